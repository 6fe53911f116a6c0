"""The only file of the core that calls collectives: it issues them, waits for them, and counts calls and bytes.

All functions take a process group or an `OrderedGroup` (an entry of `MeshInfo.groups`). Tensors must be contiguous,
because backends read and write memory.

Functions named by a verb (`all_gather`) write to their output in place and wait. With `async_op` they return the Work
instead; keep the tensors alive until its `wait()`. Functions named by a participle (`gathered`) wait and return a new
tensor. In a traced graph they become one op and its wait.

Bytes are counted like the size in nccl-tests: those of the larger of input and output.

This module calls the methods of the process group instead of the functions of torch.distributed. Those functions
spend 5 to 20 us on checks, logging and options that are the same every time. The callers of this module ensure what
torch.distributed checks. On CUDA, a waiting call uses the current stream, as in torch.distributed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core import torch_compat
from dtbench_core.errors import ArgumentError
from dtbench_core.runtime import PerRank, simulation
from dtbench_core.torch_compat import (
    ALL_GATHER_METHOD,
    ALL_TO_ALL_METHOD,
    REDUCE_SCATTER_METHOD,
    dispatch_modes_active,
    is_fake,
    new_op,
)
from dtbench_core.traced_collectives import keep_on_all_ranks

_REDUCE_OP = {
    op: getattr(dist.ReduceOp, op.upper())
    for op in ("sum", "avg", "product", "max", "min", "band", "bor", "bxor")
}


def _options(kind: Callable[[], Any], op: str | None, async_op: bool) -> Any:
    options = kind()
    options.asyncOp = async_op
    if op is not None:
        options.reduceOp = _REDUCE_OP[op]
    return options


# Options are read-only, so all calls share one instance each. Indexed by (reduction and) async_op.
_GATHER, _EXCHANGE = (
    {a: _options(kind, None, a) for a in (False, True)}
    for kind in (torch_compat.AllGatherOptions, torch_compat.AllToAllOptions)
)
_REDUCE, _REDUCE_SCATTER = (
    {(op, a): _options(kind, op, a) for op in _REDUCE_OP for a in (False, True)}
    for kind in (torch_compat.AllReduceOptions, torch_compat.ReduceScatterOptions)
)


# ---- groups in the caller's order ----


class OrderedGroup:
    """A process group whose ranks the caller counts in another order.

    torch sorts the ranks of a group, but a mesh dim may have the ranks 3, 1, 2, 0. For callers, rank i is the rank at
    position i of the mesh dim. A copy before or after the collective converts tensors that are split by rank. Such
    calls are never asynchronous.

    Args:
        order: group rank at each position.
    """

    __slots__ = ("group", "inverse_order", "order")

    def __init__(self, group: ProcessGroup, order: Sequence[int]) -> None:
        self.group, self.order = group, tuple(order)
        self.inverse_order = tuple(self.order.index(rank) for rank in range(len(self.order)))

    def size(self) -> int:
        return len(self.order)

    def rank(self) -> int:
        """This rank's position in the caller's order."""
        return self.inverse_order[self.group.rank()]

    def in_caller_order(self, parts: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Reorders parts along dim 0 from group order to the caller's. rows: rows per part, if not equal."""
        return _reordered(parts, self.order, rows)

    def in_group_order(self, parts: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Reorders parts along dim 0 from the caller's order to group order. rows: rows per part, if not equal."""
        return _reordered(parts, self.inverse_order, rows)


Group = ProcessGroup | OrderedGroup


def _reordered(parts: torch.Tensor, order: Sequence[int], rows: Sequence[int] | None) -> torch.Tensor:
    if parts.numel() == 0:
        return parts
    pieces = parts.split(list(rows or [len(parts) // len(order)] * len(order)))
    return torch.cat([pieces[i] for i in order])


def process_group_of(group: Group) -> ProcessGroup:
    """Returns the process group without the caller's order."""
    return group.group if isinstance(group, OrderedGroup) else group


@dataclass
class CommCount:
    """Calls and bytes of each collective, by the names of this module's functions."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)


# The active count_collectives() blocks.
counters: PerRank[list[CommCount]] = PerRank("comm.counters", list)
_counters = counters.get


@contextmanager
def count_collectives() -> Iterator[CommCount]:
    """Counts the collectives that this process issues inside the block, also those of backward threads."""
    count, entered = CommCount(), _counters()
    entered.append(count)
    try:
        yield count
    finally:
        entered.remove(count)


def _record(name: str, tensor: torch.Tensor) -> None:
    for count in _counters():
        count.calls[name] += 1
        count.bytes[name] += tensor.numel() * tensor.element_size()


def all_gather(
    output: torch.Tensor,  # (n * k,) or (n * rows, ...)
    input: torch.Tensor,  # (k,) or (rows, ...)
    group: Group,
    async_op: bool = False,
) -> Work | None:
    """Concatenates the inputs of all ranks on dim 0 into every rank's output."""
    if isinstance(group, OrderedGroup) or _functional(input):
        output.copy_(gathered(input, output.shape, group))
        return None
    return _all_gather(output, input, group, async_op)


def _all_gather(
    output: torch.Tensor, input: torch.Tensor, group: ProcessGroup, async_op: bool
) -> Work | None:
    if _counters():
        _record("all_gather", output)
    received, sent = output, input
    if output.is_complex():
        received, sent = _real(output), _real(input.resolve_conj())
    return _finish(getattr(group, ALL_GATHER_METHOD)(received, sent, _GATHER[async_op]), async_op)


def gathered(input: torch.Tensor, shape: Sequence[int], group: Group) -> torch.Tensor:
    """Returns the output of `all_gather`, of the given shape."""
    if isinstance(group, OrderedGroup):
        return group.in_caller_order(gathered(input, shape, group.group))
    if _functional(input):
        result = _call(_ops.all_gather_into_tensor, input, group.size(), group.group_name).view(shape)
        _record("all_gather", result)
        return result
    output = input.new_empty(shape)
    _all_gather(output, input, group, False)
    return output


def reduce_scatter(
    output: torch.Tensor,  # (k,) or (rows, ...)
    input: torch.Tensor,  # (n * k,) or (n * rows, ...)
    group: Group,
    op: str = "sum",
    async_op: bool = False,
) -> Work | None:
    """Reduces the inputs of all ranks; rank r receives part r of dim 0. Returns None once complete."""
    if isinstance(group, OrderedGroup) or _functional(input):
        output.copy_(reduce_scattered(input, output.shape, group, op))
        return None
    return _reduce_scatter(output, input, group, op, async_op)


def _reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, group: ProcessGroup, op: str, async_op: bool
) -> Work | None:
    if _counters():
        _record("reduce_scatter", input)
    divides = op == "avg" and not _averages(group, input)
    if divides:
        op, async_op = "sum", False
    received, sent = output, input
    if output.is_complex():
        _refuse_complex("reduce_scatter", op)
        received, sent = _real(output), _real(input.resolve_conj())
    work = _finish(
        getattr(group, REDUCE_SCATTER_METHOD)(received, sent, _REDUCE_SCATTER[op, async_op]), async_op
    )
    if divides:
        output /= group.size()
    return work


def reduce_scattered(
    input: torch.Tensor, shape: Sequence[int], group: Group, op: str = "sum"
) -> torch.Tensor:
    """Returns the output of `reduce_scatter`, of the given shape."""
    if isinstance(group, OrderedGroup):
        return reduce_scattered(group.in_group_order(input), shape, group.group, op)
    if _functional(input):
        _record("reduce_scatter", input)
        return _reduce(_ops.reduce_scatter_tensor, input, op, group, group.size()).view(shape)
    output = input.new_empty(shape)
    _reduce_scatter(output, input, group, op, False)
    return output


def all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Work | None:
    """Reduces `tensor` over the ranks in place. Returns None once complete."""
    group = process_group_of(group)
    if _functional(tensor):
        tensor.copy_(reduced(tensor, group, op))
        return None
    return _all_reduce(tensor, group, op, async_op)


def _all_reduce(tensor: torch.Tensor, group: ProcessGroup, op: str, async_op: bool) -> Work | None:
    if _counters():
        _record("all_reduce", tensor)
    divides = op == "avg" and not _averages(group, tensor)
    if divides:
        op, async_op = "sum", False
    sent = tensor
    if tensor.is_complex():
        _refuse_complex("all_reduce", op)
        sent = _real(tensor)
    work = _finish(group.allreduce([sent], _REDUCE[op, async_op]), async_op)
    if divides:
        tensor /= group.size()
    return work


def reduced(input: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """Returns the result of `all_reduce`, as a contiguous tensor."""
    group = process_group_of(group)
    if _functional(input):
        _record("all_reduce", input)
        return _reduce(_ops.all_reduce, input.contiguous(), op, group)
    output = input.clone(memory_format=torch.contiguous_format)
    _all_reduce(output, group, op, False)
    return output


def all_to_all(
    output: torch.Tensor,  # (sum of output_splits, ...)
    input: torch.Tensor,  # (sum of input_splits, ...)
    group: Group,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sends part r of dim 0 to rank r. Parts are equal unless the splits (rows per rank) are given."""
    if isinstance(group, OrderedGroup) or _functional(input):
        output.copy_(exchanged(input, output.shape, group, output_splits, input_splits))
        return None
    if _counters():
        _record("all_to_all", input)
    splits = list(output_splits or ()), list(input_splits or ())
    received, sent = output, input
    if output.is_complex():
        received, sent = _real(output), _real(input.resolve_conj())
    if not async_op and type(sent) is torch.Tensor and sent.is_cpu and dist.get_backend(group) == "gloo":
        _send_and_receive(received, sent, group, *splits)
        return None
    return _finish(getattr(group, ALL_TO_ALL_METHOD)(received, sent, *splits, _EXCHANGE[async_op]), async_op)


def exchanged(
    input: torch.Tensor,
    shape: Sequence[int],
    group: Group,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> torch.Tensor:
    """Returns the output of `all_to_all`, of the given shape."""
    if isinstance(group, OrderedGroup):
        output_rows, input_rows = (
            [n[i] for i in group.inverse_order] if n else None for n in (output_splits, input_splits)
        )
        result = exchanged(
            group.in_group_order(input, input_splits), shape, group.group, output_rows, input_rows
        )
        return group.in_caller_order(result, output_rows)
    if _functional(input):
        _record("all_to_all", input)
        n = group.size()
        splits = [
            list(rows or [length // n] * n)
            for rows, length in ((output_splits, shape[0]), (input_splits, input.size(0)))
        ]
        return _call(_ops.all_to_all_single, input, *splits, group.group_name).view(shape)
    output = input.new_empty(shape)
    all_to_all(output, input, group, output_splits, input_splits)
    return output


def all_to_all_single_autograd(
    self: torch.Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: Group | DeviceMesh | tuple[DeviceMesh, int],
    tag: str = "",
) -> torch.Tensor:
    """Sends parts of dim 0 to the ranks of a group, as experts do in dispatch and combine. Waits for the result.

    The gradient is sent back by an all-to-all with the splits exchanged, so all ranks must run the backward pass. The
    name and the arguments are those of torch.distributed._functional_collectives.

    Args:
        self: (rows, ...), the parts for ranks 0, 1, ... one after the other. Need not be contiguous.
        output_split_sizes: rows to receive from each rank. None, for both splits, means equal parts.
        input_split_sizes: rows to send to each rank. May contain 0.
        group: a process group, a one-dimensional mesh, or a mesh with the number of its dim.
        tag: ignored; torch has it.

    Returns:
        (sum of output_split_sizes, ...), the parts from ranks 0, 1, ... one after the other.

    Raises:
        ArgumentError: the splits do not fit the group, the tensor or each other.
    """
    if isinstance(group, (DeviceMesh, tuple)):
        mesh, dim = group if isinstance(group, tuple) else (group, None)
        group = mesh.get_group(dim)
    n, rank, rows = group.size(), group.rank(), self.size(0)
    equal = [rows // n] * n if rows % n == 0 and output_split_sizes is input_split_sizes is None else []
    outputs, inputs = output_split_sizes or equal, input_split_sizes or equal
    if not len(outputs) == len(inputs) == n or sum(inputs) != rows or inputs[rank] != outputs[rank]:
        raise ArgumentError(
            f"all_to_all_single_autograd got output_split_sizes={output_split_sizes} and "
            f"input_split_sizes={input_split_sizes} for {rows} rows on rank {rank} of {n}: expected two lists of {n} "
            "numbers, of which the second adds up to the rows and both have the same number for this rank; or None "
            "for both and a multiple of the ranks"
        )
    return cast("torch.Tensor", _AllToAll.apply(self, outputs, inputs, group))


class _AllToAll(torch.autograd.Function):
    """An all-to-all whose backward pass is the all-to-all with the splits exchanged."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, outputs: Sequence[int], inputs: Sequence[int], group: Group
    ) -> torch.Tensor:
        ctx.reverse = (inputs, outputs, group)
        return exchanged(packed(input), (sum(outputs), *input.shape[1:]), group, outputs, inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllToAll.apply(grad, *ctx.reverse), None, None, None


# Tag of messages between two ranks. gloo's collectives use separate slots.
_TAG = 0xA2A


def _send_and_receive(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup,
    output_splits: list[int],
    input_splits: list[int],
) -> None:
    """Does an all-to-all with messages, and posts all receives before the first send.

    gloo's own all-to-all posts sends first. A late rank then permits its peer to send only after all of its own sends,
    so the two directions of a link alternate. Measured between two hosts with 400 Mbit/s, two groups and 1 MiB per
    rank: 34 to 49 ms instead of 41 to 90 ms, where the link needs 42 ms. The effect is similar on one host.
    """
    n, my_rank = group.size(), group.rank()
    received = output.split(output_splits or output.size(0) // n) if output.size(0) else [output] * n
    parts = input.split(input_splits or input.size(0) // n) if input.size(0) else [input] * n
    peers = [(my_rank + i) % n for i in range(1, n)]
    works = [group.recv([received[r]], r, _TAG) for r in peers if received[r].numel()]
    works += [group.send([parts[r]], r, _TAG) for r in peers if parts[r].numel()]
    received[my_rank].copy_(parts[my_rank])
    for work in works:
        work.wait()


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether the values are contiguous in memory, in row-major order, without lazy conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` if it is packed, otherwise a packed copy."""
    return tensor if is_packed(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def broadcast(tensor: torch.Tensor, group: Group, src: int = 0, async_op: bool = False) -> Work | None:
    """Copies the tensor of group rank `src` to the other ranks, in place."""
    if isinstance(group, OrderedGroup):
        src, group = group.order[src], group.group
    _record("broadcast", tensor)
    if _functional(tensor):
        tensor.copy_(_call(_ops.broadcast, tensor, src, group.group_name))
        return None
    options = torch_compat.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = src, 0, async_op
    return _finish(group.broadcast([_real(tensor) if tensor.is_complex() else tensor], options), async_op)


def scatter(
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor] | None,
    group: Group,
    src: int = 0,
    async_op: bool = False,
) -> Work | None:
    """Gives rank r the r-th of `inputs`, which have equal shapes. Only group rank `src` passes inputs."""
    if isinstance(group, OrderedGroup):
        inputs = None if inputs is None else [inputs[i] for i in group.inverse_order]
        src, group = group.order[src], group.group
    if _counters():
        _record("scatter", output)
    options = torch_compat.ScatterOptions()
    options.rootRank, options.asyncOp = src, async_op
    lists = [] if inputs is None else [list(inputs)]
    if output.is_complex():
        output, lists = _real(output), [[_real(t) for t in part] for part in lists]
    return _finish(group.scatter([output], lists, options), async_op)


def all_gather_objects(value: object, group: Group | None = None) -> list[Any]:
    """Returns the `value` of every rank, in order; without a group, of all ranks of the world.

    torch pickles the values, so it is meant for checks, not for hot paths.
    """
    if isinstance(group, OrderedGroup):
        objects = all_gather_objects(value, group.group)
        return [objects[i] for i in group.order]
    gathered: list[Any] = [None] * (dist.get_world_size() if group is None else group.size())
    dist.all_gather_object(gathered, value, group=group)
    return gathered


_ops = torch.ops._c10d_functional


def _functional(input: torch.Tensor) -> bool:
    """Whether the functional ops must be used, because a dispatch mode observes the call.

    The mode may be a tracer, or a tool that recognizes collectives by name. A method of the process group would enter
    the collective into the graph without its wait. It would also reject the fake tensors of a suspended tracer.
    Simulated ranks use the methods (`simulate`).
    """
    traced = dispatch_modes_active() != 0 or (input.__class__ is not torch.Tensor and is_fake(input))
    return traced and not simulation.active


def _call(op: Callable[..., torch.Tensor], input: torch.Tensor, *args: object) -> torch.Tensor:
    """Calls a functional collective and returns its result after waiting for it."""
    if input.is_complex():
        return torch.view_as_complex(_call(op, _real(input.resolve_conj()), *args))
    result = op(input, *args)
    keep_on_all_ranks(result, _copy_ordered_after)
    return cast("torch.Tensor", _ops.wait_tensor(result))


def _reduce(
    functional: Callable[..., torch.Tensor], input: torch.Tensor, op: str, group: ProcessGroup, *size: int
) -> torch.Tensor:
    if input.is_complex():
        _refuse_complex("a reduction", op)
    divides = op == "avg" and not _averages(group, input)
    result = _call(functional, input, "sum" if divides else op, *size, group.group_name)
    return result / group.size() if divides else result


# Returns a copy of `input`, and makes the graph treat it as computed from `source` too.
_copy_ordered_after = new_op(
    "after(Tensor input, Tensor source) -> Tensor", lambda tensor, source: tensor.clone()
)
_full_ordered_after = new_op(
    "full_ordered_after(Tensor[] sources, SymInt[] size, Scalar value, ScalarType dtype) -> Tensor",
    lambda sources, size, value, dtype: sources[0].new_full(size, value, dtype=dtype),
)


def full_ordered_after(
    sources: Sequence[torch.Tensor], shape: Sequence[int], value: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns a tensor filled with `value`, on the device of `sources`. A graph treats it as computed from them.

    A tracer drops ops that no result depends on. If only one rank does not need the value of a collective, its graph
    would lack the collective, and the other ranks would wait for it.
    """
    if dispatch_modes_active() and not simulation.active:
        return cast("torch.Tensor", _full_ordered_after(list(sources), shape, value, dtype))
    return sources[0].new_full(shape, value, dtype=dtype)


def _averages(group: ProcessGroup, tensor: torch.Tensor) -> bool:
    """Whether the backend supports AVG: NCCL does, gloo does not."""
    return tensor.is_cuda and "nccl" in dist.get_backend(group)


def reduces_bits(group: Group) -> bool:
    """Whether the backend supports band, bor and bxor: gloo does, NCCL does not."""
    return "nccl" not in dist.get_backend(process_group_of(group))


# Backends do not support complex numbers. Complex numbers are sent and added as pairs of real numbers.
_real = torch.view_as_real


def _refuse_complex(name: str, op: str) -> None:
    """Raises for reductions other than sums, which do not act separately on real and imaginary parts."""
    if op not in ("sum", "avg"):
        raise ArgumentError(
            f"{name} got complex numbers and the reduction {op!r}, expected 'sum' or 'avg': gather the terms and "
            "reduce them on every rank"
        )


def _finish(work: Work | None, async_op: bool) -> Work | None:
    if async_op or work is None:  # None: the backend has already waited
        return work
    work.wait()
    return None
