"""The process group of simulated ranks, whose collectives are plain arithmetic on the tensors of all ranks.

A rank's call is recorded as a `CollectiveCall`, and the simulator (threads.py) collects the calls of all ranks. As on
a real backend, the n-th call of one rank on a group belongs to the n-th call of every other rank. Where a real
backend would hang or return garbage, since op, root, shape or dtype differ, an error is raised here.
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
# The part of a call on which all ranks of the group must agree: (collective, reduction or root, tensor metadata).
Signature = tuple[str, str, tuple[tuple[torch.Size, torch.dtype], ...]]

_REDUCE_PAIR: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}
_REDUCTIONS = {getattr(dist.ReduceOp, name.upper()): name for name in _REDUCE_PAIR}


# ---- a call, and how messages name it ----


class CollectiveCall(NamedTuple):
    """A collective as called by one rank.

    Attributes:
        ranks: global ranks of the group, by group rank.
        group_name: the name of the group.
        group_rank: the calling rank's index in `ranks`.
        signature: the part of the call on which all ranks must agree.
        finish: computes the results, given the arguments of all ranks and the signature.
        arguments: tensors, roots and split sizes, as `finish` expects them.
        results: the value of the future of the call's Work.
    """

    ranks: tuple[int, ...]
    group_name: str
    group_rank: int
    signature: Signature
    finish: Callable[[list[Any], Signature], None]
    arguments: Any
    results: Any


def combine(call: CollectiveCall, calls: list[Any]) -> str | None:
    """Executes a collective, given the calls of all its ranks.

    Args:
        call: the call of any of the ranks.
        calls: the arguments of every rank's call, by group rank.

    Returns:
        The message of an error in the computation, for example since shapes do not fit; None without an error.
    """
    try:
        # A backend writes into the tensors' memory without autograd noticing; inference mode does the same.
        with torch.inference_mode():
            call.finish(calls, call.signature)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{describe(call.signature)} of {name_ranks(call.ranks)} failed: {error}"
    return None


def mismatch(call: CollectiveCall, other_ranks: Sequence[int], other_signature: Signature) -> str:
    """Returns the message for a rank whose call differs from that of `other_ranks` of its group."""
    return (
        f"mismatched collectives: {name_ranks([call.ranks[call.group_rank]])} called "
        f"{describe(call.signature)} where {name_ranks(other_ranks)} called {describe(other_signature)}, in the "
        f"group of {name_ranks(call.ranks)}; every rank of a group must issue the same collectives in the same order"
    )


def describe(signature: Signature) -> str:
    """Formats a call, e.g. `all_reduce(sum, float32[4, 4])`."""
    name, detail, metas = signature
    parts = [detail] if detail else []
    parts += [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in metas[:4]]
    if len(metas) > 4:
        parts.append(f"and {len(metas) - 4} more")
    return f"{name}({', '.join(parts)})"


def name_ranks(ranks: Sequence[int]) -> str:
    """Formats ranks, e.g. `rank 2`, `ranks 0, 1, 3` or `ranks 0 to 7`."""
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def describe_actions(actions: Mapping[int, str]) -> list[str]:
    """Groups ranks by their action, e.g. `["rank 0 returned", "ranks 1, 2 raised ..."]`."""
    ranks_of: dict[str, list[int]] = {}
    for rank, action in actions.items():
        ranks_of.setdefault(action, []).append(rank)
    return [f"{name_ranks(ranks)} {action}" for action, ranks in ranks_of.items()]


# ---- the computation of each collective ----

# Each function takes the arguments of all ranks' calls, by group rank, and their common signature.


def _reduced(op: str, tensors: Tensors) -> torch.Tensor:
    if op not in _REDUCE_PAIR:
        raise ValueError(f"got the reduction {op!r}, expected one of {', '.join(_REDUCE_PAIR)}")
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        _REDUCE_PAIR[op](total, tensor)
    if op == "avg":
        total.div_(len(tensors), rounding_mode=None if total.dtype.is_floating_point else "trunc")
    return total


def _finish_all_reduce(calls: list[Tensors], signature: Signature) -> None:
    for tensors in zip(*calls, strict=True):
        total = _reduced(signature[1], tensors)
        for tensor in tensors:
            tensor.copy_(total)


def _finish_reduce(calls: list[tuple[torch.Tensor, int]], signature: Signature) -> None:
    root = calls[0][1]
    calls[root][0].copy_(_reduced(signature[1].split()[0], [tensor for tensor, _ in calls]))


def _finish_broadcast(calls: list[tuple[Tensors, int]], _: Signature) -> None:
    root = calls[0][1]
    for rank, (tensors, _root) in enumerate(calls):
        if rank != root:
            for received, sent in zip(tensors, calls[root][0], strict=True):
                received.copy_(sent)


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
    for index in range(len(calls[0][0])):
        total = _reduced(signature[1], [inputs[index] for _, inputs in calls]).view(len(calls), -1)
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
            (_split(output, output_splits, n), _split(sent, input_splits, n))
            for output, sent, output_splits, input_splits in calls
        ],
        signature,
    )


def _split(tensor: torch.Tensor, splits: list[int], n: int) -> Tensors:
    if splits:
        return tuple(tensor.split(splits))
    if tensor.shape[0] % n:
        raise ValueError(f"got {tensor.shape[0]} rows without splits, expected a multiple of {n} ranks")
    return tuple(tensor.split(tensor.shape[0] // n)) if tensor.shape[0] else (tensor,) * n


# ---- the process group ----


def _metadata_of(tensors: Tensors) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple([(t.shape, t.dtype) for t in tensors])


def _reduction(options: Any) -> str:
    """Returns the name of the reduction in c10d's options, e.g. "sum" or "avg"."""
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
    """The process group object of one rank (its end of the group), with the methods that torch.distributed calls.

    torch 2.13 renamed the flat collectives; both names are defined. Functional collectives, which c10d calls from
    C++, use the same methods.

    Args:
        group_rank: the rank's index in `ranks`.
        ranks: global ranks of the group, by group rank.
        name: the name of the group.
        backend: the name of the backend.
        submit: takes each call and returns its Work.
    """

    def __init__(
        self,
        group_rank: int,
        ranks: tuple[int, ...],
        name: str,
        backend: str,
        submit: Callable[[CollectiveCall], dist.Work],
    ) -> None:
        super().__init__(group_rank, len(ranks))
        self.ranks, self._group_rank, self._size = ranks, group_rank, len(ranks)
        self._name, self._backend, self._submit = name, backend, submit
        self.is_name_registered = False  # functional collectives look groups up by name

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def getBackendName(self) -> str:  # noqa: N802 (c10d's name)
        return self._backend

    def _call(
        self, signature: Signature, finish: Callable[..., None], arguments: Any, results: Any = None
    ) -> dist.Work:
        return self._submit(
            CollectiveCall(self.ranks, self._name, self._group_rank, signature, finish, arguments, results)
        )

    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._call(
            ("all_reduce", _reduction(opts), _metadata_of(tensors)), _finish_all_reduce, tensors, tensors
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._call(
            ("reduce", f"{_reduction(opts)} to group rank {opts.rootRank}", _metadata_of(tensors)),
            _finish_reduce,
            (tensors[0], opts.rootRank),
            tensors,
        )

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._call(
            ("broadcast", f"from group rank {opts.rootRank}", _metadata_of(tensors)),
            _finish_broadcast,
            (tensors, opts.rootRank),
            tensors,
        )

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None) -> dist.Work:
        for parts, sent in zip(outputs, inputs, strict=True):
            if parts[self._group_rank].shape != sent.shape or parts[self._group_rank].dtype != sent.dtype:
                raise SimulationError(
                    f"all_gather got {sent.dtype} {list(sent.shape)} to send and {parts[self._group_rank].dtype} "
                    f"{list(parts[self._group_rank].shape)} as this rank's part of the output; expected the same"
                )
        # Ranks may contribute parts of different sizes, as long as every rank expects the same size of each part.
        signature = ("all_gather", "", _metadata_of([part for parts in outputs for part in parts]))
        return self._call(signature, _finish_all_gather, (outputs, inputs), outputs)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        for output, sent in zip(outputs, inputs, strict=True):
            _check_size("all_gather_single", output, sent, self._size)
        return self._call(
            ("all_gather_single", "", _metadata_of(inputs)),
            _finish_all_gather_single,
            (outputs, inputs),
            outputs,
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        return self._call(
            ("gather", f"to group rank {opts.rootRank}", _metadata_of(inputs)),
            _finish_gather,
            (outputs[0] if outputs else (), inputs[0], opts.rootRank),
            outputs,
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        return self._call(
            ("scatter", f"from group rank {opts.rootRank}", _metadata_of(outputs)),
            _finish_scatter,
            (outputs[0], inputs[0] if inputs else (), opts.rootRank),
            outputs,
        )

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: object) -> dist.Work:
        return self._call(
            ("reduce_scatter", _reduction(opts), _metadata_of([part for parts in inputs for part in parts])),
            _finish_reduce_scatter,
            (outputs, inputs),
            outputs,
        )

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: object) -> dist.Work:
        for output, sent in zip(outputs, inputs, strict=True):
            _check_size("reduce_scatter_single", sent, output, self._size)
        return self._call(
            ("reduce_scatter_single", _reduction(opts), _metadata_of(inputs)),
            _finish_reduce_scatter_single,
            (outputs, inputs),
            outputs,
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: object) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> dist.Work:
        return self._call(
            ("all_to_all", str(inputs[0].dtype) if inputs else "", ()),
            _finish_all_to_all,
            (outputs, inputs),
            outputs,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: object = None,
    ) -> dist.Work:
        # The number of rows may differ between ranks; the shape and dtype of a row may not.
        return self._call(
            ("all_to_all_single", "rows of", ((input.shape[1:], input.dtype),)),
            _finish_all_to_all_single,
            (output, input, list(output_splits or ()), list(input_splits or ())),
            [output],
        )

    def barrier(self, *_: object, opts: object = None) -> dist.Work:
        return self._call(("barrier", "", ()), lambda *_: None, ())

    # The names of torch 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


# ---- collectives as ops, which a dispatch mode intercepts ----

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


def group_of(op: OpOverload, args: Args, kwargs: Kwargs) -> dist.ProcessGroup | None:
    """Returns the process group of a collective op; None for an op that takes no group, such as waiting."""
    arguments = bound_arguments(op, args, kwargs)
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        with c10d_state.use_process_tables():
            return resolve_group(group)
    return group if group is None or isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def issue(op: OpOverload, args: Args, kwargs: Kwargs, end: SimulatedGroup | None) -> Any:
    """Runs the collective `op` as one rank.

    Args:
        end: the rank's end of the group; None for an op that takes no group.

    Returns:
        The result of the op, after the data of the other ranks has arrived.
    """
    if op.namespace != "c10d":  # torch's kernels of functional collectives call the methods of the group
        if end is None:
            return op(*args, **kwargs)
        c10d_state.register_group_name(end)
        result = op(*args, **kwargs)
        for tensor in tree_leaves(result):
            torch.ops._c10d_functional.wait_tensor(tensor)
        return result
    # `alltoall_base_(output, input, process_group, output_split_sizes, ...)` calls the method of that name.
    name = op._schema.name.removeprefix("c10d::").removesuffix("_")
    if end is None or name not in vars(SimulatedGroup):
        raise SimulationError(
            f"{op} is not simulated: use a collective, or ThreadWorld, which runs the program once per rank"
        )
    arguments = bound_arguments(op, args, kwargs)
    options = SimpleNamespace(
        reduceOp=SimpleNamespace(op=arguments["reduce_op"].op()) if "reduce_op" in arguments else None,
        rootRank=arguments.get("root_rank", 0),
    )
    tensors = list(arguments.values())[: list(arguments).index("process_group")]
    getattr(end, name)(
        *tensors,
        *(sizes for argument, sizes in arguments.items() if argument.endswith("_split_sizes")),
        options,
    ).wait()
    returns = [_completed_work() if "Work" in str(r.type) else tensors[0] for r in op._schema.returns]
    return tuple(returns) if len(returns) > 1 else returns[0]


@functools.cache
def _completed_work() -> Any:
    """Returns a completed Work: one object for all ranks, so that their results are equal."""
    return Work.boxed(FakeWork())


# ---- which ranks call a collective together ----

# The process has only the groups of its own rank. A group of a DeviceMesh dim has siblings along the same dim: in the
# mesh [[0, 1], [2, 3]] the groups of the inner dim are 0-1 and 2-3. When rank 0 calls a collective on 0-1, ranks 2
# and 3 call it on 2-3.
RankGroups = tuple[tuple[int, ...], ...]
_groups_by_dim: weakref.WeakKeyDictionary[DeviceMesh, list[RankGroups]] = weakref.WeakKeyDictionary()


def groups_by_dim(mesh: DeviceMesh) -> list[RankGroups]:
    """Returns, per dim of `mesh`, the ranks of every group along it.

    For a slice of a mesh, this includes the groups of the sibling slices.
    """
    if mesh not in _groups_by_dim:
        _groups_by_dim[mesh] = [mesh_dim_groups(mesh, dim) for dim in range(mesh.ndim)]
    return _groups_by_dim[mesh]


def coordinate_of(mesh: DeviceMesh, rank: int) -> tuple[int, ...] | None:
    """Returns the coordinate of `rank` in `mesh`, or in the sibling slice that contains it; None outside both."""
    own_groups = [next((ranks for ranks in groups if rank in ranks), None) for groups in groups_by_dim(mesh)]
    return None if None in own_groups else tuple(g.index(rank) for g in own_groups if g is not None)


# The groups declared with `declare_group`, or found in the mesh of a group.
_sibling_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, RankGroups] = weakref.WeakKeyDictionary()


def declare_group(group: dist.ProcessGroup, groups: Sequence[Sequence[int]]) -> None:
    """Declares which ranks call a collective together when the process calls it on `group`.

    Needed only for groups made by hand; the groups of a DeviceMesh are recognised.

    Args:
        group: a group of the process.
        groups: the global ranks of each group that calls the collective at the same time, in group order, including
            those of `group` itself. Other ranks do not call it.

    Raises:
        SimulationError: `groups` does not include the ranks of `group`.
    """
    rank_groups = tuple(tuple(ranks) for ranks in groups)
    group_ranks = tuple(dist.get_process_group_ranks(group))
    if group_ranks not in rank_groups:
        raise SimulationError(
            f"declare_group got {list(map(list, rank_groups))} for the group of {name_ranks(group_ranks)}, expected "
            "the ranks of all groups, including this one's"
        )
    _sibling_groups[group] = rank_groups


def sibling_groups(group: dist.ProcessGroup) -> RankGroups:
    """Returns the ranks of every group that calls a collective when the process calls it on `group`."""
    if group not in _sibling_groups:
        _sibling_groups[group] = _sibling_groups_by_mesh(group)
    return _sibling_groups[group]


def _sibling_groups_by_mesh(group: dist.ProcessGroup) -> RankGroups:
    group_ranks = tuple(dist.get_process_group_ranks(group))
    if not group.group_desc.startswith("mesh"):
        return (group_ranks,)
    # A group has no reference to its mesh. Searching all objects is slow, but done only once per group.
    for mesh in gc.get_objects():
        # isinstance would read an attribute of every object. A mesh with a thread id belongs to a rank of a
        # ThreadWorld; its groups are not the process's, even if their names are equal.
        if issubclass(type(mesh), DeviceMesh) and getattr(mesh, "_thread_id", None) is None:
            for dim, name in enumerate(mesh_group_names(mesh)):
                if name == group.group_name:
                    groups = groups_by_dim(mesh)[dim]
                    # A mesh of a destroyed world may have used the same name for other ranks.
                    if (
                        any(set(group_ranks) == set(ranks) for ranks in groups)
                        and max(map(max, groups)) < dist.get_world_size()
                    ):
                        # torch sorts the ranks of a group.
                        return tuple(tuple(sorted(ranks)) for ranks in groups)
    return (group_ranks,)
