"""The base class of DTensor: a local tensor and a spec, without behaviour; and how tensors share memory.

`DTensor` (tensor/dtensor.py) adds the behaviour and imports dispatch. Dispatch makes results with this module, which
avoids a circle of imports.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from types import SimpleNamespace
from typing import ClassVar, Literal, TypeAlias, TypeVar
from weakref import ReferenceType, WeakSet, ref

import torch

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.op_types import Value
from dtbench_core.runtime import PerRank
from dtbench_core.torch_compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    as_subclass,
    have_same_version_counter,
    is_fake,
    is_grad_enabled,
    make_subclass,
    make_wrapper,
    set_data,
    share_storage,
    version_counter_of,
    version_of,
)
from dtbench_core.traced_collectives import see_uneven_shards

Wrapped = TypeVar("Wrapped", bound="Wrapper")


class SharedResults:
    """Results of a compiled graph that share memory in plain torch, while one of them had to be copied here.

    A write to one of them would not be visible in the others, so it raises.

    Attributes:
        exist: whether this process has traced or loaded a graph with such results.
        of_argument: whether the results are views of an argument of the graph.
        count: how many results share the memory.
    """

    __slots__ = ("count", "of_argument")

    exist: ClassVar[bool] = False

    def __init__(self, of_argument: bool, count: int = 0) -> None:
        SharedResults.exist = True
        self.of_argument, self.count = of_argument, count

    def __reduce__(self) -> tuple[type[SharedResults], tuple[bool, int]]:
        return SharedResults, (self.of_argument, self.count)


# Why a tensor that entered or left a compiled graph must not be written to. "argument": it entered as a copied view.
# `SharedResults`: it is one of these results.
ReadOnlyReason: TypeAlias = Literal["argument"] | SharedResults


class SharedMemory:
    """The memory that a tensor and its views share.

    Attributes:
        traced: whether this process has traced a graph.
        writes: number of writes by ops to any of the tensors.
        update_history: called after a write to the DTensor. It gives the plain tensor that shares this memory the same
            autograd history.
        copied_from: memory of the argument, for a copied view of it that a compiled graph returned.
        counter: a tensor that shares the argument's version counter, for such a view. A graph writes to arguments
            without ops, so `writes` misses these writes.
        of_input: whether the memory belongs to an input of a graph that is being traced.
        source: local tensor of that input before any write; None if `of_input` is False.
        of_two_inputs: whether two inputs of that graph share the memory.
        in_history: whether autograd has recorded a write to it. Only set for memory of an input or of a plain tensor.
        results: results of a traced graph that share this memory, if one of them is a copy.
    """

    traced: ClassVar[bool] = False

    __slots__ = (
        "__weakref__",
        "copied_from",
        "counter",
        "in_history",
        "of_input",
        "of_two_inputs",
        "results",
        "source",
        "update_history",
        "writes",
    )

    def __init__(self, source: torch.Tensor | None = None) -> None:
        self.writes, self.source, self.of_input = 0, source, source is not None
        self.of_two_inputs = self.in_history = False
        self.results: SharedResults | None = None
        self.update_history: Callable[[Wrapper], None] | None = None
        self.copied_from: SharedMemory | None = None
        self.counter: torch.Tensor | None = None

    def count(self) -> int:
        """Returns the number of writes so far, by ops and graphs, to this memory and the memory it was copied from."""
        return (
            self.writes
            + (0 if self.copied_from is None else self.copied_from.count())
            + (0 if self.counter is None else version_of(self.counter) or 0)
        )

    def __reduce__(self) -> tuple[type[SharedMemory], tuple[()]]:
        return SharedMemory, ()  # a loaded tensor starts with a count of 0


class Wrapper(torch.Tensor):
    """A tensor subclass that has the global shape and no storage; `_local_tensor` has the data of this rank.

    `_local_tensor` never requires grad: autograd records only ops on the wrapper.
    """

    __slots__ = ("_local_tensor", "_spec")

    _local_tensor: torch.Tensor
    _spec: DTensorSpec
    # (memory that this tensor shares with its views or base, byte offset in the global tensor). None: it has neither.
    _memory: tuple[SharedMemory, int] | None = None
    # Whether this tensor is a view of an input of the graph that is being traced.
    _views_input = False
    # The local tensor of that input. A graph that returns a copied view of the input returns this tensor, too.
    _source: torch.Tensor | None = None
    # Set for tensors that entered or left a compiled graph and must not be written to.
    _read_only_reason: ReadOnlyReason | None = None
    # `SharedMemory.count()` when a graph returned this tensor as a copied view of an argument. None for other tensors.
    _writes_at_return: int | None = None
    # `copied_view`: the subclass for copied views (redistribute/copied_view.py).
    # `viewed`: the class of results of ops. For a copied-view class it is the underlying class, else the class itself.
    copied_view: ClassVar[type[Wrapper]]
    viewed: ClassVar[type[Wrapper]]

    def storage_offset(self) -> int:
        """Returns the offset of this view from its base in the global tensor, in elements."""
        return 0 if self._memory is None else self._memory[1] // self._spec.dtype.itemsize

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "viewed" not in vars(cls):
            cls.viewed = cls


def wrap(cls: type[Wrapped], local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> Wrapped:
    """Returns a `cls` of the local tensor with the spec's global metadata."""
    # Positional arguments are 0.3 us faster: storage offset, memory format, dtype, layout, device, pinned.
    tensor = make_wrapper(
        cls,
        spec.shape,
        spec.stride,
        None,
        None,
        spec.dtype,
        torch.strided,
        local.device,
        False,
        requires_grad,
    )
    tensor._local_tensor = local  # type: ignore[attr-defined]
    tensor._spec = spec  # type: ignore[attr-defined]
    if local.__class__ is not torch.Tensor:
        _inform_tracer(tensor, local, spec)
    return tensor  # type: ignore[return-value]


def _inform_tracer(tensor: torch.Tensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Informs a compiler's tracer, if one runs, that memory is shared and whether shards are uneven."""
    if is_fake(local):
        SharedMemory.traced = True
        share_storage(tensor, local)
    if not spec.is_even():
        see_uneven_shards()


def wrap_shared(cls: type[Wrapped], local: torch.Tensor, spec: DTensorSpec, *, view: bool = False) -> Wrapped:
    """Returns a `cls` of a plain tensor that the caller keeps using.

    Both share one version counter, so that autograd notices writes to a saved tensor.

    Args:
        view: whether the result is an autograd view of a second wrapper of `local`. A tracer can then recreate the
            result from that base.
    """
    tensor: Value = make_subclass(cls, local)
    set_data(tensor, wrap(cls, local, spec))
    _set_local(tensor, local, spec)
    if view:
        with DisableTorchDispatch():
            tensor = as_subclass(tensor, cls)
        _set_local(tensor, local, spec)
    return tensor  # type: ignore[no-any-return]


def _set_local(tensor: Value, local: torch.Tensor, spec: DTensorSpec) -> None:
    tensor._local_tensor = local.detach()  # a separate object without autograd metadata
    tensor._spec = spec


def alias_of_local(tensor: Wrapper, local: torch.Tensor, *, view: bool = False) -> torch.Tensor:
    """Returns another tensor object for `local`, the local tensor of `tensor`, with the version counter of `tensor`."""
    with DisableTorchDispatch():
        alias = make_subclass(torch.Tensor, tensor)
    set_data(alias, local)
    return alias.view_as(alias) if view else alias


def data_of(tensor: Wrapped) -> Wrapped:
    """Returns torch's `.data`: a tensor on the same memory with a separate version counter."""
    with DisableTorchFunction():
        data: Wrapped = torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined]
    if (local := stored_local(tensor)).__class__ is torch.Tensor and have_same_version_counter(tensor, local):
        data._local_tensor = local.data
    return data


def share_memory(base: Wrapper, view: Wrapper, offset: int) -> SharedMemory:
    """Records that `view` shares the memory of `base`, and returns that memory.

    Args:
        offset: byte offset of the view from `base`, in the global tensor.
    """
    memory = base._memory
    if memory is None:
        memory = base._memory = (SharedMemory(), 0)
    view._memory = (memory[0], memory[1] + offset) if offset else memory
    if memory[0].of_input:
        view._views_input = True
    return memory[0]


def shares_memory(tensor: Wrapper) -> bool:
    """Whether a tensor that shares the memory of `tensor` may be alive.

    If no other tensor refers to the memory, as usual for a parameter, `_memory` is cleared to make later calls fast.
    """
    if tensor._memory is not None:
        if (
            tensor._memory[1]
            or _is_always_shared(tensor._memory[0])
            or _reference_counts(tensor) != _UNSHARED_COUNTS
        ):
            return True
        tensor._memory = None
    return bool(_counting_memories and _memories_of_storage(stored_local(tensor)))


def _is_always_shared(memory: SharedMemory) -> bool:
    return memory.of_input or memory.update_history is not None


def _reference_counts(tensor: Value) -> tuple[int, int]:
    """Returns the reference counts of the tuple `_memory` and of its `SharedMemory`.

    They include temporary references, whose number depends on Python's version.
    """
    memory = tensor._memory
    return getrefcount(memory), getrefcount(memory[0])


_UNSHARED_COUNTS = _reference_counts(SimpleNamespace(_memory=(SharedMemory(), 0)))


# (update_history, written DTensor) of writes in the current call. It is called after autograd has recorded the write.
pending_history_updates: PerRank[list[tuple[Callable[[Wrapper], None], Wrapper]]] = PerRank(
    "wrapper.pending_history_updates", list
)


def count_write(tensor: Wrapper) -> None:
    """Counts a write by an op to `tensor` and to all tensors that share its memory.

    Raises:
        ArgumentError: in a graph, if two inputs share the memory.
    """
    if tensor._memory is not None:
        if tensor._memory[0].of_two_inputs:
            raise ArgumentError(
                f"got an in-place write in a compiled function to {tensor._spec}, which shares memory with another "
                "argument; expected only one of the two, as the write would not be visible in the other: take the "
                "view inside the function, or pass a clone() of it"
            )
        memory = tensor._memory[0]
        memory.writes += 1
        if (
            (memory.update_history is not None or memory.of_input)
            and tensor.requires_grad
            and is_grad_enabled()
        ):
            memory.in_history = True
            if memory.update_history is not None:
                pending_history_updates.get().append((memory.update_history, tensor))
    count_for_copied_views(tensor)


def update_histories(pending: list[tuple[Callable[[Wrapper], None], Wrapper]]) -> None:
    """Updates the autograd history of plain tensors whose DTensors were written to.

    Called after each op, above autograd.
    """
    while pending:
        update_history, written = pending.pop()
        update_history(written)


# The living `SharedMemory` objects of copied views. Each is also an attribute of the storage of its base's local
# tensor. Results of graphs share that storage without referring to the base, so their writes are counted through the
# storage.
_counting_memories: set[ReferenceType[SharedMemory]] = set()


def _add_counting_memory(local: torch.Tensor, memory: SharedMemory) -> None:
    # Stored as an attribute, since another storage may get the same address later, on one rank but not on others.
    vars(local.untyped_storage()).setdefault("counting_memories", WeakSet()).add(memory)
    _counting_memories.add(ref(memory, _counting_memories.discard))


def _memories_of_storage(local: torch.Tensor) -> list[SharedMemory]:
    return (
        list(vars(local.untyped_storage()).get("counting_memories", ()))
        if local.__class__ is torch.Tensor
        else []
    )


def count_by_storage(base: Wrapper, memory: SharedMemory) -> None:
    """Makes `memory` count the writes to all tensors with the same local storage as `base`."""
    local = stored_local(base)
    if local.__class__ is torch.Tensor:
        _add_counting_memory(local, memory)


def store_argument_counters(tensor: Wrapper) -> None:
    """Attaches the version counter and `SharedMemory` of a graph's argument to its storage.

    `track_argument_writes` reads them.
    """
    noted = vars(stored_local(tensor).untyped_storage())
    if "counter" not in noted:
        noted["counter"] = version_counter_of(tensor)
    noted["copied_from"] = None if tensor._memory is None else tensor._memory[0]


def track_argument_writes(view: Wrapper, source: torch.Tensor) -> None:
    """Sets a `SharedMemory` on a copied view that a graph returned. It counts later writes to the graph's argument.

    Args:
        source: the local tensor of the argument.
    """
    noted, memory = vars(source.untyped_storage()), SharedMemory()
    memory.counter, memory.copied_from = noted.get("counter"), noted.get("copied_from")
    _add_counting_memory(source, memory)
    view._memory, view._writes_at_return = (memory, 0), memory.count()


def count_for_copied_views(tensor: Wrapper) -> None:
    """Counts a write to `tensor` in the memories of copied views whose bases have the same local storage."""
    if _counting_memories:
        for memory in _memories_of_storage(stored_local(tensor)):
            memory.writes += 1


# Reads the stored local tensor. Unlike `_local_tensor`, it does not refresh a stale copied view first.
stored_local: Callable[[Wrapper], torch.Tensor] = Wrapper.__dict__["_local_tensor"].__get__

# Attributes that copies and saved files of a tensor must not have. They describe the base of a copied view, a stored
# reduction, and how the tensor entered or left a compiled graph.
UNCOPIED_ATTRIBUTES = (
    "_read_only_reason",
    "_materialised",
    "_memory",
    "_origin",
    "_writes_at_return",
    "_source",
)
