"""Reads the trace of one rank: when it computed, copied and communicated, and each of its collectives.

On a GPU, kernels are the work and each collective is a kernel. Its arguments, or those of the call that launched it,
describe it. Without a GPU, ops of torch are the work, and the events of gloo's transfers ("transports" below) are the
collectives. Times are microseconds since the trace's zero, which is a time within the trace.
"""

import re
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dtbench.errors import UnreadableRunError
from dtbench.grouping import group_by
from dtbench.records.job import InjectedDelay
from dtbench.text.units import format_seconds, plural
from dtbench.traces import communication as comm
from dtbench.traces.host_calls import (
    C10D_EVENTS,
    Op,
    describe_kernel,
    find_caller,
    find_enclosing,
    has_shapes,
    is_call,
    match_gloo_threads,
)
from dtbench.traces.intervals import Intervals, intervals, union
from dtbench.traces.kernel_names import COMPUTES, MAY_COMMUNICATE, function_of, kernel_collective
from dtbench.traces.kineto import Args, Event, Trace, args_of, printable
from dtbench.traces.phases import find_phases
from dtbench.traces.steps import Steps, find_steps

# Category of an event -> its kind. A "mark" is an annotation on a GPU's stream. Older traces capitalize the categories.
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
# Names that reveal an accelerator in a trace without kernels. They are backends such as nccl and xccl, ops of a device
# type such as mps or npu, and categories of kernels that dtbench cannot read (libkineto/include/ActivityType.h). gloo,
# MPI, UCC and plain ccl do not count.
_ON_DEVICE = re.compile(
    r"^(?:(?:\w+ccl|cncl)(?::|$)|(?:aten::_?|torch_)?(?:mps|npu|hpu|xla|mtia)(?:_|::)|collective_comm$)"
)
_COUNTED_OP = re.compile(rf"{C10D_EVENTS.pattern}|^gloo:")
# The event of an op that torch dispatches to a tensor subclass. The ops that enclose it only dispatch, so they do not
# count as work.
_SUBCLASS_OP = "PythonSubclass"
# The annotation around sends and receives in traces that dtbench recorded. The group's name follows.
_GROUP_ANNOTATION = "dtbench:group "
# The annotation around an injected delay. It lies within the call that it delays.
_DELAY = "dtbench:delay"
# gloo runs a reduce_scatter as an all_reduce.
_CALLS_BY_TRANSPORT = {"all_reduce": ("all_reduce", "reduce_scatter")}
_MAX_TRANSPORT_DELAY_US = 5e6  # a transport that starts more than this after a call belongs to another call
_MAX_TIME_US = 1e13  # a third of a year
_OVERFLOW_US = 2**31 / 1e3  # 2^31 ns: a duration that overflowed
_MAX_CANDIDATE_CALLS = 64  # calls of one kind that are compared with a transport
_MAX_NESTING = 64  # enclosing ops that are kept for a call
_MARK_ROUNDING_US = 1e-3  # an annotation on a stream starts with its kernel, up to this rounding error
_IMPOSSIBLE, _REPEATED = "with an impossible duration", "that repeat another event"
# A stream counts as one for communication if its computation takes at most this share of its communication time.
_MAX_COMPUTE_SHARE = 0.1
_MAX_NAMED_KERNELS = 3  # in a note


@dataclass
class RankTrace:
    """The content of one rank's trace. Times are microseconds since `zero_us`.

    Attributes:
        rank: its global rank.
        world_size: number of ranks of the job.
        backend: the default process group's backend.
        zero_us: the trace's zero, in microseconds since the epoch of its clock.
        source: name of the file.
        torch: version of torch; "" if unknown.
        host: name of the host; "" if unknown.
        device: name of the GPU; "" if unknown.
        calls: its collectives, in the order in which the host issued them.
        compute: the intervals in which it computed, merged.
        copies: the intervals in which it copied memory, merged.
        launched: (start of a kernel, time at which the host launched it), sorted by start.
        span: start and end of all work.
        steps: its steps.
        on_gpu: whether the trace has kernels.
        window: what dtbench wrote about the recorded steps. "asked" and "whole" are the numbers of requested
            and complete steps. "why" is the reason for fewer. "warm" is true if the recording contains no warm-up.
        delay: the injected delay, if any, with the number of delays in this trace.
        notes: what was excluded or is unknown.
    """

    rank: int
    world_size: int
    backend: str
    zero_us: float
    source: str = ""
    torch: str = ""
    host: str = ""
    device: str = ""
    calls: list[comm.Call] = field(default_factory=list)
    compute: Intervals = field(default_factory=lambda: intervals(()))
    copies: Intervals = field(default_factory=lambda: intervals(()))
    launched: Intervals = field(default_factory=lambda: intervals(()))
    span: tuple[float, float] = (0.0, 0.0)
    steps: Steps = field(default_factory=Steps)
    on_gpu: bool = False
    window: dict[str, Any] = field(default_factory=dict)
    delay: InjectedDelay | None = None
    notes: list[str] = field(default_factory=list)


class _Spans:
    """A compact list of events of one kind: start, duration and an integer tag each, and the arguments of some."""

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
        """Yields (index, start, end) sorted by start, enclosing events first.

        A last item with index -1 and infinite times makes the caller close all open ops.
        """
        pairs = self.pairs()
        order = np.lexsort((-pairs[:, 1], pairs[:, 0]))
        for part in np.array_split(order, len(order) // 10_000 + 1):
            yield from zip(part.tolist(), *pairs[part].T.tolist(), strict=True)
        yield -1, float("inf"), float("inf")


def read_rank(path: Path, fallback_rank: int) -> RankTrace:
    """Reads the trace in a file.

    Args:
        path: a trace of torch.profiler, plain or gzip.
        fallback_rank: the rank to use if the trace does not record it.

    Raises:
        UnreadableRunError: the file is not a trace, or lacks the kernels of an accelerator.
    """
    return _RankReader(path).read(fallback_rank)


class _RankReader:
    """Collects the events of a trace, then derives a `RankTrace` from them."""

    def __init__(self, path: Path) -> None:
        self.trace = Trace(path)
        self._zero: int | None = None
        self._kernels, self._copies, self._launches = _Spans(), _Spans(), _Spans()
        # Thread -> its ops. The tag is the number of the op's name. Arguments are kept for calls of c10d only.
        self._ops = defaultdict[int, _Spans](_Spans)
        self._names: dict[str, int] = {}
        self._threads: dict[Any, int] = {}
        self._annotations: list[tuple[str, float, float]] = []
        self._kernel_ids: dict[tuple[int, str], int] = {}  # (stream, kernel name) -> number
        self._computing_ids = array("q")  # that number for each kernel in self._kernels
        self._hashes: set[int] = set()  # to find repeated events
        self._categories: set[str] = set()  # of events that are not read
        # Communication kernels, gloo's transports, and nccl's annotations on the GPU's streams.
        self._messages, self._transports, self._marks = list[Op](), list[Op](), list[Op]()
        self._duration_us: float | None = None  # of the whole trace
        self._excluded: Counter[str] = Counter()  # reason -> number of events

    def read(self, fallback_rank: int) -> RankTrace:
        for events in self.trace.events():
            if self._zero is None:
                self._zero = _choose_zero(
                    [event.ts for event in events if _KINDS.get(event.cat or "", "trace") != "trace"]
                )
            for event in events:
                if event.ph == "X" and event.cat and (kind := _KINDS.get(event.cat)):
                    self._add(event, kind)
                elif event.cat:
                    self._categories.add(event.cat)
        return self._finish(fallback_rank)

    def _add(self, event: Event, kind: str) -> None:
        """Stores an event by its kind, or counts it as excluded."""
        try:
            ts = event.ts if type(event.ts) is not str else float(event.ts)
            start, duration = float(ts - (self._zero or 0)), float(event.dur)  # type: ignore[arg-type]
        except (TypeError, ValueError, ArithmeticError):
            start = duration = float("nan")
        if kind == "trace":
            self._duration_us = duration if 0 < duration < _MAX_TIME_US else None
        elif not -_MAX_TIME_US < start < _MAX_TIME_US or duration != duration:
            self._excluded["without a time"] += 1
        elif not 0 <= duration < _MAX_TIME_US or -2e-3 < duration - _OVERFLOW_US < 2e-3:
            self._excluded[_IMPOSSIBLE] += 1
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
                if not C10D_EVENTS.match(op.name):
                    self._annotations.append(op[:3])
                self._add_op(op.thread, op.name, start, duration, op.args)
            elif op.name.startswith("nccl:"):
                self._marks.append(op)

    def _is_new(self, op: Op) -> bool:
        """Returns whether no equal event was read before.

        A profile that was exported twice contains each event twice.
        """
        count = len(self._hashes)
        self._hashes.add(hash((op[:4], _number(op.args.correlation), _number(op.args.external))))
        self._excluded[_REPEATED] += count == len(self._hashes)
        return count < len(self._hashes)

    def _add_op(
        self, thread: int, name: str, start: float, duration: float, args: Args | None = None
    ) -> None:
        ops = self._ops[thread]
        if args is not None and C10D_EVENTS.match(name):
            ops.args[len(ops.ts)] = args
        ops.add(start, duration, self._names.setdefault(name, len(self._names)))

    def _add_kernel(self, kernel: Op, duration: float) -> None:
        """Stores a kernel as communication if its arguments or its name show a collective, else as computation."""
        if kernel.args.collective is not None or kernel_collective(kernel.name):
            self._messages.append(kernel)
        else:
            self._kernels.add(kernel.start, duration, _number(kernel.args.correlation))
            self._computing_ids.append(
                self._kernel_ids.setdefault((kernel.thread, kernel.name), len(self._kernel_ids))
            )

    def _thread(self, event: Event) -> int:
        """Returns a number for the thread or stream of an event; -1 if it has no valid one."""
        try:
            return self._threads.setdefault((event.pid, event.tid), len(self._threads))
        except TypeError:
            return -1

    def _finish(self, fallback_rank: int) -> RankTrace:
        """Derives the trace's content once all events were read."""
        if self._zero is None:
            raise UnreadableRunError(
                f"{self.trace.path} has no event with a time, expected a profiler's trace"
            )
        header = self.trace.header
        info, recorder, window, mesh_dims = (
            value if isinstance(value := header.get(key), dict) else {}
            for key in ("distributedInfo", "dtbench", "dtbench_window", comm.MESH_DIMS)
        )
        on_gpu = bool(self._kernels.ts or self._messages)
        if not on_gpu:
            self._refuse_without_kernels(printable(info.get("backend", "")))
        rank = comm.to_count(info.get("rank"))
        trace = RankTrace(
            rank=fallback_rank if rank is None else rank,
            world_size=comm.to_count(info.get("world_size")) or 1,
            backend=comm.find_backend(info, on_gpu),
            zero_us=self._zero + (comm.to_count(header.get("baseTimeNanoseconds"), 2**63) or 0) / 1e3,
            source=self.trace.path.name,
            torch=printable(recorder.get("torch", "")),
            host=printable(recorder.get("host", header.get("host_name", ""))),
            device=printable(recorder.get("device", "")),
            on_gpu=on_gpu,
            window=window,
            delay=_parse_delay(
                recorder.get("delay"), sum(name == _DELAY for name, _, _ in self._annotations)
            ),
        )
        launched = self._launched()
        trace.launched = launched[np.argsort(launched[:, 1], kind="stable")][:, ::-1]
        trace.steps = find_steps(self._annotations, launched)
        host_calls, work = self._host_calls(on_gpu)
        self._drop_long(trace, self._kernels if on_gpu else work)
        groups = comm.read_groups(info, mesh_dims)
        calls = [
            *self._kernel_calls(host_calls, groups),
            *self._gloo_calls(host_calls, groups, recorder.get("gloo_threads")),
        ]
        if len(groups) == 1:
            (group,) = groups.values()
            calls = [call if call.group.key else call._replace(group=group) for call in calls]
        calls.sort(key=lambda call: (call.issued, call.start, call.end))
        trace.calls = self._with_phases(calls, trace.steps)
        spans = [
            trace.compute,
            trace.copies,
            intervals((call.start, call.end) for call in calls),
            *(ops.pairs() for ops in self._ops.values() if not on_gpu),
        ]
        if len(edges := np.concatenate(spans)):
            trace.span = float(edges[:, 0].min()), float(edges[:, 1].max())
        if not trace.steps.spans:
            trace.steps = find_steps([], launched, trace.calls)
        trace.notes = [
            f"rank {trace.rank}: {note}"
            for note, applies in self._notes(trace, bool(host_calls)).items()
            if applies
        ]
        return trace

    def _with_phases(self, calls: Sequence[comm.Call], steps: Steps) -> list[comm.Call]:
        """Adds the phases to the calls whose time on the host is recorded."""
        ops, names = (ops.arrays() for ops in self._ops.values()), [*self._names]
        phases = find_phases(self._annotations, ops, names, steps.host_spans)
        return [
            call._replace(phase=phase) if call.issued != call.start else call
            for call, phase in zip(calls, phases.at([call.issued for call in calls]), strict=True)
        ]

    def _refuse_without_kernels(self, backend: str) -> None:
        """Raises an error if a trace without kernels comes from a job on an accelerator.

        The calls on the host do not show when such a job computed and communicated.

        Raises:
            UnreadableRunError: the job ran on an accelerator.
        """
        names = [*self._names, *self._categories, "" if self._transports else backend]
        if shows := next(filter(_ON_DEVICE.match, names), None):
            end = " before the point where it is cut off" * self.trace.cut_off
            raise UnreadableRunError(
                f"{self.trace.path} has no kernels{end}, although {printable(shows)!r} shows a job on an accelerator: "
                "expected kernels of CUDA, ROCm or XPU. Give the complete trace of a profiler with "
                "ProfilerActivity.CPU and ProfilerActivity.CUDA (on Intel GPUs: ProfilerActivity.XPU), or "
                "record the job with `dtbench profile -- COMMAND`"
            )

    def _host_calls(self, on_gpu: bool) -> tuple[list[Op], _Spans]:
        """Returns the calls of c10d with their enclosing ops, and the intervals in which torch's ops worked.

        The intervals are needed only without a GPU. Ops that communicate, or that torch dispatched to a tensor
        subclass, do not count as work.
        """
        calls, work, names = list[Op](), _Spans(), list(self._names)
        for thread, ops in self._ops.items():
            if on_gpu and not ops.args:
                continue
            open_ops: list[list[Any]] = []  # [start, end, name, is_work], outermost first
            for index, start, end in ops.in_order():
                while open_ops and open_ops[-1][1] <= start:
                    op_start, op_end, name, is_work = open_ops.pop()
                    if is_work and name.startswith("aten::"):
                        work.add(op_start, op_end - op_start, -1)
                    elif open_ops and not is_work:
                        open_ops[-1][3] = False
                if index >= 0:
                    name, args = names[ops.tag[index]], ops.args.get(index)
                    if name == _DELAY and calls and calls[-1].thread == thread and calls[-1].end >= end:
                        calls[-1] = calls[-1]._replace(start=end)  # the rank arrives after the delay
                    if args is not None:
                        # Ops may overlap without nesting: a step's annotation may begin within the optimizer's
                        # annotation and end after it.
                        parents = tuple(
                            parent for _, op_end, parent, _ in open_ops[-_MAX_NESTING:] if op_end >= end
                        )
                        calls.append(Op(name, start, end, thread, args, parents))
                    open_ops.append([start, end, name, args is None and name != _SUBCLASS_OP])
        return calls, work

    def _launched(self) -> Any:
        """Returns (launch, start) of the kernels whose launch is recorded, sorted by launch time."""
        ts, _, tag = self._kernels.arrays()
        launch_ts, _, launch_tag = self._launches.arrays()
        if not len(launch_ts):
            return intervals(())
        order = np.argsort(launch_tag, kind="stable")
        launch = order[np.minimum(np.searchsorted(launch_tag, tag, sorter=order), len(order) - 1)]
        pairs = np.column_stack([launch_ts[launch], ts])[(launch_tag[launch] == tag) & (tag >= 0)]
        return pairs[np.argsort(pairs[:, 0], kind="stable")]

    def _drop_long(self, trace: RankTrace, work: _Spans) -> None:
        """Drops events longer than the trace, or longer than the longest step if they begin in a step.

        gloo's transports may wait in its queue for several steps, so the limit of a step does not apply to them.
        """
        lists = self._messages, self._transports
        spans = [work.pairs(), self._copies.pairs(), *(intervals(op[1:3] for op in ops) for ops in lists)]
        starts = np.concatenate(spans)[:, 0]
        longest = self._duration_us or (float(np.ptp(starts)) if len(starts) > 9 else 0.0) or float("inf")
        steps, longest_step = intervals(trace.steps.spans), trace.steps.longest_us or float("inf")
        is_valid: list[Any] = []
        for array_ in spans:
            step = np.searchsorted(steps[:, 0], array_[:, 0], side="right") - 1
            in_step = (step >= 0) & (array_[:, 0] < steps[step, 1]) if len(steps) else step >= 0
            is_valid.append(
                array_[:, 1] - array_[:, 0]
                <= np.where(in_step & (array_ is not spans[-1]), min(longest_step, longest), longest)
            )
        self._excluded[_IMPOSSIBLE] += sum(int((~valid).sum()) for valid in is_valid)
        self._doubtful = self._find_doubtful(is_valid[0]) if trace.on_gpu else {}
        trace.compute, trace.copies = (
            union(array_[valid]) for array_, valid in zip(spans[:2], is_valid, strict=False)
        )
        self._messages, self._transports = (
            [op for op, valid in zip(ops, valids, strict=True) if valid]
            for ops, valids in zip(lists, is_valid[2:], strict=True)
        )

    def _find_doubtful(self, is_valid: Any) -> dict[str, float]:
        """Returns kernels that count as computation but may communicate, as function -> microseconds.

        Either their names mention a collective, or they run on a stream with hardly anything but communication.
        """
        totals_us = np.bincount(
            self._computing_ids, np.where(is_valid, self._kernels.dur, 0), len(self._kernel_ids)
        )
        us = dict(zip(self._kernel_ids, totals_us.tolist(), strict=True))
        messages_by_stream = group_by(self._messages, lambda message: message.thread)
        computing = {
            name
            for stream, name in us
            if stream not in messages_by_stream or COMPUTES.search(function_of(name))
        }
        communication_streams = {
            stream
            for stream, messages in messages_by_stream.items()
            if sum(us[on, name] for on, name in us if on == stream and name in computing)
            <= _MAX_COMPUTE_SHARE * sum(message.end - message.start for message in messages)
        }
        return {
            function: sum(us[kernel] for kernel in kernels)
            for function, kernels in group_by(us, lambda kernel: function_of(kernel[1])).items()
            if (MAY_COMMUNICATE.search(function) and not COMPUTES.search(function))
            or any(stream in communication_streams and name not in computing for stream, name in kernels)
        }

    def _kernel_calls(
        self, host: Sequence[Op], groups: Mapping[str, comm.ProcessGroup]
    ) -> Iterator[comm.Call]:
        """Yields a call for each communication kernel.

        The kernel's launch leads to the calls on the host that describe it. If it leads to none, the annotation over
        the kernel on its stream is used instead.
        """
        by_thread = group_by(host, lambda op: op.thread)
        by_number = {number: op for op in host if (number := _number(op.args.external)) >= 0}
        marks = group_by(sorted(self._marks, key=lambda mark: mark.start), lambda mark: mark.thread)
        numbers = np.array([_number(message.args.correlation) for message in self._messages])
        launch_times, threads, tags = self._launches.arrays()
        is_message = np.isin(tags, numbers[numbers >= 0])
        launches = {
            number: (int(thread), time_us)
            for number, time_us, thread in zip(
                *(column[is_message].tolist() for column in (tags, launch_times, threads)), strict=True
            )
        }
        for message, number in zip(self._messages, numbers.tolist(), strict=True):
            launch = launches.get(number)
            enclosing = find_enclosing(by_thread, *launch) if launch else []
            start = message.start + _MARK_ROUNDING_US
            if not enclosing and (mark := next(iter(find_enclosing(marks, message.thread, start)), None)):
                op = by_number.get(_number(mark.args.external))
                enclosing = find_enclosing(by_thread, op.thread, op.start) if op else []
            issued = launch[1] if launch else enclosing[0].start if enclosing else message.start
            yield describe_kernel(message, enclosing, groups)._replace(issued=issued)

    def _gloo_calls(
        self, host: Sequence[Op], groups: Mapping[str, comm.ProcessGroup], group_by_tid: object
    ) -> Iterator[comm.Call]:
        """Yields a call for each of gloo's transports.

        A call on the host starts its transport, or queues it behind others of its group. A transport therefore belongs
        to the first earlier call of its kind and shapes that has no transport yet.
        """
        threads = {transport.thread for transport in self._transports} - {
            thread for thread, ops in self._ops.items() if ops.args
        }
        tids = {number: key[1] for key, number in self._threads.items() if number in threads}
        group_names = match_gloo_threads(group_by_tid, tids, groups)
        pending: dict[str, deque[Op]] = {}
        calls = sorted((op for op in host if is_call(op.name)), key=lambda op: -op.start)
        for transport in sorted(self._transports, key=lambda transport: transport.start):
            name, start, end, thread, args = transport[:5]
            while calls and calls[-1].start <= start:
                op = calls.pop()
                pending.setdefault(comm.parse_collective(op.name), deque()).append(op)
            group = groups.get(group_names.get(thread, ""), comm.ProcessGroup(""))
            dtype, bytes_ = comm.payload_from_shapes(name, args, group.size)
            kind = comm.parse_collective(name)
            call = comm.Call(start, start, end, kind, group, dtype, bytes_, issued=start)
            for collective in _CALLS_BY_TRANSPORT.get(kind, (kind,)):
                candidates = pending.get(collective, deque())
                while candidates and start - candidates[0].start > _MAX_TRANSPORT_DELAY_US:
                    candidates.popleft()
                if match := next(
                    (op for op in islice(candidates, _MAX_CANDIDATE_CALLS) if has_shapes(op, args)), None
                ):
                    candidates.remove(match)
                    call_dtype, size = comm.payload_from_shapes(match.name, match.args, group.size, dtype)
                    if call_dtype is not None:
                        dtype = call_dtype
                        bytes_ = size if size or match.name.endswith("gather_") else bytes_
                    annotated = (groups.get(name.partition(_GROUP_ANNOTATION)[2]) for name in match.parents)
                    call = call._replace(
                        arrival=match.start,
                        issued=match.start,
                        collective=collective,
                        group=next(filter(None, annotated), group),
                        dtype=dtype,
                        bytes=bytes_,
                        caller=find_caller(match),
                    )
                    break
            yield call

    def _notes(self, trace: RankTrace, has_host_calls: bool) -> dict[str, object]:
        """Returns each possible note with a value that is true if it applies."""
        calls, damaged = trace.calls, self.trace.damaged
        unknown = sum(call.collective == comm.UNKNOWN for call in calls)
        unsized = sum(
            call.bytes is None and call.collective not in ("barrier", comm.UNKNOWN) for call in calls
        )
        # Only gloo's sends and receives lack their group: NCCL's record it.
        groupless = sum(
            not (trace.on_gpu or call.group.key) and call.collective in ("send", "recv") for call in calls
        )
        doubtful = [
            f"{printable(name)} ({format_seconds(us / 1e6)})"
            for name, us in sorted(self._doubtful.items(), key=lambda kernel: -kernel[1])
        ]
        doubtful[_MAX_NAMED_KERNELS:] = ["..."] * (len(doubtful) > _MAX_NAMED_KERNELS)
        return {
            "the trace is cut off; the events before that point were read": self.trace.cut_off,
            f"excluded {plural(damaged, 'damaged event')}": damaged,
            **{
                f"excluded {plural(count, 'event')} {reason}": count
                for reason, count in sorted(self._excluded.items())
            },
            f"{unknown} of {len(calls)} communication kernels could not be identified: the trace lacks the c10d calls "
            "that launched them": unknown,
            f"the size of {unsized} collectives is unknown: give torch.profiler record_shapes=True": unsized,
            f"the process group of {groupless} sends and receives is unknown: gloo's events do not contain it; "
            "`dtbench profile -- COMMAND` records it": groupless,
            f"kernels that count as computation may communicate: {', '.join(doubtful)}; dtbench does not know "
            "their names": doubtful,
            f"calls of torch.distributed have no times: the trace has no events of {trace.backend or 'the backend'} "
            "that show when they ran": has_host_calls and not calls,
            "no steps found in the trace: call profiler.step(), or wrap each step in record_function": (
                not trace.steps.spans
            ),
        }


def _parse_delay(text: object, count: int) -> InjectedDelay | None:
    """Returns the injected delay from the recorder's text, "RANK SECONDS"; None without one."""
    match = re.fullmatch(r"(\d{1,9}) (\d{1,9}\.\d{1,9})", str(text))
    return InjectedDelay(rank=int(match[1]), delay_s=float(match[2]), count=count) if match else None


def _number(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else -1


def _choose_zero(times: Sequence[Any]) -> int | None:
    """Returns the median of the valid times, which becomes the trace's zero; None without valid times.

    Times may count from 1970, and single times may be wrong.
    """
    valid = sorted(
        int(time_us) for time_us in times if type(time_us) in (int, float, Decimal) and abs(time_us) < 1e18
    )
    return valid[len(valid) // 2] if valid else None
