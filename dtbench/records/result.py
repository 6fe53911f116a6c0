"""What comes out of a measurement: result, run and the facts of a run's header, as run files hold them.

Units stand in the names: `time_s` seconds, `size_bytes` bytes, `algbw_Bps` bytes per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dtbench.fields import MAX_INT, Amount, Count, Name, Whole
from dtbench.records.timing import Timing
from dtbench.suite.case import Case, ClockKind, Estimator, Param
from dtbench.suite.mesh import MAX_RANKS

SCHEMA = 1
_ReadInt = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]
_ReadParam = str | bool | float | _ReadInt
Status = Literal["ok", "failed", "skipped", "wrong"]
STATUSES: tuple[Status, ...] = ("ok", "failed", "skipped", "wrong")


CaseKey = tuple[str, str, str, tuple[tuple[str, Param], ...]]
ResultKey = tuple[str, str, str, tuple[tuple[str, Param], ...], int]


class Result(msgspec.Struct, frozen=True, tag_field="kind", tag="result"):
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
    rank_samples_s: Mapping[str, tuple[Amount, ...]] = {}
    rank_arrivals_s: Mapping[str, tuple[Amount, ...]] = {}
    algbw_Bps: Amount | None = None  # noqa: N815 - bytes per second, as the file spells it
    busbw_Bps: Amount | None = None  # noqa: N815
    counters: Mapping[str, _ReadInt | float] = {}
    launch: Count = 0
    clock: ClockKind = "device"

    @property
    def estimate_s(self) -> float | None:
        """The time that stands for this launch: the order statistic that `estimator_of` names."""
        return None if self.time_s is None else float(getattr(self.time_s, estimator_of(self)))

    @property
    def spread(self) -> float | None:
        """How far the samples' upper quartile lies above `estimate_s`, as a share of it: three quarters of the samples
        took no longer. None without a time, of 0 s or of one sample, as a log has."""
        time_s, estimate_s = self.time_s, self.estimate_s
        if time_s is None or time_s.n < 2 or not estimate_s:
            return None
        return max(time_s.p75 / estimate_s - 1, 0.0)

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
        return msgspec.structs.replace(self, samples_s=(), rank_samples_s={}, rank_arrivals_s={})


def estimator_of(of: Case | Result) -> Estimator:
    """Which order statistic is the estimate of a launch: a steady one, never the mean.

    The minimum is the steadiest for a host latency, whose noise only adds; a collective's fastest
    call is a lucky meeting of ranks, so the lower quartile stands for work on a device or between ranks.
    """
    return "min" if of.clock == "host" else "p25"


class Checkout(msgspec.Struct, frozen=True, kw_only=True):
    """A git checkout: its commit, and whether tracked files differ from it."""

    commit: str | None = None
    dirty: bool | None = None


class Checkouts(Checkout, frozen=True, kw_only=True):
    """The checkout that the run was started in, and that of dtbench; None where it was installed."""

    dtbench: Checkout | None = None


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """cores: logical, physical, and those that the run might use."""

    model: str | None = None
    logical_cores: Count | None = None
    physical_cores: Count | None = None
    usable_cores: Count | None = None
    governor: str | None = None
    numa_nodes: Count | None = None


class NvLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The links of a GPU and how many of them are up; version: as NVML numbers it."""

    links: Count = 0
    active_links: Count = 0
    version: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
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


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The host of rank 0."""

    cpu: Cpu = Cpu()
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    memory_bytes: Count | None = None
    system: str | None = None


class NvLinkPeers(msgspec.Struct, frozen=True, kw_only=True):
    """What the links of a rank's GPU lead to: links by the PCI bus id of the neighbour, links to switches."""

    neighbours: dict[str, Whole]
    switch_links: Count


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
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

    @property
    def node(self) -> tuple[str | None, str | None]:
        """What is the same for two ranks of one host alone: nodes may share a name such as localhost."""
        return self.host, self.boot_id


class MeshShape(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the mesh dims and their sizes, outermost first."""

    dim_names: tuple[str, ...]
    shape: tuple[Whole, ...]

    def __post_init__(self) -> None:
        if len(self.dim_names) != len(self.shape):
            raise ValueError(f"dim_names has {len(self.dim_names)} names for {len(self.shape)} dims")
        ranks = 1  # readers go through them one by one
        for size in self.shape:
            ranks *= size
            if ranks > MAX_RANKS:
                raise ValueError(f"shape is of more ranks than the {MAX_RANKS} that are expected at most")


class ImportedLog(msgspec.Struct, frozen=True, kw_only=True):
    """A log of another tool that results were taken from. aside: columns that were not read, with some of what they
    hold."""

    file: str
    sha256: str
    format: str
    tables: Count
    rows: Count
    started: str | None = None
    aside: Mapping[str, tuple[str, ...]] = {}


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a run file: how it was measured. options: those of the run, as `RunOptions` has them."""

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
    options: dict[str, Any] = {}
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

    def by_one_process(self, suite: str) -> bool:
        """Whether a single rank of several measured the suite, as where the others are simulated: the run's ranks and
        mesh are then not the suite's."""
        timed = [r for r in self.results if r.suite == suite and r.samples_s]
        several = len(self.header.ranks) > 1 and not self.header.imported
        return several and bool(timed) and not any(r.rank_samples_s for r in timed)

    def ok(self, suite: str) -> list[Result]:
        """The suite's results that hold a time one may believe."""
        return [r for r in self.results if r.suite == suite and r.status == "ok" and r.time_s is not None]
