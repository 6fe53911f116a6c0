"""Plans, validations and machines as tables."""

from __future__ import annotations

from dtbench.cost.plan.machines import built_in, find_machine
from dtbench.cost.plan.search import LayoutRow, PlanFile
from dtbench.cost.plan.validate import StepsFile
from dtbench.text.terminal import new_console, print_columns, print_line, print_prose
from dtbench.text.units import NO_INTERVAL, format_bytes, format_seconds, interval_or_none, plural

# Of a long table the rows that are furthest off are shown; `--json` has all.
MAX_ROWS = 60


def print_file(file: PlanFile | StepsFile) -> None:
    """A plan: the best layouts and what their time goes to. A validation: measured, predicted and the error of each
    row, then how good that is for choosing."""
    if isinstance(file, PlanFile):
        _print_plan(file)
    else:
        _print_validation(file)


def _print_plan(file: PlanFile) -> None:
    console, best = new_console(), file.best
    first = best[0]
    interval = "" if first.low_s is None else f" (90 % interval {_interval(first)})"
    print_prose(
        console,
        f"{first.words}: {format_seconds(first.step_s)} a step{interval}, MFU {first.mfu:.1%}",
        "bold",
    )
    print_prose(console, f"is the fastest found for {file.title}; {first.why}")
    print_line(console, "")
    print_prose(
        console,
        f"{plural(file.considered, 'layout')} considered, {file.fitting} fit into {format_bytes(file.limit_bytes)} "
        "per GPU; the best of each split of the ranks:",
    )
    print_columns(
        console,
        [("layout", [one.words for one in best])],
        figures=[
            ("step", [format_seconds(one.step_s) for one in best]),
            ("90 % interval", [_interval(one) for one in best]),
            ("MFU", [f"{one.mfu:.1%}" for one in best]),
            ("memory", [format_bytes(sum(one.memory_bytes.values())) for one in best]),
            ("exposed", [f"{one.exposed_s / one.step_s:.1%}" for one in best]),
        ],
        extras=[("where the rest goes", [one.why for one in best])],
    )
    print_line(console, "")
    print_prose(console, "exposed: communication that nothing hides, of the step")
    for note in file.assumptions:
        print_prose(console, f"assumed: {note}")


def _interval(one: LayoutRow) -> str:
    ends = interval_or_none(one.low_s, one.high_s)
    return NO_INTERVAL if ends is None else " .. ".join(map(format_seconds, ends))


def _print_validation(file: StepsFile) -> None:
    console = new_console()
    print_line(console, file.title, "bold")
    worst = sorted(file.rows, key=lambda row: -abs(row.error))[:MAX_ROWS]
    rows = [row for row in file.rows if row in worst]
    print_columns(
        console,
        [("layout", [row.label for row in rows])],
        figures=[
            ("measured", [format_seconds(row.measured_s) for row in rows]),
            ("predicted", [format_seconds(row.predicted_s) for row in rows]),
            ("error", [f"{row.error:+.1%}" for row in rows]),
        ],
    )
    if len(rows) < len(file.rows):
        print_line(console, f"the {len(rows)} rows of {len(file.rows)} that are furthest off; --json has all")
    print_line(console, "")
    for line in file.verdict:
        print_line(console, line)


def print_machines() -> None:
    """The machines that come with dtbench: their sources, and what steps they were fitted on."""
    console = new_console()
    for one in map(find_machine, built_in()):
        print_line(
            console,
            f"{one.name}: {one.gpus_per_node} GPUs a node of {one.memory_GiB:.4g} GiB, {one.peak_tflops:.4g} TFLOP/s, "
            f"{one.network.GBps:.3g} GB/s between nodes; {one.source}; steps: {one.fitted_on}",
        )
