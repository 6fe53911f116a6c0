"""The suite `compat`: a case per program, answered by worker processes that fork four gloo ranks each time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from dtbench.comparison.op_verdicts import VARIANTS, WRITTEN
from dtbench.records.verdicts import PROGRAMS
from dtbench.suite import CHOOSABLE_IMPLS, Case, RunOptions, suite
from dtbench.suite.errors import UsageError
from dtbench_suites import SUITES
from dtbench_suites.coverage.suite import judged_by, not_timed, number, pattern

OPTIONS = {
    "variants": f"comma list of {', '.join(VARIANTS)} [default: all]",
    "share": "one program in so many runs in a variant [default: 4, in inductor 16; with --quick 8 times these]",
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
def compat(plan: RunOptions) -> Iterator[Case]:
    number(plan, "workers", 1)
    wanted = pattern(plan, "programs")
    chosen = plan.options.get("variants", ",".join(VARIANTS)).split(",")
    if unknown := [variant for variant in chosen if variant not in VARIANTS]:
        expected = f"expected a comma list of {', '.join(VARIANTS)}"
        raise UsageError(f"--variants has {', '.join(unknown)}: {expected}")
    from dtbench_suites.compat.program import programs
    from dtbench_suites.compat.variants import QUICK_SHARE, SHARES, is_chosen

    entries = [entry for entry in programs().values() if wanted.search(f"{entry.topic}: {entry.name}")]
    cases = []
    for variant in [variant for variant in VARIANTS if variant in chosen]:
        share = number(plan, "share", SHARES.get(variant, 1) * (QUICK_SHARE if plan.quick else 1))
        cases += [(variant, entry) for entry in entries if is_chosen(variant, entry.name, share)]
    if any("inductor" in (variant, entry.backend) for variant, entry in cases):
        _need_compiler()
    for variant, entry in cases:
        mode = entry.topic if variant == WRITTEN else variant
        yield Case(entry.name, {"mode": mode}, dict.fromkeys(CHOOSABLE_IMPLS, not_timed))


def _need_compiler() -> None:
    """Raises UsageError where inductor would find no compiler."""
    named = os.environ.get("CXX", "g++")  # as inductor looks for it
    if not shutil.which(named):
        raise UsageError(
            f"inductor builds code with a C++ compiler, and there is no {named}: install it, name yours in CXX, or "
            "do without by --programs '^(?!.*inductor)' and --variants written,order,uneven,strided,from_local"
        )
