"""The fsdp suite: its cases and worlds, its check against plain torch, and the times of its stages."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from dtbench.engine.rank_votes import simulated_world, world_of_one
from dtbench.records.run import read_run
from dtbench.suite import RunOptions, Skip
from dtbench.suite.registry import load
from dtbench.tests.programs import start
from dtbench_suites import fsdp

CPU = torch.device("cpu")
IMPLS = ("core", "torch", "local")


@pytest.fixture
def world() -> Iterator[Any]:
    with simulated_world(CPU) as simulated:
        yield simulated


def test_cases_run_on_simulated_ranks_and_on_the_ranks_of_the_run() -> None:
    (suite,) = load(["fsdp"])
    cases = list(suite.cases(RunOptions((("dp", 2), ("tp", 2)), ())))
    swept = {(groups, params) for groups in (1, 8, 32) for params in (1, 8, 64)}
    for group, ranks, world in (("simulated", 8, "simulated"), ("real", 4, "ranks")):
        of_group = [case for case in cases if case.params["group"] == group]
        assert {(case.params["groups"], case.params["params"]) for case in of_group} == swept
        assert {(case.params["ranks"], case.world) for case in of_group} == {(ranks, world)}
    without_core = [case.params for case in cases if "core" not in case.build]
    assert {(p["group"], p["groups"] * p["params"] > 64) for p in without_core} == {("real", True)}
    on_one_rank = suite.cases(RunOptions((("tp", 1),), (), quick=True))
    assert {case.params["group"] for case in on_one_rank} == {"simulated"}


@pytest.mark.parametrize("impl", IMPLS)
def test_check_compares_parameters_after_a_step_with_plain_torch(impl: str) -> None:
    with world_of_one(CPU) as (world, _):
        workload = fsdp.build_impl(3, 2, impl, world)
        assert workload.check is not None
        assert [workload.check() for _ in range(2)] == [None, None]
        right, calls = fsdp.Group.forward, itertools.count()

        def forward(
            group: Any, x: torch.Tensor
        ) -> torch.Tensor:  # wrong by 1 % in the first group of the model
            return right(group, x) * (1 if next(calls) else 1.01)

        with mock.patch.object(fsdp.Group, "forward", forward):
            assert "are wrong" in str(workload.check())


@pytest.mark.parametrize("impl", IMPLS)
def test_check_on_simulated_ranks_accepts_sharded_gradients(world: Any, impl: str) -> None:
    workload = fsdp.build_impl(2, 3, impl, world)
    assert workload.check is not None and workload.check() is None


@pytest.mark.parametrize("groups", [1, 3])
def test_stage_times_are_those_of_the_hooks_alone(
    world: Any, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    workload = fsdp.build_impl(groups, 2, "torch", world)
    hooks = {stage: getattr(FSDPParamGroup, stage) for stage in fsdp.STAGES}
    for number, stage in enumerate(fsdp.STAGES):

        def hook(group: Any, *args: Any, stage: str = stage, number: int = number, **kwargs: Any) -> Any:
            clock[0] += 10.0**number  # a hook within another one would add to both
            return hooks[stage](group, *args, **kwargs)

        monkeypatch.setattr(FSDPParamGroup, stage, hook)
    wrapped = {stage: getattr(FSDPParamGroup, stage) for stage in fsdp.STAGES}
    monkeypatch.setattr(fsdp.timeit, "default_timer", lambda: clock[0])
    monkeypatch.setattr(fsdp.timeit, "timeit", lambda step, number: (step(), 5000.0)[1])
    assert workload.counters is not None
    assert workload.counters() == {
        **{f"stage_s:{stage}": groups * 10.0**number for number, stage in enumerate(fsdp.STAGES)},
        "stage_s:rest": 5000.0 - groups * 1111.0,
        "stage_s:recorded step": 5000.0,
    }
    assert {stage: getattr(FSDPParamGroup, stage) for stage in fsdp.STAGES} == wrapped


def test_fastest_recorded_step_counts(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = iter([4.0, 2.0, 3.0, 5.0])
    monkeypatch.setattr(fsdp.timeit, "timeit", lambda step, number: next(totals))
    times = fsdp.stage_times(lambda: None)
    assert (times["stage_s:recorded step"], times["stage_s:rest"], times["stage_s:pre_forward"]) == (
        2.0,
        2.0,
        0.0,
    )


def test_torch_without_a_hook_is_skipped_with_its_name(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPParamGroup, "post_forward")
    with pytest.raises(Skip, match=r"has no FSDPParamGroup\.post_forward, which this suite times"):
        fsdp.build_impl(1, 1, "torch", world)


def test_run_on_gloo_ranks_measures_both_worlds(tmp_path: Path) -> None:
    words = ["run", "fsdp", "--quick", "--nproc", "2", "--device", "cpu", "-o", "run.jsonl", "--filter"]
    done = start(*words, "groups=2 params=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on 2 cpu ranks (tp=2), part of fsdp in one process" in done.stdout
    results = read_run(tmp_path / "run.jsonl").results
    assert [(r.params["group"], r.impl, r.status, len(r.rank_samples_s)) for r in results] == [
        *(("simulated", impl, "ok", 0) for impl in IMPLS),
        *(("real", impl, "ok", 2) for impl in IMPLS),
    ]
    for result in results:
        stages = {
            name.removeprefix("stage_s:"): s for name, s in result.counters.items() if "stage_s" in name
        }
        assert bool(stages) == (result.impl == "torch")
        total_s = stages.pop("recorded step", 0.0)
        assert sum(stages.values()) == pytest.approx(total_s) and min(stages.values(), default=0.0) >= 0
