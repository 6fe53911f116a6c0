"""LocalTensorMode runs the ranks of a world as one program; local_tensor.py explains how to use it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from dtbench_core.errors import SimulationError, describe_ranks
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Args, Call, Kwargs
from dtbench_core.simulate.dtensor_parts import CoreParts
from dtbench_core.simulate.group import NAMESPACES, group_of, issue
from dtbench_core.simulate.local_int import local_int
from dtbench_core.simulate.local_random import RankStates, default_generators, set_generator_states
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
from dtbench_core.simulate.rank_answers import answers_installed
from dtbench_core.simulate.rank_runner import RankRunner, generators_in, suspended, use_mesh_tables
from dtbench_core.torch_compat import DisableTorchFunction

P = ParamSpec("P")
R = TypeVar("R")

_active: LocalTensorMode | None = None


def local_tensor_mode() -> LocalTensorMode | None:
    """Returns the active mode, if any."""
    return _active


class LocalTensorMode(RankRunner):
    """`with LocalTensorMode(4):` runs the program inside once, for ranks 0 to 3 of a fake world.

    Args:
        ranks: how many ranks from 0 on, or which global ranks. A collective needs all ranks of its group.

    Raises:
        SimulationError: no rank; on entry: no process group, one with fewer ranks, or a mode is already active.
    """

    def __enter__(self) -> LocalTensorMode:
        global _active
        if not dist.is_initialized() or dist.get_world_size() <= self.ranks[-1]:
            raise SimulationError(
                f"got a LocalTensorMode of ranks {describe_ranks(self.ranks)} "
                + (f"in a world of {dist.get_world_size()}" if dist.is_initialized() else "without a world")
                + ', expected one that has them: dist.init_process_group("fake", rank=0, '
                f"world_size={self.ranks[-1] + 1}, store=FakeStore()) (torch.testing._internal.distributed.fake_pg)"
            )
        if _active is not None:
            raise SimulationError(
                "got a LocalTensorMode inside another, expected one at a time: take some of its ranks with tensor_map"
            )
        with ExitStack() as stack:
            stack.enter_context(answers_installed(self))
            stack.enter_context(use_mesh_tables(self.ranks))
            # The state of a rank belongs to its thread, and autograd would run a GPU's backward in its own thread.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            self.random = RankStates(self.ranks)
            super().__enter__()
            self._exit_stack, _active = stack.pop_all(), self
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        global _active
        super().__exit__(kind, error, trace)
        self._exit_stack.close()
        self._threads.close()
        self._tables, _active = {}, None

    # ---- ops ----

    def __torch_dispatch__(self, op: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if suspended.get():
            return op(*args, **kwargs)
        if self.current_rank is not None:
            return self._dispatch_as_rank(self.current_rank, op, types, args, kwargs)
        if _has_other_types(types, Wrapper):
            return NotImplemented
        if any(issubclass(kind, Wrapper) for kind in types):
            return self._run_as_ranks(op, args, kwargs, functools.partial(_below_autograd, op))
        if op.namespace in NAMESPACES:
            group = group_of(op, args, kwargs)
            for rank in ranks_of(args, kwargs) or self.ranks:
                if group is not None:
                    self.rank_group(group, rank)  # raises before any rank has sent
            return self._run_as_ranks(op, args, kwargs, functools.partial(self._issue, op))
        return self._dispatch_for_all(op, args, kwargs)

    def _dispatch_for_all(self, op: Any, args: Args, kwargs: Kwargs) -> Any:
        ranks = ranks_of(args, kwargs)
        if is_random(op):
            return self._draw(op, args, kwargs, ranks or self.ranks)
        if ranks is None:
            leaves = tree_leaves((args, kwargs))
            if op is torch.ops.aten.lift_fresh.default:  # torch.tensor(...)
                return LocalTensor({rank: args[0].clone() for rank in self.ranks})
            if (
                any(isinstance(leaf, torch.Tensor) for leaf in leaves)
                or any(isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in leaves)
                or not any("Tensor" in str(r.type) for r in op._schema.returns)
            ):
                return op(*args, **kwargs)
        return run_on_each(op, args, kwargs, ranks or self.ranks)

    def _run_as_ranks(self, op: Any, args: Args, kwargs: Kwargs, run: Call) -> Any:
        """Runs an op on DTensors, or a collective, once as each rank.

        Args:
            run: runs `op` with one rank's arguments.
        """
        copies, name = PlainCopies(op, args, kwargs), str(op)
        parts = CoreParts(self.ranks, copies)
        result = self.call_as_ranks(run, args, kwargs, name=name, parts=parts, sees_ops=False)
        if op._schema.is_mutable:
            parts.update_written(name)
        copies.write_back(name)
        return result

    def _draw(self, op: Any, args: Args, kwargs: Kwargs, ranks: Sequence[int]) -> Any:
        """Runs a random op with each rank's random state."""
        states = self.random.start(generators_in((args, kwargs)) or default_generators())
        try:
            return run_on_each(op, args, kwargs, ranks, lambda rank: self.random.as_rank(rank, states))
        finally:
            self.random.finish(states)

    def _dispatch_as_rank(self, rank: int, op: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        if LocalTensor in types:
            raise SimulationError(
                f"{op} got a LocalTensor in code that runs as rank {rank}: take its part, x.shard({rank}), or pass it "
                "as an argument of the function"
            )
        if _has_other_types(types):
            return NotImplemented
        if op.namespace in NAMESPACES:
            return self._issue(op, *args, **kwargs)
        if is_random(op):
            for generator in generators_in((args, kwargs)):
                if generator not in self._starts:
                    self._starts[generator] = self.random.states_of(generator)
                    set_generator_states({generator: self._starts[generator][rank]})
        return op(*args, **kwargs)

    def _issue(self, op: Any, /, *args: object, **kwargs: object) -> Any:
        """Issues a collective as the running rank."""
        rank, group = self.current_rank, group_of(op, args, kwargs)
        assert rank is not None
        return issue(op, args, kwargs, None if group is None else self.rank_group(group, rank))

    # ---- functions of the user ----

    def rank_map(self, fn: Callable[[int], Any]) -> Any:
        """Calls `fn(rank)` as each rank and joins the results.

        Tensors become a LocalTensor; numbers become one number, or one per rank where they differ. `fn` may call
        collectives.
        """
        rank = local_int({rank: rank for rank in self.ranks})
        return self.call_as_ranks(fn, [rank], name=_name_of(fn), ranks=self.ranks)

    def tensor_map(self, tensor: torch.Tensor, fn: Callable[[int, torch.Tensor], Any]) -> Any:
        """Calls `fn(rank, the rank's tensor)` as each rank and joins the results.

        Ranks for which `fn` returns None hold nothing of the result.
        """
        _refuse_grad(tensor)
        ranks = ranks_of(tensor) or self.ranks
        results: dict[int, Any] = {}

        def run(rank: int, shard: torch.Tensor) -> None:
            results[rank] = fn(rank, shard)

        self.call_as_ranks(run, [local_int({r: r for r in ranks}), tensor], name=_name_of(fn), ranks=ranks)
        return joined({r: v for r, v in results.items() if v is not None}, RankParts(), _name_of(fn))


def _below_autograd(op: Any, /, *args: object, **kwargs: object) -> Any:
    with DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


def _has_other_types(types: Iterable[type], allowed: type = LocalTensor) -> bool:
    """Whether tensor subclasses other than LocalTensor and `allowed` are involved. (torch may list plain tensors.)"""
    return any(not issubclass(kind, (LocalTensor, allowed)) and not is_plain(kind) for kind in types)


def _name_of(fn: Call) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _refuse_grad(*arguments: object) -> None:
    if torch.is_grad_enabled():
        for value in tree_leaves(arguments):
            if isinstance(value, LocalTensor) and value.requires_grad:
                raise SimulationError(
                    "got a LocalTensor that requires grad for a function run per rank, whose ops autograd does "
                    "not record: pass it detached, or run it under torch.no_grad()"
                )


# ---- the same functions, with or without a mode ----


def _mode_for_all() -> LocalTensorMode | None:
    return None if _active is None or _active.current_rank is not None else _active


def rank_map(fn: Callable[[int], Any]) -> Any:
    """Calls `LocalTensorMode.rank_map`; without a mode, calls `fn` with this process's rank."""
    mode = _mode_for_all()
    return fn(dist.get_rank()) if mode is None else mode.rank_map(fn)


def tensor_map(tensor: torch.Tensor, fn: Callable[[int, torch.Tensor], Any]) -> Any:
    """Calls `LocalTensorMode.tensor_map`; without a mode, calls `fn` with this process's rank and tensor."""
    mode = _mode_for_all()
    return fn(dist.get_rank(), tensor) if mode is None else mode.tensor_map(tensor, fn)


def maybe_run_for_local_tensor(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of one rank's tensors and numbers that has no side effects.

    In a LocalTensorMode, if an argument is a LocalTensor or a rank-dependent number, the function is called as each
    rank with that rank's values. Otherwise it is called directly.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        mode = _mode_for_all()
        if mode is None or ranks_of(args, kwargs) is None:
            return fn(*args, **kwargs)
        _refuse_grad(args, kwargs)
        return cast("R", mode.call_as_ranks(fn, args, dict(kwargs), name=_name_of(fn)))

    return call


def per_rank(value: object, ranks: Iterable[int]) -> list[Any]:
    """Returns the value of each of `ranks`."""
    parts = RankParts()
    return [parts.part_of(value, rank) for rank in ranks]
