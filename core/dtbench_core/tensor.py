"""DTensor: a tensor spread over a device mesh that is used like one tensor.

`from_local` and `distribute_tensor` make one, `to_local` and `full_tensor` leave, `redistribute`
changes how it is placed. Every op goes through dispatch.py. Names and signatures are those of
torch.distributed.tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core import comm, dispatch
from dtbench_core.errors import ArgumentError, LayoutError, MeshError, PlacementError
from dtbench_core.mesh import MeshInfo, mesh_info
from dtbench_core.placement import (
    REPLICATE,
    Partial,
    Placement,
    Placements,
    Shard,
    chunk_lengths,
    describe,
)
from dtbench_core.redistribute import Redistribute, cast_dtype, placements_of_gradient, redistribute_tensor
from dtbench_core.spec import DTensorSpec, contiguous_stride, normalize
from dtbench_core.torch_compat import any_requires_grad, current_mesh
from dtbench_core.wrapper import Wrapper, wrap


class DTensor(Wrapper):
    """One global tensor, of which every rank holds the part its placements say.

    Shape, stride and dtype are the global ones; `placements` has one entry per mesh dim. Under
    autograd it is a tensor like any other; its gradient is a DTensor too.
    """

    __slots__ = ()

    __torch_function__ = classmethod(dispatch.torch_function)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch.torch_dispatch(cls, func, args, kwargs or {})

    # Answered at once: torch's own getters would go through __torch_function__ first.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._spec.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._spec.dtype

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._spec.shape)

    @property
    def requires_grad(self) -> bool:
        return any_requires_grad(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.info.mesh

    @property
    def placements(self) -> Placements:
        return self._spec.placements

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DTensor({self._spec}, local={self._local_tensor!r})"

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """A DTensor of which `local_tensor` is this rank's part; differentiable, nothing is copied.

        Args:
            placements: one per mesh dim; all Replicate when not given.
            run_check: compare shapes over the mesh, and make replicas equal to the first rank's.
            shape, stride: global ones, given together. Without them every rank is taken to hold
                equally much.
            grad_placements: how the gradient is placed before its local part flows on; the default
                is `placements`, with Replicate for Partial.

        Raises:
            LayoutError: the local shape is not the shard that shape and placements say, or shapes
                that differ between ranks (with run_check).
            PlacementError, ArgumentError: placements or arguments that cannot hold.
        """
        info = mesh_info(_mesh_or_current(device_mesh))
        placed = normalize(placements, local_tensor.ndim, info)
        grad_placed = None if grad_placements is None else normalize(grad_placements, local_tensor.ndim, info)
        if (shape is None) != (stride is None):
            raise ArgumentError(
                f"from_local got shape={shape} and stride={stride}, expected both or neither: add the other"
            )
        if run_check:
            local_tensor = _checked_over_mesh(local_tensor, info, placed, given_shape=shape is not None)
        if shape is None or stride is None:
            shape, stride = _global_layout(local_tensor, info, placed)
        spec = DTensorSpec.of(info, placed, shape, stride, local_tensor.dtype)
        if tuple(local_tensor.shape) != spec.local_shape:
            raise LayoutError(
                f"from_local got a local tensor of shape {list(local_tensor.shape)} for {spec}, expected "
                f"{list(spec.local_shape)} on this rank (shards are cut as torch.chunk cuts): pass the tensor's "
                "global shape and stride, or that shard"
            )
        if torch.is_grad_enabled() and local_tensor.requires_grad:
            made: DTensor = FromLocal.apply(local_tensor, spec, grad_placed)
            return made
        return wrap(DTensor, local_tensor.detach(), spec)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, sharing memory; differentiable.

        Args:
            grad_placements: how the gradients that flow back on the ranks make up the global one; the
                default is the tensor's placements, with Replicate for Partial.
        """
        if torch.is_grad_enabled() and any_requires_grad(self):
            spec = self._spec
            placed = None if grad_placements is None else normalize(grad_placements, spec.ndim, spec.info)
            local: torch.Tensor = ToLocal.apply(self, placed)
            return local
        return self._local_tensor.detach()

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor placed as `placements` (all Replicate when not given); differentiable.

        Args:
            device_mesh: only the tensor's own; may be left out.
            async_op: accepted for compatibility; the result is complete on return.
            forward_dtype, backward_dtype: cast before moving, forward and backward.

        Raises:
            MeshError: another mesh. PlacementError: a Partial that the tensor is not already.
        """
        spec = self._spec
        if device_mesh is not None and mesh_info(device_mesh) is not spec.info:
            raise MeshError(
                f"redistribute got {mesh_info(device_mesh)} for a tensor on {spec.info}, expected the same mesh: "
                "full_tensor() and distribute_tensor() move between meshes"
            )
        placed = normalize(placements, spec.ndim, spec.info)
        for current, wanted in zip(spec.placements, placed, strict=True):
            if wanted.is_partial() and wanted != current:
                raise PlacementError(
                    f"redistribute got {describe(placed)} for {spec}, expected Shard or Replicate where the tensor is "
                    "not already that Partial: nothing says which terms the ranks should hold"
                )
        if torch.is_grad_enabled() and any_requires_grad(self):
            moved: DTensor = Redistribute.apply(self, placed, forward_dtype, backward_dtype)
            return moved
        if forward_dtype is not None and forward_dtype != spec.dtype:
            return redistribute_tensor(cast_dtype(self, forward_dtype), placed)
        return redistribute_tensor(self, placed)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank; differentiable. `grad_placements` as in `to_local`."""
        whole = self.redistribute(placements=[REPLICATE] * self._spec.info.ndim)
        return whole.to_local(grad_placements=grad_placements)


class FromLocal(torch.autograd.Function):
    """local tensor -> DTensor."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, spec: DTensorSpec, grad_placements: Placements | None
    ) -> DTensor:
        ctx.spec = spec
        ctx.grad_placements = grad_placements or placements_of_gradient(spec.placements)
        return wrap(DTensor, local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor, None, None]:
        local = grad.redistribute(placements=ctx.grad_placements).to_local()
        for placement, parts in zip(ctx.spec.placements, ctx.spec.info.sizes, strict=True):
            if placement.is_partial("avg"):
                local = local / parts  # one of `parts` terms of a mean
            elif isinstance(placement, Partial) and placement.reduce_op != "sum":
                raise PlacementError(
                    f"cannot differentiate from_local with {placement}: which rank's term decided is not known; "
                    "reduce the local tensors yourself before wrapping them"
                )
        return local, None, None


class ToLocal(torch.autograd.Function):
    """DTensor -> local tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: Placements | None) -> torch.Tensor:
        ctx.spec = tensor._spec
        ctx.grad_placements = grad_placements or placements_of_gradient(tensor._spec.placements)
        # A fresh tensor object: autograd marks the result, and must not mark `_local_tensor`.
        return tensor._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:
        spec: DTensorSpec = ctx.spec
        stride = contiguous_stride(spec.shape)
        made = DTensor.from_local(
            grad.contiguous(), spec.mesh, ctx.grad_placements, shape=spec.shape, stride=stride
        )
        return made, None


def _mesh_or_current(mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh given, or the one of the enclosing `with mesh:`."""
    return mesh if mesh is not None else current_mesh()


def _global_layout(
    local: torch.Tensor, info: MeshInfo, placements: Placements
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Global shape and stride when every rank holds as much as this one."""
    shape, stride = list(local.shape), list(local.stride())
    for placement, parts in zip(placements, info.sizes, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim
            shape[dim] *= parts
            stride = [s * parts if d != dim and s > stride[dim] else s for d, s in enumerate(stride)]
    return tuple(shape), tuple(stride)


def _checked_over_mesh(
    local: torch.Tensor, info: MeshInfo, placements: Placements, *, given_shape: bool
) -> torch.Tensor:
    """run_check: every rank sees every rank's metadata, so that all raise alike; replicas are made equal."""
    info.my_coordinate()
    mine = (str(local.dtype), None if given_shape else tuple(local.shape))
    seen = [mine]
    for group in info.groups:
        seen = [meta for part in comm.all_gather_objects(seen, group) for meta in part]
    if any(meta != mine for meta in seen):
        listed = "; ".join(f"mesh rank {i}: {dtype} {shape or ''}" for i, (dtype, shape) in enumerate(seen))
        raise LayoutError(
            f"from_local got local tensors that differ between ranks ({listed}), expected one dtype and one shape: "
            "for uneven shards pass the global shape and stride"
        )
    for placement, group in zip(placements, info.groups, strict=True):
        if placement.is_replicate():
            local = (
                local.contiguous()
                if local.requires_grad
                else local.clone(memory_format=torch.contiguous_format)
            )
            comm.broadcast(local.detach(), group)
    return local


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """The global `tensor`, which every rank passes in the same shape, spread over the mesh.

    Args:
        placements: one per mesh dim, Shard or Replicate; all Replicate when not given.
        src_data_rank: the rank, within each mesh dim, whose values count. None: every rank cuts its
            part from its own copy and nothing is sent.

    Returns:
        A leaf DTensor that requires grad if `tensor` does.

    Raises:
        ArgumentError: a tensor computed from others under autograd, a DTensor already placed otherwise.
        PlacementError: a Partial placement.
    """
    info = mesh_info(_mesh_or_current(device_mesh))
    placed = normalize(placements, tensor.ndim, info)
    if isinstance(tensor, DTensor):
        if tensor._spec.info is info and tensor.placements == placed:
            return tensor
        raise ArgumentError(
            f"distribute_tensor got a DTensor, {tensor._spec}, to be placed as {describe(placed)} on {info}; expected "
            "a plain tensor: use tensor.redistribute(placements=...)"
        )
    if not tensor.is_leaf:
        raise ArgumentError(
            "distribute_tensor got the result of a computation under autograd, expected a leaf tensor: use "
            "DTensor.from_local, which is differentiable, or detach() it"
        )
    if any(p.is_partial() for p in placed):
        raise PlacementError(
            f"distribute_tensor got {describe(placed)}, expected Shard or Replicate: wrap terms of a sum with "
            "DTensor.from_local(term, mesh, [Partial()])"
        )
    local = tensor.detach()
    if local.device.type not in (info.device_type, "meta"):
        local = local.to(info.device_type)
    local = _cut(local, info, placed, None if local.is_meta else src_data_rank)
    spec = DTensorSpec.of(info, placed, tensor.shape, contiguous_stride(tensor.shape), tensor.dtype)
    return wrap(DTensor, local, spec, requires_grad=tensor.requires_grad)


def _cut(local: torch.Tensor, info: MeshInfo, placements: Placements, src: int | None) -> torch.Tensor:
    """This rank's contiguous part, mesh dim by mesh dim, outermost first."""
    source = local
    for mesh_dim, placement in enumerate(placements):
        group, index = info.groups[mesh_dim], info.my_coordinate()[mesh_dim]
        if isinstance(placement, Shard):
            dim = placement.dim
            lengths = chunk_lengths(local.size(dim), info.sizes[mesh_dim])
            parts = local.split(lengths, dim)
            local = parts[index] if src is None else _scattered(parts, dim, group, index, src)
        elif src is not None:
            local = (
                local.clone(memory_format=torch.contiguous_format) if local is source else local.contiguous()
            )
            comm.broadcast(local, group, src)
    shares = local.untyped_storage()._cdata == source.untyped_storage()._cdata
    return local.clone(memory_format=torch.contiguous_format) if shares else local.contiguous()


def _scattered(parts: Sequence[torch.Tensor], dim: int, group: Any, index: int, src: int) -> torch.Tensor:
    """Part `index` of the source rank's parts; padded on the way, as a scatter moves equal shapes."""
    most = parts[0].size(dim)
    shape = (*parts[0].shape[:dim], most, *parts[0].shape[dim + 1 :])
    if 0 in shape:
        return parts[index].contiguous()

    def padded(part: torch.Tensor) -> torch.Tensor:
        full = part.new_zeros(shape)
        full.narrow(dim, 0, part.size(dim)).copy_(part)
        return full

    output = parts[0].new_empty(shape)
    comm.scatter(output, [padded(p) for p in parts] if index == src else None, group, src)
    return output.narrow(dim, 0, parts[index].size(dim))


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
) -> nn.Module:
    """Makes a module's parameters and buffers DTensors, in place, and its inputs and outputs as told.

    Args:
        partition_fn: called with (fully qualified name, submodule, mesh) for every submodule; replaces
            its parameters. What it leaves plain is replicated.
        input_fn: called with (module, inputs, mesh) before forward; its result replaces the inputs.
        output_fn: called with (module, outputs, mesh) after forward; its result replaces the outputs.

    Returns:
        The same module.
    """
    mesh = _mesh_or_current(device_mesh)
    for name, part in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, part, mesh)
        _replicate_plain(part, mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: output_fn(mod, outputs, mesh))
    return module


def _replicate_plain(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not isinstance(parameter, DTensor):
            replicated = nn.Parameter(distribute_tensor(parameter.detach(), mesh), parameter.requires_grad)
            module.register_parameter(name, replicated)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if not isinstance(buffer, DTensor):
            setattr(module, name, distribute_tensor(buffer, mesh))
