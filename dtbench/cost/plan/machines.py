"""Descriptions of machines, and the communication times that follow from them.

A machine consists of nodes of equal GPUs, with their compute, memory and link speeds. Alternatively, a calibrated
topology predicts the communication.
"""

import functools
import itertools
import math
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from dtbench.cost.estimate import estimate_collective
from dtbench.errors import UsageError
from dtbench.records.read import BadFieldError, convert, decode, read_json
from dtbench.records.topology import CalibratedTopology
from dtbench.text.names import name_words, nearest
from dtbench_core.cost.curve import Curve

MAX_FILE_BYTES = 2**20
_FOLDER = resources.files("dtbench.cost.plan") / "machines"

# Wide limits for a machine's constants; within them, products and powers neither overflow nor become 0.
_Positive = Annotated[float, msgspec.Meta(ge=1e-12, le=1e18)]
_Share = Annotated[float, msgspec.Meta(ge=1e-12, le=1.0)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class FittedConstants(msgspec.Struct, frozen=True, kw_only=True):
    """Constants that data sheets lack; `dtbench plan --fit` fits them to measured steps.

    Attributes:
        matmul: share of the peak FLOP/s that matrix products reach.
        memory: share of the peak bandwidth that memory-bound operations reach.
        attention: speed of flash attention relative to matrix products, counting the scores that causal kernels skip.
        fp8: speed of matrix products in FP8 relative to bfloat16.
        grouped: speed of the experts' matrix products relative to other products.
        host_us: host time of a layer, forward and backward; a lower limit of the layer's time.
        host_tp_us: the same for a layer with collectives.
        wait_us: additional host time per tensor-parallel rank if a pipeline spans nodes.
        layer_us: fixed time of a layer's kernels: starts, tails and small kernels.
        logit_bytes: bytes moved per logit for the loss and its gradient.
        step_us: fixed time of a step.
        gradient_bytes: bytes per element of gradients when they are summed and reduced, 2 or 4.
        activations: factor on the computed bytes of activations; unfused kernels keep more.
        stages_by_cost: pipeline stages are balanced by the cost of layers and head, not by the number of layers.
        overlaps: reducing gradients and gathering ZeRO's weights overlap with computation, if a table does not say.
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


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """The network between nodes.

    Attributes:
        GBps: 10^9 bytes/s that a node can send over all of its adapters.
        latency_us: latency per hop. A ring has as many hops as ranks, so its bandwidth falls with the number of nodes.
        shared: share of GBps that is available if several groups with several ranks each use the same node. Their
            rings do not spread evenly over the adapters.
    """

    GBps: _Positive
    latency_us: _Positive
    shared: _Share = 1.0


class ErrorBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The range of measured over predicted time that holds 90 % of new steps.

    Attributes:
        low: lower end for all steps.
        high: upper end for all steps.
        kinds: kind of steps -> (low, high); see `dtbench.cost.plan.prediction_intervals.kind_of`.
    """

    low: _Positive
    high: _Positive
    kinds: dict[str, tuple[_Positive, _Positive]] = {}

    def __post_init__(self) -> None:
        if any(low > high for low, high in ((self.low, self.high), *self.kinds.values())):
            raise ValueError("low is above high")


CollectiveTables = dict[str, list[tuple[_Positive, _Positive]]]
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")


class MachineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A machine: nodes of equal GPUs.

    Attributes:
        source: origin of the data.
        memory_GiB: memory per GPU.
        peak_tflops: dense bfloat16, 10^12 FLOP/s per GPU.
        memory_GBps: 10^9 bytes/s per GPU.
        fitted_on: the steps to which `fitted` was fitted.
        all_reduce: ranks of a node -> measured [[bytes, us], ...]. Other numbers of ranks are interpolated.
        collectives: the same for other collectives. Missing ones are derived from the all-reduce.
        error: accuracy of predicted step times, if steps were measured.
        fitted_range: quantity -> smallest and largest value among the fitted steps.
        licence: licence of the measurements.
        stands_in: the machine whose collectives were measured instead of this one's.
        fsdp: the machine whose constants apply to steps that shard weights by FSDP.
    """

    name: str
    source: str
    gpus_per_node: _Count
    memory_GiB: _Positive  # noqa: N815 - the unit's name
    peak_tflops: _Positive
    memory_GBps: _Positive  # noqa: N815
    fitted: FittedConstants
    fitted_on: str
    network: Network
    all_reduce: CollectiveTables
    collectives: dict[str, CollectiveTables] = {}
    error: ErrorBounds | None = None
    fitted_range: dict[str, tuple[_Positive, _Positive]] = msgspec.field(name="ground", default_factory=dict)
    licence: str = ""
    stands_in: str = ""
    fsdp: str = ""

    def __post_init__(self) -> None:
        for name in self.collectives:
            if name not in COLLECTIVES:
                raise ValueError(f"collectives.{name[:40]} is not one of {', '.join(COLLECTIVES)}")
        for name, tables in self.all_collectives.items():
            if not tables:
                raise ValueError(f"{name} is empty, expected at least one table of a node's ranks")
            for ranks, rows in tables.items():
                self._check(f"{name}.{ranks[:20]}", ranks, rows)

    def _check(self, name: str, ranks: str, rows: list[tuple[float, float]]) -> None:
        if not ranks.isdecimal() or not 2 <= int(ranks) <= self.gpus_per_node:
            raise ValueError(f"{name} is not a number of ranks from 2 to gpus_per_node")
        sizes, times = zip(*rows, strict=True) if rows else ((), ())
        if not rows or any(int(size) <= int(previous) for previous, size in itertools.pairwise((0, *sizes))):
            raise ValueError(f"{name} must have rows with increasing bytes")
        if any(time < previous for previous, time in itertools.pairwise(times)):
            raise ValueError(f"{name} must have times that never decrease")

    @property
    def all_collectives(self) -> dict[str, CollectiveTables]:
        """Name -> tables of all measured collectives, the all-reduce first."""
        return {"all_reduce": self.all_reduce, **self.collectives}

    @property
    def flops(self) -> float:
        """FLOP/s that matrix products reach."""
        return self.peak_tflops * 1e12 * self.fitted.matmul

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that memory-bound operations reach."""
        return self.memory_GBps * 1e9 * self.fitted.memory


def built_in() -> list[str]:
    return sorted(file.name[:-5] for file in _FOLDER.iterdir() if file.name.endswith(".json"))


def _content(name: str) -> dict[str, object]:
    """Reads a built-in machine. Keys missing in its file come from the machine named by the key `like`."""
    content = decode((_FOLDER / f"{name}.json").read_bytes())
    return _content(str(content["like"])) | content if "like" in content else content


def machine_called(system: str) -> str | None:
    """Returns the built-in machine for a table's name of a system, e.g. `DGX-H100` or `h100_80gb`; None if unknown."""
    name = re.sub(r"\b\d+x(?=[a-z])", "", system.lower().replace("_", " "))
    words = re.findall(r"[a-z]+\d+[a-z]*", name)
    if "rtx" in system.lower():
        words = ["rtx"] if "6000" in system else []
    return next((name for name in built_in() if name.partition("-")[0] in words), None)


def _built_in_name(name: str) -> str | None:
    """Returns the built-in machine that has most words in common with a name, e.g. h100-8x for 8xH100-AWS-p5.

    Returns None for a variant with another memory size or bus (40GB, PCIe).
    """
    words = name_words(name)
    is_variant = any(re.fullmatch(r"\d+gi?b|pcie|nvl", word) for word in words)
    fitting = [machine for machine in built_in() if name_words(machine) <= words and not is_variant]
    return max(fitting, key=lambda machine: len(name_words(machine)), default=None)


def find_machine(name_or_path: str) -> MachineSpec:
    """Returns a built-in machine by its name or by that of a public system with such nodes, or reads a JSON file.

    Raises:
        UsageError: the machine is unknown, or the file has an invalid key.
        UnreadableRunError: the file cannot be read, or is not JSON.
    """
    if name_or_path.endswith(".json"):
        content = read_json(Path(name_or_path), "a machine in JSON", MAX_FILE_BYTES)
    elif name := _built_in_name(name_or_path):
        content = _content(name)
    else:
        raise UsageError(
            f"--machine {name_or_path}: unknown machine; nearest are {nearest(name_or_path, built_in())}; expected one "
            f"of {', '.join(built_in())}, or a JSON file"
        )
    try:
        return convert(content, MachineSpec)
    except BadFieldError as error:
        raise UsageError(f"--machine {name_or_path}: {error}") from error


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
        return copies * (ranks - 1) / ranks * size_bytes * groups / rate + hops * network.latency_us * 1e-6

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        """Predicts sending activations to the next pipeline stage. `tp` ranks have copies of them."""
        network, per_node = self.machine.network, self.machine.gpus_per_node
        # Within a node, this is half an all-reduce of two ranks, which sends each byte once.
        if inner < per_node:
            return self.in_node("all_reduce", size_bytes, 2) / 2
        # Each of the tp ranks sends its share, and all pipelines of the node send at the same time.
        return size_bytes * per_node / min(tp, per_node) / (network.GBps * 1e9) + network.latency_us * 1e-6

    def _predict_in_node(self, name: str, size_bytes: float, ranks: int) -> float:
        """Predicts a collective of ranks within a node."""
        if (curves := self._curves.get(name)) is None:  # a ring needs half the steps of its all-reduce
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
        return (
            float(curves[lower].us(size_bytes) ** (1 - share) * curves[upper].us(size_bytes) ** share) * 1e-6
        )


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
        if not (dims := self.topology.dims):
            raise UsageError(
                "the topology has no mesh dim, expected at least one: calibrate a run of the suite collectives"
            )
        dim = min(
            [dim for dim in dims if (dim.layout.kind == "intra-host") == intra_host] or dims,
            key=lambda dim: dim.bandwidth_GiBps,
        )
        # A ring needs half the steps of its all-reduce.
        if name in ("all_gather", "reduce_scatter") and name not in dim.collectives:
            return self._seconds("all_reduce", size_bytes, ranks, intra_host) / 2
        return estimate_collective(dim, name, ranks, max(1, int(size_bytes))).time_us * 1e-6
