"""Assigns the values of rows to columns, by the names in the header.

If a header lacks names, the columns are inferred from the law size / time = algbw. Each version of nccl-tests and
rccl-tests adds columns: statistics of the iterations, the time by events, the algorithm, protocol and channels.
Unknown columns are recorded, but not used.
"""

from collections.abc import Sequence

from dtbench.importers.model import (
    DTYPES,
    Log,
    LogMeasurement,
    LogRow,
    LogTable,
    collective_of,
    leading_value,
    parse_amount,
    parse_number,
)

REDOPS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")
# Columns of one buffer placement, which every version prints next to each other -> unit.
MEASURED = {"time": 1e-6, "algbw": 1e9, "busbw": 1e9}
DATA_CHECKS = ("#wrong", "wrong", "error")
_ROW_COLUMNS = ("size", "count", "type", "redop", "root", "inplace")
_USED_COLUMNS = (*_ROW_COLUMNS, "collective", "ranks", "gpus", "gpusperrank", *MEASURED, *DATA_CHECKS)
_REDUNDANT_COLUMNS = ("numcycle", "nodes", "rankspernode")
# Bandwidths with at most this rounding error confirm that a number is a time. The 0.00 of a small size does not.
_FINE_COARSENESS = 0.01

Names = tuple[str, ...]
Words = Sequence[str]
Row = tuple[int, Words]  # line number, values


def placement_columns(names: Names) -> list[range]:
    """Returns the column indices of each buffer placement; a new placement begins where a name is repeated.

    Returns an empty list if a placement lacks its time or one of its bandwidths.
    """
    starts = [0]
    for index, name in enumerate(names):
        if name and name in names[starts[-1] : index]:
            starts.append(index)
    timed = [
        group
        for group in map(range, starts, [*starts[1:], len(names)])
        if {names[index] for index in group} >= MEASURED.keys()
    ]
    return timed if all(names.count(name) == len(timed) for name in MEASURED) else []


def values_by_name(names: Names, words: Words) -> dict[str, str]:
    """Maps names to a row's values; a repeated name keeps its first value."""
    return dict(reversed([*zip(names, words, strict=False)]))


def add_rows(log: Log, table: LogTable, names: Names, rows: Sequence[Row], optional: int = 0) -> Names:
    """Adds the rows to the table and returns the names of their columns.

    Args:
        names: names of the header's columns.
        optional: number of columns at the end that a row may lack.
    """
    if len({len(words) for _, words in rows}) == 1:
        names = _with_unnamed(names, [words for _, words in rows])
    for line, words in rows:
        values = values_by_name(names, words)
        invalid = [name for name in ("count", "root") if values.get(name) and not is_integer(values[name])]
        invalid += ["inplace"] if values.get("inplace", "0") not in ("0", "1") else []
        fault = f"its {invalid[0]} is {values[invalid[0]][:20]!r}" if invalid else ""
        if extra := [word for word in words[len(names) :] if leading_value(word)[0]]:
            fault = f"it has {len(extra)} value(s) more than the header has columns"
        if len(words) < len(names) and len(words) != len(names) - optional:
            log.add_problem(
                line,
                f"row dropped: it has {len(words)} values, expected the {len(names)} that its header names",
                drops_row=True,
            )
        elif not is_integer(values["size"]) or values["size"][0] == "-":
            log.add_problem(
                line, "row dropped: " + (fault or f"its size is {values['size'][:20]!r}"), drops_row=True
            )
        else:
            table.rows.append(_row(line, names, words, fault))
            for number, (name, word) in enumerate(zip(names, words, strict=False), 1):
                if name not in (*_USED_COLUMNS, *_REDUNDANT_COLUMNS):
                    table.unused_columns.setdefault(name[:20] or f"column {number}", {})[word[:20]] = None
    if table.unused_columns:
        columns = (f"{name} ({', '.join([*column][:4])})" for name, column in table.unused_columns.items())
        log.add_problem(table.line, f"columns not used: {', '.join(columns)}")
    return names


def is_integer(word: str) -> bool:
    return word.removeprefix("-").isdecimal() and len(word) <= 20


def _row(line: int, names: Names, words: Words, fault: str = "") -> LogRow:
    values = values_by_name(names, words)
    count, root = (
        int(values[name]) if is_integer(values.get(name, "")) else None for name in ("count", "root")
    )
    dtype = DTYPES.get(values["type"], (values["type"][:20], 0))[0]
    row = LogRow(line, int(values["size"]), count, dtype, values.get("redop", "")[:20], root, [])
    for number, group in enumerate(placement_columns(names)):
        measured = {names[index]: words[index] for index in group if index < len(words)}
        in_place = number == 1 or values.get("inplace") == "1"
        row.measurements.append(
            LogMeasurement(in_place, None, fault=fault) if fault else measurement_of(measured, in_place)
        )
    return row


def measurement_of(values: dict[str, str], in_place: bool) -> LogMeasurement:
    """Makes a measurement of printed values.

    Args:
        values: names of `MEASURED` and `DATA_CHECKS` -> text. Times are in us, bandwidths in GB/s.
    """
    time, algbw, busbw = (parse_amount(values.get(name, ""), unit) for name, unit in MEASURED.items())
    measurement = LogMeasurement(in_place, time, algbw, busbw)
    if time is None or algbw is None or busbw is None:
        invalid = [
            f"{name} {text[:20]}"
            for name, text in values.items()
            if name in MEASURED and parse_amount(text) is None
        ]
        measurement.fail(f"it has no number for {', '.join(invalid) or 'time, algbw or busbw'}")
    text = next((values[name] for name in DATA_CHECKS if name in values), "N/A")
    wrong = parse_number(text)
    if wrong is not None:
        measurement.wrong = wrong.value
    elif text.upper() != "N/A":
        measurement.fail(f"its check of the data gives {text[:20]}", wrong_data=True)
    return measurement


def _with_unnamed(names: Names, rows: Sequence[Words]) -> Names:
    """Inserts "" into the names for the columns that the rows have and the header lacks.

    Returns the names unchanged unless the rows fit with the new columns at a single position.
    """
    extra = len(rows[0]) - len(names)
    placements = (
        [index for index in group if names[index] in (*MEASURED, *DATA_CHECKS)]
        for group in placement_columns(names)
    )
    inseparable = {position for indices in placements for position in range(indices[0] + 1, indices[-1] + 1)}
    inseparable |= {index for index, name in enumerate(names) if name == "root"}
    fitting: dict[tuple[int, ...], Names] = {}
    for position in range(len(names) + 1 if 0 < extra <= 16 else 0):
        trial = names[:position] + ("",) * extra + names[position:]
        fits = [_fits(trial, words) for words in rows] if position not in inseparable else []
        if fits.count(True) > 4 * fits.count(False):  # tolerates single rows that were edited
            fitting.setdefault(tuple(i for i, name in enumerate(trial) if name in _USED_COLUMNS), trial)
    return fitting.popitem()[1] if len(fitting) == 1 else names


def _fits(names: Names, words: Words) -> bool | None:
    """Whether a row satisfies size / time = algbw with these columns; None if it was rounded too coarsely."""
    values = values_by_name(names, words)
    if not (
        all(is_integer(values[name]) for name in ("size", "count", "root") if values.get(name))
        and values["type"] in DTYPES
        and values.get("redop", "") in ("", *REDOPS)
        and values.get("inplace", "0") in ("0", "1")
        and collective_of(values.get("collective", "reduce")) is not None
    ):
        return False
    is_precise = True
    for measurement in _row(0, names, words).measurements:
        time, algbw, size = measurement.time, measurement.algbw, int(values["size"])
        if (
            measurement.fault
            or (measurement.wrong or 0) >= 1
            or time is None
            or time.low <= 0
            or algbw is None
        ):
            return False
        if not (size / time.high <= algbw.high * (1 + 1e-6) and size / time.low >= algbw.low * (1 - 1e-6)):
            return False
        is_precise = is_precise and algbw.coarseness < _FINE_COARSENESS
    return is_precise or None
