"""The coverage suite: what the judge sees, how samples are placed, workers that die, the command line."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("expecttest", reason="torch's op database imports it")

import dtbench_core as core
from dtbench.cli.program import cli
from dtbench.comparison.op_verdicts import MODES
from dtbench.engine.options import RunRequest, split_words
from dtbench.engine.rank_run import run
from dtbench.records.verdicts import OpVerdict
from dtbench.suite.errors import UsageError
from dtbench_core.simulate import ThreadWorld
from dtbench_suites.coverage import judge, pool, samples
from dtbench_suites.coverage.verdicts import RANKS, Caps, Case, Job, summarize

CAPS = Caps(2, 4)


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    with ThreadWorld(RANKS) as made:
        yield made


def judged(world: ThreadWorld, job: Job) -> OpVerdict:
    return summarize(job, list(judge.judge_op(world, job)))


class MadeUpOp:
    """An op that is `plain` on tensors and `distributed` on DTensors."""

    name, variant_test_name = "made_up", ""
    supports_autograd = True
    supports_out = False

    def __init__(self, distributed: Callable[[Any], Any], plain: Callable[[Any], Any] | None = None) -> None:
        self._distributed, self._plain = distributed, plain or distributed
        self.inplace_variant = self.op

    def op(self, x: Any, *args: Any) -> Any:
        return (self._distributed if isinstance(x, core.DTensor) else self._plain)(x)

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> Iterator[Any]:
        from torch.testing._internal.opinfo.core import SampleInput

        for shape in ((4, 8), (8,)):
            yield SampleInput(torch.randn(shape, dtype=dtype, device=device, requires_grad=requires_grad))


@pytest.fixture
def verdict_on(world: ThreadWorld, monkeypatch: pytest.MonkeyPatch) -> Callable[..., OpVerdict]:
    def judge_it(
        distributed: Callable[[Any], Any], plain: Callable[[Any], Any] | None = None, mode: str = "even"
    ) -> OpVerdict:
        monkeypatch.setitem(samples.database(), "made_up", MadeUpOp(distributed, plain))
        return judged(world, Job("made_up", mode, "core", CAPS))

    return judge_it


# ---- what the judge sees ----


def _relabelled(x: Any) -> Any:
    """A shard that claims to be the whole."""
    whole = torch.zeros(x.shape)
    whole[: x.to_local().shape[0]] = x.to_local()[:1].flatten()[0]
    return core.DTensor.from_local(whole, x.device_mesh, [core.Replicate()], run_check=False)


def _on_rank_2(error: Exception) -> Callable[[Any], Any]:
    def distributed(x: Any) -> Any:
        if dist.get_rank() == 2:
            raise error
        dist.barrier()
        return x.sum()

    return distributed


def _off_on_rank_1(x: Any) -> Any:
    """Right with the others, who go on to the gradients, where they wait for each other."""
    whole = x.redistribute(x.device_mesh, [core.Replicate()])
    return whole + float(dist.get_rank() == 1)


def _raises(error: Exception) -> Callable[[Any], Any]:
    def distributed(x: Any) -> Any:
        raise error

    return distributed


def _noise_of_the_rank(x: Any) -> Any:
    torch.rand(1 + dist.get_rank())
    local = x.to_local() + torch.rand(x.to_local().shape)
    return core.DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


@pytest.mark.parametrize(
    ("distributed", "plain", "verdict", "reason"),
    [
        (lambda x: x * 2, None, "pass", ""),
        (lambda x: x * 2.01, lambda x: x * 2, "wrong", "elements differ"),
        (lambda x: x.double(), lambda x: x * 1, "wrong", "got torch.float64, expected torch.float32"),
        (lambda x: x.sum(), lambda x: x * 1, "wrong", "got shape []"),
        (lambda x: (x, x), lambda x: x * 1, "wrong", "got 2 results, expected 1"),
        (lambda x: x.detach() * 2, lambda x: x * 2, "wrong", "backward: no result requires grad"),
        (lambda x: x.detach() + x, lambda x: x * 2, "wrong", "backward: the gradient of input 0"),
        (_relabelled, lambda x: x * 1, "wrong", "result 0"),
        (
            _on_rank_2(ValueError("no")),
            torch.sum,
            "hang",
            "rank 2 raised ValueError: no while ranks 0, 1, 3 waited",
        ),
        (_off_on_rank_1, lambda x: x * 1, "wrong", "elements differ"),
        (_raises(RuntimeError("broken")), torch.sum, "error", "RuntimeError: broken"),
        (_raises(NotImplementedError("later")), torch.sum, "no rule", "later"),
        (_raises(RuntimeError("op does not have a sharding strategy")), torch.sum, "no rule", "strategy"),
        (_raises(core.PlacementError("cannot")), torch.sum, "refused", "cannot"),
        (_noise_of_the_rank, lambda x: x + torch.rand_like(x), "random differs", "elements differ"),
        (lambda x: x + torch.zeros(3, 3), lambda x: x * 1, "error", "MixedTensorError"),
    ],
)
def test_the_judge_sees(
    verdict_on: Callable[..., OpVerdict], distributed: Any, plain: Any, verdict: str, reason: str
) -> None:
    got = verdict_on(distributed, plain)
    assert set(got.cases) == {verdict} and got.not_judged == 0, got
    assert reason in got.reason


def test_an_op_without_anything_to_compare_is_no_verdict(verdict_on: Callable[..., OpVerdict]) -> None:
    got = verdict_on(lambda x: x, lambda x: x.to_sparse())
    assert (got.verdict, got.samples, got.result().status) == ("n/a", 0, "skipped")


def test_a_sample_whose_plain_op_raises_is_not_judged(verdict_on: Callable[..., OpVerdict]) -> None:
    got = verdict_on(lambda x: x, _raises(RuntimeError("not for these")))
    assert (got.verdict, got.cases, got.samples, got.not_judged) == ("n/a", {}, 2, 2)
    assert "the plain op raises RuntimeError: not for these" in got.reason
    some = verdict_on(lambda x: x * 1, lambda x: _raises(ValueError("flat"))(x) if x.ndim == 1 else x * 1)
    assert (some.verdict, some.samples, some.not_judged) == ("pass", 2, 1)
    assert OpVerdict.of(some.result()) == some


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("no gradient here")


def test_a_sample_whose_plain_gradient_raises_is_not_judged(verdict_on: Callable[..., OpVerdict]) -> None:
    """Its values are: a wrong one is seen, a right one does not hide that gradients were not compared."""
    got = verdict_on(lambda x: x * 2, _NoGradient.apply)
    assert (got.verdict, got.samples, got.not_judged) == ("pass", 2, 2)
    assert "backward: the plain gradient raises RuntimeError: no gradient here" in got.reason
    assert set(verdict_on(lambda x: x * 3, _NoGradient.apply).cases) == {"wrong"}


def test_samples_that_end_with_an_error_are_not_judged(
    world: ThreadWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(MadeUpOp):
        def sample_inputs(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            yield from super().sample_inputs("cpu", torch.float32, False)
            raise IndexError("no such part")

    monkeypatch.setitem(samples.database(), "made_up", Broken(lambda x: x * 2))
    got = judged(world, Job("made_up", "even", "core", CAPS))
    assert (got.verdict, got.samples, got.not_judged) == ("pass", 3, 1)
    assert "the samples end with IndexError: no such part" in got.reason


def test_the_worst_case_is_the_verdict_of_the_op() -> None:
    cases = [
        Case(0, (("R",),), "pass"),
        Case(1, (("S(0)",), ("R",)), "no rule", "forward", "none"),
        Case(2, (("S(1)",),), "hang", "backward", "first"),
        Case(3, (("S(1)",),), "hang", "backward", "second"),
    ]
    got = summarize(Job("op", "even", "core", CAPS), cases)
    assert got.verdict == "hang" and got.reason == "sample 2, S(1): backward: first"
    assert got.cases == {"hang": 2, "no rule": 1, "pass": 1}
    counted = {"hang": 2, "no rule": 1, "pass": 1, "samples": 4}
    assert (got.result().status, got.result().counters) == ("failed", counted)


@pytest.mark.parametrize("impl", ["core", "torch"])
@pytest.mark.parametrize("mode", MODES)
def test_a_plain_op_passes_in_every_mode(world: ThreadWorld, mode: str, impl: str) -> None:
    judge.quiet()
    got = judged(world, Job("mul", mode, impl, Caps(3, 3)))
    if (mode, impl) == ("order", "torch"):  # takes a group's ranks for coordinates, and cuts the wrong parts
        assert got.verdict == "wrong", got
    else:
        assert got.verdict == "pass" and got.cases["pass"] >= 3 and got.not_judged == 0, got


@pytest.mark.parametrize(
    ("got", "wanted", "problem"),
    [
        (torch.ones(3), torch.ones(3), ""),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), ""),
        (torch.tensor([1e-5, 100.0]), torch.tensor([0.0, 100.0]), ""),  # within the scale of the tensor
        (torch.tensor([1.0, 100.0]), torch.tensor([2.0, 100.0]), "1 of 2 elements differ"),
        (torch.tensor([torch.nan]), torch.tensor([1.0]), "1 of 1"),
        (torch.tensor([torch.inf]), torch.tensor([1.0]), "1 of 1"),
        (torch.tensor([1]), torch.tensor([2]), "1 of 1"),
        (torch.tensor([1j]), torch.tensor([-1j]), "elements differ"),
        (torch.ones(3), torch.ones(3, 1), "got shape [3], expected [3, 1]"),
        (torch.ones(3), 1.0, "got a tensor, expected float"),
        (3, torch.ones(3), "got int, expected a tensor"),
        (3, 3, ""),
        (3, 4, "got 3, expected 4"),
        (float("nan"), float("nan"), ""),
    ],
)
def test_differences(got: Any, wanted: Any, problem: str) -> None:
    found = judge.difference(got, wanted)
    assert problem in found and bool(found) == bool(problem)


def test_what_float32_cannot_tell_is_not_wrong() -> None:
    wanted, got = torch.tensor([1e-5, 1.0]), torch.tensor([1e-3, 1.0])
    assert judge.difference(got, wanted)
    steep = wanted + 1.3e-4  # what the plain op gives for inputs that differ in their last bits
    assert judge.difference(got, wanted, lambda: steep) == ""
    assert judge.difference(got + 0.1, wanted, lambda: wanted + 10.0)  # but not any difference
    nudged = judge._nudged(torch.ones(100))
    assert 0 < float((nudged - 1).abs().max()) < 1e-6 and 0.0 < float((nudged > 1).float().mean()) < 1.0


# ---- samples and placements ----


def test_samples_are_the_same_every_time_and_fit_their_mode() -> None:
    even = samples.samples_of("add", "even", 4)[0]
    assert len(even) == 4
    uneven = samples.samples_of("add", "uneven", 4)[0]
    again = samples.samples_of("add", "even", 4)[0]
    for one, other in zip(even, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.values, other.values, strict=True))
    assert all(size % RANKS == 0 for one in even for value in one.values for size in value.shape if size > 2)
    assert any(size % RANKS for one in uneven for value in one.values for size in value.shape)
    assert samples.has_mode("add", "inplace") and not samples.has_mode("nn.functional.dropout", "out")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("inplace", "out")])
def test_placements_fit_their_mode(mode: str) -> None:
    tensors = [torch.ones(4, 5, 8), torch.ones(5, 8), torch.ones(8, dtype=torch.int64), torch.ones(())]
    found = samples.places_of(tensors, mode, 40, "salt")
    assert found == samples.places_of(tensors, mode, 40, "salt")
    assert 40 >= len(found) == len(set(found)) > 6
    for places in found:
        for place, tensor in zip(places, tensors, strict=True):
            shards = [int(p[2:-1]) for p in place if p.startswith("S")]
            ways = 2 if mode == "mesh2x2" else RANKS
            any_size = mode in ("uneven", "order", "strided", "from_local")
            for dim in shards:
                assert any_size or tensor.shape[dim] % ways ** shards.count(dim) == 0
            assert not any(p.startswith("P") for p in place) or tensor.is_floating_point()
    flat = {p for places in found for place in places for p in place}
    assert ("P(sum)" in flat and "S(0)" not in flat) if mode == "partial" else "S(0)" in flat
    if mode == "uneven":
        assert "S(1)" in {place[0] for places in found for place in places[:1]}  # 5 rows on 4 ranks
    assert Case(0, found[0], "pass").describe().count("|") == 3


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_the_parts_of_a_partial_tensor_make_the_tensor(op: str) -> None:
    full = torch.cat([torch.randn(100), torch.tensor([1e-30, 1e30, 3e38, -2.0, 0.0, torch.inf, -torch.inf])])
    if op == "avg":
        full = full[full.abs() != 3e38]  # four times that is too much
    parts = torch.stack([judge._part(full.clone(), op, rank) for rank in range(RANKS)])
    whole = parts[0] + parts[1] + parts[2] + parts[3]
    assert torch.equal({"sum": whole, "avg": whole / RANKS, "max": parts.amax(0)}[op], full)
    assert len({tuple(part.tolist()) for part in parts}) == RANKS


# ---- workers ----


def test_a_dead_worker_costs_one_verdict() -> None:
    jobs = [Job(op, "even", "core", Caps(1, 1)) for op in ("no such op", "abs", "neg")]
    found = {result.op: result for result in pool.judge_all(jobs, 1)}
    assert found["no such op"].verdict == "error" and "KeyError" in found["no such op"].reason
    assert found["abs"].verdict == found["neg"].verdict == "pass"


@pytest.mark.parametrize(("computed_s", "verdict"), [(1, "error"), (0, "hang")])
def test_a_worker_that_takes_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch, computed_s: int, verdict: str
) -> None:
    times = itertools.count(step=computed_s)
    monkeypatch.setattr(pool.Worker, "_cpu_s", lambda worker: next(times))
    jobs = [Job("nn.functional.conv2d", "even", "core", Caps(12, 8))]
    [result] = pool.judge_all(jobs, 1, timeout_s=0.05)
    assert result.verdict == verdict and "no answer within" in result.reason


# ---- the command line ----


def _do(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Exit code and output of a command, in this process, which has torch's op database already."""
    code = cli.main(args, standalone_mode=False)
    return code or 0, capsys.readouterr().out


def test_a_run_its_table_and_its_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table, baseline = (tmp_path / name for name in ("run.jsonl", "table.md", "baseline.json"))
    options = [
        "--impl",
        "core",
        "--mode",
        "even,inplace",
        "--ops",
        "^(abs|mean)$",
        "--samples=2",
        "--places",
        "2",
    ]
    code, said = _do(capsys, "run", "coverage", *options, "-o", str(path))
    assert code == 0, said
    assert "3 results to measure" in said and "3 ok" in said
    code, said = _do(capsys, "run", "coverage", *options, "-o", str(path), "--resume")
    assert code == 0 and "is complete already" in said
    assert "100.0%" in _do(capsys, "show", str(path))[1]

    code, said = _do(capsys, "coverage", str(path), "-o", str(table), "-o", str(baseline))
    assert code == 0, said
    assert "| abs | pass | pass |" in table.read_text() and "| mean | pass |  |" in table.read_text()
    code, said = _do(capsys, "coverage", str(path), "--base", str(baseline))
    assert code == 0 and "0 worse" in said

    known = json.loads(baseline.read_text())
    known["verdicts"]["argsort"] = {"even": "pass"}
    baseline.write_text(json.dumps(known))
    code, said = _do(capsys, "coverage", str(path), "--base", str(baseline))
    assert code == 1 and "worse: argsort (even): was pass, is not measured" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("coverage --mode odd", "--mode has odd"),
        ("coverage --ops (", "no regular expression"),
        ("coverage --ops=^no.such.op$", "nothing to measure"),
        ("coverage --samples 0", "expected a number of at least 1"),
        ("coverage --mode", "--mode needs a value"),
        ("coverage --mode even --mode out", "--mode is given twice"),
        ("coverage dispatch", "give it a run of its own"),
        ("dispatch --mode even", "No such option '--mode'"),
    ],
)
def test_options_that_cannot_be_followed(words: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        suites, own = split_words(words.split())
        run(RunRequest(suites=suites, suite_options=own, output=tmp_path / "run.jsonl"), [])
    assert not (tmp_path / "run.jsonl").exists()


def test_options_about_ranks_are_refused(tmp_path: Path) -> None:
    own, output = {"ops": "^add$"}, tmp_path / "run.jsonl"
    options = RunRequest(suites=("coverage",), suite_options=own, nproc=2, launches=2, output=output)
    with pytest.raises(UsageError, match="coverage starts no ranks: leave --nproc, --launches out"):
        run(options, [])


def test_inputs_of_strided_modes_lie_in_memory_as_they_say() -> None:
    full = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(samples.transposed(full), full) and samples.transposed(full).stride() == (1, 2, 6)
    assert torch.equal(samples.stepped(full), full) and samples.stepped(full).stride() == (24, 8, 2)
    for mode, lay in (("strided", samples.transposed), ("from_local", samples.stepped)):
        one = samples.samples_of("nn.functional.gelu", mode, 3)[0][0].values[0]
        assert one.stride() == lay(one.contiguous()).stride()
