"""Runs a gate, which compares the speed of base and head.

It builds both arms, counts the operations of each benchmark, times them, decides the verdicts and writes the files of
its folder.
"""

import contextlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from dtbench.engine.progress import format_about, print_status_if_slow
from dtbench.engine.rank_env import find_rank_env
from dtbench.errors import OutputError, UsageError
from dtbench.gate import control, outputs
from dtbench.gate.arms import Arm, open_arms
from dtbench.gate.benchmark import Benchmark, Key
from dtbench.gate.launcher import Counted, Launcher, Limits
from dtbench.gate.options import GateOptions
from dtbench.gate.schedule import MOST_LAUNCHES, SCREEN_ROUNDS, TEST_LOOKS, GateSchedule, OutOfTimeError
from dtbench.gate.verdict import compared_case, describe_counters, exit_code_of, rises
from dtbench.records import exports
from dtbench.records.atomic import write_atomically
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.records.gate import ArmRecord, Gate, Trust, encode_gate
from dtbench.text.units import plural

FILES = ("gate.json", "junit.xml", "smaller-is-better.json")
# Durations of the screening and of a fresh pair, as multiples of the duration of counting. All three load torch and run
# each benchmark. With 1, 10 and 55 benchmarks on two busy cores, the screening took 0.8 to 1.6 times as long.
SCREEN_PER_COUNT, PAIR_PER_COUNT = 2.5, 0.5
_NARROW = "name fewer benchmarks, such as dispatch/relu"


def gate(options: GateOptions, say: Callable[[str], None] = lambda _text: None) -> Gate:
    """Runs a gate and writes its files.

    Raises:
        UsageError: invalid options.
        ArmError: an arm cannot be built or started.
        OutputError: the folder cannot be written, or holds another gate.
    """
    began = time.monotonic()
    if find_rank_env() is not None:
        raise UsageError("a gate starts its own launches: run `dtbench gate` once, without torchrun or srun")
    budget_s = math.inf if options.budget_s is None else options.budget_s
    folder = options.folder or Path(time.strftime("gate-%Y%m%dT%H%M%SZ", time.gmtime()))
    if any((folder / name).exists() for name in FILES) or any(folder.glob("launches/*")):
        raise OutputError(f"{folder} holds a gate already: give another -o")

    def encode_options(arm: Arm) -> bytes:
        return msgspec.json.encode(
            replace(
                options,
                base="env:",
                head="env:",
                folder=None,
                selections=arm.selections(options.selections),
                request=replace(options.request, backend=arm.backend),
            )
        )

    with contextlib.ExitStack() as stack:
        with print_status_if_slow("making base and head ready", say):
            base, head = stack.enter_context(
                open_arms(options.base, options.head, say, encode_options, budget_s)
            )
        shared_problems = [
            b if b == h else f"in base: {b}; in head: {h}"
            for b, h in zip(base.problems, head.problems, strict=False)
            if b and h
        ]
        if shared_problems:
            raise UsageError("; ".join(shared_problems))
        kind = control_kind(base, head)
        launches = folder / "launches"
        try:
            launches.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot make {folder}: {error.strerror or error}; give -o another folder"
            ) from error
        launcher = Launcher(
            {"base": base, "head": head},
            {name: arm.selections(options.selections) for name, arm in (("base", base), ("head", head))},
            options.run_options(min(base.gpus, head.gpus)),
            launches,
            Limits(options.timeout_s, began + budget_s, f"{budget_s:g} s"),
            variables={control.KIND: kind},
        )
        with contextlib.closing(launcher):
            report = GateRun(options, launcher, (base, head), say, bool(kind)).run(began)
        texts = encode_gate(report) + "\n", outputs.junit(report), exports.github(outputs.gate_points(report))
        for name, text in zip(FILES, texts, strict=True):
            write_atomically(folder / name, text, lambda _start: True, "file of a gate")
    return report


def control_kind(base: Arm, head: Arm) -> str:
    """Returns which control both arms can run with the same code: "torch" (plain ops), "python" or "" for none."""
    if (base.python, base.torch_version) == (head.python, head.torch_version):
        return "torch"
    return "python" if base.python_version == head.python_version else ""


@dataclass
class GateRun:
    """The work of a gate after its arms are built: counting, timing, verdicts."""

    options: GateOptions
    launcher: Launcher
    arms: tuple[Arm, Arm]
    say: Callable[[str], None]
    with_control: bool
    notes: list[str] = field(default_factory=list)
    verdicts: dict[Key, ComparedCase] = field(default_factory=dict)

    def run(self, began: float) -> Gate:
        """Counts and times the benchmarks, and returns the gate's record.

        Args:
            began: start of the gate on the monotonic clock, seconds.
        """
        seed, trust, launches = self.options.seed, Trust(), 0
        seed = random.SystemRandom().randrange(2**31) if seed is None else seed
        counting = time.monotonic()
        try:
            base_counts, head_counts = self._count()
        except OutOfTimeError as error:
            spent_s = time.monotonic() - began
            raise UsageError(
                f"{error}, and counting is not finished after {format_about(spent_s)}: "
                f"give --budget {math.ceil(3 * spent_s)}s or more"
            ) from error
        counted_s = time.monotonic() - counting
        benchmarks = self._comparable(base_counts, head_counts)
        with contextlib.suppress(OutOfTimeError):
            self._compare_counters(benchmarks, base_counts, head_counts)
        remaining = [b for b in benchmarks if b.key not in self.verdicts]
        if remaining:
            controls = [
                b for b in head_counts.listing.benchmarks if b.key[0] == control.NAME and self.with_control
            ]
            schedule = GateSchedule(remaining, controls, self.launcher.launch, seed, self.say)
            self.say(_announcement(remaining, counted_s, self.options.budget_s))
            compared, trust = schedule.run()
            self.verdicts |= {case.key: case for case in compared}
            launches, stopped = schedule.evidence.launches, schedule.evidence.stopped
            if stopped:
                self.notes.append(stopped + _remedy(launches, time.monotonic() - counting))
        if not self.with_control:
            self.notes.append(
                "the arms share neither torch nor Python, so there is no control: only base against itself checks "
                "the machine"
            )
        order = dict.fromkeys(
            b.key for b in [*base_counts.listing.benchmarks, *head_counts.listing.benchmarks]
        )
        ended = tuple(self.verdicts[key] for key in order if key in self.verdicts)
        base, head = (
            ArmRecord(
                arm=arm.text,
                commit=arm.revision or None,
                built=arm.note,
                python=arm.python_version,
                torch=arm.torch_version,
            )
            for arm in self.arms
        )
        return Gate(
            exit_code=exit_code_of(ended, trust, allow_new=self.options.allow_new),
            trust=trust,
            notes=tuple(dict.fromkeys(self.notes)),
            base=base,
            head=head,
            seed=seed,
            launches=launches,
            duration_s=time.monotonic() - began,
            allow_new=self.options.allow_new,
            benchmarks=ended,
        )

    def _count(self) -> tuple[Counted, Counted]:
        self.say("counting the operations of one call of each benchmark, in base and in head")
        base, head = self.launcher.count("base", "head")
        for name, arm, counted in (("base", self.arms[0], base), ("head", self.arms[1], head)):
            self.notes += [f"in {name}: {arm.explain(problem)}" for problem in counted.listing.problems]
            if files := counted.listing.working_tree_files:
                raise UsageError(
                    f"{arm.text} imported {files[0]} of the working tree, not the file of its commit: add the folder "
                    "that contains the package to PYTHONPATH, or uninstall its editable installation"
                )
        if not self._selected(base) and not self._selected(head):
            impls = {b.key[2] for b in head.listing.benchmarks if b.key[0] != control.NAME}
            raise UsageError("; ".join(head.listing.problems) or self.options.missing_impls(impls))
        return base, head

    def _selected(self, counted: Counted) -> list[Benchmark]:
        impls, listed = self.options.impls, counted.listing.benchmarks
        return [b for b in listed if b.key[0] != control.NAME and (not impls or b.key[2] in impls)]

    def _comparable(self, base: Counted, head: Counted) -> list[Benchmark]:
        """Returns the benchmarks that both arms can measure, and decides the verdicts of the others."""
        base_benchmarks, head_benchmarks = (
            {b.key: b for b in self._selected(counted)} for counted in (base, head)
        )
        skipped = base_benchmarks.keys() & head_benchmarks.keys() & base.skipped.keys() & head.skipped.keys()
        if skipped:
            self.notes.append(f"{len(skipped)} benchmark(s) are skipped by both arms and are left out")
        found = {k: b for k, b in (base_benchmarks | head_benchmarks).items() if k not in skipped}
        for key, benchmark in found.items():
            why = _broken(key, {"head": head, "base": base})
            if key not in head_benchmarks:
                why = Verdict.MISSING, "head has no benchmark of this name"
            elif key not in base_benchmarks:
                why = Verdict.NEW, "base has no benchmark of this name to compare with"
            if why:
                self.verdicts[key] = compared_case(benchmark, *why)
        return [benchmark for key, benchmark in found.items() if key not in self.verdicts]

    def _compare_counters(self, benchmarks: Sequence[Benchmark], base: Counted, head: Counted) -> None:
        """Compares the counters of base and head.

        A rise counts only if a second launch of each arm gives the same counts. The verdict is then slower; with
        `--counters report` there is only a note.
        """
        ignored = frozenset[str]()
        if self.arms[0].python_version.split(".")[:2] != self.arms[1].python_version.split(".")[:2]:
            ignored = frozenset({"python_calls"})
            self.notes.append("Python calls are not compared: the arms run different versions of Python")
        counts = ((b, base.counters.get(b.key, {}), head.counters.get(b.key, {})) for b in benchmarks)
        risen = {
            b: rise
            for b, base_counts, head_counts in counts
            if (rise := rises(base_counts, head_counts, ignored))
        }
        if not risen:
            return
        self.say(f"{len(risen)} benchmark(s) do more per call in head: counting again")
        recounted = [side.counters for side in self.launcher.count("base", "head")]
        for benchmark, rise in risen.items():
            sure = {
                name: pair
                for name, pair in rise.items()
                if [side.get(benchmark.key, {}).get(name) for side in recounted] == [pair.base, pair.head]
            }
            if len(sure) < len(rise):
                unsure = ", ".join(name for name in rise if name not in sure)
                self.notes.append(f"{benchmark.label}: {unsure} differ between launches and are ignored")
            if sure and self.options.counters == "judge":
                self.verdicts[benchmark.key] = compared_case(
                    benchmark,
                    Verdict.SLOWER,
                    "does more per call than base, in two separate counts",
                    "counters",
                    counters=sure,
                )
            elif sure:
                self.notes.append(f"{benchmark.label}: {describe_counters(sure)} (--counters report)")


def _broken(key: Key, counted: Mapping[str, Counted]) -> tuple[Verdict, str] | None:
    """Returns the verdict and reason of a benchmark that an arm cannot time."""
    for name, side in counted.items():
        if key in side.bad:
            return Verdict.FAILED, f"in {name}: {side.bad[key]}"
        if key in side.skipped:
            return Verdict.MISSING, f"skipped in {name}: {side.skipped[key]}"
    return None


def _announcement(benchmarks: Sequence[Benchmark], counted_s: float, budget_s: float | None) -> str:
    """Returns a line about how long the launches will take, estimated from how long counting took."""
    if any(b.world == "ranks" for b in benchmarks):  # each launch imports torch, as the two of counting did
        first_s, all_s = (counted_s / 2 * launches for launches in (3 * SCREEN_ROUNDS, MOST_LAUNCHES))
    else:
        first_s = SCREEN_PER_COUNT * counted_s
        all_s = first_s + PAIR_PER_COUNT * counted_s * TEST_LOOKS[-1]
    end = (
        "there is no --budget"
        if budget_s is None
        else f"--budget ends it after {format_about(budget_s)} in all"
    )
    return (
        f"timing {plural(len(benchmarks), 'benchmark')}: {3 * SCREEN_ROUNDS} launches, {format_about(first_s)}; for "
        f"undecided benchmarks up to {MOST_LAUNCHES}, {format_about(all_s)}; {end}"
    )


def _remedy(launches: int, spent_s: float) -> str:
    """Returns advice after a spent budget: the missing time, estimated from the launches so far.

    Args:
        launches: number of timed launches.
        spent_s: time spent on counting and on these launches, seconds.
    """
    if not launches:
        return f": give --budget more, or {_NARROW}"
    # A loader serves two launches of a pair, and three of the screening or of counting.
    more_s = 1.5 * spent_s / (3 + launches) * max(MOST_LAUNCHES - launches, 1)
    return f": {format_about(more_s)} more are needed; give --budget that much more, or {_NARROW}"
