"""Autograd beyond `backward`: checkpoints, hooks, higher orders, functorch, custom functions."""

from __future__ import annotations

from typing import Any, ClassVar

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

from dtbench_suites.compat.program import AnyTensor, Cases, Given, Programs, randn


def _checkpointed(w: Given, fn: Any, **options: Any) -> AnyTensor:
    x = w.leaf()
    checkpoint(fn, x, **options).pow(2).sum().backward()
    return x.grad


def _doubled(module: nn.Module, inputs: AnyTensor, outputs: AnyTensor) -> AnyTensor:
    return (inputs[0] * 2,)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: AnyTensor) -> AnyTensor:
        ctx.save_for_backward(t)
        return t * t

    @staticmethod
    def backward(ctx: Any, *gradients: AnyTensor) -> AnyTensor:
        (t,) = ctx.saved_tensors
        return 5 * t * gradients[0]


class _Scaled(torch.autograd.Function):
    """Of the newer form, with one result that has no gradient and one input that is written."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: AnyTensor, factor: float) -> AnyTensor:
        return t * factor, t.argmax(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: AnyTensor, output: AnyTensor) -> None:
        ctx.factor = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: AnyTensor) -> AnyTensor:
        return gradients[0] * ctx.factor * 3, None


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: AnyTensor) -> AnyTensor:
        ctx.mark_dirty(t)
        return t.mul_(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: AnyTensor) -> AnyTensor:
        return gradients[0] * 2


def _clone(t: torch.Tensor | None) -> torch.Tensor:
    assert t is not None
    return t.clone()


class Checkpoint(Programs):
    topic = "checkpoint"
    cases: ClassVar[Cases] = {
        "checkpoint not reentrant": lambda w: _checkpointed(
            w, lambda t: t.softmax(0).sin(), use_reentrant=False
        ),
        "checkpoint reentrant": lambda w: _checkpointed(w, lambda t: t.softmax(0).sin(), use_reentrant=True),
    }

    def checkpoint_of_a_parallel_block(self) -> object:
        net = self.block(8)
        x = randn(4, 8).requires_grad_()
        return self.backward(checkpoint(net, x, use_reentrant=False), x, net)

    def checkpoint_sequential_of_modules(self) -> object:
        net = self.seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), "S(0)")
        x = self.leaf("R")
        return self.backward(checkpoint_sequential(net, 2, x, use_reentrant=False), x, net)

    def checkpoints_nested(self) -> object:
        def inner(t: AnyTensor) -> AnyTensor:
            return checkpoint(lambda u: u.exp().cumsum(0), t, use_reentrant=False)

        return _checkpointed(self, lambda t: inner(t).sin(), use_reentrant=False)

    def checkpoint_that_redistributes(self) -> object:
        to = self.move("R")
        return _checkpointed(self, lambda t: to(t).softmax(0), use_reentrant=False)

    def checkpoint_with_selective_policy(self) -> object:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        saved = [torch.ops.aten.mm.default]
        return _checkpointed(
            self,
            lambda t: (t @ t.t()).relu(),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(saved),
        )

    def checkpoint_keeps_random_numbers(self) -> object:
        torch.manual_seed(5)
        return _checkpointed(self, lambda t: nn.functional.dropout(t, 0.5).sin(), use_reentrant=False)

    def checkpoint_with_keywords_and_numbers(self) -> object:
        def fn(t: AnyTensor, factor: float, *, other: Any) -> AnyTensor:
            return {"out": t * factor, "rest": [other.exp(), factor]}

        x, y = self.leaf(), self.leaf("R")
        found = checkpoint(fn, x, 2.0, other=y, use_reentrant=False)
        return self.backward(found["out"] * found["rest"][0], x, y, power=1), found["rest"][1]

    def checkpoint_of_blocks_trained(self) -> object:
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
        for block in blocks:
            self.parallelize(block, {"0": "col", "2": "row"})
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

    def checkpoint_under_autocast(self) -> object:
        x, weight = self.leaf("R"), self.place(randn(8, 4, seed=1), "S(0)", grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(nn.functional.linear, x, weight, use_reentrant=False)
        return self.backward(out.float(), weight, power=1), out.dtype is torch.bfloat16


class Autograd(Programs):
    topic = "autograd"
    cases: ClassVar[Cases] = {
        "func grad": lambda w: grad(lambda t: t.softmax(0).pow(2).sum())(w.leaf().detach()),
        "func jacrev": lambda w: jacrev(lambda t: t.sum(0).sin())(w.leaf().detach()),
        "func hessian": lambda w: hessian(lambda t: t.pow(3).sum())(w.place(randn(4), "S(0)")),
        "func vmap": lambda w: vmap(lambda t: t.sin() * 2)(w.leaf("S(1)").detach()),
        "func jacfwd": lambda w: jacfwd(lambda t: t.cumsum(0).sin())(w.place(randn(4), "S(0)")),
        "custom function": lambda w: w.through(lambda x: _Double.apply(x).softmax(0)),
    }

    def tensor_hook(self) -> object:
        x = self.leaf()
        x.register_hook(lambda g: g * 3)
        return self.backward(x, x)

    def hook_after_accumulation(self) -> object:
        x = self.leaf()
        seen: list[AnyTensor] = []
        x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad * 2))
        x.pow(2).sum().backward()
        return seen

    def full_backward_hook_of_a_module(self) -> object:
        net: Any = self.shard(nn.Linear(4, 8), "S(0)")
        nn.init.ones_(net.weight)
        net.register_full_backward_hook(_doubled)
        x = self.leaf("R")
        return self.backward(net(x), x)

    def forward_hooks_of_a_module(self) -> object:
        net = self.seeded(lambda: nn.Linear(4, 8), "S(0)")
        net.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
        net.register_forward_hook(lambda m, a, out: out + 1)
        return net(self.leaf("R"))

    def create_graph(self) -> object:
        x = self.leaf()
        (g,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        return self.backward(g, x)

    def gradient_penalty_of_a_linear(self) -> object:
        net, x = self.seeded(lambda: nn.Linear(4, 8), "S(0)"), self.leaf("R")
        (g,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
        g.norm().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    def func_grad_of_functional_call(self) -> object:
        net, x = self.seeded(lambda: nn.Linear(4, 8), "S(0)"), self.leaf("R").detach()
        params = {name: p.detach() for name, p in net.named_parameters()}
        return grad(lambda p: functional_call(net, p, (x,)).pow(2).sum())(params)

    def func_vjp(self) -> object:
        x = self.leaf().detach()
        out, back, *_ = vjp(lambda t: t.sin() * 2, x)
        return out, back(out)

    def func_jvp(self) -> object:
        x = self.leaf().detach()
        return jvp(lambda t: t.sin() * 2, (x,), (x,))

    def func_jvp_of_softmax(self) -> object:
        x = self.leaf().detach()
        return jvp(lambda t: t.softmax(0), (x,), (x,))

    def func_vmap_with_a_captured_tensor(self) -> object:
        weight = self.place(randn(4, 4, seed=1), "R")
        return vmap(lambda t: t @ weight)(self.rows("R"))

    def forward_mode(self) -> object:
        import torch.autograd.forward_ad as fwd

        x = self.leaf().detach()
        with fwd.dual_level():
            return fwd.unpack_dual(fwd.make_dual(x, x * 2).sin()).tangent

    def torch_autograd_functional_jacobian(self) -> object:
        return torch.autograd.functional.jacobian(lambda t: t.sum(0).exp(), self.leaf().detach())

    def saved_tensors_hooks(self) -> object:
        x = self.leaf()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            out = x.sin().pow(2)
        return self.backward(out, x, power=1)

    def save_on_cpu(self) -> object:
        x = self.leaf()
        with torch.autograd.graph.save_on_cpu():
            out = x.softmax(0).pow(2)
        return self.backward(out, x, power=1)

    def anomaly_mode(self) -> object:
        x = self.leaf()
        with torch.autograd.detect_anomaly(check_nan=True):
            x.softmax(0).pow(2).sum().backward()
        return x.grad

    def anomaly_mode_sees_nan(self) -> object:
        x = self.place(torch.zeros(8, 4), "S(0)", grad=True)
        with torch.autograd.detect_anomaly(check_nan=True):
            (x.sqrt() * 0).sum().backward()
        return x.grad

    def backward_twice_is_refused(self) -> object:
        x = self.leaf()
        loss = x.exp().sum()
        loss.backward()
        loss.backward()
        return x.grad

    def backward_with_a_given_gradient(self) -> object:
        x = self.leaf()
        out = x.sin()
        out.backward(self.place(randn(8, 4, seed=2), "R"))
        return x.grad

    def backward_with_inputs(self) -> object:
        x, y = self.leaf(), self.leaf("R")
        (x * y).sum().backward(inputs=[y])
        return x.grad is None, y.grad

    def retained_gradient_of_an_intermediate(self) -> object:
        x = self.leaf()
        y = x * 2
        y.retain_grad()
        return self.backward(y.softmax(0), x, y)

    def batched_gradients(self) -> object:
        x = self.place(randn(4), "R", grad=True)
        return torch.autograd.grad(x.sin() * 2, x, self.place(torch.eye(4), "R"), is_grads_batched=True)

    def multi_grad_hook(self) -> object:
        x, y = self.leaf(), self.leaf()
        seen: list[AnyTensor] = []
        torch.autograd.graph.register_multi_grad_hook((x, y), lambda gs: seen.extend(gs))
        (x * y).sum().backward()
        return seen

    def pending_gradient_of_a_replicated_leaf(self) -> object:
        x, y = self.leaf("R"), self.place(randn(8, 4, seed=2), "S(0)")
        return self.backward(x * y, x, power=1)

    def func_gradient_of_every_sample(self) -> object:
        net = self.seeded(lambda: nn.Linear(4, 2), "R")
        params = {name: p.detach() for name, p in net.named_parameters()}

        def loss(p: AnyTensor, x: AnyTensor) -> AnyTensor:
            return functional_call(net, p, (x[None],)).pow(2).sum()

        return vmap(grad(loss), in_dims=(None, 0))(params, self.rows("R"))

    def func_vmap_of_the_sharded_dim(self) -> object:
        x, y = self.leaf().detach(), self.place(randn(4, 8, seed=1), "S(1)")
        return vmap(torch.dot, in_dims=(0, 1))(x, y), vmap(lambda t: t.softmax(0), out_dims=1)(x)

    def func_linearized(self) -> object:
        x = self.leaf().detach()
        out, tangent = linearize(lambda t: t.sin() * 2, x)
        return out, tangent(x)

    def func_grad_and_value_with_more_returned(self) -> object:
        x = self.leaf().detach()
        return grad_and_value(lambda t: (t.exp().sum(), t * 2), has_aux=True)(x)

    def products_with_hessian_and_jacobian(self) -> object:
        x, v = self.place(randn(6), "S(0)"), self.place(randn(6, seed=1), "R")
        f = torch.autograd.functional
        return [
            f.hvp(lambda t: t.sin().sum(), x, v),
            f.vhp(lambda t: t.exp().sum(), x, v),
            f.vjp(torch.sin, x, v),
        ]

    def gradients_checked_numerically(self) -> object:
        x = self.place(randn(4).double(), "R", grad=True)
        return torch.autograd.gradcheck(lambda t: t.sin().softmax(0), (x,), fast_mode=True)

    def custom_function_with_setup_context(self) -> object:
        x = self.leaf()
        out, largest = _Scaled.apply(x, 2.0)
        return (
            self.backward(out, x),
            largest,
            vmap(lambda t: _Scaled.apply(t, 2.0)[0])(self.leaf("R").detach()[None]),
        )

    def custom_function_that_writes(self) -> object:
        x = self.leaf()
        y = x * 1
        _InPlace.apply(y)
        return self.backward(y, x)

    def custom_function_differentiated_twice(self) -> object:
        x = self.leaf()
        (g,) = torch.autograd.grad(_Double.apply(x).sum(), x, create_graph=True)
        return self.backward(g, x)

    def saved_tensors_written(self) -> object:
        x = self.leaf()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = x * 2
            z = y * y
            y.mul_(3)
            z.sum().backward()
        return y, x.grad

    def saved_tensors_hooks_refused(self) -> object:
        x = self.leaf()
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)

    def gradient_of_an_edge(self) -> object:
        x = self.leaf()
        y = x * 2
        edge = torch.autograd.graph.get_gradient_edge(y)
        out = y.softmax(0).pow(2).sum()
        return torch.autograd.grad(out, edge)

    def gradients_of_what_is_unused(self) -> object:
        x, y = self.leaf(), self.leaf("R")
        free = torch.autograd.grad(x.sin().sum(), (x, y), allow_unused=True)
        return free[0], free[1] is None, torch.autograd.grad(x.sum(), (x, y), materialize_grads=True)

    def gradients_accumulate_over_placements(self) -> object:
        x, found = self.leaf(), []
        for place in ("S(0)", "R", "S(1)"):
            self.move(place)(x * 2).pow(2).sum().backward()
            found.append(_clone(x.grad))
        x.grad = self.place(randn(8, 4, seed=3), "R")
        return self.backward(x, x, power=1), found

    def leaves_frozen_and_thawed(self) -> object:
        x = self.leaf()
        x.requires_grad_(False)
        y = x * 2
        x.requires_grad_(True)
        (x * y).sum().backward()
        return x.grad, y.requires_grad, y.is_leaf

    def gradients_of_several_results(self) -> object:
        x, v = self.leaf(), self.place(randn(8, 4, seed=1), "S(1)")
        torch.autograd.backward([x.sin(), x.exp()], [v, v * 2])
        return x.grad
