"""Formats numbers with units: seconds, bytes, bandwidths and ratios.

Sizes use powers of 1024 (KiB, MiB), bandwidths powers of 1000 (GB/s), like nccl-tests. GiB and GB differ by 7.4%, so
the unit is always exact.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MISSING = "–"
_TIMES = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
_BANDWIDTHS = (("kB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9))
_SIZES = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))


@dataclass(frozen=True)
class Unit:
    """A unit for a column of values."""

    name: str
    scale: float

    def format(self, value: float | None) -> str:
        """Formats the value with four significant digits and without the unit's name; "-" for None."""
        return "-" if value is None else significant(value / self.scale)


def time_unit(values_s: Iterable[float]) -> Unit:
    """Returns the unit in which most of these times are at least 1."""
    return _unit_for(values_s, _TIMES)


def bandwidth_unit(values_Bps: Iterable[float]) -> Unit:  # noqa: N803 - bytes per second
    """Returns the unit in which most of these bandwidths are at least 1."""
    return _unit_for(values_Bps, _BANDWIDTHS)


def format_seconds(seconds: float | None) -> str:
    """Formats a time, e.g. "8.21 µs"; "-" for None."""
    return "-" if seconds is None else _with_unit(seconds, _TIMES)


def format_bandwidth(value_Bps: float | None) -> str:  # noqa: N803 - bytes per second
    """Formats a bandwidth, e.g. "12.5 GB/s" (10^9); "-" for None."""
    return "-" if value_Bps is None else _with_unit(value_Bps, _BANDWIDTHS)


def format_bytes(size_bytes: float | None) -> str:
    """Formats a measured number of bytes with four significant digits, e.g. "64 MiB"; "-" for None."""
    return "-" if size_bytes is None else _with_unit(size_bytes, _SIZES, digits=4)


def format_size(size_bytes: int | None) -> str:
    """Formats a size that identifies a case. It is exact: "64 KiB", "1.5 MiB", or "65537 B" if no unit fits."""
    if size_bytes is None:
        return "-"
    for name, scale in reversed(_SIZES):
        if size_bytes >= scale and size_bytes * 4 % scale == 0:
            # Integers, since a float would round huge sizes.
            count, quarters = divmod(size_bytes * 4 // scale, 4)
            return f"{count}{('', '.25', '.5', '.75')[quarters]} {name}"
    return f"{size_bytes} B"


def format_ratio(ratio: float | None) -> str:
    """Formats a ratio, e.g. "1.03x"; "-" for None."""
    return "-" if ratio is None else f"{significant(ratio, 3)}x"


def format_change(ratio: float) -> str:
    """Describes a ratio of times, e.g. "1.30x slower" or "2.00x faster"."""
    return f"{format_ratio(max(ratio, 1 / ratio))} {'slower' if ratio > 1 else 'faster'}"


def format_difference(ratio: float) -> str:
    """Describes a ratio of times, e.g. "+3.0%"; from a factor of two on, e.g. "2.00x slower"."""
    return f"{ratio - 1:+.1%}" if 0.5 < ratio < 2 else format_change(ratio)


def format_factor(value: float) -> str:
    """Formats a factor, e.g. "0.74×" or "36.9×"."""
    return f"{value:.2f}×" if value < 10 else f"{significant(value, 3)}×"


def format_speedup(ratio: float | None, than: str = "") -> str:
    """Describes a ratio of times: 0.51 is "1.96× faster", 1.1 "1.10× slower", 1.001 "as fast".

    Args:
        than: what the time is compared with, e.g. "torch" for "1.96× faster than torch".
    """
    if ratio is None or ratio <= 0:
        return MISSING
    if format_factor(max(ratio, 1 / ratio)) == "1.00×":
        return f"as fast as {than}" if than else "as fast"
    words = f"{format_factor(1 / ratio)} faster" if ratio <= 1 else f"{format_factor(ratio)} slower"
    return f"{words} than {than}" if than else words


NO_INTERVAL = "no interval"


def format_interval(bounds: tuple[float | None, float | None] | None, separator: str = " .. ") -> str:
    """Formats an interval, e.g. "0.698 .. 0.702", with enough digits to distinguish its ends.

    It is "no interval" if there are no bounds or they do not differ.
    """
    if (interval := interval_or_none(*bounds or (None, None))) is None:
        return NO_INTERVAL
    ends = ([significant(end, digits) for end in interval] for digits in range(3, 12))
    return separator.join(next(pair for pair in ends if pair[0] != pair[1]))


def interval_or_none(low: float | None, high: float | None) -> tuple[float, float] | None:
    """Returns the bounds if both are finite and differ by more than rounding, else None."""
    if low is None or high is None or not math.isfinite(high - low) or high - low <= 1e-9 * abs(high):
        return None
    return low, high


def format_spread(spread: float | None) -> str:
    """Formats the relative distance of the upper quartile above an estimate, e.g. "+4%"; "-" for None."""
    if spread is None:
        return "-"
    return f"+{spread:.0%}" if spread < 10 else f"{significant(spread + 1, 2)}x"


def plural(count: int, noun: str) -> str:
    """Formats a count with its noun, e.g. "1 case" or "2 cases"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def significant(value: float, digits: int = 4) -> str:
    """Formats a value with `digits` significant digits and without rounding its integer part.

    Only values with dozens of zeros, which no measured value has, are written with an exponent.
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if not 1e-15 <= abs(value) < 1e30:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{value:.{max(decimals, 0)}f}"
    # Rounding up may add a digit before the decimal point: 9.9996 -> "10.000".
    if decimals > 0 and len(text.lstrip("-0.").replace(".", "")) > digits:
        text = f"{value:.{decimals - 1}f}"
    return text


def _unit_for(values: Iterable[float], units: tuple[tuple[str, float], ...]) -> Unit:
    typical_value = typical(values)
    return Unit(*units[-1]) if typical_value is None else Unit(*_largest(typical_value, units))


def typical(values: Iterable[float]) -> float | None:
    """Returns the value that determines the unit and digits of a column, the lower quartile of the positive values.

    The smallest value would not do: a sweep over sizes spans decades, and the large values would get too many digits.
    None if no value is positive.
    """
    positive = sorted(v for v in values if v > 0 and math.isfinite(v))
    return positive[len(positive) // 4] if positive else None


def _largest(value: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    """Returns the largest unit in which `value` is at least 1, up to rounding."""
    return max(
        (unit for unit in units if unit[1] <= value * (1 + 1e-9)), key=lambda u: u[1], default=units[0]
    )


def _with_unit(value: float, units: tuple[tuple[str, float], ...], digits: int = 3) -> str:
    name, scale = _largest(abs(value), units)
    if scale == 1 and name == "B":
        return f"{value:.0f} B"
    return f"{significant(value / scale, digits)} {name}"
