"""Reductions over dims. Over a sharded dim, each rank reduces its own part and the result is Partial.

A mean is a pending average if all shards are even, otherwise a pending sum of shares. Extrema over a sharded dim need
nonempty shards.

Variances, norms and logsumexp over a sharded dim are computed from sums, extrema and elementwise ops. These communicate
results of reductions only, whereas gathering the dim would send the whole input. If no reduced dim is sharded, the op
itself runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from dtbench_core.layout.placement import Partial, Placement, Shard, splits_evenly
from dtbench_core.op_types import Call, Value
from dtbench_core.redistribute.routes import is_inexact
from dtbench_core.rules.base import (
    OpCall,
    PlacementRow,
    Strategy,
    aten,
    decomposition,
    linear_rows,
    listed_dims,
    pending_ops,
    rule,
)
from dtbench_core.rules.labels import SUM, is_split, moved_rows, reduce_partials, remaining_dims, upcast

# Ops for which an empty list of dims means no dims. For other ops it means all dims.
_EMPTY_MEANS_NO_DIMS = {aten.all.dims, aten.any.dims}


def reduced_dims(call: OpCall) -> tuple[tuple[int, ...], bool]:
    """Returns (reduced dims, keepdim). An op without a dim argument reduces all dims."""
    names = call.arguments()
    if call.op in _EMPTY_MEANS_NO_DIMS and call["dim"] == []:
        dims: tuple[int, ...] = ()
    else:
        dims = call.dims() if "dim" in names else tuple(range(call.inputs[0].ndim))
    return dims, bool(call["keepdim"]) if "keepdim" in names else False


def unreduced_dim_rows(
    call: OpCall, reduced: Collection[int], keepdim: bool, outs: int = 1
) -> list[PlacementRow]:
    """Returns rows that shard a dim which is not reduced. Removed dims shift its position in the result."""
    return moved_rows(remaining_dims(call.inputs[0].ndim, reduced, keepdim=keepdim), outs)


def _reduction_rows(call: OpCall, *outputs: Placement, nonempty: bool = False) -> list[PlacementRow]:
    """Returns the rows of a reduction whose partial results have the placements `outputs`."""
    reduced, keepdim = reduced_dims(call)
    return [
        *unreduced_dim_rows(call, reduced, keepdim, outs=len(outputs)),
        *(PlacementRow((Shard(d),), outputs, nonempty=((0, d),) if nonempty else ()) for d in reduced),
    ]


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_(call: OpCall) -> Strategy:
    return Strategy([*_reduction_rows(call, SUM), *_linear_rows(call)])


def _linear_rows(call: OpCall) -> list[PlacementRow]:
    """Returns rows for pending sums, which pass unless the op converts each term to another kind of number first."""
    dtype, result_dtype = call.inputs[0].dtype, call.outputs[0].dtype if call.outputs[0] is not None else None
    if dtype == result_dtype and not is_inexact(dtype):
        return linear_rows(call, 1, ops=("sum",))
    inexact = result_dtype is not None and is_inexact(dtype) and is_inexact(result_dtype)
    return linear_rows(call, 1) if inexact else []


# Reductions, and the pending reduction that combines their partial results. An empty part has the neutral result.
PARTIAL_RESULTS: dict[OpOverload, Placement] = {
    aten.nansum.default: SUM,  # not linear, because it depends on values
    aten.count_nonzero.default: SUM,
    aten.count_nonzero.dim_IntList: SUM,
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), Partial("min")),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), Partial("max")),
}


@rule(*PARTIAL_RESULTS)
def partial_reduction(call: OpCall) -> Strategy:
    return Strategy(_reduction_rows(call, PARTIAL_RESULTS[call.op]))


@rule(aten.mean.default, aten.mean.dim)
def mean(call: OpCall) -> Strategy:
    reduced, keepdim = reduced_dims(call)
    rows = [*unreduced_dim_rows(call, reduced, keepdim), *linear_rows(call, 1)]
    spec = call.inputs[0]
    chunks = all(type(p) is Shard or not p.is_shard() for p in spec.placements)
    if chunks and all(splits_evenly(spec.shape[d], d, spec.placements, spec.info.sizes) for d in reduced):
        rows += [PlacementRow((Shard(d),), (Partial("avg"),), ((0, d),), ((0, d),)) for d in reduced]
        return Strategy(rows)
    return Strategy(
        [*rows, *(PlacementRow((Shard(d),), (SUM,)) for d in reduced)],
        local_op=_share_of_mean(call, reduced),
        any_lengths=True,
    )


def _share_of_mean(call: OpCall, reduced: tuple[int, ...]) -> Call:
    """Returns the op whose local mean is scaled by the rank's share of all elements."""
    op, count = call.op, math.prod(call.inputs[0].shape[d] for d in reduced)

    def local_op(local: torch.Tensor, *args: object, **kwargs: object) -> Value:
        local_count = math.prod(local.size(d) for d in reduced)
        if local_count == count:
            return op(local, *args, **kwargs)
        if local_count:
            return op(local, *args, **kwargs) * (local_count / count)
        return (aten.sum.default if op is aten.mean.default else aten.sum.dim_IntList)(local, *args, **kwargs)

    return local_op


@rule(aten.trace.default)
def trace(call: OpCall) -> Strategy:
    """Each rank sums its part of the diagonal, which need not be on the diagonal of its shard."""

    def localize(placed: Any) -> Call:
        row, column = placed.inputs[0].local_offset
        return lambda local: local.diagonal(row - column).sum()

    if call.inputs[0].dtype is torch.bool:  # the op rejects bool, but a sum would not
        return Strategy([])
    return Strategy(
        [*(PlacementRow((Shard(d),), (SUM,)) for d in (0, 1)), *_linear_rows(call)],
        localize=localize,
        any_lengths=True,
    )


@rule(aten.prod.default, aten.prod.dim_int)
def prod(call: OpCall) -> Strategy:
    if call.inputs[0].dtype.is_complex:  # no backend multiplies complex numbers
        reduced, keepdim = reduced_dims(call)
        return Strategy(unreduced_dim_rows(call, reduced, keepdim))
    rows = _reduction_rows(call, Partial("product"))
    if pending_ops(call, ["product"]) and call["dtype"] is None:
        rows.append(PlacementRow((Partial("product"),), (Partial("product"),)))
    return Strategy(rows)


@rule(aten.amax.default, aten.max.default, aten.amin.default, aten.min.default)
def extremum(call: OpCall) -> Strategy:
    kind = "max" if call.op in (aten.amax.default, aten.max.default) else "min"
    return Strategy(
        [*_reduction_rows(call, Partial(kind), nonempty=True), *linear_rows(call, 1, ops=(kind,))]
    )


@rule(aten.aminmax.default)
def aminmax(call: OpCall) -> Strategy:
    return Strategy(_reduction_rows(call, Partial("min"), Partial("max"), nonempty=True))


@rule(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)
@rule(aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default, aten.hash_tensor.default)
@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
@rule(aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim)
@rule(aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype, aten.logsumexp.default)
def unsharded_reduction(call: OpCall) -> Strategy:
    """Reductions whose partial results one collective cannot combine: reduced dims must not be sharded."""
    reduced, keepdim = reduced_dims(call)
    return Strategy(unreduced_dim_rows(call, reduced, keepdim, outs=len(call.outputs)))


# ---- over a sharded dim: variances, norms and logsumexp ----


def _would_gather(tensor: Value, dims: Sequence[int]) -> bool:
    """Whether the op itself would gather `tensor`, and sums and extrema can replace it."""
    return is_inexact(tensor.dtype) and tensor.numel() > 0 and is_split(tensor, dims)


def _variance(
    tensor: Value, dims: Sequence[int], correction: float | None, keepdim: bool
) -> tuple[Any, Any] | None:
    """Returns (variance, mean), computed in two passes, or None if the op itself should run."""
    if not _would_gather(tensor, dims) or not tensor.dtype.is_floating_point:
        return None
    data = upcast(tensor)
    count = math.prod(tensor.shape[d] for d in dims)
    center = reduce_partials(data.sum(dims, keepdim=True) / count)
    total = (data - center).square().sum(dims, keepdim=keepdim)
    degrees_of_freedom = max(count - (1.0 if correction is None else correction), 0.0)
    return reduce_partials(total) / degrees_of_freedom, center if keepdim else center.squeeze(dims)


@decomposition(aten.var.correction, aten.var_mean.correction, with_op=True)
@decomposition(aten.std.correction, aten.std_mean.correction, with_op=True)
def moments(
    op: OpOverload, tensor: Value, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Value:
    """Returns the variance or standard deviation, and for the variants that end with "_mean" also the mean."""
    if (variance := _variance(tensor, listed_dims(dim, tensor.ndim), correction, keepdim)) is None:
        return NotImplemented
    result = (
        variance[0].sqrt() if op in (aten.std.correction, aten.std_mean.correction) else variance[0]
    ).to(tensor.dtype)
    return (result, variance[1].to(tensor.dtype)) if len(op._schema.returns) == 2 else result


@decomposition(aten.linalg_vector_norm.default)
def vector_norm(
    tensor: Value,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    """(sum of |x|^ord)^(1/ord). An infinite `ord` is the max or min of |x|; 0 is the count of nonzero elements."""
    dims = listed_dims(dim, tensor.ndim)
    if not _would_gather(tensor, dims):
        return NotImplemented
    data = tensor if dtype is None else tensor.to(dtype)
    result_dtype = data.dtype.to_real() if data.dtype.is_complex else data.dtype
    magnitude = upcast(data).abs()
    if ord in (math.inf, -math.inf):
        return (magnitude.amax(dims, keepdim) if ord > 0 else magnitude.amin(dims, keepdim)).to(result_dtype)
    if ord == 0:
        return (magnitude != 0).sum(dims, keepdim, dtype=result_dtype)
    if ord == 1:
        return magnitude.sum(dims, keepdim).to(result_dtype)
    return magnitude.pow(ord).sum(dims, keepdim).pow(1 / ord).to(result_dtype)


@decomposition(aten.norm.Scalar, aten.norm.ScalarOpt_dtype)
@decomposition(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def norm(tensor: Value, p: float | None = 2, *args: Any, **kwargs: Any) -> Value:
    return vector_norm(tensor, 2 if p is None else p, *args, **kwargs)


@decomposition(aten.dist.default)
def dist(tensor: Value, subtrahend: object, p: float = 2) -> Value:
    """Returns the norm of the difference, wherever the tensors are sharded."""
    return aten.linalg_vector_norm.default(tensor - subtrahend, p)


@decomposition(aten.logsumexp.default)
def logsumexp(tensor: Value, dim: Any, keepdim: bool = False) -> Value:
    """Subtracts the maximum, so that no term overflows; an infinite maximum is not subtracted (inf - inf is NaN)."""
    dims = listed_dims(dim, tensor.ndim)
    if not _would_gather(tensor, dims) or not tensor.dtype.is_floating_point:
        return NotImplemented
    data = upcast(tensor)
    maximum = reduce_partials(data.amax(dims, keepdim=True))
    maximum = maximum.masked_fill(maximum.abs() == math.inf, 0.0)
    return (
        reduce_partials((data - maximum).exp().sum(dims, keepdim=keepdim)).log()
        + (maximum if keepdim else maximum.squeeze(dims))
    ).to(tensor.dtype)
