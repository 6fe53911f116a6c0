"""In-place writes to tensors that share memory, compared with plain tensors: results, and errors on every rank."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.placing import place
from dtbench_core import DTensor, NoRuleError, Partial, PlacementError, Replicate, Shard, distribute_tensor

S, R = Shard, Replicate()
Tensors = tuple[torch.Tensor, torch.Tensor]


def _full() -> torch.Tensor:
    return torch.arange(30.0).view(5, 6) + 1


# What is written and what is read.
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


def _index(x: torch.Tensor, count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    index = torch.arange(count).to(dtype)
    return distribute_tensor(index, x.device_mesh, src_data_rank=None) if isinstance(x, DTensor) else index


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


def _written(
    full: torch.Tensor, windows: Callable[[torch.Tensor], Tensors], write: Any
) -> torch.Tensor | Exception:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            write(*windows(full))
        except Exception as error:
            return error
    return full


# Plain torch defines no result of these.
UNDEFINED = ("a window with gaps, twice", "expanded", "a row further")


@on_ranks
def test_writes_over_shared_memory() -> None:
    for (name, windows), (how, write) in itertools.product(WINDOWS.items(), WRITES.items()):
        expected = _written(_full(), windows, write)
        for placed in (S(0), S(1), R):
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
def test_lists_of_tensors_that_share_memory() -> None:
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
        for one, other in ((S(0), S(1)), (R, S(0)), (S(1), R)):
            plain = _full(), _full() / 4
            ours = [place(t, p) for t, p in zip(plain, (one, other), strict=True)]
            for _ in range(2):
                write(*ours)
                write(*plain)
            for got, expected in zip(ours, plain, strict=True):
                torch.testing.assert_close(got.full_tensor(), expected)
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
            for placed in (S(0), S(1)):
                full = torch.arange(16.0).view(4, 4)
                x = place(full, placed)
                seen, expected = view(x), view(full)
                for base, window in ((x, seen), (full, expected)):
                    change(base)
                    base.mul_(2)
                    window.add_(1)
                    base.select(-1, 0).zero_()
                assert torch.equal(seen.full_tensor(), expected) and torch.equal(x.full_tensor(), full), (
                    placed
                )


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
        for placed in (S(0), S(1), R):
            full = torch.arange(3.0).view(3, 1) + 1
            x = place(full, placed)
            before, expected = full.clone(), write(full)
            try:
                got = write(x)
            except PlacementError:
                assert write in shared and placed != R
                assert torch.equal(x.full_tensor(), before)
            else:
                assert torch.equal(x.full_tensor(), full)
                for one, other in (
                    zip(got, expected, strict=True) if isinstance(got, tuple) else ((got, expected),)
                ):
                    assert torch.equal(one.full_tensor(), other)


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@on_ranks
def test_as_strided_over_gaps_is_refused() -> None:
    mesh, full = mesh_of((4,)), _full()[:4, ::2]
    local = full.chunk(4)[mesh.get_local_rank()]
    x = DTensor.from_local(local, mesh, [S(0)], shape=full.shape, stride=full.stride())
    with pytest.raises(NoRuleError, match="memory has gaps"):
        x.as_strided((2, 2), (6, 1))
    assert torch.equal(x.contiguous().as_strided((2, 2), (3, 1)).full_tensor(), full[:2, :2])
