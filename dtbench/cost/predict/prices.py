"""What one collective takes on a mesh dim of the topology, also over more ranks than were measured there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtbench.cost.price import BEYOND_HALF_WIDTH, Price, around, price, ring_us


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
    """One of the RING_COLLECTIVES on a dim of the topology. ranks: of a group, at least 2.

    Over other ranks than measured, the measured time is multiplied by the ratio that a ring with the dim's
    bandwidth and latency per hop has, and its interval widens by every doubling of ranks as much as by a
    doubling of size.
    """
    measured = dim["ranks"]
    curve = dim["collectives"].get(collective)
    at = _by_formula(dim, collective, size_bytes) if curve is None else price(curve, size_bytes)
    factor, by_formula = ranks / measured, curve is None
    if factor == 1:
        return Estimate(at.time_us, at.low_us, at.high_us, at.beyond, factor, by_formula)
    scale = ring_us(collective, size_bytes, ranks, dim) / ring_us(collective, size_bytes, measured, dim)
    half_width = max(math.log(at.high_us / at.time_us), math.log(at.time_us / at.low_us))
    per_doubling = max(half_width / (1 + math.log2(at.beyond)), BEYOND_HALF_WIDTH)
    at = around(at.time_us * scale, half_width + per_doubling * abs(math.log2(factor)), at.beyond)
    return Estimate(at.time_us, at.low_us, at.high_us, at.beyond, factor, by_formula)


def _by_formula(dim: Mapping[str, Any], collective: str, size_bytes: int) -> Price:
    """The ring's time over as many ranks as were measured, as far off as the worst point of its fit."""
    smallest, largest = dim["fitted_on"]["size_bytes"]
    beyond = max(1.0, size_bytes / largest, smallest / size_bytes)
    half_width = max(math.log(dim["residuals"]["worst_ratio"]), BEYOND_HALF_WIDTH) * (1 + math.log2(beyond))
    return around(ring_us(collective, size_bytes, dim["ranks"], dim), half_width, beyond)
