"""Machines as data: nodes of equal GPUs, what they compute and copy, and what their links carry."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from dtbench.cost.price import estimate
from dtbench.model.errors import UsageError
from dtbench.records.read import BadFieldError, decode, into, read_json
from dtbench.records.topology import Dim, Topology
from dtbench_core.cost.curve import Curve

MAX_FILE_BYTES = 2**20

_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1.0)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """What no data sheet says; `dtbench plan --fit` fits it to measured steps.

    matmul, memory: share of the peak that matrix products and memory-bound operations reach.
    host_us: the host's time for one layer, forward and backward; a layer is never faster. host_tp_us: with
        collectives in the layer.
    layer_us: time of a layer's kernels that does not shrink with their work: starts, tails and small ones.
    logit_bytes: bytes moved per logit for the loss and its gradient.
    step_us: once a step.
    """

    matmul: _Share
    memory: _Share
    host_us: _Positive
    host_tp_us: _Positive
    layer_us: _Positive
    logit_bytes: _Positive
    step_us: _Positive


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Between nodes. GBps: 10^9 bytes/s that one node sends, over all of its adapters. latency_us: of one hop.

    shared: share of GBps that is left where several groups, of several ranks each, pass through one node: their rings
        do not spread evenly over the adapters, as one ring over all ranks or one adapter per group does.
    """

    GBps: _Positive
    latency_us: _Positive
    shared: _Share = 1.0


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """90 % of the held-out steps took `low` to `high` times what was predicted."""

    low: _Positive
    high: _Positive

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """peak_tflops: dense bfloat16. memory_GBps: 10^9 bytes/s. all_reduce: ranks of one node -> [[bytes, us], ...],
    measured; ranks that are missing follow from the next larger by the ring's ratio."""

    name: str
    source: str
    gpus_per_node: _Count
    memory_GiB: _Positive  # noqa: N815 - the unit's name
    peak_tflops: _Positive
    memory_GBps: _Positive  # noqa: N815
    fitted: Fitted
    fitted_on: str
    network: Network
    all_reduce: dict[str, list[tuple[_Positive, _Positive]]]
    error: Error | None = None

    def __post_init__(self) -> None:
        if not self.all_reduce:
            raise ValueError("all_reduce is empty, expected at least one table of a node's ranks")
        for ranks, rows in self.all_reduce.items():
            if not ranks.isdecimal() or not 2 <= int(ranks) <= self.gpus_per_node:
                raise ValueError(f"all_reduce.{ranks[:20]} is not a number of ranks from 2 to gpus_per_node")
            sizes, times = zip(*rows, strict=True) if rows else ((), ())
            if not rows or any(int(b) <= int(a) for a, b in itertools.pairwise((0, *sizes))):
                raise ValueError(f"all_reduce.{ranks} must have rows of growing bytes")
            if any(b < a for a, b in itertools.pairwise(times)):
                raise ValueError(f"all_reduce.{ranks} must have times that never fall")

    @property
    def flops(self) -> float:
        """Floating point operations per second that matrix products reach."""
        return self.peak_tflops * 1e12 * self.fitted.matmul

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that memory-bound operations reach."""
        return self.memory_GBps * 1e9 * self.fitted.memory

    @property
    def curves(self) -> dict[int, Curve]:
        """Ranks of one node -> time of an all-reduce over bytes."""
        return {
            int(ranks): Curve(tuple(int(s) for s, _ in rows), tuple(us for _, us in rows))
            for ranks, rows in self.all_reduce.items()
        }


class Links(Protocol):
    """What communication costs, in seconds. inner: ranks between neighbours of a group (1: consecutive ranks)."""

    def all_reduce(self, size_bytes: float, ranks: int, inner: int) -> float:
        """Of a buffer of so many bytes on each rank. A gather or scatter of it takes half."""

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        """From a pipeline stage to the next, of activations that `tp` ranks hold copies of."""


@dataclass(frozen=True)
class FasterNetwork:
    """Links whose network between nodes carries `factor` times the bytes, whatever prices them: n bytes take what
    n / factor took."""

    links: Links
    factor: float
    gpus_per_node: int

    def all_reduce(self, size_bytes: float, ranks: int, inner: int) -> float:
        crosses = group_in_node(self.gpus_per_node, ranks, inner) < ranks
        return self.links.all_reduce(size_bytes / (self.factor if crosses else 1), ranks, inner)

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        return self.links.send(size_bytes / (self.factor if inner >= self.gpus_per_node else 1), tp, inner)


class NodeLinks:
    """The links of a machine file: a measured all-reduce within a node, a ring over the nodes' adapters beyond."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._curves = machine.curves
        self._in_node = functools.lru_cache(maxsize=2**14)(self._price_in_node)

    def all_reduce(self, size_bytes: float, ranks: int, inner: int) -> float:
        if ranks == 1:
            return 0.0
        per_node = group_in_node(self.machine.gpus_per_node, ranks, inner)
        if per_node >= ranks:
            return self._in_node(size_bytes, ranks)
        # Every group that passes through a node sends its ring's share through the node's adapters.
        groups = self.machine.gpus_per_node / per_node
        network = self.machine.network
        rate = network.GBps * 1e9 * (network.shared if per_node > 1 and groups > 1 else 1.0)
        hops = 2 * math.ceil(math.log2(math.ceil(ranks / per_node)))
        sent = 2 * (ranks - 1) / ranks * size_bytes * groups
        return sent / rate + hops * network.latency_us * 1e-6

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        network, per_node = self.machine.network, self.machine.gpus_per_node
        if inner < per_node:  # both stages in one node: half an all-reduce of two ranks sends each byte once
            return self._in_node(size_bytes, 2) / 2
        # Each of the tp ranks sends its share, all pipelines of the node at once.
        return size_bytes * per_node / min(tp, per_node) / (network.GBps * 1e9) + network.latency_us * 1e-6

    def _price_in_node(self, size_bytes: float, ranks: int) -> float:
        curves = self._curves
        if ranks in curves:
            return curves[ranks].us(size_bytes) * 1e-6
        nearest = min((n for n in curves if n > ranks), default=max(curves))
        return curves[nearest].us(size_bytes) * 1e-6 * _ring(ranks) / _ring(nearest)


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def group_in_node(gpus_per_node: int, ranks: int, inner: int) -> int:
    """How many ranks of one group share a node."""
    return max(1, min(ranks, gpus_per_node // inner))


@dataclass(frozen=True)
class TopologyLinks:
    """The links of a calibrated topology: its slowest dim within a host, and its slowest dim between hosts."""

    topology: Topology
    gpus_per_node: int

    def all_reduce(self, size_bytes: float, ranks: int, inner: int) -> float:
        if ranks == 1:
            return 0.0
        within = group_in_node(self.gpus_per_node, ranks, inner) >= ranks
        return self._us("all_reduce", size_bytes, ranks, within) * 1e-6

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        return self._us("all_reduce", size_bytes / tp, 2, inner < self.gpus_per_node) * 1e-6 / 2

    def _us(self, collective: str, size_bytes: float, ranks: int, within: bool) -> float:
        return estimate(self._dim(within), collective, ranks, max(1, int(size_bytes))).time_us

    def _dim(self, within: bool) -> Dim:
        dims = self.topology.dims
        fitting = [dim for dim in dims if (dim.layout.kind == "intra-host") == within]
        if not dims:
            raise UsageError("the topology holds no mesh dim: calibrate from a run with collectives")
        return min(fitting or dims, key=lambda dim: dim.bandwidth_GiBps)


def built_in() -> list[str]:
    """Names of the machines that come with dtbench."""
    return sorted(file.name[:-5] for file in _folder().iterdir() if file.name.endswith(".json"))


def _folder() -> Traversable:
    return resources.files("dtbench.cost.plan") / "machines"


def find_machine(name_or_path: str) -> Machine:
    """A built-in machine by name, or the one in a JSON file.

    Raises:
        UsageError: no such machine; or a file that is not one, with the key that is wrong.
        UnreadableRunError: a file that cannot be read, or is no JSON.
    """
    if name_or_path in built_in():
        content = decode((_folder() / f"{name_or_path}.json").read_bytes())
    elif name_or_path.endswith(".json"):
        content = read_json(Path(name_or_path), "a machine in JSON", MAX_FILE_BYTES)
    else:
        raise UsageError(
            f"--machine {name_or_path} is not known: expected one of {', '.join(built_in())}, or a JSON file"
        )
    try:
        return into(content, Machine)
    except BadFieldError as error:
        raise UsageError(f"--machine {name_or_path}: {error}") from error
