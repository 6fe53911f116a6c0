"""One entry of the op tables: what test_ops.py runs against plain torch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dtbench_core import DTensor, Placement, distribute_tensor

Shapes = tuple[tuple[int, ...], ...]
# Shapes of one and of two inputs; U: uneven on 4 ranks.
A, B = ((8, 4),), ((8, 4), (8, 4))
UA, UB = ((5, 3),), ((5, 3), (5, 3))


class Op(NamedTuple):
    """fn of the input tensors; shapes of the inputs (even on 4 ranks), and of an uneven variant.

    places: placement combinations tried per mesh; fewer for a function that is many ops at once.
    """

    fn: Callable[..., Any]
    shapes: Shapes = A
    uneven: Shapes = UA
    differentiable: bool = True
    places: int = 4


def values(fn: Callable[..., Any], shapes: Shapes = A, uneven: Shapes = UA, places: int = 4) -> Op:
    """A case of values alone, without gradients."""
    return Op(fn, shapes, uneven, differentiable=False, places=places)


def index_for(like: Any, values: list[Any], placement: Placement) -> Any:
    """An index tensor to go with `like`: plain, or placed on its mesh."""
    index = torch.tensor(values)
    if not isinstance(like, DTensor):
        return index
    mesh = like.device_mesh
    return distribute_tensor(index, mesh, [placement] * mesh.ndim, src_data_rank=None)


def total(parts: list[Any]) -> Any:
    """One tensor of many of the same shape, which tells them apart."""
    return functools.reduce(torch.add, (part.double() * (i + 1) for i, part in enumerate(parts)))


def flat(parts: list[Any]) -> Any:
    """One tensor of many of any shape, which tells them apart."""
    return torch.cat([part.reshape(-1).double() * (i + 1) for i, part in enumerate(parts)])


# Ops that run on GPUs only: test_ops.py tries their rules on meta tensors.
_attentions = ("flash", "efficient", "cudnn", "fused")
DEVICE_ONLY = {
    op.default
    for kind in _attentions
    for name in (
        f"_scaled_dot_product_{kind}_attention",
        f"_scaled_dot_product_{kind}_attention_overrideable",
    )
    for op in (getattr(torch.ops.aten, name, None), getattr(torch.ops.aten, name + "_backward", None))
    if op is not None
} | {torch.ops.aten._fused_rms_norm.default, torch.ops.aten._fused_rms_norm_backward.default}
