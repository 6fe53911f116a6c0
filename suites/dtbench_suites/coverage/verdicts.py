"""What is tried and what can come of it. Plain data, no torch.

Verdicts, worst first:
    wrong           a value, shape, dtype or gradient differs, and nobody was told
    hang            one rank raised or diverged while others waited or returned
    error           every rank raised, alike
    no rule         every rank raised, to say that the op has no sharding rule
    random differs  a random op gave other numbers than the plain op under the same seed
    refused         the core's own refusal of a write that the placement cannot hold (PlacementError)
    pass
An op has the worst verdict of its cases, or "n/a" when the plain op gives nothing to compare with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtbench.judge.op_verdicts import MODES, NOTHING, VERDICTS

__all__ = [
    "IMPLS",
    "MODES",
    "NOTHING",
    "RANKS",
    "VERDICTS",
    "Caps",
    "Case",
    "OpVerdict",
    "Place",
    "Places",
    "spell",
    "summarize",
]

IMPLS = ("core", "torch")
RANKS = 4

# Per mesh dim: "R", "S0", "S1", ..., "Psum", "Pavg", "Pmax".
Place = str
# Per tensor of a sample, in the order of its pytree (and then per tensor of out=): per mesh dim.
Places = tuple[tuple[Place, ...], ...]


@dataclass(frozen=True)
class Caps:
    """How much of an op is tried: samples, and placements of each."""

    samples: int = 12
    places: int = 8


@dataclass(frozen=True)
class Case:
    """A sample and how it was placed, and what came of it. `stage`: "forward" or "backward"."""

    sample: int
    places: Places
    verdict: str
    stage: str = ""
    reason: str = ""
    error: BaseException | None = field(default=None, compare=False)

    def describe(self) -> str:
        """In a line."""
        stage = f" {self.stage}:" if self.stage else ""
        placed = f", {spell(self.places)}" if self.places else ""
        return f"sample {self.sample}{placed}:{stage} {self.reason}"


@dataclass(frozen=True)
class OpVerdict:
    """An op in one mode. `counts`: cases per verdict. `reason`: of the first case with the op's verdict.

    fallbacks: calls of aten ops that the core ran on replicated inputs, for want of a rule.
    """

    op: str
    mode: str
    impl: str
    verdict: str
    counts: dict[str, int]
    fallbacks: int = 0
    reason: str = ""


def summarize(op: str, mode: str, impl: str, cases: Sequence[Case], fallbacks: int = 0) -> OpVerdict:
    """The op's verdict from its cases'."""
    counts = Counter(case.verdict for case in cases)
    worst = next((verdict for verdict in VERDICTS if counts[verdict]), NOTHING)
    first = next((case for case in cases if case.verdict == worst), None)
    shown = {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}
    reason = "" if first is None or worst == "pass" else first.describe()
    return OpVerdict(op, mode, impl, worst, shown, fallbacks, reason)


def spell(places: Places) -> str:
    """`S0 | R`, a tensor between bars; `S0,R` on two mesh dims."""
    return " | ".join(",".join(one) for one in places)
