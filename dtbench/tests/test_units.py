"""How figures are written: rounded, never wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtbench.text import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (3e-10, "0.300 ns"),
        (8.214e-6, "8.21 µs"),
        (999.96e-6, "1000 µs"),
        (1e-3, "1.00 ms"),
        (12.3456, "12.3 s"),
        (123456.0, "123456 s"),
        (None, "-"),
    ],
)
def test_seconds(seconds: float | None, text: str) -> None:
    assert units.format_seconds(seconds) == text


def test_bandwidths_count_in_thousands_and_sizes_in_1024() -> None:
    assert units.format_bandwidth(12.5e9) == "12.5 GB/s"
    assert units.format_bandwidth(12.0) == "0.0120 kB/s"
    assert units.format_bandwidth(None) == "-"
    assert units.format_bytes(64 * 2**20) == "64.00 MiB"
    assert units.format_bytes(1000) == "1000 B"
    assert units.format_bytes(None) == "-"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (65537, "65537 B"),
        (16 * 2**20, "16 MiB"),
        (2**20 + 2**10, "1025 KiB"),
        (3 * 2**38, "768 GiB"),
        (None, "-"),
    ],
)
def test_a_size_that_names_a_case_is_exact(size: int | None, text: str) -> None:
    assert units.format_size(size) == text


@given(st.integers(0, 2**50))
def test_a_size_can_be_read_back(size: int) -> None:
    number, unit = units.format_size(size).split()
    assert float(number) * dict(units._SIZES)[unit] == size


@given(st.floats(1e-12, 1e12), st.integers(2, 6))
def test_significant_digits_round_and_never_drop_a_digit(value: float, digits: int) -> None:
    text = units.significant(value, digits)
    assert "e" not in text
    assert float(text) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))
    assert len(text.replace(".", "").lstrip("0")) >= digits


@pytest.mark.parametrize(
    ("value", "text"),
    [(9.9996, "10.00"), (-9.9996, "-10.00"), (0.0, "0"), (0.99999, "1.000"), (0.012345, "0.01235")],
)
def test_rounding_up_adds_no_digit(value: float, text: str) -> None:
    assert units.significant(value, 4) == text


def test_one_unit_for_a_column() -> None:
    unit = units.time_unit([4e-6, 5e-6, 9e-6, 3e-3, 0.0])
    assert unit.name == "µs"
    assert [unit.format(v) for v in (4e-6, 3e-3, 0.0, None)] == ["4.000", "3000", "0", "-"]
    assert units.time_unit([]).name == "s"
    assert units.time_unit([1e-12]).name == "ns"
    assert units.bandwidth_unit([5e8, 7e8, 3e9]).name == "MB/s"
    assert units.format_ratio(1.0346) == "1.03x"
    assert units.format_ratio(None) == "-"
