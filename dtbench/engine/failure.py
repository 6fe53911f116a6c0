"""Rank failure: noticing that a rank died, raised or hangs, telling all ranks, and ending them.

A main thread may sit in a collective that will never return, so a few threads wait for failures, all
asleep in the kernel until something happens; while times are taken nothing beats or polls:

- for signals: a launcher that sees a rank die sends SIGTERM to the others; Ctrl-C arrives as SIGINT;
- for an event in the store: another rank raised, found a failure, or tells all to stop;
- for the timeout of the case at work.

On a failure every rank that can writes its state into the store. Who is missing after `ANSWER_S` is dead
or frozen. The lowest living rank reports, and all leave by `os._exit`, since their main threads may never
come back from where they wait. `record_failure` makes the failed result of it, in our launcher or, under another's, in
the rank that reports.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from dtbench.errors import EXIT_CASE_FAILED, EXIT_INTERRUPTED, OutputError, UnreadableRunError, complain
from dtbench.grouping import group_by
from dtbench.records.result import Result
from dtbench.records.run import RunWriter, read_run
from dtbench.suite import Param

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")

ANSWER_S = 2.0
# When a rank raised: so long may the others take to reach the next vote. A call of theirs may be under way;
# one that waits for the rank that raised will not end.
GRACE_S = 5.0
# What the slowest rank gets, once it has the last decision, to take note of it.
FAREWELL_S = 10.0
# A launcher that was killed may close its store's socket a moment after its ranks get the signal.
DYING_S = 0.3
# Waits on the store are ended by the detector, which knows why; this only has to be longer than any run.
FOREVER = timedelta(days=7)
_OUR_FOLDERS = {Path(__file__).parent}


@dataclass
class ActiveCase:
    """What this rank is doing. Another thread reads it when something goes wrong."""

    suite: str = ""
    name: str = ""
    params: Mapping[str, Param] = field(default_factory=dict)
    impls: Sequence[str] = ()
    impl: str | None = None
    launch: int = 0
    case: int = 0  # cases begun
    step: int = 0  # samples begun in the case; the others wait for the rank with the fewest
    raised: str | None = None  # the first failure since the last vote
    raised_in: str | None = None  # and its impl

    def begin(self, suite: str, name: str, params: Mapping[str, Param], impls: Sequence[str]) -> None:
        self.suite, self.name, self.params, self.impls = suite, name, params, impls
        self.case, self.step = self.case + 1, 0

    def end(self) -> None:
        self.name = ""

    @property
    def blamed(self) -> Sequence[str]:
        """The impls that a failure is put down to: the one at work, else all of the case."""
        impl = self.raised_in or self.impl
        return (impl,) if impl else self.impls

    @property
    def label(self) -> str:
        """`collectives all_reduce size=1024 (c10d)`, or empty between cases."""
        if not self.name:
            return ""
        words = [self.suite, self.name, *(f"{k}={v}" for k, v in self.params.items())]
        return " ".join(filter(None, words)) + (f" ({self.blamed[0]})" if len(self.blamed) == 1 else "")


@dataclass(frozen=True)
class RankState:
    """What a rank is doing when a failure is noticed, as it writes it into the store.

    case, step: how many cases and samples it has begun. where: file, line and function its main
    thread is in. waits: whether that is inside torch or the harness, so that it probably waits for
    others. raised_at: seconds since 1970, 0 if it did not raise.
    """

    cause: str  # "died", "interrupted", "timeout", "raised", "event"
    label: str = ""
    step: int = 0
    where: str = ""
    waits: bool = False
    case: int = 0
    raised: str | None = None
    raised_at: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    """What ended the world. rank: whose fault it is, where that can be told; code: the exit code;
    blames_case: whether the case at work has failed, rather than been cut short."""

    sentence: str
    rank: int | None
    code: int = EXIT_CASE_FAILED
    blames_case: bool = True

    def during(self, case: ActiveCase) -> str:
        """The sentence, with the case that it has failed."""
        return f"{self.sentence} during {case.label}" if self.blames_case and case.name else self.sentence


INTERRUPTED = Diagnosis("interrupted", None, EXIT_INTERRUPTED, blames_case=False)
_UNREACHABLE = "the process that started the ranks died or cannot be reached"
LAUNCHER_DIED = Diagnosis(_UNREACHABLE, None, blames_case=False)


def diagnose(states: Mapping[int, RankState], hosts: Sequence[str], limit: str) -> Diagnosis:
    """Who broke the world, from the states of the ranks that answered. limit: see `FailureDetector.limit`."""

    def named(ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)

    if missing := [rank for rank in range(len(hosts)) if rank not in states]:
        return Diagnosis(f"{named(missing)} died or did not answer", missing[0])
    raised = [rank for rank, state in states.items() if state.raised]
    if raised:
        first = min(raised, key=lambda rank: (states[rank].raised_at, rank))
        others = " while the other ranks waited for it" if len(raised) < len(hosts) else ""
        return Diagnosis(f"{named([first])} raised {states[first].raised}{others}", first)
    if {state.cause for state in states.values()} & {"interrupted", "died"}:  # told to end, nobody is missing
        return INTERRUPTED
    late = _latecomers(states)
    if late:
        where = f" (at {states[late[0]].where})" if states[late[0]].where else ""
        return Diagnosis(f"{named(late)} did not finish {limit}{where}", late[0])
    places = "; ".join(f"rank {rank} at {state.where}" for rank, state in sorted(states.items())[:4])
    return Diagnosis(f"no rank finished {limit}, they wait for one another ({places})", None)


def _latecomers(states: Mapping[int, RankState]) -> list[int]:
    """The ranks that the others wait for: behind by a sample, or busy with code of their own."""
    states = {rank: state for rank, state in sorted(states.items()) if state.label} or states
    progress = {rank: (state.case, state.step) for rank, state in states.items()}
    if len(states) == 1 or len(set(progress.values())) > 1:
        return [rank for rank, reached in progress.items() if reached == min(progress.values())]
    busy = [rank for rank, state in states.items() if not state.waits]
    if 0 < len(busy) < len(states):
        return busy
    few = min(group_by(states, lambda rank: states[rank].where).values(), key=len)
    return few if len(few) * 2 < len(states) else []


def record_failure(
    diagnosis: Diagnosis,
    case: ActiveCase,
    output: Path,
    writer: RunWriter | None = None,
    *,
    may_restart: bool = False,
) -> bool:
    """Records the active case as failed, and prints in one line what ended the ranks and how many results are kept.

    Args:
        output: the run file.
        writer: the run file's writer if this process has opened it.
        may_restart: whether new ranks may continue after a failed case.

    Returns:
        Whether new ranks continue.
    """
    sentence, failed = diagnosis.during(case), diagnosis.blames_case and bool(case.name)
    try:
        kept = _record(diagnosis, case, output, writer) if failed else describe_kept_results(output)
    except OutputError as error:
        complain(f"{sentence}: {error}")
        return False
    if failed and may_restart:
        complain(f"{sentence}: recorded as failed; continuing with new ranks")
        return True
    complain(f"{sentence}: {kept}")
    return False


def _record(diagnosis: Diagnosis, case: ActiveCase, output: Path, writer: RunWriter | None) -> str:
    try:
        with nullcontext(writer) if writer is not None else RunWriter.resume(output) as file:
            for impl in case.blamed:
                result = Result(
                    suite=case.suite,
                    name=case.name,
                    impl=impl,
                    params=case.params,
                    status="failed",
                    reason=diagnosis.sentence,
                    rank=diagnosis.rank,
                    launch=case.launch,
                )
                if result.key not in file.results:
                    file.append(result)
    except UnreadableRunError:  # it has not even a header
        pass
    return describe_kept_results(output)


def describe_kept_results(output: Path) -> str:
    """`3 results are in x.jsonl; continue with --resume -o x.jsonl`."""
    try:
        count = len(read_run(output, with_samples=False).results)
    except UnreadableRunError:
        return "nothing was measured"
    return f"{count} {'result is' if count == 1 else 'results are'} in {output}; continue with --resume -o {output}"


class FailureDetector:
    """One rank's. Signals are waited for from its making on; all else from `join` on.

    report: called once, on the lowest living rank, with what happened; it writes the failed result and the
        last line. Runs in a helper thread.
    """

    def __init__(self, now: ActiveCase, rank: int, size: int, report: Callable[[Diagnosis], None]) -> None:
        self._now = now
        self._rank = rank
        self._report = report
        self._hosts: Sequence[str] = ["this host"] * size
        self._serving_rank: int | None = None
        self._limit = ""
        self.joined = False  # whether the other ranks can be told
        self._store: Store | None = None  # opened when a failure is noticed
        self._votes: Callable[[], int] = lambda: 0
        self._raised: tuple[int, str] = (-1, "")  # how many votes were decided, and the reason
        self._raised_at = 0.0
        self._ending = threading.Lock()  # held for ever by the thread that ends the process
        self._finished: int | None = None
        self._main = threading.main_thread().ident
        threading.Thread(target=self._wait_for_signals, name="signals", daemon=True).start()

    # ---- what the main thread says ----

    def join(
        self,
        connect: Callable[[], Store],
        hosts: Sequence[str],
        votes: Callable[[], int],
        serving_rank: int | None,
    ) -> None:
        """The world is there: waits for its events from now on.

        connect: opens a connection to its store. hosts: of each rank. votes: how many votes were decided so far.
        serving_rank: the one that hosts the store, None where the launcher does.
        """
        events = connect() if len(hosts) > 1 else None
        self._hosts, self._votes, self._serving_rank = hosts, votes, serving_rank
        self._connect, self.joined = connect, True
        if events is not None:
            threading.Thread(target=self._wait_for_events, args=(events,), name="events", daemon=True).start()

    @contextmanager
    def limit(self, timeout_s: float, text: str = "") -> Iterator[None]:
        """Ends the world if the block takes this rank longer than so many seconds.

        text: what did not finish, and the limit as the user set it; by default that of --timeout.
        """
        outer, self._limit = self._limit, text or f"within --timeout {timeout_s:g} s"
        timer = self._later(timeout_s, self._end_late, self._limit)
        try:
            yield
        finally:
            timer.cancel()
            self._limit = outer

    def _end_late(self, limit: str) -> None:
        self._limit = limit
        self.end_world("timeout")

    def raised(self, reason: str) -> None:
        """A call raised here: the others may be waiting for it in a collective."""
        self._raised, self._raised_at = (self._votes(), reason), time.time()
        self._publish({"kind": "raised", "votes": self._votes()})

    def fault(self, reason: str) -> NoReturn:
        """This rank cannot go on, and nothing foresaw why: ends the world."""
        self._now.raised, self._raised_at = reason, time.time()
        self.end_world("raised")

    def stop_others(self, code: int) -> None:
        """Rank 0 cannot go on (its file cannot be written, say): all other ranks leave with `code`."""
        self._publish({"kind": "stop", "code": code})
        self.leave(code)

    def leave(self, code: int, store: Store | None = None) -> None:
        """All is done; returns when all ranks have come here, or gives them up.

        Nobody ends before: a launcher kills the others at the first exit code but 0, and rank 0 may serve the store.
        """
        self.finish(code)
        with suppress(RuntimeError):  # whoever served the store has heard of all, and left
            if self.joined or store is not None:
                farewell(store or self._connect(), self._rank, len(self._hosts))

    def finish(self, code: int) -> None:
        """All is done: from here on SIGTERM only means to leave with `code` a little earlier."""
        self._ending.acquire()
        self._finished = code

    # ---- what the threads wait for ----

    def _wait_for_signals(self) -> None:
        while True:
            got = signal.sigwait(_SIGNALS)
            if self._finished is not None:
                os._exit(self._finished)
            self.end_world("died" if got == signal.SIGTERM else "interrupted")

    def _wait_for_events(self, store: Store) -> None:
        number = 0
        while True:
            try:
                store.wait([f"event/{number}"], FOREVER)
                event = json.loads(store.get(f"event/{number}"))
            except RuntimeError:
                if self._finished is None:
                    self.end_world("died")  # whoever served the store did
                return
            number += 1
            match event["kind"]:
                case "stop":
                    self.leave(event["code"], store)
                    exit_now(event["code"])
                case "failure":
                    self.end_world("event")
                case "raised":
                    self._later(GRACE_S, self._end_unless_voted, event["votes"])

    def _end_unless_voted(self, votes: int) -> None:
        if self._finished is None and self._votes() <= votes:
            self.end_world("raised")

    def _later(self, seconds: float, step: Callable[[_T], object], value: _T) -> threading.Timer:
        timer = threading.Timer(seconds, step, (value,))
        timer.daemon = True
        timer.start()
        return timer

    # ---- the end ----

    def end_world(self, cause: str) -> NoReturn:
        """Ends this process once all ranks were asked for their state. Any thread, any number of times."""
        self._ending.acquire()
        state = self._state(cause)
        if cause == "interrupted":
            self._end(INTERRUPTED, reports=self._rank == 0)
        if not self.joined:
            late = cause == "timeout" and f"rank {self._rank} did not finish {self._limit}"
            sentence = state.raised or late or "ended while the ranks were starting"
            self._end(Diagnosis(sentence, None), reports=self._rank == 0 or cause == "timeout")
        if cause == "died":
            time.sleep(DYING_S)
        try:
            states = self._ask_all(state)
        except RuntimeError:
            first_here = self._rank == self._hosts.index(self._hosts[self._rank])
            after_server = self._serving_rank == 0 and self._rank == 1
            self._end(self._without_store(), reports=first_here or after_server)
        self._end(diagnose(states, self._hosts, self._limit), reports=self._rank == min(states))

    def _without_store(self) -> Diagnosis:
        """The store is gone, and with it whoever served it; the other ranks cannot be asked."""
        if self._serving_rank is None:
            return LAUNCHER_DIED
        who = f"rank {self._serving_rank} on {self._hosts[self._serving_rank]}"
        return Diagnosis(f"{who} died or did not answer", self._serving_rank)

    def _end(self, diagnosis: Diagnosis, *, reports: bool) -> NoReturn:
        """The others leave once the report is made: a launcher may end the rank that is just writing it as soon
        as one has left."""
        try:
            if reports:
                self._report(diagnosis)
            if self._store is not None:
                with suppress(RuntimeError):
                    if reports:
                        self._store.set("reported", "1")
                    else:
                        self._store.wait(["reported"], timedelta(seconds=2 * ANSWER_S))
        finally:
            exit_now(diagnosis.code)

    def _ask_all(self, state: RankState) -> dict[int, RankState]:
        """The states of the ranks that answer."""
        if len(self._hosts) == 1:
            return {self._rank: state}
        store = self._store = self._connect()
        if state.cause != "event":
            self._publish({"kind": "failure"}, store)
        store.set(f"state/{self._rank}", json.dumps(asdict(state)))
        keys = [f"state/{rank}" for rank in range(len(self._hosts))]
        try:
            store.wait(keys, timedelta(seconds=ANSWER_S))
        except RuntimeError:
            keys = [key for key in keys if store.check([key])]
        return {int(key.partition("/")[2]): RankState(**json.loads(store.get(key))) for key in keys}

    def _state(self, cause: str) -> RankState:
        now = self._now
        where, waits = _where(sys._current_frames().get(self._main or 0))
        votes, reason = self._raised
        raised = now.raised or (reason if votes == self._votes() else None)
        return RankState(cause, now.label, now.step, where, waits, now.case, raised, self._raised_at)

    def _publish(self, event: Mapping[str, str | int], store: Store | None = None) -> None:
        if not self.joined or len(self._hosts) == 1:
            return
        with suppress(RuntimeError):  # the store is gone: each rank finds that out by itself
            store = store or self._connect()
            store.set(f"event/{store.add('events', 1) - 1}", json.dumps(event))


def farewell(store: Store, rank: int, size: int) -> None:
    """Returns when all ranks have said it, or after `FAREWELL_S`."""
    store.set(f"farewell/{rank}", "")
    store.wait([f"farewell/{rank}" for rank in range(size)], timedelta(seconds=FAREWELL_S))


_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})


def block_signals() -> None:
    """Leaves the signals to the detector: a main thread inside a collective would not see them.

    Called before any other thread exists, since threads inherit it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def exit_now(code: int) -> NoReturn:
    """Threads that sleep in C++ would hold up an orderly end."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _where(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost frame as `file.py:12 in run`, and whether it is torch's or the harness's own."""
    if frame is None:
        return "", True
    path = Path(frame.f_code.co_filename)
    ours = path.parent in _OUR_FOLDERS
    return f"{path.name}:{frame.f_lineno} in {frame.f_code.co_name}", ours or "torch" in path.parts
