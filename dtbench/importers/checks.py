"""What the figures of a table must satisfy, and what follows from them where the log is silent.

    algbw = S / time          busbw = algbw * factor(collective, ranks)
    the printed average = the mean of busbw over all rows and both placements

A printed number stands for an interval, so that nothing is found wrong which only was rounded. A
row that breaks a law keeps its place and loses its numbers. The same laws tell the number of ranks
where no rank was listed, and contradict a name that does not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from statistics import fmean

from dtbench.importers.model import SPELT, Figure, Log, Printed, Row, Table
from dtbench.importers.nccl_text import ITEMSIZE
from dtbench.mesh import MAX_RANKS
from dtbench_core.cost.ring import ONE_WAY, busbw_factor

# In nccl-tests the count is one rank's part of the size; elsewhere it is the whole.
_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
# nccl-tests 2.0 to 2.12 print the largest deviation; what they allow is from their src/common.cu.
_ALLOWED_DEVIATION = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-12}
_SLACK = 1 + 1e-6  # of the arithmetic here
# A derived time or a bandwidth known worse than this says nothing about a machine.
_MAX_COARSENESS = 0.05

_LIST = "the list of ranks"
_MAX_BYTES = 2**62

# What tells a collective in the name of a file; "reduce" and its like also stand in other names.
_HINTS = {spelt: name for spelt, name in SPELT.items() if name not in ("reduce", "gather", "scatter")}


def check(log: Log, *, collective: str | None = None, ranks: int | None = None) -> None:
    """Finds each table's collective and ranks, and marks what cannot be right.

    collective, ranks: what the user says of tables that do not say it themselves.
    """
    for table in log.tables:
        if not table.refusal:
            _find_groups(table)
            _refuse_mixed(table)
            _find_ranks(log, table, ranks)
            _refuse_ranks_beyond_bounds(table)
            _find_collective(log, table, collective)
            _doubt_list(log, table, collective)
        if not table.refusal and table.ranks is None:
            _find_ranks_by_ratio(table)
        _refuse_ranks_beyond_bounds(table)
        _find_sizes(log, table)
        if table.refusal or table.collective is None or table.ranks is None:
            continue
        if table.ranks == 1:
            table.refusal = "one rank: nothing is sent, so its bandwidths are of memory or mean nothing"
            continue
        _check_rows(log, table)
        _check_data(table)
        _check_average(log, table)
        if not (table.ended or table.elided) and table.rows:
            log.say(
                table.rows[-1].line, "the table has no end: the log was cut, or the benchmark did not finish"
            )


# -------------------------------------------------------------------------- what the log says of ranks


def _find_groups(table: Table) -> None:
    groups = {device.group for device in table.devices}
    table.groups = max(len(groups), 1)
    if not table.devices:
        return
    sizes = {sum(d.group == group for d in table.devices) for group in groups}
    listed = max(device.rank for device in table.devices) + 1
    if table.groups == 1:
        table.ranks, table.ranks_from = listed, _LIST
    elif len(sizes) == 1 and len(table.devices) == listed:
        table.ranks, table.ranks_from = sizes.pop(), "the list of ranks and their groups"
    else:
        table.refusal = (
            f"{len(table.devices)} ranks in {table.groups} groups are listed, of different sizes or not all "
            "of them: how many ranks took part in one collective cannot be told"
        )


def _refuse_mixed(table: Table) -> None:
    """Refuses rows of several processes that each took themselves for the whole world."""
    rows = [(row.size_bytes, row.dtype, row.redop, row.root) for row in table.rows if row.size_bytes]
    if table.continues is not None and table.continues.refusal:
        table.refusal = table.continues.refusal
    elif table.mixed and len(set(rows)) < len(rows):
        table.refusal = (
            "several processes printed into it at once, each as rank 0: nccl-tests was built without MPI, so "
            "each measured alone while the others disturbed it; build it with MPI=1"
        )


def _refuse_ranks_beyond_bounds(table: Table) -> None:
    if table.ranks is not None and not 1 <= table.ranks <= MAX_RANKS:
        table.refusal, table.ranks = f"it has {table.ranks} ranks, which cannot be", None


def _find_sizes(log: Log, table: Table) -> None:
    for row in table.rows:
        row.size_bytes *= (table.ranks or 1) if table.sizes_are_parts else 1
    for row in [row for row in table.rows if row.size_bytes > _MAX_BYTES]:
        log.say(row.line, f"its size of {row.size_bytes} bytes cannot be: the row was left out")
        table.rows.remove(row)


def _find_ranks(log: Log, table: Table, given: int | None) -> None:
    if table.refusal:
        return
    parts = {p for row in table.rows if (p := _parts(row)) is not None}
    if len(parts) == 1 and (only := parts.pop()) > 1:
        if table.ranks is None:
            table.ranks, table.ranks_from = only, "size and count"
        elif table.ranks != only:
            log.say(
                table.line,
                f"{table.ranks_from} gives {table.ranks} ranks, size over count gives {only}: the latter is taken",
            )
            table.ranks, table.ranks_from = only, "size and count"
    if given is not None and table.ranks not in (None, given):
        table.refusal = f"--ranks {given} contradicts it: {table.ranks_from} gives {table.ranks} ranks"
    elif given is not None:
        table.ranks, table.ranks_from = given, "--ranks"


def _parts(row: Row) -> int | None:
    """Into how many parts of `count` elements the size falls; None where that says nothing."""
    itemsize = ITEMSIZE.get(row.dtype)
    if not row.count or not itemsize or not row.size_bytes:
        return None
    whole, rest = divmod(row.size_bytes, row.count * itemsize)
    return whole if not rest else None


def _find_ranks_by_ratio(table: Table) -> None:
    """The number of ranks that agrees with busbw / algbw in the rows; those that print it finely decide."""
    if table.collective in ONE_WAY or not table.bandwidths_checked:
        table.ranks, table.ranks_from = table.command_ranks, "the command line"
        if table.ranks is None:
            table.refusal = "how many ranks it ran on is not in the log: give --ranks N"
        return
    found_of = (_ranks_of_ratio(ratio, table.collective or "") for ratio in _ratios(table))
    ranges = sorted((found for found in found_of if found is not None), key=lambda r: r[1] - r[0])
    candidates = {n for low, high in ranges[:8] if high - low < 64 for n in range(low, high + 1)}
    scores = {n: sum(low <= n <= high for low, high in ranges) for n in candidates}
    best = max(scores.values(), default=0)
    found = sorted(n for n, score in scores.items() if score == best)
    if len(found) == 1 and best > 0.5 * len(ranges):
        table.ranks, table.ranks_from = found[0], "bus over algorithm bandwidth"
    elif table.command_ranks is not None:
        table.ranks, table.ranks_from = table.command_ranks, "the command line"
    else:
        several = f" ({found[0]} to {found[-1]} fit its bandwidths)" if len(found) > 1 else ""
        table.refusal = f"how many ranks it ran on is not in the log{several}: give --ranks N"


def _doubt_list(log: Log, table: Table, given: str | None) -> None:
    """Takes the ranks that the bandwidths tell, where the list of ranks was cut short."""
    if table.ranks_from != _LIST or table.ranks is None or not table.bandwidths_checked:
        return
    ratios = _ratios(table)
    named = table.collective
    if not ratios or (named and _mostly(_may_have(ratio, named, table.ranks) for ratio in ratios)):
        return
    listed, refusal = table.ranks, table.refusal
    table.ranks, table.refusal = None, ""
    _find_collective(log, table, given)
    if not table.refusal:
        _find_ranks_by_ratio(table)
    if not table.refusal and (table.ranks or 0) > listed:
        log.say(
            table.line,
            f"{listed} ranks are listed, the bandwidths are those of {table.ranks}: the list is cut",
        )
    else:
        table.ranks, table.ranks_from, table.refusal, table.collective = listed, _LIST, refusal, named


def _ranks_of_ratio(ratio: tuple[float, float], collective: str) -> tuple[int, int] | None:
    # factor = k - k / n, with k = 2 for all_reduce and 1 for the others
    k = 2 if collective == "all_reduce" else 1
    low, high = (k / (k - bound) if bound < k else math.inf for bound in ratio)
    if high > MAX_RANKS or low <= 0:
        return None
    return max(math.ceil(low - 1e-9), 1), math.floor(high + 1e-9)


def _ratios(table: Table) -> list[tuple[float, float]]:
    """The intervals of busbw / algbw, where they are not printed too coarsely to say anything."""
    return [
        (b.low / a.high / _SLACK, b.high / a.low * _SLACK)
        for _, figure in _figures(table)
        if not figure.fault and (a := figure.algbw) is not None and (b := figure.busbw) is not None
        if max(a.coarseness, b.coarseness) <= _MAX_COARSENESS
    ]


# ------------------------------------------------------------------------------- which collective it is


def _find_collective(log: Log, table: Table, given: str | None) -> None:
    if table.refusal:
        return
    if table.collective is not None:
        if given is not None and given != table.collective:
            table.refusal = f"--collective {given} contradicts it: the log says {table.collective}"
        return
    fitting = _fitting(table)
    if given is not None:
        if fitting and given not in fitting:
            table.refusal = f"--collective {given} contradicts its rows, which fit {' or '.join(fitting)}"
        table.collective = given
        return
    named = _named(log.name)
    if len(fitting) > 1 and named in fitting:
        log.say(table.line, f"{named} by the name of the file: the rows fit {' or '.join(fitting)} as well")
        fitting = [named]
    if len(fitting) == 1:
        table.collective = fitting[0]
    else:
        table.refusal = (
            "which collective it is cannot be told"
            + (f" ({' or '.join(fitting)} fit its rows)" if fitting else "")
            + ": give --collective NAME"
        )


def _named(name: str) -> str | None:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    found = {name for hint, name in _HINTS.items() if hint in letters}
    return found.pop() if len(found) == 1 else None


def _fitting(table: Table) -> list[str]:
    """The collectives whose rows look like these."""
    rows = [row for row in table.rows if row.size_bytes]
    if table.tool == "ml-engineering":
        return ["all_reduce"]  # its older script knows no other
    parts = {_parts(row) for row in rows} - {None}
    reduces = any(row.redop not in ("", "none") for row in rows)
    rooted = any(row.root is not None and row.root >= 0 for row in rows)
    if parts and parts != {1}:
        if reduces:
            found = ["reduce_scatter"]
        elif rooted:
            found = ["gather", "scatter"]
        elif table.redop_column and rows and not rows[0].redop:
            found = ["all_to_all"]  # nccl-tests 2.0 to 2.12 leave its redop blank
        elif not table.redop_column:
            found = ["all_gather"]  # they print no such column for it
        elif all(f.wrong is None for r in rows for f in r.figures if f.in_place) and any(
            f.wrong is not None for r in rows for f in r.figures
        ):
            found = ["all_to_all"]  # in place it is not checked
        else:
            found = ["all_gather", "all_to_all"]
    elif rooted:
        found = ["reduce"] if reduces else ["broadcast"]
    else:
        found = ["all_reduce", "sendrecv"]
    ratios = _ratios(table)
    return [c for c in found if _mostly(_may_have(ratio, c, table.ranks) for ratio in ratios)]


def _may_have(ratio: tuple[float, float], collective: str, ranks: int | None) -> bool:
    low, high = ratio
    if collective in ONE_WAY:
        return low <= 1 <= high
    if ranks is not None:
        return low <= busbw_factor(collective, ranks) <= high or _is_old(collective, ratio)
    return (high >= 1 and low < 2) if collective == "all_reduce" else low < 1 or _is_old(collective, ratio)


def _is_old(collective: str, ratio: tuple[float, float]) -> bool:
    """Whether algbw holds the factor already, as until 2020 (nccl-tests, commit ec1b5e2)."""
    return collective in ("all_gather", "reduce_scatter") and ratio[0] <= 1 <= ratio[1]


def _mostly(holds: Iterable[bool]) -> bool:
    """Most of them, so that single rows that were altered do not decide; true of none at all."""
    values = list(holds)
    return sum(values) >= 0.8 * len(values)


# ------------------------------------------------------------------------------------- the laws of rows


def _check_rows(log: Log, table: Table) -> None:
    assert table.collective is not None and table.ranks is not None
    factor = busbw_factor(table.collective, table.ranks)
    if not table.bandwidths_checked:
        _derive_times(table, factor, 1.0)
        return
    ratios = _ratios(table)
    fits = _mostly(low <= factor <= high for low, high in ratios)
    old = table.error_column and not fits and _mostly(_is_old(table.collective, ratio) for ratio in ratios)
    if old:
        log.say(
            table.line,
            f"algbw holds the factor {factor:.4g} of busbw already, as until 2020: it is taken out again",
        )
    elif not fits:
        low, high = sorted(ratios)[len(ratios) // 2]
        table.refusal = (
            f"busbw is {(low + high) / 2:.4g} x algbw, {table.collective} among {table.ranks} ranks "
            f"({table.ranks_from}) would have {factor:.4g}: the collective or the ranks are not what they seem"
        )
        return
    for row in table.rows:
        _check_count(row, table)
        for figure in row.figures:
            _check_figure(row, figure, factor, old)
    _derive_times(table, factor, factor if old else 1.0)


def _check_count(row: Row, table: Table) -> None:
    itemsize = ITEMSIZE.get(row.dtype)
    if row.count is None or itemsize is None or table.collective is None or table.ranks is None:
        return
    parts = table.ranks if table.collective in _PARTS else 1
    if row.count * itemsize * parts != row.size_bytes:
        for figure in row.figures:
            figure.fail(
                f"{row.count} elements of {row.dtype}"
                + (f" on each of {parts} ranks" if parts > 1 else "")
                + f" are {row.count * itemsize * parts} bytes, the row says {row.size_bytes}"
            )


def _check_figure(row: Row, figure: Figure, factor: float, old: bool) -> None:
    time, algbw, busbw = figure.time, figure.algbw, figure.busbw
    if figure.fault or algbw is None or busbw is None:
        return
    if time is not None and row.size_bytes and not figure.time_is_separate:
        carried = row.size_bytes * (factor if old else 1.0)
        low, high = carried / time.high, carried / time.low if time.low > 0 else math.inf
        if not _overlap(low, high, algbw):
            figure.fail(
                f"{row.size_bytes} bytes in {time.value * 1e6:.6g} us are {carried / time.value / 1e9:.4g} GB/s, "
                f"the row says {algbw.value / 1e9:.6g}"
                if time.value > 0
                else f"its time is 0 and its algbw {algbw.value / 1e9:.6g} GB/s"
            )
    expected = 1.0 if old else factor
    if not _overlap(algbw.low * expected, algbw.high * expected, busbw):
        figure.fail(
            f"its busbw of {busbw.value / 1e9:.6g} GB/s is not {expected:.4g} x its algbw "
            f"of {algbw.value / 1e9:.6g}"
        )


def _overlap(low: float, high: float, value: Printed) -> bool:
    return low / _SLACK <= value.high * _SLACK and high * _SLACK >= value.low / _SLACK


def _derive_times(table: Table, factor: float, carried: float) -> None:
    """Gives figures without a time the one that their bandwidth implies. carried: of the size, by algbw."""
    for row, figure in _figures(table):
        if figure.fault or not row.size_bytes:
            continue
        by_bandwidth = figure.algbw or (figure.busbw and figure.busbw.scaled(1 / factor))
        better = (
            by_bandwidth is not None
            and figure.time is not None
            and by_bandwidth.coarseness < figure.time.coarseness
        )
        if figure.time is not None and not (better and figure.time.coarseness > 5e-3):
            if figure.time.value <= 0:
                figure.fail("its time is 0")
            continue
        if by_bandwidth is None or by_bandwidth.coarseness > _MAX_COARSENESS:
            given = "nothing" if by_bandwidth is None else f"{by_bandwidth.value / 1e9:.6g} GB/s"
            figure.fail(f"it has no time, and its bandwidth ({given}) is too coarse to derive one")
            continue
        time = row.size_bytes * carried / by_bandwidth.value
        figure.time, figure.time_is_derived = Printed(time, time * by_bandwidth.coarseness), True


# --------------------------------------------------------------------------------- the data it checked


def _check_data(table: Table) -> None:
    bad = False
    for row, figure in _figures(table):
        if figure.wrong is None:
            continue
        allowed = _ALLOWED_DEVIATION.get(row.dtype, 0.0) if table.error_column else 0.0
        if not 0 <= figure.wrong <= allowed:
            what = "a deviation of" if table.error_column else "wrong elements:"
            figure.fail(f"the data were wrong: {what} {figure.wrong:g}", wrong_data=True)
        bad = bad or figure.fault_is_wrong_data
    if table.failed_values and not bad:
        for _, figure in _figures(table):
            figure.fail(
                f"the table ends with {table.failed_values} values out of bounds, and no row says which",
                wrong_data=True,
            )


def _check_average(log: Log, table: Table) -> None:
    average = table.average_busbw
    values = [figure.busbw for _, figure in _figures(table) if figure.busbw is not None]
    if average is None or not values or len(values) < sum(len(row.figures) for row in table.rows):
        return
    mean, slack = fmean(v.value for v in values), fmean(v.half for v in values) + average.half
    if abs(mean - average.value) > slack * _SLACK + abs(mean) * 1e-6:
        why = "rows were left out of the log" if table.elided else "rows are missing or were altered"
        log.say(
            table.average_line,
            f"the average bus bandwidth is given as {average.value / 1e9:.6g} GB/s, the rows have "
            f"{mean / 1e9:.6g}: {why}",
        )


def _figures(table: Table) -> list[tuple[Row, Figure]]:
    return [(row, figure) for row in table.rows for figure in row.figures]
