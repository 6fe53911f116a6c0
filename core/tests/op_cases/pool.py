"""Cases of pooling, resizing, padding and sampling, batched and not."""

from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import Op, values

ONE, UNEVEN_ONE = ((4, 8, 6),), ((3, 5, 5),)
TWO, UNEVEN_TWO = ((4, 4, 6, 6),), ((3, 5, 5, 4),)
THREE, UNEVEN_THREE = ((4, 4, 4, 4, 4),), ((2, 3, 4, 4, 4),)
ALONE, UNEVEN_ALONE = ((8, 6, 6),), ((5, 5, 4),)  # without a batch dim


def _resized(mode: str, **how: Any) -> Any:
    return lambda x: F.interpolate(x, scale_factor=1.5, mode=mode, **how)


def _grid(x: Any, grid: Any) -> Any:
    return F.grid_sample(x, grid.tanh(), align_corners=False)


OPS: dict[str, Op] = {
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
