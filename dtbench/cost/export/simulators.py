"""Exports for simulators of training jobs: AMD Primus, and ASTRA-sim's analytical network.

Both model a collective by one bandwidth and one latency. The templates explain how each parameter is derived.
"""

import math

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
from dtbench.suite.mesh import format_mesh


def render_primus(request: ExportRequest) -> Export:
    """Returns the YAML of Primus's option --hardware-config.

    Raises:
        UsageError: the hosts or the layout of a dim on them is unknown.
    """
    system = measured_system(request.topology, "Primus")
    host_dim, network_dim = system.host_dim, system.network_dim
    config = render_template(
        request,
        "primus.yaml",
        system=system,
        base_us=request.topology.base_latency_us,
        host=host_dim and _link(host_dim, bandwidth_inside(host_dim), steps=1),
        network=network_dim
        and _link(
            network_dim,
            bandwidth_between_hosts(network_dim),
            steps=math.ceil(math.log2(hosts_per_group(network_dim))),
        ),
    )
    return Export(
        config,
        tuple(
            f"Primus's own bandwidth {place} hosts is used, since no mesh dim {place} hosts was measured"
            for place, dim in (("inside", host_dim), ("between", network_dim))
            if dim is None
        ),
    )


def _link(dim: Dim, bandwidth: float, steps: int) -> dict[str, object]:
    """Returns the figures of a dim, with the latency of each of Primus's steps instead of a ring's hops."""
    hosts = hosts_per_group(dim)
    return {
        "name": dim.name,
        "ranks": dim.ranks,
        "bandwidth": bandwidth,
        "hop_us": dim.latency_us_per_hop,
        "steps": steps,
        "step_us": dim.latency_us_per_hop * (dim.ranks - 1) / steps,
        # Bytes between hosts in Primus's all-reduce, relative to those of a ring.
        "bytes_share": (hosts - 1) / hosts * dim.ranks / (dim.ranks - 1),
    }


def render_astra_sim(request: ExportRequest) -> Export:
    """Returns the YAML of ASTRA-sim's option --network-configuration.

    Raises:
        UsageError: a dim of the mesh was not calibrated, so that the network would lack it.
    """
    topology = request.topology
    calibrated = {(dim.name, dim.ranks): dim for dim in topology.dims}
    # Dims of one rank do not communicate, and ASTRA-sim refuses them.
    mesh = [dim for dim in zip(topology.mesh.dim_names, topology.mesh.shape, strict=True) if dim[1] > 1]
    if missing := [dim for dim in mesh if dim not in calibrated]:
        raise UsageError(
            f"ASTRA-sim needs every dim of the mesh {format_mesh(mesh)}, but {format_mesh(missing)} was not "
            "calibrated: measure it, too"
        )
    return Export(
        render_template(
            request,
            "astra_sim.yaml",
            base_us=topology.base_latency_us,
            dims=[calibrated[dim] for dim in reversed(mesh)],
        )
    )
