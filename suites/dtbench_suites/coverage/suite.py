"""The suite `coverage`: a case per op of torch's database and mode, answered by worker processes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence

from dtbench.comparison.op_verdicts import MODES
from dtbench.records.verdicts import SUITE
from dtbench.suite import CHOOSABLE_IMPLS, Case, Result, RunOptions, Workload, suite
from dtbench.suite.errors import UsageError, WorldBrokenError
from dtbench.suite.suites import Measure
from dtbench_suites import SUITES
from dtbench_suites.coverage import pool
from dtbench_suites.coverage.verdicts import Caps, Job

# Under --quick, and what CI runs: all modes in some minutes on two cores.
QUICK = Caps(samples=3, places=4)

OPTIONS = {
    "mode": f"comma list of {', '.join(MODES)} [default: all]",
    "ops": "regular expression that an op's name holds, such as '^nn.functional.conv' [default: all]",
    "samples": f"samples tried per op [default: {Caps.samples}; with --quick {QUICK.samples}]",
    "places": f"placements tried per sample [default: {Caps.places}; with --quick {QUICK.places}]",
    "workers": "processes that judge at a time [default: the cores that may be used]",
}


def judged_by(module: str, of: str, workers: int) -> Measure:
    """What measures a suite of verdicts: the judge of a module. of: the suite; workers: unless the plan says."""

    def measure(
        plan: RunOptions, tasks: Sequence[tuple[Case, tuple[str, ...]]], record: Callable[[Result], None]
    ) -> None:
        caps = caps_of(plan)
        jobs = [
            Job(case.name, str(case.params["mode"]), impl, caps, of)
            for case, impls in tasks
            for impl in impls
        ]
        try:
            for verdict in pool.judge_all(jobs, number(plan, "workers", workers), judge_module=module):
                record(verdict.result())
        except pool.WorkerFailedError as error:
            raise WorldBrokenError(str(error)) from error

    return measure


@suite(
    "coverage",
    world="own",
    help=SUITES["coverage"],
    measure=judged_by("dtbench_suites.coverage.judge", SUITE, len(os.sched_getaffinity(0))),
    options=OPTIONS,
    by_default=False,
)
def coverage(plan: RunOptions) -> Iterator[Case]:
    caps_of(plan)
    chosen = plan.options.get("mode", ",".join(MODES)).split(",")
    if unknown := [mode for mode in chosen if mode not in MODES]:
        raise UsageError(f"--mode has {', '.join(unknown)}: expected a comma list of {', '.join(MODES)}")
    wanted = pattern(plan, "ops")
    try:
        from dtbench_suites.coverage.samples import database, has_mode

        names = [name for name in database() if wanted.search(name)]
    except ImportError as error:
        raise UsageError(
            f"torch's op database cannot be loaded ({error}): it needs packages of torch's tests; "
            "`pip install 'dtbench[coverage]'` brings them"
        ) from error
    for mode in MODES:
        for name in names if mode in chosen else ():
            if has_mode(name, mode):
                yield Case(name, {"mode": mode}, dict.fromkeys(CHOOSABLE_IMPLS, not_timed))


def not_timed(world: object) -> Workload:
    raise NotImplementedError("verdicts come from `measure`")


def caps_of(plan: RunOptions) -> Caps:
    """How much is tried per op."""
    least = QUICK if plan.quick else Caps()
    return Caps(number(plan, "samples", least.samples), number(plan, "places", least.places))


def pattern(plan: RunOptions, name: str) -> re.Pattern[str]:
    try:
        return re.compile(plan.options.get(name, ""))
    except re.error as error:
        raise UsageError(f"--{name} {plan.options[name]}: no regular expression ({error})") from error


def number(plan: RunOptions, name: str, default: int) -> int:
    text = plan.options.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--{name} {text}: expected a number of at least 1")
    return int(text)
