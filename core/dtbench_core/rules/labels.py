"""Rows from labelled dims, with one letter per dim: a convolution is `ni..,oi..,o -> no..`.

Sharding a label shards each tensor that has it, on the dim with that label. Dots are dims that must not be sharded.
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
    """Returns `count` labels that are not in `skip`."""
    return "".join([letter for letter in string.ascii_letters if letter not in skip][:count])


def label_rows(
    labels: Iterable[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    missing: Placement = REPLICATE,
    *,
    even: bool = False,
    nonempty: bool = False,
) -> list[PlacementRow]:
    """Returns one row per label.

    Args:
        labels: labels that may be sharded.
        inputs, outputs: labels of the dims of each tensor.
        missing: placement of outputs that lack the label, such as a pending sum if it is contracted.
        even: whether every rank must hold equally much of the label.
        nonempty: whether no rank may have an empty part of it.
    """
    rows = []
    for label in labels:
        places = tuple([(i, dims.index(label)) for i, dims in enumerate(inputs) if label in dims])
        rows.append(
            PlacementRow(
                tuple([Shard(dims.index(label)) if label in dims else REPLICATE for dims in inputs]),
                tuple([Shard(dims.index(label)) if label in dims else missing for dims in outputs]),
                even=places if even else (),
                nonempty=places if nonempty else (),
            )
        )
    return rows


def batch_rows(call: OpCall, count: int) -> list[PlacementRow]:
    """Returns rows that shard one of the first `count` dims, if all inputs and outputs have the same sizes there."""
    return shard_rows(
        range(count) if same_leading_dims(call, count) else (), len(call.inputs), len(call.outputs)
    )


def remaining_dims(ndim: int, removed: Iterable[int], *, keepdim: bool = False) -> dict[int, int]:
    """Returns a map from the dims of a tensor that are not `removed` to their dims in the result.

    Args:
        keepdim: whether removed dims remain in the result, so that the others keep their positions.
    """
    removed = set(removed)
    return {d: d if keepdim else d - sum(g < d for g in removed) for d in range(ndim) if d not in removed}


def moved_rows(dims: Mapping[int, int], outs: int = 1) -> list[PlacementRow]:
    """Returns rows for ops with one input, where Shard(k) becomes Shard(dims[k]) in each output."""
    return [PlacementRow((Shard(src),), (Shard(dst),) * outs) for src, dst in dims.items()]


def same_leading_dims(call: OpCall, count: int) -> bool:
    """Whether the first `count` dims have the same sizes in all inputs and outputs."""
    shapes = [spec.shape for spec in call.inputs]
    shapes += [meta.shape for meta in call.outputs if meta is not None]
    return all(len(shape) >= count and shape[:count] == shapes[0][:count] for shape in shapes)


def broadcast_placement(spec: DTensorSpec, dim: int, shape: Sequence[int]) -> Placement:
    """Returns the placement of an input that broadcasts to `shape`, if `dim` of that shape is sharded."""
    own_dim = dim - (len(shape) - spec.ndim)
    return Shard(own_dim) if own_dim >= 0 and spec.shape[own_dim] == shape[dim] else REPLICATE


def broadcast_placements(specs: Iterable[DTensorSpec], dim: int, shape: Sequence[int]) -> Placements:
    """Returns `broadcast_placement` of each input."""
    return tuple(broadcast_placement(spec, dim, shape) for spec in specs)


def splits_between_groups(call: OpCall, groups: int) -> bool:
    """Whether a dim of `groups` equal groups is cut only between groups, whichever mesh dims shard it."""
    return groups % math.prod(call.inputs[0].info.sizes) == 0


def is_split(tensor: object, dims: Iterable[int]) -> bool:
    """Whether `tensor` is a DTensor sharded on one of `dims`."""
    return isinstance(tensor, Wrapper) and any(p.is_shard(d) for p in tensor._spec.placements for d in dims)


def reduce_partials(tensor: Value) -> Value:
    """Reduces the Partial placements of `tensor`, so that several uses do not each reduce them."""
    if not isinstance(tensor, Wrapper) or not tensor._spec.has_partial():
        return tensor
    return tensor.redistribute(placements=placements_of_gradient(tensor._spec.placements))  # type: ignore[attr-defined]


def replicate(tensor: Value) -> Value:
    """Replicates a DTensor; returns other values unchanged."""
    return tensor.redistribute() if isinstance(tensor, Wrapper) else tensor  # type: ignore[attr-defined]


def upcast(tensor: Value) -> Value:
    """Casts to the dtype in which torch's kernels accumulate: float64 on CPU, float32 elsewhere."""
    if tensor.device.type == "cpu":
        return tensor.double() if tensor.dtype.is_floating_point else tensor.to(torch.complex128)
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
