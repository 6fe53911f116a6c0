"""Time of DTensor.redistribute between any two placements, per dim of the device mesh.

    S(0) -> R      all-gather          P -> R      all-reduce         R -> S(0)     a local slice
    S(0) -> S(1)   all-to-all          P -> S(0)   reduce-scatter

What lies on another tensor dim than 0 also has to be put in order in memory, which is part of the
time. size_bytes is the whole tensor, as one group holds it. `groups` and `mode` are those of the
collectives suite: all sizes together and isolated, one in each other regime. In files from before these
params, everything was measured together and isolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from dtbench.engine.refine import is_calibrated_with
from dtbench.suite import Case, RunOptions, Workload, World, suite
from dtbench_suites import SUITES
from dtbench_suites.collectives import accompanying_sizes, calls_of, params_of, refinement_of, swept
from dtbench_suites.data import (
    dtensor_api,
    hush_torch,
    mesh_of_dim,
    mismatch,
    moved_values,
    placement,
    priced_dims,
    refuse_gathers_of_cuda_on_gloo,
    shard_of,
    sum_of_values,
    summed_values,
    torch_dtype,
)

# Every change of placement but those to Partial, which torch.distributed.tensor refuses.
_SHARDED = ("S(0)->S(1)", "S(1)->S(0)", "S(0)->R", "S(1)->R")
TRANSITIONS = (*_SHARDED, "R->S(0)", "R->S(1)", "P->R", "P->S(0)", "P->S(1)")


def shape_of(size_bytes: int, itemsize: int, n: int) -> tuple[int, int]:
    """A nearly square shape of at most so many bytes whose both dims n ranks can share evenly."""
    blocks = max(size_bytes // itemsize // n**2, 1)
    rows = 2 ** (blocks.bit_length() // 2)
    return rows * n, blocks // rows * n


def build_impl(
    where: tuple[str, str],
    change: tuple[str, str],
    shape: tuple[int, int],
    dtype: torch.dtype,
    impl: str,
    world: World,
) -> Workload:
    """where: mesh dim and `groups`. change: the placements before and after."""
    (mesh_dim, groups), (src, dst) = where, change
    hush_torch()
    api, mesh = dtensor_api(impl), mesh_of_dim(world, mesh_dim)
    if groups == "alone" and 0 not in mesh.mesh:
        return Workload(run=lambda: None, participates=False)
    if impl == "torch" and src != "P" and dst == "R":
        refuse_gathers_of_cuda_on_gloo(mesh)
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


def sizes_of(options: RunOptions, groups: str, mode: str) -> Sequence[int]:
    if (groups, mode) != ("together", "isolated"):
        return accompanying_sizes(options, groups, mode)
    return options.sizes_bytes if options.refine else options.coarse_sizes_bytes


def case_of(change: str, mesh_dim: str, ranks: int, groups: str, mode: str, dtype: str, size: int) -> Case:
    """change: `S(0)->R`. size: bytes asked for, of which as many are taken as `shape_of` can share."""
    of_torch = torch_dtype(dtype)
    src, _, dst = change.partition("->")
    shape = shape_of(size, of_torch.itemsize, ranks)
    size = shape[0] * shape[1] * of_torch.itemsize
    build = partial(build_impl, (mesh_dim, groups), (src, dst), shape, of_torch)
    return Case(
        name=change,
        params=params_of(mesh_dim, ranks, groups, mode, dtype, size),
        build={impl: partial(build, impl) for impl in ("core", "torch")},
        size_bytes=size,
        calls_per_sample=calls_of(mode, size),
    )


@suite(
    "redistribute",
    world="ranks",
    help=SUITES["redistribute"],
    impl_s=(0.135, 0.085),
    refinement=refinement_of(case_of),
    budget_priority=is_calibrated_with,
)
def redistribute(options: RunOptions) -> Iterator[Case]:
    yield from swept(options, priced_dims(options), TRANSITIONS, sizes_of, case_of)
