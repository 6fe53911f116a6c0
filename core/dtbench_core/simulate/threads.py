"""Runs the ranks of a world as threads of this process that take turns: exactly one runs at a time.

    with ThreadWorld(4) as world:
        world.run(train_step, data)     # on every rank; returns the ranks' results

A rank runs until it waits for a collective; then the next rank that can run takes over. So a run is deterministic and
a collective costs a few thread switches.

A hang is detected at once: no rank can run, and at least one waits. The waiting ranks are then stopped with a
`SimulationError`. It names the collective in which each waits, and what the other ranks did instead.

On every rank `torch.distributed` is initialised, with groups, meshes, functional collectives and
`torch.distributed.tensor` as in a process of its own (group.py has the collectives). State that torch and the core
keep per process is kept per rank: see Note [Process state]. Between runs, the process has its own `torch.distributed`
back, initialised or not. Ranks cannot use the process's groups, and a rank cannot start a world.

Tensors live on the CPU. A CUDA device works too if no backward pass calls collectives, since torch runs the backward
of a CUDA device in threads of its own.

Note [Process state]: during a run, the module attribute that holds c10d's table of groups is replaced by an object
that looks up the running thread's table. c10d's C++ table of group names has a switch for the same purpose. The
default random generators, including CUDA's once it is initialised, are swapped when ranks take turns. The core keeps
its state in context variables (runtime.py), of which each thread has its own.

Note [Locks]: a rank that waits in a collective keeps the locks it holds. If the running rank needs one of them, it
blocks, and no other rank gets a turn: a deadlock. The only such lock known to be held during collectives by library
code is that of `functools.cached_property` before Python 3.12. It is not taken during a run.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dtbench_core import comm
from dtbench_core.dispatch import fallback
from dtbench_core.errors import SimulationError
from dtbench_core.layout import random
from dtbench_core.op_types import Call
from dtbench_core.parallel import region
from dtbench_core.runtime import initial_values, using_values
from dtbench_core.simulate import c10d_state
from dtbench_core.simulate.group import (
    CollectiveCall,
    Signature,
    SimulatedGroup,
    combine,
    describe,
    describe_actions,
    mismatch,
    name_ranks,
)
from dtbench_core.simulate.local_random import States, default_generators, set_generator_states

_BACKEND = "dtbench_threads"
_thread_state = threading.local()  # .rank: the SimulatedRank of the thread
_active_run = threading.Lock()  # only one world at a time can replace the process state


@dataclass(frozen=True)
class RankResult:
    """The outcome of a run on one rank.

    Attributes:
        rank: the global rank.
        value: returned by the function.
        error: raised by the function.
        stopped: whether the rank waited in a collective that could not complete, or issued one that contradicts the
            other ranks'. On real ranks it would hang. A stopped rank that caught the error may still return a value.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    stopped: bool = False


# ---- collectives that wait for ranks ----


@dataclass(slots=True, eq=False)
class PendingCollective:
    """A collective that some ranks of a group have called and others have not.

    Attributes:
        signature: the part of the call on which all ranks must agree.
        calls: arguments of each rank's call by group rank; None for a rank that has not called it.
        done: whether it has been computed.
        error: why it cannot complete.
        waiters: the ranks that wait for it.
    """

    signature: Signature
    calls: list[Any]
    done: bool = False
    error: str | None = None
    waiters: list[SimulatedRank] = field(default_factory=list)


class ThreadWork(dist.Work):
    """The Work of one rank's call. `wait` lets the other ranks run until all have called the collective."""

    def __init__(self, pending: PendingCollective, rank: SimulatedRank, results: Any) -> None:
        super().__init__()
        self._pending, self._rank, self._results = pending, rank, results

    def wait(self, timeout: object = None) -> bool:
        """Waits for the collective.

        Raises:
            SimulationError: it cannot complete.
        """
        if not self._pending.done or self._pending.error is not None:
            self._rank.wait(self._pending)
        return True

    def is_completed(self) -> bool:
        return self._pending.done

    def get_future(self) -> Any:
        """Waits, and returns a completed future."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


class Rendezvous:
    """Matches the calls of all ranks of one process group.

    Attributes:
        ranks: global ranks, by group rank.
        open: index of the call -> the collective. The n-th calls of all ranks belong together.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.open: dict[int, PendingCollective] = {}
        self._call_counts = [0] * len(ranks)  # by group rank

    def submit(self, call: CollectiveCall) -> PendingCollective:
        """Records a rank's call, and computes the collective if all ranks have called it.

        A failure is stored in the `error` of the returned collective.
        """
        index = self._call_counts[call.group_rank]
        self._call_counts[call.group_rank] += 1
        pending = self.open.setdefault(index, PendingCollective(call.signature, [None] * len(self.ranks)))
        if pending.signature != call.signature:
            pending.error = mismatch(
                call,
                [rank for rank, args in zip(self.ranks, pending.calls, strict=True) if args is not None],
                pending.signature,
            )
            return pending
        pending.calls[call.group_rank] = call.arguments
        if None not in pending.calls:
            pending.error = combine(call, pending.calls)
            pending.done, pending.calls = True, []
            del self.open[index]
        return pending


# ---- ranks ----


class SimulatedRank:
    """A simulated rank: its thread, and its random states while other ranks run.

    Attributes:
        baton: a lock that is free when this rank may run.
        states: generator -> state, saved when the rank's turn ends.
        waiting: the collective for which it waits.
        stopped: see RankResult.
    """

    def __init__(self, threads: RankThreads, rank: int) -> None:
        self.threads, self.rank = threads, rank
        self.baton = threading.Lock()
        self.baton.acquire()
        self.states: States = {}
        self.waiting: PendingCollective | None = None
        self.stopped = False
        self.result: RankResult | None = None
        self.thread = threading.Thread(target=self._serve, name=f"simulated-rank-{rank}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        _thread_state.rank = self
        self.baton.acquire()
        while (fn := self.threads.fn) is not None:
            self.stopped, self.states = False, {}
            self._restore_states()
            self.result = self._run(fn)
            # The function may hold large objects, which must not stay alive until the next run.
            del fn
            self._save_states()
            self.threads.pass_turn()
            self.baton.acquire()

    def _run(self, fn: Callable[[int], Any]) -> RankResult:
        try:
            with (
                torch.inference_mode(self.threads.inference),  # turns autograd's threads on
                torch.autograd.set_multithreading_enabled(False),  # a CUDA backward must run in this thread
                torch.set_grad_enabled(self.threads.grad),
            ):
                return RankResult(self.rank, fn(self.rank), None, self.stopped)
        except BaseException as error:
            return RankResult(self.rank, None, error, self.stopped)

    def _restore_states(self) -> None:
        set_generator_states(
            {g: states[self.rank] for g, states in self.threads.starts.items()} | self.states
        )

    def _save_states(self) -> None:
        self.states = {g: g.get_state() for g in {*self.threads.starts, *default_generators()}}

    def submit(self, call: CollectiveCall) -> dist.Work:
        """Issues a collective as this rank and returns its Work.

        Raises:
            SimulationError: another thread calls it, a rank of the group does not take part, or the run has failed
                already.
        """
        threads = self.threads
        if running_rank() is not self or self not in threads.participants:
            raise SimulationError(
                f"{describe(call.signature)} was called on a group of simulated {name_ranks([self.rank])}, but not "
                "by that rank's thread during a run of its world; use the groups that the rank made, inside the "
                "function that the world runs"
            )
        participants = [participant.rank for participant in threads.participants]
        if missing := sorted({*call.ranks} - {*participants}):
            raise SimulationError(
                f"{describe(call.signature)} of {name_ranks(call.ranks)} needs {name_ranks(missing)} too, but "
                f"only {name_ranks(participants)} take part: simulate all ranks of the group"
            )
        if threads.failure is not None:
            self._stop()
        pending = threads.rendezvous(call.group_name, call.ranks).submit(call)
        if pending.error is not None and threads.failure is None:
            threads.failure = pending.error
        if (pending.done or pending.error is not None) and pending.waiters:
            threads.ready.extend(pending.waiters)
            pending.waiters = []
        return ThreadWork(pending, self, call.results)

    def wait(self, pending: PendingCollective) -> None:
        """Lets other ranks run until `pending` is done."""
        if not pending.done and self.threads.failure is None:
            self.waiting = pending
            pending.waiters.append(self)
            next_rank = self.threads.next_rank()
            if next_rank is not self:
                self._save_states()
                next_rank.baton.release()
                self.baton.acquire()
                self._restore_states()
            self.waiting = None
        if pending.error is not None or not pending.done:
            self._stop()

    def _stop(self) -> None:
        self.stopped = True
        raise SimulationError(self.threads.failure or "the collective cannot complete")


def running_rank() -> SimulatedRank | None:
    """Returns the simulated rank whose thread calls this; None in other threads."""
    return getattr(_thread_state, "rank", None)


class RankThreads:
    """The threads of simulated ranks, started on first use, and the collectives that their ranks call.

    Attributes:
        fn: the function of the present run; None between runs.
        starts: generator -> rank -> the state from which the rank draws.
        grad, inference: the caller's autograd modes.
        failure: why the run cannot complete.
        ready: the ranks that can run, in order.
        participants: the ranks of the present run.
        open_rendezvous: (group name, global ranks) -> the calls of that group.
        interrupted: whether a run was left by an exception while its ranks were running.
    """

    def __init__(self) -> None:
        self.fn: Callable[[int], Any] | None = None
        self.starts: dict[torch.Generator, dict[int, torch.Tensor]] = {}
        self.grad, self.inference = True, False
        self.failure: str | None = None
        self.ready: deque[SimulatedRank] = deque()
        self.participants: list[SimulatedRank] = []
        self.open_rendezvous: dict[tuple[str, tuple[int, ...]], Rendezvous] = {}
        self._ranks: dict[int, SimulatedRank] = {}
        self.interrupted = False
        self._caller = threading.Lock()  # free when the run has ended
        self._caller.acquire()

    def rendezvous(self, group_name: str, ranks: tuple[int, ...]) -> Rendezvous:
        return self.open_rendezvous.setdefault((group_name, ranks), Rendezvous(ranks))

    def take_turns(
        self,
        fn: Callable[[int], Any],
        ranks: Sequence[int],
        starts: dict[torch.Generator, dict[int, torch.Tensor]],
    ) -> list[RankResult]:
        """Calls `fn(rank)` on each of `ranks`, in the caller's grad mode, and returns their results in that order.

        Args:
            starts: generator -> rank -> the state from which the rank draws. On return, the state in which it ended.

        Raises:
            SimulationError: called by a simulated rank, or after an interrupted run.
        """
        if running_rank() is not None:
            raise SimulationError(
                "a simulated rank cannot start a world: call it outside the ranks' function"
            )
        if self.interrupted:
            raise SimulationError("this world was interrupted while its ranks ran: make a new ThreadWorld")
        with _active_run, _without_property_lock():
            for rank in ranks:
                if rank not in self._ranks:
                    c10d_state.register_device_guard()
                    self._ranks[rank] = SimulatedRank(self, rank)
            self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self.fn, self.failure, self.starts = fn, None, starts
            self.participants = [self._ranks[rank] for rank in ranks]
            self.ready = deque(self.participants)
            try:
                self.ready.popleft().baton.release()
                self._caller.acquire()
            except BaseException:
                self.interrupted = True  # the ranks' threads are still running
                raise
            participants, self.participants, self.fn, self.starts = self.participants, [], None, {}
            for generator, states in starts.items():
                states.update({m.rank: m.states[generator] for m in participants if generator in m.states})
            results = [participant.result for participant in participants]
            for participant in participants:
                participant.result = None
            return [result for result in results if result is not None]

    # ---- turns ----

    def next_rank(self) -> SimulatedRank:
        """Returns the rank to run next, when the running rank has to wait."""
        if not self.ready:
            self._stop_waiting()
        return self.ready.popleft()

    def pass_turn(self) -> None:
        """Lets the next rank run, or the caller if all ranks have ended."""
        if not self.ready and any(rank.waiting is not None for rank in self.participants):
            self._stop_waiting()
        (self.ready.popleft().baton if self.ready else self._caller).release()

    def _stop_waiting(self) -> None:
        waiting = [rank for rank in self.participants if rank.waiting is not None]
        if self.failure is None:
            self.failure = self._describe_hang()
        for rank in waiting:
            assert rank.waiting is not None
            rank.waiting.waiters = []
        self.ready.extend(waiting)

    def _describe_hang(self) -> str:
        """Describes the hang, e.g. `hang: rank 2 raised ValueError(...) while ranks 0, 1 waited in all_reduce(...)`."""
        ended = describe_actions({r.rank: _action(r.result) for r in self.participants if r.waiting is None})
        waited: dict[tuple[str, tuple[str, tuple[int, ...]]], list[int]] = {}
        for rank in self.participants:
            if rank.waiting is not None:
                group = next(
                    key for key, calls in self.open_rendezvous.items() if rank.waiting in calls.open.values()
                )
                waited.setdefault((describe(rank.waiting.signature), group), []).append(rank.rank)
        has_several_groups = len({group for _, group in waited}) > 1
        waits = ", ".join(
            f"{name_ranks(waiting_ranks)} waited in {collective}"
            + (f" of group {name!r}" if has_several_groups else "")
            + (f" of {name_ranks(group_ranks)}" if len(group_ranks) < len(self.participants) else "")
            for (collective, (name, group_ranks)), waiting_ranks in waited.items()
        )
        return f"hang: {', '.join(ended)} while {waits}" if ended else f"hang: {waits}"

    def close(self) -> None:
        """Ends the threads; a later run starts new ones.

        The threads end one after another. torch frees the stack traces of a compilation under a lock when the thread
        ends, and may run Python meanwhile. Two threads that ended together could deadlock on that lock.
        """
        ranks, self._ranks, self.open_rendezvous = list(self._ranks.values()), {}, {}
        for rank in ranks:
            rank.baton.release()
            rank.thread.join()


def values_of_ranks(results: Sequence[RankResult]) -> list[Any]:
    """Returns the ranks' values.

    Raises:
        SimulationError: ranks diverged.
        Exception: the first rank's error, if every rank raised and none was stopped.
    """
    first = next((r.error for r in results if r.error is not None and not r.stopped), None)
    if (difference := diverged(results)) is not None:
        raise SimulationError(difference) from first
    if first is not None:
        raise first
    return [r.value for r in results]


def diverged(results: Sequence[RankResult]) -> str | None:
    """Describes how the ranks diverged; None if all returned, or all raised without being stopped."""
    stopped = next((r.error for r in results if r.stopped and r.error is not None), None)
    if stopped is not None:
        return str(stopped)
    if len({(r.error is None, r.stopped) for r in results}) == 1 and not results[0].stopped:
        return None
    return " while ".join(
        describe_actions(
            {r.rank: _action(r) + (" after it was stopped" if r.stopped else "") for r in results}
        )
    )


def _action(result: RankResult | None) -> str:
    """Describes the end of a rank's run: `returned`, or `raised ValueError: first line of the message`."""
    if result is None or result.error is None:
        return "returned"
    text = str(result.error).strip().split("\n", 1)[0]
    return f"raised {type(result.error).__name__}: {text[:200]}{'...' if len(text) > 200 else ''}"


@contextmanager
def _without_property_lock() -> Iterator[None]:
    """Context in which `functools.cached_property` takes no lock; see Note [Locks]."""
    original: Any = functools.cached_property.__get__

    def get(self: Any, instance: Any, owner: Any = None) -> Any:
        if instance is None or self.attrname is None or not hasattr(instance, "__dict__"):
            return original(self, instance, owner)
        values = instance.__dict__
        if self.attrname not in values:
            values[self.attrname] = self.func(instance)
        return values[self.attrname]

    if sys.version_info < (3, 12):
        functools.cached_property.__get__ = get  # type: ignore[method-assign]
    try:
        yield
    finally:
        functools.cached_property.__get__ = original  # type: ignore[method-assign]


class ThreadWorld:
    """A world of `world_size` simulated ranks. Threads and groups live until `close`.

    Runs are independent of each other. Each starts, on every rank, with the caller's grad mode and states of the
    default generators; afterwards the caller's generators are restored. Groups, meshes and thread-local variables of
    a rank are kept for the next run. After a run in which ranks diverged, they may differ in their groups: all groups
    are dropped, and the threads are started again.

    Raises:
        SimulationError: world_size < 1.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise SimulationError(f"got a world of {world_size} ranks, expected at least 1")
        self.world_size = world_size
        self._threads = RankThreads()
        self._c10d: list[c10d_state.RankC10d] = []  # by rank; empty before the first run

    def __enter__(self) -> ThreadWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, fn: Call, *args: object, **kwargs: object) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on every rank and returns the results by rank.

        In `fn`, `dist.get_rank()` returns the rank.

        Raises:
            SimulationError: ranks diverged. One raised while others waited or returned, or they waited for different
                collectives. The message names each rank's action; __cause__ is the error of the first rank that
                raised.
            Exception: raised by rank 0, if every rank raised and none was stopped.
        """
        return values_of_ranks(self.outcomes(fn, *args, **kwargs))

    def outcomes(self, fn: Call, *args: object, **kwargs: object) -> list[RankResult]:
        """Same as `run`, but returns how the run ended on each rank instead of raising."""
        if not self._c10d:
            self._start()
        results = self._run_all(lambda: fn(*args, **kwargs))
        if any(r.error is not None or r.stopped for r in results) and (
            any(calls.open for calls in self._threads.open_rendezvous.values())
            or diverged(results)
            or len({tables.group_count for tables in self._c10d}) > 1
        ):
            self.close()
        return results

    def _run_all(self, fn: Callable[[], Any]) -> list[RankResult]:
        def on_rank(rank: int) -> Any:
            with using_values(
                *self._rank_values[rank], (comm.counters, []), (random.regions, {}), (region.streams, {})
            ):
                return fn()

        ranks, generators = range(self.world_size), default_generators()
        saved_states = {generator: generator.get_state() for generator in generators}
        try:
            with c10d_state.use_thread_tables(self._tables_of_thread, _BACKEND):
                return self._threads.take_turns(
                    on_rank, ranks, {g: dict.fromkeys(ranks, state) for g, state in saved_states.items()}
                )
        finally:
            set_generator_states(saved_states)

    def _tables_of_thread(self) -> c10d_state.RankC10d | None:
        rank = running_rank()
        return None if rank is None else self._c10d[rank.rank]

    def _start(self) -> None:
        self._c10d = [c10d_state.RankC10d() for _ in range(self.world_size)]
        # By rank, the core's per-rank variables with their values. Ops that replicate their inputs are counted, and
        # warned of, for all ranks together.
        self._rank_values = [initial_values(inherited=[fallback.logs]) for _ in range(self.world_size)]
        c10d_state.register_backend(_BACKEND, _make_group)
        try:
            values_of_ranks(
                self._run_all(lambda: c10d_state.initialise(_BACKEND, _rank().rank, self.world_size))
            )
        except BaseException:
            self._c10d = []
            raise

    def close(self) -> None:
        """Ends the threads and destroys the groups; a later run starts new ones."""
        if self._c10d and not self._threads.interrupted:
            self._run_all(c10d_state.destroy)
            self._threads.close()
            self._c10d = []


def run_ranks(fn: Call, world_size: int, *args: object, **kwargs: object) -> list[RankResult]:
    """Calls `fn(*args, **kwargs)` on every rank of a new world of simulated ranks; returns how it ended on each.

    To get only the results, or the error raised: `with ThreadWorld(n) as world: world.run(...)`.
    """
    with ThreadWorld(world_size) as world:
        return world.outcomes(fn, *args, **kwargs)


def _rank() -> SimulatedRank:
    if (rank := running_rank()) is None:
        raise SimulationError(
            f"the backend {_BACKEND!r} belongs to simulated ranks: start them with ThreadWorld(n).run(fn)"
        )
    return rank


def _make_group(options: Any, _: object) -> SimulatedGroup:
    """Makes a rank's end of a new group; c10d calls it in the thread of that rank."""
    rank = _rank()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(len(rank.threads.participants)))
    name = str(options.group_id)
    rank.threads.rendezvous(name, ranks)  # registers the group even if no collective is called on it
    return SimulatedGroup(options.group_rank, ranks, name, _BACKEND, rank.submit)
