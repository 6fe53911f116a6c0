"""Cases of the pointwise, matmul, reduction, view, norm and lookup rules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import UA, UB, A, B, Op, index_for
from dtbench_core import Replicate, Shard

_tangent_like = torch.ops.aten._new_zeros_with_same_feature_meta


def _mlp(x: Any, w1: Any, w2: Any) -> Any:
    return F.linear(torch.relu(F.linear(x, w1)), w2)


def _attention(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v


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
    "memory for tangents": Op(
        lambda a: _tangent_like(a, a) + _tangent_like(a, a[0], self_num_batch_dims=1),
        A,
        UA,
        differentiable=False,
    ),
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
    "index_select": Op(lambda a: a.index_select(0, index_for(a, [3, 0, 3], Replicate())), A, UA),
    "index_select_sharded": Op(lambda a: a.index_select(0, index_for(a, [3, 0, 3, 1], Shard(0))), A, UA),
    "gather": Op(
        lambda a: a.gather(0, index_for(a, [[2, 1, 0]] * 5, Replicate())), A, UA, differentiable=False
    ),
    "embedding": Op(lambda a: F.embedding(index_for(a, [[3, 0], [3, 1]], Replicate()), a), A, UA),
    "embedding_sharded": Op(lambda a: F.embedding(index_for(a, [[3, 0], [3, 1]], Shard(0)), a), A, UA),
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
    "equal_op": Op(lambda a: a.new_full((1,), torch.ops.aten.equal(a, a * 1)), A, UA, differentiable=False),
    "same_size": Op(
        lambda a: a.new_full((1,), torch.ops.aten.is_same_size(a, a.t())), A, UA, differentiable=False
    ),
    "clone": Op(torch.clone, A, UA),
    "mlp": Op(_mlp, ((4, 8, 4), (8, 4), (4, 8)), ((3, 5, 2), (3, 2), (2, 3))),
    "attention": Op(_attention, ((4, 4, 2, 2),) * 3, ((3, 5, 2, 2),) * 3),
    "sdpa": Op(F.scaled_dot_product_attention, ((4, 4, 2, 2),) * 3, ((3, 5, 2, 2),) * 3),
    "double_use": Op(lambda a: (a * a.sum() + a.mean(0)).relu(), A, UA),
}
