import pytest

from dtbench.engine.failure import INTERRUPTED, RankState, diagnose

HOSTS = ["n1", "n1", "n2", "n2"]
LIMIT = "within --timeout 2 s"


def states(**special: RankState) -> dict[int, RankState]:
    """Returns four ranks that wait in the same collective of the same case, except those given as r0, r1, ..."""
    usual = state(case_label="suite case (core)", location="c10d.py:1 in all_reduce")
    return {rank: special.get(f"r{rank}", usual) for rank in range(4)}


def state(cause: str = "event", **changes: object) -> RankState:
    fields: dict[str, object] = {
        "case_label": "suite case",
        "samples_begun": 7,
        "location": "c10d.py:1 in f",
        "is_waiting": True,
        "cases_begun": 2,
    }
    return RankState(cause, **(fields | changes))  # type: ignore[arg-type]


ALL_WAIT = states()
RAISED = state("raised", failure="ValueError: x", failed_at=5.0)
TIMED_OUT = state("timeout")
IN_OWN_WAIT = state(location="comm.py:9 in wait", is_waiting=False)


@pytest.mark.parametrize(
    ("ranks", "blamed", "message"),
    [
        pytest.param(
            {rank: ALL_WAIT[rank] for rank in (1, 3)} | {0: state("died")},
            2,
            "rank 2 on n2 died or did not answer",
            id="one rank does not answer",
        ),
        pytest.param(
            {0: state("died"), 3: ALL_WAIT[3]},
            1,
            "rank 1 on n1, rank 2 on n2 died or did not answer",
            id="two ranks do not answer",
        ),
        pytest.param(
            states(r2=RAISED),
            2,
            "rank 2 on n2 raised ValueError: x while the other ranks waited for it",
            id="one rank raised",
        ),
        pytest.param(
            states(r0=state(failure="RuntimeError: connection closed", failed_at=6.0), r2=RAISED),
            2,
            "raised ValueError: x",
            id="the first of two that raised",
        ),
        pytest.param(
            states(r0=TIMED_OUT, r3=state(samples_begun=6, location="mine.py:3 in run")),
            3,
            "rank 3 on n2 did not finish within --timeout 2 s (at mine.py:3 in run)",
            id="fewer samples at the timeout",
        ),
        pytest.param(
            states(r0=TIMED_OUT, r1=state(cases_begun=1, samples_begun=90)),
            1,
            "rank 1 on n1 did not finish",
            id="an earlier case at the timeout",
        ),
        pytest.param(
            states(r0=TIMED_OUT, r1=state(location="mine.py:3 in run", is_waiting=False)),
            1,
            "rank 1 on n1 did not finish",
            id="not in a collective at the timeout",
        ),
        # All look busy: they wait in code that belongs neither to torch nor to the harness.
        pytest.param(
            dict.fromkeys((0, 1, 3), IN_OWN_WAIT) | {2: state(location="x.py:1 in f", is_waiting=False)},
            2,
            "rank 2 on n2 did not finish",
            id="another line than all other ranks",
        ),
        pytest.param(
            states(r0=state("timeout", location="a.py:1 in f")),
            0,
            "rank 0 on n1 did not finish",
            id="waits elsewhere than all other ranks",
        ),
        pytest.param(
            states(r0=state(location="a.py:1 in f"), r1=state(location="a.py:1 in f")),
            None,
            "they wait for one another",
            id="two by two",
        ),
        # In a simulated world only rank 0 runs a case; the others wait for it.
        pytest.param(
            dict.fromkeys(range(4), RankState("event", location="rank_votes.py:1 in agree", is_waiting=True))
            | {0: state("timeout", cases_begun=9)},
            0,
            "rank 0 on n1 did not finish",
            id="simulated world",
        ),
    ],
)
def test_diagnosis_blames_the_rank_at_fault(
    ranks: dict[int, RankState], blamed: int | None, message: str
) -> None:
    result = diagnose(ranks, HOSTS, LIMIT)
    assert (result.rank, result.code, result.blames_case) == (blamed, 5, True) and message in result.message


@pytest.mark.parametrize("cause", ["died", "interrupted"])
def test_end_of_the_launcher_with_all_ranks_present_is_an_interruption(cause: str) -> None:
    assert diagnose(states(r1=state(cause)), HOSTS, LIMIT) is INTERRUPTED
    assert not INTERRUPTED.blames_case and INTERRUPTED.code == 130
