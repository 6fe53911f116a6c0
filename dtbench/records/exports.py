"""Exports times in the formats of github-action-benchmark and Bencher.

Names come from run files, which may be untrusted, so unprintable characters are escaped.
"""

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
    """The time of one implementation of a case.

    Attributes:
        key: identifies the case and implementation.
        time_s: seconds per call.
        low_s: lower end of the time's interval; None if there is none.
        high_s: upper end of the time's interval; None if there is none.
        verdict: verdict of a comparison, else "".
        remark: explains the verdict, else "".
    """

    key: CaseKey
    time_s: float
    low_s: float | None = None
    high_s: float | None = None
    verdict: str = ""
    remark: str = ""

    @property
    def label(self) -> str:
        """Unique name of the key for all formats, e.g. `collectives all_reduce mesh_dim=tp size=1024 [c10d]`.

        A name that is too long ends with a hash instead.
        """
        suite, name, impl, params = self.key
        words = (suite, name, *(f"{key}={value}" for key, value in params), f"[{impl}]")
        label = plain(" ".join(filter(None, words)))
        if len(label) <= MAX_NAME_CHARS:
            return label
        return f"{label[: MAX_NAME_CHARS - 13]}~{hashlib.sha256(label.encode()).hexdigest()[:12]}"


def compared_point(case: ComparedCase, verdict: str, remark: str) -> Point | None:
    """Returns head's time with the interval that the ratio's bounds imply; None if base or head has no time."""
    base_s, head_s, low, high = case.base_s, case.head_s, case.low, case.high
    if base_s is None or head_s is None:
        return None
    return Point(
        case.key,
        head_s,
        low_s=None if low is None else min(base_s * low, head_s),
        high_s=None if high is None else max(base_s * high, head_s),
        verdict=verdict,
        remark=remark,
    )


def run_points(runs: Iterable[Run]) -> list[Point]:
    """Returns the median of the launches' estimates for each case and implementation.

    The interval spans the launches' estimates or, with a single launch, the quartiles of its samples.
    """
    timed = (r for run in runs for r in run.results if r.status == "ok" and r.time_s is not None)
    points = []
    for key, results in group_by(timed, lambda result: result.case_key).items():
        times = [result.estimate_s for result in results if result.estimate_s is not None]
        bounds = times if len(times) > 1 else [*times, *((t.p25, t.p75) if (t := results[0].time_s) else ())]
        points.append(
            Point(key, median(times), *(interval_or_none(min(bounds), max(bounds)) or (None, None)))
        )
    return points


def github(points: Sequence[Point]) -> str:
    """Formats the points as `customSmallerIsBetter` of github-action-benchmark, in microseconds."""
    rows = []
    for point in points:
        row: dict[str, str | float] = {"name": point.label, "unit": "us", "value": point.time_s * 1e6}
        if point.low_s is not None and point.high_s is not None:
            row["range"] = f"{point.low_s * 1e6:.4g} to {point.high_s * 1e6:.4g}"
        extra = ": ".join(plain(text) for text in (point.verdict, point.remark) if text)
        rows.append(row | ({"extra": extra} if extra else {}))
    return json.dumps(rows, indent=2, allow_nan=False) + "\n"


def bmf(points: Sequence[Point]) -> str:
    """Formats the points in Bencher Metric Format, as the measure `latency` in nanoseconds."""
    fields = {"value": "time_s", "lower_value": "low_s", "upper_value": "high_s"}
    metrics = {
        point.label: {
            "latency": {
                name: getattr(point, field) * 1e9
                for name, field in fields.items()
                if getattr(point, field) is not None
            }
        }
        for point in points
    }
    return json.dumps(metrics, indent=2, allow_nan=False) + "\n"


# Name -> its formatter, and a text that identifies existing files of the format. Other files are not replaced.
FORMATS: Mapping[str, tuple[Callable[[Sequence[Point]], str], str]] = {
    "github": (github, '"unit": "us"'),
    "bmf": (bmf, '"latency": {'),
}


def write_exports(points: Sequence[Point], files: Iterable[tuple[str, Path]]) -> None:
    """Writes the points to each file.

    Args:
        files: (format, path) pairs.

    Raises:
        OutputError: a file cannot be written, or exists in another format.
    """
    for name, path in files:
        render, mark = FORMATS[name]

        def is_ours(head: str, mark: str = mark) -> bool:
            return mark in head or head.strip() in ("[]", "{}")

        write_atomically(path, render(points), is_ours, f"file of {name}")
