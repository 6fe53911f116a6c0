"""Tables of the answers about host time, for the terminal and the page."""

from collections.abc import Iterable, Sequence

from dtbench.records.host_time import SecondCall, StepGrowth
from dtbench.records.result import Result
from dtbench.stats.second_calls import second_calls
from dtbench.stats.step_growth import step_growths
from dtbench.text import columns
from dtbench.text.table import Table


def host_time_tables(results: Sequence[Result]) -> list[Table]:
    """Returns the tables that have rows."""
    tables = (_cache_misses(second_calls(results)), _growths(step_growths(results)))
    return [table for table in tables if table.total_rows]


def _cache_misses(calls: Iterable[SecondCall]) -> Table:
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


def _growths(growths: Sequence[StepGrowth]) -> Table:
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
