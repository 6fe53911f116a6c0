"""A result's line in a run file: read, and checked against itself.

What dtbench writes today is decoded straight into its types, which takes a third of the time; every other line
(of an older file, damaged, with fields unknown here) goes the way that can name what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from dtbench.fields import MAX_INT, Amount
from dtbench.files.read import BadFieldError, colons_of, into
from dtbench.model import Param, Result, Timing, estimator_of

# Params that a suite got later, and what its results meant before: old files have the keys of new ones.
_LATER_PARAMS: Mapping[str, Mapping[str, Param]] = {
    "redistribute": {"groups": "together", "mode": "isolated"}
}
# By share of the samples below.
_QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
# Written by other programs too, which may round.
_SAME, _SAME_S = 1e-6, 1e-15

# ------------------------------------------------------------------------------ as it is written today

_FIELDS = typing.get_type_hints(Result, include_extras=True)
_OF_RANKS = ("rank_samples_s", "rank_arrivals_s")
# Their names as text; matching a pattern for each rank of each line would take longer than all else.
_RANKS = frozenset(map(str, range(4096)))
# Every field has to be there: with as many colons as that makes, none can be there twice.
_Line = msgspec.defstruct(
    "_Line",
    [
        ("kind", Literal["result"]),
        *((n, dict[str, tuple[Amount, ...]] if n in _OF_RANKS else kind) for n, kind in _FIELDS.items()),
    ],
)
_decoder = msgspec.json.Decoder(_Line)
_COLONS = len(_FIELDS) + 1
_COLONS_OF_TIMES = len(dataclasses.fields(Timing))


def result_in(data: bytes, with_samples: bool = True) -> Result | None:
    """The result in a line that is exactly as `RunWriter` writes it and sound; None for any other."""
    if b"\\" in data and b"\\u" in data:  # one byte is found faster than two, and is in hardly any line
        return None
    try:
        line: Any = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    ranks, late, params, counters = line.rank_samples_s, line.rank_arrivals_s, line.params, line.counters
    colons = _COLONS + len(ranks) + len(late) + len(params) + len(counters)
    if line.time_s is not None:
        colons += _COLONS_OF_TIMES
    if data.count(b":") != colons:
        texts = [line.suite, line.name, line.impl, line.reason, *params, *counters, *params.values()]
        if data.count(b":") != colons + colons_of(texts):
            return None
    if not (_RANKS.issuperset(ranks) and _RANKS.issuperset(late)):
        return None
    whole = [number for number in counters.values() if type(number) is int] if counters else []
    if max(line.rank or 0, line.size_bytes or 0, line.launch, *map(abs, whole)) > MAX_INT:
        return None
    try:
        _check(line, getattr(line.time_s, estimator_of(line), None))
    except BadFieldError:
        return None
    if not with_samples:
        line.samples_s, line.rank_samples_s, line.rank_arrivals_s = (), {}, {}
    return Result(*msgspec.structs.astuple(line)[1:])


# ------------------------------------------------------------------------------ any


def result_of(line: Mapping[str, Any]) -> Result:
    """The result that a decoded line holds; unknown fields are ignored.

    Raises:
        BadFieldError: a field that is missing, of the wrong type or out of range.
    """
    result = into(line, Result)
    if "clock" not in line:
        return _before_clocks(result)
    _check(result, result.estimate_s)
    return result


def _before_clocks(result: Result) -> Result:
    """Files that do not say the clock: `dispatch` alone timed the host, and bandwidths are of the median."""
    params = {**_LATER_PARAMS.get(result.suite, {}), **result.params}
    clock: Literal["host", "device"] = "host" if result.suite == "dispatch" else "device"
    result = dataclasses.replace(result, params=params, clock=clock)
    _check(result, None if result.time_s is None else result.time_s.median)
    if result.time_s is None or not result.estimate_s:
        return result
    faster = result.time_s.median / result.estimate_s
    return dataclasses.replace(
        result,
        algbw_Bps=result.algbw_Bps and result.algbw_Bps * faster,
        busbw_Bps=result.busbw_Bps and result.busbw_Bps * faster,
    )


def _check(result: Result, seconds: float | None) -> None:
    """Whether its figures agree with each other. seconds: what the bandwidths are of."""
    if result.time_s is not None:
        _check_order(result.time_s)
        _check_samples(result.time_s, result.samples_s)
    _check_bandwidths(result, seconds)


def _check_order(time: Timing) -> None:
    if not time.min <= time.p25 <= time.median <= time.p75 <= time.p95 <= time.max:
        raise BadFieldError(f"time_s is not in order: expected {' <= '.join(_QUANTILES)}")
    # The mean of equal numbers may round to just beside them.
    if not time.min * (1 - 1e-9) <= time.mean <= time.max * (1 + 1e-9):
        raise BadFieldError(f"time_s.mean is {time.mean!r}, expected it between min and max")


def _check_samples(time: Timing, samples_s: Sequence[float]) -> None:
    """Whether the statistics are those of the samples, where the file holds them."""
    if not samples_s:
        return
    if len(samples_s) != time.n:
        raise BadFieldError(f"time_s.n is {time.n}, but there are {len(samples_s)} samples_s")
    ordered = sorted(samples_s)
    figures = (time.min, time.p25, time.median, time.p75, time.p95, time.max)
    for name, got, (low, high, part) in zip(_QUANTILES, figures, _places(time.n), strict=True):
        _expect("time_s.", name, got, ordered[low] + (ordered[high] - ordered[low]) * part, "by samples_s")
    _expect("time_s.", "mean", time.mean, math.fsum(ordered) / time.n, "by samples_s")


@lru_cache(1024)
def _places(n: int) -> tuple[tuple[int, int, float], ...]:
    """Of each quantile of `n` ordered numbers the neighbours, and how far it lies from the lower to the upper."""
    at = [share * (n - 1) for share in _QUANTILES.values()]
    return tuple((math.floor(x), math.ceil(x), x % 1) for x in at)


def _check_bandwidths(result: Result, seconds: float | None) -> None:
    """Whether algbw is size over time; busbw is up to twice that (all_reduce among many ranks)."""
    algbw, busbw = result.algbw_Bps, result.busbw_Bps
    if algbw is not None and result.size_bytes is not None and seconds:
        _expect("", "algbw_Bps", algbw, result.size_bytes / seconds, "by size_bytes and time_s")
    if busbw is not None and (algbw is None or busbw > 2 * algbw):
        raise BadFieldError(f"busbw_Bps is {busbw!r}, expected at most 2 x algbw_Bps, which is {algbw!r}")


def _expect(of: str, name: str, got: float, expected: float, why: str) -> None:
    if got != expected and not math.isclose(got, expected, rel_tol=_SAME, abs_tol=_SAME_S):
        raise BadFieldError(f"{of}{name} is {got!r}, expected {expected!r} {why}")
