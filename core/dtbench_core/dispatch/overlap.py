"""Writes that plain tensors refuse because of memory: to a tensor that overlaps itself, or that an input overlaps.

Kernels look at addresses. Those of shards say nothing of the whole: a rank may hold one row of a tensor expanded over
rows, none at all, or a copy where the whole is a window. So the op is tried on plain tensors that share memory as the
global ones do: by their strides, and by where each begins in the memory of the tensor that they are views of.
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

# The answers so far, by specs and places.
Known = dict[tuple[Value, ...], Exception | None]
_REFUSED = "unsupported operation: "  # how all of torch's messages about memory begin
# The most elements that plain tensors are made of to be asked.
_MOST = 1 << 24


def refuse_overlap(
    op: OpOverload, written: Sequence[Wrapper], args: Args, kwargs: Kwargs, answers: Known
) -> None:
    """Before `op` writes to `written`, which are among its arguments. answers: the answers so far, for tensors of these
    specs.

    Raises:
        RuntimeError: what plain tensors raise, where another argument is a window on the same memory.
    """
    tensors = _wrappers((*args, *kwargs.values()))
    written_to = {_identity(one) for one in written}
    if sum(_identity(one) in written_to for one in tensors) == len(written_to):
        return  # each memory that is written to is met once
    if dispatch_modes_active() or simulation.active:
        return
    first = written[0]
    same = all(t is first or (t._spec is first._spec and t._memory == first._memory) for t in tensors)
    if same and is_pointwise(op):
        return  # element by element, over itself
    order: dict[object, int] = {}
    objects: dict[int, int] = {}  # one tensor twice is refused where two of the same window are not
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


def met_twice(args: Args, kwargs: Kwargs) -> bool:
    """Whether two of the arguments may share memory: what `refuse_overlap` is for, asked on every write."""
    tensors = _wrappers((*args, *kwargs.values()) if kwargs else args)
    met = {id(t) if (memory := t._memory) is None else id(memory[0]) for t in tensors}
    return len(met) < len(tensors)


def _wrappers(arguments: Iterable[Value]) -> list[Wrapper]:
    """Those among the arguments and in their lists. A walk of pytree's costs ten times as much."""
    tensors: list[Wrapper] = []
    for one in arguments:
        if isinstance(one, Wrapper):
            tensors.append(one)
        elif one.__class__ is list or one.__class__ is tuple:
            tensors += [member for member in one if isinstance(member, Wrapper)]
    return tensors


def _identity(tensor: Wrapper) -> object:
    """Of its memory."""
    return id(tensor) if tensor._memory is None else tensor._memory[0]


def _offset(tensor: Wrapper) -> int:
    return 0 if tensor._memory is None else tensor._memory[1]


def refuse_overlapping_itself(op: OpOverload, written: Sequence[Wrapper], args: Args, kwargs: Kwargs) -> None:
    """Before `op` is planned that writes to these tensors.

    Raises:
        RuntimeError: what plain tensors raise, where one has several elements in one place, as an expanded one has.
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
    """What plain tensors of zeros raise, of the global shapes and strides; `otherwise` if they would be large.

    memory_of: which tensors share memory, and where in it they begin.
    """
    leaves, rebuilt = flattened(args, kwargs)
    places: dict[int, tuple[object, int]] = {}  # which memory, and the first element in it
    ends: dict[object, int] = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, (torch.Tensor, DTensorSpec)):
            continue
        spec, memory = _spec_of(leaf), memory_of(leaf)
        whose, offset = (id(leaf), 0) if memory is None else (memory[0], memory[1] // spec.dtype.itemsize)
        places[index] = (whose, spec.dtype), offset
        last = offset + sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True)) + 1
        ends[places[index][0]] = max(ends.get(places[index][0], 0), last, 0)
    if sum(ends.values()) > _MOST:
        return otherwise
    held = {key: torch.zeros(end, dtype=key[1], device="cpu") for key, end in ends.items()}  # type: ignore[index]
    views: dict[int, torch.Tensor] = {}  # one argument given twice is one tensor
    for index, (key, offset) in places.items():
        leaf = leaves[index]
        which = id(leaf) if isinstance(leaf, torch.Tensor) else index
        if which not in views:
            spec = _spec_of(leaf)
            views[which] = held[key].as_strided(spec.shape, spec.stride, offset)
        leaves[index] = views[which]
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
    """What says the global shape, stride and dtype of an argument."""
    if isinstance(leaf, Wrapper):
        return leaf._spec
    return leaf if isinstance(leaf, DTensorSpec) else TensorMeta(leaf.shape, leaf.stride(), leaf.dtype)
