"""What programs do with modules of DTensor parameters, compared with the same on plain modules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from core.tests.gloo_world import mesh_of, on_ranks, on_worlds
from core.tests.placing import place, sharded
from dtbench_core import (
    DTensor,
    FallbackWarning,
    MixedTensorError,
    NoRuleError,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _assert_trains_alike(module: nn.Module, plain: nn.Module, x: DTensor) -> None:
    """Outputs and the gradients of all parameters."""
    for one, inputs in ((module, x), (plain, x.full_tensor())):
        one.zero_grad()
        out = one(inputs)
        out = out[0] if isinstance(out, tuple) else out
        if one is module:
            got = out
        out.square().sum().backward()
    torch.testing.assert_close(got.full_tensor(), out)
    for (name, mine), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor), name
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)


# ---- recurrent modules, without states given ----

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True),
    "LSTM, projected": lambda: nn.LSTM(4, 6, proj_size=3, batch_first=True),
    "GRU": lambda: nn.GRU(4, 6, batch_first=True),
    "RNN": lambda: nn.RNN(4, 6, nonlinearity="relu", batch_first=True),
    "LSTMCell": lambda: nn.LSTMCell(4, 6),
    "GRUCell": lambda: nn.GRUCell(4, 6),
    "RNNCell": lambda: nn.RNNCell(4, 6),
}


@pytest.mark.filterwarnings(
    "ignore::dtbench_core.dispatch.fallback.FallbackWarning", "ignore:LSTM with projections:UserWarning"
)
@pytest.mark.parametrize("name", RECURRENT)
@on_ranks
def test_recurrent_modules_start_from_zeros(name: str) -> None:
    torch.manual_seed(0)
    plain = RECURRENT[name]()
    shape = (8, 4) if name.endswith("Cell") else (8, 3, 4)
    for placed, given in ((R, S0), (S0, R), (R, R)):
        _assert_trains_alike(sharded(plain, placed), plain, place(torch.randn(shape), given))


@on_ranks
def test_a_plain_input_of_a_recurrent_module_is_refused() -> None:
    module = sharded(nn.GRU(4, 6))
    with pytest.raises(MixedTensorError, match=r"gru got a plain torch\.Tensor of shape \[5, 2, 4\]"):
        module(torch.ones(5, 2, 4))
    with pytest.raises(MixedTensorError, match=r"gru got a plain torch\.Tensor of shape \[18, 4\]"):
        nn.GRU(4, 6)(place(torch.ones(5, 2, 4)))


# ---- loading plain tensors ----


@on_worlds
def test_plain_tensors_are_loaded() -> None:
    """Of a whole plain tensor, which every rank has, each takes its part."""
    torch.manual_seed(0)
    plain, other = nn.Linear(3, 5), nn.Linear(3, 5)
    for placement in (S0, R):
        module = sharded(other, placement)
        module.load_state_dict(plain.state_dict())
        for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            assert isinstance(mine, DTensor) and mine.placements == (placement,) and mine.requires_grad
            assert (mine.full_tensor() == theirs).all()
    values = torch.arange(6.0).reshape(2, 3)
    for placement in (P, Partial("avg"), Partial("max"), S1):
        tensor = place(torch.zeros(2, 3), placement)
        tensor.copy_(values)
        assert tensor.placements == (placement,) and (tensor.full_tensor() == values).all(), placement
        tensor.copy_(torch.arange(3))  # broadcast, and cast
        assert (tensor.full_tensor() == torch.arange(3.0)).all(), placement


@on_worlds
def test_what_is_copied_gets_the_gradient() -> None:
    source = torch.ones(5, requires_grad=True)
    tensor = place(torch.zeros(5), S0).copy_(source)
    (tensor * place(torch.arange(5.0), S0)).sum().full_tensor().backward()
    assert (source.grad == torch.arange(5.0)).all()
    with pytest.raises(MixedTensorError, match="copy_ got a plain"):
        torch.zeros(5).copy_(tensor.detach())


# ---- gradients that DTensors do not have ----


@on_ranks
def test_sparse_gradients_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for placement in (R, S0, S1):
            table = sharded(nn.Embedding(8, 4, sparse=True), placement)
            out = table(place(torch.tensor([1, 2, 1])))
            with pytest.raises(NoRuleError, match="set sparse=False"):
                out.sum().backward()


# ---- parametrizations, conversions ----

NORMED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": lambda module: torch.nn.utils.weight_norm(module),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::dtbench_core.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("name", NORMED)
@on_ranks
def test_parametrized_weights(name: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4, 8)
    for placement in (S0, R):
        torch.manual_seed(1)
        plain = NORMED[name](copy.deepcopy(linear))
        torch.manual_seed(1)
        module = NORMED[name](sharded(linear, placement))
        _assert_trains_alike(module, plain, place(torch.randn(5, 4)))
    if not name.startswith("old"):  # whose weight is no leaf, which no module copies
        _assert_trains_alike(sharded(plain.eval()), plain, place(torch.randn(5, 4)))


@on_ranks
def test_conversions_keep_what_a_parameter_is() -> None:
    plain = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    module = sharded(plain)
    weight = module[0].weight
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
        module.to(dtype)
        assert module[0].weight is weight and isinstance(weight, nn.Parameter), "an optimizer holds it"
        assert weight.dtype == weight.to_local().dtype == weight.full_tensor().dtype == dtype
        assert weight.placements == (S0,) and weight.requires_grad
    module.requires_grad_(False)
    assert not any(p.requires_grad for p in module.parameters())
    assert module.requires_grad_()(place(torch.ones(2, 4))).requires_grad
    module.to("meta").to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert module[0].weight.placements == (S0,)
    torch.testing.assert_close(module(place(torch.ones(2, 4))).full_tensor(), plain(torch.ones(2, 4)))


# ---- norms of half-precision tensors, with weights of their own precision and in float32 ----

NORMS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, weight, _: F.layer_norm(x, (4,), weight, weight),
    "layer_norm without weight": lambda x, *_: F.layer_norm(x, (4,)),
    "group_norm": lambda x, _, channels: F.group_norm(x, 2, channels, channels),
}


@on_ranks
def test_half_precision() -> None:
    mesh = mesh_of((4,))
    rng = torch.Generator().manual_seed(2)
    for dtype in (torch.bfloat16, torch.float16):
        for precision in (dtype, torch.float32):
            values = [torch.randn(shape, generator=rng) for shape in ((5, 8, 4), (4,), (8,))]
            converted = [
                one.to(kind) for one, kind in zip(values, (dtype, precision, precision), strict=True)
            ]
            for name, norm in NORMS.items():
                plain = [one.clone().requires_grad_() for one in converted]
                placed = [
                    distribute_tensor(one, mesh, [placement] if placement else None, src_data_rank=None)
                    for one, placement in zip(converted, (Shard(0), None, None), strict=True)
                ]
                for one in placed:
                    one.requires_grad_()
                expected, got = norm(*plain), norm(*placed)
                assert got.dtype == expected.dtype
                torch.testing.assert_close(got.full_tensor(), expected, msg=lambda m, n=name: f"{n}: {m}")
                expected.float().square().sum().backward()
                got.float().square().sum().backward()
                torch.testing.assert_close(placed[0].grad.full_tensor(), plain[0].grad)
