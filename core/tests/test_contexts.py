"""Implicit replication, and the watch over implicit redistribution."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.placing import place
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
    implicit_replication,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _cut(placement: Any, shape: tuple[int, ...] = (8, 4)) -> DTensor:
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return place(full, placement)


# ---- implicit replication ----


@on_ranks
def test_plain_tensors_count_as_replicated() -> None:
    full = torch.arange(32.0).reshape(8, 4)
    tensor, plain = _cut(S0), torch.arange(4.0).requires_grad_()
    with implicit_replication():
        product = tensor * plain
        in_list = torch.cat([tensor.detach(), torch.ones(2, 4)]).full_tensor()
        assert (plain.detach() + tensor).placements == (S0,)
        product.sum().backward()
    assert torch.equal(product.full_tensor(), full * torch.arange(4.0)) and in_list.shape == (10, 4)
    assert plain.grad is not None and type(plain.grad) is torch.Tensor
    assert torch.equal(plain.grad, full.sum(0)), "the whole gradient, not this rank's rows"


@on_ranks
def test_what_was_admitted_is_refused_outside() -> None:
    tensor, plain = _cut(S0), torch.arange(4.0)
    for _ in range(2):
        for _ in range(3):  # often enough to be remembered
            with implicit_replication():
                _ = tensor * plain
        with pytest.raises(MixedTensorError, match=r"plain torch\.Tensor of shape \[4\]"):
            _ = tensor * plain


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


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MOVES)
@on_ranks
def test_only_explicit_redistribution(name: str, strict: bool) -> None:
    mesh_of((4,))
    refused = name in COMMUNICATES or (strict and name == "cuts")
    refusal = pytest.raises(RedistributionError, match=r"aten\..*float32\[8.* from ")
    with (
        count_collectives() as count,
        refusal if refused else nullcontext(),
        ExplicitRedistributionContext(strict=strict),
    ):
        MOVES[name]()
    assert not (refused and count.calls), "refused before anything is sent"


@on_ranks
def test_contexts_nest() -> None:
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
    assert [*seen, refused()] == [False, True, False, True, False, True, False]


@on_ranks
def test_warnings() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ExplicitRedistributionContext(mode="warn"):
            whole = MOVES["gathers"]().full_tensor()
    messages = [str(w.message) for w in caught if w.category is ImplicitRedistributionWarning]
    assert len(messages) == 1 and "from S(1) to S(0)" in messages[0]
    assert torch.equal(whole, 2 * torch.arange(32.0).reshape(8, 4))
