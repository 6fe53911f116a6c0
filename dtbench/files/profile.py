"""What `dtbench profile` writes, as far as a report takes it: tables of calls and of ranks, and traces."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from dtbench.fields import Amount, Count


class Stage(Struct, frozen=True, kw_only=True):
    """A stage of a call, ns."""

    stage: str
    ns: float
    plus_minus_ns: Amount


class Call(Struct, frozen=True, kw_only=True):
    """One impl of a case, ns per call. source: what the stages were taken with; floor_ns: of plain tensors."""

    label: str
    impl: str
    source: str
    whole_ns: Amount
    unattributed_ns: float
    rows: tuple[Stage, ...]
    floor_ns: Amount | None = None


class Calls(Struct, frozen=True, kw_only=True):
    """The table of a profile of calls."""

    kind: Literal["profile of calls"]
    cases: tuple[Call, ...]


class Parts(Struct, frozen=True, kw_only=True):
    """Where one iteration of a rank went, us."""

    compute: float
    overlap: float
    exposed: float
    host: float


class Skew(Struct, frozen=True, kw_only=True):
    """How far apart the ranks came to a kind of collective; latest: who came last most often, if that is known."""

    kind: str
    mean_us: Amount
    latest: Count | None = None


class Section(Struct, frozen=True, kw_only=True):
    """A section of a profile of ranks; us per iteration, with the profiler and without."""

    label: str
    iterations: Count
    parts_us: dict[str, Parts | None]
    plain_us: Amount
    profiled_us: Amount
    skews: tuple[Skew, ...]


class Ranks(Struct, frozen=True, kw_only=True):
    """The table of a profile of ranks."""

    kind: Literal["profile of ranks"]
    sections: tuple[Section, ...]


class Event(Struct, frozen=True, kw_only=True):
    """A complete event of a trace (Trace Event Format, "ph" X), us."""

    pid: int
    ts: float
    dur: Amount


class Trace(Struct, frozen=True, kw_only=True):
    """A trace; its events are of many kinds, some of other tools."""

    traceEvents: list[Any]  # noqa: N815 - as the format spells it
