"""Training on sharded parameters: each optimizer, and gradient clipping, against plain training."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.tests.gloo_world import on_ranks, on_worlds
from core.tests.local_world import ThreadWorlds
from core.tests.placing import full, place
from dtbench_core import (
    DTensor,
    MixedTensorError,
    Placement,
    Replicate,
    Shard,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
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


def _model(layout: Layout | None) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if layout is not None:
        for module in (model[0], model[2]):
            for key, placements in zip(("weight", "bias"), layout[1:], strict=True):
                spread = place(getattr(module, key).detach(), *placements, mesh=layout[0])
                module.register_parameter(key, nn.Parameter(spread))
    return model


def _train(
    module: nn.Module, optimizer: Any, layout: Layout | None, clip: dict[str, Any] | None = None
) -> list[Any]:
    """The parameters after three steps, and the norms of the gradients where they are clipped."""
    generator, norms = torch.Generator().manual_seed(0), []
    for _ in range(3):
        x, y = (torch.randn(4, n, generator=generator).double() for n in (6, 3))
        if layout is not None:
            x, y = (place(t, mesh=layout[0]) for t in (x, y))
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(module.parameters(), **clip))
        optimizer.step()
    return [t.detach().clone() for t in full([*module.parameters(), *norms])]


def _trained(
    optimizer: str, form: str, layout: Layout | None, clip: dict[str, Any] | None = None
) -> list[Any]:
    module = _model(layout)
    make, arguments = OPTIMIZERS[optimizer.split()[0]]
    if "tensor" in optimizer:
        arguments = {"lr": torch.tensor(0.01)}
    return _train(module, make(module.parameters(), **arguments, **FORMS[form]), layout, clip)


CASES: list[tuple[str, str, Any]] = [(optimizer, form, None) for optimizer in OPTIMIZERS for form in FORMS]
CASES += [
    ("adamw of a tensor as step size", form, None) for form in ("loop", "fused")
]  # foreach asks for numbers
CASES += [("sgd", "default", {"foreach": foreach}) for foreach in (True, False)]
CASES += [("sgd", "default", {"norm_type": kind}) for kind in (float("inf"), 1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["rows", "columns", "both"])
@pytest.mark.parametrize(("optimizer", "form", "clip"), CASES)
def test_training(ranks: ThreadWorlds, optimizer: str, form: str, clip: Any, layout: Layout) -> None:
    clip = clip and {"max_norm": 0.05, **clip}
    expected = _trained(optimizer, form, None, clip)
    for got in ranks(_trained, optimizer, form, layout, clip):
        torch.testing.assert_close(got, expected)


# ---- parameters of several kinds in one optimizer ----


def _mixed() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Plain parameters with gradients, and the same: of one mesh, of another, and plain ones."""
    generator = torch.Generator().manual_seed(3)
    plain, mixed = [], []
    layouts: list[tuple[tuple[int, ...], list[Placement]] | None]
    layouts = [((4,), [S0]), None, ((2, 2), [R, S1]), ((4,), [R]), None, ((2, 2), [S0, S1])]
    for layout in layouts:
        values = [torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(2)]
        for parameters, here in ((plain, None), (mixed, layout)):
            value, grad = (place(t, *here[1], mesh=here[0]) if here else t.clone() for t in values)
            parameters.append(nn.Parameter(value))
            parameters[-1].grad = grad
    return plain, mixed


@pytest.mark.parametrize("form", ["default", "foreach", "fused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_worlds
def test_plain_parameters_and_several_meshes(optimizer: str, form: str) -> None:
    make, arguments = OPTIMIZERS[optimizer]
    clips: list[dict[str, Any]] = [{}, {"norm_type": 1.0}, {"norm_type": float("inf")}]
    for clip in clips if form == "default" else clips[:1]:
        plain, mixed = _mixed()
        norms = []
        for parameters in (plain, mixed):
            stepper = make(parameters, **arguments, **FORMS[form])
            for _ in range(3):
                norms.append(nn.utils.clip_grad_norm_(parameters, 0.5, **clip))
                stepper.step()
        for got, expected in zip(norms[3:], norms[:3], strict=True):
            torch.testing.assert_close(full(got), expected)
        for one, expected in zip(mixed, plain, strict=True):
            assert isinstance(one.grad, DTensor) == isinstance(one, DTensor)
            torch.testing.assert_close(full([one.detach(), one.grad]), [expected.detach(), expected.grad])


@on_worlds
def test_clipping_one_by_one_beside_plain_parameters() -> None:
    """Of one mesh, which clipping without foreach asks for."""
    these, those = ([parameters[i] for i in (0, 1, 3, 4)] for parameters in _mixed())
    expected, got = (nn.utils.clip_grad_norm_(ps, 0.3, foreach=False) for ps in (these, those))
    torch.testing.assert_close(full(got), expected)
    for one, plainly in zip(those, these, strict=True):
        torch.testing.assert_close(full(one.grad), plainly.grad)
    those[1].grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(those, 0.3, error_if_nonfinite=True)


@on_worlds
def test_a_plain_tensor_is_scaled_by_a_distributed_number() -> None:
    factor = place(torch.tensor(2.0), R)
    written = torch.ones(3)
    assert written.mul_(factor) is written and torch.equal(written, torch.full((3,), 2.0))
    with pytest.raises(MixedTensorError, match=r"mul got a plain torch\.Tensor"):
        torch.mul(torch.ones(3), factor)
    _, (spread, plain, *_) = _mixed()
    with pytest.raises(MixedTensorError, match=r"_foreach_add_ got a plain torch\.Tensor"):
        torch._foreach_add_([spread.detach(), plain.detach()], [plain.detach(), spread.detach()])


@on_worlds
def test_a_state_of_whole_tensors_is_loaded() -> None:
    values = torch.arange(20.0).view(5, 4)
    plain = nn.Parameter(values.clone())
    spread = nn.Parameter(place(values, S0))
    first, second = (torch.optim.Adam([p], 0.1) for p in (plain, spread))
    plain.sin().sum().backward()
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    spread.detach().copy_(plain.detach())
    for optimizer, p in ((first, plain), (second, spread)):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert isinstance(second.state[spread]["exp_avg"], DTensor)
    torch.testing.assert_close(full(spread.detach()), plain.detach())


@on_ranks
def test_unscaling() -> None:
    """Of DTensors of two meshes and plain tensors, by plain numbers and by ones that one rank of a mesh dim holds."""
    for sizes, placed in (((4,), [S0]), ((2, 2), [S0, R]), ((2, 2), [R, S0])):

        def spread(t: torch.Tensor) -> torch.Tensor:
            return place(t, *placed, mesh=sizes)  # noqa: B023

        for bad, plain_numbers in itertools.product((1.0, float("inf")), (False, True)):
            outcomes = []
            for put in (torch.clone, spread):
                grads = [put(torch.tensor([1.0, 2, bad])), put(torch.ones(5)), torch.ones(3)]
                if plain_numbers and put is spread:
                    grads.append(place(torch.ones(6, 5), S0, S1, mesh=(2, 2)))
                elif plain_numbers:
                    grads.append(torch.ones(6, 5))
                numbers = [torch.zeros(1), torch.full((1,), 0.5)]
                infinite, scale = numbers if plain_numbers else map(put, numbers)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, infinite, scale)
                outcomes.append([full(t) for t in (*grads, infinite)])
            torch.testing.assert_close(*outcomes)


@on_ranks
def test_gradients_are_assigned_as_those_of_plain_parameters() -> None:
    x = nn.Parameter(place(torch.ones(8, 2), S0))
    (x * x).sum().backward()
    assert isinstance(x.grad, DTensor) and bool((x.grad.full_tensor() == 2).all())
    with pytest.raises(RuntimeError, match="size"):
        x.grad = torch.ones(3)
    x.grad = other = torch.zeros_like(x)
    assert x.grad is other
    del x.grad
    assert x.grad is None
