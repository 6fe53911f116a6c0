"""Results of `dtbench profile`: the tables, and from a trace of ranks one iteration of each section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtbench.files.read import BadFieldError
from dtbench.show.report import fields as f

PARTS = ("compute", "overlap", "exposed", "host")
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


def call_profile(data: Mapping[str, Any]) -> list[CallProfile]:
    """
    Raises:
        BadFieldError: not what a profile of calls holds.
    """
    return [
        CallProfile(
            f.text(case, "label"),
            f.text(case, "impl"),
            f.text(case, "source"),
            f.number(case, "whole_ns", least=0),
            f.optional(case, "floor_ns", least=0),
            f.number(case, "unattributed_ns"),
            {
                f.text(row, "stage"): (f.number(row, "ns"), f.number(row, "plus_minus_ns", least=0))
                for row in f.mappings(case, "rows")
            },
        )
        for case in f.mappings(data, "cases")
    ]


def rank_profile(data: Mapping[str, Any]) -> list[RankProfile]:
    """
    Raises:
        BadFieldError: not what a profile of ranks holds.
    """
    found = []
    for section in f.mappings(data, "sections"):
        parts = {
            str(rank): {part: f.number(f.as_mapping(of, "parts_us"), part) for part in PARTS}
            for rank, of in f.mapping(section, "parts_us").items()
            if of
        }
        found.append(
            RankProfile(
                f.text(section, "label"),
                int(f.number(section, "iterations", least=0)),
                parts,
                f.number(section, "plain_us", least=0),
                f.number(section, "profiled_us", least=0),
                tuple(_late(skew) for skew in f.mappings(section, "skews")),
            )
        )
    return found


def _late(skew: Mapping[str, Any]) -> str:
    latest = f.optional(skew, "latest", least=0)
    who = "the clocks cannot tell who is last" if latest is None else f"rank {latest:.0f} is last most often"
    mean = f.number(skew, "mean_us", least=0)
    return f"{f.text(skew, 'kind')}: the ranks arrive {mean:.3g} µs apart on average, {who}"


def spans_of(trace: Any) -> dict[str, list[Span]]:
    """Of each section the middle one of its iterations, on all ranks.

    Raises:
        BadFieldError: not a trace.
    """
    events = f.as_mapping(trace, "the trace").get("traceEvents")
    if not isinstance(events, list):
        raise BadFieldError("traceEvents is missing")
    drawn = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
    windows: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
    for event in drawn:
        name = event.get("name")
        if isinstance(name, str) and name.startswith(_ITERATION) and event.get("cat") == "user_annotation":
            section, _, number = name.removeprefix(_ITERATION).strip().rpartition(" #")
            windows.setdefault(section, {}).setdefault(number, []).append(_place(event))
    lanes = [(*_place(e), _LANES[e["tid"]]) for e in drawn if e.get("tid") in _LANES]
    return {section: _middle(list(iterations.values()), lanes) for section, iterations in windows.items()}


def _place(event: Mapping[str, Any]) -> tuple[int, float, float]:
    start = f.number(event, "ts")
    return int(f.number(event, "pid")), start, start + f.number(event, "dur", least=0)


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
