"""The terminal takes any text at all."""

import io
import sys
from collections.abc import Callable
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtbench.text import units
from dtbench.text.clean import clean_output


@pytest.mark.parametrize("tty", [False, True])
def test_clean_output_escapes_control_sequences(monkeypatch: pytest.MonkeyPatch, tty: bool) -> None:
    """Terminals keep what tables and bars of our own say to them; pipes get text alone."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(stream, "isatty", lambda: tty)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with clean_output():
        sys.stdout.write("a\tb \x1b[1mbold\x1b[0m \x1b[2J \x1b]0;t\x07 \x9b \u202e é\n")
        click.echo("\x1b[2J\x9b é", color=True)  # which opens a stream of its own where it can
    assert sys.stdout is stream
    bold = b"\x1b[1mbold\x1b[0m" if tty else rb"\x1b[1mbold\x1b[0m"
    lines = (b"a\tb " + bold + rb" \x1b[2J \x1b]0;t\x07 \x9b \u202e", rb"\x1b[2J\x9b")
    assert written.getvalue() == b"".join(line + " é\n".encode() for line in lines)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (units.format_seconds, 0.0, "0 ns"),
        (units.format_seconds, 3e-10, "0.300 ns"),
        (units.format_seconds, 8.214e-6, "8.21 µs"),
        (units.format_seconds, 999.96e-6, "1000 µs"),
        (units.format_seconds, 12.3456, "12.3 s"),
        (units.format_seconds, 123456.0, "123456 s"),
        (units.format_seconds, None, "-"),
        # Bandwidths count in thousands, sizes in 1024.
        (units.format_bandwidth, 12.5e9, "12.5 GB/s"),
        (units.format_bandwidth, 12.0, "0.0120 kB/s"),
        (units.format_bandwidth, None, "-"),
        (units.format_bytes, 64 * 2**20, "64.00 MiB"),
        (units.format_bytes, 1000, "1000 B"),
        (units.format_bytes, None, "-"),
        # A size that names a case is exact.
        (units.format_size, 0, "0 B"),
        (units.format_size, 1000, "1000 B"),
        (units.format_size, 1536, "1.5 KiB"),
        (units.format_size, 65537, "65537 B"),
        (units.format_size, 2**20 + 2**10, "1025 KiB"),
        (units.format_size, 3 * 2**38, "768 GiB"),
        (units.format_size, None, "-"),
        (units.format_interval, (0.698, 0.698), "no interval"),
        (units.format_interval, (0.698, 0.698 * (1 + 1e-15)), "no interval"),  # what arithmetic rounds off
        (units.format_interval, (0.6981, 0.6984), "0.6981 .. 0.6984"),  # as many digits as it takes
        (units.format_interval, (0.5, 0.7), "0.500 .. 0.700"),
        (units.format_interval, (0.0, 0.0), "no interval"),
        (units.format_interval, (0.7, 0.5), "no interval"),
        (units.format_interval, (float("nan"), 1.0), "no interval"),
        (units.format_interval, (1.0, float("inf")), "no interval"),
        (units.format_interval, (None, 1.0), "no interval"),
        (units.format_interval, None, "no interval"),
        (units.format_change, 1.3, "1.30x slower"),
        (units.format_change, 0.5, "2.00x faster"),
        (units.format_ratio, 1.0346, "1.03x"),
        (units.format_ratio, None, "-"),
        # Rounding up adds no digit.
        (lambda value: units.significant(value, 4), 9.9996, "10.00"),
        (lambda value: units.significant(value, 4), -9.9996, "-10.00"),
        (lambda value: units.significant(value, 4), 0.0, "0"),
        (lambda value: units.significant(value, 4), 0.012345, "0.01235"),
    ],
)
def test_units_format_values(write: Callable[[Any], str], value: float | None, text: str) -> None:
    assert write(value) == text


@given(st.floats(1e-12, 1e12), st.integers(2, 6))
def test_significant_digits_round_and_never_drop_a_digit(value: float, digits: int) -> None:
    text = units.significant(value, digits)
    assert "e" not in text and float(text) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))
    assert len(text.replace(".", "").lstrip("0")) >= digits


def test_unit_of_a_column_fits_its_values() -> None:
    columns = ([4e-6, 5e-6, 9e-6, 3e-3, 0.0], [], [1e-12])
    assert [units.time_unit(times).name for times in columns] == ["µs", "s", "ns"]
    formatted = [units.time_unit(columns[0]).format(seconds) for seconds in (4e-6, 3e-3, 0.0, None)]
    assert formatted == ["4.000", "3000", "0", "-"]
    assert units.bandwidth_unit([5e8, 7e8, 3e9]).name == "MB/s"
