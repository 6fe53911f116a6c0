"""The contents of a run file: its header, its results, and the run that they form.

Names end in their units: `time_s` is in seconds, `size_bytes` in bytes, `algbw_Bps` in bytes per second.
"""

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from dtbench.fields import MAX_INT, Amount, Count, Name, Whole
from dtbench.records.timing import Timing
from dtbench.suite.case import ROUTING, Case, ClockKind, Estimator, Param
from dtbench.suite.mesh import MAX_RANKS

SCHEMA = 1
_ReadInt = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]
_ReadParam = str | bool | float | _ReadInt
Status = Literal["ok", "failed", "skipped", "wrong"]
STATUSES: tuple[Status, ...] = ("ok", "failed", "skipped", "wrong")


CaseKey = tuple[str, str, str, tuple[tuple[str, Param], ...]]
ResultKey = tuple[str, str, str, tuple[tuple[str, Param], ...], int]


def integer_param(params: Mapping[str, Param], name: str) -> int:
    """Returns a param as an integer; 0 if it is missing or, as in damaged files, no number."""
    value = params.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


class Result(msgspec.Struct, frozen=True, tag_field="kind", tag="result"):
    """The measurement of one implementation of a case in one launch; a line of the run file.

    Attributes:
        suite: suite of the case.
        name: name of the case.
        impl: implementation, e.g. "core" or "torch".
        params: params of the case.
        status: "ok", "failed", "skipped", or "wrong" if the implementation returned wrong data.
        reason: explains a status other than "ok", else "".
        rank: the rank that failed, if any.
        size_bytes: message size.
        time_s: statistics of the samples, seconds per call.
        samples_s: seconds per call; each sample is the maximum over the participating ranks.
        rank_samples_s: rank, as text -> its samples, seconds per call.
        rank_arrivals_s: rank, as text -> its delay behind the first rank in each sample, seconds per call. Empty
            without a common clock. If clocks were aligned, the counter `arrival_error_s` is the alignment error.
        algbw_Bps: size_bytes / estimate_s.
        busbw_Bps: algbw_Bps times the collective's bus bandwidth factor.
        counters: name -> value, often per call.
        launch: number of the launch, from 0.
        clock: clock that measured the samples.
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
    algbw_Bps: Amount | None = None  # noqa: N815 - the file spells it so
    busbw_Bps: Amount | None = None  # noqa: N815
    counters: Mapping[str, _ReadInt | float] = {}
    launch: Count = 0
    clock: ClockKind = "device"

    @property
    def estimate_s(self) -> float | None:
        """The estimate of this launch in seconds per call: the order statistic that `estimator_of` names."""
        return None if self.time_s is None else float(getattr(self.time_s, estimator_of(self)))

    @property
    def spread(self) -> float | None:
        """Relative distance of the samples' upper quartile above `estimate_s`; None without two samples above 0 s."""
        if self.time_s is None or self.time_s.n < 2 or not self.estimate_s:
            return None
        return max(self.time_s.p75 / self.estimate_s - 1, 0.0)

    @property
    def case_key(self) -> CaseKey:
        """Identifies the case and implementation across launches and runs."""
        return (self.suite, self.name, self.impl, tuple(sorted(self.params.items())))

    @property
    def key(self) -> ResultKey:
        """Identifies the result within a run."""
        return (*self.case_key, self.launch)

    def without_samples(self) -> Self:
        """Returns the result with its statistics, but without its samples."""
        return msgspec.structs.replace(self, samples_s=(), rank_samples_s={}, rank_arrivals_s={})


def estimator_of(measured: Case | Result) -> Estimator:
    """Returns the order statistic that is the estimate of a launch.

    Host latencies use the minimum, since noise only adds to them. Work on a device or between ranks uses the lower
    quartile: the fastest call of a collective depends on a coincidence of the ranks' arrivals.
    """
    return "min" if measured.clock == "host" else "p25"


class Checkout(msgspec.Struct, frozen=True, kw_only=True):
    """A git checkout.

    Attributes:
        commit: hash of the commit.
        dirty: whether tracked files differ from the commit.
    """

    commit: str | None = None
    dirty: bool | None = None


class Checkouts(Checkout, frozen=True, kw_only=True):
    """The checkout in which the run was started.

    Attributes:
        dtbench: the checkout of dtbench; None if dtbench was installed from a package.
    """

    dtbench: Checkout | None = None


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """The CPUs of a host.

    Attributes:
        usable_cores: number of logical cores that the run was allowed to use.
        governor: frequency governors, joined by "+".
    """

    model: str | None = None
    logical_cores: Count | None = None
    physical_cores: Count | None = None
    usable_cores: Count | None = None
    governor: str | None = None
    numa_nodes: Count | None = None


class NvLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The NVLinks of a GPU.

    Attributes:
        links: number of links.
        active_links: number of links that are up.
        version: NVML's number of the NVLink version.
    """

    links: Count = 0
    active_links: Count = 0
    version: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, described by NVML."""

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
    """The devices at the other ends of the NVLinks of a rank's GPU.

    Attributes:
        neighbours: PCI bus id of a GPU -> number of links to it.
        switch_links: number of links to NVSwitches.
    """

    neighbours: dict[str, Whole]
    switch_links: Count


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The process, host and device of a rank.

    Attributes:
        boot_id: id of the running kernel, which distinguishes hosts of the same name.
        device: torch's name of the device, e.g. "cuda:1".
        numa_nodes: NUMA nodes of the CPUs that the rank may run on.
        interface: network interface chosen by an environment variable; None if the backend chooses.
        pci_bus_id: PCI bus id of the GPU.
        device_numa_node: NUMA node of the GPU.
    """

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
        """Identifies the host; the host name is not enough, since several hosts may be called localhost."""
        return self.host, self.boot_id


class MeshShape(msgspec.Struct, frozen=True, kw_only=True):
    """Names and sizes of the mesh dims, outermost first."""

    dim_names: tuple[str, ...]
    shape: tuple[Whole, ...]

    def __post_init__(self) -> None:
        if len(self.dim_names) != len(self.shape):
            raise ValueError(f"dim_names has {len(self.dim_names)} names for {len(self.shape)} dims")
        if any(ranks > MAX_RANKS for ranks in itertools.accumulate(self.shape, operator.mul)):
            raise ValueError(f"shape has more ranks than the maximum of {MAX_RANKS}")


class ImportedLog(msgspec.Struct, frozen=True, kw_only=True):
    """A log of another tool from which results were imported.

    Attributes:
        file: name of the log.
        sha256: hash of its contents.
        format: the recognized formats.
        started: start time that the log states.
        unused_columns: unused column -> some of its values.
    """

    file: str
    sha256: str
    format: str
    tables: Count
    rows: Count
    started: str | None = None
    unused_columns: Mapping[str, tuple[str, ...]] = msgspec.field(name="aside", default_factory=dict)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a run file: the conditions of the measurement.

    Attributes:
        started: start time, ISO 8601.
        argv: command line.
        versions: package or component -> version.
        machine: the host of rank 0.
        env: recorded environment variables.
        options: fields of `RunOptions`.
        suites: names of the suites.
        launches: number of launches.
        imported: the logs, if the run was imported.
    """

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
    """The contents of a run file.

    Attributes:
        complete: whether the file has its end line.
    """

    path: Path
    header: Header
    results: tuple[Result, ...]
    complete: bool

    def by_one_process(self, suite: str) -> bool:
        """Whether only one of several ranks measured the suite, e.g. because it simulates the others.

        The ranks and the mesh of the run then do not describe the suite.
        """
        timed = [r for r in self.results if r.suite == suite and r.samples_s]
        return (
            len(self.header.ranks) > 1
            and not self.header.imported
            and bool(timed)
            and not any(r.rank_samples_s for r in timed)
        )

    def ok(self, suite: str) -> list[Result]:
        """Returns the suite's valid results that have a time."""
        return [r for r in self.results if r.suite == suite and r.status == "ok" and r.time_s is not None]

    def collectives(self) -> list[Result]:
        """Returns the valid results of the suite `collectives` in which all ranks send equal parts."""
        return [r for r in self.ok("collectives") if ROUTING not in r.params]
