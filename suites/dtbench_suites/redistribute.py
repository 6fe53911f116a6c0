"""Time of DTensor.redistribute between any two placements, per dim of the device mesh.

    S(0) -> R      all-gather          P -> R      all-reduce         R -> S(0)     a local slice
    S(0) -> S(1)   all-to-all          P -> S(0)   reduce-scatter

What lies on another tensor dim than 0 also has to be put in order in memory, which is part of the
time. size_bytes is the whole tensor, as one group holds it. `groups` and `mode` are those of the
collectives suite: all sizes together and isolated, one in each other regime. In files from before these
params, everything was measured together and isolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from dtbench.bench.refine import is_calibrated_with, sizes_between
from dtbench.model import Case, Param, Plan, Workload
from dtbench.suite import Refinement, World, suite
from dtbench_suites import SUITES
from dtbench_suites.collectives import REGIMES, accompanying_sizes, calls_of, params_of
from dtbench_suites.data import (
    dtensor_api,
    hush_all_to_all,
    mesh_of_dim,
    mismatch,
    moved_values,
    placement,
    priced_dims,
    shard_of,
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
    where: tuple[str, str],
    change: tuple[str, str],
    shape: tuple[int, int],
    dtype: torch.dtype,
    impl: str,
    world: World,
) -> Workload:
    """where: mesh dim and `groups`. change: the placements before and after."""
    (mesh_dim, groups), (src, dst) = where, change
    hush_all_to_all()
    api, mesh = dtensor_api(impl), mesh_of_dim(world, mesh_dim)
    if groups == "alone" and 0 not in mesh.mesh:
        return Workload(run=lambda: None, participates=False)
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


def regimes_and_sizes(plan: Plan, n: int) -> Iterator[tuple[str, str, int]]:
    """(groups, mode, bytes asked for) of all cases of a transition among n ranks."""
    swept = plan.sizes_bytes if plan.refine else plan.coarse_sizes_bytes
    for groups, mode in REGIMES:
        if groups == "alone" and n == plan.world_size:
            continue  # a group that spans the world is alone and together at once
        beside = (groups, mode) != ("together", "isolated")
        for size in accompanying_sizes(plan, groups, mode) if beside else swept:
            yield groups, mode, size


def case_of(mesh_dim: str, n: int, groups: str, mode: str, dtype_name: str, name: str, asked: int) -> Case:
    """name: `S(0)->R`. asked: bytes, of which as many are taken as `shape_of` can share."""
    dtype = torch_dtype(dtype_name)
    src, _, dst = name.partition("->")
    shape = shape_of(asked, dtype.itemsize, n)
    size = shape[0] * shape[1] * dtype.itemsize
    build = partial(build_impl, (mesh_dim, groups), (src, dst), shape, dtype)
    return Case(
        name=name,
        params=params_of(mesh_dim, n, groups, mode, dtype_name, size),
        build={impl: partial(build, impl) for impl in ("core", "torch")},
        size_bytes=size,
        calls_per_sample=calls_of(mode, size),
    )


def refined_case(plan: Plan, name: str, params: Mapping[str, Param]) -> Case:
    """The case of a size between those of the sweep."""
    mesh_dim, groups, mode, dtype_name = (str(params[p]) for p in ("mesh_dim", "groups", "mode", "dtype"))
    return case_of(mesh_dim, int(params["ranks"]), groups, mode, dtype_name, name, int(params["size"]))


@suite(
    "redistribute",
    world="ranks",
    help=SUITES["redistribute"],
    refinement=Refinement(sizes_between, refined_case),
    telling=is_calibrated_with,
)
def redistribute(plan: Plan) -> Iterator[Case]:
    for mesh_dim, n in priced_dims(plan):
        for dtype_name in plan.dtypes:
            for src, dst in TRANSITIONS:
                cases = [
                    case_of(mesh_dim, n, groups, mode, dtype_name, f"{src}->{dst}", asked)
                    for groups, mode, asked in regimes_and_sizes(plan, n)
                ]
                # Sizes below what the ranks can share are the same one.
                yield from {tuple(case.params.items()): case for case in cases}.values()
