"""What a profile gives: its tables as plain text, frames for speedscope, and the folder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dtbench.engine.progress import say
from dtbench.records.atomic import write_folder
from dtbench.records.profile import Calls, CallStages, IterationParts, RankSection, RanksProfile
from dtbench.suite import STAGES
from dtbench.suite.grouping import group_by, in_order
from dtbench.text.units import significant

SPEEDSCOPE, TRACE = "speedscope.json", "trace.json.gz"
_VIEWERS = {
    SPEEDSCOPE: f"{SPEEDSCOPE} at https://www.speedscope.app",
    TRACE: f"{TRACE} at https://ui.perfetto.dev or chrome://tracing",
}


def stage_tables(calls: Sequence[CallStages]) -> list[str]:
    """A table per case: stages down, impls across."""
    cases = group_by(calls, lambda b: b.label)
    return [line for label, impls in cases.items() for line in (label, *_stage_table(impls), "")]


def _stage_table(impls: Sequence[CallStages]) -> list[str]:
    rows = [["µs per call"], *([s] for s in in_order({r.stage for b in impls for r in b.rows}, STAGES))]
    wholes = ["unattributed", "whole, not recorded", "whole, recorded", "plain op alone"]
    for b in impls:
        stages = {r.stage: (_us(r.ns), _us(r.plus_minus_ns), f"{r.ns / b.whole_ns:.0%}") for r in b.rows}
        rows[0] += [b.impl, "+-", "%"]
        for row in rows[1:]:
            row += stages.get(row[0], ("-", "", ""))
    whole_ns = [(b.unattributed_ns, b.whole_ns, b.recorded_ns, b.floor_ns) for b in impls]
    for name, values in zip(wholes, zip(*whole_ns, strict=True), strict=True):
        rows.append([name, *(cell for ns in values for cell in (_us(ns), "", ""))])
    return ["  " + line for line in _aligned(rows)] + [
        f"  {b.impl}: from {b.source}; {b.spans_per_call:.0f} spans a call make it "
        f"{significant(b.recorded_ns / b.whole_ns, 3)} times as long, {significant(b.fitted_to_calibrated, 3)} times "
        f"what recording as many costs by itself ({b.calls} calls)"
        for b in impls
    ]


def section_tables(record: RanksProfile) -> list[str]:
    """A table per section: ranks down, parts of an iteration across; then who arrives late, and the clocks."""
    names = IterationParts.__struct_fields__
    lines: list[str] = []
    for section in record.sections:
        lines.append(f"{section.label}, {section.iterations} iterations")
        rows = [["µs per iteration", *names]]
        for rank, parts in section.parts_us.items():
            values = [getattr(parts, name, None) for name in names]
            rows.append([f"rank {rank}", *("-" if v is None else significant(v, 4) for v in values)])
        lines += ["  " + line for line in _aligned(rows)]
        lines += ["  " + line for line in _skew_lines(section)]
        lines.append(
            f"  an iteration of the slowest rank takes {significant(section.plain_us)} µs without the profiler, "
            f"{significant(section.profiled_us)} µs with it ({section.overhead:+.0%})"
        )
        lines.append("")
    clocks = ", ".join(f"rank {rank} +-{significant(us, 2)} µs" for rank, us in record.clock_us.items())
    return [*lines, f"clocks: all times are on rank 0's host clock; {clocks}"]


def _skew_lines(section: RankSection) -> list[str]:
    lines = []
    for skew in section.skews:
        late = "which rank is last is below the clocks’ resolution"
        if skew.latest is not None:
            late = (
                f"rank {skew.latest} is last most often, {skew.late[str(skew.latest)]} of {skew.count} times"
            )
            if skew.unclear:
                late += f" ({skew.unclear} too close to tell)"
        lines.append(
            f"{skew.kind}: the ranks arrive {significant(skew.mean_us, 3)} µs apart on average, "
            f"p95 {significant(skew.p95_us, 3)} µs; {late}"
        )
    if section.unmatched:
        lines.append(f"{section.unmatched} iterations in which the ranks' collectives differ: not counted")
    return lines or ["no collective of two or more ranks"]


def _us(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e3:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


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
    further: Mapping[str, Mapping[str, object]],
) -> None:
    """Prints the table and writes the folder: the table, the record and further JSON files, compressed where their
    names end in .gz.

    Raises:
        OutputError: it cannot be written, or came to exist meanwhile.
    """
    for line in lines:
        say(line)
    files = {
        "table.txt": "\n".join([*lines, ""]).encode("utf-8", "replace"),
        "table.json": msgspec.json.encode(record),
    }
    for name, content in further.items():
        data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        files[name] = gzip.compress(data, compresslevel=6, mtime=0) if name.endswith(".gz") else data
    write_folder(folder, files)
    viewers = " and ".join(_VIEWERS[name] for name in further)
    say(f"{folder}: {', '.join(files)}; open {viewers}")
