"""The ranks of a job on one clock, and in each collective who came when. Times in us.

The clocks of hosts differ, and traces do not say by how much. A collective ends on all ranks of its group about
together: kernels of a ring within a hop, so the median difference of the ends is that of the clocks, and their scatter
its error. Gloo's transports end apart by up to what they take once all are there, which is the time in one of the rank
that comes last: the shortest are used, and what they take is the error.
Calls are joined by the number that the process group gave them where traces have it, else the n-th call of a kind over
a group is the n-th on every rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from dtbench.grouping import group_by
from dtbench.records.job import Waits
from dtbench.traces.communication import Call
from dtbench.traces.rank_trace import RankTrace

# Those that no rank can leave before all have come. A broadcast's root, or a sender, may be gone long before.
_END_TOGETHER = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))
# Ranks of one host have one clock, as far as the ends of their collectives do not say otherwise: by more than gloo's
# transports end apart. Each process turns the CPU's counter into time for itself, to well within SAME_CLOCK_US.
SAME_HOST_US, SAME_CLOCK_US = 5e3, 20.0
_Key = tuple[object, ...]


@dataclass
class Together:
    """shift_us, error_us: by rank, what brings its times to the first rank's clock, and how far off that may be; ranks
    that are `apart` have another. waits: by mesh dim. moving_us: (rank, index of its call) -> from the last arrival to
    its end."""

    shift_us: dict[int, float] = field(default_factory=dict)
    error_us: dict[int, float] = field(default_factory=dict)
    waits: list[Waits] = field(default_factory=list)
    moving_us: dict[tuple[int, int], float] = field(default_factory=dict)
    apart: set[int] = field(default_factory=set)
    by: str = ""


def bring_together(traces: Sequence[RankTrace]) -> Together:
    together = Together()
    joined = _joined(traces)
    _align(traces, joined, together)
    _find_waits(traces, joined, together)
    return together


def _joined(traces: Sequence[RankTrace]) -> dict[_Key, dict[int, int]]:
    """The same call of several ranks: a key of it -> by rank the index of its call."""
    joined: dict[_Key, dict[int, int]] = {}
    members_of: dict[object, int] = {}  # numbers of sets of ranks, which may be long
    for trace in traces:
        numbers: Counter[_Key] = Counter()
        for name, calls in group_by(enumerate(trace.calls), lambda one: one[1].group.key).items():
            group = calls[0][1].group
            world = group.ranks is None and group.size == trace.world_size
            if group.size is None or not (world or trace.rank in (group.ranks or ())):
                continue
            members = members_of.setdefault(group.ranks or group.size, len(members_of))
            for index, call in calls:
                if call.collective in ("send", "recv", "send_recv", "unknown"):
                    continue
                kind: _Key = (members, name, call.collective)
                key = (*kind, "seq", call.sequence)
                if call.sequence is None:
                    key = (*kind, "nth", numbers[kind])
                    numbers[kind] += 1
                joined.setdefault(key, {}).setdefault(trace.rank, index)
    # Traces that begin or end at different calls show different numbers of them: then the n-th is not the n-th.
    sizes = {(key[:3], len(ranks)) for key, ranks in joined.items() if key[3] == "nth"}
    odd = {kind for kind, count in Counter(kind for kind, _ in sizes).items() if count > 1}
    return {key: of for key, of in joined.items() if len(of) > 1 and key[:3] not in odd}


def _align(traces: Sequence[RankTrace], joined: Mapping[_Key, Mapping[int, int]], together: Together) -> None:
    by_rank = {trace.rank: trace for trace in traces}
    ends: dict[
        tuple[int, int], list[tuple[float, float]]
    ] = {}  # what a call takes once all are there, and ends apart
    for key, of in joined.items():
        if key[2] in _END_TOGETHER:
            calls = {rank: by_rank[rank].calls[index] for rank, index in of.items()}
            moving, first = min(call.end - call.arrival for call in calls.values()), min(calls)
            for rank in calls.keys() - {first}:
                ends.setdefault((first, rank), []).append((moving, calls[first].end - calls[rank].end))
    neighbours: dict[int, list[tuple[int, float, float]]] = {}
    for (a, b), apart in ends.items():
        kernels = by_rank[a].on_gpu and by_rank[b].on_gpu
        used = np.array(apart if kernels else sorted(apart)[: max(len(apart) // 4, 3)])
        shift = float(np.median(used[:, 1]))
        # Of a normal distribution the sigma.
        scatter = float(np.median(np.abs(used[:, 1] - shift))) * 1.4826
        error = max(scatter, 0.0 if kernels else float(np.median(used[:, 0])))
        error = error if len(apart) > 2 else float("inf")
        same_clock, host = by_rank[b].zero_us - by_rank[a].zero_us, by_rank[a].host
        if host and host == by_rank[b].host and abs(shift - same_clock) < 3 * scatter + SAME_HOST_US:
            shift, error = same_clock, SAME_CLOCK_US
        neighbours.setdefault(a, []).append((b, shift, error))
        neighbours.setdefault(b, []).append((a, -shift, error))
    for trace in traces:
        if trace.rank in together.shift_us:
            continue
        # One that shares no collective with the first: by the host's clock, else by its own.
        same_clock = trace is traces[0] or (bool(trace.host) and trace.host == traces[0].host)
        together.shift_us[trace.rank] = trace.zero_us - traces[0].zero_us if same_clock else 0.0
        together.error_us[trace.rank] = SAME_CLOCK_US if same_clock and trace is not traces[0] else 0.0
        waiting = deque([trace.rank])
        while waiting:
            rank = waiting.popleft()
            if not same_clock:
                together.apart.add(rank)
            for other, shift, error in neighbours.get(rank, ()):
                if other not in together.shift_us:
                    together.shift_us[other] = together.shift_us[rank] + shift
                    together.error_us[other] = together.error_us[rank] + error
                    waiting.append(other)
    if ends:
        joined_by = "numbers" if any(key[3] == "seq" for key in joined) else "order"
        together.by = f"the ends of collectives, joined by their {joined_by}"


def _find_waits(
    traces: Sequence[RankTrace], joined: Mapping[_Key, Mapping[int, int]], together: Together
) -> None:
    by_rank = {trace.rank: trace for trace in traces}
    dims: dict[tuple[str, int], _DimWaits] = {}
    is_counted = {trace.rank: trace.steps.hold([call.issued for call in trace.calls]) for trace in traces}
    for of in joined.values():
        calls = {rank: by_rank[rank].calls[index] for rank, index in of.items()}
        call = next(iter(calls.values()))
        if len(of) != call.group.size or any(rank not in together.shift_us for rank in of):
            continue
        arrivals = {rank: calls[rank].arrival + together.shift_us[rank] for rank in of}
        last_at = max(arrivals.values())
        for rank, index in of.items():
            shift = together.shift_us[rank]
            moving = calls[rank].end + shift - max(last_at, calls[rank].start + shift)
            together.moving_us[rank, index] = max(moving, 0.0)
        if call.collective in (*_END_TOGETHER, "broadcast") and all(
            is_counted[rank][index] for rank, index in of.items()
        ):
            dims.setdefault((call.group.mesh_dim, len(of)), _DimWaits()).add(arrivals, calls, together)
    together.waits = [of.record(*dim) for dim, of in sorted(dims.items())]


class _DimWaits:
    def __init__(self) -> None:
        self.calls = self.unclear = 0
        self.moving_us = 0.0
        self.waiting_us: Counter[int] = Counter()
        self.late_us: dict[int, list[float]] = {}

    def add(self, arrivals: Mapping[int, float], calls: Mapping[int, Call], together: Together) -> None:
        order = sorted(arrivals, key=arrivals.__getitem__)
        last, second = order[-1], order[-2]
        self.calls += 1
        for rank in order[:-1]:
            self.waiting_us[rank] += arrivals[last] - arrivals[rank]  # type: ignore[assignment]
        ends = [calls[rank].end + together.shift_us[rank] for rank in order]
        self.moving_us += max(median(ends) - arrivals[last], 0.0)
        if arrivals[last] - arrivals[second] > together.error_us[last] + together.error_us[second]:
            behind = arrivals[last] - median(arrivals[rank] for rank in order[:-1])
            self.late_us.setdefault(last, []).append(behind)
        else:
            self.unclear += 1

    def record(self, mesh_dim: str, size: int) -> Waits:
        return Waits(
            mesh_dim=mesh_dim,
            group_size=size,
            calls=self.calls,
            waiting_s={str(rank): us / 1e6 for rank, us in sorted(self.waiting_us.items())},
            moving_s=self.moving_us / 1e6,
            last={str(rank): len(us) for rank, us in sorted(self.late_us.items())},
            late_s={str(rank): fmean(us) / 1e6 for rank, us in sorted(self.late_us.items())},
            unclear=self.unclear,
        )
