"""Panels that are neither lines nor dots: intervals, maps of a mesh, stacked bars, timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter, NullLocator

from dtbench.show.report.figures import (
    ROW_PX,
    Axis,
    LegendItem,
    Panel,
    Style,
    axes_in,
    cut,
    look_of,
    panel,
    swatch,
)
from dtbench.show.report.svg import STAND_IN, printable

WIDE_PX = 880.0
HALF_PX = 430.0
# Ink stays legible on the deepest cell, in light and in dark: the tests compute it.
CELL_OPACITY = (0.04, 0.45)
_CELL_PX = 46.0
_LETTER_PX = 5.6
# The page's colours for parts of a bar, in turn, then paler once more; a part also bears its name.
_BAR_COLOURS = ("s0", "s1", "s3", "s4", "s5", "s2")
_BAR_OPACITIES = (0.42, 0.2)

# A name of the page's colours, and an opacity.
Shade = tuple[str, float]


# ------------------------------------------------------------------------------------ intervals


@dataclass(frozen=True)
class Interval:
    """A row of a forest plot. low, high: None where open. matters: the least change that counts."""

    label: str
    ratio: float
    low: float | None
    high: float | None
    matters: float
    style: Style
    note: str


def forest_panel(title: str, rows: Sequence[Interval], *, prefix: str, desc: str) -> Panel:
    """New over base per case, with its interval; shaded is what does not count as a change."""
    left = min(24 + 5.9 * max(len(row.label) for row in rows), 330.0)
    right = 18 + 6.0 * max(len(row.note) for row in rows)
    height = ROW_PX * len(rows) + 40
    known = [v for row in rows for v in (row.ratio, row.low, row.high) if v]
    ends = min(*known, 0.9) / 1.05, max(*known, 1.1) * 1.05

    def paint(canvas: Canvas) -> None:
        axes = axes_in(canvas, WIDE_PX, height, left=left, right=right, top=6, bottom=30)
        axes.axvline(1, color=STAND_IN["ink"], linewidth=1.0, zorder=1.5)
        for place, row in enumerate(rows):
            width = (1 + row.matters) - 1 / (1 + row.matters)
            box = Rectangle((1 / (1 + row.matters), place - 0.5), width, 1, linewidth=0, zorder=0.5)
            box.set(color=STAND_IN["muted"], alpha=0.16)
            axes.add_patch(box)
            colour = STAND_IN[row.style.colour]
            span = (row.low or ends[0], row.high or ends[1])
            axes.plot(span, [place] * 2, color=colour, linewidth=1.4, zorder=2)
            for end, there, mark in ((span[0], row.low, "<"), (span[1], row.high, ">")):
                axes.plot(
                    [end],
                    [place],
                    color=colour,
                    zorder=2,
                    linestyle="none",
                    marker=mark if there is None else "|",
                    markersize=5 if there is None else 7,
                )
            axes.plot([row.ratio], [place], zorder=2.5, **look_of(row.style))
            axes.annotate(
                printable(row.note),
                (1, place),
                (8, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                color=STAND_IN["ink"],
                fontsize=9,
            )
        axes.set_xscale("log")
        axes.set_xlim(*ends)
        ticks = [t for t in _ratio_ticks(*ends) if ends[0] <= t <= ends[1]]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FixedFormatter([f"{t:g}×" for t in ticks]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), [printable(cut(row.label, 54)) for row in rows])
        axes.tick_params(axis="y", length=0, labelcolor=STAND_IN["ink"], labelsize=9)
        axes.grid(axis="y", linewidth=0.35)

    return panel(title, WIDE_PX, height, paint, prefix=prefix, desc=desc)


def _ratio_ticks(low: float, high: float) -> list[float]:
    if high / low < 1.6:
        return [0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5]
    if high / low < 8:
        return [0.2, 0.25, 0.33, 0.5, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0]
    return [d * 10.0**k for k in range(-6, 7) for d in (1, 3)]


# ------------------------------------------------------------------------------------ a mesh


def mesh_panel(
    title: str,
    cells: Sequence[Sequence[tuple[str, float | None]]],
    axes_names: tuple[str, str],
    words: Mapping[int, str],
    *,
    prefix: str,
    desc: str,
) -> Panel:
    """A cell per rank: (its name, its value, None where nothing was measured); the larger the value, the deeper.

    cells: rows over the first of `axes_names`, columns over the second. words: row * columns + column -> text
    of the value.
    """
    rows, columns = len(cells), max(len(row) for row in cells)
    cell = min(max((HALF_PX - 70) / columns, 8.0), 92.0)
    width, height = max(cell * columns + 70, 200.0), min(cell, _CELL_PX) * rows + 46
    known = [value for row in cells for _, value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    named = cell >= 44

    def paint(canvas: Canvas) -> None:
        axes = axes_in(canvas, width, height, left=44, right=width - 44 - cell * columns, top=6, bottom=38)
        for i, row in enumerate(cells):
            for j, (name, value) in enumerate(row):
                share = 0.5 if high <= low or value is None else (value - low) / (high - low)
                depth = CELL_OPACITY[0] + share * (CELL_OPACITY[1] - CELL_OPACITY[0])
                box = Rectangle((j - 0.5, i - 0.5), 1, 1, linewidth=0)
                box.set(
                    facecolor=STAND_IN["s0"], alpha=None if value is None else depth, fill=value is not None
                )
                axes.add_patch(box)
                if named:
                    text = words.get(i * columns + j, "–")
                    axes.text(j, i - 0.2, printable(name), ha="center", va="center", fontsize=8.5)
                    axes.text(j, i + 0.2, text, ha="center", va="center", fontsize=9.5, fontweight="bold")
        axes.set_xlim(-0.5, columns - 0.5)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_xticks([k - 0.5 for k in range(1, columns)], minor=False)
        axes.set_yticks([k - 0.5 for k in range(1, rows)], minor=False)
        axes.xaxis.set_major_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(NullFormatter())
        axes.tick_params(length=0)
        axes.grid(color=STAND_IN["surface"], linewidth=2)
        axes.set_axisbelow(False)
        for side in axes.spines.values():
            side.set_visible(True)
        axes.set_xlabel(printable(cut(f"{axes_names[1]} →", 30)), fontsize=9)
        axes.set_ylabel(printable(cut(f"← {axes_names[0]}", 16)), fontsize=9)

    return panel(title, width, height, paint, prefix=prefix, desc=desc)


# ------------------------------------------------------------------------------------ bars and timelines


@dataclass(frozen=True)
class Bar:
    """A stacked bar: (name of a part, its length). note: at its right end. mark: drawn across, a floor."""

    label: str
    parts: Sequence[tuple[str, float]]
    note: str
    mark: float | None = None


def shades(order: Sequence[str]) -> dict[str, Shade]:
    """A shade for each of these parts."""
    count = len(_BAR_COLOURS)
    return {
        name: (_BAR_COLOURS[i % count], _BAR_OPACITIES[min(i // count, 1)]) for i, name in enumerate(order)
    }


def bar_legend(colours: Mapping[str, Shade], *, prefix: str) -> list[LegendItem]:
    """A box per part."""

    def item(index: int, label: str, shade: Shade) -> LegendItem:
        def paint(canvas: Canvas) -> None:
            axes = canvas.add_axes((0, 0, 1, 1))
            axes.set_axis_off()
            axes.set_xlim(0, 30)
            axes.set_ylim(0, 12)
            box = Rectangle((6, 1), 18, 10, linewidth=0)
            box.set(color=STAND_IN[shade[0]], alpha=shade[1])
            axes.add_patch(box)

        return LegendItem(label, swatch(paint, f"{prefix}{index}"))

    return [item(index, label, shade) for index, (label, shade) in enumerate(colours.items())]


def bars_panel(
    title: str, bars: Sequence[Bar], colours: Mapping[str, Shade], x: Axis, *, prefix: str, desc: str
) -> Panel:
    """Stacked bars; every part that has room for it bears its name. colours: of each part."""
    left = min(24 + 5.9 * max(len(bar.label) for bar in bars), 150.0)
    right = 14 + 6.0 * max(len(bar.note) for bar in bars)
    height = 34.0 * len(bars) + 40
    across = WIDE_PX - left - right

    def paint(canvas: Canvas) -> None:
        axes = axes_in(canvas, WIDE_PX, height, left=left, right=right, top=6, bottom=30)
        for place, bar in enumerate(bars):
            at = 0.0
            for name, length in bar.parts:
                if length <= 0:
                    continue
                box = Rectangle((at, place - 0.36), length, 0.72, linewidth=1.2)
                colour, opacity = colours[name]
                box.set(facecolor=STAND_IN[colour], edgecolor=STAND_IN["surface"], alpha=opacity)
                axes.add_patch(box)
                room = length / (x.high - x.low) * across
                if room > _LETTER_PX * len(name) + 6:
                    axes.text(at + length / 2, place, printable(name), ha="center", va="center", fontsize=9)
                at += length
            if bar.mark is not None:
                for ends in ((-0.46, -0.26), (0.26, 0.46)):  # beside the names of the parts
                    axes.plot([bar.mark] * 2, [place + e for e in ends], color=STAND_IN["ink"], linewidth=2)
            axes.annotate(
                printable(bar.note),
                (1, place),
                (8, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        x.apply(axes, "x")
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_yticks(range(len(bars)), [printable(cut(bar.label, 22)) for bar in bars])
        axes.tick_params(axis="y", length=0, labelcolor=STAND_IN["ink"], labelsize=9)
        axes.grid(visible=False, axis="y")

    return panel(title, WIDE_PX, height, paint, prefix=prefix, desc=desc)


@dataclass(frozen=True)
class Lane:
    """A line of a timeline: what was busy from when to when."""

    label: str
    spans: Sequence[tuple[float, float]]
    colour: str


def timeline_panel(title: str, lanes: Sequence[Lane], x: Axis, *, prefix: str, desc: str) -> Panel:
    """Lanes over time."""
    left = min(24 + 5.9 * max(len(lane.label) for lane in lanes), 190.0)
    height = 20.0 * len(lanes) + 40

    def paint(canvas: Canvas) -> None:
        axes = axes_in(canvas, WIDE_PX, height, left=left, right=20, top=6, bottom=30)
        for place, lane in enumerate(lanes):
            # At least a hair's breadth: what was there is seen.
            hair = (x.high - x.low) / WIDE_PX
            pieces = [(a, max(b - a, hair)) for a, b in lane.spans]
            axes.broken_barh(pieces, (place - 0.36, 0.72), facecolors=STAND_IN[lane.colour], linewidth=0)
        x.apply(axes, "x")
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_yticks(range(len(lanes)), [printable(cut(lane.label, 30)) for lane in lanes])
        axes.tick_params(axis="y", length=0, labelcolor=STAND_IN["ink"], labelsize=9)
        axes.grid(axis="y", linewidth=0.35)

    return panel(title, WIDE_PX, height, paint, prefix=prefix, desc=desc)
