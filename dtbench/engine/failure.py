"""Notices that a rank died, raised or hangs, informs all ranks, and ends them.

The main thread may be in a collective that never returns, so a few threads wait for failures. They sleep until
something happens: no heartbeat disturbs the measurement. They wait for

- signals: a launcher sends SIGTERM to the remaining ranks when one dies, and Ctrl-C arrives as SIGINT;
- an event in the store: another rank raised, noticed a failure, or stops all ranks;
- the timeout of the active case.

After a failure every living rank writes its state into the store. A rank whose state is missing after `ANSWER_S` is
dead or frozen. The lowest living rank reports the failure, and all ranks leave by `os._exit`, since their main threads
may never return. `record_failure` then writes the failed result, in our launcher or else in the reporting rank.
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

from dtbench.errors import EXIT_CASE_FAILED, EXIT_INTERRUPTED, OutputError, UnreadableRunError, print_error
from dtbench.grouping import group_by
from dtbench.records.result import Result
from dtbench.records.run import RunWriter, read_run
from dtbench.suite import Param

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")

# Time for a rank to write its state after a failure.
ANSWER_S = 2.0
# Time for the other ranks to reach the next vote after a rank raised. Their current call may still finish, or may wait
# for that rank forever.
GRACE_S = 5.0
# Time for the slowest rank to leave after the last vote.
FAREWELL_S = 10.0
# A killed launcher may close its store's socket a moment after its ranks get the signal.
STORE_CLOSING_S = 0.3
# Timeout of the store, longer than any run. The failure detector ends the process earlier and prints the reason.
FOREVER = timedelta(days=7)
_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_ENGINE_FOLDER = Path(__file__).parent


@dataclass
class ActiveCase:
    """The case that this rank is measuring. Another thread reads it when something fails.

    Attributes:
        name: the case's name; "" between cases.
        impls: the impls of the case.
        impl: the impl whose code is running.
        launch: number of the launch, from 0.
        cases_begun: number of cases that this rank has begun.
        samples_begun: number of samples begun in the case; the other ranks wait for the rank with the fewest.
        failure: the first failure since the last vote.
        failed_impl: the impl that failed.
    """

    suite: str = ""
    name: str = ""
    params: Mapping[str, Param] = field(default_factory=dict)
    impls: Sequence[str] = ()
    impl: str | None = None
    launch: int = 0
    cases_begun: int = 0
    samples_begun: int = 0
    failure: str | None = None
    failed_impl: str | None = None

    def begin(self, suite: str, name: str, params: Mapping[str, Param], impls: Sequence[str]) -> None:
        self.suite, self.name, self.params, self.impls = suite, name, params, impls
        self.cases_begun, self.samples_begun = self.cases_begun + 1, 0

    def end(self) -> None:
        self.name = ""

    @property
    def blamed_impls(self) -> Sequence[str]:
        """The impl that failed or is running; all impls of the case if neither is known."""
        impl = self.failed_impl or self.impl
        return (impl,) if impl else self.impls

    @property
    def label(self) -> str:
        """The case in one line: `collectives all_reduce size=1024 (c10d)`; "" between cases."""
        if not self.name:
            return ""
        words = [self.suite, self.name, *(f"{k}={v}" for k, v in self.params.items())]
        impls = self.blamed_impls
        return " ".join(filter(None, words)) + (f" ({impls[0]})" if len(impls) == 1 else "")


@dataclass(frozen=True)
class RankState:
    """The state of a rank at a failure, as it writes it into the store.

    Attributes:
        cause: how this rank noticed the failure: "died", "interrupted", "timeout", "raised" or "event".
        case_label: the active case.
        samples_begun: number of samples begun in the case.
        location: file, line and function that the main thread is in.
        is_waiting: whether that location is inside torch or this package, so that the rank probably waits for others.
        cases_begun: number of cases begun.
        failure: the error that this rank raised, if any.
        failed_at: when it raised, seconds since 1970; 0 if it did not.
    """

    cause: str
    case_label: str = ""
    samples_begun: int = 0
    location: str = ""
    is_waiting: bool = False
    cases_begun: int = 0
    failure: str | None = None
    failed_at: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    """The reason why the ranks ended.

    Attributes:
        message: the reason in words.
        rank: the rank at fault, if it is known.
        code: the exit code.
        blames_case: whether the active case failed, rather than being cut short.
    """

    message: str
    rank: int | None
    code: int = EXIT_CASE_FAILED
    blames_case: bool = True

    def message_during(self, case: ActiveCase) -> str:
        """Returns the message, with the label of the case if the case failed."""
        return f"{self.message} during {case.label}" if self.blames_case and case.name else self.message


INTERRUPTED = Diagnosis("interrupted", None, EXIT_INTERRUPTED, blames_case=False)
LAUNCHER_DIED = Diagnosis(
    "the process that started the ranks died or cannot be reached", None, blames_case=False
)


def diagnose(states: Mapping[int, RankState], hosts: Sequence[str], limit: str) -> Diagnosis:
    """Finds the rank at fault.

    Args:
        states: the state of each rank that answered.
        hosts: host name of each rank.
        limit: at a timeout, the step that did not finish and its limit, see `FailureDetector.limit`.
    """

    def named(ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)

    if missing := [rank for rank in range(len(hosts)) if rank not in states]:
        return Diagnosis(f"{named(missing)} died or did not answer", missing[0])
    if raised := [rank for rank, state in states.items() if state.failure]:
        first = min(raised, key=lambda rank: (states[rank].failed_at, rank))
        waiting = " while the other ranks waited for it" if len(raised) < len(hosts) else ""
        return Diagnosis(f"{named([first])} raised {states[first].failure}{waiting}", first)
    # All ranks answered, so a signal ended them.
    if {state.cause for state in states.values()} & {
        "interrupted",
        "died",
    }:
        return INTERRUPTED
    if late := _late_ranks(states):
        location = f" (at {states[late[0]].location})" if states[late[0]].location else ""
        return Diagnosis(f"{named(late)} did not finish {limit}{location}", late[0])
    locations = "; ".join(f"rank {rank} at {state.location}" for rank, state in sorted(states.items())[:4])
    return Diagnosis(f"no rank finished {limit}, they wait for one another ({locations})", None)


def _late_ranks(states: Mapping[int, RankState]) -> list[int]:
    """Returns the ranks that the others probably wait for.

    These have begun fewer cases or samples, or run code outside torch and this package, or are a minority at a line of
    their own.
    """
    states = {rank: state for rank, state in sorted(states.items()) if state.case_label} or states
    progress = {rank: (state.cases_begun, state.samples_begun) for rank, state in states.items()}
    if len(states) == 1 or len(set(progress.values())) > 1:
        return [rank for rank, reached in progress.items() if reached == min(progress.values())]
    busy = [rank for rank, state in states.items() if not state.is_waiting]
    if 0 < len(busy) < len(states):
        return busy
    fewest = min(group_by(states, lambda rank: states[rank].location).values(), key=len)
    return fewest if len(fewest) * 2 < len(states) else []


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
    message, has_failed = diagnosis.message_during(case), diagnosis.blames_case and bool(case.name)
    try:
        if has_failed:
            _record(diagnosis, case, output, writer)
    except OutputError as error:
        print_error(f"{message}: {error}")
        return False
    continues = has_failed and may_restart
    outcome = "recorded as failed; continuing with new ranks" if continues else describe_kept_results(output)
    print_error(f"{message}: {outcome}")
    return continues


def _record(diagnosis: Diagnosis, case: ActiveCase, output: Path, writer: RunWriter | None) -> None:
    # The file cannot be read if the ranks ended before they wrote its header.
    with (
        suppress(UnreadableRunError),
        nullcontext(writer) if writer is not None else RunWriter.resume(output) as file,
    ):
        for impl in case.blamed_impls:
            result = Result(
                suite=case.suite,
                name=case.name,
                impl=impl,
                params=case.params,
                status="failed",
                reason=diagnosis.message,
                rank=diagnosis.rank,
                launch=case.launch,
            )
            if result.key not in file.results:
                file.append(result)


def describe_kept_results(output: Path) -> str:
    """Describes what a run file holds: `3 results are in x.jsonl; continue with --resume -o x.jsonl`."""
    try:
        count = len(read_run(output, with_samples=False).results)
    except UnreadableRunError:
        return "nothing was measured"
    return f"{count} {'result is' if count == 1 else 'results are'} in {output}; continue with --resume -o {output}"


class FailureDetector:
    """Detects failures on one rank: signals from construction on, failures of other ranks from `join` on."""

    def __init__(
        self, active_case: ActiveCase, rank: int, world_size: int, report: Callable[[Diagnosis], None]
    ) -> None:
        """Starts to wait for signals.

        Args:
            report: called once with the reason, in a helper thread of the lowest living rank.
        """
        self._active_case = active_case
        self._rank = rank
        self._report = report
        self._hosts: Sequence[str] = ["this host"] * world_size
        self._store_rank: int | None = None
        self._limit = ""
        self.joined = False  # whether the other ranks can be informed
        self._store: Store | None = None  # opened when a failure is noticed
        self._votes: Callable[[], int] = lambda: 0
        self._raised: tuple[int, str] = (-1, "")  # votes before the error, and the error
        self._raised_at = 0.0
        self._ending = threading.Lock()  # held for ever by the thread that ends the process
        self._final_code: int | None = None
        threading.Thread(target=self._wait_for_signals, name="signals", daemon=True).start()

    # ---- called by the main thread ----

    def join(
        self,
        connect: Callable[[], Store],
        hosts: Sequence[str],
        votes: Callable[[], int],
        store_rank: int | None,
    ) -> None:
        """Starts to wait for events of the other ranks, which have all joined.

        Args:
            connect: opens a connection to the ranks' store.
            hosts: host name of each rank.
            votes: returns the number of votes taken so far.
            store_rank: the rank that serves the store; None if the launcher does.
        """
        events = connect() if len(hosts) > 1 else None
        self._hosts, self._votes, self._store_rank = hosts, votes, store_rank
        self._connect, self.joined = connect, True
        if events is not None:
            threading.Thread(target=self._wait_for_events, args=(events,), name="events", daemon=True).start()

    @contextmanager
    def limit(self, timeout_s: float, text: str = "") -> Iterator[None]:
        """Ends all ranks if the block takes this rank longer than `timeout_s`.

        Args:
            text: the block and its limit in words, for the message; by default the limit of --timeout.
        """
        outer, self._limit = self._limit, text or f"within --timeout {timeout_s:g} s"
        timer = self._after(timeout_s, self._end_late, self._limit)
        try:
            yield
        finally:
            timer.cancel()
            self._limit = outer

    def _end_late(self, limit: str) -> None:
        self._limit = limit
        self.end_all_ranks("timeout")

    def report_failure(self, error: str) -> None:
        """Informs the other ranks that a call raised here: they may wait for this rank in a collective."""
        self._raised, self._raised_at = (self._votes(), error), time.time()
        self._publish({"kind": "raised", "votes": self._votes()})

    def fail(self, error: str) -> NoReturn:
        """Ends all ranks after an unexpected error."""
        self._active_case.failure, self._raised_at = error, time.time()
        self.end_all_ranks("raised")

    def stop_other_ranks(self, code: int) -> None:
        """Makes all other ranks leave with `code`, for example because rank 0 cannot write its file."""
        self._publish({"kind": "stop", "code": code})
        self.leave(code)

    def leave(self, code: int, store: Store | None = None) -> None:
        """Returns when all ranks have called it, or after `FAREWELL_S`. From now on SIGTERM ends this rank with `code`.

        No rank ends earlier: a launcher kills the other ranks at the first exit code except 0, and rank 0 may serve the
        store.
        """
        self._ending.acquire()
        self._final_code = code
        with suppress(RuntimeError):  # the process that served the store has left
            if self.joined or store is not None:
                store = store or self._connect()
                store.set(f"farewell/{self._rank}", "")
                store.wait(
                    [f"farewell/{rank}" for rank in range(len(self._hosts))], timedelta(seconds=FAREWELL_S)
                )

    # ---- threads ----

    def _wait_for_signals(self) -> None:
        while True:
            number = signal.sigwait(_SIGNALS)
            if self._final_code is not None:
                os._exit(self._final_code)
            self.end_all_ranks("died" if number == signal.SIGTERM else "interrupted")

    def _wait_for_events(self, store: Store) -> None:
        number = 0
        while True:
            try:
                store.wait([f"event/{number}"], FOREVER)
                event = json.loads(store.get(f"event/{number}"))
            except RuntimeError:
                if self._final_code is None:
                    self.end_all_ranks("died")  # the process that served the store has ended
                return
            number += 1
            match event["kind"]:
                case "stop":
                    self.leave(event["code"], store)
                    exit_now(event["code"])
                case "failure":
                    self.end_all_ranks("event")
                case "raised":
                    self._after(GRACE_S, self._end_unless_voted, event["votes"])

    def _end_unless_voted(self, votes: int) -> None:
        if self._final_code is None and self._votes() <= votes:
            self.end_all_ranks("raised")

    def _after(self, seconds: float, step: Callable[[_T], object], argument: _T) -> threading.Timer:
        timer = threading.Timer(seconds, step, (argument,))
        timer.daemon = True
        timer.start()
        return timer

    # ---- the end of the process ----

    def end_all_ranks(self, cause: str) -> NoReturn:
        """Collects the states of all ranks and ends this process. Any thread may call it, any number of times."""
        self._ending.acquire()
        state = self._state(cause)
        if cause == "interrupted":
            self._end(INTERRUPTED, reports=self._rank == 0)
        if not self.joined:
            late = cause == "timeout" and f"rank {self._rank} did not finish {self._limit}"
            message = state.failure or late or "ended while the ranks were starting"
            self._end(Diagnosis(message, None), reports=self._rank == 0 or cause == "timeout")
        if cause == "died":
            time.sleep(STORE_CLOSING_S)
        try:
            states = self._collect_states(state)
        except RuntimeError:
            # The store has ended with the process that served it; the other ranks cannot be asked.
            server = self._store_rank
            diagnosis = (
                LAUNCHER_DIED
                if server is None
                else Diagnosis(f"rank {server} on {self._hosts[server]} died or did not answer", server)
            )
            is_first_on_host = self._rank == self._hosts.index(self._hosts[self._rank])
            replaces_rank_0 = server == 0 and self._rank == 1
            self._end(diagnosis, reports=is_first_on_host or replaces_rank_0)
        self._end(diagnose(states, self._hosts, self._limit), reports=self._rank == min(states))

    def _end(self, diagnosis: Diagnosis, *, reports: bool) -> NoReturn:
        """Ends this process. The ranks that do not report wait for the report.

        If they left earlier, a launcher could kill the reporting rank before it has reported.
        """
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

    def _collect_states(self, state: RankState) -> dict[int, RankState]:
        """Returns the states of the ranks that answer in time."""
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
        case = self._active_case
        location, is_waiting = _locate(sys._current_frames().get(threading.main_thread().ident or 0))
        votes, error = self._raised
        return RankState(
            cause,
            case.label,
            case.samples_begun,
            location,
            is_waiting,
            case.cases_begun,
            case.failure or (error if votes == self._votes() else None),
            self._raised_at,
        )

    def _publish(self, event: Mapping[str, str | int], store: Store | None = None) -> None:
        if not self.joined or len(self._hosts) == 1:
            return
        with suppress(RuntimeError):  # without the store, each rank notices the failure by itself
            store = store or self._connect()
            store.set(f"event/{store.add('events', 1) - 1}", json.dumps(event))


def block_signals() -> None:
    """Leaves signals to the detector, since the main thread does not handle them inside a collective.

    Called before any other thread exists: threads inherit the mask.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def exit_now(code: int) -> NoReturn:
    """Ends the process without waiting for threads that sleep in C++."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _locate(frame: FrameType | None) -> tuple[str, bool]:
    """Returns the innermost frame as `file.py:12 in run`, and whether it belongs to torch or this package."""
    if frame is None:
        return "", True
    path = Path(frame.f_code.co_filename)
    return (
        f"{path.name}:{frame.f_lineno} in {frame.f_code.co_name}",
        path.parent == _ENGINE_FOLDER or "torch" in path.parts,
    )
