"""Time of DTensor.redistribute between any two placements, per mesh dim.

    S(0) -> R      all-gather          P -> R      all-reduce         R -> S(0)     a local slice
    S(0) -> S(1)   all-to-all          P -> S(0)   reduce-scatter

Shards of a tensor dim other than 0 must also be rearranged in memory, which is part of the time. size_bytes is the size
of the full tensor. `groups` and `mode` have the meaning of the collectives suite. All sizes are measured with
groups=together and mode=isolated. Every other combination has one size. Results without these params were measured
together and isolated.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from dtbench.engine.refine import is_calibrated_with
from dtbench.suite import Case, RunOptions, Workload, World, suite
from dtbench_suites import SUITES
from dtbench_suites.collectives import (
    accompanying_sizes,
    calls_per_sample_of,
    params_of,
    refinement_of,
    sweep_cases,
)
from dtbench_suites.data import (
    Place,
    calibrated_dims,
    mesh_of_dim,
    moved_values,
    shard_of,
    silence_torch,
    skip_cuda_gathers_on_gloo,
    sum_of_values,
    summed_values,
    torch_dtype,
)

# All changes of placement except those to Partial, which torch.distributed.tensor does not support.
_SHARDED = ("S(0)->S(1)", "S(1)->S(0)", "S(0)->R", "S(1)->R")
TRANSITIONS = (*_SHARDED, "R->S(0)", "R->S(1)", "P->R", "P->S(0)", "P->S(1)")


def shape_of(size_bytes: int, itemsize: int, n: int) -> tuple[int, int]:
    """Returns a nearly square shape of at most `size_bytes` (if possible) whose dims are both multiples of n."""
    blocks = max(size_bytes // itemsize // n**2, 1)
    rows = 2 ** (blocks.bit_length() // 2)
    return rows * n, blocks // rows * n


def build_impl(
    target_dim: tuple[str, str],
    change: tuple[str, str],
    shape: tuple[int, int],
    dtype: torch.dtype,
    impl: str,
    world: World,
) -> Workload:
    """Builds the workload of one change of placement.

    Args:
        target_dim: (mesh dim, `groups`).
        change: (source placement, destination placement).
    """
    (mesh_dim, groups), (src, dst) = target_dim, change
    silence_torch()
    mesh = mesh_of_dim(world, mesh_dim)
    place = Place(impl, mesh, world.device)
    if groups == "alone" and 0 not in mesh.mesh:
        return Workload(run=lambda: None, participates=False)
    if impl == "torch" and src != "P" and dst == "R":
        skip_cuda_gathers_on_gloo(mesh)
    rank, n, count = mesh.get_local_rank(), mesh.size(), shape[0] * shape[1]
    if src == "P":
        full = sum_of_values(n, count, dtype, world.device).view(shape)
        local = summed_values(rank, n, count, dtype, world.device).view(shape)
    else:
        full = moved_values(0, count, dtype, world.device).view(shape)
        local = shard_of(full, src, rank, n)
    tensor = place.api.DTensor.from_local(local, mesh, place.placements(src), run_check=False)
    run = partial(tensor.redistribute, mesh, place.placements(dst))
    return Workload(run, check=lambda: place.mismatch(run(), dst, shape, shard_of(full, dst, rank, n)))


def sizes_of(options: RunOptions, groups: str, mode: str) -> Sequence[int]:
    if (groups, mode) != ("together", "isolated"):
        return accompanying_sizes(options, groups, mode)
    return options.sizes_bytes if options.refine else options.coarse_sizes_bytes


def case_of(change: str, mesh_dim: str, ranks: int, groups: str, mode: str, dtype: str, size: int) -> Case:
    """Returns the case of a change such as `S(0)->R`. `size`: requested bytes, rounded by `shape_of`."""
    dtype_of_torch = torch_dtype(dtype)
    src, _, dst = change.partition("->")
    shape = shape_of(size, dtype_of_torch.itemsize, ranks)
    size = shape[0] * shape[1] * dtype_of_torch.itemsize
    return Case(
        name=change,
        params=params_of(mesh_dim, ranks, groups, mode, dtype, size),
        build={
            impl: partial(build_impl, (mesh_dim, groups), (src, dst), shape, dtype_of_torch, impl)
            for impl in ("core", "torch")
        },
        size_bytes=size,
        calls_per_sample=calls_per_sample_of(mode, size),
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
    yield from sweep_cases(options, calibrated_dims(options), TRANSITIONS, sizes_of, case_of)
