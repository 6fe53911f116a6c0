"""Tables of the answers about host time, for the terminal and the page."""

from collections.abc import Sequence

from dtbench.records.result import Result
from dtbench.stats.host_time import second_calls, step_growths
from dtbench.text import columns
from dtbench.text.table import Table


def host_time_tables(results: Sequence[Result]) -> list[Table]:
    """Returns the tables that have rows: second calls that miss the cache, growth of repeated steps."""
    misses = [call for call in second_calls(results) if call.decisions > 0]
    growths = step_growths(results)
    times = {"first": "first_s", "second": "second_s", "cached": "cached_s"}
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
                    [(title, [getattr(call, name) for call in misses]) for title, name in times.items()]
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
    )
    return [table for table in tables if table.total_rows]
