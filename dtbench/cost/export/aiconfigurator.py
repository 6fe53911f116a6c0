"""`dtbench export --to aiconfigurator`: a folder for --systems-paths, with the times of NCCL's collectives.

aiconfigurator (ai-dynamo) looks a collective up by its dtype, number of GPUs and elements. Between two sizes it
interpolates linearly, as the calibrated curve does (perf_database/communication.rs in
aic-core/rust/aiconfigurator-core/src, @095f58a). Sizes are those of nccl-tests, whose output its collector reads
(collector/network/collect_nccl.py).
"""

import io
import math
import re
from collections.abc import Iterator, Sequence

from dtbench.cost.export.module import render_template
from dtbench.cost.export.system import (
    bandwidth_between_hosts,
    bandwidth_inside,
    hosts_per_group,
    measured_system,
)
from dtbench.cost.export.targets import Export, ExportRequest
from dtbench.cost.plan.machines import find_machine
from dtbench.errors import UsageError
from dtbench.records.topology import Dim

# Name of the GPU, as in aiconfigurator's own nccl_perf.parquet -> name of aiconfigurator's system, and the machine of
# `dtbench plan` that has the GPU's peaks, which a topology lacks.
SYSTEMS = {
    "NVIDIA A100-SXM4-80GB": ("a100_sxm", "a100-8x"),
    "NVIDIA H100 80GB HBM3": ("h100_sxm", "h100-8x"),
    "NVIDIA H200": ("h200_sxm", "h200-8x"),
    "NVIDIA B200": ("b200_sxm", "b200-8x"),
    "NVIDIA B300 SXM6 AC": ("b300_sxm", "b300-8x"),
    "NVIDIA GB200": ("gb200", "gb200"),
    "NVIDIA GB300": ("gb300", "gb300"),
    "NVIDIA L40S": ("l40s", "l40s-8x"),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("rtx_pro_6000_server", "rtx-pro-6000-8x"),
}
# Collective -> its name in aiconfigurator.
OPERATIONS = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "alltoall",
    "reduce_scatter": "reduce_scatter",
}
DTYPE_BYTES = {"half": 2, "int8": 1}  # the dtypes of aiconfigurator's tables
# Beyond the table, aiconfigurator scales times in proportion to the size. Sizes from one element to 1 TiB, whose times
# are extrapolated by the curve, avoid that.
LARGEST_BYTES = 2**40
COLUMNS = (
    "framework",
    "version",
    "device",
    "op_name",
    "kernel_source",
    "nccl_dtype",
    "num_gpus",
    "message_size",  # elements
    "latency",  # milliseconds
)
# aiconfigurator's record of where a table comes from (collection_meta.yaml, schema 1).
META = """schema_version: 1
provenance: collected
runtime:
  framework: nccl
  version: '{version}'
tables:
  nccl_perf:
    status: complete
"""
# "2.29.2+cuda13.2" -> "2.29.2"; the version becomes the name of a folder.
NCCL_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}")


def render(request: ExportRequest) -> Export:
    """Returns the files of the folder.

    Raises:
        UsageError: the GPU, the hosts or NCCL's version are unknown, no dim lies inside a host, or pyarrow is missing.
    """
    topology = request.topology
    system = measured_system(topology, "aiconfigurator")
    if system.gpu not in SYSTEMS:
        raise UsageError(
            f"aiconfigurator models {', '.join(SYSTEMS)}; the topology was measured on "
            f"{system.gpu or f'a {topology.device_type} without a recorded GPU name'}"
        )
    if system.host_dim is None:
        raise UsageError(
            "aiconfigurator needs the bandwidth inside a host, but every mesh dim of the topology crosses hosts: "
            "measure a mesh with a dim inside hosts"
        )
    matches = (NCCL_VERSION.match(run.versions.get("nccl") or "") for run in topology.runs)
    if (version := next((match[0] for match in matches if match), None)) is None:
        raise UsageError(
            "aiconfigurator needs the version of NCCL, which the topology does not record: calibrate a run with NCCL"
        )
    name, machine = SYSTEMS[system.gpu]
    # Number of GPUs -> the first dim with so many ranks, whose groups are on as few hosts as possible.
    exported = {
        dim.ranks: dim
        for dim in reversed(topology.dims)
        if hosts_per_group(dim) == math.ceil(dim.ranks / system.gpus_per_host)
    }
    spec = render_template(
        request,
        "aiconfigurator.yaml",
        name=name,
        machine=find_machine(machine),
        system=system,
        version=version,
        host_GBps=bandwidth_inside(system.host_dim),
        network_GBps=system.network_dim and bandwidth_between_hosts(system.network_dim),
    )
    rows = [
        ("dtbench", version, system.gpu, operation, source, dtype, ranks, elements, time_ms)
        for ranks, dim in exported.items()
        for operation, source, dtype, elements, time_ms in _times(dim)
    ]
    folder = f"data/{name}/comm/nccl/{version}"
    files = {
        f"{name}.yaml": spec.encode(),
        f"{folder}/nccl_perf.parquet": _parquet(rows),
        f"{folder}/collection_meta.yaml": META.format(version=version).encode(),
    }
    return Export(
        files,
        tuple(
            f"not exported: {dim.name}, since aiconfigurator has one table per number of GPUs, on as few hosts as "
            "possible"
            for dim in topology.dims
            if dim not in exported.values()
        ),
    )


def _times(dim: Dim) -> Iterator[tuple[str, str, str, int, float]]:
    """Yields operation, source of the time, dtype, elements and milliseconds."""
    for collective, curve in dim.collectives.items():
        if collective not in OPERATIONS:
            continue
        times = curve.columns["time_us"]
        for dtype, itemsize in DTYPE_BYTES.items():
            for size in (itemsize, *times.sizes, LARGEST_BYTES):
                source = "NCCL" if times.sizes[0] <= size <= times.sizes[-1] else "extrapolated"
                elements = max(1, size // itemsize)
                yield OPERATIONS[collective], source, dtype, elements, times.us(elements * itemsize) / 1e3


def _parquet(rows: Sequence[tuple[object, ...]]) -> bytes:
    import pandas as pd

    content = io.BytesIO()
    try:
        pd.DataFrame(rows, columns=COLUMNS).to_parquet(content, engine="pyarrow", index=False)
    except ImportError as error:
        raise UsageError(
            "aiconfigurator reads Parquet, which needs pyarrow to be written: pip install pyarrow"
        ) from error
    return content.getvalue()
