"""torch.func, forward-mode AD and torch.autograd.grad on DTensors; local_map and register_sharding."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_map

from core.tests.gloo_world import mesh_of, on_gloo_ranks, on_ranks, on_worlds
from core.tests.placing import S0, S1, P, R, full, place, sharded
from core.tests.torch_version import needs_213
from dtbench_core import (
    CoreError,
    DTensor,
    MixedTensorError,
    NoRuleError,
    Replicate,
    Shard,
    clear_caches,
    count_collectives,
    distribute_tensor,
    implicit_replication,
    local_map,
    register_sharding,
)
from dtbench_core.dispatch import autograd_grad
from dtbench_core.errors import ArgumentError
from dtbench_core.rules import base

# torch's own, of the formulas that it has in TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


Parameters = dict[str, torch.Tensor]
# (the module, its parameters, an input) -> what is to be alike.
OF_MODULES: dict[str, Callable[[nn.Module, Parameters, torch.Tensor], Any]] = {
    "grad": lambda net, p, x: grad(lambda p: functional_call(net, p, (x,)).square().mean())(p),
    "vjp": lambda net, p, x: _pulled(lambda p: functional_call(net, p, (x,)), p),
    "jvp": lambda net, p, x: jvp(lambda p: functional_call(net, p, (x,)), (p,), (p,)),
    "hessian": lambda net, p, x: [
        hessian(lambda one, name=name: functional_call(net, {**p, name: one}, (x,)).square().mean())(p[name])
        for name in p
    ],
    "gradients per sample": lambda net, p, x: vmap(
        grad(lambda p, row: functional_call(net, p, (row,)).square().mean()), in_dims=(None, 0)
    )(p, x),
    "vmap of the parameters": lambda net, p, x: vmap(lambda p: functional_call(net, p, (x,)))(
        tree_map(lambda t: torch.stack([t, 2 * t]), p)
    ),
}


def _pulled(function: Callable[[Parameters], torch.Tensor], parameters: Parameters) -> Any:
    out, pull = vjp(function, parameters)
    return out, pull(torch.ones_like(out))


# Levels of forward mode are a process's own, so ranks in threads mix theirs up.
FORWARD_MODE = {"jvp", "hessian", "jacobian, forward", "forward over forward", "dual numbers"}


def _dual(x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        out = forward_ad.make_dual(x, x.cos()).softmax(0)
        return tuple(forward_ad.unpack_dual((out * out).sum(0)))


OF_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "hessian": hessian(lambda x: (x**3).sum()),
    "jacobian, forward": jacfwd(lambda x: x.softmax(0)),
    "jacobian, backward": jacrev(lambda x: x.softmax(0)),
    "forward over forward": jacfwd(jacfwd(lambda x: (x * x.sin()).sum())),
    "dual numbers": _dual,
    "captured": lambda x: vmap(lambda row: (x @ row).softmax(0))(x * 2),
    "written under vmap": vmap(lambda row: row.clone().mul_(2).add_(row.sum())),
}


@pytest.mark.parametrize("name", [n for n in OF_MODULES | OF_TENSORS if n not in FORWARD_MODE])
@on_ranks
def test_transforms_equal_those_on_full_tensors(name: str) -> None:
    _assert_as_on_full_tensors(name)


@pytest.mark.parametrize("name", sorted(FORWARD_MODE))
@on_gloo_ranks
def test_forward_mode(name: str) -> None:
    _assert_as_on_full_tensors(name)


def _assert_as_on_full_tensors(name: str) -> None:
    plain = _network()
    of_net, of_tensor = OF_MODULES.get(name), OF_TENSORS.get(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rules there are none for
        for placement in (R, S0, S1):
            if of_net and placement != S1:
                net, x = sharded(plain), torch.arange(20.0).double().reshape(5, 4).cos()
                want = of_net(plain, {k: v.detach() for k, v in plain.named_parameters()}, x)
                got = of_net(net, {k: v.detach() for k, v in net.named_parameters()}, place(x, placement))
                torch.testing.assert_close(full(got), want)
            for size in (4, 3) if of_tensor else ():
                x = torch.arange(float(size * size), dtype=torch.float64).reshape(size, size).sin()
                torch.testing.assert_close(full(of_tensor(place(x, placement))), of_tensor(x))


@on_worlds
def test_vmap_captures_a_partial() -> None:
    x = torch.arange(16.0).reshape(4, 4)
    terms = DTensor.from_local(x / 4, mesh_of((4,)), [P])
    got = vmap(lambda row: terms @ row + terms[0])(place(x, S0)).full_tensor()
    assert (got == vmap(lambda row: x @ row + x[0])(x)).all()


@on_gloo_ranks
def test_tangents_pass_conversions() -> None:
    x = torch.arange(12.0).reshape(4, 3).sin()
    rank = mesh_of((4,)).get_local_rank()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(place(x, S0), place(x.cos(), S0))
        moved = dual.redistribute(placements=[R], forward_dtype=torch.float64) * 2
        local = forward_ad.make_dual(x[rank : rank + 1].clone(), x[rank : rank + 1].cos())
        for got, want in (
            (moved, (2 * x.cos()).double()),
            (dual.full_tensor() * 2, 2 * x.cos()),
            (dual.to_local() * 2, 2 * x.cos()[rank : rank + 1]),
            (DTensor.from_local(local, mesh_of((4,)), [S0]) * 2, 2 * x.cos()),
        ):
            torch.testing.assert_close(full(forward_ad.unpack_dual(got).tangent), want, check_dtype=False)


@on_ranks
def test_tangent_is_redistributed_to_its_primal() -> None:
    """Nothing is sent if both have the same placement."""
    x = torch.arange(8.0).sin()
    with count_collectives() as count:
        jvp(torch.sin, (place(x, S0),), (place(x, S0),))
    assert not count.calls
    out, tangent = jvp(torch.sin, (place(x, S0),), (place(x, R),))
    assert out.placements == tangent.placements == (S0,)
    torch.testing.assert_close(tangent.full_tensor(), x.cos() * x)


@on_ranks
def test_plain_tensors_are_refused_or_replicated() -> None:
    x, rows = torch.arange(16.0).reshape(4, 4), torch.arange(12.0).reshape(3, 4)
    placed = place(x, S0)
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
def test_linearize_is_refused() -> None:
    with pytest.raises(NoRuleError, match=r"use torch\.func\.jvp, or trace a function"):
        linearize(torch.sin, place(torch.arange(4.0), S0))


# ---- torch.autograd.grad, with all that it takes ----


def _equal(got: Any, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.full_tensor(), want)


@on_worlds
def test_gradients_are_those_of_torch() -> None:
    mesh = mesh_of((4,))
    values = torch.arange(32.0).view(8, 4) / 7
    plain, unused = values.clone().requires_grad_(), values.clone().requires_grad_()
    x, y = (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (plain, unused))
    cotangent = values.sin()
    spread = distribute_tensor(cotangent, mesh, [Replicate()], src_data_rank=None)

    # A cotangent placed otherwise, a scalar without one, several outputs at once.
    _equal(torch.autograd.grad(x.exp(), x, spread)[0], torch.autograd.grad(plain.exp(), plain, cotangent)[0])
    _equal(torch.autograd.grad((x * x).sum(), x)[0], 2 * plain.detach())
    got = torch.autograd.grad([x.exp(), x.sin()], [x], [spread, spread])[0]
    _equal(got, torch.autograd.grad([plain.exp(), plain.sin()], [plain], [cotangent, cotangent])[0])

    # Kept, and differentiated again.
    output = x.exp()
    first = torch.autograd.grad(output, x, spread, retain_graph=True)[0]
    assert torch.equal(first.full_tensor(), torch.autograd.grad(output, x, spread)[0].full_tensor())
    once = torch.autograd.grad(x**3, x, spread, create_graph=True)[0]
    _equal(torch.autograd.grad(once, x, spread)[0], 6 * plain.detach() * cotangent**2)

    # Inputs that the output does not depend on.
    missing = torch.autograd.grad(x.exp(), [x, y], spread, allow_unused=True)
    assert missing[1] is None and isinstance(missing[0], DTensor)
    _equal(torch.autograd.grad(x.exp(), [x, y], spread, materialize_grads=True)[1], torch.zeros(8, 4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@on_gloo_ranks
def test_gradients_of_plain_outputs_are_checked_as_torch_does() -> None:
    values = torch.arange(32.0).view(8, 4) / 7
    x = distribute_tensor(values, mesh_of((4,)), [Shard(0)], src_data_rank=None).requires_grad_()
    plain = values.clone().requires_grad_()
    local, weights = x.to_local(), torch.arange(8.0).view(2, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            autograd_grad, "make_grads", lambda *_, **__: pytest.fail("a pair that fits was checked")
        )
        (got,) = torch.autograd.grad(local, x, weights, retain_graph=True)
    _equal(got, weights.repeat(4, 1))
    (doubled,) = torch.autograd.grad(local, x, weights.double(), retain_graph=True)
    assert doubled.dtype == torch.float32 and torch.equal(doubled.full_tensor(), got.full_tensor())
    for wrong in (
        weights.view(4, 2),
        weights.to(torch.complex64),
        torch.nested.nested_tensor([weights]),
        None,
    ):
        errors = []
        for output, leaf in ((local, x), (plain[:2] * 1, plain)):
            with pytest.raises((RuntimeError, TypeError)) as caught:
                torch.autograd.grad(output, leaf, wrong, retain_graph=True)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]


@needs_213("there is no such op")
@on_worlds
def test_linear_cross_entropy_in_chunks() -> None:
    """torch's op creates plain buffers in its backward. Tests a DTensor loss and a plain one."""
    mesh, options = mesh_of((4,)), nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    tensors = [torch.arange(n * 4.0).view(n, 4).sin() for n in (6, 5)]
    target = torch.tensor([0, 3, 1, 4, 2, 2])

    for reduction in ("none", "mean"):
        plain = [t.clone().requires_grad_() for t in tensors]
        wanted = F.linear_cross_entropy(*plain, target, reduction=reduction, options=options)
        wanted.pow(2).sum().backward()
        for whole in (False, True):
            parts = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in tensors]
            labels = distribute_tensor(target, mesh, [Replicate()])
            loss = F.linear_cross_entropy(*parts, labels, reduction=reduction, options=options)
            _equal(loss, wanted.detach())
            (loss.full_tensor() if whole else loss).pow(2).sum().backward()
            for part, reference in zip(parts, plain, strict=True):
                _equal(part.grad, reference.grad)


# (function of a plain tensor [8, 4]) -> what calls it inside a transform.
TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "grad": lambda fn, x: grad(lambda t: fn(t).sum())(x),
    "vjp": lambda fn, x: vjp(fn, x),
    "jvp": lambda fn, x: jvp(fn, (x,), (x,)),
    "vmap": lambda fn, x: vmap(fn)(torch.stack([x, x])),
    "grad of vmap": lambda fn, x: grad(lambda t: vmap(fn)(torch.stack([t, t])).sum())(x),
    "computed": lambda fn, x: grad(lambda t: fn(t * 2).sum())(x),
    "functional_call": lambda fn, x: grad(
        lambda p: functional_call(nn.Linear(4, 4), {n: fn(t) for n, t in p.items()}, (x,)).sum()
    )({"weight": torch.ones(4, 4), "bias": torch.ones(4)}),
}


@pytest.mark.parametrize("placement", (S0, R))
@pytest.mark.parametrize("name", TRANSFORMS)
@on_ranks
def test_plain_tensors_of_a_transform_are_refused_by_name(name: str, placement: Any) -> None:
    mesh, x = mesh_of((4,)), torch.arange(32.0).view(8, 4)
    for source in (0, None):
        with pytest.raises(
            ArgumentError, match=r"distribute_tensor got .* inside a transform .* create the DTensor before"
        ):
            TRANSFORMS[name](
                lambda t, p=placement, s=source: distribute_tensor(
                    t, mesh, [p], src_data_rank=s
                ).full_tensor(),
                x,
            )
    with pytest.raises(ArgumentError, match=r"DTensor.from_local got .* inside a transform"):
        TRANSFORMS[name](lambda t, p=placement: DTensor.from_local(t, mesh, [p]).full_tensor(), x)


@on_ranks
def test_constants_are_refused_inside_a_transform_and_used_from_outside() -> None:
    mesh, x, constant = mesh_of((4,)), torch.arange(32.0).view(8, 4), torch.arange(4.0)
    made = distribute_tensor(constant, mesh, [S0])
    for transform in (vmap, grad):
        with pytest.raises(ArgumentError, match=r"inside a transform of torch\.func"):
            transform(lambda t: (t * distribute_tensor(constant, mesh, [S0]).full_tensor()).sum())(x)
    _equal(grad(lambda t: (t * made).sum())(distribute_tensor(x, mesh, [R])), constant.expand(8, 4))


# ---- local_map ----


A, B = torch.arange(32.0).reshape(8, 4), torch.arange(24.0).reshape(4, 6)


@on_ranks
def test_shards_in_and_placements_out() -> None:
    """Multiplies along a sharded inner dim: each rank computes a term."""
    a, b = place(A, S1).requires_grad_(), place(B, S0).requires_grad_()
    seen = []

    def multiply(x: torch.Tensor, y: torch.Tensor, scale: float, *, bias: float) -> torch.Tensor:
        seen.append((type(x), type(y), tuple(x.shape)))
        return x @ y * scale + bias

    mapped = local_map(multiply, [P], ([S1], [S0], None))
    out = mapped(a, b, 2.0, bias=0.0)
    out.redistribute(placements=[R]).sum().backward()
    moved = local_map(multiply, (P,), ([S1], [S0], None), redistribute_inputs=True)
    again = moved(place(A, S0), place(B, R), 2.0, bias=0.0)
    assert seen == [(torch.Tensor, torch.Tensor, (8, 1))] * 2
    assert out.full_tensor().tolist() == again.full_tensor().tolist() == (A @ B * 2).tolist()
    assert a.grad.full_tensor().tolist() == (torch.ones(8, 6) @ B.t() * 2).tolist()
    assert (mapped.__name__, type(mapped(A, B, 1.0, bias=1.0))) == ("multiply", torch.Tensor)


@on_ranks
def test_several_results_and_gradients() -> None:
    @local_map(out_placements=([S0], None, [P]), in_placements=([S0], [R]), in_grad_placements=([S0], [P]))
    def parts(x: torch.Tensor, w: torch.Tensor) -> Any:
        return x * w, "text", (x * w).sum()

    w = place(torch.ones(4), R).requires_grad_()
    scaled, text, total = parts(place(A, S0), w)
    total.redistribute(placements=[R]).backward()
    plain = parts(place(A, S0), torch.ones(4))[0]  # a plain tensor is passed as it is
    assert scaled.full_tensor().tolist() == plain.full_tensor().tolist() == A.tolist()
    results = text, total.full_tensor().tolist(), w.grad.full_tensor().tolist()
    assert results == ("text", A.sum().tolist(), A.sum(0).tolist())


def _identity(x: Any, *_: Any) -> Any:
    return x


def _wraps(x: torch.Tensor) -> DTensor:
    return place(A, S0)


MISTAKES: dict[str, tuple[Any, str]] = {
    "other placement": (
        lambda a: local_map(_identity, [S0], ([S1],))(a),
        r"got float32\[8, 4\] S\(0\) .* as argument 0 of _identity, expected the placements S\(1\)",
    ),
    "too few": (lambda a: local_map(_identity, [S0], ([S0],))(a, 1), "got 1 in_placements for 2 arguments"),
    "none for a tensor": (lambda a: local_map(_identity, [S0], (None,))(a), "got None in in_placements"),
    "placed number": (
        lambda a: local_map(_identity, [S0], ([S0], [S0]))(a, 1),
        "for argument 1 of _identity, which is 1; expected None",
    ),
    "results": (lambda a: local_map(_identity, ([S0], [S0]))(a), "got 2 out_placements for 1 results"),
    "no placements": (lambda a: local_map(_identity)(a), "which is a tensor; expected placements"),
    "distributed result": (lambda a: local_map(_wraps, [S0])(a), "got a DTensor, .* expected a plain tensor"),
    "dim": (lambda a: local_map(_identity, [S0], ([Shard(5)],))(a), r"got Shard\(5\) for a tensor of 2 dims"),
    "not an op": (lambda a: register_sharding(torch.add), "expected an op overload"),
}


@pytest.mark.parametrize("name", MISTAKES)
@on_ranks
def test_mistakes(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises(CoreError, match=message):
        call(place(A, S0))


# ---- register_sharding ----

LIBRARY = "dtbench_test_rules"


def _library() -> Any:
    """Returns custom ops, defined once per process: x * scale plus a list item; x reversed along its last dim."""
    if not hasattr(getattr(torch.ops, LIBRARY), "combine"):

        @torch.library.custom_op(f"{LIBRARY}::combine", mutates_args=())
        def combine(
            x: torch.Tensor, scale: float, others: list[torch.Tensor]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return x * scale + others[0], x.sum()

        @combine.register_fake
        def _(x: torch.Tensor, scale: float, others: list[torch.Tensor]) -> Any:
            return torch.empty_like(x), x.new_empty(())

        @torch.library.custom_op(f"{LIBRARY}::backwards", mutates_args=())
        def backwards(x: torch.Tensor) -> torch.Tensor:
            return x.flip(-1)

        @backwards.register_fake
        def _(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x)

    return getattr(torch.ops, LIBRARY)


@on_ranks
def test_custom_ops_get_rules() -> None:
    ops = _library()
    seen = []

    @register_sharding(ops.combine.default)
    def rows(x: Any, scale: float, others: list[Any]) -> Any:
        seen.append((tuple(x.shape), x.ndim, x.dtype, scale, len(others), x.placements))
        return [([Shard(d), P], [Shard(d), None, Shard(d)]) for d in range(-x.ndim, 0)]

    a, same, across = place(A, S0), place(A, S0), place(A, S1)
    with count_collectives() as count:
        out, total = ops.combine(a, 2.0, [same])
    with count_collectives() as moving:
        again, _ = ops.combine(a, 2.0, [across])
    assert seen[0] == ((8, 4), 2, torch.float32, 2.0, 1, (S0,))
    assert (out.placements, total.placements) == ((S0,), (P,))
    assert (sum(count.calls.values()), sum(moving.calls.values())) == (0, 1)
    results = [t.full_tensor().tolist() for t in (out, again, total)]
    assert results == [(A * 3).tolist(), (A * 3).tolist(), A.sum().tolist()]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([([S0, S0], [S0])], "returned placements of 2 outputs and 1 input tensors, expected 1 and 1"),
        ([([Shard(7)], [S0])], r"got Shard\(7\) for a tensor of 2 dims"),
    ],
)
@on_ranks
def test_invalid_rules_are_refused(answer: Any, message: str) -> None:
    op = _library().backwards.default
    register_sharding(op)(lambda x: answer)
    with pytest.raises(CoreError, match=message):
        op(place(A, S0))


@on_ranks
def test_rules_are_replaced() -> None:
    """Also for calls that were planned before. The rule may depend on the value of a number."""
    op = torch.ops.aten.mul.Scalar
    x = place(A, S0)
    assert [op(x, s).placements for s in (2.0, 3.0)] == [(S0,), (S0,)]
    dist.barrier()  # ranks may be threads, with one table of rules
    message = register_sharding(op)(lambda x, other: [([S0], [S0])] if other == 2.0 else [([R], [R])])
    try:
        assert callable(message), "a decorator"
        for scale, placement in ((2.0, S0), (3.0, R)):
            scaled = op(x, scale)
            assert scaled.placements == (placement,) and scaled.full_tensor().equal(A * scale)
    finally:
        dist.barrier()
        base.rules_by_op.pop(op, None)
        base.overridden_ops.discard(op)
        clear_caches()
