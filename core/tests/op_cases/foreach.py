"""Cases of ops on lists of tensors: every `_foreach_*` overload, fused steps, norms, loss scaling."""

from typing import Any

import torch
from torch._ops import OpOverload

from core.tests.op_case import UB, B, Op, flat, index_for, values
from dtbench_core import Replicate
from dtbench_core.rules.base import rules_by_op

aten = torch.ops.aten


def _overloads() -> dict[str, OpOverload]:
    named = {str(op): op for op in rules_by_op}
    return {name: op for name, op in sorted(named.items()) if name.startswith("aten._foreach_")}


def _arguments(op: OpOverload, tensors: list[Any], like: Any) -> tuple[list[Any], dict[str, Any]]:
    """What the schema asks for: lists are the tensors, turned by one for each further list."""
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
        results = op(*args, **kwargs)
        outs += results or args[0]
    return flat(outs)


def _linear(a: Any, b: Any) -> Any:
    """What pending sums pass through."""
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


OPS: dict[str, Op] = {
    "foreach": values(_every_overload, B, UB, places=1),
    "foreach_linear": Op(_linear, B, UB),
    "foreach_in_place": values(_in_place_linear, B, UB),
    "foreach_norm": values(_norms, B, UB),
    "fused_steps": values(_fused, B, UB, places=2),
    "unscaled": values(_unscaled, B, UB),
}
