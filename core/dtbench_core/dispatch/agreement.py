"""A checking mode: before every op the ranks of a mesh compare what each is about to do. Off by default.

A program whose ranks hold other shapes or placements for one op is wrong in a way that no rank can see alone: one gets
a result of another shape, another waits for ever. Inside `check_ranks()` all of them raise instead, before anything
is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtbench_core import comm
from dtbench_core.errors import RanksDifferError
from dtbench_core.layout.placement import Partial, Placement, Replicate, Shard, describe, local_extents
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Args, Kwargs, Value
from dtbench_core.runtime import PerRank, simulation
from dtbench_core.torch_compat import disable_modes, is_traced

# How many check_ranks() are entered.
_checking: PerRank[int] = PerRank("dispatch.checking", lambda: 0)
_is_checking = _checking.get
# Whose part of a shape follows from the shape.
_REGULAR = (Shard, Replicate, Partial)


@contextmanager
def check_ranks() -> Iterator[None]:
    """Inside, every op, `redistribute` and `full_tensor` of DTensors is compared over the ranks of its mesh first.

    All ranks have to enter it, for the same ops. An op costs two small all-gathers of objects per mesh dim more (0.7 ms
    on gloo between two ranks; without this context nothing), and takes the way that it takes under any dispatch mode.
    Simulated ranks, which are one program, and graphs are not compared.

    Raises (within):
        RanksDifferError: on every rank of the mesh, with the op, the specs and the ranks that have them, where ranks
            came with different ops, with tensors of other shapes, dtypes or placements, or one of them holds another
            part than its spec says.
    """
    _checking.set(_checking.get() + 1)
    try:
        with _CheckRanks():
            yield
    finally:
        _checking.set(_checking.get() - 1)


class _CheckRanks(TorchDispatchMode):
    """Sees ops on DTensors before the core does; what runs on their parts passes by."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Value:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Wrapper)]
        if tensors and not func.is_view:  # a view sends nothing, and what takes it is compared
            compare(str(func), tensors)
        return func(*args, **kwargs)


def compare_move(name: str, tensor: Wrapper, placements: Sequence[Placement] | None = None) -> None:
    """`compare` of what moves a tensor and is no op, inside `check_ranks()`. placements: where to."""
    if _is_checking():
        compare(f"{name} to {describe(tuple(placements))}" if placements else name, [tensor])


def compare(name: str, tensors: Sequence[Wrapper]) -> None:
    """Raises as `check_ranks` says, where the ranks differ in the op of this name on these tensors."""
    info = tensors[0]._spec.info
    alone = any(
        comm.process_group_of(group).name() == "fake" for group in info.groups
    )  # nobody is at the other end
    if simulation.active or is_traced() or info.coordinate is None or not info.groups or alone:
        return
    mine = [(dist.get_rank(), name, tuple(map(_words, tensors)))]
    with disable_modes():
        for group in info.groups:
            mine = [one for several in comm.all_gather_objects(mine, group) for one in several]
    ranks_by_call: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, op, words in mine:
        ranks_by_call.setdefault((op, words), []).append(rank)
    if len(ranks_by_call) > 1:
        each = "; ".join(
            f"{_ranks(ranks)} {op} on {', '.join(words)}" for (op, words), ranks in ranks_by_call.items()
        )
        raise RanksDifferError(f"the ranks differ: {each}; expected one op on the same specs on every rank")
    wrong = {words for words in mine[0][2] if _WRONG in words}
    if wrong:
        raise RanksDifferError(
            f"{name}: every rank has {', '.join(sorted(wrong))}; give from_local the true shape"
        )


_WRONG = ", of which it holds "


def _words(tensor: Wrapper) -> str:
    """The spec, and this rank's part where that is not what the spec says."""
    spec = tensor._spec
    held = tuple(tensor._local_tensor.shape)
    if spec.info.coordinate is not None and all(type(p) in _REGULAR for p in spec.placements):
        part, _ = local_extents(tuple(spec.shape), spec.placements, spec.info.sizes, spec.info.coordinate)
        if part != held:
            return f"{spec}{_WRONG}{list(held)} instead of {list(part)}"
    return str(spec)


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank {listed[0]} has" if len(listed) == 1 else f"ranks {', '.join(map(str, listed))} have"
