"""`dtbench export --to autoparallel`: the arguments of autoparallel's `NCCLTopoConfig`.

autoparallel models NCCL's algorithms from one bandwidth inside hosts and one between hosts
(autoparallel/cost_models/nccl_cost_model.py, meta-pytorch/autoparallel @a54c252).
"""

import re

from dtbench.cost.export.module import render_template
from dtbench.cost.export.system import (
    bandwidth_between_hosts,
    bandwidth_inside,
    hosts_per_group,
    measured_system,
)
from dtbench.cost.export.targets import Export, ExportRequest
from dtbench.errors import UsageError
from dtbench.records.topology import Dim

# GPU -> member of autoparallel's GpuArch. autoparallel's own values for bandwidths that were not measured, GB/s per GPU
# inside a host and between hosts, are those of its functions a100_topo_config, h100_topo_config and gb200_topo_config.
ARCHITECTURES = {"A100": "AMPERE", "H100": "HOPPER", "H200": "HOPPER", "B200": "BLACKWELL"}
DEFAULT_BANDWIDTHS = {"AMPERE": (87.7, 25.0), "HOPPER": (320.0, 50.0), "BLACKWELL": (640.0, 50.0)}
# Latencies of a hop that autoparallel assumes for rings of the LL protocol, us (_HW_LAT_NVLINK, _HW_LAT_NET).
HOP_INSIDE_US, HOP_BETWEEN_US = 0.6, 2.7


def render(request: ExportRequest) -> Export:
    """Returns a module that defines the `NCCLTopoConfig`.

    Raises:
        UsageError: the GPU, its hosts or the layout of a dim on them is unknown, or autoparallel does not model it.
    """
    system = measured_system(request.topology, "autoparallel")
    arch, per_host = ARCHITECTURES[_model(system.gpu, request.topology.device_type)], system.gpus_per_host
    host_dim, network_dim = system.host_dim, system.network_dim
    default_intra, default_inter = DEFAULT_BANDWIDTHS[arch]
    arguments: dict[str, tuple[object, str]] = {
        "num_nodes": (system.hosts, "hosts"),
        "gpus_per_node": (per_host, "ranks per host"),
        "bw_intra": (bandwidth_inside(host_dim), "fitted over the widest dim in a host")
        if host_dim
        else (default_intra, "autoparallel's own value: no dim inside hosts was measured"),
        "bw_inter": (bandwidth_between_hosts(network_dim), "fitted over the slowest dim between hosts")
        if network_dim
        else (default_inter, "autoparallel's own value: no dim between hosts was measured"),
        "num_channels": (None, "NCCL's default for the GPU"),
        # Boards with PCIe or a bridge (NVL) have no NVSwitch, nor have hosts with fewer than 8 GPUs.
        "has_nvswitch": (
            arch != "AMPERE" and per_host >= 8 and not re.search(r"\b(PCIe|NVL)\b", system.gpu),
            "by the name and number of GPUs; correct it if it is wrong",
        ),
        "has_collnet": (False, "unknown; True if the network reduces (SHARP)"),
        "net_latency": (
            round(_extra_latency_us(network_dim), 3),
            "of a hop of that dim, beyond NCCL's 2.7 us",
        )
        if network_dim
        else (0.0, "no dim between hosts was measured"),
    }
    return Export(
        render_template(request, "autoparallel.py", arch=arch, gpu=ascii(system.gpu), arguments=arguments)
    )


def _model(gpu: str, device_type: str) -> str:
    """Returns the GPU's model among ARCHITECTURES."""
    models: list[str] = sorted({*re.findall(rf"\b({'|'.join(ARCHITECTURES)})\b", gpu)})
    if len(models) != 1:
        raise UsageError(
            f"autoparallel models {', '.join(ARCHITECTURES)}; the topology was measured on "
            f"{gpu or f'a {device_type} without a recorded GPU name'}"
        )
    return models[0]


def _extra_latency_us(dim: Dim) -> float:
    """Returns how much longer a hop between hosts takes than autoparallel assumes.

    A ring of h hosts has h - 1 hops between hosts; the others are assumed to take as long as inside a host.
    """
    hops, network_hops = dim.ranks - 1, hosts_per_group(dim) - 1
    hop_us = (hops * dim.latency_us_per_hop - (hops - network_hops) * HOP_INSIDE_US) / network_hops
    return max(0.0, hop_us - HOP_BETWEEN_US)
