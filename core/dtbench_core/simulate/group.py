"""The process group of simulated ranks: collectives as plain maths over the ranks' tensors.

A call records its tensors in an `Arrival`, and whoever simulates (threads.py, local_mode.py) brings those of
all ranks of the group together: the n-th call of a rank belongs to the n-th call of the others, as on a real
transport. What that answers with a hang or with garbage (another op, root, shape or dtype) is an error here.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, Work
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from dtbench_core.errors import SimulationError
from dtbench_core.op_types import Args, Kwargs
from dtbench_core.rules.base import bound_arguments
from dtbench_core.simulate import c10d_state
from dtbench_core.torch_compat import mesh_dim_groups, mesh_group_names, resolve_group

Tensors = Sequence[torch.Tensor]
# What the ranks of a group must agree on: (name, what else, the metadata of the tensors).
Signature = tuple[str, str, tuple[tuple[torch.Size, torch.dtype], ...]]

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}
_REDUCTIONS = {getattr(dist.ReduceOp, name.upper()): name for name in _COMBINE}


# ---- a call, and how messages name it ----


class Arrival(NamedTuple):
    """A rank's call of a collective, recorded.

    ranks: of the group, by group rank. finish: the maths, given the calls of all ranks and the signature.
    results: what the future of its Work gives.
    """

    ranks: tuple[int, ...]
    group_name: str
    group_rank: int
    signature: Signature
    finish: Callable[[list[Any], Signature], None]
    call: Any
    results: Any


def combine(arrival: Arrival, calls: list[Any]) -> None:
    """Does the collective of which `arrival` is one call."""
    try:
        # Inference mode: results go into what tensors hold, past autograd, as a transport's do.
        with torch.inference_mode():
            arrival.finish(calls, arrival.signature)
    except (RuntimeError, ValueError, TypeError) as error:
        raise SimulationError(
            f"{describe(arrival.signature)} of {name_ranks(arrival.ranks)} failed: {error}"
        ) from error


def mismatch(arrival: Arrival, others: Sequence[int], theirs: Signature) -> str:
    """The message for a rank that calls something else than the ranks `others` of its group."""
    return (
        f"mismatched collectives: {name_ranks([arrival.ranks[arrival.group_rank]])} called "
        f"{describe(arrival.signature)} where {name_ranks(others)} called {describe(theirs)}, in the group of "
        f"{name_ranks(arrival.ranks)}; every rank of a group must issue the same collectives in the same order"
    )


def describe(signature: Signature) -> str:
    """`all_reduce(sum, float32[4, 4])`."""
    name, detail, metas = signature
    parts = [detail] if detail else []
    parts += [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in metas[:4]]
    if len(metas) > 4:
        parts.append(f"and {len(metas) - 4} more")
    return f"{name}({', '.join(parts)})"


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1, 3` or `ranks 0 to 7`."""
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def group_actions(actions: Mapping[int, str]) -> list[str]:
    """rank -> what it did, as `["rank 0 returned", "ranks 1, 2 raised ..."]`."""
    ranks_of: dict[str, list[int]] = {}
    for rank, action in actions.items():
        ranks_of.setdefault(action, []).append(rank)
    return [f"{name_ranks(ranks)} {action}" for action, ranks in ranks_of.items()]


# ---- the maths ----

# Each takes the ranks' recorded calls, by group rank, and the signature they agree on.


def _reduced(op: str, tensors: Tensors) -> torch.Tensor:
    if op not in _COMBINE:
        raise ValueError(f"got the reduction {op!r}, simulated ranks know {', '.join(_COMBINE)}")
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        _COMBINE[op](total, tensor)
    if op == "avg":
        total.div_(len(tensors), rounding_mode=None if total.dtype.is_floating_point else "trunc")
    return total


def _finish_all_reduce(calls: list[Tensors], signature: Signature) -> None:
    for same in zip(*calls, strict=True):
        total = _reduced(signature[1], same)
        for tensor in same:
            tensor.copy_(total)


def _finish_reduce(calls: list[tuple[torch.Tensor, int]], signature: Signature) -> None:
    root = calls[0][1]
    calls[root][0].copy_(_reduced(signature[1].split()[0], [tensor for tensor, _ in calls]))


def _finish_broadcast(calls: list[tuple[Tensors, int]], _: Signature) -> None:
    root = calls[0][1]
    for rank, (tensors, _root) in enumerate(calls):
        if rank != root:
            for mine, sent in zip(tensors, calls[root][0], strict=True):
                mine.copy_(sent)


def _finish_all_gather(calls: list[tuple[list[Tensors], Tensors]], _: Signature) -> None:
    for outputs, _inputs in calls:
        for index, parts in enumerate(outputs):
            for part, (_outputs, inputs) in zip(parts, calls, strict=True):
                part.copy_(inputs[index])


def _finish_all_gather_single(calls: list[tuple[Tensors, Tensors]], _: Signature) -> None:
    for index in range(len(calls[0][0])):
        full = torch.cat([inputs[index].reshape(-1) for _, inputs in calls])
        for outputs, _inputs in calls:
            outputs[index].view(-1).copy_(full)


def _finish_gather(calls: list[tuple[Tensors, torch.Tensor, int]], _: Signature) -> None:
    root = calls[0][2]
    for part, (_outputs, sent, _root) in zip(calls[root][0], calls, strict=True):
        part.copy_(sent)


def _finish_scatter(calls: list[tuple[torch.Tensor, Tensors, int]], _: Signature) -> None:
    root = calls[0][2]
    for part, (received, _inputs, _root) in zip(calls[root][1], calls, strict=True):
        received.copy_(part)


def _finish_reduce_scatter(calls: list[tuple[Tensors, list[Tensors]]], signature: Signature) -> None:
    for rank, (outputs, _) in enumerate(calls):
        for index, output in enumerate(outputs):
            output.copy_(_reduced(signature[1], [inputs[index][rank] for _, inputs in calls]))


def _finish_reduce_scatter_single(calls: list[tuple[Tensors, Tensors]], signature: Signature) -> None:
    n = len(calls)
    for index in range(len(calls[0][0])):
        total = _reduced(signature[1], [inputs[index] for _, inputs in calls]).view(n, -1)
        for rank, (outputs, _) in enumerate(calls):
            outputs[index].view(-1).copy_(total[rank])


def _finish_all_to_all(calls: list[tuple[Tensors, Tensors]], _: Signature) -> None:
    for receiver, (outputs, _inputs) in enumerate(calls):
        for sender, output in enumerate(outputs):
            sent = calls[sender][1][receiver]
            if sent.shape != output.shape:
                raise ValueError(
                    f"group rank {sender} sends {list(sent.shape)} to group rank {receiver}, "
                    f"which expects {list(output.shape)}"
                )
            output.copy_(sent)


def _finish_all_to_all_single(
    calls: list[tuple[torch.Tensor, torch.Tensor, list[int], list[int]]], signature: Signature
) -> None:
    n = len(calls)
    _finish_all_to_all(
        [
            (_cut(output, output_splits, n), _cut(sent, input_splits, n))
            for output, sent, output_splits, input_splits in calls
        ],
        signature,
    )


def _cut(tensor: torch.Tensor, splits: list[int], n: int) -> Tensors:
    if splits:
        return tuple(tensor.split(splits))
    if tensor.shape[0] % n:
        raise ValueError(f"got {tensor.shape[0]} rows without splits, expected a multiple of {n} ranks")
    return tuple(tensor.split(tensor.shape[0] // n)) if tensor.shape[0] else (tensor,) * n


# ---- what c10d sees ----


def _meta(tensors: Tensors) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple([(t.shape, t.dtype) for t in tensors])


def _reduction(options: Any) -> str:
    """ "sum", "avg", ... of c10d's options."""
    op = options.reduceOp.op
    return _REDUCTIONS.get(op) or str(op).rpartition(".")[2].lower()


def _check_size(name: str, larger: torch.Tensor, smaller: torch.Tensor, n: int) -> None:
    if larger.numel() != smaller.numel() * n or larger.dtype != smaller.dtype:
        raise SimulationError(
            f"{name} of {n} ranks got {larger.dtype} {list(larger.shape)} and {smaller.dtype} "
            f"{list(smaller.shape)}, expected one dtype and {n} times as many elements in the first"
        )


# c10d's stubs declare overloads that only its C++ side has.
_ProcessGroup: Any = dist.ProcessGroup


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """One rank's end of a process group. The methods are those that torch.distributed calls.

    torch 2.13 renamed the flat collectives; both names are here. c10d's calls from C++ (functional
    collectives) arrive in the same methods.

    Args:
        group_rank: of the rank whose end it is, among the global `ranks` of the group.
        arrive: gets each call, and gives its Work.
    """

    def __init__(
        self,
        group_rank: int,
        ranks: tuple[int, ...],
        name: str,
        backend: str,
        arrive: Callable[[Arrival], dist.Work],
    ) -> None:
        super().__init__(group_rank, len(ranks))
        self.ranks, self._me, self._n = ranks, group_rank, len(ranks)
        self._name, self._backend, self._arrive = name, backend, arrive
        self.named = False  # whether functional collectives can call it by its name

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def getBackendName(self) -> str:  # noqa: N802 (c10d's name)
        return self._backend

    def _call(
        self, signature: Signature, finish: Callable[..., None], call: Any, results: Any = None
    ) -> dist.Work:
        return self._arrive(Arrival(self.ranks, self._name, self._me, signature, finish, call, results))

    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        signature = ("all_reduce", _reduction(opts), _meta(tensors))
        return self._call(signature, _finish_all_reduce, tensors, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        signature = ("reduce", f"{_reduction(opts)} to group rank {opts.rootRank}", _meta(tensors))
        return self._call(signature, _finish_reduce, (tensors[0], opts.rootRank), tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        signature = ("broadcast", f"from group rank {opts.rootRank}", _meta(tensors))
        return self._call(signature, _finish_broadcast, (tensors, opts.rootRank), tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None) -> dist.Work:
        # The parts may differ in size by rank, as long as every rank expects the same of each.
        signature = ("all_gather", "", _meta([part for parts in outputs for part in parts]))
        for parts, sent in zip(outputs, inputs, strict=True):
            if parts[self._me].shape != sent.shape or parts[self._me].dtype != sent.dtype:
                raise SimulationError(
                    f"all_gather got {sent.dtype} {list(sent.shape)} to send and {parts[self._me].dtype} "
                    f"{list(parts[self._me].shape)} as this rank's part of the output; expected the same"
                )
        return self._call(signature, _finish_all_gather, (outputs, inputs), outputs)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        for output, sent in zip(outputs, inputs, strict=True):
            _check_size("all_gather_single", output, sent, self._n)
        signature = ("all_gather_single", "", _meta(inputs))
        return self._call(signature, _finish_all_gather_single, (outputs, inputs), outputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        signature = ("gather", f"to group rank {opts.rootRank}", _meta(inputs))
        parts = outputs[0] if outputs else ()
        return self._call(signature, _finish_gather, (parts, inputs[0], opts.rootRank), outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        signature = ("scatter", f"from group rank {opts.rootRank}", _meta(outputs))
        parts = inputs[0] if inputs else ()
        return self._call(signature, _finish_scatter, (outputs[0], parts, opts.rootRank), outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: object) -> dist.Work:
        metas = _meta([part for parts in inputs for part in parts])
        signature = ("reduce_scatter", _reduction(opts), metas)
        return self._call(signature, _finish_reduce_scatter, (outputs, inputs), outputs)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: object) -> dist.Work:
        for output, sent in zip(outputs, inputs, strict=True):
            _check_size("reduce_scatter_single", sent, output, self._n)
        signature = ("reduce_scatter_single", _reduction(opts), _meta(inputs))
        return self._call(signature, _finish_reduce_scatter_single, (outputs, inputs), outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: object) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> dist.Work:
        signature = ("all_to_all", str(inputs[0].dtype) if inputs else "", ())
        return self._call(signature, _finish_all_to_all, (outputs, inputs), outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: object = None,
    ) -> dist.Work:
        # The rows may differ by rank; what a row is may not.
        signature = ("all_to_all_single", "rows of", ((input.shape[1:], input.dtype),))
        call = (output, input, list(output_splits or ()), list(input_splits or ()))
        return self._call(signature, _finish_all_to_all_single, call, [output])

    def barrier(self, *_: object, opts: object = None) -> dist.Work:
        return self._call(("barrier", "", ()), lambda *_: None, ())

    # The names of torch 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


# ---- the collectives of c10d as ops, which a dispatch mode sees ----

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


def group_of(op: OpOverload, args: Args, kwargs: Kwargs) -> dist.ProcessGroup | None:
    """The group of the process that a collective is issued on; None of one that has none, such as waiting."""
    named = bound_arguments(op, args, kwargs)
    group = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        with c10d_state.of_process():
            return resolve_group(group)
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    return dist.ProcessGroup.unbox(group)


def issue(op: OpOverload, args: Args, kwargs: Kwargs, end: SimulatedGroup | None) -> Any:
    """Runs the collective `op` as one rank, whose end of the group is `end`.

    Returns:
        What the op returns; the other ranks' data has arrived.
    """
    if op.namespace != "c10d":  # torch's kernels of these call the methods of the group
        if end is None:
            return op(*args, **kwargs)
        c10d_state.name_group(end)
        result = op(*args, **kwargs)
        for tensor in tree_leaves(result):
            torch.ops._c10d_functional.wait_tensor(tensor)
        return result
    # `alltoall_base_(output, input, process_group, output_split_sizes, ...)` calls the method of that name.
    name = op._schema.name.removeprefix("c10d::").removesuffix("_")
    if end is None or name not in vars(SimulatedGroup):
        raise SimulationError(
            f"{op} is not simulated: use a collective, or ThreadWorld, which runs each rank by itself"
        )
    named = bound_arguments(op, args, kwargs)
    reduce_op = SimpleNamespace(op=named["reduce_op"].op()) if "reduce_op" in named else None
    options = SimpleNamespace(reduceOp=reduce_op, rootRank=named.get("root_rank", 0))
    tensors = list(named.values())[: list(named).index("process_group")]
    splits = [sizes for argument, sizes in named.items() if argument.endswith("_split_sizes")]
    getattr(end, name)(*tensors, *splits, options).wait()
    returns = [_done() if "Work" in str(r.type) else tensors[0] for r in op._schema.returns]
    return tuple(returns) if len(returns) > 1 else returns[0]


@functools.cache
def _done() -> Any:
    """A Work that is done: one for all, so that the ranks' results are the same."""
    return Work.boxed(FakeWork())


# ---- which ranks meet in a collective ----

# The process has just its own rank's groups. But a group of a DeviceMesh dim is one of several that lie side by side
# (its fibres): in the mesh [[0, 1], [2, 3]] the groups of the inner dim are 0-1 and 2-3, and a call on the one is, on
# the other ranks, a call on the other.
Fibres = tuple[tuple[int, ...], ...]
_dims: weakref.WeakKeyDictionary[DeviceMesh, list[Fibres]] = weakref.WeakKeyDictionary()


def fibres_by_dim(mesh: DeviceMesh) -> list[Fibres]:
    """The ranks of every group along each dim of `mesh`, or of its siblings where it is a slice."""
    if mesh not in _dims:
        _dims[mesh] = [mesh_dim_groups(mesh, dim) for dim in range(mesh.ndim)]
    return _dims[mesh]


def coordinate_of(mesh: DeviceMesh, rank: int) -> tuple[int, ...] | None:
    """Where `rank` stands in `mesh`, or in the sibling of it that holds `rank`; None outside."""
    fibres = [next((f for f in along if rank in f), None) for along in fibres_by_dim(mesh)]
    return None if None in fibres else tuple(f.index(rank) for f in fibres if f is not None)


# As declared, or as their meshes say.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Fibres] = weakref.WeakKeyDictionary()


def declare_group(group: dist.ProcessGroup, fibres: Sequence[Sequence[int]]) -> None:
    """Declares which ranks call a collective on `group`, or on their own counterpart of it.

    Needed only for groups made by hand: those of a DeviceMesh are known.

    Args:
        fibres: the global ranks of each group, in group order; one of them is `group`'s own. Ranks in
            none of them take no part.

    Raises:
        SimulationError: `group`'s own ranks are not among them.
    """
    listed = tuple(tuple(ranks) for ranks in fibres)
    own = tuple(dist.get_process_group_ranks(group))
    if own not in listed:
        raise SimulationError(
            f"declare_group got {list(map(list, listed))} for the group of {name_ranks(own)}, expected the ranks of "
            "all groups, this one's among them"
        )
    _groups[group] = listed


def fibres_of_group(group: dist.ProcessGroup) -> Fibres:
    """The groups that meet in a collective on `group`."""
    if group not in _groups:
        _groups[group] = _fibres_by_mesh(group)
    return _groups[group]


def _fibres_by_mesh(group: dist.ProcessGroup) -> Fibres:
    own = tuple(dist.get_process_group_ranks(group))
    if not group.group_desc.startswith("mesh"):
        return (own,)
    # A group does not know its mesh. Looking through all objects is slow, and done once per group.
    for mesh in gc.get_objects():
        # isinstance would read attributes of any object; a mesh with a thread is of a ThreadWorld's rank, whose groups
        # are not the process', whatever their names.
        if issubclass(type(mesh), DeviceMesh) and getattr(mesh, "_thread_id", None) is None:
            for dim, name in enumerate(mesh_group_names(mesh)):
                if name == group.group_name:
                    fibres = fibres_by_dim(mesh)[dim]
                    # A mesh of a destroyed world may have used the same name for other ranks.
                    is_own = any(set(own) == set(fibre) for fibre in fibres)
                    if is_own and max(map(max, fibres)) < dist.get_world_size():
                        return tuple(tuple(sorted(fibre)) for fibre in fibres)  # as torch makes groups
    return (own,)
