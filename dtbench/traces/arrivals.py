"""Measures and judges what bounds each collective over each mesh dim: the transfer, or the arrival of its last rank.

A call's time on a rank is waiting until its last rank arrives, then transfer. Waiting is known up to the errors of the
clocks. On gloo between hosts, that error is as long as a short transfer, so it often leaves no verdict there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from dtbench.grouping import group_by
from dtbench.records.job import Arrivals, Bound, BoundVerdict, Collective, Job, LinkComparison
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
# each call random. This needs 3 calls of 4 ranks, or 5 calls of 2.
MAX_CHANCE = 0.1
# Calls that wait less than this share of the mean do not count for that probability.
MIN_SHARE_OF_MEAN = 0.5
_NO_LATE_RANK = "no rank comes last more often than by chance"
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


def sum_arrivals(
    mesh_dim: str, collective: str, group_size: int, calls: Sequence[TimedCall], error_us: Mapping[int, float]
) -> Arrivals:
    """Sums the times of a collective over one mesh dim, and finds the rank that causes most of the waiting.

    Args:
        calls: the calls in steps; at least one.
        error_us: rank -> error of its clock offset.
    """
    waiting_us, longest = sum(call.waiting_us for call in calls), max(calls, key=lambda call: call.waiting_us)
    late_ranks = [call.late_rank(error_us) for call in calls]
    caused_us: dict[int, float] = {}
    for call, late in zip(calls, late_ranks, strict=True):
        if late:
            caused_us[late[0]] = caused_us.get(late[0], 0.0) + call.waiting_us
    rank = max(caused_us, key=caused_us.__getitem__, default=-1)
    counted = [
        late
        for call, late in zip(calls, late_ranks, strict=True)
        if rank in call.arrivals and call.waiting_us >= MIN_SHARE_OF_MEAN * waiting_us / len(calls)
    ]
    late_us = [late[1] for late in counted if late and late[0] == rank]
    is_late = (
        caused_us.get(rank, 0.0) > MOSTLY * waiting_us
        and group_size * _chance(len(counted), len(late_us), 1 / group_size) <= MAX_CHANCE
    )
    return Arrivals(
        mesh_dim=mesh_dim,
        collective=collective,
        group_size=group_size,
        calls=len(calls),
        time_s=sum(call.time_us for call in calls) / 1e6,
        waiting_s=waiting_us / 1e6,
        clock_error_s=sum(call.clock_error_us for call in calls) / 1e6,
        longest_wait_s=(longest.time_us / 1e6, longest.waiting_us / 1e6),
        late_rank=rank if is_late else None,
        late_s=fmean(late_us) / 1e6 if is_late else None,
        late_waiting_s=caused_us[rank] / 1e6 if is_late else None,
    )


def _chance(trials: int, successes: int, probability: float) -> float:
    """Returns the probability of at least so many successes."""
    return sum(
        math.comb(trials, count) * probability**count * (1 - probability) ** (trials - count)
        for count in range(successes, trials + 1)
    )


def judge_bounds(job: Job, links: Sequence[LinkComparison]) -> tuple[BoundVerdict, ...]:
    """Judges each collective over each mesh dim, those with the most time first.

    Args:
        links: comparisons with a topology, if there is one.
    """
    arrivals: dict[_Kind, Arrivals] = {
        (row.mesh_dim, row.collective, row.group_size): row
        for row in job.arrivals or (_arrivals_in_logs(job) if job.lacks_times else ())
    }
    calls_by_kind = group_by(
        (call for call in job.collectives if call.calls_in_steps and call.group_size != 1),
        lambda call: (call.mesh_dim, call.collective, call.group_size),
    )
    verdicts = [_judge(job, kind, calls, arrivals.get(kind), links) for kind, calls in calls_by_kind.items()]
    return tuple(sorted(verdicts, key=lambda verdict: -verdict.time_s))


def _arrivals_in_logs(job: Job) -> Iterator[Arrivals]:
    """Yields the times of a job that was read from logs, which do not show which rank came last."""
    known = [call for call in job.collectives if call.transfer_s is not None and call.group_size]
    for kind, calls in group_by(
        known, lambda call: (call.mesh_dim, call.collective, call.group_size)
    ).items():
        time_s = sum(call.mean_s * call.count for call in calls)
        waiting_s = time_s - sum((call.transfer_s or 0.0) * call.count for call in calls)
        yield Arrivals(
            mesh_dim=kind[0],
            collective=kind[1],
            group_size=kind[2] or 0,
            calls=sum(call.count for call in calls) // (kind[2] or 1),
            time_s=time_s,
            waiting_s=max(waiting_s, 0.0),
        )


def _judge(
    job: Job,
    kind: _Kind,
    calls: Sequence[Collective],
    arrivals: Arrivals | None,
    links: Sequence[LinkComparison],
) -> BoundVerdict:
    """Judges one collective over one mesh dim."""
    time_s = sum(call.mean_s * call.calls_in_steps for call in calls)
    if arrivals is None or not arrivals.time_s:
        return BoundVerdict(*kind, "inconclusive", time_s, why=_why_unmatched(job, kind))
    share, error = (part_s / arrivals.time_s for part_s in (arrivals.waiting_s, arrivals.clock_error_s))
    bounds = [_bound_by(share + sign * error) for sign in (-1, 0, 1)]
    longest_s, longest_waiting_s = arrivals.longest_wait_s
    remaining_s = arrivals.time_s - longest_s
    without_longest = (arrivals.waiting_s - longest_waiting_s) / remaining_s if remaining_s > 0 else share
    per_rank_s = arrivals.calls * arrivals.group_size
    reasons = {
        f"{plural(arrivals.calls, 'call')} in steps, expected at least {MIN_CALLS}: record more --steps": (
            arrivals.calls < MIN_CALLS
        ),
        f"the clocks are known to {format_seconds(arrivals.clock_error_s / per_rank_s)}, too coarse for calls of "
        f"{format_seconds(arrivals.time_s / per_rank_s)}": len({*bounds}) > 1,
        f"one of {arrivals.calls} calls has {longest_waiting_s / (arrivals.waiting_s or 1):.0%} of the waiting": (
            abs(share - without_longest) > MAX_EFFECT_OF_CALL
            and _bound_by(without_longest) != _bound_by(share)
        ),
    }
    why = next((reason for reason, applies in reasons.items() if applies), "")
    bound = "inconclusive" if why else bounds[1]
    if bound == "arrival" and arrivals.late_rank is None:
        why = "logs do not show which rank it is" if job.lacks_times else _NO_LATE_RANK
    rows = [row for row in links if row.reference_s and row.excludes_waiting]
    rows = [row for row in rows if (row.kind.mesh_dim, row.kind.collective, row.kind.group_size) == kind]
    reference_s = sum((row.reference_s or 0.0) * row.count for row in rows)
    return BoundVerdict(
        *kind,
        bound,
        time_s,
        calls=arrivals.calls,
        waiting_share=share,
        late_rank=arrivals.late_rank,
        late_s=arrivals.late_s,
        late_share=arrivals.late_waiting_s and arrivals.late_waiting_s / arrivals.time_s,
        slowdown=sum(row.time_s * row.count for row in rows) / reference_s if reference_s else None,
        reference=rows[0].reference if reference_s else "",
        why=why,
    )


def _bound_by(waiting_share: float) -> Bound:
    return "arrival" if waiting_share > MOSTLY else "transfer" if waiting_share < 1 - MOSTLY else "mixed"


def _why_unmatched(job: Job, kind: _Kind) -> str:
    """Returns the reason why the waiting time of a collective is unknown."""
    _, collective, group_size = kind
    reasons = {
        "the trace does not show which collective it is": collective == UNKNOWN,
        f"a rank may leave a {collective} before the others arrive": collective not in SYNCHRONIZING,
        "the trace does not show its process group": group_size is None,
        f"that needs the traces of all ranks of a group (have {len(job.ranks)} of {job.world_size})": (
            len(job.ranks) < job.world_size
        ),
    }
    return next(
        (reason for reason, applies in reasons.items() if applies),
        "the calls of its ranks could not be matched; profile the traces again if an older dtbench wrote this profile",
    )
