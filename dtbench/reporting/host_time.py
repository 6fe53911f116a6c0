"""Tables of the answers about host time, for the terminal and the page."""

from collections.abc import Sequence

from dtbench.records.result import Result
from dtbench.stats.host_time import group_costs, second_calls, step_growths
from dtbench.text import columns
from dtbench.text.table import Table
from dtbench.text.units import format_interval


def host_time_tables(results: Sequence[Result]) -> list[Table]:
    """Returns the tables that have rows: second calls that miss the cache, growth of repeated steps, cost of groups."""
    misses = [call for call in second_calls(results) if call.decisions > 0]
    growths, costs = step_growths(results), group_costs(results)
    tables = (
        Table(
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
        ),
        Table(
            "Steps in a row: what each step keeps",
            [
                columns.text("Step", [growth.name for growth in growths]),
                columns.text("Impl", [growth.impl for growth in growths]),
                columns.counts("steps", [growth.steps for growth in growths]),
                columns.numbers("objects", [growth.objects_per_step for growth in growths], "{:.2f}".format),
                columns.numbers(
                    "memory", [growth.bytes_per_step for growth in growths], "{:.0f}".format, "B"
                ),
                columns.ratios("last 20 / first 20 steps", [growth.late_over_early for growth in growths]),
                columns.text("Verdict", [growth.verdict for growth in growths]),
            ],
        ),
        Table(
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
        ),
    )
    return [table for table in tables if table.total_rows]
