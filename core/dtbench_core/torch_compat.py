"""All private or renamed torch names that the core depends on (torch 2.11 to 2.13).

torch 2.13 renamed the flat collectives (all_gather_into_tensor -> all_gather_single,
reduce_scatter_tensor -> reduce_scatter_single) and warns about the old names; 2.11 has only those.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import fx
from torch._library import fake_class_registry
from torch._subclasses import fake_tensor, functional_tensor
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental import proxy_tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils, _python_dispatch

# c10d, public functions under the name this torch does not warn about.
all_gather_single = cast(
    "Callable[..., Any]", getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single = cast(
    "Callable[..., Any]", getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

# The methods of a process group that torch.distributed's functions call, so every process group has them, including
# those written in Python. Each takes a record of options.
_renamed = hasattr(dist.ProcessGroup, "all_gather_single")
ALL_GATHER_METHOD = "all_gather_single" if _renamed else "_allgather_base"
REDUCE_SCATTER_METHOD = "reduce_scatter_single" if _renamed else "_reduce_scatter_base"
ALL_TO_ALL_METHOD = "all_to_all_single" if _renamed else "alltoall_base"
AllGatherOptions = torch._C._distributed_c10d.AllgatherOptions
AllReduceOptions = distributed_c10d.AllreduceOptions
AllToAllOptions = distributed_c10d.AllToAllOptions
BroadcastOptions = distributed_c10d.BroadcastOptions
ReduceScatterOptions = distributed_c10d.ReduceScatterOptions
ScatterOptions = distributed_c10d.ScatterOptions

# Modes and autograd state that dispatch reads at every call. These C functions take tenths of a microsecond, their
# public wrappers microseconds.
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass
DisableTorchDispatch = torch._C._DisableTorchDispatch
# A `__torch_function__` with which ops go directly to the class's `__torch_dispatch__`.
disabled_torch_function = cast("Any", torch._C._disabled_torch_function_impl)
any_requires_grad = torch._C._any_requires_grad
any_autocast = torch._C._is_any_autocast_enabled
increment_version = torch._C._increment_version
is_inference_mode_enabled = torch.is_inference_mode_enabled
is_grad_enabled = torch.is_grad_enabled
get_default_dtype = torch.get_default_dtype
dispatch_modes_active = torch._C._len_torch_dispatch_stack
functorch_level = cast("Callable[[], object]", torch._C._functorch.peek_interpreter_stack)
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
# Runs autograd's engine without the argument checks of autograd.grad and backward.
run_backward = cast(
    "Callable[..., tuple[torch.Tensor | None, ...]]", torch.autograd.graph._engine_run_backward
)
# Returns a checked cotangent for each output, which is 1 for a scalar without one.
make_grads = cast("Callable[..., tuple[torch.Tensor | None, ...]]", torch.autograd._make_grads)
# Splits dim 0 of each tensor into n equal chunks and concatenates the flattened i-th chunks of all: (n, ...). One call,
# and on CUDA one kernel, for all tensors.
chunk_cat = cast("Callable[..., torch.Tensor]", torch._chunk_cat)
make_wrapper = cast("Callable[..., torch.Tensor]", torch.Tensor._make_wrapper_subclass)


# torch's Python binding of an op is 0.8 us faster than the OpOverload. Only ops whose binding takes the arguments of
# the schema, by position or name, are listed.
_BINDINGS: dict[object, Callable[..., Any]] = {
    getattr(getattr(torch.ops.aten, name), overload or "default"): getattr(owner, name)
    for owner, ops in (
        (torch, "_foreach_add_.List _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data"),
        (torch, "add.Tensor addmm bmm cat clone div.Tensor mean mean.dim mm mul.Tensor native_layer_norm"),
        (torch, "permute relu sub.Tensor sum sum.dim_IntList t transpose.int unsqueeze"),
        (torch.Tensor, "add_.Tensor detach expand view"),
        (vars(torch._C)["_VariableFunctions"], "split.Tensor"),
    )
    for name, _, overload in (op.partition(".") for op in ops.split())
}


def current_stream(device: torch.device) -> Any:
    """Returns the stream that ops on the device go to; None on a CPU, or for fake tensors of an absent GPU."""
    has_streams = device.type == "cuda" and torch.cuda.is_initialized()
    return torch.cuda.current_stream(device) if has_streams else None


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent in builds for CPUs


def stream_handle(device: torch.device) -> object:
    """Returns an identifier of the current stream of a CUDA device, without making an object for it; else None."""
    return _raw_stream(device.index) if _raw_stream is not None and device.type == "cuda" else None


def is_stream_capturing(stream: Any) -> bool:
    """Returns whether what is enqueued on a CUDA stream goes into a graph."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Makes the allocator reuse the tensor's memory only after work that is queued on `stream` when it is freed."""
    tensor.record_stream(stream)


def is_capturing(device: torch.device) -> bool:
    """Whether ops on the device are captured in a CUDA graph, where no event may be queried."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def kernel_of(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Returns the fastest way to call `op`: its binding, or its C entry without OpOverload's Python `__call__`."""
    return _BINDINGS.get(op) or op._op


disable_modes = _python_dispatch._disable_current_modes


def ranks_of_mesh(mesh: DeviceMesh) -> list[int]:
    """Returns the global ranks in row-major order. Modes are disabled: a FakeTensorMode refuses the mesh's tensor."""
    with disable_modes():
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def world_store() -> Any:
    """Returns the store that the world's ranks share; None if ranks are threads or have no common store."""
    c10d: Any = torch._C._distributed_c10d
    store = underlying = cast("Any", distributed_c10d)._get_default_store()
    while isinstance(underlying, c10d.PrefixStore):
        underlying = underlying.underlying_store
    return None if isinstance(underlying, c10d.HashStore) else store


# Returns the process group with a name, as ops have in their arguments.
resolve_group = cast("Callable[[str], dist.ProcessGroup]", torch._C._distributed_c10d._resolve_process_group)
# Returns a device whose tensors a group can send.
device_of_group = cast("Callable[[dist.ProcessGroup], str]", distributed_c10d._get_object_coll_device)


def current_mesh() -> DeviceMesh:
    """Returns the mesh of the enclosing `with mesh:`. Raises RuntimeError outside of one."""
    return device_mesh._mesh_resources.get_current_mesh()


def set_wrapper_metadata(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> None:
    """Gives a wrapper without storage another shape and stride, below autograd and without dispatch.

    The meta kernel of `set_` changes the numbers alone and allocates nothing.
    """
    _set_storage(tensor, tensor.untyped_storage(), shape, stride)


def _set_storage(
    wrapper: torch.Tensor, storage: torch.UntypedStorage, shape: Sequence[int], stride: Sequence[int]
) -> None:
    was = torch._C._meta_in_tls_dispatch_include()
    with torch._C._AutoDispatchBelowAutograd(), DisableTorchDispatch(), DisableTorchFunction():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            torch.ops.aten.set_.source_Storage_storage_offset(wrapper, storage, 0, list(shape), list(stride))
        finally:
            torch._C._set_meta_in_tls_dispatch_include(was)


def share_storage(wrapper: torch.Tensor, local: torch.Tensor) -> None:
    """Gives wrappers whose local tensors share memory a common, empty storage, so that a tracer sees the sharing."""
    shared = vars(local.untyped_storage()).setdefault("of_wrappers", wrapper.untyped_storage())
    if shared is not wrapper.untyped_storage() and shared.device == wrapper.device and 0 not in wrapper.shape:
        _set_storage(wrapper, shared, wrapper.shape, wrapper.stride())


def share_storage_of(base: torch.Tensor, wrapper: torch.Tensor, local: torch.Tensor) -> None:
    """Gives a copied view the storage of its base, as if its local tensor shared the base's memory."""
    vars(local.untyped_storage())["of_wrappers"] = base.untyped_storage()
    if base.untyped_storage().device == wrapper.device and 0 not in wrapper.shape:
        _set_storage(wrapper, base.untyped_storage(), wrapper.shape, wrapper.stride())


def register_foreach_type(cls: type[torch.Tensor]) -> None:
    """Makes optimizers and clip_grad_norm_ choose their foreach form for `cls`, as for plain tensors."""
    for listed in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if cls not in listed:
            listed.append(cls)


def wrap_state_loading(wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps the function that optimizers call for each value of a loaded state: (parameter, value, ...) -> value."""
    name = "_process_value_according_to_param_policy"
    setattr(optimizer.Optimizer, name, staticmethod(wrapped(getattr(optimizer.Optimizer, name))))


def mesh_dim_groups(mesh: DeviceMesh, dim: int) -> tuple[tuple[int, ...], ...]:
    """Returns the global ranks of every group along `dim`, of the parent mesh if `mesh` is a slice."""
    layout: Any = mesh._layout[dim]
    if not hasattr(layout, "remap_to_tensor"):  # since torch 2.13, meshes that are slices lack it
        layout = vars(device_mesh)["_MeshLayout"]([layout])
    with torch._C._DisableTorchDispatch():
        return tuple(map(tuple, layout.remap_to_tensor(mesh._rank_map).reshape(-1, mesh.size(dim)).tolist()))


_library = torch.library.Library("dtbench_core", "FRAGMENT")


def new_op(
    schema: str, kernel: Callable[..., Any], meta: Callable[..., Any] | None = None
) -> torch._ops.OpOverload:
    """Defines an op of this library. meta: its meta kernel, if `kernel` does not work on meta tensors."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    if meta is not None:
        _library.impl(name, meta, "Meta")
    return cast("torch._ops.OpOverload", getattr(torch.ops.dtbench_core, name).default)


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether torch decomposes `op` into other ops above autograd."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def mesh_group_names(mesh: DeviceMesh) -> list[str]:
    """Returns the name of this process's group along each dim of `mesh`; an empty list outside the mesh."""
    return [str(name) for name in getattr(mesh, "_dim_group_names", [])]


# make_subclass(cls, tensor) returns a `cls` that shares the version counter of `tensor`. `set_data` then
# changes the metadata of the result.
make_subclass = torch.Tensor._make_subclass
as_subclass = torch.Tensor.as_subclass  # the same, but autograd records the result as a view
set_data = cast("Any", torch.Tensor.data).__set__

_version: Callable[[torch.Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__


def version_of(tensor: torch.Tensor) -> int | None:
    """Returns the version of `tensor`, which its base and their views share; None for an inference tensor."""
    with DisableTorchFunction():
        return None if tensor.is_inference() else _version(tensor)


def have_same_version_counter(tensor: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a write to one of the tensors increments the version of both."""
    if (version := version_of(tensor)) is None or version_of(second) != version:
        return False
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(second):
        increment_version((second,))
        return version_of(tensor) != version


_COUNTING = torch._C.DispatchKey.ADInplaceOrView


def version_counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without values that has the version counter of `tensor`, but no reference to `tensor`."""
    was = torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTING)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTING, False)  # dispatch runs below this key
    try:
        with DisableTorchDispatch():
            return make_subclass(torch.Tensor, tensor)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTING, was)


_Result = TypeVar("_Result")


def counting(call: Callable[..., _Result], *, view: bool) -> Callable[..., _Result]:
    """Returns `call` such that it increments versions also below autograd, where dispatch runs.

    The key ADInplaceOrView is enabled for this. torch excludes it there.

    Args:
        view: whether `call` returns views that share the version. Not for `.data`, whose version is separate. Only for
            `.data` does torch leave the key enabled; it is then excluded.
    """

    def counted(*args: object, **kwargs: object) -> _Result:
        was = torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTING)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTING, view and not was)
        try:
            return call(*args, **kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTING, was)

    return counted


def is_fake_mode_active() -> bool:
    """Whether torch.compile or torch.export traces with tensors that have no values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def in_backward() -> bool:
    """Whether autograd's engine runs in this thread and is not traced."""
    return in_backward_pass() and not is_traced()


def is_traced() -> bool:
    """Whether ops are traced into a graph, which cannot branch on values."""
    return is_fake_mode_active() or active_tracer() is not None


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no values. Its mode need not be active, for example while Dynamo replays a view."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether `tensor` belongs to a graph that AOTAutograd is tracing."""
    return isinstance(tensor, functional_tensor.FunctionalTensor)


# Context for further ops on tensors of a graph that AOTAutograd is tracing, after the traced function has ended.
functionalizing = functional_tensor.FunctionalTensorMode


def value_of_functional(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the current value of a tensor in a graph that AOTAutograd is tracing. Later writes do not change it."""
    return torch._from_functional_tensor(vars(tensor)["elem"])


def as_functional(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with this value in a graph that AOTAutograd is tracing."""
    with functionalizing():
        functional: torch.Tensor = functional_tensor.FunctionalTensor.to_functional(value)
    return functional


def functionalization() -> object:
    """Returns the mode that traces a graph of AOTAutograd, a new object per trace; None between traces."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)


def storage_of_wrapper(local: torch.Tensor) -> int:
    """Returns an identifier of the storage that a tracer sees for the wrapper of `local` (`share_storage`)."""
    storage = value_of_functional(local).untyped_storage()
    return cast("int", vars(storage).get("of_wrappers", storage)._cdata)


def as_unknown_size(error: RuntimeError, base: type[Exception], words: str) -> Exception | None:
    """Returns an error that is both a `base` and torch's GuardOnDataDependentSymNode, with this message.

    Dynamo then breaks the graph before the op. None if `error` is of another class.
    """
    kind: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes").GuardOnDataDependentSymNode
    if not isinstance(error, kind):
        return None
    return cast("Exception", type("UnknownSizeError", (base, kind), {})(vars(error)["cond"], words))


# apply(cls, *arguments): the C function that an autograd function's `apply` calls.
_apply = vars(torch._C._FunctionBase)["apply"]
# Returns the inner tensor of a transform of torch.func that has ended; any other tensor unchanged.
unwrap_if_dead = cast("Callable[[torch.Tensor], torch.Tensor]", torch._C._functorch.unwrap_if_dead)


class AutogradFunction(torch.autograd.Function):
    """An autograd function whose `apply` skips torch's Python code for transforms of torch.func, which takes 2 us.

    No argument may be a tensor of a transform that has ended, which torch's `apply` would unwrap. DTensors never are;
    plain tensors must be passed through `unwrap_if_dead`.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if functorch_level() is not None or is_dynamo_compiling():
            return super().apply(*args)
        return _apply(cls, *args)


# ---- tracing with make_fx: the fx node of a tensor ----

share_memory = cast("Callable[[torch.Tensor, torch.Tensor], bool]", vars(torch._C)["_is_alias_of"])
untraced = proxy_tensor.disable_proxy_modes_tracing


def active_tracer() -> Any:
    """Returns the fx tracer of the make_fx that is running, or None."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


def traced_value(tensor: torch.Tensor, tracer: Any) -> Any:
    """Returns the fx proxy of `tensor`, or the tensor itself, a constant of the graph, if it has none."""
    return proxy_tensor.get_proxy_slot(tensor, tracer, tensor, lambda slot: slot.proxy)


def trace_as(tensor: torch.Tensor, proxy: Any, tracer: Any) -> None:
    """Represents `proxy` by `tensor` in the graph."""
    with untraced():
        proxy_tensor.track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)


def in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1


def traced_node(tensor: torch.Tensor, tracer: Any) -> fx.Node | None:
    """Returns the node of the graph that computes `tensor`; None if it is a constant."""
    if is_functional(tensor):
        tensor = value_of_functional(tensor)
    return getattr(traced_value(tensor, tracer), "node", None)


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the innermost tensor inside the wrappers of transforms of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


# ---- torch.compile ----

Function = TypeVar("Function", bound=Callable[..., Any])


def in_graph(function: Function) -> Function:
    """Makes `function` a single call in a graph of torch.compile.

    Dynamo does not trace its Python code, which may use context variables and caches by identity. AOTAutograd runs it
    and traces its ops and collectives.
    """
    when_imported("torch._dynamo", lambda dynamo: dynamo.allow_in_graph(function))
    return function


def register_constant(cls: type) -> None:
    """Makes objects of `cls` constants of a graph. They compare by value, and their `repr` gives an equal object."""
    opaque: Any = importlib.import_module("torch._library.opaque_object")
    names = [name for name in dir(cls) if not name.startswith("_")]
    used = dict.fromkeys([*names, "__eq__"], opaque.MemberType.USE_REAL)
    cls.__fx_repr__ = lambda self: (repr(self), {type(self).__name__: type(self)})  # type: ignore[attr-defined]
    if hasattr(opaque, "register_custom_class"):  # since torch 2.14 or 2.15
        opaque.register_custom_class(cls, typ="constant", members=used)
        return
    # Before torch 2.13, torch requires a metaclass also of values, though only references need it.
    metaclass, opaque.OpaqueBaseMeta = opaque.OpaqueBaseMeta, type
    try:
        opaque.register_opaque_type(cls, typ="value", members=used)
    finally:
        opaque.OpaqueBaseMeta = metaclass


def real_object(traced: Any) -> Any:
    """Returns the real object of a traced input that is no tensor, such as a mesh; any other object unchanged."""
    kind = vars(fake_class_registry)["FakeScriptObject"]
    return object.__getattribute__(traced, "real_obj") if type(traced) is kind else traced


# ---- modules of torch that take long to load ----


def is_torchs_dtensor(value: object) -> bool:
    """Whether `value` is a torch.distributed.tensor.DTensor. Does not import that module, which is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback` with the module of that name: now, or once it has been imported."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Awaited(name, callback))


class _Awaited(importlib.abc.MetaPathFinder):
    """Meta path finder that calls a function once a module was loaded. The other finders find the module."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name, self._callback = name, callback

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._callback(module)

            vars(spec.loader)["exec_module"] = execute_and_call
        return spec


_FOLDER = Path(__file__).parent


@functools.cache
def state_of_library() -> str:
    """Returns a digest of this library's source. It is part of the keys of torch's caches of graphs on disk."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(_FOLDER.rglob("*.py")))).hexdigest()


def _configure_dynamo(dynamo: Any) -> None:
    """Makes Dynamo trace calls into this library. It must not compile frames of the library that run after a break.

    Dynamo treats torch's own code the same way. Before torch 2.13 it cannot do both, and compiles such frames.
    """
    if hasattr(dynamo.trace_rules, "BUILTIN_INLINE_WHEN_CALLED"):
        dynamo.trace_rules.add("dtbench_core")
        dynamo.trace_rules.BUILTIN_INLINE_WHEN_CALLED.add(str(_FOLDER))


when_imported("torch._dynamo", _configure_dynamo)


def accept_plain_gradients(cls: type[torch.Tensor], placed: Callable[..., torch.Tensor]) -> None:
    """Makes compiled backward passes accept a plain gradient for a result that is a `cls`.

    Autograd passes plain zeros for unused results.

    Args:
        placed: (gradient, metadata of the result's `__tensor_flatten__`) -> gradient as a `cls`.
    """

    def configure(wrappers: ModuleType) -> None:
        kind, dispatcher = wrappers.SubclassCreationMeta, wrappers.AOTDispatchAutograd
        process = dispatcher.process_runtime_tangent

        def process_placed(x: object, meta: object, *options: object) -> object:
            if x.__class__ is torch.Tensor and isinstance(meta, kind) and meta.original_subclass_type is cls:
                x = placed(x, meta.meta)
            return process(x, meta, *options)

        dispatcher.process_runtime_tangent = staticmethod(process_placed)

    when_imported("torch._functorch._aot_autograd.runtime_wrappers", configure)
