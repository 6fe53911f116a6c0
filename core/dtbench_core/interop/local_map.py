"""local_map: a function of plain tensors, applied to the shards of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from dtbench_core.errors import FunctionError, PlacementError
from dtbench_core.layout.mesh import mesh_info
from dtbench_core.layout.placement import Placement, describe
from dtbench_core.layout.shard_layout import joined_layout
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, normalize
from dtbench_core.op_types import Call
from dtbench_core.tensor.dtensor import DTensor, wrapped
from dtbench_core.torch_compat import in_graph

PlacementsOf = Sequence[Placement] | None
InputPlacements = tuple[PlacementsOf, ...] | None
OutputPlacements = PlacementsOf | tuple[PlacementsOf, ...]


def local_map(
    func: Call | None = None,
    out_placements: OutputPlacements = None,
    in_placements: InputPlacements = None,
    in_grad_placements: InputPlacements = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Call:
    """Makes of `func`, written for plain tensors, a function of DTensors that runs it on their shards.

    Differentiable. Called without any DTensor, the result is `func` itself. Without `func`, this is a
    decorator.

    Args:
        out_placements: of the result; a tuple of placements for several results, in the order of the
            flattened output, with None for one that is no tensor. Where an argument is spread
            unevenly, the ranks tell each other how large their results are; else they are taken to be
            equally large, as in `DTensor.from_local`.
        in_placements: of each flattened positional argument, with None for one that is no tensor; not
            looked at when not given. A plain tensor is passed as it is.
        in_grad_placements: how the ranks' gradients of each argument make up the global one, as in
            `DTensor.to_local`.
        device_mesh: of the results; that of the first DTensor argument when not given.
        redistribute_inputs: move arguments that are placed otherwise than `in_placements` says.

    Raises:
        PlacementError: an argument placed otherwise, without `redistribute_inputs`.
        FunctionError: placements that do not match the arguments or results one to one.
    """
    if func is None:
        options = (out_placements, in_placements, in_grad_placements, device_mesh)
        return lambda func: local_map(func, *options, redistribute_inputs=redistribute_inputs)

    @functools.wraps(func)
    def mapped(*args: object, **kwargs: object) -> Any:
        leaves, tree = tree_flatten(args)
        local = _shards(func, leaves, in_placements, in_grad_placements, redistribute_inputs)
        result = func(*tree_unflatten(local, tree), **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not tensors:
            return result
        return _wrapped(func, result, out_placements, device_mesh or tensors[0].device_mesh, tensors)

    return mapped


def _shards(
    func: Call,
    leaves: list[Any],
    in_placements: InputPlacements,
    in_grad_placements: InputPlacements,
    redistribute: bool,
) -> list[Any]:
    """The arguments with shards for DTensors, placed as they are to be."""
    for name, placements in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
        if placements is not None and len(placements) != len(leaves):
            raise FunctionError(
                f"local_map got {len(placements)} {name} for {len(leaves)} arguments of {_name(func)}, expected one "
                "for each flattened positional argument: give None for those that are no tensors"
            )
    wanted = in_placements or (None,) * len(leaves)
    grads = in_grad_placements or (None,) * len(leaves)
    local = []
    for index, (leaf, want, grad) in enumerate(zip(leaves, wanted, grads, strict=True)):
        what = f"argument {index} of {_name(func)}"
        if isinstance(leaf, DTensor):
            if want is not None:
                leaf = _placed(leaf, want, what, redistribute)
            elif in_placements is not None:
                raise FunctionError(
                    f"local_map got None in in_placements for {what}, which is {leaf._spec}; expected its "
                    "placements"
                )
            leaf = leaf.to_local(grad_placements=grad)
        elif want is not None and not isinstance(leaf, torch.Tensor):
            raise FunctionError(
                f"local_map got in_placements for {what}, which is {leaf!r}; expected None for what is no tensor"
            )
        local.append(leaf)
    return local


@in_graph
def _placed(tensor: DTensor, wanted: Sequence[Placement], what: str, redistribute: bool) -> DTensor:
    placed = normalize(wanted, tensor.ndim, mesh_info(tensor.device_mesh))
    if tensor.placements == placed:
        return tensor
    if not redistribute:
        raise PlacementError(
            f"local_map got {tensor._spec} as {what}, expected the placements {describe(placed)}: redistribute it "
            "before, or pass redistribute_inputs=True"
        )
    return tensor.redistribute(placements=placed)


def _wrapped(
    func: Call, result: Any, placements: OutputPlacements, mesh: DeviceMesh, inputs: list[DTensor]
) -> Any:
    leaves, tree = tree_flatten(result)
    several = isinstance(placements, tuple) and any(p is None or isinstance(p, Sequence) for p in placements)
    listed: Sequence[Any] = placements if several else (placements,)  # type: ignore[assignment]
    if len(listed) != len(leaves):
        raise FunctionError(
            f"local_map got {len(listed)} out_placements for {len(leaves)} results of {_name(func)}, expected one for "
            "each: give a tuple of placements, with None for results that are no tensors"
        )
    results = []
    for index, (leaf, placed) in enumerate(zip(leaves, listed, strict=True)):
        if isinstance(leaf, DTensor):
            raise FunctionError(
                f"local_map got a DTensor, {leaf._spec}, as result {index} of {_name(func)}, expected a plain tensor: "
                "the function works on shards"
            )
        if isinstance(leaf, torch.Tensor) != (placed is not None):
            kind = "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise FunctionError(
                f"local_map got out_placements {placed} for result {index} of {_name(func)}, which is {kind}; expected "
                "placements for tensors and None for the rest"
            )
        results.append(leaf if placed is None else _distributed(leaf, mesh, placed, inputs))
    return tree_unflatten(results, tree)


@in_graph
def _distributed(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], inputs: list[DTensor]
) -> DTensor:
    info = mesh_info(mesh)
    if all(one._spec.is_even() for one in inputs) or info.coordinate is None:
        return DTensor.from_local(local, mesh, placements)
    shape, placed = joined_layout(local, info, normalize(placements, local.ndim, info))
    spec = DTensorSpec.of(info, placed, shape, contiguous_stride(shape), local.dtype)
    return wrapped(local.contiguous(), spec)


def _name(func: Call) -> str:
    return getattr(func, "__name__", repr(func))
