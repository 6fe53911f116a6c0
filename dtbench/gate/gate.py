"""A gate from its options to its report: the folder, counting, timing, verdicts, what is told."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import click
import msgspec

from dtbench.engine.options import LAUNCH_TIMEOUT_S, RunRequest
from dtbench.engine.progress import about, said_if_slow
from dtbench.gate import control, outputs
from dtbench.gate.arms import Arm, open_arms, repository
from dtbench.gate.benchmark import Benchmark, Key, Selection
from dtbench.gate.forecast import forecast, impls_to_launch
from dtbench.gate.launcher import Counted, Launcher, Limits
from dtbench.gate.schedule import MOST_LAUNCHES, OutOfTimeError, Schedule
from dtbench.gate.verdict import exit_code_of, judged, rises, trust_of, words_of
from dtbench.machine.device import DEFAULT_CPU_RANKS
from dtbench.records import exports
from dtbench.records.atomic import write_atomically
from dtbench.records.gate import Arm as ArmFacts
from dtbench.records.gate import Gate, State, Trust, text_of
from dtbench.records.judged import Judged, Verdict
from dtbench.records.read import BadFieldError, decode, into
from dtbench.suite import RunOptions
from dtbench.suite.errors import OutputError, UnreadableRunError, UsageError
from dtbench.suite.mesh import Mesh, ranks_of
from dtbench.text.units import format_bytes

STATE = "gate.state.json"


@dataclass(frozen=True)
class GateOptions:
    """What a gate is asked for."""

    base: str
    head: str
    selections: tuple[Selection, ...]
    impls: tuple[str, ...] = ()  # to judge; empty is all
    only: frozenset[str] = frozenset()  # labels of benchmarks to judge; empty is all
    mesh: Mesh | None = None
    nproc: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    sizes_bytes: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ("float32",)
    budget_s: float | None = None
    timeout_s: float = LAUNCH_TIMEOUT_S
    seed: int | None = None
    allow_new: bool = False
    counters: Literal["judge", "report"] = "judge"
    folder: Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.selections:
            raise UsageError("nothing is selected: name a suite, such as `dispatch`, or SUITE/TEXT")
        if self.timeout_s <= 0:
            raise UsageError(f"--launch-timeout {self.timeout_s:g}: expected seconds above 0")
        if self.resume and self.folder is None:
            raise UsageError("--resume needs -o FOLDER: the gate to go on with")
        RunRequest(mesh=self.mesh, nproc=self.nproc)  # checks that they agree


def gate(options: GateOptions, say: Callable[[str], None] = lambda _text: None) -> Gate:
    """Runs the gate.

    Raises:
        UsageError: options that cannot be followed.
        ArmError: an arm that cannot be built or started.
        OutputError: the folder cannot be written, or holds another gate.
    """
    began = time.monotonic()
    _refuse_ranks()
    limits = Limits(options.timeout_s)
    if options.budget_s is not None:
        limits = Limits(options.timeout_s, began + options.budget_s, f"{options.budget_s:g} s")
    folder = options.folder or Path(time.strftime("gate-%Y%m%dT%H%M%SZ", time.gmtime()))
    with _made_folder(folder, options.resume), contextlib.ExitStack() as stack:
        with said_if_slow("making base and head ready", say):
            base, head = stack.enter_context(open_arms(options.base, options.head, say))
        plan = _plan(options, base, head)
        seed = _keep_state(folder, options, base, head, plan)
        with said_if_slow("loading torch and the suites", say):
            least = forecast(options.selections, options.impls, _run_options(options), _ranks(options))
        if least:
            budget = "" if options.budget_s is None else f"; the budget is {about(options.budget_s)}"
            say(least + budget)
        top = repository() if base.revision or head.revision else None
        kind = control_kind(base, head)
        launcher = Launcher(
            {"base": base, "head": head},
            {name: arm.selections(options.selections, top) for name, arm in (("base", base), ("head", head))},
            plan,
            folder / "launches",
            limits,
            variables={control.KIND: kind},
        )
        with contextlib.closing(launcher):
            report = _Gate(options, launcher, (base, head), seed, say, bool(kind)).judge(began)
    _write(folder / "gate.json", text_of(report) + "\n", '"kind": "gate"')
    _write(folder / "junit.xml", outputs.junit(report), "<testsuites")
    _write(folder / "smaller-is-better.json", exports.github(outputs.points_of(report)), "[")
    return report


def _would_do(launches: int, spent_s: float) -> str:
    """What a gate needs whose budget is spent, from what its launches took."""
    narrow = "name fewer benchmarks, such as dispatch/relu"
    if not launches:
        return f": give --budget more, or {narrow}"
    more_s = spent_s / launches * max(MOST_LAUNCHES - launches, 1)
    return f": {about(more_s)} more would hold all; give --budget so much more, or {narrow}"


def control_kind(base: Arm, head: Arm) -> str:
    """What neither arm touches: plain torch where both run one, Python's arithmetic where both run one."""
    if (base.python, base.torch_version) == (head.python, head.torch_version):
        return "torch"
    return "python" if base.python_version == head.python_version else ""


@dataclass
class _Gate:
    """Counting, then timing, then the report."""

    options: GateOptions
    launcher: Launcher
    arms: tuple[Arm, Arm]
    seed: int
    say: Callable[[str], None]
    with_control: bool
    notes: list[str] = field(default_factory=list)
    judged: dict[Key, Judged] = field(default_factory=dict)

    def judge(self, began: float) -> Gate:
        """The whole gate, after its arms are built."""
        trust, launches, stopped = Trust(), 0, ""
        try:
            old, new = self._count()
        except OutOfTimeError as error:
            spent_s = time.monotonic() - began
            more = f"give --budget {math.ceil(3 * spent_s)}s or more"
            raise UsageError(f"{error}, and not all is counted after {about(spent_s)}: {more}") from error
        benchmarks = self._sort_out(old, new)
        with contextlib.suppress(OutOfTimeError):
            self._compare_counters(benchmarks, old, new)
        left = [b for b in benchmarks if b.key not in self.judged]
        controls = [b for b in new.listing.benchmarks if b.key[0] == control.NAME and self.with_control]
        if left:
            launcher = self.launcher
            schedule = Schedule(left, controls, launcher.launch, self.seed, self.say, launcher.prepare)
            timed = time.monotonic()
            found, trust = schedule.run()
            self.judged |= {j.key: j for j in found}
            launches, stopped = schedule.evidence.launches, schedule.evidence.stopped
            if stopped:
                stopped += _would_do(launches, time.monotonic() - timed)
        else:
            trust = trust_of(None, None, measured=False)
        return self._report(old, new, trust, launches, stopped, began)

    def _count(self) -> tuple[Counted, Counted]:
        self.say("counting what one call of each benchmark does, in base and in head")
        old, new = self.launcher.count("base", "head")
        for name, counted in (("base", old), ("head", new)):
            self.notes += [f"in {name}: {problem}" for problem in counted.listing.problems]
        if not self._wanted(old) and not self._wanted(new):
            known = ", ".join(sorted({b.key[2] for b in new.listing.benchmarks if b.key[0] != control.NAME}))
            empty = (
                f"the selection holds no benchmark of --impl {','.join(self.options.impls)}: it has {known}"
            )
            raise UsageError("; ".join(new.listing.problems) or empty)
        return old, new

    def _sort_out(self, old: Counted, new: Counted) -> list[Benchmark]:
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

    def _wanted(self, counted: Counted) -> list[Benchmark]:
        impls = self.options.impls
        kept = [b for b in counted.listing.benchmarks if b.key[0] != control.NAME]
        only = self.options.only
        return [b for b in kept if (not impls or b.key[2] in impls) and (not only or b.label in only)]

    def _compare_counters(self, benchmarks: Sequence[Benchmark], old: Counted, new: Counted) -> None:
        """A rise is a regression, once a second launch of each arm has counted the same."""
        ignored = frozenset[str]()
        if self.arms[0].python_version.split(".")[:2] != self.arms[1].python_version.split(".")[:2]:
            ignored = frozenset({"python_calls"})
            self.notes.append("Python calls are not compared: the arms run different versions of Python")
        risen = {b.key: r for b in benchmarks if (r := rises(_of(old, b), _of(new, b), ignored))}
        if not risen:
            return
        self.say(f"{len(risen)} benchmark(s) do more per call in head: counting again")
        again = self.launcher.count("base", "head")
        for benchmark in benchmarks:
            rise = risen.get(benchmark.key, {})
            sure = {
                name: pair
                for name, pair in rise.items()
                if [_of(side, benchmark).get(name) for side in again] == [pair.base, pair.head]
            }
            if len(sure) < len(rise):
                unsure = ", ".join(name for name in rise if name not in sure)
                self.notes.append(f"{benchmark.label}: {unsure} differ between launches and are not judged")
            if sure and self.options.counters == "judge":
                reason = "does more per call than before; counted twice, the same both times"
                self.judged[benchmark.key] = judged(
                    benchmark, Verdict.REGRESSION, reason, "counters", counters=sure
                )
            elif sure:
                self.notes.append(f"{benchmark.label}: {words_of(sure)} (--counters report)")

    def _report(
        self, old: Counted, new: Counted, trust: Trust, launches: int, stopped: str, began: float
    ) -> Gate:
        order = [b.key for b in [*old.listing.benchmarks, *new.listing.benchmarks]]
        places = {key: i for i, key in reversed(list(enumerate(order)))}
        ended = tuple(sorted(self.judged.values(), key=lambda j: places[j.key]))
        if stopped:
            self.notes.append(stopped)
        self.launcher.close()
        if left_out := self.launcher.left_out:
            self.notes.append(
                f"launches printed {format_bytes(left_out)} more than their logs keep, the first and last MiB of each"
            )
        if not self.with_control:
            self.notes.append(
                "the arms share neither torch nor Python: base against itself is the only check"
            )
        allow_new = self.options.allow_new
        base, head = (
            ArmFacts(
                arm=arm.text,
                commit=arm.revision or None,
                built=arm.note,
                python=arm.python_version,
                torch=arm.torch_version,
            )
            for arm in self.arms
        )
        return Gate(
            exit_code=exit_code_of(ended, trust, allow_new=allow_new),
            trust=trust,
            notes=tuple(dict.fromkeys(self.notes)),
            base=base,
            head=head,
            seed=self.seed,
            launches=launches,
            reused_launches=self.launcher.reused,
            duration_s=time.monotonic() - began,
            allow_new=allow_new,
            benchmarks=ended,
        )


def _broken(key: Key, counted: Mapping[str, Counted]) -> tuple[Verdict, str] | None:
    """Why a benchmark that both arms have cannot be timed."""
    for name, of in counted.items():
        if key in of.bad:
            return Verdict.FAILED, f"in {name}: {of.bad[key]}"
        if key in of.skipped:
            return Verdict.MISSING, f"skipped in {name}: {of.skipped[key]}"
    return None


def _of(counted: Counted, benchmark: Benchmark) -> Mapping[str, float]:
    return counted.counters.get(benchmark.key, {})


# --------------------------------------------------------------------------------- before it starts


def _refuse_ranks() -> None:
    from dtbench.engine.place import find_place

    if find_place() is not None:
        raise UsageError("a gate starts its own launches: run `dtbench gate` once, without torchrun or srun")


def _plan(options: GateOptions, base: Arm, head: Arm) -> RunOptions:
    """The same in both arms."""
    gpus = min(base.gpus, head.gpus)
    device = options.device if options.device != "auto" else "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus:
        raise UsageError("--device cuda: an arm's torch finds no GPU here; use --device cpu")
    return _run_options(options).resolve(device, _ranks(options, gpus if device == "cuda" else 0))


def _run_options(options: GateOptions) -> RunRequest:
    """Of the launches."""
    impls = impls_to_launch(options.impls)
    return RunRequest(impls=impls, mesh=options.mesh, sizes_bytes=options.sizes_bytes, dtypes=options.dtypes)


def _ranks(options: GateOptions, gpus: int = 0) -> int:
    asked = ranks_of(options.mesh) if options.mesh else options.nproc
    return asked or gpus or DEFAULT_CPU_RANKS


@contextlib.contextmanager
def _made_folder(folder: Path, resume: bool) -> Iterator[None]:
    """It is gone again where the gate is refused before it holds anything."""
    if (folder / STATE).exists() and not resume:
        raise OutputError(f"{folder} holds a gate already: give another -o, or --resume to go on with it")
    if resume and not (folder / STATE).exists():
        raise UsageError(
            f"{folder} holds no gate to go on with: leave --resume out, or give its folder to -o"
        )
    try:
        (folder / "launches").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make {folder}: {error.strerror or error}; give -o another folder"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # they hold something
            (folder / "launches").rmdir()
            folder.rmdir()


def _keep_state(folder: Path, options: GateOptions, base: Arm, head: Arm, plan: RunOptions) -> int:
    """Writes what the gate is about, or checks that it is the same; the seed of its order."""
    from dtbench.machine.provenance import cpu

    now = State(
        base=base.identity,
        head=head.identity,
        selections=options.selections,
        plan=plan,
        cpu=cpu().model,
        host=os.uname().nodename,
        seed=random.SystemRandom().randrange(2**31) if options.seed is None else options.seed,
    )
    path = folder / STATE
    if not options.resume:
        _write(path, json.dumps(msgspec.to_builtins(now), indent=2), "gate state")
        return now.seed
    try:
        was = into(decode(path.read_bytes()), State)
    except (OSError, BadFieldError) as error:
        raise UnreadableRunError(f"{path} cannot be read: {error}; start anew with another -o") from error
    for name, value in msgspec.structs.asdict(now).items():
        before = getattr(was, name)
        if before != value and name != "seed":
            raise UsageError(
                f"cannot go on with {folder}: its {name} is {str(before)[:200]}, now it is {str(value)[:200]}; "
                "give what the first gate was given, on the same machine, or another -o"
            )
    return was.seed


def _write(path: Path, text: str, mark: str) -> None:
    write_atomically(path, text, lambda head: mark in head, "file of a gate")


# --------------------------------------------------------------------------------- what is told


def publish(report: Gate, as_json: bool = False) -> None:
    """The report on the terminal and, in a GitHub job, in its annotations and summary.

    Raises:
        OutputError: the summary cannot be written.
    """
    lines = [text_of(report)] if as_json else outputs.lines(report)
    if os.environ.get("GITHUB_ACTIONS") == "true" and not as_json:
        lines = [*lines, *outputs.annotations_of(report)]
    for line in lines:
        click.echo(line)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(outputs.markdown(report))
        except OSError as error:
            raise OutputError(f"cannot append to GITHUB_STEP_SUMMARY: {error.strerror or error}") from error
