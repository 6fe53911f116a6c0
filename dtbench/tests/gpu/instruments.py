"""Is the core right on a GPU, what is the GPU's own limit, are the clocks true: measured in a process of its own.

    python -m dtbench.tests.gpu.instruments smoke FILE.json      one of GROUPS; written after each check

A check gives figures by name, with their unit at its end, its goal (the project's, not a data sheet's), and whether
that is met. In a rehearsal everything is small and says nothing of a GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.tensor as torch_dtensor
from torch.profiler import ProfilerActivity, profile

import dtbench_core
from dtbench.engine.clock import Clock, HostClock, clocks_of
from dtbench.engine.ranks import simulated_world, world_of_one
from dtbench.engine.workers import scratch
from dtbench.machine import device as machine
from dtbench.records.atomic import write_atomically
from dtbench.suite.errors import describe
from dtbench_core.torch_compat import reduce_scatter_single
from dtbench_suites import packing

Run = Callable[[], object]
Found = tuple[dict[str, float | str], str, bool | None]
AGREE, TRIES = 0.02, 20  # how far two clocks may be apart over the same work; samples of each
# Between two readings of a clock: bf16 products, and calls of an op.
PRODUCTS, CALLS = 20, 50
OCCUPIED_S = 2e-4  # longer than a launch takes
OF_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of the profiler's events


class Bench:
    """What the checks work with: sizes for a GPU, or small ones."""

    def __init__(self) -> None:
        self.rehearsal, self.gpus = machine.rehearsing(), machine.gpus()
        self.device = self.gpus.select(0)
        self.clocks = clocks_of(self.device)
        self.clock = self.clocks["device"]
        # A product whose rate cards are known by; 2 GiB, many times an L2; less than Hopper's L2 (50 to 60 MB).
        sizes = (128, 2**22, 2**16) if self.rehearsal else (8192, 2**31, 2**25)
        self.side, self.copy_bytes, self.l2_bytes = sizes

    def product(self) -> Run:
        """A square bf16 product of random numbers, into memory that is there."""
        shape = (self.side, self.side)
        a, b, out = (torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(3))
        return partial(torch.mm, a, b, out=out)

    def large_copy(self) -> Run:
        source = torch.ones(self.copy_bytes, dtype=torch.uint8, device=self.device)
        return partial(torch.empty_like(source).copy_, source)

    def us(self, run: Run, calls: int = CALLS, clock: Clock | None = None, cold: bool = False) -> list[float]:
        """Of a call, in order; by the GPU's clock, or another."""
        clock, taken = clock or self.clock, []
        for _ in range(TRIES + 1):  # the first warms up
            clock.settle(cold=cold)
            taken.append(clock.measure(run, calls) * 1e6)
        return sorted(taken[1:])

    def behind_us(self, run: Run, cold: bool = False) -> list[float]:
        """Of a call that the GPU finds in its queue, so without the launch; in order."""
        taken, start, end = [], self.gpus.event(), self.gpus.event()
        for _ in range(TRIES + 1):
            self.clock.settle(cold=cold)
            self.gpus.occupy(OCCUPIED_S)
            start.record()
            run()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) * 1e3)
        return sorted(taken[1:])

    def median_us(self, run: Run, calls: int = CALLS) -> float:
        return statistics.median(self.us(run, calls))


def op_and_bucket(bench: Bench) -> Found:
    """A DTensor's add, a bucket and a plain reduce-scatter of one rank, each beside plain torch."""
    same = partial(torch.testing.assert_close, rtol=0, atol=0)
    sent = torch.randn(1024, device=bench.device)
    with simulated_world(bench.device) as world:
        x = dtbench_core.DTensor.from_local(sent, world.mesh, [dtbench_core.Shard(0)], run_check=False)
        same((x + x).to_local(), sent + sent)
    reduced: list[torch.Tensor] = []
    with world_of_one(bench.device) as (world, _):
        bucketer = dtbench_core.ReduceScatterBucketer()
        bucketer.reduce_scatter_async(sent, world.mesh.get_group(0), reduced.append)
        bucketer.flush()
        reduce_scatter_single(out := torch.empty_like(sent), sent)
        same([*reduced, out], [sent, sent])
    return {}, "as plain torch gives", True


def limits(bench: Bench) -> Found:
    """The card's own: a copy, bytes read and written; a bf16 product; the launch of a small kernel."""
    copy_us = bench.median_us(bench.large_copy(), 1)
    launch = partial(torch.ones(16, device=bench.device).add_, 1)
    return {
        "copy_GBps": 2 * bench.copy_bytes / copy_us / 1e3,
        "bf16_TFLOPps": 2 * bench.side**3 / bench.median_us(bench.product(), 5) / 1e6,
        "launch_idle_us": bench.us(launch, clock=bench.clocks["host"])[0],
        "launch_busy_us": bench.us(launch, clock=bench.clocks["busy"])[0],
    }, "", None  # fmt: skip


def graph(bench: Bench) -> Found:
    """Adds called one by one, and replayed as a CUDA graph: what is left without the host."""
    us: dict[str, float] = {}
    with simulated_world(bench.device) as world:
        plain = torch.ones(16, device=bench.device)
        for name, api in (("core", dtbench_core), ("torch", torch_dtensor), ("plain", None)):
            x = api.DTensor.from_local(plain, world.mesh, [api.Shard(0)], run_check=False) if api else plain
            call = partial(torch.add, x, x)
            us[f"{name}_eager_us"] = bench.median_us(call)
            replay = bench.gpus.captured(lambda call=call: [call() for _ in range(CALLS)])  # type: ignore[misc]
            us[f"{name}_replay_us"] = bench.median_us(replay, 1) / CALLS
    return {**us}, "replayed in less than eager", us["core_replay_us"] < us["core_eager_us"]


def events_against_host(bench: Bench) -> Found:
    """The same products by events and by the host's clock around them."""
    run, ratios = bench.product(), []
    for _ in range(TRIES):
        bench.clock.settle()
        by_events: list[float] = []
        by_host = HostClock().measure(lambda add=by_events.append: add(bench.clock.measure(run, PRODUCTS)), 1)  # type: ignore[misc]
        ratios.append(by_host / PRODUCTS / by_events[0])
    ratio = statistics.median(ratios)
    got = {"host_over_events": ratio, "start_of_a_sample_off_by_us": bench.clock.error_ns / 1e3}
    return {**got}, f"within {AGREE:.0%}", abs(ratio - 1) <= AGREE


def flush(bench: Bench) -> Found:
    """Memory read again, with the L2 as the first read left it and flushed."""
    read = torch.ones(bench.l2_bytes // 4, device=bench.device).sum
    warm, cold = bench.behind_us(read), bench.behind_us(read, cold=True)
    got = {"warm_us": statistics.median(warm), "cold_us": statistics.median(cold)}
    return {**got}, "cold reads' quartiles above warm ones'", cold[TRIES // 4] > warm[3 * TRIES // 4]


def packing_kernels(bench: Bench) -> Found:
    """64 MiB packed in pieces of 16 KiB: bytes read and written over a graph's replay, and over the profiler's sum of
    kernels; a copy that lasts a millisecond by both. CUPTI may stay attached and slow what comes after: last in a
    process."""
    if bench.rehearsal:
        return {"left out": "a CPU has no kernels"}, "", None
    number, count = packing.TOTAL // packing.SIZES[0], packing.SIZES[0] // 4
    got, impls, moved = dict[str, float](), ("core", "core_held", "copy"), 2 * packing.TOTAL / 1e9
    with simulated_world(bench.device) as world:
        for impl in impls:
            replay = packing.build(impl, number, count, torch.float32, world, bench.gpus.captured).run
            got[f"{impl}_replay_GBps"] = moved / statistics.median(bench.behind_us(replay)) * 1e6
        large = bench.large_copy()
        events_us = statistics.median(bench.behind_us(large))
        for impl in impls:
            kernels = kernels_s(bench, packing.build(impl, number, count, torch.float32, world).run)
            got |= {f"{impl}_GBps": moved / sum(kernels), f"{impl}_kernels": float(len(kernels))}
        got |= {"large_copy_us": events_us, "large_copy_kernel_us": sum(kernels_s(bench, large)) * 1e6}
    ratio = events_us / got["large_copy_kernel_us"]
    return {**got}, f"events within {AGREE:.0%} of the large copy's kernel", abs(ratio - 1) <= AGREE


def kernels_s(bench: Bench, run: Run) -> list[float]:
    """Of each kernel, copy and set of one call, as the profiler has them."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        bench.gpus.synchronize()
    with scratch() as folder:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [e["dur"] * 1e-6 for e in events if e.get("cat") in OF_GPU]


GROUPS: dict[str, tuple[Callable[[Bench], Found], ...]] = {
    "smoke": (op_and_bucket,),
    "limits": (limits,),
    "graph": (graph,),
    "clocks": (events_against_host, flush),
    "profiler": (packing_kernels,),
}


def main(group: str, path: Path) -> int:
    """Makes every check of a group; 5 where one raised, else 0: a missed goal is a finding."""
    bench, findings, code = Bench(), [], 0
    for check in GROUPS[group]:
        try:
            got, goal, met = check(bench)
        except Exception as error:  # the others are worth having
            traceback.print_exc()
            got, goal, met, code = {"failed": describe(error)}, "", False, 5
        shown = {True: "yes", False: "NO", None: ""}[None if bench.rehearsal else met]
        findings.append([check.__name__, got, goal, shown])
        write_atomically(path, json.dumps(findings, indent=1) + "\n", lambda head: "[" in head, "measurement")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
