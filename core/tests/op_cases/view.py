"""Cases of the view rules: diagonals, windows, repeats, scatters into views, and the copying forms."""

from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import Op, flat, values

aten = torch.ops.aten
A3, U3 = ((4, 8, 4),), ((3, 5, 2),)


def _copies(a: Any) -> Any:
    """The copying form of each view."""
    ones, bits, sizes = a.unsqueeze(0), (a * 4).round(), [1, a.shape[0] - 1]
    outs = [aten.view_copy(a, [-1]), aten.view_copy.dtype(bits, torch.int64) % 7, aten.t_copy(a)]
    outs += [aten.transpose_copy.int(a, 0, -1), aten.permute_copy(a, [1, 0]), aten.unsqueeze_copy(a, -1)]
    outs += [aten.squeeze_copy(ones), aten.squeeze_copy.dim(ones, 0), aten.squeeze_copy.dims(ones, [0, 1])]
    outs += [aten.expand_copy(ones, [2, -1, -1]), aten.slice_copy.Tensor(a, 0, 1, 4)]
    outs += [aten.select_copy.int(a, 0, 1), aten.diagonal_copy(a), aten.unfold_copy(a, 0, 2, 1)]
    outs += [aten.narrow_copy(a, 0, 1, 2), *aten.split_copy.Tensor(a, 2), *aten.unbind_copy.int(a, 1)]
    outs += [*aten.split_with_sizes_copy(a, sizes), *aten.unsafe_split_with_sizes(a, sizes)]
    return flat([*outs, bits.view(torch.int64) % 5, bits.view(torch.int32) % 5])


def _triangles(a: Any) -> Any:
    """Every diagonal, also in place, of matrices whose dims are sharded."""
    parts = [f(a, k) for k in range(-3, 4) for f in (torch.tril, torch.triu)]
    parts += [(a * 1).tril_(-1), (a * 1).triu_(1)]
    return flat(parts)


OPS: dict[str, Op] = {
    "copies": values(_copies),
    "triangles": Op(_triangles),
    "triangles_batch": Op(_triangles, A3, U3),
    "diagonal": Op(lambda a: a.diagonal(1, -1, 0), A3, U3),
    "diag_embed": Op(lambda a: torch.diag_embed(a, -1, 0, -1)),
    "diagonal_scatter": Op(
        lambda a, b: a.diagonal_scatter(b, 0, 1, 2), ((4, 8, 4), (4, 4)), ((3, 5, 2), (3, 2))
    ),
    "select_scatter": Op(lambda a, b: a.select_scatter(b, 1, -1), ((4, 8, 4), (4, 4)), ((3, 5, 2), (3, 2))),
    "slice_scatter": Op(
        lambda a, b: a.slice_scatter(b, 1, 0, 4, 2), ((4, 8, 4), (4, 2, 4)), ((3, 5, 2), (3, 2, 2))
    ),
    "slice_scatter_all": Op(lambda a, b: a.slice_scatter(b, 1), A3 * 2, U3 * 2),
    "unfold": Op(lambda a: a.unfold(-1, 2, 1)),
    "roll": Op(lambda a: a.roll((1, -3), (0, -1))),
    "roll_flat": Op(lambda a: a.roll(2)),
    "rot90": Op(lambda a: a.rot90(1, (0, 1)), A3, U3),
    "repeat": Op(lambda a: a.repeat(2, 1, 3)),
    "tile": Op(lambda a: a.tile((2, 1))),
    "pixel_shuffle": Op(lambda a: F.pixel_shuffle(a, 2), ((4, 4, 2, 3),), ((3, 4, 2, 1),)),
    "pixel_unshuffle": Op(lambda a: F.pixel_unshuffle(a, 2), ((4, 1, 2, 4),), ((3, 2, 2, 4),)),
    "channel_shuffle": Op(lambda a: F.channel_shuffle(a, 2), ((4, 4, 2),), ((3, 4, 2),)),
    "squeeze_none": Op(lambda a: a.squeeze(()), ((1, 8, 1),), ((1, 5, 1),)),
    "tensor_split": Op(lambda a: a.tensor_split(torch.tensor([1, 3]))[1]),
    "movedim": Op(lambda a: a.movedim(0, -1).swapaxes(0, 1), A3, U3),
    "meshgrid": Op(lambda a, b: torch.stack(torch.meshgrid(a, b, indexing="ij")), ((8,), (4,)), ((5,), (3,))),
}
