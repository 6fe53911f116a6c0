"""The compat suite: what the judge sees on real ranks, and that programs are well-formed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("expecttest", reason="torch's op database imports it")

import dtbench_core as core
from dtbench.records.verdicts import PROGRAMS
from dtbench_suites.compat.judge import Seen, judge_program, kind_of, together
from dtbench_suites.compat.program import Entry, Given, programs, randn
from dtbench_suites.coverage import pool
from dtbench_suites.coverage.verdicts import Caps, Job


def _right(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    x.softmax(0).pow(2).sum().backward()
    return x.grad


def _wrong(w: Given) -> Any:
    return w.place(randn(8, 4), "S(0)") * (1 if w.plain else 2)


def _refused_by_both(w: Given) -> Any:
    return w.place(randn(8, 4), "S(0)", grad=True).add_(1)


def _refused(w: Given) -> Any:
    if not w.plain:
        raise core.PlacementError("cannot")


def _raised(w: Given) -> Any:
    if not w.plain:
        raise ValueError("broken")


def _not_refused(w: Given) -> Any:
    if w.plain:
        raise ValueError("plain only")


def _refused_otherwise(w: Given) -> Any:
    raise ValueError("index 9 is out of range" if w.plain else "expected another dtype")


def _refused_in_two_ways(w: Given) -> Any:
    """Every rank raises an error of one class; of one of them it is about something else."""
    raise ValueError("index 9 is out of range" if w.plain or w.rank == 2 else "expected another dtype")


def _apart(w: Given) -> Any:
    if not w.plain and w.rank == 2:
        raise ValueError("alone")


def _waits(w: Given) -> Any:
    if not w.plain and w.rank == 2:
        raise ValueError("alone")
    if not w.plain:
        dist.all_reduce(torch.ones(1))


def _dies(w: Given) -> Any:
    if not w.plain and w.rank == 1:
        os.abort()


@pytest.mark.parametrize(
    ("run", "verdict", "reason"),
    [
        (_right, "pass", ""),
        (_wrong, "wrong", "elements differ"),
        (_refused_by_both, "pass", "refused as with plain tensors"),
        (_refused, "refused", "cannot"),
        (_raised, "error", "ValueError: broken"),
        (_not_refused, "wrong", "plain tensors raise ValueError: plain only"),
        (_refused_otherwise, "error", "expected another dtype"),
        (_refused_in_two_ways, "differs", "rank 2: refused as with plain tensors: ValueError: index 9"),
        (_apart, "differs", "rank 2: ValueError: alone"),
        (_waits, "hang", "rank 2 raised ValueError: alone while ranks 0, 1, 3 waited"),
        (_dies, "died", "rank 1 died of SIGABRT"),
    ],
)
def test_a_program_on_four_ranks(
    run: Any, verdict: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtbench_suites.compat.judge._GRACE_S", 2.0)
    case = judge_program(Entry("made up", "tests", run), "core", 60.0)
    assert case.verdict == verdict and reason in case.reason, case


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("index 99 is out of bounds for dimension 0 with size 8", "index"),
        ("Target 4 is out of bounds.", "index"),
        ("expected m1 and m2 to have the same dtype, but got: float != double", "dtype"),
        (
            "a view of a leaf Variable that requires grad is being used in an in-place operation.",
            "write in place",
        ),
        ("The size of tensor a (3) must match the size of tensor b (4)", "shape"),
        ("add got a plain torch.Tensor of shape [8, 4] together with a DTensor", "mixed tensors"),
        ("Trying to backward through the graph a second time", "autograd"),
        ("only 3 of [1, 2] are 'here'", "only of are"),
    ],
)
def test_errors_are_of_a_kind(message: str, kind: str) -> None:
    assert " ".join(kind_of(RuntimeError(message)).split()) == kind


def test_ranks_that_raise_one_class_about_different_things_differ() -> None:
    seen = [Seen("error", "a", f"ValueError, {kind}") for kind in ("index", "index", "dtype", "index")]
    assert together(seen, [0] * 4)[0] == "differs"


def test_what_nobody_answers_is_a_hang() -> None:
    assert together([None] * 4, [-9] * 4, 5.0) == ("hang", "no answer within 5 s")
    assert together([Seen("pass")] * 4, [0] * 4)[0] == "pass"


def test_workers_judge_programs() -> None:
    job = Job("tensor hook", "autograd", "core", Caps(1, 1), PROGRAMS)
    [result] = pool.judge_all([job], 1, judge_module="dtbench_suites.compat.judge")
    assert (result.suite, result.verdict, result.mode) == (PROGRAMS, "pass", "autograd")


def test_there_are_programs_for_both_backends() -> None:
    table = programs()
    assert len(table) >= 150
    assert {"aot_eager", "inductor", ""} <= {entry.backend for entry in table.values()}
