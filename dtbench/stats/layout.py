"""Placement of a mesh's process groups on hosts, as the ranks of a run report it.

A host is identified by its name and its running kernel (`boot_id`). Nodes that are all called "localhost" differ in
`boot_id`; network namespaces of one machine differ in the name. Nothing is inferred from the shape of the mesh.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dtbench.records.result import Header, RankFacts, Result
from dtbench.stats import index_blocks
from dtbench.suite.mesh import Groups, groups_by_dim
from dtbench.text.units import plural

Range = tuple[int, int]  # (least, most)


@dataclass(frozen=True)
class DimLayout:
    """Placement of the groups of one mesh dim. Values are None if the run does not record them.

    Attributes:
        name: the mesh dim.
        ranks: ranks per group.
        groups: number of groups.
        hosts_per_group: (least, most) hosts of a group.
        ranks_per_host: (least, most) ranks of one group on one host.
        groups_per_host_pair: largest number of groups that span the same two hosts and so share the link between them;
            0 if no group spans several hosts.
        numa_nodes_per_group: (least, most) NUMA nodes of a group's GPUs, or of its CPUs if there are no GPUs.
        nvlink: (connected, all) pairs of ranks of a group on the same host; connected GPUs are NVLink neighbours or
            both have links to an NVSwitch.
    """

    name: str
    ranks: int
    groups: int
    hosts_per_group: Range | None
    ranks_per_host: Range | None
    groups_per_host_pair: int | None
    numa_nodes_per_group: Range | None
    nvlink: tuple[int, int] | None


def shared_cores(header: Header) -> str:
    """Returns e.g. "4 ranks share 2 cores" if a host has more CPU ranks than cores, else ""."""
    cores, ranks = header.machine.cpu.usable_cores, Counter(rank.node for rank in header.ranks)
    max_ranks = max(ranks.values(), default=0)
    if not cores or max_ranks <= cores or any(rank.device not in ("cpu", None) for rank in header.ranks):
        return ""
    return f"{plural(max_ranks, 'rank')} share {plural(cores, 'core')}"


def hosts_of(header: Header) -> list[str | None]:
    """Returns an identifier of each rank's host; None if the run does not record it."""
    host_of_rank = {rank.rank: f"{rank.host} {rank.boot_id or ''}" for rank in header.ranks if rank.host}
    return [host_of_rank.get(rank) for rank in range(math.prod(header.mesh.shape))]


def mesh_groups(header: Header) -> dict[str, Groups]:
    """Returns the process groups of each mesh dim of a run, and of all dims together.

    It is empty if the header does not list the ranks of its mesh: a damaged file may claim a mesh of any size.
    """
    names, shape = header.mesh.dim_names, header.mesh.shape
    return groups_by_dim(names, shape) if names and math.prod(shape) == len(header.ranks) else {}


def layout_of(header: Header) -> list[DimLayout]:
    """Returns the layout of every mesh dim of a run; empty if the header does not list the ranks of its mesh."""
    groups = mesh_groups(header)
    hosts = hosts_of(header) if groups else []
    ranks = {rank.rank: rank for rank in header.ranks}
    return [_layout_of_dim(name, dim_groups, hosts, ranks) for name, dim_groups in groups.items()]


def format_hosts(dims: Mapping[str, tuple[Range | None, Range | None]]) -> dict[str, str]:
    """Returns each mesh dim's hosts and ranks per host, e.g. {"tp": "1 host x 8 ranks", "dp": "2 hosts x 1 rank"}.

    Groups of equal numbers of ranks differ in speed by these two. Empty unless the mesh has both groups over several
    hosts and several ranks on a host; a dim whose placement is unknown is left out.

    Args:
        dims: name -> (hosts_per_group, ranks_per_host), each (least, most) or None.
    """
    recorded = {name: (hosts, ranks) for name, (hosts, ranks) in dims.items() if hosts and ranks}
    if not all(any(span[index][1] > 1 for span in recorded.values()) for index in (0, 1)):
        return {}
    return {
        name: f"{format_range(hosts)} {'host' if hosts[1] == 1 else 'hosts'} x "
        f"{format_range(ranks)} {'rank' if ranks[1] == 1 else 'ranks'}"
        for name, (hosts, ranks) in recorded.items()
    }


def format_range(span: Range | None) -> str:
    """Formats (least, most), e.g. "2", or "1..2" if groups differ, or "-" if it is unknown."""
    return "-" if span is None else "..".join(map(str, dict.fromkeys(span)))


def _layout_of_dim(
    name: str, groups: Groups, hosts: Sequence[str | None], ranks: Mapping[int, RankFacts]
) -> DimLayout:
    spans = per_host = pairs = None
    if None not in hosts:
        counts = [Counter(hosts[rank] for rank in group) for group in groups]
        spans = _range(len(count) for count in counts)
        per_host = _range(number for count in counts for number in count.values())
        host_pairs = (itertools.combinations(sorted(map(str, count)), 2) for count in counts)
        pairs = max(Counter(itertools.chain.from_iterable(host_pairs)).values(), default=0)
    nodes = {
        rank: [facts.device_numa_node] if facts.device_numa_node is not None else facts.numa_nodes or ()
        for rank, facts in ranks.items()
    }
    per_group = [{(hosts[r], node) for r in group for node in nodes.get(r, ())} for group in groups]
    return DimLayout(
        name,
        len(groups[0]),
        len(groups),
        spans,
        per_host,
        pairs,
        _range(map(len, per_group)) if all(per_group) else None,
        _nvlink_pairs(groups, hosts, ranks),
    )


def _range(numbers: Iterable[int]) -> Range:
    values = list(numbers)
    return min(values), max(values)


def _nvlink_pairs(
    groups: Groups, hosts: Sequence[str | None], ranks: Mapping[int, RankFacts]
) -> tuple[int, int] | None:
    linked = total = 0
    for group in groups:
        for a, b in itertools.combinations(group, 2):
            nvlink_a, nvlink_b = (ranks[rank].nvlink if rank in ranks else None for rank in (a, b))
            if hosts[a] is None or hosts[a] != hosts[b] or nvlink_a is None or nvlink_b is None:
                continue
            total += 1
            linked += (
                ranks[b].pci_bus_id in nvlink_a.neighbours
                or min(nvlink_a.switch_links, nvlink_b.switch_links) > 0
            )
    return (linked, total) if total else None


def from_last_arrival_s(result: Result, groups: Groups) -> tuple[float, ...]:
    """Returns `from_last_arrivals_s` of one result."""
    return tuple(map(float, from_last_arrivals_s([result], groups)[0]))


def from_last_arrivals_s(results: Sequence[Result], groups: Groups) -> list[NDArray[np.float64]]:
    """Computes the time from the arrival of a group's last rank until all of its ranks are done.

    If the file does not record the arrivals, the shortest time of any rank in the group is used, because the times of
    the other ranks include waiting for the last one. That is too short where ranks finish one after another
    (all-to-all).

    Args:
        groups: groups that run at the same time. The longest time over the groups counts.

    Returns:
        Seconds per sample for each result; empty if the file lacks the samples of single ranks.
    """
    times_s = [np.empty(0)] * len(results)
    for (sample_ranks, arrival_ranks, _), indices in index_blocks(map(_array_shape, results)):
        samples = np.array([list(results[index].rank_samples_s.values()) for index in indices])
        arrivals = np.array([list(results[index].rank_arrivals_s.values()) for index in indices])
        sample_rows, arrival_rows = (
            {int(rank): row for row, rank in enumerate(ranks)} for ranks in (sample_ranks, arrival_ranks)
        )
        group_times = []
        for group in groups:
            ranks = [rank for rank in group if rank in sample_rows]
            arrived = [arrival_rows[rank] for rank in ranks if rank in arrival_rows]
            if ranks:
                group_samples = samples[:, [sample_rows[rank] for rank in ranks]]
                group_arrivals = arrivals[:, arrived] if len(arrived) == len(ranks) else None
                group_times.append(_from_last_arrival(group_samples, group_arrivals))
        for index, slowest_s in zip(
            indices, np.max(group_times, axis=0) if group_times else (), strict=False
        ):
            times_s[index] = slowest_s
    return times_s


def _array_shape(result: Result) -> tuple[tuple[str, ...], tuple[str, ...], int] | None:
    """Returns the ranks with samples, the ranks with arrivals, and the number of samples.

    Results with the same values fit into one array. None if the ranks have different numbers of samples, or none.
    """
    samples, arrivals = result.rank_samples_s, result.rank_arrivals_s
    lengths = {*map(len, samples.values()), *map(len, arrivals.values())}
    return (tuple(samples), tuple(arrivals), lengths.pop()) if len(lengths) == 1 and samples else None


def _from_last_arrival(
    samples: NDArray[np.float64], arrivals: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Computes the time from the last arrival to the last end per result and sample.

    Clocks of the ranks may disagree. The true value lies between the shortest and the longest time of any rank, so the
    result is clipped to that range.

    Args:
        samples: seconds, shape (results, ranks of the group, samples).
        arrivals: seconds, same shape.
    """
    shortest: NDArray[np.float64] = samples.min(axis=1)
    if arrivals is None:
        return shortest
    times_s = (arrivals + samples).max(axis=1) - arrivals.max(axis=1)
    return np.asarray(np.clip(times_s, shortest, samples.max(axis=1)))
