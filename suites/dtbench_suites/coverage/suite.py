"""The suite `coverage`: a case per op of torch's database and mode, answered by worker processes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence

from dtbench.errors import UsageError, WorldBrokenError
from dtbench.judge.op_verdicts import FALLBACKS, NOTHING
from dtbench.model import Case, Plan, Result, Status, Workload
from dtbench.suite import suite
from dtbench_suites import SUITES
from dtbench_suites.coverage import pool
from dtbench_suites.coverage.verdicts import IMPLS, MODES, Caps, OpVerdict

# Under --quick, and what CI runs: all modes in some minutes on two cores.
QUICK = Caps(samples=3, places=4)

OPTIONS = {
    "mode": f"comma list of {', '.join(MODES)} [default: all]",
    "ops": "regular expression that an op's name holds, such as '^nn.functional.conv' [default: all]",
    "samples": f"samples tried per op [default: {Caps.samples}; with --quick {QUICK.samples}]",
    "places": f"placements tried per sample [default: {Caps.places}; with --quick {QUICK.places}]",
    "workers": "processes that judge at a time [default: the cores that may be used]",
}


_STATUS: dict[str, Status] = {"pass": "ok", "wrong": "wrong", NOTHING: "skipped"}


def measure(
    plan: Plan, tasks: Sequence[tuple[Case, tuple[str, ...]]], record: Callable[[Result], None]
) -> None:
    """Judges the ops and records each verdict."""
    caps = caps_of(plan)
    jobs = [
        pool.Job(case.name, str(case.params["mode"]), impl, caps.samples, caps.places)
        for case, impls in tasks
        for impl in impls
    ]
    workers = _number(plan, "workers", len(os.sched_getaffinity(0)))
    try:
        for _, verdict in pool.judge_all(jobs, workers):
            record(result_of(verdict))
    except pool.WorkerFailedError as error:
        raise WorldBrokenError(str(error)) from error


def result_of(verdict: OpVerdict) -> Result:
    """The line of the run file."""
    status = _STATUS.get(verdict.verdict, "failed")
    counters = {name: float(count) for name, count in verdict.counts.items()}
    if verdict.fallbacks:
        counters[FALLBACKS] = float(verdict.fallbacks)
    reason = verdict.reason if verdict.verdict != NOTHING else "the plain op gives nothing to compare"
    return Result(
        "coverage", verdict.op, verdict.impl, {"mode": verdict.mode}, status, reason, counters=counters
    )


@suite(
    "coverage",
    world="own",
    help=SUITES["coverage"],
    measure=measure,
    options=OPTIONS,
    by_default=False,
)
def coverage(plan: Plan) -> Iterator[Case]:
    caps_of(plan)
    chosen = plan.options.get("mode", ",".join(MODES)).split(",")
    if unknown := [mode for mode in chosen if mode not in MODES]:
        raise UsageError(f"--mode has {', '.join(unknown)}: expected a comma list of {', '.join(MODES)}")
    try:
        wanted = re.compile(plan.options.get("ops", ""))
    except re.error as error:
        raise UsageError(f"--ops {plan.options['ops']}: no regular expression ({error})") from error
    for mode in MODES:
        if mode in chosen:
            for name in _names(mode):
                if wanted.search(name):
                    yield Case(name, {"mode": mode}, dict.fromkeys(IMPLS, _not_timed))


def _names(mode: str) -> list[str]:
    try:
        from dtbench_suites.coverage.samples import has_mode, op_names

        return [name for name in op_names() if has_mode(name, mode)]
    except ImportError as error:
        raise UsageError(
            f"torch's op database cannot be loaded ({error}): it needs packages of torch's tests; "
            "`pip install 'dtbench[coverage]'` brings them"
        ) from error


def _not_timed(world: object) -> Workload:
    raise NotImplementedError("verdicts come from `measure`")


def caps_of(plan: Plan) -> Caps:
    """How much is tried per op."""
    least = QUICK if plan.quick else Caps()
    return Caps(_number(plan, "samples", least.samples), _number(plan, "places", least.places))


def _number(plan: Plan, name: str, default: int) -> int:
    text = plan.options.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--{name} {text}: expected a number of at least 1")
    return int(text)
