"""What `dtbench plan --json` writes: layouts of a training job, and measured steps beside predicted ones."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from dtbench.fields import Amount, Count


class LayoutRow(Struct, frozen=True, kw_only=True):
    """A way to shard. Times in seconds, memory in bytes; parts_s and memory_bytes: name -> share."""

    words: str
    layout: dict[str, int | str]
    step_s: Amount
    low_s: Amount | None
    high_s: Amount | None
    mfu: Amount
    exposed_s: Amount
    parts_s: dict[str, Amount]
    memory_bytes: dict[str, Amount]
    why: str


class PlanFile(Struct, frozen=True, kw_only=True):
    """best: the fastest first. considered, fitting: layouts. changes: what would change the answer."""

    kind: Literal["plan"] = "plan"
    title: str
    model: dict[str, Any]
    machine: str
    gpus: Count
    global_batch: Count
    sequence: Count
    limit_bytes: Amount
    considered: Count
    fitting: Count
    best: tuple[LayoutRow, ...]
    changes: tuple[str, ...]
    assumptions: tuple[str, ...]


class StepRow(Struct, frozen=True, kw_only=True):
    """error: predicted over measured, less 1."""

    label: str
    group: str
    measured_s: Amount
    predicted_s: Amount
    error: float


class StepsFile(Struct, frozen=True, kw_only=True):
    """cost_of_choice: per group of choices, what the one predicted fastest took more than the fastest."""

    kind: Literal["plan validation"] = "plan validation"
    title: str
    rows: tuple[StepRow, ...]
    mean_error: float
    pairs: Count
    pairs_in_order: Count
    cost_of_choice: tuple[float, ...]
    verdict: tuple[str, ...]
