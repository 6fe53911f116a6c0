"""Estimates of a collective on a calibrated mesh dim, within its curve and outside it."""

import itertools
import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from msgspec import structs

from dtbench.cost.estimate import estimate_call, estimate_collective
from dtbench.records.topology import CalibratedTopology, Residuals
from dtbench.tests.made_up import ring_us
from dtbench.tests.made_up_topology import a_dim, a_topology, curve_of, ring_dim
from dtbench.tests.test_export import module_of
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
    """Returns the price that the file's `price_of_a_table` describes, computed independently with exact fractions.

    Between rows it follows a line. Beyond them it continues with the slope over the last factor of 4, at most in
    proportion to size.
    """
    if rows[0][0] <= size <= rows[-1][0]:
        return float(np.interp(size, *zip(*rows, strict=True)))
    inwards = rows if size > rows[-1][0] else rows[::-1]
    end_size, end_us = inwards[-1]
    far = [row for row in inwards if max(row[0], end_size) >= 4 * min(row[0], end_size) and row[1] != end_us]
    other_size, other_us = far[-1] if far else inwards[0]
    share = Fraction(end_us) / end_size
    has_slope = (other_size, other_us) != (end_size, end_us)
    slope = Fraction(end_us - other_us) / (end_size - other_size) if has_slope else share * (size > end_size)
    return float(end_us + (Fraction(size) - end_size) * min(slope, share))


def test_core_export_and_dtbench_interpolate_tables_alike() -> None:
    rng = np.random.default_rng(6)
    for _ in range(30):
        sizes = sorted(set((2 ** rng.uniform(3, 30, rng.integers(1, 9))).astype(int).tolist()))
        times = np.sort(np.exp(rng.normal(4, 2, len(sizes)))).round(0).clip(1).tolist()
        curve = curve_of(sizes, times)
        core = read_curve(msgspec.json.decode(msgspec.json.encode(curve)), "curve")
        topology = a_topology(a_dim("tp", 8, 1.0, 1.0, collectives={"all_reduce": curve}))
        exported = module_of(topology, "inductor").CURVES["tp", "all_reduce"]
        for size in 2 ** rng.uniform(0, 36, 30):
            us = straight_lines_us(list(zip(sizes, times, strict=True)), float(size))
            prices = [core.us(size), exported.us(size), estimate_call(curve, size).time_us]
            assert prices == pytest.approx([us] * 3, rel=1e-9)


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


@pytest.mark.parametrize(
    ("spread", "size", "size_factor", "half_width"),
    [
        (1.5, 40, 1, 1.5),
        (1.5, 256, 1, 1.5),
        (1.5, 512, 2, 1.5**2),
        (1.5, 1024, 4, 1.5**3),
        (1.5, 4096, 16, 1.5**5),
        # A narrow table does not make sizes that were never measured certain.
        (1.001, 512, 2, 1.2**2),
    ],
)
def test_intervals_widen_with_every_doubling_outside_the_table(
    spread: float, size: int, size_factor: int, half_width: float
) -> None:
    got = estimate_call(curve_of(SIZES, TIMES, spread=spread), size * KIB)
    assert (got.high_us / got.time_us, got.time_us / got.low_us) == pytest.approx((half_width, half_width))
    assert (got.size_factor, got.extrapolated) == (size_factor, size_factor > 1)


@pytest.mark.parametrize("size", [0, -1, 0.5, math.nan])
def test_estimate_call_refuses_sizes_below_1(size: float) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        estimate_call(curve_of(SIZES, TIMES), size)


# ------------------------------------------------------------------------------- beyond it by the ring


def test_estimates_for_other_ranks_follow_the_ring() -> None:
    """The made-up curves are the ring's own, so scaling them has to give the ring's time at any size and ranks."""
    for (measured, bandwidth, latency_us), dim in zip(DIMS.values(), topology().dims, strict=True):
        for ranks, size in itertools.product((2, measured, measured * 16, 4096), (1024, 2**26)):
            estimate = estimate_collective(dim, "all_gather", ranks, size)
            assert estimate.time_us == pytest.approx(
                ring_us("all_gather", size, ranks, bandwidth, latency_us)
            )
            assert (estimate.ranks_factor, estimate.extrapolated) == (ranks / measured, ranks != measured)


def test_ring_scales_measured_times() -> None:
    slow = a_dim("tp", 8, 150.0, 2.0, collectives={"all_reduce": curve_of((2**26,), (9000.0,))})
    eight_us, more_us = (ring_us("all_reduce", 2**26, ranks, 150, 2) for ranks in (8, 32))
    assert estimate_collective(slow, "all_reduce", 32, 2**26).time_us == pytest.approx(
        9000 * more_us / eight_us
    )


@pytest.mark.parametrize(
    ("ranks", "size", "doublings"),
    [(8, 2**20, 0), (16, 2**20, 1), (256, 2**20, 5), (8, 2**31, 1), (8, 2**35, 5), (16, 2**31, 2)],
)
def test_intervals_widen_with_doublings_of_ranks_and_size(ranks: int, size: int, doublings: int) -> None:
    """The half width of the made-up curves is log 1.2, up to 1 GiB."""
    got = estimate_collective(topology().dims[1], "all_gather", ranks, size)
    assert math.log(got.high_us / got.low_us) == pytest.approx(2 * math.log(1.2) * (1 + doublings))


def test_unmeasured_collectives_use_the_formula() -> None:
    residuals = Residuals(geometric_mean_ratio=1.2, worst_ratio=1.5, points=())
    dim = a_dim("tp", 8, 150.0, 2.0, residuals=residuals)
    # The formula was fitted up to 1 GiB.
    within, beyond = (estimate_collective(dim, "all_gather", 8, size) for size in (2**26, 2**32))
    assert within.time_us == pytest.approx(ring_us("all_gather", 2**26, 8, 150, 2))
    assert (within.by_formula, within.extrapolated, beyond.size_factor) == (True, True, 4)
    assert (within.high_us / within.time_us, beyond.high_us / beyond.time_us) == pytest.approx((1.5, 1.5**3))


def test_flat_tables_are_extrapolated_with_slopes_of_other_collectives() -> None:
    """Times of noise alone have no slope: 208 MiB and 1 GiB would cost the same, and win every ranking."""
    flat = structs.replace(curve_of((1024, 2**20, 2**24), (3870.0,) * 3), beta_is_lower_bound=True)
    measured = ring_dim("dp", 4, 20.0, 10.0, "all_gather", "all_reduce")
    dim = structs.replace(measured, collectives=dict(measured.collectives) | {"reduce_scatter": flat})
    at, further = (estimate_collective(dim, "reduce_scatter", 4, size) for size in (208 * 2**20, 2**30))
    per_byte = 3 / 4 / 20 / 2**30 * 1e6  # as the gather's and half the all-reduce's
    assert at.time_us == pytest.approx(3870 + (208 - 16) * 2**20 * per_byte)
    assert further.time_us == pytest.approx(3870 + (2**30 - 2**24) * per_byte)
    # The same number of doublings beyond a table with a slope.
    sloped = estimate_collective(measured, "all_gather", 4, 2**34)
    assert math.log(further.high_us / further.time_us) > 1.5 * math.log(sloped.high_us / sloped.time_us)
    # Inside the table it is what was measured.
    assert estimate_collective(dim, "reduce_scatter", 4, 2**20).time_us == 3870
