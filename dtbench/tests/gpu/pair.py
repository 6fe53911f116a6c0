"""Two ranks that share one GPU over NCCL: whether that works, and what only real ranks show.

    python -m dtbench.tests.gpu.pair CHECK SECONDS FILE.json       one of CHECKS

Ranks that are not done in time are killed. How they come to share a GPU: `sharing.py`.

Nothing here is the bandwidth of a link: what is sent stays on the card.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dtbench.machine.device import gpus, rehearsing
from dtbench.machine.provenance import preloaded_nccl
from dtbench.records.atomic import write_atomically
from dtbench.tests.gpu.sharing import LIBRARY, MODES, format_variables

RANKS = 2
TRIES = 5
READING_S = 10.0  # of the time of `attach`, kept to read its traces

Figures = dict[str, float | str]


# ---- the ranks of one check ----


class RanksFailedError(Exception):
    """Ranks raised, died or were not done in time."""


def start_ranks(check: str, variables: Mapping[str, str], seconds: float, folder: Path) -> Figures:
    """Runs a check on two new ranks; returns the figures of the first, as far as both came.

    Raises:
        RanksFailedError: a rank left no figures; says how each ended.
    """
    words = [sys.executable, "-P", "-m", "dtbench.tests.gpu.pair", check]
    die_with_parent = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h
    store = tempfile.mkdtemp(dir=folder)
    files = [Path(store) / f"figures-{rank}.json" for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), f"{store}/store", str(files[rank]), str(folder)],
            env=os.environ | variables,
            preexec_fn=die_with_parent,
        )
        for rank in range(RANKS)
    ]
    deadline, codes = time.monotonic() + seconds, [None] * RANKS
    while codes != [0] * RANKS and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]  # type: ignore[misc]
    for rank in ranks:
        rank.kill()  # one that still runs waits for a peer
        rank.wait()
    figures = [json.loads(file.read_text()) for file in files if file.exists()]
    if codes != [0] * RANKS:
        how = f"still running {seconds - max(deadline - time.monotonic(), 0):.0f} s after its start"
        ends = [f"rank {rank}: {how if code is None else f'exit {code}'}" for rank, code in enumerate(codes)]
        if len(figures) < RANKS:
            raise RanksFailedError("; ".join(ends))
        figures[0] |= {"ended early": "; ".join(ends)}
    return dict(figures[0])


def join(rank: int, store: str) -> Any:
    """Joins the world of both ranks; returns the device, which both share."""
    import torch
    import torch.distributed as dist

    device = gpus().select(0)
    dist.init_process_group(
        os.environ["DTBENCH_TEST_BACKEND"],
        store=dist.FileStore(store, RANKS),  # type: ignore[attr-defined]
        rank=rank,
        world_size=RANKS,
        device_id=device if device.type == "cuda" else None,
    )
    torch.manual_seed(0)
    return device


def median_us(run: Callable[[], object]) -> float:
    """Returns the median time of a call, the device's work included; ranks begin together."""
    import torch.distributed as dist

    taken = []
    for _ in range(TRIES + 1):  # the first warms up
        gpus().synchronize()
        dist.barrier()
        began = time.perf_counter()
        run()
        gpus().synchronize()
        taken.append((time.perf_counter() - began) * 1e6)
    return statistics.median(taken[1:])


# ---- does it work ----


def pair(rank: int, device: Any, _folder: Path) -> Iterator[Figures]:
    """Collectives of two ranks beside plain sums, waiting and asynchronous, on two streams; then in a second group,
    which has a communicator of its own."""
    import torch
    import torch.distributed as dist

    from dtbench_core.torch_compat import all_gather_single, reduce_scatter_single

    same = partial(torch.testing.assert_close, rtol=0, atol=0)
    values = torch.arange(2**20, device=device) % 101
    mine, both = (values * (rank + 1)).float(), (values * 3).float()
    half = len(values) // RANKS
    summed = mine.clone()
    dist.all_reduce(summed)
    same(summed, both, msg=lambda text: f"all_reduce: {text}")
    reduce_scatter_single(part := torch.empty(half, device=device), mine)
    same(part, both[half * rank : half * (rank + 1)], msg=lambda text: f"reduce_scatter: {text}")
    all_gather_single(gathered := torch.empty_like(mine), part)
    same(gathered, both, msg=lambda text: f"all_gather: {text}")
    dist.all_to_all_single(exchanged := torch.empty_like(mine), mine)
    same(
        exchanged[:half],
        values[half * rank : half * (rank + 1)].float(),
        msg=lambda text: f"all_to_all: {text}",
    )
    # The matrix products run on another stream while the collective does.
    aside = torch.cuda.Stream() if device.type == "cuda" else None
    summed = mine.clone()
    matrix = torch.ones(512, 512, device=device)
    work = dist.all_reduce(summed, async_op=True)
    with torch.cuda.stream(aside) if aside else contextlib.nullcontext():
        if aside:
            aside.wait_stream(torch.cuda.default_stream())
        product = matrix @ matrix
    assert work is not None
    work.wait()
    same(summed, both, msg=lambda text: f"asynchronous all_reduce: {text}")
    gpus().synchronize()
    same(product, torch.full_like(matrix, 512.0), msg=lambda text: f"product beside it: {text}")
    large = torch.ones(2**14 if rehearsing() else 2**24, device=device)
    figures: Figures = {"version": preloaded_nccl() or "gloo"}
    figures["all_reduce_64MiB_us"] = median_us(partial(dist.all_reduce, large))
    yield figures | {"second_group": "failed"}
    dist.all_reduce(again := mine.clone(), group=dist.new_group([0, 1]))
    same(again, both, msg=lambda text: f"all_reduce of a second group: {text}")
    yield figures | {"second_group": "works"}


# ---- attach() beside FSDP2 ----

# (layers, width, tokens): matrices of 64 MiB in bf16, above a bucket's 25 MiB; small ones in a rehearsal.
STACK, STACK_IN_REHEARSAL = (6, 2896, 4096), (2, 64, 32)
WARMUP_STEPS = 2
PROGRAMS = ("core", "fsdp2")


def attach(rank: int, device: Any, folder: Path) -> Iterator[Figures]:
    """One traced training step with ReduceScatterBucketer.attach, and one with FSDP2, of the same stack of MLPs.

    FSDP2 keeps its parameters whole after forward, as those of `attach` are; it holds a shard of each besides.
    """
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    figures: Figures = {}
    for name, program in zip(PROGRAMS, (attached, fully_sharded), strict=True):
        with program(device) as step:
            for _ in range(WARMUP_STEPS):
                step()
            figures[f"{name}_step_us"] = median_us(step)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                for number in range(2):  # the first absorbs that the ranks' profilers start apart
                    with record_function(f"ProfilerStep#{number}"):
                        step()
                        gpus().synchronize()
                    dist.barrier()
            if device.type == "cuda":
                figures[f"{name}_peak_MiB"] = torch.cuda.max_memory_allocated() / 2**20
            (folder / name).mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / name / f"rank{rank}.json.gz"))
        gc.collect()
        gpus().free_cached()
        yield figures


def stack(device: Any) -> tuple[Any, Any]:
    """Returns a stack of norms and MLPs in bf16, and its input, (tokens, width)."""
    import torch
    from torch import nn

    layers, width, tokens = STACK_IN_REHEARSAL if rehearsing() else STACK
    torch.manual_seed(0)
    mlps = [
        nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        for _ in range(layers)
    ]
    model = nn.Sequential(*mlps).to(device, torch.bfloat16)
    return model, torch.randn(tokens, width, device=device, dtype=torch.bfloat16)


@contextlib.contextmanager
def attached(device: Any) -> Iterator[Callable[[], object]]:
    import torch.distributed as dist

    from dtbench_core import ReduceScatterBucketer

    model, x = stack(device)
    shards: dict[Any, Any] = {}
    bucketer = ReduceScatterBucketer(op="avg", check_ranks="never")
    group = dist.group.WORLD
    assert group is not None

    def step() -> None:
        shards.clear()
        model(x).square().mean().backward()
        bucketer.flush()

    with bucketer.attach(model, group, shards.__setitem__):
        yield step
        assert len(shards) == len(list(model.parameters()))
    shards.clear()
    bucketer.teardown()


@contextlib.contextmanager
def fully_sharded(device: Any) -> Iterator[Callable[[], object]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x = stack(device)
    mesh = init_device_mesh(device.type, (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().mean().backward()

    yield step


def read_traces(folder: Path) -> Figures:
    """Returns what `dtbench profile` says of both programs: communication, and the share that computation hides."""
    figures: Figures = {}
    for name in (program for program in PROGRAMS if (folder / program / "rank0.json.gz").exists()):
        words = [sys.executable, "-P", "-m", "dtbench", "profile", str(folder / name), "--json"]
        clean = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        job = json.loads(subprocess.check_output(words, env=clean, timeout=60))
        last_step = job["ranks"][0]["each_step"][-1]
        sent_s, exposed_s = last_step["communication_s"], last_step["exposed_s"]
        figures[f"{name}_communication_us"] = sent_s * 1e6
        figures[f"{name}_overlap"] = 1 - exposed_s / sent_s if sent_s else "no communication found"
    return figures


# ---- a captured tensor-parallel block ----


def captured(rank: int, device: Any, _folder: Path) -> Iterator[Figures]:
    """A tensor-parallel MLP over both ranks, forward, called and replayed as a CUDA graph with its all-reduce."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from dtbench_suites.tensor_parallel import FeedForward, parallelize, wait_for

    width, tokens = (64, 32) if rehearsing() else (1024, 512)
    mesh = init_device_mesh(device.type, (RANKS,))
    x = torch.randn(tokens, width, device=device)
    torch.manual_seed(0)
    whole = FeedForward(width, 1).to(device)
    figures: Figures = {}
    with torch.no_grad():
        want = whole(x)
        for impl in ("core", "torch"):
            torch.manual_seed(0)
            model = parallelize(impl, FeedForward(width, 1).to(device), mesh)
            outputs: list[Any] = []

            def run(model: Any = model, outputs: list[Any] = outputs) -> None:
                outputs[:] = [wait_for(model(x))]

            figures[f"{impl}_eager_us"] = median_us(run)
            replay = gpus().captured(run)
            (output,) = outputs  # in the graph's memory: a replay writes it again
            figures[f"{impl}_replay_us"] = median_us(replay)
            torch.testing.assert_close(output, want, rtol=1e-3, atol=1e-3)
            yield figures


# Each yields its figures so far, so that what fails later costs none of them.
CHECKS: dict[str, Callable[[int, Any, Path], Iterator[Figures]]] = {
    "pair": pair,
    "attach": attach,
    "pair-captured": captured,
}


def main(check: str, seconds: float, path: Path) -> int:
    """Runs a check on two ranks and writes its figures as the instruments do; 5 where no way to run it works."""
    deadline = time.monotonic() + seconds
    if not (rehearsing() or LIBRARY.exists()):
        sys.stderr.write(
            "dtbench: no .wheels/libnccl.so.2, expected an NCCL of 2.30 or newer built for this card\n"
        )
        return 5
    modes = MODES if check == "pair" and not rehearsing() else MODES[:1]
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="dtbench-pair-") as name:
        for number, mode in enumerate(modes):
            variables = format_variables(mode)
            debug = {"NCCL_DEBUG": "INFO"} if check == "pair" else {}
            left_s = (deadline - time.monotonic() - READING_S * (check == "attach")) / (len(modes) - number)
            try:
                figures = start_ranks(check, mode | debug, left_s, Path(name))
                if check == "attach":
                    figures |= read_traces(Path(name))
                    keep_traces(Path(name), path.with_suffix(""))
            except (RanksFailedError, subprocess.SubprocessError, OSError, ValueError) as error:
                failures.append(f"{variables or 'as documented'}: {error}")
                continue
            figures |= {"variables": variables} if variables else {}
            figures |= {"failed before": "; ".join(failures)} if failures else {}
            goal, met = goal_of(check, figures)
            findings = json.dumps([[check, figures, goal, "" if rehearsing() else met]])
            write_atomically(path, findings + "\n", lambda head: "[" in head, "measurement")
            return 0
    sys.stderr.write(f"dtbench: two ranks do not work here: {'; '.join(failures)}\n")
    return 5


def goal_of(check: str, figures: Figures) -> tuple[str, str]:
    """Returns the goal of a check in words, and "yes" or "NO"; "" where a figure is missing."""
    goals = {
        "attach": ("hides as much as FSDP2", "core_overlap", "fsdp2_overlap"),
        "pair-captured": ("replayed in less than eager", "core_eager_us", "core_replay_us"),
    }
    if check not in goals:
        return "as plain sums", "yes"
    goal, *names = goals[check]
    more, less = (figures.get(name) for name in names)
    if not (isinstance(more, float) and isinstance(less, float)):
        return goal, ""
    return goal, "yes" if more >= less else "NO"


def keep_traces(folder: Path, kept: Path) -> None:
    """Keeps the first rank's trace of each program beside the figures."""
    for trace in folder.glob("*/rank0.json.gz"):
        trace.rename(kept.with_name(f"{kept.name}-{trace.parent.name}.json.gz"))


def rank_main(check: str, rank: int, store: str, path: Path, folder: Path) -> None:
    """Runs a check on one rank, and writes its figures as soon as they are there."""
    import torch.distributed as dist

    for figures in CHECKS[check](rank, join(rank, store), folder):
        gpus().synchronize()
        dist.barrier()
        write_atomically(path, json.dumps(figures) + "\n", lambda head: "{" in head, "measurement")
    # A peer may still read this process's memory; and an orderly end of NCCL may lock up.
    (path.parent / f"done-{rank}").touch()
    deadline = time.monotonic() + 5
    while len(list(path.parent.glob("done-*"))) < RANKS and time.monotonic() < deadline:
        time.sleep(0.02)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        sys.exit(main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])))
    rank_main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
