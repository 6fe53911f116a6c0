"""Are the clocks true, does the flush flush, is throttling noticed: measurements of the instruments on one GPU.

    python -m dtbench.tests.gpu_check.truth FILE.json      in a process of its own, as `dtbench gpu-check` starts it

The goals are the project's, not a data sheet's. In a rehearsal everything is small and says nothing of a GPU.
"""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import msgspec
import torch

from dtbench.bench.clock import GpuClock, HostClock
from dtbench.machine import device as machine
from dtbench.model.errors import describe
from dtbench.profile.gpu import Sampler
from dtbench.tests.gpu_check.fake_gpu import NAME
from dtbench.world.ranks import LiveWorld, simulated_world
from dtbench_core import DTensor, Shard

# How far two clocks may be apart over the same work.
AGREE = 0.02
# Read twice to see the L2: less than an L2 of Hopper (50 to 60 MB) holds.
L2_READ_BYTES = 32 * 2**20
TRIES = 20
PRODUCTS = 20


class Check(msgspec.Struct):
    """One finding. got: figures by name, with their unit at its end. met: None where there is no goal, or the check
    was left out."""

    name: str
    goal: str = ""
    got: dict[str, float | list[str]] = {}
    met: bool | None = None
    left_out: str = ""


class Truth(msgspec.Struct, kw_only=True):
    """What a process found. rehearsal: the fake's name; None on a GPU."""

    kind: str = "gpu-truth"
    rehearsal: str | None = None
    checks: list[Check]


class Bench:
    """What the checks work with: sizes for a GPU, or small ones."""

    def __init__(self) -> None:
        self.rehearsal = machine.rehearsing()
        self.gpus = machine.gpus()
        self.device = self.gpus.select(0)
        self.clock = GpuClock(self.device, self.gpus)
        # A bf16 product whose rate other H200s are known by; 2 GiB, many times an L2.
        self.side, self.copy_bytes = (128, 2**22) if self.rehearsal else (8192, 2**31)
        self.load_s = 0.3 if self.rehearsal else 5.0
        self._events = self.gpus.event(), self.gpus.event()

    def product(self) -> Callable[[], object]:
        """A square bf16 product of random numbers, into memory that is there; it has run once."""
        shape = (self.side, self.side)
        a, b, out = (torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(3))
        run = partial(torch.mm, a, b, out=out)
        run()
        return run

    def products(self, run: Callable[[], object]) -> None:
        """Several of them between two events, until all have ended."""
        self._events[0].record()
        for _ in range(PRODUCTS):
            run()
        self._events[1].record()
        self.gpus.synchronize()

    def products_s(self) -> float:
        """What the last `products` took by its events."""
        return self._events[0].elapsed_time(self._events[1]) * 1e-3

    def seconds(self, run: Callable[[], object], calls: int, *, cold: bool = False) -> list[float]:
        """Of each try, per call, by the clock of samples."""
        run()
        taken = []
        for _ in range(TRIES):
            self.clock.settle(cold=cold)
            taken.append(self.clock.measure(run, calls))
        return taken


def events_against_host(bench: Bench) -> Check:
    """The same products by events and by the host's clock around them and a synchronise."""
    run = partial(bench.products, bench.product())
    ratios = []
    for _ in range(TRIES):
        bench.gpus.synchronize()
        ratios.append(HostClock().measure(run, 1) / bench.products_s())
    return _agreeing("events_against_host", "host_over_events", statistics.median(ratios))


def events_against_kernels(bench: Bench) -> Check:
    """One product by events and as the profiler sees its kernels."""
    if bench.rehearsal:
        return Check("events_against_kernels", left_out="a CPU has no kernels")
    from torch.profiler import ProfilerActivity, profile

    from dtbench.profile.recording import events_of

    run = bench.product()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        bench.gpus.synchronize()
        bench.products(run)
    kernels_s = sum(e["dur"] for e in events_of(profiler, 0) if e.get("cat") == "kernel") * 1e-6
    ratio = bench.products_s() / kernels_s if kernels_s else float("nan")
    return _agreeing("events_against_kernels", "events_over_kernels", ratio)


def _agreeing(name: str, figure: str, ratio: float) -> Check:
    return Check(name, f"within {AGREE:.0%}", {figure: ratio}, abs(ratio - 1) <= AGREE)


def flush(bench: Bench) -> Check:
    """32 MiB read again, with the L2 as the first read left it and flushed: every cold read is slower."""
    x = torch.ones(L2_READ_BYTES // 4, device=bench.device)
    warm, cold = bench.seconds(x.sum, 1), bench.seconds(x.sum, 1, cold=True)
    got = {f"{name}_us": statistics.median(taken) * 1e6 for name, taken in (("warm", warm), ("cold", cold))}
    separate = statistics.quantiles(cold)[0] > statistics.quantiles(warm)[2]
    return Check("flush", "quartiles of cold reads above those of warm ones", got, separate)


def start_of_a_sample(bench: Bench) -> Check:
    """How far off the start of a sample on the host's clock may be."""
    errors_us = []
    for _ in range(TRIES):
        bench.clock.settle()
        bench.clock.measure(lambda: None, 1)
        errors_us.append(bench.clock.error_ns / 1e3)
    got = {"error_us": statistics.median(errors_us), "worst_us": max(errors_us)}
    return Check("start_of_a_sample", got=got)


def throttling(bench: Bench) -> Check:
    """Seconds of products under NVML's eyes; the power limit is left as it is."""
    run = bench.product()
    with Sampler(0) as sampler:
        until = perf_counter() + bench.load_s
        while perf_counter() < until:
            bench.products(run)
    read = {name: [v for _, v in values] for name, values in sampler.samples.items()}
    samples = len(read.get("throttled", ()))
    got: dict[str, float | list[str]] = {
        f"{name}_{f.__name__}": f(v) for name, v in read.items() for f in (min, max)
    }
    got |= {"samples": samples, "reasons": sorted(sampler.reasons)}
    known = bench.rehearsal or "sm_clock_MHz" in read
    return Check("throttling", "clocks and reasons are read", got, known and samples > 0)


def limits(bench: Bench) -> Check:
    """The card's own: a copy, bytes read and written; a bf16 product of random numbers."""
    source = torch.ones(bench.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy_s = statistics.median(bench.seconds(partial(target.copy_, source), 1))
    product_s = statistics.median(bench.seconds(bench.product(), 5))
    rates = {"copy_TBps": 2 * bench.copy_bytes / copy_s, "bf16_TFLOPps": 2 * bench.side**3 / product_s}
    return Check("limits", got={name: rate / 1e12 for name, rate in rates.items()})


def dispatch(bench: Bench) -> Check:
    """A DTensor's add: its host's time while the GPU is idle and busy, and whether launch or kernel bounds it."""
    with simulated_world(bench.device) as world:
        small, large = _adding(world, 16), _adding(world, bench.copy_bytes // 16)
        occupy = bench.product()
        got: dict[str, float | list[str]] = {"host_idle_us": _host_us(bench, small, lambda: None)}
        got["host_busy_us"] = _host_us(bench, small, lambda: [occupy() for _ in range(50)])
        for name, run in (("small", small), ("large", large)):
            got[f"gpu_{name}_us"] = statistics.median(bench.seconds(run, 50)) * 1e6
    return Check("dispatch", got=got)


def graph(bench: Bench) -> Check:
    """A DTensor's adds, captured and replayed: what is left without the host."""
    if bench.rehearsal:
        return Check("graph", left_out="a CPU captures no graph")
    with simulated_world(bench.device) as world:
        run = _adding(world, 16)
        eager_us = statistics.median(bench.seconds(run, 50)) * 1e6
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(50):
                run()
        replay_us = statistics.median(bench.seconds(captured.replay, 1)) * 1e6 / 50
    got = {"eager_us": eager_us, "replay_us": replay_us}
    return Check("graph", "less than eager", got, replay_us < eager_us)


def _adding(world: LiveWorld, numel: int) -> Callable[[], object]:
    local = torch.ones(numel, device=world.device)
    x = DTensor.from_local(local, world.mesh, [Shard(0)], run_check=False)
    return lambda: x + x


def _host_us(bench: Bench, run: Callable[[], object], before: Callable[[], object]) -> float:
    """The host's microseconds for a call; `before` is left to the GPU."""
    for _ in range(100):
        run()
    bench.gpus.synchronize()
    before()
    taken_s = HostClock().measure(run, 100)
    bench.gpus.synchronize()
    return taken_s * 1e6


OF_CLOCKS = (events_against_host, events_against_kernels, flush, start_of_a_sample)
CHECKS = (*OF_CLOCKS, throttling, limits, dispatch, graph)


def main(path: Path) -> int:
    """Makes every check and writes what was found; 5 where one raised, else 0: a missed goal is a finding."""
    bench, found, code = Bench(), [], 0
    for check in CHECKS:
        try:
            found.append(check(bench))
        except Exception as error:  # the others are worth having
            traceback.print_exc()
            found.append(Check(check.__name__, left_out=f"failed: {describe(error)}", met=False))
            code = 5
    if bench.rehearsal:  # what a CPU reaches meets no goal of a GPU, and misses none
        found = [msgspec.structs.replace(check, met=None) for check in found]
    truth = Truth(rehearsal=NAME if bench.rehearsal else None, checks=found)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(truth), indent=1) + b"\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
