"""A run as one matplotlib plot: curves over size where a suite sweeps it, else a row of points per case."""

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

# More curves, or rows of points, nobody tells apart; nor more spreads than so many.
MAX_CURVES, MAX_ROWS, MAX_BANDS = 20, 60, 4
_FIELDS = {"time": "estimate_s", "algbw": "algbw_Bps", "busbw": "busbw_Bps"}
# The launches of a case and impl.
_Launches = Sequence[Result]


def plot(results: Sequence[Result], suite: str | None, y: str, ax: Axes | None) -> Axes:
    """Draws the good results of one suite, as `dtbench.api.Results.plot` says."""
    import matplotlib.pyplot as plt

    if y not in _FIELDS:
        raise UsageError(f"y={y!r}: expected one of {', '.join(_FIELDS)}")
    good = [r for r in results if r.status == "ok" and r.estimate_s and suite in (None, r.suite)]
    suites = list(dict.fromkeys(r.suite for r in good))
    if len(suites) != 1:
        raise UsageError(
            f"suite={suite!r}: expected one suite that has times; "
            f"the suites are {', '.join(dict.fromkeys(r.suite for r in results)) or 'none'}"
        )
    cases = [of for of in group_by(good, lambda r: r.case_key).values() if getattr(of[0], _FIELDS[y])]
    if not cases:
        raise UsageError(f"y={y!r}: no result of {suites[0]} has one; expected time")
    varying, _ = split_params([of[0].params for of in cases])
    swept = "size" in varying
    names = [" ".join([of[0].name, *_words(of[0], varying)]) for of in cases]
    rows = group_by(zip(names, cases, strict=True), lambda pair: pair[0])
    height = 4.5 if swept else 1.5 + 0.22 * min(len(rows), MAX_ROWS)
    axes = ax or plt.subplots(figsize=(8, height), layout="constrained")[1]
    axes.set_title(suites[0])
    if swept:
        _curves(axes, [of for of in cases if "size" in of[0].params], varying, y)
    else:
        _points(axes, {name: [of for _, of in pairs] for name, pairs in rows.items()}, y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return axes


def _words(result: Result, varying: Sequence[str]) -> list[str]:
    there = [name for name in varying if name != "size" and name in result.params]
    return [param_text(name, result.params[name]) for name in there]


def _value(of: _Launches, y: str) -> float:
    return quantile([value for r in of if (value := getattr(r, _FIELDS[y]))], 0.5)


def _above(of: _Launches, y: str) -> float:
    """How far the upper quartile of times lies above."""
    high = quantile([r.time_s.p75 for r in of if r.time_s], 0.75) if y == "time" else 0.0
    return max(high - _value(of, y), 0.0)


def _scale(axes: Axes, cases: Sequence[_Launches], y: str, on: str) -> float:
    """Names the axis; by what to divide."""
    from matplotlib.ticker import LogFormatter

    values = [_value(of, y) for of in cases]
    unit = time_unit(values) if y == "time" else bandwidth_unit(values)
    getattr(axes, f"set_{on}label")(f"{y} [{unit.name}]")
    getattr(axes, f"set_{on}scale")("log")
    axis = axes.yaxis if on == "y" else axes.xaxis
    axis.set_major_formatter(LogFormatter())  # 2000, not 2 x 10^3
    axis.set_minor_formatter(LogFormatter())
    return unit.scale


def _curves(axes: Axes, cases: Sequence[_Launches], varying: Sequence[str], y: str) -> None:
    curves = group_by(cases, lambda of: " ".join([of[0].name, *_words(of[0], varying), of[0].impl]))
    scale = _scale(axes, cases, y, "y")
    for number, (name, points) in enumerate(list(curves.items())[:MAX_CURVES]):
        points = sorted(points, key=lambda of: float(of[0].params["size"]))
        sizes = [float(of[0].params["size"]) for of in points]
        values = [_value(of, y) / scale for of in points]
        color, linestyle = f"C{number % 10}", ("-", "--")[number // 10 % 2]
        axes.plot(sizes, values, marker="o", label=name, color=color, linestyle=linestyle)
        if len(curves) <= MAX_BANDS:
            high = [value + _above(of, y) / scale for of, value in zip(points, values, strict=True)]
            axes.fill_between(sizes, values, high, color=color, alpha=0.15, linewidth=0)
    ticks = sorted({int(of[0].params["size"]) for of in cases})
    ticks = ticks[:: -(-len(ticks) // 8)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [format_size(tick) for tick in ticks])
    axes.set_xlabel("size")
    if len(curves) > MAX_CURVES:
        axes.set_title(f"{axes.get_title()}: {MAX_CURVES} of {len(curves)} curves")


def _points(axes: Axes, rows: Mapping[str, Sequence[_Launches]], y: str) -> None:
    """A row per case, a point per impl, with its spread."""
    shown = list(rows.items())[:MAX_ROWS][::-1]
    scale = _scale(axes, [of for _, impls in shown for of in impls], y, "x")
    places = [(place, of) for place, (_, impls) in enumerate(shown) for of in impls]
    for impl, members in group_by(places, lambda pair: pair[1][0].impl).items():
        values = [_value(of, y) / scale for _, of in members]
        high = [_above(of, y) / scale for _, of in members]
        spread = [[0.0] * len(values), high]
        axes.errorbar(values, [p for p, _ in members], xerr=spread, fmt="o", label=impl, capsize=2)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown], fontsize="small")
    if len(rows) > MAX_ROWS:
        axes.set_title(f"{axes.get_title()}: {MAX_ROWS} of {len(rows)} cases")
