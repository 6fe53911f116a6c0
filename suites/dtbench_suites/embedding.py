"""Lookups in embedding tables that are sharded by rows, by columns, or table by table.

    core    dtbench_core
    torch   torch.distributed.tensor
    whole   every rank holds all tables and does not communicate. This is no floor: gradients are as large as the tables

Each rank looks up its own part of the batch. A lookup all-gathers the indices, looks them up in the rank's shard, and
returns the embeddings to the requesting ranks with a second collective. The backward pass sends the gradients the same
way; the gradient of a table is placed like the table.

Values are small integers, so embeddings and gradients are compared with plain torch bit by bit.
"""

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
    dims_with_several_ranks,
    dtensor_api,
    mismatch,
    parallel_api,
    silence_torch,
    skip_cuda_gathers_on_gloo,
    summed_values,
    torch_dtype,
)
from dtbench_suites.tensor_parallel import FORWARD, FORWARD_BACKWARD, run_pass, wait_for

# (rows of a table, width, lookups of all ranks together). On a GPU: the width and the batch of MLPerf's DLRM-DCNv2
# (github.com/mlcommons/training, recommendation_v2: embedding_dim 128, global batch 65536) and a table of a million
# rows. On a CPU: small enough that a pass takes milliseconds.
SHAPES = {"cpu": (16384, 64, 2048), "cuda": (2**20, 128, 65536)}
QUICK = (2048, 32, 512)

# Runs one pass; returns the embeddings and, with a backward pass, the gradients of the tables.
Step = Callable[[], list[Tensor]]


def tables_of(number: int, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns `number` tables of shape (rows, width) with different values."""
    values = torch.arange(rows * width).view(rows, width)
    return [((values * 7 + 13 * k) % MOVED_VALUES).to(dtype) for k in range(number)]


def indices_of(tables: int, rows: int, lookups: int) -> Tensor:
    """Returns (tables, lookups) indices, the same on all ranks. As in real logs, few rows get most lookups."""
    drawn = torch.rand(tables, lookups, generator=torch.Generator().manual_seed(0))
    return (drawn.pow(3) * rows).long().clamp_(max=rows - 1)


def step_of(embed: Callable[[], Tensor], weights: Sequence[Tensor], cotangent: Tensor | None) -> Step:
    def step() -> list[Tensor]:
        embedded, *grads = run_pass(embed, (), weights, None if cotangent is None else lambda _out: cotangent)
        return [embedded, *(wait_for(placed_as(g, w)) for g, w in zip(grads, weights, strict=False))]

    return step


def placed_as(grad: Any, weight: Any) -> Any:
    """Redistributes the gradient of a DTensor to the placements of its weight, where an optimizer needs it."""
    return grad.redistribute(placements=weight.placements) if hasattr(grad, "redistribute") else grad


# ---- the shardings ----


def by_module(
    style: str, impl: str, mesh: Any, table: Tensor, own_indices: Tensor
) -> tuple[Any, list[Tensor]]:
    """Shards an nn.Embedding with a parallel style.

    Args:
        own_indices: (1, lookups / n), this rank's part of the batch.

    Returns:
        The lookup function and the parameters.
    """
    module: nn.Module = nn.Embedding.from_pretrained(table.clone(), freeze=False)
    if impl != WHOLE:
        api, parallel = dtensor_api(impl), parallel_api(impl)
        sharding = getattr(parallel, style)(input_layouts=api.Shard(0), output_layouts=api.Shard(0))
        module = parallel.parallelize_module(module, mesh, sharding)
    indices = own_indices[0]
    return lambda: module(indices), list(module.parameters())


def by_table(
    impl: str, mesh: Any, rank_mesh: Any, tables: Sequence[Tensor], own_indices: Tensor
) -> tuple[Any, list[Tensor]]:
    """Puts table k on rank k of the mesh.

    Args:
        rank_mesh: the mesh that holds this rank only.
        own_indices: (tables, lookups / n), this rank's part of the batch.

    Returns:
        The lookup function and the parameters.
    """
    if impl == WHOLE:
        full_tables: list[Tensor] = [nn.Parameter(table.clone()) for table in tables]
        return lambda: torch.stack([*map(F.embedding, own_indices, full_tables)]), full_tables
    api = dtensor_api(impl)
    weight = nn.Parameter(
        api.distribute_tensor(tables[mesh.get_local_rank()].clone(), rank_mesh, [api.Replicate()])
    )

    def embed() -> Tensor:
        sent = api.DTensor.from_local(own_indices, mesh, [api.Shard(1)], run_check=False)
        own_lookups = sent.redistribute(
            placements=[api.Shard(0)]
        ).to_local()  # (1, lookups) in this rank's table
        index = api.DTensor.from_local(own_lookups, rank_mesh, [api.Replicate()], run_check=False)
        embedded: Any = F.embedding(index, weight)  # (1, lookups, width)
        returned = api.DTensor.from_local(embedded.to_local(), mesh, [api.Shard(0)], run_check=False)
        # (tables, lookups / n, width)
        return cast("Tensor", returned.redistribute(placements=[api.Shard(1)]).to_local())

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
    silence_torch()
    (rows, width, lookups), mesh = shape, world.mesh[mesh_dim]
    if impl == "torch":
        skip_cuda_gathers_on_gloo(mesh)
    rank, n = mesh.get_local_rank(), mesh.size()
    table_count = n if sharding == "table-wise" else 1
    tables = [table.to(world.device) for table in tables_of(table_count, rows, width, dtype)]
    indices = indices_of(table_count, rows, lookups).to(world.device)
    own_indices = indices.chunk(n, dim=1)[rank].contiguous()
    if sharding == "table-wise":
        embed, weights = by_table(
            impl, mesh, world.mesh_of((world.world_size, 1))["dim1"], tables, own_indices
        )
    else:
        embed, weights = by_module(STYLES[sharding], impl, mesh, tables[0], own_indices)
    # (tables, lookups, width); each rank uses the part of its own lookups.
    cotangent = summed_values(0, 1, table_count * lookups * width, dtype, world.device).view(
        table_count, lookups, width
    )
    own_cotangent = cotangent.chunk(n, dim=1)[rank].contiguous()
    output_cotangent = own_cotangent if sharding == "table-wise" else own_cotangent[0]
    step = step_of(embed, weights, output_cotangent if passes == FORWARD_BACKWARD else None)
    # With whole tables, a rank's gradients contain only its own lookups.
    checked_indices, checked_cotangents = (
        (own_indices, own_cotangent) if impl == WHOLE else (indices, cotangent)
    )

    def check() -> str | None:
        embedded, *grads = step()
        want = torch.stack([table[index] for table, index in zip(tables, own_indices, strict=True)])
        wrong = mismatch(embedded.view_as(want), want, "the embeddings")
        table_numbers = range(table_count) if impl == WHOLE or sharding != "table-wise" else [rank]
        # All ranks gather all gradients, even after a mismatch: full_tensor() is a collective.
        gathered = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        for k, grad in zip(table_numbers, gathered, strict=False):
            expected = torch.zeros_like(tables[k]).index_add_(0, checked_indices[k], checked_cotangents[k])
            wrong = wrong or mismatch(grad, expected, f"the gradient of table {k}")
        return wrong

    return Workload(run=step, check=check)


@suite("embedding", world="ranks", help=SUITES["embedding"], impl_s=(0.26, 0.17))
def embedding(options: RunOptions) -> Iterator[Case]:
    rows, width, lookups = QUICK if options.quick else SHAPES[options.device_type]
    for mesh_dim, n in dims_with_several_ranks(options):
        shape = rows, -(-width // n) * n, -(-lookups // n) * n  # even shards
        sizes = dict(zip(("rows", "width", "lookups"), shape, strict=True))
        for dtype, sharding, passes in itertools.product(
            options.dtypes, SHARDINGS, (FORWARD, FORWARD_BACKWARD)
        ):
            yield Case(
                name=sharding,
                params={"mesh_dim": mesh_dim, "ranks": n, "pass": passes, "dtype": dtype, **sizes},
                build={
                    impl: partial(build_impl, sharding, mesh_dim, passes, shape, torch_dtype(dtype), impl)
                    for impl in ("core", "torch", WHOLE)
                },
            )
