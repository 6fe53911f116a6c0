"""The report: one HTML page of runs and what was found out about them, with figures, tables and data inside.

Read `page` first: it is the table of contents. `sources` says what a report is made of, `parts` holds a file for
each part, `section` what these have in common; `figures` draws.
"""

import contextlib
import logging
import os

# A report takes nothing from a user's configuration of matplotlib, which writes of its folder and of fonts while it
# loads, and ends with an error where MPLBACKEND names none of its backends.
_logger, _backend = logging.getLogger("matplotlib"), os.environ.pop("MPLBACKEND", None)
_level = _logger.level
_logger.setLevel(logging.ERROR)
try:
    import matplotlib.font_manager
finally:
    _logger.setLevel(_level)
    if _backend is not None:  # for who draws beside reports
        os.environ["MPLBACKEND"] = _backend
        with contextlib.suppress(ValueError, NameError):
            matplotlib.rcParams["backend"] = _backend

from dtbench.reporting.html.page import render, write_report  # noqa: E402
from dtbench.reporting.html.sources import Sources, gather  # noqa: E402

__all__ = ["Sources", "gather", "render", "write_report"]
