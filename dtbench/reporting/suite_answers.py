"""Tables of what suites answer beyond the times of their cases, for the terminal and the page."""

from collections.abc import Sequence

from dtbench.records.result import Result, Run
from dtbench.stats.exchanges import payload_choices, routing_costs
from dtbench.stats.host_time import group_costs, second_calls, step_growths
from dtbench.text import columns
from dtbench.text.table import Table
from dtbench.text.units import format_bytes, format_interval, format_size


def answer_tables(runs: Sequence[Run], *suites: str) -> list[Table]:
    """Returns the tables that have rows, of these suites, or without names of all suites."""
    makers = [maker for suite in suites or _TABLES for maker in _TABLES.get(suite, ())]
    return [table for maker in makers if (table := maker(runs)).total_rows]


def _results(runs: Sequence[Run]) -> list[Result]:
    return [result for run in runs for result in run.results]


def _cache_misses(runs: Sequence[Run]) -> Table:
    misses = [call for call in second_calls(_results(runs)) if call.decisions > 0]
    return Table(
        "Ops whose second call with the same shapes misses the sharding cache",
        [
            columns.text("Op", [call.op for call in misses]),
            columns.text("Placements", [call.placements for call in misses]),
            columns.text("Pass", [call.pass_ for call in misses]),
            columns.text("Impl", [call.impl for call in misses]),
            columns.counts("decisions made again", [call.decisions for call in misses]),
            *columns.times(
                [
                    ("first", [call.first_s for call in misses]),
                    ("second", [call.second_s for call in misses]),
                    ("cached", [call.cached_s for call in misses]),
                ]
            ),
        ],
    )


def _growths(runs: Sequence[Run]) -> Table:
    growths = step_growths(_results(runs))
    return Table(
        "Steps in a row: what each step keeps",
        [
            columns.text("Step", [growth.name for growth in growths]),
            columns.text("Impl", [growth.impl for growth in growths]),
            columns.counts("steps", [growth.steps for growth in growths]),
            columns.numbers("objects", [growth.objects_per_step for growth in growths], "{:.2f}".format),
            columns.numbers("memory", [growth.bytes_per_step for growth in growths], "{:.0f}".format, "B"),
            columns.ratios("last 20 / first 20 steps", [growth.late_over_early for growth in growths]),
            columns.text("Verdict", [growth.verdict for growth in growths]),
        ],
    )


def _group_costs(runs: Sequence[Run]) -> Table:
    costs = group_costs(_results(runs))
    return Table(
        "Host time of sharded parameters: per group and per parameter, with 95 % intervals",
        [
            columns.text("Ranks", [cost.group for cost in costs]),
            columns.text("Impl", [cost.impl for cost in costs]),
            columns.text("Stage", [cost.stage for cost in costs]),
            *(
                column
                for title, seconds in (
                    ("per group", [cost.per_group_s for cost in costs]),
                    ("per parameter", [cost.per_parameter_s for cost in costs]),
                    ("fixed", [cost.fixed_s for cost in costs]),
                )
                for column in (
                    columns.numbers(title, [1e6 * value for value, *_ in seconds], "{:.1f}".format, "µs"),
                    columns.text(
                        "interval", [format_interval((1e6 * low, 1e6 * high)) for _, low, high in seconds]
                    ),
                )
            ),
        ],
        note="Stages of the fastest recorded step: the hooks and the rest add up to the recorded step.",
    )


def _routings(runs: Sequence[Run]) -> Table:
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


def _payloads(runs: Sequence[Run]) -> Table:
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


# Suite -> functions that make its tables.
_TABLES = {
    "dispatch": (_cache_misses, _growths),
    "fsdp": (_group_costs,),
    "collectives": (_routings,),
    "payload": (_payloads,),
}
