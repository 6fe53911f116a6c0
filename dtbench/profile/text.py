"""What a profile gives: its tables as plain text, frames for speedscope, and the folder."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dtbench.engine.progress import say
from dtbench.grouping import group_by, in_order
from dtbench.profile.judge import judged
from dtbench.records.atomic import write_folder
from dtbench.records.job import Job
from dtbench.records.judged_job import Judgement
from dtbench.records.profile import Calls, CallStages, RanksProfile, Section
from dtbench.suite import STAGES
from dtbench.text.units import plural, significant

PrintJob = Callable[[Job, Judgement], None]
SPEEDSCOPE = "speedscope.json"


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


def section_tables(sections: Sequence[Section], print_job: PrintJob) -> list[str]:
    """A job's tables per section, and what recording it added."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for one in sections:
            print_job(one.job, judged(one.job))
            out.write(f"{one.overhead_words}\n\n")
    return out.getvalue().splitlines()


def _us(ns: float | None) -> str:
    return "-" if ns is None else f"{round(ns / 1e3, 2) + 0.0:.2f}"  # + 0.0: never -0.00


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows]


def speedscope(folded: Mapping[str, Mapping[tuple[str, ...], float]], name: str) -> dict[str, object]:
    """Frames for speedscope, which draws flame graphs: a profile per impl of a case, whose values are ns per call.

    folded: the impl's label -> stack, the root first -> ns in its last frame and in nothing that this called.
    Source: https://www.speedscope.app/file-format-schema.json.
    """
    numbers: dict[str, int] = {}  # of frames, which the profiles share
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
                "samples": [[numbers.setdefault(f, len(numbers)) for f in stack] for stack in stacks],
                "weights": weights,
            }
        )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "dtbench",
        "shared": {"frames": [{"name": frame} for frame in numbers]},
        "profiles": profiles,
    }


def write_profile(
    folder: Path,
    lines: Sequence[str],
    record: Calls | RanksProfile,
    further: Mapping[str, bytes],
    viewer: str,
) -> None:
    """Prints the table and writes the folder: the table, the record and further files, which the viewer opens.

    Raises:
        OutputError: it cannot be written, or came to exist meanwhile.
    """
    for line in lines:
        say(line)
    files = {
        "table.txt": "\n".join([*lines, ""]).encode("utf-8", "replace"),
        "table.json": msgspec.json.encode(record),
    }
    write_folder(folder, {**files, **further})
    say(f"{folder}: {', '.join(files)} and {plural(len(further), 'file')} for {viewer}")
