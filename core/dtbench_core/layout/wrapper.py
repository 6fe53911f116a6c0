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
    counted_together,
    counter_of,
    is_fake,
    is_grad_enabled,
    make_subclass,
    make_wrapper,
    set_data,
    share_storage,
    version_of,
)
from dtbench_core.traced_collectives import see_uneven_shards

Wrapped = TypeVar("Wrapped", bound="Wrapper")


class SharedResults:
    """The results of a compiled graph that share memory in plain torch, one of which had to be copied.

    A write to one of them would be lost to the others, so it is refused.

    Attributes:
        exist: whether this process has traced or loaded a graph with such results.
        of_argument: whether they are views of an argument of the graph.
        count: how many results share the memory.
    """

    __slots__ = ("count", "of_argument")

    exist: ClassVar[bool] = False

    def __init__(self, of_argument: bool, count: int = 0) -> None:
        SharedResults.exist = True
        self.of_argument, self.count = of_argument, count

    def __reduce__(self) -> tuple[type[SharedResults], tuple[bool, int]]:
        return SharedResults, (self.of_argument, self.count)


# Why a tensor that crosses the boundary of a compiled graph must not be written to: it is an argument that was copied
# from its base before, or one of these results.
Crossing: TypeAlias = Literal["argument"] | SharedResults


class SharedMemory:
    """The memory that a tensor and its views share.

    Attributes:
        traced: whether this process has traced a graph.
        writes: number of writes by ops to any of the tensors.
        update_lender: gives the plain tensor that lent the memory the autograd history of a DTensor that was written
            to.
        lender: the memory that the values were copied from, for a result of a compiled graph.
        counter: shares torch's count of writes with the argument of which a compiled graph returned a copied view.
            Graphs write to arguments without an op that `writes` would count.
        of_input: whether it belongs to an input of a graph that is being traced. Then:
        source: the local tensor of that input, before any write.
        of_two_inputs: whether two inputs of the graph share it.
        in_history: whether autograd has recorded a write to it.
        results: the graph's results in this memory, if one of them is a copy.
    """

    traced: ClassVar[bool] = False

    __slots__ = (
        "__weakref__",
        "counter",
        "in_history",
        "lender",
        "of_input",
        "of_two_inputs",
        "results",
        "source",
        "update_lender",
        "writes",
    )

    def __init__(self, source: torch.Tensor | None = None) -> None:
        self.writes, self.source, self.of_input = 0, source, source is not None
        self.of_two_inputs = self.in_history = False
        self.results: SharedResults | None = None
        self.update_lender: Callable[[Wrapper], None] | None = None
        self.lender: SharedMemory | None = None
        self.counter: torch.Tensor | None = None

    def count(self) -> int:
        """Returns the number of writes so far, by ops and graphs, to this memory and to those it was copied from."""
        return (
            self.writes
            + (0 if self.lender is None else self.lender.count())
            + (0 if self.counter is None else version_of(self.counter) or 0)
        )

    def __reduce__(self) -> tuple[type[SharedMemory], tuple[()]]:
        return SharedMemory, ()  # a loaded tensor starts with a count of 0


class Wrapper(torch.Tensor):
    """A tensor subclass of the global shape without storage; `_local_tensor` has the data of this rank.

    `_local_tensor` never requires grad: autograd records only ops on the wrapper.
    """

    __slots__ = ("_local_tensor", "_spec")

    _local_tensor: torch.Tensor
    _spec: DTensorSpec
    # (memory that this tensor shares with its views, offset in bytes of the global tensor). None: it has no views.
    _memory: tuple[SharedMemory, int] | None = None
    # Whether it is a view of an input of the graph that is being traced.
    _views_input = False
    # The local tensor of that input, which a graph returns beside a copied view.
    _source: torch.Tensor | None = None
    # Set for tensors that crossed the boundary of a compiled graph and must not be written to.
    _crossing: Crossing | None = None
    # Count of writes to the argument when a graph returned this copied view of it. None: no such view.
    _returned_at: int | None = None
    # `copied_view`: class of views of this class that had to be copied (redistribute/copied_view.py). `viewed`: class
    # of the results of ops; for a class of copied views the class that they are views of, else the class itself.
    copied_view: ClassVar[type[Wrapper]]
    viewed: ClassVar[type[Wrapper]]

    def storage_offset(self) -> int:
        """Returns the offset of the global tensor in the tensor that it is a view of, in elements."""
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
    """Passes a compiler's tracer, if one runs, what it cannot see in a wrapper: shared memory and uneven shards."""
    if is_fake(local):
        SharedMemory.traced = True
        share_storage(tensor, local)
    if not spec.is_even():
        see_uneven_shards()


def wrap_shared(cls: type[Wrapped], local: torch.Tensor, spec: DTensorSpec, *, view: bool = False) -> Wrapped:
    """Returns a `cls` of a plain tensor that the caller keeps using.

    Both share torch's count of writes, so that autograd notices writes to a saved tensor.

    Args:
        view: whether autograd treats the result as a view of a wrapper, from which tracers can make it again.
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
    tensor._local_tensor = local.detach()  # another object, which autograd does not mark
    tensor._spec = spec


def lend(tensor: Wrapper, local: torch.Tensor, *, view: bool = False) -> torch.Tensor:
    """Returns another object for `local`, the local tensor of `tensor`. Both share torch's count of writes."""
    with DisableTorchDispatch():
        alias = make_subclass(torch.Tensor, tensor)
    set_data(alias, local)
    return alias.view_as(alias) if view else alias


def data_of(tensor: Wrapped) -> Wrapped:
    """Returns torch's `.data`: a tensor of the same memory with a separate count of writes."""
    with DisableTorchFunction():
        data: Wrapped = torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined]
    if (local := stored_local(tensor)).__class__ is torch.Tensor and counted_together(tensor, local):
        data._local_tensor = local.data
    return data


def share_memory(base: Wrapper, view: Wrapper, offset: int) -> SharedMemory:
    """Records that `view` shares the memory of `base`, and returns that memory.

    Args:
        offset: where the view begins behind `base`, in bytes of the global tensor.
    """
    memory = base._memory
    if memory is None:
        memory = base._memory = (SharedMemory(), 0)
    view._memory = (memory[0], memory[1] + offset) if offset else memory
    if memory[0].of_input:
        view._views_input = True
    return memory[0]


def shares_memory(tensor: Wrapper) -> bool:
    """Whether another tensor that shares the memory may be alive.

    If none is, which is usual for parameters, `_memory` is cleared so that later calls are fast.
    """
    if tensor._memory is not None:
        if (
            tensor._memory[1]
            or _is_always_shared(tensor._memory[0])
            or _reference_counts(tensor) != _UNSHARED_COUNTS
        ):
            return True
        tensor._memory = None
    return bool(_lent and _borrowers(stored_local(tensor)))


def _is_always_shared(memory: SharedMemory) -> bool:
    return memory.of_input or memory.update_lender is not None


def _reference_counts(tensor: Value) -> tuple[int, int]:
    """Returns the reference counts of `_memory` and of its memory. Temporary references depend on Python's version."""
    memory = tensor._memory
    return getrefcount(memory), getrefcount(memory[0])


_UNSHARED_COUNTS = _reference_counts(SimpleNamespace(_memory=(SharedMemory(), 0)))


# (update_lender, written DTensor) of writes in the current call: the lender's history is updated after autograd has
# recorded the write.
pending_lenders: PerRank[list[tuple[Callable[[Wrapper], None], Wrapper]]] = PerRank(
    "wrapper.pending_lenders", list
)


def count_write(tensor: Wrapper) -> None:
    """Counts a write by an op to the tensor and to all that share its memory.

    Raises:
        ArgumentError: in a graph, if two inputs share the memory.
    """
    if tensor._memory is not None:
        if tensor._memory[0].of_two_inputs:
            raise ArgumentError(
                f"got an in-place write in a compiled function to {tensor._spec}, which shares memory with another "
                "argument; expected only one of the two, as the graph would not show the write in the other: take the "
                "view inside the function, or pass a clone() of it"
            )
        memory = tensor._memory[0]
        memory.writes += 1
        if (
            (memory.update_lender is not None or memory.of_input)
            and tensor.requires_grad
            and is_grad_enabled()
        ):
            memory.in_history = True
            if memory.update_lender is not None:
                pending_lenders.get().append((memory.update_lender, tensor))
    count_for_borrowers(tensor)


def update_lenders(pending: list[tuple[Callable[[Wrapper], None], Wrapper]]) -> None:
    """Updates the history of plain tensors whose DTensors were written to. Called above autograd after each call."""
    while pending:
        update_lender, written = pending.pop()
        update_lender(written)


# The `SharedMemory` objects of copied views that are alive. They are attributes of the storage of the base's local
# tensor, since results of graphs share that storage without a reference to the base.
_lent: set[ReferenceType[SharedMemory]] = set()


def _note_lent(local: torch.Tensor, memory: SharedMemory) -> None:
    # An attribute, as another storage may get the same address later, on one rank but not on others.
    vars(local.untyped_storage()).setdefault("borrowers", WeakSet()).add(memory)
    _lent.add(ref(memory, _lent.discard))


def _borrowers(local: torch.Tensor) -> list[SharedMemory]:
    return list(vars(local.untyped_storage()).get("borrowers", ())) if local.__class__ is torch.Tensor else []


def count_by_storage(base: Wrapper, memory: SharedMemory) -> None:
    """Makes `memory` count the writes to all tensors with the same local storage as `base`."""
    local = stored_local(base)
    if local.__class__ is torch.Tensor:
        _note_lent(local, memory)


def note_argument(tensor: Wrapper) -> None:
    """Stores on the storage of a graph's argument how its writes are counted, for `borrow`."""
    noted = vars(stored_local(tensor).untyped_storage())
    if "counter" not in noted:
        noted["counter"] = counter_of(tensor)
    noted["lender"] = None if tensor._memory is None else tensor._memory[0]


def borrow(view: Wrapper, source: torch.Tensor) -> None:
    """Makes a copied view that a graph returned count later writes to its argument.

    Args:
        source: the local tensor of the argument.
    """
    noted, memory = vars(source.untyped_storage()), SharedMemory()
    memory.counter, memory.lender = noted.get("counter"), noted.get("lender")
    _note_lent(source, memory)
    view._memory, view._returned_at = (memory, 0), memory.count()


def count_for_borrowers(tensor: Wrapper) -> None:
    """Counts a write to `tensor` for the copied views of all tensors with the same local storage."""
    if _lent:
        for memory in _borrowers(stored_local(tensor)):
            memory.writes += 1


# Reads the local tensor without the check of copied views that it is up to date.
stored_local: Callable[[Wrapper], torch.Tensor] = Wrapper.__dict__["_local_tensor"].__get__

# Attributes of a tensor that its copies and files must not have: the base of a copied view, a reduction that was
# already computed, and how it crossed the boundary of a compiled graph.
OWN_ATTRIBUTES = ("_crossing", "_materialised", "_memory", "_origin", "_returned_at", "_source")
