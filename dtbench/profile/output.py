"""Formats the tables of a profile of a suite's cases as plain text, and writes its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dtbench.engine.progress import print_status
from dtbench.grouping import group_by, sort_by_order
from dtbench.records.atomic import write_folder
from dtbench.records.profile import CallsProfile, CallStages, RanksProfile, RanksSection
from dtbench.suite import STAGES
from dtbench.text.units import plural, significant
from dtbench.traces.analysis import analyze
from dtbench.traces.profile_job import job_text

SPEEDSCOPE = "speedscope.json"


def stage_tables(cases: Sequence[CallStages]) -> list[str]:
    """Returns the lines of a table for each case: a row per stage, columns per impl."""
    return [
        line
        for label, impls in group_by(cases, lambda case: case.label).items()
        for line in (label, *_stage_table(impls), "")
    ]


def _stage_table(impls: Sequence[CallStages]) -> list[str]:
    stages = {row.stage for impl in impls for row in impl.rows}
    rows = [["µs per call"], *([stage] for stage in sort_by_order(stages, STAGES))]
    for impl in impls:
        cells = {
            stage.stage: (
                _format_us(stage.ns),
                _format_us(stage.plus_minus_ns),
                _format_share(impl.share(stage)),
            )
            for stage in impl.rows
        }
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
    """Returns the lines of all sections: for each one the tables of a job, and the profiler's overhead."""
    return [
        line
        for section in sections
        for line in (*job_text(section.job, analyze(section.job)).splitlines(), section.overhead_text, "")
    ]


def _format_us(ns: float | None) -> str:
    return "-" if ns is None else f"{round(ns / 1e3, 2) + 0.0:.2f}"  # adding 0.0 turns -0.0 into 0.0


def _format_share(share: float | None) -> str:
    return "?" if share is None else f"{share:.0%}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pads the cells of each column: the first one to the right, the others to the left."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows]


def speedscope(folded: Mapping[str, Mapping[tuple[str, ...], float]], name: str) -> dict[str, object]:
    """Returns a file for speedscope, which draws flame graphs, with one profile for each impl of a case.

    The format's schema is https://www.speedscope.app/file-format-schema.json.

    Args:
        folded: impl -> stack of frames, outermost first -> nanoseconds per call.
        name: the file's title.
    """
    frame_ids: dict[str, int] = {}  # the profiles share their frames
    profiles = []
    for label, stacks in folded.items():
        weights = [round(ns, 3) for ns in stacks.values()]
        profiles.append(
            {
                "type": "sampled",
                "name": f"{label}, per call",
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": [
                    [frame_ids.setdefault(frame, len(frame_ids)) for frame in stack] for stack in stacks
                ],
                "weights": weights,
            }
        )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "dtbench",
        "shared": {"frames": [{"name": frame} for frame in frame_ids]},
        "profiles": profiles,
    }


def write_profile(
    folder: Path,
    lines: Sequence[str],
    record: CallsProfile | RanksProfile,
    viewer_files: Mapping[str, bytes],
    viewer: str,
) -> None:
    """Prints the tables and writes the folder.

    Args:
        folder: the folder to make.
        lines: the tables, written to `table.txt`.
        record: the results, written to `table.json`.
        viewer_files: name -> content of the files for the viewer.
        viewer: the web page that opens them.

    Raises:
        OutputError: the folder cannot be written, or exists.
    """
    for line in lines:
        print_status(line)
    files = {
        "table.txt": "\n".join([*lines, ""]).encode("utf-8", "replace"),
        "table.json": msgspec.json.encode(record),
    }
    write_folder(folder, {**files, **viewer_files})
    print_status(f"{folder}: {', '.join(files)} and {plural(len(viewer_files), 'file')} for {viewer}")
