"""Ops without a rule run on replicated inputs: right, counted, warned once. And out=, in-place views."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.local_world import ThreadWorlds
from core.tests.placing import full, place
from dtbench_core import (
    CoreError,
    DTensor,
    FallbackWarning,
    Partial,
    Placement,
    Replicate,
    Shard,
    clear_fallbacks,
    distribute_tensor,
    fallbacks,
)

PLACED: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()]]
S, R = Shard, Replicate()
quiet = pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")


def _same(got: Any, expected: Any) -> bool:
    got, expected = full(got), full(expected)
    if isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(expected, torch.Tensor):
        return got.dtype == expected.dtype and torch.allclose(got, expected, equal_nan=True)
    return bool(got == expected)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _into(full: torch.Tensor, placements: list[Placement]) -> Any:
    return distribute_tensor(full.clone(), mesh_of((4,)), placements)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "det": torch.linalg.det,
    "several results": lambda x: torch.linalg.qr(x),
    "shape from values": torch.nonzero,
    "mask": lambda x: x[x > 0],
    "histogram": lambda x: torch.histogramdd(x[:, :2], bins=[2, 2]).hist,
    "python value": lambda x: x.det().item(),
}


@quiet
@pytest.mark.parametrize("placements", PLACED, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@on_ranks
def test_an_op_without_a_rule_gives_what_plain_torch_gives(name: str, placements: list[Placement]) -> None:
    full = _random(5, 5)
    assert _same(FUNCTIONS[name](_into(full, placements)), FUNCTIONS[name](full))


def test_a_fallback_is_counted_and_warns_once(fake_world: Callable[[int], None]) -> None:
    fake_world(4)
    clear_fallbacks()
    x = distribute_tensor(torch.eye(4), mesh_of((4,)), [S(0)])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.nonzero(x)
    warned = [str(w.message) for w in seen if w.category is FallbackWarning]
    assert sum(fallbacks().values()) == 3
    assert len(warned) == 1 and "aten.nonzero" in warned[0]


# ---- writes ----


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "cumsum_ along both dims": lambda x, y: x.cumsum_(0).cumsum_(1),
    "copy_ from elsewhere": lambda x, y: x.copy_(y.sort(0).values),
    "out= of the same shape": lambda x, y: torch.mul(y, 2, out=x),
    "out= aliasing an input": lambda x, y: torch.add(x, y, out=x),
    "two outs": lambda x, y: torch.max(y, 1, out=(x[:, 0] * 1, (x[:, 0] * 0).long())),
    "t_": lambda x, y: x.t_(),
    "squeeze_": lambda x, y: x.unsqueeze_(0).squeeze_(0).add_(y),
}


@quiet
@pytest.mark.parametrize("read", PLACED, ids=str)
@pytest.mark.parametrize("written", PLACED, ids=str)
@pytest.mark.parametrize("name", WRITES)
@on_ranks
def test_writes_reach_the_written_tensor(name: str, written: list[Placement], read: list[Placement]) -> None:
    x, y = _random(2, 5, 3).unbind()
    target, source = _into(x, written), _into(y, read)
    got = WRITES[name](target, source)
    x = x.clone()
    assert _same(got, WRITES[name](x, y)) and _same(target, x)


@on_ranks
def test_a_pending_sum_is_added_to_by_a_rule() -> None:
    """Terms of any placement are added to a pending sum, which stays one, by a rule."""
    clear_fallbacks()
    full = torch.arange(15.0).reshape(5, 3)
    for read in ([R], [S(0)], [Partial()]):
        total = _into(full, [S(0)]).sum(0)
        total.add_(_into(full[0], read)).sub_(_into(full[1], [R]), alpha=2)
        assert _same(total, full.sum(0) + full[0] - 2 * full[1])
    assert not fallbacks()


def _resized(size: int, placement: Placement) -> Any:
    out = _into(torch.empty(size), [placement])
    return torch.mul(_into(torch.arange(15.0).reshape(5, 3), [S(0)]), 2, out=out)


@pytest.mark.filterwarnings("ignore:aten.mul.out got out= of shape")
@on_ranks
def test_out_is_resized_as_torch_does() -> None:
    for out in (_resized(0, R), _resized(2, S(0))):
        assert _same(out, torch.arange(15.0).reshape(5, 3) * 2) and out.shape == (5, 3)


def test_a_resized_out_that_held_something_warns(fake_world: Callable[[int], None]) -> None:
    fake_world(4)
    _resized(0, R)  # warnings are errors here
    with pytest.warns(UserWarning, match=r"out= of shape \[2\].*resized"):
        _resized(2, S(0))


# ---- views that are copies ----


@on_ranks
def test_a_copy_that_is_no_window_does_not_show_old_values() -> None:
    x = _into(torch.arange(8.0), [S(0)]) * 1j
    view = x.conj()
    assert _same(view * 1, torch.arange(8.0) * -1j) and _same(view[1:], torch.arange(1.0, 8.0) * -1j)
    x.add_(1)
    with pytest.raises(CoreError, match="has been written to since"):
        (view + 1).full_tensor()
    with pytest.raises(CoreError, match="the write would be lost"):
        x.conj().add_(1)
    assert type(x.conj() * 1) is DTensor


@quiet
@pytest.mark.parametrize(("reduce_op", "share"), [("sum", 10), ("avg", 2.5)])
@on_ranks
def test_a_pending_tensor_is_written_as_a_number(reduce_op: str, share: float) -> None:
    full = torch.arange(8.0, dtype=torch.float64)
    x = DTensor.from_local(full * (dist.get_rank() + 1) / share, mesh_of((4,)), [Partial(reduce_op)])
    x.exp_()
    assert x.placements == (Partial(reduce_op),) and _same(x, full.exp())


def _dtypes_that_kernels_refuse(case: str) -> None:
    """Two rows on four ranks: a rank without any runs no kernel, and a meta kernel takes these."""

    x = place(torch.ones(2, 5), S(0))
    if case == "product":
        x @ place(torch.ones(5, 5).double())
    elif case == "of what moves first":
        moments = place(torch.ones(2), S(0))
        torch.nn.functional.batch_norm(place(torch.ones(3, 2, 4).double(), S(1)), moments, moments)
    elif case == "normalisation":
        moments = place(torch.ones(5).double())
        torch.nn.functional.batch_norm(x.half(), moments, moments)
    else:
        x.index_select(1, place(torch.zeros(1)))


@pytest.mark.parametrize("case", ["product", "index", "normalisation", "of what moves first"])
def test_every_rank_refuses_a_dtype(ranks: ThreadWorlds, case: str) -> None:
    ranks.refuse(_dtypes_that_kernels_refuse, case, message="dtype", error=RuntimeError)
