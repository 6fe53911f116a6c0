"""The price of a curve of the topology file, with the interval that one new launch would measure.

The time is the core's (`dtbench_core.cost.curve`). Beyond the table a price is flagged, and its interval widens
by every doubling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtbench_core.cost.curve import Curve
from dtbench_core.cost.ring import Ring

# Half width of the interval per doubling beyond the table, at least: covers 82 to 100 % of what 56
# public curves measured at 2, 4 and 16 times the size they were cut off at.
BEYOND_HALF_WIDTH = math.log(1.2)
MAX_HALF_WIDTH = 20.0  # a factor of e^20 says that nothing is known, and can be computed with


@dataclass(frozen=True)
class Price:
    """Microseconds; low and high: 90 % interval of what one new launch would measure, where both factors are 1.

    size_factor: how far the size lies outside the measured ones; 1 inside.
    ranks_factor: ranks / measured ranks.
    by_formula: the collective was not measured on this dim; torch's ring formula with the dim's constants.
    """

    time_us: float
    low_us: float
    high_us: float
    size_factor: float = 1.0
    ranks_factor: float = 1.0
    by_formula: bool = False

    @property
    def extrapolated(self) -> bool:
        return self.size_factor > 1 or self.ranks_factor != 1 or self.by_formula


def price(curve: Mapping[str, Any], size_bytes: float) -> Price:
    """The price at one size of a curve of the topology file.

    size_bytes: the tensor as one group holds it, at least 1.

    Raises:
        ValueError: a size below 1.
    """
    if not size_bytes >= 1:
        raise ValueError(f"got size_bytes={size_bytes}: expected at least 1")
    table = curve["table"]
    smallest, largest = table[0]["size_bytes"], table[-1]["size_bytes"]
    time_us = times_of(curve).us(size_bytes)
    if smallest <= size_bytes <= largest:
        return Price(
            time_us, times_of(curve, "low_us").us(size_bytes), times_of(curve, "high_us").us(size_bytes)
        )
    above = size_bytes > largest
    nearest, beyond = (table[-1], size_bytes / largest) if above else (table[0], smallest / size_bytes)
    own = max(nearest["high_us"] / nearest["time_us"], nearest["time_us"] / nearest["low_us"])
    return around(time_us, max(math.log(own), BEYOND_HALF_WIDTH) * (1 + math.log2(beyond)), beyond)


def times_of(curve: Mapping[str, Any], column: str = "time_us") -> Curve:
    """A column of a curve's table over size."""
    table = curve["table"]
    return Curve(tuple(row["size_bytes"] for row in table), tuple(row[column] for row in table))


def around(
    time_us: float, half_width: float, size_factor: float, ranks_factor: float = 1.0, by_formula: bool = False
) -> Price:
    """A price whose interval reaches so far to either side, in the logarithm."""
    spread = math.exp(min(half_width, MAX_HALF_WIDTH))
    return Price(time_us, time_us / spread, time_us * spread, size_factor, ranks_factor, by_formula)


def ring_us(collective: str, size_bytes: float, ranks: int, constants: Mapping[str, Any]) -> float:
    """Microseconds by the ring formula, with a bandwidth and a latency as a topology file names them."""
    ring = Ring(ranks, constants["bandwidth_GiBps"], constants["latency_us_per_hop"])
    return ring.collective_us(collective, size_bytes)
