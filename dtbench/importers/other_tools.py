"""Reads the tables of DeepSpeed, the OSU Micro-Benchmarks and ml-engineering, and the CSV files of rccl-tests.

- DeepSpeed: benchmarks/communication of DeepSpeedExamples.
- OSU (osu_allreduce etc.): a time per size. There is no bandwidth that could be checked. The number of ranks is taken
  from the command line, if the log contains it.
- ml-engineering: the Markdown tables of all_reduce_bench.py and torch-dist-bench.py. Older versions print no time. It
  is derived from the bandwidth if that has enough digits.
- rccl-tests (-Z csv -x FILE): a header, then a row per size and buffer placement.
"""

import csv
import math
import re

from dtbench.importers.columns import MEASURED, Names, Row, add_rows, placement_columns, values_by_name
from dtbench.importers.model import (
    COLLECTIVES,
    IN_PLACE,
    TIME_UNITS,
    Log,
    LogMeasurement,
    LogRow,
    LogTable,
    PrintedNumber,
    clean_lines,
    collective_of,
    parse_amount,
    pattern,
    scan,
)

_Match = re.Match[str]
_DEEPSPEED_TITLE = pattern(r"-{2,}\s*Performance of (\w+) on (\d{1,7}) devices\s*-{2,}")
_DEEPSPEED_LINES = {
    "title": _DEEPSPEED_TITLE,
    "header": pattern(
        r"Size \(Bytes\)\s+Description\s+Duration( \(us\))?\s+Throughput \((\w+)\)\s+BusBW \((\w+)\)"
    ),
    # 31.67 GB   8501054668x4   3176.620 ms   171.272   149.863; with --raw the size and time have no unit.
    "row": pattern(
        r"(?:(?<=\s)|^)(\S+)(?: ([KMGTPEZ]?B))?\s+(\d{1,18})x(\d{1,3})\s+(\S+)(?: (us|ms|s))?\s+(\S+)\s+(\S+)\s*$"
    ),
}
# DeepSpeed's benchmarks; the meaning of other collectives' sizes is unknown.
_DEEPSPEED_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "broadcast", "sendrecv")
_DEEPSPEED_BANDWIDTHS = {"Gbps": 1e9 / 8, "GBps": 1e9}


def is_deepspeed(text: str) -> bool:
    return _DEEPSPEED_TITLE.search(text) is not None


def read_deepspeed(text: str, log: Log) -> None:
    table: LogTable | None = None
    units: tuple[bool, str, str] | None = None
    for number, kind, match in scan(text, _DEEPSPEED_LINES):
        if kind == "title":
            table, units = _deepspeed_table(match[1], int(match[2]), number), None
            log.tables.append(table)
        elif kind == "header" and table is not None:
            units = bool(match[1]), match[2], match[3]
            if unknown := {match[2], match[3]} - set(_DEEPSPEED_BANDWIDTHS):
                table.refusal = f"line {number} has the unit {unknown.pop()}: expected Gbps or GBps"
        elif kind == "row" and table is not None and units is not None:
            table.rows.append(_deepspeed_row(match, number, table, units))


def _deepspeed_table(name: str, ranks: int, number: int) -> LogTable:
    collective = collective_of(name)
    is_supported = collective in _DEEPSPEED_COLLECTIVES
    return LogTable(
        "deepspeed",
        number,
        collective=collective if is_supported else None,
        ranks=ranks,
        ranks_from="its title",
        refusal=""
        if is_supported
        else f"{name[:40]!r} is not supported: expected {', '.join(_DEEPSPEED_COLLECTIVES)}",
        ended=True,
    )


def _deepspeed_row(match: _Match, number: int, table: LogTable, units: tuple[bool, str, str]) -> LogRow:
    raw, throughput_unit, busbw_unit = units
    count, itemsize = int(match[3]), int(match[4])
    time = parse_amount(match[5], TIME_UNITS["us" if raw else match[6] or "us"])
    tput = parse_amount(match[7], _DEEPSPEED_BANDWIDTHS.get(throughput_unit, 1.0))
    busbw = parse_amount(match[8], _DEEPSPEED_BANDWIDTHS.get(busbw_unit, 1.0))
    measurement = LogMeasurement(table.collective in IN_PLACE, time, None, busbw)
    if not raw and match[6] is None:
        measurement.fail("its time has no unit")
    if time is None or tput is None or busbw is None:
        measurement.fail("it has no number for duration, throughput or bus bandwidth")
        size = count * itemsize
    else:
        size = _deepspeed_size(table, count * itemsize, time, tput, measurement)
    # DeepSpeed does not print the element type, only its width.
    return LogRow(number, size, None, f"{8 * itemsize}-bit", "", None, [measurement])


def _deepspeed_size(
    table: LogTable, described: int, time: PrintedNumber, tput: PrintedNumber, measurement: LogMeasurement
) -> int:
    """Returns the message size in bytes that agrees with the printed throughput.

    Depending on the version, all_gather prints the size of one rank's part or the total size, and the throughput of
    all_reduce counts the size once or twice.
    """
    sizes = [described * (table.ranks or 1), described] if table.collective == "all_gather" else [described]
    for size in sizes:
        for factor in [2, 1] if table.collective == "all_reduce" else [1]:
            low, high = factor * size / time.high, factor * size / max(time.low, 1e-300)
            if low <= tput.high * (1 + 1e-6) and high >= tput.low * (1 - 1e-6):
                return size
    measurement.fail(
        f"its throughput of {tput.value / 1e9:.6g} GB/s does not match {described} bytes in {time.value:.6g} s"
    )
    return sizes[0]


_OSU_LINES = {
    "launch": pattern(
        r"\b(?:mpirun\w*|mpiexec\w*|srun)\b.*?\s(?:-np|-n|--np|--ntasks)[ =](\d{1,7})\b.*\bosu_"
    ),
    "title": pattern(r"\bOSU MPI(-CUDA|-ROCM|-OPENACC)? (.+?) Latency Test(?: v(\S+))?\s*$"),
    "datatype": pattern(r"#\s*Datatype:\s*(\w+)"),
    "header": pattern(r"#\s*Size\s+(Avg )?Latency\s*\((\w+)\)(.*)$"),
    "row": pattern(r"(?:(?<=[\s:>])|^)(\d{1,18})((?:\s+\S+)+)\s*$"),
}
# For these, OSU prints the size of one rank's part.
_OSU_PER_RANK = ("all_gather", "all_to_all", "gather", "scatter")
_OSU_DATATYPES = {"MPI_FLOAT": "float32", "MPI_INT": "int32", "MPI_CHAR": "int8", "MPI_DOUBLE": "float64"}


def is_osu(text: str) -> bool:
    return "OSU MPI" in text and " Latency Test" in text


def read_osu(text: str, log: Log) -> None:
    """Adds the tables of a text to the log."""
    table: LogTable | None = None
    unit = 0.0
    columns: list[str] = []
    dtype, ranks = "unknown", None
    for number, kind, match in scan(text, _OSU_LINES):
        if kind == "launch":
            ranks = int(match[1])
        elif kind == "title":
            table, dtype, unit = _osu_table(match, number), "unknown", 0.0
            if ranks is not None:
                table.ranks, table.ranks_from, ranks = ranks, "the command line", None
            log.tables.append(table)
        elif table is None:
            continue
        elif kind == "datatype":
            dtype = _OSU_DATATYPES.get(match[1], match[1][:20])
        elif kind == "header":
            unit = TIME_UNITS.get(match[2], 0.0)
            columns = ["avg", *_osu_columns(match[3])]
            if not unit:
                table.refusal = f"line {number} has times in {match[2]}: expected {', '.join(TIME_UNITS)}"
        elif unit:
            _osu_add(table, match, number, dtype, unit, columns)


def _osu_table(title: _Match, number: int) -> LogTable:
    collective = collective_of(title[2])
    return LogTable(
        "osu",
        number,
        collective=collective,
        refusal="" if collective else f"OSU's {title[2][:40]!r} is not a supported collective",
        mode="isolated",
        device_type="cuda" if title[1] else "cpu",
        versions={"osu": title[3]} if title[3] else {},
        ended=True,
        sizes_are_parts=collective in _OSU_PER_RANK,
    )


def _osu_columns(headings: str) -> list[str]:
    """Returns the names of the columns behind the average. Headings may contain blanks."""
    return [
        word.lower()
        for word in re.findall(r"Min|Max|Iterations|P\d\d|Validation|Overall|Compute|\S+(?= )?", headings)
        if word not in ("Latency(us)", "Tail", "Lat(us)")
    ]


def _osu_add(
    table: LogTable, match: _Match, number: int, dtype: str, unit: float, columns: list[str]
) -> None:
    words = match[2].split()
    values = dict(zip(columns, words, strict=False))
    time = parse_amount(values.get("avg", ""), unit)
    if len(words) > len(columns) or (len(words) < len(columns) and time is None):
        return  # an unrelated line that begins with a number
    measurement = LogMeasurement(table.collective in IN_PLACE, time)
    if time is None:
        measurement.fail(f"its time is {words[0][:20]}")
    elif len(words) < len(columns):
        measurement.fail(f"it has {len(words)} values, expected the {len(columns)} that its header names")
    if values.get("validation", "pass").lower() != "pass":
        measurement.fail("its validation failed", wrong_data=True)
    table.rows.append(LogRow(number, int(match[1]), None, dtype, "", None, [measurement]))


_ML_TITLE = pattern(r"average bandwidth(?: and the per-call latency)? of (\w+) over (\d{1,7}) ranks")
_ML_SIZE = pattern(r"(\d{1,18}(?:\.\d{1,3})?)\s?(B|[KMGT]i?B)")
_ML_BANDWIDTH = pattern(r"(\S+?)\s?(GBps|MBps|GB/s)")
_ML_TIME = pattern(r"(\S+?)\s?(us|µs|ms)")
# Older versions print 2**10 bytes as "KB", too (their function fmt_bytes).
_POWERS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ML_BANDWIDTHS = {"GBps": 1e9, "GB/s": 1e9, "MBps": 1e6}
_ML_TIMES = TIME_UNITS | {"µs": TIME_UNITS["us"]}


def is_ml_engineering(text: str) -> bool:
    return "payload" in text and any(map(_is_ml_header, map(_cells, clean_lines(text))))


def read_ml_engineering(text: str, log: Log) -> None:
    table: LogTable | None = None
    columns: list[str] = []
    title: _Match | None = None
    for number, line in enumerate(clean_lines(text), start=1):
        title, cells = _ML_TITLE.search(line) or title, _cells(line)
        if _is_ml_header(cells):
            table, columns, title = _ml_table(title, number), [cell.lower() for cell in cells], None
            log.tables.append(table)
        elif table is None or set("".join(cells)) <= set("-: "):
            continue
        elif len(cells) < 2 or not _ML_SIZE.fullmatch(cells[0]):
            table = None
        else:
            table.rows.append(
                _ml_row(number, dict(zip(columns, cells, strict=False)), len(cells) - len(columns))
            )


def _cells(line: str) -> list[str]:
    start = line.find("|")
    return [] if start < 0 else [cell.strip() for cell in line[start:].strip().strip("|").split("|")]


def _is_ml_header(cells: list[str]) -> bool:
    return [cell.lower() for cell in cells[:3]] == ["payload", "busbw", "algbw"]


def _ml_table(title: _Match | None, number: int) -> LogTable:
    name = title[1] if title else "all_reduce"  # a table without a title comes from all_reduce_bench.py
    is_supported = name in COLLECTIVES and name != "sendrecv"  # torch.distributed has no sendrecv
    return LogTable(
        "ml-engineering",
        number,
        collective=name if is_supported else None,
        ranks=int(title[2]) if title else None,
        ranks_from="its title" if title else "",
        refusal="" if is_supported else f"{name[:40]!r} is not a supported collective",
        ended=True,
    )


def _ml_row(number: int, cells: dict[str, str], surplus: int) -> LogRow:
    size = _ML_SIZE.fullmatch(cells["payload"])
    assert size is not None
    size_bytes = float(size[1]) * _POWERS[size[2][0]]
    busbw, algbw = (
        _scaled(_ML_BANDWIDTH, cells.get(name, ""), _ML_BANDWIDTHS) for name in ("busbw", "algbw")
    )
    time = _scaled(_ML_TIME, cells.get("latency median", ""), _ML_TIMES)
    measurement = LogMeasurement(True, time, algbw, busbw, time_is_separate=time is not None)
    if surplus:
        measurement.fail(
            f"it has {abs(surplus)} cell(s) {'more' if surplus > 0 else 'fewer'} than its header"
        )
    elif size_bytes % 1:
        measurement.fail(f"its payload {cells['payload'][:20]} is not an integer number of bytes")
    elif time is None and (busbw is None or algbw is None):
        measurement.fail("it has no number for busbw, algbw or the latency's median")
    elif busbw is None and cells.get("busbw"):
        measurement.fail(f"its busbw is {cells['busbw'][:20]}")
    return LogRow(number, int(size_bytes), None, "float32", "", None, [measurement])


def _scaled(expression: re.Pattern[str], cell: str, units: dict[str, float]) -> PrintedNumber | None:
    match = expression.fullmatch(cell)
    return parse_amount(match[1], units[match[2]]) if match else None


_CSV_REQUIRED = {"size", "type", *MEASURED}


def is_rccl_csv(text: str) -> bool:
    return any(_is_csv_header(line) for line in text.split("\n") if "," in line)


def read_rccl_csv(text: str, log: Log) -> None:
    blocks: list[tuple[int, Names, list[Row]]] = []
    in_table = False
    for number, line in enumerate(clean_lines(text), 1):
        if _is_csv_header(line):
            blocks.append((number, tuple(field.lower() for field in _csv_fields(line)), []))
            in_table = True
        elif in_table := in_table and line.count(",") >= len(_CSV_REQUIRED):
            blocks[-1][2].append((number, _csv_fields(line)))
    for number, names, rows in blocks:
        log.tables.append(_csv_table(log, number, names, rows))


def _csv_table(log: Log, number: int, names: Names, rows: list[Row]) -> LogTable:
    table = LogTable("rccl-tests", number, ended=True)
    # With MPI, headers before May 2026 lack the column of nodes that the rows have (ROCm/rocm-systems#6004).
    position = names.index("rankspernode") - 1 if "rankspernode" in names and "nodes" not in names else 0
    if position > 0 and all(len(words) > len(names) for _, words in rows):
        names = (*names[:position], "nodes", *names[position:])
    names = add_rows(log, table, names, rows)
    identities = {
        tuple(
            values_by_name(names, words).get(name, "")
            for name in ("collective", "ranks", "gpusperrank", "gpus")
        )
        for _, words in rows
    }
    for collective, *counts in identities:
        # The number of ranks is processes times GPUs per process; without MPI, the GPUs of the only process.
        factors = [int(count) for count in counts if count.isdecimal() and len(count) < 8]
        table.collective, table.ranks = collective_of(collective), math.prod(factors) if factors else None
        table.ranks_from = "its columns of ranks and GPUs"
        if collective and table.collective is None:
            table.refusal = f"{collective[:40]!r} is not a supported collective"
    if len(identities) > 1 and table.rows:
        table.refusal = "its rows have different collectives or numbers of ranks: give one file for each"
    return table


def _is_csv_header(line: str) -> bool:
    names = tuple(field.lower() for field in _csv_fields(line)) if "algbw" in line.lower() else ()
    # There are two buffer placements, or one with a column `inplace`.
    return set(names) >= _CSV_REQUIRED and len(placement_columns(names)) + ("inplace" in names) == 2


def _csv_fields(line: str) -> list[str]:
    return [field.strip() for field in next(csv.reader([line], skipinitialspace=True), [])]
