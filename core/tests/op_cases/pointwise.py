"""Cases of elementwise ops, in groups: their in-place forms, gradients and masks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import UB, A, B, Op, index_for, total, values
from dtbench_core import Replicate

aten = torch.ops.aten


def _activations(a: Any) -> Any:
    names = "hardtanh relu6 hardswish hardsigmoid logsigmoid elu celu selu softplus hardshrink softshrink leaky_relu"
    functions = [getattr(F, name) for name in (*names.split(), "mish", "silu", "gelu", "sigmoid", "tanh")]
    functions += [torch.logit, lambda t: F.threshold(t, 0.1, 0.0)]
    return total([f(a.sigmoid() * 1.2 - 0.1 if f is not torch.logit else a.sigmoid()) for f in functions])


def _in_place(a: Any, b: Any) -> Any:
    """Ops that write to a tensor of a's placement, b following."""
    u, v = a.sigmoid(), b.sigmoid()
    return total(
        [
            u.clone().add_(v, alpha=2),
            u.clone().sub_(v),
            u.clone().mul_(v),
            u.clone().div_(v + 1),
            u.clone().mul_(3).div_(7).neg_(),
            u.clone().lerp_(v, 0.3),
            u.clone().lerp_(v, v),
            u.clone().addcmul_(v, v, value=2),
            u.clone().addcdiv_(v, v + 1, value=2),
            u.clone().eq_(v),
            u.clone().floor_divide_(v),
            aten.floor_divide.Scalar(u, 0.3),
            aten.floor_divide_.Scalar(u.clone(), 0.3),
            u.clone().masked_fill_(a > 0, 2.0),
            u.clone().masked_fill_(a > 0, 0.0),
            u.clone().masked_fill_(a > 0, v.sum()),
            u.clone().copy_(v),
            F.hardswish(u.clone(), inplace=True),
            F.mish(u.clone(), inplace=True),
            u.clone().relu_().conj_physical_(),
        ]
    )


def _linear(a: Any, b: Any) -> Any:
    """Ops through which a pending sum may pass."""
    return total(
        [
            torch.lerp(a, b, 0.3),
            torch.lerp(a, b, torch.tensor(0.3)),
            torch.addcmul(a, b, b, value=2),
            torch.addcdiv(a, b, b * b + 1),
            torch.rsub(a, b, alpha=2),
            torch.where(a > 0, a, b),
            a.masked_fill(b > 0, 0),
            a.masked_fill(b > 0, 3),
            a.masked_fill(b > 0, torch.tensor(2.0)),
            torch.maximum(a, b),
            torch.minimum(a, b),
            +a,
        ]
    )


def _written(a: Any, b: Any) -> Any:
    """What is overwritten need not be read."""
    return total(
        [
            torch.floor_divide(a.exp(), b.exp()),
            aten.copy(a, b),
            aten.fill.Scalar(a, 2),
            aten.fill.Tensor(a, b.sum()),
            aten.lift_fresh(a),
            aten.detach_copy(a),
            aten.alias_copy(a),
            aten.lift_fresh_copy(a),
        ]
    )


def _complex(a: Any, b: Any) -> Any:
    z = torch.complex(a, b)
    pairs = torch.view_as_real(z)
    again = torch.view_as_complex(pairs * 2)
    return total(
        [
            z.real,
            z.imag,
            (z * z.conj()).real,
            again.imag,
            aten.conj_physical(z).imag,
            aten._conj_physical(z).imag,
            torch.polar(a.exp(), b).real,
            z.abs(),
            z.resolve_conj().conj().imag,
        ]
    )


def _complex_copies(a: Any, b: Any) -> Any:
    z = torch.complex(a, b)
    return total([aten.view_as_real_copy(z)[..., 0], aten.view_as_complex_copy(torch.view_as_real(z)).imag])


def _looked_up(a: Any, b: Any) -> Any:
    table = a.new_zeros(4) + index_for(a, [-1.0, -0.2, 0.5, 1.5], Replicate())
    rows = b.sort(-1).values
    return total(
        [
            torch.bucketize(a, table),
            torch.searchsorted(table, a, right=True),
            torch.searchsorted(rows, a),
            torch.searchsorted(rows, a, sorter=b.argsort(-1)),
            torch.isin(a.round(), table.round()),
            torch.isin(a.round(), 1.0),
        ]
    )


OPS: dict[str, Op] = {
    "activations": Op(_activations),
    "in_place": values(_in_place, B, UB),
    "linear_ops": Op(_linear, B, UB),
    "written": values(_written, B, UB),
    "complex": Op(_complex, B, UB),
    "complex_copies": values(_complex_copies, B, UB),
    "looked_up": values(_looked_up, B, UB),
    "prelu": Op(F.prelu, ((8, 4), (4,)), ((5, 3), (3,))),
    "prelu_one": Op(F.prelu, ((8, 4, 2), (1,)), ((5, 3), (1,))),
    "glu": Op(lambda a: F.glu(a, -1), A, ((5, 2),)),
}
