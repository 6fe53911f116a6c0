"""Formats the tables of a profile of a suite's cases as plain text."""

from collections.abc import Sequence

from dtbench.grouping import group_by, sort_by_order
from dtbench.records.profile import CallStages, RanksSection
from dtbench.suite import STAGES
from dtbench.text.units import significant
from dtbench.traces.analysis import analyze
from dtbench.traces.profile_job import job_text


def stage_tables(cases: Sequence[CallStages]) -> list[str]:
    """Returns the lines of a table for each case: a row per stage, columns per impl."""
    return [
        line
        for label, impls in group_by(cases, lambda case: case.label).items()
        for line in (label, *_stage_table(impls), "")
    ]


def _stage_table(impls: Sequence[CallStages]) -> list[str]:
    stages = sort_by_order({row.stage for impl in impls for row in impl.rows}, STAGES)
    rows = [["µs per call"], *([stage] for stage in stages)]
    for impl in impls:
        cells = {}
        for stage in impl.rows:
            share = impl.share(stage)
            percent = "?" if share is None else f"{share:.0%}"
            cells[stage.stage] = (_format_us(stage.ns), _format_us(stage.plus_minus_ns), percent)
        rows[0] += [impl.impl, "+-", "%"]
        for row in rows[1:]:
            row += cells.get(row[0], ("-", "", ""))
    sums: dict[str, list[float | None]] = {
        "unattributed": [impl.unattributed_ns for impl in impls],
        "whole call": [impl.whole_ns for impl in impls],
        "whole call, recorded": [impl.recorded_ns for impl in impls],
        "plain op alone": [impl.floor_ns for impl in impls],
    }
    rows += [
        [name, *(cell for ns in values for cell in (_format_us(ns), "", ""))] for name, values in sums.items()
    ]
    return ["  " + line for line in _align(rows)] + [
        f"  {impl.impl}: from {impl.source}, {impl.calls} calls with {impl.spans_per_call:.0f} spans each; recording "
        f"makes a call {significant(impl.recorded_ns / impl.whole_ns, 3)} times as long, its cost per span is "
        f"{significant(impl.fitted_to_calibrated, 3)} times the calibrated one"
        f"{f'; {impl.caveat}' if impl.caveat else ''}"
        for impl in impls
    ]


def section_tables(sections: Sequence[RanksSection]) -> list[str]:
    """Returns for each section the lines of a job's tables and the profiler's overhead."""
    return [
        line
        for section in sections
        for line in (*job_text(section.job, analyze(section.job)).splitlines(), section.overhead_text, "")
    ]


def _format_us(ns: float | None) -> str:
    return "-" if ns is None else f"{round(ns / 1e3, 2) + 0.0:.2f}"  # adding 0.0 turns -0.0 into 0.0


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pads the cells of each column: the first one to the right, the others to the left."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows]
