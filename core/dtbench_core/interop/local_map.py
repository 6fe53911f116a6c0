"""local_map applies a function of plain tensors to the shards of DTensors."""

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
    """Converts `func`, written for plain tensors, into a function of DTensors that calls it with their shards.

    Differentiable. If no argument is a DTensor, the result of `func` is returned unchanged. Without `func`, this is a
    decorator.

    Args:
        func: the function of plain tensors.
        out_placements: the placements of the result; or a tuple with the placements of each result, in the order of
            the flattened output, and None for a result that is not a tensor. If an argument is unevenly sharded, the
            ranks exchange the sizes of their results. Otherwise the results are assumed to be equally large, as in
            `DTensor.from_local`.
        in_placements: the placements of each flattened positional argument, with None for one that is not a tensor;
            by default not checked. A plain tensor is passed unchanged.
        in_grad_placements: the placements of the ranks' gradients of each argument, as in `DTensor.to_local`.
        device_mesh: the mesh of the results; by default that of the first DTensor argument.
        redistribute_inputs: whether arguments are redistributed to `in_placements`.

    Raises:
        PlacementError: an argument has other placements, without `redistribute_inputs`.
        FunctionError: placements that do not correspond one to one to the arguments or results.
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
        return _results_as_dtensors(
            func, result, out_placements, device_mesh or tensors[0].device_mesh, tensors
        )

    return mapped


def _shards(
    func: Call,
    leaves: list[Any],
    in_placements: InputPlacements,
    in_grad_placements: InputPlacements,
    redistribute: bool,
) -> list[Any]:
    """Returns the arguments with shards in place of DTensors, after redistribution."""
    for name, placements in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
        if placements is not None and len(placements) != len(leaves):
            raise FunctionError(
                f"local_map got {len(placements)} {name} for {len(leaves)} arguments of {_name_of(func)}, expected one "
                "for each flattened positional argument: pass None for arguments that are not tensors"
            )
    all_placements = in_placements or (None,) * len(leaves)
    grads = in_grad_placements or (None,) * len(leaves)
    local = []
    for index, (leaf, leaf_placements, grad) in enumerate(zip(leaves, all_placements, grads, strict=True)):
        argument = f"argument {index} of {_name_of(func)}"
        if isinstance(leaf, DTensor):
            if leaf_placements is not None:
                leaf = _redistributed_argument(leaf, leaf_placements, argument, redistribute)
            elif in_placements is not None:
                raise FunctionError(
                    f"local_map got None in in_placements for {argument}, which is {leaf._spec}; expected its "
                    "placements"
                )
            leaf = leaf.to_local(grad_placements=grad)
        elif leaf_placements is not None and not isinstance(leaf, torch.Tensor):
            raise FunctionError(
                f"local_map got in_placements for {argument}, which is {leaf!r}; expected None for an argument that "
                "is not a tensor"
            )
        local.append(leaf)
    return local


@in_graph
def _redistributed_argument(
    tensor: DTensor, placements: Sequence[Placement], argument: str, redistribute: bool
) -> DTensor:
    placements = normalize(placements, tensor.ndim, mesh_info(tensor.device_mesh))
    if tensor.placements == placements:
        return tensor
    if not redistribute:
        raise PlacementError(
            f"local_map got {tensor._spec} as {argument}, expected the placements {describe(placements)}: "
            "redistribute it before, or pass redistribute_inputs=True"
        )
    return tensor.redistribute(placements=placements)


def _results_as_dtensors(
    func: Call, result: Any, placements: OutputPlacements, mesh: DeviceMesh, inputs: list[DTensor]
) -> Any:
    leaves, tree = tree_flatten(result)
    is_nested = isinstance(placements, tuple) and any(
        p is None or isinstance(p, Sequence) for p in placements
    )
    all_placements: Sequence[Any] = placements if is_nested else (placements,)  # type: ignore[assignment]
    if len(all_placements) != len(leaves):
        raise FunctionError(
            f"local_map got {len(all_placements)} out_placements for {len(leaves)} results of {_name_of(func)}, "
            "expected one for each: pass a tuple of placements, with None for results that are not tensors"
        )
    results = []
    for index, (leaf, leaf_placements) in enumerate(zip(leaves, all_placements, strict=True)):
        if isinstance(leaf, DTensor):
            raise FunctionError(
                f"local_map got a DTensor, {leaf._spec}, as result {index} of {_name_of(func)}, expected a plain "
                "tensor: the function works on shards"
            )
        if isinstance(leaf, torch.Tensor) != (leaf_placements is not None):
            kind = "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise FunctionError(
                f"local_map got out_placements {leaf_placements} for result {index} of {_name_of(func)}, which is "
                f"{kind}; expected placements for tensors and None for other results"
            )
        results.append(
            leaf if leaf_placements is None else _result_as_dtensor(leaf, mesh, leaf_placements, inputs)
        )
    return tree_unflatten(results, tree)


@in_graph
def _result_as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], inputs: list[DTensor]
) -> DTensor:
    info = mesh_info(mesh)
    if all(tensor._spec.is_even() for tensor in inputs) or info.coordinate is None:
        return DTensor.from_local(local, mesh, placements)
    shape, placed = joined_layout(local, info, normalize(placements, local.ndim, info))
    return wrapped(
        local.contiguous(), DTensorSpec.of(info, placed, shape, contiguous_stride(shape), local.dtype)
    )


def _name_of(func: Call) -> str:
    return getattr(func, "__name__", repr(func))
