"""The tool that judges every op: what it sees of an op, workers that die or hang, what became worse."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("expecttest", reason="torch's op database imports it")

import dtbench_core as core
from core.tests.coverage import judge, pool, samples
from core.tests.coverage.__main__ import became_worse, main
from core.tests.coverage.judge import OpOutcome, difference, judge_op
from core.tests.coverage.samples import MODES, RANKS
from dtbench_core.simulate import ThreadWorld

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    with ThreadWorld(RANKS) as ranks:
        yield ranks


class FakeOp:
    """An op that is `plain` on tensors and `distributed` on DTensors."""

    supports_autograd, supports_out = True, False

    def __init__(self, distributed: Callable[[Any], Any], plain: Callable[[Any], Any]) -> None:
        self._distributed, self._plain = distributed, plain
        self.inplace_variant = self.op

    def op(self, x: Any, *args: Any) -> Any:
        return (self._distributed if isinstance(x, core.DTensor) else self._plain)(x)

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> Iterator[Any]:
        from torch.testing._internal.opinfo.core import SampleInput

        for shape in ((4, 8), (8,)):
            yield SampleInput(torch.randn(shape, dtype=dtype, device=device, requires_grad=requires_grad))


@pytest.fixture
def judged(world: ThreadWorld, monkeypatch: pytest.MonkeyPatch) -> Callable[..., OpOutcome]:
    def judge_it(distributed: Callable[[Any], Any], plain: Callable[[Any], Any]) -> OpOutcome:
        monkeypatch.setitem(samples.database(), "fake", FakeOp(distributed, plain))
        return judge_op(world, "core", "fake", "even", 2, 4)

    return judge_it


def _shard_as_whole(x: Any) -> Any:
    whole = torch.zeros(x.shape)
    whole[: x.to_local().shape[0]] = x.to_local()[:1].flatten()[0]
    return core.DTensor.from_local(whole, x.device_mesh, [core.Replicate()], run_check=False)


def _rank_2_raises(x: Any) -> Any:
    if dist.get_rank() == 2:
        raise ValueError("no")
    dist.barrier()
    return x.sum()


def _raises(error: Exception) -> Callable[[Any], Any]:
    def op(x: Any) -> Any:
        raise error

    return op


def _noise_of_the_rank(x: Any) -> Any:
    local = x.to_local() + torch.rand(x.to_local().shape) + dist.get_rank()
    shape, stride = x.shape, x.stride()
    return core.DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride
    )


@pytest.mark.parametrize(
    ("distributed", "plain", "verdict", "reason"),
    [
        (lambda x: x * 2, lambda x: x * 2, "pass", ""),
        (lambda x: x * 2.01, lambda x: x * 2, "wrong", "elements differ"),
        (lambda x: x.double(), lambda x: x * 1, "wrong", "got torch.float64"),
        (lambda x: x.sum(), lambda x: x * 1, "wrong", "of []"),
        (lambda x: (x, x), lambda x: x * 1, "wrong", "got 2 results, expected 1"),
        (lambda x: x.detach() * 2, lambda x: x * 2, "wrong", "no result requires grad"),
        (lambda x: x.detach() + x, lambda x: x * 2, "wrong", "gradient 0"),
        (_shard_as_whole, lambda x: x * 1, "wrong", "result 0"),
        (_rank_2_raises, torch.sum, "hang", "rank 2 raised ValueError: no while ranks 0, 1, 3 waited"),
        (_raises(RuntimeError("broken")), torch.sum, "error", "RuntimeError: broken"),
        (_raises(NotImplementedError("later")), torch.sum, "no rule", "later"),
        (_raises(core.PlacementError("cannot")), torch.sum, "refused", "cannot"),
        (_noise_of_the_rank, lambda x: x + torch.rand_like(x), "random differs", "elements differ"),
    ],
)
def test_a_wrong_op_is_seen(judged: Any, distributed: Any, plain: Any, verdict: str, reason: str) -> None:
    outcome = judged(distributed, plain)
    assert set(outcome.cases) == {verdict} and (outcome.samples, outcome.not_judged) == (2, 0)
    assert reason in outcome.reasons[verdict]


def test_samples_whose_plain_op_raises_are_counted(judged: Any) -> None:
    outcome = judged(lambda x: x, _raises(RuntimeError("not for these")))
    assert (outcome.verdict, outcome.samples, outcome.not_judged) == ("n/a", 2, 2)
    assert judged(lambda x: x, lambda x: x.to_sparse()).samples == 0


@pytest.mark.parametrize("impl", ["core", "torch"])
@pytest.mark.parametrize("mode", MODES)
def test_a_plain_op_passes_in_every_mode(world: ThreadWorld, mode: str, impl: str) -> None:
    outcome = judge_op(world, impl, "mul", mode, 2, 3)
    # torch takes a group's ranks for coordinates, and cuts the wrong parts.
    assert outcome.verdict == ("wrong" if (mode, impl) == ("order", "torch") else "pass"), outcome


@pytest.mark.parametrize(
    ("got", "wanted", "problem"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), ""),
        (torch.tensor([1e-5, 100.0]), torch.tensor([0.0, 100.0]), ""),  # within the scale of the tensor
        (torch.tensor([1.0, 100.0]), torch.tensor([2.0, 100.0]), "1 of 2 elements differ"),
        (torch.tensor([torch.inf]), torch.tensor([1.0]), "1 of 1"),
        (torch.tensor([1]), torch.tensor([2]), "1 of 1"),
        (torch.tensor([1j]), torch.tensor([-1j]), "elements differ"),
        (3, torch.ones(3), "got a int, expected a Tensor"),
        (3, 4, "got 3, expected 4"),
        (float("nan"), float("nan"), ""),
    ],
)
def test_differences(got: Any, wanted: Any, problem: str) -> None:
    seen = difference(got, wanted)
    assert problem in seen and bool(seen) == bool(problem)


def test_what_float32_cannot_tell_is_not_wrong() -> None:
    wanted, got = torch.tensor([1e-5, 1.0]), torch.tensor([1e-3, 1.0])
    assert difference(got, wanted)
    assert (
        difference(got, wanted, wanted + 1.3e-4) == ""
    )  # the plain op for inputs that differ in their last bits
    assert difference(got + 0.1, wanted, wanted + 10.0)  # but not any difference


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_the_parts_of_a_partial_tensor_make_the_tensor(op: str) -> None:
    full = torch.cat([torch.randn(100), torch.tensor([1e-30, 1e30, -2.0, 0.0, torch.inf, -torch.inf])])
    parts = torch.stack([judge._part(full.clone(), op, rank) for rank in range(RANKS)])
    whole = parts[0] + parts[1] + parts[2] + parts[3]
    assert torch.equal({"sum": whole, "avg": whole / RANKS, "max": parts.amax(0)}[op], full)


# ---- workers ----


def test_a_worker_that_dies_or_hangs_costs_one_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_serve", _serve_badly)
    jobs: list[pool.OpJob] = [("core", op, "even", 1, 1) for op in ("crashes", "hangs", "abs")]
    outcomes = {job[1]: outcome for job, outcome in pool.judge_all(jobs, 1, timeout_s=1.0)}
    assert {op: outcome.verdict for op, outcome in outcomes.items()} == {
        "crashes": "error",
        "hangs": "error",
        "abs": "pass",
    }
    assert outcomes["crashes"].reasons["error"] == f"the process ended with code {-signal.SIGKILL}"
    assert outcomes["hangs"].reasons["error"] == "no answer within 1 s"


def _serve_badly(connection: Any) -> None:
    connection.send(OpOutcome())
    while True:
        op = connection.recv()[1]
        if op == "crashes":
            os.kill(os.getpid(), signal.SIGKILL)
        if op == "hangs":
            time.sleep(60)
        outcome = OpOutcome()
        outcome.add("pass", "")
        connection.send(outcome)


# ---- against the committed table ----


@pytest.mark.parametrize(
    ("before", "after", "worse", "better"),
    [
        ("pass", "pass", 0, 0),
        ("pass", "refused", 1, 0),
        ("pass", "n/a", 1, 0),
        ("no rule", "pass", 0, 1),
        ("no rule", "error", 0, 0),
        ("error", "hang", 1, 0),
        ("error", "not measured", 1, 0),
        ("wrong", "wrong", 0, 0),
    ],
)
def test_what_became_worse(before: str, after: str, worse: int, better: int) -> None:
    was, now = (
        {"torch": "2", "options": {}, "samples": 1, "not_judged": {}, "verdicts": {"add": {"even": v}}}
        for v in (before, after)
    )
    lines = [f"add (even): was {before}, is {after}"] * worse
    assert became_worse(was, now) == (lines, better)


def test_a_worker_judges_and_its_table_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, page = tmp_path / "table.json", tmp_path / "page.md"
    words = ["--ops", "^(abs|mean)$", "--mode", "even,inplace", "--workers", "1", "--samples=2", "--places=2"]
    assert main([*words, "--impl", "core,torch", "-o", str(table), str(page)]) == 0
    assert json.loads(table.read_text())["verdicts"] == {
        "abs": {"even": "pass", "inplace": "pass"},
        "mean": {"even": "pass"},
    }
    assert "| even | torch | 0 |" in page.read_text()
    known = json.loads(table.read_text())
    known["verdicts"]["argsort"] = {"even": "pass"}
    table.write_text(json.dumps(known))
    capsys.readouterr()
    assert main([*words, "--base", str(table)]) == 1
    assert "worse: argsort (even): was pass, is not measured" in capsys.readouterr().out
