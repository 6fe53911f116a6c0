"""The report's figures: which marks show what. Each is a set of small panels with common axes.

Series differ by colour, marker and dash, so that colour is never alone in telling them apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dtbench.show.report.svg import FONT_PX, STAND_IN, draw, printable
from dtbench.units import format_size

Dash = tuple[float, ...]
# Of ids in a swatch that is drawn once for all legends.
_PREFIX = "swatch"


@dataclass(frozen=True)
class Style:
    """How a series looks. marker: matplotlib's letter, "" for a line alone. dash: on, off, ... in px."""

    colour: str
    marker: str = "o"
    dash: Dash | None = ()  # () is a solid line, None no line
    hollow: bool = False


@dataclass(frozen=True)
class Series:
    """band: the low and the high y at each x, shaded."""

    label: str
    style: Style
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class Panel:
    """One drawing. make: draws it, once, and not at all where the page has no room for it."""

    title: str
    make: Callable[[], Markup]

    @cached_property
    def svg(self) -> Markup:
        return self.make()


def panel(
    title: str, width: float, height: float, paint: Callable[[Canvas], None], *, prefix: str, desc: str
) -> Panel:
    """A panel of this many pixels."""
    return Panel(title, lambda: draw(width, height, paint, prefix=prefix, title=title, desc=desc))


@dataclass(frozen=True)
class LegendItem:
    label: str
    swatch: Markup


@dataclass(frozen=True)
class Row:
    """A line of a dot plot. values: series name -> value, where it was measured. note: at its right end.
    spans: series name -> from where to where, drawn as a thin line through the mark."""

    label: str
    values: Mapping[str, float]
    note: str = ""
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """A common axis of all panels. format: value -> tick label."""

    low: float
    high: float
    log: bool
    format: Callable[[float], str]
    ticks: Sequence[float] = ()

    def apply(self, axes: Axes, which: str) -> None:
        scale, limit = getattr(axes, f"set_{which}scale"), getattr(axes, f"set_{which}lim")
        axis = getattr(axes, f"{which}axis")
        scale("log" if self.log else "linear")
        limit(self.low, self.high)
        axis.set_major_locator(FixedLocator([t for t in self.ticks if self.low <= t <= self.high]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: self.format(value)))


# ------------------------------------------------------------------------------------------- axes


def value_axis(
    values: Sequence[float], format_tick: Callable[[float], str], *, log: bool | None = None, most: int = 5
) -> Axis:
    """An axis that holds all values. log None: by the spread, logarithmic beyond a factor of 12."""
    low, high = min(values), max(values)
    if log is None:
        log = high > 12 * low
    if not log:
        step = nice_step(high / most)
        ticks = [k * step for k in range(math.ceil(high / step) + 1)]
        return Axis(0.0, high * 1.06, False, format_tick, ticks)
    room = max((high / low) ** 0.06, 1.15)
    low, high = low / room, high * room
    return Axis(low, high, True, format_tick, log_ticks(low, high, most))


def size_axis(sizes: Sequence[int], most: int = 5) -> Axis:
    """A logarithmic axis of sizes in bytes, ticks at every so many of the measured ones."""
    ordered = sorted(set(sizes))
    step = max(1, math.ceil(len(ordered) / most))
    room = max((ordered[-1] / ordered[0]) ** 0.05, 1.2)
    return Axis(ordered[0] / room, ordered[-1] * room, True, lambda v: format_size(round(v)), ordered[::step])


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """At most so many round numbers: 1-2-5, else 1-3, else powers of ten, else every second one, ..."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits, stride in (((1, 2, 5), 1), ((1, 3), 1), *(((1,), k) for k in range(1, last - first + 2))):
        ticks = [d * 10.0**k for k in range(first, last + 1, stride) for d in digits]
        ticks = [t for t in ticks if low <= t <= high]
        if len(ticks) <= most:
            break
    return ticks


def nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(d * power for d in (1, 2, 5, 10) if d * power >= rough * (1 - 1e-9))


# ------------------------------------------------------------------------------------------ panels

# Width and height of a line panel by the columns of its figure, so that text has one size on the page.
PANEL_PX = {2: (430.0, 245.0), 3: (330.0, 220.0)}
DOTS_PX = 430.0
ROW_PX = 18.0
SHADE_OPACITY = 0.09
BAND_OPACITY = 0.18  # lines and marks stay legible on it, in light and in dark


def line_panel(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    columns: int,
    prefix: str,
    desc: str,
    shade: tuple[float, float] | None = None,
    level: float | None = None,
) -> Panel:
    """Lines over a common pair of axes. shade: a range of x that is marked. level: a y that is marked."""
    width, height = PANEL_PX[columns]

    def paint(canvas: Canvas) -> None:
        axes = axes_in(canvas, width, height, left=62, right=14, top=10, bottom=26)
        if shade is not None:
            axes.axvspan(*shade, color=STAND_IN["muted"], alpha=SHADE_OPACITY, linewidth=0, zorder=0)
        if level is not None:
            axes.axhline(level, color=STAND_IN["ink"], linewidth=1.0, zorder=1.5)
        for one in series:
            if one.band is not None:
                colour = STAND_IN[one.style.colour]
                axes.fill_between(one.x, *one.band, color=colour, alpha=BAND_OPACITY, linewidth=0)
            axes.plot(one.x, one.y, clip_on=False, **look_of(one.style))
        x.apply(axes, "x")
        y.apply(axes, "y")

    return panel(title, width, height, paint, prefix=prefix, desc=desc)


def dot_panel(
    title: str, rows: Sequence[Row], styles: Mapping[str, Style], x: Axis, *, prefix: str, desc: str
) -> Panel:
    """One line per row, a mark per series; the two compared series are joined to show their distance."""
    left = min(24 + 6.2 * max(len(row.label) for row in rows), 190.0)
    right = 14 + 6.2 * max(len(row.note) for row in rows)
    height = ROW_PX * len(rows) + 34

    def paint(canvas: Canvas) -> None:
        axes = axes_in(canvas, DOTS_PX, height, left=left, right=right, top=6, bottom=28)
        joined = [name for name in styles if name in ("core", "torch")]
        for place, row in enumerate(rows):
            ends = [row.values[name] for name in joined if name in row.values]
            if len(ends) == 2:
                axes.plot(ends, [place] * 2, color=STAND_IN["muted"], linewidth=1.0, zorder=1.5)
            axes.annotate(
                printable(row.note),
                (1, place),
                (6, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                color=STAND_IN["muted"],
                fontsize=FONT_PX,
            )
        for name, style in styles.items():
            for place, row in enumerate(rows):
                if name in row.spans and name in row.values:
                    axes.plot(
                        row.spans[name], [place] * 2, color=STAND_IN[style.colour], linewidth=1.1, zorder=2
                    )
            marks = [(row.values[name], place) for place, row in enumerate(rows) if name in row.values]
            if marks:
                # Open marks are see-through, or the one drawn last would hide its equal.
                look = look_of(style) | {"linestyle": "none", "markersize": 8 if style.marker == "|" else 5}
                if style.hollow:
                    look["markerfacecolor"] = "none"
                axes.plot(*zip(*marks, strict=True), zorder=2.5, **look)
        x.apply(axes, "x")
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), [printable(cut(row.label, 30)) for row in rows])
        axes.tick_params(axis="y", length=0, labelcolor=STAND_IN["ink"], labelsize=FONT_PX)
        axes.grid(axis="y", linewidth=0.35)

    return panel(title, DOTS_PX, height, paint, prefix=prefix, desc=desc)


def axes_in(
    canvas: Canvas, width: float, height: float, *, left: float, right: float, top: float, bottom: float
) -> Axes:
    """Axes with margins in pixels."""
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    axes = canvas.add_axes(box)
    axes.tick_params(length=3, pad=4)
    return axes


def look_of(style: Style) -> dict[str, Any]:
    colour = STAND_IN[style.colour]
    if style.dash is None:
        line: Any = "none"
    else:
        line = (0, style.dash) if style.dash else "-"
    return {
        "color": colour,
        "marker": style.marker or "none",
        "linestyle": line,
        "markerfacecolor": STAND_IN["surface"] if style.hollow else colour,
        "markeredgecolor": colour,
        "markeredgewidth": 1.4,
    }


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# ------------------------------------------------------------------------------------------ legend


def legend(styles: Mapping[str, Style], *, prefix: str, lines: bool = True) -> list[LegendItem]:
    """A swatch per series, drawn by the same code as the figure. lines False: the marks alone."""
    return [
        LegendItem(label, Markup(_swatch_of(style, lines).replace(_PREFIX, f"{prefix}{index}")))
        for index, (label, style) in enumerate(styles.items())
    ]


@lru_cache(maxsize=256)
def _swatch_of(style: Style, lines: bool) -> str:
    def paint(canvas: Canvas) -> None:
        axes = canvas.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, 30)
        axes.set_ylim(-6, 6)
        look = look_of(style)
        if lines and look["linestyle"] != "none":
            axes.plot([1, 29], [0, 0], **(look | {"marker": "none"}))
        if style.marker:
            axes.plot([15], [0], **look, markersize=9 if style.marker == "|" else 5)

    return str(swatch(paint, _PREFIX))


def swatch(paint: Callable[[Canvas], None], prefix: str) -> Markup:
    """30 x 12 pixels beside a legend's words; nothing for a screen reader, which has the words."""
    svg = draw(30, 12, paint, prefix=prefix, title="", desc="")
    hidden = re.sub(r'role="img"(.*?) aria-labelledby="[^"]*"', r'aria-hidden="true"\1', str(svg), count=1)
    return Markup(re.sub(r"<title.*?</desc>", "", hidden, count=1))


def seconds_tick(value: float) -> str:
    for name, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale * 0.999:
            return f"{value / scale:g} {name}"
    return f"{value / 1e-9:g} ns" if value else "0"


def bandwidth_tick(value: float) -> str:
    """GB = 10^9 bytes, as everywhere in dtbench but the cost model."""
    for name, scale in (("GB/s", 1e9), ("MB/s", 1e6)):
        if value >= scale * 0.999:
            return f"{value / scale:g} {name}"
    return f"{value / 1e3:g} kB/s" if value else "0"
