"""What the figures of a table must satisfy.

    algbw = S / time          busbw = algbw * factor(collective, ranks)
    the printed average = the mean of busbw over all rows and both placements

A printed number stands for an interval, so that nothing is found wrong which only was rounded. A
row that breaks a law keeps its place and loses its numbers; a table whose rows break it is refused.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from dtbench.importers.model import ITEMSIZE, SPELT, Figure, Log, Printed, Row, Table
from dtbench.suite.mesh import MAX_RANKS
from dtbench_core.cost.ring import ONE_WAY, busbw_factor

# In nccl-tests the count is one rank's part of the size; elsewhere it is the whole.
_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
# nccl-tests 2.0 to 2.12 print the largest deviation; what they allow is from their src/common.cu.
_ALLOWED_DEVIATION = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-12}
_SLACK = 1 + 1e-6  # of the arithmetic here
# A derived time or a bandwidth known worse than this says nothing about a machine.
_MAX_COARSENESS = 0.05

_MAX_BYTES = 2**62

# What tells a collective in the name of a file; "reduce" and its like also stand in other names.
_HINTS = {spelt: name for spelt, name in SPELT.items() if name not in ("reduce", "gather", "scatter")}


class _RefusedError(Exception):
    """Why no row of a table can be used."""


def check(log: Log, *, collective: str | None = None, ranks: int | None = None) -> None:
    """Finds each table's collective and ranks, and marks what cannot be right.

    collective, ranks: what the user says of tables that do not say it themselves.
    """
    for table in log.tables:
        with _refusing(table):
            if not table.refusal:
                _identify(log, table, collective, ranks)
        _find_sizes(log, table)
        with _refusing(table):
            if not table.refusal:
                _check_laws(log, table)


@contextlib.contextmanager
def _refusing(table: Table) -> Iterator[None]:
    try:
        yield
    except _RefusedError as refused:
        table.refusal = str(refused)


def _identify(log: Log, table: Table, collective: str | None, ranks: int | None) -> None:
    _find_groups(table)
    _refuse_mixed(table)
    _find_ranks(log, table, ranks)
    if table.ranks is not None and not 1 <= table.ranks <= MAX_RANKS:
        beyond, table.ranks = table.ranks, None
        raise _RefusedError(f"it has {beyond} ranks, which cannot be")
    table.collective = _collective(log, table, collective)
    if table.ranks is None:
        raise _RefusedError("how many ranks it ran on is not in the log: give --ranks N")
    if table.ranks == 1:
        raise _RefusedError("one rank: nothing is sent, so its bandwidths are of memory or mean nothing")


def _check_laws(log: Log, table: Table) -> None:
    _check_rows(log, table)
    _check_data(table)
    _check_average(log, table)
    if not (table.ended or table.elided) and table.rows:
        log.say(table.rows[-1].line, "the table has no end: the log was cut, or the benchmark did not finish")


# -------------------------------------------------------------------------- what the log says of ranks


def _find_groups(table: Table) -> None:
    groups = {device.group for device in table.devices}
    table.groups = max(len(groups), 1)
    if not table.devices:
        return
    sizes = {sum(d.group == group for d in table.devices) for group in groups}
    listed = max(device.rank for device in table.devices) + 1
    if table.groups == 1:
        table.ranks, table.ranks_from = listed, "the list of ranks"
    elif len(sizes) == 1 and len(table.devices) == listed:
        table.ranks, table.ranks_from = sizes.pop(), "the list of ranks and their groups"
    else:
        raise _RefusedError(
            f"{len(table.devices)} ranks in {table.groups} groups are listed, of different sizes or not all "
            "of them: how many ranks took part in one collective cannot be told"
        )


def _refuse_mixed(table: Table) -> None:
    """Refuses rows of several processes that each took themselves for the whole world."""
    rows = [(row.size_bytes, row.dtype, row.redop, row.root) for row in table.rows if row.size_bytes]
    if table.continues is not None and table.continues.refusal:
        raise _RefusedError(table.continues.refusal)
    if table.mixed and len(set(rows)) < len(rows):
        raise _RefusedError(
            "several processes printed into it at once, each as rank 0: nccl-tests was built without MPI, so "
            "each measured alone while the others disturbed it; build it with MPI=1"
        )


def _find_sizes(log: Log, table: Table) -> None:
    for row in table.rows:
        row.size_bytes *= (table.ranks or 1) if table.sizes_are_parts else 1
    for row in [row for row in table.rows if row.size_bytes > _MAX_BYTES]:
        log.say(row.line, f"its size of {row.size_bytes} bytes cannot be: the row was left out")
        table.rows.remove(row)


def _find_ranks(log: Log, table: Table, given: int | None) -> None:
    """From the list of ranks, the size over the count, and what the user says: a list may be cut, so that he says
    more than it."""
    parts = {p for row in table.rows if (p := _parts(row)) is not None}
    if len(parts) == 1 and (only := parts.pop()) > 1 and table.ranks != only:
        if table.ranks is not None:
            log.say(
                table.line,
                f"{table.ranks_from} gives {table.ranks} ranks, size over count gives {only}: the latter is taken",
            )
        table.ranks, table.ranks_from = only, "size and count"
    if given is None or given == table.ranks:
        return
    if table.ranks is not None and (given < table.ranks or table.ranks_from != "the list of ranks"):
        raise _RefusedError(f"--ranks {given} contradicts it: {table.ranks_from} gives {table.ranks} ranks")
    if table.ranks is not None:
        log.say(table.line, f"{table.ranks} ranks are listed, --ranks gives {given}: the list is cut")
    table.ranks, table.ranks_from = given, "--ranks"


def _parts(row: Row) -> int | None:
    """Into how many parts of `count` elements the size falls; None where that says nothing."""
    itemsize = ITEMSIZE.get(row.dtype)
    if not row.count or not itemsize or not row.size_bytes:
        return None
    whole, rest = divmod(row.size_bytes, row.count * itemsize)
    return whole if not rest else None


def _ratios(table: Table) -> list[tuple[float, float]]:
    """The intervals of busbw / algbw, where they are not printed too coarsely to say anything."""
    return [
        (b.low / a.high / _SLACK, b.high / a.low * _SLACK)
        for _, figure in table.figures
        if not figure.fault and (a := figure.algbw) is not None and (b := figure.busbw) is not None
        if max(a.coarseness, b.coarseness) <= _MAX_COARSENESS
    ]


# ------------------------------------------------------------------------------- which collective it is


def _collective(log: Log, table: Table, given: str | None) -> str:
    if table.collective is not None:
        if given is not None and given != table.collective:
            raise _RefusedError(f"--collective {given} contradicts it: the log says {table.collective}")
        return table.collective
    fitting = _fitting(table)
    several = " or ".join(fitting)
    if given is not None:
        if fitting and given not in fitting:
            raise _RefusedError(f"--collective {given} contradicts its rows, which fit {several}")
        return given
    named = _named(log.name)
    if len(fitting) > 1 and named in fitting:
        log.say(table.line, f"{named} by the name of the file: the rows fit {several} as well")
        fitting = [named]
    if len(fitting) != 1:
        fit = f" ({several} fit its rows)" if fitting else ""
        raise _RefusedError(f"which collective it is cannot be told{fit}: give --collective NAME")
    return fitting[0]


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
    found = _of_parts(table, rows, reduces, rooted) if parts and parts != {1} else ["all_reduce", "sendrecv"]
    if not (parts and parts != {1}) and rooted:
        found = ["reduce"] if reduces else ["broadcast"]
    ratios = _ratios(table)
    return [c for c in found if _mostly(_may_have(ratio, c, table.ranks) for ratio in ratios)]


def _of_parts(table: Table, rows: Sequence[Row], reduces: bool, rooted: bool) -> list[str]:
    """Of those in which each rank has a part of the size."""
    if reduces:
        return ["reduce_scatter"]
    if rooted:
        return ["gather", "scatter"]
    if not table.redop_column:
        return ["all_gather"]  # nccl-tests 2.0 to 2.12 print no such column for it
    checked = {figure.in_place for row in rows for figure in row.figures if figure.wrong is not None}
    # They leave all_to_all's redop blank; it is never checked in place.
    if (rows and not rows[0].redop) or checked == {False}:
        return ["all_to_all"]
    return ["all_gather", "all_to_all"]


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
        raise _RefusedError(
            f"busbw is {(low + high) / 2:.4g} x algbw, {table.collective} among {table.ranks} ranks "
            f"({table.ranks_from}) would have {factor:.4g}: the collective or the ranks are not what they seem; "
            "where a list of ranks was cut, give --ranks N"
        )
    for row, figure in table.figures:
        if row.root is not None and not -1 <= row.root < table.ranks:  # -1: it has none
            figure.fail(f"its root is rank {row.root} of {table.ranks}")
        _check_count(row, figure, table.ranks if table.collective in _PARTS else 1)
        _check_figure(row, figure, factor, old)
    _derive_times(table, factor, factor if old else 1.0)


def _check_count(row: Row, figure: Figure, parts: int) -> None:
    itemsize = ITEMSIZE.get(row.dtype)
    if row.count is None or itemsize is None or row.count * itemsize * parts == row.size_bytes:
        return
    each = f" on each of {parts} ranks" if parts > 1 else ""
    figure.fail(
        f"{row.count} elements of {row.dtype}{each} are {row.count * itemsize * parts} bytes, the row says "
        f"{row.size_bytes}"
    )


def _check_figure(row: Row, figure: Figure, factor: float, old: bool) -> None:
    """Each pair of time, algbw and busbw: two that agree with a coarse third may still contradict each other."""
    time, algbw, busbw = figure.time, figure.algbw, figure.busbw
    if figure.fault or algbw is None or busbw is None:
        return
    expected = 1.0 if old else factor
    carried = row.size_bytes * (factor if old else 1.0)
    timed = time is not None and row.size_bytes > 0 and not figure.time_is_separate
    if timed:
        _check_time(figure, "algbw", carried, algbw)
    if not _overlap(algbw.low * expected, algbw.high * expected, busbw):
        figure.fail(
            f"its busbw of {busbw.value / 1e9:.6g} GB/s is not {expected:.4g} x its algbw "
            f"of {algbw.value / 1e9:.6g}"
        )
    if timed:
        _check_time(figure, "busbw", carried * expected, busbw)


def _check_time(figure: Figure, name: str, carried: float, bandwidth: Printed) -> None:
    """Whether so many bytes in the figure's time are this bandwidth."""
    time = figure.time
    assert time is not None
    if time.value <= 0:
        figure.fail(f"its time is 0 and its {name} {bandwidth.value / 1e9:.6g} GB/s")
    elif not _overlap(carried / time.high, carried / time.low if time.low > 0 else math.inf, bandwidth):
        figure.fail(
            f"{carried:.0f} bytes in {time.value * 1e6:.6g} us are {carried / time.value / 1e9:.4g} GB/s of {name}, "
            f"the row says {bandwidth.value / 1e9:.6g}"
        )


def _overlap(low: float, high: float, value: Printed) -> bool:
    return low / _SLACK <= value.high * _SLACK and high * _SLACK >= value.low / _SLACK


def _derive_times(table: Table, factor: float, carried: float) -> None:
    """Gives figures without a time the one that their bandwidth implies. carried: of the size, by algbw."""
    for row, figure in table.figures:
        if figure.fault or not row.size_bytes:
            continue
        time, by_bandwidth = figure.time, figure.algbw or (figure.busbw and figure.busbw.scaled(1 / factor))
        coarse = (
            time is not None
            and by_bandwidth is not None
            and time.coarseness > max(5e-3, by_bandwidth.coarseness)
        )
        if time is not None and not coarse:
            if time.value <= 0:
                figure.fail("its time is 0")
            continue
        if by_bandwidth is None or by_bandwidth.coarseness > _MAX_COARSENESS:
            given = "nothing" if by_bandwidth is None else f"{by_bandwidth.value / 1e9:.6g} GB/s"
            figure.fail(f"it has no time, and its bandwidth ({given}) is too coarse to derive one")
            continue
        seconds = row.size_bytes * carried / by_bandwidth.value
        figure.time, figure.time_is_derived = Printed(seconds, seconds * by_bandwidth.coarseness), True


# --------------------------------------------------------------------------------- the data it checked


def _check_data(table: Table) -> None:
    bad = False
    for row, figure in table.figures:
        if figure.wrong is None:
            continue
        allowed = _ALLOWED_DEVIATION.get(row.dtype, 0.0) if table.error_column else 0.0
        if not 0 <= figure.wrong <= allowed:
            what = "a deviation of" if table.error_column else "wrong elements:"
            figure.fail(f"the data were wrong: {what} {figure.wrong:g}", wrong_data=True)
        bad = bad or figure.fault_is_wrong_data
    if table.failed_values and not bad:
        for _, figure in table.figures:
            figure.fail(
                f"the table ends with {table.failed_values} values out of bounds, and no row says which",
                wrong_data=True,
            )


def _check_average(log: Log, table: Table) -> None:
    average = table.average_busbw
    values = [figure.busbw for _, figure in table.figures if figure.busbw is not None]
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
