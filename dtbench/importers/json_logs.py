"""Reads the JSON files of nccl-tests (-J, file versions 1 to 4).

A file's `env` is the complete environment of the process, including users, paths and tokens, and its `args` contain
paths. Only the program's name is taken from them.
"""

from typing import Literal

from msgspec import Struct

from dtbench.errors import UnreadableRunError
from dtbench.fields import Count
from dtbench.importers.columns import is_integer, measurement_of
from dtbench.importers.model import (
    DTYPES,
    ListedRank,
    Log,
    LogMeasurement,
    LogRow,
    LogTable,
    Problem,
    pattern,
)
from dtbench.importers.nccl_text import library_version, name_table
from dtbench.records.read import BadFieldError, convert, decode

# A number, or the text that replaces a missing one: "nan", "N/A".
Shown = float | str | None
_PROGRAM = pattern(r"(?:.*[/\\])?([a-z_]{1,40}?)_perf(?:_mpi)?")


class _Device(Struct, frozen=True):
    rank: Count
    group: Count = 0
    device: Count = 0
    hostname: str = ""
    device_info: str = ""


class _Config(Struct, frozen=True):
    blocking_collectives: str | int = "false"
    devices: tuple[_Device, ...] = ()


class _Times(Struct, frozen=True):
    """Measurements of one buffer placement.

    Attributes:
        time: us per call.
        cpu_time: us per call by the host's clock; -C writes it instead of `time`.
        alg_bw: GB/s.
        bus_bw: GB/s.
        nwrong: number of wrong elements.
    """

    time: Shown = None
    cpu_time: Shown = None
    alg_bw: Shown = None
    bus_bw: Shown = None
    nwrong: Shown = None


class _Iterations(Struct, frozen=True):
    """Times of single iterations in us, each the maximum over all processes."""

    times_us: tuple[float, ...] | None = None
    skipped_iterations: Count = 0


class _Entry(Struct, frozen=True):
    size: Count
    count: Count
    type: str
    redop: str
    root: str | int | None = None
    out_of_place: _Times | None = None
    in_place: _Times | None = None
    out_of_place_per_iter: _Iterations | None = None
    in_place_per_iter: _Iterations | None = None


class _Checked(Struct, frozen=True):
    count: Count | None = None


class _File(Struct, frozen=True):
    version: Literal[1, 2, 3, 4]
    config: _Config
    results: tuple[_Entry, ...]
    args: tuple[str, ...] = ()
    start_time: str = ""
    nccl_version: Count | None = None
    out_of_bounds: _Checked = _Checked()
    average_bus_bandwidth: object = None
    errors: tuple[str, ...] | None = None


def applies(text: str) -> bool:
    """Whether the text is a JSON object, perhaps cut short; text logs never begin like one."""
    return text.lstrip()[:1] == "{" and '"' in text[:4096].split(":", 1)[0]


def read(text: str, log: Log) -> None:
    """Adds the file's table to the log.

    Raises:
        UnreadableRunError: the text is not complete JSON, or not in the format of nccl-tests.
    """
    try:
        file = convert(decode(text.encode("utf-8", "replace")), _File)
        log.tables.append(_table(file))
    except BadFieldError as error:
        raise UnreadableRunError(
            f"{log.name} is not a complete JSON file of nccl-tests (-J): {error}; "
            "if the run was killed, import the text that it printed instead"
        ) from error
    log.failures += [
        Problem(0, f"the file reports: {text.strip()[:160]}") for text in file.errors or () if text.strip()
    ]


def _table(file: _File) -> LogTable:
    table = LogTable(
        "nccl-tests",
        0,
        rows=[_row(entry, index) for index, entry in enumerate(file.results)],
        devices=[
            ListedRank(
                device.rank, device.group, device.hostname[:255], device.device, device.device_info[:120]
            )
            for device in file.config.devices
        ],
        mode="back_to_back" if file.config.blocking_collectives in ("false", "0", 0) else "isolated",
        failed_values=file.out_of_bounds.count,
        ended=file.average_bus_bandwidth is not None,
        started=file.start_time[:40],
    )
    if file.nccl_version is not None and 1000 <= file.nccl_version < 10**6:
        table.versions["nccl"] = library_version(file.nccl_version)
    if program := _PROGRAM.fullmatch(file.args[0][:4096] if file.args else ""):
        name_table(table, program[1])
    return table


def _measurement(times: _Times, in_place: bool) -> LogMeasurement:
    values = {"time": times.time, "algbw": times.alg_bw, "busbw": times.bus_bw, "#wrong": times.nwrong}
    # Numbers are formatted like the tool does (%lf), so that their rounding is known.
    measurement = measurement_of(
        {
            name: f"{value:.6f}" if isinstance(value, float) else value or "N/A"
            for name, value in values.items()
        },
        in_place,
    )
    if times.cpu_time is not None:
        measurement.fail("its times are the host's (cpu_time): run nccl-tests without -C")
    return measurement


def _row(entry: _Entry, index: int) -> LogRow:
    measurements = []
    for times, iterations, in_place in (
        (entry.out_of_place, entry.out_of_place_per_iter, False),
        (entry.in_place, entry.in_place_per_iter, True),
    ):
        if times is not None:
            measurement = _measurement(times, in_place)
            measurements.append(measurement)
            if iterations is not None and (samples := iterations.times_us) and min(samples) > 0:
                skip = iterations.skipped_iterations if iterations.skipped_iterations < len(samples) else 0
                measurement.samples_s = tuple(us * 1e-6 for us in samples[skip:])
    if not measurements:
        raise BadFieldError(f"results[{index}] has neither out_of_place nor in_place")
    text = str(entry.root).strip()
    root = int(text) if is_integer(text) else None
    dtype = DTYPES.get(entry.type, (entry.type[:20], 0))[0]
    # A JSON file has no lines, so rows are numbered instead.
    return LogRow(index + 1, entry.size, entry.count, dtype, entry.redop[:20], root, measurements)
