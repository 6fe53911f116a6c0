"""The checks of the suites accept correct results and report wrong ones; test data are exact."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from core.tests.torch_version import BEFORE_213
from dtbench.engine.rank_votes import simulated_world
from dtbench.records.result import Result
from dtbench.records.suite_answers import StepGrowth
from dtbench.stats.host_time import step_growths
from dtbench.suite import Skip, Workload
from dtbench_suites import bucketer_reference, dispatch
from dtbench_suites.bucketer_reference import ReferenceBucketer
from dtbench_suites.data import (
    largest_exact,
    mismatch,
    moved_values,
    skip_cuda_gathers_on_gloo,
    sum_of_values,
    summed_values,
)
from dtbench_suites.dispatch_programs import (
    BACKWARD,
    EVERY_PASS,
    FORWARD,
    PROGRAMS,
    REQUIRES_GRAD,
    build_program,
    check_result,
    steps_in_a_row,
)
from dtbench_suites.memory import growth_per_step
from dtbench_suites.packing import IMPLS, build

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 21])
def test_sum_of_values_is_exact_in_any_order(dtype: torch.dtype, ranks: int):
    terms = [summed_values(r, ranks, 37, dtype, CPU, start=3) for r in range(ranks)]
    for order in (terms, terms[::-1]):
        total = torch.zeros(37, dtype=dtype)
        for term in order:
            total += term
        assert torch.equal(total, sum_of_values(ranks, 37, dtype, CPU, start=3))


@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_sums_that_omit_or_repeat_a_rank_differ(ranks: Any):
    want = sum_of_values(ranks, 10, torch.float32, CPU)
    for rank in range(ranks):
        assert not torch.equal(want - summed_values(rank, ranks, 10, torch.float32, CPU), want)


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.bfloat16, 256), (torch.float16, 2048), (torch.int8, 127)]
)
def test_sums_that_exceed_the_exact_integers_of_a_dtype_are_skipped(dtype: torch.dtype, largest: int):
    assert largest_exact(dtype) == largest
    with pytest.raises(Skip, match="ranks"):
        summed_values(0, largest, 4, dtype, CPU)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo", "nccl", "fake"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gathers_of_cuda_tensors_on_gloo_are_skipped(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    crashes = device == "cuda" and "gloo" in backend
    with pytest.raises(Skip, match="SIGSEGV") if crashes else contextlib.nullcontext():
        skip_cuda_gathers_on_gloo(SimpleNamespace(device_type=device, get_group=object))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_moved_values_are_exact_and_differ_between_ranks(dtype: torch.dtype):
    sent = torch.stack([moved_values(rank, 64, dtype, CPU) for rank in range(16)])
    exact = torch.stack([moved_values(rank, 64, torch.int64, CPU) for rank in range(16)])
    assert torch.equal(sent.to(torch.int64), exact) and len(exact.unique(dim=0)) == 16


def test_mismatch_reports_the_first_wrong_element():
    want = torch.arange(6.0).view(2, 3)
    assert mismatch(want.clone(), want) is None
    got = want.clone()
    got[1, 1] = 9
    assert mismatch(got, want) == "1 of 6 elements of the result are wrong, the first at 4: got 9, expected 4"


@pytest.mark.parametrize("rtol", [0.0, 1e-3])
@pytest.mark.parametrize(
    ("got", "message"),
    [
        (torch.tensor([1.0, 1, torch.nan, 1]), "nan"),
        (torch.ones(5), "(5,)"),
        (torch.ones(4, dtype=torch.float64), "float64"),
    ],
)
def test_mismatch_reports_nan_shape_and_dtype(got: torch.Tensor, message: str, rtol: float):
    assert message in str(mismatch(got, torch.ones(4), rtol=rtol))


# ----------------------------------------------------------------------------- dispatch, simulated


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    with simulated_world(CPU) as simulated:
        yield simulated


def setup_of(world: Any, impl: str, op: dispatch.TimedOp, pass_: str, shape: Any = (8,)) -> dispatch.PlacedOp:
    return dispatch.PlacedOp(op, dispatch.Place(impl, world.mesh_of(shape), CPU), pass_)


def op_called(name: str) -> dispatch.TimedOp:
    return next(op for op in dispatch.OPS if op.name == name)


def setups(world: Any, impl: str) -> Iterator[tuple[str, dispatch.PlacedOp]]:
    for shape, op in itertools.product(dispatch.MESHES, dispatch.OPS):
        for pass_ in EVERY_PASS if op.backward else (FORWARD,):
            yield f"{op.name} {op.placements} {shape} {pass_}", setup_of(world, impl, op, pass_, shape)


@pytest.mark.parametrize("impl", ["core", "torch", "local"])
def test_every_op_equals_plain_torch(world: Any, impl: str):
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
def test_check_of_wrapped_detects_unwrapped_results(world: Any, monkeypatch: pytest.MonkeyPatch, pass_: str):
    ops = [op for op in dispatch.OPS if not op.name.endswith("_local") and (op.backward or pass_ == FORWARD)]

    def messages() -> dict[str, str | None]:
        wrapped_ops = [(op, dispatch.wrapped(setup_of(world, "local", op, pass_))) for op in ops]
        return {
            f"{op.name} {op.placements}": workload.check() for op, workload in wrapped_ops if workload.check
        }

    assert set(messages().values()) == {None}
    wrapper_class = dispatch.MinimalWrapper if pass_ == FORWARD else dispatch.MinimalAutogradWrapper
    monkeypatch.setattr(wrapper_class, "wrap", lambda tensor, requires_grad=False: tensor)
    in_place = {"add_ S(0),S(0)"} if pass_ == FORWARD else set()  # returns its argument
    assert {name for name, message in messages().items() if not message} == in_place


@pytest.mark.parametrize("impl", ["core", "torch", "local"])
def test_check_detects_a_result_that_requires_no_gradient(
    world: Any, impl: str, monkeypatch: pytest.MonkeyPatch
):
    program = next(program for program in PROGRAMS if program.name == "dropout")
    monkeypatch.setattr(dispatch.PlacedOp, "function", lambda self: lambda x: torch.relu(x).detach())
    setup = setup_of(world, impl, op_called("relu"), REQUIRES_GRAD)
    assert setup.check() == "output 0 has requires_grad=False, expected True"
    message = check_result(program, setup.place, REQUIRES_GRAD, setup.call(dispatch.ROWS))
    assert message is not None and "requires no gradient" in message


@pytest.mark.parametrize("impl", ["core", "torch", "local"])
def test_check_detects_a_wrong_value(world: Any, impl: str, monkeypatch: pytest.MonkeyPatch):
    right = dispatch.PlacedOp.function

    def doubled(self: dispatch.PlacedOp) -> Any:
        return lambda *inputs: [out + out for out in dispatch.as_tuple(right(self)(*inputs))]

    monkeypatch.setattr(dispatch.PlacedOp, "function", doubled)
    accepted = [
        label for label, setup in setups(world, impl) if setup.pass_ != BACKWARD and not setup.check()
    ]
    assert accepted == []


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_check_detects_a_wrong_placement(world: Any, impl: str):
    replicated = dataclasses.replace(op_called("relu"), result="R")
    assert "expected" in str(setup_of(world, impl, replicated, FORWARD).check())


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_check_detects_a_wrong_gradient(world: Any, impl: str, monkeypatch: pytest.MonkeyPatch):
    setup = setup_of(world, impl, op_called("mul_scalar"), BACKWARD)
    assert setup.check() is None
    # Has the value of 2 x but the gradient of 3 x.
    monkeypatch.setattr(dispatch.PlacedOp, "function", lambda self: lambda x: x * 2.0 + (x - x.detach()))
    assert "gradient 0" in str(setup.check())


@pytest.mark.parametrize("op", (dispatch.OPS[0], dispatch.OPS[2]))
@pytest.mark.parametrize("impl", ["core", "torch"])
def test_first_calls_never_repeat_a_shape(world: Any, impl: str, monkeypatch: pytest.MonkeyPatch, op: Any):
    rows: list[int] = []
    right = dispatch.PlacedOp.call
    monkeypatch.setattr(dispatch.PlacedOp, "call", lambda self, k: (rows.append(k), right(self, k))[1])
    workload = dispatch.build_impl(op, (8,), FORWARD, dispatch.FIRST, True, impl, world)
    rows.clear()  # build_impl has prepared a cached call
    for _ in range(3):
        workload.before()
        workload.run()
    assert len({*rows, dispatch.ROWS}) == 4


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_second_calls_of_every_op_make_no_decision_again(world: Any, impl: str):
    for op, pass_ in itertools.product(dispatch.OPS, (FORWARD, BACKWARD)):
        if op.backward or pass_ == FORWARD:
            counters = second_call(world, impl, op, pass_).counters
            assert counters is not None
            counters()  # the core records the first call of a function again
            assert counters() == {"decisions": 0}, f"{op.name} {pass_}"


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_second_call_of_an_op_that_finds_no_decision_is_counted(world: Any, impl: str):
    widths = itertools.count(1)  # another slice in each call
    op = dataclasses.replace(op_called("slice"), fn=lambda x: x.narrow(1, 0, next(widths)))
    counters = second_call(world, impl, op, FORWARD).counters
    assert counters is not None and counters() == {"decisions": 1}


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_timed_second_calls_follow_an_untimed_first_one(world: Any, impl: str):
    workload = second_call(world, impl, op_called("relu"), FORWARD)
    assert workload.before is not None
    workload.before()
    workload.run()  # the core records the first call of a function again
    for _ in range(2):
        started = dispatch.decisions_made(impl)
        workload.before()
        after_first = dispatch.decisions_made(impl)
        workload.run()
        assert started is not None and after_first is not None
        assert after_first > started and dispatch.decisions_made(impl) == after_first


def second_call(world: Any, impl: str, op: dispatch.TimedOp, pass_: str) -> Workload:
    return dispatch.build_impl(op, (8,), pass_, dispatch.SECOND, True, impl, world)


# ---- steps in a row ----


class Leaked:
    pass


def growth(step: Callable[[], object]) -> StepGrowth:
    counters = growth_per_step(step, 80)
    result = Result("dispatch", "steps", "core", {}, "ok", counters=counters)
    (found,) = step_growths([result])
    return found


def test_injected_leak_is_found_and_its_type_is_named():
    kept: list[object] = []
    found = growth(lambda: kept.append(Leaked()))
    assert found.verdict == f"leak of 1 {__name__}.Leaked per step"
    assert (found.objects_per_step, found.steps) == (1.0, 80)
    kept.clear()
    found = growth(lambda: kept.extend((torch.ones(1), Leaked(), torch.ones(1))))
    assert found.types == {"torch.Tensor": 2.0, f"{__name__}.Leaked": 1.0}


def test_injected_leak_of_memory_is_found_without_objects():
    kept: list[bytes] = []
    found = growth(lambda: kept.append(b"x" * (16 * 1024 + len(kept))))
    assert found.verdict == "leak of memory outside Python's objects"
    assert found.objects_per_step == 0.0 and found.bytes_per_step == pytest.approx(16 * 1024, rel=0.3)


def test_garbage_of_cycles_is_no_leak():
    def make_cycle() -> None:
        cycle: list[object] = []
        cycle.append(cycle)

    assert growth(make_cycle).verdict == "flat"


@pytest.mark.parametrize("form", ["foreach", "fused"])
@pytest.mark.parametrize("impl", ["core", "torch", "local"])
def test_steps_equal_those_of_plain_torch_and_keep_nothing(
    world: Any, impl: str, form: str, monkeypatch: pytest.MonkeyPatch
):
    place = dispatch.Place(impl, world.mesh_of((8,)), CPU)
    workload = build_program(steps_in_a_row(form), place, FORWARD, quick=True)
    assert workload.check is not None and workload.counters is not None
    (found,) = step_growths([Result("dispatch", "steps", impl, {}, "ok", counters=workload.counters())])
    leaks = impl == "torch" and BEFORE_213  # torch 2.11 keeps the specs of each step
    assert (found.verdict.split()[0], found.steps) == ("leak" if leaks else "flat", 80)
    assert workload.check() is None
    steps = itertools.count()
    right = torch.optim.AdamW.step

    def step(optimizer: Any) -> None:
        if next(steps) != 1:  # the second step of the DTensors is missing
            right(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    assert "parameter 0 are wrong" in str(workload.check())


def test_tolerance_of_mismatch_is_relative_to_the_largest_value():
    want = torch.tensor([1000.0, 0.0])
    assert mismatch(torch.tensor([1000.0, 0.5]), want, rtol=1e-3) is None
    assert mismatch(torch.tensor([1000.0, 1.5]), want, rtol=1e-3) is not None


# ---- packing ----


MIB = 2**20


@pytest.mark.parametrize("impl", IMPLS)
def test_check_accepts_every_impl_and_detects_a_wrong_element(impl: str, world: Any):
    workload = build(impl, 5, 8 * 300, torch.float32, world)
    for _ in range(2):  # the second time with reused buffers
        assert workload.check() is None
    # Changes one element while it is copied.
    owner, name = {"core_held": (torch, "cat"), "reference": (torch, "stack")}.get(
        impl, (torch.Tensor, "copy_")
    )
    right = getattr(owner, name)

    def spoiled(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = right(*args, **kwargs)
        result[(-1,) * result.ndim] += 1
        return result

    with mock.patch.object(owner, name, spoiled):
        message = workload.check()
    assert message is not None and "wrong" in message
    if workload.close is not None:
        workload.close()


@pytest.mark.parametrize("impl", IMPLS)
def test_check_detects_a_recording_that_replays_nothing(impl: str, world: Any):
    def recorded(run: Callable[[], object]) -> Callable[[], object]:
        run()
        return lambda: None

    right = build(impl, 5, 8 * 300, torch.float32, world, lambda run: run).check
    wrong = build(impl, 5, 8 * 300, torch.float32, world, recorded).check
    assert right is not None and right() is None
    assert wrong is not None and "wrong" in str(wrong())


def test_reference_bucketer_reduces_in_order(world: Any, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []

    def add_up(output: torch.Tensor, packed: torch.Tensor, group: object) -> None:
        sizes.append(packed.numel())
        output.copy_(packed.view(8, -1).sum(0))  # as if each row came from another rank

    monkeypatch.setattr(bucketer_reference, "reduce_scatter_single", add_up)
    bucketer = ReferenceBucketer(8 * 10 * 4 / MIB)  # 10 elements per shard
    got: list[torch.Tensor] = []
    group = world.mesh.get_group(0)
    for numel in (4, 11, 7):
        bucketer.reduce_scatter_async([torch.full((numel,), float(r)) for r in range(8)], group, got.append)
    bucketer.flush()
    assert [shard.tolist() for shard in got] == [[28.0] * 11, [28.0] * 4, [28.0] * 7]
    assert (sizes, bucketer.collectives) == ([88, 32, 56], 3)
    with pytest.raises(ValueError, match="got 7 tensors"):
        bucketer.reduce_scatter_async([torch.ones(1)] * 7, group)
