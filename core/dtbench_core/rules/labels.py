"""Rows from labels of dims, one letter each: a convolution is `ni..,oi..,o -> no..`.

Sharding a label shards every tensor that has it, at its place. Dots are dims that stay whole.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Mapping, Sequence

import torch

from dtbench_core.layout.placement import REPLICATE, Partial, Placement, Placements, Shard
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Value
from dtbench_core.redistribute.routes import placements_of_gradient
from dtbench_core.rules.base import OpCall, PlacementRow, shard_rows

SUM = Partial("sum")


def free_labels(count: int, skip: str = "") -> str:
    """`count` labels that are not in `skip`."""
    free = [letter for letter in string.ascii_letters if letter not in skip]
    return "".join(free[:count])


def label_rows(
    labels: Iterable[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    missing: Placement = REPLICATE,
    *,
    even: bool = False,
    nonempty: bool = False,
) -> list[PlacementRow]:
    """A row per label; outputs that lack it become `missing` (a pending sum where it is contracted).

    even, nonempty: whether every rank must hold equally much, or some, of the label.
    """
    rows = []
    for label in labels:
        held = tuple([(i, dims.index(label)) for i, dims in enumerate(inputs) if label in dims])
        rows.append(
            PlacementRow(
                tuple([Shard(dims.index(label)) if label in dims else REPLICATE for dims in inputs]),
                tuple([Shard(dims.index(label)) if label in dims else missing for dims in outputs]),
                even=held if even else (),
                nonempty=held if nonempty else (),
            )
        )
    return rows


def batch_rows(call: OpCall, count: int) -> list[PlacementRow]:
    """Rows that shard one of the first `count` dims, if they are the same in all inputs and outputs."""
    dims = range(count) if same_leading_dims(call, count) else ()
    return shard_rows(dims, len(call.inputs), len(call.outputs))


def remaining_dims(ndim: int, gone: Iterable[int], *, keepdim: bool = False) -> dict[int, int]:
    """Dims of a tensor but `gone`, which vanish from the result or with keepdim do not -> their dims there."""
    taken = set(gone)
    return {d: d if keepdim else d - sum(g < d for g in taken) for d in range(ndim) if d not in taken}


def moved_rows(dims: Mapping[int, int], outs: int = 1) -> list[PlacementRow]:
    """Rows of ops with one input: shards of its dim k become shards of dim dims[k] of every output."""
    return [PlacementRow((Shard(src),), (Shard(dst),) * outs) for src, dst in dims.items()]


def same_leading_dims(call: OpCall, count: int) -> bool:
    """Whether the first `count` dims of all inputs and outputs are the same."""
    shapes = [spec.shape for spec in call.inputs]
    shapes += [meta.shape for meta in call.outputs if meta is not None]
    return all(len(shape) >= count and shape[:count] == shapes[0][:count] for shape in shapes)


def broadcast_placement(spec: DTensorSpec, dim: int, shape: Sequence[int]) -> Placement:
    """Placement of an input that broadcasts to `shape`, when its `dim` is sharded."""
    own = dim - (len(shape) - spec.ndim)
    return Shard(own) if own >= 0 and spec.shape[own] == shape[dim] else REPLICATE


def broadcast_placements(specs: Iterable[DTensorSpec], dim: int, shape: Sequence[int]) -> Placements:
    """The same of several inputs."""
    return tuple(broadcast_placement(spec, dim, shape) for spec in specs)


def splits_between_groups(call: OpCall, groups: int) -> bool:
    """Whether a dim made of `groups` equal groups is cut between groups, on every mesh dim alone or with all
    others."""
    return groups % math.prod(call.inputs[0].info.sizes) == 0


def is_split(tensor: object, dims: Iterable[int]) -> bool:
    """Whether `tensor` is a DTensor that is sharded on one of `dims`."""
    return isinstance(tensor, Wrapper) and any(p.is_shard(d) for p in tensor._spec.placements for d in dims)


def reduce_partials(tensor: Value) -> Value:
    """`tensor` with its pending reductions done: worth it where several uses would each do them."""
    if not isinstance(tensor, Wrapper) or not tensor._spec.has_partial():
        return tensor
    return tensor.redistribute(placements=placements_of_gradient(tensor._spec.placements))  # type: ignore[attr-defined]


def replicate(tensor: Value) -> Value:
    """`tensor` on every rank; what is not distributed as it is."""
    return tensor.redistribute() if isinstance(tensor, Wrapper) else tensor  # type: ignore[attr-defined]


def upcast(tensor: Value) -> Value:
    """`tensor` in the dtype in which torch's kernels add such numbers: the CPU's in float64, others in float32."""
    if tensor.device.type == "cpu":
        return tensor.double() if tensor.dtype.is_floating_point else tensor.to(torch.complex128)
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
