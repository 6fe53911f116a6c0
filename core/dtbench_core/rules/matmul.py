"""Products with contracted dims, described by einsum labels: `mk,kn->mn`.

A label shards every tensor that has it. A contracted label (not in the output) leaves a pending sum.
"""

from __future__ import annotations

from dtbench_core.layout.placement import Shard
from dtbench_core.rules.base import OpCall, PlacementRow, Strategy, aten, pending_rows, rule
from dtbench_core.rules.labels import SUM, label_rows, letters, placed_along

PRODUCTS = {
    aten.mm.default: "mk,kn->mn",
    aten._int_mm.default: "mk,kn->mn",
    aten.bmm.default: "bmk,bkn->bmn",
    aten.mv.default: "mk,k->m",
    aten.dot.default: "k,k->",
    aten.vdot.default: "k,k->",
}
# beta * bias + alpha * product
ADDED = {
    aten.addmm.default: "mk,kn->mn",
    aten.addmm_.default: "mk,kn->mn",
    aten.baddbmm.default: "bmk,bkn->bmn",
    aten.baddbmm_.default: "bmk,bkn->bmn",
    aten.addmv.default: "mk,k->m",
    aten.addmv_.default: "mk,k->m",
    aten.addbmm.default: "bmk,bkn->mn",
    aten.addbmm_.default: "bmk,bkn->mn",
    aten.addr.default: "m,n->mn",
    aten.addr_.default: "m,n->mn",
}


def einsum_rows(call: OpCall, equation: str) -> list[PlacementRow]:
    """Rows of a product of tensors whose dims are labelled as `equation` says."""
    operands, output = equation.split("->")
    inputs = operands.split(",")
    rows = label_rows(dict.fromkeys("".join(inputs)), inputs, [output], SUM)
    # Linear in each factor: one may be a pending sum if the others are whole.
    return rows + pending_rows(call, *[(i,) for i in range(len(inputs))], count=len(inputs))


@rule(*PRODUCTS)
def product(call: OpCall) -> Strategy:
    return Strategy(einsum_rows(call, PRODUCTS[call.op]))


@rule(*ADDED)
def added(call: OpCall) -> Strategy:
    """The bias broadcasts to the output, and takes part in a pending sum as one term of it."""
    bias, shape = call.inputs[0], call.outputs[0].shape if call.outputs[0] is not None else ()
    rows = []
    for row in einsum_rows(call, ADDED[call.op]):
        (placed,) = row.outputs
        wanted = placed_along(bias, placed.dim, shape) if isinstance(placed, Shard) else placed
        rows.append(PlacementRow((wanted, *row.inputs), row.outputs))
    return Strategy(rows)


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
    return Strategy(einsum_rows(call, f"{','.join(factors)}->{output}"))
