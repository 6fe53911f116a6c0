"""Autograd beyond `backward`: checkpoints, hooks, higher orders, functorch, custom functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
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
