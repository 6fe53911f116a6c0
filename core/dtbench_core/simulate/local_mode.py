"""LocalTensorMode: the ranks of a world, run as one program. See local_tensor.py for how to use it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtbench_core import comm
from dtbench_core.dispatch import fallback
from dtbench_core.errors import SimulationError, describe_ranks
from dtbench_core.layout.mesh import MeshTables, mesh_tables
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Args, Call, Kwargs
from dtbench_core.runtime import using_values
from dtbench_core.simulate import rank_answers
from dtbench_core.simulate.c10d_state import RankC10d, per_thread
from dtbench_core.simulate.dtensor_parts import CoreParts
from dtbench_core.simulate.group import NAMESPACES, group_of, issue
from dtbench_core.simulate.local_int import local_int
from dtbench_core.simulate.local_random import RankStates, default_generators, set_states
from dtbench_core.simulate.local_tensor import (
    LocalTensor,
    PlainCopies,
    RankParts,
    is_plain,
    is_random,
    joined,
    ranks_of,
    run_on_each,
)
from dtbench_core.simulate.threads import RankThreads, running_rank, values_of_ranks
from dtbench_core.torch_compat import DisableTorchFunction

# Whether the mode is off, inside its `disable()`.
_suspended: ContextVar[bool] = ContextVar("dtbench_core.simulate.suspended", default=False)

P = ParamSpec("P")
R = TypeVar("R")


class LocalTensorMode(TorchDispatchMode):
    """`with LocalTensorMode(4):` runs the program inside once, for ranks 0 to 3 of a fake world.

    Args:
        ranks: how many ranks from 0 on, or which. All ranks of a group must be simulated for a
            collective on it.

    Raises:
        SimulationError: no rank; on entry: no process group, or one with fewer ranks; a mode is active.
    """

    def __init__(self, ranks: int | Iterable[int]) -> None:
        super().__init__()
        self.ranks: tuple[int, ...] = tuple(range(ranks) if isinstance(ranks, int) else sorted(set(ranks)))
        if not self.ranks or self.ranks[0] < 0:
            raise SimulationError(f"got ranks {ranks}, expected at least one, from 0 on")
        self._alone: int | None = None  # the rank of `as_rank`
        self._threads = RankThreads()
        self._tables: dict[int, RankC10d] = {}
        self._starts: dict[torch.Generator, dict[int, torch.Tensor]] = {}  # of the ranks that run

    def __enter__(self) -> LocalTensorMode:
        if not dist.is_initialized() or dist.get_world_size() <= self.ranks[-1]:
            raise SimulationError(
                f"got a LocalTensorMode of ranks {describe_ranks(self.ranks)} "
                + (f"in a world of {dist.get_world_size()}" if dist.is_initialized() else "without a world")
                + ', expected one that has them: dist.init_process_group("fake", rank=0, '
                f"world_size={self.ranks[-1] + 1}, store=FakeStore()) (torch.testing._internal.distributed.fake_pg)"
            )
        with ExitStack() as stack:
            stack.enter_context(rank_answers.answering_for(self))
            stack.enter_context(_knowing_meshes(self.ranks))
            # What is known of ranks is a thread's, and autograd has a thread of its own for a GPU.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            self.random = RankStates(self.ranks)
            super().__enter__()
            self._leave = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._leave.close()
        self._threads.close()
        self._tables = {}

    # ---- where code runs ----

    @property
    def current(self) -> int | None:
        """The rank that code runs as, None where it runs for all."""
        rank = running_rank()
        return self._alone if rank is None else rank.rank

    @property
    def for_all(self) -> bool:
        """Whether code runs for all ranks."""
        return self.current is None and not _suspended.get()

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Inside, ops are torch's own again, and tensors made there are plain. (The name is torch's.)"""
        token = _suspended.set(True)
        try:
            yield
        finally:
            _suspended.reset(token)

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Inside, code runs as `rank` alone: its coordinates and random numbers, plain tensors.

        Take its part of a LocalTensor with `shard(rank)`. A collective is an error: the others are not there.
        """
        if rank not in self.ranks:
            raise SimulationError(f"got rank {rank}, expected one of {describe_ranks(self.ranks)}")
        self._refuse_within("as_rank")
        self._alone, self._starts = rank, self.random.start(default_generators())
        try:
            with self._c10d_of([rank]), _knowing_meshes(rank), self.random.as_rank(rank, self._starts):
                yield
        finally:
            self._alone = None
            self.random.finish(self._starts)

    def _refuse_within(self, what: str) -> None:
        if self.current is not None:
            raise SimulationError(f"{what} was called in code that runs as rank {self.current}")

    # ---- ops ----

    def __torch_dispatch__(self, op: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if _suspended.get():
            return op(*args, **kwargs)
        if self.current is not None:
            return self._dispatch_alone(self.current, op, types, args, kwargs)
        if _others(types, Wrapper):
            return NotImplemented
        if any(issubclass(kind, Wrapper) for kind in types):
            return self._on_each_rank(op, args, kwargs, functools.partial(_below_autograd, op))
        if op.namespace in NAMESPACES:
            group = group_of(op, args, kwargs)
            for rank in ranks_of(args, kwargs) or self.ranks:
                if group is not None:  # refused before any rank has sent
                    rank_answers.rank_group(group, rank)
            return self._on_each_rank(op, args, kwargs, functools.partial(self._issue, op))
        return self._dispatch_all(op, args, kwargs)

    def _dispatch_all(self, op: Any, args: Args, kwargs: Kwargs) -> Any:
        ranks = ranks_of(args, kwargs)
        if is_random(op):
            return self._draw(op, args, kwargs, ranks or self.ranks)
        if ranks is None:
            leaves = tree_leaves((args, kwargs))
            if op is torch.ops.aten.lift_fresh.default:  # torch.tensor(...)
                return LocalTensor({rank: args[0].clone() for rank in self.ranks})
            plain = any(isinstance(x, torch.Tensor) for x in leaves)
            meta = any(isinstance(x, torch.device) and x.type == "meta" for x in leaves)
            if plain or meta or not any("Tensor" in str(r.type) for r in op._schema.returns):
                return op(*args, **kwargs)
        return run_on_each(op, args, kwargs, ranks or self.ranks)

    def _on_each_rank(self, op: Any, args: Args, kwargs: Kwargs, run: Call) -> Any:
        """An op on DTensors, through the core's dispatch, or a collective: each rank's on its own."""
        copies, what = PlainCopies(op, args, kwargs), str(op)
        parts = CoreParts(self.ranks, copies)
        result = self.across(run, args, kwargs, what=what, parts=parts, seen=False)
        if op._schema.is_mutable:
            parts.settle(what)
        copies.write_back(what)
        return result

    def _draw(self, op: Any, args: Args, kwargs: Kwargs, ranks: Sequence[int]) -> Any:
        states = self.random.start(_generators((args, kwargs)) or default_generators())
        try:
            return run_on_each(op, args, kwargs, ranks, lambda rank: self.random.as_rank(rank, states))
        finally:
            self.random.finish(states)

    def _dispatch_alone(self, rank: int, op: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        if LocalTensor in types:
            raise SimulationError(
                f"{op} got a LocalTensor in code that runs as rank {rank}: take its part, x.shard({rank}), or pass it "
                "as an argument of the function"
            )
        if _others(types):
            return NotImplemented
        if op.namespace in NAMESPACES:
            return self._issue(op, *args, **kwargs)
        if is_random(op):
            for generator in _generators((args, kwargs)):
                if generator not in self._starts:
                    self._starts[generator] = self.random.of(generator)
                    set_states({generator: self._starts[generator][rank]})
        return op(*args, **kwargs)

    # ---- collectives ----

    def tables_of(self, rank: int) -> RankC10d:
        """What c10d knows of groups where code runs as `rank`: those of the process, and the rank's ends of them."""
        if rank not in self._tables:
            self._tables[rank] = RankC10d(dist.distributed_c10d._world)
            world = dist.group.WORLD
            assert world is not None  # a mode is entered in a world
            self._tables[rank].default_pg = rank_answers.rank_group(world, rank)
        return self._tables[rank]

    def _c10d_of(self, ranks: Iterable[int]) -> AbstractContextManager[None]:
        """Inside, c10d sees the tables of the rank that runs, one of these."""
        for rank in ranks:
            self.tables_of(rank)
        return per_thread(
            lambda: None if self.current is None else self._tables[self.current], rank_answers.BACKEND
        )

    def _issue(self, op: Any, /, *args: object, **kwargs: object) -> Any:
        rank, group = self.current, group_of(op, args, kwargs)
        assert rank is not None
        return issue(op, args, kwargs, None if group is None else rank_answers.rank_group(group, rank))

    # ---- rank by rank ----

    def across(
        self,
        fn: Call,
        args: Args = (),
        kwargs: Kwargs | None = None,
        *,
        what: str,
        ranks: Sequence[int] | None = None,
        parts: CoreParts | None = None,
        seen: bool = True,
    ) -> Any:
        """`fn` once as each rank, with the rank's parts of the arguments; the results as one.

        Args:
            what: `fn`, for messages.
            ranks: by default those of the arguments, or all.
            seen: whether this mode sees the ops of `fn`; not needed for the core, whose groups are the rank's.

        Raises:
            SimulationError: ranks diverged, or results that cannot be one.
            Exception: what `fn` raised on every rank.
        """
        self._refuse_within(what)
        parts = parts or CoreParts(self.ranks)
        ranks = ranks or parts.ranks_of(args, kwargs) or ranks_of(args, kwargs) or self.ranks
        self._starts = self.random.start([*default_generators(), *_generators((args, kwargs))])
        contexts = {rank: copy_context() for rank in ranks}

        def on_rank(rank: int) -> Any:
            with (
                _counted(rank == ranks[0]),
                _knowing_meshes(rank),
                _RankMode(self) if seen else nullcontext(),
            ):
                mine, named = parts.of((args, kwargs or {}), rank)
                return fn(*mine, **named)

        try:
            with self._c10d_of(ranks):
                results = self._threads.take_turns(
                    lambda rank: contexts[rank].run(on_rank, rank), ranks, self._starts
                )
        finally:
            self._threads.meetings.clear()
            self.random.finish(self._starts)
        return joined(dict(zip(ranks, values_of_ranks(results), strict=True)), parts, what)

    def rank_map(self, fn: Callable[[int], Any]) -> Any:
        """`fn(rank)` as each rank: its tensors as a LocalTensor, its numbers as one or per rank. It may call
        collectives."""
        return self.across(fn, [local_int({r: r for r in self.ranks})], what=_name(fn), ranks=self.ranks)

    def tensor_map(self, tensor: torch.Tensor, fn: Callable[[int, torch.Tensor], Any]) -> Any:
        """`fn(rank, its tensor)` as each rank. Ranks for which it gives None hold nothing of the result."""
        _refuse_grad(tensor)
        ranks = ranks_of(tensor) or self.ranks
        results: dict[int, Any] = {}

        def run(rank: int, shard: torch.Tensor) -> None:
            results[rank] = fn(rank, shard)

        self.across(run, [local_int({r: r for r in ranks}), tensor], what=_name(fn), ranks=ranks)
        return joined({r: v for r, v in results.items() if v is not None}, RankParts(), _name(fn))


class _RankMode(TorchDispatchMode):
    """In a rank's thread: the mode sees the ops."""

    def __init__(self, mode: LocalTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, op: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return self._mode.__torch_dispatch__(op, types, args, kwargs)


def _below_autograd(op: Any, /, *args: object, **kwargs: object) -> Any:
    with DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


# What the core knows of meshes as one rank, or as all of these.
_meshes: dict[int | tuple[int, ...], MeshTables] = {}


def _knowing_meshes(ranks: int | tuple[int, ...]) -> AbstractContextManager[None]:
    return using_values((mesh_tables, _meshes.setdefault(ranks, MeshTables())))


def _counted(counted: bool) -> AbstractContextManager[None]:
    """Of all ranks, the collectives and replicated ops of one are counted; what has warned is known to all."""
    if counted:
        return nullcontext()
    warned = fallback.seen.get().warned
    return using_values((comm.counters, []), (fallback.seen, fallback.FallbackLog(warned=warned)))


def _others(types: Iterable[type], allowed: type = LocalTensor) -> bool:
    """Whether other tensor subclasses have a say. (torch lists plain tensors at times.)"""
    return any(not issubclass(kind, (LocalTensor, allowed)) and not is_plain(kind) for kind in types)


def _generators(arguments: Any) -> list[torch.Generator]:
    return [x for x in tree_leaves(arguments) if isinstance(x, torch.Generator)]


def _name(fn: Call) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _refuse_grad(*arguments: object) -> None:
    if torch.is_grad_enabled():
        for value in tree_leaves(arguments):
            if isinstance(value, LocalTensor) and value.requires_grad:
                raise SimulationError(
                    "got a LocalTensor that requires grad for a function run per rank, which autograd cannot see "
                    "into: pass it detached, or run it under torch.no_grad()"
                )


# ---- the same where nothing is simulated ----


def _mode_for_all() -> LocalTensorMode | None:
    mode = rank_answers.local_tensor_mode()
    return None if mode is None or mode.current is not None else mode


def rank_map(fn: Callable[[int], Any]) -> Any:
    """`LocalTensorMode.rank_map`; without a mode, `fn` of this process's rank."""
    mode = _mode_for_all()
    return fn(dist.get_rank()) if mode is None else mode.rank_map(fn)


def tensor_map(tensor: torch.Tensor, fn: Callable[[int, torch.Tensor], Any]) -> Any:
    """`LocalTensorMode.tensor_map`; without a mode, `fn` of this process's rank and tensor."""
    mode = _mode_for_all()
    return fn(dist.get_rank(), tensor) if mode is None else mode.tensor_map(tensor, fn)


def maybe_run_for_local_tensor(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of a rank's tensors and numbers, without side effects.

    With LocalTensors or rank-dependent numbers as arguments, in a LocalTensorMode, it runs as each rank
    with that rank's. Otherwise it is the function itself.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        mode = _mode_for_all()
        if mode is None or ranks_of(args, kwargs) is None:
            return fn(*args, **kwargs)
        _refuse_grad(args, kwargs)
        return cast("R", mode.across(fn, args, dict(kwargs), what=_name(fn)))

    return call


def per_rank(value: object, ranks: Iterable[int]) -> list[Any]:
    """`value` as each of `ranks` has it."""
    parts = RankParts()
    return [parts.of(value, rank) for rank in ranks]
