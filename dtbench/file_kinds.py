"""Files given in place of a run or suite: traces of torch.profiler and files of dtbench, recognised by their first
bytes, programs, recognised without running them, and profiles. The error names the command that takes the file."""

from __future__ import annotations

import re
import shlex
import zlib
from pathlib import Path

from dtbench.errors import UnreadableRunError, UsageError

JOB_FILE = "job.json"  # of a profile: what it says of the job, a dtbench.records.job.Job
HEAD_BYTES = 64 * 2**10
# Kineto's header may be long: it lists devices and process groups first (libkineto/src/output_json.cpp).
_HEADER = rb'\{.*"(traceEvents|deviceProperties|distributedInfo)"'
_TRACE = re.compile(rb"[\xef\xbb\xbf\s]*(" + _HEADER + rb'|\[\s*\{[^\[\]]*"ph"\s*:)', re.DOTALL)
_KIND = re.compile(rb'\s*\{\s*"kind"\s*:\s*"([a-z]+)"')
# Kind of a file -> what it is called, and the command that reads it.
_READERS = {
    "trace": ("trace of torch.profiler", "profile {}"),
    "run": ("run of dtbench", "show {}"),
    "topology": ("topology", "export {} --to torch -o constants.py"),
    "gate": ("result of gate", "report {} -o page.html"),
    "history": ("history of gates", "report {} -o page.html"),
}
_OURS = re.compile(rb"^[ \t]*(from|import)\b.*(dtbench|suite)", re.MULTILINE)


def is_profile(path: Path) -> bool:
    """Whether it is a job's profile: the folder, or the file in it."""
    return path.name == JOB_FILE or (path / JOB_FILE).is_file()


def looks_like_trace(path: Path) -> bool:
    """Whether the file begins as a trace does, packed or not; False where it cannot be read."""
    return _TRACE.match(_head_of(path)) is not None


def _head_of(path: Path) -> bytes:
    """The first bytes of a file, unpacked; none of a file that cannot be read."""
    try:
        if not path.is_file():  # a pipe would be waited on for ever
            return b""
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(b"\x1f\x8b"):  # unpacks no more than this, whatever the file holds
            head = zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
        return head
    except (OSError, ValueError, zlib.error):
        return b""


def refuse_other_kind(path: Path, expected: str, *, programs: bool = False) -> None:
    """Raises UnreadableRunError for a trace or a file of dtbench, of a kind that `expected` does not name, and for a
    program in Python where `programs`."""
    head = _head_of(path)
    kind = "trace" if _TRACE.match(head) else match[1].decode() if (match := _KIND.match(head)) else ""
    if kind in _READERS and kind not in expected:
        words, command = _READERS[kind]
        raise UnreadableRunError(
            f"{path} is a {words}, expected {expected}; "
            f"read it with `dtbench {command.format(shlex.quote(str(path)))}`"
        )
    if programs and path.suffix == ".py" and path.is_file():
        raise UnreadableRunError(f"{path} is a program, expected {expected}; {profile_hint(path)}")


def refuse_non_suite(path: Path) -> None:
    """Raises UsageError for a file in Python that imports nothing of dtbench and so has no suite; it is not run."""
    if not _OURS.search(path.read_bytes()):
        raise UsageError(
            f"{path} registers no suite, as it imports nothing of dtbench, and was not run; {profile_hint(path)}"
        )


def profile_hint(path: Path) -> str:
    name = shlex.quote(str(path))
    return (
        f"to profile a job: `dtbench profile -- python {name}`, or `dtbench profile -- torchrun ... {name}`"
    )
