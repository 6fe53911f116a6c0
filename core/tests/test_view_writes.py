"""In-place writes through views that cut a sharded dim: the base, its shards and its other views show them.

Each program also runs on a plain tensor, and the values are compared, on shards of any length.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.tests.gloo_world import mesh_of, on_gloo_ranks, on_ranks
from core.tests.local_world import LocalWorlds, ThreadWorlds
from core.tests.op_case import index_for
from core.tests.placing import full, place
from dtbench_core import DTensor, NoRuleError, Partial, PlacementError, Replicate, Shard, distribute_tensor
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


@on_gloo_ranks
def test_views_of_inference_tensors_show_writes_to_their_base() -> None:
    # Ranks in threads share learnt calls, so one may read, and gather, such a view more often than another.
    with torch.inference_mode():
        plain, x = _x(), place(_x(), Shard(0))
        for t in (plain, x):
            _in_turn(t, lambda value: value)
        torch.testing.assert_close(x.full_tensor(), plain)


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


# ---- overlapping memory ----


R = Replicate()
Tensors = tuple[torch.Tensor, torch.Tensor]


def _full() -> torch.Tensor:
    return torch.arange(30.0).view(5, 6) + 1


# The written tensor and the tensor that is read.
WINDOWS: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "expanded": lambda x: (x[:1].expand(5, 6), x),
    "a row further": lambda x: (x[1:], x[:-1]),
    "itself": lambda x: (x, x),
    "itself, as a view": lambda x: (x, x.view(30).view(5, 6)),
    "a window with gaps": lambda x: (x[:, 1:4],) * 2,
    "a window with gaps, twice": lambda x: (x[:, 1:4], x[:, 1:4]),
    "other rows": lambda x: (x[:2], x[2:4]),
    "rows of it": lambda x: (x, x[1:3]),
}


def _index(x: torch.Tensor, count: int) -> Any:
    return index_for(x, list(range(count)), R)


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "number": lambda a, b: a.add_(1),
    "copy_": lambda a, b: a.copy_(b),
    "out=": lambda a, b: torch.add(b, 1, out=a),
    "fill_": lambda a, b: a.fill_(2),
    "index_add_": lambda a, b: a.index_add_(0, _index(a, len(b)), b),
    "scatter_add_": lambda a, b: a.scatter_add_(0, _index(a, b.numel()).view(b.shape) % len(a), b),
    "x[index] = y": lambda a, b: a.__setitem__(_index(a, len(b)), b),
    "foreach": lambda a, b: torch._foreach_add_([a], [b]),
    "cat": lambda a, b: torch.cat([b], out=a),
}


def _written(x: torch.Tensor, windows: Callable[[torch.Tensor], Tensors], write: Any) -> Any:
    """Returns `x` after the write, or the exception."""
    try:
        write(*windows(x))
    except Exception as error:
        return error
    return x


# Plain torch defines no result of these.
UNDEFINED = ("a window with gaps, twice", "expanded", "a row further")


@pytest.mark.filterwarnings("ignore")
@on_ranks
def test_overlapping_writes_equal_plain_torch() -> None:
    for (name, windows), (how, write) in itertools.product(WINDOWS.items(), WRITES.items()):
        expected = _written(_full(), windows, write)
        for placed in (Shard(0), Shard(1), R):
            for _ in range(2):  # the second from what the first has planned
                where = f"{how}, {name}, {placed}"
                got = _written(place(_full(), placed), windows, write)
                if isinstance(expected, Exception):
                    assert isinstance(got, type(expected)), f"{where}: {got!r}, expected {expected!r}"
                else:
                    assert isinstance(got, DTensor), f"{where}: {got!r}"
                    assert name in UNDEFINED or torch.equal(got.full_tensor(), expected), where


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@on_ranks
def test_list_writes_to_shared_memory_equal_plain_torch() -> None:
    """The tensors of a list are written one after the other."""
    mesh = mesh_of((4,))
    lists: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        lambda x, y: torch._foreach_add_([x[:1], x[1:2]], [y[:1], x[:1]]),
        lambda x, y: torch._foreach_mul_([x[2], x, x.t()], 3),
        lambda x, y: torch._foreach_add_([x, y], [y, x]),
        lambda x, y: torch._foreach_mul_([x.data, x[1]], 2),
        lambda x, y: torch._foreach_addcmul_([y, x], [x, y], [x, y]),
    ]
    for write in lists:
        for one, other in ((Shard(0), Shard(1)), (R, Shard(0)), (Shard(1), R)):
            plain = _full(), _full() / 4
            ours = [place(t, p) for t, p in zip(plain, (one, other), strict=True)]
            for _ in range(2):
                write(*ours)
                write(*plain)
            torch.testing.assert_close(full(ours), list(plain))
    # Max is not linear, so that the write gathers.
    x = DTensor.from_local(torch.full((2,), float(mesh.get_local_rank())), mesh, [Partial("max")])
    torch._foreach_mul_([x.view(1, 2), x], 3)
    assert x.full_tensor().tolist() == [27.0, 27.0]


@on_ranks
def test_copied_view_survives_a_new_shape_of_its_base() -> None:
    """A view that had to be copied is read and written in the old shape."""
    views = (lambda x: x[1:3], lambda x: x.split(3, 0)[-1], lambda x: x.diagonal(), lambda x: x[:, 1])
    restate = (lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.transpose_(0, 1))
    for view in views:
        for change in restate:
            for placed in (Shard(0), Shard(1)):
                plain = torch.arange(16.0).view(4, 4)
                x = place(plain, placed)
                got, expected = (x, view(x)), (plain, view(plain))
                for base, window in (got, expected):
                    change(base)
                    base.mul_(2)
                    window.add_(1)
                    base.select(-1, 0).zero_()
                torch.testing.assert_close(full(got), expected, rtol=0, atol=0)


@on_ranks
def test_squeeze_of_a_sharded_dim_needs_unshared_memory() -> None:
    alone: list[Callable[[Any], Any]] = [
        lambda x: x.squeeze_(1).mul_(3),
        lambda x: x.squeeze_().data.mul_(3),
        lambda x: x.squeeze_(-1)[1:].mul_(3),
    ]
    shared: list[Callable[[Any], Any]] = [
        lambda x: x[1:].squeeze_(1).mul_(3),
        lambda x: x[::2].squeeze_().data.mul_(3),
        lambda x: (x.view(3, 1).squeeze_(1), x.mul_(3)),
    ]
    for write in (*alone, *shared):
        for placed in (Shard(0), Shard(1), R):
            plain = torch.arange(3.0).view(3, 1) + 1
            x = place(plain, placed)
            before, expected = plain.clone(), write(plain)
            try:
                got = write(x)
            except PlacementError:
                assert write in shared and placed != R
                assert torch.equal(x.full_tensor(), before)
            else:
                torch.testing.assert_close(full((x, got)), (plain, expected), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@on_ranks
def test_as_strided_over_gaps_is_refused() -> None:
    mesh, plain = mesh_of((4,)), _full()[:4, ::2]
    local = plain.chunk(4)[mesh.get_local_rank()]
    x = DTensor.from_local(local, mesh, [Shard(0)], shape=plain.shape, stride=plain.stride())
    with pytest.raises(NoRuleError, match="memory has gaps"):
        x.as_strided((2, 2), (6, 1))
    assert torch.equal(x.contiguous().as_strided((2, 2), (3, 1)).full_tensor(), plain[:2, :2])
