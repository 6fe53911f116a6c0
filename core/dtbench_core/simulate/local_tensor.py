"""LocalTensor: every rank's tensor of a sharded program, inside one process, to look at it and debug it.

    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,))
    with LocalTensorMode(4):
        x = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
        print(x.to_local())             # all ranks' shards, with their ranks
        y = x.sum().full_tensor()       # the all-reduce is maths over the shards
        print(y.reconcile())            # the one tensor all ranks hold, or an error naming who differs

The program is run once, for all ranks:

- A tensor made inside the mode is a LocalTensor: a tensor per rank. An op runs on each rank's; a
  collective, of this package or of torch.distributed, is done as maths over the ranks of each group.
  Tensors made before are plain, and the same on every rank.
- What differs between ranks is a number per rank: `shape` of uneven shards, `dist.get_rank()`,
  `mesh.get_coordinate()`, `item()`. One can compute with it; to branch on it is an error (local_int.py).
- What has to run rank by rank goes into a function: `rank_map(lambda rank: torch.full((2,), rank))`,
  or `@maybe_run_for_local_tensor` on one that takes a rank's tensors and numbers and gives new ones.
  Collectives are allowed there.
- `with mode.as_rank(2):` is rank 2 alone: its coordinates, its random numbers, plain tensors.
- Autograd sees LocalTensors like tensors. Every rank has its own random state; `torch.manual_seed`
  sets all.

Ranks that would hang or diverge in a real world raise a SimulationError that names them.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dtbench_core.dispatch.metadata import written_arguments
from dtbench_core.errors import RankDependentError, SimulationError, describe_ranks
from dtbench_core.layout.local_shards import equal_shards, holds_shards
from dtbench_core.op_types import Args, Kwargs
from dtbench_core.rules.base import bound_arguments
from dtbench_core.simulate.local_int import describe_values, local_number, values_of
from dtbench_core.torch_compat import make_wrapper, register_foreach_type

# Of how many ranks (or groups of ranks that hold the same) `repr` shows the values.
SHOWN = 8


class LocalTensor(torch.Tensor):
    """A tensor per simulated rank. Sizes and strides that differ between ranks are rank-dependent ints.

    Args:
        local_tensors: global rank -> its tensor. Shapes may differ, the number of dims, dtype and
            device may not. They must not require grad: autograd sees the LocalTensor alone.

    Raises:
        SimulationError: no tensor, or tensors that cannot be one.
    """

    __slots__ = ("_local_tensors",)

    _local_tensors: dict[int, torch.Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[LocalTensor], local_tensors: Mapping[int, torch.Tensor], requires_grad: bool = False
    ) -> LocalTensor:
        shape, stride, dtype, device = _metadata(local_tensors)
        tensor: Any = make_wrapper(
            cls, shape, stride, dtype=dtype, device=device, requires_grad=requires_grad
        )
        tensor._local_tensors = {rank: local_tensors[rank] for rank in sorted(local_tensors)}
        return tensor  # type: ignore[no-any-return]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a tensor."""
        return tuple(self._local_tensors)

    @property
    def data(self) -> torch.Tensor:
        """The same values outside autograd, sharing memory. May be assigned another LocalTensor."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # torch's setter would take over the metadata and leave the shards behind.
        if not isinstance(value, LocalTensor):
            raise SimulationError(
                f"got .data = a plain {_brief(value)} on a LocalTensor, expected one too: make it inside the mode"
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local_tensors = value._local_tensors

    def shard(self, rank: int) -> torch.Tensor:
        """What `rank` holds, sharing memory.

        Raises:
            SimulationError: `rank` holds nothing of it.
        """
        if rank not in self._local_tensors:
            raise SimulationError(
                f"got rank {rank}, expected one that holds the tensor: ranks {describe_ranks(self.ranks)}"
            )
        return self._local_tensors[rank].detach()

    def wait(self) -> LocalTensor:
        """Itself: a simulated collective is complete when it returns, which those who hold its result may not know."""
        return self

    def data_ptr(self) -> int:
        """
        Raises:
            SimulationError: always.
        """
        raise SimulationError(
            f"data_ptr of a LocalTensor of ranks {describe_ranks(self.ranks)}, which has no memory of its own: take "
            "that of a rank's tensor, shard(rank).data_ptr()"
        )

    def reconcile(self) -> torch.Tensor:
        """The one plain tensor that every rank holds: a copy, which requires grad if this does.

        Raises:
            RankDependentError: ranks hold different values or shapes; the message says which.
        """
        held = _groups(self._local_tensors)
        if len(held) > 1:
            raise RankDependentError(
                f"reconcile got a LocalTensor that differs between ranks ({_listed(held, self._local_tensors)}), "
                "expected the same on all: gather it first, or look at shard(rank)"
            )
        with torch._C._DisableTorchDispatch():
            one = _copied(self._local_tensors[self.ranks[0]])
            return one if holds_shards(one) else one.detach().requires_grad_(self.requires_grad)

    def tolist(self) -> Any:
        """As nested lists, if all ranks hold the same."""
        return LocalTensor(self._local_tensors).reconcile().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.reconcile().numpy(force=force)

    def __getitem__(self, index: Any) -> Any:
        # torch selects with symbolic numbers, but its indexing refuses them.
        return self.select(0, index) if values_of(index) is not None else super().__getitem__(index)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalTensor:
        copied: LocalTensor | None = memo.get(id(self))
        if copied is None:
            with torch._C._DisableTorchDispatch():
                copies = {rank: _copied(tensor) for rank, tensor in self._local_tensors.items()}
            copied = memo[id(self)] = LocalTensor(copies, self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return _unpickled, (pickle.dumps(self._local_tensors, protocol), self.requires_grad)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        held = _groups(self._local_tensors)
        grad = ", requires_grad=True" if self.requires_grad else ""
        lines = [f"LocalTensor({_brief(self)} on ranks {describe_ranks(self.ranks)}{grad}"]
        with torch._C._DisableTorchDispatch():
            for ranks in held[:SHOWN]:
                text = repr(self._local_tensors[ranks[0]]).replace("\n", "\n    ")
                lines.append(f"  {describe_ranks(ranks)}: {text}")
        if len(held) > SHOWN:
            lines.append(f"  ... {len(held) - SHOWN} more")
        return "\n".join(lines) + ")"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """An op outside every mode, which is all a mode needs not see."""
        if any(kind is not LocalTensor and not is_plain(kind) for kind in types):
            return NotImplemented
        if op.namespace != "aten" or is_random(op):
            raise SimulationError(
                f"{op} got a LocalTensor outside a LocalTensorMode, which knows the groups and random states of its "
                "ranks: run it inside `with LocalTensorMode(...):`"
            )
        return run_on_each(op, args, kwargs or {})


register_foreach_type(LocalTensor)


def _unpickled(tensors: bytes, requires_grad: bool) -> LocalTensor:
    # As bytes, so that the shards are plain tensors again inside a mode too.
    with torch._C._DisableTorchDispatch():
        return LocalTensor(pickle.loads(tensors), requires_grad)


@functools.cache
def is_random(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _metadata(tensors: Mapping[int, torch.Tensor]) -> tuple[list[Any], list[Any], torch.dtype, torch.device]:
    """(shape, stride, dtype, device) common to `tensors`, with numbers per rank where they differ."""
    if not tensors:
        raise SimulationError("got no tensor for a LocalTensor, expected one for at least one rank")
    first = next(iter(tensors.values()))
    for rank, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, LocalTensor):
            raise SimulationError(f"got a {type(tensor).__name__} for rank {rank}, expected its plain tensor")
        if (tensor.dim(), tensor.dtype, tensor.device) != (first.dim(), first.dtype, first.device):
            listed = {r: f"{t.dim()}-dim {t.dtype} on {t.device}" for r, t in tensors.items()}
            raise SimulationError(
                f"got tensors of different kinds for the ranks, {describe_values(listed)}; expected one number of "
                "dims, one dtype and one device"
            )
        if tensor.requires_grad:
            raise SimulationError(
                f"got a tensor that requires grad for rank {rank}, expected detached ones: autograd sees the "
                "LocalTensor alone, so pass tensor.detach() and requires_grad=True"
            )
    if len({(t.shape, t.stride()) for t in tensors.values()}) == 1:
        return list(first.shape), list(first.stride()), first.dtype, first.device
    dims = range(first.dim())
    shape = [local_number({r: t.shape[d] for r, t in tensors.items()}) for d in dims]
    stride = [local_number({r: t.stride(d) for r, t in tensors.items()}) for d in dims]
    return shape, stride, first.dtype, first.device


def _groups(tensors: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """The ranks by what they hold: each list holds the same, NaN for NaN."""
    groups: list[list[int]] = []
    with torch._C._DisableTorchDispatch():
        for rank, tensor in tensors.items():
            group = next((ranks for ranks in groups if _same(tensors[ranks[0]], tensor)), None)
            if group is None:
                groups.append([rank])
            else:
                group.append(rank)
    return groups


# Both run without torch's dispatch, where shards must be gone to directly.


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(tensor) if holds_shards(tensor) else tensor.clone()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if holds_shards(a) or holds_shards(b):
        return equal_shards(a, b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_meta or torch.equal(a, b):
        return True
    return (a.is_floating_point() or a.is_complex()) and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _brief(tensor: torch.Tensor) -> str:
    """`float32[{0-2: 2, 3: 1}, 3]`, and the values of a small plain tensor."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"
    if isinstance(tensor, LocalTensor) or tensor.is_meta or not 0 < tensor.numel() <= 8:
        return text
    with torch._C._DisableTorchDispatch():
        return f"{text} {tensor.tolist()}"


def _listed(groups: Sequence[Sequence[int]], tensors: Mapping[int, torch.Tensor]) -> str:
    return "; ".join(f"ranks {describe_ranks(of)}: {_brief(tensors[of[0]])}" for of in groups[:SHOWN])


def refresh(tensor: LocalTensor) -> None:
    """Makes the sizes that torch sees those of the shards, after an op that changed them in place."""
    shape, stride, _, _ = _metadata(tensor._local_tensors)
    shown = *tensor.shape, *tensor.stride()
    if [values_of(n) or n for n in shown] != [values_of(n) or n for n in (*shape, *stride)]:
        with torch.no_grad():
            tensor.data = LocalTensor(tensor._local_tensors)


# ---- one value for all ranks, and back ----


class RankParts:
    """Takes a rank's parts out of values, and puts what the ranks give together again.

    copies: of plain tensors that ranks write to.
    """

    def __init__(self, copies: PlainCopies | None = None) -> None:
        self._wholes: dict[int, tuple[Any, Any]] = {}  # id of a part -> (the part, what it was taken from)
        self._copies = copies

    def of(self, value: object, rank: int) -> Any:
        """`value` as `rank` has it; containers are looked into."""
        return tree_map(lambda leaf: self._part(leaf, rank), value)

    def _part(self, value: object, rank: int) -> Any:
        if self._copies is not None and (copy := self._copies.of(value, rank)) is not None:
            return self.remember(copy, value)
        if isinstance(value, LocalTensor):
            if rank not in value._local_tensors:
                raise SimulationError(
                    f"got a LocalTensor of ranks {describe_ranks(value.ranks)} where rank {rank} takes part: give it "
                    "a tensor too, or let only those ranks take part"
                )
            return self.remember(value._local_tensors[rank], value)
        numbers = values_of(value)
        return self.other(value, rank) if numbers is None else numbers[rank]

    def other(self, value: object, rank: int) -> Any:
        """For kinds of values that a subclass knows."""
        return value

    def join(self, values: Mapping[int, Any], what: str) -> Any:
        """The whole of such values, or NotImplemented."""
        return NotImplemented

    def remember(self, part: Any, whole: Any) -> Any:
        self._wholes[id(part)] = (part, whole)
        return part

    def whole_of(self, part: Any) -> Any:
        """What `part` was taken from, None if it was not."""
        return self._wholes.get(id(part), (None, None))[1]


def joined(values: Mapping[int, Any], parts: RankParts, what: str) -> Any:
    """One value for what the ranks gave: tensors become a LocalTensor, numbers that differ one per rank."""
    flat = {rank: tree_flatten(value) for rank, value in values.items()}
    first, form = next(iter(flat.values()))
    if all(spec == form for _, spec in flat.values()):
        leaves = [
            _joined_leaf({r: leaves[i] for r, (leaves, _) in flat.items()}, parts, what)
            for i in range(len(first))
        ]
        return tree_unflatten(leaves, form)
    raise _different(values, what)


def _joined_leaf(values: Mapping[int, Any], parts: RankParts, what: str) -> Any:
    first = next(iter(values.values()))
    whole = parts.whole_of(first)
    if whole is not None and all(parts.whole_of(v) is whole for v in values.values()):
        return whole
    special = parts.join(values, what)
    if special is not NotImplemented:
        return special
    if all(isinstance(v, torch.Tensor) for v in values.values()):
        return _join_tensors(values, what)
    if {type(v) for v in values.values()} <= {int, float, bool}:
        return local_number(values)
    if any(v is not first and (type(v) is not type(first) or v != first) for v in values.values()):
        raise _different(values, what)
    return first


def _different(values: Mapping[int, Any], what: str) -> RankDependentError:
    listed = describe_values({rank: _outline(value) for rank, value in values.items()})
    return RankDependentError(
        f"{what} gave the ranks different things, {listed}; expected tensors, numbers, equally long lists of them, or "
        "the same on every rank"
    )


def _join_tensors(values: Mapping[int, torch.Tensor], what: str) -> LocalTensor:
    memory = {v.untyped_storage()._cdata for v in values.values() if is_plain(type(v))}
    try:
        if len(memory) < len(values):  # ranks share no memory: parts of one plain tensor become their own
            values = {r: v.clone() if is_plain(type(v)) else v for r, v in values.items()}
        return LocalTensor(values)
    except SimulationError as error:
        raise SimulationError(f"{what} gave what cannot be one LocalTensor: {error}") from None


def joined_states(states: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The random states of the ranks: a plain tensor if they are equal."""
    return next(iter(states.values())) if len(_groups(states)) == 1 else LocalTensor(states)


def _outline(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return _brief(value)
    return f"{len(value)} items" if isinstance(value, (list, tuple, dict)) else value


# ---- an op on every rank ----


def ranks_of(*values: object) -> tuple[int, ...] | None:
    """The ranks of the LocalTensors and rank-dependent numbers in `values`; None if there are none."""
    ranks: tuple[int, ...] | None = None
    for value in tree_leaves(values):
        if isinstance(value, LocalTensor):
            others: tuple[int, ...] | None = value.ranks
        else:
            numbers = values_of(value)
            others = None if numbers is None else tuple(sorted(numbers))
        if ranks is not None and others is not None and ranks != others:
            raise SimulationError(
                f"got tensors or numbers of ranks {describe_ranks(ranks)} together with some of ranks "
                f"{describe_ranks(others)}, expected the same ranks: what should the others do?"
            )
        ranks = others or ranks
    return ranks


def run_on_each(
    op: OpOverload,
    args: Args,
    kwargs: Kwargs,
    ranks: Sequence[int] | None = None,
    as_rank: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> Any:
    """`op` on every rank's tensors, below autograd: the results as one.

    Args:
        ranks: by default those of the arguments.
        as_rank: in which a rank runs, such as with its random state.
    """
    ranks = ranks or ranks_of(args, kwargs)
    assert ranks is not None  # an argument is a LocalTensor, or the mode gave its ranks
    copies = PlainCopies(op, args, kwargs)
    parts = RankParts(copies)
    results = {}
    for rank in ranks:
        arguments = parts.of((args, kwargs), rank)
        try:
            with as_rank(rank):
                results[rank] = op(*arguments[0], **arguments[1])
        except Exception as error:
            got = [*map(_outline, arguments[0]), *(f"{k}={_outline(v)}" for k, v in arguments[1].items())]
            error.add_note(f"on simulated rank {rank}: {op} got {', '.join(map(str, got))}")
            raise
    _refuse_partial_broadcast(op, args, results)
    copies.write_back(str(op))
    for tensor in _tensors_written(op, args, kwargs):
        if isinstance(tensor, LocalTensor):
            refresh(tensor)
    return joined(results, parts, str(op))


def _refuse_partial_broadcast(op: OpOverload, args: Args, results: Mapping[int, Any]) -> None:
    """A dim that broadcasts on some ranks only: the gradient would have to be summed on those alone."""
    if not (torch.Tag.pointwise in op.tags or op._schema.name == "aten::expand"):
        return
    for arg in args:
        if not isinstance(arg, LocalTensor) or arg.dim() == 0:
            continue
        shapes = {rank: tensor.shape for rank, tensor in arg._local_tensors.items()}
        if len(set(shapes.values())) == 1:
            continue
        for dim in range(1, arg.dim() + 1):
            ones = [r for r, shape in shapes.items() if shape[-dim] == 1]
            spread = [r for r in ones if isinstance(results[r], torch.Tensor) and results[r].shape[-dim] != 1]
            if spread and len(ones) < len(shapes):
                raise RankDependentError(
                    f"{op} got {_brief(arg)}, of which dim {-dim} would broadcast on rank {describe_ranks(spread)} but "
                    "not on the others; expected the same on every rank: expand it yourself, per rank"
                )


def _tensors_written(op: OpOverload, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    named = bound_arguments(op, args, kwargs)
    # Some batch norms write to these without saying so.
    written = [*(name for _, name in written_arguments(op)), "running_mean", "running_var"]
    return [t for t in tree_leaves([named.get(name) for name in written]) if t is not None]


class PlainCopies:
    """Plain tensors that an op writes to: each rank writes to a copy, and all must write the same.

    Ops of c10d do not say what they write to, so that every plain tensor they get counts.
    """

    def __init__(self, op: OpOverload, args: Args, kwargs: Kwargs) -> None:
        if op.namespace == "aten":
            written = _tensors_written(op, args, kwargs)
        else:
            written = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._plain = {id(t): t for t in written if is_plain(type(t))}
        self._copies: dict[int, dict[int, torch.Tensor]] = {key: {} for key in self._plain}

    def of(self, value: Any, rank: int) -> torch.Tensor | None:
        """The copy for `rank`, if `value` is such a tensor."""
        copies = self._copies.get(id(value))
        if copies is None:
            return None
        if rank not in copies:
            copies[rank] = value.clone()
        return copies[rank]

    def write_back(self, what: str) -> None:
        """Leaves in the plain tensors what all ranks wrote."""
        for key, copies in self._copies.items():
            plain = self._plain[key]
            held = _groups(copies)
            if len(held) > 1:
                raise RankDependentError(
                    f"{what} wrote to a plain {_brief(plain)}, which is the same on every rank, what differs between "
                    f"ranks ({_listed(held, copies)}): make it inside the LocalTensorMode, where each rank has its own"
                )
            written = next(iter(copies.values()))
            if not _same(plain, written):
                if plain.shape != written.shape:
                    plain.resize_(written.shape)
                plain.copy_(written)


def is_plain(kind: type) -> bool:
    """Whether tensors of this type are torch's own, parameters included."""
    return getattr(kind, "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl
