"""Implicit replication, and the watch over implicit redistribution."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch

from core.tests.gloo_world import Worlds, mesh_of
from dtbench_core import (
    DTensor,
    ExplicitRedistributionContext,
    ImplicitRedistributionWarning,
    MixedTensorError,
    Partial,
    RedistributionError,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    implicit_replication,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _cut(placement: Any, shape: tuple[int, ...] = (8, 4)) -> DTensor:
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return distribute_tensor(full, mesh_of((4,)), [placement], src_data_rank=None)


# ---- implicit replication ----


def _mixed() -> dict[str, Any]:
    tensor, plain = _cut(S0), torch.arange(4.0).requires_grad_()
    with implicit_replication():
        product = tensor * plain
        in_list = torch.cat([tensor.detach(), torch.ones(2, 4)]).full_tensor()
        with implicit_replication():
            pass
        still = (plain.detach() + tensor).placements
        product.sum().backward()
    assert plain.grad is not None
    return {
        "product": product.full_tensor().tolist(),
        "placements": still,
        "grad": (type(plain.grad) is torch.Tensor, plain.grad.tolist()),
        "list": tuple(in_list.shape),
    }


def test_plain_tensors_count_as_replicated(ranks: Worlds) -> None:
    full = torch.arange(32.0).reshape(8, 4)
    for got in ranks(_mixed):
        assert got["product"] == (full * torch.arange(4.0)).tolist()
        assert got["placements"] == (S0,)
        assert got["grad"] == (True, full.sum(0).tolist()), "the whole gradient, not this rank's rows"
        assert got["list"] == (10, 4)


def _refused_after() -> list[str]:
    tensor, plain, told = _cut(S0), torch.arange(4.0), []
    for _ in range(2):
        for _ in range(3):  # often enough to be remembered
            with implicit_replication():
                _ = tensor * plain
        try:
            _ = tensor * plain
        except MixedTensorError as error:
            told.append(str(error))
    return told


def test_what_was_admitted_is_refused_outside(ranks: Worlds) -> None:
    for told in ranks(_refused_after):
        assert len(told) == 2
        assert all("plain torch.Tensor of shape [4]" in message for message in told)


def _other_thread() -> list[bool]:
    tensor, plain, refused = _cut(S0), torch.arange(4.0), []

    def use() -> None:
        try:
            _ = tensor * plain
            refused.append(False)
        except MixedTensorError:
            refused.append(True)

    with implicit_replication():
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        use()
    return refused


def test_replication_holds_for_its_thread(ranks: Worlds) -> None:
    assert ranks(_other_thread)[0] == [True, False]


# ---- explicit redistribution ----

MOVES: dict[str, Any] = {
    "free": lambda: _cut(S0) + _cut(S0),
    "cuts": lambda: _cut(S0) + _cut(R),
    "gathers": lambda: _cut(S0) + _cut(S1),
    "reduces": lambda: DTensor.from_local(torch.ones(8), mesh_of((4,)), [P]).exp(),
    "in place": lambda: _cut(S0).add_(_cut(S1)),
    "explicit": lambda: _cut(S0) + _cut(S1).redistribute(placements=[S0]),
    "full": lambda: _cut(S0).full_tensor(),
}
COMMUNICATES = {"gathers", "reduces", "in place"}


def _watched(name: str, strict: bool) -> tuple[str, int]:
    mesh_of((4,))
    with count_collectives() as count:
        try:
            with ExplicitRedistributionContext(strict=strict):
                MOVES[name]()
        except RedistributionError as error:
            return str(error), sum(count.calls.values())
    return "", -1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_only_explicit_redistribution(ranks: Worlds, name: str, strict: bool) -> None:
    for message, sent in ranks(_watched, name, strict):
        if name in COMMUNICATES or (strict and name == "cuts"):
            assert "aten." in message and " from " in message and "float32[8" in message
            assert sent == 0, "refused before anything is sent"
        else:
            assert message == ""


def _nested() -> list[bool]:
    def refused() -> bool:
        try:
            MOVES["gathers"]()
        except RedistributionError:
            return True
        return False

    seen = [refused()]
    with ExplicitRedistributionContext():
        seen.append(refused())
        with ExplicitRedistributionContext(enable=False):
            seen.append(refused())
            with ExplicitRedistributionContext() as same, same:
                seen.append(refused())
            seen.append(refused())
        seen.append(refused())
    return [*seen, refused()]


def test_contexts_nest(ranks: Worlds) -> None:
    assert ranks(_nested) == [[False, True, False, True, False, True, False]] * 4


def _warned() -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ExplicitRedistributionContext(mode="warn"):
            whole = MOVES["gathers"]().full_tensor()
    return [[str(w.message) for w in caught if w.category is ImplicitRedistributionWarning], whole.tolist()]


def test_warnings(ranks: Worlds) -> None:
    full = torch.arange(32.0).reshape(8, 4)
    for told, whole in ranks(_warned):
        assert len(told) == 1 and "from S(1) to S(0)" in told[0]
        assert whole == (full + full).tolist()


def test_modes() -> None:
    with pytest.raises(RuntimeError, match='got mode=\'shout\', expected "raise" or "warn"'):
        ExplicitRedistributionContext(mode="shout")
