"""dtbench measures what distributed tensors cost and turns the measurements into decisions.

Reading order: `suite` (what a benchmark is), `engine` (how a case is timed, and who runs it), `records` (what is
written), then `cost`, `comparison`, `gate` and `reporting`. The rooms are not called `run`, `compare` and `report`, as
a package of that name would take the place of the function `dtbench.run`.
"""

from __future__ import annotations

import importlib

from dtbench._version import __version__

TYPE_CHECKING = False  # `typing` may be hidden by a file of the user, which `cli` names
if TYPE_CHECKING:
    from dtbench.api import calibrate, compare, load, report, run
    from dtbench.stats.frame import cases_frame, results_frame

# Public name -> where it stands. Loaded when asked for, so that `import dtbench` is there at once.
_PUBLIC = {
    **dict.fromkeys(("calibrate", "compare", "load", "report", "run"), "dtbench.api"),
    **dict.fromkeys(("cases_frame", "results_frame"), "dtbench.stats.frame"),
}

__all__ = ["__version__", "calibrate", "cases_frame", "compare", "load", "report", "results_frame", "run"]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'dtbench' has no attribute {name!r}: expected one of {', '.join(_PUBLIC)}"
        )
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
