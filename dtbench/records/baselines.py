"""Runs to compare with: those kept under a name, and the last one of the same cases.

A baseline is a copy of a run file in `.dtbench/baselines` of the current folder; commit it to share it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from dtbench.records.atomic import replace_file
from dtbench.records.run import read_header, read_run
from dtbench.suite import Header, Run
from dtbench.suite.errors import DtbenchError, OutputError, UsageError

FOLDER = Path(".dtbench", "baselines")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Of the run files beside a new one: how many of the latest are looked at, and how large one may be that is read.
_LOOKED_AT, _MOST_BYTES = 100, 32 * 2**20


def named(name: str) -> Path:
    """Where the baseline of this name lies, or would.

    Raises:
        UsageError: a name that is no name for a file.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} names no baseline: expected letters, digits, '.', '_' and '-', such as main"
        )
    return FOLDER / f"{name}.jsonl"


def find(text: str | Path) -> Path:
    """A run file by its path, or the baseline of that name.

    Raises:
        UsageError: neither is there.
    """
    path = Path(text)
    if path.is_file():
        return path
    if _NAME.fullmatch(str(text)) and named(str(text)).is_file():
        return named(str(text))
    there = ", ".join(sorted(file.stem for file in FOLDER.glob("*.jsonl"))) or "none yet"
    raise UsageError(
        f"there is no baseline {str(text)!r} (there: {there}), and no such file; "
        "`dtbench run --save-baseline NAME` makes one"
    )


def save(run: Path, name: str) -> Path:
    """Keeps the run under the name, in place of what had it; where.

    Raises:
        OutputError: it cannot be written.
    """
    path = named(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, run.read_bytes())
    except OSError as error:
        raise OutputError(f"cannot keep the baseline {path}: {error.strerror or error}") from error
    return path


def last_like(header: Header, output: Path) -> Run | None:
    """The latest complete run in the folder of `output` that has a suite of the header's and was measured on the same
    host, mesh, device and backend; None where there is none."""
    found: list[tuple[str, Path]] = []
    files = []
    for path in output.parent.glob("*.jsonl"):
        with suppress(OSError):
            if path.name != output.name and path.stat().st_size <= _MOST_BYTES:
                files.append((path.stat().st_mtime, path))
    for _, path in sorted(files, reverse=True)[:_LOOKED_AT]:
        with suppress(DtbenchError, OSError):
            other = read_header(path)
            if _alike(other) == _alike(header) and {*other.suites} & {*header.suites} and not other.imported:
                found.append((other.started, path))
    for _, path in sorted(found, reverse=True):
        with suppress(DtbenchError, OSError):
            run = read_run(path, with_samples=False)
            if run.complete:
                return run
    return None


def _alike(header: Header) -> tuple[object, ...]:
    hosts = sorted({str(rank.host) for rank in header.ranks})
    return hosts, header.mesh, header.plan.get("device_type"), header.versions.get("backend")
