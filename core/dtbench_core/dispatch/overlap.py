"""Raises for writes for which plain tensors raise: to a tensor whose elements overlap, or that overlaps an input.

Kernels compare addresses. The addresses of shards do not show whether the global tensors overlap: a rank may have one
row of a tensor expanded over rows, no row, or a copy instead of a view. So the op is tried on plain tensors with the
global strides and offsets. They share memory as the global tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch._ops import OpOverload

from dtbench_core.dispatch.metadata import flattened
from dtbench_core.layout.spec import DTensorSpec, TensorMeta
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Args, Kwargs, Value
from dtbench_core.rules.pointwise import is_pointwise
from dtbench_core.runtime import simulation
from dtbench_core.torch_compat import dispatch_modes_active

# Results of earlier checks, by specs and offsets: the error that plain tensors raised, if any.
KnownRefusals = dict[tuple[Value, ...], Exception | None]
_REFUSED = "unsupported operation: "  # torch's messages about overlap begin with it
# The op is tried on plain tensors of at most so many elements.
_MAX_ELEMENTS = 1 << 24


def refuse_overlap(
    op: OpOverload, written: Sequence[Wrapper], args: Args, kwargs: Kwargs, answers: KnownRefusals
) -> None:
    """Raises before `op` writes to `written` if plain tensors would raise because another argument shares its memory.

    Args:
        written: those arguments that the op writes to.
        answers: results of earlier checks, updated.

    Raises:
        RuntimeError: the error that plain tensors raise.
    """
    tensors = _wrappers((*args, *kwargs.values()))
    written_to = {_identity(tensor) for tensor in written}
    if sum(_identity(tensor) in written_to for tensor in tensors) == len(written_to):
        return  # no other argument shares the written memory
    if dispatch_modes_active() or simulation.active:
        return
    first = written[0]
    all_same_window = all(
        t is first or (t._spec is first._spec and t._memory == first._memory) for t in tensors
    )
    if all_same_window and is_pointwise(op):
        return  # every element is read before it is written
    order: dict[object, int] = {}
    objects: dict[
        int, int
    ] = {}  # torch refuses a tensor that is given twice, but not two views of the same elements
    start: dict[object, int] = {}
    key = tuple(
        (
            t._spec,
            order.setdefault(_identity(t), len(order)),
            objects.setdefault(id(t), len(objects)),
            _offset(t) - start.setdefault(_identity(t), _offset(t)),
        )
        for t in tensors
    )
    if key not in answers:
        answers[key] = _refusal(op, args, kwargs)
    if (refusal := answers[key]) is not None:
        raise type(refusal)(*refusal.args)


def may_share_memory(args: Args, kwargs: Kwargs) -> bool:
    """Whether two of the arguments may share memory. Cheap, as every write is checked."""
    tensors = _wrappers((*args, *kwargs.values()) if kwargs else args)
    return len({id(t) if (memory := t._memory) is None else id(memory[0]) for t in tensors}) < len(tensors)


def _wrappers(arguments: Iterable[Value]) -> list[Wrapper]:
    """Returns the DTensors among the arguments and in their lists. pytree takes ten times as long."""
    tensors: list[Wrapper] = []
    for argument in arguments:
        if isinstance(argument, Wrapper):
            tensors.append(argument)
        elif argument.__class__ is list or argument.__class__ is tuple:
            tensors += [member for member in argument if isinstance(member, Wrapper)]
    return tensors


def _identity(tensor: Wrapper) -> object:
    """Returns an object that identifies the tensor's memory."""
    return id(tensor) if tensor._memory is None else tensor._memory[0]


def _offset(tensor: Wrapper) -> int:
    return 0 if tensor._memory is None else tensor._memory[1]


def refuse_overlapping_itself(op: OpOverload, written: Sequence[Wrapper], args: Args, kwargs: Kwargs) -> None:
    """Raises before `op` is planned if it writes to a tensor whose elements overlap, such as an expanded one.

    Raises:
        RuntimeError: the error that plain tensors raise.
    """
    if dispatch_modes_active() or simulation.active or not any(t._spec.overlaps_itself for t in written):
        return
    if (refusal := _refusal(op, args, kwargs)) is not None:
        raise refusal


def _refusal(op: OpOverload, args: Args, kwargs: Kwargs) -> Exception | None:
    error = error_of_plain(op, args, kwargs, _memory_of)
    return error if str(error).startswith(_REFUSED) else None


def error_of_plain(
    op: OpOverload,
    args: Args,
    kwargs: Kwargs,
    memory_of: Callable[[Value], tuple[object, int] | None] = lambda _: None,
    otherwise: Exception | None = None,
) -> Exception | None:
    """Returns the error that the op raises on plain tensors of zeros with the global shapes and strides, or None.

    Args:
        memory_of: returns (memory, offset in it, in bytes) of an argument that may share memory with others.
        otherwise: returned if the plain tensors would be too large to try.
    """
    leaves, rebuilt = flattened(args, kwargs)
    places: dict[int, tuple[object, int]] = {}  # (memory, offset in elements) by index of the leaf
    ends: dict[object, int] = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, (torch.Tensor, DTensorSpec)):
            continue
        spec, memory = _spec_of(leaf), memory_of(leaf)
        memory_id, offset = (id(leaf), 0) if memory is None else (memory[0], memory[1] // spec.dtype.itemsize)
        places[index] = (memory_id, spec.dtype), offset
        last = offset + sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True)) + 1
        ends[places[index][0]] = max(ends.get(places[index][0], 0), last, 0)
    if sum(ends.values()) > _MAX_ELEMENTS:
        return otherwise
    memories = {key: torch.zeros(end, dtype=key[1], device="cpu") for key, end in ends.items()}  # type: ignore[index]
    views: dict[int, torch.Tensor] = {}  # an argument that is given twice is one tensor
    for index, (key, offset) in places.items():
        leaf = leaves[index]
        identity = id(leaf) if isinstance(leaf, torch.Tensor) else index
        if identity not in views:
            spec = _spec_of(leaf)
            views[identity] = memories[key].as_strided(spec.shape, spec.stride, offset)
        leaves[index] = views[identity]
    on_cpu = [torch.device("cpu") if isinstance(leaf, torch.device) else leaf for leaf in leaves]
    plain_args, plain_kwargs = rebuilt(on_cpu)
    try:
        op(*plain_args, **plain_kwargs)
    except Exception as error:
        return error
    return None


def _memory_of(leaf: Value) -> tuple[object, int] | None:
    return leaf._memory if isinstance(leaf, Wrapper) else None


def _spec_of(leaf: Value) -> Value:
    """Returns the global shape, stride and dtype of an argument."""
    if isinstance(leaf, Wrapper):
        return leaf._spec
    return leaf if isinstance(leaf, DTensorSpec) else TensorMeta(leaf.shape, leaf.stride(), leaf.dtype)
