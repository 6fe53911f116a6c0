"""Every op the core has a rule for, against plain torch on the full tensors: values and gradients.

Each op runs over combinations of Replicate, Partial and Shard of every dim for each of its inputs, with
uneven and empty shards on a 1-D mesh of 4 or on a 2x2 mesh, and with even ones on a mesh of 2.
"""

from __future__ import annotations

import functools
import itertools
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
from dtbench_core.rules.base import rules_by_op
from dtbench_core.simulate import maybe_run_for_local_tensor

# Fallbacks are right all the same; torch.triangular_solve is deprecated, and has a rule still.
quiet = pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning", "ignore:torch.triangular_solve")
# Of uneven shards every second op is tried on the other mesh.
MESH_OF = {name: ((4,), (2, 2))[i % 2] for i, name in enumerate(OPS)}
Shapes = tuple[tuple[int, ...], ...]


@functools.cache
def _combinations(shapes: Shapes, mesh_ndim: int, limit: int, seed: int) -> list[Any]:
    """Placements of all inputs, not all replicated: every one if there are few, else a seeded sample."""
    choices = [[Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))] for shape in shapes]
    per_input = [itertools.product(each, repeat=mesh_ndim) for each in choices]
    everything = list(itertools.product(*per_input))[1:]
    if len(everything) <= limit:
        return everything
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    return [everything[i] for i in order[:limit].tolist()]


@maybe_run_for_local_tensor
def _weight(index: int, ranks: int) -> float:
    """Of the term of rank `index`: weights that differ and sum to 1 exactly in binary."""
    return 0.5 ** min(index + 1, ranks - 1)


def place(full: torch.Tensor, mesh: Any, placements: tuple[Placement, ...]) -> DTensor:
    """`full` as a DTensor; a Partial gets different terms on every rank, which add up to it."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    placed = distribute_tensor(full, mesh, whole, src_data_rank=None)
    if whole == list(placements):
        return placed
    local = placed.to_local()
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            local = local * _weight(mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim))
    return DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.contiguous().stride())


def _inputs(shapes: Shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@functools.lru_cache(maxsize=2)
def _reference(name: str, uneven: bool) -> tuple[Any, ...]:
    """The inputs, the result of plain torch, a cotangent of it and the gradients of the inputs."""
    op = OPS[name]
    plain = [t.requires_grad_(op.differentiable) for t in _inputs(op.uneven if uneven else op.shapes)]
    expected = op.fn(*plain)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, plain, cotangent) if op.differentiable else ()
    return [t.detach() for t in plain], expected.detach(), cotangent, list(gradients)


def _run_op(name: str, mesh_shape: tuple[int, ...], uneven: bool, limit: int) -> None:
    """On a rank: values and gradients are those of plain torch, however the inputs are placed."""
    op, mesh = OPS[name], mesh_of(mesh_shape)
    plain, expected, cotangent, gradients = _reference(name, uneven)
    shapes = op.uneven if uneven else op.shapes
    for placements in _combinations(shapes, len(mesh_shape), min(op.places, limit), len(name)):
        inputs = [
            place(t, mesh, p).requires_grad_(op.differentiable)
            for t, p in zip(plain, placements, strict=True)
        ]
        try:
            with torch.no_grad():
                results = [op.fn(*inputs) for _ in range(3)]  # the last call takes the fast path
            if op.differentiable:
                results[0] = op.fn(*inputs)
            for result in (results[0], results[-1]):
                torch.testing.assert_close(result.full_tensor(), expected)
            if op.differentiable:
                (results[0].full_tensor() * cotangent).sum().backward()
                torch.testing.assert_close([t.grad.full_tensor() for t in inputs], gradients)
        except Exception as error:
            mesh_name = "x".join(map(str, mesh_shape))
            error.add_note(f"{name} on {mesh_name}: {[','.join(map(str, p)) for p in placements]}")
            raise


@quiet
@pytest.mark.parametrize("name", OPS)
def test_op_equals_plain_torch(ranks: ThreadWorlds, name: str) -> None:
    ranks(_run_op, name, MESH_OF[name], True, 3)
    ranks(_run_op, name, (2,), False, 2, world_size=2)


# One or two of each family, for other kinds of ranks: these are the same for all.
OF_EACH_FAMILY = (
    *("add_broadcast", "to_int", "written", "sum_dim", "mean", "std", "max_dim", "mm", "linear_3d", "mlp"),
    *("sdpa_causal", "conv2d_strided", "batch_norm", "layer_norm", "softmax", "cross_entropy", "sort", "cat"),
    *("nll_ignoring", "embedding_sharded", "index_put", "scatter_in_place", "view_split", "split_other"),
    *("cumsum", "slice_scatter", "dropout", "listed_in_place"),
)


@quiet
@pytest.mark.parametrize("name", OF_EACH_FAMILY)
def test_op_equals_plain_torch_on_gloo(gloo_ranks: Worlds, name: str) -> None:
    gloo_ranks(_run_op, name, MESH_OF[name], True, 2)


@pytest.mark.filterwarnings("ignore")  # of torch, and of fallbacks: what the cases warn of is theirs
@pytest.mark.parametrize("name", OF_EACH_FAMILY)
def test_op_equals_plain_torch_as_local_tensors(name: str) -> None:
    _reference(name, True)  # outside of the mode, in which its tensors would be LocalTensors
    LocalWorlds()(_run_op, name, (2, 2), True, 1)


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
        # Other tests register rules of their own.
        registered = [op for op in rules_by_op if not str(op).startswith("dtbench_test")]
        unreached = [op for op in registered if op not in entry.ops and op not in DEVICE_ONLY]
        assert [str(op) for op in unreached] == []
    finally:
        dist.destroy_process_group()
