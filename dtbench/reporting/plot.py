"""A matplotlib plot of one suite: curves over size if the suite sweeps sizes, else one row of points per case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dtbench.errors import UsageError
from dtbench.grouping import group_by
from dtbench.records.result import Result
from dtbench.stats import quantile
from dtbench.text.terminal import param_text, split_params
from dtbench.text.units import bandwidth_unit, format_size, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More curves, rows of points or bands for the spread would not be readable.
MAX_CURVES, MAX_ROWS, MAX_BANDS = 20, 60, 4
_FIELDS = {"time": "estimate_s", "algbw": "algbw_Bps", "busbw": "busbw_Bps"}
# All launches of one implementation of a case.
_Case = Sequence[Result]


def plot(results: Sequence[Result], suite: str | None, y: str, ax: Axes | None) -> Axes:
    """Draws the ok results of one suite, see `dtbench.api.Results.plot`."""
    import matplotlib.pyplot as plt

    if y not in _FIELDS:
        raise UsageError(f"y={y!r}: expected one of {', '.join(_FIELDS)}")
    timed = [r for r in results if r.status == "ok" and r.estimate_s and suite in (None, r.suite)]
    suites = list(dict.fromkeys(r.suite for r in timed))
    if len(suites) != 1:
        raise UsageError(
            f"suite={suite!r}: expected one suite that has times; "
            f"the suites are {', '.join(dict.fromkeys(r.suite for r in results)) or 'none'}"
        )
    cases = [case for case in group_by(timed, lambda r: r.case_key).values() if getattr(case[0], _FIELDS[y])]
    if not cases:
        raise UsageError(f"y={y!r}: no result of {suites[0]} has one; expected time")
    varying, _ = split_params([case[0].params for case in cases])
    swept = "size" in varying
    rows = group_by(cases, lambda case: " ".join([case[0].name, *_param_texts(case[0], varying)]))
    height = 4.5 if swept else 1.5 + 0.22 * min(len(rows), MAX_ROWS)
    axes = ax or plt.subplots(figsize=(8, height), layout="constrained")[1]
    axes.set_title(suites[0])
    if swept:
        _curves(axes, [case for case in cases if "size" in case[0].params], varying, y)
    else:
        _points(axes, rows, y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return axes


def _param_texts(result: Result, varying: Sequence[str]) -> list[str]:
    return [
        param_text(name, result.params[name]) for name in varying if name != "size" and name in result.params
    ]


def _median(case: _Case, y: str) -> float:
    return quantile([value for r in case if (value := getattr(r, _FIELDS[y]))], 0.5)


def _spread(case: _Case, y: str) -> float:
    """Returns the distance of the times' upper quartile above the median; 0 for bandwidths."""
    high = quantile([r.time_s.p75 for r in case if r.time_s], 0.75) if y == "time" else 0.0
    return max(high - _median(case, y), 0.0)


def _scale(axes: Axes, cases: Sequence[_Case], y: str, axis_name: str) -> float:
    """Labels the axis and makes it logarithmic; returns the factor by which values have to be divided."""
    from matplotlib.ticker import LogFormatter

    values = [_median(case, y) for case in cases]
    unit = time_unit(values) if y == "time" else bandwidth_unit(values)
    getattr(axes, f"set_{axis_name}label")(f"{y} [{unit.name}]")
    getattr(axes, f"set_{axis_name}scale")("log")
    axis = axes.yaxis if axis_name == "y" else axes.xaxis
    axis.set_major_formatter(LogFormatter())  # 2000, not 2 x 10^3
    axis.set_minor_formatter(LogFormatter())
    return unit.scale


def _curves(axes: Axes, cases: Sequence[_Case], varying: Sequence[str], y: str) -> None:
    curves = group_by(
        cases, lambda case: " ".join([case[0].name, *_param_texts(case[0], varying), case[0].impl])
    )
    scale = _scale(axes, cases, y, "y")
    for number, (name, points) in enumerate(list(curves.items())[:MAX_CURVES]):
        points = sorted(points, key=lambda case: float(case[0].params["size"]))
        sizes = [float(case[0].params["size"]) for case in points]
        values = [_median(case, y) / scale for case in points]
        color, linestyle = f"C{number % 10}", ("-", "--")[number // 10 % 2]
        axes.plot(sizes, values, marker="o", label=name, color=color, linestyle=linestyle)
        if len(curves) <= MAX_BANDS:
            high = [value + _spread(case, y) / scale for case, value in zip(points, values, strict=True)]
            axes.fill_between(sizes, values, high, color=color, alpha=0.15, linewidth=0)
    ticks = sorted({int(case[0].params["size"]) for case in cases})
    ticks = ticks[:: -(-len(ticks) // 8)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [format_size(tick) for tick in ticks])
    axes.set_xlabel("size")
    if len(curves) > MAX_CURVES:
        axes.set_title(f"{axes.get_title()}: {MAX_CURVES} of {len(curves)} curves")


def _points(axes: Axes, rows: Mapping[str, Sequence[_Case]], y: str) -> None:
    """Draws one row per case with one point per implementation and its spread."""
    shown = list(rows.items())[:MAX_ROWS][::-1]
    scale = _scale(axes, [case for _, impls in shown for case in impls], y, "x")
    points = [(row, case) for row, (_, impls) in enumerate(shown) for case in impls]
    for impl, members in group_by(points, lambda pair: pair[1][0].impl).items():
        values = [_median(case, y) / scale for _, case in members]
        spread = [[0.0] * len(values), [_spread(case, y) / scale for _, case in members]]
        axes.errorbar(values, [p for p, _ in members], xerr=spread, fmt="o", label=impl, capsize=2)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown], fontsize="small")
    if len(rows) > MAX_ROWS:
        axes.set_title(f"{axes.get_title()}: {MAX_ROWS} of {len(rows)} cases")
