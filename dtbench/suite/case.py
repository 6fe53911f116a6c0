"""The options of a run, and the cases that a suite derives from them.

This module does not import torch. Names end with their unit: `time_s` seconds, `size_bytes` bytes, `algbw_Bps` bytes
per second.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Param = str | int | float | bool
# The time that a case measures. "host": the calling thread (dispatch latency). "device": the work itself.
ClockKind = Literal["host", "device"]
# The clock of a case. "busy" is the host's clock while the GPU runs earlier work; the others are named as above.
Instrument = Literal["host", "busy", "device"]
Estimator = Literal["min", "p25"]
DeviceType = Literal["cpu", "cuda"]
# Where a case is measured: on real ranks, or on simulated ranks in one process.
WorldKind = Literal["ranks", "simulated"]

# The stages of a dispatched op, in the order of a call. A profile lists any further stages after these.
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

# The impls that `--impl` selects from. Every other impl (local, c10d, unbucketed, limit) is a reference, which is
# always measured.
CHOOSABLE_IMPLS = ("core", "torch")
# Two reference impls. FLOOR: plain torch does one rank's share of the work, a lower bound for every distributed impl.
# WHOLE: plain torch does the work of all ranks on one rank, without communication. It is not a lower bound, since
# distributed ranks each have less work.
FLOOR, WHOLE = "local", "whole"
# The param of collectives in which ranks send each other unequal parts. It distinguishes their cases from those of
# equal parts, which alone are calibrated, refined, and compared with references.
ROUTING = "routing"
# Descriptions of the impls, for tables and reports.
IMPL_WORDS = {
    "core": "dtbench core",
    "torch": "torch.distributed.tensor",
    FLOOR: "plain torch, no distribution",
    WHOLE: "plain torch, all of the work on one rank",
    "wrapped": "a minimal tensor subclass in Python",
}


@dataclass(frozen=True)
class RunOptions:
    """The validated options of a run, from which suites derive their cases.

    Attributes:
        mesh: (dim name, size), outermost first.
        sizes_bytes: the sizes of size sweeps.
        dtypes: names of torch's dtypes.
        device_type: "cpu" or "cuda".
        impls: the impls among `CHOOSABLE_IMPLS` that are measured.
        quick: whether to use fewer sizes and samples.
        sizes_chosen: whether the user chose the sizes. Then every suite measures all of them.
        options: the options that suites declare, as given.
        refine: whether to measure all sizes, and to add cases where a suite's sweep is too coarse.
    """

    mesh: tuple[tuple[str, int], ...]
    sizes_bytes: tuple[int, ...]
    dtypes: tuple[str, ...] = ("float32",)
    device_type: DeviceType = "cpu"
    impls: tuple[str, ...] = CHOOSABLE_IMPLS
    quick: bool = False
    sizes_chosen: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    refine: bool = False

    @property
    def coarse_sizes_bytes(self) -> tuple[int, ...]:
        """Every second default size, for suites with many cases per size; all sizes that the user chose."""
        return self.sizes_bytes if self.sizes_chosen or self.quick else self.sizes_bytes[::2]

    @property
    def few_sizes_bytes(self) -> tuple[int, ...]:
        """One size from the middle, for secondary cases beside a suite's main sweep; all sizes that the user chose."""
        coarse = self.coarse_sizes_bytes
        return self.sizes_bytes if self.sizes_chosen else coarse[len(coarse) // 2 :][:1]

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.mesh)

    def wants(self, impl: str) -> bool:
        """Whether `impl` is measured. Reference impls always are."""
        return impl not in CHOOSABLE_IMPLS or impl in self.impls


@dataclass
class Workload:
    """One impl of a case, set up on one rank and ready to be timed.

    Attributes:
        run: the timed call.
        before: prepares the next sample; not timed.
        check: returns an error text if the data is wrong, else None. Called after the warm-up and after the samples.
        counters: returns counters by name. Called once, at the end.
        participates: False on a rank that only waits for the others. Its times do not count.
        close: frees resources.
    """

    run: Callable[[], object]
    before: Callable[[], None] | None = None
    check: Callable[[], str | None] | None = None
    counters: Callable[[], Mapping[str, float]] | None = None
    participates: bool = True
    close: Callable[[], None] | None = None


@dataclass(frozen=True)
class Case:
    """One measurement, with several impls that are sampled in turn.

    Attributes:
        name: the case's name.
        params: the parameters that identify the case among the cases of the same name.
        build: impl name -> function of the `World`, which returns this rank's `Workload`. If it raises `Skip`, the impl
            is recorded as skipped, with the reason.
        size_bytes: the size that bandwidths refer to (nccl-tests' S for collectives), or None.
        bandwidth: whether size / time is a bandwidth. False for collectives of one rank, or if only the start is timed.
        busbw_factor: bus bandwidth / algorithm bandwidth; None without a bus bandwidth.
        clock: "host" times the calling thread (dispatch latency); "device" times the work itself.
        busy: whether to time the host while a GPU runs earlier work; no effect on a CPU.
        calls_per_sample: calls between two clock readings, back to back without a barrier; the sample is their mean.
        sample_s: if above 0, least duration of a sample, seconds. A sample then may have more calls than that; the
            counter `calls_per_sample` records the number of calls actually made.
        samples: number of samples; None lets the schedule choose within its budget.
        warmup_calls: minimum number of unmeasured calls before the samples.
        passes: number of passes on simulated ranks. Cases with several are measured before the others, all of them once
            per pass. A disturbance of some seconds then affects one pass of each case.
        tolerance: the smallest relative slowdown that a gate must exclude before it calls the case the same; None for
            the gate's default.
        floor_s: changes below this many seconds do not count in a gate.
        world: where this case is measured; None for the world of its suite.
    """

    name: str
    params: Mapping[str, Param]
    build: Mapping[str, Callable[[Any], Workload]]
    size_bytes: int | None = None
    bandwidth: bool = True
    busbw_factor: float | None = None
    clock: ClockKind = "device"
    busy: bool = False
    calls_per_sample: int = 1
    sample_s: float = 0.0
    samples: int | None = None
    warmup_calls: int = 3
    passes: int = 1
    tolerance: float | None = None
    floor_s: float = 0.0
    world: WorldKind | None = None

    def __post_init__(self) -> None:
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise ValueError(f"{self.name}: tolerance is {self.tolerance}, expected a share above 0")
        if not 0 <= self.floor_s < math.inf:
            raise ValueError(f"{self.name}: floor_s is {self.floor_s}, expected seconds of at least 0")
        if self.busy and self.clock != "host":
            raise ValueError(f"{self.name}: busy=True requires clock='host', got clock={self.clock!r}")

        if self.world not in (None, *get_args(WorldKind)):
            raise ValueError(
                f"{self.name}: got world={self.world!r}, expected one of {', '.join(get_args(WorldKind))}"
            )

    @property
    def instrument(self) -> Instrument:
        return "busy" if self.busy else self.clock


class Skip(Exception):  # noqa: N818 - a signal, not an error
    """Raised by a builder if its impl does not apply. The message is recorded as the reason."""
