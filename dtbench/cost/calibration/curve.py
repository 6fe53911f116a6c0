"""The price of a curve: what a collective, or a change of placement, of some size is expected to take.

A curve is measured times over sizes (its `table`), rising with size. Between two rows the time is
linear in the size, which is a latency and a bandwidth of its own for each step. On 56 public curves of
nccl-tests, every second size held out, that halves the error of a log-log interpolation (median 1.1 %
against 2.0 %; from 32 MiB on 0.4 % against 0.8 %), and does no worse than splines.

Beyond the table a curve goes on as it ends: the slope of its last factor of four in size, not that of
the one line through all points (a factor of two above 128 MiB: 1.8 % off, the line 20 %). A price from
there is flagged, and its interval widens by every doubling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# The end slope is taken over this factor in size: one row back is at the mercy of noise.
END_FACTOR = 4
# Half width of the interval per doubling beyond the table, at least: covers 82 to 100 % of what 56
# public curves measured at 2, 4 and 16 times the size they were cut off at.
BEYOND_HALF_WIDTH = math.log(1.2)
MAX_HALF_WIDTH = 20.0  # a factor of e^20 says that nothing is known, and can be computed with


@dataclass(frozen=True)
class Price:
    """Microseconds; low and high: 90 % interval of what one new launch would measure.

    beyond: how far outside the measured sizes, as a factor; 1 inside.
    """

    time_us: float
    low_us: float
    high_us: float
    beyond: float = 1.0

    @property
    def extrapolated(self) -> bool:
        return self.beyond > 1


def price(curve: Mapping[str, Any], size_bytes: float) -> Price:
    """The price at one size of a curve of the topology file.

    size_bytes: the tensor as one group holds it, at least 1.

    Raises:
        ValueError: a size below 1.
    """
    if not size_bytes >= 1:
        raise ValueError(f"got size_bytes={size_bytes}: expected at least 1")
    table: Sequence[Mapping[str, Any]] = curve["table"]
    first, last = table[0], table[-1]
    if size_bytes > last["size_bytes"]:
        return _beyond(last, _above(table, size_bytes), size_bytes / last["size_bytes"])
    if size_bytes < first["size_bytes"]:
        return _beyond(first, _below(table, size_bytes), first["size_bytes"] / size_bytes)
    sizes = [row["size_bytes"] for row in table]
    return Price(
        *(
            float(np.interp(size_bytes, sizes, [row[name] for row in table]))
            for name in ("time_us", "low_us", "high_us")
        )
    )


def _above(table: Sequence[Mapping[str, Any]], size_bytes: float) -> float:
    last = table[-1]
    beyond = (size_bytes - last["size_bytes"]) * end_slope(table)
    return float(last["time_us"]) + float(beyond)


def end_slope(table: Sequence[Mapping[str, Any]]) -> float:
    """Microseconds per byte that a table ends with: of its last factor of END_FACTOR in size, and never more
    than if all of the last time were transfer. Its inverse is the bandwidth of large messages."""
    last, first = table[-1], table[0]
    proportional = float(last["time_us"] / last["size_bytes"])
    faster = [
        row
        for row in table
        if row["size_bytes"] * END_FACTOR <= last["size_bytes"] and row["time_us"] < last["time_us"]
    ]
    if len(table) == 1:
        return proportional
    return min(_slope((faster or [first])[-1], last), proportional)


def _below(table: Sequence[Mapping[str, Any]], size_bytes: float) -> float:
    first, last = table[0], table[-1]
    slower = [
        row
        for row in table
        if row["size_bytes"] >= END_FACTOR * first["size_bytes"] and row["time_us"] > first["time_us"]
    ]
    slope = 0.0 if len(table) == 1 else _slope(first, (slower or [last])[0])
    time_us = float(first["time_us"])
    proportional = time_us * float(size_bytes / first["size_bytes"])
    return max(time_us - float(first["size_bytes"] - size_bytes) * slope, proportional)


def _slope(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    return float((b["time_us"] - a["time_us"]) / (b["size_bytes"] - a["size_bytes"]))


def _beyond(nearest: Mapping[str, Any], time_us: float, beyond: float) -> Price:
    own = max(nearest["high_us"] / nearest["time_us"], nearest["time_us"] / nearest["low_us"])
    half_width = min(max(math.log(own), BEYOND_HALF_WIDTH) * (1 + math.log2(beyond)), MAX_HALF_WIDTH)
    return Price(time_us, time_us * math.exp(-half_width), time_us * math.exp(half_width), beyond)
