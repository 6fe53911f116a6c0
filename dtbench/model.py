"""What dtbench measures and what comes out: plan, case, result, run. Plain data, no torch.

Units stand in the names: `time_s` seconds, `size_bytes` bytes, `algbw_Bps` bytes per second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dtbench.fields import MAX_INT, Amount, Count, Name, Rank, Whole

SCHEMA = 1
# The variable by which a run knows its arm of `dtbench sweep-env`, whatever the arm forces.
SWEEP_ARM = "DTBENCH_SWEEP_ARM"

Param = str | int | float | bool
_ReadParam = str | bool | float | Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]
# Whose time a case takes: "host", the calling thread's (dispatch latency); "device", that of the work itself.
ClockKind = Literal["host", "device"]
Estimator = Literal["min", "p25"]
Status = Literal["ok", "failed", "skipped", "wrong"]
STATUSES: tuple[Status, ...] = ("ok", "failed", "skipped", "wrong")

# Of a dispatched op, in the order in which a call passes them; a profile may hold others, which come after these.
STAGES = (
    "entry",
    "checks",
    "key",
    "cache",
    "plan",
    "redistribute",
    "communicate",
    "local op",
    "wrap",
    "glue",
)

# What `--impl` chooses between. Every other impl (local, c10d, unbucketed, limit) is a reference
# that stands beside them and is always measured.
CHOOSABLE_IMPLS = ("core", "torch")


@dataclass(frozen=True)
class Plan:
    """What to measure: the options of one run, validated. Suites derive their cases from it."""

    mesh: tuple[tuple[str, int], ...]  # (dim name, size), outermost first
    sizes_bytes: tuple[int, ...]  # of the size sweeps
    dtypes: tuple[str, ...] = ("float32",)
    device_type: Literal["cpu", "cuda"] = "cpu"
    impls: tuple[str, ...] = CHOOSABLE_IMPLS
    quick: bool = False
    sizes_chosen: bool = False  # by the user, who then gets every size in every suite
    options: Mapping[str, str] = field(default_factory=dict)  # those that the suites declare, as given
    refine: bool = False  # a sweep to calibrate with: whole, and denser where a suite finds it too coarse

    @property
    def coarse_sizes_bytes(self) -> tuple[int, ...]:
        """Every second of the default sizes, for suites that have many cases per size; else all."""
        return self.sizes_bytes if self.sizes_chosen or self.quick else self.sizes_bytes[::2]

    @property
    def few_sizes_bytes(self) -> tuple[int, ...]:
        """For regimes that only accompany a suite's sweep: one from its middle, which costs little; all
        sizes where the user chose them."""
        coarse = self.coarse_sizes_bytes
        return self.sizes_bytes if self.sizes_chosen else coarse[len(coarse) // 2 :][:1]

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.mesh)

    def wants(self, impl: str) -> bool:
        """Whether `impl` is to be measured; references always are."""
        return impl not in CHOOSABLE_IMPLS or impl in self.impls


@dataclass
class Workload:
    """One impl of a case, set up on one rank and ready to be timed.

    `run` is the timed call. `before` (untimed) readies the next sample. `check` (untimed, after the
    warm-up) returns what is wrong with the data, or None. `counters` is read once, at the end.
    `participates` is False on a rank that only waits: its times do not count. `close` frees.
    """

    run: Callable[[], object]
    before: Callable[[], None] | None = None
    check: Callable[[], str | None] | None = None
    counters: Callable[[], Mapping[str, float]] | None = None
    participates: bool = True
    close: Callable[[], None] | None = None


@dataclass(frozen=True)
class Case:
    """One question to measure, answered by several impls that are sampled in turn.

    build: impl name -> function of the live `World`, giving this rank's `Workload`. Raising
        `Skip` from it records the impl as skipped, with the reason.
    size_bytes: the size the bandwidth counts (nccl-tests' S for collectives), or None.
    busbw_factor: bus bandwidth = algorithm bandwidth x this; None where there is no bus bandwidth.
    clock: "host" times the calling thread (dispatch latency); "device" times the work itself.
    calls_per_sample: calls between the two clock readings; the sample is their mean. More than one
        means back to back, without a barrier between.
    samples: fixed number of samples, or None to let the sampler choose within its budget.
    warmup_calls: at least so many calls are thrown away.
    tolerance: the largest slowdown that a gate's PASS has to exclude, as a share (0.05 is 5%), or None for
        the gate's own. floor_s: changes of less than so many seconds are none to a gate.
    """

    name: str
    params: Mapping[str, Param]
    build: Mapping[str, Callable[[Any], Workload]]
    size_bytes: int | None = None
    busbw_factor: float | None = None
    clock: ClockKind = "device"
    calls_per_sample: int = 1
    samples: int | None = None
    warmup_calls: int = 3
    tolerance: float | None = None
    floor_s: float = 0.0

    def __post_init__(self) -> None:
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise ValueError(f"{self.name}: tolerance is {self.tolerance}, expected a share above 0")
        if not 0 <= self.floor_s < math.inf:
            raise ValueError(f"{self.name}: floor_s is {self.floor_s}, expected seconds of at least 0")


class Skip(Exception):  # noqa: N818 - it is a signal of a builder, not an error
    """Raised by a builder whose impl does not apply here; the message is the reason recorded."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Order statistics of the samples, seconds per call."""

    min: Amount
    p25: Amount
    median: Amount
    p75: Amount
    p95: Amount
    max: Amount
    mean: Amount
    n: Whole


CaseKey = tuple[str, str, str, tuple[tuple[str, Param], ...]]
ResultKey = tuple[str, str, str, tuple[tuple[str, Param], ...], int]


@dataclass(frozen=True, slots=True)
class Result:
    """One impl of one case in one launch: a line of the run file.

    samples_s: per sample, the max over the participating ranks. rank_samples_s: rank (as text) ->
    that rank's own samples; rank_arrivals_s: how much later than the first rank it began each of them,
    per call as the samples are, empty where no common clock tells; `arrival_error_s` of the counters says how far off
    that may be where clocks were compared: a GPU's and the host's, or those of two hosts. rank: the
    rank that failed, where one did. algbw_Bps, busbw_Bps: of the estimate (`estimator_of`).
    """

    suite: Name
    name: Name
    impl: Name
    params: Mapping[str, _ReadParam]
    status: Status
    reason: str = ""
    rank: Count | None = None
    size_bytes: Count | None = None
    time_s: Timing | None = None
    samples_s: tuple[Amount, ...] = ()
    rank_samples_s: Mapping[Rank, tuple[Amount, ...]] = field(default_factory=dict)
    rank_arrivals_s: Mapping[Rank, tuple[Amount, ...]] = field(default_factory=dict)
    algbw_Bps: Amount | None = None  # noqa: N815 - bytes per second, as the file spells it
    busbw_Bps: Amount | None = None  # noqa: N815
    counters: Mapping[str, int | float] = field(default_factory=dict)
    launch: Count = 0
    clock: ClockKind = "device"

    @property
    def estimate_s(self) -> float | None:
        """The time that stands for this launch: the order statistic that `estimator_of` names."""
        return None if self.time_s is None else float(getattr(self.time_s, estimator_of(self)))

    @property
    def case_key(self) -> CaseKey:
        """Names the case and impl across launches and runs."""
        return (self.suite, self.name, self.impl, tuple(sorted(self.params.items())))

    @property
    def key(self) -> ResultKey:
        """Names the result within a run."""
        return (*self.case_key, self.launch)

    def without_samples(self) -> Result:
        """With its statistics alone."""
        return dataclasses.replace(self, samples_s=(), rank_samples_s={}, rank_arrivals_s={})

    def to_json(self) -> dict[str, Any]:
        """The line as a dict, `kind` first."""
        return {"kind": "result", **dataclasses.asdict(self)}


def estimator_of(of: Case | Result) -> Estimator:
    """Which order statistic stands for a launch: a steady one, never the mean.

    The minimum is the steadiest for a host latency, whose noise only adds; a collective's fastest
    call is a lucky meeting of ranks, so the lower quartile stands for work on a device or between ranks.
    """
    return "min" if of.clock == "host" else "p25"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a run's header."""


class Checkout(Record, frozen=True, kw_only=True):
    """A git checkout: its commit, and whether tracked files differ from it."""

    commit: str | None = None
    dirty: bool | None = None


class Checkouts(Checkout, frozen=True, kw_only=True):
    """The checkout that the run was started in, and that of dtbench; None where it was installed."""

    dtbench: Checkout | None = None


class Cpu(Record, frozen=True, kw_only=True):
    """cores: logical, physical, and those that the run might use."""

    model: str | None = None
    logical_cores: Count | None = None
    physical_cores: Count | None = None
    usable_cores: Count | None = None
    governor: str | None = None
    numa_nodes: Count | None = None


class NvLinks(Record, frozen=True, kw_only=True):
    """The links of a GPU and how many of them are up; version: as NVML numbers it."""

    links: Count = 0
    active_links: Count = 0
    version: int | None = None


class Gpu(Record, frozen=True, kw_only=True):
    """A GPU as NVML describes it."""

    index: Count | None = None
    name: str | None = None
    memory_bytes: Count | None = None
    sm_clock_MHz: int | float | None = None  # noqa: N815 - as the file spells it
    sm_clock_max_MHz: int | float | None = None  # noqa: N815
    memory_clock_MHz: int | float | None = None  # noqa: N815
    memory_clock_max_MHz: int | float | None = None  # noqa: N815
    power_limit_W: int | float | None = None  # noqa: N815
    persistence: bool | None = None
    mig: bool | None = None
    nvlink: NvLinks | None = None


class Machine(Record, frozen=True, kw_only=True):
    """The host of rank 0."""

    cpu: Cpu = Cpu()
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    memory_bytes: Count | None = None
    system: str | None = None


class NvLinkPeers(Record, frozen=True, kw_only=True):
    """What the links of a rank's GPU lead to: links by the PCI bus id of the neighbour, links to switches."""

    neighbours: dict[str, Whole]
    switch_links: Count


class RankFacts(Record, frozen=True, kw_only=True):
    """Where a rank ran. boot_id names the running kernel: it tells hosts of one name apart."""

    rank: Count
    host: str | None = None
    boot_id: str | None = None
    local_rank: Count | None = None
    device: str | None = None
    pid: Count | None = None
    numa_nodes: tuple[Count, ...] | None = None
    interface: str | None = None
    pci_bus_id: str | None = None
    device_numa_node: Count | None = None
    nvlink: NvLinkPeers | None = None


class MeshShape(Record, frozen=True, kw_only=True):
    """The names of the mesh dims and their sizes, outermost first."""

    dim_names: tuple[str, ...]
    shape: tuple[Whole, ...]

    def __post_init__(self) -> None:
        if len(self.dim_names) != len(self.shape):
            raise ValueError(f"dim_names has {len(self.dim_names)} names for {len(self.shape)} dims")


class ImportedLog(Record, frozen=True, kw_only=True):
    """A log of another tool that results were taken from."""

    file: str
    sha256: str
    format: str
    tables: Count
    rows: Count
    started: str | None = None


class Header(Record, frozen=True, kw_only=True):
    """The first line of a run file: how it was measured. plan: the options of the run, as `Plan` has them."""

    kind: Literal["run"] = "run"
    schema: Whole
    run_id: Name
    started: str = ""
    argv: tuple[str, ...] = ()
    versions: dict[str, str | None] = {}
    git: Checkouts = Checkouts()
    machine: Machine = Machine()
    ranks: tuple[RankFacts, ...] = ()
    mesh: MeshShape = MeshShape(dim_names=(), shape=())
    env: dict[str, str] = {}
    plan: dict[str, Any] = {}
    suites: tuple[str, ...] = ()
    launches: Whole = 1
    imported: tuple[ImportedLog, ...] = ()


@dataclass(frozen=True)
class Run:
    """A run file, read. `complete` is whether its end line is there."""

    path: Path
    header: Header
    results: tuple[Result, ...]
    complete: bool

    def ok(self, suite: str) -> list[Result]:
        """The suite's results that hold a time one may believe."""
        return [r for r in self.results if r.suite == suite and r.status == "ok" and r.time_s is not None]
