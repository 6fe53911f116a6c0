"""Elementwise ops: all ops that torch tags `pointwise`, copies, casts and `*_like` factories.

Any dim may be sharded, if all inputs that have it (not broadcast over it) are. A pending sum passes
only through the ops that are linear in the inputs holding it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch._ops import OpOverload

from dtbench_core.errors import PlacementError
from dtbench_core.layout.placement import NEUTRAL, REDUCE_OPS, REPLICATE, Partial, Shard
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, memory_order
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Value
from dtbench_core.redistribute.copied_view import copied_view
from dtbench_core.rules import base
from dtbench_core.rules.base import (
    OpCall,
    PlacedSpecs,
    PlacementRow,
    Strategy,
    aten,
    by_op,
    decomposition,
    linear_rows,
    ops_named,
    pending_ops,
    pending_rows,
    rule,
    shard_rows,
)
from dtbench_core.rules.labels import broadcast_placements


def is_pointwise(op: OpOverload) -> bool:
    """Whether torch tags the op as elementwise (without random numbers), and the user registered no other rule."""
    if torch.Tag.nondeterministic_seeded in op.tags or op in base.overridden_ops:
        return False
    # frexp(out=) runs like other ops with out=.
    if sum(argument.is_out for argument in op._schema.arguments) > 1:
        return False
    if torch.Tag.pointwise in op.tags or op._schema.name in PRIMS:
        return True
    # Many in-place ops lack the tag of their functional variant.
    functional = _functional_variant(op)
    return functional is not None and torch.Tag.pointwise in functional.tags


# These lack the tag as well. In forward AD, torch uses them to multiply zero tangents on the meta device.
PRIMS = {"prims::add", "prims::sub", "prims::mul", "prims::div"}


def _functional_variant(op: OpOverload) -> OpOverload | None:
    """Returns the functional variant of an in-place op: `aten.eq.Scalar` for `aten.eq_.Scalar`."""
    namespace, _, name = op._schema.name.partition("::")
    if namespace != "aten" or not name.endswith("_") or name.startswith("_"):
        return None
    return getattr(getattr(aten, name[:-1], None), op._overloadname, None)


def _with_in_place(ops: set[OpOverload]) -> set[OpOverload]:
    packets = ((op, getattr(aten, op._schema.name.partition("::")[2] + "_", None)) for op in ops)
    return ops | {
        getattr(packet, op._overloadname) for op, packet in packets if hasattr(packet, op._overloadname)
    }


# Ops that are linear in all tensor inputs together: f(x + y) = f(x) + f(y).
LINEAR = _with_in_place({aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.neg.default})
LINEAR |= _with_in_place({aten.lerp.Scalar, aten.conj_physical.default})
LINEAR |= {aten._conj_physical.default, aten.positive.default, aten.complex.default}
# Ops that are linear in the first input; the other inputs are factors. Backward ops are linear in the output gradient.
ACTIVATIONS = """
    elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid logit mish native_dropout
    _prelu_kernel sigmoid silu softplus softshrink tanh threshold
"""
GRADIENTS = set(ops_named(ACTIVATIONS, "_backward"))
LINEAR_IN_FIRST_INPUT = GRADIENTS | _with_in_place(
    {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
)
# Groups of inputs (by index) that an op is additionally linear in.
OTHER_LINEAR_INPUTS: dict[OpOverload, tuple[tuple[int, ...], ...]] = by_op(
    {
        "mul.Tensor": ((1,),),
        "lerp.Tensor lerp_.Tensor addcdiv addcdiv_": ((0, 1),),
        "addcmul addcmul_": ((0, 1), (0, 2)),
    }
)
# Elementwise ops that torch does not tag.
UNTAGGED = GRADIENTS | _with_in_place({aten.hardswish.default, aten.floor_divide.default, aten.mish.default})
UNTAGGED |= {aten.floor_divide.Scalar, aten.floor_divide_.Tensor, aten.floor_divide_.Scalar}
UNTAGGED |= {aten._prelu_kernel.default, aten.rsub.Tensor, aten.polar.default, aten.complex.default}
UNTAGGED |= {aten.isin.Tensor_Scalar}


@rule(*UNTAGGED)
def pointwise(call: OpCall) -> Strategy:
    """The rule of all pointwise ops. Inputs broadcast to the shape of the first output."""
    outs = len(call.outputs)
    shape = call.outputs[0].shape if call.outputs and call.outputs[0] is not None else torch.Size()
    return Strategy(
        [
            *(
                PlacementRow(broadcast_placements(call.inputs, dim, shape), (Shard(dim),) * outs)
                for dim in range(len(shape))
            ),
            *_partial_rows(call),
        ]
    )


def _partial_rows(call: OpCall) -> list[PlacementRow]:
    count = len(call.inputs)
    # A number added to a pending sum would be added once per rank.
    if call.op in LINEAR and not (count == 1 and len(call.args) > 1):
        return pending_rows(call, tuple(range(count)))
    terms = OTHER_LINEAR_INPUTS.get(call.op, ())
    if call.op in LINEAR_IN_FIRST_INPUT and not call.kwargs.get("rounding_mode"):
        terms = ((0,), *terms)
    return pending_rows(call, *(group for group in terms if max(group) < count))


@rule(aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default)
@rule(aten.detach_copy.default, aten.alias_copy.default, aten.lift_fresh_copy.default)
@rule(aten.empty_like.default, aten.zero_.default)
def same_placements(call: OpCall) -> Strategy:
    """Ops that return the input's values, uninitialized memory or zeros. All placements stay.

    Zeros are valid terms of any reduction.
    """
    return Strategy([*shard_rows(range(call.inputs[0].ndim), 1, 1), *linear_rows(call, 1, ops=REDUCE_OPS)])


@decomposition(aten._conj.default)
def conjugate(tensor: Wrapper) -> Wrapper:
    """Conjugates eagerly, as a copied view that refuses writes.

    Plain torch sets a bit and conjugates on reading. That bit on a shard would not be visible on the DTensor.
    """
    result: Wrapper = aten.conj_physical(tensor)
    return copied_view(tensor.viewed, result._local_tensor, result._spec, tensor)


@rule(aten._to_copy.default)
def cast(call: OpCall) -> Strategy:
    """A pending sum passes a cast to a floating dtype that represents all values of its dtype.

    A narrower dtype would round every term, and an integer dtype would truncate it.
    """
    return Strategy(
        [*shard_rows(range(call.inputs[0].ndim), 1, 1), *(linear_rows(call, 1) if _cast_widens(call) else [])]
    )


def _cast_widens(call: OpCall) -> bool:
    source, meta = call.inputs[-1].dtype, call.outputs[0]
    if meta is None or not (source.is_floating_point and meta.dtype.is_floating_point):
        return False
    # torch.promote_types does not support 8-bit floats.
    promotes = source != meta.dtype and min(source.itemsize, meta.dtype.itemsize) > 1
    return source == meta.dtype or (promotes and torch.promote_types(source, meta.dtype) == meta.dtype)


@rule(aten.copy_.default, aten.copy.default)
def copy(call: OpCall) -> Strategy:
    """The written tensor keeps its placements, and the source is moved to them.

    Terms of a pending sum cannot be cast one by one. A replica can: it is cast first, and then becomes a term.
    """
    written, source = call.inputs[0], call.inputs[-1]
    passes = written.dtype == source.dtype or not source.has_partial() or _cast_widens(call)
    if passes and written.has_partial() and written.shape == source.shape:
        return Strategy([], exact_placements=((written.placements,) * 2, (written.placements,)))
    return Strategy([*pointwise(call).rows, *(linear_rows(call, 2, ops=REDUCE_OPS) if passes else [])])


@rule(aten.fill_.Scalar, aten.fill_.Tensor, aten.fill.Scalar, aten.fill.Tensor)
@rule(aten.masked_fill.Scalar, aten.masked_fill_.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Tensor)
def fill(call: OpCall) -> Strategy:
    """(self, mask?, value): self may be Partial; each rank then writes its term of the value.

    In an average, each rank's term is the value itself. Summing them may overflow, as with the lowest number in a mask.
    So an average is only filled in place, and only after a check of the number.
    """
    op, masks = call.op, int("mask" in call.arguments())
    writes_number = op._schema.name.endswith("_") and len(call.inputs) == masks + 1
    rows = pending_rows(call, (0,), ops=[kind for kind in REDUCE_OPS if kind != "avg" or writes_number])

    def localize(placed: PlacedSpecs) -> Callable[..., torch.Tensor] | None:
        spec = placed.inputs[0]
        neutral = neutral_term(spec)
        averages = any(p.is_partial("avg") for p in spec.placements)
        if neutral is None and not averages:
            return None

        def run(local: torch.Tensor, *args: Value) -> torch.Tensor:
            value = args[masks]
            if averages:
                _raise_for_overflow(spec, value)
            if neutral is not None:
                # Raise also on ranks that use a neutral term.
                if masks and not surely_holds(spec.dtype, value):
                    op(local.new_zeros(1), args[0].new_ones(1), value)
                value = torch.full_like(value, neutral) if isinstance(value, torch.Tensor) else neutral
            return op(local, *args[:masks], value)  # type: ignore[no-any-return]

        return run

    return Strategy([*pointwise(call).rows, *rows], localize=localize, any_lengths=True)


def _raise_for_overflow(spec: DTensorSpec, value: Value) -> None:
    if not spec.dtype.is_floating_point or not math.isfinite(value):
        return
    if abs(value) * math.prod(spec.info.sizes) > torch.finfo(spec.dtype).max:
        raise PlacementError(
            f"got {value} to write to {spec}, expected a number whose sum over the ranks does not overflow: "
            "redistribute the tensor to Shard or Replicate before"
        )


def surely_holds(dtype: torch.dtype, value: object) -> bool:
    """Whether a number is certainly in the range of the dtype. If not, the kernel has to decide."""
    if not isinstance(value, (int, float)):
        return False
    if dtype is torch.bool:
        return True
    limits = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


def neutral_term(spec: DTensorSpec) -> int | None:
    """Returns the neutral element that is this rank's term of a value, or None if its term is the value itself."""
    if (coordinate := spec.info.coordinate) is None:  # a rank outside the mesh has no shard
        return None
    for placement, index in zip(spec.placements, coordinate, strict=True):
        if index > 0 and isinstance(placement, Partial) and placement.reduce_op in NEUTRAL:
            return NEUTRAL[placement.reduce_op]
    return None


@rule(aten.where.self)
def where(call: OpCall) -> Strategy:
    """(condition, a, b): each element is one of the two, so sums and extrema pass.

    Averages do not pass: masks often contain the lowest number of a dtype, whose sum over the ranks would overflow.
    """
    return Strategy(
        [
            *pointwise(call).rows,
            *pending_rows(
                call, (1, 2), ops=("sum", "max", "min") if call.inputs[0].dtype == torch.bool else ()
            ),
        ]
    )


@rule(aten.maximum.default, aten.minimum.default)
def binary_extremum(call: OpCall) -> Strategy:
    kind = "max" if call.op is aten.maximum.default else "min"
    return Strategy([*pointwise(call).rows, *linear_rows(call, 2, ops=(kind,))])


@rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(call: OpCall) -> Strategy:
    """(input) -> (output, buffer). Only the backward on CPU uses the buffer; elsewhere it is empty."""

    def local_op(local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, buffer = aten.log_sigmoid_forward(local)
        return output, buffer if buffer.shape == local.shape else torch.zeros_like(local)

    return Strategy(shard_rows(range(call.inputs[0].ndim), 1, 2), local_op=local_op)


@rule(aten.glu.default, aten.glu_backward.default)
def glu(call: OpCall) -> Strategy:
    """Splits one dim into halves, which must not be sharded; (grad, input) in the backward."""
    ndim, count = call.inputs[-1].ndim, len(call.inputs)
    halved = call.dim(ndim=ndim)
    return Strategy(
        [
            *shard_rows((d for d in range(ndim) if d != halved), count, 1),
            *(pending_rows(call, (0,)) if count == 2 else []),
        ]
    )


@rule(aten.view_as_real.default, aten.view_as_real_copy.default)
@rule(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def complex_pairs(call: OpCall) -> Strategy:
    """Adds or removes a last dim of 2 for the real and imaginary parts."""
    pairs = call.op in (aten.view_as_complex.default, aten.view_as_complex_copy.default)
    return Strategy([*shard_rows(range(call.inputs[0].ndim - pairs), 1, 1), *linear_rows(call, 1)])


@rule(aten.bucketize.Tensor, aten.isin.Tensor_Tensor)
def table_lookup(call: OpCall) -> Strategy:
    """(elements, table): each element is looked up in the replicated table."""
    return Strategy([PlacementRow((Shard(d), REPLICATE), (Shard(d),)) for d in range(call.inputs[0].ndim)])


@rule(aten.searchsorted.Tensor)
def searchsorted(call: OpCall) -> Strategy:
    """(sorted [..., n], values [..., m], sorter? [..., n]), with one table for all values, or one per row."""
    table, values = call.inputs[:2]
    shared = [table.ndim == 1 or dim == values.ndim - 1 for dim in range(values.ndim)]
    placed = [REPLICATE if is_shared else Shard(dim) for dim, is_shared in enumerate(shared)]
    return Strategy(
        [
            PlacementRow((p, Shard(dim), *(p,) * (len(call.inputs) - 2)), (Shard(dim),))
            for dim, p in enumerate(placed)
        ]
    )


@rule(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def new_like(call: OpCall) -> Strategy:
    """New values in the shape of the input. The result has the shards of the input; its values are not read."""
    return Strategy(
        [
            *shard_rows(range(call.inputs[0].ndim), 1, 1),
            *(PlacementRow((Partial(op),), (REPLICATE,)) for op in pending_ops(call, REDUCE_OPS)),
        ]
    )


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default)
def new_with_shape(call: OpCall) -> Strategy:
    """New values in a given shape. The result is sharded like the input if the shapes are equal."""
    return Strategy(_new_rows(call), local_shape_args=(1,))


@rule(aten.new_empty_strided.default)
def new_with_stride(call: OpCall) -> Strategy:
    """The local strides have the same order as the global ones."""
    order = memory_order(call["size"], call["stride"])[::-1]

    def local_op(local: torch.Tensor, size: list[int], _: object, **kwargs: object) -> torch.Tensor:
        return aten.new_empty_strided(local, size, contiguous_stride(size, order), **kwargs)  # type: ignore[no-any-return]

    return Strategy(_new_rows(call), local_shape_args=(1,), local_op=local_op, any_lengths=True)


def _new_rows(call: OpCall) -> list[PlacementRow]:
    same_shape = tuple(call["size"]) == tuple(call.inputs[0].shape)
    # The input's values are not read, so any placement may stay, with a replicated result.
    return [
        *(shard_rows(range(call.inputs[0].ndim), 1, 1) if same_shape else []),
        *(
            PlacementRow((p,), (REPLICATE,))
            for p in sorted(
                {p for p in call.inputs[0].placements if not same_shape or p.is_partial()}, key=str
            )
        ),
    ]
