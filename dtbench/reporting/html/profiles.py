"""From a trace of ranks one iteration of each section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtbench.records.profile import ITERATION, LANES, TraceEvent, TraceFile
from dtbench.records.read import into

# The lanes that a page draws, by their thread ids.
_LANES = {tid: LANES[tid] for tid in (1, 2)}
# Per rank and lane; more are not told apart on a page.
MAX_SPANS = 400


@dataclass(frozen=True)
class RankSpan:
    """What a rank did, us from the start of the earliest rank's iteration."""

    rank: int
    lane: str
    start_us: float
    end_us: float


def spans_of(trace: Mapping[str, Any]) -> dict[str, list[RankSpan]]:
    """Of each section the middle one of its iterations, on all ranks.

    Raises:
        BadFieldError: not a trace.
    """
    drawn = [e for e in into(trace, TraceFile).traceEvents if isinstance(e, dict) and e.get("ph") == "X"]
    windows: dict[str, dict[str, list[TraceEvent]]] = {}
    for event in drawn:
        name = event.get("name")
        if isinstance(name, str) and name.startswith(ITERATION) and event.get("cat") == "user_annotation":
            section, _, number = name.removeprefix(ITERATION).strip().rpartition(" #")
            windows.setdefault(section, {}).setdefault(number, []).append(into(event, TraceEvent))
    # A thread id is anything in a damaged trace, also what no dict can be asked for.
    of_lanes = [(lane, e) for e in drawn for number, lane in _LANES.items() if e.get("tid") == number]
    lanes = [(lane, into(e, TraceEvent)) for lane, e in of_lanes]
    return {section: _middle(list(iterations.values()), lanes) for section, iterations in windows.items()}


def _middle(
    iterations: Sequence[Sequence[TraceEvent]], lanes: Sequence[tuple[str, TraceEvent]]
) -> list[RankSpan]:
    chosen = iterations[len(iterations) // 2]
    zero = min(one.ts for one in chosen)
    spans = []
    for rank, start, end in sorted({(one.pid, one.ts, one.ts + one.dur) for one in chosen}):
        spans.append(RankSpan(rank, "whole", start - zero, end - zero))
        for lane in _LANES.values():
            of = sorted((e.ts, e.ts + e.dur) for name, e in lanes if (name, e.pid) == (lane, rank))
            inside = [(a, b) for a, b in of if start <= a < end]
            spans += [RankSpan(rank, lane, a - zero, min(b, end) - zero) for a, b in inside[:MAX_SPANS]]
    return spans
