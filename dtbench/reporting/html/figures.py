"""The kit of figures: curves, dots, bars and maps; each a set of small panels in one style.

A part names the panels and what is in them; here axes are made common, drawings numbered and legends drawn.
Series differ by colour, marker and dash, so that colour is never alone in telling them apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from dtbench.reporting.html.axes import Axis, Format, size_axis, value_axis
from dtbench.reporting.html.svg import FONT_PX, STAND_IN, draw, text_px
from dtbench.suite.errors import plain
from dtbench.suite.fields import MIN_POSITIVE

# A figure of more panels or rows is not read; the tables hold all.
MAX_PANELS, MAX_ROWS = 24, 12
MAX_SHOWN = 6  # two rows of small panels
# A phone's width holds a panel without making its text small.
WIDE_PX, INTERVALS_PX, DOTS_PX, CURVES_PX = 880.0, 560.0, 400.0, (340.0, 192.0)
ROW_PX, BAR_PX = 17.0, 34.0
TICK_PX = 24.0  # that the number of a place takes, with the gap beside it
SHADE_OPACITY, BAND_OPACITY, ROW_OPACITY = 0.09, 0.18, 0.16  # lines and marks stay legible on them
# Ink stays legible on the deepest cell, in light and in dark: the tests compute it.
CELL_OPACITY = (0.04, 0.45)
# The page's colours for the parts of bars, in turn, then paler once more; a part also bears its name.
_BAR_COLOURS = ("s0", "s1", "s3", "s4", "s5", "s2")
_BAR_OPACITIES = (0.42, 0.2)
# Of ids in a swatch that is drawn once for all legends.
_PREFIX = "swatch"

# A name of the page's colours, and an opacity.
Shade = tuple[str, float]
# Of a mark: where it is, in pixels from the left and the top, and what it says.
Mark = tuple[int, int, str]


@dataclass(frozen=True)
class Style:
    """How a series looks. marker: matplotlib's letter, "" for a line alone. dash: on, off, ... in px, () a solid
    line, None no line. words: of the legend, where the series' name does not do."""

    colour: str
    marker: str = "o"
    dash: tuple[float, ...] | None = ()
    hollow: bool = False
    words: str = ""


# Where colour and mark say one thing: how lines differ in another, in turn.
DASHES = ((), (5, 2), (1.5, 1.5), (5, 1.5, 1, 1.5))
# Told apart by colour, marker and dash; for names that have no style of their own, in turn.
LOOKS = (
    Style("s0", "o"),
    Style("s1", "s", (5, 2)),
    Style("s3", "^", (5, 1.5, 1, 1.5)),
    Style("s4", "D", (1.5, 1.5), hollow=True),
    Style("s5", "v", (8, 2), hollow=True),
    Style("s2", "X", (3, 1, 1, 1, 1, 1)),
)


@dataclass(frozen=True)
class Panel:
    """One drawing, made once, and not at all where the page has no room for it. prefix: of its ids. desc: what a
    screen reader says."""

    title: str
    desc: str
    prefix: str
    width: float
    height: float
    paint: Callable[[Canvas], Sequence[Mark]]

    @property
    def scrolls(self) -> bool:
        """Whether a phone shows a part of it at a time."""
        return self.width >= WIDE_PX

    @property
    def svg(self) -> Markup:
        return self._drawn[0]

    @property
    def points(self) -> str:
        """What the page says of the marks: [[x, y, words], ...] in pixels, as JSON."""
        return json.dumps(self._drawn[1], ensure_ascii=False, separators=(",", ":"))

    @cached_property
    def _drawn(self) -> tuple[Markup, list[Mark]]:
        marks: list[Mark] = []
        svg = draw(
            self.width,
            self.height,
            lambda canvas: marks.extend(self.paint(canvas)),
            prefix=self.prefix,
            title=self.title,
            desc=self.desc,
        )
        return svg, marks


@dataclass(frozen=True)
class LegendItem:
    label: str
    swatch: Markup


@dataclass(frozen=True)
class Figure:
    """shown: so many panels are seen at once, the others behind a fold. folded: its few words, where all of it is."""

    caption: str
    legend: Sequence[LegendItem]
    panels: Sequence[Panel]
    columns: int
    shown: int = MAX_SHOWN
    folded: str = ""


# ----------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class DrawnCurve:
    """label: the name of its style. band: the low and the high y at each x, shaded."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class CurvePanel:
    """A panel of curves. desc: what a screen reader says. shade: a range of x that is marked; level: a y that is.
    y: an axis of its own."""

    title: str
    series: Sequence[DrawnCurve]
    desc: str
    shade: tuple[float, float] | None = None
    level: float | None = None
    y: Axis | None = None


def line(label: str, points: Iterable[tuple[float, float | None]]) -> list[DrawnCurve]:
    """The curve of the points that have a value; none where no point has."""
    there = [(x, y) for x, y in points if y is not None]
    return [DrawnCurve(label, *zip(*there, strict=True))] if there else []


def curves(
    name: str,
    panels: Sequence[CurvePanel],
    styles: Mapping[str, Style],
    caption: str,
    *,
    y: Callable[[Sequence[float]], Axis],
    x: Axis | None = None,
    over: str = "size of the tensor",
    lines: bool = True,
    shown: int = MAX_SHOWN,
    folded: str = "",
) -> Figure | None:
    """Curves over size (`over` says of what), or over `x`, with common axes; None where there is nothing to draw.

    name: of the drawings' ids. y: from all values. lines: whether the legend shows them beside the marks.
    shown, folded: as of `Figure`.
    """
    panels = [panel for panel in panels if panel.series]
    everything = [one for panel in panels for one in panel.series]
    if not everything:
        return None
    if x is None:  # sizes; lines without marks are no measurement and name none
        measured = [one for one in everything if styles[one.label].marker] or everything
        x = size_axis([round(v) for one in measured for v in one.x], over)
    common = y([v for one in everything for v in (*one.y, *(one.band[1] if one.band else ()))])
    drawn = [
        Panel(
            one.title,
            one.desc,
            f"{name}{i}",
            *CURVES_PX,
            partial(_paint_curves, one, styles, x, one.y or common),
        )
        for i, one in enumerate(panels)
    ]
    items = _legend(name, styles, {one.label for one in everything}, lines)
    return Figure(caption, items, drawn, 3, shown, folded)


def _paint_curves(
    of: CurvePanel, styles: Mapping[str, Style], x: Axis, y: Axis, canvas: Canvas
) -> list[Mark]:
    axes = _axes_in(canvas, left=14 + y.width_px(), right=20, top=26, bottom=42)
    if of.shade is not None:
        axes.axvspan(*of.shade, color=STAND_IN["muted"], alpha=SHADE_OPACITY, linewidth=0, zorder=0)
    if of.level is not None:
        axes.axhline(of.level, color=STAND_IN["ink"], linewidth=1.0, zorder=1.5)
    for one in of.series:
        style = styles[one.label]
        if one.band is not None:
            colour = STAND_IN[style.colour]
            axes.fill_between(one.x, *one.band, color=colour, alpha=BAND_OPACITY, linewidth=0)
        if len(one.x) == 1 and not style.marker:  # a limit beside one measurement: a point would not be seen
            axes.axhline(one.y[0], **_look_of(style))
        else:
            axes.plot(one.x, one.y, clip_on=False, **_look_of(style))
    x.apply(axes, "x")
    y.apply(axes, "y")
    marks = [
        (at, value, f"{styles[one.label].words or one.label}, {x.format(at)}: {y.precisely(value)}")
        for one in of.series
        if styles[one.label].marker
        for at, value in zip(one.x, one.y, strict=True)
    ]
    return _marks_at(axes, marks)


# ------------------------------------------------------------------------------------------- dots


@dataclass(frozen=True)
class DotRow:
    """A line of a plot of dots. values: series -> value, where it was measured. note: at its right end. spans:
    series -> from where to where (None: open), a thin line through the mark. shade: a range that is marked."""

    label: str
    values: Mapping[str, float]
    note: str = ""
    spans: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    shade: tuple[float, float] | None = None


def dots(
    name: str,
    panels: Mapping[str, Sequence[DotRow]],
    styles: Mapping[str, Style],
    caption: str,
    axis: Callable[[Sequence[float]], Axis],
    *,
    each_axis: bool = False,
    desc: Callable[[Sequence[DotRow]], str] | None = None,
    intervals: bool = False,
    shown: int = MAX_SHOWN,
    folded: str = "",
) -> Figure | None:
    """A line per row, a mark per series; the core and torch are joined to show their distance.

    axis: from all values, or with each_axis from those of a panel. desc: what a screen reader says of a panel,
    else its labels and notes. intervals: wide, spans with ends, and a line at 1. shown, folded: as of `Figure`.
    """
    panels = {title: there for title, rows in panels.items() if (there := [r for r in rows if r.values])}
    if not panels:
        return None
    describe = desc or (lambda rows: "; ".join(f"{row.label} {row.note}" for row in rows))
    common = axis([v for rows in panels.values() for v in _reach(rows)])
    drawn = []
    for index, (title, rows) in enumerate(panels.items()):
        x = axis(_reach(rows)) if each_axis else common
        size = INTERVALS_PX if intervals else DOTS_PX, ROW_PX * len(rows) + (48 if x.title else 34)
        paint = partial(_paint_dots, rows, styles, x, intervals)
        drawn.append(Panel(title, describe(rows), f"{name}{index}", *size, paint))
    present = {series for rows in panels.values() for row in rows for series in row.values}
    return Figure(caption, _legend(name, styles, present, False), drawn, 1 if intervals else 2, shown, folded)


def _reach(rows: Sequence[DotRow]) -> list[float]:
    """All values of the rows, and the ends of their spans."""
    ends = (v for row in rows for span in row.spans.values() for v in span if v is not None)
    return [*(v for row in rows for v in row.values.values()), *(v for v in ends if v >= MIN_POSITIVE)]


def _paint_dots(
    rows: Sequence[DotRow], styles: Mapping[str, Style], x: Axis, intervals: bool, canvas: Canvas
) -> list[Mark]:
    labels = [_cut(row.label, 44 if intervals else 30) for row in rows]
    axes = _rows_in(canvas, labels, [row.note for row in rows], "muted", 42 if x.title else 28)
    if intervals:
        axes.axvline(1, color=STAND_IN["ink"], linewidth=1.0, zorder=1.5)
    for place, row in enumerate(rows):
        if row.shade is not None:
            low, high = row.shade
            axes.barh(place, high - low, 1, left=low, color=STAND_IN["muted"], alpha=ROW_OPACITY, zorder=0.5)
        ends = [row.values[name] for name in styles if name in ("core", "torch") and name in row.values]
        if len(ends) == 2:
            axes.plot(ends, [place] * 2, color=STAND_IN["muted"], linewidth=1.0, zorder=1.5)
    for name, style in styles.items():
        _paint_series(axes, rows, name, style, x, intervals)
    x.apply(axes, "x")
    axes.grid(axis="y", linewidth=0.35)
    marks = [
        (value, place, f"{row.label}, {name}: {x.precisely(value)}")
        for place, row in enumerate(rows)
        for name, value in row.values.items()
    ]
    return _marks_at(axes, marks)


def _paint_series(axes: Axes, rows: Sequence[DotRow], name: str, style: Style, x: Axis, caps: bool) -> None:
    """One series of all rows. caps: spans have ends; one that is open has an arrowhead."""
    places = [(place, row) for place, row in enumerate(rows) if name in row.values]
    for place, row in places:
        low, high = row.spans.get(name, (row.values[name], row.values[name]))
        colour, span = STAND_IN[style.colour], (low or x.low, high or x.high)
        axes.plot(span, [place] * 2, color=colour, linewidth=1.2, zorder=2)
        for end, there, arrow in ((span[0], low, "<"), (span[1], high, ">")):
            if there is None or (caps and name in row.spans):
                axes.plot([end], [place], arrow if there is None else "|", color=colour, markersize=6)
    if places:
        look = _look_of(style) | {"linestyle": "none", "markersize": 8 if style.marker == "|" else 5}
        if style.hollow:  # open marks are see-through, or the one drawn last would hide its equal
            look["markerfacecolor"] = "none"
        axes.plot([row.values[name] for _, row in places], [p for p, _ in places], zorder=2.5, **look)


# ------------------------------------------------------------------------------------------- bars


@dataclass(frozen=True)
class StackedBar:
    """Boxes end to end. parts: (name, length). note: at its right end. mark: drawn across, a floor."""

    label: str
    parts: Sequence[tuple[str, float]]
    note: str = ""
    mark: float | None = None

    @property
    def reach(self) -> float:
        return max(sum(length for _, length in self.parts), self.mark or 0.0)


def bars(
    name: str,
    panels: Mapping[str, Sequence[StackedBar]],
    order: Sequence[str],
    caption: str,
    folded: str = "",
) -> Figure | None:
    """Bars of seconds, each panel with an axis of its own. Every box that has room for it bears its name.

    order: of the names of parts, which have a shade each.
    """
    shades = shades_of(order)
    drawn: list[Panel] = []
    for title, rows in panels.items():
        top = max((bar.reach for bar in rows), default=0.0)
        if top > 0:
            desc = "; ".join(f"{bar.label}: {bar.note}" for bar in rows)
            paint = partial(_paint_bars, rows, shades, value_axis([top], log=False))
            height = BAR_PX * len(rows) + 40
            drawn.append(Panel(title, desc, f"{name}{len(drawn)}", WIDE_PX, height, paint))
    present = {part for rows in panels.values() for bar in rows for part, length in bar.parts if length > 0}
    return Figure(caption, _legend(name, shades, present, False), drawn, 1, folded=folded) if drawn else None


def _paint_bars(
    rows: Sequence[StackedBar], shades: Mapping[str, Shade], x: Axis, canvas: Canvas
) -> list[Mark]:
    axes = _rows_in(canvas, [_cut(bar.label, 40) for bar in rows], [bar.note for bar in rows], "ink", 30)
    across = axes.get_position().width * WIDE_PX / (x.high - x.low)
    for place, bar in enumerate(rows):
        at = 0.0
        for part, length in bar.parts:
            if length <= 0:
                continue
            # At least a pixel wide: what was there is seen.
            box = Rectangle((at, place - 0.36), max(length, 1 / across), 0.72)
            colour, opacity = shades[part]
            box.set(facecolor=STAND_IN[colour], alpha=opacity, edgecolor=STAND_IN["surface"], linewidth=1.2)
            axes.add_patch(box)
            if length * across > text_px(plain(part)) + 4:
                axes.text(at + length / 2, place, plain(part), ha="center", va="center", fontsize=FONT_PX - 1)
            at += length
        if bar.mark is not None:
            for ends in ((-0.46, -0.26), (0.26, 0.46)):  # beside the names of the parts
                axes.plot([bar.mark] * 2, [place + e for e in ends], color=STAND_IN["ink"], linewidth=2)
    x.apply(axes, "x")
    axes.grid(visible=False, axis="y")
    return []


def shades_of(order: Sequence[str]) -> dict[str, Shade]:
    """A shade for each of these parts."""
    count = len(_BAR_COLOURS)
    return {
        name: (_BAR_COLOURS[i % count], _BAR_OPACITIES[min(i // count, 1)]) for i, name in enumerate(order)
    }


# ------------------------------------------------------------------------------------------- maps


@dataclass(frozen=True)
class HeatMap:
    """A cell per (row, column): its name and value, None where nothing was measured. words: of a value."""

    title: str
    cells: Sequence[Sequence[tuple[str, float | None]]]
    words: Format
    desc: str


def maps(
    name: str, panels: Sequence[HeatMap], axes_names: tuple[str, str], caption: str, folded: str = ""
) -> Figure | None:
    """Cells over two axes, the first downwards; the larger a value, the deeper, from nothing to the largest: what
    differs little looks the same."""
    drawn = []
    for index, one in enumerate(panels):
        columns = max(map(len, one.cells))
        cell = min(max((DOTS_PX - 70) / columns, 8.0), 92.0)
        width, height = max(cell * columns + 70, 200.0), min(cell, 46.0) * len(one.cells) + 46
        paint = partial(_paint_map, one, axes_names, cell, width - 44 - cell * columns)
        drawn.append(Panel(one.title, one.desc, f"{name}{index}", width, height, paint))
    return Figure(caption, (), drawn, 2, folded=folded) if drawn else None


def _paint_map(
    one: HeatMap, axes_names: tuple[str, str], cell: float, right: float, canvas: Canvas
) -> list[Mark]:
    """cell: its width in pixels."""
    high = max((value for row in one.cells for _, value in row if value is not None), default=1.0) or 1.0
    columns = max(map(len, one.cells))
    axes = _axes_in(canvas, left=44, right=right, top=6, bottom=38)
    words = [[(label, "–" if v is None else one.words(v)) for label, v in row] for row in one.cells]
    # What is bold is wider by a tenth.
    widest = 1.1 * max(text_px(plain(text)) for row in words for texts in row for text in texts)
    for i, row in enumerate(one.cells):
        for j, (_, value) in enumerate(row):
            if value is not None:
                depth = CELL_OPACITY[0] + value / high * (CELL_OPACITY[1] - CELL_OPACITY[0])
                box = Rectangle((j - 0.5, i - 0.5), 1, 1, edgecolor=STAND_IN["surface"], linewidth=2)
                box.set_facecolor((STAND_IN["s0"], depth))
                axes.add_patch(box)
            if cell >= widest:
                label, text = words[i][j]
                axes.text(j, i - 0.2, plain(label), ha="center", va="center", fontsize=FONT_PX - 1)
                axes.text(j, i + 0.2, text, ha="center", va="center", fontsize=FONT_PX, fontweight="bold")
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(len(one.cells) - 0.5, -0.5))
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, len(one.cells))):
        # Where cells hold no words their places are numbered, as many as there is room for.
        step = math.ceil(count * TICK_PX / (cell * columns))
        axis.set_ticks([] if cell >= widest else range(0, count, step))
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_xlabel(plain(_cut(f"{axes_names[1]} →", 30)))
    axes.set_ylabel(plain(_cut(f"← {axes_names[0]}", 16)))
    return []


# --------------------------------------------------------------------------------- what all share


def _axes_in(canvas: Canvas, *, left: float, right: float, top: float, bottom: float) -> Axes:
    """Axes with margins in pixels."""
    width, height = 72 * canvas.get_size_inches()
    axes = canvas.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )
    axes.tick_params(length=3, pad=4)
    return axes


def _rows_in(canvas: Canvas, labels: Sequence[str], notes: Sequence[str], ink: str, bottom: float) -> Axes:
    """Axes of rows with labels at the left and notes at the right, in margins that hold them."""
    left, right = (max(text_px(plain(one)) for one in texts) for texts in (labels, notes))
    axes = _axes_in(canvas, left=left + 10, right=max(right + 12, 24), top=6, bottom=bottom)
    for place, text in enumerate(notes):
        axes.annotate(
            plain(text),
            (1, place),
            (7, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=STAND_IN[ink],
            annotation_clip=False,
        )
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_yticks(range(len(labels)), list(map(plain, labels)))
    axes.tick_params(axis="y", length=0, labelcolor=STAND_IN["ink"], labelsize=FONT_PX)
    return axes


def _marks_at(axes: Axes, marks: Sequence[tuple[float, float, str]]) -> list[Mark]:
    """Of marks in the axes' values, and what each says, their places in pixels."""
    canvas = axes.get_figure(root=True)
    assert canvas is not None
    scale, height = 72 / canvas.dpi, 72 * canvas.get_size_inches()[1]
    places = axes.transData.transform([mark[:2] for mark in marks] or np.empty((0, 2))) * scale
    return [
        (round(x), round(height - y), words)
        for (x, y), (*_, words) in zip(places, marks, strict=True)
        if math.isfinite(x + y)
    ]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _look_of(style: Style) -> dict[str, Any]:
    colour = STAND_IN[style.colour]
    return {
        "color": colour,
        "marker": style.marker or "none",
        "linestyle": "none" if style.dash is None else (0, style.dash) if style.dash else "-",
        "markerfacecolor": STAND_IN["surface"] if style.hollow else colour,
        "markeredgecolor": colour,
        "markeredgewidth": 1.4,
    }


def _legend(
    name: str, looks: Mapping[str, Style] | Mapping[str, Shade], present: Iterable[str], lines: bool
) -> list[LegendItem]:
    """A swatch per series that is there, drawn by the same code as the figure."""
    there = set(present)
    return [
        LegendItem(
            (look.words if isinstance(look, Style) else "") or label,
            Markup(_swatch(look, lines).replace(_PREFIX, f"{name}L{place}")),
        )
        for place, (label, look) in enumerate(looks.items())
        if label in there
    ]


@lru_cache(maxsize=256)
def _swatch(of: Style | Shade, lines: bool) -> str:
    """30 x 12 pixels beside a legend's words; nothing for a screen reader, which has the words."""

    def paint(canvas: Canvas) -> None:
        axes = canvas.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, 30), ylim=(-6, 6))
        if not isinstance(of, Style):
            axes.add_patch(Rectangle((6, -5), 18, 10, linewidth=0, color=STAND_IN[of[0]], alpha=of[1]))
            return
        look = _look_of(of)
        if lines and look["linestyle"] != "none":
            axes.plot([1, 29], [0, 0], **(look | {"marker": "none"}))
        if of.marker:
            axes.plot([15], [0], **look, markersize=9 if of.marker == "|" else 5)

    return draw(30, 12, paint, prefix=_PREFIX)
