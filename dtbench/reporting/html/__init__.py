"""The report: one self-contained HTML page with figures, tables and data of runs, profiles and comparisons.

`page` assembles the page; begin there. `sources` reads the input, `parts` has a file per part of the page, `section`
has what the parts share, and `figures` draws.
"""

import contextlib
import logging
import os

# A report must not depend on a user's configuration of matplotlib. While it is imported, matplotlib logs about its
# folder and fonts, and it raises an error if MPLBACKEND is not one of its backends.
_logger, _backend = logging.getLogger("matplotlib"), os.environ.pop("MPLBACKEND", None)
_level = _logger.level
_logger.setLevel(logging.ERROR)
try:
    import matplotlib.font_manager
finally:
    _logger.setLevel(_level)
    if _backend is not None:  # restored for users who also draw their own figures
        os.environ["MPLBACKEND"] = _backend
        with contextlib.suppress(ValueError, NameError):
            matplotlib.rcParams["backend"] = _backend

from dtbench.reporting.html.page import render, write_report  # noqa: E402
from dtbench.reporting.html.sources import Sources, gather  # noqa: E402

__all__ = ["Sources", "gather", "render", "write_report"]
