"""Cases of the convolution rules: every way to shard, bias once, groups cut between groups."""

from typing import Any

import torch.nn.functional as F

from core.tests.op_case import Op


def _strided(x: Any, w: Any, b: Any) -> Any:
    return F.conv2d(x, w, b, stride=2, padding=1)


OPS: dict[str, Op] = {
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
