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
from dtbench_suites.compat.program import RANKS, Given, program, randn


def _rows(w: Given, *places: str, requires_grad: bool = True) -> torch.Tensor:
    return w.place(randn(8, 4), *(places or ("S(0)",)), grad=requires_grad)


def _trained(net: Any, parameters: Any, batches: Any) -> Any:
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


# ---- blocks of models ----


class Llama(nn.Module):
    """A decoder layer: RMSNorm, rotary embeddings, grouped heads, a gated block. heads: this rank's."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(16), nn.RMSNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Any) -> Any:
        rows, length, _ = x.shape
        angle = torch.arange(length, dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.5])
        cos, sin = angle.cos(), angle.sin()

        def turned(t: Any) -> Any:
            a, b = t.unflatten(-1, (2, 2)).unbind(-1)
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

        y = self.first(x)
        q, k, v = (f(y).view(rows, length, self.heads, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@program("compile", *BACKENDS)
def llama_layer(w: Given) -> Any:
    torch.manual_seed(3)
    styles = dict.fromkeys(("q", "k", "v", "gate", "up"), "col") | {"o": "row", "down": "row"}
    net = w.parallelize(Llama(4 if w.plain else 4 // RANKS), styles)
    x = randn(2, 6, 16).requires_grad_()
    out = w.compile(net)(x)
    out.pow(2).sum().backward()
    return out, x.grad, [p.grad for p in net.parameters()]


@program("compile", *BACKENDS)
def block_with_the_sequence_sharded(w: Given) -> Any:
    torch.manual_seed(3)
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
    if not w.plain:
        sequence, parallel = w.api.Shard(1), w.parallel
        styles = {
            "0": parallel.SequenceParallel(),
            "1": parallel.ColwiseParallel(input_layouts=sequence),
            "3": parallel.RowwiseParallel(output_layouts=sequence),
            "4": parallel.SequenceParallel(),
        }
        parallel.parallelize_module(net, w.mesh, styles)
    x = w.part(randn(2, 8, 8), 1)
    out = w.compile(net)(x)
    out.pow(3).sum().backward()
    made = out if w.plain or not hasattr(out, "full_tensor") else out.full_tensor()
    return made, [p.grad for p in net.parameters()]


@program("compile", *BACKENDS)
def sharded_embedding_and_loss(w: Given) -> Any:
    torch.manual_seed(3)
    table, head = w.shard(nn.Embedding(12, 8), "S(0)"), w.shard(nn.Linear(8, 12), "S(0)")
    tokens = w.place(torch.arange(10).view(2, 5) % 7, "R")

    def loss(tokens: Any) -> Any:
        return F.cross_entropy(head(table(tokens)).flatten(0, 1), tokens.flatten())

    found = w.compile(loss)(tokens)
    found.backward()
    return found, [p.grad for net in (table, head) for p in net.parameters()]


@program("compile", *BACKENDS)
def weights_sharded_on_two_mesh_dims(w: Given) -> Any:
    torch.manual_seed(3)
    net = w.shard(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), "S(0)", "R")
    return _trained(
        w.compile(net), net.parameters(), [w.place(randn(8, 8, seed=i), "R", "S(0)") for i in range(3)]
    )


@program("compile", *BACKENDS)
def batch_sharded_over_replicated_weights(w: Given) -> Any:
    torch.manual_seed(3)
    net = w.shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), "R")
    return _trained(
        w.compile(net), net.parameters(), [w.place(randn(8, 4, seed=i), "S(0)") for i in range(3)]
    )


@program("compile", *BACKENDS)
def attention_over_sharded_heads(w: Given) -> Any:
    q, k, v = (w.place(randn(2, 4, 6, 8, seed=i), "S(1)", grad=True) for i in range(3))
    out = w.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))(q, k, v)
    out.pow(2).sum().backward()
    return out, q.grad, k.grad, v.grad


@program("compile", *BACKENDS)
def statistics_of_a_batch_norm(w: Given) -> Any:
    net = w.shard(nn.BatchNorm1d(4), "R")
    if not w.plain:
        for name, buffer in list(net.named_buffers()):
            setattr(net, name, w.place(buffer, "R"))
    out = w.compile(net)(_rows(w))
    return out, net.running_mean, net.running_var


@program("compile", *BACKENDS)
def recurrent_cell(w: Given) -> Any:
    torch.manual_seed(3)
    net = w.shard(nn.GRUCell(4, 6), "R")
    x, h = _rows(w), w.place(torch.zeros(8, 6), "S(0)")
    out = w.compile(lambda x, h: net(x, net(x, h)))(x, h)
    out.pow(2).sum().backward()
    return out, x.grad


@program("compile", *BACKENDS)
def cache_of_keys_written(w: Given) -> Any:
    cache, new = w.place(torch.zeros(2, 4, 8, 4), "S(1)"), w.place(randn(2, 4, 1, 4), "S(1)")

    def step(at: Any) -> Any:
        cache.index_copy_(2, at, new)
        return cache.sum(2)

    fn = w.compile(step)
    return [fn(w.place(torch.tensor([i]), "R")) for i in range(2)], cache


@program("compile", *BACKENDS)
def experts_chosen_by_a_router(w: Given) -> Any:
    x, router, experts = (
        _rows(w),
        w.place(randn(4, 3, seed=1), "R", grad=True),
        w.place(randn(3, 4, 4, seed=2), "R", grad=True),
    )

    def layer(x: Any, router: Any, experts: Any) -> Any:
        weight, chosen = (x @ router).softmax(-1).topk(2, -1)
        each = torch.einsum("nd,edf->nef", x, experts)
        return (each.gather(1, chosen[..., None].expand(8, 2, 4)) * weight[..., None]).sum(1)

    out = w.compile(layer)(x, router, experts)
    out.pow(2).sum().backward()
    return out, x.grad, router.grad, experts.grad


# ---- what surrounds a model ----


@program("compile", *BACKENDS)
def checkpointed_block(w: Given) -> Any:
    net, x = mlp(w), randn(4, 8).requires_grad_()
    out = w.compile(lambda t: checkpoint(net, t, use_reentrant=False))(x)
    out.pow(2).sum().backward()
    return out, x.grad, [p.grad for p in net.parameters()]


@program("compile", *BACKENDS)
def under_autocast(w: Given) -> Any:
    x, weight = _rows(w, "R"), w.place(randn(8, 4, seed=1), "S(0)", grad=True)
    fn = w.compile(F.linear)
    with torch.autocast("cpu", torch.bfloat16):
        out = fn(x, weight)
    out.float().sum().backward()
    return out.dtype is torch.bfloat16, weight.grad


@program("compile", *BACKENDS)
def gradient_taken_in_the_graph(w: Given) -> Any:
    def loss(t: Any) -> Any:
        return t.softmax(0).pow(2).sum()

    return w.compile(grad(loss))(_rows(w, requires_grad=False))


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Any) -> Any:
        ctx.save_for_backward(t)
        return t**3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (t,) = ctx.saved_tensors
        return 2 * t * gradients[0]


@program("compile", *BACKENDS)
def custom_function_in_the_graph(w: Given) -> Any:
    x = _rows(w)
    out = w.compile(lambda t: _Cubed.apply(t).softmax(0))(x)
    out.pow(2).sum().backward()
    return out, x.grad


@program("compile", *BACKENDS)
def compiled_in_pieces(w: Given) -> Any:
    """A part that is not compiled, another that is compiled by itself, a value read, between the two."""
    inner = w.compile(torch.sin)

    outside: Any = torch._dynamo.disable(lambda t: t.cumsum(0))

    def fn(t: Any) -> Any:
        a = outside(inner(t) * 2)
        return a + 1 if a.sum().item() > -1e9 else a

    x = _rows(w)
    out = w.compile(fn, fullgraph=False)(x)
    out.pow(2).sum().backward()
    return out, x.grad


@program("compile", *BACKENDS)
def captured_tensors_and_modules(w: Given) -> Any:
    weight, net = w.place(randn(4, seed=1), "R", grad=True), w.shard(nn.LayerNorm(4), "R")
    x = _rows(w)
    out = w.compile(lambda t: net(t * weight))(x)
    out.pow(3).sum().backward()
    return out, x.grad, weight.grad


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Held:
    value: Any


@program("compile", *BACKENDS)
def containers_in_and_out(w: Given) -> Any:
    def fn(given: Any, *, scale: float) -> Any:
        return {
            "a": [given["x"] * scale],
            "b": Pair(given["pair"].first + 1, None),
            "h": Held(given["x"].t()),
        }

    found = w.compile(fn)({"x": _rows(w), "pair": Pair(_rows(w, "R"), 3)}, scale=2.0)
    return found["a"], found["b"].first, found["h"].value


@program("compile", *BACKENDS)
def numbers_that_change(w: Given) -> Any:
    fn, x = w.compile(lambda t, n: t * n + n), _rows(w)
    return [fn(x, n) for n in (1, 2, 3, 0.5, 0.25)]


@program("compile", *BACKENDS)
def shapes_used_as_numbers(w: Given) -> Any:
    fn = w.compile(lambda t: t.reshape(t.shape[0] * t.shape[1]).view(-1, 2) / t.numel())
    return [fn(w.place(randn(rows, 4), "S(0)")) for rows in (8, 12)]


@program("compile", *BACKENDS)
def dynamic_block(w: Given) -> Any:
    net, found = mlp(w), []
    step = w.compile(net, dynamic=True)
    for rows in (4, 6, 10):
        net.zero_grad()
        out = step(randn(rows, 8))
        out.pow(2).sum().backward()
        found.append((out.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None]))
    return found


@program("compile", *BACKENDS)
def dynamic_rows_of_a_sharded_dim(w: Given) -> Any:
    fn, found = w.compile(lambda t: (t @ t.t()).softmax(0), dynamic=True), []
    for rows in (8, 7, 12, 5):
        x = w.place(randn(rows, 4), "S(0)", grad=True)
        fn(x).pow(2).sum().backward()
        found.append(x.grad)
    return found


@program("compile", *BACKENDS)
def training_and_evaluation(w: Given) -> Any:
    net = mlp(w)
    step, x, found = w.compile(net), randn(4, 8), []
    for training in (True, False, True):
        net.train(training)
        with torch.set_grad_enabled(training):
            found.append(step(x))
    found[-1].sum().backward()
    return found, [p.grad for p in net.parameters()]


@program("compile", *BACKENDS)
def step_of_training_as_one_function(w: Given) -> Any:
    net = w.shard(nn.Linear(4, 4), "S(0)")
    nn.init.constant_(net.weight, 0.3), nn.init.zeros_(net.bias)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(x: Any) -> Any:
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    fn = w.compile(step, fullgraph=False)
    return [fn(w.place(randn(8, 4, seed=i), "R")) for i in range(2)], list(net.parameters())


@program("compile", *BACKENDS)
def branch_on_a_value(w: Given) -> Any:
    def fn(t: Any) -> Any:
        return t.sin() if t.sum() > 1e9 else t.cos()

    return w.compile(fn, fullgraph=False)(_rows(w, requires_grad=False))


@program("compile", *BACKENDS)
def local_map_in_a_graph(w: Given) -> Any:
    x = _rows(w)
    if w.plain:
        out = x.exp() * 2
    else:
        import importlib

        module = "dtbench_core" if w.impl == "core" else "torch.distributed.tensor.experimental"
        shard = w.placements(["S(0)"])
        mapped = importlib.import_module(module).local_map(
            lambda t: t.exp() * 2, out_placements=shard, in_placements=(shard,), device_mesh=w.mesh
        )
        out = w.compile(lambda t: mapped(t))(x)
    out.pow(2).sum().backward()
    return out, x.grad


@program("compile", *BACKENDS)
def asynchronous_redistribute_in_a_graph(w: Given) -> Any:
    x = _rows(w)
    if w.plain:
        out = x.sin() + 1
    else:
        whole = w.placements(["R"])
        out = w.compile(lambda t: t.redistribute(placements=whole, async_op=True).sin() + 1)(x)
    out.pow(2).sum().backward()
    return out, x.grad


@program("compile", *BACKENDS)
def hooks_in_a_graph(w: Given) -> Any:
    net, x = w.shard(nn.Linear(4, 4), "S(0)"), _rows(w, "R")
    nn.init.constant_(net.weight, 0.3), nn.init.zeros_(net.bias)  # type: ignore[arg-type]
    net.register_forward_hook(lambda m, a, out: out * 2)

    def fn(t: Any) -> Any:
        y = t * 2
        y.register_hook(lambda g: g * 3)
        return net(y)

    w.compile(fn, fullgraph=False)(x).pow(2).sum().backward()
    return x.grad


@program("trace")
def make_fx(w: Given) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx as trace

    x, leave, enter = w.part(randn(8, 4)), w.leave(), w.enter("S(0)")

    def fn(t: Any) -> Any:
        return leave(enter(t).softmax(1) * 2)

    return enter(trace(fn)(x)(x + 1) if not w.plain else fn(x + 1))


@program("trace")
def export_of_a_parallel_block(w: Given) -> Any:
    net, x = mlp(w), randn(4, 8)
    return net(x) if w.plain else torch.export.export(net, (x,), strict=False).module()(x)
