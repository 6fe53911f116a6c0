"""The JSON that nccl-tests writes with -J (versions 1 to 4 of its file).

Its `env` is the whole environment of the process, with users, paths and tokens in it, and its `args`
hold paths: of neither is anything taken over but the program's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dtbench.errors import UnreadableRunError
from dtbench.files.read import BadFieldError, decode, shown
from dtbench.importers.model import Device, Figure, Log, Printed, Problem, Row, Table
from dtbench.importers.nccl_text import DTYPES, library_version, name_table
from dtbench.importers.text import pattern

_PROGRAM = pattern(r"(?:.*[/\\])?([a-z_]{1,40}?)_perf(?:_mpi)?")
_VERSIONS = (1, 2, 3, 4)
# %lf prints six decimals.
_HALF = 0.5e-6


def applies(text: str) -> bool:
    """Whether the text is one JSON object, whole or cut: no log of text begins like that."""
    return text.lstrip()[:1] == "{" and '"' in text[:4096].split(":", 1)[0]


def read(text: str, log: Log) -> None:
    """Adds the table of a file to its log.

    Raises:
        UnreadableRunError: no JSON, cut short, or not what nccl-tests writes.
    """
    try:
        made = decode(text.encode("utf-8", "replace"))
        log.tables.append(_Reader(log).table(made))
    except (BadFieldError, _Foreign) as error:
        raise UnreadableRunError(
            f"{log.name} is not a whole JSON file of nccl-tests (-J): {error}; "
            "if the run was killed, give the text it printed instead"
        ) from error


class _Foreign(Exception):  # noqa: N818 - becomes an UnreadableRunError that names the file
    """A field that is missing or of the wrong type."""


class _Reader:
    def __init__(self, log: Log) -> None:
        self.log = log

    def table(self, made: Mapping[str, Any]) -> Table:
        version = made.get("version")
        if "results" not in made or "config" not in made:
            raise _Foreign("it has no results and config")
        if version not in _VERSIONS or isinstance(version, bool):
            raise _Foreign(f"its version is {shown(version)}, expected {_VERSIONS[0]} to {_VERSIONS[-1]}")
        config = _object(made["config"], "config")
        table = Table("nccl-tests", 0, redop_column=True, ended="average_bus_bandwidth" in made)
        table.iterations = _count_or_none(config.get("iterations"))
        table.mode = (
            "isolated"
            if str(config.get("blocking_collectives", "false")) not in ("false", "0")
            else "back_to_back"
        )
        table.devices = [_device(entry) for entry in _list(config.get("devices", []), "config.devices")]
        started = made.get("start_time")
        table.started = started[:40] if isinstance(started, str) else ""
        library = made.get("nccl_version")
        if isinstance(library, int) and not isinstance(library, bool) and 1000 <= library < 10**6:
            table.versions["nccl"] = library_version(library)
        self._name(table, made.get("args"))
        # The file does not say over how many threads; their per-process times are one rank's only
        # where a process has one GPU.
        one_each = config.get("nthreads") == 1 and config.get("ngpus") == 1
        for index, entry in enumerate(_list(made["results"], "results")):
            table.rows.append(_row(_object(entry, f"results[{index}]"), index, one_each))
        self._summary(table, made)
        return table

    def _name(self, table: Table, args: Any) -> None:
        first = args[0] if isinstance(args, list) and args else None
        match = _PROGRAM.fullmatch(first) if isinstance(first, str) and len(first) < 4096 else None
        if match:
            name_table(table, match[1])

    def _summary(self, table: Table, made: Mapping[str, Any]) -> None:
        bad = made.get("out_of_bounds")
        if isinstance(bad, dict):
            table.failed_values = _count_or_none(bad.get("count"))
        average = made.get("average_bus_bandwidth")
        if isinstance(average, dict) and _is_number(average.get("bandwidth")):
            table.average_busbw = Printed(float(average["bandwidth"]) * 1e9, _HALF * 1e9)
        for text in made.get("errors") or []:
            if isinstance(text, str) and text.strip():
                self.log.failures.append(Problem(0, f"the file says: {text.strip()[:160]}"))


def _device(entry: Any) -> Device:
    device = _object(entry, "config.devices[]")
    host, name = device.get("hostname"), device.get("device_info")
    return Device(
        rank=_count(device.get("rank"), "rank"),
        group=_count(device.get("group", 0), "group"),
        host=host[:255] if isinstance(host, str) else "",
        index=_count(device.get("device", 0), "device"),
        name=name[:120] if isinstance(name, str) else "",
        pid=_count(device.get("pid", 0), "pid"),
    )


def _row(entry: Mapping[str, Any], index: int, one_each: bool) -> Row:
    where = f"results[{index}]"
    kind, redop = entry.get("type"), entry.get("redop")
    if not isinstance(kind, str) or not isinstance(redop, str):
        raise _Foreign(f"{where} has no type and redop")
    root = entry.get("root")
    if isinstance(root, str) and re.fullmatch(r"\s*-?[0-9]{1,9}\s*", root):
        root = int(root)
    row = Row(
        index + 1,  # rows stand for lines here
        _count(entry.get("size"), f"{where}.size"),
        _count(entry.get("count"), f"{where}.count"),
        DTYPES.get(kind, (kind[:20], 0))[0],
        redop[:20],
        root if isinstance(root, int) and not isinstance(root, bool) else None,
        [],
    )
    for key, in_place in (("out_of_place", False), ("in_place", True)):
        if isinstance(entry.get(key), dict):
            figure = _figure(entry[key], in_place)
            _iterations(figure, entry.get(f"{key}_per_iter"), one_each)
            row.figures.append(figure)
    if not row.figures:
        raise _Foreign(f"{where} has neither out_of_place nor in_place")
    return row


def _figure(entry: Mapping[str, Any], in_place: bool) -> Figure:
    time, algbw, busbw = (_printed(entry.get(key)) for key in ("time", "alg_bw", "bus_bw"))
    figure = Figure(
        in_place, time and time.scaled(1e-6), algbw and algbw.scaled(1e9), busbw and busbw.scaled(1e9)
    )
    if (time is None and "cpu_time" not in entry) or algbw is None or busbw is None:
        figure.fail("it has no number for time, alg_bw or bus_bw")
    wrong = entry.get("nwrong")
    if wrong is not None and _is_number(wrong):
        figure.wrong = float(wrong)
    elif wrong is not None:
        figure.fail(f"its nwrong is {shown(wrong)}", wrong_data=True)
    return figure


def _iterations(figure: Figure, entry: Any, one_each: bool) -> None:
    """The times of single iterations, each the longest over the processes."""
    if not isinstance(entry, dict):
        return
    times = _times(entry.get("times_us"))
    if not times:
        return
    skip = entry.get("skipped_iterations", 0)
    skip = skip if isinstance(skip, int) and 0 <= skip < len(times) else 0
    figure.samples_s = times[skip:]
    per_process = entry.get("per_process_max_times_us")
    if one_each and isinstance(per_process, list):
        ranks = [_times(process) for process in per_process]
        if all(len(process) == len(times) for process in ranks):
            figure.rank_samples_s = {str(rank): process[skip:] for rank, process in enumerate(ranks)}


def _times(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(_is_number(v) and v > 0 for v in values):
        return ()
    return tuple(float(v) * 1e-6 for v in values)


def _printed(value: Any) -> Printed | None:
    return Printed(float(value), _HALF) if _is_number(value) and value >= 0 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _count_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _Foreign(f"{name} is {shown(value)}, expected a whole number")
    return value


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Foreign(f"{name} is {shown(value)}, expected an object")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Foreign(f"{name} is {shown(value)}, expected a list")
    return value
