"""The suite `compat`: a case per program, answered by worker processes that fork four gloo ranks each time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from dtbench.errors import UsageError, WorldBrokenError
from dtbench.judge.op_verdicts import PROGRAMS
from dtbench.model import CHOOSABLE_IMPLS, Case, Plan, Result
from dtbench.suite import suite
from dtbench_suites import SUITES
from dtbench_suites.coverage import pool
from dtbench_suites.coverage.suite import not_timed, number
from dtbench_suites.coverage.verdicts import Caps, Job

OPTIONS = {
    "programs": "regular expression that a program's topic and name hold, such as 'compile: .*inductor' [default: all]",
    "workers": "programs judged at a time, each on four ranks [default: 1]",
}


def measure(
    plan: Plan, tasks: Sequence[tuple[Case, tuple[str, ...]]], record: Callable[[Result], None]
) -> None:
    """Runs the programs and records each verdict."""
    jobs = [
        Job(case.name, str(case.params["mode"]), impl, Caps(1, 1), PROGRAMS)
        for case, impls in tasks
        for impl in impls
    ]
    try:
        for result in pool.judge_all(
            jobs, number(plan, "workers", 1), judge_module="dtbench_suites.compat.judge"
        ):
            record(result)
    except pool.WorkerFailedError as error:
        raise WorldBrokenError(str(error)) from error


@suite("compat", world="own", help=SUITES["compat"], measure=measure, options=OPTIONS, by_default=False)
def compat(plan: Plan) -> Iterator[Case]:
    number(plan, "workers", 1)
    try:
        wanted = re.compile(plan.options.get("programs", ""))
    except re.error as error:
        raise UsageError(f"--programs {plan.options['programs']}: no regular expression ({error})") from error
    from dtbench_suites.compat.program import programs

    for entry in programs().values():
        if wanted.search(f"{entry.topic}: {entry.name}"):
            yield Case(entry.name, {"mode": entry.topic}, dict.fromkeys(CHOOSABLE_IMPLS, not_timed))
