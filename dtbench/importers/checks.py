"""What the figures of a table must satisfy.

    algbw = S / time          busbw = algbw * factor(collective, ranks)

A printed number stands for an interval, so that nothing is found wrong which only was rounded. A
row that breaks a law keeps its place and loses its numbers; a table whose rows break it is refused.
"""

from __future__ import annotations

import math
import re

from dtbench.importers.model import ITEMSIZE, PARTS, SPELT, Log, LogFigure, LogRow, LogTable, Printed, Problem
from dtbench.suite.mesh import MAX_RANKS
from dtbench_core.cost.ring import busbw_factor

_REDUCING = ("all_reduce", "reduce_scatter", "reduce", "sendrecv")  # it prints a redop of sendrecv, too
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
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
        listed = max((device.rank + 1 for device in table.devices), default=ranks)
        conflict = "" if ranks in (None, listed) else f"{listed} ranks are listed, --ranks gives {ranks}"
        try:
            if table.refusal:
                raise _RefusedError(table.refusal)
            _identify(log, table, collective, ranks)
            _find_sizes(log, table)
            _check_rows(table)
        except _RefusedError as refused:
            table.refusal = f"{conflict}: {refused}" if conflict else str(refused)
            continue
        if conflict:  # before all else that is said of the log
            log.problems.insert(0, Problem(table.line, f"{conflict}: the list is taken for cut"))
        _check_data(table)
        if not table.ended and table.rows:
            log.say(
                table.rows[-1].line, "the table has no end: the log was cut, or the benchmark did not finish"
            )


def _identify(log: Log, table: LogTable, collective: str | None, ranks: int | None) -> None:
    if len({device.group for device in table.devices}) > 1:
        raise _RefusedError("groups of ranks ran side by side: give a log of one group")
    if table.devices:
        table.ranks = max(device.rank for device in table.devices) + 1
        table.ranks_from = "the list of ranks"
    rows = [(row.size_bytes, row.dtype, row.redop, row.root) for row in table.rows if row.size_bytes]
    if table.mixed and len(set(rows)) < len(rows):
        raise _RefusedError(
            "several processes printed into it at once, each as rank 0: nccl-tests was built without MPI, so "
            "each measured alone while the others disturbed it; build it with MPI=1"
        )
    _find_ranks(log, table, ranks)
    if table.ranks is not None and not 1 <= table.ranks <= MAX_RANKS:
        beyond, table.ranks = table.ranks, None
        raise _RefusedError(f"it has {beyond} ranks, which cannot be")
    table.collective = _collective(log, table, collective)
    if table.ranks is None:
        raise _RefusedError("how many ranks it ran on is not in the log: give --ranks N")
    if table.ranks == 1:
        raise _RefusedError("one rank: nothing is sent, so its bandwidths are of memory or mean nothing")


def _find_sizes(log: Log, table: LogTable) -> None:
    for row in table.rows:
        row.size_bytes *= (table.ranks or 1) if table.sizes_are_parts else 1
    for row in [row for row in table.rows if row.size_bytes > _MAX_BYTES]:
        log.say(
            row.line, f"its size of {row.size_bytes} bytes cannot be: the row was left out", leaves_out=True
        )
        table.rows.remove(row)


def _find_ranks(log: Log, table: LogTable, by_user: int | None) -> None:
    """From the list of ranks, the size over the count, and what the user says: a list may be cut, so that he says
    more than it."""
    parts = {_parts(row) for row in table.rows} - {None}
    part = parts.pop() if len(parts) == 1 else None
    if part is not None and part > 1 and {part} != {table.ranks, by_user or part}:
        if table.ranks not in (None, part, by_user):
            log.say(
                table.line, f"{table.ranks} ranks are listed, size over count gives {part}, which is taken"
            )
        table.ranks, table.ranks_from = part, "size and count"
    if by_user is None or by_user == table.ranks:
        return
    if table.ranks is not None and (by_user < table.ranks or table.ranks_from != "the list of ranks"):
        raise _RefusedError(f"--ranks {by_user} contradicts it: {table.ranks_from} gives {table.ranks} ranks")
    table.ranks, table.ranks_from = by_user, "--ranks"


def _parts(row: LogRow) -> int | None:
    """Into how many parts of `count` elements the size falls; None where that says nothing."""
    itemsize = ITEMSIZE.get(row.dtype)
    if not row.count or not itemsize or not row.size_bytes:
        return None
    whole, rest = divmod(row.size_bytes, row.count * itemsize)
    return whole if not rest else None


def _collective(log: Log, table: LogTable, by_user: str | None) -> str:
    """What the log says, else the user, else the name of the file; of the latter two the rows may say otherwise."""
    if table.collective is not None:
        if by_user is not None and by_user != table.collective:
            raise _RefusedError(f"--collective {by_user} contradicts it: the log says {table.collective}")
        return table.collective
    name = by_user or _named(log.name)
    if name is None:
        raise _RefusedError("which collective it is is not in the log: give --collective NAME")
    reduces = any(row.redop not in ("", "none") for row in table.rows)
    rooted = any((row.root or -1) >= 0 for row in table.rows)
    if (reduces and name not in _REDUCING) or (rooted and name not in _ROOTED):
        of = "--collective" if by_user else "the name of the file"
        raise _RefusedError(f"{name} by {of} contradicts its rows, which name a reduction or a root")
    if by_user is None:
        log.say(table.line, f"{name} by the name of the file: the log does not say which collective it is")
    return name


def _named(name: str) -> str | None:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    names = {name for hint, name in _HINTS.items() if hint in letters}
    return names.pop() if len(names) == 1 else None


def _check_rows(table: LogTable) -> None:
    assert table.collective is not None and table.ranks is not None
    factor = busbw_factor(table.collective, table.ranks)
    # Intervals of busbw / algbw, where they are not printed too coarsely to say anything.
    ratios = [
        (b.low / a.high / _SLACK, b.high / a.low * _SLACK)
        for _, figure in table.figures
        if not figure.fault and (a := figure.algbw) is not None and (b := figure.busbw) is not None
        if max(a.coarseness, b.coarseness) <= _MAX_COARSENESS
    ]
    # Single rows that were altered do not decide.
    if sum(low <= factor <= high for low, high in ratios) < 0.8 * len(ratios):
        low, high = sorted(ratios)[len(ratios) // 2]
        raise _RefusedError(
            f"busbw is {(low + high) / 2:.4g} x algbw, {table.collective} among {table.ranks} ranks "
            f"({table.ranks_from}) would have {factor:.4g}: the collective or the ranks are not what they seem"
            + ("; where a list of ranks was cut, give --ranks N" if table.ranks_from != "--ranks" else "")
        )
    for row, figure in table.figures:
        if row.root is not None and not -1 <= row.root < table.ranks:  # -1: it has none
            figure.fail(f"its root is rank {row.root} of {table.ranks}")
        _check_count(row, figure, table.ranks if table.collective in PARTS else 1)
        _check_figure(row, figure, factor)
    _derive_times(table, factor)


def _check_count(row: LogRow, figure: LogFigure, parts: int) -> None:
    itemsize = ITEMSIZE.get(row.dtype)
    if row.count is None or itemsize is None or row.count * itemsize * parts == row.size_bytes:
        return
    elements = f"{row.count} elements of {row.dtype}" + (f" on each of {parts} ranks" if parts > 1 else "")
    figure.fail(f"{elements} are {row.count * itemsize * parts} bytes, the row says {row.size_bytes}")


def _check_figure(row: LogRow, figure: LogFigure, factor: float) -> None:
    """Each pair of time, algbw and busbw: two that agree with a coarse third may still contradict each other."""
    time, algbw, busbw = figure.time, figure.algbw, figure.busbw
    if figure.fault or algbw is None or busbw is None:
        return
    timed = time is not None and row.size_bytes > 0 and not figure.time_is_separate
    if timed:
        _check_time(figure, "algbw", row.size_bytes, algbw)
    if not _overlap(algbw.low * factor, algbw.high * factor, busbw):
        bus, alg = busbw.value / 1e9, algbw.value / 1e9
        figure.fail(f"its busbw of {bus:.6g} GB/s is not {factor:.4g} x its algbw of {alg:.6g}")
    if timed:
        _check_time(figure, "busbw", row.size_bytes * factor, busbw)


def _check_time(figure: LogFigure, name: str, carried: float, bandwidth: Printed) -> None:
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


def _derive_times(table: LogTable, factor: float) -> None:
    """Gives figures without a time, or with one coarser than their bandwidth, that which the bandwidth implies."""
    for row, figure in table.figures:
        if figure.fault or not row.size_bytes:
            continue
        time, by_bandwidth = figure.time, figure.algbw or (figure.busbw and figure.busbw.scaled(1 / factor))
        finer = by_bandwidth is not None and time is not None and time.coarseness > by_bandwidth.coarseness
        if time is not None and not (finer and time.coarseness > 5e-3):
            if time.value <= 0:
                figure.fail("its time is 0")
        elif by_bandwidth is None or by_bandwidth.coarseness > _MAX_COARSENESS:
            bandwidth = "nothing" if by_bandwidth is None else f"{by_bandwidth.value / 1e9:.6g} GB/s"
            figure.fail(f"it has no time, and its bandwidth ({bandwidth}) is too coarse to derive one")
        else:
            seconds = row.size_bytes / by_bandwidth.value
            figure.time, figure.time_is_derived = Printed(seconds, seconds * by_bandwidth.coarseness), True


def _check_data(table: LogTable) -> None:
    for row, figure in table.figures:
        if figure.wrong is None:
            continue
        allowed = _ALLOWED_DEVIATION.get(row.dtype, 0.0) if table.error_column else 0.0
        if not 0 <= figure.wrong <= allowed:
            what = "a deviation of" if table.error_column else "wrong elements:"
            figure.fail(f"the data were wrong: {what} {figure.wrong:g}", wrong_data=True)
    if table.failed_values and not any(figure.fault_is_wrong_data for _, figure in table.figures):
        why = f"the table ends with {table.failed_values} values out of bounds, and no row says which"
        for _, figure in table.figures:
            figure.fail(why, wrong_data=True)
