"""The checks of the data: they pass what is right and name what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtbench.engine.ranks import simulated_world
from dtbench.suite import Skip
from dtbench_suites import dispatch
from dtbench_suites.data import (
    largest_exact,
    mismatch,
    moved_values,
    refuse_gathers_of_cuda_on_gloo,
    sum_of_values,
    summed_values,
)
from dtbench_suites.dispatch_programs import (
    BACKWARD,
    EVERY_PASS,
    FORWARD,
    PROGRAMS,
    REQUIRES_GRAD,
    wrong_result,
)

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 21])
def test_the_closed_form_is_the_sum_in_any_order(dtype: torch.dtype, ranks: int):
    terms = [summed_values(r, ranks, 37, dtype, CPU, start=3) for r in range(ranks)]
    want = sum_of_values(ranks, 37, dtype, CPU, start=3)
    for order in (terms, terms[::-1]):
        total = torch.zeros(37, dtype=dtype)
        for term in order:
            total += term
        assert torch.equal(total, want)


def test_a_sum_that_leaves_out_or_repeats_a_rank_differs():
    for ranks in (2, 3, 8):
        terms = [summed_values(r, ranks, 10, torch.float32, CPU) for r in range(ranks)]
        want = sum_of_values(ranks, 10, torch.float32, CPU)
        for term in terms:
            assert not torch.equal(want - term, want)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 256), (torch.float16, 2048), (torch.int8, 127)])
def test_more_ranks_than_a_dtype_counts_are_skipped(dtype: torch.dtype, most: int):
    assert largest_exact(dtype) == most
    with pytest.raises(Skip, match="ranks"):
        summed_values(0, most, 4, dtype, CPU)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo", "nccl", "fake"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gathers_that_would_end_the_ranks_are_skipped(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    mesh: Any = SimpleNamespace(device_type=device, get_group=object)
    dies = device == "cuda" and "gloo" in backend
    with pytest.raises(Skip, match="SIGSEGV") if dies else contextlib.nullcontext():
        refuse_gathers_of_cuda_on_gloo(mesh)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_ranks_send_differs_and_every_dtype_holds_it(dtype: torch.dtype):
    sent = [moved_values(r, 64, dtype, CPU) for r in range(16)]
    exact = [moved_values(r, 64, torch.int64, CPU) for r in range(16)]
    for r, (mine, whole) in enumerate(zip(sent, exact, strict=True)):
        assert torch.equal(mine.to(torch.int64), whole)
        assert all(not torch.equal(mine, other) for other in sent[:r])


def test_mismatch_names_the_first_wrong_element():
    want = torch.arange(6.0).view(2, 3)
    assert mismatch(want.clone(), want) is None
    got = want.clone()
    got[1, 1] = 9
    assert mismatch(got, want) == "1 of 6 elements of the result are wrong, the first at 4: got 9, expected 4"


@pytest.mark.parametrize("rtol", [0.0, 1e-3])
def test_nan_and_other_shapes_and_dtypes_are_wrong(rtol: float):
    want = torch.ones(4)
    assert "nan" in str(mismatch(torch.tensor([1.0, 1, torch.nan, 1]), want, rtol=rtol))
    assert "(5,)" in str(mismatch(torch.ones(5), want, rtol=rtol))
    assert "float64" in str(mismatch(torch.ones(4, dtype=torch.float64), want, rtol=rtol))


# ----------------------------------------------------------------------------- dispatch, simulated


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    with simulated_world(CPU) as simulated:
        yield simulated


def setup_of(world: Any, impl: str, op: dispatch.TimedOp, pass_: str, shape: Any = (8,)) -> dispatch.PlacedOp:
    return dispatch.PlacedOp(op, dispatch.Place(impl, world.mesh_of(shape), CPU), pass_)


def setups(world: Any, impl: str) -> Iterator[tuple[str, dispatch.PlacedOp]]:
    for shape in dispatch.MESHES:
        for op in dispatch.OPS:
            for pass_ in EVERY_PASS if op.backward else (FORWARD,):
                yield f"{op.name} {op.placements} {shape} {pass_}", setup_of(world, impl, op, pass_, shape)


@pytest.mark.parametrize("impl", ["core", "torch", "local"])
def test_every_op_gives_what_plain_torch_gives(world: Any, impl: str):
    wrong: dict[str, str] = {}
    for label, setup in setups(world, impl):
        try:
            message = setup.check()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        if message:
            wrong[label] = message
    assert wrong == {}


@pytest.mark.parametrize("pass_", [FORWARD, REQUIRES_GRAD])
def test_the_least_wraps_every_result_and_one_that_does_not_is_caught(
    world: Any, monkeypatch: pytest.MonkeyPatch, pass_: str
):
    ops = [op for op in dispatch.OPS if not op.name.endswith("_local") and (op.backward or pass_ == FORWARD)]

    def said() -> dict[str, str | None]:
        wrapped_ops = [(op, dispatch.wrapped(setup_of(world, "local", op, pass_))) for op in ops]
        return {
            f"{op.name} {op.placements}": workload.check() for op, workload in wrapped_ops if workload.check
        }

    assert set(said().values()) == {None}
    least = dispatch.Least if pass_ == FORWARD else dispatch.LeastRecorded
    monkeypatch.setattr(least, "wrap", lambda tensor, requires_grad=False: tensor)
    in_place = {"add_ S(0),S(0)"} if pass_ == FORWARD else set()  # gives its argument
    assert {name for name, wrong in said().items() if not wrong} == in_place


@pytest.mark.parametrize("impl", ["core", "torch", "local"])
def test_result_without_its_gradient_is_caught(world: Any, impl: str, monkeypatch: pytest.MonkeyPatch):
    op, program = (
        next(op for op in ops if op.name == name)
        for ops, name in ((dispatch.OPS, "relu"), (PROGRAMS, "dropout"))
    )
    monkeypatch.setattr(dispatch.PlacedOp, "function", lambda self: lambda x: torch.relu(x).detach())
    setup = setup_of(world, impl, op, REQUIRES_GRAD)
    assert setup.check() == "output 0 has requires_grad=False, expected True"
    assert "requires no gradient" in str(
        wrong_result(program, setup.at, REQUIRES_GRAD, setup.call(dispatch.ROWS))
    )


@pytest.mark.parametrize("impl", ["core", "torch", "local"])
def test_a_wrong_value_is_caught(world: Any, impl: str, monkeypatch: pytest.MonkeyPatch):
    right = dispatch.PlacedOp.function

    def slightly_off(self: dispatch.PlacedOp) -> Any:
        fn = right(self)
        return lambda *inputs: [out + out for out in dispatch.as_tuple(fn(*inputs))]

    monkeypatch.setattr(dispatch.PlacedOp, "function", slightly_off)
    caught = {label for label, setup in setups(world, impl) if setup.pass_ != BACKWARD and setup.check()}
    assert caught == {label for label, setup in setups(world, impl) if setup.pass_ != BACKWARD}


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_a_wrong_placement_is_caught(world: Any, impl: str):
    op = next(op for op in dispatch.OPS if op.name == "relu")
    setup = setup_of(world, impl, dataclasses.replace(op, result="R"), FORWARD)
    assert "expected" in str(setup.check())


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_a_wrong_gradient_is_caught(world: Any, impl: str, monkeypatch: pytest.MonkeyPatch):
    op = next(op for op in dispatch.OPS if op.name == "mul_scalar")
    setup = setup_of(world, impl, op, BACKWARD)
    assert setup.check() is None
    # The value of 2 x with the gradient of 3 x.
    monkeypatch.setattr(dispatch.PlacedOp, "function", lambda self: lambda x: x * 2.0 + (x - x.detach()))
    assert "gradient 0" in str(setup.check())


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_first_calls_never_see_a_shape_twice(world: Any, impl: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    right = dispatch.PlacedOp.call
    monkeypatch.setattr(dispatch.PlacedOp, "call", lambda self, k: (seen.append(k), right(self, k))[1])
    for op in (dispatch.OPS[0], dispatch.OPS[2]):
        workload = dispatch.build_impl(op, (8,), FORWARD, True, True, impl, world)
        seen.clear()  # that one readies the call before the first `before`
        assert workload.before is not None
        for _ in range(3):
            workload.before()
            workload.run()
        assert len(set(seen)) == 3
        assert dispatch.ROWS not in seen


def test_tolerance_is_relative_to_the_largest_value():
    want = torch.tensor([1000.0, 0.0])
    assert mismatch(torch.tensor([1000.0, 0.5]), want, rtol=1e-3) is None
    assert mismatch(torch.tensor([1000.0, 1.5]), want, rtol=1e-3) is not None
