"""The raw data inside the page: JSON in an element, CSV behind a link, neither with single samples."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from markupsafe import Markup

from dtbench.files.frame import harmless, results_frame
from dtbench.model import Result, Run
from dtbench.show.report.sources import Sources
from dtbench.show.report.svg import printable

# RFC 3986, 2.2: reserved characters that stand for themselves in the path of an address.
_PLAIN_IN_ADDRESS = "/:@!$*+,;=()"


def as_json(sources: Sources) -> Markup | None:
    """Headers, results and the topology, as JSON that cannot end its element; None where there are none.

    Results are a table, as every name in every result would be half of the page. Six digits of every figure.
    """
    if not sources.runs and sources.topology is None:
        return None
    data = {
        "runs": [_run(run) for run in sources.runs],
        "baseline": [_run(run) for run in sources.baseline],
        "topology": _six_digits(sources.topology) if sources.topology is not None else None,
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _six_digits(data: Any) -> Any:
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, Mapping):
        return {key: _six_digits(value) for key, value in data.items()}
    return [_six_digits(value) for value in data] if isinstance(data, list | tuple) else data


def _run(run: Run) -> dict[str, Any]:
    lines = [_six_digits(_line(r)) for r in run.results]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    rows = [[line.get(name) for name in columns] for line in lines]
    return {
        "header": msgspec.to_builtins(run.header),
        "complete": run.complete,
        "results": {"columns": columns, "rows": rows},
    }


def _line(result: Result) -> dict[str, Any]:
    """What there is of a result; times under names like time_s.median."""
    line = dataclasses.asdict(result.without_samples())
    times = line.pop("time_s") or {}
    line |= {f"time_s.{name}": value for name, value in times.items()}
    return {k: v for k, v in line.items() if v not in (None, "", (), {})}


def as_csv(runs: Sequence[Run]) -> str:
    """A head, then a line per result; text is harmless in a spreadsheet. Six digits of every figure."""
    frame = harmless(results_frame(runs).drop(columns="case"), printable)
    text: str = frame.dropna(axis="columns", how="all").to_csv(
        index=False, lineterminator="\n", float_format="%.6g"
    )
    return text


def csv_link(runs: Sequence[Run]) -> str:
    """The CSV as an address that holds it: it works without script and without a request."""
    return "data:text/csv;charset=utf-8," + quote(as_csv(runs), safe=_PLAIN_IN_ADDRESS)
