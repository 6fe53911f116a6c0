"""Cases of elementwise ops, in groups: their in-place forms, gradients and masks."""

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
    outs = [getattr(u.clone(), name)(v) for name in ("sub_", "mul_", "eq_", "floor_divide_", "copy_")]
    outs += [u.clone().add_(v, alpha=2), u.clone().div_(v + 1), u.clone().mul_(3).div_(7).neg_()]
    outs += [u.clone().lerp_(v, 0.3), u.clone().lerp_(v, v), u.clone().addcmul_(v, v, value=2)]
    outs += [u.clone().addcdiv_(v, v + 1, value=2), u.clone().relu_().conj_physical_()]
    outs += [aten.floor_divide.Scalar(u, 0.3), aten.floor_divide_.Scalar(u.clone(), 0.3)]
    outs += [u.clone().masked_fill_(a > 0, value) for value in (2.0, 0.0, v.sum())]
    return total([*outs, F.hardswish(u.clone(), inplace=True), F.mish(u.clone(), inplace=True)])


def _linear(a: Any, b: Any) -> Any:
    """Ops through which a pending sum may pass."""
    outs = [torch.lerp(a, b, 0.3), torch.lerp(a, b, torch.tensor(0.3)), torch.where(a > 0, a, b), +a]
    outs += [torch.addcmul(a, b, b, value=2), torch.addcdiv(a, b, b * b + 1), torch.rsub(a, b, alpha=2)]
    outs += [a.masked_fill(b > 0, value) for value in (0, 3, torch.tensor(2.0))]
    return total([*outs, torch.maximum(a, b), torch.minimum(a, b)])


def _written(a: Any, b: Any) -> Any:
    """What is overwritten need not be read."""
    outs = [torch.floor_divide(a.exp(), b.exp()), aten.copy(a, b)]
    outs += [aten.fill.Scalar(a, 2), aten.fill.Tensor(a, b.sum())]
    return total(
        outs
        + [copy(a) for copy in (aten.lift_fresh, aten.detach_copy, aten.alias_copy, aten.lift_fresh_copy)]
    )


def _complex(a: Any, b: Any) -> Any:
    z = torch.complex(a, b)
    pairs = torch.view_as_real(z)
    again = torch.view_as_complex(pairs * 2)
    outs = [z.real, z.imag, z.abs(), (z * z.conj()).real, z.resolve_conj().conj().imag, again.imag]
    outs += [aten.conj_physical(z).imag, aten._conj_physical(z).imag]
    return total([*outs, torch.polar(a.exp(), b).real])


def _complex_copies(a: Any, b: Any) -> Any:
    z = torch.complex(a, b)
    return total([aten.view_as_real_copy(z)[..., 0], aten.view_as_complex_copy(torch.view_as_real(z)).imag])


def _looked_up(a: Any, b: Any) -> Any:
    table = a.new_zeros(4) + index_for(a, [-1.0, -0.2, 0.5, 1.5], Replicate())
    rows = b.sort(-1).values
    outs = [torch.bucketize(a, table), torch.searchsorted(table, a, right=True)]
    outs += [torch.searchsorted(rows, a), torch.searchsorted(rows, a, sorter=b.argsort(-1))]
    return total([*outs, torch.isin(a.round(), table.round()), torch.isin(a.round(), 1.0)])


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
