"""The tables of a profile of a suite's cases, as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from dtbench.grouping import group_by, in_order
from dtbench.records.profile import CallStages, RanksSection
from dtbench.suite import STAGES
from dtbench.text.units import significant
from dtbench.traces.analysis import analyze
from dtbench.traces.profile_job import job_text


def stage_tables(calls: Sequence[CallStages]) -> list[str]:
    """A table per case: stages down, impls across."""
    return [
        line
        for label, impls in group_by(calls, lambda case: case.label).items()
        for line in (label, *_stage_table(impls), "")
    ]


def _stage_table(impls: Sequence[CallStages]) -> list[str]:
    rows = [["µs per call"], *([s] for s in in_order({r.stage for b in impls for r in b.rows}, STAGES))]
    for b in impls:
        shares = {r.stage: "?" if (share := b.share(r)) is None else f"{share:.0%}" for r in b.rows}
        stages = {r.stage: (_us(r.ns), _us(r.plus_minus_ns), shares[r.stage]) for r in b.rows}
        rows[0] += [b.impl, "+-", "%"]
        for row in rows[1:]:
            row += stages.get(row[0], ("-", "", ""))
    whole_ns: dict[str, list[float | None]] = {
        "unattributed": [b.unattributed_ns for b in impls],
        "whole, not recorded": [b.whole_ns for b in impls],
        "whole, recorded": [b.recorded_ns for b in impls],
        "plain op alone": [b.floor_ns for b in impls],
    }
    for name, values in whole_ns.items():
        rows.append([name, *(cell for ns in values for cell in (_us(ns), "", ""))])
    return ["  " + line for line in _aligned(rows)] + [
        f"  {b.impl}: from {b.source}; {b.spans_per_call:.0f} spans a call make it "
        f"{significant(b.recorded_ns / b.whole_ns, 3)} times as long, {significant(b.fitted_to_calibrated, 3)} times "
        f"what recording as many costs by itself ({b.calls} calls)"
        f"{f'; {b.caveat}' if b.caveat else ''}"
        for b in impls
    ]


def section_tables(sections: Sequence[RanksSection]) -> list[str]:
    """A job's tables per section, and what recording it added."""
    texts = (
        f"{job_text(section.job, analyze(section.job))}{section.overhead_text}\n" for section in sections
    )
    return [line for text in texts for line in (*text.splitlines(), "")]


def _us(ns: float | None) -> str:
    return "-" if ns is None else f"{round(ns / 1e3, 2) + 0.0:.2f}"  # + 0.0: never -0.00


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows]
