"""Tables of the answers about host time, for the terminal and the page."""

from collections.abc import Iterable, Sequence

from dtbench.records.host_time import SecondCall
from dtbench.records.result import Result
from dtbench.stats.second_calls import second_calls
from dtbench.text import columns
from dtbench.text.table import Table


def host_time_tables(results: Sequence[Result]) -> list[Table]:
    """Returns the tables that have rows."""
    return [table for table in (cache_miss_table(second_calls(results)),) if table.total_rows]


def cache_miss_table(calls: Iterable[SecondCall]) -> Table:
    """Returns the table of the second calls that miss the sharding cache."""
    misses = [call for call in calls if call.misses]
    times = {"first": "first_s", "second": "second_s", "cached": "cached_s"}
    return Table(
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
    )
