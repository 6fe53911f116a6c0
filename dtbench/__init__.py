"""dtbench measures what distributed tensors cost and turns the measurements into decisions.

Reading order: `model` (the data), `suite` (what a suite is), `bench` (how a case is timed), `world` (who runs it),
`files` (where results go), then `cost`, `judge` and `show`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtbench.api import calibrate, compare, load, report, run
    from dtbench.files.frame import cases_frame, results_frame

__version__ = "0.1.0"

# Public name -> where it stands. Loaded when asked for, so that `import dtbench` is there at once.
_PUBLIC = {
    **dict.fromkeys(("calibrate", "compare", "load", "report", "run"), "dtbench.api"),
    **dict.fromkeys(("cases_frame", "results_frame"), "dtbench.files.frame"),
}

__all__ = ["calibrate", "cases_frame", "compare", "load", "report", "results_frame", "run"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'dtbench' has no attribute {name!r}: expected one of {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
