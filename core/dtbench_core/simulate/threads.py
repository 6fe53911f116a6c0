"""Ranks of a world as threads of this process that take turns: exactly one runs at a time.

    with ThreadWorld(4) as world:
        world.run(train_step, data)     # on every rank; the ranks' results

A rank runs until it waits for a collective, then the next one that can run does. So a run is
deterministic, a collective costs a few thread switches, and a hang is seen at once: when nobody can run
and somebody waits, those who wait are stopped with a `SimulationError` that tells who waited where, and
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
them blocks with the turn in its hands: all stand still. The one lock of that kind that library code is
known to hold over collectives is `functools.cached_property`'s, before Python 3.12; it is not taken
during a call.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
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
from dtbench_core.runtime import entered, fresh
from dtbench_core.simulate import c10d_state
from dtbench_core.simulate.group import (
    Arrival,
    Signature,
    SimulatedGroup,
    SimulatedWork,
    combine,
    describe,
    mismatch,
    name_deeds,
    name_ranks,
    raised,
)
from dtbench_core.simulate.local_random import State, default_states, set_states

_BACKEND = "dtbench_threads"
_here = threading.local()  # .rank: the Rank whose thread this is
_one_call = threading.Lock()  # the process state can belong to one world at a time


@dataclass(frozen=True)
class RankResult:
    """What became of a call on one rank: `value`, or the `error` it ended with.

    stopped: the rank waited in a collective that could not come about (or issued one that contradicts
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
    missing: int
    done: bool = False
    error: str | None = None
    waiters: list[SimulatedRank] = field(default_factory=list)


class ThreadWork(SimulatedWork):
    """A collective of one rank. `wait` lets the other ranks run until all have called it."""

    def __init__(self, pending: PendingCollective, rank: SimulatedRank, results: Any) -> None:
        super().__init__(results)
        self._pending, self._rank = pending, rank

    def wait(self, timeout: object = None) -> bool:
        """Raises SimulationError when the collective cannot come about."""
        if not self._pending.done or self._pending.error is not None:
            self._rank.wait(self._pending)
        return True

    def is_completed(self) -> bool:
        return self._pending.done


class Meeting:
    """What the ranks of one process group share. `ranks` are the world's, in the order of the group."""

    __slots__ = ("_first", "_turns", "open", "ranks")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.reset()

    def reset(self) -> None:
        """Forgets the collectives under way, after a call that failed."""
        self.open: deque[PendingCollective] = deque()
        self._first = 0  # the number of open[0]
        self._turns = [0] * len(self.ranks)  # calls so far, by group rank

    def arrive(self, arrival: Arrival) -> PendingCollective:
        """Records a rank's call, and does the collective if it is the last. A failure is in `error`."""
        turn = self._turns[arrival.group_rank] - self._first
        self._turns[arrival.group_rank] += 1
        if turn == len(self.open):
            self.open.append(PendingCollective(arrival.signature, [None] * len(self.ranks), len(self.ranks)))
        pending = self.open[turn]
        if pending.signature != arrival.signature:
            others = [r for r, c in zip(self.ranks, pending.calls, strict=True) if c is not None]
            pending.error = mismatch(arrival, others, pending.signature)
            return pending
        pending.calls[arrival.group_rank] = arrival.call
        pending.missing -= 1
        if not pending.missing:
            try:
                combine(arrival, pending.calls)
            except SimulationError as error:
                pending.error = str(error)
            pending.done = True
            pending.calls = []
            self.open.popleft()  # all ranks called this one, hence every earlier one
            self._first += 1
        return pending


# ---- ranks ----


class SimulatedRank:
    """One simulated rank: its thread, and what is its own while others run."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank = world, rank
        self.baton = threading.Lock()  # free: this rank may run
        self.baton.acquire()
        self.c10d = c10d_state.RankC10d()
        self.generator_states: dict[torch.Generator, State] = {}
        # Ops that run on replicated inputs are counted, and warned of, for all ranks together.
        self.own = fresh(besides=[fallback.seen])
        self.waiting: PendingCollective | None = None
        self.stopped = False
        self.outcome: RankResult | None = None
        self.thread = threading.Thread(target=self._serve, name=f"simulated-rank-{rank}", daemon=True)

    # ---- the thread ----

    def _serve(self) -> None:
        _here.rank = self
        self.baton.acquire()
        while (call := self.world.call) is not None:
            self.outcome = self._run(call)
            # Errors hold frames, and frames what the call held: nothing of it may outlive it here.
            del call
            self.world.pass_on()
            self.baton.acquire()

    def _run(self, call: Callable[[], Any]) -> RankResult:
        self.stopped = False
        set_states(self.world.caller_states)
        try:
            with (
                entered(*self.own, (comm.counters, []), (rng.regions, {}), (region.streams, {})),
                torch.inference_mode(self.world.inference),
                torch.set_grad_enabled(self.world.grad),
            ):
                return RankResult(self.rank, call(), None, self.stopped)
        except BaseException as error:
            return RankResult(self.rank, None, error, self.stopped)

    # ---- collectives ----

    def arrive(self, meeting: Meeting, arrival: Arrival) -> dist.Work:
        """A collective that this rank calls."""
        if threading.get_ident() != self.thread.ident or not self.world.running:
            raise SimulationError(
                f"{describe(arrival.signature)} was called on a group of simulated {name_ranks([self.rank])}, but not "
                "by that rank's thread during a call of its world; use the groups that the rank made, inside the "
                "function that the world runs"
            )
        if self.world.broken is not None:
            self._stop()
        pending = meeting.arrive(arrival)
        if pending.error is not None and self.world.broken is None:
            self.world.broken = pending.error
        if (pending.done or pending.error is not None) and pending.waiters:
            self.world.ready.extend(pending.waiters)
            pending.waiters = []  # they run again
        return ThreadWork(pending, self, arrival.results)

    def wait(self, pending: PendingCollective) -> None:
        """Lets other ranks run until `pending` is done."""
        if not pending.done and self.world.broken is None:
            self.waiting = pending
            pending.waiters.append(self)
            self._let_others_run()
            self.waiting = None
        if pending.error is not None or not pending.done:
            self._stop()

    def _let_others_run(self) -> None:
        following = self.world.next_rank()
        if following is self:
            return
        self.generator_states = default_states()
        following.baton.release()
        self.baton.acquire()
        set_states(self.generator_states)

    def _stop(self) -> None:
        self.stopped = True
        raise SimulationError(self.world.broken or "the collective cannot come about")


class ThreadWorld:
    """A world of `world_size` simulated ranks, whose threads and groups live until `close`.

    Calls are independent of each other: each starts on every rank with the caller's states of the default
    generators and grad mode, and the caller's generators are as before afterwards. What a rank made (groups,
    meshes, thread-local variables) it finds again in the next call. After a call in which ranks diverged,
    groups that not all of their members made are dropped with all others, and the threads start afresh.

    Raises:
        SimulationError: world_size < 1.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise SimulationError(f"got a world of {world_size} ranks, expected at least 1")
        self.world_size = world_size
        self.call: Callable[[], Any] | None = None
        self.running = False
        self.broken: str | None = None  # why the call cannot go on
        self.ready: deque[SimulatedRank] = deque()
        self.meetings: dict[tuple[str, tuple[int, ...]], Meeting] = {}
        self.caller_states = default_states()
        self.grad, self.inference = True, False
        self._ranks: list[SimulatedRank] = []
        self._lost = False
        self._caller = threading.Lock()  # free: the call has ended
        self._caller.acquire()

    def __enter__(self) -> ThreadWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- calls ----

    def run(self, fn: Call, *args: object, **kwargs: object) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank (`dist.get_rank()` tells which): the results, by rank.

        Raises:
            SimulationError: ranks diverged: one raised while others waited or returned, or waited for
                different collectives. The message tells who did what; __cause__ is the first rank's own error.
            Exception: what rank 0 raised, if every rank raised by itself.
        """
        outcomes = self.outcomes(fn, *args, **kwargs)
        if all(o.error is None and not o.stopped for o in outcomes):
            return [o.value for o in outcomes]
        if all(o.error is not None and not o.stopped for o in outcomes):
            assert outcomes[0].error is not None
            raise outcomes[0].error
        own = next((o.error for o in outcomes if o.error is not None and not o.stopped), None)
        raise SimulationError(diverged(outcomes)) from own

    def outcomes(self, fn: Call, *args: object, **kwargs: object) -> list[RankResult]:
        """As `run`, but tells what became of each rank instead of raising."""
        if not self._ranks:
            self._start()
        outcomes = self._call(lambda: fn(*args, **kwargs))
        if any(o.error is not None or o.stopped for o in outcomes):
            self._recover()
        return outcomes

    def _call(self, call: Callable[[], Any]) -> list[RankResult]:
        if getattr(_here, "rank", None) is not None:
            raise SimulationError(
                "a simulated rank cannot start a world: call it outside the ranks' function"
            )
        if self._lost:
            raise SimulationError("this world was interrupted while its ranks ran: make a new ThreadWorld")
        with _one_call:
            self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self.caller_states = default_states()
            self.call, self.broken, self.running = call, None, True
            self.ready = deque(self._ranks[1:])
            give_back = c10d_state.per_thread(_my_c10d, _BACKEND)
            lock_again = _without_property_lock()
            try:
                self._ranks[0].baton.release()
                self._caller.acquire()
            except BaseException:
                self._lost = True  # an interrupt: the ranks still run, as if nothing had happened
                raise
            finally:
                self.running = False
                give_back()
                lock_again()
                set_states(self.caller_states)
            made = [rank.outcome for rank in self._ranks]
            self.call = None
            for rank in self._ranks:
                rank.outcome = None
            return [outcome for outcome in made if outcome is not None]

    # ---- turns ----

    def next_rank(self) -> SimulatedRank:
        """Who runs next, when the running rank cannot. Somebody waits, or this is not called."""
        if not self.ready:
            self._stop_all()
        return self.ready.popleft()

    def pass_on(self) -> None:
        """The running rank has ended."""
        if not self.ready and any(rank.waiting is not None for rank in self._ranks):
            self._stop_all()
        (self.ready.popleft().baton if self.ready else self._caller).release()

    def _stop_all(self) -> None:
        waiting = [rank for rank in self._ranks if rank.waiting is not None]
        if self.broken is None:
            self.broken = self._why_stuck()
        for rank in waiting:
            assert rank.waiting is not None
            rank.waiting.waiters = []
        self.ready.extend(waiting)

    def _why_stuck(self) -> str:
        """`hang: rank 2 raised ValueError(...) while ranks 0, 1, 3 waited in all_reduce(...)`."""
        ended = [rank for rank in self._ranks if rank.waiting is None]
        deeds = name_deeds({rank.rank: _deed(rank.outcome) for rank in ended})
        waited: dict[tuple[str, tuple[str, tuple[int, ...]]], list[int]] = {}
        for rank in self._ranks:
            if rank.waiting is not None:
                group = next(g for g, meeting in self.meetings.items() if rank.waiting in meeting.open)
                waited.setdefault((describe(rank.waiting.signature), group), []).append(rank.rank)
        several = len({group for _, group in waited}) > 1
        where = ", ".join(
            f"{name_ranks(who)} waited in {what}"
            + (f" of group {name!r}" if several else "")
            + (f" of {name_ranks(ranks)}" if len(ranks) < self.world_size else "")
            for (what, (name, ranks)), who in waited.items()
        )
        return f"hang: {', '.join(deeds)} while {where}" if deeds else f"hang: {where}"

    # ---- life ----

    def _start(self) -> None:
        c10d_state.register_device_guard()
        self._ranks = [SimulatedRank(self, rank) for rank in range(self.world_size)]
        self.meetings = {}
        for rank in self._ranks:
            rank.thread.start()
        c10d_state.register_backend(_BACKEND, _make_group)
        outcomes = self._call(_initialise)
        failed = next((o.error for o in outcomes if o.error is not None), None)
        if failed is not None:
            raise failed

    def _recover(self) -> None:
        """Makes the world usable after ranks ended otherwise than by returning."""
        for meeting in self.meetings.values():
            meeting.reset()
        for rank in self._ranks:
            rank.waiting = None
        counts = {rank.c10d.group_count for rank in self._ranks}
        holders: dict[str, list[int]] = {}
        for rank in self._ranks:
            for name in rank.c10d.pg_names.values():
                holders.setdefault(name, []).append(rank.rank)
        made = {(name, tuple(sorted(ranks))) for name, ranks in holders.items()}
        if len(counts) > 1 or made != {(n, tuple(sorted(r))) for n, r in self.meetings}:
            self.close()

    def close(self) -> None:
        """Ends the threads and destroys the groups. A later call starts new ones."""
        if not self._ranks or self._lost:
            return
        self._call(c10d_state.destroy)
        self.call = None
        ranks, self._ranks, self.meetings = self._ranks, [], {}
        for rank in ranks:
            rank.baton.release()
        for rank in ranks:
            rank.thread.join()


def run_ranks(fn: Call, world_size: int, *args: object, **kwargs: object) -> list[RankResult]:
    """`fn(*args, **kwargs)` on every rank of a new world of simulated ranks: what became of each.

    For results alone, and an error when there is one: `with ThreadWorld(n) as world: world.run(...)`.
    """
    with ThreadWorld(world_size) as world:
        return world.outcomes(fn, *args, **kwargs)


def diverged(outcomes: Sequence[RankResult]) -> str | None:
    """How the ranks went apart, or None if all returned or all raised by themselves."""
    stopped = next((o.error for o in outcomes if o.stopped and o.error is not None), None)
    if stopped is not None:
        return str(stopped)
    if len({(o.error is None, o.stopped) for o in outcomes}) == 1 and not outcomes[0].stopped:
        return None
    return " while ".join(
        name_deeds({o.rank: _deed(o) + (" after it was stopped" if o.stopped else "") for o in outcomes})
    )


def _deed(outcome: RankResult | None) -> str:
    return "returned" if outcome is None or outcome.error is None else raised(outcome.error)


def _my_c10d() -> c10d_state.RankC10d | None:
    rank: SimulatedRank | None = getattr(_here, "rank", None)
    return None if rank is None else rank.c10d


def _without_property_lock() -> Callable[[], None]:
    """See Note [Locks]. Returns what undoes it."""
    original: Any = functools.cached_property.__get__
    if sys.version_info >= (3, 12):
        return lambda: None

    def get(self: Any, instance: Any, owner: Any = None) -> Any:
        if instance is None or self.attrname is None or not hasattr(instance, "__dict__"):
            return original(self, instance, owner)
        values = instance.__dict__
        if self.attrname not in values:
            values[self.attrname] = self.func(instance)
        return values[self.attrname]

    def undo() -> None:
        functools.cached_property.__get__ = original  # type: ignore[method-assign]

    functools.cached_property.__get__ = get  # type: ignore[method-assign]
    return undo


def _initialise() -> None:
    rank: SimulatedRank = _here.rank
    c10d_state.initialise(_BACKEND, rank.rank, rank.world.world_size)


def _make_group(options: Any, _: object) -> SimulatedGroup:
    """What c10d calls for each new group, in the thread of the rank that makes it."""
    rank: SimulatedRank | None = getattr(_here, "rank", None)
    if rank is None:
        raise SimulationError(
            f"the backend {_BACKEND!r} belongs to simulated ranks: start them with ThreadWorld(n).run(fn)"
        )
    ranks = tuple(options.global_ranks_in_group) or tuple(range(rank.world.world_size))
    name = str(options.group_id)
    meeting = rank.world.meetings.setdefault((name, ranks), Meeting(ranks))
    return SimulatedGroup(options.group_rank, ranks, name, _BACKEND, functools.partial(rank.arrive, meeting))
