"""Measures and judges what bounds each collective over each mesh dim: the transfer, or the arrival of its last rank.

A call's time on a rank is waiting until its last rank arrives, then transfer. Waiting is known up to the errors of the
clocks. On gloo between hosts, that error is as long as a short transfer, so it often leaves no verdict there.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from msgspec.structs import replace

from dtbench.grouping import group_by
from dtbench.records.job import Bound, BoundVerdict, Collective, Job, LinkComparison
from dtbench.text.units import format_seconds, plural
from dtbench.traces.communication import SYNCHRONIZING, UNKNOWN

# The thresholds were chosen by hand. Beyond this share of the time, one part is at least twice the other. Removing the
# other part would then save less than half as much.
MOSTLY = 2 / 3
# Fewer calls cannot show which one is an exception.
MIN_CALLS = 3
# A single call may change the share of waiting by at most this, the width of "mixed".
MAX_EFFECT_OF_CALL = 1 / 3
# A rank is named only if another rank would come last as often with at most this probability, were the last rank of
# each call random. This needs 3 calls of 4 ranks, or 5 calls of 2. A rank that always comes last is also named if its
# smallest delay is at least STEADY of its largest. Three exponentially distributed delays are so with probability 1/10,
# and of the same one of two ranks with 1/40.
MAX_CHANCE, STEADY = 0.1, 0.5
# Calls that wait less than this share of the mean do not count for that probability.
MIN_SHARE_OF_MEAN = 0.5
_NO_LATE_RANK = "no rank comes last more often than by chance"
_RANK_UNKNOWN = "logs do not show which rank it is"
_Kind = tuple[str, str, int | None]  # mesh dim, collective and group size


class TimedCall(NamedTuple):
    """A collective that the traces of all ranks of its group show. Times are microseconds on the aligned clock.

    Attributes:
        arrivals: rank -> when it was ready for the call.
        end: median end over the ranks.
        time_us: time in the call, summed over the ranks.
        waiting_us: the part of it before the last rank's arrival.
        clock_error_us: error of waiting_us, at most time_us.
    """

    arrivals: Mapping[int, float]
    end: float
    time_us: float
    waiting_us: float
    clock_error_us: float

    def late_rank(self, error_us: Mapping[int, float]) -> tuple[int, float] | None:
        """Returns the last rank and its delay after the median arrival of the others; None if the clocks hide it.

        Args:
            error_us: rank -> error of its clock offset.
        """
        *earlier, last = sorted(self.arrivals, key=self.arrivals.__getitem__)
        if self.arrivals[last] - self.arrivals[earlier[-1]] <= error_us[last] + error_us[earlier[-1]]:
            return None
        return last, self.arrivals[last] - median(self.arrivals[rank] for rank in earlier)


def judge_calls(
    mesh_dim: str, collective: str, group_size: int, calls: Sequence[TimedCall], error_us: Mapping[int, float]
) -> BoundVerdict:
    """Judges a collective over one mesh dim, and finds the rank that causes most of the waiting.

    Args:
        calls: the calls in steps; at least one.
        error_us: rank -> error of its clock offset.
    """
    count, time_us = len(calls), sum(call.time_us for call in calls) or 1e-9
    waiting_us, clock_error_us = (
        sum(call.waiting_us for call in calls),
        sum(call.clock_error_us for call in calls),
    )
    share, error, mean_s = waiting_us / time_us, clock_error_us / time_us, time_us / count / group_size / 1e6
    longest = max(calls, key=lambda call: call.waiting_us)
    without_longest = (waiting_us - longest.waiting_us) / max(time_us - longest.time_us, 1e-9)
    reasons = {
        f"{plural(count, 'call')} in steps, expected at least {MIN_CALLS}: record more --steps": (
            count < MIN_CALLS
        ),
        f"the clocks are known to {format_seconds(error * mean_s)}, too coarse for calls of {format_seconds(mean_s)}": (
            _bound_by(share - error) != _bound_by(share + error)
        ),
        f"one of {count} calls has {longest.waiting_us / (waiting_us or 1):.0%} of the waiting": (
            abs(share - without_longest) > MAX_EFFECT_OF_CALL
            and _bound_by(without_longest) != _bound_by(share)
        ),
    }
    why = next((reason for reason, applies in reasons.items() if applies), "")
    bound = "inconclusive" if why else _bound_by(share)
    rank, late_s, caused_us = _find_late_rank(calls, group_size, error_us)
    return BoundVerdict(
        mesh_dim,
        collective,
        group_size,
        bound,
        time_us / 1e6,
        calls=count,
        waiting_share=share,
        late_rank=rank,
        late_s=late_s,
        late_share=None if rank is None else caused_us / time_us,
        why=_NO_LATE_RANK if bound == "arrival" and rank is None else why,
    )


def _find_late_rank(
    calls: Sequence[TimedCall], group_size: int, error_us: Mapping[int, float]
) -> tuple[int | None, float | None, float]:
    """Returns the rank that causes most of the waiting, its mean delay in seconds, and that waiting in microseconds.

    The rank is None if there is no such rank, or if chance could explain it.
    """
    waiting_us = sum(call.waiting_us for call in calls)
    late_ranks = [(call, call.late_rank(error_us) or (-1, 0.0)) for call in calls]
    by_rank = group_by(late_ranks, lambda pair: pair[1][0])
    caused_us = {
        rank: sum(call.waiting_us for call, _ in pairs) for rank, pairs in by_rank.items() if rank >= 0
    }
    rank = max(caused_us, key=caused_us.__getitem__, default=-1)
    counted = [
        late
        for call, late in late_ranks
        if rank in call.arrivals and call.waiting_us >= MIN_SHARE_OF_MEAN * waiting_us / len(calls)
    ]
    late_us = [delay_us for last, delay_us in counted if last == rank]
    chance = group_size * _chance_of_last(len(counted), len(late_us), group_size)
    is_steady = len(late_us) == len(counted) >= MIN_CALLS and min(late_us) >= STEADY * max(late_us)
    if caused_us.get(rank, 0.0) <= MOSTLY * waiting_us or (chance > MAX_CHANCE and not is_steady):
        return None, None, 0.0
    return rank, fmean(late_us) / 1e6, caused_us[rank]


def _chance_of_last(calls: int, times: int, ranks: int) -> float:
    """Returns the probability that any rank comes last at least `times` times, if the last rank is random."""
    return sum(
        math.exp(
            math.lgamma(calls + 1)
            - math.lgamma(count + 1)
            - math.lgamma(calls - count + 1)
            + (calls - count) * math.log(ranks - 1)
            - calls * math.log(ranks)
        )
        for count in range(times, calls + 1)
    )


def judge_bounds(job: Job, links: Sequence[LinkComparison]) -> tuple[BoundVerdict, ...]:
    """Returns the verdicts of a job, compared with references, those of the collectives with the most time first.

    Collectives that the traces do not judge are inconclusive.

    Args:
        links: comparisons with a topology, if there is one.
    """
    judged = {(row.mesh_dim, row.collective, row.group_size): row for row in job.bounds}
    calls_by_kind = group_by(
        (call for call in job.collectives if call.calls_in_steps and call.group_size != 1),
        lambda call: (call.mesh_dim, call.collective, call.group_size),
    )
    rows_by_kind = group_by(
        (row for row in links if row.reference_s and row.excludes_waiting),
        lambda row: (row.kind.mesh_dim, row.kind.collective, row.kind.group_size),
    )
    verdicts = []
    for kind, calls in calls_by_kind.items():
        verdict, rows = judged.get(kind) or _judge_untimed(job, kind, calls), rows_by_kind.get(kind, [])
        reference_s = sum((row.reference_s or 0.0) * row.count for row in rows)
        if reference_s and verdict.calls:
            slowdown = sum(row.time_s * row.count for row in rows) / reference_s
            verdict = replace(verdict, slowdown=slowdown, reference=rows[0].reference)
        verdicts.append(verdict)
    return tuple(sorted(verdicts, key=lambda verdict: -verdict.time_s))


def _judge_untimed(job: Job, kind: _Kind, calls: Sequence[Collective]) -> BoundVerdict:
    """Judges calls whose arrivals are unknown, by their mean times if logs show the time without waiting."""
    time_s = sum(call.mean_s * call.calls_in_steps for call in calls)
    _, collective, group_size = kind
    timed = [call for call in calls if job.lacks_times and call.transfer_s is not None]
    if timed and group_size:
        total_s = sum(call.mean_s * call.count for call in timed)
        share = max(1 - sum((call.transfer_s or 0.0) * call.count for call in timed) / total_s, 0.0)
        bound, count = _bound_by(share), sum(call.count for call in timed) // group_size
        return BoundVerdict(
            *kind, bound, time_s, calls=count, waiting_share=share, why=_RANK_UNKNOWN * (bound == "arrival")
        )
    reasons = {
        "the trace does not show which collective it is": collective == UNKNOWN,
        f"a rank may leave a {collective} before the others arrive": collective not in SYNCHRONIZING,
        "the trace does not show its process group": group_size is None,
        f"that needs the traces of all ranks of a group (have {len(job.ranks)} of {job.world_size})": (
            len(job.ranks) < job.world_size
        ),
        "the calls of its ranks could not be matched; profile the traces again if an older dtbench wrote this "
        "profile": True,
    }
    return BoundVerdict(
        *kind, "inconclusive", time_s, why=next(reason for reason, applies in reasons.items() if applies)
    )


def _bound_by(waiting_share: float) -> Bound:
    return "arrival" if waiting_share > MOSTLY else "transfer" if waiting_share < 1 - MOSTLY else "mixed"
