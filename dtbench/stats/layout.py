"""Where the groups of a mesh lie: which hosts they span, by what the ranks said of themselves.

A host is a name and a running kernel (`boot_id`): nodes that are all called "localhost" differ in the
kernel, network namespaces of one machine in the name. Nothing is inferred from the mesh's shape.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class DimLayout:
    """One mesh dim. Pairs are (least, most) over its groups, None where the run does not say.

    hosts_per_group; ranks_per_host: ranks of one group on one host. groups_per_host_pair: the most
    groups of the dim that span the same two hosts and so share what lies between them; 0 where none
    leaves its host. numa_nodes_per_group: NUMA nodes of the ranks' GPUs, else of their CPUs.
    nvlink: of the pairs of ranks of a group on one host, how many GPUs are NVLink neighbours or hang on
    the same kind of switch, and how many pairs there are.
    """

    name: str
    ranks: int
    groups: int
    hosts_per_group: tuple[int, int] | None
    ranks_per_host: tuple[int, int] | None
    groups_per_host_pair: int | None
    numa_nodes_per_group: tuple[int, int] | None
    nvlink: tuple[int, int] | None


def crowded(header: Header) -> str:
    """`4 ranks share 2 cores`, where more ranks of a host than it has cores take turns on them; else nothing."""
    cores, ranks = header.machine.cpu.usable_cores, Counter(rank.node for rank in header.ranks)
    most = max(ranks.values(), default=0)
    if not cores or most <= cores or any(rank.device not in ("cpu", None) for rank in header.ranks):
        return ""
    return f"{plural(most, 'rank')} share {plural(cores, 'core')}"


def hosts_of(header: Header) -> list[str | None]:
    """By rank what tells its host from others; None where the run does not say."""
    host_of_rank = {rank.rank: f"{rank.host} {rank.boot_id or ''}" for rank in header.ranks if rank.host}
    return [host_of_rank.get(rank) for rank in range(math.prod(header.mesh.shape))]


def mesh_groups(header: Header) -> dict[str, Groups]:
    """The groups of each mesh dim of a run, and of all dims as one; none where its ranks are not those of its
    mesh (a file from elsewhere may claim a mesh of any size)."""
    names, shape = header.mesh.dim_names, header.mesh.shape
    if not names or math.prod(shape) != len(header.ranks):
        return {}
    return groups_by_dim(names, shape)


def layout_of(header: Header) -> list[DimLayout]:
    """The layout of every mesh dim of a run; empty where it does not list the ranks of its mesh."""
    groups = mesh_groups(header)
    hosts = hosts_of(header) if groups else []
    ranks = {rank.rank: rank for rank in header.ranks}
    return [_layout_of_dim(name, of_dim, hosts, ranks) for name, of_dim in groups.items()]


def _layout_of_dim(
    name: str, groups: Groups, hosts: Sequence[str | None], ranks: Mapping[int, RankFacts]
) -> DimLayout:
    spans = per_host = pairs = None
    if None not in hosts:
        counts = [Counter(hosts[rank] for rank in group) for group in groups]
        spans = _range(len(count) for count in counts)
        per_host = _range(number for count in counts for number in count.values())
        of_groups = (itertools.combinations(sorted(map(str, count)), 2) for count in counts)
        pairs = max(Counter(itertools.chain.from_iterable(of_groups)).values(), default=0)
    nodes = {rank: _numa_nodes(facts) for rank, facts in ranks.items()}
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


def _range(numbers: Iterable[int]) -> tuple[int, int]:
    values = list(numbers)
    return min(values), max(values)


def _numa_nodes(facts: RankFacts) -> list[int]:
    device = facts.device_numa_node
    return [device] if device is not None else list(facts.numa_nodes or ())


def _nvlink_pairs(
    groups: Groups, hosts: Sequence[str | None], ranks: Mapping[int, RankFacts]
) -> tuple[int, int] | None:
    linked = total = 0
    for group in groups:
        for a, b in itertools.combinations(group, 2):
            one, other = (ranks[rank].nvlink if rank in ranks else None for rank in (a, b))
            if hosts[a] is None or hosts[a] != hosts[b] or one is None or other is None:
                continue
            total += 1
            linked += ranks[b].pci_bus_id in one.neighbours or min(one.switch_links, other.switch_links) > 0
    return (linked, total) if total else None


def from_last_arrival_s(result: Result, groups: Groups) -> tuple[float, ...]:
    """`from_last_arrivals_s` of one result."""
    return tuple(map(float, from_last_arrivals_s([result], groups)[0]))


def from_last_arrivals_s(results: Sequence[Result], groups: Groups) -> list[NDArray[np.float64]]:
    """Of each result per sample the seconds from the arrival of a group's last rank until all of it is done, the
    longest over the groups, which work at once.

    Where the file does not say when the ranks came, it is the shortest reading within a group: a rank's own
    includes its wait for the last one. That is too short where ranks end one by one (all-to-all). Empty
    where the file lacks the ranks' own samples.
    """
    times_s = [np.empty(0)] * len(results)
    for (own, late, _), places in index_blocks(map(_shape, results)):
        readings = np.array([list(results[place].rank_samples_s.values()) for place in places])
        arrivals = np.array([list(results[place].rank_arrivals_s.values()) for place in places])
        rows, late_rows = ({int(rank): row for row, rank in enumerate(ranks)} for ranks in (own, late))
        taken = []
        for group in groups:
            there = [rank for rank in group if rank in rows]
            came = [late_rows[rank] for rank in there if rank in late_rows]
            if there:
                of_group = readings[:, [rows[rank] for rank in there]]
                taken.append(_of_group(of_group, arrivals[:, came] if len(came) == len(there) else None))
        for place, samples in zip(places, np.max(taken, axis=0) if taken else (), strict=False):
            times_s[place] = samples
    return times_s


def _shape(result: Result) -> tuple[tuple[str, ...], tuple[str, ...], int] | None:
    """What results have in common whose readings fit into one array; None where those of a result do not."""
    own, late = result.rank_samples_s, result.rank_arrivals_s
    lengths = {*map(len, own.values()), *map(len, late.values())}
    return (tuple(own), tuple(late), lengths.pop()) if len(lengths) == 1 and own else None


def _of_group(readings: NDArray[np.float64], arrivals: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Per result and sample from the last arrival to the last end; what clocks disagree on is no less than the
    shortest reading and no more than the longest, between which the truth lies.

    readings, arrivals: (results, ranks of the group, samples).
    """
    shortest: NDArray[np.float64] = readings.min(axis=1)
    if arrivals is None:
        return shortest
    taken = (arrivals + readings).max(axis=1) - arrivals.max(axis=1)
    return np.asarray(np.clip(taken, shortest, readings.max(axis=1)))
