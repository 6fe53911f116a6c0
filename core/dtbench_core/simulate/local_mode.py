"""LocalTensorMode: the ranks of a world, run as one program. See local_tensor.py for how to use it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from dtbench_core.errors import SimulationError, describe_ranks
from dtbench_core.layout.mesh import MeshTables, mesh_tables
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Args, Call, Kwargs
from dtbench_core.runtime import entered
from dtbench_core.simulate import rank_answers
from dtbench_core.simulate.dtensor_parts import CoreParts
from dtbench_core.simulate.group import Arrival, describe, name_ranks
from dtbench_core.simulate.local_collectives import NAMESPACES, issue
from dtbench_core.simulate.local_int import local_int
from dtbench_core.simulate.local_random import RankStates, default_generators
from dtbench_core.simulate.local_tensor import (
    LocalTensor,
    Parts,
    PlainCopies,
    is_plain,
    is_random,
    joined,
    ranks_of,
    run_on_each,
)
from dtbench_core.simulate.rank_runs import Inputs, RankRun, counted_once, meet, verdict
from dtbench_core.torch_compat import DisableTorchFunction

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
        self._run: RankRun | None = None  # the rank that runs alone
        self._alone = False  # by the user's wish
        self._suspended = False

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
            self.random = RankStates(self.ranks)
            super().__enter__()
            self._leave = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._leave.close()

    # ---- where code runs ----

    @property
    def current(self) -> int | None:
        """The rank that code runs as, None where it stands for all."""
        return None if self._run is None else self._run.rank

    @property
    def for_all(self) -> bool:
        """Whether code stands for all ranks."""
        return self._run is None and not self._suspended

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Inside, ops are torch's own again, and tensors made there are plain. (The name is torch's.)"""
        kept, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = kept

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Inside, code runs as `rank` alone: its coordinates and random numbers, plain tensors.

        Take its part of a LocalTensor with `shard(rank)`. A collective is an error: the others are not there.
        """
        if rank not in self.ranks:
            raise SimulationError(f"got rank {rank}, expected one of {describe_ranks(self.ranks)}")
        states = self.random.start(default_generators())
        self._alone = True
        try:
            with self._as(RankRun(rank), states, states):
                yield
        finally:
            self._alone = False
            self.random.finish(states)

    @contextmanager
    def _as(
        self, run: RankRun, states: dict[Any, Any], begin: dict[Any, Any], seen: bool = True
    ) -> Iterator[None]:
        """Code runs as `run`'s rank, with the random `states`; `begin` holds those of all ranks."""
        if self._run is not None:
            raise SimulationError(f"got rank {run.rank} inside code that runs as rank {self._run.rank}")
        self._run, self._states, self._begin = run, states, begin
        try:
            with (
                _knowing_meshes(run.rank),
                self._seen() if seen else nullcontext(),
                self.random.as_rank(run.rank, states),
            ):
                yield
        finally:
            self._run = None

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """This mode sees the ops inside: torch takes a mode off while it handles one."""
        if self in _get_current_dispatch_mode_stack():
            yield
            return
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    # ---- ops ----

    def __torch_dispatch__(self, op: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended:
            return op(*args, **kwargs)
        if self._run is not None:
            return self._dispatch_alone(self._run, op, types, args, kwargs)
        if _others(types, Wrapper):
            return NotImplemented
        if any(issubclass(kind, Wrapper) for kind in types):
            return self._dispatch_core(op, args, kwargs)
        if op.namespace in NAMESPACES:
            copies = PlainCopies(op, args, kwargs)
            parts, issue_one = CoreParts(self.ranks, copies), functools.partial(self._issue, op)
            result = self.across(issue_one, args, kwargs, what=str(op), parts=parts, keep=False)
            copies.write_back(str(op))
            return result
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

    def _dispatch_core(self, op: Any, args: Args, kwargs: Kwargs) -> Any:
        """An op on DTensors: each rank's on its own, through the core's dispatch."""
        copies, what = PlainCopies(op, args, kwargs), str(op)
        parts = CoreParts(self.ranks, copies)

        def run(*args: Any, **kwargs: Any) -> Any:
            with DisableTorchFunction():  # below autograd, as here
                return op(*args, **kwargs)

        # Inputs are put back whatever the schema says: batch norm's does not tell that it writes.
        result = self.across(run, args, kwargs, what=what, parts=parts, seen=False)
        if op._schema.is_mutable:
            parts.settle(what)
        copies.write_back(what)
        return result

    def _draw(self, op: Any, args: Args, kwargs: Kwargs, ranks: Sequence[int]) -> Any:
        states = self.random.start(_generators((args, kwargs)) or default_generators())

        def call(rank: int, run: Callable[[], Any]) -> Any:
            with self.random.as_rank(rank, states):
                return run()

        try:
            return run_on_each(op, args, kwargs, ranks, call)
        finally:
            self.random.finish(states)

    def _dispatch_alone(self, run: RankRun, op: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        if LocalTensor in types:
            raise SimulationError(
                f"{op} got a LocalTensor in code that runs as rank {run.rank}: take its part, x.shard({run.rank}), or "
                "pass it as an argument of the function"
            )
        if _others(types):
            return NotImplemented
        if op.namespace in NAMESPACES:
            return self._issue(op, *args, **kwargs)
        if is_random(op):
            for given in _generators((args, kwargs)):
                if given not in self._states:
                    self._states[given] = dict(self._begin.setdefault(given, self.random.of(given)))
        return op(*args, **kwargs)

    # ---- collectives ----

    def _issue(self, op: Any, /, *args: object, **kwargs: object) -> Any:
        run = self._run
        assert run is not None
        return issue(op, args, kwargs, lambda group: rank_answers.rank_group(group, run.rank))

    def arrive(self, arrival: Arrival) -> dist.Work:
        """A collective called by the rank that runs."""
        if self._run is None or self._alone:
            raise SimulationError(
                f"{describe(arrival.signature)} was called on the group of {name_ranks(arrival.ranks)}, in code that "
                "runs as one rank alone: run it in a function under rank_map, which lets the others come"
            )
        return self._run.arrive(arrival)

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
        keep: bool = True,
        seen: bool = True,
    ) -> Any:
        """`fn` once as each rank, with the rank's parts of the arguments; the results as one.

        Args:
            what: `fn`, for messages.
            ranks: by default those of the arguments, or all.
            keep: put inputs back before a rank starts again; not needed where `fn` only reads them.
            seen: whether this mode sees the ops of `fn`; not needed for the core, whose groups are the rank's.

        Raises:
            SimulationError: ranks diverged, or results that cannot be one.
            Exception: what `fn` raised on every rank.
        """
        if self._run is not None:
            raise SimulationError(f"{what} was called in code that runs as rank {self._run.rank}")
        parts = parts or CoreParts(self.ranks)
        ranks = ranks or parts.ranks_of(args, kwargs) or ranks_of(args, kwargs) or self.ranks
        runs = {rank: RankRun(rank) for rank in ranks}
        inputs = Inputs() if keep else None
        begin = self.random.start([*default_generators(), *_generators((args, kwargs))])
        ended = {generator: dict(states) for generator, states in begin.items()}

        def attempt(run: RankRun) -> None:
            states = {generator: dict(held) for generator, held in begin.items()}
            with counted_once(run, run.rank == ranks[0]), self._as(run, states, begin, seen):
                mine, named = parts.of((args, kwargs or {}), run.rank)
                if inputs is not None:
                    with self.disable():
                        inputs.keep((mine, named))
                run.attempt(lambda: fn(*mine, **named))
                if not run.over and inputs is not None:
                    with self.disable():
                        inputs.put_back()
            for generator, held in states.items():
                if run.over:
                    ended.setdefault(generator, dict(begin[generator]))[run.rank] = held[run.rank]

        try:
            self._until_over(runs, attempt)
        finally:
            self.random.finish(ended)
        verdict(runs)
        return joined({rank: run.result for rank, run in runs.items()}, parts, what)

    def _until_over(self, runs: dict[int, RankRun], attempt: Callable[[RankRun], None]) -> None:
        """Attempts all runs, with collectives between, until they are over; one that fails or is stuck ends it."""
        while True:
            for run in runs.values():
                if not run.over:
                    attempt(run)
            if all(run.over for run in runs.values()) or any(run.error for run in runs.values()):
                return
            with self.disable():
                if not meet(runs):
                    return

    def rank_map(self, fn: Callable[[int], Any]) -> Any:
        """`fn(rank)` as each rank: its tensors as a LocalTensor, its numbers as one or per rank.

        Args:
            fn: without side effects, as it may run several times. It may call collectives.
        """
        return self.across(fn, [local_int({r: r for r in self.ranks})], what=_name(fn), ranks=self.ranks)

    def tensor_map(self, tensor: torch.Tensor, fn: Callable[[int, torch.Tensor], Any]) -> Any:
        """`fn(rank, its tensor)` as each rank. Ranks for which it gives None hold nothing of the result."""
        _refuse_grad(tensor)
        ranks = ranks_of(tensor) or self.ranks
        kept: dict[int, Any] = {}

        def run(rank: int, held: torch.Tensor) -> None:
            kept[rank] = fn(rank, held)

        self.across(run, [local_int({r: r for r in ranks}), tensor], what=_name(fn), ranks=ranks)
        return joined({r: v for r, v in kept.items() if v is not None}, Parts(), _name(fn))


# What the core knows of meshes as one rank, or as all of these.
_meshes: dict[int | tuple[int, ...], MeshTables] = {}


def _knowing_meshes(ranks: int | tuple[int, ...]) -> AbstractContextManager[None]:
    return entered((mesh_tables, _meshes.setdefault(ranks, MeshTables())))


def _others(types: Iterable[type], known: type = LocalTensor) -> bool:
    """Whether other tensor subclasses have a say. (torch lists plain tensors at times.)"""
    return any(not issubclass(kind, (LocalTensor, known)) and not is_plain(kind) for kind in types)


def _generators(given: Any) -> list[torch.Generator]:
    """Those among the arguments of a call."""
    return [x for x in tree_leaves(given) if isinstance(x, torch.Generator)]


def _name(fn: Call) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _refuse_grad(*given: object) -> None:
    if torch.is_grad_enabled():
        for value in tree_leaves(given):
            if isinstance(value, LocalTensor) and value.requires_grad:
                raise SimulationError(
                    "got a LocalTensor that requires grad for a function run per rank, which autograd cannot see "
                    "into: pass it detached, or run it under torch.no_grad()"
                )


# ---- the same where nothing is simulated ----


def local_tensor_mode() -> LocalTensorMode | None:
    """The mode that is active, if any."""
    mode = rank_answers.active()
    return mode if isinstance(mode, LocalTensorMode) else None


def get_local_tensor_mode_list() -> list[LocalTensorMode]:
    """The modes that are active, of which there is one at most. (The name is torch's, as those below.)"""
    mode = local_tensor_mode()
    return [] if mode is None else [mode]


def enabled_local_tensor_mode() -> LocalTensorMode | None:
    """The mode that is active and sees ops: not inside its `disable()`."""
    mode = local_tensor_mode()
    return None if mode is None or mode._suspended else mode


def maybe_disable_local_tensor_mode() -> AbstractContextManager[None]:
    """`disable()` of the mode that is active, if any."""
    mode = local_tensor_mode()
    return nullcontext() if mode is None else mode.disable()


def maybe_enable_local_tracker(
    device_type: str, distribute_region_enabled: bool, spec: object, generator: torch.Generator | None
) -> AbstractContextManager[None] | None:
    """A context for random ops on DTensors inside a mode, None without one. A mode keeps the states of all ranks and
    each of these draws its part as on one device, so that there is nothing for it to do."""
    return None if enabled_local_tensor_mode() is None else nullcontext()


def get_generator_seed_for_device_type(device_type: str) -> int:
    """The seed in the state of the device type's default generator; inside a mode, a number per rank where they
    differ."""
    module = torch if device_type == "cpu" else torch.get_device_module(device_type)
    seed: int = rank_map(lambda _: int(module.get_rng_state()[:8].view(torch.int64).item()))
    return seed


def reconcile_args(args: Args, kwargs: Kwargs | None = None) -> tuple[Args, Kwargs]:
    """(args, kwargs) with the tensor that all ranks have in the place of each LocalTensor.

    Raises:
        RankDependentError: one that differs between ranks.
    """
    made: tuple[Args, Kwargs] = tree_map(
        lambda leaf: leaf.reconcile() if isinstance(leaf, LocalTensor) else leaf, (args, kwargs or {})
    )
    return made


def _mode_for_all() -> LocalTensorMode | None:
    mode = local_tensor_mode()
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
        result: R = mode.across(fn, args, dict(kwargs), what=_name(fn))
        return result

    return call


def per_rank(value: object, ranks: Iterable[int]) -> list[Any]:
    """`value` as each of `ranks` has it."""
    parts = Parts()
    return [parts.of(value, rank) for rank in ranks]
