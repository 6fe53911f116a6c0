"""The report: one HTML page of runs and what was found out about them, with figures, tables and data inside.

Read `page` first: it is the table of contents. `sources` says what a report is made of, `parts` holds a file for
each part, `section` what these have in common; `figures` draws.
"""

from dtbench.reporting.html import quiet_matplotlib  # noqa: F401 - first, before any module that draws
from dtbench.reporting.html.page import render, write_report
from dtbench.reporting.html.sources import Sources, gather

__all__ = ["Sources", "gather", "render", "write_report"]
