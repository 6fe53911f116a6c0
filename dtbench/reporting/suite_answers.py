"""Tables of what suites answer beyond the times of their cases, for the terminal and the page."""

from collections.abc import Sequence

from dtbench.cost.routing_cost import routing_costs
from dtbench.records.result import Run
from dtbench.text import columns
from dtbench.text.table import Table
from dtbench.text.units import format_interval, format_size

ONE_LAUNCH = " Intervals from a single launch are too narrow: measure with --launches 5."


def answer_tables(runs: Sequence[Run]) -> list[Table]:
    """Returns the tables for which the runs have results."""
    return [table for table in (routing_table(runs),) if table.total_rows]


def routing_table(runs: Sequence[Run]) -> Table:
    """Returns the table of `routing_costs`."""
    costs = routing_costs(runs)
    changes = [cost.change for cost in costs]
    intervals = [format_interval((change.low, change.high)) if change else "" for change in changes]
    return Table(
        "all_to_all_v: cost of unequal parts",
        [
            columns.text("Mesh dim", [f"{cost.mesh_dim}={cost.ranks}" for cost in costs]),
            columns.text("Dtype", [cost.dtype for cost in costs]),
            columns.sizes("Size", [format_size(cost.size_bytes) for cost in costs]),
            columns.text("Routing", [cost.routing for cost in costs]),
            *columns.times([("time", [cost.time_s for cost in costs])]),
            columns.ratios("time / uniform", [change.ratio if change else None for change in changes]),
            columns.text("95% interval", intervals),
            columns.ratios("fullest rank", [cost.max_over_mean for cost in costs]),
            *columns.bandwidths([("bus", [cost.busbw_Bps for cost in costs])]),
            columns.text("Cost", [cost.verdict for cost in costs]),
        ],
        note="Every routing of a size sends the same number of bytes. Size: mean bytes that a rank sends. Bus: bytes "
        "that leave a rank per second, on average. Fullest rank: rows that it receives over the mean."
        + ONE_LAUNCH
        * any(change and change.pairs == 1 for change in changes),
    )
