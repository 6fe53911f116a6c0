"""A plan and a validation as tables and as JSON."""

from __future__ import annotations

import dataclasses

import msgspec

from dtbench.cost.plan.machines import Machine
from dtbench.cost.plan.search import Candidate, Plan, explain
from dtbench.cost.plan.validate import PlanValidation
from dtbench.files.plan import LayoutRow, PlanFile, StepRow, StepsFile
from dtbench.terminal import Column, new_console, print_columns, print_json, print_line
from dtbench.units import format_bytes, format_seconds, plural

# Of a long table the rows that are furthest off are shown; `--json` has all.
MAX_ROWS = 60
# Of a step's time, as `Step` names them.
PARTS = ("compute", "tensor", "pipeline", "data", "bubble", "once")


def print_plan(plan: Plan, notes: tuple[str, ...], as_json: bool = False) -> None:
    """The best layouts, what their time goes to, and what would change the answer."""
    if as_json:
        print_json(msgspec.to_builtins(plan_file(plan, notes)))
        return
    console = new_console()
    job, machine = plan.job, plan.machine
    print_line(console, title(plan), "bold")
    print_line(
        console,
        f"{plural(plan.considered, 'layout')} considered, {plan.fitting} fit into {format_bytes(plan.limit_bytes)} "
        "per GPU; the best of each split of the ranks:",
    )
    best = plan.best
    figures: list[Column] = [
        ("step", [format_seconds(one.step.total_s) for one in best]),
        ("90 % interval", [_interval(one, machine) for one in best]),
        ("MFU", [f"{one.step.mfu(machine, job.gpus):.1%}" for one in best]),
        ("memory", [format_bytes(one.memory.total) for one in best]),
        ("exposed communication", [f"{one.step.exposed_s / one.step.total_s:.1%}" for one in best]),
    ]
    print_line(console, "")
    print_columns(
        console,
        [("layout", [one.layout.words() for one in best])],
        figures,
        [("where the rest goes", [explain(one, plan.limit_bytes) for one in best])],
    )
    print_line(console, "")
    for change in plan.changes:
        print_line(console, f"with {change}")
    for note in notes:
        print_line(console, f"assumed: {note}")


def plan_file(plan: Plan, notes: tuple[str, ...]) -> PlanFile:
    """The plan as its file holds it."""
    job = plan.job
    return PlanFile(
        title=title(plan),
        model=dataclasses.asdict(job.model) | {"elements": job.model.elements()},
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


def title(plan: Plan) -> str:
    """What was planned."""
    job = plan.job
    batch = f"{job.batch} sequences of {job.sequence} tokens a step"
    return f"{job.model.name} on {job.gpus} GPUs of {plan.machine.name}, {batch}"


def _row(one: Candidate, plan: Plan) -> LayoutRow:
    step, error = one.step, plan.machine.error
    return LayoutRow(
        words=one.layout.words(),
        layout=dataclasses.asdict(one.layout),
        step_s=step.total_s,
        low_s=None if error is None else step.total_s * error.low,
        high_s=None if error is None else step.total_s * error.high,
        mfu=step.mfu(plan.machine, plan.job.gpus),
        exposed_s=step.exposed_s,
        parts_s={name: getattr(step, f"{name}_s") for name in PARTS},
        memory_bytes=dataclasses.asdict(one.memory),
        why=explain(one, plan.limit_bytes),
    )


def _interval(one: Candidate, machine: Machine) -> str:
    if machine.error is None:
        return "not known"
    ends = (one.step.total_s * machine.error.low, one.step.total_s * machine.error.high)
    return " .. ".join(map(format_seconds, ends))


def print_validation(validation: PlanValidation, as_json: bool = False) -> None:
    """Measured, predicted and the error of each row, then how good that is for choosing."""
    if as_json:
        print_json(msgspec.to_builtins(steps_file(validation)))
        return
    console = new_console()
    print_line(console, validation.title, "bold")
    rows = sorted(validation.rows, key=lambda row: -abs(row.error))[:MAX_ROWS]
    rows = (
        [row for row in validation.rows if row in rows]
        if len(validation.rows) > MAX_ROWS
        else list(validation.rows)
    )
    figures: list[Column] = [
        ("measured", [format_seconds(row.measured_s) for row in rows]),
        ("predicted", [format_seconds(row.predicted_s) for row in rows]),
        ("error", [f"{row.error:+.1%}" for row in rows]),
    ]
    print_columns(console, [("layout", [row.label for row in rows])], figures)
    if len(rows) < len(validation.rows):
        print_line(
            console, f"the {len(rows)} rows of {len(validation.rows)} that are furthest off; --json has all"
        )
    print_line(console, "")
    for line in verdict(validation):
        print_line(console, line)


def verdict(validation: PlanValidation) -> list[str]:
    """How far off, and what choosing by the predictions would cost."""
    lines = [f"mean error {validation.mean_error:.1%} over {plural(len(validation.rows), 'row')}"]
    right, pairs = validation.pairs_in_order()
    costs = validation.cost_of_choice()
    if pairs and any(" on " in row.label for row in validation.rows):
        lines.append(f"{right} of {pairs} pairs of layouts in the order measured ({right / pairs:.1%})")
        lines.append(
            f"the layout predicted fastest took {sum(costs) / len(costs):.1%} more than the fastest, mean of "
            f"{plural(len(costs), 'choice')}; at most {max(costs):.1%}"
        )
    return [*lines, *validation.notes]


def steps_file(validation: PlanValidation) -> StepsFile:
    """The validation as its file holds it."""
    right, pairs = validation.pairs_in_order()
    return StepsFile(
        title=validation.title,
        rows=tuple(
            StepRow(
                label=row.label,
                group=row.group,
                measured_s=row.measured_s,
                predicted_s=row.predicted_s,
                error=row.error,
            )
            for row in validation.rows
        ),
        mean_error=validation.mean_error,
        pairs=pairs,
        pairs_in_order=right,
        cost_of_choice=tuple(validation.cost_of_choice()),
        verdict=tuple(verdict(validation)),
    )
