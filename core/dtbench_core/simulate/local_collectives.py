"""The collectives that reach a dispatch mode, as calls on a simulated rank's own groups.

torch issues a collective as an op: `c10d::*` works in place on outputs that the caller made and gives a
Work, `_c10d_functional::*` makes its outputs. Each entry here says, for one rank and its plain tensors,
which method of a process group the op stands for. The maths is that of group.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, Work, _resolve_process_group
from torch._ops import OpOverload
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import GroupName

from dtbench_core.errors import SimulationError
from dtbench_core.op_types import Args, Kwargs
from dtbench_core.rules.base import bound
from dtbench_core.simulate.group import SimulatedGroup

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")

# Gets the op's arguments by name, and the rank's end of the group.
Handler = Callable[[SimpleNamespace, SimulatedGroup], Any]


def issue(
    op: OpOverload,
    args: Args,
    kwargs: Kwargs,
    group_for: Callable[[ProcessGroup], SimulatedGroup],
) -> Any:
    """Runs the collective `op` as one rank: `group_for` gives the rank's end of a group.

    Returns:
        What the op returns. A Work is done: the other ranks' data has arrived.
    """
    handler = _handlers.get(op._schema.name)
    if handler is None:
        raise SimulationError(
            f"{op} is not simulated: use a collective, or ThreadWorld, which runs each rank by itself"
        )
    given = bound(op, args, kwargs)
    group = given.get("process_group", given.get("group_name"))
    mine = None if group is None else group_for(_unboxed(group))
    result = handler(SimpleNamespace(**given), mine)  # type: ignore[arg-type]
    if op.namespace != "c10d":
        return result
    returns = [_done() if "Work" in str(r.type) else result for r in op._schema.returns]
    return tuple(returns) if len(returns) > 1 else (returns[0] if returns else None)


@functools.cache
def _done() -> Any:
    """A Work that is done: one for all, so that the ranks' results are the same."""
    return Work.boxed(FakeWork())


def _unboxed(group: Any) -> ProcessGroup:
    if isinstance(group, str):
        return _resolve_process_group(GroupName(group))
    return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)


def _options(reduce_op: Any = None, root: int = 0) -> Any:
    """What the methods of a group read of c10d's options; `reduce_op` as c10d or by its name."""
    if isinstance(reduce_op, str):
        reduce_op = SimpleNamespace(op=getattr(ReduceOp, reduce_op.upper()))
    elif reduce_op is not None:
        reduce_op = SimpleNamespace(op=reduce_op.op())
    return SimpleNamespace(reduceOp=reduce_op, rootRank=root)


# ---- c10d: in place ----

# Op -> (the group's method, the op's arguments that it takes before the options, the one that the op gives back).
_IN_PLACE: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "allreduce_": ("allreduce", ("tensors",), "tensors"),
    "allreduce_coalesced_": ("allreduce", ("tensors",), "tensors"),
    "reduce_": ("reduce", ("tensors",), "tensors"),
    "broadcast_": ("broadcast", ("tensors",), "tensors"),
    "allgather_": ("allgather", ("output_tensors", "input_tensors"), "output_tensors"),
    "allgather_coalesced_": ("allgather_coalesced", ("output_lists", "input_list"), "output_lists"),
    "_allgather_base_": ("all_gather_single", ("output_tensor", "input_tensor"), "output_tensor"),
    "allgather_into_tensor_coalesced_": ("all_gather_single_coalesced", ("outputs", "inputs"), "outputs"),
    "gather_": ("gather", ("output_tensors", "input_tensors"), "output_tensors"),
    "scatter_": ("scatter", ("output_tensors", "input_tensors"), "output_tensors"),
    "reduce_scatter_": ("reduce_scatter", ("output_tensors", "input_tensors"), "output_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter_single", ("output_tensor", "input_tensor"), "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_single_coalesced", ("outputs", "inputs"), "outputs"),
    "alltoall_": ("alltoall", ("output_tensors", "input_tensors"), "output_tensors"),
    "alltoall_base_": (
        "all_to_all_single",
        ("output", "input", "output_split_sizes", "input_split_sizes"),
        "output",
    ),
    "barrier": ("barrier", (), None),
    "monitored_barrier_": ("barrier", (), None),
}


def _in_place(method: str, taken: tuple[str, ...], given_back: str | None) -> Handler:
    def handle(a: Any, mine: SimulatedGroup) -> Any:
        options = _options(getattr(a, "reduce_op", None), getattr(a, "root_rank", 0))
        getattr(mine, method)(*(getattr(a, name) for name in taken), options).wait()
        return given_back and getattr(a, given_back)

    return handle


# ---- functional: the outputs are made here ----


def _same(tensor: torch.Tensor, n: int) -> torch.Tensor:
    return tensor


def _clone(tensor: torch.Tensor, n: int) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _grown(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """Room for n tensors like this one, one after the other on dim 0."""
    return tensor.new_empty((n * tensor.shape[0], *tensor.shape[1:]))


def _shrunk(tensor: torch.Tensor, n: int) -> torch.Tensor:
    return tensor.new_empty((tensor.shape[0] // n, *tensor.shape[1:]))


# Op -> (the group's method, what makes an output of an input and the number of ranks).
_FUNCTIONAL: dict[str, tuple[str, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "all_reduce": ("allreduce", _clone),
    "all_reduce_coalesced": ("allreduce", _clone),
    "all_reduce_": ("allreduce", _same),
    "all_reduce_coalesced_": ("allreduce", _same),
    "broadcast": ("broadcast", _clone),
    "broadcast_": ("broadcast", _same),
    "all_gather_into_tensor": ("all_gather_single_coalesced", _grown),
    "all_gather_into_tensor_out": ("all_gather_single_coalesced", _grown),
    "all_gather_into_tensor_coalesced": ("all_gather_single_coalesced", _grown),
    "reduce_scatter_tensor": ("reduce_scatter_single_coalesced", _shrunk),
    "reduce_scatter_tensor_out": ("reduce_scatter_single_coalesced", _shrunk),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_single_coalesced", _shrunk),
}


def _functional(method: str, output_of: Callable[[torch.Tensor, int], torch.Tensor]) -> Handler:
    def handle(a: Any, mine: SimulatedGroup) -> Any:
        several = hasattr(a, "inputs")
        inputs = a.inputs if several else [a.input]
        outputs = [a.out] if hasattr(a, "out") else [output_of(t, mine.size()) for t in inputs]
        options = _options(getattr(a, "reduce_op", None), getattr(a, "src", 0))
        given = (outputs,) if output_of in (_same, _clone) else (outputs, inputs)
        getattr(mine, method)(*given, options).wait()
        return outputs if several else outputs[0]

    return handle


def _all_to_all(a: Any, mine: SimulatedGroup) -> Any:
    rows, splits = a.input.shape[0], a.output_split_sizes
    output = a.input.new_empty((sum(splits) if splits else rows, *a.input.shape[1:]))
    mine.all_to_all_single(output, a.input, splits, a.input_split_sizes).wait()
    return output


def _shard_dim_all_to_all(a: Any, mine: SimulatedGroup) -> Any:
    """Everybody's part along `gather_dim`, cut along `shard_dim`."""
    parts = [torch.empty_like(a.input, memory_format=torch.contiguous_format) for _ in range(mine.size())]
    mine.allgather([parts], [a.input]).wait()
    return torch.cat(parts, a.gather_dim).chunk(mine.size(), a.shard_dim)[mine.rank()].contiguous()


_handlers: dict[str, Handler] = {
    **{f"c10d::{op}": _in_place(*described) for op, described in _IN_PLACE.items()},
    **{f"_c10d_functional::{op}": _functional(*described) for op, described in _FUNCTIONAL.items()},
    "_c10d_functional::wait_tensor": lambda a, _: a.tensor,
    "_c10d_functional::_wrap_tensor_autograd": lambda a, _: a.input,
    "_c10d_functional::all_to_all_single": _all_to_all,
    "_dtensor::shard_dim_alltoall": _shard_dim_all_to_all,
}
