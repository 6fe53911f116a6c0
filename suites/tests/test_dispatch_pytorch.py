"""The cases of pytorch's own DTensor benchmarks: names, checks, the mesh of 256 ranks, counted instructions."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtbench.engine.rank_votes import simulated_world
from dtbench.suite import RunOptions, Workload
from dtbench_suites import dispatch
from dtbench_suites.data import Place, silence_torch
from dtbench_suites.dispatch_programs import (
    FORWARD,
    PROGRAMS,
    PYTORCH_PROGRAMS,
    TimedProgram,
    count_instructions,
)

CPU = torch.device("cpu")
# Names as in pytorch's benchmarks/dynamo/pr_time_benchmarks/benchmarks/dtensor.py.
NAMES = {
    f"dtensor_dispatch_{operator}"
    for operator in (
        *("detach", "to_from_local", "collectives", "add_backward"),
        *("inplace", "view", "random", "custom_handler"),
    )
}
NO_COUNT = 2**64 - 1  # -1, as torch's counter returns it if it failed


@pytest.fixture
def world() -> Iterator[Any]:
    """A new world for each test, so the mesh of 256 ranks is made again after its group was destroyed."""
    with simulated_world(CPU) as simulated:
        yield simulated


def program_called(operator: str) -> TimedProgram:
    return next(p for p in PYTORCH_PROGRAMS if p.name == f"dtensor_dispatch_{operator}")


def place_of(world: Any, impl: str) -> Place:
    return Place(impl, world.mesh_of((256,)), CPU)


def built(world: Any, operator: str, impl: str) -> tuple[Callable[[Any], str | None], Any]:
    """Returns the check of a program, which takes the call to check, and the right call."""
    silence_torch()
    program, place = program_called(operator), place_of(world, impl)
    assert program.check is not None
    return partial(program.check, place), program.build(place, program.passes[0])


@pytest.mark.parametrize("quick", [False, True])
def test_suite_lists_the_eight_cases_under_their_names(quick: bool):
    options = RunOptions((("tp", 2),), (), quick=quick)
    listed = {case.name: case for case in dispatch.dispatch.cases(options) if case.params["mesh"] == "256"}
    assert listed.keys() == NAMES
    assert all({"core", "torch"} <= case.build.keys() and case.clock == "host" for case in listed.values())


@pytest.mark.parametrize("impl", ["core", "torch", "local"])
def test_cases_are_right_before_and_after_many_calls(world: Any, impl: str):
    for case in dispatch.dispatch.cases(RunOptions((("tp", 2),), ())):
        if case.name in NAMES and impl in case.build:
            workload: Workload = case.build[impl](world)
            assert workload.check is not None and workload.check() is None, case.name
            for _ in range(5):
                workload.run()
            assert workload.check() is None, case.name


def test_mesh_of_256_ranks_leaves_the_group_of_8_as_it_is(world: Any):
    mesh_of_8 = world.mesh_of((8,))
    mesh = world.mesh_of((256,))
    assert mesh is world.mesh_of((256,)) and mesh.size() == dist.get_world_size(mesh.get_group()) == 256
    assert (*mesh.get_coordinate(), mesh.get_local_rank()) == (0, 0)
    assert world.world_size == dist.get_world_size() == dist.get_world_size(mesh_of_8.get_group()) == 8
    assert set(map(dist.get_world_size, world.mesh_of((2, 4)).get_all_groups())) == {2, 4}


def test_cases_of_both_meshes_are_measured_in_turn(world: Any):
    relu = next(op for op in dispatch.OPS if op.name == "relu")
    for impl in ("core", "torch"):
        small = dispatch.build_impl(relu, (8,), FORWARD, False, True, impl, world)
        large = dispatch.build_impl(program_called("view"), (256,), FORWARD, False, True, impl, world)
        for workload in (small, large, small, large):
            result: Any = workload.run()
            assert result.device_mesh.size() == (8 if workload is small else 256)
            assert workload.check is not None and workload.check() is None


# ---- wrong results ----


@pytest.mark.parametrize("operator", ["detach", "inplace", "view", "random", "custom_handler"])
@pytest.mark.parametrize("impl", ["core", "torch"])
def test_check_detects_a_result_that_differs_from_plain_torch(world: Any, operator: str, impl: str):
    check, call = built(world, operator, impl)
    assert check(call) is None

    def spoiled(*inputs: Any) -> Any:
        result = call.func(*inputs)
        if type(inputs[0]) is torch.Tensor:  # plain torch, which the result is compared with
            return result
        return not result if isinstance(result, bool) else result + 1

    assert "expected" in str(check(partial(spoiled, *call.args)))
    plain = partial(lambda *inputs: call.func(*(getattr(t, "_local_tensor", t) for t in inputs)), *call.args)
    if operator != "custom_handler" and impl == "torch":
        assert "plain Tensor, expected a DTensor" in str(check(plain))


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_check_detects_a_wrong_conversion(world: Any, impl: str):
    check, call = built(world, "to_from_local", impl)
    assert check(call) is None
    assert "expected 1" in str(check(lambda: [call()[0] + 1]))
    assert "expected a DTensor" in str(check(lambda: [call()[0].to_local()]))


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_check_detects_a_wrong_result_of_each_collective(world: Any, impl: str):
    check, call = built(world, "collectives", impl)
    right = call()
    assert check(lambda: right) is None

    def message(index: int, result: Any) -> str:
        return str(check(lambda: [*right[:index], result, *right[index + 1 :]]))

    for index, other in enumerate((1, 0, 0, 0, 2)):  # with another placement
        assert f"result {index} is (" in message(index, right[other])
    for index in (0, 3):
        assert f"result {index} are wrong" in message(index, right[index] + 1)


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_check_detects_wrong_gradients(world: Any, impl: str):
    check, call = built(world, "add_backward", impl)
    assert check(call) is None
    leaves = call()
    assert "got 0, expected 1" in str(check(lambda: leaves))
    assert "got 2, expected 1" in str(check(lambda: (call(), call())[1]))


# ---- instructions ----


class FakeCounter:
    """Stand-in for torch's counter: the instructions of a call fall from 1400 to 1000 with the first calls.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._calls_at_start = -1

    def call(self) -> None:
        self.calls += 1

    def start(self) -> int:
        self._calls_at_start = self.calls
        return 100

    def end(self, identifier: int) -> int:
        assert identifier == 100 and self.calls == self._calls_at_start + 1
        return 1000 + 100 * max(5 - self.calls, 0)


def test_instructions_are_those_of_the_cheapest_of_nine_calls(world: Any, monkeypatch: pytest.MonkeyPatch):
    counter = FakeCounter()
    monkeypatch.setattr(torch._C, "_instruction_counter", counter)
    counters = count_instructions(counter.call)
    assert counters == {"instructions": 1000} and type(counters["instructions"]) is int
    assert counter.calls == 10  # the first does not count


def test_first_counted_call_is_left_out(monkeypatch: pytest.MonkeyPatch):
    counts = iter([50, *range(108, 99, -1)])
    counter = SimpleNamespace(start=lambda: 3, end=lambda _: next(counts))
    monkeypatch.setattr(torch._C, "_instruction_counter", counter)
    assert count_instructions(lambda: None) == {"instructions": 100}


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_instructions_are_counted_apart_from_the_samples(
    world: Any, impl: str, monkeypatch: pytest.MonkeyPatch
):
    ends: list[int] = []
    counter = SimpleNamespace(start=lambda: 3, end=lambda _: ends.append(1) or 1000 + len(ends))
    monkeypatch.setattr(torch._C, "_instruction_counter", counter)
    workload = dispatch.build_impl(program_called("view"), (256,), FORWARD, False, True, impl, world)
    workload.run()
    assert ends == [] and workload.counters is not None
    assert workload.counters() == {"instructions": 1002} and len(ends) == 10
    other = next(program for program in PROGRAMS if program.name == "dropout")
    assert dispatch.build_impl(other, (8,), FORWARD, False, True, impl, world).counters is None


def print_and_fail(_identifier: int) -> int:
    """Fails as torch's C++ code does: a line on file descriptor 2, and -1 as an unsigned number of 64 bits."""
    os.write(2, b"Error disabling perf event: Bad file descriptor\n")
    return 2**64 - 1


counts_then_fails = iter([100] * 9 + [2**64 - 1])


@pytest.mark.parametrize(
    "counter",
    [
        None,
        SimpleNamespace(start=lambda: -1, end=print_and_fail),
        SimpleNamespace(start=lambda: 3, end=lambda _: 0),
        SimpleNamespace(start=lambda: 3, end=lambda _: next(counts_then_fails)),
    ],
    ids=["no module", "refused", "standing still", "failing later"],
)
def test_no_instructions_without_a_working_counter(
    counter: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch._C, "_instruction_counter", counter)
    assert count_instructions(lambda: None) == {}
    os.write(2, b"still open")
    assert capfd.readouterr() == ("", "still open")


def test_counting_restores_stderr_after_an_error(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ZeroDivisionError):
        count_instructions(lambda: 1 // 0)
    os.write(2, b"still open")
    assert capfd.readouterr().err == "still open"


def test_counter_of_this_machine_counts_or_is_left_out(capfd: pytest.CaptureFixture[str]):
    counters = count_instructions(lambda: sum(range(1000)))
    assert not counters or counters["instructions"] > 1000
    assert capfd.readouterr().err == ""
