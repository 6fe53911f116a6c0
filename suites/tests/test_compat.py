"""The compat suite: what the judge sees on real ranks, and that programs are well-formed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("expecttest", reason="torch's op database imports it")

import dtbench_core as core
from dtbench.judge.op_verdicts import PROGRAMS, verdict_of
from dtbench_suites.compat.judge import Seen, judge_program, together
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


def test_what_nobody_answers_is_a_hang() -> None:
    assert together([None] * 4, [-9] * 4, 5.0) == ("hang", "no answer within 5 s")
    assert together([Seen("pass")] * 4, [0] * 4)[0] == "pass"


def test_workers_judge_programs() -> None:
    job = Job("tensor hook", "autograd", "core", Caps(1, 1), PROGRAMS)
    [result] = pool.judge_all([job], 1, judge_module="dtbench_suites.compat.judge")
    assert (result.suite, verdict_of(result), result.params) == (PROGRAMS, "pass", {"mode": "autograd"})


def test_there_are_programs_for_both_backends() -> None:
    table = programs()
    assert len(table) >= 150
    assert {"aot_eager", "inductor", ""} <= {entry.backend for entry in table.values()}
