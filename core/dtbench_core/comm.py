"""The only file of the core that calls collectives: issue, wait, count calls and bytes.

All functions take a process group (a `MeshInfo.groups` entry), contiguous tensors and act in place
on their output. They wait unless `async_op`, which returns the Work instead: keep the tensors alive
until its `wait()`. Bytes counted are those of the larger side of the call (nccl-tests' size).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from dtbench_core import torch_compat

_REDUCE_OP = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@dataclass
class CommCount:
    """Calls and bytes per collective, by the names of this module's functions."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)


_counting: list[CommCount] = []


@contextmanager
def count_collectives() -> Iterator[CommCount]:
    """Counts what this process issues inside the block, backward passes on other threads included."""
    count = CommCount()
    _counting.append(count)
    try:
        yield count
    finally:
        _counting.remove(count)


def _record(name: str, tensor: torch.Tensor) -> None:
    for count in _counting:
        count.calls[name] += 1
        count.bytes[name] += tensor.numel() * tensor.element_size()


def all_gather(
    output: torch.Tensor,  # (n * k,) or (n * rows, ...)
    input: torch.Tensor,  # (k,) or (rows, ...)
    group: ProcessGroup,
    async_op: bool = False,
) -> Work | None:
    """Concatenates the ranks' inputs on dim 0 into every rank's output."""
    if _counting:
        _record("all_gather", output)
    return _finish(torch_compat.all_gather_single(output, input, group=group, async_op=True), async_op)


def reduce_scatter(
    output: torch.Tensor,  # (k,) or (rows, ...)
    input: torch.Tensor,  # (n * k,) or (n * rows, ...)
    group: ProcessGroup,
    op: str = "sum",
    async_op: bool = False,
) -> Work | None:
    """Reduces the ranks' inputs and leaves part r of dim 0 with rank r."""
    if _counting:
        _record("reduce_scatter", input)
    if op == "avg" and not _averages(group, input):
        torch_compat.reduce_scatter_single(output, input, op=dist.ReduceOp.SUM, group=group)
        output /= group.size()
        return None
    work = torch_compat.reduce_scatter_single(output, input, op=_REDUCE_OP[op], group=group, async_op=True)
    return _finish(work, async_op)


def all_reduce(
    tensor: torch.Tensor, group: ProcessGroup, op: str = "sum", async_op: bool = False
) -> Work | None:
    """Reduces `tensor` over the ranks, in place."""
    if _counting:
        _record("all_reduce", tensor)
    if op == "avg" and not _averages(group, tensor):
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
        tensor /= group.size()
        return None
    return _finish(dist.all_reduce(tensor, _REDUCE_OP[op], group=group, async_op=True), async_op)


def all_to_all(
    output: torch.Tensor,  # (sum of output_splits, ...)
    input: torch.Tensor,  # (sum of input_splits, ...)
    group: ProcessGroup,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sends part r of dim 0 to rank r; equal parts unless the splits (rows per rank) are given."""
    if _counting:
        _record("all_to_all", input)
    out_splits = None if output_splits is None else list(output_splits)
    in_splits = None if input_splits is None else list(input_splits)
    return _finish(
        dist.all_to_all_single(output, input, out_splits, in_splits, group=group, async_op=True), async_op
    )


def broadcast(tensor: torch.Tensor, group: ProcessGroup, src: int = 0, async_op: bool = False) -> Work | None:
    """Copies the tensor of group rank `src` to the others, in place."""
    if _counting:
        _record("broadcast", tensor)
    return _finish(dist.broadcast(tensor, group=group, group_src=src, async_op=True), async_op)


def scatter(
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor] | None,
    group: ProcessGroup,
    src: int = 0,
    async_op: bool = False,
) -> Work | None:
    """Gives rank r the r-th of `inputs` (equal shapes), which only group rank `src` passes."""
    if _counting:
        _record("scatter", output)
    given = None if inputs is None else list(inputs)
    return _finish(dist.scatter(output, given, group=group, group_src=src, async_op=True), async_op)


def all_gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """Every rank's `value` (pickled by torch; for checks, not for the hot path)."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _averages(group: ProcessGroup, tensor: torch.Tensor) -> bool:
    """Whether the transport knows AVG: NCCL does, gloo refuses it."""
    return tensor.is_cuda and "nccl" in dist.get_backend(group)


def _finish(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None
