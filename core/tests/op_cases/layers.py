"""Cases of losses, norms, attention, convolutions and pooling."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import UB, B, Op, flat, index_for, values
from dtbench_core import DTensor, Replicate, Shard, distribute_tensor


def beside(like: Any, full: torch.Tensor) -> Any:
    """`full` replicated on the mesh of `like`; as it is where that is plain."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, src_data_rank=None)


def _weight(like: Any, length: int) -> Any:
    return beside(like, torch.arange(1, length + 1, dtype=torch.float64) / length)


def _classes(like: Any, shard: bool) -> Any:
    """Targets of logits [n, class, ...]: the first half is class 1, to be ignored."""
    n, classes = like.shape[:2]
    shape = (n, *like.shape[2:])
    targets = torch.arange(torch.Size(shape).numel()).view(shape) % classes
    targets[: (n + 1) // 2] = 1
    return index_for(like, targets.tolist(), Shard(0) if shard else Replicate())


def _elementwise(loss: Callable[..., Any]) -> dict[str, Op]:
    name = loss.__name__.strip("_")
    return {
        f"{name}_{how}": Op(lambda a, b, how=how: loss(a, b, reduction=how), B, UB)
        for how in ("none", "mean", "sum")
    }


def _soft_margin(a: Any, b: Any, reduction: str) -> Any:
    return F.soft_margin_loss(a * b, b.detach().sign(), reduction=reduction)


def _bce(a: Any, b: Any, how: str) -> Any:
    weight = _weight(a, a.shape[-1])
    return F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), weight=weight.expand(a.shape), reduction=how)


def _bce_logits(a: Any, b: Any) -> Any:
    return F.binary_cross_entropy_with_logits(a, b.sigmoid(), pos_weight=_weight(a, a.shape[-1]))


def _nll(a: Any, how: str, *, weighted: bool = False, ignore: int = -100, shard: bool = True) -> Any:
    weight = _weight(a, a.shape[1]) if weighted else None
    return F.nll_loss(a, _classes(a, shard), weight, reduction=how, ignore_index=ignore)


def _cross_entropy(a: Any) -> Any:
    return F.cross_entropy(a, _classes(a, True), ignore_index=1, label_smoothing=0.1)


def _cross_entropy_parts(a: Any) -> Any:
    """The ops that F.cross_entropy becomes where classes are sharded, called one by one."""
    ours, classes = torch.ops.dtbench_core, a.shape[1]
    target, weight = _classes(a, True), _weight(a, classes)
    top = ours.class_max(a, 1)
    sums = ours.class_sums(a, top, target, weight, 1, True)
    losses = ours.class_loss(sums, target, weight, classes, 1, 0.1)
    options = (1, classes, 1, 0.1)  # dim, classes, ignore_index, smoothing
    return flat([top, sums, losses, ours.class_gradient(top, a, top, sums, target, weight, *options)])


def _embedding_rows_backward(a: Any) -> Any:
    """The gradient of a table by rows, of whose 7 rows the second is padding."""
    rows = index_for(a, [i % 7 for i in range(a.shape[0])], Shard(0))
    return torch.ops.dtbench_core.embedding_rows_backward(a, rows, 7, 1)


IMAGES, UNEVEN_IMAGES = ((4, 3, 4, 2),), ((3, 4, 2, 5),)

OPS: dict[str, Op] = {
    **_elementwise(F.mse_loss),
    **_elementwise(F.huber_loss),
    **_elementwise(F.smooth_l1_loss),
    **_elementwise(_soft_margin),
    "mse_loss_empty_shards": Op(F.mse_loss, ((2, 3),) * 2, ((1, 2),) * 2),
    "bce": Op(lambda a, b: _bce(a, b, "mean"), B, UB),
    "bce_sum": Op(lambda a, b: _bce(a, b, "sum"), B, UB),
    "bce_none": Op(lambda a, b: _bce(a, b, "none"), B, UB),
    "bce_logits": Op(_bce_logits, B, UB),
    "kl_div": Op(lambda a, b: F.kl_div(a, b.softmax(-1), reduction="batchmean"), B, UB),
    "poisson_nll": Op(lambda a, b: F.poisson_nll_loss(a, b.exp(), full=True), B, UB),
    "hinge": Op(lambda a, b: F.hinge_embedding_loss(a * b, b.detach().sign()), B, UB),
    "nll_whole_target": Op(lambda a: _nll(a, "mean", shard=False)),
    "nll_weighted": Op(lambda a: _nll(a, "mean", weighted=True)),
    "nll_ignoring": Op(lambda a: _nll(a, "mean", weighted=True, ignore=1)),
    "nll_sum": Op(lambda a: _nll(a, "sum", ignore=1)),
    "nll_none": Op(lambda a: _nll(a, "none", weighted=True, ignore=1)),
    "nll_images": Op(lambda a: _nll(a, "mean", weighted=True, ignore=1), IMAGES, UNEVEN_IMAGES),
    "cross_entropy": Op(_cross_entropy),
    "cross_entropy_parts": values(_cross_entropy_parts),
    "embedding_rows_backward": values(_embedding_rows_backward),
}


# ---- norms ----


PLANES, UNEVEN_PLANES = ((4, 8, 3),), ((3, 5, 2),)


def _batch_norm(x: Any, w: Any, b: Any) -> Any:
    """In training, with running statistics, which become part of the result."""
    channels = x.shape[1]
    mean, var = beside(x, torch.zeros(channels).double()), beside(x, torch.ones(channels).double())
    return F.batch_norm(x, mean, var, w, b, training=True) + (mean + var).view(-1, *[1] * (x.ndim - 2))


def _batch_norm_given(x: Any, w: Any) -> Any:
    steps = torch.arange(1, x.shape[1] + 1).double()
    return F.batch_norm(x, beside(x, steps), beside(x, steps), w, None, training=False)


def _with_update(x: Any) -> Any:
    one = beside(x, torch.ones(x.shape[1]).double())
    mean, var = one - 1, one * 2
    updated = torch.ops.aten._batch_norm_with_update(x, one, one, mean, var, 0.2, 1e-5)
    same = torch.ops.aten._native_batch_norm_legit(x, one, one, mean, var, True, 0.1, 1e-5)
    alone = torch.ops.aten._native_batch_norm_legit(x, one, None, True, 0.1, 1e-5)
    return updated[0] + updated[1].view(-1, 1) + same[0] + alone[2].view(-1, 1) + (mean + var).view(-1, 1)


def _without_update(x: Any) -> Any:
    one = beside(x, torch.ones(x.shape[1]).double())
    updated = torch.ops.aten._batch_norm_no_update(x, one, one, one, one, 0.2, 1e-5)
    same = torch.ops.aten._native_batch_norm_legit_no_training(x, one, None, one, one, 0.1, 1e-5)
    return updated[0] + same[0]


CHANNELS = ((4, 8, 3), (8,), (8,)), ((3, 5, 2), (5,), (5,))

OPS |= {
    "safe_softmax": Op(lambda a: torch.ops.aten._safe_softmax(a, 1)),
    "renorm": Op(lambda a: torch.renorm(a, 2, 0, 0.5)),
    "renorm_in_place": values(lambda a: (a * 1).renorm_(2, 0, 0.5)),
    "numbers_added_in_place": Op(lambda a: a.sum(0).sub_(2).add_(3, alpha=2) + a.mean(0).add_(1)),
    "cross": Op(torch.linalg.cross, ((8, 3), (8, 3)), ((5, 3), (1, 3))),
    "rms_norm": Op(lambda a, w: F.rms_norm(a, w.shape, w), ((8, 4), (4,)), ((5, 3), (3,))),
    "normalize": Op(F.normalize),
    "group_norm": Op(lambda x, w, b: F.group_norm(x, 4, w, b), CHANNELS[0], ((3, 4, 2), (4,), (4,))),
    "group_norm_one": Op(lambda x: F.group_norm(x, 1), PLANES, UNEVEN_PLANES),
    "weight_norm": Op(lambda v: torch._weight_norm(v, v[:, :1] * 2, 0)),
    "cdist": Op(torch.cdist, ((4, 8, 2), (4, 4, 2)), ((2, 5, 3), (2, 3, 3))),
    "cdist_city": Op(lambda a, b: torch.cdist(a, b, p=1.0), B, UB),
    "cosine_similarity": Op(F.cosine_similarity, B, UB),
    "batch_norm": Op(_batch_norm, *CHANNELS),
    "batch_norm_given": Op(_batch_norm_given, ((4, 8, 3), (8,)), ((3, 5, 2), (5,))),
    "batch_norm_forms": values(_with_update, PLANES, UNEVEN_PLANES),
    "batch_norm_reserve": Op(
        lambda x: torch.ops.aten._batch_norm_with_update(
            x, *(beside(x, torch.ones(x.shape[1]).double()) for _ in range(4)), 0.2, 1e-5
        )[0],
        PLANES,
        UNEVEN_PLANES,
    ),
    "batch_norm_no_update": values(_without_update, PLANES, UNEVEN_PLANES),
    "instance_norm": Op(F.instance_norm, PLANES, UNEVEN_PLANES),
}


# ---- attention ----


SDPA = F.scaled_dot_product_attention
Q, UQ = (4, 4, 3, 2), (3, 5, 3, 2)  # [batch, head, length, width]


def _mask(q: Any, shape: tuple[int, ...]) -> Any:
    return beside(q, torch.arange(torch.Size(shape).numel()).view(shape).double().sin())


def _masked(*dims: int | None) -> Op:
    """With a mask of the query's lengths of `dims`; None: one that broadcasts."""

    def run(q: Any, k: Any, v: Any) -> Any:
        shape = tuple(1 if d is None else q.shape[d] for d in dims)
        return SDPA(q, k, v, attn_mask=_mask(q, (*shape, k.shape[2])), scale=0.3)

    return Op(run, (Q,) * 3, (UQ,) * 3)


OPS |= {
    "sdpa_mask": _masked(0, 1, 2),
    "sdpa_mask_of_batch": _masked(0, None, 2),
    "sdpa_mask_of_length": _masked(2),
    "sdpa_causal": Op(lambda q, k, v: SDPA(q, k, v, is_causal=True), (Q,) * 3, (UQ,) * 3),
    "sdpa_grouped": Op(
        lambda q, k, v: SDPA(q, k, v, enable_gqa=True),
        ((4, 8, 2, 2), (4, 2, 3, 2), (4, 2, 3, 2)),
        ((3, 6, 2, 2), (3, 3, 3, 2), (3, 3, 3, 2)),
    ),
    "sdpa_3d": Op(SDPA, ((4, 3, 2),) * 3, ((5, 3, 2),) * 3),
}


# ---- convolutions ----


def _strided(x: Any, w: Any, b: Any) -> Any:
    return F.conv2d(x, w, b, stride=2, padding=1)


OPS |= {
    "conv1d": Op(F.conv1d, ((4, 4, 6), (8, 4, 3), (8,)), ((3, 5, 6), (6, 5, 2), (6,))),
    "conv2d_strided": Op(_strided, ((4, 4, 5, 5), (4, 4, 3, 3), (4,)), ((2, 3, 5, 4), (5, 3, 3, 2), (5,))),
    "conv_unbatched": Op(F.conv2d, ((4, 5, 5), (8, 4, 2, 2), (8,)), ((3, 5, 5), (2, 3, 2, 2), (2,))),
    "conv_depthwise": Op(
        lambda x, w, b: F.conv1d(x, w, b, groups=x.shape[1], dilation=2),
        ((4, 8, 6), (8, 1, 2), (8,)),
        ((3, 6, 6), (6, 1, 2), (6,)),
    ),
    "conv_groups": Op(
        lambda x, w: F.conv1d(x, w, groups=4), ((4, 8, 4), (12, 2, 3)), ((2, 12, 4), (8, 3, 3))
    ),
    "conv_transpose": Op(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        ((4, 4, 3, 3), (4, 8, 2, 2), (8,)),
        ((3, 5, 3, 2), (5, 3, 2, 2), (3,)),
    ),
    "conv_transpose_groups": Op(
        lambda x, w, b: F.conv_transpose1d(x, w, b, groups=4),
        ((4, 8, 3), (8, 3, 2), (12,)),
        ((5, 4, 3), (4, 1, 2), (4,)),
    ),
    "conv3d": Op(
        F.conv3d, ((4, 4, 3, 3, 3), (4, 4, 2, 2, 2), (4,)), ((2, 3, 3, 2, 3), (3, 3, 2, 2, 2), (3,))
    ),
}


# ---- pooling, resizing, padding ----


ONE, UNEVEN_ONE = ((4, 8, 6),), ((3, 5, 5),)
TWO, UNEVEN_TWO = ((4, 4, 6, 6),), ((3, 5, 5, 4),)
THREE, UNEVEN_THREE = ((4, 4, 4, 4, 4),), ((2, 3, 4, 4, 4),)
ALONE, UNEVEN_ALONE = ((8, 6, 6),), ((5, 5, 4),)  # without a batch dim


def _resized(mode: str, **how: Any) -> Any:
    return lambda x: F.interpolate(x, scale_factor=1.5, mode=mode, **how)


def _grid(x: Any, grid: Any) -> Any:
    return F.grid_sample(x, grid.tanh(), align_corners=False)


OPS |= {
    "avg_pool1d": Op(lambda x: F.avg_pool1d(x, 2), ONE, UNEVEN_ONE),
    "avg_pool2d": Op(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), TWO, UNEVEN_TWO),
    "avg_pool3d": Op(lambda x: F.avg_pool3d(x, 2), THREE, UNEVEN_THREE),
    "max_pool1d": Op(lambda x: F.max_pool1d(x, 2), ONE, UNEVEN_ONE),
    "max_pool2d": Op(lambda x: F.max_pool2d(x, 3, 2, 1), TWO, UNEVEN_TWO),
    "max_pool2d_indices": values(lambda x: sum(F.max_pool2d(x, 2, return_indices=True)), TWO, UNEVEN_TWO),
    "max_pool3d": Op(lambda x: F.max_pool3d(x, 2), THREE, UNEVEN_THREE),
    "adaptive_avg_pool2d": Op(lambda x: F.adaptive_avg_pool2d(x, 2), TWO, UNEVEN_TWO),
    "adaptive_avg_pool2d_to_one": Op(lambda x: F.adaptive_avg_pool2d(x, 1), TWO, UNEVEN_TWO),
    "adaptive_avg_pool3d": Op(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2)), THREE, UNEVEN_THREE),
    "adaptive_max_pool2d": Op(lambda x: F.adaptive_max_pool2d(x, 2), ALONE, UNEVEN_ALONE),
    "adaptive_max_pool3d": Op(lambda x: F.adaptive_max_pool3d(x, 2), THREE, UNEVEN_THREE),
    "local_response_norm": Op(lambda x: F.local_response_norm(x, 3), TWO, UNEVEN_TWO),
    **{
        f"resize_{mode}_{rank}d": Op(_resized(mode), shapes, uneven)
        for mode in ("nearest", "nearest-exact")
        for rank, shapes, uneven in ((1, ONE, UNEVEN_ONE), (2, TWO, UNEVEN_TWO), (3, THREE, UNEVEN_THREE))
    },
    "resize_linear": Op(_resized("linear"), ONE, UNEVEN_ONE),
    "resize_bilinear": Op(_resized("bilinear"), TWO, UNEVEN_TWO),
    "resize_bicubic": Op(_resized("bicubic", align_corners=True), TWO, UNEVEN_TWO),
    "resize_bilinear_smooth": Op(_resized("bilinear", antialias=True), TWO, UNEVEN_TWO),
    "resize_bicubic_smooth": Op(_resized("bicubic", antialias=True), TWO, UNEVEN_TWO),
    "resize_trilinear": Op(_resized("trilinear"), THREE, UNEVEN_THREE),
    "pad_constant": Op(lambda x: F.pad(x, (1, -1, 0, 0)), ONE, UNEVEN_ONE),
    "pad_constant_value": Op(lambda x: F.pad(x, (0, 0, 1, 2), value=3.0), ONE, UNEVEN_ONE),
    **{
        f"pad_{mode}_{rank}d": Op(
            lambda x, mode=mode, rank=rank: F.pad(x, (1, 2) * rank, mode=mode), shapes, uneven
        )
        for mode in ("reflect", "replicate")
        for rank, shapes, uneven in ((1, ONE, UNEVEN_ONE), (2, TWO, UNEVEN_TWO), (3, THREE, UNEVEN_THREE))
    },
    "unfold_planes": Op(lambda x: F.unfold(x, 2), TWO, UNEVEN_TWO),
    "fold": Op(lambda x: F.fold(x, (3, 3), 2), ((4, 16, 4),), ((3, 12, 4),)),
    "grid_sample": Op(_grid, ((4, 4, 4, 4), (4, 4, 8, 2)), ((3, 5, 4, 3), (3, 2, 5, 2))),
    "grid_sample_3d": Op(_grid, ((4, 4, 2, 2, 2), (4, 4, 2, 2, 3)), ((2, 3, 2, 3, 2), (2, 3, 2, 1, 3))),
}
if hasattr(torch.ops.aten, "_upsample_lanczos2d_aa"):
    OPS["resize_lanczos"] = Op(
        lambda x: torch.ops.aten._upsample_lanczos2d_aa(x, [9, 7], False), TWO, UNEVEN_TWO
    )
