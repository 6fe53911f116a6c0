"""What a profile gives: its tables as plain text, and the folder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec

from dtbench.engine.progress import say
from dtbench.profile.request import DATA_NAME, TABLE_NAME, TRACE_NAME
from dtbench.records.atomic import write_folder
from dtbench.records.profile import Call, Calls, Parts, Ranks, Section
from dtbench.suite import STAGES
from dtbench.suite.grouping import known_first
from dtbench.text.units import significant


def stage_tables(calls: Sequence[Call]) -> list[str]:
    """A table per case: stages down, impls across."""
    lines: list[str] = []
    cases = dict.fromkeys(b.label for b in calls)
    for label in cases:
        lines += [label, *_stage_table([b for b in calls if b.label == label]), ""]
    return lines


def _stage_table(impls: Sequence[Call]) -> list[str]:
    stages = known_first({r.stage for b in impls for r in b.rows}, STAGES)

    def row(name: str, cells: Callable[[Call], tuple[str, str, str]]) -> list[str]:
        return [name, *(text for b in impls for text in cells(b))]

    def figures(stage: str, b: Call) -> tuple[str, str, str]:
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


def section_tables(record: Ranks) -> list[str]:
    """A table per section: ranks down, parts of an iteration across; then who arrives late, and the clocks."""
    names = Parts.__struct_fields__
    lines: list[str] = []
    for section in record.sections:
        lines.append(f"{section.label}, {section.iterations} iterations")
        counters = sorted({name for of in section.gpu.values() for name in of})
        rows = [["µs per iteration", *names, *counters]]
        for rank, parts in section.parts_us.items():
            gpu = section.gpu.get(rank, {})
            values = [getattr(parts, name, None) for name in names] + [gpu.get(name) for name in counters]
            rows.append([f"rank {rank}", *("-" if v is None else significant(v, 4) for v in values)])
        lines += ["  " + line for line in _aligned(rows)]
        lines += ["  " + line for line in _skew_lines(section)]
        lines.append(
            f"  an iteration of the slowest rank takes {significant(section.plain_us)} µs without the profiler, "
            f"{significant(section.profiled_us)} µs with it ({section.overhead:+.0%})"
        )
        lines.append("")
    clocks = ", ".join(f"rank {rank} +-{significant(us, 2)} µs" for rank, us in record.clock_us.items())
    lines.append(f"clocks: all times are on rank 0's host clock; {clocks}")
    return lines + [f"rank {rank} was throttled: {', '.join(why)}" for rank, why in record.throttled.items()]


def _skew_lines(section: Section) -> list[str]:
    lines = []
    for skew in section.skews:
        late = "the clocks cannot tell who is last"
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


def write_and_tell(
    folder: Path,
    lines: Sequence[str],
    record: Calls | Ranks,
    trace: Mapping[str, object],
    further: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Prints the table and writes the folder: table, record, trace, and further files.

    Raises:
        OutputError: it cannot be written, or came to exist meanwhile.
    """
    for line in lines:
        say(line)
    files = {
        TABLE_NAME: "\n".join(lines) + "\n",
        DATA_NAME: msgspec.json.encode(record).decode(),
        **further,
        TRACE_NAME: json.dumps(trace, separators=(",", ":"), allow_nan=False),
    }
    write_folder(folder, {name: _bytes_of(name, text) for name, text in files.items()})
    say(f"{folder}: {', '.join(files)}; open the trace at https://ui.perfetto.dev or chrome://tracing")


def _bytes_of(name: str, text: str) -> bytes:
    """Of a file of this name: compressed where it ends in .gz."""
    data = text.encode("utf-8", "replace")
    return gzip.compress(data, compresslevel=6, mtime=0) if name.endswith(".gz") else data
