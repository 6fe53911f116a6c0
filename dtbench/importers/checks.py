"""Checks that the size, time and bandwidths of each measurement agree.

    algbw = size / time          busbw = algbw * factor(collective, ranks)

A printed number is treated as the interval that its rounding allows, so rounding alone never fails a check. A row that
fails is recorded without its numbers. A table is refused if most of its rows fail.
"""

import math
import re

from dtbench.importers.model import (
    COUNTED_PER_RANK,
    ITEMSIZE,
    SPELLINGS,
    Log,
    LogMeasurement,
    LogRow,
    LogTable,
    PrintedNumber,
    Problem,
)
from dtbench.suite.mesh import MAX_RANKS
from dtbench_core.cost.ring import busbw_factor

# nccl-tests prints a reduction for sendrecv, too.
_REDUCING = (
    "all_reduce",
    "reduce_scatter",
    "reduce",
    "sendrecv",
)
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
# nccl-tests 2.0 to 2.12 print the largest deviation. Source of the limits: their src/common.cu.
_ALLOWED_DEVIATION = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-12}
_SLACK = 1 + 1e-6  # tolerance for floating-point arithmetic
# Times and bandwidths with a larger relative rounding error are not used.
_MAX_COARSENESS = 0.05
_MAX_BYTES = 2**62
# Spellings that identify a collective in a file name. "reduce", "gather" and "scatter" are parts of other names.
_NAME_HINTS = {
    spelling: name for spelling, name in SPELLINGS.items() if name not in ("reduce", "gather", "scatter")
}


class _TableRefusedError(Exception):
    """The reason why no row of a table can be used."""


def check(log: Log, *, collective: str | None = None, ranks: int | None = None) -> None:
    """Determines each table's collective and ranks, and marks inconsistent measurements.

    Args:
        collective: the user's value for tables that do not state theirs.
        ranks: the same, for the number of ranks.
    """
    for table in log.tables:
        listed = max((device.rank + 1 for device in table.devices), default=ranks)
        conflict = "" if ranks in (None, listed) else f"{listed} ranks are listed, --ranks gives {ranks}"
        try:
            if table.refusal:
                raise _TableRefusedError(table.refusal)
            _identify(log, table, collective, ranks)
            _check_rows(table)
        except _TableRefusedError as refused:
            table.refusal = f"{conflict}: {refused}" if conflict else str(refused)
            continue
        if conflict:  # shown before all other problems
            log.problems.insert(0, Problem(table.line, f"{conflict}: the list is assumed to be cut short"))
        _check_data(table)
        if not table.ended and table.rows:
            log.add_problem(
                table.rows[-1].line,
                "the table has no end: the log was cut short, or the benchmark did not finish",
            )


def _identify(log: Log, table: LogTable, collective: str | None, ranks: int | None) -> None:
    if len({device.group for device in table.devices}) > 1:
        raise _TableRefusedError("several groups of ranks ran at the same time: give a log of a single group")
    if table.devices:
        table.ranks = max(device.rank for device in table.devices) + 1
        table.ranks_from = "the list of ranks"
    rows = [(row.size_bytes, row.dtype, row.redop, row.root) for row in table.rows if row.size_bytes]
    if table.mixed and len(set(rows)) < len(rows):
        raise _TableRefusedError(
            "several processes printed tables at the same time, each as rank 0: nccl-tests was built without MPI, so "
            "each measured on its own while the others disturbed it; build it with MPI=1"
        )
    _find_ranks(log, table, ranks)
    if table.ranks is not None and not 1 <= table.ranks <= MAX_RANKS:
        invalid, table.ranks = table.ranks, None
        raise _TableRefusedError(f"it has {invalid} ranks: expected 1 to {MAX_RANKS}")
    table.collective = _collective(log, table, collective)
    if table.ranks is None:
        raise _TableRefusedError("the log does not state the number of ranks: give --ranks N")
    if table.ranks == 1:
        raise _TableRefusedError(
            "a single rank does not communicate, so its bandwidths say nothing about links"
        )
    for row in table.rows:
        row.size_bytes *= table.ranks if table.sizes_are_parts else 1
    for row in [row for row in table.rows if row.size_bytes > _MAX_BYTES]:
        log.add_problem(
            row.line, f"row dropped: its size of {row.size_bytes} bytes exceeds {_MAX_BYTES}", drops_row=True
        )
        table.rows.remove(row)


def _find_ranks(log: Log, table: LogTable, by_user: int | None) -> None:
    """Determines the number of ranks from the list of ranks, the size over the count, and the user's value.

    The list may be cut short, so the user may give more ranks than it has.
    """
    counts = {_parts(row) for row in table.rows} - {None}
    parts = counts.pop() if len(counts) == 1 else None
    if parts is not None and parts > 1 and {parts} != {table.ranks, by_user or parts}:
        if table.ranks not in (None, parts, by_user):
            log.add_problem(
                table.line, f"{table.ranks} ranks are listed; used {parts} ranks instead, from size and count"
            )
        table.ranks, table.ranks_from = parts, "size and count"
    if by_user is not None and by_user != table.ranks:
        if table.ranks is not None and (by_user < table.ranks or table.ranks_from != "the list of ranks"):
            raise _TableRefusedError(
                f"--ranks {by_user} contradicts the log: {table.ranks_from} gives {table.ranks} ranks"
            )
        table.ranks, table.ranks_from = by_user, "--ranks"


def _parts(row: LogRow) -> int | None:
    """Returns the number of parts of `count` elements that make up the size; None if it cannot be computed."""
    itemsize = ITEMSIZE.get(row.dtype)
    if not row.count or not itemsize or not row.size_bytes:
        return None
    parts, remainder = divmod(row.size_bytes, row.count * itemsize)
    return parts if not remainder else None


def _collective(log: Log, table: LogTable, by_user: str | None) -> str:
    """Returns the collective that the log states, else the user's, else the one in the file name.

    Raises:
        _TableRefusedError: they contradict each other or the rows, or none of them names a collective.
    """
    if table.collective is not None:
        if by_user is not None and by_user != table.collective:
            raise _TableRefusedError(
                f"--collective {by_user} contradicts the log, which names {table.collective}"
            )
        return table.collective
    name = by_user or _collective_in_name(log.name)
    if name is None:
        raise _TableRefusedError("the log does not name the collective: give --collective NAME")
    reduces = any(row.redop not in ("", "none") for row in table.rows)
    rooted = any((row.root or -1) >= 0 for row in table.rows)
    if (reduces and name not in _REDUCING) or (rooted and name not in _ROOTED):
        source = "--collective" if by_user else "the file name"
        raise _TableRefusedError(
            f"{name} (from {source}) contradicts its rows, which name a reduction or a root"
        )
    if by_user is None:
        log.add_problem(table.line, f"the log does not name the collective: used {name}, from the file name")
    return name


def _collective_in_name(name: str) -> str | None:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    names = {name for hint, name in _NAME_HINTS.items() if hint in letters}
    return names.pop() if len(names) == 1 else None


def _check_rows(table: LogTable) -> None:
    assert table.collective is not None and table.ranks is not None
    factor = busbw_factor(table.collective, table.ranks)
    # Intervals of busbw / algbw, for measurements that are not rounded too coarsely.
    ratios = [
        (busbw.low / algbw.high / _SLACK, busbw.high / algbw.low * _SLACK)
        for _, measurement in table.measurements
        if not measurement.fault
        and (algbw := measurement.algbw) is not None
        and (busbw := measurement.busbw) is not None
        if max(algbw.coarseness, busbw.coarseness) <= _MAX_COARSENESS
    ]
    # Tolerates single rows that were edited.
    if sum(low <= factor <= high for low, high in ratios) < 0.8 * len(ratios):
        low, high = sorted(ratios)[len(ratios) // 2]
        raise _TableRefusedError(
            f"busbw is {(low + high) / 2:.4g} x algbw, expected {factor:.4g} x for {table.collective} among "
            f"{table.ranks} ranks ({table.ranks_from}): the collective or the number of ranks is wrong"
            + ("; if a list of ranks was cut short, give --ranks N" if table.ranks_from != "--ranks" else "")
        )
    for row, measurement in table.measurements:
        if row.root is not None and not -1 <= row.root < table.ranks:  # -1: no root
            measurement.fail(f"its root is rank {row.root} of {table.ranks}")
        _check_count(row, measurement, table.ranks if table.collective in COUNTED_PER_RANK else 1)
        _check_measurement(row, measurement, factor)
    _derive_times(table, factor)


def _check_count(row: LogRow, measurement: LogMeasurement, parts: int) -> None:
    itemsize = ITEMSIZE.get(row.dtype)
    if row.count is None or itemsize is None or row.count * itemsize * parts == row.size_bytes:
        return
    elements = f"{row.count} elements of {row.dtype}" + (f" on each of {parts} ranks" if parts > 1 else "")
    measurement.fail(f"{elements} are {row.count * itemsize * parts} bytes, but the row has {row.size_bytes}")


def _check_measurement(row: LogRow, measurement: LogMeasurement, factor: float) -> None:
    """Checks each pair of time, algbw and busbw.

    All pairs are needed: two values can contradict each other although both agree with a coarsely rounded third.
    """
    time, algbw, busbw = measurement.time, measurement.algbw, measurement.busbw
    if measurement.fault or algbw is None or busbw is None:
        return
    timed = time is not None and row.size_bytes > 0 and not measurement.time_is_separate
    if timed:
        _check_time(measurement, "algbw", row.size_bytes, algbw)
    if not _overlap(algbw.low * factor, algbw.high * factor, busbw):
        measurement.fail(
            f"its busbw of {busbw.value / 1e9:.6g} GB/s is not {factor:.4g} x its algbw of {algbw.value / 1e9:.6g}"
        )
    if timed:
        _check_time(measurement, "busbw", row.size_bytes * factor, busbw)


def _check_time(measurement: LogMeasurement, name: str, transferred: float, bandwidth: PrintedNumber) -> None:
    """Checks that the transferred bytes over the measured time are the bandwidth of this name."""
    time = measurement.time
    assert time is not None
    if time.value <= 0:
        measurement.fail(f"its time is 0, but its {name} is {bandwidth.value / 1e9:.6g} GB/s")
    elif not _overlap(
        transferred / time.high, transferred / time.low if time.low > 0 else math.inf, bandwidth
    ):
        measurement.fail(
            f"{transferred:.0f} bytes in {time.value * 1e6:.6g} us give a {name} of "
            f"{transferred / time.value / 1e9:.4g} GB/s, but the row has {bandwidth.value / 1e9:.6g}"
        )


def _overlap(low: float, high: float, value: PrintedNumber) -> bool:
    return low / _SLACK <= value.high * _SLACK and high * _SLACK >= value.low / _SLACK


def _derive_times(table: LogTable, factor: float) -> None:
    """Derives the time from the bandwidth where a measurement has no time, or a more coarsely rounded one."""
    for row, measurement in table.measurements:
        if measurement.fault or not row.size_bytes:
            continue
        time, by_bandwidth = (
            measurement.time,
            measurement.algbw or (measurement.busbw and measurement.busbw.scaled(1 / factor)),
        )
        finer = by_bandwidth is not None and time is not None and time.coarseness > by_bandwidth.coarseness
        if time is not None and not (finer and time.coarseness > 5e-3):
            if time.value <= 0:
                measurement.fail("its time is 0")
        elif by_bandwidth is None or by_bandwidth.coarseness > _MAX_COARSENESS:
            bandwidth = "none" if by_bandwidth is None else f"{by_bandwidth.value / 1e9:.6g} GB/s"
            measurement.fail(
                f"it has no time, and its bandwidth ({bandwidth}) is rounded too coarsely to derive one"
            )
        else:
            seconds = row.size_bytes / by_bandwidth.value
            measurement.time, measurement.time_is_derived = (
                PrintedNumber(seconds, seconds * by_bandwidth.coarseness),
                True,
            )


def _check_data(table: LogTable) -> None:
    for row, measurement in table.measurements:
        allowed = _ALLOWED_DEVIATION.get(row.dtype, 0.0) if table.error_column else 0.0
        if measurement.wrong is not None and not 0 <= measurement.wrong <= allowed:
            label = "a deviation of" if table.error_column else "wrong elements:"
            measurement.fail(f"the data were wrong: {label} {measurement.wrong:g}", wrong_data=True)
    if table.failed_values and not any(
        measurement.fault_is_wrong_data for _, measurement in table.measurements
    ):
        for _, measurement in table.measurements:
            measurement.fail(
                f"the table reports {table.failed_values} values out of bounds, but does not mark their rows",
                wrong_data=True,
            )
