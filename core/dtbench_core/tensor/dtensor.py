"""DTensor: a tensor spread over a device mesh that is used like one tensor.

`from_local` makes one of local tensors (distribute.py and factories.py of global ones and of nothing), `to_local` and
`full_tensor` leave, `redistribute` moves. Ops go to dispatch/entry.py. Signatures are torch.distributed.tensor's.
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
from dtbench_core.layout.wrapper import Wrapper, data_of, lend, wrap, wrap_shared
from dtbench_core.op_types import Ctx
from dtbench_core.redistribute.autograd import (
    Redistribute,
    cast_dtype,
    redistribute_along,
    redistribute_tensor,
)
from dtbench_core.redistribute.copied_view import CopiedView, is_copied, mark_crossing, take_memory
from dtbench_core.redistribute.routes import (
    Route,
    cheapest_route,
    placements_of_gradient,
    requested_route,
    requested_routes,
    run_route,
)
from dtbench_core.tensor import checkpoint, in_graphs
from dtbench_core.tensor.lent_memory import note_lender
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
    """One global tensor, of which every rank holds the part its placements say.

    Shape, stride and dtype are the global ones; `placements` has one entry per mesh dim. Under
    autograd it is a tensor like any other; its gradient is a DTensor too.
    """

    # No __slots__ of its own: an asynchronous checkpoint copies what `__slots__` lists, which are the wrapper's.

    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise ArgumentTypeError(
            "DTensor got a call of its constructor, expected one of the functions that make them: distribute_tensor("
            "tensor, mesh, placements) of a global tensor, DTensor.from_local(tensor, mesh, placements) of shards"
        )

    __torch_function__ = classmethod(dispatch.torch_function)

    __torch_dispatch__ = classmethod(dispatch.torch_dispatch)  # type: ignore[assignment]

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

    is_sparse = False

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch's; of a device that the tensor is on already, itself at once, as clipping asks of every norm."""
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
        if is_copied(self):  # knows by the count of writes whether its values are those of its base
            return self.detach()  # type: ignore[return-value]
        return data_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # torch's setter would take over the metadata and leave the shard behind.
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
        """Moves this rank's part to memory that processes share."""
        self._local_tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        shared: bool = self._local_tensor.is_shared()
        return shared

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"DTensor({self._spec}, local={self._local_tensor!r})"

    # The parts of a wrapper, for torch's own machinery: it exchanges parameters on Module.to by them.
    __tensor_flatten__ = in_graphs.flatten
    _stable_hash_for_caching = in_graphs.stable_hash
    _dynamo_dynamic_indices = in_graphs.dynamic_marks

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], described: in_graphs.Described, outer_size: Any, outer_stride: Any
    ) -> DTensor:
        spec, requires_grad, crossing = described
        local = inner["_local_tensor"]
        spec = DTensorSpec.of(spec.info, spec.placements, outer_size, outer_stride, local.dtype, spec.order)
        tensor = wrap(DTensor, local, spec, requires_grad)
        if crossing is not None:
            tensor = mark_crossing(tensor, crossing, inner.get("_source"))
        if is_functional(local):
            tensor._memory = (in_graphs.memory_of_input(local, spec), 0)
        return tensor

    # AOTAutograd takes a gradient's placements for granted while it traces; a compiled backward is given what has them.
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

    # What torch.distributed.checkpoint asks of a tensor.
    __create_write_items__ = checkpoint.create_write_items
    __create_chunk_list__ = checkpoint.create_chunk_list
    __get_tensor_shard__ = checkpoint.get_tensor_shard

    # ---- values for Python and NumPy ----

    def __format__(self, spec: str) -> str:
        """A scalar with a format is formatted as its number; every rank must then call it, as it must `item`."""
        return format(self.item(), spec) if spec and self._spec.ndim == 0 else super().__format__(spec)

    def tolist(self) -> Any:
        """All values; gathers, so every rank must call it."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values of a replicated tensor, sharing memory.

        Raises:
            ArgumentError: this rank does not hold all values.
        """
        if any(not placement.is_replicate() for placement in self._spec.placements):
            raise ArgumentError(
                f"numpy got {self._spec}, expected a tensor that every rank holds whole: gather it with "
                "full_tensor().numpy(), called on every rank, or take this rank's part with to_local().numpy()"
            )
        return self.to_local().numpy(force=force)

    # ---- torch's sharded data parallelism ----

    @property
    def _is_flat_param(self) -> bool:
        """torch's FullyShardedDataParallel asks every parameter for this, before it takes them for plain tensors."""
        raise ArgumentTypeError(
            f"FullyShardedDataParallel got the parameter {self._spec}, expected plain tensors: use "
            "dtbench_core.parallel.shard_parameters(module, mesh, mesh_dim)"
        )

    @property
    def fsdp_pre_all_gather(self) -> Any:
        """torch's fully_shard asks every parameter for this, when it knows none of the class."""
        raise ArgumentTypeError(
            f"fully_shard got the parameter {self._spec}, expected plain tensors or torch's own DTensors: spread it "
            "over the other mesh dim with dtbench_core.parallel.shard_parameters(module, mesh, mesh_dim)"
        )

    _fsdp_orig_uid = fsdp_pre_all_gather  # asked before it sends anything

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
            local_tensor: a tensor, or a `LocalShardsWrapper`, which `to_local` hands back.
            placements: one per mesh dim; all Replicate when not given.
            run_check: compare metadata over the mesh, and make replicas the first rank's; of shards, also their places.
            shape, stride: global ones, given together. Without them every rank is taken to hold equally much. With
                them the shards may be of any lengths: the ranks tell each other theirs (a small all-gather per mesh
                dim); where they are not torch.chunk's the placement becomes a RaggedShard, but in a graph.
            grad_placements: how the gradient is placed before its local part flows on; the default
                is `placements`, with Replicate for Partial.

        Returns:
            A DTensor; on a rank outside the mesh one that holds nothing, whatever was passed.

        Raises:
            LayoutError: local shapes that do not make up the global one, or (with run_check) differ between ranks.
            PlacementError, ArgumentError: placements or arguments that cannot hold; a tensor of a transform of
                torch.func.
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
        """This rank's part, sharing memory; differentiable.

        Args:
            grad_placements: how the gradients that flow back on the ranks make up the global one; the
                default is the tensor's placements, with Replicate for Partial.
        """
        if is_dynamo_compiling():
            return _to_local(self, grad_placements=grad_placements)
        if (torch.is_grad_enabled() and any_requires_grad(self)) or forward_ad._current_level >= 0:
            placed = (
                None if grad_placements is None else normalize(grad_placements, self.ndim, self._spec.info)
            )
            local: torch.Tensor = ToLocal.apply(self, placed, False)
            return local
        return _lent(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor placed as `placements` (all Replicate when not given); differentiable. Itself, if it is.

        Args:
            device_mesh: only the tensor's own; may be left out.
            async_op: accepted for compatibility; the result is complete on return, which a warning says once.
            forward_dtype, backward_dtype: cast before moving, forward and backward.

        Raises:
            CrossMeshError: another mesh. PlacementError: a Partial that the tensor is not already.
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
                "full_tensor() and distribute_tensor() move between meshes"
            )
        try:  # what `request` finds, without a call
            route = requested_routes[spec, None if placements is None else tuple(placements)]
        except (KeyError, TypeError):
            route = requested_route(spec, placements)
        if (
            not route
            and forward_dtype in (None, spec.dtype)
            and backward_dtype is None
            and not is_copied(self)
        ):
            return self  # as `to` does, so that a write to the one is a write to the other
        moved: Any
        if (torch.is_grad_enabled() and any_requires_grad(self)) or forward_ad._current_level >= 0:
            moved = Redistribute.apply(self, route, forward_dtype, backward_dtype)
        elif forward_dtype is not None and forward_dtype != spec.dtype:
            moved = redistribute_tensor(cast_dtype(self, forward_dtype), route.result.placements)
        else:
            moved = redistribute_along(self, route)
        return moved  # type: ignore[no-any-return]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank; differentiable. `grad_placements` as in `to_local`."""
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
        return _whole(self, route)


# In a graph: Dynamo reads methods of tensors that are not torch's own, and functions only if not for a graph.
in_graph(DTensor.from_local)
_to_local, _full_tensor = in_graph(DTensor.to_local), in_graph(DTensor.full_tensor)
_redistribute = in_graph(DTensor.redistribute)


def _check_arguments(
    local_tensor: torch.Tensor, shape: Sequence[int] | None, stride: Sequence[int] | None
) -> None:
    """Raises ArgumentError for what `from_local` cannot wrap."""
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


def handed_over(tensor: DTensor) -> torch.Tensor:
    """`tensor.to_local()` where `tensor` has no other use: an activation in place may write to the result."""
    if torch.is_grad_enabled() and any_requires_grad(tensor):
        local: torch.Tensor = ToLocal.apply(tensor, None, True)
        return local
    return tensor.to_local()


def wrapped(local: torch.Tensor, spec: DTensorSpec, grad_placements: Placements | None = None) -> DTensor:
    """`local` as this rank's part of `spec`, under autograd if it requires grad."""
    member = spec.info.coordinate is not None
    if member and tuple(local.shape) != spec.local_shape:
        raise LayoutError(
            f"from_local got a local tensor of shape {list(local.shape)} for {spec}, expected "
            f"{list(spec.local_shape)} on this rank: pass the tensor's global shape and stride, or that shard"
        )
    if (torch.is_grad_enabled() and local.requires_grad) or forward_ad._current_level >= 0:
        tensor: DTensor = FromLocal.apply(unwrap_if_dead(local), spec, grad_placements)
        needs_no_lender = local.is_leaf or is_dynamo_compiling() or is_uncounted(local)
        return tensor if needs_no_lender else note_lender(tensor, local)
    return _held(local, spec)


def _gradient(local: torch.Tensor, info: MeshInfo, placements: Placements, shape: Sequence[int]) -> DTensor:
    """The local gradient that came back as a DTensor. Nothing is sent."""
    local = local.contiguous()
    spec = DTensorSpec.of(info, placements, shape, contiguous_stride(shape), local.dtype)
    if torch.is_grad_enabled() or info.coordinate is None or tuple(local.shape) != spec.local_shape:
        return wrapped(local, spec)
    return wrap(DTensor, local, spec)  # the engine hands it on, and nobody writes to it


def _whole(tensor: DTensor, route: Route) -> torch.Tensor:
    """The tensor at the end of its route to Replicate, outside autograd."""
    if route:
        return run_route(tensor._local_tensor, route)
    return plain_part(tensor._local_tensor, tensor._spec).clone()  # moved or not, it is nobody else's


def _lent(tensor: DTensor, *, view: bool = False) -> torch.Tensor:
    """The local tensor as another object on the same memory, which counts writes together with `tensor`."""
    local = tensor._local_tensor  # of a copied view, read anew
    if is_uncounted(local):
        local = _detached(local)
        return local.view_as(local) if view and local.__class__ is torch.Tensor else local
    with DisableTorchFunction():
        return lend(tensor, local, view=view)


def _held(local: torch.Tensor, spec: DTensorSpec, *, view: bool = False) -> DTensor:
    """`local`, which others hold too, as this rank's part."""
    if spec.info.coordinate is None:
        return wrap(DTensor, empty_part(spec, local.device), spec)
    if is_uncounted(local):
        return wrap(DTensor, _detached(local), spec)
    with DisableTorchFunction():
        return wrap_shared(DTensor, local, spec, view=view)


def is_uncounted(local: torch.Tensor) -> bool:
    """Whether torch counts no writes to `local` now: modes and transforms keep their own account."""
    return (
        local.__class__ is not torch.Tensor
        or dispatch_modes_active() > 0
        or functorch_level() is not None
        or is_inference_mode_enabled()
    )


def _detached(local: torch.Tensor) -> torch.Tensor:
    """Another tensor object on the same memory: autograd marks the one, and must not mark the other."""
    if holds_shards(local):  # handed on, and back, as it is
        return local
    try:
        return local.detach()
    except NotImplementedError:  # a subclass that holds shards and knows few ops
        return local


class CopiedDTensorView(CopiedView, DTensor):  # type: ignore[misc]
    """A view of a DTensor that had to be copied. It is read and written as the window on its base that it stands for
    (redistribute/copied_view.py)."""

    viewed = DTensor


DTensor.copied_view = CopiedDTensorView


class FromLocal(AutogradFunction):
    """local tensor -> DTensor."""

    @staticmethod
    def forward(
        ctx: Ctx, local: torch.Tensor, spec: DTensorSpec, grad_placements: Placements | None
    ) -> DTensor:
        ctx.spec, ctx.local_shape = spec, local.shape
        ctx.grad_placements = grad_placements or placements_of_gradient(spec.placements)
        # Plain torch refuses writes to the memory of a leaf: so does autograd here, of what it takes for a view.
        owner = local if local._base is None else local._base
        ctx.of_leaf = owner.is_leaf and owner.requires_grad
        return _held(local, spec, view=ctx.of_leaf)

    @staticmethod
    def backward(ctx: Ctx, grad: DTensor) -> tuple[torch.Tensor, None, None]:
        # What was passed on a rank outside the mesh is no part of the tensor; autograd itself makes plain zeros.
        if ctx.spec.info.coordinate is None or not isinstance(grad, DTensor):
            return torch.zeros(ctx.local_shape, dtype=grad.dtype, device=grad.device), None, None
        if torch.is_grad_enabled():  # a backward that is itself differentiated needs its own graph
            local = grad.redistribute(placements=ctx.grad_placements).to_local()
        else:
            local = run_route(grad._local_tensor, cheapest_route(grad._spec, ctx.grad_placements))
        for placement, parts in zip(ctx.spec.placements, ctx.spec.info.sizes, strict=True):
            if placement.is_partial("avg"):
                local = local / parts  # one of `parts` terms of a mean
            elif isinstance(placement, Partial) and placement.reduce_op != "sum":
                raise PlacementError(
                    f"cannot differentiate from_local with {placement}: which rank's term decided is not known; "
                    "reduce the local tensors yourself before wrapping them"
                )
        return local, None, None

    @staticmethod
    def jvp(ctx: Ctx, tangent: torch.Tensor, *_: object) -> DTensor:
        return _held(tangent, ctx.spec, view=ctx.of_leaf)  # a view where the value is one


class ToLocal(AutogradFunction):
    """DTensor -> local tensor."""

    @staticmethod
    def forward(
        ctx: Ctx, tensor: DTensor, grad_placements: Placements | None, writable: bool
    ) -> torch.Tensor:
        ctx.arguments = tensor._spec, grad_placements, writable  # one attribute: each takes 0.2 us
        # To autograd a view made in here, so that it refuses a write: that would change `tensor`, and the gradients
        # of what is computed from that would not know.
        return _lent(tensor, view=not writable)

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[DTensor, None, None]:
        spec, placed, _ = ctx.arguments
        placed = placed or placements_of_gradient(spec.placements)
        return _gradient(grad, spec.info, placed, spec.shape), None, None

    @staticmethod
    def jvp(ctx: Ctx, tangent: DTensor, *_: object) -> torch.Tensor:
        return _lent(tangent, view=not ctx.arguments[-1])


class FullTensor(AutogradFunction):
    """DTensor -> global tensor: redistribute and to_local in one."""

    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor, route: Route, grad_placements: Placements | None) -> torch.Tensor:
        ctx.route, ctx.grad_placements = route, grad_placements
        return _whole(tensor, route)

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[DTensor, None, None]:
        route: Route = ctx.route
        spec, stride = route.result, contiguous_stride(route.result.shape)
        if torch.is_grad_enabled() or ctx.grad_placements is not None:
            # A backward that is itself differentiated needs its own graph.
            placed = ctx.grad_placements or spec.placements
            gradient = _gradient(grad, spec.info, placed, spec.shape)
            return gradient.redistribute(placements=route.gradient), None, None
        full_spec = DTensorSpec.of(spec.info, spec.placements, spec.shape, stride, grad.dtype)
        back = cheapest_route(full_spec, route.gradient)
        local = run_route(grad, back) if back else grad.contiguous()
        return wrap(DTensor, local, back.result), None, None

    @staticmethod
    def jvp(ctx: Ctx, tangent: DTensor, *_: object) -> torch.Tensor:
        return _whole(tangent, requested_route(tangent._spec, None))


torch.serialization.add_safe_globals([DTensor])
register_foreach_type(DTensor)
for _kind in (Shard, Replicate, Partial, StridedShard, RaggedShard):
    register_constant(_kind)
