"""The tool that judges every op: verdicts, workers that die or hang, comparison with a base."""

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
from core.tests.coverage import __main__ as tool
from core.tests.coverage import samples
from core.tests.coverage.judge import OpOutcome, difference, judge_op
from core.tests.coverage.samples import RANKS
from dtbench_core.simulate import ThreadWorld

pytestmark = pytest.mark.filterwarnings("ignore")
TABLE = json.loads(Path("results/coverage-core.json").read_text())


class FakeOp:
    """An op that is `plain` on tensors and `distributed` on DTensors."""

    supports_autograd, supports_out, inplace_variant = True, False, None

    def __init__(self, distributed: Callable[[Any], Any], plain: Callable[[Any], Any]) -> None:
        self.op = lambda x: (distributed if isinstance(x, core.DTensor) else plain)(x)

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> Iterator[Any]:
        from torch.testing._internal.opinfo.core import SampleInput

        for shape in ((4, 8), (8,)):
            yield SampleInput(torch.randn(shape, dtype=dtype, device=device, requires_grad=requires_grad))


def _rank_2_raises(x: Any) -> Any:
    if dist.get_rank() == 2:
        raise ValueError("no")
    dist.barrier()
    return x.sum()


def _raises(error: Exception) -> Callable[[Any], Any]:
    def op(x: Any) -> Any:
        raise error

    return op


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
        (_rank_2_raises, torch.sum, "hang", "rank 2 raised ValueError: no while ranks 0, 1, 3 waited"),
        (_raises(RuntimeError("broken")), torch.sum, "error", "RuntimeError: broken"),
        (_raises(NotImplementedError("later")), torch.sum, "no rule", "later"),
        (_raises(core.PlacementError("cannot")), torch.sum, "refused", "cannot"),
        (lambda x: x * 2, lambda x: x + torch.rand_like(x), "random differs", "elements differ"),
        (lambda x: x, _raises(RuntimeError("not for these")), "n/a", ""),
    ],
)
def test_each_fault_of_an_op_has_its_verdict(
    monkeypatch: pytest.MonkeyPatch, distributed: Any, plain: Any, verdict: str, reason: str
) -> None:
    monkeypatch.setitem(samples.database(), "fake", FakeOp(distributed, plain))
    with ThreadWorld(RANKS) as world:
        outcome = judge_op(world, "core", "fake", "even")
    assert (outcome.verdict, len(outcome.cases)) == (verdict, verdict != "n/a")
    assert reason in outcome.reasons.get(verdict, "")


def test_difference_tolerates_float32_rounding() -> None:
    wanted, got = torch.tensor([1e-5, 1.0]), torch.tensor([1e-3, 1.0])
    assert difference(got, wanted) and not difference(got[1:] + 1e-5, wanted[1:])
    # By as much as the plain op changes when its inputs change in their last bits, but not by any amount.
    assert difference(got, wanted, wanted + 1.3e-4) == ""
    assert difference(got + 0.1, wanted, wanted + 10.0)


def _judge_badly(world: ThreadWorld, impl: str, op: str, mode: str) -> OpOutcome:
    if mode == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "hangs":
        time.sleep(60)
    return OpOutcome.of("pass", "")


def test_workers_that_die_or_hang_cost_one_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "judge_op", _judge_badly)
    jobs: list[tool.OpJob] = [("core", "a", ["even", "crashes", "out"]), ("core", "b", ["hangs"])]
    outcomes = {key[2]: outcome for key, outcome in tool.judge_all(jobs, 2, timeout_s=5.0)}
    verdicts = {mode: outcome.verdict for mode, outcome in outcomes.items()}
    assert verdicts == {"even": "pass", "crashes": "error", "out": "pass", "hangs": "error"}
    assert outcomes["crashes"].reasons["error"] == f"the process ended with code {-signal.SIGKILL}"
    assert outcomes["hangs"].reasons["error"] == "no answer within 5 s"


@pytest.mark.skipif(torch.__version__ != TABLE["torch"], reason="the committed table is of another torch")
def test_workers_judge_every_mode_and_write_tables(tmp_path: Path, capsys: Any) -> None:
    table, page, words = tmp_path / "table.json", tmp_path / "page.md", ["--ops", "^mul$"]
    assert tool.main([*words, "-o", str(table), "--base", "results/coverage-core.json"]) == 1
    assert json.loads(table.read_text())["verdicts"] == {"mul": dict.fromkeys(samples.MODES, "pass")}
    lines = capsys.readouterr().out
    assert "worse: add (even): was pass, is not measured" in lines and "worse: mul (" not in lines
    # torch takes a group's ranks for coordinates, and cuts the wrong parts.
    assert tool.main([*words, "--impl", "core,torch", "-o", str(page), "--base", str(table)]) == 0
    assert "| mul | pass / wrong: order |" in page.read_text()
