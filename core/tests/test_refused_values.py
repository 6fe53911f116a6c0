"""Values that plain tensors refuse and one rank alone holds: every rank raises what plain tensors raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.local_world import ThreadWorlds
from dtbench_core import DTensor, Placement, Replicate, Shard, count_collectives, distribute_tensor

S, R = Shard, Replicate()
Place = Callable[..., Any]
FULL = torch.arange(1, 49).view(8, 6)
# The last rank of four that hold 8 rows has the value that is refused: a zero, or an index far beyond.
ZERO = FULL.clone()
ZERO[7, 2] = 0
ROWS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 77])
EACH = torch.zeros(8, 6, dtype=torch.int64)
EACH[7, 1] = 66
FLOATS = FULL.double()
LOGITS = FULL.double() / 48


def _in_place(op: str) -> Callable[[Place], Any]:
    return lambda put: getattr(put(FULL.clone(), 0), op)(put(ZERO, 0))


# What is done to tensors that `put(full, dim)` shards, with dim None replicates.
PROGRAMS: dict[str, Callable[[Place], Any]] = {
    "//": lambda put: put(FULL, 0) // put(ZERO, 0),
    "%": lambda put: put(FULL, 0) % put(ZERO, 0),
    "number %": lambda put: torch.remainder(5, put(ZERO, 0)),
    "fmod": lambda put: torch.fmod(put(FULL, 0), put(ZERO, 0)),
    "out=": lambda put: torch.fmod(put(FULL, 0), put(ZERO, 0), out=put(FULL.clone(), 0)),
    "remainder_": _in_place("remainder_"),
    "//=, of a broadcast row": lambda put: put(FULL, 1) // put(ZERO[7], 0),
    "index": lambda put: put(FLOATS, None)[put(ROWS, 0)],
    "index_select": lambda put: put(FLOATS, None).index_select(0, put(ROWS, 0)),
    "index_select of the sharded dim": lambda put: put(FLOATS, 0).index_select(0, put(ROWS, 0)),
    "gather": lambda put: put(FLOATS, 0).gather(1, put(EACH, 0)),
    "scatter": lambda put: put(FLOATS, 0).scatter(1, put(EACH, 0), 1.0),
    "scatter_add": lambda put: put(FLOATS, 0).scatter_add(1, put(EACH, 0), put(FLOATS, 0)),
    "index_put": lambda put: put(FLOATS, None).index_put((put(ROWS, 0),), put(FLOATS, 0), accumulate=True),
    "index_add": lambda put: put(FLOATS, None).index_add(0, put(ROWS, 0), put(FLOATS, 0)),
    "embedding of sharded rows": lambda put: F.embedding(put(EACH, 0), put(FLOATS, 0)),
    "cross_entropy": lambda put: F.cross_entropy(put(LOGITS, 0), put(ROWS % 50, 0), reduction="none"),
    "cross_entropy of sharded classes": lambda put: F.cross_entropy(put(LOGITS, 1), put(ROWS % 50, 0)),
    "binary_cross_entropy": lambda put: F.binary_cross_entropy(put(FLOATS / 47, 0), put(LOGITS, 0)),
    "backward": lambda put: (
        (put(LOGITS.clone(), 0).requires_grad_().gather(1, put(EACH, 0))).sum().backward()
    ),
    # Replicated values, and ranks whose part of what they are applied to is empty.
    "index of what some ranks hold": lambda put: put(FLOATS[:, :3], 1)[put(ROWS, None)],
    "index_put_ of what some ranks hold": lambda put: put(FLOATS[:, :3].clone(), 1).index_put_(
        (put(ROWS, None),), put(FLOATS[:, :3], 1)
    ),
    "index_add_ of what some ranks hold": lambda put: put(FLOATS[:, :3].clone(), 1).index_add_(
        0, put(ROWS, None), put(FLOATS[:, :3], 1)
    ),
    "// 0 of 3 columns": lambda put: put(FULL[:, :3], 1) // 0,
}


def _put(mesh: DeviceMesh, *more: Placement) -> Place:
    def put(full: torch.Tensor, dim: int | None) -> DTensor:
        return distribute_tensor(full, mesh, [*more, R if dim is None else S(dim)], src_data_rank=None)

    return put


def _plain(full: torch.Tensor, dim: int | None) -> torch.Tensor:
    return full


def _error_of(run: Callable[[], Any]) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except Exception as error:
            return error
    return None


def _refuses(name: str, mesh_shape: tuple[int, ...]) -> None:
    program, mesh = PROGRAMS[name], mesh_of(mesh_shape)
    want = _error_of(lambda: program(_plain))
    for _ in range(2):  # the second from what the first has planned
        got = _error_of(lambda: program(_put(mesh, *[R] * (len(mesh_shape) - 1))))
        assert isinstance(got, type(want)), (got, want)
    # The ranks are still in step.
    assert distribute_tensor(FLOATS, mesh, [S(0)] * len(mesh_shape)).sum().full_tensor() == FLOATS.sum()


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_rank_raises_what_plain_tensors_raise(
    ranks: ThreadWorlds, name: str, mesh_shape: tuple[int, ...]
) -> None:
    ranks(_refuses, name, mesh_shape)


@on_ranks
def test_replicated_values_cost_no_collective() -> None:
    put = _put(mesh_of((4,)))
    x, rows, divisor = put(FULL, 0), put(ROWS % 6, None), put(FULL, None)
    with count_collectives() as seen:
        x.index_select(1, rows)
        x[:, rows]
        put(FULL, None) // divisor
    assert not seen.calls
