"""Prints plans, validations and machines as tables."""

from dtbench.cost.plan.machines import built_in, find_machine
from dtbench.cost.plan.search import LayoutRow, PlanFile
from dtbench.cost.plan.validate import StepsFile
from dtbench.text.terminal import new_console, print_columns, print_line, print_prose
from dtbench.text.units import NO_INTERVAL, format_bytes, format_seconds, interval_or_none, plural

# A longer table is reduced to the rows with the largest errors; `--json` prints all.
MAX_ROWS = 60


def print_file(file: PlanFile | StepsFile) -> None:
    """Prints the best layouts of a plan, or the rows of a validation with their errors and a summary."""
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
        f"fastest layout: {first.words}; {format_seconds(first.step_s)} per step{interval}, MFU {first.mfu:.1%}",
        "bold",
    )
    print_prose(console, f"for {file.title}; {first.why}")
    print_line(console, "")
    print_prose(
        console,
        f"{plural(file.considered, 'layout')} evaluated, {file.fitting} fit into {format_bytes(file.limit_bytes)} "
        "per GPU; the best of each split of the ranks:",
    )
    print_columns(
        console,
        [("layout", [row.words for row in best])],
        figures=[
            ("step", [format_seconds(row.step_s) for row in best]),
            ("90 % interval", [_interval(row) for row in best]),
            ("MFU", [f"{row.mfu:.1%}" for row in best]),
            ("memory", [format_bytes(sum(row.memory_bytes.values())) for row in best]),
            ("exposed", [f"{row.exposed_s / row.step_s:.1%}" for row in best]),
        ],
        extras=[("largest losses and memory", [row.why for row in best])],
    )
    print_line(console, "")
    print_prose(
        console, "exposed: share of the step spent in communication that does not overlap with computation"
    )
    for note in file.assumptions:
        print_prose(console, f"assumed: {note}")


def _interval(row: LayoutRow) -> str:
    bounds = interval_or_none(row.low_s, row.high_s)
    return NO_INTERVAL if bounds is None else " .. ".join(map(format_seconds, bounds))


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
        print_line(
            console, f"the {len(rows)} of {len(file.rows)} rows with the largest errors; --json prints all"
        )
    print_line(console, "")
    for line in file.verdict:
        print_line(console, line)


def print_machines() -> None:
    """Prints the machines that are included in dtbench, with their sources and the steps they were fitted to."""
    console = new_console()
    for machine in map(find_machine, built_in()):
        print_line(
            console,
            f"{machine.name}: {machine.gpus_per_node} GPUs per node with {machine.memory_GiB:.4g} GiB and "
            f"{machine.peak_tflops:.4g} TFLOP/s each, {machine.network.GBps:.3g} GB/s between nodes; {machine.source}; "
            f"fitted to: {machine.fitted_on}",
        )
