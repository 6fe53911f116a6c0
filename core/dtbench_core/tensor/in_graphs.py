"""What compilers ask of a DTensor: its parts, and a name for what a graph traced with it depends on."""

from __future__ import annotations

from typing import TypeAlias
from weakref import ref

import torch

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.shared_results import NOT_ALONE, OF_BASE, Parted, Place, SharedResults, window
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import SharedMemory, Wrapper, held_by, note_counter
from dtbench_core.redistribute.copied_view import is_copied, read_again
from dtbench_core.torch_compat import (
    as_functional,
    functionalization,
    is_functional,
    mesh_group_names,
    place_of_view,
    ranks_of_mesh,
    state_of_library,
    storage_of_wrapper,
    value_of_functional,
)

# Its spec, whether it requires grad, and, of a tensor that a graph gives out though others share its memory, how.
Described: TypeAlias = tuple[DTensorSpec, bool, Parted | None]


def flatten(tensor: Wrapper) -> tuple[list[str], Described]:
    """(names of its tensors, what it is made again with). A graph that returns a copied view of an input gives out the
    input's local tensor beside it, by which later writes to the input are noticed."""
    parted, local = tensor._parted, held_by(tensor)
    if SharedResults.exist and local.__class__ is torch.Tensor:  # Dynamo's guards ask, before each call
        note_counter(tensor)
    if is_functional(local):
        read_again(tensor)
        parted = tensor._parted = _as_result(tensor)
        copied = is_copied(tensor) and 0 not in tensor._spec.shape
        if tensor._memory is not None and (
            (copied and tensor._views_input) or (parted is not None and parted.place is not None)
        ):
            tensor._source = _as_it_came(tensor._memory[0])
    elif parted is not None and parted.results is not None:  # what a later graph need know of it
        parted = Parted(parted.from_input, number=0 if parted.alone() else NOT_ALONE)
    elif parted is None and is_copied(tensor):
        parted = Parted(from_input=False, number=OF_BASE)
    inner = ["_local_tensor"]
    if tensor._source is not None and tensor._borrowed is None:
        inner.append("_source")
    return inner, (tensor._spec, tensor.requires_grad, parted)


def _as_result(tensor: Wrapper) -> Parted | None:
    """How a graph that is traced gives out this tensor, at the end: a view of an input that it wrote to, or that was
    copied, and what shares memory with a copy, as tensors of their own."""
    if tensor._memory is None or (tensor._memory[0].of_input and not tensor._views_input):
        return tensor._parted  # itself an input
    memory = tensor._memory[0]
    written = tensor._views_input and memory.writes > 0 and not is_copied(tensor)
    place = _place(tensor, memory) if written else None
    from_input = tensor._views_input and (is_copied(tensor) or (written and place is None))
    if memory.results is None:
        return Parted(from_input, place=place) if from_input or place is not None else None
    parted = tensor._parted
    if parted is not None and parted.shared is memory.results:
        return parted._replace(from_input=from_input, place=place)
    memory.results.results.append((window(tensor._spec, tensor._memory[1]), is_copied(tensor)))
    return Parted(from_input, memory.results, len(memory.results.results) - 1, place=place)


def _place(tensor: Wrapper, memory: SharedMemory) -> Place | None:
    """Where a window on an input that the graph writes to lies in its local tensor: torch gives out the value that was
    written, and not the memory. None: not known, or autograd has recorded a write, which torch makes to a clone."""
    if memory.in_history or 0 in tensor._spec.shape:
        return None
    assert memory.source is not None
    if memory.source.dtype is not tensor._spec.dtype:
        return None
    place = place_of_view(held_by(tensor), memory.source)
    if place is None or place[0] != tuple(held_by(tensor).shape):
        return None
    static = all(type(number) is int for number in (*place[0], *place[1], place[2]))
    return place if static else None


def _as_it_came(memory: SharedMemory) -> torch.Tensor:
    """The local tensor of an input of a graph that is traced, whatever the graph has written to it since.

    Raises:
        ArgumentError: by a write that autograd has recorded, which torch's tracer makes to a clone.
    """
    if memory.in_history:
        raise ArgumentError(
            "got a compiled function that writes in-place to an input, recorded by autograd, and returns a view of it "
            "whose sharded dim had to be gathered before it could be cut: the view would not show later writes to the "
            "input; return a clone() of the view, take it outside the function, or write under torch.no_grad()"
        )
    assert memory.source is not None
    return as_functional(memory.source)


def memory_of_input(local: torch.Tensor, spec: DTensorSpec) -> SharedMemory:
    """What is noted of the memory of an input, of that local tensor, of a graph that is traced."""
    memory, trace = SharedMemory(value_of_functional(local), of_input=True), functionalization()
    if trace is not None and 0 not in spec.shape:
        others = vars(trace).setdefault("dtbench_core", dict[int, SharedMemory]())
        first = others.setdefault(storage_of_wrapper(local), memory)
        first.twice = memory.twice = first is not memory
    return memory


def stable_hash(tensor: Wrapper) -> str:
    """Names what a graph traced with this tensor depends on, its process groups and this library included."""
    spec, local = tensor._spec, tensor._local_tensor
    mesh = spec.info.mesh
    groups = mesh.device_type, mesh.mesh_dim_names, ranks_of_mesh(mesh), mesh_group_names(mesh)
    by = state_of_library()
    kept = tuple(local.shape), local.stride(), tensor.requires_grad
    return repr((by, groups, spec.placements, tuple(spec.shape), spec.stride, spec.order, spec.dtype, kept))


class MarkedDims(set[int]):
    """What `torch._dynamo.mark_dynamic` notes dims of a DTensor in. Always empty: a shard's size is no function of the
    global one that a compiler could keep open, so that each graph has its sizes, and the mark is a wish, as that
    of `maybe_mark_dynamic`: sizes are right, and each has a graph of its own."""

    def __init__(self, tensor: Wrapper) -> None:
        super().__init__()
        self._tensor = ref(tensor)

    def add(self, index: int) -> None:
        tensor = self._tensor()
        if tensor is None:
            return
        for name in ("_dynamo_dynamic_indices", "_dynamo_dynamic_range", "_dynamo_hint_overrides"):
            vars(held_by(tensor)).pop(name, None)  # it marks the local tensor first
        vars(tensor).get("_dynamo_hint_overrides", {}).clear()  # a size is what it is
        torch._dynamo.maybe_mark_dynamic(tensor, index)


class _Marks:
    """The attribute that `mark_dynamic` makes: unset it is not there, as guards ask for it at every call."""

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


marks = _Marks()
