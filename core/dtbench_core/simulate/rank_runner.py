"""Calls functions once as each simulated rank, with the groups, mesh coordinates and random state of that rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtbench_core import comm
from dtbench_core.dispatch import fallback
from dtbench_core.errors import SimulationError, describe_ranks
from dtbench_core.layout.mesh import MeshTables, mesh_tables
from dtbench_core.op_types import Args, Call, Kwargs
from dtbench_core.runtime import simulation, using_values
from dtbench_core.simulate.c10d_state import RankC10d, use_thread_tables
from dtbench_core.simulate.dtensor_parts import CoreParts
from dtbench_core.simulate.group import CollectiveCall, SimulatedGroup, describe, name_ranks, sibling_groups
from dtbench_core.simulate.local_random import RankStates, default_generators
from dtbench_core.simulate.local_tensor import joined, ranks_of
from dtbench_core.simulate.threads import RankThreads, running_rank, values_of_ranks

_BACKEND = "dtbench_local_tensor"

# True inside `LocalTensorMode.disable()`.
suspended: ContextVar[bool] = ContextVar("dtbench_core.simulate.suspended", default=False)


class RankRunner(TorchDispatchMode):
    """Base of LocalTensorMode, which keeps the state of each simulated rank and calls functions as each rank.

    Args:
        ranks: how many ranks from 0 on, or which global ranks.

    Attributes:
        ranks: the simulated global ranks, ascending.
        random: the random states of these ranks, from entering the mode on.

    Raises:
        SimulationError: no rank, or a negative one.
    """

    random: RankStates

    def __init__(self, ranks: int | Iterable[int]) -> None:
        super().__init__()
        self.ranks: tuple[int, ...] = tuple(range(ranks) if isinstance(ranks, int) else sorted(set(ranks)))
        if not self.ranks or self.ranks[0] < 0:
            raise SimulationError(f"got ranks {ranks}, expected at least one, from 0 on")
        self._single_rank: int | None = None  # the rank of `as_rank`
        self._threads = RankThreads()
        self._tables: dict[int, RankC10d] = {}
        # generator -> rank -> its random state, of the ranks that are running
        self._starts: dict[torch.Generator, dict[int, torch.Tensor]] = {}

    # ---- where code runs ----

    @property
    def current_rank(self) -> int | None:
        """The rank that code runs as; None where it runs for all ranks."""
        rank = running_rank()
        return self._single_rank if rank is None else rank.rank

    @property
    def runs_for_all(self) -> bool:
        """Whether code runs for all ranks, and the mode is not disabled."""
        return self.current_rank is None and not suspended.get()

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Context in which ops are torch's own again and create plain tensors. (The name is torch's.)"""
        token = suspended.set(True)
        try:
            yield
        finally:
            suspended.reset(token)

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Context in which code runs as `rank` alone: its coordinates and random numbers, plain tensors.

        `shard(rank)` gives this rank's tensor of a LocalTensor. A collective is an error, since no other rank calls it.
        """
        if rank not in self.ranks:
            raise SimulationError(f"got rank {rank}, expected one of {describe_ranks(self.ranks)}")
        self._refuse_in_rank("as_rank")
        self._single_rank, self._starts = rank, self.random.start(default_generators())
        try:
            with self._rank_c10d([rank]), use_mesh_tables(rank), self.random.as_rank(rank, self._starts):
                yield
        finally:
            self._single_rank = None
            self.random.finish(self._starts)

    def _refuse_in_rank(self, name: str) -> None:
        if self.current_rank is not None:
            raise SimulationError(f"{name} was called in code that runs as rank {self.current_rank}")

    # ---- process groups ----

    def rank_group(self, group: dist.ProcessGroup, rank: int) -> SimulatedGroup:
        """Returns the group object that `rank` uses where the process uses `group`.

        Raises:
            SimulationError: the ranks that call collectives together with `group` do not include `rank`.
        """
        if isinstance(group, SimulatedGroup):
            return group
        tables = self._tables_of(rank)
        if group not in tables.ends:
            groups = sibling_groups(group)
            ranks = next((group_ranks for group_ranks in groups if rank in group_ranks), None)
            if ranks is None:
                raise SimulationError(
                    f"got a collective on the group of ranks {describe_ranks(groups[0])}, and no sibling group that "
                    f"contains rank {rank}: use the group of a DeviceMesh dim, or declare with declare_group(group, "
                    "[[0, 1], ...]) which ranks call it together, and take only those (tensor_map)"
                )
            tables.add(
                group, SimulatedGroup(ranks.index(rank), ranks, group.group_name, _BACKEND, _submit), _BACKEND
            )
        return cast("SimulatedGroup", tables.ends[group])

    def _tables_of(self, rank: int) -> RankC10d:
        """Returns c10d's tables for code that runs as `rank`: the process's groups and the rank's ends of them."""
        if rank not in self._tables:
            self._tables[rank] = RankC10d(dist.distributed_c10d._world)
            # The default group exists: a mode can only be entered after init_process_group.
            self._tables[rank].default_pg = self.rank_group(cast("Any", dist.group.WORLD), rank)
        return self._tables[rank]

    def _rank_c10d(self, ranks: Iterable[int]) -> AbstractContextManager[None]:
        """Context in which c10d uses the tables of the running rank, which is one of `ranks`."""
        for rank in ranks:
            self._tables_of(rank)
        return use_thread_tables(
            lambda: None if self.current_rank is None else self._tables[self.current_rank], _BACKEND
        )

    # ---- calls as each rank ----

    def call_as_ranks(
        self,
        fn: Call,
        args: Args = (),
        kwargs: Kwargs | None = None,
        *,
        name: str,
        ranks: Sequence[int] | None = None,
        parts: CoreParts | None = None,
        sees_ops: bool = True,
    ) -> Any:
        """Calls `fn` once as each rank, with the rank's parts of the arguments, and joins the results.

        Args:
            name: names `fn` in messages.
            ranks: the ranks that call it; by default those of the arguments, or all.
            parts: gives each rank its part of the arguments.
            sees_ops: whether this mode intercepts the ops of `fn`. The core's own functions do not need it, since
                their process groups are those of the rank.

        Raises:
            SimulationError: ranks diverged, or their results cannot be joined.
            Exception: raised by `fn` on every rank.
        """
        self._refuse_in_rank(name)
        parts = parts or CoreParts(self.ranks)
        ranks = ranks or parts.ranks_of(args, kwargs) or ranks_of(args, kwargs) or self.ranks
        self._starts = self.random.start([*default_generators(), *generators_in((args, kwargs))])
        contexts = {rank: copy_context() for rank in ranks}

        def call(rank: int) -> Any:
            with (
                _counted(rank == ranks[0]),
                use_mesh_tables(rank),
                _RankMode(self) if sees_ops else nullcontext(),
            ):
                rank_args, rank_kwargs = parts.part_of((args, kwargs or {}), rank)
                return fn(*rank_args, **rank_kwargs)

        try:
            with self._rank_c10d(ranks):
                results = self._threads.take_turns(
                    lambda rank: contexts[rank].run(call, rank), ranks, self._starts
                )
        finally:
            self._threads.open_rendezvous.clear()
            self.random.finish(self._starts)
        return joined(dict(zip(ranks, values_of_ranks(results), strict=True)), parts, name)


class _RankMode(TorchDispatchMode):
    """Passes the ops of one rank's thread to the LocalTensorMode."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, op: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return self._mode.__torch_dispatch__(op, types, args, kwargs)


def _submit(call: CollectiveCall) -> dist.Work:
    called = f"{describe(call.signature)} was called on the group of {name_ranks(call.ranks)}"
    if not simulation.active:
        raise SimulationError(
            f"{called} of a LocalTensorMode that has ended: make the groups' mesh, and use them, inside one"
        )
    if (rank := running_rank()) is None:
        raise SimulationError(
            f"{called}, in code that runs as one rank alone: run it in a function under rank_map, so that the other "
            "ranks call it too"
        )
    return rank.submit(call)


# The core's mesh tables by rank, or by all simulated ranks for code that runs for all of them.
_mesh_tables: dict[int | tuple[int, ...], MeshTables] = {}


def use_mesh_tables(ranks: int | tuple[int, ...]) -> AbstractContextManager[None]:
    """Context in which the core uses the mesh tables of one rank, or those of all simulated ranks."""
    return using_values((mesh_tables, _mesh_tables.setdefault(ranks, MeshTables())))


def _counted(is_counted: bool) -> AbstractContextManager[None]:
    """Context of one rank's call.

    Collectives and replicated ops are counted on one rank only, and a warning is given once for all ranks.
    """
    if is_counted:
        return nullcontext()
    return using_values(
        (comm.counters, []), (fallback.logs, fallback.FallbackLog(warned=fallback.logs.get().warned))
    )


def generators_in(arguments: Any) -> list[torch.Generator]:
    """Returns the random generators among nested arguments."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Generator)]
