"""One rank's trace: when it computed, copied and communicated, and what each collective was. Times in us.

With a GPU the kernels are the work, and a collective is a kernel; what it was stands in its own arguments, or in those
of the call that launched it. Without one, ops of torch are the work, and gloo's transports the collectives.
"""

from __future__ import annotations

import re
import sys
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dtbench.profile import communication as comm
from dtbench.profile.communication import Call, Group
from dtbench.profile.intervals import Intervals, intervals, union
from dtbench.profile.kineto import Args, Event, Trace, args_of, told
from dtbench.profile.steps import Steps, steps_of
from dtbench.suite.errors import UnreadableRunError

_COPIES = frozenset(("gpu_memcpy", "gpu_memset", "memcpy", "memset"))
_LAUNCHES = frozenset(("cuda_runtime", "cuda_driver", "runtime", "xpu_runtime", "privateuse1_runtime"))
_OPS = frozenset(("cpu_op", "operator", "user_annotation"))
_OF_CALLS = re.compile(r"^(?:c10d::|record_param_comms|nccl:|_c10d_functional)")
_HANDED_OVER = (
    "PythonSubclass"  # an op that is handed to a tensor subclass: what is around it is dispatch, not work
)
_NO_ASKER = re.compile(r"^(?:autograd::engine|torch::autograd|ProfilerStep|PythonSubclass|## )|wait_tensor")
_AFTER_CALL_US = 5e6  # a transport that begins later than this after a call is another one's


class Message(NamedTuple):
    """A kernel that communicates, a transport of gloo, or what is drawn on a stream, us."""

    name: str
    start: float
    end: float
    thread: Any
    args: Args


class Op(NamedTuple):
    """A call or an annotation of the host, us. inside: what it was called from, outermost first."""

    name: str
    start: float
    end: float
    thread: Any
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
        return tuple(np.array(of) for of in (self.ts, self.dur, self.tag))  # type: ignore[return-value]


def read_rank(path: Path, fallback_rank: int) -> RankTrace:
    """The trace in a file. fallback_rank: where it does not say whose it is.

    Raises:
        UnreadableRunError: it is no trace.
    """
    return _Reader(path, fallback_rank).read()


class _Reader:
    def __init__(self, path: Path, fallback_rank: int) -> None:
        self._trace, self._fallback_rank = Trace(path), fallback_rank
        self._zero: float | None = None
        self._kernels, self._copies, self._launches = _Spans(), _Spans(), _Spans()
        # By thread: start, end, name; the arguments of c10d's calls; whether it is an annotation.
        self._ops: dict[Any, list[tuple[float, float, str, Args | None, bool]]] = {}
        self._messages: list[Message] = []  # kernels that communicate
        self._transports: list[Message] = []  # gloo's
        self._gpu_annotations: list[Message] = []
        self._communicates: dict[str, bool] = {}  # by name: kernels' names are few and long
        self._window_us: float | None = None
        self._wrong: Counter[str] = Counter()
        self._threads: dict[Any, int] = {}
        self._of_launch: dict[int, Any] = {}

    def read(self) -> RankTrace:
        began = time.perf_counter()
        for events in self._trace.events():
            for event in events:
                if event.ph == "X":
                    self._add(event)
        rank = self._finish()
        rank.mbs = self._trace.size / 1e6 / max(time.perf_counter() - began, 1e-9)
        return rank

    def _add(self, event: Event) -> None:
        category = event.cat
        if category is None or category == "python_function":
            return
        category = category.lower()
        try:
            ts = event.ts if type(event.ts) is not str else float(event.ts)
            duration = float(event.dur)  # type: ignore[arg-type]
            if self._zero is None:
                self._zero = ts if category != "trace" else None  # type: ignore[assignment]
            start = float(ts - (self._zero or 0))  # type: ignore[operator]
        except (TypeError, ValueError, OverflowError):
            self._wrong["without a time"] += 1
            return
        if category == "trace":
            self._window_us = duration if duration > 0 else None
        elif not abs(start) < 1e13 or duration != duration:  # a third of a year, NaN
            self._wrong["without a time"] += 1
        elif category == "kernel":
            name = event.name
            if (communicates := self._communicates.get(name)) is None:
                communicates = self._communicates[name] = comm.COMMUNICATES.search(name) is not None
            if communicates:
                self._messages.append(Message(name, start, start + duration, _thread(event), args_of(event)))
            else:
                self._kernels.add(start, duration, self._correlation(event))
        elif category in _COPIES:
            self._copies.add(start, duration, self._correlation(event))
        elif category in _LAUNCHES:
            thread = self._threads.setdefault(_thread(event), len(self._threads))
            self._launches.add(start, thread, self._correlation(event))
        elif category == "gpu_user_annotation":
            self._gpu_annotations.append(
                Message(event.name, start, start + duration, _thread(event), args_of(event))
            )
        elif category in _OPS:
            name = sys.intern(event.name)
            if name.startswith("gloo:"):
                message = Message(name, start, start + duration, _thread(event), args_of(event))
                self._transports.append(message)
            else:
                # An event's arguments hold on to all the text that they stand in.
                args = args_of(event) if _OF_CALLS.match(name) else None
                of_thread = self._ops.setdefault(_thread(event), [])
                of_thread.append((start, start + duration, name, args, category == "user_annotation"))

    @staticmethod
    def _correlation(event: Event) -> int:
        number = args_of(event).correlation
        return number if type(number) is int and abs(number) < 2**62 else -1

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
            zero_us=(self._zero or 0.0) + base_us,
            source=self._trace.path.name,
            torch=told(ours.get("torch", "")),
            host=told(ours.get("host", header.get("host_name", ""))),
            device=told(ours.get("device", "")),
        )
        if self._zero is None:
            raise UnreadableRunError(
                f"{self._trace.path} holds no event with a time, expected a profiler's trace"
            )
        trace.on_gpu = bool(self._kernels.ts or self._messages)
        calls, compute = self._host_calls()
        trace.steps = steps_of(self._annotations(), self._gpu_starts() if trace.on_gpu else None)
        self._drop_impossible(trace)
        groups = comm.groups_of(header)
        pools = _pools(
            ours, {message.thread for message in self._transports} - {op.thread for op in calls}, groups
        )
        trace.calls = [*self._kernel_calls(calls, groups), *self._gloo_calls(calls, groups, pools)]
        trace.compute = self._united(self._kernels) if trace.on_gpu else union(intervals(compute))
        trace.copies, trace.launched = self._united(self._copies), self._launch_times()
        only = next(iter(groups.values())) if len(groups) == 1 else Group("")
        trace.calls = [call if call.group.key else call._replace(group=only) for call in trace.calls]
        trace.calls.sort(key=lambda call: (call.start, call.end))
        trace.span = self._span(trace)
        if not trace.steps.marks:
            trace.steps = steps_of([], None, trace.calls)
        trace.notes = list(self._notes(trace, len(calls)))
        return trace

    # ---- the host ----

    def _host_calls(self) -> tuple[list[Op], list[tuple[float, float]]]:
        """The calls of c10d by thread and start, each with what it was called from; and without a GPU when torch's ops
        worked: those that neither communicate nor were handed to a subclass."""
        calls: list[Op] = []
        work: list[tuple[float, float]] = []
        for thread, ops in self._ops.items():
            ops.sort(key=lambda op: (op[0], -op[1]))
            open_: list[tuple[float, str, list[Any]]] = []  # end, name, [start, is work, children's work]
            for start, end, name, args, _ in [*ops, (float("inf"), float("inf"), "", None, True)]:
                while open_ and open_[-1][0] <= start:
                    until, closed, (began, is_work, below) = open_.pop()
                    mine = [(began, until)] if is_work and closed.startswith("aten::") else below
                    (open_[-1][2][2] if open_ else work).extend(mine)
                    if open_ and not is_work:
                        open_[-1][2][1] = False
                if start == float("inf"):
                    break
                if args is not None:
                    # A step that begins inside of the optimizer's outlasts it.
                    inside = tuple(of for until, of, _ in open_ if until >= end)
                    calls.append(Op(name, start, end, thread, args, inside))
                open_.append((end, name, [start, args is None and name != _HANDED_OVER, []]))
        return calls, work

    def _annotations(self) -> list[tuple[str, float, float]]:
        return [
            (name, start, end)
            for ops in self._ops.values()
            for start, end, name, _, annotates in ops
            if annotates
        ]

    # ---- the GPU ----

    def _gpu_starts(self) -> Any:
        """Of all kernels: (launch, start) by launch, where the trace has both."""
        ts, _, tag = self._kernels.arrays()
        launch_ts, _, launch_tag = self._launches.arrays()
        if not len(ts) or not len(launch_ts):
            return None
        order = np.argsort(launch_tag, kind="stable")
        at = np.searchsorted(launch_tag[order], tag)
        at = np.minimum(at, len(order) - 1)
        joined = (launch_tag[order][at] == tag) & (tag >= 0)
        pairs = np.column_stack([launch_ts[order][at][joined], ts[joined]])
        return pairs[np.argsort(pairs[:, 0], kind="stable")]

    def _launch_times(self) -> Intervals:
        pairs = self._gpu_starts()
        if pairs is None:
            return intervals(())
        return np.asarray(pairs[np.argsort(pairs[:, 1], kind="stable")][:, ::-1])

    @staticmethod
    def _united(spans: _Spans) -> Intervals:
        ts, dur, _ = spans.arrays()
        return union(np.column_stack([ts, ts + dur]))

    def _drop_impossible(self, trace: RankTrace) -> None:
        """Leaves out what cannot be: a negative duration, one beyond the trace, or beyond the longest step."""
        starts = np.concatenate([self._kernels.ts, self._copies.ts, [of.start for of in self._messages]])
        if not len(starts):
            return
        most = self._window_us or (float(np.ptp(starts)) if len(starts) > 9 else float("inf"))
        most = min(most or float("inf"), trace.steps.longest_us or float("inf"))
        for spans in (self._kernels, self._copies):
            ts, dur, tag = spans.arrays()
            good = (dur >= 0) & (dur <= most)
            self._wrong["of an impossible duration"] += int((~good).sum())
            spans.ts, spans.dur, spans.tag = (
                array("d", ts[good]),
                array("d", dur[good]),
                array("q", tag[good]),
            )
        good_messages = [one for one in self._messages if 0 <= one.end - one.start <= most]
        self._wrong["of an impossible duration"] += len(self._messages) - len(good_messages)
        self._messages = good_messages

    def _kernel_calls(self, host: Sequence[Op], groups: Mapping[str, Group]) -> Iterator[Call]:
        at = _HostCalls(host)
        launches = dict(
            zip(self._launches.tag, zip(self._launches.ts, self._launches.dur, strict=True), strict=True)
        )
        threads = {number: thread for thread, number in self._threads.items()}
        annotated = _Annotated(self._gpu_annotations, host)
        for message in self._messages:
            number = message.args.correlation
            launch = launches.get(number) if type(number) is int else None
            around = at.around(threads[int(launch[1])], launch[0]) if launch else ()
            if not around and (op := annotated.op(message)):
                around = at.around(op.thread, op.start)
            yield _described(message, around, groups)

    # ---- gloo ----

    def _gloo_calls(
        self, host: Sequence[Op], groups: Mapping[str, Group], pools: Mapping[Any, str]
    ) -> Iterator[Call]:
        """A transport belongs to the first call before it of its kind and shapes that has none yet: a call starts it,
        or queues it behind others of its group."""
        calls = sorted((op for op in host if _is_call(op.name)), key=lambda op: op.start)
        waiting: list[Op] = []
        following = iter([*calls, None])
        upcoming = next(following)
        for transport, start, end, thread, args in sorted(self._transports, key=lambda one: one.start):
            while upcoming is not None and upcoming.start <= start:
                waiting.append(upcoming)
                upcoming = next(following)
            waiting = [op for op in waiting if start - op.start < _AFTER_CALL_US]
            name = comm.collective_of(transport)
            op = next((op for op in waiting if _carried_by(op, name, args)), None)
            group = groups.get(pools.get(thread and thread[1], ""), Group(""))
            if op is None:
                dtype, bytes_ = comm.payload_of_shapes(transport, args, None)
                yield Call(start, start, end, name, group, dtype, bytes_)
                continue
            waiting.remove(op)
            dtype, bytes_ = comm.payload_of_shapes(op.name, op.args, group.size)
            if dtype is None:
                dtype, bytes_ = comm.payload_of_shapes(transport, args, group.size)
            elif bytes_ is None and not op.name.endswith("gather_"):
                bytes_ = comm.payload_of_shapes(transport, args, group.size)[1]
            yield Call(
                op.start, start, end, comm.collective_of(op.name), group, dtype, bytes_, None, _asker(op)
            )

    # ---- the whole ----

    def _span(self, trace: RankTrace) -> tuple[float, float]:
        """From the first to the last of the GPU's work; without one, of all that the host did."""
        edges = [
            of for of in (trace.compute, trace.copies, intervals(c[1:3] for c in trace.calls)) if len(of)
        ]
        if not trace.on_gpu:
            edges += [intervals((ops[0][0], max(op[1] for op in ops)) for ops in self._ops.values())]
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


def _thread(event: Event) -> Any:
    try:
        hash(key := (event.pid, event.tid))
    except TypeError:
        return None
    return key


def _is_call(name: str) -> bool:
    return name.startswith("c10d::") and comm.NO_COLLECTIVE.search(name[6:]) is None


def _asker(op: Op) -> str:
    """The op that it was called for: the innermost that is none of communication's own."""
    names = (n for n in reversed(op.inside) if not _OF_CALLS.match(n) and not _NO_ASKER.search(n))
    return told(next(names, ""))


def _carried_by(op: Op, transport: str, args: Args) -> bool:
    """Whether gloo carries the call out so: it reduces and scatters by an all-reduce."""
    kind = comm.collective_of(op.name)
    if kind != transport and (kind, transport) != ("reduce_scatter", "all_reduce"):
        return False
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


class _Annotated:
    """The annotations `nccl:...` that are drawn on the GPU's streams: they name the host's call by its number."""

    def __init__(self, drawn: Sequence[Message], host: Sequence[Op]) -> None:
        self._by_stream: dict[Any, list[tuple[float, float, Any]]] = {}
        for one in sorted(drawn, key=lambda one: one.start):
            if one.name.startswith("nccl:"):
                self._by_stream.setdefault(one.thread, []).append((one.start, one.end, one.args.external))
        self._host = {op.args.external: op for op in host if type(op.args.external) is int}

    def op(self, kernel: Message) -> Op | None:
        drawn = self._by_stream.get(kernel.thread, [])
        at = bisect_right(drawn, kernel.start + 1e-3, key=lambda one: one[0]) - 1
        if at < 0 or drawn[at][1] < kernel.start or type(drawn[at][2]) is not int:
            return None
        return self._host.get(drawn[at][2])


def _described(kernel: Message, around: Sequence[Op], groups: Mapping[str, Group]) -> Call:
    """A kernel as a call: by its own words, else by those of the calls that it was launched in."""
    start, end = kernel.start, kernel.end
    said = [kernel.args, *(op.args for op in around)]
    own = next(
        (
            of
            for of in said
            if of.collective is not None and not comm.NO_COLLECTIVE.search(str(of.collective))
        ),
        None,
    )
    by_name = comm.collective_of(kernel.name)
    asker = _asker(around[0]) if around else ""
    if own is not None:
        dtype, bytes_ = comm.payload(own)
        name = comm.collective_of(str(own.collective))
        name = by_name if name in (comm.UNKNOWN, "coalesced") and by_name != comm.UNKNOWN else name
        return Call(
            start,
            start,
            end,
            name,
            comm.group_of(own, groups),
            dtype,
            bytes_,
            comm.whole(own.sequence),
            asker,
        )
    dtype = bytes_ = None
    for op in around:
        found, size = comm.payload_of_shapes(op.name, op.args, None)
        dtype, bytes_ = dtype or found, max(size or 0, bytes_ or 0) or None
    named = (comm.collective_of(op.name) for op in around)
    name = next((n for n in named if n != comm.UNKNOWN), by_name)
    return Call(start, start, end, name, Group(""), dtype, bytes_, None, asker)


def _pools(ours: Mapping[str, Any], threads: set[Any], groups: Mapping[str, Group]) -> dict[Any, str]:
    """gloo's thread -> the name of its group. Traces say it where dtbench recorded them; else each group has two
    threads, started in the order of the groups: told only where all of them show."""
    ids = sorted(thread[1] for thread in threads if thread and type(thread[1]) is int)
    listed = ours.get("gloo_threads")
    if isinstance(listed, dict):
        return {tid: told(listed[str(tid)]) for tid in ids if str(tid) in listed}
    if len(groups) == 1:
        return dict.fromkeys(ids, next(iter(groups)))
    if len(ids) != 2 * len(groups) or not all(name.isdigit() for name in groups):
        return {}
    return dict(zip(ids, (name for name in sorted(groups, key=int) for _ in range(2)), strict=True))
