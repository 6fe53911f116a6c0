"""Measures how often the gate is wrong on this machine: false alarms, and known slowdowns that it finds.

Real launches make a pool: rounds of base, base again (head of an unchanged gate), a third base (its null arm) and an
arm with real extra work, in random order. Trials then run the gate's own schedule on rounds drawn from
the pool without replacement. The launches are real, the trials share them: the intervals (Clopper-Pearson)
hold for the pool and are somewhat too narrow for the machine, which the report says.

    python -m dtbench.tests.gate_selftest --budget 20m -o FOLDER      in a checkout
"""

import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import msgspec

from dtbench.engine.options import RunRequest, parse_duration
from dtbench.errors import EXIT_INCONCLUSIVE, EXIT_OK, DtbenchError, UsageError, print_error
from dtbench.gate import control
from dtbench.gate.arms import open_arms
from dtbench.gate.benchmark import Benchmark, SuiteSelection
from dtbench.gate.history import machine_kind
from dtbench.gate.launcher import Launcher, Limits
from dtbench.gate.schedule import ArmName, GateSchedule, LaunchArms, LaunchTimes, OutOfTimeError
from dtbench.machine.device import DEFAULT_CPU_RANKS
from dtbench.records.comparison import Verdict
from dtbench.suite import RunOptions
from dtbench.tests import gate_selftest_suite

DEFAULT_BUDGET_S = 1200.0
# A trial that needs everything takes 5 rounds of the screen, 5 more where something moved, and 22 fresh pairs;
# one that finds the pool used up misses what it would have found.
FEWEST_ROUNDS = 32
TRIALS = 1000
# The goals on a loaded machine of two cores.
FALSE_PER_BENCHMARK, FALSE_PER_RUN = 0.005, 0.02
FOUND = {3: 0.80, 5: 0.95, 10: 0.95}


def plan_on(device: str) -> RunOptions:
    return RunRequest(impls=("core",)).resolve("cuda" if device == "cuda" else "cpu", DEFAULT_CPU_RANKS)


# Launches next to each other: "base", "same" and "null" of the same code, and "slowed".
Round = Mapping[str, LaunchTimes]


@dataclass
class Tally:
    """Trials of one kind. slowed, called: extra work in percent -> benchmarks, and regressions called among them."""

    runs: int = 0
    alarmed_runs: int = 0
    untrusted: int = 0
    undecided: int = 0
    launches: int = 0
    slowed: Counter[int] = field(default_factory=Counter)
    called: Counter[int] = field(default_factory=Counter)

    def share(self, extra: int) -> str:
        """Returns the share of benchmarks with `extra` percent more work that were called slower."""
        return share(self.called[extra], self.slowed[extra])


def selftest(budget_s: float | None, folder: Path | None, device: str, say: Callable[[str], None]) -> int:
    """Makes the pool, runs the trials, prints what came out; 0 where the goals are met, else 3. device: "cuda" judges
    the GPU's times, all others the host's.

    Raises:
        UsageError: a budget that holds too few launches.
    """
    folder = folder or Path(time.strftime("gate-selftest-%Y%m%dT%H%M%SZ", time.gmtime()))
    if (folder / "launches").exists():
        raise UsageError(f"{folder} exists already: give another -o")
    (folder / "launches").mkdir(parents=True)
    rounds, benchmarks, controls = _pool(folder, budget_s or DEFAULT_BUDGET_S, device, say)
    if len(rounds) < FEWEST_ROUNDS:
        raise UsageError(
            f"the budget held {len(rounds)} rounds of four launches, trials need {FEWEST_ROUNDS}: give --budget more"
        )
    unchanged = trials(rounds, benchmarks, controls, slowed=False, count=TRIALS, seed=1)
    changed = trials(rounds, benchmarks, controls, slowed=True, count=TRIALS, seed=2)
    report = lines(unchanged, changed, len(rounds))
    click.echo("\n".join(report))
    content = {
        "machine": msgspec.to_builtins(machine_kind()),
        "rounds": len(rounds),
        "unchanged": vars(unchanged),
        "changed": vars(changed),
        "lines": report,
    }
    (folder / "selftest.json").write_text(json.dumps(content, indent=1) + "\n")
    return EXIT_OK if meets_goals(unchanged, changed) else EXIT_INCONCLUSIVE


def _pool(
    folder: Path, budget_s: float, device: str, say: Callable[[str], None]
) -> tuple[list[Round], list[Benchmark], list[Benchmark]]:
    limits = Limits(600.0, time.monotonic() + budget_s, f"{budget_s:g} s")
    with contextlib.ExitStack() as stack:
        base, slowed = stack.enter_context(open_arms("env:", f"env:{gate_selftest_suite.VARIABLE}=1", say))
        launcher = Launcher(
            {"base": base, "head": slowed},
            {name: [SuiteSelection(gate_selftest_suite.__file__)] for name in ("base", "head")},
            plan_on(device),
            folder / "launches",
            limits,
            variables={control.KIND: "torch"},
        )
        stack.callback(launcher.close)
        order = random.Random(0)
        rounds: list[Round] = []
        benchmarks: list[Benchmark] = []
        controls: list[Benchmark] = []
        try:
            (counted,) = launcher.count("base")
            for benchmark in counted.listing.benchmarks:
                (controls if benchmark.key[0] == control.NAME else benchmarks).append(benchmark)
            while True:
                names = order.sample(["base", "same", "null", "slowed"], 4)
                arms: list[ArmName] = ["head" if name == "slowed" else "base" for name in names]
                rounds.append(dict(zip(names, launcher.launch(arms, benchmarks), strict=True)))
                say(f"round {len(rounds)} of the pool")
        except OutOfTimeError:
            return rounds, benchmarks, controls


def trials(
    rounds: Sequence[Round],
    benchmarks: Sequence[Benchmark],
    controls: Sequence[Benchmark],
    *,
    slowed: bool,
    count: int,
    seed: int,
) -> Tally:
    """Runs the gate's schedule `count` times, each on rounds drawn from the pool."""
    tally = Tally()
    for number in range(count):
        drawn = random.Random(f"{seed}/{number}").sample(list(rounds), len(rounds))
        schedule = GateSchedule(benchmarks, controls, _replay(drawn, slowed=slowed), seed=number)
        judged, trust = schedule.run()
        extra = [int(benchmark.params["extra"]) if slowed else 0 for benchmark in judged]
        verdicts = [benchmark.verdict for benchmark in judged]
        tally.slowed.update(extra)
        tally.called.update(
            percent for percent, verdict in zip(extra, verdicts, strict=True) if verdict is Verdict.SLOWER
        )
        tally.undecided += verdicts.count(Verdict.INCONCLUSIVE)
        tally.runs += 1
        tally.alarmed_runs += Verdict.SLOWER in verdicts
        tally.untrusted += bool(trust.reasons)
        tally.launches += schedule.evidence.launches
    return tally


def _replay(drawn: Sequence[Round], *, slowed: bool) -> LaunchArms:
    """Gives the launches of the drawn rounds, a round for each pair."""
    counts, head = Counter[ArmName](), "slowed" if slowed else "same"

    def one(arm: ArmName) -> LaunchTimes:
        at = counts[arm]
        if at == len(drawn):
            raise OutOfTimeError("the pool is used up")
        counts[arm] += 1
        return drawn[at][head if arm == "head" else arm]

    return lambda arms, _benchmarks: [one(arm) for arm in arms]


# --------------------------------------------------------------------------------- the report


def share(part: int, whole: int) -> str:
    """`0.12 % (0.03 to 0.31 %)`: a share with its Clopper-Pearson interval at 95%."""
    from scipy.stats import binomtest

    if not whole:
        return "nothing"
    interval = binomtest(part, whole).proportion_ci(0.95, method="exact")
    return f"{part / whole:.2%} ({interval.low:.2%} to {interval.high:.2%}; {part} of {whole})"


def meets_goals(unchanged: Tally, changed: Tally) -> bool:
    """Whether the shares themselves, not their intervals, are within the goals."""
    return (
        unchanged.called[0] <= FALSE_PER_BENCHMARK * unchanged.slowed[0]
        and unchanged.alarmed_runs <= FALSE_PER_RUN * unchanged.runs
        and all(changed.called[extra] >= goal * changed.slowed[extra] for extra, goal in FOUND.items())
    )


def lines(unchanged: Tally, changed: Tally, rounds: int) -> list[str]:
    """For a terminal."""
    runs = unchanged.runs
    return [
        f"pool: {rounds} rounds of 4 real launches; {runs} trials of each kind, resampled from it: they share",
        "launches, so the intervals are narrower than fresh gates would give",
        f"no change: false alarms per benchmark {unchanged.share(0)}, goal 0.5 %",
        f"runs with one {share(unchanged.alarmed_runs, runs)}, goal 2 %",
        f"untrusted {share(unchanged.untrusted, runs)}; undecided {share(unchanged.undecided, unchanged.slowed[0])}",
        f"changed: false alarms of the unchanged benchmarks {changed.share(0)}",
        *(f"+{extra} % found {changed.share(extra)}, goal {goal:.0%}" for extra, goal in FOUND.items()),
        f"no change: {unchanged.launches / max(runs, 1):.1f} launches per run",
        f"changed: {changed.launches / max(changed.runs, 1):.1f} launches per run",
        "the goals are met" if meets_goals(unchanged, changed) else "the goals are NOT met",
    ]


@click.command()
@click.option("--budget", "budget_s", metavar="TIME", type=parse_duration, help="For the launches.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Whose times are judged.")
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), help="The folder for the pool.")
def main(budget_s: float | None, device: str, folder: Path | None) -> None:
    """Measures this machine's false alarms and detection."""
    try:
        sys.exit(selftest(budget_s, folder, device, lambda text: click.echo(text, err=True)))
    except DtbenchError as error:
        print_error(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
