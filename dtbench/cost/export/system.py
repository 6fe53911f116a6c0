"""Figures of a topology for programs that model a cluster by its links inside hosts and its links between hosts."""

import math
from dataclasses import dataclass

from dtbench.errors import UsageError
from dtbench.records.topology import CalibratedTopology, Dim

GB_PER_GIB = 2**30 / 1e9


@dataclass(frozen=True)
class MeasuredSystem:
    """Hosts with equal numbers of GPUs, and the mesh dims that measured their links.

    Attributes:
        gpu: name of the GPU; "" if the topology lacks it.
        hosts: number of hosts.
        gpus_per_host: GPUs of the mesh on each host.
        host_dim: the widest dim whose groups stay on a host; None if all dims cross hosts.
        network_dim: the dim between hosts with the lowest bandwidth per GPU; None if no dim crosses hosts.
    """

    gpu: str
    hosts: int
    gpus_per_host: int
    host_dim: Dim | None
    network_dim: Dim | None


def measured_system(topology: CalibratedTopology, taker: str) -> MeasuredSystem:
    """Describes the system of a topology.

    Args:
        taker: the program that needs it, for the message.

    Raises:
        UsageError: the number of hosts or a dim's layout on them is unknown, or hosts have unequal numbers of GPUs.
    """
    hosts = max((run.hosts for run in topology.runs), default=0)
    ranks = math.prod(topology.mesh.shape)
    if not hosts or ranks % hosts:
        raise UsageError(
            f"{taker} needs hosts with the same number of GPUs: the topology has {ranks} ranks on "
            f"{hosts or 'an unknown number of'} hosts"
        )
    if unknown := [dim.name for dim in topology.dims if dim.layout.kind is None]:
        raise UsageError(
            f"the topology does not record whether groups of {', '.join(unknown)} cross hosts: "
            "calibrate a run that records its hosts"
        )
    return MeasuredSystem(
        gpu=next((run.gpu for run in topology.runs if run.gpu), ""),
        hosts=hosts,
        gpus_per_host=ranks // hosts,
        host_dim=max(
            (dim for dim in topology.dims if dim.layout.kind == "intra-host"),
            key=lambda dim: dim.ranks,
            default=None,
        ),
        network_dim=min(
            (dim for dim in topology.dims if dim.layout.kind != "intra-host"),
            key=bandwidth_between_hosts,
            default=None,
        ),
    )


def hosts_per_group(dim: Dim) -> int:
    """Returns the largest number of hosts of a group, at least 2 for groups between hosts."""
    return 1 if dim.layout.kind == "intra-host" else max(2, *(dim.layout.hosts_per_group or (2,)))


def bandwidth_inside(dim: Dim) -> float:
    """Returns the fitted GB/s (10^9 bytes/s) of each GPU."""
    return round(dim.bandwidth_GiBps * GB_PER_GIB, 3)


def bandwidth_between_hosts(dim: Dim) -> float:
    """Returns the fitted GB/s of each GPU between hosts. The GPUs of a group on the same host share its traffic."""
    return round(dim.bandwidth_GiBps * GB_PER_GIB * hosts_per_group(dim) / dim.ranks, 3)
