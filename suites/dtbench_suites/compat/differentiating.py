"""Autograd beyond `backward`: checkpoints, hooks, higher orders, functorch, custom functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from dtbench_suites.compat.program import Given, program, randn


def _leaf(w: Given, *places: str) -> torch.Tensor:
    return w.place(randn(8, 4), *(places or ("S(0)",)), grad=True)


def _checkpointed(w: Given, fn: Any, **options: Any) -> Any:
    x = _leaf(w)
    checkpoint(fn, x, **options).pow(2).sum().backward()
    return x.grad


@program("checkpoint")
def checkpoint_not_reentrant(w: Given) -> Any:
    return _checkpointed(w, lambda t: t.softmax(0).sin(), use_reentrant=False)


@program("checkpoint")
def checkpoint_reentrant(w: Given) -> Any:
    return _checkpointed(w, lambda t: t.softmax(0).sin(), use_reentrant=True)


@program("checkpoint")
def checkpoint_of_a_parallel_block(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.parallelize(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), {"0": "col", "2": "row"}
    )
    x = randn(4, 8).requires_grad_()
    checkpoint(net, x, use_reentrant=False).pow(2).sum().backward()
    return x.grad, [p.grad for p in net.parameters()]


@program("checkpoint")
def checkpoint_sequential_of_modules(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), "S(0)")
    x = _leaf(w, "R")
    checkpoint_sequential(net, 2, x, use_reentrant=False).pow(2).sum().backward()
    return x.grad, [p.grad for p in net.parameters()]


@program("checkpoint")
def checkpoints_nested(w: Given) -> Any:
    def inner(t: Any) -> Any:
        return checkpoint(lambda u: u.exp().cumsum(0), t, use_reentrant=False)

    return _checkpointed(w, lambda t: inner(t).sin(), use_reentrant=False)


@program("checkpoint")
def checkpoint_that_redistributes(w: Given) -> Any:
    to = w.move("R")
    return _checkpointed(w, lambda t: to(t).softmax(0), use_reentrant=False)


@program("checkpoint")
def checkpoint_with_selective_policy(w: Given) -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    saved = [torch.ops.aten.mm.default]
    return _checkpointed(
        w,
        lambda t: (t @ t.t()).relu(),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(saved),
    )


@program("checkpoint")
def checkpoint_keeps_random_numbers(w: Given) -> Any:
    torch.manual_seed(5)
    return _checkpointed(w, lambda t: nn.functional.dropout(t, 0.5).sin(), use_reentrant=False)


@program("checkpoint")
def checkpoint_with_keywords_and_numbers(w: Given) -> Any:
    def fn(t: Any, factor: float, *, other: Any) -> Any:
        return {"out": t * factor, "rest": [other.exp(), factor]}

    x, y = _leaf(w), _leaf(w, "R")
    found = checkpoint(fn, x, 2.0, other=y, use_reentrant=False)
    (found["out"] * found["rest"][0]).sum().backward()
    return x.grad, y.grad, found["rest"][1]


@program("checkpoint")
def checkpoint_of_blocks_trained(w: Given) -> Any:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
    for block in blocks:
        w.parallelize(block, {"0": "col", "2": "row"})
    params = [p for block in blocks for p in block.parameters()]
    optimizer = torch.optim.AdamW(params, 0.1)
    for number in range(2):
        x = randn(4, 8, seed=number)
        for reentrant, block in zip((False, True), blocks, strict=True):
            x = x + checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=reentrant)
        x.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return params


@program("checkpoint")
def checkpoint_under_autocast(w: Given) -> Any:
    x, weight = _leaf(w, "R"), w.place(randn(8, 4, seed=1), "S(0)", grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = checkpoint(nn.functional.linear, x, weight, use_reentrant=False)
    out.float().sum().backward()
    return out.dtype is torch.bfloat16, weight.grad


@program("autograd")
def tensor_hook(w: Given) -> Any:
    x = _leaf(w)
    x.register_hook(lambda g: g * 3)
    x.pow(2).sum().backward()
    return x.grad


@program("autograd")
def hook_after_accumulation(w: Given) -> Any:
    x = _leaf(w)
    seen: list[Any] = []
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad * 2))
    x.pow(2).sum().backward()
    return seen


def _doubled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return (inputs[0] * 2,)


@program("autograd")
def full_backward_hook_of_a_module(w: Given) -> Any:
    net: Any = w.shard(nn.Linear(4, 8), "S(0)")
    nn.init.ones_(net.weight)
    net.register_full_backward_hook(_doubled)
    x = _leaf(w, "R")
    net(x).pow(2).sum().backward()
    return x.grad


@program("autograd")
def forward_hooks_of_a_module(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.Linear(4, 8), "S(0)")
    net.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    net.register_forward_hook(lambda m, a, out: out + 1)
    return net(_leaf(w, "R"))


@program("autograd")
def create_graph(w: Given) -> Any:
    x = _leaf(w)
    (g,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    g.pow(2).sum().backward()
    return g, x.grad


@program("autograd")
def gradient_penalty_of_a_linear(w: Given) -> Any:
    torch.manual_seed(1)
    net, x = w.shard(nn.Linear(4, 8), "S(0)"), _leaf(w, "R")
    (g,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
    g.norm().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@program("autograd")
def func_grad(w: Given) -> Any:
    return grad(lambda t: t.softmax(0).pow(2).sum())(_leaf(w).detach())


@program("autograd")
def func_grad_of_functional_call(w: Given) -> Any:
    torch.manual_seed(1)
    net, x = w.shard(nn.Linear(4, 8), "S(0)"), _leaf(w, "R").detach()
    params = {name: p.detach() for name, p in net.named_parameters()}
    return grad(lambda p: functional_call(net, p, (x,)).pow(2).sum())(params)


@program("autograd")
def func_vjp(w: Given) -> Any:
    x = _leaf(w).detach()
    out, back, *_ = vjp(lambda t: t.sin() * 2, x)
    return out, back(out)


@program("autograd")
def func_jvp(w: Given) -> Any:
    x = _leaf(w).detach()
    return jvp(lambda t: t.sin() * 2, (x,), (x,))


@program("autograd")
def func_jvp_of_softmax(w: Given) -> Any:
    x = _leaf(w).detach()
    return jvp(lambda t: t.softmax(0), (x,), (x,))


@program("autograd")
def func_jacrev(w: Given) -> Any:
    return jacrev(lambda t: t.sum(0).sin())(_leaf(w).detach())


@program("autograd")
def func_hessian(w: Given) -> Any:
    return hessian(lambda t: t.pow(3).sum())(w.place(randn(4), "S(0)"))


@program("autograd")
def func_vmap(w: Given) -> Any:
    return vmap(lambda t: t.sin() * 2)(_leaf(w, "S(1)").detach())


@program("autograd")
def func_vmap_with_a_captured_tensor(w: Given) -> Any:
    weight = w.place(randn(4, 4, seed=1), "R")
    return vmap(lambda t: t @ weight)(w.place(randn(8, 4), "R"))


@program("autograd")
def forward_mode(w: Given) -> Any:
    import torch.autograd.forward_ad as fwd

    x = _leaf(w).detach()
    with fwd.dual_level():
        return fwd.unpack_dual(fwd.make_dual(x, x * 2).sin()).tangent


@program("autograd")
def torch_autograd_functional_jacobian(w: Given) -> Any:
    return torch.autograd.functional.jacobian(lambda t: t.sum(0).exp(), _leaf(w).detach())


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Any) -> Any:
        ctx.save_for_backward(t)
        return t * t

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (t,) = ctx.saved_tensors
        return 5 * t * gradients[0]


@program("autograd")
def custom_function(w: Given) -> Any:
    x = _leaf(w)
    _Double.apply(x).softmax(0).pow(2).sum().backward()
    return x.grad


@program("autograd")
def saved_tensors_hooks(w: Given) -> Any:
    x = _leaf(w)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        out = x.sin().pow(2)
    out.sum().backward()
    return x.grad


@program("autograd")
def save_on_cpu(w: Given) -> Any:
    x = _leaf(w)
    with torch.autograd.graph.save_on_cpu():
        out = x.softmax(0).pow(2)
    out.sum().backward()
    return x.grad


@program("autograd")
def anomaly_mode(w: Given) -> Any:
    x = _leaf(w)
    with torch.autograd.detect_anomaly(check_nan=True):
        x.softmax(0).pow(2).sum().backward()
    return x.grad


@program("autograd")
def anomaly_mode_sees_nan(w: Given) -> Any:
    x = w.place(torch.zeros(8, 4), "S(0)", grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        (x.sqrt() * 0).sum().backward()
    return x.grad


@program("autograd")
def backward_twice_is_refused(w: Given) -> Any:
    x = _leaf(w)
    loss = x.exp().sum()
    loss.backward()
    loss.backward()
    return x.grad


@program("autograd")
def backward_with_a_given_gradient(w: Given) -> Any:
    x = _leaf(w)
    out = x.sin()
    out.backward(w.place(randn(8, 4, seed=2), "R"))
    return x.grad


@program("autograd")
def backward_with_inputs(w: Given) -> Any:
    x, y = _leaf(w), _leaf(w, "R")
    (x * y).sum().backward(inputs=[y])
    return x.grad is None, y.grad


@program("autograd")
def retained_gradient_of_an_intermediate(w: Given) -> Any:
    x = _leaf(w)
    y = x * 2
    y.retain_grad()
    y.softmax(0).pow(2).sum().backward()
    return x.grad, y.grad


@program("autograd")
def batched_gradients(w: Given) -> Any:
    x = w.place(randn(4), "R", grad=True)
    return torch.autograd.grad(x.sin() * 2, x, w.place(torch.eye(4), "R"), is_grads_batched=True)


@program("autograd")
def multi_grad_hook(w: Given) -> Any:
    x, y = _leaf(w), _leaf(w)
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook((x, y), lambda gs: seen.extend(gs))
    (x * y).sum().backward()
    return seen


@program("autograd")
def pending_gradient_of_a_replicated_leaf(w: Given) -> Any:
    x, y = _leaf(w, "R"), w.place(randn(8, 4, seed=2), "S(0)")
    (x * y).sum().backward()
    return x.grad


@program("autograd")
def func_jacfwd(w: Given) -> Any:
    return jacfwd(lambda t: t.cumsum(0).sin())(w.place(randn(4), "S(0)"))


@program("autograd")
def func_gradient_of_every_sample(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.Linear(4, 2), "R")
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(p: Any, x: Any) -> Any:
        return functional_call(net, p, (x[None],)).pow(2).sum()

    return vmap(grad(loss), in_dims=(None, 0))(params, w.place(randn(8, 4), "R"))


@program("autograd")
def func_vmap_of_the_sharded_dim(w: Given) -> Any:
    x, y = _leaf(w).detach(), w.place(randn(4, 8, seed=1), "S(1)")
    return vmap(torch.dot, in_dims=(0, 1))(x, y), vmap(lambda t: t.softmax(0), out_dims=1)(x)


@program("autograd")
def func_linearized(w: Given) -> Any:
    x = _leaf(w).detach()
    out, tangent = linearize(lambda t: t.sin() * 2, x)
    return out, tangent(x)


@program("autograd")
def func_grad_and_value_with_more_returned(w: Given) -> Any:
    x = _leaf(w).detach()
    return grad_and_value(lambda t: (t.exp().sum(), t * 2), has_aux=True)(x)


@program("autograd")
def products_with_hessian_and_jacobian(w: Given) -> Any:
    x, v = w.place(randn(6), "S(0)"), w.place(randn(6, seed=1), "R")
    f = torch.autograd.functional
    return [
        f.hvp(lambda t: t.sin().sum(), x, v),
        f.vhp(lambda t: t.exp().sum(), x, v),
        f.vjp(torch.sin, x, v),
    ]


@program("autograd")
def gradients_checked_numerically(w: Given) -> Any:
    x = w.place(randn(4).double(), "R", grad=True)
    return torch.autograd.gradcheck(lambda t: t.sin().softmax(0), (x,), fast_mode=True)


class _Scaled(torch.autograd.Function):
    """Of the newer form, with one result that has no gradient and one input that is written."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: Any, factor: float) -> Any:
        return t * factor, t.argmax(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor * 3, None


@program("autograd")
def custom_function_with_setup_context(w: Given) -> Any:
    x = _leaf(w)
    out, largest = _Scaled.apply(x, 2.0)
    out.pow(2).sum().backward()
    return out, largest, x.grad, vmap(lambda t: _Scaled.apply(t, 2.0)[0])(_leaf(w, "R").detach()[None])


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Any) -> Any:
        ctx.mark_dirty(t)
        return t.mul_(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


@program("autograd")
def custom_function_that_writes(w: Given) -> Any:
    x = _leaf(w)
    y = x * 1
    _InPlace.apply(y)
    y.pow(2).sum().backward()
    return y, x.grad


@program("autograd")
def custom_function_differentiated_twice(w: Given) -> Any:
    x = _leaf(w)
    (g,) = torch.autograd.grad(_Double.apply(x).sum(), x, create_graph=True)
    g.pow(2).sum().backward()
    return g, x.grad


@program("autograd")
def saved_tensors_written(w: Given) -> Any:
    x = _leaf(w)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = x * 2
        z = y * y
        y.mul_(3)
        z.sum().backward()
    return y, x.grad


@program("autograd")
def saved_tensors_hooks_refused(w: Given) -> Any:
    x = _leaf(w)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)


@program("autograd")
def gradient_of_an_edge(w: Given) -> Any:
    x = _leaf(w)
    y = x * 2
    edge = torch.autograd.graph.get_gradient_edge(y)
    out = y.softmax(0).pow(2).sum()
    return torch.autograd.grad(out, edge)


@program("autograd")
def gradients_of_what_is_unused(w: Given) -> Any:
    x, y = _leaf(w), _leaf(w, "R")
    free = torch.autograd.grad(x.sin().sum(), (x, y), allow_unused=True)
    return free[0], free[1] is None, torch.autograd.grad(x.sum(), (x, y), materialize_grads=True)


@program("autograd")
def gradients_accumulate_over_placements(w: Given) -> Any:
    x, found = _leaf(w), []
    for place in ("S(0)", "R", "S(1)"):
        w.move(place)(x * 2).pow(2).sum().backward()
        found.append(_clone(x.grad))
    x.grad = w.place(randn(8, 4, seed=3), "R")
    x.sum().backward()
    return found, x.grad


def _clone(t: torch.Tensor | None) -> torch.Tensor:
    assert t is not None
    return t.clone()


@program("autograd")
def leaves_frozen_and_thawed(w: Given) -> Any:
    x = _leaf(w)
    x.requires_grad_(False)
    y = x * 2
    x.requires_grad_(True)
    (x * y).sum().backward()
    return x.grad, y.requires_grad, y.is_leaf


@program("autograd")
def gradients_of_several_results(w: Given) -> Any:
    x, v = _leaf(w), w.place(randn(8, 4, seed=1), "S(1)")
    torch.autograd.backward([x.sin(), x.exp()], [v, v * 2])
    return x.grad
