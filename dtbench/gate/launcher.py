"""Launches of an arm: a fresh process each, its results kept as a run file.

A gate that goes on meets the files of the first one: a launch that is complete, and was asked for the same,
is read instead of made.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtbench.errors import ArmError, DtbenchError
from dtbench.gate import control
from dtbench.gate.arms import Arm
from dtbench.gate.benchmark import (
    CALLS_WANTED,
    SAMPLES_WANTED,
    Benchmark,
    Key,
    Listing,
    Selection,
    read_listing,
)
from dtbench.gate.schedule import ArmName, Launch, OutOfTimeError
from dtbench.model import Result
from dtbench.options import format_mesh
from dtbench.store import read_run

DEFAULT_SAMPLES = 50
NOTE_SUFFIX = ".now"  # as the worker writes it
# A command line's longest argument on Linux is 128 KiB; beyond half of it, ranks measure the whole selection.
_MAX_FILTER_CHARS = 60_000
# What belongs to the job that the gate runs in, not to a launch.
_LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LEFT_OUT_PREFIXES = ("TORCHELASTIC_", "PYTEST_", "DTBENCH_LAUNCH", "DTBENCH_OUTPUT", "DTBENCH_NOTE")


@dataclass(frozen=True)
class Counted:
    """What the counting launch of an arm found: its benchmarks, what failed or was skipped, counters."""

    listing: Listing
    bad: Mapping[Key, str] = field(default_factory=dict)
    skipped: Mapping[Key, str] = field(default_factory=dict)
    counters: Mapping[Key, Mapping[str, float]] = field(default_factory=dict)


@dataclass
class Limits:
    """timeout_s: of one launch. deadline: when the budget ends, on the monotonic clock; None is never."""

    timeout_s: float
    deadline: float | None = None
    budget: str = ""

    def left_s(self) -> float:
        """What one launch may take now."""
        if self.deadline is None:
            return self.timeout_s
        return min(self.timeout_s, self.deadline - time.monotonic())


class Launcher:
    """Makes the launches of one gate."""

    def __init__(
        self,
        arms: Mapping[str, Arm],
        selections: Mapping[str, Sequence[Selection]],
        plan: Mapping[str, Any],
        folder: Path,
        limits: Limits,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._arms = arms
        self._selections = selections
        self._plan = plan
        self._folder = folder.absolute()  # launches start elsewhere
        self._limits = limits
        self._samples: dict[Key, int] = {}
        self._calls: dict[Key, int] = {}
        self._variables = dict(variables or {})
        self._number = 0
        self._longest_s = 0.0
        self.reused = 0

    # ---- counting ----

    def count(self, name: str) -> Counted:
        """Lists an arm's benchmarks and counts what one call of each does.

        Raises:
            ArmError: the arm cannot even list them.
            OutOfTimeError: the budget is spent.
        """
        bad: dict[Key, str] = {}
        without: set[str] = set()
        results: dict[Key, Result] = {}
        listing: Listing
        while True:
            stem = self._next(f"{name}-count")
            order = self._order(name, "count") | {
                "listing": f"{stem}.listing.json",
                "without": sorted(without),
            }
            died = self._work(self._arms[name], order, stem)
            listing = _listing_of(stem, self._arms[name], died)
            by_label = {b.label: b for b in listing.benchmarks}
            results |= {r.case_key: r for r in _results(stem)}
            if not died:
                break
            blamed = by_label.get(_in_hand(stem))
            if blamed is None or blamed.key in bad:
                raise ArmError(f"{name} cannot be counted: {died}")
            bad[blamed.key] = died
            without.add(blamed.label)
        if any(b.world == "ranks" for b in listing.benchmarks):
            results |= self._ranks(name, [b for b in listing.benchmarks if b.world == "ranks"], bad)
        for key, result in results.items():
            if result.status in ("failed", "wrong"):
                bad[key] = f"{result.status}: {result.reason}"
        for key, result in results.items():
            if name == "base" and SAMPLES_WANTED in result.counters:
                self._samples.setdefault(key, int(result.counters[SAMPLES_WANTED]))
                if CALLS_WANTED in result.counters:
                    self._calls.setdefault(key, int(result.counters[CALLS_WANTED]))
        return Counted(
            listing,
            bad,
            {k: r.reason for k, r in results.items() if r.status == "skipped"},
            {k: r.counters for k, r in results.items() if r.status == "ok"},
        )

    # ---- timing ----

    def launch(self, arm: ArmName, benchmarks: Sequence[Benchmark], again: bool = False) -> Launch:
        """One launch of all the benchmarks: a process for the simulated ones and the control, and a world of
        ranks for the others. What brings a process down fails, and the rest is launched again.

        Raises:
            OutOfTimeError: the budget does not hold it.
        """
        name = "head" if arm == "head" else "base"
        bad: dict[Key, str] = {}
        results: dict[Key, Result] = {}
        left = [b for b in benchmarks if b.world == "simulated"]
        while True:
            stem = self._next(arm)
            samples = {b.label: self._samples.get(b.key, DEFAULT_SAMPLES) for b in left}
            calls = {b.label: self._calls[b.key] for b in left if b.key in self._calls}
            order = self._order(name, "time") | {"samples": samples} | ({"calls": calls} if calls else {})
            died = self._work(self._arms[name], order, stem)
            results |= {r.case_key: r for r in _results(stem)}
            if not died:
                break
            case = _in_hand(stem)
            blamed = [b for b in left if b.key not in results and case and b.label.startswith(f"{case} [")]
            gone = blamed or [b for b in left if b.key not in results]
            bad |= {b.key: died for b in gone}
            left = [b for b in left if b.key not in results and b.key not in bad]
            if not left:
                break
        ranks = [b for b in benchmarks if b.world == "ranks"]
        if ranks:
            results |= self._ranks(arm, ranks, bad)
        wanted = {b.key: b for b in benchmarks}
        times: dict[Key, float] = {}
        for key, result in results.items():
            if result.status != "ok" or result.time_s is None:
                if key in wanted:
                    bad[key] = f"{result.status}: {result.reason}"
            elif key in wanted or key[0] == control.NAME:
                estimator = wanted[key].estimator if key in wanted else "min"
                times[key] = getattr(result.time_s, estimator)
        return Launch(times, bad, {k: r.counters for k, r in results.items() if r.status == "ok"})

    def _ranks(self, arm: str, benchmarks: Sequence[Benchmark], bad: dict[Key, str]) -> dict[Key, Result]:
        """One `dtbench run` of the selected suites of ranks."""
        name = "head" if arm.startswith("head") else "base"
        stem = self._next(f"{arm}-ranks")
        suites = list(dict.fromkeys(s.suite for s in self._selections[name]))
        command = ["run", *suites, "--device", self._plan["device"], "--nproc", str(self._plan["nproc"])]
        command += ["--impl", ",".join(self._plan["impls"]), "--dtype", ",".join(self._plan["dtypes"])]
        if self._plan["mesh"]:
            command += ["--mesh", format_mesh(self._plan["mesh"])]
        if self._plan["sizes"]:
            command += ["--size", ",".join(map(str, self._plan["sizes"]))]
        text = "\n".join(dict.fromkeys(b.label.rpartition(" [")[0] for b in benchmarks))
        if len(text) <= _MAX_FILTER_CHARS:
            command += ["--filter", text]
        died = self._start(self._arms[name], command, stem)
        keys = {b.key for b in benchmarks}
        results = {r.case_key: r for r in _results(stem) if r.case_key in keys}
        for benchmark in benchmarks:
            if benchmark.key not in results and died:
                bad[benchmark.key] = died
        return results

    # ---- processes ----

    def _next(self, what: str) -> Path:
        self._number += 1
        return self._folder / f"{self._number:04d}-{what}"

    def _order(self, name: str, mode: str) -> dict[str, Any]:
        return {
            "mode": mode,
            "arm": self._arms[name].identity,
            "selections": [asdict(s) for s in self._selections[name]],
            "plan": dict(self._plan),
        }

    def _work(self, arm: Arm, order: Mapping[str, Any], stem: Path) -> str:
        """Has a worker carry out the order; what went wrong, or ""."""
        text = json.dumps(_portable(order), sort_keys=True)
        asked = stem.with_name(f"{stem.name}.order.json")
        if asked.exists() and asked.read_text() == text and _is_complete(stem):
            self.reused += 1
            return ""
        _clear(stem)
        # What is compared when a gate goes on is without the folders that each gate makes anew.
        real = stem.with_name(f"{stem.name}.full-order.json")
        real.write_text(json.dumps(order))
        died = self._run(arm, ["dtbench.gate.worker", str(real), f"{stem}.jsonl"], stem)
        if not died:
            asked.write_text(text)
        return died

    def _start(self, arm: Arm, command: Sequence[str], stem: Path) -> str:
        asked = stem.with_name(f"{stem.name}.order.json")
        text = json.dumps([arm.identity, list(command[len(self._selections["base"]) + 1 :])])
        if asked.exists() and asked.read_text() == text and _is_complete(stem):
            self.reused += 1
            return ""
        _clear(stem)
        died = self._run(arm, ["dtbench", *command, "-o", f"{stem}.jsonl"], stem)
        if _is_complete(stem):  # cases may have failed: the file says which
            asked.write_text(text)
            return ""
        return died

    def _run(self, arm: Arm, module: Sequence[str], stem: Path) -> str:
        left_s = self._limits.left_s()
        if self._limits.deadline is not None:
            rest_s = self._limits.deadline - time.monotonic()
            if rest_s < self._longest_s or rest_s <= 0:
                raise OutOfTimeError(f"the budget of {self._limits.budget} holds no further launch")
        began = time.monotonic()
        with Path(f"{stem}.log").open("wb") as log:
            process = subprocess.Popen(
                [arm.python, "-P", "-m", *module],
                cwd=arm.root,
                env=environment_of(arm, self._variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(left_s)
            except subprocess.TimeoutExpired:
                if left_s < self._limits.timeout_s:
                    raise OutOfTimeError(
                        f"the budget of {self._limits.budget} holds no further launch"
                    ) from None
                return f"no end after {self._limits.timeout_s:g} s (--timeout)"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        return "" if code == 0 else _how(code, Path(f"{stem}.log"))


def environment_of(arm: Arm, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a launch: those of the gate, without what belongs to its job, and the arm's."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _LEFT_OUT and not name.startswith(_LEFT_OUT_PREFIXES)
    }
    env.setdefault("OMP_NUM_THREADS", "1")
    return env | {"PYTHONPATH": os.pathsep.join(arm.path)} | dict(arm.env) | dict(variables)


def _portable(order: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in order.items() if k not in ("listing", "selections")}
    return kept | {"selections": [[Path(s["suite"]).name, s["text"]] for s in order["selections"]]}


def _clear(stem: Path) -> None:
    for path in stem.parent.glob(f"{stem.name}.*"):
        path.unlink()


def _is_complete(stem: Path) -> bool:
    try:
        return read_run(f"{stem}.jsonl").complete
    except DtbenchError:
        return False


def _results(stem: Path) -> tuple[Result, ...]:
    """What a launch wrote, or nothing: an unreadable file is as good as none."""
    try:
        return read_run(f"{stem}.jsonl").results
    except DtbenchError:
        return ()


def _in_hand(stem: Path) -> str:
    try:
        return Path(f"{stem}.jsonl{NOTE_SUFFIX}").read_text()
    except OSError:
        return ""


def _listing_of(stem: Path, arm: Arm, died: str) -> Listing:
    try:
        return read_listing(Path(f"{stem}.listing.json"))
    except DtbenchError as error:
        raise ArmError(f"{arm.text} cannot list its benchmarks: {died or error}") from error


def _how(code: int, log: Path) -> str:
    """How a process ended, and the last line it said."""
    how = f"the launch ended with exit code {code}"
    if code < 0:
        how = f"the launch died of signal {-code}"
        with contextlib.suppress(ValueError):
            how = f"the launch died of {signal.Signals(-code).name}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{how}: {lines[-1][:300]}" if lines else how
