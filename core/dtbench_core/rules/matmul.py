"""Products with contracted dims, told by einsum labels: `mk,kn->mn`.

A label shards every tensor that has it. A contracted label (not in the output) leaves a pending sum.
"""

from __future__ import annotations

from dtbench_core.layout.placement import REPLICATE, Partial, Placement, Shard
from dtbench_core.rules.base import OpCall, Row, Strategy, aten, pending_rows, rule
from dtbench_core.rules.labels import letters, placed_along


def einsum_rows(call: OpCall, inputs: tuple[str, ...], output: str) -> list[Row]:
    """Rows of a product of tensors whose dims are labelled by `inputs`, giving `output`."""
    rows = []
    for label in dict.fromkeys("".join(inputs)):
        placed: Placement = Shard(output.index(label)) if label in output else Partial()
        wanted = tuple(Shard(labels.index(label)) if label in labels else REPLICATE for labels in inputs)
        rows.append(Row(wanted, (placed,)))
    # Linear in each factor: one may be a pending sum if the others are whole.
    factors = range(len(inputs))
    return [*rows, *pending_rows(call, *((i,) for i in factors), count=len(factors))]


@rule(aten.mm.default, aten._int_mm.default)
def mm(call: OpCall) -> Strategy:
    return Strategy(einsum_rows(call, ("mk", "kn"), "mn"))


@rule(aten.bmm.default)
def bmm(call: OpCall) -> Strategy:
    return Strategy(einsum_rows(call, ("bmk", "bkn"), "bmn"))


@rule(aten.mv.default)
def mv(call: OpCall) -> Strategy:
    return Strategy(einsum_rows(call, ("mk", "k"), "m"))


@rule(aten.dot.default, aten.vdot.default)
def dot(call: OpCall) -> Strategy:
    return Strategy(einsum_rows(call, ("k", "k"), ""))


@rule(aten.addmm.default, aten.addmm_.default)
def addmm(call: OpCall) -> Strategy:
    return _added(call, ("mk", "kn"), "mn")


@rule(aten.baddbmm.default, aten.baddbmm_.default)
def baddbmm(call: OpCall) -> Strategy:
    return _added(call, ("bmk", "bkn"), "bmn")


@rule(aten.addmv.default, aten.addmv_.default)
def addmv(call: OpCall) -> Strategy:
    return _added(call, ("mk", "k"), "m")


@rule(aten.addbmm.default, aten.addbmm_.default)
def addbmm(call: OpCall) -> Strategy:
    return _added(call, ("bmk", "bkn"), "mn")


@rule(aten.addr.default, aten.addr_.default)
def addr(call: OpCall) -> Strategy:
    return _added(call, ("m", "n"), "mn")


@rule(aten._trilinear.default)
def trilinear(call: OpCall) -> Strategy:
    """Three factors that each lack the dims in their `expand`; those in `sumdim` are contracted."""
    total = letters(call.inputs[0].ndim + len(call["expand1"]))
    factors = [
        "".join(label for d, label in enumerate(total) if d not in call[f"expand{i}"]) for i in (1, 2, 3)
    ]
    if any(len(labels) != spec.ndim for labels, spec in zip(factors, call.inputs, strict=True)):
        return Strategy([])
    output = "".join(label for d, label in enumerate(total) if d not in call["sumdim"])
    return Strategy(einsum_rows(call, tuple(factors), output))


def _added(call: OpCall, factors: tuple[str, str], output: str) -> Strategy:
    """beta * bias + alpha * product: the bias broadcasts to the output, and takes part in a pending
    sum as one term of it."""
    bias, shape = call.inputs[0], call.outputs[0].shape if call.outputs[0] is not None else ()
    rows = []
    for row in einsum_rows(call, factors, output):
        (placed,) = row.outputs
        wanted = placed_along(bias, placed.dim, shape) if isinstance(placed, Shard) else placed
        rows.append(Row((wanted, *row.inputs), row.outputs))
    return Strategy(rows)
