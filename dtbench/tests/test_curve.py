"""The price of a size: what is read from a table, and beyond it. Core reads the same file by the same rule."""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest

from dtbench.cost.price import price
from dtbench.records.topology import MeasuredCurve
from dtbench.tests.made_up_topology import curve_of
from dtbench_core.cost.topology import read_curve

KIB, MIB = 1024, 1024**2
SIZES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB]
TIMES = [100.0, 110.0, 150.0, 310.0, 950.0]


def of(sizes: list[int], times: list[float], spread: float = 1.1) -> MeasuredCurve:
    return curve_of(sizes, times, spread=spread)


def test_between_rows_time_is_linear_in_size() -> None:
    curve = of(SIZES, TIMES)
    for size in (*SIZES, 2500, 10 * KIB, 40 * KIB, 200 * KIB):
        got = price(curve, size)
        expected = float(np.interp(size, SIZES, TIMES))
        assert got.time_us == pytest.approx(expected, rel=1e-12) and not got.extrapolated
        assert (got.low_us, got.high_us) == (pytest.approx(expected / 1.1), pytest.approx(expected * 1.1))
    # A latency and a bandwidth are found between any two points of theirs.
    line = of([MIB, 64 * MIB], [20 + 8.0, 20 + 8.0 * 64])
    assert price(line, 16 * MIB).time_us == pytest.approx(20 + 8 * 16)


def test_above_the_table_its_last_factor_of_four_goes_on() -> None:
    got = price(of(SIZES, TIMES), MIB)
    assert got.time_us == pytest.approx(950 + (MIB - 256 * KIB) * (950 - 310) / (192 * KIB))
    assert got.extrapolated and got.size_factor == 4
    # A row within the last factor of four does not make the slope: one step is at the mercy of noise.
    noisy = of([KIB, 64 * KIB, 255 * KIB, 256 * KIB], [100.0, 310.0, 700.0, 950.0])
    assert price(noisy, MIB).time_us == pytest.approx(got.time_us)
    # Nor does one that takes as long as the last: the slope is that to the last faster one.
    level = of([KIB, 16 * KIB, 64 * KIB, 256 * KIB], [100.0, 150.0, 310.0, 310.0])
    assert price(level, MIB).time_us == pytest.approx(310 + (MIB - 256 * KIB) * (310 - 150) / (240 * KIB))


def test_above_the_table_time_never_grows_faster_than_size() -> None:
    steep = of([KIB, 64 * KIB, 256 * KIB], [1.0, 2.0, 400.0])
    assert price(steep, MIB).time_us == pytest.approx(4 * 400.0)


def test_below_the_table_its_first_factor_of_four_goes_on() -> None:
    curve = of(SIZES[1:], TIMES[1:])
    assert price(curve, KIB).time_us == pytest.approx(110 - 3 * KIB * (150 - 110) / (12 * KIB))
    assert price(curve, KIB).size_factor == 4
    # But not below the share of the first row's time.
    steep = of([MIB, 4 * MIB], [100.0, 1000.0])
    assert price(steep, 256 * KIB).time_us == pytest.approx(25.0)


def test_flat_tables_and_single_rows() -> None:
    flat = of(SIZES, [100.0] * 5)
    assert [price(flat, size).time_us for size in (16, 2 * KIB, MIB)] == [100.0] * 3
    one = of([64 * KIB], [100.0])
    assert [price(one, s).time_us for s in (KIB, 64 * KIB, 128 * KIB)] == [100.0, 100.0, 200.0]
    assert not price(one, 64 * KIB).extrapolated


def test_intervals_widen_with_every_doubling_beyond_the_table() -> None:
    curve = of(SIZES, TIMES, spread=1.5)
    for times, size in ((1, 256), (2, 512), (4, 1024), (16, 4096)):
        got = price(curve, size * KIB)
        assert math.log(got.high_us / got.time_us) == pytest.approx(math.log(1.5) * (1 + math.log2(times)))
        assert got.low_us * got.high_us == pytest.approx(got.time_us**2)
    # A narrow table does not make what was never measured certain.
    narrow = price(of(SIZES, TIMES, spread=1.001), 512 * KIB)
    assert narrow.high_us / narrow.time_us == pytest.approx(1.2**2)


def test_prices_never_fall_with_size_and_join_without_a_jump() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        sizes = sorted(set((2 ** rng.uniform(3, 30, rng.integers(1, 9))).astype(int).tolist()))
        times = np.sort(np.exp(rng.normal(4, 2, len(sizes)))).tolist()
        curve = of(sizes, times)
        asked = np.geomspace(1, 2**34, 200)
        got = [price(curve, size) for size in asked]
        prices = np.array([p.time_us for p in got])
        assert (np.diff(prices) >= -1e-9 * prices[:-1]).all() and (prices > 0).all()
        assert all(p.low_us <= p.time_us <= p.high_us for p in got)
        for end in (sizes[0], sizes[-1]):
            before, after = (price(curve, end * (1 + sign * 1e-12)).time_us for sign in (-1, 1))
            assert before == pytest.approx(after, rel=1e-6)


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


def test_core_reads_the_file_by_the_rule_it_states() -> None:
    rng = np.random.default_rng(6)
    for _ in range(30):
        sizes = sorted(set((2 ** rng.uniform(3, 30, rng.integers(1, 9))).astype(int).tolist()))
        times = np.sort(np.exp(rng.normal(4, 2, len(sizes)))).round(0).clip(1).tolist()
        curve = of(sizes, times)
        core = read_curve(msgspec.json.decode(msgspec.json.encode(curve)), "curve")
        for size in 2 ** rng.uniform(0, 36, 30):
            expected = straight_lines_us(list(zip(sizes, times, strict=True)), float(size))
            assert core.us(size) == pytest.approx(expected, rel=1e-9)
            assert price(curve, size).time_us == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [0, -1, 0.5, math.nan])
def test_sizes_that_are_none_are_refused(size: float) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        price(of(SIZES, TIMES), size)
