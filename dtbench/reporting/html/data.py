"""The raw data inside the page: CSV behind a link, without single samples."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from dtbench.records.frame import results_frame
from dtbench.suite import Run
from dtbench.text import csv

# RFC 3986, 2.2: reserved characters that stand for themselves in the path of an address.
_PLAIN_IN_ADDRESS = "/:@!$*+,;=()"


def csv_link(runs: Sequence[Run]) -> str:
    """A head, then a line per result with six digits of every figure, as an address that holds all of it: it works
    without script and without a request."""
    frame = results_frame(runs).drop(columns="case").dropna(axis="columns", how="all")
    held = quote(csv.of_frame(frame, "%.6g"), safe=_PLAIN_IN_ADDRESS)
    return f"data:text/csv;charset=utf-8,{held}"
