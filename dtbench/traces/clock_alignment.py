"""Aligns the clocks of a job's ranks and measures when each rank arrives at each collective. Times are microseconds.

The clocks of different hosts have unknown offsets, which the traces do not record. All ranks leave an all_reduce,
all_gather, reduce_scatter, all_to_all or barrier at nearly the same time. The median difference between their end times
therefore estimates the clock offset, and the scatter of the differences its error.

On gloo the end times differ by up to the transfer time itself. There, only the calls with the shortest transfers are
used, and their transfer time is the error.

Calls of different ranks are matched by the process group's sequence number if the traces record it. Otherwise the n-th
call of a kind over a group on one rank is matched with the n-th on the others.
"""

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from dtbench.grouping import group_by
from dtbench.records.job import BoundVerdict, Waits
from dtbench.traces.arrivals import TimedCall, judge_calls
from dtbench.traces.communication import SYNCHRONIZING
from dtbench.traces.rank_trace import RankTrace

# Ranks with the same host name share a clock, unless their end times differ by more than SAME_HOST_US; on gloo, by more
# than that beyond the transfer time. Each process converts the CPU's counter to time separately, with an error
# well below SAME_CLOCK_US.
SAME_HOST_US, SAME_CLOCK_US = 5e3, 20.0
# Identifies a call across ranks: group members, group name, collective, the kind of number ("seq" or "nth") and the
# number.
_CallKey = tuple[object, ...]
# Call key -> rank -> index of the call in the rank's trace.
_MatchedCalls = Mapping[_CallKey, Mapping[int, int]]


@dataclass
class AlignedJob:
    """The ranks of a job on the clock of the first rank.

    Attributes:
        offset_us: rank -> microseconds to add to its timestamps.
        error_us: rank -> estimated error of that offset.
        unaligned: ranks that share neither a collective nor a host with the first rank; their offset is arbitrary.
        waits: waiting times by mesh dim.
        bounds: what bounds each collective over each mesh dim.
        transfer_us: (rank, index of its call) -> microseconds from the last arrival to the end of the call.
        method: how the clocks were aligned; "" without matched collectives.
    """

    offset_us: dict[int, float] = field(default_factory=dict)
    error_us: dict[int, float] = field(default_factory=dict)
    unaligned: set[int] = field(default_factory=set)
    waits: list[Waits] = field(default_factory=list)
    bounds: list[BoundVerdict] = field(default_factory=list)
    transfer_us: dict[tuple[int, int], float] = field(default_factory=dict)
    method: str = ""


def align_clocks(traces: Sequence[RankTrace]) -> AlignedJob:
    """Aligns the clocks of all ranks, then measures arrivals and waiting times.

    Args:
        traces: one for each rank, in the order of ranks.
    """
    aligned = AlignedJob()
    matched = _match_calls(traces)
    _find_offsets(traces, matched, aligned)
    _find_waits(traces, matched, aligned)
    return aligned


def _match_calls(traces: Sequence[RankTrace]) -> _MatchedCalls:
    """Finds the collectives that several ranks recorded."""
    matched: dict[_CallKey, dict[int, int]] = {}
    member_ids: dict[object, int] = {}  # short keys for tuples of ranks, which may be long
    for trace in traces:
        numbers = defaultdict[_CallKey, Iterator[int]](itertools.count)
        for name, calls in group_by(
            enumerate(trace.calls), lambda indexed_call: indexed_call[1].group.key
        ).items():
            group = calls[0][1].group
            is_world = group.ranks is None and group.size == trace.world_size
            if group.size is None or not (is_world or trace.rank in (group.ranks or ())):
                continue
            members = member_ids.setdefault(group.ranks or group.size, len(member_ids))
            for index, call in calls:
                if call.collective in ("send", "recv", "send_recv", "unknown"):
                    continue
                kind: _CallKey = (members, name, call.collective)
                key = (*kind, "seq", call.sequence)
                if call.sequence is None:
                    key = (*kind, "nth", next(numbers[kind]))
                matched.setdefault(key, {}).setdefault(trace.rank, index)
    # If traces begin or end at different calls, their n-th calls are different ones. The number of calls shows that.
    rank_counts = {(key[:3], len(ranks)) for key, ranks in matched.items() if key[3] == "nth"}
    inconsistent = {kind for kind, count in Counter(kind for kind, _ in rank_counts).items() if count > 1}
    return {
        key: indices for key, indices in matched.items() if len(indices) > 1 and key[:3] not in inconsistent
    }


def _find_offsets(traces: Sequence[RankTrace], matched: _MatchedCalls, aligned: AlignedJob) -> None:
    """Estimates clock offsets between pairs of ranks, then adds them up from the first rank to all others."""
    by_rank = {trace.rank: trace for trace in traces}
    # Pair of ranks -> for each common call its transfer time and the difference between the end times.
    end_differences: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for key, indices in matched.items():
        if key[2] in SYNCHRONIZING:
            calls = {rank: by_rank[rank].calls[index] for rank, index in indices.items()}
            transfer, first = min(call.end - call.arrival for call in calls.values()), min(calls)
            for rank in calls.keys() - {first}:
                end_differences.setdefault((first, rank), []).append(
                    (transfer, calls[first].end - calls[rank].end)
                )
    neighbors: dict[int, list[tuple[int, float, float]]] = {}
    for (a, b), differences in end_differences.items():
        on_gpu = by_rank[a].on_gpu and by_rank[b].on_gpu
        used = np.array(differences if on_gpu else sorted(differences)[: max(len(differences) // 4, 3)])
        offset = float(np.median(used[:, 1]))
        # The factor makes the median absolute deviation the sigma of a normal distribution.
        scatter = float(np.median(np.abs(used[:, 1] - offset))) * 1.4826
        transfer = 0.0 if on_gpu else float(np.median(used[:, 0]))
        error = max(scatter, transfer)
        error = error if len(differences) > 2 else float("inf")
        same_clock_offset, host = by_rank[b].zero_us - by_rank[a].zero_us, by_rank[a].host
        largest = 3 * scatter + transfer + SAME_HOST_US
        if host and host == by_rank[b].host and abs(offset - same_clock_offset) < largest:
            offset, error = same_clock_offset, SAME_CLOCK_US
        neighbors.setdefault(a, []).append((b, offset, error))
        neighbors.setdefault(b, []).append((a, -offset, error))
    for trace in traces:
        if trace.rank in aligned.offset_us:
            continue
        # A rank that shares no collective with the first one uses the clock of their common host, else its own.
        same_clock = trace is traces[0] or (bool(trace.host) and trace.host == traces[0].host)
        aligned.offset_us[trace.rank] = trace.zero_us - traces[0].zero_us if same_clock else 0.0
        aligned.error_us[trace.rank] = SAME_CLOCK_US if same_clock and trace is not traces[0] else 0.0
        queue = deque([trace.rank])
        while queue:
            rank = queue.popleft()
            if not same_clock:
                aligned.unaligned.add(rank)
            for neighbor, offset, error in neighbors.get(rank, ()):
                if neighbor not in aligned.offset_us:
                    aligned.offset_us[neighbor] = aligned.offset_us[rank] + offset
                    aligned.error_us[neighbor] = aligned.error_us[rank] + error
                    queue.append(neighbor)
    if end_differences:
        aligned.method = "the end times of collectives, matched by " + (
            "sequence number" if any(key[3] == "seq" for key in matched) else "call order"
        )


def _find_waits(traces: Sequence[RankTrace], matched: _MatchedCalls, aligned: AlignedJob) -> None:
    """Measures transfer times and, over each mesh dim, waiting times. Uses calls that all ranks of a group recorded."""
    by_rank = {trace.rank: trace for trace in traces}
    # Mesh dim, collective and group size -> its calls in steps.
    timed_calls = defaultdict[tuple[str, str, int], list[TimedCall]](list)
    in_steps = {trace.rank: trace.steps.contain([call.issued for call in trace.calls]) for trace in traces}
    for indices in matched.values():
        calls = {rank: by_rank[rank].calls[index] for rank, index in indices.items()}
        collective, group = next((call.collective, call.group) for call in calls.values())
        if len(indices) != group.size or any(rank not in aligned.offset_us for rank in indices):
            continue
        arrivals = {rank: calls[rank].arrival + aligned.offset_us[rank] for rank in indices}
        last_arrival = max(arrivals.values())
        for rank, index in indices.items():
            call, offset = calls[rank], aligned.offset_us[rank]
            aligned.transfer_us[rank, index] = max(
                call.end + offset - max(last_arrival, call.start + offset), 0.0
            )
        if collective in (*SYNCHRONIZING, "broadcast") and all(
            in_steps[rank][index] for rank, index in indices.items()
        ):
            durations_us = {rank: call.end - call.start for rank, call in calls.items()}
            last, time_us = max(arrivals, key=arrivals.__getitem__), sum(durations_us.values())
            timed_calls[group.mesh_dim, collective, len(indices)].append(
                TimedCall(
                    arrivals=arrivals,
                    end=median(call.end + aligned.offset_us[rank] for rank, call in calls.items()),
                    time_us=time_us,
                    waiting_us=max(time_us - sum(aligned.transfer_us[call] for call in indices.items()), 0.0),
                    clock_error_us=sum(
                        min(aligned.error_us[rank] + aligned.error_us[last], durations_us[rank])
                        for rank in calls.keys() - {last}
                    ),
                )
            )
    aligned.waits = [
        _sum_waits(*dim, [call for kind in kinds for call in timed_calls[kind]], aligned.error_us)
        for dim, kinds in sorted(group_by(timed_calls, lambda kind: (kind[0], kind[2])).items())
    ]
    aligned.bounds = [
        judge_calls(*kind, calls, aligned.error_us)
        for kind, calls in sorted(timed_calls.items())
        if kind[1] in SYNCHRONIZING
    ]


def _sum_waits(
    mesh_dim: str,
    group_size: int,
    calls: Sequence[TimedCall],
    error_us: Mapping[int, float],
) -> Waits:
    """Sums the waiting times over one mesh dim.

    Args:
        calls: the collectives over it.
        error_us: rank -> error of its clock offset.
    """
    waiting_us = defaultdict[int, float](float)
    late_us = defaultdict[int, list[float]](list)
    for call in calls:
        last_arrival = max(call.arrivals.values())
        for rank, arrival in call.arrivals.items():
            waiting_us[rank] += last_arrival - arrival
        if late := call.late_rank(error_us):
            late_us[late[0]].append(late[1])
    return Waits(
        mesh_dim=mesh_dim,
        group_size=group_size,
        calls=len(calls),
        waiting_s={str(rank): us / 1e6 for rank, us in sorted(waiting_us.items())},
        transfer_s=sum(max(call.end - max(call.arrivals.values()), 0.0) for call in calls) / 1e6,
        last_counts={str(rank): len(us) for rank, us in sorted(late_us.items())},
        late_s={str(rank): fmean(us) / 1e6 for rank, us in sorted(late_us.items())},
        unclear=len(calls) - sum(map(len, late_us.values())),
    )
