"""Dispatch latency: time per call on the host, cached and first calls, and stages of a call."""

from collections.abc import Sequence

from dtbench.engine.findings import describe_added_time, describe_host_time
from dtbench.grouping import group_by, sort_by_order
from dtbench.records.profile import CallStages, Stage
from dtbench.reporting.html.figures import Figure, StackedBar, bars
from dtbench.reporting.html.parts.suites import (
    add_dots,
    case_columns,
    compare_core_with_torch,
    note_slow_floors,
    ratio_caption,
    time_columns,
)
from dtbench.reporting.html.section import Material, Part, ReportCase, ReportSection, distinct
from dtbench.reporting.suite_answers import answer_tables
from dtbench.stats.dispatch_headline import SINGLE_OPS, added_times, is_cached, kind_of
from dtbench.suite import STAGES
from dtbench.suite.case import FLOOR
from dtbench.text import columns
from dtbench.text.table import MAX_ROWS, Table
from dtbench.text.units import format_seconds

PARAMS = {"placements": "Placements", "mesh": "Mesh", "pass": "Pass"}
MAX_CASES = 4


def fill(section: ReportSection, material: Material) -> None:
    cases, calls = material.cases("dispatch"), material.sources.calls
    cached = [c for c in cases if is_cached(c.params)]
    busy = [c for c in cases if c.get("call") == "busy"]
    section.lead = "Time of one call on the host: the minimum of the samples. "
    if cached:
        meshes = " and ".join(distinct(str(c.get("mesh")) for c in cached if c.get("mesh")))
        section.lead += (
            "A cached call looks up the sharding, runs the local op and wraps the result. One process simulates one "
            f"rank of a larger world{f' with mesh {meshes}' if meshes else ''}. "
        )
        if any(FLOOR in c.impls for c in cached):
            section.lead += "The floor is the same op on plain local tensors. "
        cases_of = [(c.name, c.params, {i: m.estimate_s for i, m in c.impls.items()}) for c in cached]
        for words in describe_added_time(cases_of):
            section.outcome = words.partition(":")[0]
            first_s, *_ = added_times(cases_of)[0].values()
            section.headlines.append((f"+{format_seconds(first_s)}", words))
        for kind, of_kind in group_by(cached, lambda c: kind_of(c.name, c.params)).items():
            section.lead += compare_core_with_torch(
                section, of_kind, f"cached call ({kind})", f"For cached {kind}, the"
            )
        note_slow_floors(section, cached)
        add_dots(
            section,
            group_by(cached, lambda c: f"mesh {c.get('mesh')}, {c.get('pass')}"),
            lambda c: f"{c.name} {c.get('placements')}".strip(),
            f"Time per call, cached, with a line to the upper quartile{ratio_caption(cached)}.",
            first=[f"{name} {placements}" for name, placements in SINGLE_OPS.items()],
        )
        section.add(_table(cached, cases))
    elif cases:
        section.add(_op_table("Every op: time per call, not cached", cases, folded=True))
    section.add(*answer_tables(material.sources.runs, "dispatch"))
    section.notes += [
        f"{line[0].upper()}{line[1:]}."
        for line in describe_host_time(
            [r for run in material.sources.runs for r in run.results if r.suite == "dispatch"]
        )
    ]
    if busy and cached:
        section.add(
            _op_table("Cached calls while the GPU executes earlier kernels, as in a training step", busy)
        )
    if calls:
        section.add(_stages(calls, bool(section.figures)), _stage_table(calls))


def _op_table(caption: str, cases: Sequence[ReportCase], folded: bool = False) -> Table:
    return Table(
        caption, [*case_columns(cases, "Op", PARAMS | {"call": "Call"}), *time_columns(cases)], folded=folded
    )


def _table(all_cached: Sequence[ReportCase], cases: Sequence[ReportCase]) -> Table:
    cached = all_cached[:MAX_ROWS]

    def identity(case: ReportCase) -> tuple[object, ...]:
        return (case.name, *sorted((k, v) for k, v in case.params.items() if k != "call"))

    new_shapes = {
        call: {identity(c): c for c in cases if c.get("call") == call} for call in ("first", "second")
    }
    call_times = [
        (
            f"{i}, {call} call",
            [case.seconds(i) if (case := by_id.get(identity(c))) else None for c in cached],
        )
        for call, by_id in new_shapes.items()
        for i in ("core", "torch")
        if by_id or call == "first"
    ]
    slower = any((c.ratio("core", "torch") or 0.0) > columns.MARKED for c in all_cached)
    return Table(
        "Every op: time per call",
        [*case_columns(cached, "Op", PARAMS, "call"), *time_columns(cached), *columns.times(call_times)],
        folded=True,
        note=" ".join(
            [
                *(["▲: the core takes over 5 % more time than torch."] if slower else []),
                *(
                    ["A first call has to find its sharding; a cached one looks it up."]
                    if new_shapes["first"]
                    else []
                ),
                *(["A second call is a single one after a first call."] if new_shapes["second"] else []),
            ]
        ),
        total=len(all_cached),
    )


def _stages(calls: Sequence[CallStages], folded: bool) -> Figure | None:
    """Draws a panel per case, with a bar of stages per implementation."""
    cases = group_by(calls, lambda c: c.label)
    panels = {
        label: [
            StackedBar(
                c.impl,
                [(row.stage, row.ns * 1e-9) for row in _rows(c)],
                f"{format_seconds(c.whole_ns * 1e-9)} in all{' (unreliable)' if c.caveat else ''}",
                c.floor_ns * 1e-9 if c.floor_ns is not None else None,
            )
            for c in members
        ]
        for label, members in list(cases.items())[:MAX_CASES]
    }
    floors = "; vertical strokes: the time of the plain op; the remainder is the overhead of distribution"
    return bars(
        "stages",
        panels,
        _in_order(calls),
        "Time of one call, stage by stage, without the cost of recording"
        f"{floors if any(c.floor_ns is not None for c in calls) else ''}. Stages too short for a label are in the "
        f"table{f'; so are cases beyond the first {MAX_CASES}' if len(cases) > MAX_CASES else ''}.",
        folded="Time of a call, stage by stage" if folded else "",
    )


def _in_order(calls: Sequence[CallStages]) -> list[str]:
    return sort_by_order({row.stage for c in calls for row in c.rows}, STAGES)


def _rows(call: CallStages) -> list[Stage]:
    return [row for stage in _in_order([call]) for row in call.rows if row.stage == stage]


def _stage_table(calls: Sequence[CallStages]) -> Table:
    rows = [(call, row) for call in calls for row in _rows(call)]
    return Table(
        "Every stage: time per call",
        [
            columns.text("Case", [c.label for c, _ in rows]),
            columns.text("Impl", [c.impl for c, _ in rows]),
            columns.text("Stage", [row.stage for _, row in rows]),
            columns.numbers("time", [row.ns / 1e3 for _, row in rows], "{:.2f}".format, "µs"),
            columns.numbers(
                "plus or minus", [row.plus_minus_ns / 1e3 for _, row in rows], "{:.2f}".format, "µs"
            ),
            columns.percents("share", [c.share(row) for c, row in rows], 0),
            columns.text("Recorded by", [c.source for c, _ in rows]),
        ],
        folded=True,
        note=" ".join(f"{c.label} ({c.impl}): {c.caveat}." for c in calls if c.caveat),
    )


DISPATCH = Part("dispatch", "Dispatch latency", fill, ("dispatch",), "dtbench run dispatch")
