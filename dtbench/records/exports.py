"""Times in formats of other tools: github-action-benchmark and Bencher. Names are foreign and escaped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dtbench.errors import plain
from dtbench.grouping import group_by
from dtbench.records.atomic import write_atomically
from dtbench.records.comparison import ComparedCase
from dtbench.records.result import CaseKey, Run
from dtbench.text.units import interval_or_none

# https://bencher.dev/docs/reference/bencher-metric-format: longer names are refused.
MAX_NAME_CHARS = 1024


@dataclass(frozen=True)
class Point:
    """The time of one impl of a case, seconds per call, and where there is one its interval and the verdict on it."""

    key: CaseKey
    time_s: float
    low_s: float | None = None
    high_s: float | None = None
    verdict: str = ""
    remark: str = ""

    @property
    def label(self) -> str:
        """`collectives all_reduce mesh_dim=tp size=1024 [c10d]`, short enough for every format, one per key."""
        suite, name, impl, params = self.key
        words = (suite, name, *(f"{key}={value}" for key, value in params), f"[{impl}]")
        label = plain(" ".join(filter(None, words)))
        if len(label) <= MAX_NAME_CHARS:
            return label
        return f"{label[: MAX_NAME_CHARS - 13]}~{hashlib.sha256(label.encode()).hexdigest()[:12]}"


def compared_point(judged: ComparedCase, verdict: str, remark: str) -> Point | None:
    """Head's time, between the bounds of the ratio times base's; None where a side has no time."""
    base_s, head_s, low, high = judged.base_s, judged.head_s, judged.low, judged.high
    if base_s is None or head_s is None:
        return None
    return Point(
        judged.key,
        head_s,
        low_s=None if low is None else min(base_s * low, head_s),
        high_s=None if high is None else max(base_s * high, head_s),
        verdict=verdict,
        remark=remark,
    )


def run_points(runs: Iterable[Run]) -> list[Point]:
    """Of each case and impl the median of its launches' estimates, between the least and the largest of them; of a
    single launch, between the quartiles of its samples."""
    timed = (r for run in runs for r in run.results if r.status == "ok" and r.time_s is not None)
    points = []
    for key, results in group_by(timed, lambda result: result.case_key).items():
        times = [result.estimate_s for result in results if result.estimate_s is not None]
        bounds = times if len(times) > 1 else [*times, *((t.p25, t.p75) if (t := results[0].time_s) else ())]
        ends = interval_or_none(min(bounds), max(bounds)) or (None, None)
        points.append(Point(key, median(times), *ends))
    return points


def github(points: Sequence[Point]) -> str:
    """`customSmallerIsBetter` of github-action-benchmark, microseconds."""
    rows = []
    for point in points:
        row: dict[str, str | float] = {"name": point.label, "unit": "us", "value": point.time_s * 1e6}
        if point.low_s is not None and point.high_s is not None:
            row["range"] = f"{point.low_s * 1e6:.4g} to {point.high_s * 1e6:.4g}"
        extra = ": ".join(plain(text) for text in (point.verdict, point.remark) if text)
        rows.append(row | ({"extra": extra} if extra else {}))
    return json.dumps(rows, indent=2, allow_nan=False) + "\n"


def bmf(points: Sequence[Point]) -> str:
    """Bencher Metric Format: the measure `latency`, nanoseconds."""
    metrics = {}
    for point in points:
        figures = {"value": point.time_s, "lower_value": point.low_s, "upper_value": point.high_s}
        metrics[point.label] = {"latency": {name: s * 1e9 for name, s in figures.items() if s is not None}}
    return json.dumps(metrics, indent=2, allow_nan=False) + "\n"


# Name -> the format, and what tells a file of it from others, which are not replaced.
FORMATS: Mapping[str, tuple[Callable[[Sequence[Point]], str], str]] = {
    "github": (github, '"unit": "us"'),
    "bmf": (bmf, '"latency": {'),
}


def write_exports(points: Sequence[Point], wanted: Iterable[tuple[str, Path]]) -> None:
    """Writes each (format, file).

    Raises:
        OutputError: a file cannot be written, or holds something else.
    """
    for name, path in wanted:
        render, mark = FORMATS[name]

        def is_ours(head: str, mark: str = mark) -> bool:
            return mark in head or head.strip() in ("[]", "{}")

        write_atomically(path, render(points), is_ours, f"file of {name}")
