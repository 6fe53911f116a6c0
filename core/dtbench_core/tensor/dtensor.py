"""DTensor: a tensor that is distributed over a device mesh and used like a single tensor.

`from_local` makes a DTensor from local tensors; distribute.py and factories.py contain the other functions that make
DTensors. `to_local` and `full_tensor` return plain tensors, and `redistribute` changes placements. dispatch/entry.py
runs ops. The signatures are those of torch.distributed.tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.dispatch import entry as dispatch
from dtbench_core.dispatch.agreement import compare_move
from dtbench_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    CrossMeshError,
    LayoutError,
    MixedTensorError,
    PlacementError,
    in_transform,
)
from dtbench_core.layout.local_shards import check_places, holds_shards, plain_part
from dtbench_core.layout.mesh import MeshInfo, mesh_info, mesh_or_current
from dtbench_core.layout.placement import (
    Partial,
    Placement,
    Placements,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
)
from dtbench_core.layout.shard_layout import (
    agreed_placements,
    checked_over_mesh,
    empty_part,
    even_layout,
    even_spec,
)
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, normalize
from dtbench_core.layout.wrapper import Wrapper, alias_of_local, data_of, wrap, wrap_shared
from dtbench_core.op_types import Ctx
from dtbench_core.redistribute.autograd import (
    Redistribute,
    cast_dtype,
    redistribute_along,
    redistribute_tensor,
)
from dtbench_core.redistribute.copied_view import CopiedView, is_copied, mark_read_only, take_memory
from dtbench_core.redistribute.routes import (
    Route,
    cheapest_route,
    placements_of_gradient,
    requested_route,
    requested_routes,
    run_route,
)
from dtbench_core.tensor import checkpoint, in_graphs
from dtbench_core.tensor.plain_history import with_history_update
from dtbench_core.tensor.view_methods import direct_methods
from dtbench_core.torch_compat import (
    AutogradFunction,
    DisableTorchFunction,
    any_requires_grad,
    dispatch_modes_active,
    functorch_level,
    in_graph,
    innermost,
    is_dynamo_compiling,
    is_functional,
    is_inference_mode_enabled,
    is_torchs_dtensor,
    register_constant,
    register_foreach_type,
    unwrap_if_dead,
)


@direct_methods
class DTensor(Wrapper):
    """A global tensor of which every rank has a part, given by the placements.

    Shape, stride and dtype are those of the global tensor; `placements` has one entry per mesh dim. Autograd treats it
    like any tensor, and its gradient is a DTensor.
    """

    # Without __slots__, `DTensor.__slots__` is that of Wrapper: an asynchronous checkpoint copies these attributes.

    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise ArgumentTypeError(
            "DTensor got a call of its constructor, expected a function that makes DTensors: distribute_tensor("
            "tensor, mesh, placements) for a global tensor, DTensor.from_local(tensor, mesh, placements) for shards"
        )

    __torch_function__ = classmethod(dispatch.torch_function)

    __torch_dispatch__ = classmethod(dispatch.torch_dispatch)  # type: ignore[assignment]

    # Defined here, since torch's getters would call __torch_function__ first.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._spec.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._spec.dtype

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._spec.shape)

    is_sparse = False

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Implements Tensor.to. Returns at once for the same device, since clipping calls it for every norm."""
        if len(args) == 1 and not kwargs and args[0].__class__ is torch.device and args[0] == self.device:
            return self
        return super().to(*args, **kwargs)

    @property
    def requires_grad(self) -> bool:
        return any_requires_grad(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def data(self) -> DTensor:
        """The same values outside autograd, sharing memory. May be assigned another DTensor."""
        if is_copied(self):  # a copied view needs the version counter that it shares with its base
            return self.detach()  # type: ignore[return-value]
        return data_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # torch's setter would assign only the metadata and keep the old shard.
        if not isinstance(value, DTensor):
            raise MixedTensorError(
                f"got .data = a {type(value).__name__} of shape {list(value.shape)} on {self._spec}, expected a "
                "DTensor: place it with distribute_tensor(tensor, mesh, placements)"
            )
        with DisableTorchFunction():
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local_tensor, self._spec = value._local_tensor, value._spec
        take_memory(self, value)

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.info.mesh

    @property
    def placements(self) -> Placements:
        return self._spec.placements

    def share_memory_(self) -> DTensor:
        """Moves this rank's part to memory that is shared between processes."""
        self._local_tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        shared: bool = self._local_tensor.is_shared()
        return shared

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"DTensor({self._spec}, local={self._local_tensor!r})"

    # Called by compilers, and by Module.to to exchange parameters.
    __tensor_flatten__ = in_graphs.flatten
    _stable_hash_for_caching = in_graphs.stable_hash
    _dynamo_dynamic_indices = in_graphs.dynamic_marks

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], described: in_graphs.Described, outer_size: Any, outer_stride: Any
    ) -> DTensor:
        spec, requires_grad, reason = described
        local = inner["_local_tensor"]
        spec = DTensorSpec.of(spec.info, spec.placements, outer_size, outer_stride, local.dtype, spec.order)
        tensor = wrap(DTensor, local, spec, requires_grad)
        if reason is not None:
            tensor = mark_read_only(tensor, reason, inner.get("_source"))
        if is_functional(local):
            tensor._memory = (in_graphs.memory_of_input(local, spec), 0)
        return tensor

    # AOTAutograd traces a backward pass for gradients with these placements. At run time, gradients are redistributed
    # to them.
    def __coerce_tangent_metadata__(self) -> DTensor:
        return self.redistribute(placements=placements_of_gradient(self._spec.placements))

    def __coerce_same_metadata_as_tangent__(
        self, described: in_graphs.Described, expected_type: type | None = None
    ) -> torch.Tensor | None:
        if expected_type is torch.Tensor:
            return self.full_tensor()
        if expected_type is not None and expected_type is not DTensor:
            return None
        return self.redistribute(placements=described[0].placements)

    __reduce_ex__ = checkpoint.reduce

    def __deepcopy__(self, memo: Any) -> DTensor:
        copied: DTensor = memo[id(self)] if id(self) in memo else super().__deepcopy__(memo)
        checkpoint.forget(copied)
        return copied

    # Methods that torch.distributed.checkpoint calls.
    __create_write_items__ = checkpoint.create_write_items
    __create_chunk_list__ = checkpoint.create_chunk_list
    __get_tensor_shard__ = checkpoint.get_tensor_shard

    # ---- values for Python and NumPy ----

    def __format__(self, spec: str) -> str:
        """Formats a 0-dim tensor with a format spec as its Python number.

        This calls `item()`, so every rank must call it.
        """
        return format(self.item(), spec) if spec and self._spec.ndim == 0 else super().__format__(spec)

    def tolist(self) -> Any:
        """Returns all values as lists. Gathers, so every rank must call it."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns the values of a replicated tensor, sharing memory.

        Raises:
            ArgumentError: the tensor is not replicated.
        """
        if any(not placement.is_replicate() for placement in self._spec.placements):
            raise ArgumentError(
                f"numpy got {self._spec}, expected a replicated tensor: gather it with "
                "full_tensor().numpy(), called on every rank, or take this rank's part with to_local().numpy()"
            )
        return self.to_local().numpy(force=force)

    # ---- torch's sharded data parallelism ----

    @property
    def _is_flat_param(self) -> bool:
        """Raises. torch's FullyShardedDataParallel reads this attribute and would treat the parameter as plain."""
        raise ArgumentTypeError(
            f"FullyShardedDataParallel got the parameter {self._spec}, expected plain tensors: use "
            "dtbench_core.parallel.shard_parameters(module, mesh, mesh_dim)"
        )

    @property
    def fsdp_pre_all_gather(self) -> Any:
        """Raises. torch's fully_shard reads this attribute of parameters whose class it does not know."""
        raise ArgumentTypeError(
            f"fully_shard got the parameter {self._spec}, expected plain tensors or torch's own DTensors: shard it "
            "over the other mesh dim with dtbench_core.parallel.shard_parameters(module, mesh, mesh_dim)"
        )

    _fsdp_orig_uid = fsdp_pre_all_gather  # fully_shard reads this before it sends anything

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
        """Returns a DTensor of which `local_tensor` is this rank's part. Differentiable; nothing is copied.

        Args:
            local_tensor: a tensor, or a `LocalShardsWrapper`; then `to_local` returns the `LocalShardsWrapper`.
            placements: one per mesh dim; all Replicate if not given.
            run_check: compare metadata and offsets of shards between all ranks; give replicas the first rank's values.
            shape, stride: those of the global tensor, given together. Without them, all ranks must have the same local
                shape. With them, shards may have any lengths. The ranks gather the lengths, with a small all-gather
                per mesh dim. If lengths differ from torch.chunk's, the placement becomes a RaggedShard, except in a
                graph.
            grad_placements: placements that the gradient is redistributed to before its local part is returned. The
                default is `placements` with Replicate for Partial.

        Returns:
            A DTensor. On a rank outside the mesh it is empty, whatever was passed.

        Raises:
            LayoutError: local shapes that do not make up the global one, or (with run_check) differ between ranks.
            PlacementError: placements that the tensor cannot have.
            ArgumentError: other invalid arguments; a tensor of a transform of torch.func.
        """
        if functorch_level() is not None and innermost(local_tensor) is not local_tensor:
            raise in_transform("DTensor.from_local", local_tensor.shape)
        info = mesh_info(mesh_or_current(device_mesh))
        simple = shape is None and stride is None and grad_placements is None and not run_check
        if simple and local_tensor.__class__ is torch.Tensor and isinstance(placements, (list, tuple)):
            spec = even_spec(local_tensor, info, placements)
            if spec is not None:
                return wrapped(local_tensor, spec)
        _check_arguments(local_tensor, shape, stride)
        ndim = local_tensor.ndim if shape is None else len(shape)
        placed = normalize(placements, ndim, info, shape)
        grad_placed = None if grad_placements is None else normalize(grad_placements, ndim, info, shape)
        if local_tensor.device.type not in (info.device_type, "meta"):
            local_tensor = local_tensor.to(info.device_type)
        if run_check and info.coordinate is not None:
            local_tensor = checked_over_mesh(local_tensor, info, placed, with_shape=shape is not None)
        ask = shape is not None
        if shape is None or stride is None:
            shape, stride = even_layout(local_tensor, info, placed)
            ask = any(isinstance(p, RaggedShard) for p in placed)
            placed = normalize(placed, ndim, info, shape)
        if ask:
            placed = agreed_placements(local_tensor, info, placed, shape, stride)
        spec = DTensorSpec.of(info, placed, shape, stride, local_tensor.dtype)
        if run_check and local_tensor.__class__ is not torch.Tensor:
            check_places(local_tensor, spec)
        return wrapped(local_tensor, spec, grad_placed)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns this rank's part, sharing memory. Differentiable.

        Args:
            grad_placements: placements with which the ranks' local gradients make up the global gradient. The default
                is the tensor's placements, with Replicate for Partial.
        """
        if is_dynamo_compiling():
            return _to_local(self, grad_placements=grad_placements)
        if (torch.is_grad_enabled() and any_requires_grad(self)) or forward_ad._current_level >= 0:
            placed = (
                None if grad_placements is None else normalize(grad_placements, self.ndim, self._spec.info)
            )
            local: torch.Tensor = ToLocal.apply(self, placed, False)
            return local
        return _local_alias(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Returns the tensor with other placements, or itself if it has them. Differentiable.

        Args:
            device_mesh: the tensor's mesh; may be omitted.
            placements: one per mesh dim; all Replicate if not given.
            async_op: accepted for compatibility, with a warning: the result is complete on return.
            forward_dtype, backward_dtype: dtypes to cast to before sending, forward and backward.

        Raises:
            CrossMeshError: another mesh.
            PlacementError: a Partial that the tensor does not have already.
        """
        if is_dynamo_compiling():
            return _redistribute(
                self, device_mesh, placements, forward_dtype=forward_dtype, backward_dtype=backward_dtype
            )
        compare_move("redistribute", self, placements)
        if async_op:
            warnings.warn("redistribute(async_op=True) waits: its result is complete on return", stacklevel=2)
        spec = self._spec
        if (
            device_mesh is not None
            and device_mesh is not spec.info.mesh
            and mesh_info(device_mesh) is not spec.info
        ):
            raise CrossMeshError(
                f"redistribute got {mesh_info(device_mesh)} for a tensor on {spec.info}, expected the same mesh: "
                "call full_tensor() and then distribute_tensor() to change the mesh"
            )
        try:  # the cached answer of `requested_route`, without the call
            route = requested_routes[spec, None if placements is None else tuple(placements)]
        except (KeyError, TypeError):
            route = requested_route(spec, placements)
        if (
            not route
            and forward_dtype in (None, spec.dtype)
            and backward_dtype is None
            and not is_copied(self)
        ):
            return self  # as `to` does: a write to the result is a write to the tensor
        moved: Any
        if (torch.is_grad_enabled() and any_requires_grad(self)) or forward_ad._current_level >= 0:
            moved = Redistribute.apply(self, route, forward_dtype, backward_dtype)
        elif forward_dtype is not None and forward_dtype != spec.dtype:
            moved = redistribute_tensor(cast_dtype(self, forward_dtype), route.result.placements)
        else:
            moved = redistribute_along(self, route)
        return moved  # type: ignore[no-any-return]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns the global tensor on every rank. Differentiable. `grad_placements` is the same as in `to_local`."""
        if is_dynamo_compiling():
            return _full_tensor(self, grad_placements=grad_placements)
        compare_move("full_tensor", self)
        route = requested_route(self._spec, None)
        if (torch.is_grad_enabled() and any_requires_grad(self)) or forward_ad._current_level >= 0:
            placed = (
                None if grad_placements is None else normalize(grad_placements, self.ndim, self._spec.info)
            )
            full: torch.Tensor = FullTensor.apply(self, route, placed)
            return full
        return _global(self, route)


# Registered as single calls in a graph; otherwise Dynamo would trace into these methods.
in_graph(DTensor.from_local)
_to_local, _full_tensor = in_graph(DTensor.to_local), in_graph(DTensor.full_tensor)
_redistribute = in_graph(DTensor.redistribute)


def _check_arguments(
    local_tensor: torch.Tensor, shape: Sequence[int] | None, stride: Sequence[int] | None
) -> None:
    """Raises ArgumentError for arguments that `from_local` cannot take."""
    if isinstance(local_tensor, DTensor):
        raise ArgumentError(
            f"from_local got a DTensor, {local_tensor._spec}, expected a plain tensor: use redistribute"
        )
    if is_torchs_dtensor(local_tensor):
        raise ArgumentError(
            "from_local got a DTensor of torch.distributed.tensor, expected a plain tensor: use from_torch"
        )
    if (shape is None) != (stride is None):
        raise ArgumentError(
            f"from_local got shape={shape} and stride={stride}, expected both or neither: add the other"
        )


def local_to_overwrite(tensor: DTensor) -> torch.Tensor:
    """Returns `tensor.to_local()` for a tensor that is not used again. In-place ops may write to the result."""
    if torch.is_grad_enabled() and any_requires_grad(tensor):
        local: torch.Tensor = ToLocal.apply(tensor, None, True)
        return local
    return tensor.to_local()


def wrapped(local: torch.Tensor, spec: DTensorSpec, grad_placements: Placements | None = None) -> DTensor:
    """Returns a DTensor of `local` and `spec`, with autograd history if `local` requires grad."""
    member = spec.info.coordinate is not None
    if member and tuple(local.shape) != spec.local_shape:
        raise LayoutError(
            f"from_local got a local tensor of shape {list(local.shape)} for {spec}, expected "
            f"{list(spec.local_shape)} on this rank: pass the tensor's global shape and stride, or that shard"
        )
    if (torch.is_grad_enabled() and local.requires_grad) or forward_ad._current_level >= 0:
        tensor: DTensor = FromLocal.apply(unwrap_if_dead(local), spec, grad_placements)
        needs_no_update = local.is_leaf or is_dynamo_compiling() or lacks_version_counter(local)
        return tensor if needs_no_update else with_history_update(tensor, local)
    return _from_alias(local, spec)


def _gradient(local: torch.Tensor, info: MeshInfo, placements: Placements, shape: Sequence[int]) -> DTensor:
    """Returns a local gradient as a DTensor. Nothing is sent."""
    local = local.contiguous()
    spec = DTensorSpec.of(info, placements, shape, contiguous_stride(shape), local.dtype)
    if torch.is_grad_enabled() or info.coordinate is None or tuple(local.shape) != spec.local_shape:
        return wrapped(local, spec)
    return wrap(DTensor, local, spec)  # autograd passes it on and does not write to it


def _global(tensor: DTensor, route: Route) -> torch.Tensor:
    """Returns the global tensor, outside autograd. `route`: route from the tensor's placements to Replicate."""
    if route:
        return run_route(tensor._local_tensor, route)
    # The result must own its memory, like a gathered tensor.
    return plain_part(tensor._local_tensor, tensor._spec).clone()


def _local_alias(tensor: DTensor, *, view: bool = False) -> torch.Tensor:
    """Returns another tensor object for the local tensor. It shares memory and the version counter with `tensor`."""
    local = tensor._local_tensor  # gathers a stale copied view again
    if lacks_version_counter(local):
        local = _detached(local)
        return local.view_as(local) if view and local.__class__ is torch.Tensor else local
    with DisableTorchFunction():
        return alias_of_local(tensor, local, view=view)


def _from_alias(local: torch.Tensor, spec: DTensorSpec, *, view: bool = False) -> DTensor:
    """Returns a DTensor of `local`, which the caller keeps using."""
    if spec.info.coordinate is None:
        return wrap(DTensor, empty_part(spec, local.device), spec)
    if lacks_version_counter(local):
        return wrap(DTensor, _detached(local), spec)
    with DisableTorchFunction():
        return wrap_shared(DTensor, local, spec, view=view)


def lacks_version_counter(local: torch.Tensor) -> bool:
    """Whether no version counter counts writes to `local`, as under modes and transforms of torch.func."""
    return (
        local.__class__ is not torch.Tensor
        or dispatch_modes_active() > 0
        or functorch_level() is not None
        or is_inference_mode_enabled()
    )


def _detached(local: torch.Tensor) -> torch.Tensor:
    """Returns another tensor object on the same memory, so that autograd metadata is set on only one of them."""
    if holds_shards(local):  # `to_local` returns the same object
        return local
    try:
        return local.detach()
    except NotImplementedError:  # a subclass that supports few ops
        return local


class CopiedDTensorView(CopiedView, DTensor):  # type: ignore[misc]
    """A copied view of a DTensor (redistribute/copied_view.py)."""

    viewed = DTensor


DTensor.copied_view = CopiedDTensorView


class FromLocal(AutogradFunction):
    """Autograd function: local tensor -> DTensor."""

    @staticmethod
    def forward(
        ctx: Ctx, local: torch.Tensor, spec: DTensorSpec, grad_placements: Placements | None
    ) -> DTensor:
        ctx.spec, ctx.local_shape = spec, local.shape
        ctx.grad_placements = grad_placements or placements_of_gradient(spec.placements)
        # Plain torch refuses in-place writes to a leaf. They raise here, too: for a leaf, autograd treats the result
        # as a view of it.
        owner = local if local._base is None else local._base
        ctx.of_leaf = owner.is_leaf and owner.requires_grad
        return _from_alias(local, spec, view=ctx.of_leaf)

    @staticmethod
    def backward(ctx: Ctx, grad: DTensor) -> tuple[torch.Tensor, None, None]:
        # The argument has no gradient on a rank outside the mesh. If `grad` is plain, it is autograd's zeros.
        if ctx.spec.info.coordinate is None or not isinstance(grad, DTensor):
            return torch.zeros(ctx.local_shape, dtype=grad.dtype, device=grad.device), None, None
        if torch.is_grad_enabled():  # for double backward, with a graph
            local = grad.redistribute(placements=ctx.grad_placements).to_local()
        else:
            local = run_route(grad._local_tensor, cheapest_route(grad._spec, ctx.grad_placements))
        for placement, parts in zip(ctx.spec.placements, ctx.spec.info.sizes, strict=True):
            if placement.is_partial("avg"):
                local = local / parts  # each of the `parts` terms contributes 1 / parts to the mean
            elif isinstance(placement, Partial) and placement.reduce_op != "sum":
                raise PlacementError(
                    f"got a gradient of from_local with {placement}, for which it is unknown which rank's term was "
                    "chosen; expected Partial of sum or avg: reduce the local tensors before wrapping them"
                )
        return local, None, None

    @staticmethod
    def jvp(ctx: Ctx, tangent: torch.Tensor, *_: object) -> DTensor:
        return _from_alias(tangent, ctx.spec, view=ctx.of_leaf)  # a view in the same cases as in `forward`


class ToLocal(AutogradFunction):
    """Autograd function: DTensor -> local tensor."""

    @staticmethod
    def forward(
        ctx: Ctx, tensor: DTensor, grad_placements: Placements | None, writable: bool
    ) -> torch.Tensor:
        # A single attribute, since setting one takes 0.2 us.
        ctx.arguments = tensor._spec, grad_placements, writable
        # Writes to a view that was made inside an autograd function raise. Such a write would change `tensor`, but not
        # the gradients of results computed from `tensor`.
        return _local_alias(tensor, view=not writable)

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[DTensor, None, None]:
        spec, placed, _ = ctx.arguments
        placed = placed or placements_of_gradient(spec.placements)
        return _gradient(grad, spec.info, placed, spec.shape), None, None

    @staticmethod
    def jvp(ctx: Ctx, tangent: DTensor, *_: object) -> torch.Tensor:
        return _local_alias(tangent, view=not ctx.arguments[-1])


class FullTensor(AutogradFunction):
    """Autograd function: DTensor -> global tensor. Does the same as redistribute and to_local together."""

    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor, route: Route, grad_placements: Placements | None) -> torch.Tensor:
        ctx.route, ctx.grad_placements = route, grad_placements
        return _global(tensor, route)

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[DTensor, None, None]:
        route: Route = ctx.route
        spec, stride = route.result, contiguous_stride(route.result.shape)
        if torch.is_grad_enabled() or ctx.grad_placements is not None:
            # Double backward needs a graph.
            placed = ctx.grad_placements or spec.placements
            gradient = _gradient(grad, spec.info, placed, spec.shape)
            return gradient.redistribute(placements=route.gradient), None, None
        full_spec = DTensorSpec.of(spec.info, spec.placements, spec.shape, stride, grad.dtype)
        back = cheapest_route(full_spec, route.gradient)
        local = run_route(grad, back) if back else grad.contiguous()
        return wrap(DTensor, local, back.result), None, None

    @staticmethod
    def jvp(ctx: Ctx, tangent: DTensor, *_: object) -> torch.Tensor:
        return _global(tangent, requested_route(tangent._spec, None))


torch.serialization.add_safe_globals([DTensor])
register_foreach_type(DTensor)
for _kind in (Shard, Replicate, Partial, StridedShard, RaggedShard):
    register_constant(_kind)
