"""Machines as data: nodes of equal GPUs, what they compute and copy, and what their links carry."""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import structs

from dtbench.cost.price import estimate
from dtbench.records.read import BadFieldError, decode, into, read_json
from dtbench.records.topology import CalibratedTopology, Dim
from dtbench.suite.errors import UsageError
from dtbench_core.cost.curve import Curve

MAX_FILE_BYTES = 2**20

# No constant of a machine comes near these; products and powers of some stay floats, and none of them 0.
_Positive = Annotated[float, msgspec.Meta(ge=1e-12, le=1e18)]
_Share = Annotated[float, msgspec.Meta(ge=1e-12, le=1.0)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """What no data sheet says; `dtbench plan --fit` fits it to measured steps.

    Of the GPU: matmul, memory: share of the peak that matrix products and memory-bound operations reach.

    Of the software (`SOFTWARE`), so that another machine's may stand in:
    attention: how many times as fast as matrix products flash attention is, all scores counted although causal
        kernels leave half of them out. fp8: how many times as fast as in bfloat16 matrix products in FP8 are.
        grouped: share of that speed that the products of experts reach.
    host_us: the host's time for one layer, forward and backward; a layer is never faster. host_tp_us: with
        collectives in the layer. wait_us: more of it per tensor-parallel rank where a pipeline crosses nodes.
    layer_us: time of a layer's kernels that does not shrink with their work: starts, tails and small ones.
    logit_bytes: bytes moved per logit for the loss and its gradient.
    step_us: once a step.
    gradient_bytes: of an element of the gradients as they are summed and reduced, 2 or 4.
    activations: times the bytes of activations that are counted: kernels that are not fused keep more.
    stages_by_cost: pipeline stages are cut by the cost of layers and head, not by the number of layers.
    overlaps: gradients are reduced, and ZeRO's weights gathered, behind computation where a table does not say.
    """

    matmul: _Share
    memory: _Share
    attention: _Positive = 1.0
    fp8: _Positive = 1.5
    grouped: _Share = 0.7
    host_us: _Positive
    host_tp_us: _Positive
    wait_us: _Positive = 1.0
    layer_us: _Positive
    logit_bytes: _Positive
    step_us: _Positive
    gradient_bytes: Literal[2, 4] = 2
    activations: _Positive = 1.0
    stages_by_cost: bool = False
    overlaps: bool = True


SOFTWARE = (
    "attention",
    "fp8",
    "grouped",
    "host_us",
    "host_tp_us",
    "wait_us",
    "layer_us",
    "logit_bytes",
    "step_us",
    "gradient_bytes",
    "activations",
    "stages_by_cost",
    "overlaps",
)


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Between nodes. GBps: 10^9 bytes/s that one node sends, over all of its adapters. latency_us: of one hop: a ring
    has as many as ranks, which is why a collective's bandwidth falls with the number of nodes; a tree has few.

    shared: share of GBps that is left where several groups, of several ranks each, pass through one node: their rings
        do not spread evenly over the adapters, as one ring over all ranks or one adapter per group does.
    """

    GBps: _Positive
    latency_us: _Positive
    shared: _Share = 1.0


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """90 % of the held-out steps took `low` to `high` times what was predicted; kinds: the same of steps of one kind,
    as `dtbench.cost.plan.ground` tells them apart."""

    low: _Positive
    high: _Positive
    kinds: dict[str, tuple[_Positive, _Positive]] = {}

    def __post_init__(self) -> None:
        if any(low > high for low, high in ((self.low, self.high), *self.kinds.values())):
            raise ValueError("low is above high")


Tables = dict[str, list[tuple[_Positive, _Positive]]]
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """peak_tflops: dense bfloat16. memory_GBps: 10^9 bytes/s. all_reduce, and by name other collectives: ranks of one
    node -> [[bytes, us], ...], measured; other numbers of ranks follow from the nearest, other collectives from the
    all-reduce. ground: what -> from the least to the most that steps were fitted on. licence: of what was measured.
    stands_in: whose collectives these are, where none were measured. fsdp: the machine whose constants are of programs
    that shard weights by FSDP: rows of tables that did are predicted by it."""

    name: str
    source: str
    gpus_per_node: _Count
    memory_GiB: _Positive  # noqa: N815 - the unit's name
    peak_tflops: _Positive
    memory_GBps: _Positive  # noqa: N815
    fitted: Fitted
    fitted_on: str
    network: Network
    all_reduce: Tables
    collectives: dict[str, Tables] = {}
    error: Error | None = None
    ground: dict[str, tuple[_Positive, _Positive]] = {}
    licence: str = ""
    stands_in: str = ""
    fsdp: str = ""

    def __post_init__(self) -> None:
        for name in self.collectives:
            if name not in COLLECTIVES:
                raise ValueError(f"collectives.{name[:40]} is not one of {', '.join(COLLECTIVES)}")
        for name, tables in {"all_reduce": self.all_reduce, **self.collectives}.items():
            if not tables:
                raise ValueError(f"{name} is empty, expected at least one table of a node's ranks")
            for ranks, rows in tables.items():
                self._check(f"{name}.{ranks[:20]}", ranks, rows)

    def _check(self, name: str, ranks: str, rows: list[tuple[float, float]]) -> None:
        if not ranks.isdecimal() or not 2 <= int(ranks) <= self.gpus_per_node:
            raise ValueError(f"{name} is not a number of ranks from 2 to gpus_per_node")
        sizes, times = zip(*rows, strict=True) if rows else ((), ())
        if not rows or any(int(b) <= int(a) for a, b in itertools.pairwise((0, *sizes))):
            raise ValueError(f"{name} must have rows of growing bytes")
        if any(b < a for a, b in itertools.pairwise(times)):
            raise ValueError(f"{name} must have times that never fall")

    @property
    def flops(self) -> float:
        """Floating point operations per second that matrix products reach."""
        return self.peak_tflops * 1e12 * self.fitted.matmul

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that memory-bound operations reach."""
        return self.memory_GBps * 1e9 * self.fitted.memory


class Links(Protocol):
    """What communication costs, in seconds. inner: ranks between neighbours of a group (1: consecutive ranks)."""

    def all_reduce(self, size_bytes: float, ranks: int, inner: int) -> float:
        """Of a buffer of so many bytes on each rank."""

    def gather(self, size_bytes: float, ranks: int, inner: int) -> float:
        """An all-gather to, or a reduce-scatter of, a buffer of so many bytes."""

    def all_to_all(self, size_bytes: float, ranks: int, inner: int) -> float:
        """Each rank shares out a buffer of so many bytes."""

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
        return self.links.all_reduce(self._size(size_bytes, ranks, inner), ranks, inner)

    def gather(self, size_bytes: float, ranks: int, inner: int) -> float:
        return self.links.gather(self._size(size_bytes, ranks, inner), ranks, inner)

    def all_to_all(self, size_bytes: float, ranks: int, inner: int) -> float:
        return self.links.all_to_all(self._size(size_bytes, ranks, inner), ranks, inner)

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        return self.links.send(size_bytes / (self.factor if inner >= self.gpus_per_node else 1), tp, inner)

    def _size(self, size_bytes: float, ranks: int, inner: int) -> float:
        crosses = group_in_node(self.gpus_per_node, ranks, inner) < ranks
        return size_bytes / (self.factor if crosses else 1)


class NodeLinks:
    """The links of a machine file: measured collectives within a node, a ring over the nodes' adapters beyond."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._curves = {"all_reduce": curves_of(machine.all_reduce)}
        self._curves |= {name: curves_of(tables) for name, tables in machine.collectives.items()}
        self.in_node = functools.lru_cache(maxsize=2**14)(self._price_in_node)

    def all_reduce(self, size_bytes: float, ranks: int, inner: int) -> float:
        hops = 2 * math.ceil(math.log2(max(2, ranks / self._per_node(ranks, inner))))
        return self._ring("all_reduce", size_bytes, ranks, inner, 2.0, hops)

    def gather(self, size_bytes: float, ranks: int, inner: int) -> float:
        return self._ring("all_gather", size_bytes, ranks, inner, 1.0, ranks - 1)

    def all_to_all(self, size_bytes: float, ranks: int, inner: int) -> float:
        per_node = self._per_node(ranks, inner)
        crossing = (ranks - per_node) / max(1, ranks - 1)  # share of the bytes that leave the node
        return self._ring("all_to_all", size_bytes, ranks, inner, crossing, ranks // per_node)

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        network, per_node = self.machine.network, self.machine.gpus_per_node
        if inner < per_node:  # both stages in one node: half an all-reduce of two ranks sends each byte once
            return self.in_node("all_reduce", size_bytes, 2) / 2
        # Each of the tp ranks sends its share, all pipelines of the node at once.
        return size_bytes * per_node / min(tp, per_node) / (network.GBps * 1e9) + network.latency_us * 1e-6

    def _per_node(self, ranks: int, inner: int) -> int:
        return group_in_node(self.machine.gpus_per_node, ranks, inner)

    def _ring(
        self, collective: str, size_bytes: float, ranks: int, inner: int, copies: float, hops: int
    ) -> float:
        """copies: how often a node sends its share of the buffer."""
        if ranks == 1:
            return 0.0
        per_node = self._per_node(ranks, inner)
        if per_node >= ranks:
            return self.in_node(collective, size_bytes, ranks)
        # Every group that passes through a node sends its ring's share through the node's adapters.
        groups = self.machine.gpus_per_node / per_node
        network = self.machine.network
        rate = network.GBps * 1e9 * (network.shared if per_node > 1 and groups > 1 else 1.0)
        sent = copies * (ranks - 1) / ranks * size_bytes * groups
        return sent / rate + hops * network.latency_us * 1e-6

    def _price_in_node(self, collective: str, size_bytes: float, ranks: int) -> float:
        """Seconds of a collective of so many ranks of one node."""
        curves = self._curves.get(collective)
        if curves is None:  # of a ring
            return self._price_in_node("all_reduce", size_bytes, ranks) / 2
        known = sorted(curves)
        more = next((n for n in known if n >= ranks), known[-1])
        if more == ranks or ranks < known[0] or ranks > known[-1]:
            return curves[more].us(size_bytes) * 1e-6 * _ring_share(ranks) / _ring_share(more)
        # Between two measured numbers of ranks a line of logarithms: n = 4 from 2 and 8 is 8 % off on H200, B300 and
        # RTX PRO 6000.
        less = known[known.index(more) - 1]
        share = math.log(ranks / less) / math.log(more / less)
        us: float = curves[less].us(size_bytes) ** (1 - share) * curves[more].us(size_bytes) ** share
        return us * 1e-6


def curves_of(tables: Tables) -> dict[int, Curve]:
    """Ranks of one node -> time of a collective over bytes."""
    return {
        int(ranks): Curve(tuple(int(s) for s, _ in rows), tuple(us for _, us in rows))
        for ranks, rows in tables.items()
    }


def _ring_share(ranks: int) -> float:
    return (ranks - 1) / ranks


def group_in_node(gpus_per_node: int, ranks: int, inner: int) -> int:
    """How many ranks of one group share a node."""
    return max(1, min(ranks, gpus_per_node // inner))


@dataclass(frozen=True)
class TopologyLinks:
    """The links of a calibrated topology: its slowest dim within a host, and its slowest dim between hosts."""

    topology: CalibratedTopology
    gpus_per_node: int

    def all_reduce(self, size_bytes: float, ranks: int, inner: int) -> float:
        if ranks == 1:
            return 0.0
        return self._us("all_reduce", size_bytes, ranks, self._within(ranks, inner)) * 1e-6

    def gather(self, size_bytes: float, ranks: int, inner: int) -> float:
        return self.all_reduce(size_bytes, ranks, inner) / 2

    def all_to_all(self, size_bytes: float, ranks: int, inner: int) -> float:
        if ranks == 1:
            return 0.0
        return self._us("all_to_all", size_bytes, ranks, self._within(ranks, inner)) * 1e-6

    def _within(self, ranks: int, inner: int) -> bool:
        return group_in_node(self.gpus_per_node, ranks, inner) >= ranks

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


def machine_called(system: str) -> str | None:
    """The built-in machine that a table's words for a system mean, such as `DGX-H100` or `h100_80gb`."""
    words = re.findall(r"[a-z]+\d+[a-z]*", system.lower().replace("_", " "))
    if "rtx" in system.lower():
        words = ["rtx"] if "6000" in system else []
    return next((name for name in built_in() if name.partition("-")[0] in words), None)


def with_software(machine: Machine, of: Machine) -> Machine:
    """The machine as another one's software drives it."""
    values = {name: getattr(of.fitted, name) for name in SOFTWARE}
    fitted = structs.replace(machine.fitted, **values)
    return structs.replace(
        machine, fitted=fitted, fsdp="", error=None, fitted_on=f"the software: {of.fitted_on}"
    )


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
