"""Machines as data: nodes of equal GPUs, what they compute and copy, and what their links carry."""

from __future__ import annotations

import itertools
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dtbench.errors import UsageError
from dtbench.records.read import BadFieldError, decode, into, read_json
from dtbench.text.names import name_words, nearest

MAX_FILE_BYTES = 2**20
_FOLDER = resources.files("dtbench.cost.plan") / "machines"

# No constant of a machine comes near these; products and powers of some stay floats, and none of them 0.
_Positive = Annotated[float, msgspec.Meta(ge=1e-12, le=1e18)]
_Share = Annotated[float, msgspec.Meta(ge=1e-12, le=1.0)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class FittedConstants(msgspec.Struct, frozen=True, kw_only=True):
    """What no data sheet says; `dtbench plan --fit` fits it to measured steps.

    Of the GPU: matmul, memory: share of the peak that matrix products and memory-bound operations reach.

    Of the software:
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


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Between nodes. GBps: 10^9 bytes/s that one node sends, over all of its adapters. latency_us: of one hop: a ring
    has as many as ranks, which is why a collective's bandwidth falls with the number of nodes; a tree has few.

    shared: share of GBps that is left where several groups, of several ranks each, pass through one node: their rings
        do not spread evenly over the adapters, as one ring over all ranks or one adapter per group does.
    """

    GBps: _Positive
    latency_us: _Positive
    shared: _Share = 1.0


class ErrorBounds(msgspec.Struct, frozen=True, kw_only=True):
    """90 % of the held-out steps took `low` to `high` times what was predicted; kinds: the same of steps of one kind,
    as `dtbench.cost.plan.ground` tells them apart."""

    low: _Positive
    high: _Positive
    kinds: dict[str, tuple[_Positive, _Positive]] = {}

    def __post_init__(self) -> None:
        if any(low > high for low, high in ((self.low, self.high), *self.kinds.values())):
            raise ValueError("low is above high")


CollectiveTables = dict[str, list[tuple[_Positive, _Positive]]]
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")


class MachineSpec(msgspec.Struct, frozen=True, kw_only=True):
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
    fitted: FittedConstants
    fitted_on: str
    network: Network
    all_reduce: CollectiveTables
    collectives: dict[str, CollectiveTables] = {}
    error: ErrorBounds | None = None
    ground: dict[str, tuple[_Positive, _Positive]] = {}
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
        if not rows or any(int(b) <= int(a) for a, b in itertools.pairwise((0, *sizes))):
            raise ValueError(f"{name} must have rows of growing bytes")
        if any(b < a for a, b in itertools.pairwise(times)):
            raise ValueError(f"{name} must have times that never fall")

    @property
    def all_collectives(self) -> dict[str, CollectiveTables]:
        """By name, the all-reduce first."""
        return {"all_reduce": self.all_reduce, **self.collectives}

    @property
    def flops(self) -> float:
        """Floating point operations per second that matrix products reach."""
        return self.peak_tflops * 1e12 * self.fitted.matmul

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that memory-bound operations reach."""
        return self.memory_GBps * 1e9 * self.fitted.memory


def built_in() -> list[str]:
    return sorted(file.name[:-5] for file in _FOLDER.iterdir() if file.name.endswith(".json"))


def _content(name: str) -> dict[str, object]:
    """Of a built-in machine; what its file does not say is as in the one that it is `like`."""
    content = decode((_FOLDER / f"{name}.json").read_bytes())
    return _content(str(content["like"])) | content if "like" in content else content


def machine_called(system: str) -> str | None:
    """The built-in machine that a table's words for a system mean, such as `DGX-H100` or `h100_80gb`."""
    name = re.sub(r"\b\d+x(?=[a-z])", "", system.lower().replace("_", " "))
    words = re.findall(r"[a-z]+\d+[a-z]*", name)
    if "rtx" in system.lower():
        words = ["rtx"] if "6000" in system else []
    return next((name for name in built_in() if name.partition("-")[0] in words), None)


def _spelt(name: str) -> str | None:
    """The built-in machine that a name means: the one with most of its words, such as h100-8x for 8xH100-AWS-p5.

    A word that tells other memory or another bus (40GB, PCIe) means another machine.
    """
    words = name_words(name)
    is_other = any(re.fullmatch(r"\d+gi?b|pcie|nvl", word) for word in words)
    fitting = [known for known in built_in() if name_words(known) <= words and not is_other]
    return max(fitting, key=lambda known: len(name_words(known)), default=None)


def find_machine(name_or_path: str) -> MachineSpec:
    """A built-in machine by name, or the one in a JSON file. Public systems of such a node mean it, too: 8xH100-AWS-p5.

    Raises:
        UsageError: no such machine; or a file that is not one, with the key that is wrong.
        UnreadableRunError: a file that cannot be read, or is no JSON.
    """
    if name_or_path.endswith(".json"):
        content = read_json(Path(name_or_path), "a machine in JSON", MAX_FILE_BYTES)
    elif name := _spelt(name_or_path):
        content = _content(name)
    else:
        raise UsageError(
            f"--machine {name_or_path} is not known: nearest are {nearest(name_or_path, built_in())}; expected one of "
            f"{', '.join(built_in())}, or a JSON file"
        )
    try:
        return into(content, MachineSpec)
    except BadFieldError as error:
        raise UsageError(f"--machine {name_or_path}: {error}") from error
