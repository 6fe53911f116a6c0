"""A user's own job given in place of a run or suite: traces of torch.profiler, told by their first bytes, programs,
told without running them, and profiles. Of the former the error names the command that takes it."""

from __future__ import annotations

import re
import shlex
import zlib
from pathlib import Path

from dtbench.suite.errors import UnreadableRunError, UsageError

JOB_FILE = "job.json"  # of a profile: what it says of the job, a dtbench.records.job.Job
HEAD_BYTES = 64 * 2**10
# Kineto's header may be long: it lists devices and process groups first (libkineto/src/output_json.cpp).
_HEADER = rb'\{.*"(traceEvents|deviceProperties|distributedInfo)"'
_TRACE = re.compile(rb"[\xef\xbb\xbf\s]*(" + _HEADER + rb'|\[\s*\{[^\[\]]*"ph"\s*:)', re.DOTALL)
_OURS = re.compile(rb"^[ \t]*(from|import)\b.*(dtbench|suite)", re.MULTILINE)


def is_profile(path: Path) -> bool:
    """Whether it is a job's profile: the folder, or the file in it."""
    return path.name == JOB_FILE or (path / JOB_FILE).is_file()


def looks_like_trace(path: Path) -> bool:
    """Whether the file begins as a trace does, packed or not; False where it cannot be read."""
    try:
        if not path.is_file():  # a pipe would be waited on for ever
            return False
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(b"\x1f\x8b"):  # unpacks no more than this, whatever the file holds
            head = zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
        return _TRACE.match(head) is not None
    except (OSError, ValueError, zlib.error):
        return False


def refuse_job(path: Path, expected: str, *, programs: bool = False) -> None:
    """Raises UnreadableRunError for a trace, and for a program in Python where `programs`."""
    if looks_like_trace(path):
        what, remedy = "trace of torch.profiler", f"read it with `dtbench profile {shlex.quote(str(path))}`"
        raise UnreadableRunError(f"{path} is a {what}, expected {expected}; {remedy}")
    if programs and path.suffix == ".py" and path.is_file():
        raise UnreadableRunError(f"{path} is a program, expected {expected}; {how_to_profile(path)}")


def refuse_program(path: Path) -> None:
    """Raises UsageError for a file in Python that imports nothing of dtbench and so has no suite; it is not run."""
    if not _OURS.search(path.read_bytes()):
        why = "as it imports nothing of dtbench, and was not run"
        raise UsageError(f"{path} registers no suite, {why}; {how_to_profile(path)}")


def how_to_profile(path: Path) -> str:
    name = shlex.quote(str(path))
    return (
        f"to profile a job: `dtbench profile -- python {name}`, or `dtbench profile -- torchrun ... {name}`"
    )
