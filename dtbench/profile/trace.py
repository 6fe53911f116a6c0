"""Traces of ranks: as one Chrome trace on one clock, and what they come to per section, rank and collective. Pure.

Events are dicts of the Chrome trace format ("X": complete, `ts` and `dur` in microseconds), as
torch.profiler writes them; Perfetto and chrome://tracing read the result. An interval is (start, end), half open;
`union` and `difference` give sorted, disjoint ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dtbench.profile.stages import HANDED_OVER, Span
from dtbench.records.profile import ITERATION, LANES, IterationParts, RankSection, Skew
from dtbench.suite.grouping import group_by

# An event as torch and the viewers have it.
Event = dict[str, Any]

_FIRST_TID = 10
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
Interval = tuple[float, float]


class RankCollective(NamedTuple):
    """One collective of one rank, us on the merged clock. arrival_us: when this rank came to it.

    It lasts from the rank's call (a GPU: its kernel's start) until the transport is done.
    """

    kind: str
    arrival_us: float
    end_us: float


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded. shift_us: added to its times gives those on the merged clock; uncertainty_us: of that."""

    rank: int
    host: str
    device: str
    events: Sequence[Event]
    shift_us: float = 0.0
    uncertainty_us: float = 0.0


@dataclass(frozen=True)
class Iteration:
    """One iteration of a section on one rank, and what was done in it; all on the merged clock, us."""

    section: str
    start_us: float
    end_us: float
    collectives: tuple[RankCollective, ...]
    compute: tuple[Interval, ...]

    @property
    def exposed(self) -> list[Interval]:
        """Communication that no compute of the same rank covers."""
        return difference((c[1:] for c in self.collectives), self.compute)

    @property
    def parts_us(self) -> IterationParts:
        whole, exposed = self.end_us - self.start_us, length(self.exposed)
        parts = {"communication": length(c[1:] for c in self.collectives), "compute": length(self.compute)}
        parts |= {"exposed": exposed, "overlap": parts["communication"] - exposed}
        return IterationParts(whole=whole, host=whole - parts["compute"] - exposed, **parts)


def iterations_of(trace: RankTrace) -> list[Iteration]:
    shift = trace.shift_us
    events = sorted((e | {"ts": e["ts"] + shift} for e in trace.events if e.get("ph") == "X"), key=_start)
    compute = compute_of(events)
    iterations: list[Iteration] = []
    for event in events:
        name, start, end = event["name"], _start(event), _end(event)
        # The same annotation is drawn on the GPU's lanes a second time.
        if not name.startswith(ITERATION) or event.get("cat") != "user_annotation":
            continue
        section = name.removeprefix(ITERATION).strip().rpartition(" #")[0]
        # What goes on after an iteration, such as the next barrier, is not its own.
        inside = collectives_of([e for e in events if start <= _start(e) < end], end)
        own = [(max(a, start), min(b, end)) for a, b in compute if a < end and b > start]
        iterations.append(Iteration(section, start, end, tuple(inside), tuple(own)))
    return iterations


def collectives_of(events: Sequence[Event], until_us: float) -> list[RankCollective]:
    """The collectives among one rank's events, by arrival and cut off at the end of the time given: NCCL's
    kernels where there are any, else the process group's calls with what gloo's threads did for them."""
    kernels = [e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()]
    if kernels:
        collectives = [
            RankCollective(_nccl_kind(e["name"]), _start(e), min(_end(e), until_us)) for e in kernels
        ]
        return sorted(collectives, key=lambda c: c.arrival_us)
    # A tensor subclass may issue a call again, inside: the innermost one is what goes to the transport.
    threads = group_by((e for e in events if e["name"].startswith("c10d::")), _thread).values()
    calls = [s for thread in threads for top in nested(thread) for s in top.walk() if not s.children]
    calls.sort(key=lambda span: span.start_ns)
    transports = sorted((e for e in events if e["name"].startswith("gloo:")), key=_start)
    ends: dict[int, float] = {}
    waiting = list(range(len(calls)))
    for transport in transports:  # gloo starts works in the order of the calls
        if waiting and calls[waiting[0]].start_ns <= _start(transport):
            ends[waiting.pop(0)] = _end(transport)
    return [
        RankCollective(
            c.name.removeprefix("c10d::").strip("_"),
            c.start_ns,
            min(max(ends.get(i, 0.0), c.end_ns), until_us),
        )
        for i, c in enumerate(calls)
    ]


def compute_of(events: Sequence[Event]) -> list[Interval]:
    """When the rank computed: its GPU's kernels and copies but for NCCL's, or without a GPU the ops of
    torch that neither communicate nor were handed to a tensor subclass."""
    gpu = [e for e in events if e.get("cat") in _GPU_WORK]
    if gpu:
        return union((_start(e), _end(e)) for e in gpu if "nccl" not in e["name"].lower())
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    return union(i for thread in group_by(ops, _thread).values() for i in _work(nested(thread)))


def _thread(event: Event) -> tuple[object, object]:
    return event.get("pid"), event.get("tid")


def nested(events: Iterable[Event]) -> list[Span]:
    """The events of one thread as trees; times in us. One that outlasts its parent is cut there."""
    top: list[Span] = []
    open_: list[Span] = []
    for event in sorted(events, key=lambda e: (_start(e), -e["dur"])):
        span = Span(event["name"], event.get("cat", ""), _start(event), _end(event))
        while open_ and open_[-1].end_ns <= span.start_ns:
            open_.pop()
        if open_:
            span.end_ns = min(span.end_ns, open_[-1].end_ns)
        (open_[-1].children if open_ else top).append(span)
        open_.append(span)
    return top


def _work(spans: Sequence[Span]) -> Iterator[Interval]:
    for span in spans:
        if span.name.startswith("aten::") and not any(
            below.name.startswith((HANDED_OVER, "c10d::", "_c10d_functional::")) for below in span.walk()
        ):
            yield (span.start_ns, span.end_ns)
        else:
            yield from _work(span.children)


def _start(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def _nccl_kind(name: str) -> str:
    """`ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)` -> `AllReduce`."""
    parts = name.partition("(")[0].split("_")
    return parts[1] if len(parts) > 1 else parts[0]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What any of them covers."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def difference(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What `some` covers and `others` does not."""
    left = union(some)
    for start, end in union(others):
        left = [
            piece for a, b in left for piece in ((a, min(b, start)), (max(a, end), b)) if piece[0] < piece[1]
        ]
    return left


def length(intervals: Iterable[Interval]) -> float:
    """How much they cover together."""
    return sum(end - start for start, end in union(intervals))


def merge(ranks: Sequence[RankTrace]) -> dict[str, object]:
    """One trace of all ranks, a process each, times in us from the earliest event on."""
    starts = [_start(e) + r.shift_us for r in ranks for e in r.events if "ts" in e and e.get("ph") != "M"]
    zero = min(starts, default=0.0)
    clock = {f"rank {r.rank}": f"+-{r.uncertainty_us:.1f} us" for r in ranks}
    return {
        "traceEvents": [event for trace in ranks for event in _rank_events(trace, zero)],
        "displayTimeUnit": "ns",
        "otherData": {"made by": "dtbench profile", "clock": clock, "zero_us": zero},
    }


def _rank_events(trace: RankTrace, zero: float) -> Iterator[Event]:
    pid, shift = trace.rank, trace.shift_us - zero

    def named(tid: int, fact: str, /, **args: object) -> Event:
        return {"ph": "M", "name": fact, "pid": pid, "tid": tid, "args": args}

    yield named(0, "process_name", name=f"rank {trace.rank} ({trace.host}, {trace.device})")
    yield named(0, "process_sort_index", sort_index=pid)
    tids: dict[tuple[object, object], int] = {}
    for event in sorted((e for e in trace.events if e.get("ph") == "X"), key=_start):
        tid = tids.setdefault(_thread(event), _FIRST_TID + len(tids))
        at = {"ts": round(_start(event) + shift, 3), "dur": event["dur"], "pid": pid, "tid": tid}
        args = {"args": event["args"]} if event.get("args") else {}
        yield {"name": event["name"], "cat": event.get("cat", ""), "ph": "X"} | at | args
    threads = {_thread(e): e["args"]["name"] for e in trace.events if e.get("ph") == "M"}
    names = {tid: str(threads.get(thread, f"thread {thread[1]}")) for thread, tid in tids.items()}
    for tid, name in (names | LANES).items():
        yield named(tid, "thread_name", name=name)
        yield named(tid, "thread_sort_index", sort_index=tid)
    for iteration in iterations_of(trace):
        drawn = [(1, c.kind, c[1:]) for c in iteration.collectives]
        drawn += [(2, "compute", interval) for interval in iteration.compute]
        drawn += [(3, "exposed", interval) for interval in iteration.exposed]
        for tid, name, (start, end) in drawn:
            at = {"ts": round(start - zero, 3), "dur": round(end - start, 3), "pid": pid, "tid": tid}
            yield {"name": name, "cat": LANES[tid], "ph": "X"} | at


def sections_of(
    traces: Sequence[RankTrace],
    groups: Mapping[str, Sequence[Sequence[int]]],
    plain_us: Mapping[str, Sequence[float]],
) -> list[RankSection]:
    """The sections in the order in which rank 0 ran them.

    groups: section -> the ranks that communicate with each other. plain_us: section -> the times of
    iterations without the profiler.
    """
    recorded = {trace.rank: iterations_of(trace) for trace in traces}
    uncertainty_us = {trace.rank: trace.uncertainty_us for trace in traces}
    sections = []
    for label in dict.fromkeys(one.section for one in recorded[traces[0].rank]):
        own = {rank: [one for one in of if one.section == label] for rank, of in recorded.items()}
        apart, unmatched = skews(own, groups[label], uncertainty_us)
        slowest = [
            max(one.end_us - one.start_us for one in turn) for turn in zip(*own.values(), strict=False)
        ]
        plain, profiled = median(plain_us[label]), median(slowest) if slowest else 0.0
        sections.append(
            RankSection(
                label=label,
                iterations=len(slowest),
                parts_us={str(rank): _means(of) for rank, of in own.items()},
                skews=tuple(apart),
                unmatched=unmatched,
                plain_us=plain,
                profiled_us=profiled,
                overhead=profiled / plain - 1,
            )
        )
    return sections


def _means(iterations: Sequence[Iteration]) -> IterationParts | None:
    parts = [msgspec.structs.asdict(one.parts_us) for one in iterations]
    return IterationParts(**{name: fmean(one[name] for one in parts) for name in parts[0]}) if parts else None


def skews(
    recorded: Mapping[int, Sequence[Iteration]],
    groups: Sequence[Sequence[int]],
    uncertainty_us: Mapping[int, float],
) -> tuple[list[Skew], int]:
    """(per kind of collective how far apart the ranks arrive, iterations that could not be matched).

    recorded: of each rank, the same iterations of one section in the same order. groups: the ranks that
    communicate with each other; the n-th collective of one of them is the n-th of all. uncertainty_us:
    of each rank's clock.
    """
    apart: dict[str, list[float]] = {}
    last_ranks: dict[str, list[int | None]] = {}  # None where the clocks cannot tell
    unmatched = 0
    for group in groups:
        ranks = [rank for rank in group if rank in recorded]
        for iteration in zip(*(recorded[rank] for rank in ranks), strict=False) if len(ranks) > 1 else ():
            if len({tuple(c.kind for c in one.collectives) for one in iteration}) > 1:
                unmatched += 1
                continue
            for together in zip(*(one.collectives for one in iteration), strict=True):
                *_, (second_us, second), (last_us, last) = order = sorted(
                    zip((c.arrival_us for c in together), ranks, strict=True)
                )
                kind = together[0].kind
                apart.setdefault(kind, []).append(last_us - order[0][0])
                # Known to be last only beyond what the clocks of the two may be wrong by.
                sure = last_us - second_us > uncertainty_us.get(last, 0) + uncertainty_us.get(second, 0)
                last_ranks.setdefault(kind, []).append(last if sure else None)
    return [_skew(kind, us, Counter(last_ranks[kind])) for kind, us in sorted(apart.items())], unmatched


def _skew(kind: str, apart_us: Sequence[float], last: Counter[int | None]) -> Skew:
    unclear = last.pop(None, 0)
    late = {rank: times for rank, times in last.items() if rank is not None}
    return Skew(
        kind=kind,
        count=len(apart_us),
        mean_us=fmean(apart_us),
        p95_us=float(np.quantile(apart_us, 0.95, method="inverted_cdf")),
        late={str(rank): times for rank, times in late.items()},
        unclear=unclear,
        latest=max(late, key=lambda rank: (late[rank], -rank)) if late else None,
    )
