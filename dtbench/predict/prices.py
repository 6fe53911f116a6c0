"""What one collective takes on a mesh dim of the topology, also over more ranks than were measured there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtbench.calibration.curve import BEYOND_HALF_WIDTH, MAX_HALF_WIDTH, price
from dtbench.calibration.ring import ring_us


@dataclass(frozen=True)
class Estimate:
    """Microseconds, with a 90 % interval where both factors are 1.

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


def estimate(dim: Mapping[str, Any], collective: str, ranks: int, size_bytes: int) -> Estimate:
    """One collective of `calibration.ring.RING_COLLECTIVES` on a dim of the topology. ranks: of a group, at least 2.

    Over other ranks than measured, the measured time is multiplied by the ratio that a ring with the dim's
    bandwidth and latency per hop has, and its interval widens by every doubling of ranks as it does by
    every doubling of size.
    """
    measured = dim["ranks"]
    curve = dim["collectives"].get(collective)
    if curve is None:
        time_us = ring_us(collective, size_bytes, measured, dim)
        half_width = max(math.log(dim["residuals"]["worst_ratio"]), BEYOND_HALF_WIDTH)
        low, high, size_factor = time_us / math.exp(half_width), time_us * math.exp(half_width), 1.0
    else:
        at = price(curve, size_bytes)
        time_us, low, high, size_factor = at.time_us, at.low_us, at.high_us, at.beyond
    factor = ranks / measured
    if factor != 1:
        scale = ring_us(collective, size_bytes, ranks, dim) / ring_us(collective, size_bytes, measured, dim)
        half_width = max(math.log(high / time_us), math.log(time_us / low), BEYOND_HALF_WIDTH)
        half_width = min(half_width * (1 + abs(math.log2(factor))), MAX_HALF_WIDTH)
        time_us *= scale
        low, high = time_us / math.exp(half_width), time_us * math.exp(half_width)
    return Estimate(time_us, low, high, size_factor, factor, curve is None)
