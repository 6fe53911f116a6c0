"""Recognizes files that were given to the wrong command, and names the command that reads them.

Traces of torch.profiler and files of dtbench are recognized by their first bytes, and programs without running them.
"""

import re
import shlex
import zlib
from pathlib import Path

from dtbench.errors import UnreadableRunError, UsageError

JOB_FILE = "job.json"  # the file in a profile's folder that contains a dtbench.records.job.Job
HEAD_BYTES = 64 * 2**10
# Kineto's header may be long, since devices and process groups come first (libkineto/src/output_json.cpp).
_HEADER = rb'\{.*"(traceEvents|deviceProperties|distributedInfo)"'
_TRACE = re.compile(rb"[\xef\xbb\xbf\s]*(" + _HEADER + rb'|\[\s*\{[^\[\]]*"ph"\s*:)', re.DOTALL)
# A key in each line of NCCL's inspector (NCCL's plugins/profiler/inspector/inspector_json.cc).
_INSPECTOR = b'"inspector_output_format_version"'
_KIND = re.compile(rb'\s*\{\s*"kind"\s*:\s*"([a-z]+)"')
# Kind of file -> its description, and the command that reads it.
_READERS = {
    "trace": ("trace of torch.profiler", "profile {}"),
    "inspector": ("log of NCCL's inspector", "profile {}"),
    "run": ("run of dtbench", "show {}"),
    "topology": ("topology", "export {} --to torch -o constants.py"),
    "gate": ("result of gate", "report {} -o page.html"),
    "history": ("history of gates", "report {} -o page.html"),
}
_IMPORTS_DTBENCH = re.compile(rb"^[ \t]*(from|import)\b.*(dtbench|suite)", re.MULTILINE)


def is_profile(path: Path) -> bool:
    """Whether the path is the folder of a job's profile, or the job file in it."""
    return path.name == JOB_FILE or (path / JOB_FILE).is_file()


def _read_head(path: Path) -> bytes:
    """Returns the first bytes of a file, decompressed; b"" if it cannot be read."""
    try:
        if not path.is_file():  # reading a pipe could block forever
            return b""
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(b"\x1f\x8b"):  # the limit protects against decompression bombs
            head = zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
        return head
    except (OSError, ValueError, zlib.error):
        return b""


def kind_of(path: Path) -> str:
    """Returns the kind that the file begins with, e.g. "topology" or "trace"; "" if it is unknown or unreadable."""
    head = _read_head(path)
    if match := _KIND.match(head):  # first, since a run may contain names like those of a trace
        return match[1].decode()
    return "trace" if _TRACE.match(head) else "inspector" if _INSPECTOR in head else ""


def refuse_other_kind(path: Path, expected: str, *, programs: bool = False) -> None:
    """Raises UnreadableRunError if the file is of another kind than expected.

    Args:
        expected: description of the expected file; kinds that it names are accepted.
        programs: whether to refuse Python programs, too.
    """
    kind = kind_of(path)
    if kind in _READERS and kind not in expected:
        description, command = _READERS[kind]
        raise UnreadableRunError(
            f"{path} is a {description}, expected {expected}; "
            f"read it with `dtbench {command.format(shlex.quote(str(path)))}`"
        )
    if programs and path.suffix == ".py" and path.is_file():
        raise UnreadableRunError(f"{path} is a program, expected {expected}; {profile_hint(path)}")


def refuse_non_suite(path: Path) -> None:
    """Raises UsageError if a Python file imports nothing from dtbench, so that it cannot define a suite."""
    if not _IMPORTS_DTBENCH.search(path.read_bytes()):
        raise UsageError(
            f"{path} registers no suite, since it imports nothing from dtbench, and was not run; {profile_hint(path)}"
        )


def profile_hint(path: Path) -> str:
    name = shlex.quote(str(path))
    return (
        f"to profile a job: `dtbench profile -- python {name}`, or `dtbench profile -- torchrun ... {name}`"
    )
