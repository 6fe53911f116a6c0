"""torch.compile of what whole models and their steps are made of; make_fx and export."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad
from torch.utils.checkpoint import checkpoint

from dtbench_suites.compat.compiling import BACKENDS, mlp
from dtbench_suites.compat.program import AnyTensor, Programs, grads_of, randn


def _trained(net: Any, parameters: Any, batches: Any) -> AnyTensor:
    """Three steps of AdamW."""
    parameters, losses = list(parameters), []
    optimizer = torch.optim.AdamW(parameters, 0.05)
    for batch in batches:
        loss = net(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, parameters


class Llama(nn.Module):
    """A decoder layer: RMSNorm, rotary embeddings, grouped heads, a gated block. heads: this rank's."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(16), nn.RMSNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: AnyTensor) -> AnyTensor:
        rows, length, _ = x.shape
        angle = torch.arange(length, dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.5])
        cos, sin = angle.cos(), angle.sin()

        def turned(t: AnyTensor) -> AnyTensor:
            a, b = t.unflatten(-1, (2, 2)).unbind(-1)
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

        y = self.first(x)
        q, k, v = (f(y).view(rows, length, self.heads, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: AnyTensor) -> AnyTensor:
        ctx.save_for_backward(t)
        return t**3

    @staticmethod
    def backward(ctx: Any, *gradients: AnyTensor) -> AnyTensor:
        (t,) = ctx.saved_tensors
        return 2 * t * gradients[0]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Held:
    value: Any


class Compile(Programs):
    topic = "compile"
    backends = BACKENDS

    def llama_layer(self) -> object:
        torch.manual_seed(3)
        styles = dict.fromkeys(("q", "k", "v", "gate", "up"), "col") | {"o": "row", "down": "row"}
        net = self.parallelize(Llama(4 if self.plain else 4 // self.ranks), styles)
        x = randn(2, 6, 16).requires_grad_()
        return self.backward(self.compile(net)(x), x, net)

    def block_with_the_sequence_sharded(self) -> object:
        torch.manual_seed(3)
        net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
        if not self.plain:
            sequence, parallel = self.api.Shard(1), self.parallel
            styles = {
                "0": parallel.SequenceParallel(),
                "1": parallel.ColwiseParallel(input_layouts=sequence),
                "3": parallel.RowwiseParallel(output_layouts=sequence),
                "4": parallel.SequenceParallel(),
            }
            parallel.parallelize_module(net, self.mesh, styles)
        x = self.part(randn(2, 8, 8), 1)
        out = self.compile(net)(x)
        out.pow(3).sum().backward()
        made = out if self.plain or not hasattr(out, "full_tensor") else out.full_tensor()
        return made, grads_of(net)

    def sharded_embedding_and_loss(self) -> object:
        torch.manual_seed(3)
        table, head = self.shard(nn.Embedding(12, 8), "S(0)"), self.shard(nn.Linear(8, 12), "S(0)")
        tokens = self.place(torch.arange(10).view(2, 5) % 7, "R")

        def loss(tokens: AnyTensor) -> AnyTensor:
            return F.cross_entropy(head(table(tokens)).flatten(0, 1), tokens.flatten())

        found = self.compile(loss)(tokens)
        found.backward()
        return found, [p.grad for net in (table, head) for p in net.parameters()]

    def weights_sharded_on_two_mesh_dims(self) -> object:
        torch.manual_seed(3)
        net = self.shard(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), "S(0)", "R")
        return _trained(
            self.compile(net),
            net.parameters(),
            [self.place(randn(8, 8, seed=i), "R", "S(0)") for i in range(3)],
        )

    def batch_sharded_over_replicated_weights(self) -> object:
        torch.manual_seed(3)
        net = self.shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), "R")
        return _trained(
            self.compile(net), net.parameters(), [self.place(randn(8, 4, seed=i), "S(0)") for i in range(3)]
        )

    def attention_over_sharded_heads(self) -> object:
        q, k, v = (self.place(randn(2, 4, 6, 8, seed=i), "S(1)", grad=True) for i in range(3))
        out = self.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))(q, k, v)
        return self.backward(out, q, k, v)

    def statistics_of_a_batch_norm(self) -> object:
        net = self.shard(nn.BatchNorm1d(4), "R")
        self.replicate_buffers(net)
        out = self.compile(net)(self.leaf())
        return out, net.running_mean, net.running_var

    def recurrent_cell(self) -> object:
        torch.manual_seed(3)
        net = self.shard(nn.GRUCell(4, 6), "R")
        x, h = self.leaf(), self.place(torch.zeros(8, 6), "S(0)")
        return self.backward(self.compile(lambda x, h: net(x, net(x, h)))(x, h), x)

    def cache_of_keys_written(self) -> object:
        cache, new = self.place(torch.zeros(2, 4, 8, 4), "S(1)"), self.place(randn(2, 4, 1, 4), "S(1)")

        def step(at: AnyTensor) -> AnyTensor:
            cache.index_copy_(2, at, new)
            return cache.sum(2)

        fn = self.compile(step)
        return [fn(self.place(torch.tensor([i]), "R")) for i in range(2)], cache

    def experts_chosen_by_a_router(self) -> object:
        x, router, experts = (
            self.leaf(),
            self.place(randn(4, 3, seed=1), "R", grad=True),
            self.place(randn(3, 4, 4, seed=2), "R", grad=True),
        )

        def layer(x: AnyTensor, router: AnyTensor, experts: AnyTensor) -> AnyTensor:
            weight, chosen = (x @ router).softmax(-1).topk(2, -1)
            each = torch.einsum("nd,edf->nef", x, experts)
            return (each.gather(1, chosen[..., None].expand(8, 2, 4)) * weight[..., None]).sum(1)

        return self.backward(self.compile(layer)(x, router, experts), x, router, experts)

    def checkpointed_block(self) -> object:
        net, x = mlp(self), randn(4, 8).requires_grad_()
        return self.backward(self.compile(lambda t: checkpoint(net, t, use_reentrant=False))(x), x, net)

    def under_autocast(self) -> object:
        x, weight = self.leaf("R"), self.place(randn(8, 4, seed=1), "S(0)", grad=True)
        fn = self.compile(F.linear)
        with torch.autocast("cpu", torch.bfloat16):
            out = fn(x, weight)
        return self.backward(out.float(), weight, power=1), out.dtype is torch.bfloat16

    def gradient_taken_in_the_graph(self) -> object:
        def loss(t: AnyTensor) -> AnyTensor:
            return t.softmax(0).pow(2).sum()

        return self.compile(grad(loss))(self.rows())

    def custom_function_in_the_graph(self) -> object:
        x = self.leaf()
        return self.backward(self.compile(lambda t: _Cubed.apply(t).softmax(0))(x), x)

    def compiled_in_pieces(self) -> object:
        """A part that is not compiled, another that is compiled by itself, a value read, between the two."""
        inner = self.compile(torch.sin)

        outside: Any = torch._dynamo.disable(lambda t: t.cumsum(0))

        def fn(t: AnyTensor) -> AnyTensor:
            a = outside(inner(t) * 2)
            return a + 1 if a.sum().item() > -1e9 else a

        x = self.leaf()
        out = self.compile(fn, fullgraph=False)(x)
        return self.backward(out, x)

    def captured_tensors_and_modules(self) -> object:
        weight, net = self.place(randn(4, seed=1), "R", grad=True), self.shard(nn.LayerNorm(4), "R")
        x = self.leaf()
        return self.backward(self.compile(lambda t: net(t * weight))(x), x, weight, power=3)

    def containers_in_and_out(self) -> object:
        def fn(given: AnyTensor, *, scale: float) -> AnyTensor:
            return {
                "a": [given["x"] * scale],
                "b": Pair(given["pair"].first + 1, None),
                "h": Held(given["x"].t()),
            }

        found = self.compile(fn)({"x": self.leaf(), "pair": Pair(self.leaf("R"), 3)}, scale=2.0)
        return found["a"], found["b"].first, found["h"].value

    def numbers_that_change(self) -> object:
        fn, x = self.compile(lambda t, n: t * n + n), self.leaf()
        return [fn(x, n) for n in (1, 2, 3, 0.5, 0.25)]

    def shapes_used_as_numbers(self) -> object:
        fn = self.compile(lambda t: t.reshape(t.shape[0] * t.shape[1]).view(-1, 2) / t.numel())
        return [fn(self.place(randn(rows, 4), "S(0)")) for rows in (8, 12)]

    def dynamic_block(self) -> object:
        net, found = mlp(self), []
        step = self.compile(net, dynamic=True)
        for rows in (4, 6, 10):
            net.zero_grad()
            out = step(randn(rows, 8))
            out.pow(2).sum().backward()
            found.append((out.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None]))
        return found

    def dynamic_rows_of_a_sharded_dim(self) -> object:
        fn, found = self.compile(lambda t: (t @ t.t()).softmax(0), dynamic=True), []
        for rows in (8, 7, 12, 5):
            x = self.place(randn(rows, 4), "S(0)", grad=True)
            fn(x).pow(2).sum().backward()
            found.append(x.grad)
        return found

    def training_and_evaluation(self) -> object:
        net = mlp(self)
        step, x, found = self.compile(net), randn(4, 8), []
        for training in (True, False, True):
            net.train(training)
            with torch.set_grad_enabled(training):
                found.append(step(x))
        return self.backward(found[-1], net, power=1), found

    def step_of_training_as_one_function(self) -> object:
        net = self.shard(nn.Linear(4, 4), "S(0)")
        nn.init.constant_(net.weight, 0.3), nn.init.zeros_(net.bias)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def step(x: AnyTensor) -> AnyTensor:
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        fn = self.compile(step, fullgraph=False)
        return [fn(self.place(randn(8, 4, seed=i), "R")) for i in range(2)], list(net.parameters())

    def branch_on_a_value(self) -> object:
        def fn(t: AnyTensor) -> AnyTensor:
            return t.sin() if t.sum() > 1e9 else t.cos()

        return self.compile(fn, fullgraph=False)(self.rows())

    def local_map_in_a_graph(self) -> object:
        x = self.leaf()
        if self.plain:
            out = x.exp() * 2
        else:
            import importlib

            module = "dtbench_core" if self.impl == "core" else "torch.distributed.tensor.experimental"
            shard = self.placements(["S(0)"])
            mapped = importlib.import_module(module).local_map(
                lambda t: t.exp() * 2, out_placements=shard, in_placements=(shard,), device_mesh=self.mesh
            )
            out = self.compile(lambda t: mapped(t))(x)
        return self.backward(out, x)

    def asynchronous_redistribute_in_a_graph(self) -> object:
        x = self.leaf()
        if self.plain:
            out = x.sin() + 1
        else:
            whole = self.placements(["R"])
            out = self.compile(lambda t: t.redistribute(placements=whole, async_op=True).sin() + 1)(x)
        return self.backward(out, x)

    def hooks_in_a_graph(self) -> object:
        net, x = self.shard(nn.Linear(4, 4), "S(0)"), self.leaf("R")
        nn.init.constant_(net.weight, 0.3), nn.init.zeros_(net.bias)  # type: ignore[arg-type]
        net.register_forward_hook(lambda m, a, out: out * 2)

        def fn(t: AnyTensor) -> AnyTensor:
            y = t * 2
            y.register_hook(lambda g: g * 3)
            return net(y)

        return self.backward(self.compile(fn, fullgraph=False)(x), x)


class Trace(Programs):
    topic = "trace"

    def make_fx(self) -> object:
        from torch.fx.experimental.proxy_tensor import make_fx as trace

        x, local_of, wrap = self.part(randn(8, 4)), self.to_local(), self.from_local("S(0)")

        def fn(t: AnyTensor) -> AnyTensor:
            return local_of(wrap(t).softmax(1) * 2)

        return wrap(trace(fn)(x)(x + 1) if not self.plain else fn(x + 1))

    def export_of_a_parallel_block(self) -> object:
        net, x = mlp(self), randn(4, 8)
        return net(x) if self.plain else torch.export.export(net, (x,), strict=False).module()(x)
