"""A plan and a validation as tables and as JSON."""

from __future__ import annotations

import dataclasses

import msgspec

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
    made = plan_file(plan, notes)
    if as_json:
        print_json(msgspec.to_builtins(made))
        return
    console, best = new_console(), made.best
    print_line(console, made.title, "bold")
    print_line(
        console,
        f"{plural(made.considered, 'layout')} considered, {made.fitting} fit into {format_bytes(made.limit_bytes)} "
        "per GPU; the best of each split of the ranks:",
    )
    figures: list[Column] = [
        ("step", [format_seconds(one.step_s) for one in best]),
        ("90 % interval", [_interval(one) for one in best]),
        ("MFU", [f"{one.mfu:.1%}" for one in best]),
        ("memory", [format_bytes(sum(one.memory_bytes.values())) for one in best]),
        ("exposed communication", [f"{one.exposed_s / one.step_s:.1%}" for one in best]),
    ]
    print_line(console, "")
    why = [one.why for one in best]
    print_columns(console, [("layout", [one.words for one in best])], figures, [("where the rest goes", why)])
    print_line(console, "")
    for change in made.changes:
        print_line(console, f"with {change}")
    for note in made.assumptions:
        print_line(console, f"assumed: {note}")


def plan_file(plan: Plan, notes: tuple[str, ...]) -> PlanFile:
    """The plan as its file holds it."""
    job = plan.job
    return PlanFile(
        title=f"{job.model.name} on {job.gpus} GPUs of {plan.machine.name}, {job.batch} sequences of {job.sequence} "
        "tokens a step",
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


def _interval(one: LayoutRow) -> str:
    return (
        "not known" if one.low_s is None else f"{format_seconds(one.low_s)} .. {format_seconds(one.high_s)}"
    )


def print_validation(validation: PlanValidation, as_json: bool = False) -> None:
    """Measured, predicted and the error of each row, then how good that is for choosing."""
    made = steps_file(validation)
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
        rows=tuple(StepRow(**dataclasses.asdict(row), error=row.error) for row in validation.rows),
        mean_error=validation.mean_error,
        pairs=pairs,
        pairs_in_order=right,
        cost_of_choice=tuple(validation.cost_of_choice()),
        verdict=tuple(verdict(validation)),
    )
