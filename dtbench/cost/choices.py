"""What the choices of each cost model cost: what `dtbench regret` finds, and the report shows. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtbench.fields import Amount, Count

# In order of what they know.
CHOOSERS: Mapping[str, str] = {
    "greedy": "torch's planner (greedy, its default)",
    "by_cost": "torch's planner by cost",
    "guessed": "built-in constants, hosts as torch guesses them",
    "layout": "built-in constants, hosts as they are",
    "constants": "calibrated constants",
    "curves": "calibrated curves",
    "oracle": "what was fastest in the other launches",
    "worst": "the slowest way",
}


@dataclass(frozen=True)
class Score:
    """A model's regret over decisions and launches. interval: 90 %, over decisions.

    ranked_right: of the pairs of ways that differ clearly, the share whose prices have the
    order of their times; None for a planner that has no prices. ties: share of decisions with no preference.
    """

    mean: Amount
    interval: tuple[Amount, Amount]
    worst: Amount
    near: Amount
    ranked_right: Amount | None
    ties: Amount | None
    decisions: Count


@dataclass(frozen=True)
class Group:
    """Decisions of one library, kind and size, and how each model fares."""

    library: str
    name: str
    size_bytes: Count
    launches: Count
    scores: Mapping[str, Score]


@dataclass(frozen=True)
class Regret:
    """All groups; notes say what weakens them."""

    mesh: str
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain data, which says what it is."""
        return {"kind": "regret", "schema": 1, **dataclasses.asdict(self)}
