"""Named baselines: copies of run files in `.dtbench/baselines` of the current folder.

`dtbench run --save-baseline NAME` saves one, and `dtbench compare NAME RUN` compares with it. To share baselines,
commit the folder.
"""

import re
from pathlib import Path

from dtbench.errors import OutputError, UsageError
from dtbench.records.atomic import replace_file

FOLDER = Path(".dtbench", "baselines")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def baseline_path(name: str) -> Path:
    """Returns the path of the named baseline, which need not exist.

    Raises:
        UsageError: the name is not allowed.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a name of a baseline: expected letters, digits, '.', '_' and '-', e.g. main"
        )
    return FOLDER / f"{name}.jsonl"


def find_run_file(text: str | Path) -> Path:
    """Returns the path of a run file, given its path or the name of a baseline. Any existing path is returned as it is.

    Raises:
        UsageError: there is no such file and no such baseline.
    """
    path = Path(text)
    if path.exists():
        return path
    if _NAME.fullmatch(str(text)) and baseline_path(str(text)).is_file():
        return baseline_path(str(text))
    names = ", ".join(sorted(file.stem for file in FOLDER.glob("*.jsonl"))) or "none yet"
    raise UsageError(
        f"there is no baseline {str(text)!r} (have: {names}), and no such file; "
        "`dtbench run --save-baseline NAME` makes one"
    )


def save(run: Path, name: str) -> Path:
    """Saves a copy of the run under the name, replacing a previous baseline. Returns the copy's path.

    Raises:
        OutputError: the copy cannot be written.
    """
    path = baseline_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, run.read_bytes())
    except OSError as error:
        raise OutputError(f"cannot save the baseline {path}: {error.strerror or error}") from error
    return path
