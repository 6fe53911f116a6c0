"""Between our DTensors and those of torch.distributed.tensor, both ways, without a copy.

The two stand on the same mesh and share the local tensor, with the count of writes to it; simulated ranks count none.
Under autograd the conversion is an identity: a gradient comes back as a tensor of the class that went in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.autograd import forward_ad

from dtbench_core.errors import ArgumentTypeError, LayoutError, NoRuleError, PlacementError
from dtbench_core.layout.local_shards import holds_shards
from dtbench_core.layout.mesh import mesh_info
from dtbench_core.layout.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtbench_core.layout.spec import DTensorSpec, normalize
from dtbench_core.layout.wrapper import wrap
from dtbench_core.op_types import Ctx
from dtbench_core.redistribute.copied_view import is_copied
from dtbench_core.redistribute.routes import placements_of_gradient
from dtbench_core.tensor.dtensor import DTensor, is_uncounted
from dtbench_core.torch_compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    any_requires_grad,
    as_subclass,
    functorch_level,
    in_graph,
    make_subclass,
    set_data,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

Kind = TypeVar("Kind", bound=torch.Tensor)


@in_graph
def to_torch(tensor: DTensor) -> TorchDTensor:
    """The same tensor as a torch.distributed.tensor.DTensor; differentiable, nothing is copied or sent.

    A parameter of torch's class on the same values is `nn.Parameter(to_torch(parameter.detach()))`.

    Returns:
        A DTensor of torch's on the same mesh with the same placements. A write to the one is a write to the other;
        under autograd writes to the result are refused, as to a view that a function made.

    Raises:
        PlacementError: a placement that torch does not have, or a view that was copied.
        NoRuleError: a tensor with a tangent, which torch's cannot have.
        ArgumentTypeError: no DTensor of ours.
    """
    if not isinstance(tensor, DTensor):
        raise ArgumentTypeError(
            f"to_torch got {_described(tensor)}, expected a dtbench_core.DTensor: from_torch converts the other "
            "way, and a transform takes tensors of one class: convert before it"
        )
    if is_copied(tensor):
        raise PlacementError(
            f"to_torch got {tensor._spec}, a view whose sharded dim had to be gathered before it could be cut, "
            "expected a tensor with memory of its own: clone() it before"
        )
    if holds_shards(tensor._local_tensor):
        raise PlacementError(
            f"to_torch got {tensor._spec}, whose ranks hold lists of shards, expected one local tensor per rank: "
            "convert the shards by themselves"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NoRuleError(
            f"to_torch got {tensor._spec} with a tangent of forward-mode differentiation, which torch's class has no "
            "rule to set: convert the parts of forward_ad.unpack_dual by themselves"
        )
    placed = tuple(_as_torch(p, tensor._spec) for p in tensor._spec.placements)
    if torch.is_grad_enabled() and any_requires_grad(tensor):
        return cast("TorchDTensor", ToTorch.apply(tensor, placed))
    return _to_torch(tensor, placed, view=False)


@in_graph
def from_torch(tensor: TorchDTensor) -> DTensor:
    """The same tensor as a DTensor of ours; differentiable, nothing is copied or sent.

    Returns:
        A DTensor on the same mesh with the same placements. A write to the one is a write to the other; under
        autograd writes to the result are refused, as to a view that a function made.

    Raises:
        PlacementError: a placement, or an order of shards, that only torch has.
        LayoutError: a local tensor that is not the part that the placements say; on the ranks that hold such.
        ArgumentTypeError: no DTensor of torch's.
    """
    from torch.distributed.tensor import DTensor as Theirs

    if not isinstance(tensor, Theirs):
        raise ArgumentTypeError(
            f"from_torch got {_described(tensor)}, expected a torch.distributed.tensor.DTensor: distribute_tensor and "
            "DTensor.from_local take plain tensors"
        )
    spec = _spec_of(tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        return cast("DTensor", FromTorch.apply(tensor, spec))
    return _from_torch(tensor, spec, view=False)


def _described(value: object) -> str:
    kind = type(value)
    wrapped = isinstance(value, torch.Tensor) and functorch_level() is not None
    return f"{kind.__module__}.{kind.__qualname__}{', inside a transform of torch.func' if wrapped else ''}"


def _as_torch(placement: Placement, spec: DTensorSpec) -> Any:
    from torch.distributed.tensor import placement_types as theirs

    kind = type(placement)
    if kind is Replicate:
        return theirs.Replicate()
    if kind is Shard:
        return theirs.Shard(placement.dim)  # type: ignore[attr-defined]
    if isinstance(placement, Partial):
        return theirs.Partial(placement.reduce_op)
    if isinstance(placement, StridedShard):
        return theirs._StridedShard(placement.dim, split_factor=placement.split_factor)
    raise PlacementError(
        f"to_torch got {spec}, expected placements that torch has: {placement!r} is none, as torch cuts a dim only as "
        "torch.chunk does; redistribute it before"
    )


def _spec_of(tensor: TorchDTensor) -> DTensorSpec:
    theirs: Any = tensor._spec
    info = mesh_info(theirs.mesh)
    # Where a dim is sharded twice, torch can let an inner mesh dim split first.
    lists = [o.mesh_dims for o in getattr(theirs, "shard_order", None) or ()]
    if any(list(dims) != sorted(dims) for dims in lists):
        raise PlacementError(
            f"from_torch got {theirs}, whose mesh dims split a tensor dim in the order {lists}, expected the outer "
            "mesh dim first: redistribute it before, without shard_order"
        )
    placed = normalize(theirs.placements, len(theirs.shape), info, theirs.shape)
    spec = DTensorSpec.of(info, placed, theirs.shape, theirs.stride, tensor.dtype)
    held = tensor._local_tensor
    if info.coordinate is not None and tuple(held.shape) != spec.local_shape:
        raise LayoutError(
            f"from_torch got a local tensor of shape {list(held.shape)} for {spec}, expected {list(spec.local_shape)} "
            "on this rank: torch takes shards as they are; tell DTensor.from_local the global shape"
        )
    return spec


def _to_torch(tensor: DTensor, placements: tuple[Any, ...], *, view: bool) -> TorchDTensor:
    from torch.distributed.tensor import DTensor as Theirs
    from torch.distributed.tensor import _dtensor_spec

    spec = tensor._spec
    meta = _dtensor_spec.TensorMeta(spec.shape, spec.stride, spec.dtype)
    placed = _dtensor_spec.DTensorSpec(spec.mesh, placements, tensor_meta=meta)
    local = tensor._local_tensor.detach()
    result = Theirs(local, placed, requires_grad=False)
    return _counted_with(tensor, Theirs, result, local, placed, view)


def _from_torch(tensor: TorchDTensor, spec: DTensorSpec, *, view: bool) -> DTensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = tensor._local_tensor
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local.detach()
    return _counted_with(tensor, DTensor, wrap(DTensor, local, spec), local, spec, view)


def _counted_with(
    tensor: torch.Tensor, cls: type[Kind], result: Kind, local: torch.Tensor, spec: object, view: bool
) -> Kind:
    """`result`, a `cls`, as a tensor whose writes are counted together with those of `tensor`."""
    if is_uncounted(local):
        return result
    with DisableTorchFunction(), DisableTorchDispatch():
        shared: Any = as_subclass(tensor, cls) if view else make_subclass(cls, tensor)
        set_data(shared, result)
    shared._local_tensor, shared._spec = local, spec
    return cast("Kind", shared)


class ToTorch(torch.autograd.Function):
    """Our DTensor -> torch's."""

    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor, placements: tuple[Any, ...]) -> TorchDTensor:
        ctx.spec = tensor._spec
        return _to_torch(tensor, placements, view=True)

    @staticmethod
    def backward(ctx: Ctx, grad: TorchDTensor) -> tuple[DTensor, None]:
        placed = placements_of_gradient(ctx.spec.placements)
        return from_torch(grad).redistribute(placements=placed), None


class FromTorch(torch.autograd.Function):
    """Torch's DTensor -> ours."""

    @staticmethod
    def forward(ctx: Ctx, tensor: TorchDTensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        return _from_torch(tensor, spec, view=True)

    @staticmethod
    def backward(ctx: Ctx, grad: DTensor) -> tuple[TorchDTensor, None]:
        return to_torch(grad.redistribute(placements=placements_of_gradient(ctx.spec.placements))), None
