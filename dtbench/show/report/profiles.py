"""Results of `dtbench profile`: the tables, and from a trace of ranks one iteration of each section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from dtbench.files import profile
from dtbench.files.read import into

# The lanes that `dtbench profile` adds to each rank of a trace, by their thread ids.
_LANES = {1: "communication", 2: "compute"}
_ITERATION = "dtbench iteration"
# Per rank and lane; more are not told apart on a page.
MAX_SPANS = 400


@dataclass(frozen=True)
class CallProfile:
    """Stages of one impl of a case, ns per call: stage -> (ns, plus or minus)."""

    label: str
    impl: str
    source: str
    whole_ns: float
    floor_ns: float | None
    unattributed_ns: float
    stages: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class RankProfile:
    """One section of a profile of ranks. parts_us: rank -> part of PARTS -> us per iteration."""

    label: str
    iterations: int
    parts_us: Mapping[str, Mapping[str, float]]
    plain_us: float
    profiled_us: float
    late: tuple[str, ...]


@dataclass(frozen=True)
class Span:
    """What a rank did, us from the start of the earliest rank's iteration."""

    rank: int
    lane: str
    start_us: float
    end_us: float


def call_profile(data: Any) -> list[CallProfile]:
    """
    Raises:
        BadFieldError: not what a profile of calls holds.
    """
    return [
        CallProfile(
            case.label,
            case.impl,
            case.source,
            case.whole_ns,
            case.floor_ns,
            case.unattributed_ns,
            {row.stage: (row.ns, row.plus_minus_ns) for row in case.rows},
        )
        for case in into(data, profile.Calls).cases
    ]


def rank_profile(data: Any) -> list[RankProfile]:
    """
    Raises:
        BadFieldError: not what a profile of ranks holds.
    """
    return [
        RankProfile(
            section.label,
            section.iterations,
            {rank: asdict(parts) for rank, parts in section.parts_us.items() if parts is not None},
            section.plain_us,
            section.profiled_us,
            tuple(_late(skew) for skew in section.skews),
        )
        for section in into(data, profile.Ranks).sections
    ]


def _late(skew: profile.Skew) -> str:
    who = (
        "the clocks cannot tell who is last"
        if skew.latest is None
        else f"rank {skew.latest} is last most often"
    )
    return f"{skew.kind}: the ranks arrive {skew.mean_us:.3g} µs apart on average, {who}"


def spans_of(trace: dict[str, Any]) -> dict[str, list[Span]]:
    """Of each section the middle one of its iterations, on all ranks.

    Raises:
        BadFieldError: not a trace.
    """
    events = into(trace, profile.Trace).traceEvents
    drawn = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
    windows: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
    for event in drawn:
        name = event.get("name")
        if isinstance(name, str) and name.startswith(_ITERATION) and event.get("cat") == "user_annotation":
            section, _, number = name.removeprefix(_ITERATION).strip().rpartition(" #")
            windows.setdefault(section, {}).setdefault(number, []).append(_place(event))
    lanes = [(*_place(e), _LANES[e["tid"]]) for e in drawn if e.get("tid") in _LANES]
    return {section: _middle(list(iterations.values()), lanes) for section, iterations in windows.items()}


def _place(event: dict[str, Any]) -> tuple[int, float, float]:
    place = into(event, profile.Event, "an event")
    return place.pid, place.ts, place.ts + place.dur


def _middle(
    iterations: Sequence[Sequence[tuple[int, float, float]]],
    lanes: Sequence[tuple[int, float, float, str]],
) -> list[Span]:
    chosen = iterations[len(iterations) // 2]
    zero = min(start for _, start, _ in chosen)
    found = []
    for rank, start, end in sorted(set(chosen)):
        found.append(Span(rank, "whole", start - zero, end - zero))
        for lane in _LANES.values():
            inside = [(a, b) for r, a, b, of in lanes if r == rank and of == lane and start <= a < end]
            found += [Span(rank, lane, a - zero, min(b, end) - zero) for a, b in sorted(inside)[:MAX_SPANS]]
    return found
