"""Axes of the figures: their range, their ticks and how these are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, combinations, pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from dtbench.fields import MIN_POSITIVE
from dtbench.reporting.html.svg import FONT_PX, STAND_IN, text_px
from dtbench.text.units import format_bytes, format_size

Format = Callable[[float], str]
TICK_GAP_PX = 6.0
# GB = 10^9 bytes, as everywhere in dtbench but the cost model.
seconds_tick: Format = EngFormatter("s")
bandwidth_tick: Format = EngFormatter("B/s")


@dataclass(frozen=True)
class Axis:
    """An axis that panels have in common. format: value -> tick label. ticks: sets of them, of which the first that has
    room for its labels is drawn. title: what it measures; ticks have units."""

    low: float
    high: float
    log: bool
    format: Format
    ticks: Sequence[Sequence[float]] = ()
    title: str = ""

    def apply(self, axes: Axes, which: str) -> None:
        axis, across = getattr(axes, f"{which}axis"), which == "x"
        getattr(axes, f"set_{which}scale")("log" if self.log else "linear")
        getattr(axes, f"set_{which}lim")(self.low, self.high)
        axis.set_major_locator(FixedLocator(self.spaced_ticks(axes, across)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: self.format(value)))
        if across:
            axes.set_xlabel(self.title, labelpad=5)
        elif self.title:  # above the axis, where it takes no width
            axes.annotate(
                self.title,
                (0, 1),
                (6, 7),
                xycoords=("figure fraction", "axes fraction"),
                textcoords="offset points",
                va="bottom",
                color=STAND_IN["muted"],
                annotation_clip=False,
            )

    @cached_property
    def _inside(self) -> list[list[float]]:
        return [[t for t in ticks if self.low <= t <= self.high] for ticks in self.ticks]

    def spaced_ticks(self, axes: Axes, across: bool) -> Sequence[float]:
        """The first set of three ticks or more whose labels have a gap between them; else of the largest set the three,
        two or one that lie farthest apart."""
        box, place = axes.get_position(), math.log if self.log else float
        width, height = 72 * axes.get_figure(root=True).get_size_inches()  # type: ignore[union-attr]
        scale = (box.width * width if across else box.height * height) / (place(self.high) - place(self.low))

        def gap_px(ticks: Sequence[float]) -> float:
            room = [text_px(self.format(t)) + TICK_GAP_PX if across else FONT_PX for t in ticks]
            ends = zip(pairwise(map(place, ticks)), pairwise(room), strict=True)
            return min((scale * (b - a) - sum(of) / 2 for (a, b), of in ends), default=0.0)

        fewer = (max(combinations(max(self._inside, key=len), n), key=gap_px, default=()) for n in (3, 2, 1))
        sets = chain((ticks for ticks in self._inside if len(ticks) > 2), fewer)
        return next((ticks for ticks in sets if ticks and gap_px(ticks) >= 0), ())

    def width_px(self) -> float:
        """Of the widest label of its ticks."""
        return max((text_px(self.format(t)) for ticks in self._inside for t in ticks), default=0.0)


def value_axis(
    values: Sequence[float], format_tick: Format = seconds_tick, *, title: str = "", log: bool = True
) -> Axis:
    """An axis from 0 on that holds all values. log: whether it may be logarithmic, beyond a factor of 12."""
    low, high = min(values), max(values)
    if log and high > 12 * low > 0:
        return log_axis(values, format_tick, title=title)
    high = high if high >= MIN_POSITIVE else 1.0  # where all are 0, it has a length nevertheless
    return Axis(0.0, high * 1.06, False, format_tick, round_ticks(0.0, high), title)


def log_axis(
    values: Sequence[float], format_tick: Format, *, ticks: Sequence[Sequence[float]] = (), title: str = ""
) -> Axis:
    """A logarithmic axis that holds all values. ticks: as of `Axis`; else by how far it reaches."""
    low, high = min(values), max(values)
    room = max((high / low) ** 0.05, 1.05)
    low, high = low / room, high * room
    fitting = round_ticks(low, high) if high / low < 10 else _log_ticks(low, high)
    return Axis(low, high, True, format_tick, ticks or fitting, title)


def size_axis(sizes: Sequence[int], title: str) -> Axis:
    """A logarithmic axis of sizes in bytes, at most four ticks at powers of two between the measured ones; where they
    are too near each other for three, at round numbers of KiB, MiB, ..."""
    low, high = min(sizes), max(sizes)
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    fewest = max(1, math.ceil((math.log2(high) - math.log2(low) + 1) / 4))
    sets = [[2.0**power for power in powers[::step]] for step in range(fewest, fewest + 3)]
    unit = 1024.0 ** (math.floor(math.log2(high)) // 10)
    if low < high <= 4 * low:
        sets += [[t * unit for t in ticks] for ticks in round_ticks(low / unit, high / unit)]
    return log_axis(sizes, _size_tick, ticks=sets, title=title)


def _size_tick(value: float) -> str:
    """Exactly where that is short: 64 KiB; else rounded: 31.99 MiB."""
    exact = format_size(round(value))
    return exact if len(exact) <= 8 else format_bytes(value)


def round_ticks(low: float, high: float) -> list[list[float]]:
    """Sets of at most six, the densest first; then one more dense, for a range in which these have less than three."""
    locators = (MaxNLocator(most, steps=[1, 2, 5, 10]) for most in (5, 4, 3, 2, 8))
    return [list(map(float, of.tick_values(low, high))) for of in locators]


def _log_ticks(low: float, high: float, most: int = 6) -> list[list[float]]:
    """Sets of at most so many round numbers, the densest first: 1-2-5, 1-3, powers of ten, every second one, ..."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = [((1, 2, 5), 1), ((1, 3), 1), *(((1,), stride) for stride in range(1, last - first + 2))]
    sets = [[d * 10.0**k for k in range(first, last + 1, stride) for d in of] for of, stride in digits]
    sets = [[t for t in ticks if low <= t <= high] for ticks in sets]
    return [ticks for ticks in sets if len(ticks) <= most]


# Of values over sizes, which span decades.
times_axis = partial(log_axis, format_tick=seconds_tick, title="time per call")
bandwidths_axis = partial(log_axis, format_tick=bandwidth_tick, title="bus bandwidth")
