"""Products described by einsum labels (`mk,kn->mn`), and `F.linear` as one op in the forward and one in the backward.

torch flattens the leading dims, multiplies and restores them. These are five ops in the forward and six in the
backward, and a DTensor has to plan, unwrap and wrap for each. Here the layer [..., k] x [o, k] (+ [o]) -> [..., o] is
one op with one rule, and all its gradients are another op. Autograd records a single node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dtbench_core.layout.placement import Shard
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Ctx, Value
from dtbench_core.rules.base import (
    OpCall,
    PlacedSpecs,
    PlacementRow,
    Strategy,
    aten,
    by_op,
    pending_rows,
    rule,
)
from dtbench_core.rules.labels import SUM, broadcast_placement, free_labels, label_rows
from dtbench_core.rules.pointwise import neutral_term
from dtbench_core.torch_compat import AutogradFunction, is_grad_enabled, kernel_of, new_op

# ---- entry and autograd ----


def linear(input: Value, weight: Value, bias: Value = None, **kwargs: object) -> Value:
    """F.linear of DTensors. Returns NotImplemented for other arguments, such as `out=`, or other types."""
    if kwargs:
        return NotImplemented
    cls = input.__class__
    for parameter in (weight, bias):
        if parameter is not None and parameter.__class__ is not cls:
            return NotImplemented
    if not issubclass(cls, Wrapper) or weight.ndim != 2:
        return NotImplemented
    return Linear.apply(input, weight, bias) if is_grad_enabled() else _forward(input, weight, bias)


class Linear(AutogradFunction):
    """input [..., k], weight [o, k], bias [o] or None -> [..., o]."""

    @staticmethod
    def forward(ctx: Ctx, input: Wrapper, weight: Wrapper, bias: Wrapper | None) -> Value:
        ctx.save_for_backward(input, weight)
        return _forward(input, weight, bias)

    @staticmethod
    def backward(ctx: Ctx, grad: Wrapper) -> tuple[Any, Any, Any]:
        source, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if is_grad_enabled():  # a double backward: use ops that autograd records
            grads = iter(gradients(grad, source, weight, *needs))
        else:
            grads = iter(type(grad).__torch_dispatch__(linear_backward, (), (grad, source, weight, *needs)))  # type: ignore[call-arg]
        return tuple(next(grads) if need else None for need in needs)  # type: ignore[return-value]


def _forward(input: Wrapper, weight: Wrapper, bias: Wrapper | None) -> Value:
    """Runs the layer's plan, below autograd."""
    args = (input, weight) if bias is None else (input, weight, bias)
    return type(input).__torch_dispatch__(linear_forward, (), args)  # type: ignore[call-arg]


# ---- the ops ----

linear_forward = aten.linear.default


def gradients(
    grad: Tensor,  # [..., o]
    input: Tensor,  # [..., k]
    weight: Tensor,  # [o, k]
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> list[Tensor]:
    """Returns the requested gradients in the order input, weight, bias."""
    results = []
    if need_input:
        results.append(grad.matmul(weight))
    flat = _matrix(grad) if need_weight or need_bias else grad
    if need_weight:
        results.append(flat.t().mm(_matrix(input)))
    if need_bias:
        results.append(flat.sum(0))
    return results


def _matrix(tensor: Tensor) -> Tensor:
    """[..., n] -> [rows, n]. reshape(-1, n) would fail if n is 0, because it could not infer the number of rows."""
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)


def _metadata(
    grad: Tensor, input: Tensor, weight: Tensor, need_input: bool, need_weight: bool, need_bias: bool
) -> list[Tensor]:
    metas = [input.new_empty(input.shape, dtype=grad.dtype)] if need_input else []
    if need_weight:
        metas.append(weight.new_empty(weight.shape, dtype=grad.dtype))
    return [*metas, grad.new_empty(weight.shape[0])] if need_bias else metas


linear_backward = new_op(
    "linear_backward(Tensor grad, Tensor input, Tensor weight, bool need_input, bool need_weight, bool need_bias)"
    " -> Tensor[]",
    gradients,
    _metadata,
)


# ---- rules of these ops ----


@rule(linear_forward)
def forward_rows(call: OpCall) -> Strategy:
    """(input, weight, bias?). A bias is replicated if the result is a pending sum, and only one rank adds it."""
    if call.inputs[1].ndim != 2:  # torch also accepts a vector
        return Strategy([])
    lead = free_labels(call.inputs[0].ndim - 1, skip="ko")
    count = len(call.inputs)
    return Strategy(
        [
            *label_rows(lead + "ok", (lead + "k", "ok", "o")[:count], (lead + "o",), SUM),
            *pending_rows(call, (0,), (1,)),
        ],
        localize=_bias_once if count == 3 else None,
        any_lengths=True,
    )


def _bias_once(placed: PlacedSpecs) -> Callable[..., Tensor]:
    """Returns the layer, with the bias only on the first of the ranks whose results are summed."""
    (output,) = placed.outputs
    assert output is not None
    if neutral_term(output) is None:
        return kernel_of(linear_forward)
    return lambda x, weight, bias: kernel_of(linear_forward)(x, weight)


@rule(linear_backward)
def backward_rows(call: OpCall) -> Strategy:
    """(grad, input, weight) -> the requested gradients."""
    lead = free_labels(call.inputs[0].ndim - 1, skip="ko")
    inputs = (lead + "o", lead + "k", "ok")
    needs = (("need_input", lead + "k"), ("need_weight", "ok"), ("need_bias", "o"))
    outputs = [dims for name, dims in needs if call[name]]
    # With the label k sharded, the gradient of the bias is complete on each rank, not a sum.
    return Strategy(
        [
            *label_rows(lead + "o", inputs, outputs, SUM),
            *label_rows("k", inputs, outputs),
            *pending_rows(call, (0,)),
        ],
        local_op=gradients,
    )


# ---- products with contracted dims ----

# Contracted labels (those missing in the output) result in a pending sum.
PRODUCTS = by_op({"mm _int_mm": "mk,kn->mn", "bmm": "bmk,bkn->bmn", "mv": "mk,k->m", "dot vdot": "k,k->"})
# beta * bias + alpha * product
PRODUCTS_WITH_BIAS = by_op(
    {
        "addmm addmm_": "mk,kn->mn",
        "baddbmm baddbmm_": "bmk,bkn->bmn",
        "addmv addmv_": "mk,k->m",
        "addbmm addbmm_": "bmk,bkn->mn",
        "addr addr_": "m,n->mn",
    }
)


def einsum_rows(call: OpCall, equation: str) -> list[PlacementRow]:
    """Returns rows for a product of tensors whose dims have the labels of `equation`."""
    operands, output = equation.split("->")
    inputs = operands.split(",")
    # The product is linear in each factor, so one factor may be a pending sum while the others are replicated.
    return label_rows(dict.fromkeys("".join(inputs)), inputs, [output], SUM) + pending_rows(
        call, *[(i,) for i in range(len(inputs))], count=len(inputs)
    )


@rule(*PRODUCTS)
def product(call: OpCall) -> Strategy:
    return Strategy(einsum_rows(call, PRODUCTS[call.op]))


@rule(*PRODUCTS_WITH_BIAS)
def product_with_bias(call: OpCall) -> Strategy:
    """The bias broadcasts to the output. If the output is a pending sum, the bias is one of its terms."""
    bias, shape = call.inputs[0], call.outputs[0].shape if call.outputs[0] is not None else ()
    rows = []
    for row in einsum_rows(call, PRODUCTS_WITH_BIAS[call.op]):
        (placed,) = row.outputs
        bias_placement = broadcast_placement(bias, placed.dim, shape) if isinstance(placed, Shard) else placed
        rows.append(PlacementRow((bias_placement, *row.inputs), row.outputs))
    return Strategy(rows)


@rule(aten._trilinear.default)
def trilinear(call: OpCall) -> Strategy:
    """Product of three factors. Each lacks the dims of its `expand` argument; the dims in `sumdim` are contracted."""
    total = free_labels(call.inputs[0].ndim + len(call["expand1"]))
    factors = [
        "".join(label for d, label in enumerate(total) if d not in call[f"expand{i}"]) for i in (1, 2, 3)
    ]
    if any(len(labels) != spec.ndim for labels, spec in zip(factors, call.inputs, strict=True)):
        return Strategy([])
    output = "".join(label for d, label in enumerate(total) if d not in call["sumdim"])
    return Strategy(einsum_rows(call, f"{','.join(factors)}->{output}"))
