"""Checks before any rank runs an op that it can run on the shards of all ranks.

If shards are uneven, a kernel may refuse a short or empty shard that only one rank has, and the other ranks would wait
for it. So the op is tried on meta tensors of every local shape. The result depends only on specs, so all ranks agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtbench_core.dispatch.metadata import as_meta, as_sequence, flattened
from dtbench_core.layout.placement import REPLICATE, Placements, Shard, local_extents, splits_evenly
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, memory_order
from dtbench_core.op_types import Args, Call, Kwargs, Value
from dtbench_core.rules.base import OpCall, Strategy
from dtbench_core.runtime import simulation
from dtbench_core.torch_compat import dispatch_modes_active, kernel_of

# Errors of kernels and meta kernels for shapes that they cannot run on: torch's checks raise the first three, and
# kernels in Python may divide by a length. Any other error is a fault of a rule and is raised on every rank.
REFUSALS = (RuntimeError, ValueError, IndexError, ZeroDivisionError)


def every_rank_can(
    call: OpCall, strategy: Strategy, inputs: Sequence[Placements], outputs: Sequence[Placements]
) -> bool:
    """Whether the op runs on all ranks' shards and gives the shards that `outputs` says."""
    if all_even(call, inputs, outputs):
        return True
    sizes = call.inputs[0].info.sizes
    placed, results = placed_shapes(call, inputs, outputs)
    checked: set[Any] = set()
    # All ranks are checked: which of them have the short and the empty shards depends on the lengths.
    for coordinate in itertools.product(*map(range, sizes)):
        local_shapes = tuple(local_extents(shape, p, sizes, coordinate)[0] for shape, p in placed)
        expected = tuple(local_extents(shape, p, sizes, coordinate)[0] for shape, p in results)
        if (local_shapes, expected) not in checked and not _runs(call, strategy, local_shapes, expected):
            return False
        checked.add((local_shapes, expected))
    return True


def all_even(call: OpCall, inputs: Sequence[Placements], outputs: Sequence[Placements]) -> bool:
    """Whether all ranks have shards of the same shape of every input and result."""
    placed, results = placed_shapes(call, inputs, outputs)
    return all(
        splits_evenly(shape[p.dim], p.dim, placements, call.inputs[0].info.sizes)
        for shape, placements in (*placed, *results)
        for p in placements
        if isinstance(p, Shard)
    )


def placed_shapes(
    call: OpCall, inputs: Sequence[Placements], outputs: Sequence[Placements]
) -> tuple[list[tuple[tuple[int, ...], Placements]], ...]:
    """Returns (global shape, placements) of the inputs, and of the outputs that are tensors."""
    return (
        [(tuple(s.shape), p) for s, p in zip(call.inputs, inputs, strict=True)],
        [(tuple(m.shape), p) for m, p in zip(call.outputs, outputs, strict=True) if m is not None],
    )


def _runs(
    call: OpCall,
    strategy: Strategy,
    local_shapes: Sequence[tuple[int, ...]],
    expected: Sequence[tuple[int, ...]],
) -> bool:
    if expected and not call.op._schema.is_mutable and all(0 in shape for shape in expected):
        return True  # the kernel does not run there (make_plan.py)
    if strategy.localize is not None:
        return True  # the rule makes the local op for its rank
    try:
        tensors = [_meta(spec, shape) for spec, shape in zip(call.inputs, local_shapes, strict=True)]
        result = _run(call, strategy, tensors, expected)
    except REFUSALS:
        return False
    return [tuple(r.shape) for r in as_sequence(result) if isinstance(r, torch.Tensor)] == list(expected)


def _run(
    call: OpCall, strategy: Strategy, tensors: Sequence[torch.Tensor], expected: Sequence[tuple[int, ...]]
) -> Value:
    """Runs the local op with these tensors in place of the inputs. expected: shapes of its results."""
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
    """Returns the error of the first rank's kernel, if dtypes or static arguments cause it, else None.

    Called on a rank whose shard is empty, so that its own kernel does not run or does not raise. Real kernels are
    tried, as meta kernels refuse less. A local op that the rule makes for its rank is replaced by the op on global
    tensors.
    """
    if dispatch_modes_active() or simulation.active:
        return None
    info = call.inputs[0].info
    if strategy.localize is not None:
        inputs, outputs = (
            [(REPLICATE,) * info.ndim for _ in placements_of_tensors]
            for placements_of_tensors in (inputs, outputs)
        )
    placed, results = placed_shapes(call, inputs, outputs)
    local_shapes, expected = (
        [
            tuple(local_extents(shape, p, info.sizes, (0,) * info.ndim)[0])
            for shape, p in placements_of_tensors
        ]
        for placements_of_tensors in (placed, results)
    )
    # A separate generator, so that trying the op does not advance the others.
    draws = torch.Generator(info.device_type).manual_seed(0)

    def attempt(fill_value: int) -> None:
        tensors = [
            torch.rand(shape, generator=draws, device=info.device_type).to(spec.dtype)
            if spec.dtype.is_floating_point or spec.dtype.is_complex
            else torch.full(shape, fill_value, dtype=spec.dtype, device=info.device_type)
            for spec, shape in zip(call.inputs, local_shapes, strict=True)
        ]
        _run(call, strategy, tensors, expected)

    # LAPACK counts pivots from 1 and does not check them: 0 is outside the matrix.
    has_pivots = any("pivots" in argument.name for argument in call.op._schema.arguments)
    return _refusal(attempt, (1,)) if has_pivots else _refusal(attempt)


def refusal_of_numbers(op: Call, args: Args, kwargs: Kwargs) -> Exception | None:
    """Returns the error of an elementwise op for the numbers of this call, tried on tensors of one element, or None.

    A plan holds for all numbers of a type, so this is checked at every call.
    """
    if dispatch_modes_active() or simulation.active:
        return None
    leaves, rebuilt = flattened(args, kwargs)

    def attempt(fill_value: int) -> None:
        tried = [x.new_full((1,) * x.ndim, fill_value) if isinstance(x, torch.Tensor) else x for x in leaves]
        tried_args, tried_kwargs = rebuilt(tried)
        op(*tried_args, **tried_kwargs)

    return _refusal(attempt)


def _refusal(attempt: Callable[[int], None], fill_values: Sequence[int] = (0, 1)) -> Exception | None:
    """Returns the error that `attempt` raises for tensors of each of these values, or None.

    Some ops reject one of these values: zero as a divisor, or one as an index into a dim of length 1. Errors about the
    values of a matrix do not count.
    """
    refusal: Exception | None = None
    for fill_value in fill_values:
        try:
            attempt(fill_value)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return None
        except REFUSALS as error:
            refusal = error
        else:
            return None
    return refusal


def _meta(spec: DTensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a meta tensor of the local shape, with its dims in the order of the global strides."""
    stride = contiguous_stride(shape, reversed(memory_order(spec.shape, spec.stride)))
    return torch.empty_strided(shape, stride, dtype=spec.dtype, device="meta")
