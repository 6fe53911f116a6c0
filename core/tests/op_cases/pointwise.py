"""Cases of elementwise ops, in groups: in-place forms, gradients, masks; ops on lists of tensors (`_foreach_*`)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload

from core.tests.op_case import UB, A, B, Op, flat, index_for, total, values
from dtbench_core import Replicate
from dtbench_core.rules.base import rules_by_op

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
    """Calls ops that overwrite their input without reading it."""
    outs = [torch.floor_divide(a.exp(), b.exp()), aten.copy(a, b)]
    outs += [aten.fill.Scalar(a, 2), aten.fill.Tensor(a, b.sum())]
    return total(
        outs
        + [copy(a) for copy in (aten.lift_fresh, aten.detach_copy, aten.alias_copy, aten.lift_fresh_copy)]
    )


def _complex(a: Any, b: Any) -> Any:
    z = torch.complex(a, b)
    again = torch.view_as_complex(torch.view_as_real(z) * 2)
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


# ---- lists of tensors ----


def _overloads() -> dict[str, OpOverload]:
    named = {str(op): op for op in rules_by_op}
    return {name: op for name, op in sorted(named.items()) if name.startswith("aten._foreach_")}


def _arguments(op: OpOverload, tensors: list[Any], like: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments for a schema. A list has all tensors, rotated by one for each further list."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    lists = 0
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            value: Any = [t.clone() for t in (*tensors[lists:], *tensors[:lists])]
            lists += 1
        elif kind == "Tensor":
            value = index_for(like, 0.5, Replicate())
        elif kind == "List[number]":
            value = [2.0, 0.5, 1.5][: len(tensors)]
        elif kind == "number":
            value = 2.0
        else:
            continue
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _every_overload(a: Any, b: Any) -> Any:
    """All of them, in place too, on columns placed differently; values in (0, 1), where all are defined."""
    tensors = [a.sigmoid(), b.sigmoid(), (a + b).sigmoid()]
    outs = []
    for op in _overloads().values():
        args, kwargs = _arguments(op, tensors, a)
        outs += op(*args, **kwargs) or args[0]
    return flat(outs)


def _foreach_linear(a: Any, b: Any) -> Any:
    """Calls ops that keep pending sums."""
    outs = [
        *torch._foreach_add([a, b], [b, a], alpha=2),
        *torch._foreach_mul([a, b], 3.0),
        *torch._foreach_mul([a, b], torch.tensor(0.5)),
        *torch._foreach_neg([a, b]),
        *torch._foreach_lerp([a, b], [b, a], 0.25),
    ]
    return flat(outs)


def _in_place_linear(a: Any, b: Any) -> Any:
    """Pending sums that stay where they are."""
    tensors = [a * 1, b * 1]
    torch._foreach_mul_(tensors, 0.5)
    torch._foreach_mul_(tensors, torch.tensor(3.0))
    torch._foreach_neg_(tensors)
    zeros = [a * 1, b * 2]
    torch._foreach_zero_(zeros)
    return flat([*tensors, *zeros])


def _norms(a: Any, b: Any) -> Any:
    outs = [
        *torch._foreach_norm([a, a[:0]]),
        *torch._foreach_norm([a.float(), b.float()], dtype=torch.float64),
    ]
    for order in (1, 2, 3, float("inf")):
        outs += torch._foreach_norm([a, b, a * 1e200, b.sum()], order)
    return flat([n.clamp(max=1e3) + n.log() for n in outs[:1] + outs[2:]] + outs[1:2])


def _fused(a: Any, b: Any) -> Any:
    """Every fused step, the gradients placed as the parameters and otherwise."""
    outs = []
    rates: list[tuple[str, Any]] = [("default", 0.1), ("tensor_lr", torch.tensor(0.1))]
    options = {"weight_decay": 0.1, "maximize": False, "grad_scale": None, "found_inf": None}
    scaled = {**options, "grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)}
    for overload, lr in rates:
        for kwargs in (options, scaled):
            for name in ("_fused_adam_", "_fused_adamw_"):
                parameters, grads = [a.exp(), b.exp()], [b * 1, a * 1]
                state = [[torch.zeros_like(p) for p in parameters] for _ in range(3)]
                steps = [torch.tensor(1.0) for _ in parameters]
                op = getattr(getattr(aten, name), overload)
                adam = {"lr": lr, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": True}
                op(parameters, [g.exp() for g in grads], *state, steps, **adam, **kwargs)
                outs += [*parameters, *state[0], *state[2]]
            parameters, momenta = [a.exp(), b.exp()], [b.exp(), b.exp()]
            sgd = {"lr": lr, "momentum": 0.9, "dampening": 0.1, "nesterov": False, "is_first_step": False}
            getattr(aten._fused_sgd_, overload)(parameters, [b.exp(), a.exp()], momenta, **sgd, **kwargs)
            outs += [*parameters, *momenta]
            if hasattr(aten._fused_adagrad_, overload):
                parameters, sums = [a.exp(), b.exp()], [a.exp(), b.exp()]
                steps = [torch.tensor(1.0) for _ in parameters]
                adagrad = {"lr": lr, "lr_decay": 0.1, "eps": 1e-8}
                step = getattr(aten._fused_adagrad_, overload)
                step(parameters, [b.exp(), a.exp()], sums, steps, **adagrad, **kwargs)
                outs += [*parameters, *sums]
    return flat(outs)


def _unscaled(a: Any, b: Any) -> Any:
    """Loss scaling: finite gradients, and one that is not."""
    outs = []
    for bad in (1.0, float("inf")):
        grads = [a.exp(), (b * 1).where(b != b.max(), bad)]
        overflow = torch.tensor(0.0)
        aten._amp_foreach_non_finite_check_and_unscale_(grads, overflow, torch.tensor(0.5))
        outs += [grads[0], grads[0] * 0 + overflow]
    return flat(outs)


OPS |= {
    "foreach": values(_every_overload, B, UB, places=1),
    "foreach_linear": Op(_foreach_linear, B, UB),
    "foreach_in_place": values(_in_place_linear, B, UB),
    "foreach_norm": values(_norms, B, UB),
    "fused_steps": values(_fused, B, UB, places=2),
    "unscaled": values(_unscaled, B, UB),
}
