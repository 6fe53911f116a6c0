"""The verdict on an op or program, as the suites `coverage` and `compat` make it, and the committed tables of them.

In a run file it is a result whose counters hold the cases per verdict: `OpVerdict.result` and `OpVerdict.of` are the
two directions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from dtbench.records.read import BadFieldError, into, read_json
from dtbench.suite import Result, Run, Status
from dtbench.suite.errors import UnreadableRunError
from dtbench.suite.fields import Count

# Worst first. An op has the worst verdict of its cases; what each means stands in the suite.
VERDICTS = ("wrong", "hang", "died", "differs", "error", "no rule", "random differs", "refused", "pass")
NOTHING = "n/a"
# Counters beside the verdicts: calls run on replicated inputs, samples tried, samples that could not be judged.
FALLBACKS = "fallbacks"
SAMPLES = "samples"
NOT_JUDGED = "not judged"
SUITE = "coverage"
PROGRAMS = "compat"  # its names are programs, its modes are their topics
MAX_TABLE_BYTES = 64 * 2**20

_STATUS: Mapping[str, Status] = {"pass": "ok", "wrong": "wrong", NOTHING: "skipped"}


class OpVerdict(Struct, frozen=True, kw_only=True):
    """What came of an op in one mode, or of a program of a topic.

    cases: per verdict, how many. samples: tried, of which `not_judged` gave nothing to judge by because the plain op
    raised, or its gradient did. fallbacks: calls that the core ran on replicated inputs, for want of a rule.
    """

    op: str
    mode: str
    impl: str
    cases: Mapping[str, int]
    suite: str = SUITE
    reason: str = ""
    samples: int = 0
    not_judged: int = 0
    fallbacks: int = 0

    @property
    def verdict(self) -> str:
        """One of VERDICTS or NOTHING."""
        return next((v for v in VERDICTS if self.cases.get(v)), NOTHING)

    @property
    def by_fallback(self) -> bool:
        return self.impl == "core" and bool(self.fallbacks)

    def result(self) -> Result:
        """The line of the run file."""
        counters = {v: float(self.cases[v]) for v in VERDICTS if self.cases.get(v)}
        aside = {FALLBACKS: self.fallbacks, SAMPLES: self.samples, NOT_JUDGED: self.not_judged}
        counters |= {name: float(count) for name, count in aside.items() if count}
        status = _STATUS.get(self.verdict, "failed")
        params = {"mode": self.mode}
        return Result(self.suite, self.op, self.impl, params, status, self.reason, counters=counters)

    @classmethod
    def of(cls, result: Result) -> OpVerdict:
        count = {
            name: int(result.counters.get(name, 0)) for name in (*VERDICTS, FALLBACKS, SAMPLES, NOT_JUDGED)
        }
        return cls(
            op=result.name,
            mode=str(result.params["mode"]),
            impl=result.impl,
            cases={v: count[v] for v in VERDICTS if count[v]},
            suite=result.suite,
            reason=result.reason,
            samples=count[SAMPLES],
            not_judged=count[NOT_JUDGED],
            fallbacks=count[FALLBACKS],
        )


def has_verdicts(result: Result) -> bool:
    """Whether it is a verdict on an op or program, not a time."""
    return result.suite in (SUITE, PROGRAMS) and "mode" in result.params


def verdicts_of(run: Run) -> list[OpVerdict]:
    return [OpVerdict.of(result) for result in run.results if has_verdicts(result)]


# ---- the committed table ----


class Baseline(Struct, frozen=True, kw_only=True):
    """The core's verdicts that were committed: op -> mode -> verdict, and what they were made with.

    samples: tried in all; not_judged: op -> mode -> samples. Tables of before have neither: None.
    """

    schema: Literal[1] = 1
    torch: str
    options: Mapping[str, str]
    verdicts: Mapping[str, Mapping[str, str]]
    samples: Count | None = None
    not_judged: Mapping[str, Mapping[str, Count]] | None = None


def write_baseline(baseline: Baseline, path: Path) -> None:
    """As JSON with a line per op, which makes changes easy to read."""
    head = {
        "schema": baseline.schema,
        "torch": baseline.torch,
        "options": dict(baseline.options),
        "samples": baseline.samples,
        "not_judged": baseline.not_judged,
    }
    known = json.dumps({name: value for name, value in head.items() if value is not None})
    ops = [f"  {json.dumps(op)}: {json.dumps(dict(modes))}" for op, modes in baseline.verdicts.items()]
    path.write_text(known[:-1] + ', "verdicts": {\n' + ",\n".join(ops) + "\n}}\n")


def read_baseline(path: Path) -> Baseline:
    """What `write_baseline` wrote.

    Raises:
        UnreadableRunError: it is something else.
    """
    read = read_json(path, "what `coverage -o` writes", MAX_TABLE_BYTES)
    try:
        return into(read, Baseline)
    except BadFieldError as error:
        raise UnreadableRunError(
            f"{path} is no table of verdicts: {error}; expected what `coverage -o` writes"
        ) from error
