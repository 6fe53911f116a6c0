"""Measures whether the core is correct on a GPU, the limits of the GPU itself, and the accuracy of the clocks.

    python -m dtbench.tests.gpu.instruments smoke FILE.json      one of GROUPS; written after each check

A check returns figures by name, which ends in the unit, its goal (the project's, not a data sheet's), and whether it
is met. In a rehearsal everything is small, and no figure applies to a GPU.
"""

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.tensor as torch_dtensor
from torch.profiler import ProfilerActivity, profile

import dtbench_core
from dtbench.engine.clock import Clock, HostClock, clocks_of
from dtbench.engine.rank_votes import simulated_world, world_of_one
from dtbench.engine.workers import scratch
from dtbench.errors import describe
from dtbench.machine.device import gpus, rehearsing
from dtbench.records.atomic import write_atomically
from dtbench_core import Partial, Replicate, Shard, comm
from dtbench_core.redistribute.movers import Exchange, make_mover
from dtbench_core.torch_compat import reduce_scatter_single
from dtbench_suites import packing, tensor_parallel
from dtbench_suites.bucketer import bucketer_of, send_all
from dtbench_suites.data import MIB

Run = Callable[[], object]
Found = tuple[dict[str, float | str], str, bool | None]
AGREE, TRIES = 0.02, 20  # how far two clocks may be apart over the same work; samples of each
# Between two readings of a clock: bf16 products, and calls of an op.
PRODUCTS, CALLS = 20, 50
OCCUPIED_S = 2e-4  # longer than a launch takes
OF_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of the profiler's events


class Bench:
    """Device, clocks and sizes that the checks use: large sizes for a GPU, small ones in a rehearsal."""

    def __init__(self) -> None:
        self.rehearsal, self.gpus = rehearsing(), gpus()
        self.device = self.gpus.select(0)
        self.clocks = clocks_of(self.device)
        self.clock = self.clocks["device"]
        # A product whose rate cards are known by; 2 GiB, many times an L2; less than Hopper's L2 (50 to 60 MB).
        self.side, self.copy_bytes, self.l2_bytes = (
            (128, 2**22, 2**16) if self.rehearsal else (8192, 2**31, 2**25)
        )

    def product(self) -> Run:
        """Returns a square bf16 product of random matrices, into allocated memory."""
        shape = (self.side, self.side)
        a, b, out = (torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(3))
        return partial(torch.mm, a, b, out=out)

    def large_copy(self) -> Run:
        source = torch.ones(self.copy_bytes, dtype=torch.uint8, device=self.device)
        return partial(torch.empty_like(source).copy_, source)

    def us(self, run: Run, calls: int = CALLS, clock: Clock | None = None, cold: bool = False) -> list[float]:
        """Returns sorted times of a call, microseconds, by the GPU's clock or another."""
        clock, taken = clock or self.clock, []
        for _ in range(TRIES + 1):  # the first warms up
            clock.settle(cold=cold)
            taken.append(clock.measure(run, calls) * 1e6)
        return sorted(taken[1:])

    def behind_us(self, run: Run, cold: bool = False) -> list[float]:
        """Returns sorted times of a call that is queued before the GPU reaches it, microseconds: without its launch."""
        if self.rehearsal:  # a CPU has no queue
            return self.us(run, 1)
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
    """Compares a DTensor's add, a bucket and a reduce-scatter of one rank with plain torch."""
    same = partial(torch.testing.assert_close, rtol=0, atol=0)
    sent = torch.randn(1024, device=bench.device)
    with simulated_world(bench.device) as world:
        x: Any = dtbench_core.DTensor.from_local(sent, world.mesh, [dtbench_core.Shard(0)], run_check=False)
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
    """Measures the card's own limits: a copy (bytes read and written), a bf16 product, the launch of a small kernel."""
    copy_us = bench.median_us(bench.large_copy(), 1)
    launch = partial(torch.ones(16, device=bench.device).add_, 1)
    return {
        "copy_GBps": 2 * bench.copy_bytes / copy_us / 1e3,
        "bf16_TFLOPps": 2 * bench.side**3 / bench.median_us(bench.product(), 5) / 1e6,
        "launch_idle_us": bench.us(launch, clock=bench.clocks["host"])[0],
        "launch_busy_us": bench.us(launch, clock=bench.clocks["busy"])[0],
    }, "", None  # fmt: skip


def graph(bench: Bench) -> Found:
    """Compares adds called one by one with their replay as a CUDA graph, which needs little of the host."""
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
    """Compares the time of products by events with that of the host's clock around them."""
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
    """Compares reading memory again with the L2 warm and flushed."""
    read = torch.ones(bench.l2_bytes // 4, device=bench.device).sum
    warm, cold = bench.behind_us(read), bench.behind_us(read, cold=True)
    got = {"warm_us": statistics.median(warm), "cold_us": statistics.median(cold)}
    return {**got}, "cold reads' quartiles above warm ones'", cold[TRIES // 4] > warm[3 * TRIES // 4]


def packing_kernels(bench: Bench) -> Found:
    """Measures the bandwidth of packing 64 MiB in pieces of 16 KiB, by a graph's replay and by the profiler's kernels.

    A copy of about a millisecond is measured by both. CUPTI may stay attached and slow down later checks, so this is
    the last check of its process.
    """
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
    """Returns the time of each kernel, copy and memset of one call by the profiler, seconds."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        bench.gpus.synchronize()
    with scratch() as folder:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        trace = json.loads((folder / "trace.json").read_text())
    return [event["dur"] * 1e-6 for event in trace["traceEvents"] if event.get("cat") in OF_GPU]


ODD_COST = 0.10  # at most so much slower with one shard of odd size


def odd_shard(bench: Bench) -> Found:
    """Compares packing 64 MiB in pieces of 16 KiB with and without a bias before them whose shards have 4 bytes.

    Copies behind the bias are not aligned to 16 bytes. Times are those of a replayed graph.
    """
    number, count = packing.TOTAL // packing.SIZES[0], packing.SIZES[0] // 4
    number = number // 32 if bench.rehearsal else number
    us = dict[str, float]()
    with simulated_world(bench.device) as world:
        group = world.mesh.get_group(0)
        _, even = packing.make_gradients(number, count, torch.float32, world.device)
        odd = [torch.ones(group.size(), device=world.device), *even]
        for impl in ("core", "core_held"):
            for name, gradients in (("even", even), ("odd", odd)):
                bucketer, inputs = bucketer_of(impl, packing.BUCKET, gradients, group.size())
                callbacks = [lambda _result: None] * len(inputs)
                replay = bench.gpus.captured(partial(send_all, bucketer, inputs, callbacks, group))
                us[f"{impl}_{name}_us"] = statistics.median(bench.behind_us(replay))
    slower = {
        f"{impl}_slower": us[f"{impl}_odd_us"] / us[f"{impl}_even_us"] - 1 for impl in ("core", "core_held")
    }
    return {**us, **slower}, f"at most {ODD_COST:.0%} slower", max(slower.values()) <= ODD_COST


# ---- the copies of a redistribution ----

MOVED_SHARE = 0.8  # of the card's own copy
COLUMNS = 8192  # of bf16: a shard of 8 has rows of 2 KiB
MOVE_BYTES = (64 * MIB, 256 * MIB, 1024 * MIB)
MOVE_BYTES_IN_REHEARSAL = (64 * 1024, 128 * 1024, 256 * 1024)


def moves_of(size: int) -> Callable[[Bench], Found]:
    """Returns the check of one size, an index of MOVE_BYTES."""

    def check(bench: Bench) -> Found:
        nbytes = (MOVE_BYTES_IN_REHEARSAL if bench.rehearsal else MOVE_BYTES)[size]
        columns = COLUMNS // 64 if bench.rehearsal else COLUMNS
        rows = nbytes // 2 // columns
        source = torch.ones(rows, columns, dtype=torch.bfloat16, device=bench.device)
        copy_us = statistics.median(bench.behind_us(partial(torch.empty_like(source).copy_, source)))
        shares = dict[str, float]()
        with simulated_world(bench.device) as world:
            group, n = world.mesh.get_group(0), world.world_size
            # The shape that the ranks share, for which each rank copies `nbytes`.
            moves = {
                "S(1)->R": (Shard(1), Replicate(), (rows, columns)),
                "P->S(1)": (Partial(), Shard(1), (rows, columns)),
                "S(0)->S(1)": (Shard(0), Shard(1), (rows * n, columns)),
                "S(1)->S(0)": (Shard(1), Shard(0), (rows, columns * n)),
                "uneven S(1)->R": (Shard(1), Replicate(), (rows, columns - 1)),
            }
            for name, (src, dst, shape) in moves.items():
                step = Exchange((src,), (dst,), (n,), shape, source.dtype, group, (0,))
                us = statistics.median(bench.behind_us(bench.gpus.captured(without_sending(step, source))))
                shares[name] = copy_us / us
        got = {"MiB": nbytes / MIB, "copy_GBps": 2 * nbytes / copy_us / 1e3, **shares}
        return {**got}, f"at least {MOVED_SHARE:.0%} of the copy", min(shares.values()) >= MOVED_SHARE

    check.__name__ = f"moves_{MOVE_BYTES[size] // MIB}MiB"
    return check


def without_sending(step: Exchange, memory: torch.Tensor) -> Run:
    """Returns a rank's copies in a step, without communication: it packs its message, and unpacks `memory`."""
    move = make_mover(step)
    src, shape = step.src[0], list(step.shape)
    if isinstance(src, Shard):
        shape[src.dim] = src.lengths(shape[src.dim], step.parts)[0]
    local = torch.ones(shape, dtype=step.dtype, device=memory.device)

    def received(_sent: torch.Tensor, wanted: Sequence[int], *_about: Any) -> torch.Tensor:
        return memory.view(-1)[: torch.Size(wanted).numel()].view(tuple(wanted))

    def run() -> None:
        with mock.patch.multiple(comm, gathered=received, reduce_scattered=received, exchanged=received):
            move(local)

    return run


# ---- torch.compile, and a captured block ----


def compiled(bench: Bench) -> Found:
    """Measures a chain of pointwise ops on a sharded tensor, compiled by inductor: compile time and call time."""
    got: dict[str, float | str] = {}
    compile_with(bench, torch.neg)(torch.ones(8, device=bench.device))  # sets inductor up
    with simulated_world(bench.device) as world:
        side = 64 if bench.rehearsal else 1024
        plain = torch.randn(side, side, device=bench.device)
        for name, api in (("core", dtbench_core), ("plain", None), ("torch", torch_dtensor)):
            x = api.DTensor.from_local(plain, world.mesh, [api.Shard(0)], run_check=False) if api else plain
            try:
                figures = compiled_figures(bench, x, chain(plain))
            except Exception as error:  # the core's figures are worth having without torch's
                if name != "torch":
                    raise
                figures = {"failed": describe(error)}
            got |= {f"{name}_{figure}": value for figure, value in figures.items()}
    return got, "a compiled call below an eager one", got["core_call_us"] < got["core_eager_us"]  # type: ignore[operator]


def compile_with(bench: Bench, function: Any) -> Any:
    """Compiles a function; in a rehearsal without inductor's C++ compiler, which takes a minute on two cores."""
    return torch.compile(function, backend="aot_eager" if bench.rehearsal else "inductor")


def compiled_figures(bench: Bench, x: Any, want: torch.Tensor) -> dict[str, float | str]:
    torch._dynamo.reset()
    function = compile_with(bench, chain)
    began = time.perf_counter()
    result: Any = function(x)
    bench.gpus.synchronize()
    compile_s = time.perf_counter() - began
    local = result if type(result) is torch.Tensor else result.to_local()
    torch.testing.assert_close(local, want, rtol=1e-4, atol=1e-4)  # fused, with other roundings
    eager_us, call_us = (bench.median_us(partial(call, x)) for call in (chain, function))
    return {"compile_s": compile_s, "eager_us": eager_us, "call_us": call_us}


def chain(x: torch.Tensor) -> torch.Tensor:
    return (((x * 2 + 1) * x).sin() * x + x) * 0.5


def captured(bench: Bench) -> Found:
    """Compares calling a tensor-parallel transformer block, one of 8 ranks, with its replay as a CUDA graph.

    Both are forward and backward. Collectives take no time and move nothing; `pair-captured` checks values on two
    ranks.
    """
    width, heads, positions = (64, 8, 16) if bench.rehearsal else (1024, 16, 512)
    got: dict[str, float | str] = {}
    with simulated_world(bench.device) as world:
        x = torch.randn(1, positions, width, device=bench.device, requires_grad=True)
        for impl in ("core", "torch"):
            torch.manual_seed(0)
            model = tensor_parallel.TransformerBlock(width, heads).to(bench.device)
            block = tensor_parallel.parallelize(impl, model, world.mesh)
            wanted = [x, *block.parameters()]
            run = partial(tensor_parallel.run_pass, block, [x], wanted, torch.ones_like)
            got[f"{impl}_eager_us"] = bench.median_us(run, 2)
            try:
                got[f"{impl}_replay_us"] = bench.median_us(bench.gpus.captured(run), 2)
            except RuntimeError as error:  # the core's figures are worth having without torch's
                if impl == "core":
                    raise
                got["torch_failed"] = describe(error)
    return got, "replayed in less than eager", got["core_replay_us"] < got["core_eager_us"]  # type: ignore[operator]


GROUPS: dict[str, tuple[Callable[[Bench], Found], ...]] = {
    "smoke": (op_and_bucket,),
    "limits": (limits,),
    "graph": (graph,),
    "clocks": (events_against_host, flush),
    "kernels": (odd_shard, packing_kernels),
    "moves": tuple(map(moves_of, range(len(MOVE_BYTES)))),
    "compiled": (compiled,),
    "captured": (captured,),
}


def main(group: str, path: Path) -> int:
    """Runs every check of a group. Returns 5 if a check raised, else 0: a missed goal is a finding."""
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
