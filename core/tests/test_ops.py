"""Every op the core has a rule for, against plain torch on the full tensors: values and gradients.

Each op runs over combinations of Replicate, Partial and Shard of every dim for each of its inputs, with
even shards and with uneven and empty ones, on a 1-D mesh of 4 or on a 2x2 mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.tests.gloo_world import Worlds, mesh_of
from core.tests.local_world import LocalWorlds, ThreadWorlds
from core.tests.op_case import DEVICE_ONLY
from core.tests.op_cases import OPS
from core.tests.torch_version import needs_213
from dtbench_core import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from dtbench_core.dispatch import entry
from dtbench_core.rules.base import ops_with_rules
from dtbench_core.simulate import maybe_run_for_local_tensor

MESHES = (4,), (2, 2)


def _choices(ndim: int) -> list[Placement]:
    return [Replicate(), Partial(), *(Shard(d) for d in range(ndim))]


def _combinations(
    shapes: tuple[tuple[int, ...], ...], mesh_ndim: int, limit: int, seed: int
) -> Iterator[Any]:
    """Placements of all inputs: everything when there are few, else a seeded sample, alike on all ranks."""
    per_input = [list(itertools.product(_choices(len(s)), repeat=mesh_ndim)) for s in shapes]
    everything = list(itertools.product(*per_input))
    if len(everything) <= limit:
        yield from everything
        return
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    yield from (everything[i] for i in order[:limit].tolist())


@maybe_run_for_local_tensor
def _weight(index: int, ranks: int) -> float:
    """Of the term of rank `index`: weights that differ and sum to 1 exactly in binary."""
    return 0.5 ** min(index + 1, ranks - 1)


def place(full: torch.Tensor, mesh: Any, placements: tuple[Placement, ...]) -> DTensor:
    """`full` as a DTensor; a Partial gets different terms on every rank, which add up to it."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    made = distribute_tensor(full, mesh, whole, src_data_rank=None)
    if whole == list(placements):
        return made
    local = made.to_local()
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            local = local * _weight(mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim))
    return DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.contiguous().stride())


def _inputs(shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _run_op(name: str, mesh_shape: tuple[int, ...], uneven: bool, most: int = 4) -> None:
    """On a rank: values and gradients are those of plain torch, however the inputs are placed."""
    op = OPS[name]
    shapes = op.uneven if uneven else op.shapes
    mesh = mesh_of(mesh_shape)
    plain = [t.requires_grad_(op.differentiable) for t in _inputs(shapes)]
    expected = op.fn(*plain)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if op.differentiable:
        wanted = torch.autograd.grad(expected, plain, cotangent)
    for placements in _combinations(shapes, len(mesh_shape), min(op.places, most), seed=len(name)):
        inputs = [
            place(t.detach(), mesh, p).requires_grad_(op.differentiable)
            for t, p in zip(plain, placements, strict=True)
        ]
        try:
            with torch.no_grad():
                fast = [op.fn(*inputs) for _ in range(3)][-1]  # learnt on the way
            result = op.fn(*inputs)
            for got in (result, fast):
                torch.testing.assert_close(got.full_tensor(), expected)
            if op.differentiable:
                (result.full_tensor() * cotangent).sum().backward()
                torch.testing.assert_close([t.grad.full_tensor() for t in inputs], list(wanted))
        except Exception as error:
            mesh_name = "x".join(map(str, mesh_shape))
            error.add_note(f"{name} on {mesh_name}: {[','.join(map(str, p)) for p in placements]}")
            raise


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")  # right all the same
@pytest.mark.filterwarnings("ignore:torch.triangular_solve")  # deprecated, and in the database still
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("name", OPS)
def test_op_equals_plain_torch(ranks: ThreadWorlds, name: str, uneven: bool) -> None:
    # Even shards on the one mesh and uneven ones on the other; every second op the other way round.
    mesh_shape = MESHES[(list(OPS).index(name) + uneven) % 2]
    # Two placements of even shards: of planted faults, four found no other.
    ranks(_run_op, name, mesh_shape, uneven, 4 if uneven else 2)


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@pytest.mark.filterwarnings("ignore:torch.triangular_solve")
@pytest.mark.parametrize("name", OPS)
def test_op_equals_plain_torch_on_gloo(gloo_ranks: Worlds, name: str) -> None:
    """What differs there are the transport's own ways, so two placements are enough."""
    gloo_ranks(_run_op, name, MESHES[list(OPS).index(name) % 2], True, most=2)


# One or two of each family, for the second flavour: the simulation is the same for all.
AS_LOCAL_TENSORS = (
    *("add_broadcast", "to_int", "written", "sum_dim", "mean", "std", "max_dim", "mm", "linear_3d", "mlp"),
    *("sdpa_causal", "conv2d_strided", "batch_norm", "layer_norm", "softmax", "cross_entropy"),
    *(
        "nll_ignoring",
        "embedding_sharded",
        "index_put",
        "scatter_in_place",
        "view_split",
        "cat",
        "split_other",
        "sort",
    ),
    *("cumsum", "slice_scatter", "dropout", "listed_in_place"),
)


@pytest.mark.filterwarnings("ignore")  # of torch, and of fallbacks: what the cases warn of is theirs
@pytest.mark.parametrize("name", AS_LOCAL_TENSORS)
def test_op_equals_plain_torch_as_local_tensors(name: str) -> None:
    LocalWorlds()(_run_op, name, (2, 2), True, most=1)


@needs_213("the fake group leaves unwritten what it gathers, indices too")
@pytest.mark.filterwarnings("ignore")  # of torch, and of fallbacks: what the cases warn of is theirs
def test_every_rule_is_tested() -> None:
    """Each op that has a rule is reached by an entry of OPS, forward or backward."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        for op in OPS.values():
            whole = [distribute_tensor(t, mesh, src_data_rank=None) for t in _inputs(op.shapes)]
            result = op.fn(*[t.requires_grad_(op.differentiable) for t in whole])
            if op.differentiable:
                result.sum().backward()
        unreached = [op for op in ops_with_rules() if op not in entry.ops and op not in DEVICE_ONLY]
        assert [str(op) for op in unreached] == []
    finally:
        dist.destroy_process_group()
