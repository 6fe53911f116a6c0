"""Kineto traces made by hand: events of one rank, times in us."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def event(name: str, ts: Any, dur: Any, cat: str, tid: Any = 1, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(ts: float, dur: float, name: str = "gemm", stream: int = 7, **args: Any) -> Event:
    return event(name, ts, dur, "kernel", stream, stream=stream, **args)


def nccl(ts: float, dur: float, name: str = "all_reduce", elements: int = 1000, **args: Any) -> Event:
    """A kernel of NCCL that says all of itself, over ranks 0 and 1."""
    described = {
        "Collective name": name,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "dtype": "Float",
        "Group size": 2,
        "Process Group Name": "1",
        "Process Group Ranks": "[0, 1]",
    }
    return kernel(ts, dur, "ncclDevKernel_Generic(x)", 20, **described | args)


def launch(ts: float, correlation: int) -> Event:
    return event("cudaLaunchKernel", ts, 1, "cuda_runtime", 1, correlation=correlation)


def op(name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    return event(name, ts, dur, "cpu_op", tid, **args)


def note(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    return event(name, ts, dur, "user_annotation", tid)


def steps(count: int, us: float = 1000.0, name: str = "ProfilerStep#") -> list[Event]:
    return [note(f"{name}{n}", n * us, us) for n in range(count)]


def gloo(
    ts: float, dur: float, name: str = "allreduce", tid: int = 50, late: float = 5, **args: Any
) -> list[Event]:
    """A call of c10d and what carries it, `late` us later; shapes [[1000]] of floats."""
    of_call = {"Input Dims": [[[1000]]], "Input type": ["TensorList"]} | args
    of_transfer = {"Input Dims": [[1000]], "Input type": ["float"]} | args
    kind = {"allreduce": "all_reduce", "allgather": "all_gather"}.get(name, name)
    return [
        op(f"c10d::{name}_", ts, late, **of_call),
        event(f"gloo:{kind}", ts + late, dur, "user_annotation", tid, **of_transfer),
    ]


def header(rank: int = 0, world: int = 2, groups: Sequence[Event] | None = None, **more: Any) -> Event:
    dp = {"pg_name": "1", "pg_desc": "mesh_dp", "pg_size": world, "ranks": list(range(world))}
    info = {"backend": "nccl", "rank": rank, "world_size": world}
    return {
        "schemaVersion": 1,
        "distributedInfo": info | {"pg_config": [dp] if groups is None else groups},
    } | more


def text_of(events: Sequence[Event], head: Event | None = None, **tail: Any) -> bytes:
    """Returns a trace as Kineto writes it, including the fields after the events."""
    document = (header() if head is None else head) | {"traceEvents": events} | {"traceName": "x.json"} | tail
    return json.dumps(document, indent=1).encode()


def write(folder: Path, events: Sequence[Event], rank: int = 0, *, packed: bool = False, **more: Any) -> Path:
    path = folder / f"rank{rank}.json{'.gz' * packed}"
    text = text_of(events, header(rank, **more))
    path.write_bytes(gzip.compress(text) if packed else text)
    return path


def of_all_kinds() -> bytes:
    """A trace with an event of each kind."""
    events = [
        *steps(3),
        launch(1, 1),
        launch(5, 2),
        kernel(30, 10, correlation=1),
        nccl(40, 20, correlation=2, Seq=1),
        event("nccl:x", 40, 20, "gpu_user_annotation", 20, **{"External id": 3}),
        op("record_param_comms", 3, 4, **{"External id": 3, "Collective name": "allreduce"}),
        *gloo(100, 20),
        event("Memcpy", 50, 3, "gpu_memcpy"),
        nccl(1040, 20),
        nccl(2040, 20),
        event("PyTorch Profiler (0)", 0, 3000, "Trace"),
    ]
    return text_of(events, header(host_name="node", baseTimeNanoseconds=1_700_000_000_000_000_000))
