"""Traces of ranks as one Chrome trace on one clock, with lanes of communication and compute. Pure.

Events are dicts of the Chrome trace format ("X": complete, `ts` and `dur` in microseconds), as
torch.profiler writes them; Perfetto and chrome://tracing read the result. An interval is (start, end), half open;
`union` and `difference` give sorted, disjoint ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dtbench.profile.spans import HANDED_OVER, Span
from dtbench.records.profile import ITERATION, LANES, IterationParts
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
    """What one rank recorded. shift_us: to be added to its times to get to the merged clock;
    uncertainty_us: of that. counters: name -> (us, value) samples, on the merged clock already."""

    rank: int
    host: str
    device: str
    events: Sequence[Event]
    shift_us: float = 0.0
    uncertainty_us: float = 0.0
    counters: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Iteration:
    """One iteration of a section on one rank, and what was done in it; all on the merged clock, us."""

    section: str
    start_us: float
    end_us: float
    collectives: tuple[RankCollective, ...]
    compute: tuple[Interval, ...]

    @property
    def communication(self) -> list[Interval]:
        return union(c[1:] for c in self.collectives)

    @property
    def exposed(self) -> list[Interval]:
        """Communication that no compute of the same rank covers."""
        return difference(self.communication, self.compute)

    @property
    def parts_us(self) -> IterationParts:
        """How long each was."""
        whole, communication, compute = (
            self.end_us - self.start_us,
            length(self.communication),
            length(self.compute),
        )
        exposed = length(self.exposed)
        overlap, host = communication - exposed, whole - compute - exposed
        return IterationParts(
            whole=whole,
            communication=communication,
            compute=compute,
            overlap=overlap,
            exposed=exposed,
            host=host,
        )


def iterations_of(trace: RankTrace) -> list[Iteration]:
    """The iterations that the rank recorded, in the order of time."""
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
        RankCollective(_c10d_kind(c.name), c.start_ns, min(max(ends.get(i, 0.0), c.end_ns), until_us))
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
        if span.name.startswith("aten::") and not any(_is_dispatch(below) for below in span.walk()):
            yield (span.start_ns, span.end_ns)
        else:
            yield from _work(span.children)


def _is_dispatch(span: Span) -> bool:
    return span.name == HANDED_OVER or span.name.startswith(("c10d::", "_c10d_functional::"))


def _start(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def _c10d_kind(name: str) -> str:
    return name.removeprefix("c10d::").strip("_")


def _nccl_kind(name: str) -> str:
    """`ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)` -> `AllReduce`."""
    parts = name.partition("(")[0].split("_")
    return parts[1] if len(parts) > 1 else parts[0]


# --------------------------------------------------------------------------------- intervals


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


# --------------------------------------------------------------------------------- the merged trace


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
    for name, samples in trace.counters.items():
        for at_us, value in samples:
            yield {"name": name, "ph": "C", "pid": pid, "ts": round(at_us - zero, 3), "args": {name: value}}
