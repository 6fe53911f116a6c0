"""Launches of an arm: a fresh process each, its results kept as a run file.

A gate that goes on meets the files of the first one: a launch that is complete, and was asked for the same,
is read instead of made.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dtbench.gate import control
from dtbench.gate.arms import Arm
from dtbench.gate.benchmark import (
    CALL_S,
    IN_HAND,
    LISTING,
    LOG,
    ORDER,
    RESULTS,
    Benchmark,
    Key,
    Listing,
    Order,
    Selection,
    read_listing,
)
from dtbench.gate.logs import CappedLog
from dtbench.gate.process import Round, Started, run_alone, take_turns
from dtbench.gate.schedule import ArmName, Launch, OutOfTimeError
from dtbench.records.run import read_run
from dtbench.suite import Result, Run, RunOptions
from dtbench.suite.errors import ArmError, DtbenchError
from dtbench.suite.mesh import format_mesh

# A command line's longest argument on Linux is 128 KiB; beyond half of it, ranks measure the whole selection.
_MAX_FILTER_CHARS = 60_000
_NO_END = "no end after"
# Each is a process with torch, of some 300 MB.
ROUNDS_TOGETHER = 3
WorkerRequest = tuple[Arm, Order, Path]  # a worker's arm, its order, and how its files begin
Retry = tuple[
    WorkerRequest | None, list[Benchmark]
]  # after a worker died: what to ask another, and whom to blame


@dataclass(frozen=True)
class Counted:
    """What the counting launch of an arm found: its benchmarks, what failed or was skipped, counters."""

    listing: Listing
    bad: Mapping[Key, str] = field(default_factory=dict)
    skipped: Mapping[Key, str] = field(default_factory=dict)
    counters: Mapping[Key, Mapping[str, float]] = field(default_factory=dict)


@dataclass
class Limits:
    """timeout_s: of one launch. deadline: when the budget ends, on the monotonic clock."""

    timeout_s: float
    deadline: float = math.inf
    budget: str = ""

    def left_s(self) -> float:
        """What one launch may take now."""
        return min(self.timeout_s, self.deadline - time.monotonic())


class Launcher:
    """Makes the launches of one gate; to be closed."""

    def __init__(
        self,
        arms: Mapping[str, Arm],
        selections: Mapping[str, Sequence[Selection]],
        plan: RunOptions,
        folder: Path,
        limits: Limits,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._arms = arms
        self._selections = selections
        self._plan = plan
        self._folder = folder.absolute()  # launches start elsewhere
        self._limits = limits
        self._call_s: dict[Key, float] = {}
        self._variables = dict(variables or {})
        self._loaded: dict[str, list[str]] = {}  # modules of torch, in all arms, as in a listing
        self._cpus = itertools.cycle(_cpus())
        self._round: Round | None = None
        self._prepared: list[Round] = []
        self._ahead = 0
        self._number = 0
        self._longest_s = 0.0  # of launches that were made together
        self.reused = 0
        self.left_out = 0  # bytes that launches printed and their logs do not keep

    def close(self) -> None:
        """Leaves no process behind."""
        for made in [*([self._round] if self._round else []), *self._prepared]:
            self.left_out += made.close()
        self._round, self._prepared = None, []

    # ---- counting ----

    def count(self, *names: str) -> list[Counted]:
        """Lists the benchmarks of the arms and counts what one call of each does, all arms at once.

        Raises:
            ArmError: an arm cannot even list them.
            OutOfTimeError: the budget is spent.
        """
        with self._together([self._counting(name) for name in names]) as works:
            counted = [self._counted(name, work) for name, work in zip(names, works, strict=True)]
        one, *others = (c.listing.loaded for c in counted)
        for label, modules in one.items():
            self._loaded[label] = [m for m in modules if all(m in other.get(label, ()) for other in others)]
        return counted

    def _counting(self, name: str, without: Set[str] = frozenset()) -> WorkerRequest:
        stem = self._next(f"{name}-count")
        order = self._order(name, "count", without)
        return self._arms[name], order, stem

    def _counted(self, name: str, work: _Work) -> Counted:
        listings: list[Listing] = []

        def again(died: str, stem: Path, results: Set[Key], bad: Set[Key]) -> Retry:
            listings.append(_listing_of(stem, self._arms[name], died))
            if not died:
                return None, []
            listed = listings[-1].benchmarks
            blamed = [b for b in listed if b.label == _in_hand(stem) and b.key not in bad]
            if not blamed:
                raise ArmError(f"{name} cannot be counted: {died}")
            gone = bad | {b.key for b in blamed}
            return self._counting(name, {b.label for b in listed if b.key in gone}), blamed

        results, bad, _ = self._carried_out(work, again)
        listing = listings[-1]
        of_ranks = [b for b in listing.benchmarks if b.world == "ranks"]
        if of_ranks:
            results |= self._ranks(name, of_ranks, bad)
        for key, result in results.items():
            if result.status in ("failed", "wrong"):
                bad[key] = f"{result.status}: {result.reason}"
            if name == "base" and CALL_S in result.counters:
                self._call_s.setdefault(key, result.counters[CALL_S])
        return Counted(
            listing,
            bad,
            {k: r.reason for k, r in results.items() if r.status == "skipped"},
            {k: r.counters for k, r in results.items() if r.status == "ok"},
        )

    def _carried_out(
        self, work: _Work, again: Callable[[str, Path, Set[Key], Set[Key]], Retry]
    ) -> tuple[dict[Key, Result], dict[Key, str], set[Key]]:
        """What a worker gives, and those that take its place when it dies: results, what died and how, and what
        the first has measured.

        again: from how a worker died ("" if not), its files, what has results and what has died: what to ask
        another, and whom to blame.
        """
        results: dict[Key, Result] = {}
        bad: dict[Key, str] = {}
        first: set[Key] | None = None
        while True:
            died = self._finish(work)
            results |= {r.case_key: r for r in _results(work.stem)}
            first = set(results) if first is None else first
            asked, blamed = again(died, work.stem, results.keys(), bad.keys())
            bad |= {b.key: died for b in blamed}
            if asked is None:
                return results, bad, first
            (work,) = self._begin([asked], again=True)

    # ---- timing ----

    def prepare(self, rounds: int) -> None:
        """Says that so many rounds follow: they load together, which keeps all cores busy."""
        self._ahead = rounds

    def launch(self, arms: Sequence[ArmName], benchmarks: Sequence[Benchmark]) -> list[Launch]:
        """A launch of all the benchmarks per arm, in this order: a process for the simulated ones and the
        control, and a world of ranks for the others. The processes are set up side by side and measure by turns.
        What brings a process down fails, and the rest is launched again.

        Raises:
            OutOfTimeError: the budget does not hold them.
        """
        simulated = [b for b in benchmarks if b.world == "simulated"]
        with self._together([self._timing(arm, simulated) for arm in arms]) as works:
            processes = [work.process for work in works if work.process is not None]
            for process in processes:
                process.await_ready(self._limits.left_s())
            for made in self._prepared:
                made.await_prepared(self._limits.left_s())
            take_turns(processes, self._limits.timeout_s, self._limits.deadline)
            return [self._timed(arm, work, benchmarks) for arm, work in zip(arms, works, strict=True)]

    def _timing(self, arm: ArmName, simulated: Sequence[Benchmark]) -> WorkerRequest:
        name = _side(arm)
        call_s = {b.label: self._call_s.get(b.key, 0.0) for b in simulated}
        return self._arms[name], self._order(name, "time", call_s=call_s), self._next(arm)

    def _timed(self, arm: ArmName, work: _Work, benchmarks: Sequence[Benchmark]) -> Launch:
        def again(died: str, stem: Path, results: Set[Key], bad: Set[Key]) -> Retry:
            if not died:
                return None, []
            left = [b for b in benchmarks if b.world == "simulated" and b.key not in results | bad]
            blamed = [b for b in left if b.label == _in_hand(stem)] or left
            left = [b for b in left if b not in blamed]
            return (self._timing(arm, left) if left else None), blamed

        # What is launched again measures on its own.
        results, bad, in_turn = self._carried_out(work, again)
        ranks = [b for b in benchmarks if b.world == "ranks"]
        if ranks:
            results |= self._ranks(arm, ranks, bad)
        return _launch_of(results, benchmarks, bad, in_turn)

    def _ranks(self, arm: str, benchmarks: Sequence[Benchmark], bad: dict[Key, str]) -> dict[Key, Result]:
        """One `dtbench run` of the selected suites of ranks."""
        name = _side(arm)
        stem = self._next(f"{arm}-ranks")
        suites = list(dict.fromkeys(s.suite for s in self._selections[name]))
        plan = self._plan
        command = ["run", *suites, "--device", plan.device_type, "--mesh", format_mesh(plan.mesh)]
        command += ["--nproc", str(plan.world_size), "--impl", ",".join(plan.impls)]
        command += ["--dtype", ",".join(plan.dtypes)]
        if plan.sizes_chosen:
            command += ["--size", ",".join(map(str, plan.sizes_bytes))]
        text = "\n".join(dict.fromkeys(shlex.quote(b.case_label) for b in benchmarks))
        if len(text) <= _MAX_FILTER_CHARS:
            command += ["--filter", text]
        died = self._run_ranks(self._arms[name], command, stem)
        keys = {b.key for b in benchmarks}
        results = {r.case_key: r for r in _results(stem) if r.case_key in keys}
        for benchmark in benchmarks:
            if benchmark.key not in results and died:
                bad[benchmark.key] = died
        return results

    def _run_ranks(self, arm: Arm, command: Sequence[str], stem: Path) -> str:
        text = json.dumps([arm.identity, list(command[len(self._selections["base"]) + 1 :])])
        if self._is_cached([_Work(stem, text)]):
            return ""
        self._check_budget()
        module = ["dtbench", *command, "-o", f"{stem.with_suffix(RESULTS)}"]
        log = CappedLog(stem.with_suffix(LOG))
        died = self._why(run_alone(arm, module, log, self._variables, self._limits.left_s()))
        self.left_out += log.left_out
        if _is_complete(stem):  # cases may have failed: the file says which
            _asked(stem).write_text(text)
            return ""
        return died

    # ---- processes ----

    def _next(self, what: str) -> Path:
        self._number += 1
        return self._folder / f"{self._number:04d}-{what}"

    def _order(
        self,
        name: str,
        mode: Literal["count", "time"],
        without: Set[str] = frozenset(),
        call_s: Mapping[str, float] | None = None,
    ) -> Order:
        selections = tuple(self._selections[name])
        return Order(
            mode, self._arms[name].identity, selections, self._plan, tuple(sorted(without)), call_s or {}
        )

    @contextlib.contextmanager
    def _together(self, asked: Sequence[WorkerRequest]) -> Iterator[list[_Work]]:
        """Workers begun together; nothing of them is left in the end."""
        began = time.monotonic()
        works = self._begin(asked)
        try:
            yield works
        finally:
            for work in works:
                if work.process is not None:
                    work.process.end()
        if any(work.process is not None for work in works):
            self._longest_s = max(self._longest_s, time.monotonic() - began)

    def _begin(self, asked: Sequence[WorkerRequest], *, again: bool = False) -> list[_Work]:
        """Starts the workers, but for those whose answer lies there from before. again: in the place of one of
        the round that died, and so forked off the same process.
        """
        works = [_Work(stem, order.portable()) for _, order, stem in asked]
        if self._is_cached(works):
            return works
        for _, order, stem in asked:
            stem.with_suffix(ORDER).write_text(order.to_json())
        self._check_budget()
        if self._round is None or not again:
            self._round = self._next_round(asked)
        started = [self._round.start(arm, stem) for arm, _, stem in asked]
        return [replace(work, process=process) for work, process in zip(works, started, strict=True)]

    def _next_round(self, asked: Sequence[WorkerRequest]) -> Round:
        """One of which nothing was launched. If none is prepared, as many are as are known to follow."""
        if self._round is not None:
            self.left_out += self._round.close()
        if not self._prepared:
            wanted = {"", *(label for _, order, _ in asked for label in order.call_s)}
            load = [name for label, names in self._loaded.items() if label in wanted for name in names]
            stem = asked[0][2]
            for number in range(max(1, min(self._ahead, ROUNDS_TOGETHER))):
                self._prepared.append(Round(self._arms.values(), self._variables, load, next(self._cpus)))
                log = stem.with_name(f"{stem.name}.loader{number}")
                self._prepared[-1].prepare((arm for arm, *_ in asked), log)
        self._ahead -= 1
        return self._prepared.pop(0)

    def _finish(self, work: _Work) -> str:
        """Has a worker carry out what is left of its order; what went wrong, or ""."""
        if work.process is None:
            return ""
        try:
            died = self._why(work.process.run(self._limits.timeout_s, self._limits.deadline))
        finally:
            work.process.end()
        if not died:
            _asked(work.stem).write_text(work.text)
        return died

    def _is_cached(self, works: Sequence[_Work]) -> bool:
        """Whether all were answered before: what was measured beside another launch is of no use without it."""
        if all(_is_answered(work.stem, work.text) for work in works):
            self.reused += len(works)
            return True
        for work in works:
            for path in work.stem.parent.glob(f"{work.stem.name}.*"):
                path.unlink()
        return False

    def _why(self, died: str | None) -> str:
        """How a process ended. died: None if it took too long."""
        if died is not None:
            return died
        if time.monotonic() >= self._limits.deadline:
            raise self._out_of_time()
        return f"{_NO_END} {self._limits.timeout_s:g} s (--launch-timeout)"

    def _check_budget(self) -> None:
        if self._limits.deadline - time.monotonic() <= self._longest_s:
            raise self._out_of_time()

    def _out_of_time(self) -> OutOfTimeError:
        return OutOfTimeError(f"the budget of {self._limits.budget} holds no further launch")


@dataclass(frozen=True)
class _Work:
    """What a worker was asked. process: None where its answer lies there already."""

    stem: Path
    text: str
    process: Started | None = None


def _cpus() -> list[int]:
    """Those that launches may measure on; -1 where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [-1]


def _side(arm: str) -> str:
    return "head" if arm.startswith("head") else "base"


def _launch_of(
    results: Mapping[Key, Result], benchmarks: Sequence[Benchmark], bad: dict[Key, str], in_turn: Set[Key]
) -> Launch:
    wanted = {b.key: b for b in benchmarks}
    times: dict[Key, float] = {}
    for key, result in results.items():
        if result.status != "ok" or result.time_s is None:
            if key in wanted:
                bad[key] = f"{result.status}: {result.reason}"
        elif key in wanted or key[0] == control.NAME:
            estimator = wanted[key].estimator if key in wanted else "min"
            times[key] = getattr(result.time_s, estimator)
    samples = {key: results[key].samples_s for key in in_turn if key in times}
    return Launch(times, bad, samples)


def _asked(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.order.json")


def _is_answered(stem: Path, text: str) -> bool:
    asked = _asked(stem)
    return asked.exists() and asked.read_text() == text and _is_complete(stem)


def _is_complete(stem: Path) -> bool:
    run = _run_of(stem)
    return run is not None and run.complete


def _results(stem: Path) -> tuple[Result, ...]:
    run = _run_of(stem)
    return run.results if run is not None else ()


def _run_of(stem: Path) -> Run | None:
    """What a launch wrote, or nothing: an unreadable file is as good as none."""
    try:
        return read_run(stem.with_suffix(RESULTS))
    except DtbenchError:
        return None


def _in_hand(stem: Path) -> str:
    try:
        return stem.with_suffix(IN_HAND).read_text()
    except OSError:
        return ""


def _listing_of(stem: Path, arm: Arm, died: str) -> Listing:
    try:
        return read_listing(stem.with_suffix(LISTING))
    except DtbenchError as error:
        if died.startswith(_NO_END):
            died = f"its suites, or what they import, hang while they are loaded: {died}"
        raise ArmError(f"{arm.text} cannot list its benchmarks: {died or error}") from error
