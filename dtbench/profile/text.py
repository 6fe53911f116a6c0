"""The profile's tables as plain text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dtbench.grouping import known_first
from dtbench.model import STAGES
from dtbench.profile.sections import PARTS, Section
from dtbench.profile.stages import Breakdown
from dtbench.units import significant


def stage_tables(breakdowns: Sequence[Breakdown]) -> list[str]:
    """A table per case: stages down, impls across."""
    lines: list[str] = []
    cases = dict.fromkeys(b.label for b in breakdowns)
    for label in cases:
        lines += [label, *_stage_table([b for b in breakdowns if b.label == label]), ""]
    return lines


def _stage_table(impls: Sequence[Breakdown]) -> list[str]:
    stages = known_first({r.stage for b in impls for r in b.rows}, STAGES)

    def row(name: str, cells: Callable[[Breakdown], tuple[str, str, str]]) -> list[str]:
        return [name, *(text for b in impls for text in cells(b))]

    def figures(stage: str, b: Breakdown) -> tuple[str, str, str]:
        found = next((r for r in b.rows if r.stage == stage), None)
        if found is None:
            return "-", "", ""
        return _us(found.ns), _us(found.plus_minus_ns), f"{found.ns / b.whole_ns:.0%}"

    rows = [row("µs per call", lambda b: (b.impl, "+-", "%"))]
    rows += [row(stage, partial(figures, stage)) for stage in stages]
    rows.append(row("unattributed", lambda b: (_us(b.unattributed_ns), "", "")))
    rows.append(row("whole, not recorded", lambda b: (_us(b.whole_ns), "", "100%")))
    rows.append(row("whole, recorded", lambda b: (_us(b.recorded_ns), "", "")))
    if any(b.floor_ns is not None for b in impls):
        rows.append(row("plain op alone", lambda b: (_us(b.floor_ns), "", "")))
    lines = ["  " + line for line in _aligned(rows)]
    lines += [
        f"  {b.impl}: from {b.source}; {b.spans_per_call:.0f} spans a call make it "
        f"{significant(b.recorded_ns / b.whole_ns, 3)} times as long, {significant(b.fitted_to_calibrated, 3)} times "
        f"what recording as many costs by itself ({b.calls} calls, machine {significant(b.slowed, 3)} times "
        f"slower meanwhile, which is taken off)"
        for b in impls
    ]
    return lines


def section_tables(sections: Sequence[Section], clock_us: Mapping[int, float]) -> list[str]:
    """A table per section: ranks down, parts of an iteration across; then who arrives late."""
    lines: list[str] = []
    for section in sections:
        lines.append(f"{section.label}, {section.iterations} iterations")
        rows = [["µs per iteration", *PARTS, *_gpu_names(section)]]
        for rank, parts in section.parts_us.items():
            gpu = section.gpu.get(rank, {})
            shown = [_significant(gpu.get(name)) for name in _gpu_names(section)]
            rows.append([f"rank {rank}", *(_significant(parts.get(part)) for part in PARTS), *shown])
        lines += ["  " + line for line in _aligned(rows)]
        lines += ["  " + line for line in _skew_lines(section)]
        lines.append(
            f"  an iteration of the slowest rank takes {significant(section.plain_us)} µs without the profiler, "
            f"{significant(section.profiled_us)} µs with it ({section.overhead:+.0%})"
        )
        lines.append("")
    clocks = ", ".join(f"rank {rank} +-{significant(us, 2)} µs" for rank, us in clock_us.items())
    return [*lines, f"clocks: all times are on rank 0's host clock; {clocks}"]


def _skew_lines(section: Section) -> list[str]:
    lines = []
    for skew in section.skews:
        late = "the clocks cannot tell who is last"
        if skew.latest is not None:
            late = f"rank {skew.latest} is last most often, {skew.late[skew.latest]} of {skew.count} times"
            if skew.unclear:
                late += f" ({skew.unclear} too close to tell)"
        lines.append(
            f"{skew.kind}: the ranks arrive {significant(skew.mean_us, 3)} µs apart on average, "
            f"p95 {significant(skew.p95_us, 3)} µs; {late}"
        )
    if section.unmatched:
        lines.append(f"{section.unmatched} iterations in which the ranks' collectives differ: not counted")
    return lines or ["no collective of two or more ranks"]


def _gpu_names(section: Section) -> list[str]:
    return sorted({name for of in section.gpu.values() for name in of})


def _us(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e3:.2f}"


def _significant(value: float | None) -> str:
    return "-" if value is None else significant(value, 4)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]
