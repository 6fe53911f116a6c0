"""Raises on all ranks if a CPU kernel rejects values on one rank: a zero divisor of integers, an index out of range.

A rank that raised alone would leave the others waiting in the next collective. If the values are spread over ranks, the
ranks exchange after the kernel whether it raised: an all-reduce of 4 bytes per call, along the mesh dims that the
values are spread over (0.3 ms on gloo between two ranks). Replicated values need no exchange: all ranks raise, and
ranks with an empty shard try the op on tensors of ones. CUDA kernels assert on the device instead, and a graph cannot
branch on a value. In both, a rank fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_leaves

from dtbench_core import comm
from dtbench_core.dispatch.metadata import flattened, sorted_by_name
from dtbench_core.layout.mesh import MeshInfo
from dtbench_core.layout.placement import REPLICATE, Placements, local_extents
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.op_types import Args, Call, Value
from dtbench_core.rules.base import OpCall
from dtbench_core.rules.pointwise import surely_holds
from dtbench_core.runtime import simulation
from dtbench_core.torch_compat import is_traced

# Name of an op, without overload and the underscore of its in-place form -> arguments whose values its kernel checks.
_INDEXED = """
    index_select index_add index_copy index_reduce index_fill gather scatter scatter_add scatter_reduce take put
"""
_DIVISIONS = ("floor_divide", "fmod", "remainder", "div")
_CHECKED_ARGUMENTS = {
    **dict.fromkeys(_INDEXED.split(), ("index",)),
    **dict.fromkeys(("index", "index_put", "_index_put_impl", "embedding"), ("indices",)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), ("target",)),
    **dict.fromkeys(_DIVISIONS, ("other",)),
    "binary_cross_entropy": ("self", "target"),
    "cholesky_inverse": ("self",),
}


def raise_on_all_ranks(call: OpCall, inputs: Sequence[Placements]) -> Callable[[Call], Call] | None:
    """Returns a function that makes the op's kernel raise on all ranks of the mesh or on none.

    None if the kernel does so itself.

    Args:
        inputs: placements of the op's tensors.
    """
    info = call.inputs[0].info
    name = call.op._schema.name.removeprefix("aten::").rstrip("_")
    names = _CHECKED_ARGUMENTS.get(name)
    if names is None or info.device_type != "cpu" or (name in _DIVISIONS and not _divides_integers(call)):
        return None
    leaves = tree_leaves([call.arguments().get(n) for n in names])
    values = {id(leaf) for leaf in leaves if isinstance(leaf, DTensorSpec)}
    spread = {
        dim
        for spec, placed in zip(call.inputs, inputs, strict=True)
        if id(spec) in values
        for dim, placement in enumerate(placed)
        if not placement.is_replicate()
    }
    trial = _trial(call, inputs, spread)
    groups = _groups(info, spread)
    if trial is None and not groups:
        return None
    return lambda kernel: _agreeing(kernel, trial, groups)


def _divides_integers(call: OpCall) -> bool:
    result = call.outputs[0]
    return result is not None and not (result.dtype.is_floating_point or result.dtype.is_complex)


def _groups(info: MeshInfo, dims: set[int]) -> list[Value]:
    if len(dims) == info.ndim and info.world_group is not None:
        return [info.world_group]
    return [info.groups[dim] for dim in sorted(dims)]


def _trial(call: OpCall, inputs: Sequence[Placements], spread: set[int]) -> Call | None:
    """Returns a function that runs the op with tensors of ones in place of the shards that are empty only on this rank.

    None if this rank's kernel checks the values itself.
    """
    info = call.inputs[0].info
    coordinate = info.my_coordinate()
    partly_gathered = [
        tuple(p if dim in spread else REPLICATE for dim, p in enumerate(placed)) for placed in inputs
    ]
    local_shapes, stand_in_shapes = (
        [
            local_extents(s.shape, p, info.sizes, coordinate)[0]
            for s, p in zip(call.inputs, places, strict=True)
        ]
        for places in (inputs, partly_gathered)
    )
    # No kernel runs for an empty result.
    nothing = any(result is not None and 0 in result.shape for result in call.outputs)
    if not nothing and not any(
        0 in mine and 0 not in stand_in_shape
        for mine, stand_in_shape in zip(local_shapes, stand_in_shapes, strict=True)
    ):
        return None
    shapes = [
        None if mine == stand_in_shape else stand_in_shape
        for mine, stand_in_shape in zip(local_shapes, stand_in_shapes, strict=True)
    ]
    written = call.op._schema.is_mutable

    def stand_in(tensor: torch.Tensor, shape: Sequence[int] | None) -> torch.Tensor:
        if shape is None:
            return tensor.clone() if written else tensor
        return tensor.new_ones(shape) if written else tensor.new_ones(()).expand(shape)

    def run(*args: object, **kwargs: object) -> None:
        described = {name: value for name, value in kwargs.items() if name in call.kwargs}  # without `out`
        leaves, rebuilt = flattened(args, sorted_by_name(described))
        remaining = iter(shapes)
        tried = [stand_in(x, next(remaining)) if isinstance(x, torch.Tensor) else x for x in leaves]
        tried_args, tried_kwargs = rebuilt(tried)
        call.op(*tried_args, **tried_kwargs)

    return run


def _agreeing(kernel: Call, trial: Call | None, groups: Args) -> Call:
    """Returns `kernel` such that it raises if it, or the trial, raises on any rank of the groups."""

    def run(*args: object, **kwargs: object) -> Value:
        if simulation.active or is_traced():
            return kernel(*args, **kwargs)
        result, error = None, None
        try:
            if trial is not None:
                trial(*args, **kwargs)
            result = kernel(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as raised:
            error = raised
        _raise_everywhere(error, groups)
        return result

    return run


def _raise_everywhere(error: Exception | None, groups: Args) -> None:
    """Raises this rank's error or, if it has none, the error of another rank of the groups."""
    failed = torch.tensor([error is not None], dtype=torch.int32, device="cpu")
    for group in groups:
        comm.all_reduce(failed, group, "max")
    if not failed.item():
        return
    first = None if error is None else (type(error), str(error))
    for group in groups:
        first = next((pair for pair in comm.all_gather_objects(first, group) if pair), None)
    if error is None and first is not None:
        kind, message = first
        error = kind(message)
    if error is not None:
        raise error


# ---- numbers that the dtype cannot hold ----

# Name of an op, without the underscore of its in-place form -> the name of its number. torch checks the number for
# overflow unless the tensor has one element, so a shard may be treated differently from the global tensor.
_FILL_NUMBERS = {"fill": "value", "full_like": "fill_value", "new_full": "fill_value"}


def check_filled(call: OpCall) -> Callable[[Call], Call] | None:
    """Returns a function that makes the kernel of a filling op check the number as for the global tensor, or None."""
    name = call.op._schema.name.removeprefix("aten::").rstrip("_")
    number = _FILL_NUMBERS.get(name)
    result = call.outputs[0] if call.outputs else None
    if number is None or result is None or isinstance(call[number], DTensorSpec):
        return None
    position = next(i for i, a in enumerate(call.op._schema.arguments) if a.name == number)
    count, dtype = min(result.shape.numel(), 2), result.dtype

    def checking(kernel: Call) -> Call:
        def run(*args: Value, **kwargs: Value) -> Value:
            value = args[position] if position < len(args) else kwargs[number]
            if surely_holds(dtype, value) or is_traced():
                return kernel(*args, **kwargs)
            args[0].new_empty(count, dtype=dtype).fill_(value)
            if count == 1 and args[0].numel() == 0 and name == "fill":  # the shard is empty
                return args[0]
            return kernel(*args, **kwargs)

        return run

    return checking
