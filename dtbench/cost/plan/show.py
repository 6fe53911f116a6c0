"""Plans, validations and the communication of shardings as tables and as JSON."""

from __future__ import annotations

import dataclasses

import msgspec
from rich.console import Console

from dtbench.cost.plan.ground import interval
from dtbench.cost.plan.machines import Machine, built_in, find_machine
from dtbench.cost.plan.search import Candidate, Plan, explain
from dtbench.records.plan import (
    CallRow,
    Communication,
    LayoutRow,
    PlanFile,
    ShardingRow,
    StepsFile,
    Times,
)
from dtbench.suite.mesh import format_mesh
from dtbench.text.terminal import Column, new_console, print_columns, print_json, print_line, print_prose
from dtbench.text.units import format_bytes, format_seconds, plural, significant

# Of a long table the rows that are furthest off are shown; `--json` has all.
MAX_ROWS = 60
# An interval wider than this factor to either side says nothing that its ends would add to.
NOT_KNOWN = 100
# Of a step's time, as `Step` names them.
PARTS = ("compute", "tensor", "pipeline", "data", "bubble", "once")


def print_plan(plan: Plan, notes: tuple[str, ...], as_json: bool = False) -> None:
    """The best layouts, what their time goes to, and what would change the answer."""
    made = plan_file(plan, notes)
    if as_json:
        print_json(msgspec.to_builtins(made))
        return
    console, best = new_console(), made.best
    first = best[0]
    interval = "" if first.low_s is None else f" (90 % interval {_interval(first)})"
    print_prose(
        console,
        f"{first.words}: {format_seconds(first.step_s)} a step{interval}, MFU {first.mfu:.1%}",
        "bold",
    )
    print_prose(console, f"is the fastest found for {made.title}; {first.why}")
    print_line(console, "")
    for change in made.changes:
        print_prose(console, f"with {change}")
    print_line(console, "")
    print_prose(
        console,
        f"{plural(made.considered, 'layout')} considered, {made.fitting} fit into {format_bytes(made.limit_bytes)} "
        "per GPU; the best of each split of the ranks:",
    )
    figures: list[Column] = [
        ("step", [format_seconds(one.step_s) for one in best]),
        ("90 % interval", [_interval(one) for one in best]),
        ("MFU", [f"{one.mfu:.1%}" for one in best]),
        ("memory", [format_bytes(sum(one.memory_bytes.values())) for one in best]),
        ("exposed", [f"{one.exposed_s / one.step_s:.1%}" for one in best]),
    ]
    why = [one.why for one in best]
    print_columns(
        console, [("layout", [one.words for one in best])], figures, extras=[("where the rest goes", why)]
    )
    print_line(console, "")
    print_prose(console, "exposed: communication that nothing hides, of the step")
    for note in made.assumptions:
        print_prose(console, f"assumed: {note}")


def plan_file(plan: Plan, notes: tuple[str, ...]) -> PlanFile:
    """The plan as its file holds it."""
    job = plan.job
    return PlanFile(
        title=f"{job.model.name} on {job.gpus} GPUs of {plan.machine.name}, {job.batch} sequences of {job.sequence} "
        "tokens a step",
        model=job.model.described(),
        machine=plan.machine.name,
        gpus=job.gpus,
        global_batch=job.batch,
        sequence=job.sequence,
        limit_bytes=plan.limit_bytes,
        considered=plan.considered,
        fitting=plan.fitting,
        best=tuple(_row(one, plan) for one in plan.best),
        changes=plan.changes,
        assumptions=notes,
    )


def _row(one: Candidate, plan: Plan) -> LayoutRow:
    step, ends = one.step, interval(plan.job, one.layout, plan.machine)
    return LayoutRow(
        words=one.layout.words(),
        layout=dataclasses.asdict(one.layout),
        step_s=step.total_s,
        low_s=None if ends is None else step.total_s * ends[0],
        high_s=None if ends is None else step.total_s * ends[1],
        mfu=step.mfu(plan.machine, plan.job.gpus),
        exposed_s=step.exposed_s,
        parts_s={name: getattr(step, f"{name}_s") for name in PARTS},
        memory_bytes=dataclasses.asdict(one.memory),
        why=explain(one, plan.limit_bytes),
    )


def _interval(one: LayoutRow) -> str:
    return (
        "not known" if one.low_s is None else f"{format_seconds(one.low_s)} .. {format_seconds(one.high_s)}"
    )


def print_validation(made: StepsFile, as_json: bool = False) -> None:
    """Measured, predicted and the error of each row, then how good that is for choosing."""
    if as_json:
        print_json(msgspec.to_builtins(made))
        return
    console = new_console()
    print_line(console, made.title, "bold")
    worst = sorted(made.rows, key=lambda row: -abs(row.error))[:MAX_ROWS]
    rows = [row for row in made.rows if row in worst]
    figures: list[Column] = [
        ("measured", [format_seconds(row.measured_s) for row in rows]),
        ("predicted", [format_seconds(row.predicted_s) for row in rows]),
        ("error", [f"{row.error:+.1%}" for row in rows]),
    ]
    print_columns(console, [("layout", [row.label for row in rows])], figures)
    if len(rows) < len(made.rows):
        print_line(console, f"the {len(rows)} rows of {len(made.rows)} that are furthest off; --json has all")
    print_line(console, "")
    for line in made.verdict:
        print_line(console, line)


def print_machines(as_json: bool = False) -> None:
    """The machines that come with dtbench: what of each was measured and what is its data sheet's."""
    machines = [find_machine(name) for name in built_in()]
    if as_json:
        print_json({"kind": "machines", "machines": [msgspec.to_builtins(one) for one in machines]})
        return
    console = new_console()
    figures: list[Column] = [
        ("GPUs a node", [str(one.gpus_per_node) for one in machines]),
        ("memory", [f"{one.memory_GiB:.4g} GiB" for one in machines]),
        ("peak bf16", [f"{one.peak_tflops:.4g} TFLOP/s" for one in machines]),
        ("network", [f"{one.network.GBps:.3g} GB/s" for one in machines]),
    ]
    words: list[Column] = [
        ("collectives measured on", [_measured_on(one) for one in machines]),
        ("steps", [one.fitted_on for one in machines]),
        ("licence", [one.licence for one in machines]),
    ]
    print_columns(console, [("machine", [one.name for one in machines])], figures, words)
    print_line(console, "")
    for one in machines:
        print_line(console, f"{one.name}: {one.source}")


def _measured_on(one: Machine) -> str:
    if one.stands_in:
        return f"none: of {one.stands_in}"
    return "; ".join(
        f"{name.replace('_', '-')} {', '.join(tables)}"
        for name, tables in {"all_reduce": one.all_reduce, **one.collectives}.items()
    )


def print_communication(found: Communication, as_json: bool = False) -> None:
    """The shardings with their sums, the collectives they are made of, then everything that was assumed."""
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    console = new_console()
    mesh = format_mesh(found.mesh.items())
    best = sorted(found.variants, key=lambda one: (not _is_known(one.step), one.step.time_s))
    print_prose(console, _answer(best, f"{found.model['name']} on {mesh}"), "bold")
    print_line(console, "")
    print_prose(
        console,
        f"communication of all {found.model['layers']} layers and the rest, not overlapped, per step and rank",
    )
    _print_shardings(console, best)
    for where, title in (("layer", "one layer"), ("ends", "embedding, head and loss, once a step")):
        print_line(console, "")
        print_line(console, title)
        _print_calls(console, [row for row in found.collectives if row.where == where])
    print_line(console, "")
    for title, lines in (("warning", found.warnings), ("assumed", found.assumptions)):
        for line in lines:
            print_prose(console, f"{title}: {line}")


def _answer(best: list[ShardingRow], of: str) -> str:
    """The sharding that communicates least, where its time is known."""
    if not best:
        return f"{of}: no sharding communicates"
    first = best[0]
    if not _is_known(first.step):
        return f"{of}: none is known within {NOT_KNOWN}x: measure larger sizes, and --launches 5"
    return (
        f"{of}: {' + '.join(first.schemes)} communicates least of what is known, {format_seconds(first.step.time_s)} a "
        f"step ({_ends(first.step)})"
    )


def _print_calls(console: Console, rows: list[CallRow]) -> None:
    words: list[Column] = [
        ("sharding", [row.scheme for row in rows]),
        ("what", [f"{row.phase} {row.what}" for row in rows]),
        ("collective", [f"{row.collective} {row.mesh_dim}={row.ranks}" for row in rows]),
    ]
    figures: list[Column] = [
        ("size", [f"{row.count} x {format_bytes(row.size_bytes)}" for row in rows]),
        ("time", [format_seconds(row.time_s) for row in rows]),
        ("interval", [_ends(row) for row in rows]),
    ]
    extras = [("beyond what was measured", [_beyond(row) for row in rows])]
    print_columns(console, words, figures, extras=extras)


def _print_shardings(console: Console, best: list[ShardingRow]) -> None:
    first = min((one.step.time_s for one in best if _is_known(one.step)), default=0.0)
    figures: list[Column] = [
        ("step", [format_seconds(one.step.time_s) for one in best]),
        (
            "to best",
            [f"{significant(o.step.time_s / first, 3)}x" if _is_known(o.step) else "-" for o in best],
        ),
        ("sent", [format_bytes(one.sent_bytes) for one in best]),
        ("interval of the step", [_ends(one.step) for one in best]),
    ]
    layers = [f"{format_seconds(one.layer.time_s)} ({_ends(one.layer)})" for one in best]
    print_columns(
        console,
        [("sharding", [" + ".join(one.schemes) for one in best])],
        figures,
        extras=[("a layer", layers)],
    )


def _is_known(of: Times) -> bool:
    return of.high_s <= NOT_KNOWN**2 * of.low_s


def _ends(of: Times) -> str:
    if not _is_known(of):
        return f"over {NOT_KNOWN}x"
    return f"{format_seconds(of.low_s)} .. {format_seconds(of.high_s)}"


def _beyond(row: CallRow) -> str:
    size, ranks = row.size_factor, row.ranks_factor
    parts = {
        "by formula": row.by_formula,
        f"size {significant(size, 2)}x": size > 1,
        f"ranks {significant(ranks, 3)}x": ranks != 1,
    }
    return ", ".join(words for words, is_so in parts.items() if is_so)
