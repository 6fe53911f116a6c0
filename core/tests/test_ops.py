"""Every op the core has a rule for, against plain torch on the full tensors: values and gradients.

Each op runs over all combinations of Replicate, Partial and Shard of every dim for each of its
inputs, on a 1-D mesh of 4 and on a 2x2 mesh, with even, uneven and empty shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.tests.gloo_world import Worlds, mesh_of
from dtbench_core import DTensor, Partial, Placement, Replicate, Shard, dispatch, distribute_tensor
from dtbench_core.rules.base import ops_with_rules

aten = torch.ops.aten


class Op(NamedTuple):
    """fn of the input tensors; shapes of the inputs (even on 4 ranks), and of an uneven variant."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    uneven: tuple[tuple[int, ...], ...]
    differentiable: bool = True


def _mlp(x: Any, w1: Any, w2: Any) -> Any:
    return F.linear(torch.relu(F.linear(x, w1)), w2)


def _attention(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v


def _index(like: Any, values: list[Any], placement: Placement) -> Any:
    """An index tensor to go with `like`: plain, or placed on its mesh."""
    index = torch.tensor(values)
    if not isinstance(like, DTensor):
        return index
    mesh = like.device_mesh
    return distribute_tensor(index, mesh, [placement] * mesh.ndim, src_data_rank=None)


A, B = ((8, 4),), ((8, 4), (8, 4))
UA, UB = ((5, 3),), ((5, 3), (5, 3))

OPS: dict[str, Op] = {
    "add": Op(torch.add, B, UB),
    "add_alpha": Op(lambda a, b: torch.add(a, b, alpha=3), B, UB),
    "add_broadcast": Op(lambda a, b: a + b, ((8, 4), (4,)), ((5, 3), (1, 3))),
    "add_number": Op(lambda a: a + 2, A, UA),
    "rsub": Op(lambda a: 1 - a, A, UA),
    "mul": Op(torch.mul, B, UB),
    "mul_number": Op(lambda a: a * 2.5, A, UA),
    "mul_0dim": Op(lambda a: a * torch.tensor(2.0), A, UA),
    "div": Op(lambda a, b: a / (b * b + 1), B, UB),
    "neg": Op(torch.neg, A, UA),
    "pow": Op(lambda a: a**2, A, UA),
    "exp": Op(torch.exp, A, UA),
    "relu": Op(torch.relu, A, UA),
    "gelu": Op(F.gelu, A, UA),
    "silu": Op(F.silu, A, UA),
    "sigmoid": Op(torch.sigmoid, A, UA),
    "tanh": Op(torch.tanh, A, UA),
    "where": Op(lambda a, b: torch.where(a > 0, a, b), B, UB),
    "clamp": Op(lambda a: a.clamp(-0.5, 0.5), A, UA),
    "to_float": Op(lambda a: a.to(torch.float32).double(), A, UA),
    "to_int": Op(lambda a: (a * 3).to(torch.int64), A, UA, differentiable=False),
    "zeros_like": Op(torch.zeros_like, A, UA, differentiable=False),
    "new_ones": Op(lambda a: a.new_ones(3, 2) + a.new_zeros(a.shape).sum(), A, UA, differentiable=False),
    "mm": Op(torch.mm, ((8, 4), (4, 8)), ((5, 3), (3, 7))),
    "matmul_3d": Op(torch.matmul, ((4, 8, 4), (4, 4)), ((3, 5, 2), (2, 3))),
    "bmm": Op(torch.bmm, ((4, 8, 4), (4, 4, 8)), ((5, 2, 3), (5, 3, 2))),
    "mv": Op(torch.mv, ((8, 4), (4,)), ((5, 3), (3,))),
    "addmm": Op(torch.addmm, ((8,), (4, 4), (4, 8)), ((1, 3), (5, 3), (3, 3))),
    "addmm_scaled": Op(
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
        ((4, 8), (4, 4), (4, 8)),
        ((5, 3), (5, 2), (2, 3)),
    ),
    "linear_3d": Op(F.linear, ((4, 8, 4), (8, 4), (8,)), ((3, 5, 2), (3, 2), (3,))),
    "sum": Op(torch.sum, A, UA),
    "sum_dim": Op(lambda a: a.sum(0), A, UA),
    "sum_keepdim": Op(lambda a: a.sum(-1, keepdim=True), A, UA),
    "mean": Op(torch.mean, A, UA),
    "mean_dim": Op(lambda a: a.mean(0), A, UA),
    "mean_keepdim": Op(lambda a: a.mean((0, 1), keepdim=True), A, UA),
    "amax": Op(lambda a: a.amax(0), A, UA),
    "amin_all": Op(lambda a: a.amin((0, 1)), A, UA),
    "max_all": Op(torch.max, A, UA, differentiable=False),
    "max_dim": Op(lambda a: a.max(1).values, A, UA, differentiable=False),
    "argmax": Op(lambda a: a.argmax(0), A, UA, differentiable=False),
    "var": Op(lambda a: a.var(0), A, UA),
    "norm": Op(lambda a: torch.linalg.vector_norm(a), A, UA),
    "logsumexp": Op(lambda a: a.logsumexp(1), A, UA),
    "prod_dim": Op(lambda a: torch.prod(a, 1), A, UA, differentiable=False),
    "any": Op(lambda a: (a > 1).any(), A, UA, differentiable=False),
    "softmax": Op(lambda a: F.softmax(a, 1), A, UA),
    "log_softmax": Op(lambda a: F.log_softmax(a, 0), A, UA),
    "cumsum": Op(lambda a: a.cumsum(1), A, UA),
    "sort": Op(lambda a: a.sort(0).values, A, UA, differentiable=False),
    "flip": Op(lambda a: a.flip(0), A, UA),
    "layer_norm": Op(
        lambda a, w, b: F.layer_norm(a, (4,), w, b), ((4, 8, 4), (4,), (4,)), ((5, 4), (4,), (4,))
    ),
    "layer_norm_plain": Op(lambda a: F.layer_norm(a, a.shape[-1:]), A, UA),
    "view_split": Op(lambda a: a.view(2, -1, a.shape[1]), A, ((6, 3),)),
    "view_join": Op(lambda a: a.view(-1), A, UA),
    "view_same": Op(lambda a: a.view(a.shape), A, UA),
    "view_ones": Op(lambda a: a.view(a.shape[0], 1, a.shape[1]).view(1, *a.shape), A, UA),
    "view_mix": Op(lambda a: a.view(4, -1), A, ((6, 4),)),
    "flatten_3d": Op(lambda a: a.flatten(0, 1), ((4, 8, 4),), ((3, 5, 2),)),
    "reshape_t": Op(lambda a: a.t().reshape(-1), A, UA),
    "transpose": Op(lambda a: a.transpose(0, 1), A, UA),
    "permute": Op(lambda a: a.permute(2, 0, -2), ((4, 8, 4),), ((3, 5, 2),)),
    "unsqueeze": Op(lambda a: a.unsqueeze(-1), A, UA),
    "squeeze_dim": Op(lambda a: a.squeeze(1), ((8, 1, 4),), ((5, 1, 3),)),
    "squeeze_all": Op(lambda a: a.squeeze(), ((1, 8, 4),), ((1, 5, 1),)),
    "expand": Op(lambda a: a.expand(2, -1, 4), ((8, 1),), ((5, 1),)),
    "slice": Op(lambda a: a[1:6:2], A, UA),
    "slice_other": Op(lambda a: a[:, 1:3], A, UA),
    "slice_all": Op(lambda a: a[:], A, UA),
    "select": Op(lambda a: a[2], A, UA),
    "select_last": Op(lambda a: a[..., -1], A, UA),
    "split": Op(lambda a: torch.split(a, 3)[1], A, UA),
    "split_other": Op(lambda a: a.split(1, dim=1)[2], A, UA),
    "chunk_sum": Op(lambda a: a.chunk(2)[0].sum() + a.chunk(2, -1)[1].sum(), A, UA),
    "unbind": Op(lambda a: a.unbind(1)[0], A, UA),
    "cat": Op(lambda a, b: torch.cat([a, b]), B, UB),
    "cat_last": Op(lambda a, b: torch.cat([a, b], -1), B, UB),
    "stack": Op(lambda a, b: torch.stack([a, b], 1), B, UB),
    "tril": Op(torch.tril, A, UA),
    "index_select": Op(lambda a: a.index_select(0, _index(a, [3, 0, 3], Replicate())), A, UA),
    "index_select_sharded": Op(lambda a: a.index_select(0, _index(a, [3, 0, 3, 1], Shard(0))), A, UA),
    "gather": Op(lambda a: a.gather(0, _index(a, [[2, 1, 0]] * 5, Replicate())), A, UA, differentiable=False),
    "embedding": Op(lambda a: F.embedding(_index(a, [[3, 0], [3, 1]], Replicate()), a), A, UA),
    "embedding_sharded": Op(lambda a: F.embedding(_index(a, [[3, 0], [3, 1]], Shard(0)), a), A, UA),
    "addmv": Op(torch.addmv, ((8,), (8, 4), (4,)), ((5,), (5, 3), (3,))),
    "dot": Op(torch.dot, ((8,), (8,)), ((5,), (5,))),
    "baddbmm": Op(torch.baddbmm, ((1, 8), (4, 8, 4), (4, 4, 8)), ((5, 2, 2), (5, 2, 3), (5, 3, 2))),
    "all": Op(lambda a: (a > 0).all(), A, UA, differentiable=False),
    "all_dim": Op(lambda a: (a > -1).all(0), A, UA, differentiable=False),
    "any_dim": Op(lambda a: (a > 1).any(1), A, UA, differentiable=False),
    "argmin": Op(lambda a: a.argmin(), A, UA, differentiable=False),
    "min_all": Op(torch.min, A, UA, differentiable=False),
    "min_dim": Op(lambda a: a.min(0).indices, A, UA, differentiable=False),
    "std": Op(lambda a: a.std(1), A, UA),
    "topk": Op(lambda a: a.topk(2, 0).values, A, UA, differentiable=False),
    "cumprod": Op(lambda a: a.cumprod(0), A, UA, differentiable=False),
    "triu": Op(torch.triu, A, UA),
    "squeeze_dims": Op(lambda a: a.squeeze((0, 2)), ((1, 8, 1),), ((1, 5, 4),)),
    "split_with_sizes": Op(lambda a: a.split([1, a.shape[0] - 1])[1], A, UA),
    "unsafe_split": Op(lambda a: torch.unsafe_split(a, 2)[1], A, UA, differentiable=False),
    "narrow_copy": Op(lambda a: torch.narrow_copy(a, 0, 1, 3), A, UA, differentiable=False),
    "alias": Op(torch.ops.aten.alias, A, UA),
    "full_like": Op(
        lambda a: torch.full_like(a, 2) + torch.empty_like(a).zero_(), A, UA, differentiable=False
    ),
    "new_full": Op(lambda a: a.new_full((2, 3), 4) + a.new_empty(2, 3).zero_(), A, UA, differentiable=False),
    "fill": Op(
        lambda a: (a * 1).relu().fill_(3) + a.exp().fill_(torch.tensor(2.0)), A, UA, differentiable=False
    ),
    "item": Op(lambda a: a.new_full((1,), a.sum().item()), A, UA, differentiable=False),
    "equal": Op(lambda a: a.new_full((1,), torch.equal(a, a * 1)), A, UA, differentiable=False),
    "same_size": Op(lambda a: a.new_full((1,), torch.is_same_size(a, a.t())), A, UA, differentiable=False),
    "clone": Op(torch.clone, A, UA),
    "mlp": Op(_mlp, ((4, 8, 4), (8, 4), (4, 8)), ((3, 5, 2), (3, 2), (2, 3))),
    "attention": Op(_attention, ((4, 4, 2, 2),) * 3, ((3, 5, 2, 2),) * 3),
    "sdpa": Op(F.scaled_dot_product_attention, ((4, 4, 2, 2),) * 3, ((3, 5, 2, 2),) * 3),
    "double_use": Op(lambda a: (a * a.sum() + a.mean(0)).relu(), A, UA),
}

PLACES = {(4,): 8, (2, 2): 7}  # mesh -> placement combinations tried per op and shape


def _choices(ndim: int) -> list[Placement]:
    return [Replicate(), Partial(), *(Shard(d) for d in range(ndim))]


def _combinations(shapes: tuple[tuple[int, ...], ...], mesh_ndim: int, seed: int) -> Iterator[Any]:
    """Placements of all inputs: everything when there are few, else a seeded sample, alike on all ranks."""
    per_input = [list(itertools.product(_choices(len(s)), repeat=mesh_ndim)) for s in shapes]
    everything = list(itertools.product(*per_input))
    limit = PLACES[(4,) if mesh_ndim == 1 else (2, 2)]
    if len(everything) <= limit:
        yield from everything
        return
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    yield from (everything[i] for i in order[:limit].tolist())


def place(full: torch.Tensor, mesh: Any, placements: tuple[Placement, ...]) -> DTensor:
    """`full` as a DTensor; a Partial gets different terms on every rank, which add up to it."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(full, mesh, whole, src_data_rank=None).to_local()
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            ranks, index = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
            # weights that differ and sum to 1 exactly in binary
            weights = [0.5 ** (r + 1) for r in range(ranks - 1)]
            weights.append(1 - sum(weights))
            local = local * weights[index]
    return DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.contiguous().stride())


def _inputs(shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _run_op(name: str, mesh_shape: tuple[int, ...], uneven: bool) -> tuple[int, list[str]]:
    """On a rank: (cases run, what differed from plain torch)."""
    op = OPS[name]
    shapes = op.uneven if uneven else op.shapes
    mesh = mesh_of(mesh_shape)
    plain = [t.requires_grad_(op.differentiable) for t in _inputs(shapes)]
    expected = op.fn(*plain)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if op.differentiable:
        wanted = torch.autograd.grad(expected, plain, cotangent)
    wrong, count = [], 0
    for placements in _combinations(shapes, len(mesh_shape), seed=len(name)):
        count += 1
        case = f"{name} {'x'.join(map(str, mesh_shape))} {[','.join(map(str, p)) for p in placements]}"
        inputs = [
            place(t.detach(), mesh, p).requires_grad_(op.differentiable)
            for t, p in zip(plain, placements, strict=True)
        ]
        try:
            with torch.no_grad():
                fast = [op.fn(*inputs) for _ in range(3)][-1]  # learnt on the way
            result = op.fn(*inputs)
            for got in (result, fast):
                full = got.full_tensor()
                if full.dtype != expected.dtype or not torch.allclose(
                    full, expected.to(full.dtype), atol=1e-6
                ):
                    wrong.append(f"{case}: got {full}, expected {expected}")
            if op.differentiable:
                (result.full_tensor() * cotangent).sum().backward()
                for index, (t, grad) in enumerate(zip(inputs, wanted, strict=True)):
                    assert t.grad is not None
                    if not torch.allclose(t.grad.full_tensor(), grad, atol=1e-6):
                        wrong.append(f"{case}: gradient {index} is wrong")
        except Exception as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    return count, wrong


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("name", OPS)
def test_op_equals_plain_torch(ranks: Worlds, name: str, uneven: bool) -> None:
    for mesh_shape in PLACES:
        answers = ranks(_run_op, name, mesh_shape, uneven)
        assert all(count > 0 for count, _ in answers)
        wrong = {rank: found[:5] for rank, (_, found) in enumerate(answers) if found}
        assert not wrong, "\n".join(f"rank {rank}: {line}" for rank, found in wrong.items() for line in found)


def test_every_rule_is_tested() -> None:
    """Each op that has a rule is reached by an entry of OPS, forward or backward."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        for op in OPS.values():
            whole = [distribute_tensor(t, mesh, src_data_rank=None) for t in _inputs(op.shapes)]
            result = op.fn(*[t.requires_grad_(op.differentiable) for t in whole])
            if op.differentiable:
                result.sum().backward()
        assert [str(op) for op in ops_with_rules() if op not in dispatch._infos] == []
    finally:
        dist.destroy_process_group()
