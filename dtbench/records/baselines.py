"""Runs to compare with, kept under a name: copies of run files in `.dtbench/baselines` of the current folder.

`dtbench run --save-baseline NAME` makes one, `dtbench compare NAME RUN` takes it; commit the folder to share it.
"""

from __future__ import annotations

import re
from pathlib import Path

from dtbench.errors import OutputError, UsageError
from dtbench.records.atomic import replace_file

FOLDER = Path(".dtbench", "baselines")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def baseline_path(name: str) -> Path:
    """Where the baseline of this name lies, or would.

    Raises:
        UsageError: a name that is no name for a file.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} names no baseline: expected letters, digits, '.', '_' and '-', such as main"
        )
    return FOLDER / f"{name}.jsonl"


def find_run_file(text: str | Path) -> Path:
    """A run file by its path, or the baseline of that name.

    Raises:
        UsageError: neither is there.
    """
    path = Path(text)
    if path.is_file():
        return path
    if _NAME.fullmatch(str(text)) and baseline_path(str(text)).is_file():
        return baseline_path(str(text))
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
    path = baseline_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, run.read_bytes())
    except OSError as error:
        raise OutputError(f"cannot keep the baseline {path}: {error.strerror or error}") from error
    return path
