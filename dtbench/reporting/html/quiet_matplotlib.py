"""Loads matplotlib without its own lines on standard error: a report takes nothing from a user's configuration of it.

While it loads it says so where its folder cannot be made and that it looks for fonts, and ends with an error where
MPLBACKEND names none of its backends; what a report draws needs neither.
"""

from __future__ import annotations

import contextlib
import logging
import os


def _load() -> None:
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
        import matplotlib.font_manager
    finally:
        logger.setLevel(level)
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend:  # for who draws beside reports, as matplotlib would have taken it
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = backend


_load()
