"""torch.compile of ops and small functions; of models and their steps: compiled_models.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dtbench_suites.compat.program import RANKS, Given, program, randn

BACKENDS = ("aot_eager", "inductor")


def _forward_and_backward(w: Given, fn: Callable[..., Any], *leaves: torch.Tensor) -> list[Any]:
    out = w.compile(fn)(*leaves)
    out.pow(3).sum().backward()  # the sum of squares of what is normalised has no gradient to compare
    return [out, *(leaf.grad for leaf in leaves)]


def _chain(name: str, fn: Callable[..., Any], shape: tuple[int, ...], *places: str) -> None:
    """A program that runs `fn` of one tensor forward and backward, compiled."""

    def run(w: Given) -> Any:
        return _forward_and_backward(w, fn, w.place(randn(*shape), *places, grad=True))

    run.__name__ = name
    program("compile", *BACKENDS)(run)


_chain("softmax_over_the_sharded_dim", lambda t: t.softmax(0), (8, 6), "S(0)")
_chain("layer_norm_over_the_sharded_dim", lambda t: F.layer_norm(t.t(), (8,)), (8, 6), "S(0)")
_chain("elementwise_chain", lambda t: (t.sin() * 2 + t.exp()).tanh(), (8, 6), "S(0)")
_chain("uneven_shards", lambda t: (t * 2).sum(1), (7, 6), "S(0)")
_chain("sum_over_the_sharded_dim", lambda t: t + t.sum(0), (8, 6), "S(0)")
_chain("two_mesh_dims", lambda t: (t @ t.t()).relu(), (8, 8), "S(0)", "S(1)")
_chain("two_mesh_dims_on_one_dim", lambda t: t.softmax(0), (8, 6), "S(0)", "S(0)")
_chain("views_and_transposes", lambda t: t.view(2, 4, 6).transpose(1, 2).reshape(2, 24) + 1, (8, 6), "S(0)")
_chain("cat_and_split", lambda t: torch.cat([t[:, :3] * 2, t[:, 3:]], 1), (8, 6), "S(0)")
_chain("cumsum_over_the_sharded_dim", lambda t: t.cumsum(0), (8, 6), "S(0)")
_chain("where_and_masks", lambda t: torch.where(t > 0, t, t * 0.1), (8, 6), "S(1)")
_chain("in_place_in_a_graph", lambda t: (t * 2).add_(1).mul_(3), (8, 6), "S(0)")
_chain("replicated", lambda t: t.softmax(1).log(), (8, 6), "R")
_chain("rms_norm", lambda t: F.rms_norm(t, (6,)) * 2, (8, 6), "S(1)")
_chain("group_norm", lambda t: F.group_norm(t, 2), (8, 4, 6), "S(0)")
_chain("einsum", lambda t: torch.einsum("ij,kj->ik", t, t), (8, 6), "S(0)", "S(1)")
_chain("batched_products", lambda t: torch.bmm(t, t.transpose(1, 2)), (8, 4, 6), "S(0)")
_chain("convolution", lambda t: F.conv1d(t, t[:2, :, :3]), (8, 4, 6), "S(0)")
_chain("pooling_and_padding", lambda t: F.avg_pool1d(F.pad(t, (1, 1)), 2), (8, 4, 6), "S(0)")
_chain("sort_and_topk", lambda t: t.sort(0).values + t.topk(6, 0).values.sum(0), (8, 6), "S(0)")
_chain("largest_of_uneven_shards", lambda t: t.amax(0) + t.logsumexp(0), (7, 6), "S(0)")
_chain("index_and_gather", lambda t: t[[1, 5]] + t.gather(0, t.argsort(0))[:2], (8, 6), "S(0)")
_chain("masked_fill_and_triangle", lambda t: t.masked_fill(t > 1, 0.0).tril(), (8, 8), "S(0)")
_chain("roll_flip_and_diagonal", lambda t: t.roll(1, 0).flip(0).diagonal() * 2, (8, 8), "S(0)")
_chain("norms_over_all", lambda t: t / t.norm() + t.abs().max(), (8, 6), "S(0)")
_chain("half_precision_inside", lambda t: (t.round().bfloat16() * 2).float() + t, (8, 6), "S(0)")
_chain("write_to_a_part", lambda t: (t * 2).index_fill(1, torch.tensor(2), 0.0), (8, 6), "S(0)")
_chain("mean_and_variance", lambda t: (t - t.mean(0)) / (t.var(0) + 1).sqrt(), (8, 6), "S(0)")


@program("compile", *BACKENDS)
def matrix_product_of_rows_and_columns(w: Given) -> Any:
    a, b = w.place(randn(8, 4), "S(0)", grad=True), w.place(randn(4, 8, seed=1), "S(1)", grad=True)
    return _forward_and_backward(w, lambda a, b: a @ b, a, b)


@program("compile", *BACKENDS)
def pending_product_made_whole(w: Given) -> Any:
    a, b = w.place(randn(8, 4), "S(1)", grad=True), w.place(randn(4, 8, seed=1), "S(0)", grad=True)
    to = w.move("S(0)")
    return _forward_and_backward(w, lambda a, b: to(a @ b).relu(), a, b)


@program("compile", *BACKENDS)
def linear_and_cross_entropy(w: Given) -> Any:
    x, weight = w.place(randn(8, 4), "S(0)", grad=True), w.place(randn(12, 4, seed=1), "S(0)", grad=True)
    target = w.place(torch.arange(8) % 12, "S(0)")
    loss = w.compile(lambda x, v: F.cross_entropy(F.linear(x, v), target))(x, weight)
    loss.backward()
    return loss, x.grad, weight.grad


@program("compile", *BACKENDS)
def redistribute_in_a_graph(w: Given) -> Any:
    x = w.place(randn(8, 8), "S(0)", grad=True)
    to = w.move("S(1)")
    return _forward_and_backward(w, lambda t: to(t) * 2, x)


@program("compile", *BACKENDS)
def redistribute_to_local_in_a_graph(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)")
    to, leave = w.move("R"), w.leave()
    return w.compile(lambda t: leave(to(t)) + 1)(x)


@program("compile", *BACKENDS)
def full_tensor_in_a_graph(w: Given) -> Any:
    x, gather = w.place(randn(8, 4), "S(0)", grad=True), w.gather()
    return _forward_and_backward(w, lambda t: gather(t.sin()) + 1, x)


@program("compile", *BACKENDS)
def from_local_to_local(w: Given) -> Any:
    local = w.part(randn(8, 4)).requires_grad_()
    enter, leave = w.enter("S(0)"), w.leave()
    out = w.compile(lambda t: leave(enter(t).exp()))(local)
    out.sum().backward()
    return enter(out.detach()), enter(cast("torch.Tensor", local.grad))


@program("compile", *BACKENDS)
def recompiled_for_other_placements(w: Given) -> Any:
    fn = w.compile(lambda t: (t * 2).sum(0))
    return [fn(w.place(randn(8, 8), place)) for place in ("S(0)", "S(1)", "R", "S(0)")]


@program("compile", *BACKENDS)
def recompiled_for_other_shapes(w: Given) -> Any:
    fn = w.compile(lambda t: t.softmax(0))
    return [fn(w.place(randn(rows, 4), "S(0)")) for rows in (8, 12, 16)]


@program("compile", *BACKENDS)
def dynamic_shapes(w: Given) -> Any:
    fn = w.compile(lambda t: (t * 2 + 1).sum(1), dynamic=True)
    return [fn(w.place(randn(rows, 4), "S(0)")) for rows in (8, 12, 20)]


@program("compile", *BACKENDS)
def graph_breaks(w: Given) -> Any:
    def fn(t: Any) -> Any:
        a = t * 2
        torch._dynamo.graph_break()
        return a.softmax(0)

    x = w.place(randn(8, 4), "S(0)", grad=True)
    out = w.compile(fn, fullgraph=False)(x)
    out.pow(2).sum().backward()
    return out, x.grad


@program("compile", *BACKENDS)
def gradient_of_another_placement(w: Given) -> Any:
    x = w.place(randn(8, 8), "S(0)", grad=True)
    out = w.compile(lambda t: t * 3)(x)
    w.move("S(1)")(out).pow(2).sum().backward()
    return out, x.grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)))


def mlp(w: Given) -> nn.Module:
    torch.manual_seed(3)
    return w.parallelize(Block(), {"up": "col", "down": "row"})


@program("compile", *BACKENDS)
def tensor_parallel_mlp(w: Given) -> Any:
    net, x = mlp(w), randn(4, 8).requires_grad_()
    out = w.compile(net)(x)
    out.pow(2).sum().backward()
    return out, x.grad, [p.grad for p in net.parameters()]


@program("compile", *BACKENDS)
def tensor_parallel_mlp_trained(w: Given) -> Any:
    net, losses = mlp(w), []
    step, optimizer = w.compile(net), torch.optim.AdamW(net.parameters(), lr=0.05)
    for number in range(3):
        loss = step(randn(4, 8, seed=number)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(net.parameters())


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (f(x).view(2, 4, self.heads, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(2, 4, -1))


@program("compile", *BACKENDS)
def tensor_parallel_attention(w: Given) -> Any:
    torch.manual_seed(3)
    net = w.parallelize(Attention(4 if w.plain else 1), {"q": "col", "k": "col", "v": "col", "out": "row"})
    out = w.compile(net)(randn(2, 4, 16))
    out.pow(2).sum().backward()
    return out, [p.grad for p in net.parameters()]


@program("compile", *BACKENDS)
def placements_read_in_a_graph(w: Given) -> Any:
    def fn(t: Any) -> Any:
        return t * 2 if w.plain or t.placements[0].is_shard() else t * 3

    return w.compile(fn)(w.place(randn(8, 4), "S(0)"))


@program("compile", *BACKENDS)
def compiled_under_no_grad(w: Given) -> Any:
    with torch.no_grad():
        return w.compile(lambda t: t.softmax(0))(w.place(randn(8, 4), "S(0)", grad=True))


@program("compile", *BACKENDS)
def write_to_an_input(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)")
    out = w.compile(lambda t: t.mul_(2) + 1)(x)
    return out, x


@program("compile", *BACKENDS)
def views_returned_from_a_graph(w: Given) -> Any:
    return w.compile(lambda t: (t.t(), t[:, 1:3], t.unsqueeze(0)))(w.place(randn(8, 4), "S(0)"))


@program("compile", *BACKENDS)
def optimizer_step_compiled(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    optimizer = torch.optim.Adam([x], lr=0.1)
    x.pow(2).sum().backward()
    w.compile(optimizer.step, fullgraph=False)()
    return x


@program("compile", *BACKENDS)
def compiled_autograd(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    if w.plain:
        x.softmax(0).pow(2).sum().backward()
    else:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=w.backend)):
            x.softmax(0).pow(2).sum().backward()
    return x.grad


@program("compile", "eager")
def traced_alone(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    return _forward_and_backward(w, lambda t: t.softmax(0) @ t.t(), x)


def _replicas_draw_alike(w: Given, draw: Callable[[Any], Any]) -> Any:
    x = w.place(torch.ones(64), "R")
    torch.rand_like(x)
    torch.manual_seed(0 if w.plain else w.rank)
    drawn = w.leave()(draw(x))
    sums = drawn.clone()
    if not w.plain:
        dist.all_reduce(sums)
    return w.known((sums - drawn * RANKS).abs().max(), torch.tensor(0.0))


@program("values")
def replicas_draw_alike_on_ranks_seeded_apart(w: Given) -> Any:
    return _replicas_draw_alike(w, F.dropout)


@program("compile", *BACKENDS)
def replicas_draw_alike_in_graphs_on_ranks_seeded_apart(w: Given) -> Any:
    return _replicas_draw_alike(w, w.compile(F.dropout))
