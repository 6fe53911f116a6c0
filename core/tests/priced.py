"""Meshes, specs and topologies with made-up constants, for the tests of prices."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtbench_core.cost.topology import SENDING
from dtbench_core.layout.placement import Partial, Placement, Replicate
from dtbench_core.layout.spec import DTensorSpec

# 512 KiB: large enough that an exchange beats gathering everything, too small for a detour to pay.
SHAPE = (128, 64, 16)
R, P = Replicate(), Partial()
CHANGES = [*SENDING, "R->S(0)", "R->S(1)"]


def dp_tp() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def spec(mesh: DeviceMesh, *placements: Placement, dtype: torch.dtype = torch.float32) -> DTensorSpec:
    return DTensorSpec.of(mesh, placements, SHAPE, torch.empty(SHAPE).stride(), dtype)


def topology(**changes: Any) -> dict[str, Any]:
    """A valid topology of dp=2, tp=4; `dp__ranks=3` changes a field of a dim, `schema=1` one of the file."""
    dims = {
        "dp": {"name": "dp", "ranks": 2, "bandwidth_GiBps": 0.5, "latency_us_per_hop": 40},
        "tp": {"name": "tp", "ranks": 4, "bandwidth_GiBps": 2.0, "latency_us_per_hop": 10.0},
    }
    fields: dict[str, Any] = {
        "kind": "topology",
        "schema": 1,
        "device_type": "cpu",
        "base_latency_us": 6.6,
        "dims": list(dims.values()),
    }
    for key, value in changes.items():
        dim, _, field = key.partition("__")
        if field:
            dims[dim][field] = value
        else:
            fields[key] = value
    return fields


def table(*rows: tuple[int, float]) -> dict[str, Any]:
    """A curve as a topology file holds it."""
    return {"table": [{"size_bytes": size, "time_us": us} for size, us in rows]}


def measured(**changed: Any) -> dict[str, Any]:
    """The topology with every change of placement measured on both mesh dims: 100 us at any size, except
    as `changed` says: `tp_SR=table(...)`."""
    priced = topology()
    short = {name.replace("(", "").replace(")", "").replace("->", ""): name for name in CHANGES}
    for dim in priced["dims"]:
        own = {}
        for key, name in short.items():
            own[name] = changed.get(f"{dim['name']}_{key}", table((1024, 100.0), (2**30, 100.0)))
        dim["transitions"] = {"core": own, "torch": {}}
    return priced
