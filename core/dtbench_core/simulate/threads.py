"""Ranks of a world as threads of this process that take turns: exactly one runs at a time.

    with ThreadWorld(4) as world:
        world.run(train_step, data)     # on every rank; the ranks' results

A rank runs until it waits for a collective, then the next one that can run does. So a run is
deterministic, a collective costs a few thread switches, and a hang is seen at once: when nobody can run
and somebody waits, those who wait are stopped with a `SimulationError` that says who waited where, and
what the others did instead.

On every rank `torch.distributed` is initialised, with groups, meshes, functional collectives and
`torch.distributed.tensor` as in a process of its own (group.py has the collectives). What torch and the
core keep per process is kept per rank: see Note [Process state]. While no call is running, the process
has its own `torch.distributed` back, initialised or not; ranks cannot use the process' groups, nor a
rank start a world. Tensors live on the CPU or, without collectives in a backward pass, which runs in threads of torch
there, on a CUDA device.

Note [Process state]: c10d's table of groups hangs on a module attribute, which is replaced during a
call by one that looks at the running thread; its C++ table of group names has a switch for the same.
The default generators, CUDA's once it is initialised, are swapped when ranks take turns. What the core keeps
is in context variables (runtime.py), which each thread has for itself.

Note [Locks]: a rank that waits in a collective keeps the locks it holds, and another that needs one of
them blocks while it is its turn: a deadlock. The one lock of that kind that library code is
known to hold over collectives is `functools.cached_property`'s, before Python 3.12; it is not taken
during a call.
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
from dtbench_core.layout import rng
from dtbench_core.op_types import Call
from dtbench_core.parallel import region
from dtbench_core.runtime import initial_values, using_values
from dtbench_core.simulate import c10d_state
from dtbench_core.simulate.group import (
    Arrival,
    Signature,
    SimulatedGroup,
    combine,
    describe,
    group_actions,
    mismatch,
    name_ranks,
)
from dtbench_core.simulate.local_random import States, default_generators, set_states

_BACKEND = "dtbench_threads"
_here = threading.local()  # .rank: the SimulatedRank whose thread this is
_one_call = threading.Lock()  # the process state can belong to one world at a time


@dataclass(frozen=True)
class RankResult:
    """How a call ended on one rank: with `value`, or with `error`.

    stopped: the rank waited in a collective that could not complete (or issued one that contradicts
    the others'); on a real machine it would hang. It may have a value even so, if it caught the error.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    stopped: bool = False


# ---- where ranks meet ----


@dataclass(slots=True, eq=False)
class PendingCollective:
    """One collective that not all ranks of a group have called yet."""

    signature: Signature
    calls: list[Any]  # by group rank: what its method recorded
    done: bool = False
    error: str | None = None
    waiters: list[SimulatedRank] = field(default_factory=list)


class ThreadWork(dist.Work):
    """A collective of one rank. `wait` lets the other ranks run until all have called it."""

    def __init__(self, pending: PendingCollective, rank: SimulatedRank, results: Any) -> None:
        super().__init__()
        self._pending, self._rank, self._results = pending, rank, results

    def wait(self, timeout: object = None) -> bool:
        """Raises SimulationError when the collective cannot complete."""
        if not self._pending.done or self._pending.error is not None:
            self._rank.wait(self._pending)
        return True

    def is_completed(self) -> bool:
        return self._pending.done

    def get_future(self) -> Any:
        """A future that is already set: asking for it waits."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


class Meeting:
    """What the ranks of one process group share. `ranks` are the world's, in the order of the group."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.open: dict[int, PendingCollective] = {}  # by number: the n-th call of each rank belongs together
        self._calls = [0] * len(ranks)  # so far, by group rank

    def arrive(self, arrival: Arrival) -> PendingCollective:
        """Records a rank's call, and does the collective if it is the last. A failure is in `error`."""
        number, n = self._calls[arrival.group_rank], len(self.ranks)
        self._calls[arrival.group_rank] += 1
        pending = self.open.setdefault(number, PendingCollective(arrival.signature, [None] * n))
        if pending.signature != arrival.signature:
            others = [r for r, c in zip(self.ranks, pending.calls, strict=True) if c is not None]
            pending.error = mismatch(arrival, others, pending.signature)
            return pending
        pending.calls[arrival.group_rank] = arrival.call
        if None not in pending.calls:
            try:
                combine(arrival, pending.calls)
            except SimulationError as error:
                pending.error = str(error)
            pending.done, pending.calls = True, []
            del self.open[number]
        return pending


# ---- ranks ----


class SimulatedRank:
    """One simulated rank: its thread, and the states of generators that are its own while others run."""

    def __init__(self, threads: RankThreads, rank: int) -> None:
        self.threads, self.rank = threads, rank
        self.baton = threading.Lock()  # free: this rank may run
        self.baton.acquire()
        self.states: States = {}
        self.waiting: PendingCollective | None = None
        self.stopped = False
        self.result: RankResult | None = None
        self.thread = threading.Thread(target=self._serve, name=f"simulated-rank-{rank}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        _here.rank = self
        self.baton.acquire()
        while (call := self.threads.call) is not None:
            self.stopped, self.states = False, {}
            self._take_states()
            self.result = self._run(call)
            # Errors hold frames, and frames what the call held: nothing of it may outlive it here.
            del call
            self._keep_states()
            self.threads.pass_on()
            self.baton.acquire()

    def _run(self, call: Callable[[int], Any]) -> RankResult:
        try:
            with (
                torch.inference_mode(self.threads.inference),  # allows autograd's threads
                torch.autograd.set_multithreading_enabled(False),  # a GPU's backward runs here too
                torch.set_grad_enabled(self.threads.grad),
            ):
                return RankResult(self.rank, call(self.rank), None, self.stopped)
        except BaseException as error:
            return RankResult(self.rank, None, error, self.stopped)

    def _take_states(self) -> None:
        starts = {g: states[self.rank] for g, states in self.threads.starts.items()}
        set_states({**starts, **self.states})

    def _keep_states(self) -> None:
        self.states = {g: g.get_state() for g in {*self.threads.starts, *default_generators()}}

    def arrive(self, arrival: Arrival) -> dist.Work:
        """A collective that this rank calls."""
        threads = self.threads
        if running_rank() is not self or self not in threads.members:
            raise SimulationError(
                f"{describe(arrival.signature)} was called on a group of simulated {name_ranks([self.rank])}, but not "
                "by that rank's thread during a call of its world; use the groups that the rank made, inside the "
                "function that the world runs"
            )
        members = [member.rank for member in threads.members]
        if missing := sorted({*arrival.ranks} - {*members}):
            raise SimulationError(
                f"{describe(arrival.signature)} of {name_ranks(arrival.ranks)} needs {name_ranks(missing)} too, but "
                f"only {name_ranks(members)} take part: simulate all ranks of the group"
            )
        if threads.broken is not None:
            self._stop()
        pending = threads.meeting(arrival.group_name, arrival.ranks).arrive(arrival)
        if pending.error is not None and threads.broken is None:
            threads.broken = pending.error
        if (pending.done or pending.error is not None) and pending.waiters:
            threads.ready.extend(pending.waiters)
            pending.waiters = []  # they run again
        return ThreadWork(pending, self, arrival.results)

    def wait(self, pending: PendingCollective) -> None:
        """Lets other ranks run until `pending` is done."""
        if not pending.done and self.threads.broken is None:
            self.waiting = pending
            pending.waiters.append(self)
            following = self.threads.next_rank()
            if following is not self:
                self._keep_states()
                following.baton.release()
                self.baton.acquire()
                self._take_states()
            self.waiting = None
        if pending.error is not None or not pending.done:
            self._stop()

    def _stop(self) -> None:
        self.stopped = True
        raise SimulationError(self.threads.broken or "the collective cannot complete")


def running_rank() -> SimulatedRank | None:
    """The simulated rank whose thread this is."""
    return getattr(_here, "rank", None)


class RankThreads:
    """The threads of simulated ranks, started when first needed, and the collectives in which they meet."""

    def __init__(self) -> None:
        self.call: Callable[[int], Any] | None = None
        self.starts: dict[torch.Generator, dict[int, torch.Tensor]] = {}
        self.grad, self.inference = True, False
        self.broken: str | None = None  # why the call cannot go on
        self.ready: deque[SimulatedRank] = deque()
        self.members: list[SimulatedRank] = []  # that take part in the call
        self.meetings: dict[tuple[str, tuple[int, ...]], Meeting] = {}
        self._ranks: dict[int, SimulatedRank] = {}
        self.interrupted = False
        self._caller = threading.Lock()  # free: the call has ended
        self._caller.acquire()

    def meeting(self, group_name: str, ranks: tuple[int, ...]) -> Meeting:
        return self.meetings.setdefault((group_name, ranks), Meeting(ranks))

    def take_turns(
        self,
        call: Callable[[int], Any],
        ranks: Sequence[int],
        starts: dict[torch.Generator, dict[int, torch.Tensor]],
    ) -> list[RankResult]:
        """`call(rank)` on each of `ranks`, in the caller's grad mode.

        Args:
            starts: generator -> rank -> the state from which the rank draws; afterwards the state in which it ended.
        """
        if running_rank() is not None:
            raise SimulationError(
                "a simulated rank cannot start a world: call it outside the ranks' function"
            )
        if self.interrupted:
            raise SimulationError("this world was interrupted while its ranks ran: make a new ThreadWorld")
        with _one_call, _without_property_lock():
            for rank in ranks:
                if rank not in self._ranks:
                    c10d_state.register_device_guard()
                    self._ranks[rank] = SimulatedRank(self, rank)
            self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self.call, self.broken, self.starts = call, None, starts
            self.members = [self._ranks[rank] for rank in ranks]
            self.ready = deque(self.members)
            try:
                self.ready.popleft().baton.release()
                self._caller.acquire()
            except BaseException:
                self.interrupted = True  # the ranks still run, as if nothing had happened
                raise
            members, self.members, self.call, self.starts = self.members, [], None, {}
            for generator, states in starts.items():
                states.update({m.rank: m.states[generator] for m in members if generator in m.states})
            results = [member.result for member in members]
            for member in members:
                member.result = None
            return [result for result in results if result is not None]

    # ---- turns ----

    def next_rank(self) -> SimulatedRank:
        """Who runs next, when the running rank cannot. Somebody waits, or this is not called."""
        if not self.ready:
            self._stop_all()
        return self.ready.popleft()

    def pass_on(self) -> None:
        """The running rank has ended."""
        if not self.ready and any(rank.waiting is not None for rank in self.members):
            self._stop_all()
        (self.ready.popleft().baton if self.ready else self._caller).release()

    def _stop_all(self) -> None:
        waiting = [rank for rank in self.members if rank.waiting is not None]
        if self.broken is None:
            self.broken = self._why_stuck()
        for rank in waiting:
            assert rank.waiting is not None
            rank.waiting.waiters = []
        self.ready.extend(waiting)

    def _why_stuck(self) -> str:
        """`hang: rank 2 raised ValueError(...) while ranks 0, 1, 3 waited in all_reduce(...)`."""
        ended = group_actions({r.rank: _action(r.result) for r in self.members if r.waiting is None})
        waited: dict[tuple[str, tuple[str, tuple[int, ...]]], list[int]] = {}
        for rank in self.members:
            if rank.waiting is not None:
                group = next(g for g, m in self.meetings.items() if rank.waiting in m.open.values())
                waited.setdefault((describe(rank.waiting.signature), group), []).append(rank.rank)
        several = len({group for _, group in waited}) > 1
        where = ", ".join(
            f"{name_ranks(who)} waited in {what}"
            + (f" of group {name!r}" if several else "")
            + (f" of {name_ranks(ranks)}" if len(ranks) < len(self.members) else "")
            for (what, (name, ranks)), who in waited.items()
        )
        return f"hang: {', '.join(ended)} while {where}" if ended else f"hang: {where}"

    def close(self) -> None:
        """Ends the threads. A later call starts new ones.

        One after another: torch frees the stack traces that a compilation leaves with a thread under a lock, and may
        run Python meanwhile, so that two threads that end at once could wait for each other.
        """
        ranks, self._ranks, self.meetings = list(self._ranks.values()), {}, {}
        for rank in ranks:
            rank.baton.release()
            rank.thread.join()


def values_of_ranks(results: Sequence[RankResult]) -> list[Any]:
    """The ranks' values.

    Raises:
        SimulationError: ranks diverged.
        Exception: what the first rank raised, if every rank raised by itself.
    """
    first = next((r.error for r in results if r.error is not None and not r.stopped), None)
    if (difference := diverged(results)) is not None:
        raise SimulationError(difference) from first
    if first is not None:
        raise first
    return [r.value for r in results]


def diverged(results: Sequence[RankResult]) -> str | None:
    """How the ranks went apart, or None if all returned or all raised by themselves."""
    stopped = next((r.error for r in results if r.stopped and r.error is not None), None)
    if stopped is not None:
        return str(stopped)
    if len({(r.error is None, r.stopped) for r in results}) == 1 and not results[0].stopped:
        return None
    actions = {r.rank: _action(r) + (" after it was stopped" if r.stopped else "") for r in results}
    return " while ".join(group_actions(actions))


def _action(result: RankResult | None) -> str:
    """`returned`, or `raised ValueError: the first line of it`."""
    if result is None or result.error is None:
        return "returned"
    text = str(result.error).strip().split("\n", 1)[0]
    return f"raised {type(result.error).__name__}: {text[:200]}{'...' if len(text) > 200 else ''}"


@contextmanager
def _without_property_lock() -> Iterator[None]:
    """See Note [Locks]."""
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
    """A world of `world_size` simulated ranks, whose threads and groups live until `close`.

    Calls are independent of each other: each starts on every rank with the caller's states of the default
    generators and grad mode, and the caller's generators are as before afterwards. What a rank made (groups,
    meshes, thread-local variables) it has again in the next call. After a call in which ranks diverged, they may
    differ in their groups: all are dropped, and the threads start afresh.

    Raises:
        SimulationError: world_size < 1.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise SimulationError(f"got a world of {world_size} ranks, expected at least 1")
        self.world_size = world_size
        self._threads = RankThreads()
        self._c10d: list[c10d_state.RankC10d] = []  # of each rank; none before the first call
        self._own: list[list[tuple[Any, Any]]] = []

    def __enter__(self) -> ThreadWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, fn: Call, *args: object, **kwargs: object) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank (`dist.get_rank()` tells which): the results, by rank.

        Raises:
            SimulationError: ranks diverged: one raised while others waited or returned, or waited for
                different collectives. The message says who did what; __cause__ is the first rank's own error.
            Exception: what rank 0 raised, if every rank raised by itself.
        """
        return values_of_ranks(self.outcomes(fn, *args, **kwargs))

    def outcomes(self, fn: Call, *args: object, **kwargs: object) -> list[RankResult]:
        """As `run`, but gives how the call ended on each rank instead of raising."""
        if not self._c10d:
            self._start()
        results = self._call(lambda: fn(*args, **kwargs))
        if any(r.error is not None or r.stopped for r in results):
            pending = any(meeting.open for meeting in self._threads.meetings.values())
            if pending or diverged(results) or len({tables.group_count for tables in self._c10d}) > 1:
                self.close()
        return results

    def _call(self, call: Callable[[], Any]) -> list[RankResult]:
        def on_rank(rank: int) -> Any:
            with using_values(*self._own[rank], (comm.counters, []), (rng.regions, {}), (region.streams, {})):
                return call()

        ranks, generators = range(self.world_size), default_generators()
        before = {generator: generator.get_state() for generator in generators}
        try:
            with c10d_state.per_thread(self._of_thread, _BACKEND):
                return self._threads.take_turns(
                    on_rank, ranks, {g: dict.fromkeys(ranks, state) for g, state in before.items()}
                )
        finally:
            set_states(before)

    def _of_thread(self) -> c10d_state.RankC10d | None:
        rank = running_rank()
        return None if rank is None else self._c10d[rank.rank]

    def _start(self) -> None:
        self._c10d = [c10d_state.RankC10d() for _ in range(self.world_size)]
        # Ops that run on replicated inputs are counted, and warned of, for all ranks together.
        self._own = [initial_values(besides=[fallback.seen]) for _ in range(self.world_size)]
        c10d_state.register_backend(_BACKEND, _make_group)
        try:
            values_of_ranks(
                self._call(lambda: c10d_state.initialise(_BACKEND, _rank().rank, self.world_size))
            )
        except BaseException:
            self._c10d = []
            raise

    def close(self) -> None:
        """Ends the threads and destroys the groups. A later call starts new ones."""
        if self._c10d and not self._threads.interrupted:
            self._call(c10d_state.destroy)
            self._threads.close()
            self._c10d = []


def run_ranks(fn: Call, world_size: int, *args: object, **kwargs: object) -> list[RankResult]:
    """`fn(*args, **kwargs)` on every rank of a new world of simulated ranks: how it ended on each.

    For results alone, and an error when there is one: `with ThreadWorld(n) as world: world.run(...)`.
    """
    with ThreadWorld(world_size) as world:
        return world.outcomes(fn, *args, **kwargs)


def _rank() -> SimulatedRank:
    rank = running_rank()
    if rank is None:
        raise SimulationError(
            f"the backend {_BACKEND!r} belongs to simulated ranks: start them with ThreadWorld(n).run(fn)"
        )
    return rank


def _make_group(options: Any, _: object) -> SimulatedGroup:
    """What c10d calls for each new group, in the thread of the rank that makes it."""
    rank = _rank()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(len(rank.threads.members)))
    name = str(options.group_id)
    rank.threads.meeting(name, ranks)  # also a group on which nothing is called counts as made
    return SimulatedGroup(options.group_rank, ranks, name, _BACKEND, rank.arrive)
