"""Logs of NCCL's inspector made by hand, with the keys and the order of its inspector_json.cc (NCCL 2.30)."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]

# Bus bandwidth / (bytes in the log / time), written by hand from inspectorComputeOpBw of the plugin's inspector.cc: the
# size of a gathering or scattering collective is one rank's share there.
FACTORS = {
    "AllReduce": lambda n: 2 * (n - 1) / n,
    "AllGather": lambda n: n * (n - 1) / n,
    "ReduceScatter": lambda n: n * (n - 1) / n,
    "Broadcast": lambda n: 1.0,
    "Reduce": lambda n: 1.0,
    "Send": lambda n: 1.0,
    "Recv": lambda n: 1.0,
}


def line(
    coll: str = "AllReduce",
    sn: int = 0,
    size: int = 2**20,
    us: float = 100,
    *,
    rank: int = 0,
    ranks: int = 2,
    comm: str = "0xa1",
    name: str | None = "default_pg:0",
    process: tuple[str, int] | None = None,
    peer: int | None = None,
    verbose: bool = False,
    **fields: Any,
) -> Line:
    """A line of one call; `fields` replace those of the call, without their prefix."""
    prefix = "coll" if peer is None else "p2p"
    host, pid = process or ("node0", 100 + rank)
    gbs = size / 1e9 / (us / 1e6) if us else 0.0
    factor = FACTORS.get(coll, lambda n: 0.0)(ranks)
    call = {
        "": coll,
        "sn": sn,
        "peer": peer,
        "msg_size_bytes": size,
        "exec_time_us": us,
        "timing_source": "kernel_gpu",
        "algobw_gbs": round(gbs * (ranks if coll in ("AllGather", "ReduceScatter") else 1), 6),
        "busbw_gbs": round(gbs * factor, 6),
        **fields,
    }
    if peer is None:
        del call["peer"]
    if verbose:
        events = [{"channel_id": 0, "kernel_start_sn": 3, "kernel_stop_sn": 5, "kernel_record_sn": 4}]
        call["event_trace_sn"] = {f"{prefix}_start_sn": 1, f"{prefix}_stop_sn": 2, "kernel_events": events}
        times = [{"channel_id": 0, "kernel_start_ts": 7, "kernel_stop_ts": 9, "kernel_record_ts": 9}]
        call["event_trace_ts"] = {f"{prefix}_start_ts": 5, f"{prefix}_stop_ts": 6, "kernel_events": times}
    keys = {key: key if key.startswith("event_trace") else f"{prefix}_{key}".rstrip("_") for key in call}
    header = {"id": comm, "comm_name": name, "rank": rank, "n_ranks": ranks, "nnodes": 1}
    if name is None:
        del header["comm_name"]
    return {
        "header": header,
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": 1748030377748202,
            "hostname": host,
            "pid": pid,
        },
        f"{prefix}_perf": {keys[key]: value for key, value in call.items()},
    }


def text_of(lines: Iterable[Line]) -> bytes:
    return b"".join(json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in lines)


def write(folder: Path, lines: Sequence[Line], name: str = "", *, packed: bool = False) -> Path:
    """Writes a log under the name that the plugin gives it."""
    metadata = lines[0]["metadata"]
    path = folder / (name or f"{metadata['hostname']}-pid{metadata['pid']}.log{'.gz' * packed}")
    text = text_of(lines)
    path.write_bytes(gzip.compress(text) if packed else text)
    return path


def of_all_kinds() -> bytes:
    """A log with a line of each kind, for two ranks of two communicators."""
    return text_of(
        line(
            function, sn, rank=0, comm=comm, peer=1 if function in ("Send", "Recv") else None, verbose=sn == 1
        )
        for comm in ("0xa1", "0xb2")
        for function in FACTORS
        for sn in range(3)
    )


def job(folder: Path, calls: int = 10, late: int = 2, **fields: Any) -> list[Path]:
    """Writes the logs of 4 ranks on a mesh dp x tp of 2 x 2. The rank `late` arrives 40 us after the others.

    A call takes 200 us without waiting. Each rank makes 1 + 2 x `calls` calls.
    """
    paths = []
    for rank in range(4):
        dp, tp = divmod(rank, 2)
        process = (f"node{dp}", 100 + rank)
        lines = [line("AllReduce", 0, 8192, 20, rank=rank, ranks=4, process=process, **fields)]
        for name, comm, member, has_late, coll, size in (
            ("mesh_dp:2", f"0xd{tp}", dp, tp == late % 2, "ReduceScatter", 2**22),
            ("mesh_tp:1", f"0xe{dp}", tp, dp == late // 2, "AllReduce", 2**24),
        ):
            us = 240 if has_late and rank != late else 200
            options = {"rank": member, "comm": comm, "process": process, "name": name} | fields
            lines += [line(coll, sn, size, us, **options) for sn in range(calls)]
        paths.append(write(folder, lines))
    return paths
