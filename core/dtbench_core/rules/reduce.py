"""Reductions over dims. Over a sharded dim each rank reduces its own part and the result is pending.

A mean is pending as an average, which is right only when every rank holds equally much; otherwise
the dim is gathered. Extrema over a sharded dim need every rank to hold something.
"""

from __future__ import annotations

from collections.abc import Collection

from dtbench_core.placement import Partial, Shard
from dtbench_core.rules.base import OpCall, Row, Strategy, aten, linear_rows, pending, rule


def kept_rows(call: OpCall, reduced: Collection[int], keepdim: bool, outs: int = 1) -> list[Row]:
    """Rows that shard a dim which is not reduced; it moves forward where reduced dims vanish."""
    rows = []
    for dim in range(call.inputs[0].ndim):
        if dim not in reduced:
            after = dim if keepdim else dim - sum(r < dim for r in reduced)
            rows.append(Row((Shard(dim),), (Shard(after),) * outs))
    return rows


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_(call: OpCall) -> Strategy:
    reduced, keepdim = _reduced(call)
    rows = [Row((Shard(d),), (Partial("sum"),)) for d in reduced]
    return Strategy([*kept_rows(call, reduced, keepdim), *rows, *linear_rows(call, 1)])


@rule(aten.mean.default, aten.mean.dim)
def mean(call: OpCall) -> Strategy:
    reduced, keepdim = _reduced(call)
    rows = [Row((Shard(d),), (Partial("avg"),), even=((0, d),), nonempty=((0, d),)) for d in reduced]
    return Strategy([*kept_rows(call, reduced, keepdim), *rows, *linear_rows(call, 1)])


@rule(aten.amax.default, aten.max.default)
def amax(call: OpCall) -> Strategy:
    return _extremum(call, "max")


@rule(aten.amin.default, aten.min.default)
def amin(call: OpCall) -> Strategy:
    return _extremum(call, "min")


@rule(aten.all.default, aten.all.dim, aten.any.default, aten.any.dim, aten.max.dim, aten.min.dim)
@rule(aten.argmax.default, aten.argmin.default, aten.var.correction, aten.std.correction, aten.prod.dim_int)
@rule(aten.linalg_vector_norm.default, aten.logsumexp.default)
def whole_dims(call: OpCall) -> Strategy:
    """Reductions whose partial results cannot be combined by one collective: reduced dims are whole."""
    reduced, keepdim = _reduced(call)
    return Strategy(kept_rows(call, reduced, keepdim, outs=len(call.outputs)))


def _extremum(call: OpCall, kind: str) -> Strategy:
    reduced, keepdim = _reduced(call)
    rows = [Row((Shard(d),), (Partial(kind),), nonempty=((0, d),)) for d in reduced]
    if pending(call, kind):
        rows.append(Row((Partial(kind),), (Partial(kind),)))
    return Strategy([*kept_rows(call, reduced, keepdim), *rows])


def _reduced(call: OpCall) -> tuple[tuple[int, ...], bool]:
    """(dims reduced, keepdim); an op without a dim argument reduces all."""
    names = {argument.name for argument in call.op._schema.arguments}
    dims = call.dims() if "dim" in names else tuple(range(call.inputs[0].ndim))
    return dims, bool(call["keepdim"]) if "keepdim" in names else False
