"""What dtbench measures: the plan, and the cases that a suite makes of it. Plain data, no torch.

Units stand in the names: `time_s` seconds, `size_bytes` bytes, `algbw_Bps` bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Param = str | int | float | bool
# Whose time a case takes: "host", the calling thread's (dispatch latency); "device", that of the work itself.
ClockKind = Literal["host", "device"]
# What reads it: "busy" is the host's clock while the GPU is at earlier work.
Instrument = Literal["host", "busy", "device"]
Estimator = Literal["min", "p25"]
DeviceType = Literal["cpu", "cuda"]

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
# Two of the references. FLOOR: plain torch does a rank's share of the work, which nothing that distributes it can beat.
# WHOLE: plain torch does all ranks' work on one, without communication: no floor, as a rank of several has less to do.
FLOOR, WHOLE = "local", "whole"
# What the names of implementations mean, wherever they stand.
IMPL_WORDS = {
    "core": "dtbench core",
    "torch": "torch.distributed.tensor",
    FLOOR: "plain torch, no distribution",
    WHOLE: "plain torch, all of the work on one rank",
    "wrapped": "a minimal tensor subclass in Python",
}


@dataclass(frozen=True)
class RunOptions:
    """What to measure: the options of one run, validated. Suites derive their cases from it."""

    mesh: tuple[tuple[str, int], ...]  # (dim name, size), outermost first
    sizes_bytes: tuple[int, ...]  # of the size sweeps
    dtypes: tuple[str, ...] = ("float32",)
    device_type: DeviceType = "cpu"
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
    bandwidth: whether size over time is one: not of a collective of one rank, nor of a host that only launches.
    busbw_factor: bus bandwidth = algorithm bandwidth x this; None where there is no bus bandwidth.
    clock: "host" times the calling thread (dispatch latency); "device" times the work itself.
    busy: the host's time is taken while a GPU is still at earlier work; nothing on a CPU.
    calls_per_sample: calls between the two clock readings; the sample is their mean. More than one
        means back to back, without a barrier between.
    sample_s: where above 0, `run` repeats calls until a sample lasts so many seconds, which may take more
        than `calls_per_sample`; the counter of that name then says how many.
    samples: fixed number of samples, or None to let the sampler choose within its budget.
    warmup_calls: at least so many calls are thrown away.
    passes: above 1, in a simulated world, such cases are measured before all others, so many times in turn: what
        disturbs the machine for some seconds then spoils one pass of each instead of all samples of some.
    tolerance: the largest slowdown that a gate's PASS has to exclude, as a share (0.05 is 5%), or None for
        the gate's own. floor_s: changes of less than so many seconds are none to a gate.
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

    def __post_init__(self) -> None:
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise ValueError(f"{self.name}: tolerance is {self.tolerance}, expected a share above 0")
        if not 0 <= self.floor_s < math.inf:
            raise ValueError(f"{self.name}: floor_s is {self.floor_s}, expected seconds of at least 0")
        if self.busy and self.clock != "host":
            raise ValueError(f"{self.name}: busy with the clock {self.clock!r}, expected clock='host'")

    @property
    def instrument(self) -> Instrument:
        return "busy" if self.busy else self.clock


class Skip(Exception):  # noqa: N818 - it is a signal of a builder, not an error
    """Raised by a builder whose impl does not apply here; the message is the reason recorded."""
