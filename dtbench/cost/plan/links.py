"""Predicts communication times of a training step, from a machine's tables and network or a calibrated topology."""

import functools
import math
from dataclasses import dataclass
from typing import Protocol

from dtbench.cost.estimate import estimate_collective
from dtbench.cost.plan.machines import MachineSpec
from dtbench.errors import UsageError
from dtbench.records.topology import CalibratedTopology
from dtbench_core.cost.curve import Curve


class Links(Protocol):
    """Predicts communication times in seconds; the arguments are described in `NodeLinks`."""

    def collective(self, name: str, size_bytes: float, ranks: int, inner: int) -> float: ...

    def send(self, size_bytes: float, tp: int, inner: int) -> float: ...


class NodeLinks:
    """The links of a machine file: measured collectives within a node, and a ring over the adapters between nodes.

    Times are in seconds. `inner` is the distance between neighbouring ranks of a group (1: consecutive ranks).
    """

    def __init__(self, machine: MachineSpec) -> None:
        self.machine = machine
        # Collective -> ranks of a node -> time over bytes.
        self._curves = {
            name: {
                int(ranks): Curve(tuple(int(size) for size, _ in rows), tuple(us for _, us in rows))
                for ranks, rows in tables.items()
            }
            for name, tables in machine.all_collectives.items()
        }
        self.in_node = functools.lru_cache(maxsize=2**14)(self._predict_in_node)

    def collective(self, name: str, size_bytes: float, ranks: int, inner: int) -> float:
        """Predicts an all_reduce, all_gather, reduce_scatter or all_to_all of at least 2 ranks.

        Args:
            size_bytes: the output of an all_gather, the input of the other collectives.
        """
        per_node = group_in_node(self.machine.gpus_per_node, ranks, inner)
        if per_node >= ranks:
            return self.in_node(name, size_bytes, ranks)
        # Number of times that a node sends its share of the buffer, and number of hops with their latency.
        if name == "all_reduce":  # a tree
            copies, hops = 2.0, 2 * math.ceil(math.log2(max(2, ranks / per_node)))
        elif name == "all_to_all":  # only some of the bytes leave the node
            copies, hops = (ranks - per_node) / (ranks - 1), ranks // per_node
        else:
            copies, hops = 1.0, ranks - 1
        # All groups with ranks on a node share its adapters.
        groups = self.machine.gpus_per_node / per_node
        network = self.machine.network
        rate = network.GBps * 1e9 * (network.shared if per_node > 1 and groups > 1 else 1.0)
        sent = copies * (ranks - 1) / ranks * size_bytes * groups
        return sent / rate + hops * network.latency_us * 1e-6

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        """Predicts sending activations to the next pipeline stage. `tp` ranks have copies of them."""
        network, per_node = self.machine.network, self.machine.gpus_per_node
        if (
            inner < per_node
        ):  # within a node, like half an all-reduce of two ranks, which sends each byte once
            return self.in_node("all_reduce", size_bytes, 2) / 2
        # Each of the tp ranks sends its share, and all pipelines of the node send at the same time.
        return size_bytes * per_node / min(tp, per_node) / (network.GBps * 1e9) + network.latency_us * 1e-6

    def _predict_in_node(self, name: str, size_bytes: float, ranks: int) -> float:
        """Predicts a collective of ranks within a node."""
        curves = self._curves.get(name)
        if curves is None:  # a ring needs half the steps of its all-reduce
            return self._predict_in_node("all_reduce", size_bytes, ranks) / 2
        measured = sorted(curves)
        upper = next((count for count in measured if count >= ranks), measured[-1])
        if upper == ranks or ranks < measured[0] or ranks > measured[-1]:
            ring_share = ((count - 1) / count for count in (ranks, upper))
            return curves[upper].us(size_bytes) * 1e-6 * next(ring_share) / next(ring_share)
        # Interpolates the logarithm of the time over the logarithm of the ranks. Predicting 4 ranks from 2 and 8 has an
        # error of 8 % on H200, B300 and RTX PRO 6000.
        lower = measured[measured.index(upper) - 1]
        share = math.log(ranks / lower) / math.log(upper / lower)
        us: float = curves[lower].us(size_bytes) ** (1 - share) * curves[upper].us(size_bytes) ** share
        return us * 1e-6


def group_in_node(gpus_per_node: int, ranks: int, inner: int) -> int:
    """Returns the number of ranks of a group that share a node."""
    return max(1, min(ranks, gpus_per_node // inner))


@dataclass(frozen=True)
class TopologyLinks:
    """The links of a calibrated topology: the slowest mesh dim within a host, and the slowest between hosts."""

    topology: CalibratedTopology
    gpus_per_node: int

    def collective(self, name: str, size_bytes: float, ranks: int, inner: int) -> float:
        return self._seconds(
            name, size_bytes, ranks, group_in_node(self.gpus_per_node, ranks, inner) >= ranks
        )

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        return self._seconds("all_reduce", size_bytes / tp, 2, inner < self.gpus_per_node) / 2

    def _seconds(self, name: str, size_bytes: float, ranks: int, intra_host: bool) -> float:
        dims = self.topology.dims
        if not dims:
            raise UsageError(
                "the topology has no mesh dim, expected at least one: calibrate a run of the suite collectives"
            )
        fitting = [dim for dim in dims if (dim.layout.kind == "intra-host") == intra_host]
        dim = min(fitting or dims, key=lambda dim: dim.bandwidth_GiBps)
        # A ring needs half the steps of its all-reduce.
        if name in ("all_gather", "reduce_scatter") and name not in dim.collectives:
            return self._seconds("all_reduce", size_bytes, ranks, intra_host) / 2
        return estimate_collective(dim, name, ranks, max(1, int(size_bytes))).time_us * 1e-6
