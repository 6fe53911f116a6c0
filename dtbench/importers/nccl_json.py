"""The JSON that nccl-tests writes with -J (versions 1 to 4 of its file).

Its `env` is the whole environment of the process, with users, paths and tokens in it, and its `args`
hold paths: of neither is anything taken over but the program's name.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from msgspec import UNSET, Struct

from dtbench.errors import UnreadableRunError
from dtbench.fields import Count
from dtbench.files.read import BadFieldError, decode, into, shown
from dtbench.importers.model import (
    HALF_DECIMAL,
    Device,
    Figure,
    Log,
    Printed,
    Problem,
    Row,
    Table,
    decimal,
    is_number,
)
from dtbench.importers.nccl_text import DTYPES, library_version, name_table
from dtbench.importers.text import pattern

_PROGRAM = pattern(r"(?:.*[/\\])?([a-z_]{1,40}?)_perf(?:_mpi)?")


def applies(text: str) -> bool:
    """Whether the text is one JSON object, whole or cut: no log of text begins like that."""
    return text.lstrip()[:1] == "{" and '"' in text[:4096].split(":", 1)[0]


def read(text: str, log: Log) -> None:
    """Adds the table of a file to its log.

    Raises:
        UnreadableRunError: no JSON, cut short, or not what nccl-tests writes.
    """
    try:
        file = into(decode(text.encode("utf-8", "replace")), _File)
        log.tables.append(_table(file, log))
    except BadFieldError as error:
        raise UnreadableRunError(
            f"{log.name} is not a whole JSON file of nccl-tests (-J): {error}; "
            "if the run was killed, give the text it printed instead"
        ) from error


# Numbers are `Any` where the tool prints text for one that it does not have ("nan", "N/A").


class _Device(Struct, frozen=True):
    rank: Count
    group: Count = 0
    device: Count = 0
    pid: Count = 0
    hostname: str = ""
    device_info: str = ""


class _Config(Struct, frozen=True):
    nthreads: Any = None
    ngpus: Any = None
    iterations: Any = None
    blocking_collectives: Any = "false"
    devices: tuple[_Device, ...] = ()


class _Times(Struct, frozen=True):
    """Of one placement: us, GB/s, wrong elements. Some versions say cpu_time instead of time."""

    time: Any = None
    cpu_time: Any = UNSET
    alg_bw: Any = None
    bus_bw: Any = None
    nwrong: Any = None


class _Iterations(Struct, frozen=True):
    """Single iterations, each the longest over the processes, and those of each process."""

    times_us: Any = None
    skipped_iterations: Any = 0
    per_process_max_times_us: Any = None


class _Entry(Struct, frozen=True):
    size: Count
    count: Count
    type: str
    redop: str
    root: Any = None
    out_of_place: _Times | None = None
    in_place: _Times | None = None
    out_of_place_per_iter: _Iterations | None = None
    in_place_per_iter: _Iterations | None = None


class _Checked(Struct, frozen=True):
    count: Any = None


class _Average(Struct, frozen=True):
    bandwidth: Any = None


class _File(Struct, frozen=True):
    version: Literal[1, 2, 3, 4]
    config: _Config
    results: tuple[_Entry, ...]
    args: tuple[str, ...] = ()
    start_time: str = ""
    nccl_version: Any = None
    out_of_bounds: _Checked | None = None
    average_bus_bandwidth: _Average | None = None
    errors: tuple[Any, ...] | None = None


def _table(file: _File, log: Log) -> Table:
    config = file.config
    table = Table("nccl-tests", 0, redop_column=True, ended=file.average_bus_bandwidth is not None)
    table.iterations = _count_or_none(config.iterations)
    blocking = str(config.blocking_collectives) not in ("false", "0")
    table.mode = "isolated" if blocking else "back_to_back"
    table.devices = [
        Device(d.rank, d.group, d.hostname[:255], d.device, d.device_info[:120], d.pid)
        for d in config.devices
    ]
    table.started = file.start_time[:40]
    library = _count_or_none(file.nccl_version)
    if library is not None and 1000 <= library < 10**6:
        table.versions["nccl"] = library_version(library)
    program = _PROGRAM.fullmatch(file.args[0]) if file.args and len(file.args[0]) < 4096 else None
    if program:
        name_table(table, program[1])
    # The file does not say over how many threads; their per-process times are one rank's only
    # where a process has one GPU.
    one_each = config.nthreads == 1 and config.ngpus == 1
    table.rows = [_row(entry, index, one_each) for index, entry in enumerate(file.results)]
    if file.out_of_bounds is not None:
        table.failed_values = _count_or_none(file.out_of_bounds.count)
    average = file.average_bus_bandwidth
    if average is not None and is_number(average.bandwidth):
        table.average_busbw = Printed(float(average.bandwidth) * 1e9, HALF_DECIMAL * 1e9)
    for text in file.errors or ():
        if isinstance(text, str) and text.strip():
            log.failures.append(Problem(0, f"the file says: {text.strip()[:160]}"))
    return table


def _row(entry: _Entry, index: int, one_each: bool) -> Row:
    root = entry.root
    if isinstance(root, str) and re.fullmatch(r"\s*-?[0-9]{1,9}\s*", root):
        root = int(root)
    row = Row(
        index + 1,  # rows stand for lines here
        entry.size,
        entry.count,
        DTYPES.get(entry.type, (entry.type[:20], 0))[0],
        entry.redop[:20],
        root if isinstance(root, int) and not isinstance(root, bool) else None,
        [],
    )
    for times, iterations, in_place in (
        (entry.out_of_place, entry.out_of_place_per_iter, False),
        (entry.in_place, entry.in_place_per_iter, True),
    ):
        if times is not None:
            figure = _figure(times, in_place)
            if iterations is not None:
                _iterations(figure, iterations, one_each)
            row.figures.append(figure)
    if not row.figures:
        raise BadFieldError(f"results[{index}] has neither out_of_place nor in_place")
    return row


def _figure(entry: _Times, in_place: bool) -> Figure:
    time, algbw, busbw = (decimal(value) for value in (entry.time, entry.alg_bw, entry.bus_bw))
    figure = Figure.of(in_place, time, algbw, busbw)
    if (time is None and entry.cpu_time is UNSET) or algbw is None or busbw is None:
        figure.fail("it has no number for time, alg_bw or bus_bw")
    if entry.nwrong is not None and is_number(entry.nwrong):
        figure.wrong = float(entry.nwrong)
    elif entry.nwrong is not None:
        figure.fail(f"its nwrong is {shown(entry.nwrong)}", wrong_data=True)
    return figure


def _iterations(figure: Figure, entry: _Iterations, one_each: bool) -> None:
    times = _times(entry.times_us)
    if not times:
        return
    skip = entry.skipped_iterations
    skip = skip if isinstance(skip, int) and 0 <= skip < len(times) else 0
    figure.samples_s = times[skip:]
    if one_each and isinstance(entry.per_process_max_times_us, list):
        ranks = [_times(process) for process in entry.per_process_max_times_us]
        if all(len(process) == len(times) for process in ranks):
            figure.rank_samples_s = {str(rank): process[skip:] for rank, process in enumerate(ranks)}


def _times(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(is_number(v) and v > 0 for v in values):
        return ()
    return tuple(float(v) * 1e-6 for v in values)


def _count_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
