"""Reads the logs of NCCL's inspector plugin: what the collectives of a running job reach, without a trace.

The plugin writes a JSON line for each call of each communicator (NCCL's plugins/profiler/inspector/inspector_json.cc,
formats v4.0 to v4.2). A line has the time in the kernel, which includes waiting for other ranks. It lacks dtype, steps
and computation.

A call has the same number on all ranks of its communicator. NCCL numbers each collective of a communicator separately
(ncclProfilerStartTaskEvents in NCCL's src/plugin/profiler.cc). The rank with the shortest time arrived last, so its
time is the transfer without waiting.
"""

import math
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pandas as pd

from dtbench.errors import UnreadableRunError, UsageError
from dtbench.fields import Amount, Count, Real, Whole
from dtbench.records.job import Collective, Job, RankJob
from dtbench.records.read import read_lines
from dtbench.traces.communication import SYNCHRONIZING, bus_bandwidth, name_mesh_dim, parse_collective
from dtbench.traces.kineto import printable

EXPECTED = "JSON lines of NCCL's inspector (NCCL_INSPECTOR_ENABLE=1, without NCCL_INSPECTOR_PROM_DUMP)"
# A verbose line lists at most 64 channels (MAX_CHANNELS in the plugin's inspector.h) with some 200 bytes each.
_MAX_LINE_BYTES, _MAX_LOG_BYTES, _MAX_DAMAGED_LINES = 2**20, 64 * 2**30, 100_000
# Functions of NCCL whose size in the log is that of the tensor, and those where it is a rank's share of it
# (inspectorComputeOpBw in the plugin's inspector.cc).
_WHOLE, _SHARED = ["AllReduce", "Broadcast", "Reduce", "Send", "Recv"], ["AllGather", "ReduceScatter"]
# Fields of a call. Their keys in the log begin with "coll_" or "p2p_"; that of the function is "coll" or "p2p".
_CALL_FIELDS: Sequence[Any] = [
    ("function", str),
    ("sn", Annotated[int, msgspec.Meta(ge=0, le=2**48)]),
    ("msg_size_bytes", Amount),
    ("exec_time_us", Annotated[float, msgspec.Meta(ge=0, le=1e12)]),
    ("timing_source", str, "unknown"),
    ("busbw_gbs", Real, math.nan),
    ("peer", int, -1),
]


def _call_struct(prefix: str) -> type[msgspec.Struct]:
    """Returns the struct of a call whose keys have the prefix."""
    keys = {name: f"{prefix}_{name}" for name, *_ in _CALL_FIELDS} | {"function": prefix}
    return msgspec.defstruct(prefix, _CALL_FIELDS, rename=keys.get)


# The communicator of a call. Its `id` is the same on all its ranks; its name is missing before NCCL 2.30.
_HEADER_FIELDS: Sequence[Any] = [
    ("id", str),
    ("rank", Count),
    ("n_ranks", Whole),
    ("comm_name", str, "unknown"),
]
_LINE_FIELDS: Sequence[Any] = [
    ("header", msgspec.defstruct("Header", _HEADER_FIELDS)),
    ("metadata", msgspec.defstruct("Metadata", [("hostname", str), ("pid", Count)])),
    ("coll_perf", _call_struct("coll") | None, None),
    ("p2p_perf", _call_struct("p2p") | None, None),
]
_LINE = msgspec.json.Decoder[Any](msgspec.defstruct("Line", _LINE_FIELDS))


def read_logs(files: Sequence[Path]) -> Job:
    """Reads the logs of the processes of a job.

    Raises:
        UsageError: the logs do not show which GPU made which call.
        UnreadableRunError: a file is no log of the inspector, or no file has a call.
    """
    numbers, notes = dict[tuple[Any, ...], int](), Counter[str]()
    # 40 bytes a call, since a log may have millions of lines. `caller` is an index of `callers`.
    columns = [array(code) for code in "qqddd"]
    for file in files:
        for caller, *values in _read_log(file, notes):
            for column, value in zip(
                columns, (numbers.setdefault(caller, len(numbers)), *values), strict=True
            ):
                column.append(value)
    if not numbers:
        raise UnreadableRunError(f"no calls in {', '.join(map(str, files[:3]))}: expected {EXPECTED}")
    callers = pd.DataFrame(
        [*numbers],
        columns=["id", "name", "group_size", "process", "log", "member", "function", "clock", "to_itself"],
    )
    callers["rank"] = _global_ranks(callers, notes)
    callers["mesh_dim"] = _mesh_dims(callers)
    callers["collective"] = callers["function"].map(parse_collective)
    calls = pd.DataFrame(dict(zip(("caller", "sn", "bytes", "s", "busbw"), columns, strict=True)))
    collectives = _collectives(_check(calls, callers, notes), callers)
    ranks = callers.drop_duplicates("rank").sort_values("rank")
    world_size = max(len(ranks), int(callers["group_size"].max()))
    return Job(
        label=files[0].parent.name,
        world_size=world_size,
        backend="nccl",
        ranks=tuple(
            RankJob(
                rank=rank,
                source=log,
                host=printable(process[0]),
                span_s=None,
                computation_s=None,
                communication_s=None,
                exposed_s=None,
                copy_s=None,
                idle_s=None,
            )
            for rank, log, process in zip(ranks["rank"], ranks["log"], ranks["process"], strict=True)
        ),
        collectives=tuple(sorted(collectives, key=lambda row: (row.rank, -row.time_s))),
        notes=(
            *[f"have logs of {len(ranks)} of {world_size} ranks"] * (len(ranks) < world_size),
            *(f"{text}: {count}" for text, count in notes.items() if count),
        ),
    )


def _read_log(path: Path, notes: Counter[str]) -> Iterator[tuple[Any, ...]]:
    """Yields of each call in a log, plain or gzip: caller, number, bytes, seconds, and bus bandwidth in bytes/s.

    The caller has what many calls share: hash, name and size of the communicator; process, name of the log, rank in the
    communicator; NCCL's function, the clock that timed it, and whether a rank sends to itself.

    Args:
        notes: text -> number of calls or lines that it applies to. This function adds to it.

    Raises:
        UnreadableRunError: the file cannot be read, or too few of its lines are the inspector's.
    """
    number = valid = 0
    try:
        for number, data in read_lines(path, EXPECTED, _MAX_LOG_BYTES, _MAX_LINE_BYTES, allow_gzip=True):
            if number - valid > _MAX_DAMAGED_LINES:
                break
            with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
                line = _LINE.decode(data)
                valid += 1
                if call := line.coll_perf or line.p2p_perf:  # later formats also have lines of statistics
                    header, process = line.header, (line.metadata.hostname, line.metadata.pid)
                    member = (header.id, header.comm_name, header.n_ranks, process, path.name, header.rank)
                    caller = (*member, call.function, call.timing_source, call.peer == header.rank)
                    yield caller, call.sn, call.msg_size_bytes, call.exec_time_us / 1e6, call.busbw_gbs * 1e9
    except (EOFError, zlib.error):
        notes["compressed logs whose end is missing or damaged"] += 1
    if number - valid > (_MAX_DAMAGED_LINES if valid else 0):
        raise UnreadableRunError(
            f"{path} is no log of NCCL's inspector: {number - valid} of {number} lines are damaged or of another kind; "
            f"expected {EXPECTED}"
        )
    notes["excluded damaged or torn lines"] += number - valid


def _global_ranks(callers: pd.DataFrame, notes: Counter[str]) -> "pd.Series[int]":
    """Returns the global rank of each caller.

    The widest communicators show it if each process has one rank in them, and no two the same. Otherwise, the processes
    are numbered.
    """
    if callers["id"].nunique() == 1:
        return callers["member"]
    if callers.drop_duplicates(["process", "id", "member"]).duplicated(["process", "id"]).any():
        raise UsageError(
            "a process has several ranks of a communicator, and there are several communicators: the logs do not show "
            "which GPU made a call; expected one process for each GPU"
        )
    widest = callers["group_size"] == callers["group_size"].max()
    world = callers[widest].drop_duplicates(["process", "member"])
    ranks = {process: number for number, process in enumerate(sorted({*callers["process"]}))}
    if sorted(world["process"]) == [*ranks] and world["member"].is_unique:
        ranks = dict(zip(world["process"], world["member"], strict=True))
    else:
        notes["ranks numbered by host and process ID, since no communicator shows their global ranks"] = len(
            ranks
        )
    return callers["process"].map(ranks)


def _mesh_dims(callers: pd.DataFrame) -> list[str]:
    """Returns the mesh dim of each caller's communicator.

    torch names communicators "DESCRIPTION:NAME", such as "mesh_tp:5" (pytorch#192487, August 2026). torch 2.13 gives
    them no name; they are then named by their ranks, if the logs of all of them are present.
    """
    ranks = {id_: sorted({*members}) for id_, members in callers.groupby("id")["rank"]}
    return [
        name_mesh_dim(
            re.sub(r":[^:]*$", "", name.removeprefix("unknown")),
            ranks[id_] if len(ranks[id_]) == size else None,
            size,
        )
        for id_, name, size in zip(callers["id"], callers["name"], callers["group_size"], strict=True)
    ]


def _check(calls: pd.DataFrame, callers: pd.DataFrame, notes: Counter[str]) -> pd.DataFrame:
    """Removes repeated and unusable calls, converts sizes to the larger of input and output, and adds `transfer_s`.

    `transfer_s` is the shortest time of a call over all ranks of its communicator. It is nan unless all of them logged
    the call, and for broadcasts and reductions to one rank, which a rank may leave before others arrive.

    Args:
        calls: `caller` (index of `callers`), number, and what the log shows: bytes, seconds, bus bandwidth.
        notes: text -> number of calls that it applies to. This function adds to it.
    """
    # Sends and receives of a communicator are numbered together.
    numbered = callers["collective"].mask(callers["collective"].isin(["send", "recv"]), "p2p")
    is_synchronizing, names = callers["collective"].isin(SYNCHRONIZING), callers["function"]
    per_caller = {
        "communicator": callers.groupby(["id", numbered]).ngroup(),
        "series": callers.groupby(["rank", "id", numbered]).ngroup(),
        "needed": callers["group_size"].where(is_synchronizing, math.inf),
        "to_itself": callers["to_itself"],
        "is_on_gpu": callers["clock"] == "kernel_gpu",
        "shares": callers["group_size"].where(names.isin(_SHARED), names.isin(_WHOLE)),
        "factor": pd.Series(
            bus_bandwidth(collective, size, 1, 1.0) or 0.0
            for collective, size in zip(callers["collective"], callers["group_size"], strict=True)
        ),
    }
    calls = calls.assign(**{name: column.to_numpy()[calls["caller"]] for name, column in per_caller.items()})
    first = calls.drop_duplicates(["series", "sn"])
    numbers, is_timed = first.groupby("series")["sn"], first["s"] > 0
    timed = first[is_timed & ~first["to_itself"]]
    same_call = timed.groupby(["communicator", "sn"])["s"]
    is_complete = same_call.transform("size") == timed["needed"]
    # The bus bandwidth in the log has 6 decimals of a GB/s, and the time behind it is in whole microseconds.
    bytes_ = timed["bytes"] * timed["shares"]
    busbw = bytes_ * timed["factor"] / timed["s"]
    contradicts = (timed["busbw"] - busbw).abs() > busbw * 1e-6 / timed["s"] + 1e3
    # The plugin takes -1 for the size of a dtype that it does not know (NCCL's uint8), so the size is 2^64 - count.
    has_size = bytes_.between(1, 2**53) & ~contradicts
    counts = {
        "excluded lines that repeat a call, since a log counts once": len(calls) - len(first),
        "excluded calls with a time of 0, which is unknown or below 1 µs": (~is_timed).sum(),
        "excluded sends and receives of a rank to itself, which use no link": first["to_itself"].sum(),
        "calls not timed by the GPU, whose times may include delays of the host": (~timed["is_on_gpu"]).sum(),
        "calls of unknown size, since the plugin does not know their dtype or collective, or its bus bandwidth "
        "contradicts size and time": (~has_size).sum(),
        "calls missing between the first and the last of their kind, which are smaller than "
        "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES (default 8 KiB) or were dropped, since the plugin keeps a limited number "
        "between two dumps": (numbers.max() - numbers.min() + 1).sum() - len(first),
        "collectives without a time without waiting, since not all ranks of their communicator logged them": (
            (~is_complete & (timed["needed"] < math.inf)).sum()
        ),
    }
    notes.update({text: int(count) for text, count in counts.items()})
    return timed.assign(
        bytes=(bytes_ // 1).where(has_size),  # whole bytes, even if the log is damaged
        transfer_s=same_call.transform("min").where(is_complete),
    )


def _collectives(calls: pd.DataFrame, callers: pd.DataFrame) -> Iterator[Collective]:
    """Yields the calls of each rank by kind."""
    kind = ["rank", "mesh_dim", "collective", "group_size"]
    figures = {
        "caller": ("caller", "first"),
        "count": ("s", "size"),
        "time_s": ("s", "sum"),
        "median_s": ("s", "median"),
        "best_s": ("s", "min"),
        "transfer_s": ("transfer_s", "mean"),
    }
    kinds = callers.groupby(kind).ngroup().to_numpy()[calls["caller"]]
    rows = calls.groupby([kinds, "bytes"], dropna=False).agg(**figures).reset_index("bytes")
    rows = rows.join(callers[kind], on="caller").drop(columns="caller").astype({"bytes": "Int64"})
    for row in rows.astype(object).where(rows.notna(), None).to_dict("records"):
        mean_s = row["time_s"] / row["count"]
        busbw = bus_bandwidth(row["collective"], row["group_size"], row["bytes"], mean_s)
        yield Collective(**{str(name): value for name, value in row.items()}, busbw=busbw)
