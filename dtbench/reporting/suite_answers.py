"""Tables of what suites answer beyond the times of their cases, for the terminal and the page."""

from collections.abc import Sequence

from dtbench.records.result import Run
from dtbench.stats.exchanges import payload_choices, routing_costs
from dtbench.text import columns
from dtbench.text.table import Table
from dtbench.text.units import format_bytes, format_interval, format_size


def answer_tables(runs: Sequence[Run]) -> list[Table]:
    """Returns the tables for which the runs have results."""
    return [table for table in (routing_table(runs), payload_table(runs)) if table.total_rows]


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
        "that leave a rank per second, on average. Fullest rank: rows that it receives over the mean. Ratios are "
        "medians over launches."
        + " Intervals from a single launch are too narrow: measure with --launches 5."
        * any(change and change.pairs == 1 for change in changes),
    )


def payload_table(runs: Sequence[Run]) -> Table:
    """Returns the table of `payload_choices`."""
    choices = payload_choices(runs)
    return Table(
        "payload: the size from which a narrower dtype pays, with its conversion",
        [
            columns.text("Mesh dim", [f"{choice.mesh_dim}={choice.ranks}" for choice in choices]),
            columns.text("Collective", [choice.collective for choice in choices]),
            columns.text("Payload", [choice.payload for choice in choices]),
            columns.sizes("Clearly loses up to", [format_size(choice.low_bytes) for choice in choices]),
            columns.sizes("Pays from", [format_bytes(choice.pays_from_bytes) for choice in choices]),
            columns.sizes("Clearly pays from", [format_size(choice.high_bytes) for choice in choices]),
            columns.text("Answer", [choice.verdict for choice in choices]),
        ],
        note="Sizes are those of the float32 tensor. A size clearly loses or pays if the 95% interval of the total "
        "time over that of float32 excludes 1. In between, the size is interpolated. Intervals from a single launch "
        "are too narrow: measure with --launches 5.",
    )
