"""How good cost models are: what `dtbench calibrate --validate` prints, and writes with --json."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from dtbench.suite.fields import Amount, Count


class Score(Struct, frozen=True, kw_only=True):
    """How far predictions lie from measurements. ratio: the typical factor; median_error: |p / m - 1|."""

    points: Count
    geometric_mean_ratio: Amount
    median_error: Amount


class CallGroup(Struct, frozen=True, kw_only=True):
    """The calls that are scored together. scores: model -> regime of sizes -> score, where there are points.

    inside: share of the new values within the topology's 90 % intervals, of `points` that lie inside the
    tables' sizes; beyond: the number of those outside, which the scores count too. one_launch: whether
    the intervals come from a single launch, so that they are too narrow.
    """

    name: str
    scores: dict[str, dict[str, Score]]
    inside: Amount | None
    points: Count
    beyond: Count
    one_launch: bool


class Validation(Struct, frozen=True, kw_only=True):
    """models: each in words. notes: what to know about the groups' scores."""

    kind: Literal["validation"] = "validation"
    models: dict[str, str]
    title: str
    groups: tuple[CallGroup, ...]
    notes: tuple[str, ...]
