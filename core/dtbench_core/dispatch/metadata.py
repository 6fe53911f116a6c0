"""Computes which arguments an op writes to, and the global shape, stride and dtype of its results.

In general the op runs on meta tensors. torch's meta kernels are written in Python and take hundreds of microseconds.
So elementwise ops on dense tensors, the most common case, run on tensors without elements instead, and the result of
layer norm, the slowest common op, is computed here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtbench_core.errors import MeshError
from dtbench_core.layout.placement import REPLICATE
from dtbench_core.layout.spec import DTensorSpec, Order, TensorMeta, contiguous_stride, memory_order
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Args, Kwargs, Value
from dtbench_core.rules.base import OpCall
from dtbench_core.torch_compat import kernel_of

Written = tuple[tuple[int, str], ...]


@functools.cache
def written_arguments(op: OpOverload) -> Written:
    """Returns (position, name) of the arguments that `op` writes to."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_by(arguments: Written, args: Args, kwargs: Kwargs) -> list[Wrapper]:
    """Returns the DTensors among these arguments of a call, including members of lists."""
    tensors: list[Wrapper] = []
    for position, name in arguments:
        value = args[position] if position < len(args) else kwargs.get(name)
        listed = value if isinstance(value, (list, tuple)) else (value,)
        tensors += [leaf for leaf in listed if isinstance(leaf, Wrapper)]
    return tensors


def device_of_results(args: Args, kwargs: Kwargs, mesh: str) -> torch.device | str:
    """Returns the device of an op's results: its `device` argument, else "meta" if an input is on it, else the mesh's.

    Args:
        mesh: device type of the mesh.
    """
    device: torch.device | None = kwargs.get("device")
    if device is not None:
        return device
    return "meta" if any(x.is_meta for x in tree_leaves(args) if isinstance(x, torch.Tensor)) else mesh


def as_sequence(result: Value) -> Sequence[Value]:
    """Returns the results of an op as a sequence, also if it returns a single one."""
    return result if isinstance(result, (list, tuple)) else (result,)


Results = tuple[tuple[TensorMeta | None, ...], str]


def results_of(op: OpOverload, args: tuple[Value, ...], kwargs: Kwargs, elementwise: bool) -> Results:
    """Returns (metadata of each result, "tensor" | "list" | "value") of `op`. Arguments have specs in place of tensors.

    Raises:
        NotImplementedError: the shape depends on values, or torch has no meta kernel.
        Exception: any error of the op for arguments of these shapes and dtypes.
    """
    if not any("Tensor" in str(r.type) for r in op._schema.returns):
        return (), "value"
    leaves, rebuilt = flattened(args, kwargs)
    if elementwise and kwargs.get("memory_format") is None:
        shape = _dense_shape([leaf for leaf in leaves if isinstance(leaf, DTensorSpec)])
        if shape is not None:
            twin_args, twin_kwargs = rebuilt([_empty_twin(leaf) for leaf in leaves])
            result = kernel_of(op)(*twin_args, **twin_kwargs)
            if isinstance(result, torch.Tensor) and result.ndim == len(shape):
                return (TensorMeta(shape, contiguous_stride(shape), result.dtype),), "tensor"
    if op is torch.ops.aten.native_layer_norm.default and len(args) == 5:
        norm_metas = _layer_norm(*args)
        if norm_metas is not None:
            return norm_metas
    meta_args, meta_kwargs = rebuilt([as_meta(leaf) for leaf in leaves])
    result = op(*meta_args, **meta_kwargs)
    if op is torch.ops.aten.convolution.default:
        result = _as_convolved(result, *meta_args[:2])
    metas = tuple(
        TensorMeta(t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else None
        for t in as_sequence(result)
    )
    return metas, "list" if isinstance(result, (list, tuple)) else "tensor"


# Ops that `reshape` calls: the second on ranks where a view is possible. Other ranks clone and then call the first.
_RESHAPES = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)


def orders_of(op: OpOverload, args: Args, kwargs: Kwargs, metas: Sequence[TensorMeta | None]) -> list[Order]:
    """Returns the order in which the elements of each result are sent: Note [Order of elements] in layout/spec.py.

    For a view it follows from the base's order. `args` have specs in place of tensors.
    """
    leaves, rebuilt = flattened(args, kwargs)
    specs = [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]
    reshapes = op in _RESHAPES
    if not reshapes and (not op.is_view or op is torch.ops.aten.as_strided.default):
        # Return before comparing sizes, which may be unknown in a graph.
        if all(list(s.order) == sorted(s.order) for s in specs):
            return [None] * len(metas)
        return [next((s.order for s in specs if meta and s.shape == meta.shape), None) for meta in metas]
    # Strides of dense tensors in these orders.
    twins = [contiguous_stride(s.shape, reversed(s.order)) for s in specs]
    if not reshapes and twins == [s.stride for s in specs]:
        return [meta and tuple(memory_order(meta.shape, meta.stride)) for meta in metas]
    strides = iter(twins)
    twin_args, twin_kwargs = rebuilt([as_meta(leaf, strides) for leaf in leaves])
    try:
        result = twin_args[0].view(args[1]) if reshapes else op(*twin_args, **twin_kwargs)
    except (RuntimeError, ValueError):  # no such view exists in this order, only for this rank's strides
        return [None] * len(metas)
    return [tuple(memory_order(view.shape, view.stride())) for view in as_sequence(result)]


def view_offsets(op: OpOverload, args: tuple[Value, ...], kwargs: Kwargs) -> tuple[int, ...]:
    """Returns the byte offset of each result of a view op from its base, in the global tensor."""
    leaves, rebuilt = flattened(args, kwargs)
    meta_args, meta_kwargs = rebuilt([as_meta(leaf) for leaf in leaves])
    result = op(*meta_args, **meta_kwargs)
    return tuple(view.storage_offset() * view.itemsize for view in as_sequence(result))


def _as_convolved(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the result in channels-last format if the input or the weight has it.

    Real kernels return this format, the meta kernel does not.
    """
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(result.ndim)
    formats = map(suggest_memory_format, (input, weight))
    return result if last is None or last not in formats else result.contiguous(memory_format=last)


def describe(op: OpOverload, args: Args, kwargs: Kwargs) -> OpCall:
    """Returns the call with specs in place of tensors. Plain tensors count as replicated.

    Raises:
        MeshError: the DTensors are on different meshes.
    """
    leaves, rebuilt = flattened(args, sorted_by_name(kwargs))
    mesh = next(leaf._spec.info for leaf in leaves if isinstance(leaf, Wrapper))
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Wrapper):
            if leaf._spec.info is not mesh:
                raise MeshError(
                    f"{op} got DTensors on different meshes, {mesh} and {leaf._spec.info}; expected one mesh: "
                    "move one with to_local() or full_tensor() and distribute_tensor on the other's mesh"
                )
            leaves[position] = leaf._spec
        elif isinstance(leaf, torch.Tensor):
            leaves[position] = DTensorSpec.of(
                mesh, (REPLICATE,) * mesh.ndim, leaf.shape, leaf.stride(), leaf.dtype
            )
    spec_args, spec_kwargs = rebuilt(leaves)
    specs = tuple(leaf for leaf in leaves if isinstance(leaf, DTensorSpec))
    return OpCall(op, tuple(spec_args), spec_kwargs, specs)


def sorted_by_name(kwargs: Kwargs) -> Kwargs:
    return {name: kwargs[name] for name in sorted(kwargs)}


def flattened(args: Args, kwargs: Kwargs) -> tuple[list[Value], Callable[[list[Value]], Any]]:
    """Returns the leaves of a call's arguments, and a function that makes (args, kwargs) from as many new leaves."""
    if not kwargs and not any(isinstance(a, (list, tuple, dict)) for a in args):
        # Without pytree, which would account for a tenth of the time for making a plan.
        return list(args), lambda leaves: (leaves, {})
    leaves, tree = tree_flatten((list(args), kwargs))
    return leaves, lambda new_leaves: tree_unflatten(new_leaves, tree)


def _layer_norm(
    input: DTensorSpec, normalized: list[int], weight: Value, bias: Value, eps: float
) -> Results | None:
    """Returns the metadata of layer norm on a contiguous input in full precision, the most common case.

    The meta kernel takes a millisecond. None: the meta kernel must run.
    """
    affine = [s for s in (weight, bias) if s is not None]
    rows = input.ndim - len(normalized)
    if input.dtype not in (torch.float32, torch.float64) or input.stride != contiguous_stride(input.shape):
        return None
    if not normalized or rows < 0 or 0 in input.shape or tuple(input.shape[rows:]) != tuple(normalized):
        return None
    if any(s.dtype != input.dtype or tuple(s.shape) != tuple(normalized) for s in affine):
        return None
    moments = torch.Size((*input.shape[:rows], *(1,) * len(normalized)))
    moment = TensorMeta(moments, contiguous_stride(moments), input.dtype)
    return (TensorMeta(input.shape, input.stride, input.dtype), moment, moment), "list"


def _dense_shape(specs: list[DTensorSpec]) -> torch.Size | None:
    """Returns the shape that the specs broadcast to if an elementwise op gives a contiguous result, else None.

    One spec must have that shape, and all specs of that shape must be contiguous.
    """
    shape = max((s.shape for s in specs), key=len)
    for spec in specs:
        if spec.shape == shape:
            if spec.stride != contiguous_stride(shape):
                return None
        elif spec.ndim and spec.shape != shape[len(shape) - spec.ndim :]:
            return None
    return shape if 0 not in shape else None


def _empty_twin(leaf: object) -> Value:
    """Returns an empty tensor with the spec's dtype and number of dims. Ops on it give results of the same dtype.

    A 0-dim tensor has one element. It is 1, since polynomial kernels may read it as the degree and compute every term
    up to it.
    """
    if isinstance(leaf, DTensorSpec):
        return torch.ones((0,) * leaf.ndim, dtype=leaf.dtype, device="cpu")
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def as_meta(leaf: object, strides: Iterator[tuple[int, ...]] | None = None) -> Value:
    """Returns the leaf on the meta device, with a tensor in place of a spec.

    Args:
        strides: strides of the tensors, if not those of the specs.
    """
    if isinstance(leaf, DTensorSpec):
        stride = leaf.stride if strides is None else next(strides)
        return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.Generator):  # of another device
        return None
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf
