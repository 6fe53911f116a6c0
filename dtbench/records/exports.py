"""Exports times in the formats of github-action-benchmark, Bencher, PyTorch's HUD and its pr_time_benchmarks.

Names come from run files, which may be untrusted, so unprintable characters are escaped.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dtbench.errors import UsageError, plain, print_error
from dtbench.grouping import group_by
from dtbench.records.atomic import write_atomically
from dtbench.records.comparison import ComparedCase
from dtbench.records.result import CaseKey, Run
from dtbench.text.units import interval_or_none

# https://bencher.dev/docs/reference/bencher-metric-format: longer names are refused.
MAX_NAME_CHARS = 1024
# The cases of pytorch/pytorch, benchmarks/dynamo/pr_time_benchmarks/benchmarks/dtensor.py, under its names.
PR_TIME_CASES = tuple(
    f"dtensor_dispatch_{name}"
    for name in (
        "detach",
        "to_from_local",
        "collectives",
        "add_backward",
        "inplace",
        "view",
        "random",
        "custom_handler",
    )
)
# Implementation -> suffix of its rows. Only torch has pytorch's own names, since those are compared with its history.
_PR_TIME_SUFFIXES = {"torch": "", "core": "_core"}


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
        base_s: base's time in a comparison, seconds per call; else None.
        launch_s: estimate of each launch, seconds per call; () in a comparison.
        busbw_Bps: bus bandwidth of each launch, bytes per second; () if there is none.
        instructions: instructions per call, the fewest of any launch; None if they were not counted.
    """

    key: CaseKey
    time_s: float
    low_s: float | None = None
    high_s: float | None = None
    verdict: str = ""
    remark: str = ""
    base_s: float | None = None
    launch_s: tuple[float, ...] = ()
    busbw_Bps: tuple[float, ...] = ()  # noqa: N815 - bytes per second
    instructions: int | None = None

    @property
    def range_us(self) -> str:
        """The time's interval in microseconds, e.g. "1 to 3"; "" without an interval."""
        return " to ".join(f"{bound * 1e6:.4g}" for bound in (self.low_s, self.high_s) if bound is not None)

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
        base_s=base_s,
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
        low_s, high_s = interval_or_none(min(bounds), max(bounds)) or (None, None)
        points.append(
            Point(
                key,
                median(times),
                low_s,
                high_s,
                launch_s=tuple(times),
                busbw_Bps=tuple(result.busbw_Bps for result in results if result.busbw_Bps),
                instructions=min(
                    (
                        int(count)
                        for result in results
                        if (count := result.counters.get("instructions", 0)) > 0 and float(count).is_integer()
                    ),
                    default=None,
                ),
            )
        )
    return points


def github(points: Sequence[Point]) -> str:
    """Formats the points as `customSmallerIsBetter` of github-action-benchmark, in microseconds."""
    rows = []
    for point in points:
        texts = {
            "range": point.range_us,
            "extra": ": ".join(plain(text) for text in (point.verdict, point.remark) if text),
        }
        shown = {name: text for name, text in texts.items() if text}
        rows.append({"name": point.label, "unit": "us", "value": point.time_s * 1e6, **shown})
    return json.dumps(rows, indent=2, allow_nan=False) + "\n"


def bmf(points: Sequence[Point]) -> str:
    """Formats the points in Bencher Metric Format, as the measure `latency` in nanoseconds."""
    metrics = {
        point.label: {
            "latency": {
                name: time_s * 1e9
                for name, time_s in (
                    ("value", point.time_s),
                    ("lower_value", point.low_s),
                    ("upper_value", point.high_s),
                )
                if time_s is not None
            }
        }
        for point in points
    }
    return json.dumps(metrics, indent=2, allow_nan=False) + "\n"


def hud(points: Sequence[Point]) -> str:
    """Formats the points as records of PyTorch's benchmark database, version 3, one JSON object per line.

    The HUD averages `benchmark_values`. It groups by mode and not by `extra_info`, and calls a larger value better
    unless the metric is called "latency". A comparison is therefore two records of "latency" in neighbouring lines: the
    first has mode "base", the second mode "head". A third record has both values, base first, for readers of the
    database. Its metric is called "base and head", because the HUD shows their average, which is the time of neither.
    Source: pytorch/test-infra, torchci/lib/benchmark/api_helper/backend/dataFetchers/queryBuilderUtils/
    benchmarkDataQueryBuilder.ts; types: clickhouse_db_schema/benchmark.oss_ci_benchmark_v3/schema.sql.
    """
    lines = []
    for point in points:
        suite, _, impl, params = point.key
        texts = {name: plain(str(value)) for name, value in params}
        mode = texts.get("mode", texts.get("pass", ""))
        base_us = [] if point.base_s is None else [point.base_s * 1e6]
        times_us = [time_s * 1e6 for time_s in point.launch_s or (point.time_s,)]
        metrics = [
            ("base", "latency", "us", base_us),
            ("head" if base_us else mode, "latency", "us", times_us),
            (mode, "base and head", "us", base_us and [*base_us, *times_us]),
            (mode, "busbw", "GB/s", [rate * 1e-9 for rate in point.busbw_Bps]),
        ]
        lines += [
            {
                "benchmark": {
                    "name": f"dtbench {plain(suite)}",
                    "mode": metric_mode,
                    "dtype": texts.get("dtype", ""),
                    "extra_info": {
                        name: plain(text)
                        for name, text in (
                            ("impl", impl),
                            ("verdict", point.verdict),
                            ("reason", point.remark),
                            ("interval_us", point.range_us),
                        )
                        if text
                    },
                },
                "model": {
                    "name": point.label,
                    "type": "micro-benchmark",
                    "backend": plain(impl),
                    "origins": ["dtbench"],
                },
                # The HUD shows no target if it is 0.
                "metric": {"name": metric, "unit": unit, "benchmark_values": values, "target_value": 0},
            }
            for metric_mode, metric, unit, values in metrics
            if values
        ]
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def pr_time(points: Sequence[Point]) -> str:
    """Formats the points as `name,metric,value` without a header, the results of pytorch's pr_time_benchmarks.

    Its check_results.py reads each value as an integer and refuses a name and metric that occur twice. A case without
    an instruction counter has no row `instruction_count`; a line on stderr names it.

    Raises:
        UsageError: no point is a case of pr_time_benchmarks, or a case has several results.
    """
    named = group_by(
        (
            p
            for p in points
            if p.key[0] == "dispatch" and p.key[1] in PR_TIME_CASES and p.key[2] in _PR_TIME_SUFFIXES
        ),
        lambda point: point.key[1] + _PR_TIME_SUFFIXES[point.key[2]],
    )
    if not named:
        raise UsageError(
            "pr-time: the run has no result of the cases dtensor_dispatch_*; "
            "measure them with `dtbench run dispatch/dtensor_dispatch -o run.jsonl`"
        )
    if repeated := [name for name, case_points in named.items() if len(case_points) > 1]:
        raise UsageError(
            f"pr-time: several results of {', '.join(repeated)}, expected one each; choose one by --filter NAME=VALUE"
        )
    metrics = {
        name: {"instruction_count": point.instructions, "time_ns": round(point.time_s * 1e9)}
        for name, (point,) in named.items()
    }
    if uncounted := [name for name, values in metrics.items() if values["instruction_count"] is None]:
        print_error(f"pr-time: no instruction_count of {', '.join(uncounted)}: the run has not counted them")
    rows = ((name, *value) for name, values in metrics.items() for value in values.items())
    return "".join(f"{name},{metric},{value}\n" for name, metric, value in rows if value is not None)


# Name -> its formatter, and a text that identifies existing files of the format. Other files are not replaced.
FORMATS: Mapping[str, tuple[Callable[[Sequence[Point]], str], str]] = {
    "github": (github, '"unit": "us"'),
    "bmf": (bmf, '"latency": {'),
    "hud": (hud, '{"benchmark": {"name": "dtbench '),
    "pr-time": (pr_time, ",time_ns,"),
}


def write_exports(points: Sequence[Point], files: Iterable[tuple[str, Path]]) -> None:
    """Writes the points to each file.

    Args:
        files: (format, path) pairs.

    Raises:
        UsageError: a format does not fit the points; then no file is written.
        OutputError: a file cannot be written, or exists in another format.
    """
    texts = [(name, path, FORMATS[name][0](points)) for name, path in files]
    for name, path, text in texts:

        def is_ours(head: str, mark: str = FORMATS[name][1]) -> bool:
            return mark in head or head.strip() in ("[]", "{}")

        write_atomically(path, text, is_ours, f"file of {name}")
