"""Makes the launches of a gate. A benchmark that ends a launch fails, and the others are launched again."""

import itertools
import math
import os
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtbench.errors import ArmError, DtbenchError
from dtbench.gate.arms import Arm
from dtbench.gate.benchmark import CALL_S, Benchmark, Key, Listing, Order, SuiteSelection
from dtbench.gate.process import LATE, LaunchProcess, Round, await_ready, run_ranks, take_turns
from dtbench.gate.schedule import ArmName, LaunchTimes, OutOfTimeError
from dtbench.records.result import Result
from dtbench.records.run import read_run
from dtbench.suite import RunOptions
from dtbench.suite.mesh import format_mesh

# Linux limits one argument to 128 KiB. If --filter would exceed about half of that, it is omitted and ranks measure the
# whole selection.
_MAX_FILTER_CHARS = 60_000
# The loaders of this many rounds start at once, which keeps all cores busy. Each is a process with torch, about 300 MB.
ROUNDS_TOGETHER = 3
_Results = dict[Key, Result]


@dataclass(frozen=True)
class Counted:
    """The result of an arm's counting launch.

    Attributes:
        listing: the arm's benchmarks.
        bad: benchmark -> why it failed.
        skipped: benchmark -> why it was skipped.
        counters: benchmark -> its counters per call.
    """

    listing: Listing
    bad: Mapping[Key, str] = field(default_factory=dict)
    skipped: Mapping[Key, str] = field(default_factory=dict)
    counters: Mapping[Key, Mapping[str, float]] = field(default_factory=dict)


@dataclass
class Limits:
    """Limits on the time of launches.

    Attributes:
        timeout_s: limit of one launch, seconds.
        deadline: end of the budget on the monotonic clock, seconds.
        budget: the budget as text, for messages.
    """

    timeout_s: float
    deadline: float = math.inf
    budget: str = ""

    def left_s(self) -> float:
        """Returns the seconds that a launch may take if it starts now."""
        return min(self.timeout_s, self.deadline - time.monotonic())

    def out_of_time(self) -> OutOfTimeError:
        return OutOfTimeError(f"the budget of {self.budget} is too short for another launch")

    def reason(self, died: str) -> str:
        """Returns why a launch failed.

        Raises:
            OutOfTimeError: it exceeded the budget.
        """
        if died == LATE and time.monotonic() >= self.deadline:
            raise self.out_of_time()
        return f"not finished after {self.timeout_s:g} s (--launch-timeout)" if died == LATE else died


class Launcher:
    """Makes the launches of one gate; must be closed.

    Args:
        arms: "base" and "head" -> the arm.
        selections: "base" and "head" -> the selections of that arm.
        options: the run options of both arms.
        folder: folder for the output of launches.
        limits: time limits of launches.
        variables: environment variables that are set in every launch.
    """

    def __init__(
        self,
        arms: Mapping[str, Arm],
        selections: Mapping[str, tuple[SuiteSelection, ...]],
        options: RunOptions,
        folder: Path,
        limits: Limits,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._arms, self._selections, self._options, self._limits = arms, selections, options, limits
        self._folder = folder.absolute()  # launches have other working directories
        self._variables = dict(variables or {})
        self._call_s: dict[Key, float] = {}
        self._cpus = itertools.cycle(
            sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [-1]
        )
        self._numbers = itertools.count(1)
        self._prepared: list[Round] = []
        self._round: Round | None = None
        self._running: list[LaunchProcess] = []
        self._longest_s = 0.0  # the longest group of launches so far

    def close(self) -> None:
        """Ends all processes."""
        self._end_round()
        while self._prepared:
            self._prepared.pop().close()

    # ---- counting ----

    def count(self, *names: str) -> list[Counted]:
        """Lists the benchmarks of these arms and counts the operations of one call of each. Arms run in parallel.

        Raises:
            ArmError: an arm cannot list its benchmarks.
            OutOfTimeError: the budget is spent.
        """
        listings = {name: Listing((), ()) for name in names}
        results: dict[str, _Results] = {name: {} for name in names}
        bad: dict[str, dict[Key, str]] = {name: {} for name in names}
        pending = list(names)
        while pending:
            launches = self._started(
                (
                    name,
                    Order(
                        "count",
                        self._selections[name],
                        self._options,
                        tuple(
                            b.label for b in listings[name].benchmarks if b.key in results[name] | bad[name]
                        ),
                        top=str(self._arms[name].top or ""),
                    ),
                )
                for name in pending
            )
            for name, launch in zip(tuple(pending), launches, strict=True):
                results[name] |= launch.results
                listings[name] = launch.listing or listings[name]
                if not launch.died:
                    pending.remove(name)
                    continue
                reason = self._limits.reason(launch.died)
                blamed = [b.key for b in listings[name].benchmarks if b.label == launch.label]
                if not blamed:
                    raise ArmError(f"{self._arms[name].text} cannot list its benchmarks: {reason}")
                bad[name][blamed[0]] = reason
        self._end_round()
        return [self._counted(name, listings[name], results[name], bad[name]) for name in names]

    def _counted(self, name: str, listing: Listing, results: _Results, bad: dict[Key, str]) -> Counted:
        results |= self._ranks(name, listing.benchmarks, bad)
        for key, result in results.items():
            if result.status in ("failed", "wrong"):
                bad[key] = f"{result.status}: {result.reason}"
            if name == "base" and CALL_S in result.counters:
                self._call_s.setdefault(key, result.counters[CALL_S])
        return Counted(
            listing,
            bad,
            {key: r.reason for key, r in results.items() if r.status == "skipped"},
            {key: r.counters for key, r in results.items() if r.status == "ok"},
        )

    # ---- timing ----

    def launch(self, arms: Sequence[ArmName], benchmarks: Sequence[Benchmark]) -> list[LaunchTimes]:
        """Launches the benchmarks once per arm, in this order.

        One process per launch measures the simulated benchmarks and the control. These processes are set up in parallel
        and measure in turns. Then, one launch after another, ranks are started for the other benchmarks.

        Raises:
            OutOfTimeError: the budget is too short.
        """
        began = time.monotonic()
        bad: list[dict[Key, str]] = [{} for _ in arms]
        simulated = [b for b in benchmarks if b.world == "simulated"]
        while True:
            call_s = {b.label: self._call_s.get(b.key, 0.0) for b in simulated}
            launches = self._started(
                (side, Order("time", self._selections[side], self._options, (), call_s))
                for side in map(_side, arms)
            )
            if not any(launch.died for launch in launches):
                for prepared in self._prepared:
                    prepared.await_loaded(self._limits.left_s())
                take_turns(launches, self._limits.timeout_s, self._limits.deadline)
            blamed: set[Key] = set()
            for launch, of_arm in zip(launches, bad, strict=True):
                if launch.died:
                    blamed_keys = [b.key for b in simulated if b.label == launch.label] or [
                        b.key for b in simulated if b.key not in launch.results
                    ]
                    of_arm |= dict.fromkeys(blamed_keys, self._limits.reason(launch.died))
                    blamed |= set(blamed_keys)
            if not blamed:
                break
            simulated = [b for b in simulated if b.key not in blamed]
        self._end_round()
        launch_times = []
        for arm, launch, of_arm in zip(arms, launches, bad, strict=True):
            launch_times.append(
                _times_of(launch.results, self._ranks(arm, benchmarks, of_arm), benchmarks, of_arm)
            )
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        return launch_times

    # ---- processes ----

    def _started(self, orders: Iterable[tuple[str, Order]]) -> list[LaunchProcess]:
        """Starts one launch per side and order, in a new round, and waits until they are ready or have ended."""
        self._end_round()
        if self._limits.deadline - time.monotonic() <= self._longest_s:
            raise self._limits.out_of_time()
        for _ in range(0 if self._prepared else ROUNDS_TOGETHER):
            log = self._folder / f"{next(self._numbers):04d}"
            self._prepared.append(Round(self._arms.values(), self._variables, log, next(self._cpus)))
        self._round = self._prepared.pop(0)
        for side, order in orders:
            log = self._folder / f"{next(self._numbers):04d}-{side}.log"
            self._running.append(self._round.start(self._arms[side], order, log))
        await_ready(self._running, self._limits.timeout_s, self._limits.deadline)
        return list(self._running)

    def _end_round(self) -> None:
        if self._round is not None:
            self._round.close()
            self._round = None
        while self._running:
            self._running.pop().close()

    def _ranks(self, arm: str, benchmarks: Sequence[Benchmark], bad: dict[Key, str]) -> _Results:
        """Runs the benchmarks that need real ranks once, with `dtbench run`. Does nothing without such benchmarks."""
        benchmarks = [b for b in benchmarks if b.world == "ranks"]
        if not benchmarks:
            return {}
        if self._limits.deadline <= time.monotonic():
            raise self._limits.out_of_time()
        side, run_options = _side(arm), self._options
        suites = list(dict.fromkeys(s.suite for s in self._selections[side]))
        stem = self._folder / f"{next(self._numbers):04d}-{arm}-ranks"
        file, log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
        options = {
            "-o": str(file),
            "--device": run_options.device_type,
            "--mesh": format_mesh(run_options.mesh),
            "--nproc": str(run_options.world_size),
            "--impl": ",".join(run_options.impls),
            "--dtype": ",".join(run_options.dtypes),
            "--backend": self._arms[side].backend,
        }
        if run_options.sizes_chosen:
            options["--size"] = ",".join(map(str, run_options.sizes_bytes))
        text = "\n".join(dict.fromkeys(shlex.quote(b.case_label) for b in benchmarks))
        if len(text) <= _MAX_FILTER_CHARS:
            options["--filter"] = text
        command = ["run", *suites, *itertools.chain(*options.items())]
        died = run_ranks(self._arms[side], command, self._variables, log, self._limits.left_s())
        try:
            run = read_run(file)
        except DtbenchError:
            run = None
        results = {r.case_key: r for r in run.results} if run else {}
        if run is None or not run.complete:  # in a complete run, failed cases have results
            reason = self._limits.reason(LATE if died is None else died or "the launch wrote no results")
            bad |= {b.key: reason for b in benchmarks if b.key not in results}
        return {b.key: results[b.key] for b in benchmarks if b.key in results}


def _side(arm: str) -> str:
    return "head" if arm == "head" else "base"


def _times_of(
    simulated: _Results, real: _Results, benchmarks: Sequence[Benchmark], bad: dict[Key, str]
) -> LaunchTimes:
    """Returns the times of a launch, with the samples of simulated benchmarks, which were taken in turns."""
    by_key = {b.key: b for b in benchmarks}
    times: dict[Key, float] = {}
    for key, result in (simulated | real).items():
        if result.status == "ok" and result.time_s is not None:
            times[key] = getattr(result.time_s, by_key[key].estimator if key in by_key else "min")
        elif key in by_key:
            bad[key] = f"{result.status}: {result.reason}"
    return LaunchTimes(times, bad, {key: r.samples_s for key, r in simulated.items() if key in times})
