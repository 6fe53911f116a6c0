"""A result's line in a run file: read, and checked against itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from dtbench.records.read import BadFieldError, abbreviate, decode, field_fault
from dtbench.records.result import Result
from dtbench.records.timing import SHARES, Timing, timing_quantiles

_USUAL_RANKS = frozenset(map(str, range(4096)))
_MAX_RANK_DIGITS = 18
# Written by other programs too, which may round.
_SAME, _SAME_S = 1e-6, 1e-15

_decoder = msgspec.json.Decoder(Result)


def result_in(data: bytes) -> Result | None:
    """The result in a line of a run file; None where the line is of another kind. Unknown fields are ignored.

    Raises:
        BadFieldError: no JSON object; a field that is missing, of the wrong type or out of range; figures that do not
            agree with each other.
    """
    try:
        result = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if decode(data).get("kind") != "result" or not isinstance(error, msgspec.ValidationError):
            return None
        raise BadFieldError(field_fault(error)) from error
    _check(result)
    return result


def _check(result: Result) -> None:
    """Checks that the figures of a result agree with each other."""
    _check_ranks("rank_samples_s", result.rank_samples_s)
    _check_ranks("rank_arrivals_s", result.rank_arrivals_s)
    if result.time_s is not None:
        _check_order(result.time_s)
        _check_samples(result.time_s, result.samples_s)
    _check_bandwidths(result)


def _check_ranks(name: str, by_rank: Mapping[str, object]) -> None:
    """Not by the pattern of a type: to match one for each rank of each line would take longer than all else."""
    for rank in () if _USUAL_RANKS.issuperset(by_rank) else by_rank:
        if not (rank.isascii() and rank.isdecimal() and len(rank) <= _MAX_RANK_DIGITS):
            raise BadFieldError(f"{name} has the key {abbreviate(rank)}, expected a rank")


def _check_order(time: Timing) -> None:
    if not time.min <= time.p25 <= time.median <= time.p75 <= time.p95 <= time.max:
        raise BadFieldError(f"time_s is not in order: expected {' <= '.join(SHARES)}")
    # The mean of equal numbers may round to just beside them.
    if not time.min * (1 - 1e-9) <= time.mean <= time.max * (1 + 1e-9):
        raise BadFieldError(f"time_s.mean is {time.mean!r}, expected it between min and max")


def _check_samples(time: Timing, samples_s: Sequence[float]) -> None:
    """Whether the statistics are those of the samples, where the file holds them."""
    if not samples_s:
        return
    if len(samples_s) != time.n:
        raise BadFieldError(f"time_s.n is {time.n}, but there are {len(samples_s)} samples_s")
    got, expected = (
        [time.min, time.p25, time.median, time.p75, time.p95, time.max],
        timing_quantiles(samples_s),
    )
    for figures in zip(SHARES, got, expected, strict=True) if got != expected else ():
        _expect("time_s.", *figures, "by samples_s")
    _expect("time_s.", "mean", time.mean, math.fsum(samples_s) / time.n, "by samples_s")


def _check_bandwidths(result: Result) -> None:
    """Whether algbw is size over time; busbw is up to twice that (all_reduce among many ranks)."""
    algbw, busbw = result.algbw_Bps, result.busbw_Bps
    if algbw is not None and result.size_bytes is not None and result.estimate_s:
        _expect("", "algbw_Bps", algbw, result.size_bytes / result.estimate_s, "by size_bytes and time_s")
    if busbw is not None and (algbw is None or busbw > 2 * algbw):
        raise BadFieldError(f"busbw_Bps is {busbw!r}, expected at most 2 x algbw_Bps, which is {algbw!r}")


def _expect(of: str, name: str, got: float, expected: float, why: str) -> None:
    if got != expected and not math.isclose(got, expected, rel_tol=_SAME, abs_tol=_SAME_S):
        raise BadFieldError(f"{of}{name} is {got!r}, expected {expected!r} {why}")
