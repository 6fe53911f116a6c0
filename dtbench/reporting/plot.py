"""A run as one matplotlib plot: curves over size where a suite sweeps it, else a row of points per case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtbench.stats import quantile
from dtbench.suite import Result
from dtbench.suite.errors import UsageError
from dtbench.suite.grouping import group_by
from dtbench.text.terminal import param_text, split_params
from dtbench.text.units import bandwidth_unit, format_size, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More curves, or rows of points, nobody tells apart; nor more spreads than so many.
MAX_CURVES, MAX_ROWS, MAX_BANDS = 20, 60, 4
_FIGURES = ("time", "algbw", "busbw")


def plot(results: Sequence[Result], suite: str | None, y: str, ax: Axes | None) -> Axes:
    """Draws the good results of one suite.

    suite: which one, where there are several. y: time (up to the upper quartile), algbw or busbw. ax: where to draw;
    None makes a figure.

    Raises:
        UsageError: nothing to draw, or several suites and none chosen.
    """
    import matplotlib.pyplot as plt

    if y not in _FIGURES:
        raise UsageError(f"y={y!r}: expected one of {', '.join(_FIGURES)}")
    good = [r for r in results if r.status == "ok" and r.estimate_s and suite in (None, r.suite)]
    suites = list(dict.fromkeys(r.suite for r in good))
    if len(suites) != 1:
        there = ", ".join(dict.fromkeys(r.suite for r in results)) or "none"
        raise UsageError(f"suite={suite!r}: expected one suite that has times; the suites are {there}")
    if y != "time" and not any(_value(r, y) for r in good):
        raise UsageError(f"y={y!r}: no result of {suites[0]} has one; expected time")
    cases = list(group_by(good, lambda r: r.case_key).values())
    varying, _ = split_params([of[0].params for of in cases])
    swept = "size" in varying
    rows = 0 if swept else min(len({of[0].case_key[:2] + of[0].case_key[3:] for of in cases}), MAX_ROWS)
    axes = (
        plt.subplots(figsize=(8, 1.5 + 0.22 * rows if rows else 4.5), layout="constrained")[1]
        if ax is None
        else ax
    )
    if swept:
        _curves(axes, cases, [name for name in varying if name != "size"], y)
    else:
        _points(axes, cases, varying, y)
    axes.set_title(axes.get_title() or suites[0])
    return axes


def _value(result: Result, y: str) -> float | None:
    return {"time": result.estimate_s, "algbw": result.algbw_Bps, "busbw": result.busbw_Bps}[y]


def _name(result: Result, varying: Sequence[str]) -> str:
    params = (param_text(name, result.params[name]) for name in varying if name in result.params)
    return " ".join([result.name, *params])


def _over_launches(of: Sequence[Result], y: str) -> float:
    return quantile([value for r in of if (value := _value(r, y))], 0.5)


def _high_s(of: Sequence[Result]) -> float:
    return quantile([r.time_s.p75 for r in of if r.time_s], 0.75)


def _scale(axes: Axes, values: Sequence[float], y: str, on: str) -> float:
    """Names the axis; by what to divide."""
    from matplotlib.ticker import LogFormatter

    unit = time_unit(values) if y == "time" else bandwidth_unit(values)
    getattr(axes, f"set_{on}label")(f"{y} [{unit.name}]")
    getattr(axes, f"set_{on}scale")("log")
    axis = axes.yaxis if on == "y" else axes.xaxis
    axis.set_major_formatter(LogFormatter())  # 2000, not 2 x 10^3
    axis.set_minor_formatter(LogFormatter())
    return unit.scale


def _curves(axes: Axes, cases: Sequence[Sequence[Result]], varying: Sequence[str], y: str) -> None:
    cases = [of for of in cases if "size" in of[0].params and _value(of[0], y)]
    curves = group_by(cases, lambda of: f"{_name(of[0], varying)} {of[0].impl}")
    scale = _scale(axes, [_over_launches(of, y) for of in cases], y, "y")
    for number, (name, points) in enumerate(list(curves.items())[:MAX_CURVES]):
        points = sorted(points, key=lambda of: float(of[0].params["size"]))
        sizes = [float(of[0].params["size"]) for of in points]
        values = [_over_launches(of, y) / scale for of in points]
        color, linestyle = f"C{number % 10}", ("-", "--")[number // 10 % 2]
        axes.plot(sizes, values, marker="o", label=name, color=color, linestyle=linestyle)
        if y == "time" and len(curves) <= MAX_BANDS:
            high = [max(_high_s(of) / scale, value) for of, value in zip(points, values, strict=True)]
            axes.fill_between(sizes, values, high, color=color, alpha=0.15, linewidth=0)
    ticks = sorted({int(of[0].params["size"]) for of in cases})
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        ticks[:: -(-len(ticks) // 8)], [format_size(tick) for tick in ticks[:: -(-len(ticks) // 8)]]
    )
    axes.set_xlabel("size")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if len(curves) > MAX_CURVES:
        axes.set_title(f"{cases[0][0].suite}: {MAX_CURVES} of {len(curves)} curves")


def _points(axes: Axes, cases: Sequence[Sequence[Result]], varying: Sequence[str], y: str) -> None:
    """A row per case, a point per impl, with its spread."""
    there = group_by(
        (of for of in cases if _value(of[0], y)), lambda of: of[0].case_key[:2] + of[0].case_key[3:]
    )
    shown = list(there.values())[:MAX_ROWS][::-1]
    scale = _scale(axes, [_over_launches(of, y) for impls in shown for of in impls], y, "x")
    by_impl = group_by(
        ((row, of) for row, impls in enumerate(shown) for of in impls), lambda pair: pair[1][0].impl
    )
    for impl, members in by_impl.items():
        values = [_over_launches(of, y) / scale for _, of in members]
        high = [max(_high_s(of) / scale - v, 0.0) for (_, of), v in zip(members, values, strict=True)]
        rows, spread = [row for row, _ in members], [[0.0] * len(values), high]
        axes.errorbar(values, rows, xerr=spread if y == "time" else None, fmt="o", label=impl, capsize=2)
    axes.set_yticks(range(len(shown)), [_name(impls[0][0], varying) for impls in shown], fontsize="small")
    axes.grid(alpha=0.3)
    if len(by_impl) > 1:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if len(there) > MAX_ROWS:
        axes.set_title(f"{cases[0][0].suite}: {MAX_ROWS} of {len(there)} cases")
