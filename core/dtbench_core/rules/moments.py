"""Variances, norms and logsumexp over a sharded dim, computed from sums, extrema and elementwise ops.

These communicate results of reductions only, whereas gathering the dim would send the whole input. If no reduced dim is
sharded, the op itself runs (reduce.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from dtbench_core.op_types import Value
from dtbench_core.redistribute.routes import is_inexact
from dtbench_core.rules.base import aten, decomposition, listed_dims
from dtbench_core.rules.labels import is_split, reduce_partials, upcast


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
    variance = _variance(tensor, listed_dims(dim, tensor.ndim), correction, keepdim)
    if variance is None:
        return NotImplemented
    deviation = op in (aten.std.correction, aten.std_mean.correction)
    result = (variance[0].sqrt() if deviation else variance[0]).to(tensor.dtype)
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
