"""What a wrong choice costs: the candidate ways of redistributing a tensor, and of a sharded product.

Each case is a decision: from these placements to those, or a @ b of sharded matrices. Its impls are the
candidates (ways.py), run in turn on the same data. `dtbench calibrate --regret` then asks each cost
model which it would have taken, and what that would have cost more than the best.

The library that moves the data is part of the case: on CPUs torch.distributed.tensor sends an all-to-all
as an all-gather, so the best way is not the same in both. size_bytes is the whole tensor, of a product the
larger input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute as torch_planner

from dtbench.suite import Case, Param, RunOptions, Workload, World, suite
from dtbench.suite.errors import UsageError
from dtbench_core.cost.topology import Topology, TopologyError
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.redistribute import route as redistribute
from dtbench_suites import SUITES
from dtbench_suites.data import hush_torch, mismatch, moved_values, shared_dims, torch_dtype
from dtbench_suites.ways import (
    Dims,
    Leg,
    Placed,
    Product,
    Way,
    offline_mesh,
    ours,
    torch_leg,
    torch_product,
    torch_spec,
    ways_between,
    ways_of_product,
)

KIB, MIB = 2**10, 2**20
# Where bandwidth decides, and where latency still has a say.
SIZES = {"cpu": (512 * KIB, 4 * MIB), "cuda": (4 * MIB, 64 * MIB)}
# What training loops do to a matrix over two mesh dims, and some that need more than one step.
REDISTRIBUTIONS: tuple[tuple[Placed, Placed], ...] = (
    (("S(0)", "S(1)"), ("S(1)", "S(0)")),
    (("S(0)", "S(0)"), ("S(1)", "S(1)")),
    (("S(0)", "S(1)"), ("R", "R")),
    (("S(0)", "S(0)"), ("R", "R")),
    (("S(0)", "R"), ("R", "S(0)")),
    (("R", "S(0)"), ("S(0)", "R")),
    (("S(1)", "R"), ("S(0)", "S(1)")),
    (("P", "P"), ("R", "R")),
    (("P", "P"), ("S(0)", "S(1)")),
    (("P", "S(0)"), ("R", "R")),
    (("S(0)", "P"), ("R", "R")),
    (("R", "P"), ("R", "S(0)")),
)
# (placements of a, of b, wanted of out): data- and tensor-parallel layers, and weights sharded over both.
PRODUCTS: tuple[tuple[Placed, Placed, Placed], ...] = (
    (("S(0)", "S(1)"), ("R", "R"), ("S(0)", "R")),
    (("S(0)", "S(1)"), ("R", "S(0)"), ("S(0)", "R")),
    (("S(0)", "R"), ("S(0)", "S(1)"), ("S(0)", "S(0)")),
    (("R", "S(1)"), ("S(0)", "R"), ("R", "R")),
)
# Columns of both factors: few, so that what is sent costs more than the product itself.
WIDTH = 128
# Of each way in a launch. TCP flows that share a link now take it in turn, now starve each other: the quartile
# of five samples is a matter of luck then (44 or 60 ms for the same all-to-all).
SAMPLES = 11


def wide(world: World) -> tuple[Dims, list[int], DeviceMesh]:
    """(names and ranks of the mesh dims with more than one rank, this rank's coordinates on them, their mesh)."""
    names, at = world.mesh.mesh_dim_names, world.mesh.get_coordinate()
    assert names is not None and at is not None
    dims = [(name, n, c) for name, n, c in zip(names, world.mesh.shape, at, strict=True) if n > 1]
    return [(name, n) for name, n, _ in dims], [c for _, _, c in dims], world.mesh[tuple(d[0] for d in dims)]


def local_of(full: Tensor, placed: Placed, at: list[int], dims: Dims) -> Tensor:
    """What the rank at these coordinates holds of `full`; of a pending sum, one term."""
    local, terms, first = full, 1, True
    for placement, index, (_, n) in zip(placed, at, dims, strict=True):
        if placement.startswith("S"):
            local = local.chunk(n, dim=int(placement[2:-1]))[index]
        elif placement == "P":
            terms, first = terms * n, first and index == 0
    if terms == 1:
        return local.contiguous()
    # All but one of the terms are 1: whole numbers, whose sum is exact.
    return local - (terms - 1) if first else torch.ones_like(local)


def mover(leg: Leg, dtype: torch.dtype, library: str, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """What takes this rank's part of the leg's tensor from its first placements to its last."""
    if library == "core":
        stride = torch.empty(leg.shape, device="meta").stride()
        spec = DTensorSpec.of(mesh, ours(leg.placed[0]), leg.shape, stride, dtype)
        route = redistribute.along(spec, leg.steps)
        return lambda local: redistribute.apply(local, route)
    specs = [torch_spec(leg.shape, placed, mesh, dtype) for placed in leg.placed]

    def move(local: Tensor) -> Tensor:
        for before, after in itertools.pairwise(specs):
            local = torch_planner.redistribute_local_tensor(local, before, after)
        return local

    return move


def build(way: Way, dtype: torch.dtype, library: str, world: World) -> Workload:
    hush_torch()
    dims, at, mesh = wide(world)
    moves = [mover(leg, dtype, library, mesh) for leg in way.legs]
    fulls = [
        moved_values(0, math.prod(leg.shape), dtype, world.device).view(leg.shape)
        for leg in way.legs
        if leg.tensor != "out"
    ]
    run: Callable[[], Tensor]
    if len(way.legs) == 1:
        (full,) = fulls
        run = partial(moves[0], local_of(full, way.legs[0].placed[0], at, dims))
    else:
        move_a, move_b, move_out = moves
        a, b = (full % 3 for full in fulls)
        local_a, local_b = (
            local_of(t, leg.placed[0], at, dims) for t, leg in zip((a, b), way.legs, strict=False)
        )
        run = lambda: move_out(move_a(local_a) @ move_b(local_b))  # noqa: E731

    def check() -> str | None:
        whole = full if len(way.legs) == 1 else a @ b
        return mismatch(run(), local_of(whole, way.legs[-1].placed[-1], at, dims), "the shard")

    return Workload(run=run, check=check)


def matrix_of(size_bytes: int, itemsize: int, ranks: int) -> tuple[int, int]:
    """A nearly square matrix of about so many bytes whose sides `ranks` ranks share evenly."""
    side = math.isqrt(size_bytes // itemsize)
    rows = max(round(side / ranks), 1) * ranks
    return rows, max(round(size_bytes / itemsize / rows / ranks), 1) * ranks


def topology_of(plan: RunOptions) -> Topology | None:
    """The topology whose favourites are measured too.

    Raises:
        UsageError: it cannot be read or does not fit the mesh.
    """
    path = plan.options.get("topology")
    if path is None:
        return None
    try:
        topology = Topology.load(Path(path))
        topology.constants(shared_dims(plan))
    except TopologyError as error:
        raise UsageError(f"--topology {path}: {error}") from error
    return topology


@suite(
    "regret",
    world="ranks",
    by_default=False,
    help=SUITES["regret"],
    options={"topology": "a calibrated topology whose favourite ways are measured, too"},
)
def regret(plan: RunOptions) -> Iterator[Case]:
    dims = shared_dims(plan)
    if len(dims) != 2:
        shape = ",".join(f"{name}={n}" for name, n in plan.mesh)
        raise UsageError(
            f"the regret suite got the mesh {shape}, expected two mesh dims of more than one rank each: "
            "on one, there is hardly a choice; give --mesh dp=2,tp=2"
        )
    topology = topology_of(plan)
    sizes = plan.sizes_bytes if plan.sizes_chosen else SIZES[plan.device_type]
    for dtype_name, size, library in itertools.product(plan.dtypes, sizes, plan.impls):
        yield from decisions(plan, topology, dtype_name, size, library)


def decisions(
    plan: RunOptions, topology: Topology | None, dtype_name: str, size: int, library: str
) -> Iterator[Case]:
    """The redistributions of a tensor of about so many bytes, and the products."""
    dims = shared_dims(plan)
    dtype, mesh, together = torch_dtype(dtype_name), offline_mesh(dims), library == "core"
    ranks, itemsize = math.prod(n for _, n in dims), dtype.itemsize

    def case(name: str, size: int, ways: list[Way], problem: str, **chosen: Way) -> Case:
        """Each different way is an impl, named by its words. chosen: those of torch, which are params too."""
        by_words = {way.words(dims, itemsize): way for way in (*ways, *chosen.values())}
        params: dict[str, Param] = {"library": library, "problem": problem}
        params |= {planner: way.words(dims, itemsize) for planner, way in chosen.items()}
        where: dict[str, Param] = {
            "mesh": ",".join(f"{dim}={n}" for dim, n in dims),
            "dtype": dtype_name,
            "size": size,
        }
        return Case(
            name=name,
            params=params | where,
            build={words: partial(build, way, dtype, library) for words, way in by_words.items()},
            size_bytes=size,
            samples=None if plan.quick else SAMPLES,
        )

    shape = matrix_of(size, itemsize, ranks)
    for src, dst in REDISTRIBUTIONS:
        greedy, by_cost = (
            Way((torch_leg("x", shape, src, dst, mesh, dtype, by_cost=by_cost),)) for by_cost in (False, True)
        )
        ways = ways_between(shape, itemsize, src, dst, dims, topology, together=together)
        problem = f"{','.join(src)}->{','.join(dst)}"
        whole = math.prod(shape) * itemsize
        yield case("redistribute", whole, ways, problem, torch_greedy=greedy, torch_by_cost=by_cost)
    width = max(WIDTH // ranks, 1) * ranks
    rows = max(size // itemsize // width // ranks, 1) * ranks
    for a, b, out in PRODUCTS:
        product = Product(rows, width, width, a, b, out)
        ways = ways_of_product(product, itemsize, dims, topology, together=together)
        problem = f"({','.join(a)})@({','.join(b)})->{','.join(out)}"
        chosen = torch_product(product, mesh, dtype)
        yield case("product", rows * width * itemsize, ways, problem, torch_greedy=chosen)
