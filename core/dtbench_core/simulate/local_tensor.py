"""LocalTensor: the tensors of all ranks of a sharded program inside one process, for inspection and debugging.

    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,))
    with LocalTensorMode(4):
        x = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
        print(x.to_local())             # all ranks' shards, with their ranks
        y = x.sum().full_tensor()       # the all-reduce is computed from the shards
        print(y.reconcile())            # the tensor that all ranks hold, or an error naming the ranks that differ

The program runs once, for all ranks:

- A tensor made inside the mode is a LocalTensor: one tensor per rank. An op runs on each rank's tensor. A collective,
  of this package or of torch.distributed, is computed from the tensors of the ranks in each group. Tensors made
  before are plain, and the same on every rank.
- A value that differs between ranks is one number per rank: `shape` of uneven shards, `dist.get_rank()`,
  `mesh.get_coordinate()`, `item()`. The program can compute with such a number; branching on it is an error
  (local_int.py).
- Code that has to run rank by rank goes into a function: `rank_map(lambda rank: torch.full((2,), rank))`. A function
  that takes one rank's tensors and numbers and returns new ones can be decorated with `@maybe_run_for_local_tensor`.
  Such functions may call collectives.
- `with mode.as_rank(2):` runs code as rank 2 alone: its coordinates, its random numbers, plain tensors.
- Autograd treats LocalTensors like any tensor. Every rank has its own random state; `torch.manual_seed` sets all of
  them.

Where real ranks would hang or diverge, a SimulationError names them.
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

# The number of ranks, or groups of ranks with equal tensors, whose values `repr` and messages show.
_MAX_SHOWN_GROUPS = 8


class LocalTensor(torch.Tensor):
    """A tensor for each simulated rank. Sizes and strides that differ between ranks are rank-dependent ints.

    Args:
        local_tensors: global rank -> its tensor. Shapes may differ; the number of dims, dtype and device must not.
            The tensors must not require grad, since autograd records only the LocalTensor.

    Raises:
        SimulationError: no tensor, or tensors that cannot form a LocalTensor.
    """

    __slots__ = ("_local_tensors",)

    _local_tensors: dict[int, torch.Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[LocalTensor], local_tensors: Mapping[int, torch.Tensor], requires_grad: bool = False
    ) -> LocalTensor:
        shape, stride, dtype, device = _common_metadata(local_tensors)
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
        # torch's setter would copy the metadata but not the shards.
        if not isinstance(value, LocalTensor):
            raise SimulationError(
                f"got .data = a plain {_describe_tensor(value)} on a LocalTensor, expected a LocalTensor: make it "
                "inside the mode"
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local_tensors = value._local_tensors

    def shard(self, rank: int) -> torch.Tensor:
        """Returns the tensor of `rank`, sharing memory.

        Raises:
            SimulationError: `rank` holds no tensor.
        """
        if rank not in self._local_tensors:
            raise SimulationError(
                f"got rank {rank}, expected one that holds the tensor: ranks {describe_ranks(self.ranks)}"
            )
        return self._local_tensors[rank].detach()

    def wait(self) -> LocalTensor:
        """Returns the tensor itself, since a simulated collective is complete when it returns.

        Code for asynchronous collectives calls this on their results.
        """
        return self

    def data_ptr(self) -> int:
        """Always raises, since the LocalTensor has no memory of its own.

        Raises:
            SimulationError: always.
        """
        raise SimulationError(
            f"data_ptr of a LocalTensor of ranks {describe_ranks(self.ranks)}, which has no memory of its own: use "
            "the pointer of a rank's tensor, shard(rank).data_ptr()"
        )

    def reconcile(self) -> torch.Tensor:
        """Returns a copy of the tensor that is the same on every rank. It requires grad if this tensor does.

        Raises:
            RankDependentError: ranks hold different values or shapes; the message lists them.
        """
        ranks_by_value = _group_equal(self._local_tensors)
        if len(ranks_by_value) > 1:
            raise RankDependentError(
                "reconcile got a LocalTensor that differs between ranks "
                f"({_describe_groups(ranks_by_value, self._local_tensors)}), expected the same on all: gather it "
                "first, or look at shard(rank)"
            )
        with torch._C._DisableTorchDispatch():
            tensor = _copy(self._local_tensors[self.ranks[0]])
            return tensor if holds_shards(tensor) else tensor.detach().requires_grad_(self.requires_grad)

    def tolist(self) -> Any:
        """Returns the values as nested lists, if all ranks hold the same."""
        return LocalTensor(self._local_tensors).reconcile().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.reconcile().numpy(force=force)

    def __getitem__(self, index: Any) -> Any:
        # torch accepts symbolic numbers in `select`, but not as an index.
        return self.select(0, index) if values_of(index) is not None else super().__getitem__(index)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalTensor:
        copied: LocalTensor | None = memo.get(id(self))
        if copied is None:
            with torch._C._DisableTorchDispatch():
                copies = {rank: _copy(tensor) for rank, tensor in self._local_tensors.items()}
            copied = memo[id(self)] = LocalTensor(copies, self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return _unpickled, (pickle.dumps(self._local_tensors, protocol), self.requires_grad)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        ranks_by_value = _group_equal(self._local_tensors)
        grad = ", requires_grad=True" if self.requires_grad else ""
        lines = [f"LocalTensor({_describe_tensor(self)} on ranks {describe_ranks(self.ranks)}{grad}"]
        with torch._C._DisableTorchDispatch():
            for ranks in ranks_by_value[:_MAX_SHOWN_GROUPS]:
                text = repr(self._local_tensors[ranks[0]]).replace("\n", "\n    ")
                lines.append(f"  {describe_ranks(ranks)}: {text}")
        if len(ranks_by_value) > _MAX_SHOWN_GROUPS:
            lines.append(f"  ... {len(ranks_by_value) - _MAX_SHOWN_GROUPS} more")
        return "\n".join(lines) + ")"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Runs an op outside every mode. Only ops that need neither process groups nor random states can run there."""
        if any(kind is not LocalTensor and not is_plain(kind) for kind in types):
            return NotImplemented
        if op.namespace != "aten" or is_random(op):
            raise SimulationError(
                f"{op} got a LocalTensor outside a LocalTensorMode, which has the groups and random states of its "
                "ranks: run it inside `with LocalTensorMode(...):`"
            )
        return run_on_each(op, args, kwargs or {})


register_foreach_type(LocalTensor)


def _unpickled(tensors: bytes, requires_grad: bool) -> LocalTensor:
    # The shards are stored as bytes, so that unpickling inside a mode makes plain tensors of them.
    with torch._C._DisableTorchDispatch():
        return LocalTensor(pickle.loads(tensors), requires_grad)


@functools.cache
def is_random(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _common_metadata(
    tensors: Mapping[int, torch.Tensor],
) -> tuple[list[Any], list[Any], torch.dtype, torch.device]:
    """Returns the (shape, stride, dtype, device) of a LocalTensor of `tensors`.

    A size or stride that differs is a number per rank.
    """
    if not tensors:
        raise SimulationError("got no tensor for a LocalTensor, expected one for at least one rank")
    first = next(iter(tensors.values()))
    for rank, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, LocalTensor):
            raise SimulationError(f"got a {type(tensor).__name__} for rank {rank}, expected its plain tensor")
        if (tensor.dim(), tensor.dtype, tensor.device) != (first.dim(), first.dtype, first.device):
            listed = {r: f"{t.dim()}-dim {t.dtype} on {t.device}" for r, t in tensors.items()}
            raise SimulationError(
                f"got tensors of different kinds for the ranks, {describe_values(listed)}; expected the same number "
                "of dims, dtype and device on all"
            )
        if tensor.requires_grad:
            raise SimulationError(
                f"got a tensor that requires grad for rank {rank}, expected a detached tensor: autograd records "
                "only the LocalTensor, so pass tensor.detach() and requires_grad=True"
            )
    if len({(t.shape, t.stride()) for t in tensors.values()}) == 1:
        return list(first.shape), list(first.stride()), first.dtype, first.device
    dims = range(first.dim())
    return (
        [local_number({r: t.shape[d] for r, t in tensors.items()}) for d in dims],
        [local_number({r: t.stride(d) for r, t in tensors.items()}) for d in dims],
        first.dtype,
        first.device,
    )


def _group_equal(tensors: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """Groups the ranks so that those with equal tensors are together; NaN equals NaN."""
    groups: list[list[int]] = []
    with torch._C._DisableTorchDispatch():
        for rank, tensor in tensors.items():
            group = next((ranks for ranks in groups if _is_equal(tensors[ranks[0]], tensor)), None)
            if group is None:
                groups.append([rank])
            else:
                group.append(rank)
    return groups


# These two functions run without torch's dispatch, so they read the shards of a tensor that wraps them directly.


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(tensor) if holds_shards(tensor) else tensor.clone()


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if holds_shards(a) or holds_shards(b):
        return equal_shards(a, b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_meta or torch.equal(a, b):
        return True
    return (a.is_floating_point() or a.is_complex()) and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _describe_tensor(tensor: torch.Tensor) -> str:
    """Formats dtype and shape, e.g. `float32[{0-2: 2, 3: 1}, 3]`, with the values of a small plain tensor."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"
    if isinstance(tensor, LocalTensor) or tensor.is_meta or not 0 < tensor.numel() <= 8:
        return text
    with torch._C._DisableTorchDispatch():
        return f"{text} {tensor.tolist()}"


def _describe_groups(groups: Sequence[Sequence[int]], tensors: Mapping[int, torch.Tensor]) -> str:
    return "; ".join(
        f"ranks {describe_ranks(ranks)}: {_describe_tensor(tensors[ranks[0]])}"
        for ranks in groups[:_MAX_SHOWN_GROUPS]
    )


def refresh_sizes(tensor: LocalTensor) -> None:
    """Updates the sizes that torch reads, after an op changed those of the shards in place."""
    shape, stride, _, _ = _common_metadata(tensor._local_tensors)
    shown = *tensor.shape, *tensor.stride()
    if [values_of(n) or n for n in shown] != [values_of(n) or n for n in (*shape, *stride)]:
        with torch.no_grad():
            tensor.data = LocalTensor(tensor._local_tensors)


# ---- splitting values by rank, and joining them ----


class RankParts:
    """Takes a rank's parts of values, and remembers each part's source so that `joined` can return it.

    Args:
        copies: each rank's copies of plain tensors that an op writes to.
    """

    def __init__(self, copies: PlainCopies | None = None) -> None:
        self._sources: dict[
            int, tuple[Any, Any]
        ] = {}  # id of a part -> (the part, the value it was taken from)
        self._copies = copies

    def part_of(self, value: object, rank: int) -> Any:
        """Returns the part of `value` on `rank`, looking into containers."""
        return tree_map(lambda leaf: self._leaf_part(leaf, rank), value)

    def _leaf_part(self, value: object, rank: int) -> Any:
        if self._copies is not None and (copy := self._copies.copy_for(value, rank)) is not None:
            return self.remember(copy, value)
        if isinstance(value, LocalTensor):
            if rank not in value._local_tensors:
                raise SimulationError(
                    f"got a LocalTensor of ranks {describe_ranks(value.ranks)} where rank {rank} takes part: give "
                    "that rank a tensor too, or let only those ranks take part"
                )
            return self.remember(value._local_tensors[rank], value)
        numbers = values_of(value)
        return self.other_part(value, rank) if numbers is None else numbers[rank]

    def other_part(self, value: object, rank: int) -> Any:
        """Returns the part of a value of a kind that a subclass splits; other values are the same on every rank."""
        return value

    def join_leaf(self, values: Mapping[int, Any], name: str) -> Any:
        """Joins the ranks' values of a kind that a subclass splits; NotImplemented for other kinds."""
        return NotImplemented

    def remember(self, part: Any, source: Any) -> Any:
        self._sources[id(part)] = (part, source)
        return part

    def source_of(self, part: Any) -> Any:
        """Returns the value that `part` was taken from; None if it is not a part."""
        return self._sources.get(id(part), (None, None))[1]


def joined(values: Mapping[int, Any], parts: RankParts, name: str) -> Any:
    """Joins the ranks' results: tensors become a LocalTensor, and a number that differs becomes one number per rank.

    Args:
        parts: has given each rank its part of the arguments.
        name: names the op or function in messages.

    Raises:
        RankDependentError: results that cannot be joined.
    """
    flat = {rank: tree_flatten(value) for rank, value in values.items()}
    first, structure = next(iter(flat.values()))
    if all(tree_spec == structure for _, tree_spec in flat.values()):
        leaves = [
            _joined_leaf({r: leaves[i] for r, (leaves, _) in flat.items()}, parts, name)
            for i in range(len(first))
        ]
        return tree_unflatten(leaves, structure)
    raise _divergence_error(values, name)


def _joined_leaf(values: Mapping[int, Any], parts: RankParts, name: str) -> Any:
    first = next(iter(values.values()))
    source = parts.source_of(first)
    if source is not None and all(parts.source_of(v) is source for v in values.values()):
        return source
    result = parts.join_leaf(values, name)
    if result is not NotImplemented:
        return result
    if all(isinstance(v, torch.Tensor) for v in values.values()):
        return _join_tensors(values, name)
    if {type(v) for v in values.values()} <= {int, float, bool}:
        return local_number(values)
    if any(v is not first and (type(v) is not type(first) or v != first) for v in values.values()):
        raise _divergence_error(values, name)
    return first


def _divergence_error(values: Mapping[int, Any], name: str) -> RankDependentError:
    listed = describe_values({rank: _outline(value) for rank, value in values.items()})
    return RankDependentError(
        f"{name} returned results that cannot be joined, {listed}; expected tensors, numbers, equally long lists of "
        "them, or the same on every rank"
    )


def _join_tensors(values: Mapping[int, torch.Tensor], name: str) -> LocalTensor:
    memory = {v.untyped_storage()._cdata for v in values.values() if is_plain(type(v))}
    try:
        if len(memory) < len(values):  # ranks must not share memory: parts of one plain tensor are copied
            values = {r: v.clone() if is_plain(type(v)) else v for r, v in values.items()}
        return LocalTensor(values)
    except SimulationError as error:
        raise SimulationError(f"{name} returned tensors that cannot form a LocalTensor: {error}") from None


def joined_states(states: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Returns the random states of the ranks; a plain tensor if they are equal."""
    return next(iter(states.values())) if len(_group_equal(states)) == 1 else LocalTensor(states)


def _outline(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    return f"{len(value)} items" if isinstance(value, (list, tuple, dict)) else value


# ---- an op on every rank ----


def ranks_of(*values: object) -> tuple[int, ...] | None:
    """Returns the ranks of the LocalTensors and rank-dependent numbers in `values`; None without any.

    Raises:
        SimulationError: values of different ranks.
    """
    ranks: tuple[int, ...] | None = None
    for value in tree_leaves(values):
        if isinstance(value, LocalTensor):
            value_ranks: tuple[int, ...] | None = value.ranks
        else:
            numbers = values_of(value)
            value_ranks = None if numbers is None else tuple(sorted(numbers))
        if ranks is not None and value_ranks is not None and ranks != value_ranks:
            raise SimulationError(
                f"got tensors or numbers of ranks {describe_ranks(ranks)} together with some of ranks "
                f"{describe_ranks(value_ranks)}, expected the same ranks: pass values of all these "
                "ranks, or take the common ranks with tensor_map"
            )
        ranks = value_ranks or ranks
    return ranks


def run_on_each(
    op: OpOverload,
    args: Args,
    kwargs: Kwargs,
    ranks: Sequence[int] | None = None,
    as_rank: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> Any:
    """Runs `op` on every rank's tensors, below autograd, and joins the results.

    Args:
        ranks: by default those of the arguments.
        as_rank: returns the context for a rank's op, for example with its random state.

    Raises:
        RankDependentError: a dim broadcasts on some ranks only, or the ranks wrote different values to a plain
            tensor.
    """
    ranks = ranks or ranks_of(args, kwargs)
    assert ranks is not None  # an argument is a LocalTensor, or the mode passed its ranks
    copies = PlainCopies(op, args, kwargs)
    parts = RankParts(copies)
    results = {}
    for rank in ranks:
        arguments = parts.part_of((args, kwargs), rank)
        try:
            with as_rank(rank):
                results[rank] = op(*arguments[0], **arguments[1])
        except Exception as error:
            shown = [*map(_outline, arguments[0]), *(f"{k}={_outline(v)}" for k, v in arguments[1].items())]
            error.add_note(f"on simulated rank {rank}: {op} got {', '.join(map(str, shown))}")
            raise
    _refuse_partial_broadcast(op, args, results)
    copies.write_back(str(op))
    for tensor in _tensors_written(op, args, kwargs):
        if isinstance(tensor, LocalTensor):
            refresh_sizes(tensor)
    return joined(results, parts, str(op))


def _refuse_partial_broadcast(op: OpOverload, args: Args, results: Mapping[int, Any]) -> None:
    """Refuses a dim that broadcasts on some ranks only: the gradient would have to be summed on only those ranks."""
    if not (torch.Tag.pointwise in op.tags or op._schema.name == "aten::expand"):
        return
    for arg in args:
        if not isinstance(arg, LocalTensor) or arg.dim() == 0:
            continue
        shapes = {rank: tensor.shape for rank, tensor in arg._local_tensors.items()}
        if len(set(shapes.values())) == 1:
            continue
        for dim in range(1, arg.dim() + 1):
            size_1 = [r for r, shape in shapes.items() if shape[-dim] == 1]
            broadcast = [
                r for r in size_1 if isinstance(results[r], torch.Tensor) and results[r].shape[-dim] != 1
            ]
            if broadcast and len(size_1) < len(shapes):
                raise RankDependentError(
                    f"{op} got {_describe_tensor(arg)}, of which dim {-dim} would broadcast on rank "
                    f"{describe_ranks(broadcast)} but not on the other ranks; expected the same on every rank: expand "
                    "it yourself, per rank"
                )


def _tensors_written(op: OpOverload, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    arguments = bound_arguments(op, args, kwargs)
    # Some batch norms write to the running statistics although their schema does not declare it.
    written = [*(name for _, name in written_arguments(op)), "running_mean", "running_var"]
    return [t for t in tree_leaves([arguments.get(name) for name in written]) if t is not None]


class PlainCopies:
    """Copies of the plain tensors that an op writes to.

    Each rank writes to its own copy, and all must write the same. The schemas of c10d's ops do not declare which
    arguments are written, so all their plain tensors are copied.
    """

    def __init__(self, op: OpOverload, args: Args, kwargs: Kwargs) -> None:
        if op.namespace == "aten":
            written = _tensors_written(op, args, kwargs)
        else:
            written = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._plain = {id(t): t for t in written if is_plain(type(t))}
        self._copies: dict[int, dict[int, torch.Tensor]] = {key: {} for key in self._plain}

    def copy_for(self, value: Any, rank: int) -> torch.Tensor | None:
        """Returns the copy for `rank`; None if `value` is not written to."""
        if (copies := self._copies.get(id(value))) is None:
            return None
        if rank not in copies:
            copies[rank] = value.clone()
        return copies[rank]

    def write_back(self, name: str) -> None:
        """Writes to the plain tensors what all ranks wrote to their copies.

        Raises:
            RankDependentError: the ranks wrote different values.
        """
        for key, copies in self._copies.items():
            plain = self._plain[key]
            ranks_by_value = _group_equal(copies)
            if len(ranks_by_value) > 1:
                raise RankDependentError(
                    f"{name} wrote different values to a plain {_describe_tensor(plain)}, which must be the same on "
                    f"every rank ({_describe_groups(ranks_by_value, copies)}): make it inside the LocalTensorMode, "
                    "where each rank has its own"
                )
            written = next(iter(copies.values()))
            if not _is_equal(plain, written):
                if plain.shape != written.shape:
                    plain.resize_(written.shape)
                plain.copy_(written)


def is_plain(kind: type) -> bool:
    """Whether tensors of this type are torch's own, including parameters."""
    return getattr(kind, "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl
