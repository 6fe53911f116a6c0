"""Axes of the figures: their range, their ticks and how these are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from dtbench.reporting.html.svg import FONT_PX, STAND_IN, text_px
from dtbench.suite.fields import MIN_POSITIVE
from dtbench.text.units import format_bytes, format_size

Format = Callable[[float], str]
TICK_GAP_PX = 6.0
# GB = 10^9 bytes, as everywhere in dtbench but the cost model.
seconds_tick: Format = EngFormatter("s")
bandwidth_tick: Format = EngFormatter("B/s")


@dataclass(frozen=True)
class Axis:
    """An axis that panels have in common. format: value -> tick label. title: what it measures; ticks have units."""

    low: float
    high: float
    log: bool
    format: Format
    ticks: Sequence[float] = ()
    title: str = ""

    def apply(self, axes: Axes, which: str) -> None:
        axis, across = getattr(axes, f"{which}axis"), which == "x"
        getattr(axes, f"set_{which}scale")("log" if self.log else "linear")
        getattr(axes, f"set_{which}lim")(self.low, self.high)
        axis.set_major_locator(FixedLocator(self._spaced_ticks(axes, across)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: self.format(value)))
        if across:
            axes.set_xlabel(self.title, labelpad=5)
        elif self.title:  # above the axis, where it takes no width
            place = {"xycoords": ("figure fraction", "axes fraction"), "textcoords": "offset points"}
            look = {"va": "bottom", "color": STAND_IN["muted"], "annotation_clip": False}
            axes.annotate(self.title, (0, 1), (6, 7), **place, **look)  # type: ignore[arg-type]

    @property
    def _ticks_inside(self) -> list[float]:
        return [t for t in self.ticks if self.low <= t <= self.high]

    def _spaced_ticks(self, axes: Axes, across: bool) -> Sequence[float]:
        """Every second tick, every third, ... as far as their labels need it to have a gap between them."""
        box, ticks, place = axes.get_position(), self._ticks_inside, math.log if self.log else float
        width, height = 72 * axes.get_figure(root=True).get_size_inches()  # type: ignore[union-attr]
        scale = (box.width * width if across else box.height * height) / (place(self.high) - place(self.low))
        room = [(text_px(self.format(t)) + TICK_GAP_PX if across else FONT_PX) / 2 for t in ticks]
        spans = [(scale * place(t), half) for t, half in zip(ticks, room, strict=True)]
        for step in range(1, len(ticks)):
            if all(b - a >= below + above for (a, below), (b, above) in pairwise(spans[::step])):
                return ticks[::step]
        return ticks[:1]

    def width_px(self) -> float:
        """Of the widest label of its ticks."""
        return max((text_px(self.format(t)) for t in self._ticks_inside), default=0.0)


def value_axis(
    values: Sequence[float], format_tick: Format = seconds_tick, *, title: str = "", log: bool = True
) -> Axis:
    """An axis from 0 on that holds all values. log: whether it may be logarithmic, beyond a factor of 12."""
    low, high = min(values), max(values)
    if log and high > 12 * low > 0:
        return log_axis(values, format_tick, title=title)
    high = high if high >= MIN_POSITIVE else 1.0  # where all are 0, it has a length nevertheless
    return Axis(0.0, high * 1.06, False, format_tick, round_ticks(0.0, high, 5), title)


def log_axis(
    values: Sequence[float], format_tick: Format, *, ticks: Sequence[float] = (), title: str = ""
) -> Axis:
    """A logarithmic axis that holds all values. ticks: else by how far it reaches."""
    low, high = min(values), max(values)
    room = max((high / low) ** 0.05, 1.05)
    low, high = low / room, high * room
    fitting = round_ticks(low, high, 8) if high / low < 8 else _log_ticks(low, high, 6)
    return Axis(low, high, True, format_tick, ticks or fitting, title)


def size_axis(sizes: Sequence[int], title: str) -> Axis:
    """A logarithmic axis of sizes in bytes, at most four ticks at powers of two between the measured ones."""
    low, high = min(sizes), max(sizes)
    powers = range(round(math.log2(low)), round(math.log2(high)) + 1)
    ticks = [2.0**power for power in powers[:: max(1, math.ceil(len(powers) / 4))]]
    return log_axis(sizes, _size_tick, ticks=ticks, title=title)


def _size_tick(value: float) -> str:
    """Exactly where that is short: 64 KiB; else rounded: 31.99 MiB."""
    exact = format_size(round(value))
    return exact if len(exact) <= 8 else format_bytes(value)


def round_ticks(low: float, high: float, most: int) -> Sequence[float]:
    return list(map(float, MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)))


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """At most so many round numbers: 1-2-5, else 1-3, else powers of ten, else every second one, ..."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits, stride in (((1, 2, 5), 1), ((1, 3), 1), *(((1,), k) for k in range(1, last - first + 2))):
        ticks = [d * 10.0**k for k in range(first, last + 1, stride) for d in digits]
        ticks = [t for t in ticks if low <= t <= high]
        if len(ticks) <= most:
            break
    return ticks


# Of values over sizes, which span decades.
times_axis = partial(log_axis, format_tick=seconds_tick, title="time per call")
bandwidths_axis = partial(log_axis, format_tick=bandwidth_tick, title="bus bandwidth")
