"""Checks before every op that all ranks of a mesh run the same op on the same specs. Off by default.

If ranks have different shapes or placements for one op, one rank may get a result of another shape and another may wait
for ever. Inside `check_ranks()` all ranks raise before anything is sent.
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

# Number of check_ranks() contexts that are active.
_checking: PerRank[int] = PerRank("dispatch.checking", lambda: 0)
_is_checking = _checking.get
# Placements for which the global shape determines each rank's shape.
_REGULAR = (Shard, Replicate, Partial)


@contextmanager
def check_ranks() -> Iterator[None]:
    """Compares every op, `redistribute` and `full_tensor` of DTensors over the ranks of its mesh before it runs.

    All ranks must enter the context for the same ops. Each op costs two small all-gathers of objects per mesh dim
    (0.7 ms on gloo between two ranks), and runs as under any dispatch mode. Simulated ranks, which run one program, and
    graphs are not compared.

    Raises (within):
        RanksDifferError: on every rank of the mesh, with the op, the specs and their ranks. Ranks run different ops,
            have tensors of different shapes, dtypes or placements, or a shard has another shape than its spec says.
    """
    _checking.set(_checking.get() + 1)
    try:
        with _CheckRanks():
            yield
    finally:
        _checking.set(_checking.get() - 1)


class _CheckRanks(TorchDispatchMode):
    """Intercepts ops on DTensors before they are dispatched; ops on their shards are not compared."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Value:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Wrapper)]
        if tensors and not func.is_view:  # a view sends nothing, and ops on it are compared
            compare(str(func), tensors)
        return func(*args, **kwargs)


def compare_move(name: str, tensor: Wrapper, placements: Sequence[Placement] | None = None) -> None:
    """Compares a redistribution to `placements` over the ranks if `check_ranks()` is active. It is not an op itself."""
    if _is_checking():
        compare(f"{name} to {describe(tuple(placements))}" if placements else name, [tensor])


def compare(name: str, tensors: Sequence[Wrapper]) -> None:
    """Raises RanksDifferError if the ranks differ in the op's name or in the specs of these tensors."""
    info = tensors[0]._spec.info
    # A fake group has no other ranks to compare with.
    is_fake_group = any(comm.process_group_of(group).name() == "fake" for group in info.groups)
    if simulation.active or is_traced() or info.coordinate is None or not info.groups or is_fake_group:
        return
    mine = [(dist.get_rank(), name, tuple(map(_description, tensors)))]
    with disable_modes():
        for group in info.groups:
            mine = [call for several in comm.all_gather_objects(mine, group) for call in several]
    ranks_by_call: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, op, words in mine:
        ranks_by_call.setdefault((op, words), []).append(rank)
    if len(ranks_by_call) > 1:
        descriptions = "; ".join(
            f"{_ranks(ranks)} {op} on {', '.join(words)}" for (op, words), ranks in ranks_by_call.items()
        )
        raise RanksDifferError(
            f"the ranks differ: {descriptions}; expected one op on the same specs on every rank"
        )
    wrong = {words for words in mine[0][2] if _MISMATCH in words}
    if wrong:
        raise RanksDifferError(
            f"{name}: every rank has {', '.join(sorted(wrong))}; pass from_local the true global shape"
        )


_MISMATCH = " with a local tensor of shape "


def _description(tensor: Wrapper) -> str:
    """Describes the spec, and the local shape if it contradicts the spec."""
    spec = tensor._spec
    local_shape = tuple(tensor._local_tensor.shape)
    if spec.info.coordinate is not None and all(type(p) in _REGULAR for p in spec.placements):
        part, _ = local_extents(tuple(spec.shape), spec.placements, spec.info.sizes, spec.info.coordinate)
        if part != local_shape:
            return f"{spec}{_MISMATCH}{list(local_shape)} instead of {list(part)}"
    return str(spec)


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank {listed[0]} has" if len(listed) == 1 else f"ranks {', '.join(map(str, listed))} have"
