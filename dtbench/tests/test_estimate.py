"""Estimates of a collective on a calibrated mesh dim, within its curve and outside it."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from msgspec import structs

from dtbench.cost.estimate import estimate_call, estimate_collective
from dtbench.records.topology import CalibratedTopology, Residuals
from dtbench.tests.made_up_topology import a_dim, a_topology, curve_of, ring_dim
from dtbench_core.cost.topology import read_curve

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
# dim -> ranks, GiB/s, us per hop
DIMS = {"dp": (4, 20.0, 10.0), "tp": (8, 150.0, 2.0)}
KIB = 1024
SIZES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB]
TIMES = [100.0, 110.0, 150.0, 310.0, 950.0]


def topology() -> CalibratedTopology:
    return a_topology(*(ring_dim(name, *of, *COLLECTIVES) for name, of in DIMS.items()))


# ------------------------------------------------------------------------------------- by its curve


def straight_lines_us(rows: list[tuple[int, float]], size: float) -> float:
    """The rule of the file's `price_of_a_table` by exact fractions, without the program's own functions: between
    rows a line; beyond them the slope of the factor of 4 at that end, within what is in proportion to size."""
    if rows[0][0] <= size <= rows[-1][0]:
        return float(np.interp(size, *zip(*rows, strict=True)))
    end = rows[-1] if size > rows[-1][0] else rows[0]
    far = [
        row
        for row in (rows if end is rows[-1] else rows[::-1])
        if max(row[0], end[0]) >= 4 * min(row[0], end[0]) and row[1] != end[1]
    ]
    other = far[-1] if far else (rows[0] if end is rows[-1] else rows[-1])
    share = Fraction(end[1]) / end[0]
    slope = Fraction(end[1] - other[1]) / (end[0] - other[0]) if other != end else share * (size > end[0])
    us = end[1] + (Fraction(size) - end[0]) * min(slope, share)
    return float(us)


def test_core_and_dtbench_interpolate_tables_alike() -> None:
    rng = np.random.default_rng(6)
    for _ in range(30):
        sizes = sorted(set((2 ** rng.uniform(3, 30, rng.integers(1, 9))).astype(int).tolist()))
        times = np.sort(np.exp(rng.normal(4, 2, len(sizes)))).round(0).clip(1).tolist()
        curve = curve_of(sizes, times)
        core = read_curve(msgspec.json.decode(msgspec.json.encode(curve)), "curve")
        for size in 2 ** rng.uniform(0, 36, 30):
            expected = straight_lines_us(list(zip(sizes, times, strict=True)), float(size))
            assert core.us(size) == pytest.approx(expected, rel=1e-9)
            assert estimate_call(curve, size).time_us == pytest.approx(expected, rel=1e-9)


def test_estimates_are_monotone_and_continuous() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        sizes = sorted(set((2 ** rng.uniform(3, 30, rng.integers(1, 9))).astype(int).tolist()))
        curve = curve_of(sizes, np.sort(np.exp(rng.normal(4, 2, len(sizes)))).tolist())
        got = [estimate_call(curve, size) for size in np.geomspace(1, 2**34, 200)]
        prices = np.array([p.time_us for p in got])
        assert (np.diff(prices) >= -1e-9 * prices[:-1]).all() and (prices > 0).all()
        assert all(p.low_us <= p.time_us <= p.high_us for p in got)
        for end in (sizes[0], sizes[-1]):
            before, after = (estimate_call(curve, end * (1 + sign * 1e-12)).time_us for sign in (-1, 1))
            assert before == pytest.approx(after, rel=1e-6)


def test_intervals_widen_with_every_doubling_outside_the_table() -> None:
    curve = curve_of(SIZES, TIMES, spread=1.5)
    inside = estimate_call(curve, 40 * KIB)
    assert (inside.low_us, inside.time_us, inside.high_us) == pytest.approx((230 / 1.5, 230, 230 * 1.5))
    for times, size in ((1, 256), (2, 512), (4, 1024), (16, 4096)):
        got = estimate_call(curve, size * KIB)
        assert math.log(got.high_us / got.time_us) == pytest.approx(math.log(1.5) * (1 + math.log2(times)))
        assert got.low_us * got.high_us == pytest.approx(got.time_us**2)
        assert (got.size_factor, got.extrapolated) == (times, times > 1)
    # A narrow table does not make what was never measured certain.
    narrow = estimate_call(curve_of(SIZES, TIMES, spread=1.001), 512 * KIB)
    assert narrow.high_us / narrow.time_us == pytest.approx(1.2**2)


@pytest.mark.parametrize("size", [0, -1, 0.5, math.nan])
def test_estimate_call_refuses_sizes_below_1(size: float) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        estimate_call(curve_of(SIZES, TIMES), size)


# ------------------------------------------------------------------------------- beyond it by the ring


def test_estimates_for_other_ranks_follow_the_ring() -> None:
    """The made-up curves are the ring's own, so scaling them has to give the ring's time at any size and ranks."""
    for (measured, bandwidth, us), dim in zip(DIMS.values(), topology().dims, strict=True):
        for ranks, size in itertools.product((2, measured, measured * 16, 4096), (1024, 2**26)):
            at = estimate_collective(dim, "all_gather", ranks, size)
            ring = 6.6 + (ranks - 1) * us + size / 2**30 * (ranks - 1) / ranks / bandwidth * 1e6
            assert at.time_us == pytest.approx(ring)
            assert at.ranks_factor == ranks / measured and at.extrapolated == (ranks != measured)


def test_ring_scales_measured_times() -> None:
    slow = a_dim("tp", 8, 150.0, 2.0, collectives={"all_reduce": curve_of((2**26,), (9000.0,))})
    ring = [6.6 + 2 * (n - 1) * 2 + 2**-4 * 2 * (n - 1) / n / 150 * 1e6 for n in (8, 32)]
    got = estimate_collective(slow, "all_reduce", 32, 2**26).time_us
    assert got == pytest.approx(9000 * ring[1] / ring[0])


def test_intervals_widen_with_doublings_of_ranks_and_size() -> None:
    dim = topology().dims[1]
    by_ranks = [estimate_collective(dim, "all_gather", 8 * 2**k, 2**20) for k in range(6)]
    by_size = [estimate_collective(dim, "all_gather", 8, 2 ** (30 + k)) for k in range(6)]
    for estimates in (by_ranks, by_size):
        widths = [math.log(e.high_us / e.low_us) for e in estimates]
        steps = [b - a for a, b in itertools.pairwise(widths)]
        assert steps == pytest.approx([2 * math.log(1.2)] * 5)  # the made-up curves' half width is log 1.2
    both = estimate_collective(dim, "all_gather", 16, 2**31)
    assert math.log(both.high_us / both.low_us) == pytest.approx(2 * math.log(1.2) * 3)


def test_unmeasured_collectives_use_the_formula() -> None:
    dim = a_dim(
        "tp", 8, 150.0, 2.0, residuals=Residuals(geometric_mean_ratio=1.2, worst_ratio=1.5, points=())
    )
    at = estimate_collective(dim, "all_gather", 8, 2**26)
    assert at.time_us == pytest.approx(6.6 + 7 * 2 + 2**-4 * 7 / 8 / 150 * 1e6)
    assert (at.by_formula, at.extrapolated) == (True, True)
    assert at.high_us / at.time_us == pytest.approx(1.5)
    beyond = estimate_collective(dim, "all_gather", 8, 2**32)  # it was fitted up to 1 GiB
    assert (beyond.size_factor, beyond.high_us / beyond.time_us) == (4, pytest.approx(1.5**3))


def test_flat_tables_are_extrapolated_with_slopes_of_other_collectives() -> None:
    """Times of noise alone have no slope: 208 MiB and 1 GiB would cost the same, and win every ranking."""
    flat = structs.replace(curve_of((1024, 2**20, 2**24), (3870.0,) * 3), beta_is_lower_bound=True)
    measured = ring_dim("dp", 4, 20.0, 10.0, "all_gather", "all_reduce")
    dim = structs.replace(measured, collectives=dict(measured.collectives) | {"reduce_scatter": flat})
    at, further = (estimate_collective(dim, "reduce_scatter", 4, size) for size in (208 * 2**20, 2**30))
    per_byte = 3 / 4 / 20 / 2**30 * 1e6  # as the gather's and half the all-reduce's
    assert at.time_us == pytest.approx(3870 + (208 - 16) * 2**20 * per_byte)
    assert further.time_us == pytest.approx(3870 + (2**30 - 2**24) * per_byte)
    own = estimate_collective(measured, "all_gather", 4, 2**34)  # as many doublings beyond its own table
    assert math.log(further.high_us / further.time_us) > 1.5 * math.log(own.high_us / own.time_us)
    assert (
        estimate_collective(dim, "reduce_scatter", 4, 2**20).time_us == 3870
    )  # inside it is what was measured
