"""Figures of the page: curves, dots and bars, each a set of small panels in one style.

A part specifies the panels and their content. This module computes common axes, assigns ids and draws the legends.
Series differ in colour, marker and dash, so that they can be distinguished without colour.
"""

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

# Limits for a readable figure; the tables have all cases.
MAX_PANELS, MAX_DOT_ROWS = 24, 18
# Approximate limit for the marks of a line (up to twice as many are drawn). More marks would overlap, and drawing them
# would take most of the time of a page.
MOST_MARKS = 200
# Number of panels that are shown without unfolding: two rows of small panels.
MAX_SHOWN = 6
# Number of panels in a row -> width of a panel: the page's width, halves and thirds. A half or a third fits a phone
# without small text.
WIDTHS_PX = {1: 980.0, 2: 440.0, 3: 340.0}
ROW_PX, BAR_PX = 17.0, 34.0
CURVES_ASPECT, CURVES_MAX_PX = 0.565, 280.0  # height / width, and the largest height
CHARACTERS_PER_PX = 0.06  # limits labels to about half of a panel's width
SHADE_OPACITY, BAND_OPACITY, ROW_OPACITY = 0.09, 0.18, 0.16  # lines and marks stay visible on them
# Colours of the parts of bars, used in turn and then once more in a paler shade. Parts also have their names on them.
_BAR_COLOURS = ("s0", "s1", "s3", "s4", "s5", "s2")
_BAR_OPACITIES = (0.42, 0.2)


@dataclass(frozen=True)
class Style:
    """The look of a series.

    Attributes:
        colour: name of a CSS colour variable of the page.
        marker: matplotlib's marker; "" for a line without marks.
        dash: lengths of dashes and gaps in px; () for a solid line, None for no line.
        hollow: whether marks are not filled.
        words: text of the legend, if it is not the name of the series.
        box: opacity of a part of a bar; 0 for other series.
        px: width of the line.
    """

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


# Dashes that distinguish series of the same colour and mark, in turn.
DASHES = ((), (5, 2), (1.5, 1.5), (5, 1.5, 1, 1.5))
# Styles for series without a style of their own, in turn. They differ in colour, marker and dash.
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
    """A drawing. It is only drawn if the page has room for it.

    Attributes:
        title: title above the drawing.
        desc: description for screen readers.
        prefix: prefix of its ids.
        px: largest height.
        paint: draws it.
        scrolls: whether a phone scrolls it. Otherwise, a drawing as wide as the page is drawn again for phones.
        aspect: height / width.
    """

    title: str
    desc: str
    prefix: str
    px: float
    paint: Callable[[Canvas], None]
    scrolls: bool = False
    aspect: float = math.inf

    def drawings(self, abreast: int) -> list[tuple[str, Markup]]:
        """Returns (CSS class, SVG) of the panel in a row of `abreast` panels."""
        kinds_alone = {"wide": 1} if self.scrolls else {"alone": 1, "phone": 2}
        kinds = kinds_alone if abreast == 1 else {"drawing": abreast}
        return [(kind, self._draw(WIDTHS_PX[n], "n" * (kind == "phone"))) for kind, n in kinds.items()]

    @lru_cache(256)  # noqa: B019 - a page that is too large is written again with the same drawings
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
    """A figure of several panels.

    Attributes:
        caption: caption below the panels.
        legend: text and swatch of each series.
        panels: the panels.
        columns: largest number of panels in a row.
        shown: number of panels that are not folded.
        folded: summary, if the whole figure is folded.
    """

    caption: str
    legend: Sequence[tuple[str, Markup]]
    panels: Sequence[Panel]
    columns: int
    shown: int = MAX_SHOWN
    folded: str = ""

    def abreast(self, panels: Sequence[Panel]) -> list[tuple[Panel, int]]:
        """Returns (panel, number of panels in its row). All rows are filled as evenly as possible."""
        rows = math.ceil(len(panels) / self.columns)
        in_row = [len(panels) // rows + (row < len(panels) % rows) for row in range(rows)]
        return list(zip(panels, [count for count in in_row for _ in range(count)], strict=True))


@dataclass(frozen=True)
class DrawnCurve:
    """A curve.

    Attributes:
        label: name of its style.
        x: values on the x axis.
        y: values on the y axis.
        band: (low, high) y at each x, which is shaded.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class CurvePanel:
    """A panel of curves.

    Attributes:
        title: title of the panel.
        series: the curves.
        shade: range of x to shade.
        level: y of a horizontal line.
        y: y axis, if it is not the common one.
    """

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
    """Returns a curve per label, without the points that have no value."""
    present = {label: [(x, y) for x, y in pairs if y is not None] for label, pairs in points.items()}
    return [DrawnCurve(label, *zip(*pairs, strict=True)) for label, pairs in present.items() if pairs]


def curves(
    name: str,
    panels: Sequence[CurvePanel],
    styles: Mapping[str, Style],
    caption: str,
    *,
    y: Callable[[Sequence[float]], Axis],
    x: Axis | None = None,
    x_title: str = "size of the tensor",
    shown: int = MAX_SHOWN,
    folded: str = "",
    max_px: float = CURVES_MAX_PX,
) -> Figure | None:
    """Draws curves with common axes, by default over size. Returns None if there is nothing to draw.

    Args:
        name: prefix of ids.
        y: returns the y axis for all values.
        x: the x axis; None for an axis of sizes.
        x_title: title of the axis of sizes.
        shown: see `Figure`.
        folded: see `Figure`.
        max_px: largest height of a panel.
    """
    panels = [panel for panel in panels if panel.series]
    if not (series := [curve for panel in panels for curve in panel.series]):
        return None
    if x is None:  # only lines with marks are measurements, so only their sizes determine the axis
        measured = [curve for curve in series if styles[curve.label].marker] or series
        x = size_axis([round(v) for curve in measured for v in curve.x], x_title)
    common = y([v for curve in series for v in (*curve.y, *(curve.band[1] if curve.band else ()))])
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


def _paint_curves(panel: CurvePanel, styles: Mapping[str, Style], x: Axis, y: Axis, canvas: Canvas) -> None:
    axes = _axes_in(canvas, left=14 + y.width_px(), right=20, top=26, bottom=42)
    if panel.shade is not None:
        axes.axvspan(*panel.shade, color=STAND_IN["muted"], alpha=SHADE_OPACITY, linewidth=0, zorder=0)
    if panel.level is not None:
        axes.axhline(panel.level, color=STAND_IN["ink"], linewidth=1.0, zorder=1.5)
    for curve in panel.series:
        style = styles[curve.label]
        if curve.band is not None:
            axes.fill_between(
                curve.x, *curve.band, color=STAND_IN[style.colour], alpha=BAND_OPACITY, linewidth=0
            )
        # A line without marks and with a single point (e.g. a limit) would be invisible.
        if len(curve.x) == 1 and not style.marker:
            axes.axhline(curve.y[0], **style.look)
        else:
            step = len(curve.x) // MOST_MARKS or None  # None marks every point
            # Marks at the edge are drawn in full. A line without marks may extend beyond the axes and is clipped.
            axes.plot(curve.x, curve.y, clip_on=not style.marker, markevery=step, **style.look)
    x.apply(axes, "x")
    y.apply(axes, "y")


@dataclass(frozen=True)
class DotRow:
    """A row of a dot plot.

    Attributes:
        label: text at the left.
        values: series -> value.
        note: text at the right.
        spans: series -> ends of a thin line through the mark; None for an open end.
        shade: range to shade.
    """

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
    """Draws rows with a mark per series. A line joins the core and torch to show their distance.

    A figure with a single row is always folded. Two panels share a row if that leaves half of each for the marks.
    Otherwise only the first panel is not folded.

    Args:
        name: prefix of ids.
        axis: returns the axis for the values of a panel.
        intervals: draw the ends of spans, and a line at 1.
        shown: see `Figure`.
        folded: see `Figure`.
    """
    panels = {title: valued for title, rows in panels.items() if (valued := [r for r in rows if r.values])}
    if not panels:
        return None
    drawn = []
    for index, (title, rows) in enumerate(panels.items()):
        bounds = [v for row in rows for span in row.spans.values() for v in span if v and v >= MIN_POSITIVE]
        x = axis([*(v for row in rows for v in row.values.values()), *bounds])
        drawn.append(
            Panel(
                title,
                desc="; ".join(f"{row.label}: {row.note}" for row in rows),
                prefix=f"{name}{index}",
                px=ROW_PX * len(rows) + (48 if x.title else 34),
                paint=partial(_paint_dots, rows, styles, x, intervals),
            )
        )
    all_rows = [(title, row) for title, rows in panels.items() for row in rows]
    if len(all_rows) == 1 and not intervals:
        folded = folded or f"{all_rows[0][0]}: {all_rows[0][1].label}"
    words_px = (
        max(text_px(plain(getattr(row, field_name))) for _, row in all_rows)
        for field_name in ("label", "note")
    )
    columns = 1 if intervals or sum(words_px) > WIDTHS_PX[2] / 2 else 2
    legend = _legend(name, styles, {series for _, row in all_rows for series in row.values}, False)
    return Figure(caption, legend, drawn, columns, shown if columns > 1 else 1, folded)


def _paint_dots(
    rows: Sequence[DotRow], styles: Mapping[str, Style], x: Axis, intervals: bool, canvas: Canvas
) -> None:
    axes = _rows_in(
        canvas, [row.label for row in rows], [row.note for row in rows], "muted", 42 if x.title else 28
    )
    if intervals:
        axes.axvline(1, color=STAND_IN["ink"], linewidth=1.0, zorder=1.5)
    for row_index, row in enumerate(rows):
        if row.shade is not None:
            low, high = row.shade
            axes.barh(
                row_index, high - low, 1, left=low, color=STAND_IN["muted"], alpha=ROW_OPACITY, zorder=0.5
            )
        ends = [row.values[name] for name in styles if name in ("core", "torch") and name in row.values]
        if len(ends) == 2:
            axes.plot(ends, [row_index] * 2, color=STAND_IN["muted"], linewidth=1.0, zorder=1.5)
    for name, style in styles.items():
        _paint_series(axes, rows, name, style, x, intervals)
    x.apply(axes, "x")
    axes.grid(axis="y", linewidth=0.35)


def _paint_series(axes: Axes, rows: Sequence[DotRow], name: str, style: Style, x: Axis, caps: bool) -> None:
    """Draws one series in all rows. Open spans get an arrowhead; with `caps`, other ends are marked, too."""
    drawn_rows = [(row_index, row) for row_index, row in enumerate(rows) if name in row.values]
    for row_index, row in drawn_rows:
        low, high = row.spans.get(name, (row.values[name], row.values[name]))
        colour, span = STAND_IN[style.colour], (low or x.low, high or x.high)
        axes.plot(span, [row_index] * 2, color=colour, linewidth=1.2, zorder=2)
        for end, bound, arrow in ((span[0], low, "<"), (span[1], high, ">")):
            if bound is None or (caps and name in row.spans):
                axes.plot([end], [row_index], arrow if bound is None else "|", color=colour, markersize=6)
    if drawn_rows:
        look = style.look | {"linestyle": "none", "markersize": 8 if style.marker == "|" else 5}
        if style.hollow:  # transparent, so that a mark does not hide an equal one below it
            look["markerfacecolor"] = "none"
        axes.plot([row.values[name] for _, row in drawn_rows], [p for p, _ in drawn_rows], zorder=2.5, **look)


@dataclass(frozen=True)
class StackedBar:
    """A bar of adjacent boxes.

    Attributes:
        label: text at the left.
        parts: (name, length in seconds).
        note: text at the right.
        mark: position of a vertical stroke, e.g. a floor.
    """

    label: str
    parts: Sequence[tuple[str, float]]
    note: str = ""
    mark: float | None = None


def bars(
    name: str, panels: Mapping[str, Sequence[StackedBar]], order: Sequence[str], caption: str, folded: str
) -> Figure | None:
    """Draws bars of seconds. Each panel has its own axis; each box shows its name if there is room.

    Args:
        name: prefix of ids.
        order: names of all parts, in the order of their colours.
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
    for row_index, bar in enumerate(rows):
        start = 0.0
        for part, length in bar.parts:
            if length <= 0:
                continue
            width, style = max(length, 1 / across), styles[part]  # at least one pixel, so that it is visible
            axes.add_patch(
                Rectangle(
                    (start, row_index - 0.36),
                    width,
                    0.72,
                    edgecolor=STAND_IN["surface"],
                    linewidth=1.2,
                    facecolor=STAND_IN[style.colour],
                    alpha=style.box,
                )
            )
            if length * across > text_px(plain(part)) + 4:
                axes.text(
                    start + length / 2, row_index, plain(part), ha="center", va="center", fontsize=FONT_PX - 1
                )
            start += length
        if bar.mark is not None:
            for ends in ((-0.46, -0.26), (0.26, 0.46)):  # above and below the names of the parts
                axes.plot([bar.mark] * 2, [row_index + e for e in ends], color=STAND_IN["ink"], linewidth=2)
    x.apply(axes, "x")
    axes.grid(visible=False, axis="y")


def box_styles(order: Sequence[str]) -> dict[str, Style]:
    """Returns a style for each part."""
    count = len(_BAR_COLOURS)
    return {
        name: Style(_BAR_COLOURS[i % count], "", box=_BAR_OPACITIES[min(i // count, 1)])
        for i, name in enumerate(order)
    }


def _axes_in(canvas: Canvas, *, left: float, right: float, top: float, bottom: float) -> Axes:
    """Adds axes with margins in pixels."""
    width, height = 72 * canvas.get_size_inches()
    axes = canvas.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )
    axes.tick_params(length=3, pad=4)
    return axes


def _rows_in(canvas: Canvas, labels: Sequence[str], notes: Sequence[str], ink: str, bottom: float) -> Axes:
    """Adds axes with labels at the left and notes at the right of each row. Long labels are cut."""
    max_characters = round(CHARACTERS_PER_PX * 72 * canvas.get_size_inches()[0])
    labels, notes = list(map(plain, labels)), list(map(plain, notes))
    labels = [text if len(text) <= max_characters else text[: max_characters - 1] + "…" for text in labels]
    axes = _axes_in(
        canvas,
        left=max(map(text_px, labels)) + 10,
        right=max(*map(text_px, notes), 12) + 12,
        top=6,
        bottom=bottom,
    )
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


def _legend(
    name: str, styles: Mapping[str, Style], present: Collection[str], lines: bool
) -> list[tuple[str, Markup]]:
    """Returns text and a swatch of 30 x 12 pixels for each series in `present`. Screen readers skip the swatch."""

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
        (style.words or label, draw(30, 12, partial(paint, style), prefix=f"{name}L{row_index}"))
        for row_index, (label, style) in enumerate(styles.items())
        if label in present
    ]
