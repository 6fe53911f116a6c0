"""Methods of DTensor that compilers call: inner tensors, a hash for caches, and dims marked as dynamic."""

from __future__ import annotations

from typing import TypeAlias
from weakref import ref

import torch

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import (
    ReadOnlyReason,
    SharedMemory,
    SharedResults,
    Wrapper,
    store_argument_counters,
    stored_local,
)
from dtbench_core.redistribute.copied_view import is_copied, refresh_stale
from dtbench_core.torch_compat import (
    as_functional,
    functionalization,
    is_functional,
    mesh_group_names,
    ranks_of_mesh,
    state_of_library,
    storage_of_wrapper,
    value_of_functional,
)

# (spec, requires_grad, why the tensor must not be written to, if so)
Described: TypeAlias = tuple[DTensorSpec, bool, ReadOnlyReason | None]


def flatten(tensor: Wrapper) -> tuple[list[str], Described]:
    """Returns (names of the inner tensors, other data that `__tensor_unflatten__` needs).

    A graph that returns a copied view of an argument also returns the argument's local tensor, so that later writes to
    the argument can be noticed.
    """
    reason, local = tensor._read_only_reason, stored_local(tensor)
    if SharedResults.exist and local.__class__ is torch.Tensor:  # called by Dynamo's guards before each call
        store_argument_counters(tensor)
    if is_functional(local):
        refresh_stale(tensor)
        reason = tensor._read_only_reason = _reason_of_result(tensor)
    elif is_copied(tensor) and (reason is None or local.__class__ is torch.Tensor):
        reason = "argument"
    return ["_local_tensor"] if tensor._source is None else ["_local_tensor", "_source"], (
        tensor._spec,
        tensor.requires_grad,
        reason,
    )


def _reason_of_result(tensor: Wrapper) -> ReadOnlyReason | None:
    """Returns why later writes to this result of the traced graph must raise; None if they need not.

    Raises:
        ArgumentError: the tensor is a view of an argument with an in-place write in its autograd history. torch's
            tracer would return a clone.
    """
    memory = None if tensor._memory is None else tensor._memory[0]
    of_argument = tensor._views_input
    if memory is None or (memory.of_input and not of_argument):
        return tensor._read_only_reason  # an argument itself, or no other tensor shares its memory
    if is_copied(tensor) and tensor._of_backward:  # type: ignore[attr-defined]
        return None
    if of_argument and not is_copied(tensor) and not memory.writes:
        return None  # a real view, which shares the argument's memory
    if of_argument and memory.in_history:
        raise ArgumentError(
            "got a compiled function that writes in-place to an argument, recorded by autograd, and returns a view of "
            "it: later writes to the argument would not be visible in the view; return a clone() of the view, take "
            "it outside the function, or write under torch.no_grad()"
        )
    if memory.results is None:
        if not of_argument:
            return None
        memory.results = SharedResults(of_argument)
    if tensor._read_only_reason is not memory.results:
        memory.results.count += 1
    if of_argument and 0 not in tensor._spec.shape:
        assert memory.source is not None
        tensor._source = as_functional(memory.source)
    return memory.results


def memory_of_input(local: torch.Tensor, spec: DTensorSpec) -> SharedMemory:
    """Returns the `SharedMemory` of an input of the graph that is being traced."""
    memory, trace = SharedMemory(value_of_functional(local)), functionalization()
    if trace is not None and 0 not in spec.shape:
        memories = vars(trace).setdefault("dtbench_core", dict[int, SharedMemory]())
        first = memories.setdefault(storage_of_wrapper(local), memory)
        first.of_two_inputs = memory.of_two_inputs = first is not memory
    return memory


def stable_hash(tensor: Wrapper) -> str:
    """Returns a text of all that a graph traced with this tensor depends on.

    It includes process groups and this library's source.
    """
    spec, local = tensor._spec, tensor._local_tensor
    mesh = spec.info.mesh
    groups = mesh.device_type, mesh.mesh_dim_names, ranks_of_mesh(mesh), mesh_group_names(mesh)
    return repr(
        (
            state_of_library(),
            groups,
            spec.placements,
            tuple(spec.shape),
            spec.stride,
            spec.order,
            spec.dtype,
            tuple(local.shape),
            local.stride(),
            tensor.requires_grad,
        )
    )


class MarkedDims(set[int]):
    """The set in which `torch._dynamo.mark_dynamic` stores dims of a DTensor. It stays empty.

    Compilers cannot express how sizes of shards depend on the global size, so each size gets a separate graph.
    A mark is treated like `maybe_mark_dynamic`, which allows that.
    """

    def __init__(self, tensor: Wrapper) -> None:
        super().__init__()
        self._tensor = ref(tensor)

    def add(self, index: int) -> None:
        tensor = self._tensor()
        if tensor is None:
            return
        for name in ("_dynamo_dynamic_indices", "_dynamo_dynamic_range", "_dynamo_hint_overrides"):
            vars(stored_local(tensor)).pop(name, None)  # `mark_dynamic` marks the local tensor first
        vars(tensor).get("_dynamo_hint_overrides", {}).clear()  # no other size is assumed
        torch._dynamo.maybe_mark_dynamic(tensor, index)


class _Marks:
    """Descriptor of the attribute that `mark_dynamic` sets. Until then it raises AttributeError, as guards expect."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, tensor: Wrapper | None, owner: type) -> set[int]:
        marked: set[int] | None = None if tensor is None else vars(tensor).get(self._name)
        if marked is None:
            raise AttributeError(self._name)
        return marked

    def __set__(self, tensor: Wrapper, value: set[int]) -> None:
        vars(tensor)[self._name] = MarkedDims(tensor)

    def __delete__(self, tensor: Wrapper) -> None:
        vars(tensor).pop(self._name, None)


dynamic_marks = _Marks()
