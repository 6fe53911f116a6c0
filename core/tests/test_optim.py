"""Training on sharded parameters: each optimizer, and gradient clipping, against plain training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.tests.gloo_world import Worlds, mesh_of, on_ranks
from dtbench_core import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
Layout = tuple[tuple[int, ...], list[Placement], list[Placement]]  # mesh, of weights, of biases
LAYOUTS: list[Layout] = [
    ((4,), [S0], [S0]),
    ((4,), [S1], [R]),
    ((2, 2), [S0, S1], [R, S0]),
]


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _sharded(layout: Layout) -> nn.Module:
    sizes, weights, biases = layout

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            placements = weights if parameter.ndim == 2 else biases
            module.register_parameter(
                key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None))
            )

    return distribute_module(_model(), mesh_of(sizes), shard)


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 6, generator=generator).double(), torch.randn(4, 3, generator=generator).double())
        for _ in range(3)
    ]


def _train(
    module: nn.Module, optimizer: Any, layout: Layout | None, clip: dict[str, Any] | None
) -> list[Any]:
    """The parameters after three steps, and the norms of the gradients where they are clipped."""
    norms = []
    for x, y in _batches():
        if layout is not None:
            mesh = mesh_of(layout[0])
            x, y = distribute_tensor(x, mesh), distribute_tensor(y, mesh)
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(module.parameters(), **clip)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return [t.detach().clone() for t in (*whole, *norms)]


def _trained(optimizer: str, form: str, layout: int | None, clip: dict[str, Any] | None = None) -> list[Any]:
    module = _model() if layout is None else _sharded(LAYOUTS[layout])
    make, arguments = OPTIMIZERS[optimizer]
    made = make(module.parameters(), **arguments, **FORMS[form])
    return _train(module, made, None if layout is None else LAYOUTS[layout], clip)


@pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=["rows", "columns", "both"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training(ranks: Worlds, optimizer: str, form: str, layout: int) -> None:
    expected = _trained(optimizer, form, None)
    for got in ranks(_trained, optimizer, form, layout):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=["rows", "columns", "both"])
@pytest.mark.parametrize(
    "clip", [{"foreach": True}, {"foreach": False}, {}, {"norm_type": float("inf")}, {"norm_type": 1}]
)
def test_clipping(ranks: Worlds, clip: dict[str, Any], layout: int) -> None:
    clip = {"max_norm": 0.05, **clip}
    expected = _trained("sgd", "default", None, clip)
    for got in ranks(_trained, "sgd", "default", layout, clip):
        torch.testing.assert_close(got, expected)


@on_ranks
def test_optimizer_states() -> None:
    """Each optimizer keeps state placed as its parameters, and copies and loads it."""
    for make, arguments in OPTIMIZERS.values():
        module = _sharded(LAYOUTS[0])
        optimizer = make(module.parameters(), **arguments)
        twin = copy.deepcopy(module)
        other = make(twin.parameters(), **arguments)
        _train(module, optimizer, LAYOUTS[0], None)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for parameter, copied in zip(module.parameters(), twin.parameters(), strict=True):
            kept = {key: value for key, value in optimizer.state[parameter].items() if key != "step"}
            assert kept
            for key, value in kept.items():
                mine = other.state[copied][key]
                assert value.placements == parameter.placements == mine.placements, key  # type: ignore[attr-defined]
                assert (mine.to_local() == value.to_local()).all(), key
