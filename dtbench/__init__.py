"""Measures what distributed tensors cost in PyTorch.

Suggested reading order: `suite` (the definition of benchmarks), `engine` (starts ranks and times cases), `records` (the
file formats), then `cost`, `comparison`, `gate` and `reporting`. No package is called `run`, `compare` or `report`,
since it would hide the function of that name, e.g. `dtbench.run`.
"""

from __future__ import annotations

import importlib

from dtbench._version import __version__

TYPE_CHECKING = (
    False  # not imported from `typing`: a user's typing.py may shadow it, which `cli` should report
)
if TYPE_CHECKING:
    from dtbench.api import calibrate, compare, load, report, run
    from dtbench.stats.frame import cases_frame, results_frame

# Public name -> its module, which is imported at first use to keep `import dtbench` fast.
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
