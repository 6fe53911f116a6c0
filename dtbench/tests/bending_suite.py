"""A suite whose time jumps by 24x at 16 KiB, so that its sweep is refined there; loaded by its path."""

import time
from collections.abc import Iterator, Mapping

from dtbench.engine.refine import sizes_between
from dtbench.suite import Case, Param, Refinement, RunOptions, Workload, World, suite

JUMP_BYTES, BROKEN_BYTES = 16 * 2**10, 8 * 2**10


def takes_s(size: int) -> float:
    """Straight lines on both sides, which rise by more than a busy machine adds: what takes longer than a
    larger size counts as disturbed, and is not refined."""
    if size < JUMP_BYTES:
        return 0.5e-3 * (1 + size / 2**10)
    return 0.05 + 0.01 * size / JUMP_BYTES


def sleep(size: int, world: World) -> Workload:
    def run() -> None:
        if size == BROKEN_BYTES:
            raise ValueError("not at this size")
        time.sleep(takes_s(size))

    return Workload(run)


def case_of(options: RunOptions, name: str, params: Mapping[str, Param]) -> Case:
    size = int(params["size"]) // 256 * 256
    return Case(
        name,
        {"mesh_dim": "tp", "groups": "together", "mode": "isolated", "size": size},
        {"c10d": lambda world: sleep(size, world), "core": lambda world: sleep(0, world)},
        size_bytes=size,
    )


@suite("bends", world="ranks", help="", refinement=Refinement(sizes_between, case_of))
def bends(options: RunOptions) -> Iterator[Case]:
    for size in options.sizes_bytes:
        yield case_of(options, "jump", {"size": size})
