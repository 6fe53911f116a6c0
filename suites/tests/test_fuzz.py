"""The generator of random programs: what it finds, and how small that becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import dtbench_core as core
from dtbench_suites.compat import judge as compat
from dtbench_suites.compat.program import Entry, Given
from dtbench_suites.coverage.verdicts import Caps, Case, Job
from dtbench_suites.fuzz.__main__ import search
from dtbench_suites.fuzz.generate import Input, Program, program
from dtbench_suites.fuzz.judge import EAGER, judging, verdict_on_forks

Judge = Callable[[Program], tuple[str, str]]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Of eager programs, in this process."""
    with judging() as judged:

        def judge(one: Program) -> tuple[str, str]:
            case = next(iter(judged(Job(one.text(), EAGER, "core", Caps()))))
            assert not isinstance(case, int)
            return case.verdict, case.reason

        yield judge


def test_a_seed_has_its_programs() -> None:
    texts = [program(f"1/{number}", 0.5).text() for number in range(60)]
    assert texts == [program(f"1/{number}", 0.5).text() for number in range(60)]
    assert len({*texts}) > 50
    for word in (
        "@compiled",
        "from_local",
        "transposed",
        "grad=True",
        "mesh([[3, 2], [1, 0]])",
        "_(",
        "with refused()",
    ):
        assert any(word in text for text in texts), word


def test_no_part_is_compiled_where_a_base_got_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own tensor subclasses fail there, too."""
    for view, compiles in (("v1 = v0.split(1)[0]", False), ("v1 = v0 * 2", True)):
        lines = iter([view, "v0.t_()", "v2 = v1 * 2"])

        def statement(
            rng: object, space: dict[str, object], *_: object, lines: Iterator[str] = lines
        ) -> str | None:
            if (line := next(lines, None)) is not None:
                exec(line, space)
            return line

        monkeypatch.setattr("dtbench_suites.fuzz.generate._statement", statement)
        monkeypatch.setattr(
            "dtbench_suites.fuzz.generate._input", lambda rng, name, ndim: Input(name, (4, 6), ("R",), 1)
        )
        monkeypatch.setattr("random.Random.randint", lambda self, low, high: high)
        assert program("1", 1.0).compiles is compiles


def test_a_planted_fault_is_found_and_minimised(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core.DTensor, "flip", lambda self, *dims: self.clone(), raising=False)
    monkeypatch.setattr(
        "dtbench_suites.fuzz.__main__.program",
        lambda seed, *_: Program(
            "[[0, 1], [2, 3]]",
            (
                Input("v0", (5, 6), ("S(0)", "P(sum)"), seed=1, strides="transposed"),
                Input("v1", (3,), ("R", "R"), seed=2),
            ),
            ("v2 = v0.t()", "v3 = v1 * 2", "v2.mul_(3)", "v4 = v2.flip(0)", "v5 = v4.relu()", "v0.zero_()"),
        ),
    )
    assert search(judge, "1", 3, 0.0, ascending=True) > 0
    said = capsys.readouterr().out
    found = said.partition("\n")[2].partition("\n\n")[0].splitlines()
    assert "wrong: result 1" in said and said.count("mesh(") == 1  # the same find again is not printed
    assert [line.rpartition(" = ")[2] for line in found[2:]] == ["v0.flip(0)"]
    assert found[0] == "mesh([0, 1, 2, 3])" and "'R'" in found[1] and "transposed" not in found[1]


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("v1 = v0.softmax(0)", "pass"),
        ("with refused(): v0.softmax(7)", "pass"),
        ("with refused(): 1 / (0 if not hasattr(v0, 'full_tensor') else 1)", "error"),
        ("v1 = v0.no_such_method()", "n/a"),
        ("v0[0:1].copy_(v0 if isinstance(v0, torch.DTensor) else v0[0])", "n/a"),
        ("v1 = torch.ones(2) + v0", "refused"),
        ("v1 = v0 if not hasattr(v0, 'full_tensor') else 1 / 0", "error"),
        ("v1 = v0 * (2 if hasattr(v0, 'full_tensor') else 1)", "wrong"),
        (
            "v1 = v0 * (2 if torch.distributed.is_initialized() and torch.distributed.get_rank() else 1)",
            "wrong",
        ),
    ],
)
def test_verdicts(judge: Judge, line: str, verdict: str) -> None:
    one = Program("[0, 1, 2, 3]", (Input("v0", (2,), ("S(0)",), seed=1),), (line,))
    assert judge(one)[0] == (verdict if verdict != "n/a" else "not judged")


@pytest.mark.parametrize(
    ("line", "verdict"), [("v1 = v0.permute(*range(v0.ndim)[::-1])", "not judged"), ("v1 = v0 * 2", "error")]
)
def test_what_torch_compile_cannot_do_with_plain_tensors_is_not_judged(
    line: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = ["error"]

    def judge_program(entry: Entry, impl: str) -> Case:
        """The first is of distributed tensors."""
        if verdicts:
            return Case(None, (), verdicts.pop(), "", "of ours")
        try:
            entry.run(Given(impl, entry.backend))
        except torch._dynamo.exc.TorchRuntimeError as error:
            return Case(None, (), "error", "", str(error))
        return Case(None, (), "pass")

    monkeypatch.setattr(compat, "judge_program", judge_program)
    one = Program("[0, 1, 2, 3]", (Input("v0", (), ("R",), seed=1),), (line,), (0, 1))
    case = verdict_on_forks(one.text(), "eager")
    assert case.verdict == verdict
    assert ("too" in case.reason) == (verdict == "not judged")
