"""Axes of the figures: range, ticks and tick labels."""

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
# GB = 10^9 bytes, as everywhere in dtbench except in the cost model.
seconds_tick: Format = EngFormatter("s")
bandwidth_tick: Format = EngFormatter("B/s")


@dataclass(frozen=True)
class Axis:
    """An axis, usually shared by several panels.

    Attributes:
        low: lower end.
        high: upper end.
        log: whether the axis is logarithmic.
        format: value -> tick label, with the unit.
        ticks: alternative sets of ticks. The first one with enough room for its labels is drawn.
        title: quantity, without the unit.
    """

    low: float
    high: float
    log: bool
    format: Format
    ticks: Sequence[Sequence[float]] = ()
    title: str = ""

    def apply(self, axes: Axes, name: str) -> None:
        axis, across = getattr(axes, f"{name}axis"), name == "x"
        getattr(axes, f"set_{name}scale")("log" if self.log else "linear")
        getattr(axes, f"set_{name}lim")(self.low, self.high)
        axis.set_major_locator(FixedLocator(self.spaced_ticks(axes, across)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: self.format(value)))
        if across:
            axes.set_xlabel(self.title, labelpad=5)
        elif self.title:  # above the axis, where it needs no additional width
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
        """Returns the first set of at least three ticks whose labels do not touch.

        If there is none, the three, two or one ticks of the largest set that are farthest apart.
        """
        box, to_scale = axes.get_position(), math.log if self.log else float
        width, height = 72 * axes.get_figure(root=True).get_size_inches()  # type: ignore[union-attr]
        scale = (box.width * width if across else box.height * height) / (
            to_scale(self.high) - to_scale(self.low)
        )

        def gap_px(ticks: Sequence[float]) -> float:
            needed_px = [text_px(self.format(t)) + TICK_GAP_PX if across else FONT_PX for t in ticks]
            neighbours = zip(pairwise(map(to_scale, ticks)), pairwise(needed_px), strict=True)
            return min((scale * (b - a) - sum(widths) / 2 for (a, b), widths in neighbours), default=0.0)

        fewer = (max(combinations(max(self._inside, key=len), n), key=gap_px, default=()) for n in (3, 2, 1))
        sets = chain((ticks for ticks in self._inside if len(ticks) > 2), fewer)
        return next((ticks for ticks in sets if ticks and gap_px(ticks) >= 0), ())

    def width_px(self) -> float:
        """Returns the width of the widest tick label."""
        return max((text_px(self.format(t)) for ticks in self._inside for t in ticks), default=0.0)


def value_axis(
    values: Sequence[float], format_tick: Format = seconds_tick, *, title: str = "", log: bool = True
) -> Axis:
    """Returns an axis from 0 that includes all values; a logarithmic one if `log` and they span a factor above 12."""
    low, high = min(values), max(values)
    if log and high > 12 * low > 0:
        return log_axis(values, format_tick, title=title)
    high = high if high >= MIN_POSITIVE else 1.0  # an axis needs a length even if all values are 0
    return Axis(0.0, high * 1.06, False, format_tick, round_ticks(0.0, high), title)


def log_axis(
    values: Sequence[float], format_tick: Format, *, ticks: Sequence[Sequence[float]] = (), title: str = ""
) -> Axis:
    """Returns a logarithmic axis that includes all values. By default, its ticks depend on its range."""
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.05, 1.05)
    low, high = low / margin, high * margin
    return Axis(
        low,
        high,
        True,
        format_tick,
        ticks or (round_ticks(low, high) if high / low < 10 else _log_ticks(low, high)),
        title,
    )


def size_axis(sizes: Sequence[int], title: str) -> Axis:
    """Returns a logarithmic axis of sizes in bytes.

    Ticks are at most four powers of two within the measured range. If the range is too small for three powers of two,
    they are at round numbers of KiB, MiB, ...
    """
    low, high = min(sizes), max(sizes)
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    fewest = max(1, math.ceil((math.log2(high) - math.log2(low) + 1) / 4))
    sets = [[2.0**power for power in powers[::step]] for step in range(fewest, fewest + 3)]
    unit = 1024.0 ** (math.floor(math.log2(high)) // 10)
    if low < high <= 4 * low:
        sets += [[t * unit for t in ticks] for ticks in round_ticks(low / unit, high / unit)]
    return log_axis(sizes, _size_tick, ticks=sets, title=title)


def _size_tick(value: float) -> str:
    """Formats a size exactly if that is short, e.g. "64 KiB", else rounded, e.g. "31.99 MiB"."""
    exact = format_size(round(value))
    return exact if len(exact) <= 8 else format_bytes(value)


def round_ticks(low: float, high: float) -> list[list[float]]:
    """Returns sets of at most six round ticks, the densest first, and a denser one for very small ranges."""
    return [
        list(map(float, MaxNLocator(count, steps=[1, 2, 5, 10]).tick_values(low, high)))
        for count in (5, 4, 3, 2, 8)
    ]


def _log_ticks(low: float, high: float, max_ticks: int = 6) -> list[list[float]]:
    """Returns sets of at most `max_ticks` ticks: 1-2-5, 1-3, powers of ten, every second power of ten, ..."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = [((1, 2, 5), 1), ((1, 3), 1), *(((1,), stride) for stride in range(1, last - first + 2))]
    sets = [
        [t for k in range(first, last + 1, stride) for d in tick_digits if low <= (t := d * 10.0**k) <= high]
        for tick_digits, stride in digits
    ]
    return [ticks for ticks in sets if len(ticks) <= max_ticks]


# Axes of values over sizes, which span decades.
times_axis = partial(log_axis, format_tick=seconds_tick, title="time per call")
bandwidths_axis = partial(log_axis, format_tick=bandwidth_tick, title="bus bandwidth")
