"""The price of one collective on a calibrated mesh dim: by its curve, and beyond it by the ring formula."""

from __future__ import annotations

import itertools
import math

import pytest
from msgspec import structs

from dtbench.cost import price as curves
from dtbench.records.topology import CalibratedTopology, Residuals
from dtbench.tests.made_up_topology import curve_of, made_dim, made_topology, ring_dim

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
# dim -> ranks, GiB/s, us per hop
DIMS = {"dp": (4, 20.0, 10.0), "tp": (8, 150.0, 2.0)}


def topology() -> CalibratedTopology:
    return made_topology(*(ring_dim(name, *of, *COLLECTIVES) for name, of in DIMS.items()))


def test_measured_sizes_and_ranks_cost_what_was_measured() -> None:
    dim = topology().dims[1]
    for size in (1024, 3000, 2**26):
        at = curves.estimate(dim, "all_reduce", 8, size)
        expected = curves.price(dim.collectives["all_reduce"], size)
        assert (at.time_us, at.low_us, at.high_us) == (expected.time_us, expected.low_us, expected.high_us)
        assert not at.extrapolated


def test_other_ranks_cost_what_the_ring_says() -> None:
    """The made-up curves are the ring's own, so scaling them has to give the ring's time at any size and ranks."""
    for (measured, bandwidth, us), dim in zip(DIMS.values(), topology().dims, strict=True):
        for ranks, size in itertools.product((2, measured * 16, 4096), (1024, 2**26)):
            at = curves.estimate(dim, "all_gather", ranks, size)
            ring = 6.6 + (ranks - 1) * us + size / 2**30 * (ranks - 1) / ranks / bandwidth * 1e6
            assert at.time_us == pytest.approx(ring)
            assert at.ranks_factor == ranks / measured


def test_a_ring_scales_what_was_measured_and_does_not_replace_it() -> None:
    slow = made_dim("tp", 8, 150.0, 2.0, collectives={"all_reduce": curve_of((2**26,), (9000.0,))})
    ring = [6.6 + 2 * (n - 1) * 2 + 2**-4 * 2 * (n - 1) / n / 150 * 1e6 for n in (8, 32)]
    got = curves.estimate(slow, "all_reduce", 32, 2**26).time_us
    assert got == pytest.approx(9000 * ring[1] / ring[0])


def test_intervals_widen_with_every_doubling() -> None:
    dim = topology().dims[1]
    by_ranks = [curves.estimate(dim, "all_gather", 8 * 2**k, 2**20) for k in range(6)]
    by_size = [curves.estimate(dim, "all_gather", 8, 2 ** (30 + k)) for k in range(6)]
    for estimates in (by_ranks, by_size):
        widths = [math.log(e.high_us / e.low_us) for e in estimates]
        steps = [b - a for a, b in itertools.pairwise(widths)]
        assert steps == pytest.approx([2 * math.log(1.2)] * 5)  # the made-up curves' half width is log 1.2
        assert all(e.low_us < e.time_us < e.high_us for e in estimates)
    both = curves.estimate(dim, "all_gather", 16, 2**31)
    assert math.log(both.high_us / both.low_us) == pytest.approx(2 * math.log(1.2) * 3)


def test_collectives_that_were_not_measured_are_priced_by_the_formula() -> None:
    dim = made_dim(
        "tp", 8, 150.0, 2.0, residuals=Residuals(geometric_mean_ratio=1.2, worst_ratio=1.5, points=())
    )
    at = curves.estimate(dim, "all_gather", 8, 2**26)
    assert at.time_us == pytest.approx(6.6 + 7 * 2 + 2**-4 * 7 / 8 / 150 * 1e6)
    assert (at.by_formula, at.extrapolated) == (True, True)
    assert at.high_us / at.time_us == pytest.approx(1.5)
    beyond = curves.estimate(dim, "all_gather", 8, 2**32)  # it was fitted up to 1 GiB
    assert (beyond.size_factor, beyond.high_us / beyond.time_us) == (4, pytest.approx(1.5**3))


def test_beyond_times_that_do_not_grow_the_other_collectives_say_how_they_do() -> None:
    """Times of noise alone have no slope: 208 MiB and 1 GiB would cost the same, and win every ranking."""
    flat = structs.replace(curve_of((1024, 2**20, 2**24), (3870.0,) * 3), beta_is_lower_bound=True)
    measured = ring_dim("dp", 4, 20.0, 10.0, "all_gather", "all_reduce")
    dim = structs.replace(measured, collectives=dict(measured.collectives) | {"reduce_scatter": flat})
    at, further = (curves.estimate(dim, "reduce_scatter", 4, size) for size in (208 * 2**20, 2**30))
    per_byte = 3 / 4 / 20 / 2**30 * 1e6  # as the gather's and half the all-reduce's
    assert at.time_us == pytest.approx(3870 + (208 - 16) * 2**20 * per_byte)
    assert further.time_us == pytest.approx(3870 + (2**30 - 2**24) * per_byte)
    own = curves.estimate(measured, "all_gather", 4, 2**34)  # as many doublings beyond its own table
    assert math.log(further.high_us / further.time_us) > 1.5 * math.log(own.high_us / own.time_us)
    assert curves.estimate(dim, "reduce_scatter", 4, 2**20).time_us == 3870  # inside it is what was measured
