from __future__ import annotations

import pytest

from dtbench.engine.failure import INTERRUPTED, Diagnosis, RankState, diagnose

HOSTS = ["n1", "n1", "n2", "n2"]
LIMIT = "within --timeout 2 s"


def states(**special: RankState) -> dict[int, RankState]:
    """Four ranks that wait in the same collective of the same case, but for those given as r0, r1..."""
    usual = RankState(
        "event",
        "suite case (core)",
        samples_begun=7,
        location="c10d.py:1 in all_reduce",
        is_waiting=True,
        cases_begun=2,
    )
    return {rank: special.get(f"r{rank}", usual) for rank in range(4)}


def of(cause: str = "event", **more: object) -> RankState:
    fields: dict[str, object] = {
        "case_label": "suite case",
        "samples_begun": 7,
        "location": "c10d.py:1 in f",
        "is_waiting": True,
        "cases_begun": 2,
    }
    return RankState(cause, **(fields | more))  # type: ignore[arg-type]


def test_ranks_that_do_not_answer_are_dead() -> None:
    there = states(r0=of("died"))
    del there[2]
    assert diagnose(there, HOSTS, LIMIT) == Diagnosis("rank 2 on n2 died or did not answer", 2, 5)
    del there[1]
    assert diagnose(there, HOSTS, LIMIT).message == "rank 1 on n1, rank 2 on n2 died or did not answer"


def test_a_rank_that_raised_alone_is_named_and_the_first_if_several_did() -> None:
    alone = diagnose(states(r2=of("raised", failure="ValueError: x", failed_at=5.0)), HOSTS, LIMIT)
    assert alone.message == "rank 2 on n2 raised ValueError: x while the other ranks waited for it"
    later = of(failure="RuntimeError: connection closed", failed_at=6.0)
    both = diagnose(states(r0=later, r2=of("raised", failure="ValueError: x", failed_at=5.0)), HOSTS, LIMIT)
    assert both.rank == 2 and both.code == 5 and both.blames_case


@pytest.mark.parametrize("cause", ["died", "interrupted"])
def test_told_to_end_with_nobody_missing_is_an_interruption(cause: str) -> None:
    assert diagnose(states(r1=of(cause)), HOSTS, LIMIT) is INTERRUPTED
    assert not INTERRUPTED.blames_case and INTERRUPTED.code == 130


def test_at_the_timeout_the_rank_that_is_behind_is_named() -> None:
    behind = diagnose(
        states(r0=of("timeout"), r3=of(samples_begun=6, location="mine.py:3 in run")),
        HOSTS,
        "within --timeout 2.5 s",
    )
    assert behind.message == "rank 3 on n2 did not finish within --timeout 2.5 s (at mine.py:3 in run)"
    earlier_case = diagnose(states(r0=of("timeout"), r1=of(cases_begun=1, samples_begun=90)), HOSTS, LIMIT)
    assert earlier_case.rank == 1


def test_at_the_timeout_the_rank_in_code_of_its_own_is_named() -> None:
    result = diagnose(
        states(r0=of("timeout"), r1=of(location="mine.py:3 in run", is_waiting=False)), HOSTS, LIMIT
    )
    assert result.rank == 1


def test_at_the_timeout_the_rank_in_another_place_is_named() -> None:
    """Where all look busy, because they wait in code that is neither torch's nor the harness's."""
    usual = of(location="comm.py:9 in wait", is_waiting=False)
    result = diagnose(
        {0: usual, 1: usual, 2: of(location="x.py:1 in f", is_waiting=False), 3: usual}, HOSTS, LIMIT
    )
    assert result.rank == 2


def test_ranks_that_wait_for_one_another_are_all_named() -> None:
    alone = diagnose(states(r0=of("timeout", location="a.py:1 in f")), HOSTS, LIMIT)
    assert alone.rank == 0 and "rank 0 on n1 did not finish" in alone.message
    even = of(location="a.py:1 in f")
    result = diagnose(states(r0=even, r1=even), HOSTS, LIMIT)
    assert result.rank is None and "they wait for one another" in result.message


def test_a_case_that_hangs_in_the_simulated_world_is_rank_0s() -> None:
    """The other ranks are in no case: they wait for rank 0."""
    waiting = RankState("event", location="ranks.py:1 in agree", is_waiting=True)
    result = diagnose({0: of("timeout", cases_begun=9), 1: waiting}, ["a", "b"], LIMIT)
    assert result.rank == 0
