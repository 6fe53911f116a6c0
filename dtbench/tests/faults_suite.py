"""A user's suite file, one case per way in which a run can go wrong. The tests start it by its path."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from dtbench.suite import Case, RunOptions, Skip, Workload, World, suite


def reduced(world: World, *, wrong: bool = False, alone: Callable[[], None] | None = None) -> Workload:
    """An all-reduce of ones; `alone` is called on rank 1 before it, once warm."""
    x = torch.ones(4)
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if alone is not None and world.rank == 1 and calls == 3:
            alone()
        dist.all_reduce(x)

    def check() -> str | None:
        total = float(x[0]) + (wrong and world.rank == 1)
        return None if total == world.world_size else f"the sum is {total}"

    return Workload(run, before=lambda: x.fill_(1), check=check, counters=lambda: {"bytes": 16.0})


def refuse(world: World) -> Workload:
    raise Skip("not for this world")


def break_on_rank_1(world: World) -> Workload:
    if world.rank == 1:
        raise ValueError("no such shape\nand a second line")
    return Workload(lambda: None)


def raise_everywhere(world: World) -> Workload:
    def run() -> None:
        raise RuntimeError("nobody can do this")

    return Workload(run)


def run_out_of_memory(world: World) -> Workload:
    def run() -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    return Workload(run)


def take_two_seconds(world: World) -> Workload:
    return Workload(lambda: time.sleep(2))


def die(world: World) -> Workload:
    return reduced(world, alone=lambda: os.kill(os.getpid(), signal.SIGKILL))


def die_on_rank_0(world: World) -> Workload:
    x = torch.ones(4)

    def run() -> None:
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(x)

    return Workload(run)


def raise_alone(world: World) -> Workload:
    def fail() -> None:
        raise ValueError("only I")

    return reduced(world, alone=fail)


def hang(world: World) -> Workload:
    return reduced(world, alone=lambda: time.sleep(600))


def differ_in_size(world: World) -> Workload:
    x = torch.ones(4 if world.rank else 4096)
    return Workload(lambda: dist.all_reduce(x))


def take_all_memory(world: World) -> Workload:
    return reduced(world, alone=lambda: [b"x" * 2**28 for _ in range(40)])


def leave_children(world: World) -> Workload:
    for session in (False, True):
        os.posix_spawnp("sleep", ["sleep", "600"], os.environ, setsid=session)
    return reduced(world)


def leave_children_and_die(world: World) -> Workload:
    leave_children(world)
    return die(world)


@suite("good", world="ranks", help="cases that work")
def good(options: RunOptions) -> Iterator[Case]:
    for n in (1, 2, 3):
        yield Case(
            "all_reduce", {"n": n}, {"core": reduced, "c10d": reduced}, size_bytes=16, busbw_factor=0.5
        )


@suite("long", world="ranks", help="more cases than anybody waits for")
def long(options: RunOptions) -> Iterator[Case]:
    for n in range(2000):
        yield Case("wait", {"n": n}, {"core": lambda world: Workload(lambda: time.sleep(0.01))})


@suite("simulated", world="simulated", help="a case on the simulated world")
def simulated(options: RunOptions) -> Iterator[Case]:
    def add(world: World) -> Workload:
        x = torch.ones(world.world_size, device=world.device)
        return Workload(lambda: x + x)

    yield Case("add", {}, {"core": add, "local": add}, clock="host", calls_per_sample=10, warmup_calls=20)
    yield Case("die", {}, {"core": die_on_rank_0}, clock="host")


@suite("bad", world="ranks", help="cases that go wrong")
def bad(options: RunOptions) -> Iterator[Case]:
    yield Case("mild", {"how": "skips"}, {"core": refuse, "c10d": reduced})
    yield Case("mild", {"how": "breaks"}, {"core": break_on_rank_1, "c10d": reduced})
    yield Case("mild", {"how": "raises"}, {"core": raise_everywhere, "c10d": reduced})
    yield Case("mild", {"how": "memory"}, {"core": run_out_of_memory, "c10d": reduced})
    yield Case("mild", {"how": "wrong"}, {"core": lambda w: reduced(w, wrong=True), "c10d": reduced})
    yield Case("mild", {"how": "slow"}, {"core": take_two_seconds})
    yield Case("mild", {"how": "none"}, {"c10d": reduced})
    yield Case("grave", {"how": "dies"}, {"core": die, "c10d": reduced})
    yield Case("grave", {"how": "rank0"}, {"core": die_on_rank_0})
    yield Case("grave", {"how": "alone"}, {"core": raise_alone})
    yield Case("grave", {"how": "hangs"}, {"core": hang})


@suite("gone", world="ranks", help="ranks that end, each for another reason")
def gone(options: RunOptions) -> Iterator[Case]:
    yield Case("sizes", {}, {"core": differ_in_size})
    yield Case("memory", {}, {"core": take_all_memory})
    yield Case("children", {}, {"core": leave_children})
    yield Case("parent_dies", {}, {"core": leave_children_and_die})


def on_rank_0(where: str) -> Callable[[World], Workload]:
    """Raises there, on rank 0 alone; the others may be in a collective meanwhile."""

    def fail(world: World) -> None:
        if world.rank == 0:
            raise ValueError(f"in its {where}")

    def build(world: World) -> Workload:
        if where == "build":
            fail(world)
            dist.barrier()
        made = reduced(world)

        def check() -> str | None:
            if where == "check":
                fail(world)
                dist.barrier()
            return None

        return Workload(made.run, before=made.before, check=check)

    return build


def fork_and_die_on_rank_0(world: World) -> Workload:
    def fork() -> None:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        if world.rank == 0:
            fork()
        dist.barrier()

    return Workload(run)


def differ_in_dtype(world: World) -> Workload:
    x = torch.ones(64, dtype=torch.float64 if world.rank else torch.float32)
    return Workload(lambda: dist.all_reduce(x))


@suite("first", world="ranks", help="cases that go wrong on rank 0 alone, or differ")
def first(options: RunOptions) -> Iterator[Case]:
    yield Case("alone", {"how": "build"}, {"core": on_rank_0("build")})
    yield Case("alone", {"how": "check"}, {"core": on_rank_0("check")})
    yield Case("forks", {}, {"core": fork_and_die_on_rank_0})
    yield Case("dtypes", {}, {"core": differ_in_dtype})
