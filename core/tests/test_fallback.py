"""Ops without a rule run on replicated inputs: right, counted, warned once. And out=, in-place views."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.tests.gloo_world import Worlds, mesh_of
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


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _same(got: Any, expected: Any) -> bool:
    got, expected = _full(got), _full(expected)
    if isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(expected, torch.Tensor):
        return got.dtype == expected.dtype and torch.allclose(got, expected, equal_nan=True)
    return bool(got == expected)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "det": torch.linalg.det,
    "several results": lambda x: torch.linalg.qr(x),
    "shape from values": torch.nonzero,
    "mask": lambda x: x[x > 0],
    "histogram": lambda x: torch.histogramdd(x[:, :2], bins=[2, 2]).hist,
    "python value": lambda x: x.det().item(),
}


def _function(name: str, placements: list[Placement]) -> bool:
    full = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        got = FUNCTIONS[name](distribute_tensor(full, mesh_of((4,)), placements))
        return _same(got, FUNCTIONS[name](full))


@pytest.mark.parametrize("placements", PLACED, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_op_without_a_rule_gives_what_plain_torch_gives(
    ranks: Worlds, name: str, placements: list[Placement]
) -> None:
    assert all(ranks(_function, name, placements))


def _counted() -> tuple[int, list[str]]:
    clear_fallbacks()
    x = distribute_tensor(torch.eye(4), mesh_of((4,)), [S(0)])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.nonzero(x)
    calls = fallbacks()
    return sum(calls.values()), [str(w.message) for w in seen if w.category is FallbackWarning]


def test_a_fallback_is_counted_and_warns_once(ranks: Worlds) -> None:
    for calls, warned in ranks(_counted):
        assert calls == 3
        assert len(warned) == 1 and "aten.nonzero" in warned[0]


def _gradient(placements: list[Placement]) -> bool:
    full = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = full.clone().requires_grad_()
    torch.linalg.inv(plain).sin().sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        x = distribute_tensor(full, mesh_of((4,)), placements).requires_grad_()
        torch.linalg.inv(x).sin().sum().backward()
    return _same(x.grad, plain.grad)


@pytest.mark.parametrize("placements", PLACED, ids=str)
def test_gradients_flow_through_a_fallback(ranks: Worlds, placements: list[Placement]) -> None:
    assert all(ranks(_gradient, placements))


# ---- writes ----


def _into(full: torch.Tensor, placements: list[Placement]) -> Any:
    return distribute_tensor(full.clone(), mesh_of((4,)), placements)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "cumsum_ along both dims": lambda x, y: x.cumsum_(0).cumsum_(1),
    "copy_ from elsewhere": lambda x, y: x.copy_(y.sort(0).values),
    "out= of the same shape": lambda x, y: torch.mul(y, 2, out=x),
    "out= of a reduction": lambda x, y: torch.sum(y, 0, keepdim=True, out=x[:1] * 1),
    "out= aliasing an input": lambda x, y: torch.add(x, y, out=x),
    "two outs": lambda x, y: torch.max(y, 1, out=(x[:, 0] * 1, (x[:, 0] * 0).long())),
    "t_": lambda x, y: x.t_(),
    "unsqueeze_": lambda x, y: x.unsqueeze_(1).mul_(2),
    "squeeze_": lambda x, y: x.unsqueeze_(0).squeeze_(0).add_(y),
    "transpose_": lambda x, y: x.transpose_(0, 1) + y.t(),
}


def _write(name: str, written: list[Placement], read: list[Placement]) -> tuple[bool, bool]:
    seed = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 3, generator=seed, dtype=torch.float64) for _ in range(2))
    target, source = _into(x, written), _into(y, read)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        got = WRITES[name](target, source)
    expected = WRITES[name](x, y)
    return _same(got, expected), _same(target, x)


@pytest.mark.parametrize("read", PLACED, ids=str)
@pytest.mark.parametrize("written", PLACED, ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_written_tensor(
    ranks: Worlds, name: str, written: list[Placement], read: list[Placement]
) -> None:
    for result, target in ranks(_write, name, written, read):
        assert result and target


def _added_to_pending() -> bool:
    """Terms of any placement are added to a pending sum, which stays one, by a rule."""
    clear_fallbacks()
    full = torch.arange(15.0).reshape(5, 3)
    right = []
    for read in ([R], [S(0)], [Partial()]):
        total = _into(full, [S(0)]).sum(0)
        total.add_(_into(full[0], read)).sub_(_into(full[1], [R]), alpha=2)
        right.append(_same(total, full.sum(0) + full[0] - 2 * full[1]))
    return all(right) and not fallbacks()


def test_a_pending_sum_is_added_to_by_a_rule(ranks: Worlds) -> None:
    assert all(ranks(_added_to_pending))


def _resized() -> tuple[bool, list[str]]:
    full = torch.arange(15.0).reshape(5, 3)
    y = _into(full, [S(0)])
    empty = _into(torch.empty(0), [R])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.mul(y, 2, out=empty)
        small = _into(torch.empty(2), [S(0)])
        torch.mul(y, 2, out=small)
    right = _same(empty, full * 2) and _same(small, full * 2) and small.shape == (5, 3)
    return right, [str(w.message) for w in seen]


def test_out_is_resized_as_torch_does(ranks: Worlds) -> None:
    for right, warned in ranks(_resized):
        assert right
        assert len(warned) == 1 and "resized" in warned[0]


def test_partial_is_an_operand_like_any_other(ranks: Worlds) -> None:
    assert all(ranks(_partial))


def _partial() -> bool:
    full = torch.eye(4, dtype=torch.float64) * 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        x = DTensor.from_local(full / 4, mesh_of((4,)), [Partial()])
        return _same(torch.linalg.inv(x), torch.linalg.inv(full))


# ---- views that are copies ----


def _stale() -> tuple[str, str, bool]:
    x = _into(torch.arange(8.0), [S(0)]) * 1j
    view = x.conj()
    read = _same(view * 1, torch.arange(8.0) * -1j) and _same(view[1:], torch.arange(1.0, 8.0) * -1j)
    messages = []
    for write in (lambda: x.add_(1), lambda: x.conj().add_(1)):
        try:
            write()
            (view + 1).full_tensor()
            messages.append("nothing was raised")
        except CoreError as error:
            messages.append(str(error))
    return messages[0], messages[1], read and type(x.conj() * 1) is DTensor


def test_a_copy_that_is_no_window_does_not_show_old_values(ranks: Worlds) -> None:
    for stale, lost, read in ranks(_stale):
        assert read
        assert "has been written to since" in stale
        assert "the write would be lost" in lost


def _in_place_on_terms(reduce_op: str) -> bool:
    full = torch.arange(8.0, dtype=torch.float64)
    share = (
        (torch.distributed.get_rank() + 1) / 10
        if reduce_op == "sum"
        else (torch.distributed.get_rank() + 1) / 2.5
    )
    x = DTensor.from_local(full * share, mesh_of((4,)), [Partial(reduce_op)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        x.exp_()
    return x.placements == (Partial(reduce_op),) and _same(x, full.exp())


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_a_pending_tensor_is_written_as_a_number(ranks: Worlds, reduce_op: str) -> None:
    assert all(ranks(_in_place_on_terms, reduce_op))


def _dtypes_that_kernels_refuse(case: str) -> None:
    """Two rows on four ranks: a rank without any runs no kernel, and a meta kernel takes these."""
    x = distribute_tensor(torch.ones(2, 5), mesh_of((4,)), [Shard(0)], src_data_rank=None)
    whole = [Replicate()]
    if case == "product":
        x @ distribute_tensor(torch.ones(5, 5).double(), mesh_of((4,)), whole, src_data_rank=None)
    elif case == "of what moves first":
        x, moments = (
            distribute_tensor(t, mesh_of((4,)), [Shard(d)], src_data_rank=None)
            for t, d in ((torch.ones(3, 2, 4).double(), 1), (torch.ones(2), 0))
        )
        torch.nn.functional.batch_norm(x, moments, moments)
    elif case == "normalisation":
        moments = distribute_tensor(torch.ones(5).double(), mesh_of((4,)), whole, src_data_rank=None)
        torch.nn.functional.batch_norm(x.half(), moments, moments)
    else:
        x.index_select(1, distribute_tensor(torch.zeros(1), mesh_of((4,)), whole, src_data_rank=None))


@pytest.mark.parametrize("case", ["product", "index", "normalisation", "of what moves first"])
def test_every_rank_refuses_a_dtype(ranks: Worlds, case: str) -> None:
    ranks.refuse(_dtypes_that_kernels_refuse, case, told="dtype", error=RuntimeError)
