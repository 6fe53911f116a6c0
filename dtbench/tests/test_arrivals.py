"""Verdicts about what bounds a collective, on jobs of which the waiting and transfer times are known."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace

from dtbench.records.job import BoundVerdict, Job, JobAnalysis, LateRank, RankJob
from dtbench.reporting.html import Sources, render
from dtbench.reporting.job_tables import tables
from dtbench.tests.made_up_traces import Event, gloo, kernel, nccl, op, write
from dtbench.tests.test_job_cli import text_of as printed
from dtbench.tests.test_job_figures import COMMITTED, committed, made_up
from dtbench.tests.test_judge_job import a_call, a_job, the_topology
from dtbench.traces.analysis import analyze
from dtbench.traces.arrivals import _chance_of_last, judge_bounds
from dtbench.traces.job import read_job

TRANSFER_US = 100.0
# Delays of four ranks, microseconds.
ON_TIME, RANK_2_LATE = (0, 0, 0, 10), (0, 0, 300, 0)


def members(ranks: Sequence[int]) -> dict[str, Any]:
    return {"Process Group Ranks": str([*ranks]), "Group size": len(ranks), "Process Group Name": str(ranks)}


def job_of(
    folder: Path,
    delays_us: Sequence[Sequence[float]],
    *,
    groups: Sequence[Sequence[int]] = ((0, 1, 2, 3),),
    leave_us: Sequence[float] = (),
    present: int = 4,
) -> Job:
    """Four ranks that meet in an all-reduce for each row of `delays_us`, and transfer for TRANSFER_US.

    Args:
        delays_us: for each call, the delay of each rank.
        groups: ranks that meet.
        leave_us: for each call, how much later than the others ranks 1, 2 and 3 leave it by their clocks.
        present: ranks whose traces are written.
    """
    configs = [
        {"pg_name": str(ranks), "pg_desc": "mesh_dp", "pg_size": len(ranks), "ranks": [*ranks]}
        for ranks in groups
    ]
    for rank in range(present):
        group = next(ranks for ranks in groups if rank in ranks)
        events: list[Event] = []
        for number, delays in enumerate(delays_us):
            begin = number * 10_000.0
            end = begin + 100 + max(delays[peer] for peer in group) + TRANSFER_US
            end += leave_us[number] if leave_us and rank else 0.0
            start = begin + 100 + delays[rank]
            events += [kernel(begin, 50), nccl(start, end - start, Seq=number, **members(group))]
        write(folder, events, rank, world=4, groups=configs)
    return read_job([folder])


def only_verdict(job: Job) -> BoundVerdict:
    (verdict,) = judge_bounds(job, ())
    return verdict


@pytest.mark.parametrize(
    ("delays_us", "bound", "waiting_share", "late"),
    [
        pytest.param([ON_TIME] * 5, "transfer", 30 / 430, (3, 10), id="transfer"),
        pytest.param([RANK_2_LATE] * 5, "arrival", 900 / 1300, (2, 300), id="a late rank"),
        pytest.param(
            [RANK_2_LATE] * 3, "arrival", 900 / 1300, (2, 300), id="three calls name a rank of four"
        ),
        pytest.param([(0, 100, 0, 0)] * 5, "mixed", 300 / 700, (1, 100), id="mixed"),
        pytest.param(
            [tuple(300 * (rank == call % 4) for rank in range(4)) for call in range(8)],
            "arrival",
            900 / 1300,
            (None, None),
            id="each rank is late at times",
        ),
        pytest.param(
            [RANK_2_LATE, ON_TIME] * 4, "mixed", 930 / 1730, (2, 300), id="late at the first call of a step"
        ),
    ],
)
def test_verdict_follows_from_waiting_and_transfer(
    tmp_path: Path,
    delays_us: list[tuple[float, ...]],
    bound: str,
    waiting_share: float,
    late: tuple[int | None, float | None],
) -> None:
    verdict = only_verdict(job_of(tmp_path, delays_us))
    assert (verdict.mesh_dim, verdict.collective, verdict.group_size) == ("dp", "all_reduce", 4)
    assert (verdict.bound, verdict.calls) == (bound, len(delays_us))
    assert verdict.waiting_share == pytest.approx(waiting_share)
    assert (verdict.late_rank, verdict.late_s) == (late[0], late[1] and pytest.approx(late[1] / 1e6))


@pytest.mark.parametrize(
    ("delays_us", "options", "why"),
    [
        ([RANK_2_LATE] * 2, {}, "2 calls in steps, expected at least 3"),
        ([RANK_2_LATE] * 5, {"present": 3}, "that needs the traces of all ranks of a group (have 3 of 4)"),
        ([(0, 0, 0, 0)] * 2 + [(0, 0, 0, 3000)] + [(0, 0, 0, 0)] * 2, {}, "one of 5 calls has 100% of the waiting"),
        # Half of the differences between the ranks' ends lie more than 200 us from their median.
        ([(0, 0, 150, 0)] * 5, {"leave_us": (0, 200, 400, 600, 800)}, "the clocks are known to"),
    ],
)  # fmt: skip
def test_verdict_is_inconclusive(
    tmp_path: Path, delays_us: list[tuple[float, ...]], options: dict[str, Any], why: str
) -> None:
    verdict = only_verdict(job_of(tmp_path, delays_us, **options))
    assert verdict.bound == "inconclusive" and verdict.why.startswith(why)
    assert str(verdict) == f"what bounds dp all_reduce is inconclusive: {verdict.why}"


@pytest.mark.parametrize(
    ("calls", "times", "ranks", "chance"),
    [
        (3, 3, 4, 1 / 64),
        (5, 5, 2, 1 / 32),
        (4, 3, 2, 5 / 16),
        (0, 0, 4, 1.0),
        (100_000, 50_000, 2, 0.50126),
        (100_000, 90_000, 8, 0.0),
    ],
)
def test_chance_of_coming_last(calls: int, times: int, ranks: int, chance: float) -> None:
    assert _chance_of_last(calls, times, ranks) == pytest.approx(chance, abs=1e-5)


@pytest.mark.parametrize(
    ("delays", "rank"),
    [
        ((900, 850, 950), 3),  # steady
        ((1200, 590, 1210, 600), None),  # each comes last four times of four with a probability of 1/16
        ((1200, 590, 1210, 600, 900), 3),
    ],
)
def test_late_rank_of_a_pair_needs_steady_delays_or_five_calls(
    tmp_path: Path, delays: tuple[int, ...], rank: int | None
) -> None:
    verdict = only_verdict(job_of(tmp_path, [(0, 0, 0, us) for us in delays], groups=((0, 1), (2, 3))))
    # 900 of 1300 us are waiting: the pair 2, 3 waits 900 us, and each of four ranks transfers for 100 us.
    assert (verdict.bound, verdict.calls, verdict.late_rank) == ("arrival", 2 * len(delays), rank)
    assert verdict.waiting_share == pytest.approx(900 / 1300)


@pytest.mark.parametrize(
    ("hosts", "late_us", "bound", "rank"),
    [
        ("aaaa", 6000, "arrival", 2),
        ("aaaa", 0, "transfer", None),
        # Between hosts, the error of the clocks is as long as a transfer.
        ("abcd", 0, "inconclusive", None),
        ("abcd", 60_000, "arrival", 2),
    ],
)
def test_verdict_on_gloo_whose_ranks_leave_apart(
    tmp_path: Path, hosts: str, late_us: float, bound: str, rank: int | None
) -> None:
    """A rank leaves 200 us after the previous one; the first one transfers for 1 ms."""
    for number, host in enumerate(hosts):
        events = [op("aten::mm", 0, 50)]
        for begin in range(100_000, 1_100_000, 100_000):
            delay = late_us * (number == 2)
            events += gloo(begin + delay, late_us - delay + 1000 + 200 * number)
        group = {"pg_name": "1", "pg_desc": "mesh_dp", "ranks": [0, 1, 2, 3]}
        write(tmp_path, events, number, world=4, groups=[group], host_name=host)
    verdict = only_verdict(read_job([tmp_path]))
    assert (verdict.bound, verdict.late_rank) == (bound, rank), verdict.why
    if bound == "arrival":
        assert verdict.late_s == pytest.approx(late_us / 1e6, rel=0.05)
        assert verdict.waiting_share == pytest.approx(3 * late_us / (3 * late_us + 5200), abs=0.02)


@pytest.mark.parametrize("source", [*COMMITTED, {}, {"late": {2: ("idle", 4000.0)}}])
def test_waiting_share_agrees_with_the_times_of_calls(tmp_path: Path, source: str | dict[str, Any]) -> None:
    job = committed(source) if isinstance(source, str) else made_up(tmp_path / "job", **source)
    for verdict in judge_bounds(job, ()):
        calls = [
            call
            for call in job.collectives
            if (call.mesh_dim, call.collective) == (verdict.mesh_dim, verdict.collective)
        ]
        if verdict.waiting_share is None:
            assert any(call.transfer_s is None for call in calls) and verdict.bound == "inconclusive"
            continue
        transfer_s = sum((call.transfer_s or 0.0) * (call.timed or 0) for call in calls)
        assert verdict.waiting_share == pytest.approx(1 - transfer_s / sum(call.time_s for call in calls))


def test_slow_transfer_is_still_transfer_and_says_by_how_much() -> None:
    """25 MiB take 12.217 ms by the topology, and 20 ms in the job."""
    bound = BoundVerdict("dp", "all_reduce", 4, "transfer", 12.0, 100, 0.32)
    job = a_job(*(a_call(rank) for rank in range(4)), bounds=(bound,))
    (verdict,) = analyze(job, the_topology()).bounds
    assert (verdict.bound, verdict.slowdown) == ("transfer", pytest.approx(0.02 / (10e-6 + 25 / 2048)))
    assert str(verdict) == "dp all_reduce is bound by transfer: it takes 1.64x the calibrated time of dim dp"
    (alone,) = analyze(job).bounds
    assert (alone.slowdown, str(alone)) == (
        None,
        "dp all_reduce is bound by transfer: 68% of its time is transfer",
    )


def test_verdict_from_logs_has_no_late_rank() -> None:
    """Logs of NCCL's inspector have no steps; 27 of 30 ms are waiting."""
    calls = [a_call(rank, in_steps=None, transfer_s=0.003) for rank in range(4)]
    verdict = only_verdict(a_job(*calls, ranks=tuple(RankJob(rank=rank, span_s=None) for rank in range(4))))
    assert (verdict.bound, verdict.calls, verdict.late_rank) == ("arrival", 100, None)
    assert verdict.waiting_share == pytest.approx(0.9)
    assert "logs do not show which rank it is" in str(verdict)


def test_verdicts_of_other_calls_state_why_there_is_none() -> None:
    names = ("broadcast", "unknown", "all_gather")
    calls = [a_call(collective=name, time_s=3.0 + number) for number, name in enumerate(names)]
    calls += [a_call(collective="all_to_all", group_size=None), a_call(collective="barrier", group_size=1)]
    whys = {row.collective: row.why for row in judge_bounds(replace(a_job(*calls), world_size=1), ())}
    assert [*whys] == ["all_gather", "unknown", "broadcast", "all_to_all"]  # by time
    assert whys["broadcast"] == "a rank may leave a broadcast before the others arrive"
    assert whys["unknown"] == "the trace does not show which collective it is"
    assert whys["all_to_all"] == "the trace does not show its process group"
    assert whys["all_gather"].startswith("the calls of its ranks could not be matched")


KIND = ("dp", "all_reduce", 4)


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (
            BoundVerdict(*KIND, "arrival", 1.0, 9, 0.824, 2, 0.03, 0.82),
            "dp all_reduce is bound by arrival: 82% of its time is waiting for rank 2, which comes 30.0 ms late",
        ),
        (
            BoundVerdict(*KIND, "arrival", 1.0, 9, 0.82, 2, 30.0, 0.6),
            "dp all_reduce is bound by arrival: 82% of its time is waiting, mostly for rank 2, which comes 30.0 s late",
        ),
        (
            BoundVerdict(*KIND, "arrival", 1.0, 9, 0.82, why="no rank stands out"),
            "dp all_reduce is bound by arrival: 82% of its time is waiting for the last rank (no rank stands out)",
        ),
        (
            BoundVerdict(*KIND, "mixed", 1.0, 9, 0.5, slowdown=1.2, reference="8xMI300X"),
            (
                "dp all_reduce is mixed: 50% of its time is waiting for the last rank, and the rest is transfer, "
                "1.20x the published time of 8xMI300X"
            ),
        ),
    ],
)  # fmt: skip
def test_verdict_is_one_sentence(verdict: BoundVerdict, text: str) -> None:
    assert str(verdict) == text


def test_late_rank_of_another_dim_is_the_cause_of_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each call another rank is last, as where a late rank makes the ranks of its group late."""
    calls = [tuple(300 * (rank == call % 4) for rank in range(4)) for call in range(8)]
    job, late = job_of(tmp_path, calls), LateRank(3, 0.061, "idle", "tp", 1.0)
    assert "rank comes last" in analyze(job).bounds[0].why
    monkeypatch.setattr("dtbench.traces.analysis.find_late_ranks", lambda _job: (late,))
    assert str(analyze(job).bounds[0]) == (
        "dp all_reduce is bound by arrival: 69% of its time is waiting for the last rank (rank 3 delays the others by "
        "61.0 ms a step)"
    )


def test_verdict_leads_terminal_page_and_json(tmp_path: Path) -> None:
    job = job_of(tmp_path, [RANK_2_LATE] * 5)
    analysis = analyze(job)
    sentence = (
        "Dp all_reduce is bound by arrival: 69% of its time is waiting for rank 2, which comes 300 µs late"
    )
    assert printed(job, analysis).replace("\n", " ").replace("  ", " ").startswith(f"{sentence}.")
    page = render(Sources(job=job, analysis=analysis))
    assert f"<h1>{sentence}</h1>" in page and f"<title>{sentence}" in page
    assert tables(job, analysis)[0].caption.startswith("What bounds each collective")
    assert json.decode(json.encode(analysis), type=JobAnalysis) == analysis
    assert json.decode(json.encode(job), type=Job).bounds == job.bounds


def test_verdict_without_all_traces_does_not_lead(tmp_path: Path) -> None:
    job = job_of(tmp_path, [RANK_2_LATE] * 5, present=1)
    assert "exposed communication" in printed(job, analyze(job)).partition("\n\n")[0]
    assert "inconclusive" not in printed(job, analyze(job)).partition("\n\n")[0]
