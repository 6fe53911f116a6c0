"""How figures are written: seconds, bytes and bandwidths, in this one place.

Sizes count in powers of 1024 (KiB, MiB), bandwidths in powers of 1000 (GB/s), as nccl-tests does:
the two differ by 7.4% at the giga, so the names always say which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_TIMES = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
_BANDWIDTHS = (("kB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9))
_SIZES = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))


@dataclass(frozen=True)
class Unit:
    """A unit for a whole column: `format` gives the figure without the unit's name."""

    name: str
    scale: float

    def format(self, value: float | None) -> str:
        """The value in this unit with four significant digits; "-" for None."""
        return "-" if value is None else significant(value / self.scale)


def time_unit(values_s: Iterable[float]) -> Unit:
    """The unit in which most of these times are at least 1."""
    return _unit_for(values_s, _TIMES)


def bandwidth_unit(values_Bps: Iterable[float]) -> Unit:  # noqa: N803 - bytes per second
    """The unit in which most of these bandwidths are at least 1."""
    return _unit_for(values_Bps, _BANDWIDTHS)


def format_seconds(seconds: float | None) -> str:
    """Such as "8.21 µs"; "-" for None."""
    return "-" if seconds is None else _with_unit(seconds, _TIMES)


def format_bandwidth(value_Bps: float | None) -> str:  # noqa: N803 - bytes per second
    """Such as "12.5 GB/s" (10^9); "-" for None."""
    return "-" if value_Bps is None else _with_unit(value_Bps, _BANDWIDTHS)


def format_bytes(size_bytes: float | None) -> str:
    """Such as "64 MiB", rounded to four digits; "-" for None. For measured amounts such as memory."""
    return "-" if size_bytes is None else _with_unit(size_bytes, _SIZES, digits=4)


def format_size(size_bytes: int | None) -> str:
    """The size exactly: "64 KiB", "1.5 MiB", and "65537 B" where no unit fits. For sizes that name a case."""
    if size_bytes is None:
        return "-"
    for name, scale in reversed(_SIZES):
        if size_bytes >= scale and size_bytes * 4 % scale == 0:
            whole, quarters = divmod(size_bytes * 4 // scale, 4)  # integers: a float would round huge sizes
            return f"{whole}{('', '.25', '.5', '.75')[quarters]} {name}"
    return f"{size_bytes} B"


def format_ratio(ratio: float | None) -> str:
    """Such as "1.03x"; "-" for None."""
    return "-" if ratio is None else f"{significant(ratio, 3)}x"


def format_change(ratio: float) -> str:
    """Of a time over another: "1.30x slower", "2.00x faster"."""
    return f"{format_ratio(max(ratio, 1 / ratio))} {'slower' if ratio > 1 else 'faster'}"


def format_difference(ratio: float) -> str:
    """Of a time over another: "+3.0%", or from twice as slow or fast on as `format_change` says it."""
    return f"{ratio - 1:+.1%}" if 0.5 < ratio < 2 else format_change(ratio)


NO_INTERVAL = "no interval"


def format_interval(bounds: tuple[float | None, float | None] | None, between: str = " .. ") -> str:
    """Such as "0.698 .. 0.702", with as many digits as tell its ends apart; "no interval" where it has no width."""
    if (found := interval_or_none(*bounds or (None, None))) is None:
        return NO_INTERVAL
    ends = ([significant(end, digits) for end in found] for digits in range(3, 12))
    return between.join(next(pair for pair in ends if pair[0] != pair[1]))


def interval_or_none(low: float | None, high: float | None) -> tuple[float, float] | None:
    """The bounds where they bound anything: both are numbers that differ by more than arithmetic rounds off."""
    if low is None or high is None or not math.isfinite(high - low) or high - low <= 1e-9 * abs(high):
        return None
    return low, high


def format_spread(spread: float | None) -> str:
    """Such as "+4%": how far the upper quartile lies above a figure; "-" for None."""
    if spread is None:
        return "-"
    return f"+{spread:.0%}" if spread < 10 else f"{significant(spread + 1, 2)}x"


def plural(count: int, noun: str) -> str:
    """Such as "1 case" and "2 cases"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


_LEAST_PLAIN, _MOST_PLAIN = 1e-15, 1e30


def significant(value: float, digits: int = 4) -> str:
    """`value` with so many significant digits and never a rounded integer part; an exponent only where it would have
    dozens of zeros, which nothing that was measured has."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if not _LEAST_PLAIN <= abs(value) < _MOST_PLAIN:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{value:.{max(decimals, 0)}f}"
    # Rounding up may have brought one digit more before the point: 9.9996 -> "10.000".
    if decimals > 0 and len(text.lstrip("-0.").replace(".", "")) > digits:
        text = f"{value:.{decimals - 1}f}"
    return text


def _unit_for(values: Iterable[float], units: tuple[tuple[str, float], ...]) -> Unit:
    usual = typical(values)
    return Unit(*units[-1]) if usual is None else Unit(*_largest(usual, units))


def typical(values: Iterable[float]) -> float | None:
    """What a column's unit and digits are chosen for: the lower quartile of what is above 0; None of nothing.

    A sweep over sizes spans decades: its smallest value would ask for digits that the largest lacks.
    """
    positive = sorted(v for v in values if v > 0 and math.isfinite(v))
    return positive[len(positive) // 4] if positive else None


def _largest(value: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    """The largest unit in which `value` is at least 1, give or take what arithmetic rounds off."""
    return max((u for u in units if u[1] <= value * (1 + 1e-9)), key=lambda u: u[1], default=units[0])


def _with_unit(value: float, units: tuple[tuple[str, float], ...], digits: int = 3) -> str:
    name, scale = _largest(abs(value), units)
    if scale == 1 and name == "B":
        return f"{value:.0f} B"
    return f"{significant(value / scale, digits)} {name}"
