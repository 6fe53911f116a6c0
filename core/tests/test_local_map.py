"""local_map and register_sharding: functions and rules of users."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.tests.gloo_world import on_ranks
from core.tests.placing import place
from dtbench_core import (
    CoreError,
    DTensor,
    Partial,
    Replicate,
    Shard,
    clear_caches,
    count_collectives,
    local_map,
    register_sharding,
)
from dtbench_core.rules import base

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
A, B = torch.arange(32.0).reshape(8, 4), torch.arange(24.0).reshape(4, 6)


# ---- local_map ----


@on_ranks
def test_shards_in_and_placements_out() -> None:
    """A product over a sharded inner dim: each rank has a term."""
    a, b = place(A, S1).requires_grad_(), place(B, S0).requires_grad_()
    types = []

    def multiply(x: torch.Tensor, y: torch.Tensor, scale: float, *, bias: float) -> torch.Tensor:
        types.append((type(x), type(y), tuple(x.shape)))
        return x @ y * scale + bias

    mapped = local_map(multiply, [P], ([S1], [S0], None))
    out = mapped(a, b, 2.0, bias=0.0)
    out.redistribute(placements=[R]).sum().backward()
    moved = local_map(multiply, (P,), ([S1], [S0], None), redistribute_inputs=True)
    again = moved(place(A, S0), place(B, R), 2.0, bias=0.0)
    assert all(x is y is torch.Tensor for x, y, _ in types) and types[0][2] == (8, 1), "plain"
    assert out.full_tensor().tolist() == again.full_tensor().tolist() == (A @ B * 2).tolist(), "value"
    assert a.grad.full_tensor().tolist() == (torch.ones(8, 6) @ B.t() * 2).tolist(), "grad"
    assert mapped.__name__ == "multiply", "name"
    assert type(mapped(A, B, 1.0, bias=1.0)) is torch.Tensor, "no tensors"


@on_ranks
def test_several_results_and_gradients() -> None:
    @local_map(out_placements=([S0], None, [P]), in_placements=([S0], [R]), in_grad_placements=([S0], [P]))
    def parts(x: torch.Tensor, w: torch.Tensor) -> Any:
        return x * w, "text", (x * w).sum()

    w = place(torch.ones(4), R).requires_grad_()
    scaled, text, total = parts(place(A, S0), w)
    total.redistribute(placements=[R]).backward()
    plain = parts(place(A, S0), torch.ones(4))[0]  # a plain tensor is passed as it is
    assert scaled.full_tensor().tolist() == plain.full_tensor().tolist() == A.tolist(), "scaled"
    assert text == "text", "text"
    assert float(total.full_tensor().detach()) == float(A.sum()), "total"
    assert w.grad.full_tensor().tolist() == A.sum(0).tolist(), "grad"


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
    """Custom ops, defined once per process: 2x + y of the first list item; x reversed along its last dim."""
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
    assert seen[0] == ((8, 4), 2, torch.float32, 2.0, 1, (S0,)), "seen"
    assert (out.placements, total.placements) == ((S0,), (P,)), "placed"
    assert sum(count.calls.values()) == 0 and sum(moving.calls.values()) == 1, "free"
    assert out.full_tensor().tolist() == again.full_tensor().tolist() == (A * 3).tolist(), "value"
    assert float(total.full_tensor()) == float(A.sum()), "total"


@on_ranks
def test_rules_that_do_not_fit_are_told() -> None:
    op = _library().backwards.default
    answers: list[tuple[Any, str]] = [
        ([([S0, S0], [S0])], "returned placements of 2 outputs and 1 input tensors, expected 1 and 1"),
        ([([Shard(7)], [S0])], r"got Shard\(7\) for a tensor of 2 dims"),
    ]
    for answer, message in answers:
        dist.barrier()  # ranks may be threads, with one table of rules
        register_sharding(op)(lambda x: answer)  # noqa: B023
        with pytest.raises(CoreError, match=message):
            op(place(A, S0))


@on_ranks
def test_rules_are_replaced() -> None:
    """A rule of the core's is replaced for plans made before, too; the value of a number may matter to it."""
    op = torch.ops.aten.mul.Scalar
    x = place(A, S0)
    assert [op(x, s).placements for s in (2.0, 3.0)] == [(S0,), (S0,)]
    dist.barrier()  # ranks may be threads, with one table of rules
    message = register_sharding(op)(lambda x, other: [([S0], [S0])] if other == 2.0 else [([R], [R])])
    try:
        assert callable(message), "a decorator"
        for scale, placement in ((2.0, S0), (3.0, R)):
            scaled = op(x, scale)
            assert scaled.placements == (placement,)
            assert scaled.full_tensor().equal(A * scale)
    finally:
        dist.barrier()
        base.rules_by_op.pop(op, None)
        base.overridden_ops.discard(op)
        clear_caches()
