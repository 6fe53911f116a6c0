"""Axes of the figures: their range, their ticks and how these are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dtbench.units import format_seconds, format_size

Format = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """An axis that panels have in common. format: value -> tick label."""

    low: float
    high: float
    log: bool
    format: Format
    ticks: Sequence[float] = ()

    def apply(self, axes: Axes, which: str) -> None:
        axis = getattr(axes, f"{which}axis")
        getattr(axes, f"set_{which}scale")("log" if self.log else "linear")
        getattr(axes, f"set_{which}lim")(self.low, self.high)
        axis.set_major_locator(FixedLocator([t for t in self.ticks if self.low <= t <= self.high]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: self.format(value)))


def value_axis(
    values: Sequence[float], format_tick: Format, *, log: bool | None = None, most: int = 5
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


def length_axis(top: float, format_tick: Format) -> Axis:
    """From 0 to `top` and hardly beyond."""
    return Axis(0, top * 1.01, False, format_tick, value_axis([top], format_tick, log=False).ticks)


def close_axis(values: Sequence[float], middle: float) -> Axis:
    """Of seconds, as near to the values as shows a change of a few percent; it does not begin at 0."""
    low, high = min(*values, 0.95 * middle), max(*values, 1.05 * middle)
    room, step = 0.06 * (high - low), nice_step((high - low) / 4)
    ticks = [k * step for k in range(math.ceil((low - room) / step), math.floor((high + room) / step) + 1)]
    return Axis(low - room, high + room, False, format_seconds, ticks)


def ratio_axis(
    values: Iterable[float], low: float, high: float, format_tick: Format, ticks: Sequence[float] = ()
) -> Axis:
    """A logarithmic axis of ratios that holds all values, `low` and `high`. ticks: else by how far it reaches."""
    there = [*values, low, high]
    room = max((max(there) / min(there)) ** 0.05, 1.05)
    low, high = min(there) / room, max(there) * room
    return Axis(low, high, True, format_tick, ticks or _ratio_ticks(low, high))


def _ratio_ticks(low: float, high: float) -> list[float]:
    if high / low < 1.6:
        return [0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5]
    if high / low < 8:
        return [0.2, 0.25, 0.33, 0.5, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0]
    return log_ticks(low, high, 8)


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


def seconds_tick(value: float) -> str:
    return _tick(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)))


def bandwidth_tick(value: float) -> str:
    """GB = 10^9 bytes, as everywhere in dtbench but the cost model."""
    return _tick(value, (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)))


def _tick(value: float, units: Sequence[tuple[str, float]]) -> str:
    if not value:
        return "0"
    name, scale = next((unit for unit in units if value >= unit[1] * 0.999), units[-1])
    return f"{value / scale:g} {name}"
