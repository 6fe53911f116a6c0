"""torch.compile of ops and small functions; of models and their steps: compiled_models.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtbench_suites.compat.program import AnyTensor, Cases, Given, Programs, randn

BACKENDS = ("aot_eager", "inductor")


def _forward_and_backward(w: Given, fn: Callable[..., AnyTensor], *leaves: torch.Tensor) -> list[AnyTensor]:
    out = w.compile(fn)(*leaves)
    out.pow(3).sum().backward()  # the sum of squares of what is normalised has no gradient to compare
    return [out, *(leaf.grad for leaf in leaves)]


# Functions of one tensor that run forward and backward: name -> (function, shape, placements).
CHAINS: Mapping[str, tuple[Callable[[AnyTensor], AnyTensor], tuple[int, ...], tuple[str, ...]]] = {
    "softmax over the sharded dim": (lambda t: t.softmax(0), (8, 6), ("S(0)",)),
    "layer norm over the sharded dim": (lambda t: F.layer_norm(t.t(), (8,)), (8, 6), ("S(0)",)),
    "elementwise chain": (lambda t: (t.sin() * 2 + t.exp()).tanh(), (8, 6), ("S(0)",)),
    "uneven shards": (lambda t: (t * 2).sum(1), (7, 6), ("S(0)",)),
    "sum over the sharded dim": (lambda t: t + t.sum(0), (8, 6), ("S(0)",)),
    "two mesh dims": (
        lambda t: (t @ t.t()).relu(),
        (8, 8),
        (
            "S(0)",
            "S(1)",
        ),
    ),
    "two mesh dims on one dim": (
        lambda t: t.softmax(0),
        (8, 6),
        (
            "S(0)",
            "S(0)",
        ),
    ),
    "views and transposes": (lambda t: t.view(2, 4, 6).transpose(1, 2).reshape(2, 24) + 1, (8, 6), ("S(0)",)),
    "cat and split": (lambda t: torch.cat([t[:, :3] * 2, t[:, 3:]], 1), (8, 6), ("S(0)",)),
    "cumsum over the sharded dim": (lambda t: t.cumsum(0), (8, 6), ("S(0)",)),
    "where and masks": (lambda t: torch.where(t > 0, t, t * 0.1), (8, 6), ("S(1)",)),
    "in place in a graph": (lambda t: (t * 2).add_(1).mul_(3), (8, 6), ("S(0)",)),
    "replicated": (lambda t: t.softmax(1).log(), (8, 6), ("R",)),
    "rms norm": (lambda t: F.rms_norm(t, (6,)) * 2, (8, 6), ("S(1)",)),
    "group norm": (lambda t: F.group_norm(t, 2), (8, 4, 6), ("S(0)",)),
    "einsum": (
        lambda t: torch.einsum("ij,kj->ik", t, t),
        (8, 6),
        (
            "S(0)",
            "S(1)",
        ),
    ),
    "batched products": (lambda t: torch.bmm(t, t.transpose(1, 2)), (8, 4, 6), ("S(0)",)),
    "convolution": (lambda t: F.conv1d(t, t[:2, :, :3]), (8, 4, 6), ("S(0)",)),
    "pooling and padding": (lambda t: F.avg_pool1d(F.pad(t, (1, 1)), 2), (8, 4, 6), ("S(0)",)),
    "sort and topk": (lambda t: t.sort(0).values + t.topk(6, 0).values.sum(0), (8, 6), ("S(0)",)),
    "largest of uneven shards": (lambda t: t.amax(0) + t.logsumexp(0), (7, 6), ("S(0)",)),
    "index and gather": (lambda t: t[[1, 5]] + t.gather(0, t.argsort(0))[:2], (8, 6), ("S(0)",)),
    "masked fill and triangle": (lambda t: t.masked_fill(t > 1, 0.0).tril(), (8, 8), ("S(0)",)),
    "roll flip and diagonal": (lambda t: t.roll(1, 0).flip(0).diagonal() * 2, (8, 8), ("S(0)",)),
    "norms over all": (lambda t: t / t.norm() + t.abs().max(), (8, 6), ("S(0)",)),
    "half precision inside": (lambda t: (t.round().bfloat16() * 2).float() + t, (8, 6), ("S(0)",)),
    "write to a part": (lambda t: (t * 2).index_fill(1, torch.tensor(2), 0.0), (8, 6), ("S(0)",)),
    "mean and variance": (lambda t: (t - t.mean(0)) / (t.var(0) + 1).sqrt(), (8, 6), ("S(0)",)),
}


def _chain(
    fn: Callable[[AnyTensor], AnyTensor], shape: tuple[int, ...], places: tuple[str, ...]
) -> Callable[[Given], object]:
    return lambda w: _forward_and_backward(w, fn, w.place(randn(*shape), *places, grad=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: AnyTensor) -> AnyTensor:
        return self.down(F.gelu(self.up(x)))


def mlp(w: Given) -> nn.Module:
    torch.manual_seed(3)
    return w.parallelize(Block(), {"up": "col", "down": "row"})


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: AnyTensor) -> AnyTensor:
        q, k, v = (f(x).view(2, 4, self.heads, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(2, 4, -1))


def _replicas_draw_alike(w: Given, draw: Callable[[AnyTensor], AnyTensor]) -> AnyTensor:
    x = w.place(torch.ones(64), "R")
    torch.rand_like(x)
    torch.manual_seed(0 if w.plain else w.rank)
    drawn = w.to_local()(draw(x))
    sums = drawn.clone()
    if not w.plain:
        dist.all_reduce(sums)
    return w.expected((sums - drawn * w.ranks).abs().max(), torch.tensor(0.0))


class Compile(Programs):
    topic = "compile"
    backends = BACKENDS
    cases: ClassVar[Cases] = {
        **{name: _chain(*given) for name, given in CHAINS.items()},
        "write to an input": lambda w: w.on(lambda x: (w.compile(lambda t: t.mul_(2) + 1)(x), x)),
    }

    def matrix_product_of_rows_and_columns(self) -> object:
        a, b = self.leaf(), self.place(randn(4, 8, seed=1), "S(1)", grad=True)
        return _forward_and_backward(self, lambda a, b: a @ b, a, b)

    def pending_product_made_whole(self) -> object:
        a, b = self.place(randn(8, 4), "S(1)", grad=True), self.place(randn(4, 8, seed=1), "S(0)", grad=True)
        to = self.move("S(0)")
        return _forward_and_backward(self, lambda a, b: to(a @ b).relu(), a, b)

    def linear_and_cross_entropy(self) -> object:
        x, weight = (
            self.leaf(),
            self.place(randn(12, 4, seed=1), "S(0)", grad=True),
        )
        target = self.place(torch.arange(8) % 12, "S(0)")
        loss = self.compile(lambda x, v: F.cross_entropy(F.linear(x, v), target))(x, weight)
        loss.backward()
        return loss, x.grad, weight.grad

    def redistribute_in_a_graph(self) -> object:
        x = self.place(randn(8, 8), "S(0)", grad=True)
        to = self.move("S(1)")
        return _forward_and_backward(self, lambda t: to(t) * 2, x)

    def redistribute_to_local_in_a_graph(self) -> object:
        x = self.rows()
        to, local_of = self.move("R"), self.to_local()
        return self.compile(lambda t: local_of(to(t)) + 1)(x)

    def full_tensor_in_a_graph(self) -> object:
        x, gather = self.leaf(), self.gather()
        return _forward_and_backward(self, lambda t: gather(t.sin()) + 1, x)

    def from_local_to_local(self) -> object:
        local = self.part(randn(8, 4)).requires_grad_()
        wrap, local_of = self.from_local("S(0)"), self.to_local()
        out = self.compile(lambda t: local_of(wrap(t).exp()))(local)
        out.sum().backward()
        return wrap(out.detach()), wrap(cast("torch.Tensor", local.grad))

    def recompiled_for_other_placements(self) -> object:
        fn = self.compile(lambda t: (t * 2).sum(0))
        return [fn(self.place(randn(8, 8), place)) for place in ("S(0)", "S(1)", "R", "S(0)")]

    def recompiled_for_other_shapes(self) -> object:
        fn = self.compile(lambda t: t.softmax(0))
        return [fn(self.place(randn(rows, 4), "S(0)")) for rows in (8, 12, 16)]

    def dynamic_shapes(self) -> object:
        fn = self.compile(lambda t: (t * 2 + 1).sum(1), dynamic=True)
        return [fn(self.place(randn(rows, 4), "S(0)")) for rows in (8, 12, 20)]

    def graph_breaks(self) -> object:
        def fn(t: AnyTensor) -> AnyTensor:
            a = t * 2
            torch._dynamo.graph_break()
            return a.softmax(0)

        x = self.leaf()
        return self.backward(self.compile(fn, fullgraph=False)(x), x)

    def gradient_of_another_placement(self) -> object:
        x = self.place(randn(8, 8), "S(0)", grad=True)
        out = self.compile(lambda t: t * 3)(x)
        return self.backward(self.move("S(1)")(out), x), out

    def tensor_parallel_mlp(self) -> object:
        net, x = mlp(self), randn(4, 8).requires_grad_()
        return self.backward(self.compile(net)(x), x, net)

    def tensor_parallel_mlp_trained(self) -> object:
        net, losses = mlp(self), []
        step, optimizer = self.compile(net), torch.optim.AdamW(net.parameters(), lr=0.05)
        for number in range(3):
            loss = step(randn(4, 8, seed=number)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, list(net.parameters())

    def tensor_parallel_attention(self) -> object:
        torch.manual_seed(3)
        net = self.parallelize(
            Attention(4 if self.plain else 1), {"q": "col", "k": "col", "v": "col", "out": "row"}
        )
        return self.backward(self.compile(net)(randn(2, 4, 16)), net)

    def placements_read_in_a_graph(self) -> object:
        def fn(t: AnyTensor) -> AnyTensor:
            return t * 2 if self.plain or t.placements[0].is_shard() else t * 3

        return self.compile(fn)(self.rows())

    def compiled_under_no_grad(self) -> object:
        with torch.no_grad():
            return self.compile(lambda t: t.softmax(0))(self.leaf())

    def views_returned_from_a_graph(self) -> object:
        return self.compile(lambda t: (t.t(), t[:, 1:3], t.unsqueeze(0)))(self.rows())

    def optimizer_step_compiled(self) -> object:
        x = self.leaf()
        optimizer = torch.optim.Adam([x], lr=0.1)
        x.pow(2).sum().backward()
        self.compile(optimizer.step, fullgraph=False)()
        return x

    def compiled_autograd(self) -> object:
        x = self.leaf()
        if self.plain:
            x.softmax(0).pow(2).sum().backward()
        else:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=self.backend)):
                x.softmax(0).pow(2).sum().backward()
        return x.grad

    def replicas_draw_alike_in_graphs_on_ranks_seeded_apart(self) -> object:
        return _replicas_draw_alike(self, self.compile(F.dropout))


class CompileEager(Programs):
    topic = "compile"
    backends = ("eager",)
    cases: ClassVar[Cases] = {
        "traced alone": lambda w: _forward_and_backward(w, lambda t: t.softmax(0) @ t.t(), w.leaf()),
    }


class Values(Programs):
    topic = "values"
    cases: ClassVar[Cases] = {
        "replicas draw alike on ranks seeded apart": lambda w: _replicas_draw_alike(w, F.dropout),
    }
