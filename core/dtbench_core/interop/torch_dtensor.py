"""Conversion between our DTensors and those of torch.distributed.tensor, both ways, without a copy.

Both have the same mesh and share the local tensor and its version counter; simulated ranks have no version counter.
Under autograd the conversion is an identity: the gradient is a tensor of the class of the input.
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
from dtbench_core.tensor.dtensor import DTensor, lacks_version_counter
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
    """Converts a DTensor to a torch.distributed.tensor.DTensor. Differentiable; nothing is copied or sent.

    A parameter of torch's class with the same values is `nn.Parameter(to_torch(parameter.detach()))`.

    Returns:
        A torch DTensor with the same mesh and placements. A write to one is a write to the other. Under autograd,
        writes to the result are refused, as for a view returned by an autograd Function.

    Raises:
        PlacementError: a placement that torch does not have, or a view that was copied.
        NoRuleError: a tensor with a tangent, which torch's DTensor cannot have.
        ArgumentTypeError: not one of our DTensors.
    """
    if not isinstance(tensor, DTensor):
        raise ArgumentTypeError(
            f"to_torch got {_describe_type(tensor)}, expected a dtbench_core.DTensor: use from_torch for a torch "
            "DTensor, and convert before a transform of torch.func, not inside"
        )
    if is_copied(tensor):
        raise PlacementError(
            f"to_torch got {tensor._spec}, a view that had to be copied, since its sharded dim was gathered; "
            "expected a tensor with memory of its own: clone() it before"
        )
    if holds_shards(tensor._local_tensor):
        raise PlacementError(
            f"to_torch got {tensor._spec}, whose ranks hold lists of shards, expected one local tensor per rank: "
            "convert each shard separately"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NoRuleError(
            f"to_torch got {tensor._spec} with a tangent of forward-mode differentiation, which torch's DTensor "
            "cannot have: convert the two tensors of forward_ad.unpack_dual separately"
        )
    placements = tuple(_as_torch(p, tensor._spec) for p in tensor._spec.placements)
    if torch.is_grad_enabled() and any_requires_grad(tensor):
        return cast("TorchDTensor", ToTorch.apply(tensor, placements))
    return _to_torch(tensor, placements, view=False)


@in_graph
def from_torch(tensor: TorchDTensor) -> DTensor:
    """Converts a torch.distributed.tensor.DTensor to a DTensor of ours. Differentiable; nothing is copied or sent.

    Returns:
        A DTensor with the same mesh and placements. A write to one is a write to the other. Under autograd, writes to
        the result are refused, as for a view returned by an autograd Function.

    Raises:
        PlacementError: a placement, or an order of shards, that only torch has.
        LayoutError: the shape of a local tensor does not fit its placements; raised on the ranks concerned.
        ArgumentTypeError: not a torch DTensor.
    """
    from torch.distributed.tensor import DTensor as TorchDTensorClass

    if not isinstance(tensor, TorchDTensorClass):
        raise ArgumentTypeError(
            f"from_torch got {_describe_type(tensor)}, expected a torch.distributed.tensor.DTensor: use "
            "distribute_tensor or DTensor.from_local for plain tensors"
        )
    spec = _spec_of(tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        return cast("DTensor", FromTorch.apply(tensor, spec))
    return _from_torch(tensor, spec, view=False)


def _describe_type(value: object) -> str:
    kind = type(value)
    wrapped = isinstance(value, torch.Tensor) and functorch_level() is not None
    return f"{kind.__module__}.{kind.__qualname__}{', inside a transform of torch.func' if wrapped else ''}"


def _as_torch(placement: Placement, spec: DTensorSpec) -> Any:
    from torch.distributed.tensor import placement_types as torch_placements

    kind = type(placement)
    if kind is Replicate:
        return torch_placements.Replicate()
    if kind is Shard:
        return torch_placements.Shard(placement.dim)  # type: ignore[attr-defined]
    if isinstance(placement, Partial):
        return torch_placements.Partial(placement.reduce_op)
    if isinstance(placement, StridedShard):
        return torch_placements._StridedShard(placement.dim, split_factor=placement.split_factor)
    raise PlacementError(
        f"to_torch got {spec}, expected placements that torch has: torch splits a dim only as torch.chunk does, so it "
        f"has no {placement!r}; redistribute the tensor before"
    )


def _spec_of(tensor: TorchDTensor) -> DTensorSpec:
    torch_spec: Any = tensor._spec
    info = mesh_info(torch_spec.mesh)
    # If a dim is sharded twice, torch allows the inner mesh dim to split it first.
    orders = [o.mesh_dims for o in getattr(torch_spec, "shard_order", None) or ()]
    if any(list(dims) != sorted(dims) for dims in orders):
        raise PlacementError(
            f"from_torch got {torch_spec}, whose mesh dims split a tensor dim in the order {orders}, expected the "
            "outer mesh dim first: redistribute it before, without shard_order"
        )
    spec = DTensorSpec.of(
        info,
        normalize(torch_spec.placements, len(torch_spec.shape), info, torch_spec.shape),
        torch_spec.shape,
        torch_spec.stride,
        tensor.dtype,
    )
    local_shape = tuple(tensor._local_tensor.shape)
    if info.coordinate is not None and local_shape != spec.local_shape:
        raise LayoutError(
            f"from_torch got a local tensor of shape {list(local_shape)} for {spec}, expected "
            f"{list(spec.local_shape)} on this rank: torch does not check the shapes of shards; pass the global shape "
            "to DTensor.from_local"
        )
    return spec


def _to_torch(tensor: DTensor, placements: tuple[Any, ...], *, view: bool) -> TorchDTensor:
    from torch.distributed.tensor import DTensor as TorchDTensorClass
    from torch.distributed.tensor import _dtensor_spec

    spec = tensor._spec
    torch_spec = _dtensor_spec.DTensorSpec(
        spec.mesh, placements, tensor_meta=_dtensor_spec.TensorMeta(spec.shape, spec.stride, spec.dtype)
    )
    local = tensor._local_tensor.detach()
    return _with_shared_version(
        tensor,
        TorchDTensorClass,
        TorchDTensorClass(local, torch_spec, requires_grad=False),
        local,
        torch_spec,
        view,
    )


def _from_torch(tensor: TorchDTensor, spec: DTensorSpec, *, view: bool) -> DTensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = tensor._local_tensor
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local.detach()
    return _with_shared_version(tensor, DTensor, wrap(DTensor, local, spec), local, spec, view)


def _with_shared_version(
    tensor: torch.Tensor, cls: type[Kind], result: Kind, local: torch.Tensor, spec: object, view: bool
) -> Kind:
    """Returns `result`, of class `cls`, as a tensor that shares the version counter of `tensor`."""
    if lacks_version_counter(local):
        return result
    with DisableTorchFunction(), DisableTorchDispatch():
        shared: Any = as_subclass(tensor, cls) if view else make_subclass(cls, tensor)
        set_data(shared, result)
    shared._local_tensor, shared._spec = local, spec
    return cast("Kind", shared)


class ToTorch(torch.autograd.Function):
    """Converts our DTensor to torch's."""

    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor, placements: tuple[Any, ...]) -> TorchDTensor:
        ctx.spec = tensor._spec
        return _to_torch(tensor, placements, view=True)

    @staticmethod
    def backward(ctx: Ctx, grad: TorchDTensor) -> tuple[DTensor, None]:
        return from_torch(grad).redistribute(placements=placements_of_gradient(ctx.spec.placements)), None


class FromTorch(torch.autograd.Function):
    """Converts torch's DTensor to ours."""

    @staticmethod
    def forward(ctx: Ctx, tensor: TorchDTensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        return _from_torch(tensor, spec, view=True)

    @staticmethod
    def backward(ctx: Ctx, grad: DTensor) -> tuple[TorchDTensor, None]:
        return to_torch(grad.redistribute(placements=placements_of_gradient(ctx.spec.placements))), None
