"""A user's suite file, one case per way in which a run can go wrong. The tests start it by its path."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from dtbench.suite import Case, RunOptions, Skip, Workload, World, suite


def reduced(
    world: World, *, wrong: bool = False, alone: Callable[[], object] | None = None, on: int = 1
) -> Workload:
    """An all-reduce of ones; `alone` is called on one rank before it, once warm."""
    x = torch.ones(4)
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if alone is not None and world.rank == on and calls == 3:
            alone()
        dist.all_reduce(x)

    def check() -> str | None:
        total = float(x[0]) + (wrong and world.rank == 1)
        return None if total == world.world_size else f"the sum is {total}"

    return Workload(run, before=lambda: x.fill_(1), check=check, counters=lambda: {"bytes": 16.0})


def fail(error: Exception) -> None:
    raise error


def refuse(world: World) -> Workload:
    raise Skip("not for this world")


def break_on_rank_1(world: World) -> Workload:
    if world.rank == 1:
        fail(ValueError("no such shape\nand a second line"))
    return Workload(lambda: None)


def raise_everywhere(error: Exception) -> Callable[[World], Workload]:
    return lambda world: Workload(lambda: fail(error))


def end_by(number: signal.Signals, rank: int = 1) -> Callable[[World], Workload]:
    """Builds an all-reduce in which a signal ends `rank` after the warm-up."""
    return lambda world: reduced(world, alone=lambda: os.kill(os.getpid(), number), on=rank)


def die_at_once(world: World) -> Workload:
    def run() -> None:
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return Workload(run)


def raise_in(where: str) -> Callable[[World], Workload]:
    """On rank 0 alone; the others are in a collective meanwhile."""

    def build(world: World) -> Workload:
        def step() -> None:
            if world.rank == 0:
                fail(ValueError(f"in its {where}"))
            dist.barrier()

        if where == "build":
            step()
        return Workload(reduced(world).run, check=step if where == "check" else None)  # type: ignore[arg-type]

    return build


def differ_in_size(world: World) -> Workload:
    x = torch.ones(4 if world.rank else 4096)
    return Workload(lambda: dist.all_reduce(x))


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
    yield Case("die", {}, {"core": die_at_once}, clock="host")


@suite("bad", world="ranks", help="cases that go wrong")
def bad(options: RunOptions) -> Iterator[Case]:
    no_memory = torch.OutOfMemoryError("tried to allocate 1 TiB")
    yield Case("mild", {"how": "skips"}, {"core": refuse, "c10d": reduced})
    yield Case("mild", {"how": "breaks"}, {"core": break_on_rank_1, "c10d": reduced})
    yield Case(
        "mild",
        {"how": "raises"},
        {"core": raise_everywhere(RuntimeError("nobody can do this")), "c10d": reduced},
    )
    yield Case("mild", {"how": "memory"}, {"core": raise_everywhere(no_memory), "c10d": reduced})
    yield Case("mild", {"how": "wrong"}, {"core": lambda w: reduced(w, wrong=True), "c10d": reduced})
    yield Case("mild", {"how": "slow"}, {"core": lambda world: Workload(lambda: time.sleep(2))})
    yield Case("mild", {"how": "none"}, {"c10d": reduced})
    for rank in range(4):
        yield Case("grave", {"how": "dies", "rank": rank}, {"core": end_by(signal.SIGKILL, rank)})
    yield Case("grave", {"how": "stops"}, {"core": end_by(signal.SIGSTOP)})
    yield Case(
        "grave", {"how": "alone"}, {"core": lambda w: reduced(w, alone=lambda: fail(ValueError("only I")))}
    )
    yield Case("grave", {"how": "hangs"}, {"core": lambda w: reduced(w, alone=lambda: time.sleep(600))})
    yield Case("grave", {"how": "build"}, {"core": raise_in("build")})
    yield Case("grave", {"how": "check"}, {"core": raise_in("check")})
    yield Case("grave", {"how": "sizes"}, {"core": differ_in_size})
