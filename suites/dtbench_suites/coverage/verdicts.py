"""What is tried and what can come of it. Plain data, no torch.

Verdicts, worst first:
    wrong           a value, shape, dtype or gradient differs, and nobody was told
    hang            one rank raised or diverged while others waited or returned
    died            a rank's process ended
    differs         ranks come to different results, or raise different errors
    error           every rank raised, alike
    no rule         every rank raised, to say that the op has no sharding rule
    random differs  a random op gave other numbers than the plain op under the same seed
    refused         the core's own refusal of a write that the placement cannot hold (PlacementError)
    pass
An op has the worst verdict of its cases, or "n/a" when the plain op gives nothing to compare with. A sample whose plain
op or gradient raises is "not judged": it is counted beside the verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dtbench.records.verdicts import NOT_JUDGED, NOTHING, SUITE, VERDICTS, OpVerdict

RANKS = 4

# Per mesh dim: "R", "S(0)", "S(1)", ..., "P(sum)", "P(avg)", "P(max)".
Place = str
# Per tensor of a sample, in the order of its pytree (and then per tensor of out=): per mesh dim.
Places = tuple[tuple[Place, ...], ...]


@dataclass(frozen=True)
class Caps:
    """How much of an op is tried: samples, and placements of each."""

    samples: int = 12
    places: int = 8


@dataclass(frozen=True)
class Job:
    """An op to judge in one mode, or a program of a topic."""

    op: str
    mode: str
    impl: str
    caps: Caps
    suite: str = SUITE


@dataclass(frozen=True)
class Case:
    """A sample (None: a program, which has none) and how it was placed, and what came of it. `stage`: "forward" or
    "backward"."""

    sample: int | None
    places: Places
    verdict: str
    stage: str = ""
    reason: str = ""

    def describe(self) -> str:
        """In a line; `S(0) | R` is a tensor between bars, `S(0),R` its placements on two mesh dims."""
        if self.sample is None:
            return self.reason
        stage = f" {self.stage}:" if self.stage else ""
        spelled = " | ".join(",".join(one) for one in self.places)
        placed = f", {spelled}" if self.places else ""
        return f"sample {self.sample}{placed}:{stage} {self.reason}"


def summarize(job: Job, cases: Sequence[Case], fallbacks: int = 0) -> OpVerdict:
    """Cases per verdict, and the reason of the first case with the worst one.

    fallbacks: calls of aten ops that the core ran on replicated inputs, for want of a rule.
    """
    counts = Counter(case.verdict for case in cases)
    worst = next((verdict for verdict in (*VERDICTS[:-1], NOT_JUDGED, NOTHING) if counts[verdict]), None)
    reason = next((case.describe() for case in cases if case.verdict == worst), "")
    if not counts[NOTHING] and not any(counts[verdict] for verdict in VERDICTS):
        reason = f"the plain op gives nothing to compare{reason and '; '}{reason}"
    return OpVerdict(
        op=job.op,
        mode=job.mode,
        impl=job.impl,
        cases={verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]},
        suite=job.suite,
        reason=reason,
        samples=len({case.sample for case in cases if case.sample is not None}),
        not_judged=len({case.sample for case in cases if case.verdict == NOT_JUDGED}),
        fallbacks=fallbacks,
    )
