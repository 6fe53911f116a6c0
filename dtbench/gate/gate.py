"""A gate from its options to its report: arms, counting, timing, verdicts, the files of its folder."""

from __future__ import annotations

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
from dtbench.gate.launcher import ROUNDS_TOGETHER, Counted, Launcher, Limits
from dtbench.gate.options import GateOptions
from dtbench.gate.schedule import MOST_LAUNCHES, SCREEN_ROUNDS, GateSchedule, OutOfTimeError
from dtbench.gate.verdict import exit_code_of, judged, rises, trust_of, words_of
from dtbench.records import exports
from dtbench.records.atomic import write_atomically
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.records.gate import ArmRecord, Gate, text_of
from dtbench.text.units import plural

FILES = ("gate.json", "junit.xml", "smaller-is-better.json")
_NARROW = "name fewer benchmarks, such as dispatch/relu"


def gate(options: GateOptions, say: Callable[[str], None] = lambda _text: None) -> Gate:
    """Runs the gate.

    Raises:
        UsageError: options that cannot be followed.
        ArmError: an arm that cannot be built or started.
        OutputError: the folder cannot be written, or holds another gate.
    """
    began = time.monotonic()
    if find_rank_env() is not None:
        raise UsageError("a gate starts its own launches: run `dtbench gate` once, without torchrun or srun")
    limits = Limits(options.timeout_s)
    if options.budget_s is not None:
        limits = Limits(options.timeout_s, began + options.budget_s, f"{options.budget_s:g} s")
    folder = options.folder or Path(time.strftime("gate-%Y%m%dT%H%M%SZ", time.gmtime()))
    if any((folder / name).exists() for name in FILES) or any(folder.glob("launches/*")):
        raise OutputError(f"{folder} holds a gate already: give another -o")

    def asked(arm: Arm) -> bytes:
        return msgspec.json.encode(
            replace(
                options,
                base="env:",
                head="env:",
                folder=None,
                selections=arm.selections(options.selections),
            )
        )

    with contextlib.ExitStack() as stack:
        with print_status_if_slow("making base and head ready", say):
            base, head = stack.enter_context(open_arms(options.base, options.head, say, asked))
        problems = zip(base.problems, head.problems, strict=False)
        both = [b if b == h else f"in base: {b}; in head: {h}" for b, h in problems if b and h]
        if both:
            raise UsageError("; ".join(both))
        kind = control_kind(base, head)
        launcher = Launcher(
            {"base": base, "head": head},
            {name: arm.selections(options.selections) for name, arm in (("base", base), ("head", head))},
            options.plan(min(base.gpus, head.gpus)),
            _new_folder(folder),
            limits,
            variables={control.KIND: kind},
        )
        with contextlib.closing(launcher):
            report = GateRun(options, launcher, (base, head), say, bool(kind)).judge(began)
        texts = text_of(report) + "\n", outputs.junit(report), exports.github(outputs.points_of(report))
        for name, text in zip(FILES, texts, strict=True):
            write_atomically(folder / name, text, lambda _start: True, "file of a gate")
    return report


def _new_folder(folder: Path) -> Path:
    """The folder for what launches print, in that of a gate."""
    launches = folder / "launches"
    try:
        launches.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make {folder}: {error.strerror or error}; give -o another folder"
        ) from error
    return launches


def control_kind(base: Arm, head: Arm) -> str:
    """What neither arm touches: plain torch where both run one, Python's arithmetic where both run one."""
    if (base.python, base.torch_version) == (head.python, head.torch_version):
        return "torch"
    return "python" if base.python_version == head.python_version else ""


@dataclass
class GateRun:
    """Counting, then timing, then the report."""

    options: GateOptions
    launcher: Launcher
    arms: tuple[Arm, Arm]
    say: Callable[[str], None]
    with_control: bool
    notes: list[str] = field(default_factory=list)
    judged: dict[Key, ComparedCase] = field(default_factory=dict)

    def judge(self, began: float) -> Gate:
        """The whole gate, after its arms are built. began: on the monotonic clock."""
        seed, trust, launches = self.options.seed, trust_of(None, None, measured=False), 0
        seed = random.SystemRandom().randrange(2**31) if seed is None else seed
        counting = time.monotonic()
        try:
            old, new = self._count()
        except OutOfTimeError as error:
            spent_s = time.monotonic() - began
            raise UsageError(
                f"{error}, and not all is counted after {format_about(spent_s)}: "
                f"give --budget {math.ceil(3 * spent_s)}s or more"
            ) from error
        counted_s = time.monotonic() - counting
        benchmarks = self._comparable(old, new)
        with contextlib.suppress(OutOfTimeError):
            self._compare_counters(benchmarks, old, new)
        left = [b for b in benchmarks if b.key not in self.judged]
        if left:
            controls = [b for b in new.listing.benchmarks if b.key[0] == control.NAME and self.with_control]
            schedule = GateSchedule(left, controls, self.launcher.launch, seed, self.say)
            self.say(_announcement(left, counted_s, self.options.budget_s))
            timed = time.monotonic()
            verdicts, trust = schedule.run()
            self.judged |= {j.key: j for j in verdicts}
            launches, stopped = schedule.evidence.launches, schedule.evidence.stopped
            if stopped:
                self.notes.append(stopped + _remedy(launches, time.monotonic() - timed))
        if not self.with_control:
            self.notes.append(
                "the arms share neither torch nor Python: base against itself is the only check"
            )
        order = dict.fromkeys(b.key for b in [*old.listing.benchmarks, *new.listing.benchmarks])
        ended = tuple(self.judged[key] for key in order if key in self.judged)
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
        old, new = self.launcher.count("base", "head")
        for name, arm, counted in (("base", self.arms[0], old), ("head", self.arms[1], new)):
            self.notes += [f"in {name}: {arm.explain(problem)}" for problem in counted.listing.problems]
        if not self._wanted(old) and not self._wanted(new):
            impls = {b.key[2] for b in new.listing.benchmarks if b.key[0] != control.NAME}
            raise UsageError("; ".join(new.listing.problems) or self.options.lacks(impls))
        return old, new

    def _wanted(self, counted: Counted) -> list[Benchmark]:
        impls, kept = self.options.impls, counted.listing.benchmarks
        return [b for b in kept if b.key[0] != control.NAME and (not impls or b.key[2] in impls)]

    def _comparable(self, old: Counted, new: Counted) -> list[Benchmark]:
        """Those in both arms that can be measured; the others have their verdicts."""
        before, after = ({b.key: b for b in self._wanted(counted)} for counted in (old, new))
        skipped = before.keys() & after.keys() & old.skipped.keys() & new.skipped.keys()
        if skipped:
            self.notes.append(f"{len(skipped)} benchmark(s) are skipped by both arms and are left out")
        left: list[Benchmark] = []
        for key, benchmark in (before | after).items():
            if key in skipped:
                continue
            if key not in after:
                why = Verdict.MISSING, "head has no benchmark of this name"
            elif key not in before:
                why = Verdict.NEW, "base has no benchmark of this name, so nothing says if it is slower"
            elif broken := _broken(key, {"head": new, "base": old}):
                why = broken
            else:
                left.append(benchmark)
                continue
            self.judged[key] = judged(benchmark, *why)
        return left

    def _compare_counters(self, benchmarks: Sequence[Benchmark], old: Counted, new: Counted) -> None:
        """A rise is a regression, once a second launch of each arm has counted the same."""
        ignored = frozenset[str]()
        if self.arms[0].python_version.split(".")[:2] != self.arms[1].python_version.split(".")[:2]:
            ignored = frozenset({"python_calls"})
            self.notes.append("Python calls are not compared: the arms run different versions of Python")
        counts = ((b, old.counters.get(b.key, {}), new.counters.get(b.key, {})) for b in benchmarks)
        risen = {b: rise for b, before, after in counts if (rise := rises(before, after, ignored))}
        if not risen:
            return
        self.say(f"{len(risen)} benchmark(s) do more per call in head: counting again")
        again = [side.counters for side in self.launcher.count("base", "head")]
        for benchmark, rise in risen.items():
            sure = {
                name: pair
                for name, pair in rise.items()
                if [side.get(benchmark.key, {}).get(name) for side in again] == [pair.base, pair.head]
            }
            if len(sure) < len(rise):
                unsure = ", ".join(name for name in rise if name not in sure)
                self.notes.append(f"{benchmark.label}: {unsure} differ between launches and are not judged")
            if sure and self.options.counters == "judge":
                reason = "does more per call than before; counted twice, the same both times"
                self.judged[benchmark.key] = judged(
                    benchmark, Verdict.SLOWER, reason, "counters", counters=sure
                )
            elif sure:
                self.notes.append(f"{benchmark.label}: {words_of(sure)} (--counters report)")


def _broken(key: Key, counted: Mapping[str, Counted]) -> tuple[Verdict, str] | None:
    """Why a benchmark that both arms have cannot be timed."""
    for name, of in counted.items():
        if key in of.bad:
            return Verdict.FAILED, f"in {name}: {of.bad[key]}"
        if key in of.skipped:
            return Verdict.MISSING, f"skipped in {name}: {of.skipped[key]}"
    return None


def _announcement(benchmarks: Sequence[Benchmark], counted_s: float, budget_s: float | None) -> str:
    """Says how long the launches will take, by how long counting took."""
    # Loading is most of a launch, and the counting loads several rounds; ranks are started anew in each launch.
    counted = 2 if any(b.world == "ranks" for b in benchmarks) else 3 * ROUNDS_TOGETHER
    first_s, all_s = (counted_s / counted * launches for launches in (3 * SCREEN_ROUNDS, MOST_LAUNCHES))
    end = (
        "no --budget ends it before"
        if budget_s is None
        else f"--budget ends it after {format_about(budget_s)} in all"
    )
    return (
        f"timing {plural(len(benchmarks), 'benchmark')}: {3 * SCREEN_ROUNDS} launches, {format_about(first_s)}; for "
        f"what these do not pass up to {MOST_LAUNCHES}, {format_about(all_s)}; {end}"
    )


def _remedy(launches: int, spent_s: float) -> str:
    """What a gate needs whose budget is spent, from what its launches took."""
    if not launches:
        return f": give --budget more, or {_NARROW}"
    more_s = spent_s / launches * max(MOST_LAUNCHES - launches, 1)
    return f": {format_about(more_s)} more would hold all; give --budget so much more, or {_NARROW}"
