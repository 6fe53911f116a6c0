"""One rank's trace: when it computed, copied and communicated, and what each collective was. Times in us.

With a GPU the kernels are the work, and a collective is a kernel; what it was stands in its own arguments, or in those
of the call that launched it. Without one, ops of torch are the work, and gloo's transports the collectives.
"""

from __future__ import annotations

import re
import time
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dtbench.profile import communication as comm
from dtbench.profile.communication import Call, Group
from dtbench.profile.intervals import Intervals, intervals, union
from dtbench.profile.kineto import Args, Event, Trace, args_of, told
from dtbench.profile.steps import Steps, steps_of
from dtbench.suite.errors import UnreadableRunError
from dtbench.suite.grouping import group_by

# What events are, by their category: kernel, copy, launch, op, mark (on a GPU's stream), trace. Older traces begin them
# with a capital.
_KINDS = dict.fromkeys(("gpu_memcpy", "gpu_memset", "memcpy", "memset"), "copy")
_KINDS |= dict.fromkeys(
    ("cuda_runtime", "cuda_driver", "runtime", "xpu_runtime", "privateuse1_runtime"), "launch"
)
_KINDS |= dict.fromkeys(("cpu_op", "operator", "user_annotation"), "op")
_KINDS |= {"kernel": "kernel", "gpu_user_annotation": "mark", "trace": "trace"}
_KINDS |= {name.capitalize(): kind for name, kind in _KINDS.items()}
_OF_CALLS = re.compile(r"^(?:c10d::|record_param_comms|nccl:|_c10d_functional)")
# An op that is handed to a tensor subclass: what is around it is dispatch, not work.
_HANDED_OVER = "PythonSubclass"
_NO_ASKER = re.compile(r"^(?:autograd::engine|torch::autograd|ProfilerStep|PythonSubclass|## )|wait_tensor")
_AFTER_CALL_US = 5e6  # a transport that begins later than this after a call is another one's
_FAR_US = 1e13  # a third of a year
_OVERFLOWN_US = 2**31 / 1e3  # a duration of -1 or 2^31 ns that lost its sign
_MOST_WAITING = 64  # calls of one kind among which a transport's is looked for


class Message(NamedTuple):
    """A kernel that communicates, a transport of gloo, or what is drawn on a stream, us."""

    name: str
    start: float
    end: float
    thread: int
    args: Args


class Op(NamedTuple):
    """A call or an annotation of the host, us. inside: what it was called from, outermost first."""

    name: str
    start: float
    end: float
    thread: int
    args: Args
    inside: tuple[str, ...] = ()


@dataclass
class RankTrace:
    """What a trace comes to. compute, copies: united. launched: (start of a kernel, when the host launched it), by
    start. notes: what was left out or is not told."""

    rank: int
    world_size: int
    backend: str
    zero_us: float
    source: str = ""
    torch: str = ""
    host: str = ""
    device: str = ""
    calls: list[Call] = field(default_factory=list)
    compute: Intervals = field(default_factory=lambda: intervals(()))
    copies: Intervals = field(default_factory=lambda: intervals(()))
    launched: Intervals = field(default_factory=lambda: intervals(()))
    span: tuple[float, float] = (0.0, 0.0)
    steps: Steps = field(default_factory=Steps)
    on_gpu: bool = False
    notes: list[str] = field(default_factory=list)
    mbs: float = 0.0


class _Spans:
    """Many (start, us) of one kind, and a number each."""

    def __init__(self) -> None:
        self.ts, self.dur, self.tag = array("d"), array("d"), array("q")

    def add(self, ts: float, dur: float, tag: int) -> None:
        self.ts.append(ts)
        self.dur.append(dur)
        self.tag.append(tag)

    def arrays(self) -> tuple[Any, Any, Any]:
        return np.array(self.ts), np.array(self.dur), np.array(self.tag)

    def united(self, most: float) -> tuple[Intervals, int]:
        """What they cover, and how many were left out because they take longer than `most`."""
        ts, dur, _ = self.arrays()
        good = dur <= most
        return union(np.column_stack([ts, ts + dur])[good]), int((~good).sum())


class _Ops(_Spans):
    """Of one thread: tag is the name's number; args, by index: of c10d's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.args: dict[int, Args] = {}


def read_rank(path: Path, fallback_rank: int) -> RankTrace:
    """The trace in a file. fallback_rank: where it does not say whose it is.

    Raises:
        UnreadableRunError: it is no trace.
    """
    return _Reader(path, fallback_rank).read()


class _Reader:
    def __init__(self, path: Path, fallback_rank: int) -> None:
        self._trace, self._fallback_rank = Trace(path), fallback_rank
        self._zero: int | None = None
        self._kernels, self._copies, self._launches = _Spans(), _Spans(), _Spans()
        self._ops: dict[Any, _Ops] = {}  # by thread
        self._names: dict[str, int] = {}
        self._annotations: list[tuple[str, float, float]] = []
        self._messages: list[Message] = []  # kernels that communicate
        self._transports: list[Message] = []  # gloo's
        self._marks: list[Message] = []  # nccl's annotations on the GPU's streams
        self._communicates: dict[str, bool] = {}  # by name: kernels' names are few and long
        self._window_us: float | None = None
        self._wrong: Counter[str] = Counter()
        self._threads: dict[Any, int] = {}

    def read(self) -> RankTrace:
        began = time.perf_counter()
        for events in self._trace.events():
            if self._zero is None:
                self._zero = _middle(
                    [event.ts for event in events if _KINDS.get(event.cat, "trace") != "trace"]
                )
            for event in events:
                if event.ph == "X" and (kind := _KINDS.get(event.cat)):
                    self._add(event, kind)
        rank = self._finish()
        rank.mbs = self._trace.size / 1e6 / max(time.perf_counter() - began, 1e-9)
        return rank

    def _add(self, event: Event, kind: str) -> None:
        try:
            ts = event.ts if type(event.ts) is not str else float(event.ts)
            start, duration = float(ts - (self._zero or 0)), float(event.dur)  # type: ignore[arg-type]
        except (TypeError, ValueError, ArithmeticError):
            start = duration = float("nan")
        if kind == "trace":
            self._window_us = duration if 0 < duration < _FAR_US else None
        elif not -_FAR_US < start < _FAR_US or duration != duration:
            self._wrong["without a time"] += 1
        elif not 0 <= duration < _FAR_US or -2e-3 < duration - _OVERFLOWN_US < 2e-3:
            self._wrong["of an impossible duration"] += 1
        elif kind == "op":
            self._add_op(event, start, duration)
        elif kind == "launch":
            self._launches.add(start, self._thread(event), _correlation(event))
        elif kind == "copy":
            self._copies.add(start, duration, -1)
        elif kind == "kernel":
            name = event.name
            if (communicates := self._communicates.get(name)) is None:
                communicates = self._communicates[name] = comm.COMMUNICATES.search(name) is not None
            if communicates:
                self._messages.append(self._message(event, start, duration))
            else:
                self._kernels.add(start, duration, _correlation(event))
        elif event.name.startswith("nccl:"):
            self._marks.append(self._message(event, start, duration))

    def _add_op(self, event: Event, start: float, duration: float) -> None:
        name = event.name
        if name.startswith("gloo:"):
            self._transports.append(self._message(event, start, duration))
            return
        if (ops := self._ops.get(thread := self._thread(event))) is None:
            ops = self._ops[thread] = _Ops()
        if _OF_CALLS.match(name):
            # An event's arguments hold on to all the text that they stand in.
            ops.args[len(ops.ts)] = args_of(event)
        elif event.cat == "user_annotation":
            self._annotations.append((name, start, start + duration))
        ops.add(start, duration, self._names.setdefault(name, len(self._names)))

    def _message(self, event: Event, start: float, duration: float) -> Message:
        return Message(event.name, start, start + duration, self._thread(event), args_of(event))

    def _thread(self, event: Event) -> int:
        """Its number, in the order of `self._threads`."""
        try:
            return self._threads.setdefault((event.pid, event.tid), len(self._threads))
        except TypeError:
            return -1

    def _finish(self) -> RankTrace:
        header = self._trace.header
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        ours = header.get("dtbench")
        ours = ours if isinstance(ours, dict) else {}
        rank = comm.whole(info.get("rank"))
        base_us = (comm.whole(header.get("baseTimeNanoseconds"), 2**63) or 0) / 1e3
        trace = RankTrace(
            rank=self._fallback_rank if rank is None else rank,
            world_size=comm.whole(info.get("world_size")) or 1,
            backend=told(info.get("backend", "")),
            zero_us=(self._zero or 0) + base_us,
            source=self._trace.path.name,
            torch=told(ours.get("torch", "")),
            host=told(ours.get("host", header.get("host_name", ""))),
            device=told(ours.get("device", "")),
        )
        if self._zero is None:
            what = f"{self._trace.path} holds no event with a time"
            raise UnreadableRunError(f"{what}, expected a profiler's trace")
        trace.on_gpu = bool(self._kernels.ts or self._messages)
        launched = self._launched() if trace.on_gpu else None
        trace.steps = steps_of(self._annotations, launched)
        most = self._longest(trace)
        calls, work = self._host_calls(trace.on_gpu)
        trace.compute, long = (self._kernels if trace.on_gpu else work).united(most)
        trace.copies, long_copies = self._copies.united(most)
        messages = [of for of in self._messages if of.end - of.start <= most]
        transports = [of for of in self._transports if of.end - of.start <= most]
        left = len(self._messages) + len(self._transports) - len(messages) - len(transports)
        self._wrong["of an impossible duration"] += long + long_copies + left
        if launched is not None:
            trace.launched = launched[np.argsort(launched[:, 1], kind="stable")][:, ::-1]
        groups = comm.groups_of(header)
        own = {thread for thread, ops in self._ops.items() if ops.args}
        numbers = {of.thread for of in transports} - own
        ids = {number: tid for number, (_, tid) in enumerate(self._threads) if number in numbers}
        pools = _pools(ours, ids, groups)
        trace.calls = [
            *self._kernel_calls(messages, calls, groups),
            *_gloo_calls(transports, calls, groups, pools),
        ]
        if len(groups) == 1:
            (only,) = groups.values()
            trace.calls = [call if call.group.key else call._replace(group=only) for call in trace.calls]
        trace.calls.sort(key=lambda call: (call.issued, call.start, call.end))
        trace.span = self._span(trace)
        if not trace.steps.marks:
            trace.steps = steps_of([], launched, trace.calls)
        trace.notes = list(self._notes(trace, len(calls)))
        return trace

    # ---- the host ----

    def _host_calls(self, on_gpu: bool) -> tuple[list[Op], _Spans]:
        """The calls of c10d, each with what it was called from; and without a GPU when torch's ops worked: those that
        neither communicate nor were handed to a subclass."""
        calls: list[Op] = []
        work = _Spans()
        names = list(self._names)
        for thread, ops in self._ops.items():
            if on_gpu and not ops.args:
                continue
            open_: list[tuple[float, str, float]] = []  # end, name, start; outermost first
            is_work: list[bool] = []
            inner: list[list[tuple[float, float]]] = []  # work in it
            for index, start, end in _in_order(ops):
                while open_ and open_[-1][0] <= start:
                    until, closed, began = open_.pop()
                    below = inner.pop()
                    works = is_work.pop()
                    mine = [(began, until)] if works and closed.startswith("aten::") else below
                    if open_:
                        inner[-1] += mine
                        is_work[-1] &= works
                    else:
                        for a, b in mine:
                            work.add(a, b - a, -1)
                if index < 0:
                    break
                name, args = names[ops.tag[index]], ops.args.get(index)
                if args is not None:
                    # A step that begins inside of the optimizer's outlasts it.
                    inside = tuple(of for until, of, _ in open_[-_MOST_WAITING:] if until >= end)
                    calls.append(Op(name, start, end, thread, args, inside))
                open_.append((end, name, start))
                is_work.append(args is None and name != _HANDED_OVER)
                inner.append([])
        return calls, work

    # ---- the GPU ----

    def _launched(self) -> Any:
        """Of all kernels (launch, start) by launch; None where the trace has not both."""
        ts, _, tag = self._kernels.arrays()
        launch_ts, _, launch_tag = self._launches.arrays()
        if not len(ts) or not len(launch_ts):
            return None
        order = np.argsort(launch_tag, kind="stable")
        at = np.minimum(np.searchsorted(launch_tag, tag, sorter=order), len(order) - 1)
        joined = (launch_tag[order[at]] == tag) & (tag >= 0)
        pairs = np.column_stack([launch_ts[order[at]][joined], ts[joined]])
        return pairs[np.argsort(pairs[:, 0], kind="stable")]

    def _longest(self, trace: RankTrace) -> float:
        """A duration beyond the trace's, or beyond the longest step's, cannot be."""
        spans = (self._kernels, self._copies) if trace.on_gpu else self._ops.values()
        lists = (self._messages, self._transports)
        starts = np.concatenate([*(of.ts for of in spans), *([one.start for one in of] for of in lists)])
        most = self._window_us or (float(np.ptp(starts)) if len(starts) > 9 else 0.0)
        return min(most or float("inf"), trace.steps.longest_us or float("inf"))

    def _kernel_calls(
        self, messages: Sequence[Message], host: Sequence[Op], groups: Mapping[str, Group]
    ) -> Iterator[Call]:
        under_way, marked = _HostCalls(host), _Marked(self._marks, host)
        numbers = np.array([_number(message.args.correlation) for message in messages])
        ts, thread, tag = self._launches.arrays()
        wanted = np.isin(tag, numbers) if len(messages) else []
        found = (of[wanted].tolist() for of in (tag, ts, thread))
        launches = {number: (at, int(of)) for number, at, of in zip(*found, strict=True)}
        for message, number in zip(messages, numbers.tolist(), strict=True):
            launch = launches.get(number) if number >= 0 else None
            around = under_way.around(launch[1], launch[0]) if launch else []
            if not around and (op := marked.op(message)):
                around = under_way.around(op.thread, op.start)
            issued = launch[0] if launch else around[0].start if around else message.start
            yield _described(message, around, groups)._replace(issued=issued)

    # ---- the whole ----

    def _span(self, trace: RankTrace) -> tuple[float, float]:
        """From the first to the last of the GPU's work; without one, of all that the host did."""
        edges = [
            of for of in (trace.compute, trace.copies, intervals(c[1:3] for c in trace.calls)) if len(of)
        ]
        if not trace.on_gpu:
            host = np.concatenate(
                [np.column_stack(of.arrays()[:2]) for of in self._ops.values()] or [[(0, 0)]]
            )
            edges += [host.cumsum(axis=1)]
        if not edges:
            return 0.0, 0.0
        return min(float(of[:, 0].min()) for of in edges), max(float(of[:, 1].max()) for of in edges)

    def _notes(self, trace: RankTrace, host_calls: int) -> Iterator[str]:
        where = f"rank {trace.rank}"
        if self._trace.cut_off:
            yield f"{where}: the trace is cut off; what stands before its end was read"
        if self._trace.damaged:
            yield f"{where}: {self._trace.damaged} events are damaged and were left out"
        for what, count in sorted(self._wrong.items()):
            if count:
                yield f"{where}: {count} events {what} were left out"
        unknown = sum(call.collective == comm.UNKNOWN for call in trace.calls)
        if unknown:
            yield (
                f"{where}: {unknown} of {len(trace.calls)} collectives are not told: their kernels' names say nothing "
                "and the calls that launched them are not in the trace"
            )
        if (
            unsized := sum(call.bytes is None and call.collective != "barrier" for call in trace.calls)
            - unknown
        ):
            yield f"{where}: {unsized} collectives carry no size; record_shapes=True of torch.profiler has it"
        if host_calls and not trace.calls and not trace.on_gpu:
            yield f"{where}: its collectives have no kernels: it was recorded without ProfilerActivity.CUDA"
        if not trace.steps.marks:
            yield f"{where}: no steps are told; profiler.step(), or an annotation around each, marks them"


def _gloo_calls(
    transports: Sequence[Message], host: Sequence[Op], groups: Mapping[str, Group], pools: Mapping[int, str]
) -> Iterator[Call]:
    """A transport belongs to the first call before it of its kind and shapes that has none yet: a call starts it, or
    queues it behind others of its group."""
    waiting: dict[str, deque[Op]] = {}
    calls = sorted((op for op in host if _is_call(op.name)), key=lambda op: -op.start)
    for transport in sorted(transports, key=lambda one: one.start):
        _, start, end, thread, args = transport
        name = comm.collective_of(transport.name)
        while calls and calls[-1].start <= start:
            op = calls.pop()
            waiting.setdefault(comm.collective_of(op.name), deque()).append(op)
        group = groups.get(pools.get(thread, ""), Group(""))
        dtype, bytes_ = comm.payload_of_shapes(transport.name, args, group.size)
        # gloo reduces and scatters by an all-reduce.
        for kind in (name, "reduce_scatter") if name == "all_reduce" else (name,):
            of = waiting.get(kind, deque())
            while of and start - of[0].start > _AFTER_CALL_US:
                of.popleft()
            op = next((op for op in islice(of, _MOST_WAITING) if _carried_by(op, args)), None)
            if op is not None:
                of.remove(op)
                own, size = comm.payload_of_shapes(op.name, op.args, group.size, dtype)
                if own is not None:
                    dtype, bytes_ = own, size if size or op.name.endswith("gather_") else bytes_
                yield Call(op.start, start, end, kind, group, dtype, bytes_, None, _asker(op), op.start)
                break
        else:
            yield Call(start, start, end, name, group, dtype, bytes_, issued=start)


def _correlation(event: Event) -> int:
    return _number(args_of(event).correlation)


def _number(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else -1


def _middle(times: Sequence[Any]) -> int | None:
    """A time near all of them, to count from: they may be years. One alone may be wrong."""
    good = sorted(int(of) for of in times if type(of) in (int, float, Decimal) and abs(of) < 1e18)
    return good[len(good) // 2] if good else None


def _in_order(ops: _Ops) -> Iterator[tuple[int, float, float]]:
    """(index, start, end), outer before inner; -1 at the end."""
    ts, dur, _ = ops.arrays()
    order = np.lexsort((-dur, ts))
    for part in np.array_split(order, len(order) // 10_000 + 1):
        yield from zip(part.tolist(), ts[part].tolist(), (ts + dur)[part].tolist(), strict=True)
    yield -1, float("inf"), float("inf")


def _is_call(name: str) -> bool:
    return name.startswith("c10d::") and comm.NO_COLLECTIVE.search(name[6:]) is None


def _asker(op: Op) -> str:
    """The op that it was called for: the innermost that is none of communication's own."""
    names = (n for n in reversed(op.inside) if not _OF_CALLS.match(n) and not _NO_ASKER.search(n))
    return told(next(names, ""))


def _carried_by(op: Op, args: Args) -> bool:
    """Whether a transport's shapes are among the call's."""
    if not isinstance(args.shapes, list) or not isinstance(op.args.shapes, list) or len(args.shapes) != 1:
        return True
    return args.shapes[0] in op.args.shapes or [args.shapes[0]] in op.args.shapes or not args.shapes[0]


class _HostCalls:
    """Calls of c10d by thread, to be asked which of them were under way."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._of: dict[Any, list[Op]] = {}
        for op in ops:
            self._of.setdefault(op.thread, []).append(op)
        self._starts = {}
        for thread, of in self._of.items():
            of.sort(key=lambda op: (op.start, -op.end))
            self._starts[thread] = [op.start for op in of]

    def around(self, thread: Any, at: float) -> list[Op]:
        """Innermost first; calls nest a few levels deep."""
        of = self._of.get(thread, [])
        last = bisect_right(self._starts.get(thread, []), at)
        return [op for op in reversed(of[max(last - 8, 0) : last]) if op.end >= at]


class _Marked:
    """The annotations `nccl:...` that are drawn on the GPU's streams: they name the host's call by its number."""

    def __init__(self, drawn: Sequence[Message], host: Sequence[Op]) -> None:
        ordered = sorted(drawn, key=lambda one: one.start)
        self._by_stream = group_by(ordered, lambda one: one.thread)
        self._host = {op.args.external: op for op in host if type(op.args.external) is int}

    def op(self, kernel: Message) -> Op | None:
        drawn = self._by_stream.get(kernel.thread, [])
        at = bisect_right(drawn, kernel.start + 1e-3, key=lambda one: one.start) - 1
        if at < 0 or drawn[at].end < kernel.start or type(drawn[at].args.external) is not int:
            return None
        return self._host.get(drawn[at].args.external)


def _described(kernel: Message, around: Sequence[Op], groups: Mapping[str, Group]) -> Call:
    """A kernel as a call: by its own words, else by those of the calls that it was launched in, innermost first."""
    by_name = comm.collective_of(kernel.name)
    call = Call(kernel.start, kernel.start, kernel.end, by_name, Group(""))
    if around:
        call = call._replace(asked_by=_asker(around[0]))
    for of in (kernel.args, *(op.args for op in around)):
        if of.collective is not None and not comm.NO_COLLECTIVE.search(str(of.collective)[:200]):
            dtype, bytes_ = comm.payload(of)
            name = comm.collective_of(str(of.collective))
            if name in (comm.UNKNOWN, "coalesced") and by_name != comm.UNKNOWN:
                name = by_name
            call = call._replace(collective=name, group=comm.group_of(of, groups))
            return call._replace(dtype=dtype, bytes=bytes_, sequence=comm.whole(of.sequence))
    payloads = [comm.payload_of_shapes(op.name, op.args, None) for op in around]
    names = (comm.collective_of(op.name) for op in around)
    return call._replace(
        collective=next((n for n in names if n != comm.UNKNOWN), by_name),
        dtype=next((dtype for dtype, _ in payloads if dtype), None),
        bytes=max((size or 0 for _, size in payloads), default=0) or None,
    )


def _pools(ours: Mapping[str, Any], tids: Mapping[int, Any], groups: Mapping[str, Group]) -> dict[int, str]:
    """gloo's thread -> the name of its group. Traces say it where dtbench recorded them; else each group has two
    threads, started in the order of the groups: told only where all of them show."""
    listed = ours.get("gloo_threads")
    if isinstance(listed, dict):
        return {thread: told(listed[str(tid)]) for thread, tid in tids.items() if str(tid) in listed}
    if len(groups) == 1:
        return dict.fromkeys(tids, next(iter(groups)))
    numbered = all(comm.whole(of) is not None for of in (*tids.values(), *groups))
    if len(tids) != 2 * len(groups) or not numbered:
        return {}
    names = [name for name in sorted(groups, key=int) for _ in range(2)]
    return dict(zip(sorted(tids, key=lambda thread: int(tids[thread])), names, strict=True))
