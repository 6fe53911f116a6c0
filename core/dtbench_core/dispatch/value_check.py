"""Values that CPU kernels refuse: a zero to divide integers by, an index or a class beyond, a probability above 1.

A rank that holds one alone would raise alone, and the others would wait for it in the next collective. Where the
values are spread over ranks, the ranks tell each other after the kernel whether it refused: one all-reduce of 4 bytes
per call, along the mesh dims that the values are spread over (0.3 ms on gloo between two ranks).
Replicated values need none: all ranks refuse them, those with an empty shard by a trial on a stand-in for it.
CUDA's kernels assert on the device instead, and a graph cannot choose by a value: there a rank fails alone.
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

# Op, without its overload and the underscore of its in-place form -> the arguments whose values its kernel refuses.
_INDEXED = """
    index_select index_add index_copy index_reduce index_fill gather scatter scatter_add scatter_reduce take put
"""
_DIVISIONS = ("floor_divide", "fmod", "remainder", "div")
_REFUSED = {
    **dict.fromkeys(_INDEXED.split(), ("index",)),
    **dict.fromkeys(("index", "index_put", "_index_put_impl", "embedding"), ("indices",)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), ("target",)),
    **dict.fromkeys(_DIVISIONS, ("other",)),
    "binary_cross_entropy": ("self", "target"),
    "cholesky_inverse": ("self",),
}


def raise_on_all_ranks(call: OpCall, inputs: Sequence[Placements]) -> Callable[[Call], Call] | None:
    """What makes of the op's kernel one that raises on all ranks of the mesh or on none; None where it does so itself.

    inputs: the placements of its tensors.
    """
    info = call.inputs[0].info
    name = call.op._schema.name.removeprefix("aten::").rstrip("_")
    names = _REFUSED.get(name)
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
    if len(dims) == info.ndim and info.whole is not None:
        return [info.whole]
    return [info.groups[dim] for dim in sorted(dims)]


def _trial(call: OpCall, inputs: Sequence[Placements], spread: set[int]) -> Call | None:
    """The op with what other ranks hold more of whole, and made of ones; None where this rank's part is not empty."""
    info = call.inputs[0].info
    here = info.my_coordinate()
    kept = [tuple(p if dim in spread else REPLICATE for dim, p in enumerate(placed)) for placed in inputs]
    held, whole = (
        [local_extents(s.shape, p, info.sizes, here)[0] for s, p in zip(call.inputs, places, strict=True)]
        for places in (inputs, kept)
    )
    # Of an empty result no kernel runs.
    nothing = any(result is not None and 0 in result.shape for result in call.outputs)
    if not nothing and not any(0 in mine and 0 not in other for mine, other in zip(held, whole, strict=True)):
        return None
    shapes = [None if mine == other else other for mine, other in zip(held, whole, strict=True)]
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
    """`kernel`, which raises where it, or the trial, does so on any rank of the groups."""

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
    """Raises this rank's error or, where it has none, one that another rank of the groups has."""
    failed = torch.tensor([error is not None], dtype=torch.int32, device="cpu")
    for group in groups:
        comm.all_reduce(failed, group, "max")
    if not failed.item():
        return
    first = None if error is None else (type(error), str(error))
    for group in groups:
        first = next((one for one in comm.all_gather_objects(first, group) if one), None)
    if error is None and first is not None:
        kind, message = first
        error = kind(message)
    if error is not None:
        raise error


# ---- numbers that the dtype cannot hold ----

# Op, without the underscore of its in-place form -> its number. torch fills a tensor of one element without a look at
# the number, and refuses one that overflows in any other: what a shard has is not what the whole has.
_FILLED = {"fill": "value", "full_like": "fill_value", "new_full": "fill_value"}


def check_filled(call: OpCall) -> Callable[[Call], Call] | None:
    """What makes of the kernel of an op that fills a tensor one that refuses what that of the whole would."""
    name = call.op._schema.name.removeprefix("aten::").rstrip("_")
    number = _FILLED.get(name)
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
            if count == 1 and args[0].numel() == 0 and name == "fill":  # nothing to fill here
                return args[0]
            return kernel(*args, **kwargs)

        return run

    return checking
