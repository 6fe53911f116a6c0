"""In-place writes through views that cut a sharded dim: the base, its shards and its other views show them.

Each program also runs on a plain tensor, and the values are compared, on shards of any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.tests.gloo_world import Worlds, mesh_of
from core.tests.local_world import LocalWorlds, ThreadWorlds
from core.tests.placing import full, place
from dtbench_core import Replicate, Shard, distribute_tensor
from dtbench_core.errors import PlacementError
from dtbench_core.layout.placement import Placements
from dtbench_core.layout.shard_layout import part_of

Program = Callable[[Any, Callable[[torch.Tensor], Any]], Any]
SHAPE = (7, 5)


def _assigned(where: Any, value: Any) -> Program:
    def program(x: Any, spread: Callable[[torch.Tensor], Any]) -> None:
        at = spread(where) if isinstance(where, torch.Tensor) else where
        x[at] = spread(value) if isinstance(value, torch.Tensor) else value

    return program


def _row(x: Any, spread: Callable[[torch.Tensor], Any]) -> None:
    x[0] = spread(torch.arange(5.0).double())


def _from_itself(x: Any, spread: Callable[[torch.Tensor], Any]) -> None:
    x[0] = x[6] * 2
    x[:, 1] = x[:, 4]
    x[1].add_(x[0])


def _in_turn(x: Any, spread: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Views taken before a write, read and written to after it."""
    one, two, column = x[2:5], x[3], x[:, 1]
    one.mul_(2)
    two.add_(1)
    column.neg_()
    one[1:].add_(10)
    x.add_(1)
    two.sub_(column.sum())
    return one.sum() + two.sum() + column.sum()


def _out(x: Any, spread: Callable[[torch.Tensor], Any]) -> None:
    torch.add(x[0], x[1], out=x[2])
    torch.cumsum(x[3:], 0, out=x[3:])


PROGRAMS: dict[str, Program] = {
    "number": _assigned(0, 1),
    "row": _row,
    "element": _assigned((4, 2), 9),
    "column": _assigned((slice(None), 1), -1),
    "block": _assigned((slice(1, 6), slice(0, 3)), 2),
    "mask": _assigned(torch.arange(35).view(SHAPE) % 3 == 0, 0),
    "list": _assigned([0, 3, 6], 5),
    "scalar tensor": _assigned(2, torch.tensor(3.0, dtype=torch.float64)),
    "mul": lambda x, spread: x[2:4].mul_(2),
    "broadcast": lambda x, spread: x[:, 1:3].mul_(spread(torch.arange(7.0).double().view(7, 1))),
    "narrow": lambda x, spread: x.narrow(0, 2, 3).copy_(spread(torch.arange(15.0).double().view(3, 5))),
    "unbind": lambda x, spread: [row.mul_(i) for i, row in enumerate(x.unbind(0))],
    "diagonal": lambda x, spread: x.diagonal().fill_(1),
    "fill_diagonal": lambda x, spread: x.fill_diagonal_(8),
    "transposed": lambda x, spread: x.t()[1].add_(1),
    "nested": lambda x, spread: x[1:6][1:3][0].mul_(3),
    "mixed": lambda x, spread: x[1:6, 2].mul_(3),
    "none": lambda x, spread: x[3:3].fill_(1),
    "flat": lambda x, spread: x.view(-1)[3:20].zero_(),
    "index_fill": lambda x, spread: x.index_fill_(0, spread(torch.tensor([0, 5])), 3),
    "index_copy": lambda x, spread: x.index_copy_(
        0, spread(torch.tensor([6, 1])), spread(torch.ones(2, 5).double())
    ),
    "index_add": lambda x, spread: x.index_add_(
        1, spread(torch.tensor([0, 1])), spread(torch.ones(7, 2).double())
    ),
    "masked_fill": lambda x, spread: x[1:5].masked_fill_(spread(torch.arange(20).view(4, 5) % 2 == 0), 7),
    "cumsum": lambda x, spread: x[1:5].cumsum_(0),
    "from itself": _from_itself,
    "overlapping": lambda x, spread: x[:, :4].add_(x[:, 1:5]),
    "in turn": _in_turn,
    "out": _out,
}
MESHES: dict[str, tuple[tuple[int, ...], Placements]] = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "both": ((2, 2), (Shard(0), Shard(1))),
    "rows twice": ((2, 2), (Shard(0), Shard(0))),
    "rows, whole": ((2, 2), (Replicate(), Shard(0))),
}


def _x() -> torch.Tensor:
    return torch.arange(1.0, 36.0, dtype=torch.float64).view(SHAPE)


def _errors_by_program(sizes: tuple[int, ...], placements: Placements, *, grad: bool) -> dict[str, str]:
    """Returns the error of each program that failed."""
    mesh, replicated = mesh_of(sizes), [Replicate()] * len(sizes)
    wrong: dict[str, str] = {}
    for name, program in PROGRAMS.items():
        if grad and name in ("out", "unbind"):
            continue  # torch refuses
        plain, leaf = _x(), _x()
        x = parts = distribute_tensor(leaf, mesh, placements, src_data_rank=None)
        if grad:
            plain.requires_grad_()
            parts.requires_grad_()
        y = plain * plain if grad else plain
        x = parts * parts if grad else parts
        row, local = x[2:4], x.to_local()
        wanted = program(y, lambda value: value)
        try:
            got = program(x, lambda value: distribute_tensor(value, mesh, replicated, src_data_rank=None))
            if grad:
                weights = torch.arange(35.0).double().view(SHAPE)
                (y * weights).sum().backward()
                (x * distribute_tensor(weights, mesh, replicated, src_data_rank=None)).sum().backward()
                pairs = [(parts.grad, plain.grad)]
            else:
                pairs = [(local, part_of(plain, x._spec)), (row, plain[2:4])]
            pairs += [(x, y)]
            if isinstance(wanted, torch.Tensor):
                pairs.append((got, wanted))
            for mine, theirs in pairs:
                torch.testing.assert_close(full(mine).detach(), theirs.detach())
        except Exception as error:  # so that all programs run
            wrong[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return wrong


@pytest.mark.filterwarnings("ignore:no sharding rule covers")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
def test_write_through_a_view_of_a_sharded_dim_reaches_base_shards_and_views(
    ranks: ThreadWorlds, mesh: str, grad: bool
) -> None:
    for wrong in ranks(_errors_by_program, *MESHES[mesh], grad=grad):
        assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def _in_turn_uncounted() -> None:
    with torch.inference_mode():
        plain, x = _x(), place(_x(), Shard(0))
        for t in (plain, x):
            _in_turn(t, lambda value: value)
        torch.testing.assert_close(x.full_tensor(), plain)


def test_views_of_inference_tensors_show_writes_to_their_base(gloo_ranks: Worlds) -> None:
    # Ranks in threads share learnt calls, so one may read, and gather, such a view more often than another.
    gloo_ranks(_in_turn_uncounted)


def test_simulated_ranks_refuse_writes_through_copied_views() -> None:
    LocalWorlds()(_refused_in_simulation)


def _refused_in_simulation() -> None:
    x = place(_x(), Shard(0))
    view = x[2:5]
    with pytest.raises(PlacementError, match="the write would be lost"):
        x[2:5].mul_(2)
    x.add_(1)
    with pytest.raises(PlacementError, match="written to since"):
        view.full_tensor()
    assert torch.equal(x.full_tensor(), _x() + 1)
