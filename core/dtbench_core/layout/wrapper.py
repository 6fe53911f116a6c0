"""The bare tensor subclass: a local tensor and a spec, without behaviour.

`DTensor` (tensor/dtensor.py) adds the behaviour. It stands apart so that dispatch can make results without
importing the class that imports dispatch.
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
        update_lender: gives the plain tensor that lent the memory the autograd history of a DTensor that was written to.
        lender: the memory that the values were copied from, for a result of a compiled graph.
        counter: shares torch's count of writes with the argument of which a compiled graph returned a copied view.
            Graphs write to arguments without an op that `writes` would count.
        of_input: whether it belongs to an input of a graph that is being traced. Then:
        source: the local tensor of that input, before any write.
        twice: whether two inputs of the graph share it.
        in_history: whether autograd has recorded a write to it.
        results: the graph's results in this memory, if one of them is a copy.
    """

    traced: ClassVar[bool] = False

    __slots__ = (
        "__weakref__",
        "counter",
        "update_lender",
        "in_history",
        "lender",
        "of_input",
        "results",
        "source",
        "twice",
        "writes",
    )

    def __init__(self, source: torch.Tensor | None = None) -> None:
        self.writes, self.source, self.of_input = 0, source, source is not None
        self.twice = self.in_history = False
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
        return SharedMemory, ()  # the count of a file's tensors starts anew


class Wrapper(torch.Tensor):
    """To torch a tensor of the global shape, without storage; `_local_tensor` holds the data.

    `_local_tensor` never requires grad: autograd sees the wrapper alone.
    """

    __slots__ = ("_local_tensor", "_spec")

    _local_tensor: torch.Tensor
    _spec: DTensorSpec
    # The memory of which this and other tensors are windows, and where in it this one begins, in bytes of the global
    # tensor. None: no view was taken.
    _memory: tuple[SharedMemory, int] | None = None
    # Whether it is a view of an input of the graph that is being traced.
    _views_input = False
    # The local tensor of that input, which a graph returns beside a copied view.
    _source: torch.Tensor | None = None
    # Set for tensors that crossed the boundary of a compiled graph and must not be written to.
    _crossing: Crossing | None = None
    # Count of writes to the argument when a graph returned this copied view of it. None: no such view.
    _returned_at: int | None = None
    # The class of views that had to be copied (copied_view.py), and that of what ops on such a view give: of every
    # other class, itself.
    copied_view: ClassVar[type[Wrapper]]
    viewed: ClassVar[type[Wrapper]]

    def storage_offset(self) -> int:
        """Where the global tensor begins in that which it is a view of, in elements."""
        return 0 if self._memory is None else self._memory[1] // self._spec.dtype.itemsize

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "viewed" not in vars(cls):
            cls.viewed = cls


def wrap(cls: type[Wrapped], local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> Wrapped:
    """A `cls` that shows `spec`'s global metadata and holds `local`."""
    # By position, which is 0.3 us faster: storage offset, memory format, dtype, layout, device, pinned.
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
        _show_tracer(tensor, local, spec)
    return tensor  # type: ignore[return-value]


def _show_tracer(tensor: torch.Tensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Tells the tracers of compilers, if there is one, what they cannot see of a wrapper."""
    if is_fake(local):  # of an input, which another one may share memory with
        SharedMemory.traced = True
        share_storage(tensor, local)
    if not spec.is_even():
        see_uneven_shards()


def wrap_shared(cls: type[Wrapped], local: torch.Tensor, spec: DTensorSpec, *, view: bool = False) -> Wrapped:
    """As `wrap`, of a plain tensor that others hold too: writes to one are counted for both, so that autograd notices
    when what it saved was changed. view: to autograd the result is a view; of a wrapper, as tracers make a view anew
    from its base."""
    tensor: Value = make_subclass(cls, local)
    set_data(tensor, wrap(cls, local, spec))
    _hold(tensor, local, spec)
    if view:
        with DisableTorchDispatch():
            tensor = as_subclass(tensor, cls)
        _hold(tensor, local, spec)
    return tensor  # type: ignore[no-any-return]


def _hold(tensor: Value, local: torch.Tensor, spec: DTensorSpec) -> None:
    tensor._local_tensor = local.detach()  # autograd marks the one object, and must not mark the other
    tensor._spec = spec


def lend(tensor: Wrapper, local: torch.Tensor, *, view: bool = False) -> torch.Tensor:
    """`local`, the plain tensor that `tensor` holds, as another object: as `wrap_shared`, the other way round."""
    with DisableTorchDispatch():
        alias = make_subclass(torch.Tensor, tensor)
    set_data(alias, local)
    return alias.view_as(alias) if view else alias


def data_of(tensor: Wrapped) -> Wrapped:
    """torch's `.data`: the same memory, whose writes count apart from those of `tensor`."""
    with DisableTorchFunction():
        data: Wrapped = torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined]
    if (local := stored_local(tensor)).__class__ is torch.Tensor and counted_together(tensor, local):
        data._local_tensor = local.data
    return data


def share_memory(base: Wrapper, view: Wrapper, offset: int) -> SharedMemory:
    """Notes that `view` begins so many bytes behind `base`, in the memory of the global tensor."""
    memory = base._memory
    if memory is None:
        memory = base._memory = (SharedMemory(), 0)
    view._memory = (memory[0], memory[1] + offset) if offset else memory
    if memory[0].of_input:
        view._views_input = True
    return memory[0]


def shares_memory(tensor: Wrapper) -> bool:
    """Whether another window on its memory may be alive: a parameter has outlived the tensor that it was made of, and
    is not asked again."""
    if tensor._memory is not None:
        if tensor._memory[1] or _is_watched(tensor._memory[0]) or _holders(tensor) != _ALONE:
            return True
        tensor._memory = None
    return bool(_lent and _borrowers(stored_local(tensor)))


def _is_watched(memory: SharedMemory) -> bool:
    return memory.of_input or memory.update_lender is not None


def _holders(tensor: Value) -> tuple[int, int]:
    """How many hold what it notes of its memory, with this function, which holds more or less by version of Python."""
    memory = tensor._memory
    return getrefcount(memory), getrefcount(memory[0])


_ALONE = _holders(SimpleNamespace(_memory=(SharedMemory(), 0)))


# Who has to update_lender a write, once autograd has recorded it: what `SharedMemory.update_lender` says, of which tensor.
written_views: PerRank[list[tuple[Callable[[Wrapper], None], Wrapper]]] = PerRank(
    "wrapper.written_views", list
)


def count_write(tensor: Wrapper) -> None:
    """After an op wrote to it.

    Raises:
        ArgumentError: in a graph, of two inputs of one memory.
    """
    if tensor._memory is not None:
        if tensor._memory[0].twice:
            raise ArgumentError(
                f"got an in-place write in a compiled function to {tensor._spec}, which shares memory with another "
                "argument; expected one of them, as a graph that writes to it would not show that in the other: take "
                "the view inside the function, or pass a clone() of it"
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
                written_views.get().append((memory.update_lender, tensor))
    count_for_borrowers(tensor)


def update_lenders(pending: list[tuple[Callable[[Wrapper], None], Wrapper]]) -> None:
    """Above autograd, after the writes of a call."""
    while pending:
        update_lender, written = pending.pop()
        update_lender(written)


# The memory of copied views, while it lives. It is noted on the storage of the local tensor that they were taken of: a
# graph's result does not know the input that it is a view of, nor other windows on the memory.
_lent: set[ReferenceType[SharedMemory]] = set()


def _note_lent(local: torch.Tensor, memory: SharedMemory) -> None:
    # Not by the number of the storage, which another one may have once this is gone, on one rank and not on the others.
    vars(local.untyped_storage()).setdefault("borrowers", WeakSet()).add(memory)
    _lent.add(ref(memory, _lent.discard))


def _borrowers(local: torch.Tensor) -> list[SharedMemory]:
    return list(vars(local.untyped_storage()).get("borrowers", ())) if local.__class__ is torch.Tensor else []


def count_by_storage(base: Wrapper, memory: SharedMemory) -> None:
    """From now on `memory` counts the writes to all that hold what `base` does, though they may not know of it."""
    local = stored_local(base)
    if local.__class__ is torch.Tensor:
        _note_lent(local, memory)


def note_argument(tensor: Wrapper) -> None:
    """Notes on the storage of an argument of a graph how writes to it are counted, for `borrow`."""
    noted = vars(stored_local(tensor).untyped_storage())
    if "counter" not in noted:
        noted["counter"] = counter_of(tensor)
    noted["lender"] = None if tensor._memory is None else tensor._memory[0]


def borrow(view: Wrapper, source: torch.Tensor) -> None:
    """Makes `view`, which a graph returned, notice writes to the argument that holds `source`."""
    noted, memory = vars(source.untyped_storage()), SharedMemory()
    memory.counter, memory.lender = noted.get("counter"), noted.get("lender")
    _note_lent(source, memory)
    view._memory, view._returned_at = (memory, 0), memory.count()


def count_for_borrowers(tensor: Wrapper) -> None:
    """After what `tensor` holds was written to."""
    if _lent:
        for memory in _borrowers(stored_local(tensor)):
            memory.writes += 1


# The local tensor, whatever the tensor's class says of reading it.
stored_local: Callable[[Wrapper], torch.Tensor] = Wrapper.__dict__["_local_tensor"].__get__

# What a tensor remembers of itself, and a copy or a file of it must not: where a copied view has its values from,
# a pending reduction that was materialised, and how it crossed the boundary of a compiled graph.
MEMORIES = ("_crossing", "_materialised", "_memory", "_origin", "_returned_at", "_source")
