"""Ops without a rule run on replicated inputs; implicit replication of plain tensors; implicit redistribution."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.placing import S0, S1, P, R, full, place
from dtbench_core import (
    CoreError,
    DTensor,
    ExplicitRedistributionContext,
    FallbackWarning,
    ImplicitRedistributionWarning,
    MixedTensorError,
    Partial,
    Placement,
    RedistributionError,
    clear_fallbacks,
    count_collectives,
    distribute_tensor,
    fallbacks,
    implicit_replication,
)

PLACED: list[list[Placement]] = [[S0], [S1], [R]]
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
def test_op_without_a_rule_equals_plain_torch(name: str, placements: list[Placement]) -> None:
    full = _random(5, 5)
    assert _same(FUNCTIONS[name](place(full, *placements)), FUNCTIONS[name](full))


def test_fallback_is_counted_and_warns_once(fake_world: Callable[[int], None]) -> None:
    fake_world(4)
    clear_fallbacks()
    x = distribute_tensor(torch.eye(4), mesh_of((4,)), [S0])
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
    target, source = place(x, *written), place(y, *read)
    got = WRITES[name](target, source)
    x = x.clone()
    assert _same(got, WRITES[name](x, y)) and _same(target, x)


@on_ranks
def test_in_place_add_to_a_partial_has_a_rule() -> None:
    """Addends of any placement are added to a Partial without a fallback; it stays Partial."""
    clear_fallbacks()
    full = torch.arange(15.0).reshape(5, 3)
    for read in (R, S0, P):
        total = place(full, S0).sum(0)
        total.add_(place(full[0], read)).sub_(place(full[1]), alpha=2)
        assert _same(total, full.sum(0) + full[0] - 2 * full[1])
    assert not fallbacks()


def _resized(size: int, placement: Placement) -> Any:
    return torch.mul(place(torch.arange(15.0).reshape(5, 3), S0), 2, out=place(torch.empty(size), placement))


@pytest.mark.filterwarnings("ignore:aten.mul.out got out= of shape")
@on_ranks
def test_out_is_resized_as_torch_does() -> None:
    for out in (_resized(0, R), _resized(2, S0)):
        assert _same(out, torch.arange(15.0).reshape(5, 3) * 2) and out.shape == (5, 3)


def test_resizing_a_nonempty_out_warns(fake_world: Callable[[int], None]) -> None:
    fake_world(4)
    _resized(0, R)  # warnings are errors here
    with pytest.warns(UserWarning, match=r"out= of shape \[2\].*resized"):
        _resized(2, S0)


# ---- views that are copies ----


@on_ranks
def test_lazy_view_refuses_reads_after_a_write_to_its_base() -> None:
    x = place(torch.arange(8.0), S0) * 1j
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
def test_nonlinear_in_place_op_on_a_partial(reduce_op: str, share: float) -> None:
    full = torch.arange(8.0, dtype=torch.float64)
    x = DTensor.from_local(full * (dist.get_rank() + 1) / share, mesh_of((4,)), [Partial(reduce_op)])
    x.exp_()
    assert x.placements == (Partial(reduce_op),) and _same(x, full.exp())


BAD_DTYPES: dict[str, Callable[[Any], Any]] = {
    "product": lambda x: x @ place(torch.ones(5, 5).double()),
    "index": lambda x: x.index_select(1, place(torch.zeros(1))),
    "normalisation": lambda x: torch.nn.functional.batch_norm(
        x.half(), *(place(torch.ones(5).double()) for _ in range(2))
    ),
    "input that moves first": lambda x: torch.nn.functional.batch_norm(
        place(torch.ones(3, 2, 4).double(), S1), *(place(torch.ones(2), S0) for _ in range(2))
    ),
}


@pytest.mark.parametrize("case", BAD_DTYPES)
@on_ranks
def test_every_rank_refuses_a_dtype(case: str) -> None:
    """Two of four ranks have no rows and run no kernel, and the meta kernels accept these dtypes."""
    x = place(torch.ones(2, 5), S0)
    with pytest.raises(RuntimeError, match="dtype"):
        BAD_DTYPES[case](x)


# ---- implicit replication and redistribution ----


def _cut(placement: Any, shape: tuple[int, ...] = (8, 4)) -> DTensor:
    return place(torch.arange(float(torch.Size(shape).numel())).reshape(shape), placement)


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
def test_plain_tensors_are_refused_after_implicit_replication() -> None:
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
def test_redistribution_contexts_nest() -> None:
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
def test_implicit_redistribution_warns() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ExplicitRedistributionContext(mode="warn"):
            whole = MOVES["gathers"]().full_tensor()
    messages = [str(w.message) for w in caught if w.category is ImplicitRedistributionWarning]
    assert len(messages) == 1 and "from S(1) to S(0)" in messages[0]
    assert torch.equal(whole, 2 * torch.arange(32.0).reshape(8, 4))
