"""What communication costs in a training step: by a machine's tables and network, or by a calibrated topology."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol

from dtbench.cost.plan.machines import MachineSpec
from dtbench.cost.price import estimate
from dtbench.errors import UsageError
from dtbench.records.topology import CalibratedTopology
from dtbench_core.cost.curve import Curve


class Links(Protocol):
    """Prices of communication, seconds; `NodeLinks` says what is given."""

    def collective(self, name: str, size_bytes: float, ranks: int, inner: int) -> float: ...

    def send(self, size_bytes: float, tp: int, inner: int) -> float: ...


class NodeLinks:
    """The links of a machine file: measured collectives within a node, a ring over the nodes' adapters beyond. Seconds;
    inner: ranks between neighbours of a group (1: consecutive ranks)."""

    def __init__(self, machine: MachineSpec) -> None:
        self.machine = machine
        # By collective: ranks of one node -> time over bytes.
        self._curves = {
            name: {
                int(ranks): Curve(tuple(int(s) for s, _ in rows), tuple(us for _, us in rows))
                for ranks, rows in tables.items()
            }
            for name, tables in machine.all_collectives.items()
        }
        self.in_node = functools.lru_cache(maxsize=2**14)(self._price_in_node)

    def collective(self, name: str, size_bytes: float, ranks: int, inner: int) -> float:
        """One of all_reduce, all_gather, reduce_scatter and all_to_all, of at least 2 ranks; size_bytes: of the whole
        buffer, which a gather fills and the others start from."""
        per_node = group_in_node(self.machine.gpus_per_node, ranks, inner)
        if per_node >= ranks:
            return self.in_node(name, size_bytes, ranks)
        # Times that a node sends its share of the buffer, and hops that each pay the latency.
        if name == "all_reduce":  # of a tree
            copies, hops = 2.0, 2 * math.ceil(math.log2(max(2, ranks / per_node)))
        elif name == "all_to_all":  # the share of the bytes that leaves the node
            copies, hops = (ranks - per_node) / (ranks - 1), ranks // per_node
        else:
            copies, hops = 1.0, ranks - 1
        # Every group that passes through a node sends its ring's share through the node's adapters.
        groups = self.machine.gpus_per_node / per_node
        network = self.machine.network
        rate = network.GBps * 1e9 * (network.shared if per_node > 1 and groups > 1 else 1.0)
        sent = copies * (ranks - 1) / ranks * size_bytes * groups
        return sent / rate + hops * network.latency_us * 1e-6

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        """From a pipeline stage to the next, of activations that `tp` ranks hold copies of."""
        network, per_node = self.machine.network, self.machine.gpus_per_node
        if inner < per_node:  # both stages in one node: half an all-reduce of two ranks sends each byte once
            return self.in_node("all_reduce", size_bytes, 2) / 2
        # Each of the tp ranks sends its share, all pipelines of the node at once.
        return size_bytes * per_node / min(tp, per_node) / (network.GBps * 1e9) + network.latency_us * 1e-6

    def _price_in_node(self, name: str, size_bytes: float, ranks: int) -> float:
        """Seconds of a collective of so many ranks of one node."""
        curves = self._curves.get(name)
        if curves is None:  # of a ring
            return self._price_in_node("all_reduce", size_bytes, ranks) / 2
        measured = sorted(curves)
        more = next((n for n in measured if n >= ranks), measured[-1])
        if more == ranks or ranks < measured[0] or ranks > measured[-1]:
            ring_share = ((n - 1) / n for n in (ranks, more))
            return curves[more].us(size_bytes) * 1e-6 * next(ring_share) / next(ring_share)
        # Between two measured numbers of ranks a line of logarithms: n = 4 from 2 and 8 is 8 % off on H200, B300 and
        # RTX PRO 6000.
        less = measured[measured.index(more) - 1]
        share = math.log(ranks / less) / math.log(more / less)
        us: float = curves[less].us(size_bytes) ** (1 - share) * curves[more].us(size_bytes) ** share
        return us * 1e-6


def group_in_node(gpus_per_node: int, ranks: int, inner: int) -> int:
    """How many ranks of one group share a node."""
    return max(1, min(ranks, gpus_per_node // inner))


@dataclass(frozen=True)
class TopologyLinks:
    """The links of a calibrated topology: its slowest dim within a host, and its slowest dim between hosts."""

    topology: CalibratedTopology
    gpus_per_node: int

    def collective(self, name: str, size_bytes: float, ranks: int, inner: int) -> float:
        return self._seconds(
            name, size_bytes, ranks, group_in_node(self.gpus_per_node, ranks, inner) >= ranks
        )

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        return self._seconds("all_reduce", size_bytes / tp, 2, inner < self.gpus_per_node) / 2

    def _seconds(self, name: str, size_bytes: float, ranks: int, within: bool) -> float:
        dims = self.topology.dims
        if not dims:
            raise UsageError("the topology holds no mesh dim: calibrate from a run with collectives")
        fitting = [dim for dim in dims if (dim.layout.kind == "intra-host") == within]
        dim = min(fitting or dims, key=lambda dim: dim.bandwidth_GiBps)
        if name in ("all_gather", "reduce_scatter") and name not in dim.collectives:  # of a ring
            return self._seconds("all_reduce", size_bytes, ranks, within) / 2
        return estimate(dim, name, ranks, max(1, int(size_bytes))).time_us * 1e-6
