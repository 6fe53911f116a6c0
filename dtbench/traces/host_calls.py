"""Matches communication kernels and gloo's transports with the calls on the host that describe them."""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dtbench.traces import communication as comm
from dtbench.traces.kernel_names import SIZED_ARGUMENTS, kernel_collective, kernel_dtype
from dtbench.traces.kineto import Args, printable

# Names of the events of torch.distributed, and of ops that communicate without c10d.
NOT_C10D = re.compile(r"(?:symm_mem|_C_custom_ar|sgl_kernel)::\w*(?:all_|reduce|broadcast)")
C10D_EVENTS = re.compile(rf"^(?:c10d::|record_param_comms|nccl:|_c10d_functional|{NOT_C10D.pattern})")
_NOT_A_CALLER = re.compile(
    r"^(?:autograd::engine|torch::autograd|ProfilerStep|PythonSubclass|## |dtbench:)|wait_tensor"
)


class Op(NamedTuple):
    """A call on the host, a communication kernel, a transport of gloo, or an annotation on a stream.

    Attributes:
        name: its name in the trace.
        start, end: microseconds.
        thread: number of the thread or stream.
        args: its arguments.
        parents: names of the ops that enclose a call on the host, outermost first.
    """

    name: str
    start: float
    end: float
    thread: int
    args: Args
    parents: tuple[str, ...] = ()


def is_call(name: str) -> bool:
    return name.startswith("c10d::") and comm.NO_COLLECTIVE.search(name[6:]) is None


def find_caller(op: Op) -> str:
    """Returns the innermost enclosing op that does not belong to the communication itself."""
    callers = (
        name
        for name in reversed(op.parents)
        if not C10D_EVENTS.match(name) and not _NOT_A_CALLER.search(name)
    )
    return printable(next(callers, ""))


def has_shapes(op: Op, args: Args) -> bool:
    """Returns whether a transport's shape is among a call's. True if one of them has no shapes."""
    if not isinstance(args.shapes, list) or not isinstance(op.args.shapes, list) or len(args.shapes) != 1:
        return True
    return args.shapes[0] in op.args.shapes or [args.shapes[0]] in op.args.shapes or not args.shapes[0]


def find_enclosing(by_thread: Mapping[int, list[Op]], thread: int, time_us: float) -> list[Op]:
    """Returns the calls on a thread, or the annotations on a stream, that are in progress; innermost first.

    Args:
        by_thread: thread or stream -> ops by start. They nest a few levels deep.
    """
    ops = by_thread.get(thread, [])
    last = bisect_right(ops, time_us, key=lambda op: op.start)
    return [op for op in reversed(ops[max(last - 8, 0) : last]) if op.end >= time_us]


def describe_kernel(
    kernel: Op, enclosing: Sequence[Op], groups: Mapping[str, comm.ProcessGroup]
) -> comm.Call:
    """Describes a communication kernel by its own arguments, else by those of the calls that launched it.

    Args:
        enclosing: those calls, innermost first.
    """
    by_name = kernel_collective(kernel.name) or comm.UNKNOWN
    call = comm.Call(
        kernel.start,
        kernel.start,
        kernel.end,
        by_name,
        comm.ProcessGroup(""),
        caller=find_caller(enclosing[0]) if enclosing else "",
    )
    for args in (kernel.args, *(op.args for op in enclosing)):
        if args.collective is not None and not comm.NO_COLLECTIVE.search(str(args.collective)[:200]):
            dtype, bytes_ = comm.payload_from_counts(args)
            name = comm.parse_collective(str(args.collective))
            return call._replace(
                collective=by_name
                if name in (comm.UNKNOWN, "coalesced") and by_name != comm.UNKNOWN
                else name,
                group=comm.find_group(args, groups),
                dtype=dtype,
                bytes=bytes_,
                sequence=comm.to_count(args.sequence),
            )
    dtype, outside = kernel_dtype(kernel.name), [op for op in enclosing if NOT_C10D.match(op.name)]
    payloads = [_payload_outside_c10d(op, by_name, dtype) for op in outside] or [
        comm.payload_from_shapes(op.name, op.args, None) for op in enclosing
    ]
    names = (comm.parse_collective(op.name) for op in enclosing if not outside)
    return call._replace(
        collective=next((name for name in names if name != comm.UNKNOWN), by_name),
        dtype=next((dtype for dtype, _ in payloads if dtype), dtype),
        bytes=max((size or 0 for _, size in payloads), default=0) or None,
    )


def _payload_outside_c10d(op: Op, collective: str, dtype: str | None) -> tuple[str | None, int | None]:
    """Returns dtype and bytes of a kernel that an op launched without c10d; None if the op does not show them.

    Args:
        collective: the kernel's collective, which the op's name must have, too.
        dtype: the kernel's dtype, which the op's tensor must have, if the kernel's name shows one.
    """
    number, shapes, types = SIZED_ARGUMENTS.get(op.name, 0), op.args.shapes, op.args.types
    if not isinstance(shapes, list) or not isinstance(types, list) or len(shapes) != len(types):
        return None, None
    payload = comm.payload_from_shapes(
        "", Args(shapes=shapes[number : number + 1], types=types[number : number + 1]), None
    )
    is_same = comm.parse_collective(op.name) == collective and payload[0] == (dtype or payload[0])
    return payload if is_same and op.name in SIZED_ARGUMENTS else (None, None)


def match_gloo_threads(
    group_by_tid: object, tids: Mapping[int, Any], groups: Mapping[str, comm.ProcessGroup]
) -> dict[int, str]:
    """Returns the name of the group that each of gloo's threads serves.

    Each group has two threads, which start in the order of the groups. That order is used only if all threads appear in
    the trace.

    Args:
        group_by_tid: thread id -> group, as dtbench's recorder wrote it; anything else in other traces.
        tids: number of a thread -> its id in the trace.
    """
    if isinstance(group_by_tid, dict):
        return {
            thread: printable(group_by_tid[str(tid)])
            for thread, tid in tids.items()
            if str(tid) in group_by_tid
        }
    if len(groups) == 1:
        return dict.fromkeys(tids, next(iter(groups)))
    if len(tids) != 2 * len(groups) or any(
        comm.to_count(value) is None for value in (*tids.values(), *groups)
    ):
        return {}
    names = [name for name in sorted(groups, key=int) for _ in range(2)]
    return dict(zip(sorted(tids, key=lambda thread: int(tids[thread])), names, strict=True))
