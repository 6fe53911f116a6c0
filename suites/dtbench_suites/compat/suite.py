"""The suite `compat`: a case per program, answered by worker processes that fork four gloo ranks each time."""

from __future__ import annotations

from collections.abc import Iterator

from dtbench.model import CHOOSABLE_IMPLS
from dtbench.records.verdicts import PROGRAMS
from dtbench.suite import Case, Plan, suite
from dtbench_suites import SUITES
from dtbench_suites.coverage.suite import judged_by, not_timed, number, pattern

OPTIONS = {
    "programs": "regular expression that a program's topic and name hold, such as 'compile: .*inductor' [default: all]",
    "workers": "programs judged at a time, each on four ranks [default: 1]",
}


@suite(
    "compat",
    world="own",
    help=SUITES["compat"],
    measure=judged_by("dtbench_suites.compat.judge", PROGRAMS, 1),
    options=OPTIONS,
    by_default=False,
)
def compat(plan: Plan) -> Iterator[Case]:
    number(plan, "workers", 1)
    wanted = pattern(plan, "programs")
    from dtbench_suites.compat.program import programs

    for entry in programs().values():
        if wanted.search(f"{entry.topic}: {entry.name}"):
            yield Case(entry.name, {"mode": entry.topic}, dict.fromkeys(CHOOSABLE_IMPLS, not_timed))
