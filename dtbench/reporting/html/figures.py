"""The kit of figures: curves, dots and bars; each a set of small panels in one style.

A part names the panels and what is in them; here axes are made common, drawings numbered and legends drawn.
Series differ by colour, marker and dash, so that colour is never alone in telling them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from dtbench.errors import plain
from dtbench.fields import MIN_POSITIVE
from dtbench.reporting.html.axes import Axis, size_axis, value_axis
from dtbench.reporting.html.svg import FONT_PX, STAND_IN, draw, text_px

# A figure of more panels or rows is not read; the tables hold all.
MAX_PANELS, MAX_DOT_ROWS = 24, 18
MOST_MARKS = 200  # of a line, or twice as many: more run together, and take most of the time of a page
MAX_SHOWN = 6  # two rows of small panels
# Of a panel, by how many stand side by side: the page's width, halves and thirds. A phone's width holds a half or a
# third without making its text small.
WIDTHS_PX = {1: 980.0, 2: 440.0, 3: 340.0}
ROW_PX, BAR_PX = 17.0, 34.0
CURVES_ASPECT, CURVES_MAX_PX = 0.565, 280.0  # height over width, as far as that height
CHARACTERS_PER_PX = 0.06  # of a label: about half of a panel's width
SHADE_OPACITY, BAND_OPACITY, ROW_OPACITY = 0.09, 0.18, 0.16  # lines and marks stay legible on them
# The page's colours for the parts of bars, in turn, then paler once more; a part also bears its name.
_BAR_COLOURS = ("s0", "s1", "s3", "s4", "s5", "s2")
_BAR_OPACITIES = (0.42, 0.2)


@dataclass(frozen=True)
class Style:
    """How a series looks. colour: a name of the page's. marker: matplotlib's letter, "" for a line alone. dash: on,
    off, ... in px, () a solid line, None no line; px: how thick. words: of the legend, where the series' name does not
    do. box: the opacity of the parts of bars."""

    colour: str
    marker: str = "o"
    dash: tuple[float, ...] | None = ()
    hollow: bool = False
    words: str = ""
    box: float = 0.0
    px: float = 1.5

    @property
    def look(self) -> dict[str, Any]:
        colour = STAND_IN[self.colour]
        return {
            "color": colour,
            "marker": self.marker or "none",
            "linestyle": "none" if self.dash is None else (0, self.dash) if self.dash else "-",
            "markerfacecolor": STAND_IN["surface"] if self.hollow else colour,
            "markeredgecolor": colour,
            "markeredgewidth": 1.4,
            "linewidth": self.px,
            "solid_capstyle": "butt" if self.px > 2 else "projecting",
        }


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
    """One drawing, made only where the page has room for it. desc: what a screen reader says. prefix: of its ids. px:
    its height; aspect: that over its width, as far as px. scrolls: whether a phone shows a part of it at a time; else
    one that is as wide as the page is drawn once more for a phone."""

    title: str
    desc: str
    prefix: str
    px: float
    paint: Callable[[Canvas], None]
    scrolls: bool = False
    aspect: float = math.inf

    def drawings(self, abreast: int) -> list[tuple[str, Markup]]:
        """(class, SVG) of so many panels side by side."""
        alone = {"wide": 1} if self.scrolls else {"alone": 1, "phone": 2}
        kinds = alone if abreast == 1 else {"drawing": abreast}
        return [(kind, self._draw(WIDTHS_PX[n], "n" * (kind == "phone"))) for kind, n in kinds.items()]

    @lru_cache(256)  # noqa: B019 - a page that does not fit is written again, with the same drawings
    def _draw(self, width: float, suffix: str) -> Markup:
        return draw(
            width,
            min(self.aspect * width, self.px),
            self.paint,
            prefix=self.prefix + suffix,
            title=self.title,
            desc=self.desc,
        )


@dataclass(frozen=True)
class Figure:
    """legend: words and swatch of each series. columns: as many panels stand side by side at most. shown: so many are
    seen at once, the others behind a fold. folded: its few words, where all of it is."""

    caption: str
    legend: Sequence[tuple[str, Markup]]
    panels: Sequence[Panel]
    columns: int
    shown: int = MAX_SHOWN
    folded: str = ""

    def abreast(self, panels: Sequence[Panel]) -> list[tuple[Panel, int]]:
        """Each of these with how many stand in its row: the rows are as equal as can be, and fill the width."""
        rows = math.ceil(len(panels) / self.columns)
        in_row = [len(panels) // rows + (row < len(panels) % rows) for row in range(rows)]
        return list(zip(panels, [count for count in in_row for _ in range(count)], strict=True))


@dataclass(frozen=True)
class DrawnCurve:
    """label: the name of its style. band: the low and the high y at each x, shaded."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class CurvePanel:
    """A panel of curves. shade: a range of x that is marked; level: a y that is. y: an axis of its own."""

    title: str
    series: Sequence[DrawnCurve]
    shade: tuple[float, float] | None = None
    level: float | None = None
    y: Axis | None = None

    def desc(self, y: Axis) -> str:
        values = [v for curve in self.series for v in curve.y]
        labels = ", ".join(curve.label for curve in self.series)
        return f"{labels}: {y.title} from {y.format(min(values))} to {y.format(max(values))}."


def lines(points: Mapping[str, Iterable[tuple[float, float | None]]]) -> list[DrawnCurve]:
    """By label the curves of the points that have a value; none where no point has."""
    there = {label: [(x, y) for x, y in of if y is not None] for label, of in points.items()}
    return [DrawnCurve(label, *zip(*of, strict=True)) for label, of in there.items() if of]


def curves(
    name: str,
    panels: Sequence[CurvePanel],
    styles: Mapping[str, Style],
    caption: str,
    *,
    y: Callable[[Sequence[float]], Axis],
    x: Axis | None = None,
    over: str = "size of the tensor",
    shown: int = MAX_SHOWN,
    folded: str = "",
    max_px: float = CURVES_MAX_PX,
) -> Figure | None:
    """Curves over size (`over` says of what), or over `x`, with common axes; None where there is nothing to draw.

    name: of the drawings' ids. y: from all values. shown, folded: as of `Figure`.
    """
    panels = [panel for panel in panels if panel.series]
    series = [one for panel in panels for one in panel.series]
    if not series:
        return None
    if x is None:  # sizes; lines without marks are no measurement and name none
        measured = [one for one in series if styles[one.label].marker] or series
        x = size_axis([round(v) for one in measured for v in one.x], over)
    common = y([v for one in series for v in (*one.y, *(one.band[1] if one.band else ()))])
    drawn = [
        Panel(
            panel.title,
            desc=panel.desc(panel.y or common),
            prefix=f"{name}{i}",
            px=max_px,
            paint=partial(_paint_curves, panel, styles, x, panel.y or common),
            aspect=CURVES_ASPECT,
        )
        for i, panel in enumerate(panels)
    ]
    return Figure(caption, _legend(name, styles, {s.label for s in series}, True), drawn, 3, shown, folded)


def _paint_curves(of: CurvePanel, styles: Mapping[str, Style], x: Axis, y: Axis, canvas: Canvas) -> None:
    axes = _axes_in(canvas, left=14 + y.width_px(), right=20, top=26, bottom=42)
    if of.shade is not None:
        axes.axvspan(*of.shade, color=STAND_IN["muted"], alpha=SHADE_OPACITY, linewidth=0, zorder=0)
    if of.level is not None:
        axes.axhline(of.level, color=STAND_IN["ink"], linewidth=1.0, zorder=1.5)
    for one in of.series:
        style = styles[one.label]
        if one.band is not None:
            axes.fill_between(one.x, *one.band, color=STAND_IN[style.colour], alpha=BAND_OPACITY, linewidth=0)
        if len(one.x) == 1 and not style.marker:  # a limit beside one measurement: a point would not be seen
            axes.axhline(one.y[0], **style.look)
        else:
            step = len(one.x) // MOST_MARKS or None  # of None each point has its mark
            # Marks at the edge are whole; a line without marks may reach beyond what was measured.
            axes.plot(one.x, one.y, clip_on=not style.marker, markevery=step, **style.look)
    x.apply(axes, "x")
    y.apply(axes, "y")


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
    intervals: bool = False,
    shown: int = MAX_SHOWN,
    folded: str = "",
) -> Figure | None:
    """A line per row, a mark per series; the core and torch are joined to show their distance.

    axis: from the values of a panel. intervals: spans with ends, and a line at 1. shown, folded: as of `Figure`; but
    one row alone is folded in any case, and two panels stand side by side where that leaves half of each to its marks,
    else one is shown.
    """
    panels = {title: there for title, rows in panels.items() if (there := [r for r in rows if r.values])}
    if not panels:
        return None
    drawn = []
    for index, (title, rows) in enumerate(panels.items()):
        ends = [v for row in rows for span in row.spans.values() for v in span if v and v >= MIN_POSITIVE]
        x = axis([*(v for row in rows for v in row.values.values()), *ends])
        drawn.append(
            Panel(
                title,
                desc="; ".join(f"{row.label}: {row.note}" for row in rows),
                prefix=f"{name}{index}",
                px=ROW_PX * len(rows) + (48 if x.title else 34),
                paint=partial(_paint_dots, rows, styles, x, intervals),
            )
        )
    present = {series for rows in panels.values() for row in rows for series in row.values}
    all_rows = [(title, row) for title, rows in panels.items() for row in rows]
    if len(all_rows) == 1 and not intervals:
        folded = folded or f"{all_rows[0][0]}: {all_rows[0][1].label}"
    words_px = (max(text_px(plain(getattr(row, of))) for _, row in all_rows) for of in ("label", "note"))
    columns = 1 if intervals or sum(words_px) > WIDTHS_PX[2] / 2 else 2
    shown = shown if columns > 1 else 1
    return Figure(caption, _legend(name, styles, present, False), drawn, columns, shown, folded)


def _paint_dots(
    rows: Sequence[DotRow], styles: Mapping[str, Style], x: Axis, intervals: bool, canvas: Canvas
) -> None:
    labels, notes = [row.label for row in rows], [row.note for row in rows]
    axes = _rows_in(canvas, labels, notes, "muted", 42 if x.title else 28)
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
        look = style.look | {"linestyle": "none", "markersize": 8 if style.marker == "|" else 5}
        if style.hollow:  # open marks are see-through, or the one drawn last would hide its equal
            look["markerfacecolor"] = "none"
        axes.plot([row.values[name] for _, row in places], [p for p, _ in places], zorder=2.5, **look)


@dataclass(frozen=True)
class StackedBar:
    """Boxes end to end. parts: (name, length). note: at its right end. mark: drawn across, a floor."""

    label: str
    parts: Sequence[tuple[str, float]]
    note: str = ""
    mark: float | None = None


def bars(
    name: str, panels: Mapping[str, Sequence[StackedBar]], order: Sequence[str], caption: str, folded: str
) -> Figure | None:
    """Bars of seconds, each panel with an axis of its own. Every box that has room for it bears its name.

    order: of the names of parts, which have a shade each.
    """
    styles = box_styles(order)
    drawn: list[Panel] = []
    for title, rows in panels.items():
        top = max([0.0, *(max(sum(length for _, length in b.parts), b.mark or 0.0) for b in rows)])
        if top > 0:
            drawn.append(
                Panel(
                    title,
                    desc="; ".join(f"{bar.label}: {bar.note}" for bar in rows),
                    prefix=f"{name}{len(drawn)}",
                    px=BAR_PX * len(rows) + 40,
                    paint=partial(_paint_bars, rows, styles, value_axis([top], log=False)),
                    scrolls=True,
                )
            )
    present = {part for rows in panels.values() for bar in rows for part, length in bar.parts if length > 0}
    return Figure(caption, _legend(name, styles, present, False), drawn, 1, folded=folded) if drawn else None


def _paint_bars(rows: Sequence[StackedBar], styles: Mapping[str, Style], x: Axis, canvas: Canvas) -> None:
    axes = _rows_in(canvas, [bar.label for bar in rows], [bar.note for bar in rows], "ink", 30)
    across = axes.get_position().width * WIDTHS_PX[1] / (x.high - x.low)
    for place, bar in enumerate(rows):
        at = 0.0
        for part, length in bar.parts:
            if length <= 0:
                continue
            width, style = max(length, 1 / across), styles[part]  # at least a pixel: what was there is seen
            axes.add_patch(
                Rectangle(
                    (at, place - 0.36),
                    width,
                    0.72,
                    edgecolor=STAND_IN["surface"],
                    linewidth=1.2,
                    facecolor=STAND_IN[style.colour],
                    alpha=style.box,
                )
            )
            if length * across > text_px(plain(part)) + 4:
                axes.text(at + length / 2, place, plain(part), ha="center", va="center", fontsize=FONT_PX - 1)
            at += length
        if bar.mark is not None:
            for ends in ((-0.46, -0.26), (0.26, 0.46)):  # beside the names of the parts
                axes.plot([bar.mark] * 2, [place + e for e in ends], color=STAND_IN["ink"], linewidth=2)
    x.apply(axes, "x")
    axes.grid(visible=False, axis="y")


def box_styles(order: Sequence[str]) -> dict[str, Style]:
    """A shade for each of these parts."""
    count = len(_BAR_COLOURS)
    return {
        name: Style(_BAR_COLOURS[i % count], "", box=_BAR_OPACITIES[min(i // count, 1)])
        for i, name in enumerate(order)
    }


def _axes_in(canvas: Canvas, *, left: float, right: float, top: float, bottom: float) -> Axes:
    """Axes with margins in pixels."""
    width, height = 72 * canvas.get_size_inches()
    inside = 1 - (left + right) / width, 1 - (top + bottom) / height
    axes = canvas.add_axes((left / width, bottom / height, *inside))
    axes.tick_params(length=3, pad=4)
    return axes


def _rows_in(canvas: Canvas, labels: Sequence[str], notes: Sequence[str], ink: str, bottom: float) -> Axes:
    """Axes of rows with labels at the left, cut to about half of the width, and notes at the right, in margins that
    hold them."""
    most = round(CHARACTERS_PER_PX * 72 * canvas.get_size_inches()[0])
    labels, notes = [_cut(plain(label), most) for label in labels], list(map(plain, notes))
    left, right = max(map(text_px, labels)) + 10, max(*map(text_px, notes), 12) + 12
    axes = _axes_in(canvas, left=left, right=right, top=6, bottom=bottom)
    for row, text in enumerate(notes):
        axes.annotate(
            text,
            (1, row),
            (7, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=STAND_IN[ink],
            annotation_clip=False,
        )
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0, labelcolor=STAND_IN["ink"], labelsize=FONT_PX)
    return axes


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _legend(
    name: str, styles: Mapping[str, Style], present: Collection[str], lines: bool
) -> list[tuple[str, Markup]]:
    """Words and a swatch of 30 x 12 pixels per series that is there, drawn by the same code as the figure; nothing
    for a screen reader, which has the words."""

    def paint(style: Style, canvas: Canvas) -> None:
        axes = canvas.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, 30), ylim=(-6, 6))
        if style.box:
            axes.add_patch(
                Rectangle((6, -5), 18, 10, linewidth=0, color=STAND_IN[style.colour], alpha=style.box)
            )
            return
        if lines and style.look["linestyle"] != "none":
            axes.plot([1, 29], [0, 0], **(style.look | {"marker": "none"}))
        if style.marker:
            axes.plot([15], [0], **style.look, markersize=9 if style.marker == "|" else 5)

    return [
        (style.words or label, draw(30, 12, partial(paint, style), prefix=f"{name}L{place}"))
        for place, (label, style) in enumerate(styles.items())
        if label in present
    ]
