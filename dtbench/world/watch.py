"""What happens when the world breaks: a rank dies, hangs, or raises while the others wait for it.

A rank that waits in a collective cannot look around, so a few threads wait for it, all asleep in the
kernel until something happens; while times are taken nothing beats or polls:

- for signals: a launcher that sees a rank die sends SIGTERM to the others; Ctrl-C arrives as SIGINT;
- for an event in the store: another rank raised, found trouble, or tells all to stop;
- for the timeout of the case in hand.

Trouble ends in a roll call: every rank that can writes where it stands into the store. Who is missing
after `ROLL_CALL_S` is dead or frozen. The lowest living rank says so, and all leave by `os._exit`,
since their main threads may never come back from where they wait.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dtbench.errors import EXIT_CASE_FAILED, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ROLL_CALL_S = 2.0
# When a rank raised: so long may the others take to reach the vote that settles it. A call of theirs
# may be under way; one that waits for the rank that raised will not end.
GRACE_S = 5.0
# A launcher that was killed may close its store's socket a moment after its ranks get the signal.
DYING_S = 0.3
_FOREVER = timedelta(days=7)
OUR_FOLDERS = {Path(__file__).parent, Path(__file__).parents[1] / "bench"}


@dataclass
class Now:
    """What this rank is doing. The watch reads it from another thread when something goes wrong."""

    suite: str = ""
    name: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    impls: tuple[str, ...] = ()
    impl: str | None = None
    launch: int = 0
    case: int = 0  # cases begun
    step: int = 0  # samples begun in the case; the others wait for the rank with the fewest
    raised: str | None = None  # the first failure since the last vote
    raised_in: str | None = None  # and its impl

    @property
    def label(self) -> str:
        """`collectives all_reduce size=1024 (c10d)`, or empty between cases."""
        if not self.suite:
            return ""
        words = [self.suite, self.name, *(f"{k}={v}" for k, v in self.params.items())]
        return " ".join(words) + (f" ({self.impl})" if self.impl else "")


@dataclass(frozen=True)
class Stand:
    """Where a rank stands when trouble is found, as it writes it into the store.

    case, step: how many cases and samples it has begun. where: file, line and function its main
    thread is in. waits: whether that is inside torch or the harness, so that it probably waits for
    others. raised_at: seconds since 1970, 0 if it did not raise.
    """

    cause: str  # "died", "interrupted", "timeout", "raised", "error", "event"
    label: str = ""
    impl: str | None = None
    step: int = 0
    where: str = ""
    waits: bool = False
    case: int = 0
    raised: str | None = None
    raised_at: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    """What ended the world. rank: whose fault it is, where that can be told; code: the exit code;
    blames_case: whether the case in hand has failed, rather than been cut short."""

    sentence: str
    rank: int | None
    code: int = EXIT_CASE_FAILED
    blames_case: bool = True


INTERRUPTED = Diagnosis("interrupted", None, EXIT_INTERRUPTED, blames_case=False)


def diagnose(stands: Mapping[int, Stand], hosts: Sequence[str], timeout_s: float) -> Diagnosis:
    """Who broke the world, from where every rank that answered the roll call stands."""

    def named(ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)

    missing = [rank for rank in range(len(hosts)) if rank not in stands]
    if missing:
        return Diagnosis(f"{named(missing)} died or did not answer", missing[0])
    raised = [rank for rank, stand in stands.items() if stand.raised]
    if raised:
        first = min(raised, key=lambda rank: (stands[rank].raised_at, rank))
        others = " while the other ranks waited for it" if len(raised) < len(hosts) else ""
        return Diagnosis(f"{named([first])} raised {stands[first].raised}{others}", first)
    causes = {stand.cause for stand in stands.values()}
    if causes & {"interrupted", "died"}:  # told to end, and nobody is missing
        return INTERRUPTED
    late = _latecomers(stands)
    limit = f"within --timeout {timeout_s:g} s"
    if late:
        where = f" (at {stands[late[0]].where})" if stands[late[0]].where else ""
        return Diagnosis(f"{named(late)} did not finish {limit}{where}", late[0])
    places = "; ".join(f"rank {rank} at {stand.where}" for rank, stand in sorted(stands.items())[:4])
    return Diagnosis(
        f"no rank finished {limit}, they wait for one another ({places})", None, EXIT_CASE_FAILED
    )


def _latecomers(stands: Mapping[int, Stand]) -> list[int]:
    """The ranks that the others wait for: behind by a sample, or busy with code of their own."""
    stands = {rank: stand for rank, stand in stands.items() if stand.label} or stands
    progress = {rank: (stand.case, stand.step) for rank, stand in sorted(stands.items())}
    if len(stands) == 1 or len(set(progress.values())) > 1:
        return [rank for rank, reached in progress.items() if reached == min(progress.values())]
    busy = [rank for rank, stand in sorted(stands.items()) if not stand.waits]
    if 0 < len(busy) < len(stands):
        return busy
    by_place: dict[str, list[int]] = {}
    for rank, stand in sorted(stands.items()):
        by_place.setdefault(stand.where, []).append(rank)
    few = min(by_place.values(), key=len)
    return few if len(few) * 2 < len(stands) else []


class Watch:
    """The watch of one rank. Signals are watched from its making; the rest from `join` on.

    on_end: called once, on the lowest living rank, with what happened and the label of the case; it
        writes the failed result and the last line. Runs in a helper thread.
    """

    def __init__(self, now: Now, rank: int, size: int, on_end: Callable[[Diagnosis], None]) -> None:
        self._now = now
        self._rank = rank
        self._on_end = on_end
        self._hosts: list[str] = ["this host"] * size
        self._serving_rank: int | None = None
        self._timeout_s = 0.0
        self._connect: Callable[[bool], Store] | None = None
        self._store: Store | None = None  # opened for the roll call
        self._votes: Callable[[], int] = lambda: 0
        self._raised_at = 0.0
        self._ending = threading.Lock()
        self._finished: int | None = None
        self._main = threading.main_thread().ident
        threading.Thread(target=self._watch_signals, name="signals", daemon=True).start()

    # ---- what the run tells the watch ----

    def join(
        self,
        connect: Callable[[bool], Store],
        hosts: Sequence[str],
        votes: Callable[[], int],
        serving_rank: int | None,
    ) -> None:
        """The world is there: watches its events from now on.

        hosts: of each rank. votes: how many votes were decided so far. serving_rank: the one that
        hosts the store, None where the launcher does.
        """
        self._hosts = list(hosts)
        self._votes = votes
        self._serving_rank = serving_rank
        self._connect = connect
        if len(hosts) > 1:
            events = connect(False)
            threading.Thread(target=self._watch_events, args=(events,), name="events", daemon=True).start()

    @contextmanager
    def limit(self, timeout_s: float) -> Iterator[None]:
        """Within the block this rank must not take longer than so many seconds."""
        self._timeout_s = timeout_s
        timer = threading.Timer(timeout_s, self.trouble, ("timeout",))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def raised(self, reason: str) -> None:
        """A call raised here: the others may be waiting for it in a collective."""
        self._raised_at = time.time()
        self._publish({"kind": "raised", "votes": self._votes(), "rank": self._rank, "reason": reason})

    def fault(self, reason: str) -> NoReturn:
        """This rank cannot go on, and nothing foresaw why: ends the world."""
        self._now.raised, self._raised_at = reason, time.time()
        self.trouble("raised")

    def stop_others(self, code: int) -> None:
        """Rank 0 cannot go on (its file cannot be written, say): all other ranks leave with `code`."""
        self._publish({"kind": "stop", "code": code})

    def finish(self, code: int) -> None:
        """All is done: from here on SIGTERM only means to leave with `code` a little earlier."""
        self._ending.acquire()  # waits for ever if another thread is ending the process
        self._finished = code

    # ---- what the threads wait for ----

    def _watch_signals(self) -> None:
        while True:
            got = signal.sigwait(WATCHED_SIGNALS)
            if self._finished is not None:
                os._exit(self._finished)
            self.trouble("died" if got == signal.SIGTERM else "interrupted")

    def _watch_events(self, store: Store) -> None:
        number = 0
        while True:
            try:
                store.wait([f"event/{number}"], _FOREVER)
                event = json.loads(store.get(f"event/{number}"))
            except RuntimeError:
                if self._finished is None:
                    self.trouble("died")  # whoever served the store did
                return
            number += 1
            match event["kind"]:
                case "stop":
                    self._leave(event["code"])
                case "trouble":
                    self.trouble("event")
                case "raised":
                    timer = threading.Timer(GRACE_S, self._settled_or_trouble, (event["votes"],))
                    timer.daemon = True
                    timer.start()

    def _settled_or_trouble(self, votes: int) -> None:
        if self._finished is None and self._votes() <= votes:
            self.trouble("raised")

    # ---- the end ----

    def trouble(self, cause: str) -> NoReturn:
        """Ends this process, after the roll call. Any thread, any number of times."""
        self._ending.acquire()  # waits for ever if another thread is ending the process
        stand = self._stand(cause)
        if cause == "interrupted":
            self._end(INTERRUPTED, reports=self._rank == 0)
        if self._connect is None:  # the world is not there yet
            sentence = stand.raised or "ended while the ranks were starting"
            self._end(Diagnosis(sentence, None), reports=self._rank == 0)
        if cause == "died":
            time.sleep(DYING_S)
        try:
            stands = self._call_roll(stand)
        except RuntimeError:
            first_here = self._rank == self._hosts.index(self._hosts[self._rank])
            after_server = self._serving_rank == 0 and self._rank == 1
            self._end(self._without_store(), reports=first_here or after_server)
        self._end(diagnose(stands, self._hosts, self._timeout_s), reports=self._rank == min(stands))

    def _without_store(self) -> Diagnosis:
        """The store is gone, and with it whoever served it; the other ranks cannot be asked."""
        if self._serving_rank is None:
            return Diagnosis("the process that started the ranks died", None, blames_case=False)
        who = f"rank {self._serving_rank} on {self._hosts[self._serving_rank]}"
        return Diagnosis(f"{who} died or did not answer", self._serving_rank)

    def _end(self, diagnosis: Diagnosis, *, reports: bool) -> NoReturn:
        try:
            if reports:
                self._on_end(diagnosis)
                self._mark_reported()
            else:
                self._wait_for_report()
        finally:
            self._exit(diagnosis.code)

    def _call_roll(self, stand: Stand) -> dict[int, Stand]:
        if len(self._hosts) == 1:
            return {self._rank: stand}
        assert self._connect is not None
        store = self._store = self._connect(False)
        if stand.cause != "event":
            self._publish({"kind": "trouble"}, store)
        store.set(f"alive/{self._rank}", json.dumps(asdict(stand)))
        keys = [f"alive/{rank}" for rank in range(len(self._hosts))]
        try:
            store.wait(keys, timedelta(seconds=ROLL_CALL_S))
        except RuntimeError:
            there = [key for key in keys if store.check([key])]
        else:
            there = keys
        return {int(key.partition("/")[2]): Stand(**json.loads(store.get(key))) for key in there}

    def _stand(self, cause: str) -> Stand:
        now = self._now
        where, waits = _where(sys._current_frames().get(self._main or 0))
        return Stand(
            cause, now.label, now.impl, now.step, where, waits, now.case, now.raised, self._raised_at
        )

    def _mark_reported(self) -> None:
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set("reported", "1")

    def _wait_for_report(self) -> None:
        """Leaving earlier could make a launcher end the rank that is just writing the last line."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.wait(["reported"], timedelta(seconds=2 * ROLL_CALL_S))

    def _publish(self, event: Mapping[str, Any], store: Store | None = None) -> None:
        if self._connect is None or len(self._hosts) == 1:
            return
        with suppress(RuntimeError):  # the store is gone: each rank finds that out by itself
            store = store or self._connect(False)
            store.set(f"event/{store.add('events', 1) - 1}", json.dumps(event))

    def _leave(self, code: int) -> None:
        self._ending.acquire()
        self._exit(code)

    def _exit(self, code: int) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


WATCHED_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})


def block_signals() -> None:
    """Leaves the watched signals to the watch: a main thread inside a collective would not see them.

    Called before any other thread exists, since threads inherit it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)


def _where(frame: Any) -> tuple[str, bool]:
    """The innermost frame as `file.py:12 in run`, and whether it is torch's or the harness's own."""
    if frame is None:
        return "", True
    path = Path(frame.f_code.co_filename)
    ours = path.parent in OUR_FOLDERS
    return f"{path.name}:{frame.f_lineno} in {frame.f_code.co_name}", ours or "torch" in path.parts
