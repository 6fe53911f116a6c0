"""Lookups in embedding tables too large for one rank, cut by rows, by columns, or a whole table per rank.

    core    dtbench_core
    torch   torch.distributed.tensor
    whole   every table whole on every rank, without communication: no floor, as a gradient is as large as its table

Each rank brings its part of the batch and wants the embeddings of that part. So a lookup is a gather of the
indices, the lookup in what the rank holds, and a collective that brings the embeddings home; backward, the
gradients go the same way, and the table's gradient comes to lie as the table does.

Values are small integers: embeddings and gradients are compared with plain torch's bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtbench.suite import Case, RunOptions, Workload, World, suite
from dtbench.suite.case import WHOLE
from dtbench_suites import SUITES
from dtbench_suites.data import (
    MOVED_VALUES,
    SUMMED_VALUES,
    dtensor_api,
    hush_torch,
    mismatch,
    parallel_api,
    refuse_gathers_of_cuda_on_gloo,
    shared_dims,
    torch_dtype,
)
from dtbench_suites.tensor_parallel import BOTH, FORWARD, finished, one_pass

# rows of a table, width, lookups of all ranks together. On a GPU the width and the batch of MLPerf's DLRM-DCNv2
# (github.com/mlcommons/training, recommendation_v2: embedding_dim 128, global batch 65536) and a table of a
# million rows; on a CPU as much as keeps a pass within milliseconds.
SHAPES = {"cpu": (16384, 64, 2048), "cuda": (2**20, 128, 65536)}
QUICK = (2048, 32, 512)

# What a pass gives: the embeddings, and in a backward pass the tables' gradients.
Step = Callable[[], list[Tensor]]


def tables_of(number: int, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Each [rows, width], other values in each."""
    values = torch.arange(rows * width).view(rows, width)
    return [((values * 7 + 13 * k) % MOVED_VALUES).to(dtype) for k in range(number)]


def indices_of(tables: int, rows: int, lookups: int) -> Tensor:
    """(tables, lookups) some rows often, most never, as in real logs; the same on all ranks."""
    drawn = torch.rand(tables, lookups, generator=torch.Generator().manual_seed(0))
    return (drawn.pow(3) * rows).long().clamp_(max=rows - 1)


def step_of(embed: Callable[[], Tensor], weights: Sequence[Tensor], cotangent: Tensor | None) -> Step:
    def step() -> list[Tensor]:
        backward = None if cotangent is None else lambda _out: cotangent
        embedded, *grads = one_pass(embed, (), weights, backward)
        return [embedded, *(finished(placed_as(g, w)) for g, w in zip(grads, weights, strict=False))]

    return step


def placed_as(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient where an optimizer needs it: as the weight is placed."""
    if not hasattr(grad, "redistribute"):
        return grad
    return cast("Tensor", grad.redistribute(placements=weight.placements))  # type: ignore[attr-defined]


# ---- the shardings ----


def by_module(style: str, impl: str, mesh: Any, table: Tensor, mine: Tensor) -> tuple[Any, list[Tensor]]:
    """The table as an nn.Embedding, cut by a style of tensor parallelism. mine: (1, lookups / n)."""
    module: nn.Module = nn.Embedding.from_pretrained(table.clone(), freeze=False)
    if impl != WHOLE:
        api, parallel = dtensor_api(impl), parallel_api(impl)
        cut = getattr(parallel, style)(input_layouts=api.Shard(0), output_layouts=api.Shard(0))
        module = parallel.parallelize_module(module, mesh, cut)
    indices = mine[0]
    return lambda: module(indices), list(module.parameters())


def by_table(
    impl: str, mesh: Any, alone: Any, tables: Sequence[Tensor], mine: Tensor
) -> tuple[Any, list[Tensor]]:
    """Table k on rank k of the mesh. mine: (tables, lookups / n). alone: the mesh of this rank only."""
    if impl == WHOLE:
        whole: list[Tensor] = [nn.Parameter(table.clone()) for table in tables]
        return lambda: torch.stack([*map(F.embedding, mine, whole)]), whole
    api = dtensor_api(impl)
    owned = api.distribute_tensor(tables[mesh.get_local_rank()].clone(), alone, [api.Replicate()])
    weight = nn.Parameter(owned)

    def embed() -> Tensor:
        sent = api.DTensor.from_local(mine, mesh, [api.Shard(1)], run_check=False)
        lookups = sent.redistribute(placements=[api.Shard(0)]).to_local()  # (1, lookups): of my table
        index = api.DTensor.from_local(lookups, alone, [api.Replicate()], run_check=False)
        embedded: Any = F.embedding(index, weight)  # (1, lookups, width)
        answered = api.DTensor.from_local(embedded.to_local(), mesh, [api.Shard(0)], run_check=False)
        # (tables, lookups / n, width)
        return cast("Tensor", answered.redistribute(placements=[api.Shard(1)]).to_local())

    return embed, [weight]


STYLES = {"row-wise": "RowwiseParallel", "column-wise": "ColwiseParallel"}
SHARDINGS = (*STYLES, "table-wise")


def build_impl(
    sharding: str,
    mesh_dim: str,
    passes: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    impl: str,
    world: World,
) -> Workload:
    hush_torch()
    (rows, width, lookups), mesh = shape, world.mesh[mesh_dim]
    if impl == "torch":
        refuse_gathers_of_cuda_on_gloo(mesh)
    rank, n = mesh.get_local_rank(), mesh.size()
    number = n if sharding == "table-wise" else 1
    tables = [table.to(world.device) for table in tables_of(number, rows, width, dtype)]
    indices = indices_of(number, rows, lookups).to(world.device)
    mine = indices.chunk(n, dim=1)[rank].contiguous()
    if sharding == "table-wise":
        embed, weights = by_table(impl, mesh, world.mesh_of((world.world_size, 1))["dim1"], tables, mine)
    else:
        embed, weights = by_module(STYLES[sharding], impl, mesh, tables[0], mine)
    # (tables, lookups, width), of which each rank has the part that belongs to its lookups.
    cotangent = torch.arange(number * lookups * width, device=world.device).view(number, lookups, width)
    cotangent = (cotangent % SUMMED_VALUES).to(dtype)
    own = cotangent.chunk(n, dim=1)[rank].contiguous()
    given = own if sharding == "table-wise" else own[0]
    step = step_of(embed, weights, given if passes == BOTH else None)
    # Of whole tables no rank learns of the others' lookups.
    looked_up, summed = (mine, own) if impl == WHOLE else (indices, cotangent)

    def check() -> str | None:
        embedded, *grads = step()
        want = torch.stack([table[one] for table, one in zip(tables, mine, strict=True)])
        wrong = mismatch(embedded.view_as(want), want, "the embeddings")
        held = range(number) if impl == WHOLE or sharding != "table-wise" else [rank]
        # Every rank gathers every gradient, whatever it found before.
        gathered = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        for k, grad in zip(held, gathered, strict=False):
            expected = torch.zeros_like(tables[k]).index_add_(0, looked_up[k], summed[k])
            wrong = wrong or mismatch(grad, expected, f"the gradient of table {k}")
        return wrong

    return Workload(run=step, check=check)


@suite("embedding", world="ranks", help=SUITES["embedding"], impl_s=(0.26, 0.17))
def embedding(options: RunOptions) -> Iterator[Case]:
    rows, width, lookups = QUICK if options.quick else SHAPES[options.device_type]
    for mesh_dim, n in shared_dims(options):
        shape = rows, -(-width // n) * n, -(-lookups // n) * n  # parts of one length for every rank
        sizes = dict(zip(("rows", "width", "lookups"), shape, strict=True))
        for dtype, sharding, passes in itertools.product(options.dtypes, SHARDINGS, (FORWARD, BOTH)):
            build = partial(build_impl, sharding, mesh_dim, passes, shape, torch_dtype(dtype))
            yield Case(
                name=sharding,
                params={"mesh_dim": mesh_dim, "ranks": n, "pass": passes, "dtype": dtype, **sizes},
                build={impl: partial(build, impl) for impl in ("core", "torch", WHOLE)},
            )
