"""The compat suite: what the judge sees on real ranks, and that programs are well-formed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("expecttest", reason="torch's op database imports it")

import dtbench_core as core
from dtbench.comparison.op_verdicts import VARIANTS
from dtbench.records.verdicts import PROGRAMS
from dtbench.suite import Case as PlannedCase
from dtbench.suite import RunOptions
from dtbench.suite.errors import UsageError
from dtbench_suites.compat.judge import Seen, _seen, judge_program, kind_of, together
from dtbench_suites.compat.program import Entry, Given, programs, randn
from dtbench_suites.compat.suite import compat
from dtbench_suites.compat.variants import LEFT_OUT, grid, is_chosen, shard_of, why_left_out
from dtbench_suites.coverage import pool
from dtbench_suites.coverage.verdicts import Caps, Job, summarize


def _right(w: Given) -> object:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    x.softmax(0).pow(2).sum().backward()
    return x.grad


def _wrong(w: Given) -> object:
    return w.place(randn(8, 4), "S(0)") * (1 if w.plain else 2)


def _refused_by_both(w: Given) -> object:
    return w.place(randn(8, 4), "S(0)", grad=True).add_(1)


def _refused(w: Given) -> object:
    if not w.plain:
        raise core.PlacementError("cannot")


def _raised(w: Given) -> object:
    if not w.plain:
        raise ValueError("broken")


def _not_refused(w: Given) -> object:
    if w.plain:
        raise ValueError("plain only")


def _refused_otherwise(w: Given) -> object:
    raise ValueError("index 9 is out of range" if w.plain else "expected another dtype")


def _refused_in_two_ways(w: Given) -> object:
    """Every rank raises an error of one class; of one of them it is about something else."""
    raise ValueError("index 9 is out of range" if w.plain or w.rank == 2 else "expected another dtype")


def _apart(w: Given) -> object:
    if not w.plain and w.rank == 2:
        raise ValueError("alone")


def _waits(w: Given) -> object:
    if not w.plain and w.rank == 2:
        raise ValueError("alone")
    if not w.plain:
        dist.all_reduce(torch.ones(1))


def _dies(w: Given) -> object:
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


def _wrong_where_memory_has_another_order(w: Given) -> object:
    x = w.rows()
    return x * (1 if w.plain or x.is_contiguous() else 2)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "inductor"])
def test_a_program_on_ranks_in_every_variant(variant: str) -> None:
    case = judge_program(Entry("made up", "tests", _right), "core", 60.0, variant)
    assert case.verdict == "pass", case


@pytest.mark.parametrize(
    ("variant", "verdict"), [("written", "pass"), ("strided", "wrong"), ("from_local", "wrong")]
)
def test_a_program_on_ranks_sees_how_inputs_lie(variant: str, verdict: str) -> None:
    case = judge_program(
        Entry("made up", "tests", _wrong_where_memory_has_another_order), "core", 60.0, variant
    )
    assert case.verdict == verdict, case


@pytest.mark.parametrize("impl", ["core", "torch"])
def test_a_program_on_ranks_whose_mesh_does_not_ascend(impl: str) -> None:
    """What torch's DTensor gets wrong there: a whole tensor distributed is another one gathered."""
    entry = programs()["mesh whose ranks descend"]
    case = judge_program(entry, impl, 60.0)
    assert case.verdict == ("pass" if impl == "core" else "wrong"), case


def test_inputs_lie_as_the_variant_says() -> None:
    lie = {variant: Given("plain", variant=variant).rows().stride() for variant in VARIANTS}
    assert {variant: stride for variant, stride in lie.items() if stride != (4, 1)} == {
        "strided": (1, 8),
        "from_local": (8, 2),
    }
    assert [grid(variant, 2).tolist() for variant in ("order", "uneven")] == [
        [[3, 1], [0, 2]],
        [[0], [1], [2]],
    ]
    assert [len(shard_of(randn(4, 2), 0, 3, rank)) for rank in range(3)] == [2, 2, 0]


def test_what_a_variant_leaves_out_are_programs_with_a_reason() -> None:
    assert set(LEFT_OUT) == set(VARIANTS) - {"written"}
    titles = [f"{entry.topic}: {entry.name}" for entry in programs().values()]
    for variant, rules in LEFT_OUT.items():
        for pattern, why in rules:
            assert why and any(re.fullmatch(pattern, title) for title in titles), (variant, pattern)
        left = [e for e in programs().values() if why_left_out(variant, e.topic, e.name)]
        assert len(left) < 0.4 * len(titles), variant
    case = judge_program(programs()["local map"], "core", 60.0, "uneven")
    assert (case.verdict, case.reason) == ("n/a", why_left_out("uneven", "placements", "local map"))
    assert summarize(Job("local map", "uneven", "core", Caps(), PROGRAMS), [case]).reason == case.reason


def test_what_torch_compile_does_not_do_with_plain_tensors_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refusing(fn: Any, backend: str) -> Any:
        raise RuntimeError(f"no graph for {backend}")

    entry = Entry("made up", "tests", lambda w: w.expected(1, 1))
    monkeypatch.setattr(torch, "compile", refusing)
    seen = _seen(entry, "core", "inductor")
    assert (seen.verdict, seen.failure) == ("n/a", "") and "plain tensors, too" in seen.reason
    monkeypatch.setattr(torch, "compile", lambda fn, backend: lambda w: fn(w) if w.plain else 2)
    assert _seen(entry, "core", "inductor").verdict == "wrong"


def _cases_of(options: dict[str, str]) -> Iterator[PlannedCase]:
    yield from compat.cases(RunOptions(mesh=(), sizes_bytes=(), options=options))


def test_a_share_of_the_programs_runs_in_a_variant() -> None:
    def count(variant: str, share: int) -> int:
        return sum(is_chosen(variant, name, share) for name in programs())

    assert count("written", 4) == count("order", 1) == len(programs())
    assert 0.15 < count("order", 4) / len(programs()) < 0.35


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"variants": "order,nowhere"}, "--variants has nowhere: expected a comma list of written, order"),
        ({"share": "0"}, "--share 0: expected a number of at least 1"),
        ({}, "there is no a-compiler-that-is-not-there: install it, name yours in CXX"),
    ],
)
def test_options_of_compat_that_cannot_be_followed(
    options: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    with pytest.raises(UsageError, match=re.escape(says)):
        list(_cases_of(options))


def test_programs_without_inductor_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    found = list(_cases_of({"variants": "written,order", "programs": "^writes: item", "share": "1"}))
    assert [case.params["mode"] for case in found] == ["writes", "order"]


def test_workers_judge_programs() -> None:
    job = Job("tensor hook", "autograd", "core", Caps(1, 1), PROGRAMS)
    [result] = pool.judge_all([job], 1, judge_module="dtbench_suites.compat.judge")
    assert (result.suite, result.verdict, result.mode) == (PROGRAMS, "pass", "autograd")


def test_there_are_programs_for_both_backends() -> None:
    table = programs()
    assert len(table) >= 150
    assert {"aot_eager", "inductor", ""} <= {entry.backend for entry in table.values()}
