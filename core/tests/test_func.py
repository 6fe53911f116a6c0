"""torch.func and forward AD over DTensors, compared with the same on full tensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_map

from core.tests.gloo_world import mesh_of, on_ranks, on_worlds
from dtbench_core import (
    DTensor,
    MixedTensorError,
    NoRuleError,
    Partial,
    Placement,
    Replicate,
    Shard,
    count_collectives,
    distribute_module,
    distribute_tensor,
    implicit_replication,
)

# torch's own, of the formulas that it has in TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _sharded(module: nn.Module) -> nn.Module:
    def rows(name: str, part: nn.Module, mesh: Any) -> None:
        for key, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [S0])))

    return distribute_module(copy.deepcopy(module), mesh_of((4,)), rows)


def _full(tree: Any) -> Any:
    return tree_map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, tree)


def _place(t: torch.Tensor, placement: Placement = S0) -> DTensor:
    return distribute_tensor(t, mesh_of((4,)), [placement], src_data_rank=None)


Parameters = dict[str, torch.Tensor]
# (the module, its parameters, an input) -> what is to be alike.
OF_MODULES: dict[str, Callable[[nn.Module, Parameters, torch.Tensor], Any]] = {
    "grad": lambda net, p, x: grad(lambda p: functional_call(net, p, (x,)).square().mean())(p),
    "vjp": lambda net, p, x: _pulled(lambda p: functional_call(net, p, (x,)), p),
    "jvp": lambda net, p, x: jvp(lambda p: functional_call(net, p, (x,)), (p,), (p,)),
    "jvp of grad": lambda net, p, x: jvp(
        grad(lambda p: functional_call(net, p, (x,)).square().mean()), (p,), (p,)
    ),
    "hessian": lambda net, p, x: [
        hessian(lambda one, name=name: functional_call(net, {**p, name: one}, (x,)).square().mean())(p[name])
        for name in p
    ],
    "gradients per sample": lambda net, p, x: vmap(
        grad(lambda p, row: functional_call(net, p, (row,)).square().mean()), in_dims=(None, 0)
    )(p, x),
    "vmap of the input": lambda net, p, x: vmap(lambda row: functional_call(net, p, (row,)))(x),
    "vmap of the parameters": lambda net, p, x: vmap(lambda p: functional_call(net, p, (x,)))(
        tree_map(lambda t: torch.stack([t, 2 * t]), p)
    ),
}


def _pulled(function: Callable[[Parameters], torch.Tensor], parameters: Parameters) -> Any:
    out, pull = vjp(function, parameters)
    return out, pull(torch.ones_like(out))


@pytest.mark.parametrize("placement", [R, S0], ids=str)
@pytest.mark.parametrize("name", OF_MODULES)
@on_ranks
def test_functions_of_modules(name: str, placement: Placement) -> None:
    plain = _network()
    net, x = _sharded(plain), torch.arange(20.0).double().reshape(5, 4).cos()
    want = OF_MODULES[name](plain, {k: v.detach() for k, v in plain.named_parameters()}, x)
    got = OF_MODULES[name](net, {k: v.detach() for k, v in net.named_parameters()}, _place(x, placement))
    torch.testing.assert_close(_full(got), want)


def _dual(x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        out = forward_ad.make_dual(x, x.cos()).softmax(0)
        return tuple(forward_ad.unpack_dual((out * out).sum(0)))


OF_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "hessian": hessian(lambda x: (x**3).sum()),
    "jacobian, forward": jacfwd(lambda x: x.softmax(0)),
    "jacobian, backward": jacrev(lambda x: x.softmax(0)),
    "forward over forward": jacfwd(jacfwd(lambda x: (x * x.sin()).sum())),
    "backward over backward": jacrev(jacrev(lambda x: (x * x.sin()).sum())),
    "dual numbers": _dual,
    "captured": lambda x: vmap(lambda row: (x @ row).softmax(0))(x * 2),
    "written under vmap": vmap(lambda row: row.clone().mul_(2).add_(row.sum())),
}


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
@pytest.mark.parametrize("name", OF_TENSORS)
@on_ranks
def test_functions_of_tensors(name: str, placement: Placement) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rules there are none for
        for size in (4, 3):
            x = torch.arange(float(size * size), dtype=torch.float64).reshape(size, size).sin()
            torch.testing.assert_close(_full(OF_TENSORS[name](_place(x, placement))), OF_TENSORS[name](x))


@on_worlds
def test_a_pending_sum_is_captured() -> None:
    x = torch.arange(16.0).reshape(4, 4)
    terms = DTensor.from_local(x / 4, mesh_of((4,)), [P])
    got = vmap(lambda row: terms @ row + terms[0])(_place(x)).full_tensor()
    assert (got == vmap(lambda row: x @ row + x[0])(x)).all()


@on_ranks
def test_tangents_enter_leave_and_move() -> None:
    x = torch.arange(12.0).reshape(4, 3).sin()
    rank = mesh_of((4,)).get_local_rank()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(_place(x), _place(x.cos()))
        moved = dual.redistribute(placements=[R], forward_dtype=torch.float64) * 2
        local = forward_ad.make_dual(x[rank : rank + 1].clone(), x[rank : rank + 1].cos())
        for got, want in (
            (moved, (2 * x.cos()).double()),
            (dual.full_tensor() * 2, 2 * x.cos()),
            (dual.to_local() * 2, 2 * x.cos()[rank : rank + 1]),
            (DTensor.from_local(local, mesh_of((4,)), [S0]) * 2, 2 * x.cos()),
        ):
            tangent = forward_ad.unpack_dual(got).tangent
            torch.testing.assert_close(_full(tangent), want, check_dtype=False)


@on_ranks
def test_a_tangent_goes_to_its_tensor() -> None:
    """Placed otherwise, it moves there; placed alike, nothing is sent."""
    x = torch.arange(8.0).sin()
    with count_collectives() as count:
        jvp(torch.sin, (_place(x),), (_place(x),))
    assert not count.calls
    out, tangent = jvp(torch.sin, (_place(x),), (_place(x, R),))
    assert out.placements == tangent.placements == (S0,)
    torch.testing.assert_close(tangent.full_tensor(), x.cos() * x)


@on_ranks
def test_plain_tensors_are_refused_or_replicated() -> None:
    x, rows = torch.arange(16.0).reshape(4, 4), torch.arange(12.0).reshape(3, 4)
    placed = _place(x)
    with pytest.raises(
        MixedTensorError, match=r"got a plain torch.Tensor of shape \[4\] together with a DTensor"
    ):
        vmap(lambda row: placed @ row)(rows)
    with pytest.raises(MixedTensorError, match=r"_make_dual got a plain torch\.Tensor"):
        jvp(torch.sin, (placed,), (x,))
    with implicit_replication():
        got = vmap(lambda row: placed @ row)(rows)
    torch.testing.assert_close(got.full_tensor(), vmap(lambda row: x @ row)(rows))


@on_ranks
def test_a_graph_of_tangents_is_refused() -> None:
    with pytest.raises(NoRuleError, match=r"use torch\.func\.jvp, or trace a function"):
        linearize(torch.sin, _place(torch.arange(4.0)))
