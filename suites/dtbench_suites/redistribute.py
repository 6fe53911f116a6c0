"""Time of DTensor.redistribute between any two placements, per dim of the device mesh.

    S(0) -> R      all-gather          P -> R      all-reduce         R -> S(0)     a local slice
    S(0) -> S(1)   all-to-all          P -> S(0)   reduce-scatter

What lies on another tensor dim than 0 also has to be put in order in memory, which is part of the
time. All groups of the mesh dim work at once. size_bytes is the whole tensor, as one group holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dtbench.model import Case, Plan, Workload
from dtbench.registry import World, suite
from dtbench_suites.data import (
    dtensor_api,
    hush_all_to_all,
    mismatch,
    moved_values,
    placement,
    shard_of,
    shared_dims,
    sum_of_values,
    summed_values,
    torch_dtype,
)

# Every change of placement but those to Partial, which torch.distributed.tensor refuses.
TRANSITIONS = (
    ("S(0)", "S(1)"),
    ("S(1)", "S(0)"),
    ("S(0)", "R"),
    ("S(1)", "R"),
    ("R", "S(0)"),
    ("R", "S(1)"),
    ("P", "R"),
    ("P", "S(0)"),
    ("P", "S(1)"),
)


def shape_of(size_bytes: int, itemsize: int, n: int) -> tuple[int, int]:
    """A nearly square shape of at most so many bytes whose both dims n ranks can share evenly."""
    blocks = max(size_bytes // itemsize // n**2, 1)
    rows = 2 ** (blocks.bit_length() // 2)
    return rows * n, blocks // rows * n


def build_impl(
    mesh_dim: str, src: str, dst: str, shape: tuple[int, int], dtype: torch.dtype, impl: str, world: World
) -> Workload:
    hush_all_to_all()
    api, mesh = dtensor_api(impl), world.mesh[mesh_dim]
    rank, n, count = mesh.get_local_rank(), mesh.size(), shape[0] * shape[1]
    if src == "P":
        full = sum_of_values(n, count, dtype, world.device).view(shape)
        local = summed_values(rank, n, count, dtype, world.device).view(shape)
    else:
        full = moved_values(0, count, dtype, world.device).view(shape)
        local = shard_of(full, src, rank, n)
    tensor = api.DTensor.from_local(local, mesh, [placement(api, src)], run_check=False)
    target = [placement(api, dst)]
    run = partial(tensor.redistribute, mesh, target)

    def check() -> str | None:
        result = run()
        if tuple(result.placements) != tuple(target) or result.shape != full.shape:
            return f"got {result.placements} {tuple(result.shape)}, expected {target} {shape}"
        return mismatch(result.to_local(), shard_of(full, dst, rank, n), "the local tensor")

    return Workload(run=run, check=check)


@suite("redistribute", world="ranks", help="time to change a DTensor's placement, per mesh dim")
def redistribute(plan: Plan) -> Iterator[Case]:
    for mesh_dim, n in shared_dims(plan):
        for dtype_name in plan.dtypes:
            dtype = torch_dtype(dtype_name)
            shapes = dict.fromkeys(shape_of(size, dtype.itemsize, n) for size in plan.coarse_sizes_bytes)
            for src, dst in TRANSITIONS:
                for rows, cols in shapes:
                    size = rows * cols * dtype.itemsize
                    build = partial(build_impl, mesh_dim, src, dst, (rows, cols), dtype)
                    yield Case(
                        name=f"{src}->{dst}",
                        params={"mesh_dim": mesh_dim, "ranks": n, "dtype": dtype_name, "size": size},
                        build={impl: partial(build, impl) for impl in ("core", "torch")},
                        size_bytes=size,
                    )
