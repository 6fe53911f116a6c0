"""`dtbench export --to autoparallel`: the arguments of autoparallel's `NCCLTopoConfig`.

autoparallel models NCCL's algorithms from one bandwidth inside hosts and one between hosts
(autoparallel/cost_models/nccl_cost_model.py, meta-pytorch/autoparallel @a54c252).
"""

import math
import re

from dtbench.cost.export.module import render_module
from dtbench.cost.export.targets import Export, ExportRequest
from dtbench.errors import UsageError
from dtbench.records.topology import CalibratedTopology, Dim

# GPU -> member of autoparallel's GpuArch. autoparallel's own values for bandwidths that were not measured, GB/s per GPU
# inside a host and between hosts, are those of its functions a100_topo_config, h100_topo_config and gb200_topo_config.
ARCHITECTURES = {"A100": "AMPERE", "H100": "HOPPER", "H200": "HOPPER", "B200": "BLACKWELL"}
DEFAULT_BANDWIDTHS = {"AMPERE": (87.7, 25.0), "HOPPER": (320.0, 50.0), "BLACKWELL": (640.0, 50.0)}
# Latencies of a hop that autoparallel assumes for rings of the LL protocol, us (_HW_LAT_NVLINK, _HW_LAT_NET).
HOP_INSIDE_US, HOP_BETWEEN_US = 0.6, 2.7
GB_PER_GIB = 2**30 / 1e9


def render(request: ExportRequest) -> Export:
    """Returns a module that defines the `NCCLTopoConfig`.

    Raises:
        UsageError: the GPU, its hosts or the layout of a dim on them is unknown, or autoparallel does not model it.
    """
    topology = request.topology
    gpu, model = _gpu(topology)
    hosts = max((run.hosts for run in topology.runs), default=0)
    ranks = math.prod(topology.mesh.shape)
    if not hosts or ranks % hosts:
        raise UsageError(
            f"autoparallel needs hosts with the same number of GPUs: the topology has {ranks} ranks on "
            f"{hosts or 'an unknown number of'} hosts"
        )
    if unknown := [dim.name for dim in topology.dims if dim.layout.kind is None]:
        raise UsageError(
            f"the topology does not record whether groups of {', '.join(unknown)} cross hosts: "
            "calibrate a run that records its hosts"
        )
    arch, per_host = ARCHITECTURES[model], ranks // hosts
    inside, between = DEFAULT_BANDWIDTHS[arch]
    arguments: dict[str, tuple[object, str]] = {
        "num_nodes": (hosts, "hosts"),
        "gpus_per_node": (per_host, "ranks per host"),
        "bw_intra": (inside, "autoparallel's own value: no dim inside hosts was measured"),
        "bw_inter": (between, "autoparallel's own value: no dim between hosts was measured"),
        "num_channels": (None, "NCCL's default for the GPU"),
        # Boards with PCIe or a bridge (NVL) have no NVSwitch, nor have hosts with fewer than 8 GPUs.
        "has_nvswitch": (
            arch != "AMPERE" and per_host >= 8 and not re.search(r"\b(PCIe|NVL)\b", gpu),
            "by the name and number of GPUs; correct it if it is wrong",
        ),
        "has_collnet": (False, "unknown; True if the network reduces (SHARP)"),
        "net_latency": (0.0, "no dim between hosts was measured"),
    }
    inner = [dim for dim in topology.dims if dim.layout.kind == "intra-host"]
    if inner:
        widest = max(inner, key=lambda dim: dim.ranks)
        arguments["bw_intra"] = (
            round(widest.bandwidth_GiBps * GB_PER_GIB, 3),
            "fitted over the widest dim in a host",
        )
    outer = [dim for dim in topology.dims if dim.layout.kind != "intra-host"]
    if outer:
        slowest = min(outer, key=_bandwidth_per_gpu)
        arguments["bw_inter"] = (
            round(_bandwidth_per_gpu(slowest), 3),
            "fitted over the slowest dim between hosts",
        )
        arguments["net_latency"] = (
            round(_extra_latency_us(slowest), 3),
            "of a hop of that dim, beyond NCCL's 2.7 us",
        )
    return render_module(request, "autoparallel", arch=arch, gpu=ascii(gpu), arguments=arguments)


def _gpu(topology: CalibratedTopology) -> tuple[str, str]:
    """Returns the full name of the GPU, and its model among ARCHITECTURES."""
    gpu = next((run.gpu for run in topology.runs if run.gpu), "")
    models = sorted({*re.findall(rf"\b({'|'.join(ARCHITECTURES)})\b", gpu)})
    if len(models) != 1:
        raise UsageError(
            f"autoparallel models {', '.join(ARCHITECTURES)}; the topology was measured on "
            f"{gpu or f'a {topology.device_type} without a recorded GPU name'}"
        )
    return gpu, models[0]


def _hosts_per_group(dim: Dim) -> int:
    return max(dim.layout.hosts_per_group or (2,))


def _bandwidth_per_gpu(dim: Dim) -> float:
    """Returns GB/s between hosts: autoparallel adds up those of the GPUs that a group has on each host."""
    return dim.bandwidth_GiBps * GB_PER_GIB * _hosts_per_group(dim) / dim.ranks


def _extra_latency_us(dim: Dim) -> float:
    """Returns how much longer a hop between hosts takes than autoparallel assumes.

    A ring of h hosts has h - 1 hops between hosts; the others are assumed to take as long as inside a host.
    """
    hops, between = dim.ranks - 1, _hosts_per_group(dim) - 1
    hop_us = (hops * dim.latency_us_per_hop - (hops - between) * HOP_INSIDE_US) / between
    return max(0.0, hop_us - HOP_BETWEEN_US)
