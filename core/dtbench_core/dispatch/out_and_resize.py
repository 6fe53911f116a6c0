"""Runs `out=` ops for which no plan can be made, and in-place ops that change a tensor's shape.

Both run the functional form of the op and store its result in the caller's tensor. Other in-place ops (`add_`) run on
the shards like any op (op_plan.py).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from dtbench_core.dispatch import contexts
from dtbench_core.dispatch.fallback import gathered
from dtbench_core.dispatch.metadata import as_sequence
from dtbench_core.dispatch.overlap import refuse_overlap
from dtbench_core.errors import ArgumentError, MixedTensorError, PlacementError
from dtbench_core.layout.placement import REPLICATE
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride
from dtbench_core.layout.wrapper import Wrapper, count_write, shares_memory
from dtbench_core.op_types import Args, Call, Kwargs, Value
from dtbench_core.redistribute.autograd import redistribute_tensor
from dtbench_core.redistribute.copied_view import (
    is_copied,
    refuse_write,
    refuse_writes,
    store_to_base,
    take_memory,
)
from dtbench_core.torch_compat import increment_version, set_wrapper_metadata, version_of

Dispatch = Callable[[type[Wrapper], OpOverload, Any, Args, Kwargs], Any]  # torch_dispatch


def out_names(op: OpOverload) -> tuple[str, ...]:
    """Returns the names of the op's `out=` arguments."""
    return tuple(a.name for a in op._schema.arguments if a.is_out)


@functools.cache
def functional_of(op: OpOverload) -> OpOverload | None:
    """Returns the functional form of `op`: `add.Tensor` for `add.out` and `add_.Tensor`. None if it has none."""
    name = op._schema.name.removeprefix(f"{op.namespace}::")
    inplace = name.endswith("_") and not name.endswith("__")
    packet = getattr(getattr(torch.ops, op.namespace), name.removesuffix("_") if inplace else name, None)
    if packet is None:
        return None
    signature = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    for overload in packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        arguments = [(a.name, str(a.type)) for a in candidate._schema.arguments]
        if arguments == signature and not candidate._schema.is_mutable:
            return candidate
    return None


def run_out(dispatch: Dispatch, cls: type[Wrapper], op: OpOverload, args: Args, kwargs: Kwargs) -> Value:
    """Runs `op(..., out=...)`: computes the result, stores it in the output and returns the output.

    Raises:
        ArgumentError: a result dtype that cannot be cast to the output's.
        PlacementError: an output whose placement the result cannot take.
    """
    functional = functional_of(op)
    assert functional is not None  # checked when OpInfo was made
    names = out_names(op)
    outs = [kwargs[name] for name in names]
    options = {name: value for name, value in kwargs.items() if name not in names}
    refuse_writes(outs)
    if all(isinstance(out, Wrapper) for out in outs):
        refuse_overlap(op, outs, args, kwargs, {})
    result = dispatch(cls, functional, (), args, options)
    for out, value in zip(outs, as_sequence(result), strict=True):
        if any(out is a for a in args) and tuple(out.shape) != tuple(value.shape):
            raise ArgumentError(
                f"{op} got an out= of shape {list(out.shape)} that is also an input, for a result of shape "
                f"{list(value.shape)}; expected an out= of the result's shape"
            )
        _store(op, out, value)
        store_to_base(out)
    return outs[0] if len(outs) == 1 else tuple(outs)


def call_with_out(func: Call, args: Args, kwargs: Kwargs) -> Value:
    """Runs a user's `func(..., out=...)` through torch, and stores the result if torch did not.

    Some of torch's composite functions (matrix_rank, matmul of batches) store their result elsewhere if a tensor is of
    a subclass, and return `out` unchanged.
    """
    targets = kwargs["out"]
    outs = as_sequence(targets)
    distributed = [out for out in outs if isinstance(out, Wrapper)]
    if func not in _IGNORES_OUT:
        versions = [version_of(out) for out in distributed]
        result = func(*args, **kwargs)
        if (
            any(v is None or v != version_of(out) for v, out in zip(versions, distributed, strict=True))
            or not distributed
        ):
            return result
    computed = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    for out, value in zip(outs, as_sequence(computed), strict=True):
        _store(getattr(func, "__name__", str(func)), out, value)
        increment_version((out,))
    return targets


_IGNORES_OUT = {torch.matmul, torch.Tensor.matmul}


def _store(op: object, out: torch.Tensor, value: torch.Tensor) -> None:
    """Stores `value` in `out`. A plain `out`, which torch made for a composite op, counts as replicated."""
    if not isinstance(out, Wrapper):
        full = gathered(value, copied=False) if isinstance(value, Wrapper) else value
        out.resize_(full.shape).copy_(full)
        return
    if not torch.can_cast(value.dtype, out._spec.dtype):
        raise ArgumentError(
            f"{op} got out= of {out._spec.dtype}, expected a dtype that its result of {value.dtype} can be cast to"
        )
    spec = out._spec
    if spec.has_partial() and not (isinstance(value, Wrapper) and value._spec.placements == spec.placements):
        raise PlacementError(
            f"{op} got out= {spec}, expected Shard or Replicate: nothing says which terms the ranks should hold"
        )
    if tuple(value.shape) != tuple(spec.shape):
        _resize(op, out, value)
        spec = out._spec
    local = value
    if isinstance(value, Wrapper):
        if (context := contexts.explicit_context()) is not None:
            context.observe(op, value._spec, spec.placements)
        local = redistribute_tensor(value, spec.placements)._local_tensor
    out._local_tensor.copy_(local)
    count_write(out)


def _resize(op: object, out: Wrapper, value: torch.Tensor) -> None:
    """Resizes an out= of another shape, with the result's placements. Warns unless it was empty, as torch does."""
    refuse_write(out, changes_shape=True)
    if out._spec.shape.numel():
        warnings.warn(
            f"{op} got out= of shape {list(out._spec.shape)} for a result of shape {list(value.shape)} and resized it, "
            "as torch does: resize it to 0 elements or pass the right shape",
            UserWarning,
            stacklevel=2,
        )
    info = out._spec.info
    placements = value._spec.placements if isinstance(value, Wrapper) else (REPLICATE,) * info.ndim
    spec = DTensorSpec.of(info, placements, value.shape, contiguous_stride(value.shape), out._spec.dtype)
    replace_local_and_spec(out, out._local_tensor.new_empty(spec.local_shape), spec)


def run_in_place_view(
    dispatch: Dispatch, cls: type[Wrapper], op: OpOverload, args: Args, kwargs: Kwargs
) -> Value:
    """Runs in-place views (`t_`, `squeeze_`, `unsqueeze_`), which give a tensor another shape on the same data."""
    functional = functional_of(op)
    assert functional is not None
    written: Wrapper = args[0]
    refuse_write(written, changes_shape=True)
    shared = shares_memory(written)
    result = dispatch(cls, functional, (), args, kwargs)
    if shared and is_copied(result):
        raise PlacementError(
            f"got {op} of {written._spec}, which has to gather a sharded dim, while other tensors share its memory: "
            "writes to it would not be visible in them, and the reverse; redistribute it so that this dim is not "
            "sharded, or call it on a clone()"
        )
    replace_local_and_spec(written, result._local_tensor, result._spec)
    written._memory, result._memory = result._memory, None  # a record of the call may keep `result`
    return written


def run_set(dispatch: Dispatch, cls: type[Wrapper], op: OpOverload, args: Args, kwargs: Kwargs) -> Value:
    """Runs `set_`, which gives a tensor the memory and metadata of another one.

    Raises:
        MixedTensorError: one of the two is plain.
    """
    written, source = args
    if not isinstance(source, Wrapper) or not isinstance(written, Wrapper):
        raise MixedTensorError(
            f"{op} got a plain torch.Tensor together with a DTensor, expected DTensors only"
        )
    replace_local_and_spec(written, source._local_tensor, source._spec)
    take_memory(written, source)
    return written


def replace_local_and_spec(tensor: Wrapper, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Gives `tensor` another local tensor and spec; it stays the same object."""
    set_wrapper_metadata(tensor, spec.shape, spec.stride)
    tensor._local_tensor, tensor._spec = local, spec
