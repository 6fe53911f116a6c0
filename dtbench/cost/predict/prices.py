"""What one collective takes on a mesh dim of the topology, also over more ranks than were measured there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dtbench.cost.price import BEYOND_HALF_WIDTH, Price, around, price, ring_us


def estimate(dim: Mapping[str, Any], collective: str, ranks: int, size_bytes: int) -> Price:
    """One of the RING_COLLECTIVES on a dim of the topology. ranks: of a group, at least 2.

    Over other ranks than measured, the measured time is multiplied by the ratio that a ring with the dim's
    bandwidth and latency per hop has, and its interval widens by every doubling of ranks as much as by a
    doubling of size.
    """
    measured = dim["ranks"]
    curve = dim["collectives"].get(collective)
    at = _by_formula(dim, collective, size_bytes) if curve is None else price(curve, size_bytes)
    factor = ranks / measured
    if factor == 1:
        return at
    scale = ring_us(collective, size_bytes, ranks, dim) / ring_us(collective, size_bytes, measured, dim)
    half_width = max(math.log(at.high_us / at.time_us), math.log(at.time_us / at.low_us))
    per_doubling = max(half_width / (1 + math.log2(at.size_factor)), BEYOND_HALF_WIDTH)
    half_width += per_doubling * abs(math.log2(factor))
    return around(at.time_us * scale, half_width, at.size_factor, factor, at.by_formula)


def _by_formula(dim: Mapping[str, Any], collective: str, size_bytes: int) -> Price:
    """The ring's time over as many ranks as were measured, as far off as the worst point of its fit."""
    smallest, largest = dim["fitted_on"]["size_bytes"]
    beyond = max(1.0, size_bytes / largest, smallest / size_bytes)
    half_width = max(math.log(dim["residuals"]["worst_ratio"]), BEYOND_HALF_WIDTH) * (1 + math.log2(beyond))
    time_us = ring_us(collective, size_bytes, dim["ranks"], dim)
    return around(time_us, half_width, beyond, by_formula=True)
