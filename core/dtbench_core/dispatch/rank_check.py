"""Whether an op can run on every rank's shards: checked before any rank starts.

Where shards are uneven, a kernel may refuse a short or an empty one that other ranks do not have, and a
rank that raises alone leaves the others waiting. So the op is tried on meta tensors of every shape that
a rank may hold. The answer depends on specs alone: all ranks compute the same one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtbench_core.dispatch.metadata import as_meta, flattened
from dtbench_core.layout.placement import REPLICATE, Placements, Shard, local_extents, splits_evenly
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, memory_order
from dtbench_core.op_types import Args, Call, Kwargs, Value
from dtbench_core.rules.base import OpCall, Strategy
from dtbench_core.runtime import simulation
from dtbench_core.torch_compat import dispatch_modes_active, kernel_of

# What torch's kernels and meta kernels raise for shapes that they cannot run on (its checks raise the first three;
# Python ones divide by lengths). Anything else is a fault of a rule's, which every rank raises.
REFUSALS = (RuntimeError, ValueError, IndexError, ZeroDivisionError)


def every_rank_can(
    call: OpCall, strategy: Strategy, inputs: Sequence[Placements], outputs: Sequence[Placements]
) -> bool:
    """Whether the op runs on all ranks' shards and gives the shards that `outputs` says."""
    if all_even(call, inputs, outputs):
        return True
    sizes = call.inputs[0].info.sizes
    placed, results = placed_shapes(call, inputs, outputs)
    seen: set[Any] = set()
    # All, as it depends on the lengths which ranks hold the short shard and the empty ones.
    for coordinate in itertools.product(*map(range, sizes)):
        held = tuple(local_extents(shape, p, sizes, coordinate)[0] for shape, p in placed)
        expected = tuple(local_extents(shape, p, sizes, coordinate)[0] for shape, p in results)
        if (held, expected) not in seen and not _runs(call, strategy, held, expected):
            return False
        seen.add((held, expected))
    return True


def all_even(call: OpCall, inputs: Sequence[Placements], outputs: Sequence[Placements]) -> bool:
    """Whether all ranks hold equally much of everything."""
    placed, results = placed_shapes(call, inputs, outputs)
    sizes = call.inputs[0].info.sizes
    return all(
        splits_evenly(shape[p.dim], p.dim, placements, sizes)
        for shape, placements in (*placed, *results)
        for p in placements
        if isinstance(p, Shard)
    )


def placed_shapes(
    call: OpCall, inputs: Sequence[Placements], outputs: Sequence[Placements]
) -> tuple[list[tuple[tuple[int, ...], Placements]], ...]:
    """(global shape, placements) of the inputs, and of the outputs that are tensors."""
    placed = [(tuple(s.shape), p) for s, p in zip(call.inputs, inputs, strict=True)]
    results = [(tuple(m.shape), p) for m, p in zip(call.outputs, outputs, strict=True) if m is not None]
    return placed, results


def _runs(
    call: OpCall, strategy: Strategy, held: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]
) -> bool:
    if expected and not call.op._schema.is_mutable and all(0 in shape for shape in expected):
        return True  # the kernel does not run there (make_plan.py)
    if strategy.localize is not None:
        return True  # made for its rank: the rule answers for it
    try:
        tensors = [_meta(spec, shape) for spec, shape in zip(call.inputs, held, strict=True)]
        result = _run(call, strategy, tensors, expected)
    except REFUSALS:
        return False
    results = result if isinstance(result, (list, tuple)) else [result]
    return [tuple(r.shape) for r in results if isinstance(r, torch.Tensor)] == list(expected)


def _run(
    call: OpCall, strategy: Strategy, tensors: Sequence[torch.Tensor], expected: Sequence[tuple[int, ...]]
) -> Value:
    """The local op on these in the place of the inputs. expected: shapes of its results."""
    leaves, rebuilt = flattened(call.args, call.kwargs)
    parts = iter(tensors)
    on_meta = any(t.is_meta for t in tensors)
    local = [next(parts) if isinstance(x, DTensorSpec) else as_meta(x) if on_meta else x for x in leaves]
    args, kwargs = rebuilt(local)
    for position in strategy.local_shape_args:
        args[position] = list(expected[0])
    return (strategy.local_op or kernel_of(call.op))(*args, **kwargs)


def refusal_of_others(
    call: OpCall, strategy: Strategy, inputs: Sequence[Placements], outputs: Sequence[Placements]
) -> Exception | None:
    """What the kernel raises on the first rank of the mesh, if that comes of dtypes or of static arguments: tried where
    this rank holds nothing, so that its own kernel does not run, or has nothing to refuse. Meta kernels do not refuse
    all that others do. What is made for its rank is tried as the op on whole tensors."""
    if dispatch_modes_active() or simulation.active:
        return None
    info = call.inputs[0].info
    if strategy.localize is not None:
        inputs, outputs = ([(REPLICATE,) * info.ndim for _ in some] for some in (inputs, outputs))
    placed, results = placed_shapes(call, inputs, outputs)
    held, expected = (
        [tuple(local_extents(shape, p, info.sizes, (0,) * info.ndim)[0]) for shape, p in some]
        for some in (placed, results)
    )
    draws = torch.Generator(info.device_type).manual_seed(0)  # whose numbers nobody else draws

    def attempt(whole: int) -> None:
        tensors = [
            torch.rand(shape, generator=draws, device=info.device_type).to(spec.dtype)
            if spec.dtype.is_floating_point or spec.dtype.is_complex
            else torch.full(shape, whole, dtype=spec.dtype, device=info.device_type)
            for spec, shape in zip(call.inputs, held, strict=True)
        ]
        _run(call, strategy, tensors, expected)

    return _refusal(attempt)


def refusal_of_numbers(op: Call, args: Args, kwargs: Kwargs) -> Exception | None:
    """What an elementwise op raises for the numbers of this call: on tensors of one element, of the dtypes given.

    A plan holds for all numbers of a type, so that this is checked at every call.
    """
    if dispatch_modes_active() or simulation.active:
        return None
    leaves, rebuilt = flattened(args, kwargs)

    def attempt(whole: int) -> None:
        tried = [x.new_full((1,) * x.ndim, whole) if isinstance(x, torch.Tensor) else x for x in leaves]
        tried_args, tried_kwargs = rebuilt(tried)
        op(*tried_args, **tried_kwargs)

    return _refusal(attempt)


def _refusal(attempt: Callable[[int], None]) -> Exception | None:
    """What it raises for tensors of any integers: one may be an index of a dim of length 1, or a divisor. What is wrong
    with the values of a matrix says nothing of others."""
    refusal: Exception | None = None
    for whole in (0, 1):
        try:
            attempt(whole)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return None
        except REFUSALS as error:  # NotImplementedError among them
            refusal = error
        else:
            return None
    return refusal


def _meta(spec: DTensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
    """A shard of that shape, its dims in the order of the global strides."""
    stride = contiguous_stride(shape, reversed(memory_order(spec.shape, spec.stride)))
    return torch.empty_strided(shape, stride, dtype=spec.dtype, device="meta")
