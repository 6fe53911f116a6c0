"""Files that are a user's own job: traces of torch.profiler, told by their first bytes, and programs in Python, told
without running them. Whoever is given one in place of something else names the command that takes it."""

from __future__ import annotations

import ast
import re
import shlex
import zlib
from contextlib import suppress
from pathlib import Path

from dtbench.suite.errors import UnreadableRunError, UsageError

HEAD_BYTES = 64 * 2**10
# What kineto writes before "traceEvents", which may come late where thousands of ranks are listed
# (libkineto/src/output_json.cpp).
_KINETO = (b'"deviceProperties"', b'"distributedInfo"')
_EVENTS = re.compile(rb'\[\s*\{[^\[\]]*"ph"\s*:\s*"')
_GZIP = b"\x1f\x8b"
PROFILE = "dtbench profile"


def looks_like_trace(path: Path) -> bool:
    """Whether the file begins as a trace of torch.profiler does, packed or not; False where it cannot be read."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(_GZIP):  # unpacks at most so much of what a few bytes may unpack to
            head = zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
    except (OSError, ValueError, zlib.error):
        return False
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"{"):
        return b'"traceEvents"' in head or (b'"schemaVersion"' in head and any(k in head for k in _KINETO))
    return _EVENTS.match(head) is not None


def refuse_trace(path: Path, expected: str) -> None:
    """Raises UnreadableRunError, which names `dtbench profile`, where the file is a trace."""
    if looks_like_trace(path):
        raise UnreadableRunError(
            f"{path} is a trace of torch.profiler, expected {expected}; read it with `{PROFILE} {shlex.quote(str(path))}`"
        )


def refuse_job(path: Path, expected: str) -> None:
    """As `refuse_trace`, and for a program in Python."""
    refuse_trace(path, expected)
    if path.suffix == ".py":
        with suppress(OSError, ValueError):
            if path.is_file():
                raise UnreadableRunError(f"{path} is a program, expected {expected}; {how_to_profile(path)}")


def refuse_program(path: Path) -> None:
    """Raises UsageError where a file in Python cannot register a suite, as it imports nothing of dtbench; it is not
    run for that."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return  # to load it says what is wrong
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or "" for node in imports]
    names += [alias.name for node in imports for alias in node.names]
    if not any("dtbench" in name or "suite" in name for name in names):
        raise UsageError(
            f"{path} registers no suite, as it imports nothing of dtbench, and was not run: expected functions with "
            f"@dtbench.suite.suite; {how_to_profile(path)}"
        )


def how_to_profile(path: Path) -> str:
    name = shlex.quote(str(path))
    return f"to profile a training job: `{PROFILE} -- python {name}`, or `{PROFILE} -- torchrun ... {name}`"
