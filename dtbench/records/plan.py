"""What `dtbench plan --json` writes: layouts of a training job, measured steps beside predicted ones, and what
shardings spend on communication."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dtbench.suite.fields import Amount, Count, Real, Time


class LayoutRow(Struct, frozen=True, kw_only=True):
    """A way to shard. Times in seconds, memory in bytes; parts_s and memory_bytes: name -> share."""

    words: str
    layout: dict[str, int | str]
    step_s: Time
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
    model: dict[str, str | int | bool]
    machine: str
    gpus: Count
    global_batch: Count
    sequence: Count
    limit_bytes: Amount
    considered: Count
    fitting: Count
    best: Annotated[tuple[LayoutRow, ...], Meta(min_length=1)]
    changes: tuple[str, ...]
    assumptions: tuple[str, ...]


class StepRow(Struct, frozen=True, kw_only=True):
    """error: predicted over measured, less 1. low_s, high_s: the 90 % interval, where there is one. Bytes of one GPU,
    where they were measured. line: of the table, 0 where it has none. mfu: as measured."""

    label: str
    group: str
    measured_s: Time
    predicted_s: Time
    error: Real
    low_s: Amount | None = None
    high_s: Amount | None = None
    measured_bytes: Amount | None = None
    predicted_bytes: Amount | None = None
    line: Count = 0
    mfu: Amount | None = None


class StepsFile(Struct, frozen=True, kw_only=True):
    """cost_of_choice: per group of choices, what the one predicted fastest took more than the fastest. left_out:
    rows that the model cannot express, a line for each reason."""

    kind: Literal["plan validation"] = "plan validation"
    title: str
    rows: Annotated[tuple[StepRow, ...], Meta(min_length=1)]
    mean_error: Real
    pairs: Count
    pairs_in_order: Count
    cost_of_choice: tuple[Real, ...]
    verdict: tuple[str, ...]
    left_out: tuple[str, ...] = ()


class Times(Struct, frozen=True, kw_only=True):
    """Seconds: expected, and the ends of the 90 % interval."""

    time_s: Amount
    low_s: Amount
    high_s: Amount


class CallRow(Times, frozen=True, kw_only=True):
    """A kind of collective and what one of it takes. where: layer or ends; count: in one layer or one step.

    size_factor, ranks_factor, by_formula: how far beyond what was measured, as `dtbench.cost.price.Price` says.
    """

    scheme: str
    where: str
    phase: str
    what: str
    collective: str
    mesh_dim: str
    size_bytes: Count
    count: Count
    ranks: Count
    size_factor: Amount
    ranks_factor: Amount
    by_formula: bool


class ShardingRow(Struct, frozen=True, kw_only=True):
    """All collectives of a sharding, one after the other. low_s and high_s add up the single ones: what is wrong
    with one is likely wrong with all of them, as they share curves. sent_bytes: by one rank in a step where every
    collective is a ring."""

    schemes: tuple[str, ...]
    layer: Times
    step: Times
    sent_bytes: Amount


class Communication(Struct, frozen=True, kw_only=True):
    """What the shardings of a model spend on communication on a mesh. measured_as: dim -> dim of the topology, where
    the names differ; variants: in the order of schemes, not of time."""

    kind: Literal["prediction"] = "prediction"
    model: dict[str, str | int | bool]
    mesh: dict[str, Count]
    measured_as: dict[str, str]
    tokens_per_rank: Count
    dtype: str
    reduce_dtype: str
    collectives: tuple[CallRow, ...]
    variants: tuple[ShardingRow, ...]
    overlapped: bool = False
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
