"""One rank's trace: when it computed, copied and communicated, and what each collective was. Times in us.

With a GPU the kernels are the work, and a collective is a kernel; what it was stands in its own arguments, or in those
of the call that launched it. Without one, ops of torch are the work, and gloo's transports the collectives.
"""

from __future__ import annotations

import re
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

from dtbench.errors import UnreadableRunError
from dtbench.grouping import group_by
from dtbench.text.units import format_seconds
from dtbench.traces import communication as comm
from dtbench.traces.communication import Call, ProcessGroup
from dtbench.traces.intervals import Intervals, intervals, union
from dtbench.traces.kernel_names import COMPUTES, MAY_COMMUNICATE, function_of, kernel_collective
from dtbench.traces.kineto import Args, Event, Trace, args_of, told
from dtbench.traces.steps import Steps, steps_of

# What events are, by their category: kernel, copy, launch, op, mark (on a GPU's stream), trace. Older traces begin them
# with a capital.
_KINDS = {
    **dict.fromkeys(("gpu_memcpy", "gpu_memset", "memcpy", "memset"), "copy"),
    **dict.fromkeys(
        ("cuda_runtime", "cuda_driver", "runtime", "xpu_runtime", "privateuse1_runtime"), "launch"
    ),
    **dict.fromkeys(("cpu_op", "operator", "user_annotation"), "op"),
    "kernel": "kernel",
    "gpu_user_annotation": "mark",
    "trace": "trace",
}
_KINDS |= {name.capitalize(): kind for name, kind in _KINDS.items()}
# Signs of an accelerator in a trace without kernels: collectives of NCCL, XCCL, HCCL and the like (on CPUs: gloo,
# MPI, UCC, ccl), ops, and categories of work that is not read (libkineto/include/ActivityType.h).
_ON_DEVICE = re.compile(
    r"^(?:(?:\w+ccl|cncl)(?::|$)|(?:aten::_?|torch_)?(?:mps|npu|hpu|xla|mtia)(?:_|::)|collective_comm$)"
)
_OF_CALLS = re.compile(r"^(?:c10d::|record_param_comms|nccl:|_c10d_functional)")
_COUNTED_OP = re.compile(rf"{_OF_CALLS.pattern}|^gloo:")
# An op that is handed to a tensor subclass: what is around it is dispatch, not work.
_HANDED_OVER = "PythonSubclass"
_NO_ASKER = re.compile(
    r"^(?:autograd::engine|torch::autograd|ProfilerStep|PythonSubclass|## |dtbench:)|wait_tensor"
)
_GROUP_NOTE = "dtbench:group "  # around a send or receive in a trace that dtbench recorded: its group's name
_CARRIES = {"all_reduce": ("all_reduce", "reduce_scatter")}  # gloo reduces and scatters by an all-reduce
_AFTER_CALL_US = 5e6  # a transport that begins later than this after a call is another one's
_FAR_US = 1e13  # a third of a year
_OVERFLOWN_US = 2**31 / 1e3  # a duration of -1 or 2^31 ns that lost its sign
_MOST_WAITING = 64  # calls of one kind among which a transport's is looked for
_MOST_LEVELS = 64  # that a call is looked at to have been called from
_MARK_US = 1e-3  # an annotation on a stream begins with its kernel, rounded
_IMPOSSIBLE, _REPEATED = "of an impossible duration", "that repeat another one in full"
_OTHER_SHARE = 0.1  # of a stream's communication: the most computation on a stream that is communication's
_MOST_NAMED = 3  # kernels in a note


class Op(NamedTuple):
    """A call of the host, a kernel that communicates, a transport of gloo or an annotation on a stream, us. inside:
    what a call was called from, outermost first."""

    name: str
    start: float
    end: float
    thread: int
    args: Args
    inside: tuple[str, ...] = ()


@dataclass
class RankTrace:
    """What a trace comes to. compute, copies: united. launched: (start of a kernel, when the host launched it), by
    start. window: the steps that dtbench was to record ("asked"), those that have an end ("whole"), and "why" it ended;
    "warm": the trace is of a case of a suite, whose first iterations are no warm-up.
    notes: what was left out or is not told."""

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
    window: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _Spans:
    """Many (start, us) of one kind, a number each, and the arguments of some by index."""

    def __init__(self) -> None:
        self.ts, self.dur, self.tag = array("d"), array("d"), array("q")
        self.args: dict[int, Args] = {}

    def add(self, ts: float, dur: float, tag: int) -> None:
        self.ts.append(ts)
        self.dur.append(dur)
        self.tag.append(tag)

    def arrays(self) -> tuple[Any, Any, Any]:
        return np.array(self.ts), np.array(self.dur), np.array(self.tag)

    def pairs(self) -> Intervals:
        ts, dur, _ = self.arrays()
        return np.column_stack([ts, ts + dur])

    def in_order(self) -> Iterator[tuple[int, float, float]]:
        """(index, start, end), outer before inner; -1 at the end."""
        pairs = self.pairs()
        order = np.lexsort((-pairs[:, 1], pairs[:, 0]))
        for part in np.array_split(order, len(order) // 10_000 + 1):
            yield from zip(part.tolist(), *pairs[part].T.tolist(), strict=True)
        yield -1, float("inf"), float("inf")


def read_rank(path: Path, fallback_rank: int) -> RankTrace:
    """The trace in a file. fallback_rank: where it does not say whose it is.

    Raises:
        UnreadableRunError: it is no trace.
    """
    return _RankReader(path).read(fallback_rank)


class _RankReader:
    def __init__(self, path: Path) -> None:
        self.trace = Trace(path)
        self._zero: int | None = None
        self._kernels, self._copies, self._launches = _Spans(), _Spans(), _Spans()
        self._ops: dict[int, _Spans] = {}  # by thread; tag: the name's number, args: of c10d's calls
        self._names: dict[str, int] = {}
        self._threads: dict[Any, int] = {}
        self._annotations: list[tuple[str, float, float]] = []
        self._kinds: dict[tuple[int, str], int] = {}  # a stream and the name of a kernel on it -> its number
        self._kind_of = array("q")  # of each kernel that is taken for computation
        self._hashes: set[int] = set()  # of events that must not count twice
        self._categories: set[str] = set()  # of events that are not read
        # Kernels that communicate, gloo's transports, and nccl's annotations on the GPU's streams.
        self._messages, self._transports, self._marks = list[Op](), list[Op](), list[Op]()
        self._window_us: float | None = None
        self._wrong: Counter[str] = Counter()

    def read(self, fallback_rank: int) -> RankTrace:
        for events in self.trace.events():
            if self._zero is None:
                self._zero = _middle(
                    [event.ts for event in events if _KINDS.get(event.cat or "", "trace") != "trace"]
                )
            for event in events:
                if event.ph == "X" and event.cat and (kind := _KINDS.get(event.cat)):
                    self._add(event, kind)
                elif event.cat:
                    self._categories.add(event.cat)
        return self._finish(fallback_rank)

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
            self._wrong[_IMPOSSIBLE] += 1
        elif kind == "launch":
            self._launches.add(start, self._thread(event), _number(args_of(event).correlation))
        elif kind == "op" and event.cat != "user_annotation" and not _COUNTED_OP.match(event.name):
            self._add_op(self._thread(event), event.name, start, duration)
        elif self._is_new(op := Op(event.name, start, start + duration, self._thread(event), args_of(event))):
            if kind == "copy":
                self._copies.add(start, duration, -1)
            elif kind == "kernel":
                self._add_kernel(op, duration)
            elif op.name.startswith("gloo:"):
                self._transports.append(op)
            elif kind == "op":
                if not _OF_CALLS.match(op.name):
                    self._annotations.append(op[:3])
                self._add_op(op.thread, op.name, start, duration, op.args)
            elif op.name.startswith("nccl:"):
                self._marks.append(op)

    def _is_new(self, op: Op) -> bool:
        """Returns whether the trace has not had it yet: a profile that is exported twice holds each event twice."""
        count = len(self._hashes)
        self._hashes.add(hash((op[:4], _number(op.args.correlation), _number(op.args.external))))
        self._wrong[_REPEATED] += count == len(self._hashes)
        return count < len(self._hashes)

    def _add_op(
        self, thread: int, name: str, start: float, duration: float, args: Args | None = None
    ) -> None:
        if (ops := self._ops.get(thread)) is None:
            ops = self._ops[thread] = _Spans()
        if args is not None and _OF_CALLS.match(name):
            ops.args[len(ops.ts)] = args
        ops.add(start, duration, self._names.setdefault(name, len(self._names)))

    def _add_kernel(self, kernel: Op, duration: float) -> None:
        """By its own arguments, else by its name, it communicates or computes."""
        if kernel.args.collective is not None or kernel_collective(kernel.name):
            self._messages.append(kernel)
        else:
            self._kernels.add(kernel.start, duration, _number(kernel.args.correlation))
            self._kind_of.append(self._kinds.setdefault((kernel.thread, kernel.name), len(self._kinds)))

    def _thread(self, event: Event) -> int:
        """Its number, in the order of `self._threads`."""
        try:
            return self._threads.setdefault((event.pid, event.tid), len(self._threads))
        except TypeError:
            return -1

    def _finish(self, fallback_rank: int) -> RankTrace:
        if self._zero is None:
            raise UnreadableRunError(
                f"{self.trace.path} holds no event with a time, expected a profiler's trace"
            )
        header = self.trace.header
        info, ours, window, mesh_dims = (
            of if isinstance(of := header.get(key), dict) else {}
            for key in ("distributedInfo", "dtbench", "dtbench_window", comm.MESH_DIMS)
        )
        on_gpu = bool(self._kernels.ts or self._messages)
        if not on_gpu:
            self._refuse_without_kernels(told(info.get("backend", "")))
        rank = comm.whole(info.get("rank"))
        trace = RankTrace(
            rank=fallback_rank if rank is None else rank,
            world_size=comm.whole(info.get("world_size")) or 1,
            backend=comm.backend_of(info, on_gpu),
            zero_us=self._zero + (comm.whole(header.get("baseTimeNanoseconds"), 2**63) or 0) / 1e3,
            source=self.trace.path.name,
            torch=told(ours.get("torch", "")),
            host=told(ours.get("host", header.get("host_name", ""))),
            device=told(ours.get("device", "")),
            on_gpu=on_gpu,
            window=window,
        )
        launched = self._launched()
        trace.launched = launched[np.argsort(launched[:, 1], kind="stable")][:, ::-1]
        trace.steps = steps_of(self._annotations, launched)
        calls, work = self._host_calls(on_gpu)
        self._leave_out_long(trace, self._kernels if on_gpu else work)
        groups = comm.groups_of(info, mesh_dims)
        found = [
            *self._kernel_calls(calls, groups),
            *self._gloo_calls(calls, groups, ours.get("gloo_threads")),
        ]
        if len(groups) == 1:
            found = [of if of.group.key else of._replace(group=groups[next(iter(groups))]) for of in found]
        trace.calls = sorted(found, key=lambda call: (call.issued, call.start, call.end))
        ops = () if on_gpu else self._ops.values()
        edges = [
            trace.compute,
            trace.copies,
            intervals((call.start, call.end) for call in found),
            *(spans.pairs() for spans in ops),
        ]
        if len(all_ := np.concatenate(edges)):
            trace.span = float(all_[:, 0].min()), float(all_[:, 1].max())
        if not trace.steps.marks:
            trace.steps = steps_of([], launched, trace.calls)
        trace.notes = [
            f"rank {trace.rank}: {text}" for text, holds in self._notes(trace, len(calls)).items() if holds
        ]
        return trace

    def _refuse_without_kernels(self, backend: str) -> None:
        """Refuses a job on an accelerator: its host's calls say neither when it computed nor when it communicated.

        Raises:
            UnreadableRunError: the job ran on an accelerator; the trace holds no kernel.
        """
        names = [*self._names, *self._categories, "" if self._transports else backend]
        if shows := next(filter(_ON_DEVICE.match, names), None):
            end = " before its cut-off end" * self.trace.cut_off
            raise UnreadableRunError(
                f"{self.trace.path} holds no kernels{end}, though {told(shows)!r} in it shows a job on an accelerator: "
                "expected kernels of CUDA, ROCm or XPU. Give the whole trace of a profiler with ProfilerActivity.CPU "
                "and .CUDA (on Intel's .XPU), or run the job by `dtbench profile -- COMMAND`"
            )

    def _host_calls(self, on_gpu: bool) -> tuple[list[Op], _Spans]:
        """The calls of c10d, each with what it was called from; and without a GPU when torch's ops worked: those that
        neither communicate nor were handed to a subclass."""
        calls, work, names = list[Op](), _Spans(), list(self._names)
        for thread, ops in self._ops.items():
            if on_gpu and not ops.args:
                continue
            open_: list[list[Any]] = []  # start, end, name, whether it is work; outermost first
            for index, start, end in ops.in_order():
                while open_ and open_[-1][1] <= start:
                    began, until, name, works = open_.pop()
                    if works and name.startswith("aten::"):
                        work.add(began, until - began, -1)
                    elif open_ and not works:
                        open_[-1][3] = False
                if index >= 0:
                    name, args = names[ops.tag[index]], ops.args.get(index)
                    if args is not None:
                        # A step that begins inside of the optimizer's outlasts it.
                        inside = tuple(of for _, until, of, _ in open_[-_MOST_LEVELS:] if until >= end)
                        calls.append(Op(name, start, end, thread, args, inside))
                    open_.append([start, end, name, args is None and name != _HANDED_OVER])
        return calls, work

    def _launched(self) -> Any:
        """Of all kernels (launch, start) by launch; none where the trace has not both."""
        ts, _, tag = self._kernels.arrays()
        launch_ts, _, launch_tag = self._launches.arrays()
        if not len(launch_ts):
            return intervals(())
        order = np.argsort(launch_tag, kind="stable")
        at = order[np.minimum(np.searchsorted(launch_tag, tag, sorter=order), len(order) - 1)]
        joined = (launch_tag[at] == tag) & (tag >= 0)
        pairs = np.column_stack([launch_ts[at], ts])[joined]
        return pairs[np.argsort(pairs[:, 0], kind="stable")]

    def _leave_out_long(self, trace: RankTrace, work: _Spans) -> None:
        """A duration beyond the trace's cannot be, nor, of what begins in a step, beyond the longest step's. What gloo
        has in its queue may be of several steps."""
        lists = self._messages, self._transports
        spans = [work.pairs(), self._copies.pairs(), *(intervals(one[1:3] for one in of) for of in lists)]
        starts = np.concatenate(spans)[:, 0]
        most = self._window_us or (float(np.ptp(starts)) if len(starts) > 9 else 0.0) or float("inf")
        marks, step = intervals(trace.steps.marks), trace.steps.longest_us or float("inf")
        sound: list[Any] = []
        for of in spans:
            at = np.searchsorted(marks[:, 0], of[:, 0], side="right") - 1
            in_step = (at >= 0) & (of[:, 0] < marks[at, 1]) if len(marks) else at >= 0
            limit = np.where(in_step & (of is not spans[-1]), min(step, most), most)
            sound.append(of[:, 1] - of[:, 0] <= limit)
        self._wrong[_IMPOSSIBLE] += sum(int((~good).sum()) for good in sound)
        self._doubtful = self._find_doubtful(sound[0]) if trace.on_gpu else {}
        trace.compute, trace.copies = (union(of[good]) for of, good in zip(spans[:2], sound, strict=False))
        self._messages, self._transports = (
            [one for one, good in zip(some, goods, strict=True) if good]
            for some, goods in zip(lists, sound[2:], strict=True)
        )

    def _find_doubtful(self, is_sound: Any) -> dict[str, float]:
        """Returns the time, us, of kernels that count as computation and may communicate, by their functions: their
        names speak of it, or they run on a stream that has next to nothing but communication."""
        totals_us = np.bincount(self._kind_of, np.where(is_sound, self._kernels.dur, 0), len(self._kinds))
        us = dict(zip(self._kinds, totals_us.tolist(), strict=True))
        sent = group_by(self._messages, lambda message: message.thread)
        computing = {name for on, name in us if on not in sent or COMPUTES.search(function_of(name))}
        quiet = {
            stream
            for stream, messages in sent.items()
            if sum(us[on, name] for on, name in us if on == stream and name in computing)
            <= _OTHER_SHARE * sum(message.end - message.start for message in messages)
        }
        by_function = group_by(us, lambda kind: function_of(kind[1]))
        spoken = {name for name in by_function if MAY_COMMUNICATE.search(name) and not COMPUTES.search(name)}
        return {
            function: sum(us[kind] for kind in kinds)
            for function, kinds in by_function.items()
            if function in spoken or any(on in quiet and n not in computing for on, n in kinds)
        }

    def _kernel_calls(self, host: Sequence[Op], groups: Mapping[str, ProcessGroup]) -> Iterator[Call]:
        """By launch each kernel finds the calls that it was launched in; else the annotation that is drawn over it on
        its stream names the call."""
        by_thread = group_by(host, lambda op: op.thread)
        by_number = {number: op for op in host if (number := _number(op.args.external)) >= 0}
        marks = group_by(sorted(self._marks, key=lambda mark: mark.start), lambda mark: mark.thread)
        numbers = np.array([_number(message.args.correlation) for message in self._messages])
        ts, thread, tag = self._launches.arrays()
        wanted = np.isin(tag, numbers[numbers >= 0])
        launches = {
            number: (int(on), at)
            for number, at, on in zip(*(column[wanted].tolist() for column in (tag, ts, thread)), strict=True)
        }
        for message, number in zip(self._messages, numbers.tolist(), strict=True):
            launch = launches.get(number)
            around = _under_way(by_thread, *launch) if launch else []
            if not around and (over := _under_way(marks, message.thread, message.start + _MARK_US)):
                op = by_number.get(_number(over[0].args.external))
                around = _under_way(by_thread, op.thread, op.start) if op else []
            issued = launch[1] if launch else around[0].start if around else message.start
            yield _described(message, around, groups)._replace(issued=issued)

    def _gloo_calls(
        self, host: Sequence[Op], groups: Mapping[str, ProcessGroup], listed: object
    ) -> Iterator[Call]:
        """A transport belongs to the first call before it of its kind and shapes that has none yet: a call starts it,
        or queues it behind others of its group."""
        numbers = {transport.thread for transport in self._transports} - {
            thread for thread, ops in self._ops.items() if ops.args
        }
        tids = {number: key[1] for key, number in self._threads.items() if number in numbers}
        pools = _pools(listed, tids, groups)
        waiting: dict[str, deque[Op]] = {}
        calls = sorted((op for op in host if _is_call(op.name)), key=lambda op: -op.start)
        for transport in sorted(self._transports, key=lambda one: one.start):
            name, start, end, thread, args = transport[:5]
            while calls and calls[-1].start <= start:
                op = calls.pop()
                waiting.setdefault(comm.collective_of(op.name), deque()).append(op)
            group = groups.get(pools.get(thread, ""), ProcessGroup(""))
            dtype, bytes_ = comm.payload_of_shapes(name, args, group.size)
            kind = comm.collective_of(name)
            call = Call(start, start, end, kind, group, dtype, bytes_, issued=start)
            for carried in _CARRIES.get(kind, (kind,)):
                of = waiting.get(carried, deque())
                while of and start - of[0].start > _AFTER_CALL_US:
                    of.popleft()
                if found := next((op for op in islice(of, _MOST_WAITING) if _carried_by(op, args)), None):
                    of.remove(found)
                    own_dtype, size = comm.payload_of_shapes(found.name, found.args, group.size, dtype)
                    if own_dtype is not None:
                        dtype, bytes_ = own_dtype, size if size or found.name.endswith("gather_") else bytes_
                    noted = (groups.get(name.partition(_GROUP_NOTE)[2]) for name in found.inside)
                    call = call._replace(
                        arrival=found.start,
                        issued=found.start,
                        collective=carried,
                        group=next(filter(None, noted), group),
                        dtype=dtype,
                        bytes=bytes_,
                        caller=_asker(found),
                    )
                    break
            yield call

    def _notes(self, trace: RankTrace, host_calls: int) -> dict[str, object]:
        """Each with what it holds by."""
        calls, damaged = trace.calls, self.trace.damaged
        unknown = sum(call.collective == comm.UNKNOWN for call in calls)
        unsized = sum(
            call.bytes is None and call.collective not in ("barrier", comm.UNKNOWN) for call in calls
        )
        # Without a GPU, for NCCL's say their group.
        groupless = sum(not (trace.on_gpu or c.group.key) and c.collective in ("send", "recv") for c in calls)
        doubtful = [
            f"{told(name)} ({format_seconds(us / 1e6)})"
            for name, us in sorted(self._doubtful.items(), key=lambda kernel: -kernel[1])
        ]
        doubtful[_MOST_NAMED:] = ["..."] * (len(doubtful) > _MOST_NAMED)
        return {
            "the trace is cut off; what stands before its end was read": self.trace.cut_off,
            f"{damaged} events are damaged and were left out": damaged,
            **{f"{count} events {what} were left out": count for what, count in sorted(self._wrong.items())},
            f"{unknown} of {len(calls)} collectives are not told: their kernels' names say nothing and the calls "
            "that launched them are not in the trace": unknown,
            f"{unsized} collectives carry no size; record_shapes=True of torch.profiler has it where "
            "torch.distributed was called": unsized,
            f"{groupless} sends and receives are of an unknown group: gloo's events do not name it; "
            "`dtbench profile -- COMMAND` records it": groupless,
            f"kernels that count as computation may communicate: {', '.join(doubtful)}; dtbench does not know "
            "their names": doubtful,
            f"calls of torch.distributed are without a time: no event of {trace.backend or 'a backend'} "
            "says when they ran": host_calls and not calls,
            "no steps are told; profiler.step(), or an annotation around each, marks them": not trace.steps.marks,
        }


def _number(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else -1


def _middle(times: Sequence[Any]) -> int | None:
    """A time near all of them, to count from: they may be years. One alone may be wrong."""
    good = sorted(int(of) for of in times if type(of) in (int, float, Decimal) and abs(of) < 1e18)
    return good[len(good) // 2] if good else None


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


def _under_way(by_thread: Mapping[int, list[Op]], thread: int, at: float) -> list[Op]:
    """Of a thread's calls, or a stream's annotations, by start: innermost first; they nest a few levels deep."""
    of = by_thread.get(thread, [])
    last = bisect_right(of, at, key=lambda one: one.start)
    return [one for one in reversed(of[max(last - 8, 0) : last]) if one.end >= at]


def _described(kernel: Op, around: Sequence[Op], groups: Mapping[str, ProcessGroup]) -> Call:
    """A kernel as a call: by its own words, else by those of the calls that it was launched in, innermost first."""
    by_name = kernel_collective(kernel.name) or comm.UNKNOWN
    caller = _asker(around[0]) if around else ""
    call = Call(kernel.start, kernel.start, kernel.end, by_name, ProcessGroup(""), caller=caller)
    for of in (kernel.args, *(op.args for op in around)):
        if of.collective is not None and not comm.NO_COLLECTIVE.search(str(of.collective)[:200]):
            dtype, bytes_ = comm.payload(of)
            name = comm.collective_of(str(of.collective))
            if name in (comm.UNKNOWN, "coalesced") and by_name != comm.UNKNOWN:
                name = by_name
            return call._replace(
                collective=name,
                group=comm.group_of(of, groups),
                dtype=dtype,
                bytes=bytes_,
                sequence=comm.whole(of.sequence),
            )
    payloads = [comm.payload_of_shapes(op.name, op.args, None) for op in around]
    return call._replace(
        collective=next((n for op in around if (n := comm.collective_of(op.name)) != comm.UNKNOWN), by_name),
        dtype=next((dtype for dtype, _ in payloads if dtype), None),
        bytes=max((size or 0 for _, size in payloads), default=0) or None,
    )


def _pools(listed: object, tids: Mapping[int, Any], groups: Mapping[str, ProcessGroup]) -> dict[int, str]:
    """gloo's thread -> the name of its group. Traces list it where dtbench recorded them; else each group has two
    threads, started in the order of the groups: told only where all of them show."""
    if isinstance(listed, dict):
        return {thread: told(listed[str(tid)]) for thread, tid in tids.items() if str(tid) in listed}
    if len(groups) == 1:
        return dict.fromkeys(tids, next(iter(groups)))
    if len(tids) != 2 * len(groups) or any(comm.whole(of) is None for of in (*tids.values(), *groups)):
        return {}
    names = [name for name in sorted(groups, key=int) for _ in range(2)]
    return dict(zip(sorted(tids, key=lambda thread: int(tids[thread])), names, strict=True))
