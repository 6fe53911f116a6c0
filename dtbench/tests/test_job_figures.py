"""The figures of a job: they are of the same steps, parts add up to wholes, and a late rank is named."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dtbench.records.comparison import Verdict
from dtbench.records.job import Job
from dtbench.reporting.html import Sources, render
from dtbench.reporting.job_tables import headline, print_job, tables
from dtbench.tests.html_page import Page
from dtbench.tests.made_up_traces import Event, event, kernel, nccl, note, write
from dtbench.traces.analysis import analyze, compare_recordings, find_late_ranks
from dtbench.traces.job import read_job
from dtbench.traces.steps import count_outlying_first, find_complete_steps

RESULTS = Path(__file__).parents[2] / "results"
COMMITTED = (
    "job/core",
    "job/torch",
    "gpu/nvidia-h200/traces/gloo-rank*",
    "gpu/nvidia-h200/traces/nccl-rank0*",
)
STEP_US = 10_000.0
TP = {"pg_name": "2", "pg_desc": "mesh_tp", "pg_size": 4, "ranks": [0, 1, 2, 3]}
DP = {"pg_name": "1", "pg_desc": "mesh_dp", "pg_size": 4, "ranks": [0, 1, 2, 3]}


def call(start: float, end: float, number: int, group: Event = DP) -> Event:
    own = {
        "Process Group Name": group["pg_name"],
        "Process Group Ranks": str(group["ranks"]),
        "Group size": 4,
    }
    return nccl(start, end - start, Seq=number, **own)


def made_up(
    folder: Path,
    durations_us: Sequence[float] = (STEP_US,) * 5,
    late: dict[int, tuple[str, float]] | None = None,
    last_calls: int = 2,
    **more: Any,
) -> Job:
    """Four ranks that compute for 2 ms a step, then communicate over two dims at once, and end every step together.

    late: rank -> ("computation" or "idle", for how many us more, before it communicates). last_calls: of the last step.
    """
    folder.mkdir(exist_ok=True)
    for rank in range(4):
        events, at = list[Event](), 0.0
        why, late_us = (late or {}).get(rank, ("", 0.0))
        for number, took in enumerate(durations_us):
            end = at + took
            computed = 2000 + (late_us if why == "computation" else 0)
            start = at + 2000 + late_us + rank
            events.append(note(f"ProfilerStep#{number + 5}", at, took))
            events += [kernel(at, computed), kernel(end - 1500, 500)]  # the second hides a part of the calls
            events.append(event("Memcpy HtoD", end - 150, 50, "gpu_memcpy", 9))
            calls = [call(start, end - 200, number), call(start + 500, end - 600, number, TP)]
            is_last = number == len(durations_us) - 1
            events += calls[: last_calls if is_last else 2]
            at = end
        write(folder, events, rank, world=4, groups=[DP, TP], **more)
    return read_job([folder])


def committed(place: str) -> Job:
    path = RESULTS / place
    return read_job([path] if path.is_dir() else sorted(path.parent.glob(path.name)))


def text_of(job: Job) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_job(job, analyze(job))
    return out.getvalue()


# ------------------------------------------------------------------------------- parts and wholes


def check_that_parts_add_up(job: Job) -> None:
    for rank in job.ranks:
        for step in (*rank.each_step, rank.mean_step):
            alone_s = step.step_s - step.computation_s - step.exposed_s - step.idle_s
            assert -1e-9 <= alone_s <= step.copy_s + 1e-9
            assert step.exposed_s <= step.communication_s + 1e-9
            assert (step.host_bound_s or 0) <= step.idle_s + 1e-9
        count = len(rank.each_step)
        assert rank.steps == count
        if count:
            assert rank.step_s == rank.mean_step.step_s
        exposed_s = (count or 1) * rank.mean_step.exposed_s
        assert sum(dim.exposed_s for dim in rank.dims) == pytest.approx(exposed_s, abs=1e-9)
        for dim in rank.dims:
            assert (dim.waiting_s or 0) <= dim.exposed_s + 1e-9 <= dim.communication_s + 2e-9
        for collective in (c for c in job.collectives if c.rank == rank.rank):
            assert collective.timed == (collective.in_steps or collective.count)
            assert (
                collective.best_s <= collective.median_s
                and (collective.transfer_s or 0) <= collective.mean_s + 1e-9
            )


def check_that_savings_are_within_what_is_exposed(job: Job) -> None:
    rows = analyze(job).savings
    saved = {(row.mesh_dim, row.assumption): row.saved_s for row in rows}
    for row in rows:
        rank = next(rank for rank in job.ranks if rank.rank == row.rank)
        hidden_s = saved[row.mesh_dim, "hidden"]
        parts_s = [saved.get((row.mesh_dim, what), 0.0) for what in ("links", "on time")]
        assert sum(parts_s) <= hidden_s + 1e-9
        total_s = sum(row.saved_s for row in rows if row.assumption == "hidden")
        assert (
            total_s == pytest.approx(rank.mean_step.exposed_s)
            and total_s <= row.step_s == rank.mean_step.step_s
        )


def check_that_tables_agree(job: Job) -> None:
    """The dims' shares add up to the headline's, and the ranks' to it over all steps."""
    shown = {table.caption.split(",")[0]: table for table in tables(job, analyze(job))}
    ranks = {column.header: column.cells for column in shown["Ranks"].columns}
    share = 100 * sum(r.mean_step.exposed_s for r in job.ranks) / sum(r.mean_step.step_s for r in job.ranks)
    assert headline(job)[0] == f"{share:.0f}%"
    if dims := shown.get("Communication by mesh dim"):
        cells = {column.header: column.cells for column in dims.columns}
        total = sum(float(cell.rstrip("%")) for cell in cells["exposed/step"])
        assert total == pytest.approx(share, abs=0.06 * len(cells["exposed/step"]))
    for rank, cell in zip(job.ranks, ranks["exposed/step"], strict=True):
        step = rank.mean_step
        assert cell == f"{step.exposed_s / step.step_s:.1%}"


@pytest.mark.parametrize("place", COMMITTED)
def test_parts_of_committed_jobs_add_up(place: str) -> None:
    job = committed(place)
    check_that_parts_add_up(job)
    check_that_savings_are_within_what_is_exposed(job)
    check_that_tables_agree(job)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"late": {2: ("idle", 4000.0)}},
        {"late": {1: ("computation", 3000.0), 3: ("idle", 3500.0)}},
        {"durations_us": (900_000.0, STEP_US, STEP_US, STEP_US)},
        {"durations_us": (STEP_US, 30_000.0, STEP_US), "last_calls": 1},
    ],
)
def test_parts_of_made_up_jobs_add_up(tmp_path: Path, more: dict[str, Any]) -> None:
    job = made_up(tmp_path / "job", **more)
    check_that_parts_add_up(job)
    check_that_savings_are_within_what_is_exposed(job)
    check_that_tables_agree(job)


def test_time_that_two_dims_expose_at_once_counts_half_for_each(tmp_path: Path) -> None:
    (rank, *_) = made_up(tmp_path / "job").ranks
    dp, tp = rank.dims
    # Exposed per step: dp alone 0.5 and 0.4 ms, both at once 7.3 - 0.4 - 0.5 of 2.5 to 9.4 ms less 0.5 ms hidden.
    assert dp.exposed_s - tp.exposed_s == pytest.approx(5 * 0.9e-3)
    assert dp.exposed_s + tp.exposed_s == pytest.approx(5 * 7.3e-3)


# ------------------------------------------------------------------------------- the steps of the figures


@pytest.mark.parametrize(
    ("durations", "skipped"),
    [
        ([5.0], 0),
        ([5.0, 1.0], 1),
        ([1.0, 1.1, 0.9], 0),
        ([1.9, 1.0, 1.0, 1.0], 0),
        ([9.0, 4.0, 1.0, 1.0, 1.0], 2),
        ([9.0, 9.0, 9.0, 1.0, 1.0], 3),
        ([1.0, 9.0, 1.0, 1.0], 0),  # no first one: it counts
        ([1.0, 1.0, 4.0] * 4, 0),
        ([], 0),
    ],
)
def test_outlying_first_counts_slow_steps_before_a_usual_one(durations: list[float], skipped: int) -> None:
    assert count_outlying_first(durations) == skipped


@pytest.mark.parametrize(
    ("counts", "whole"),
    [
        ([3, 3, 3], (0, 3)),
        ([3, 3, 2], (0, 2)),
        ([1, 3, 3], (1, 3)),
        ([3, 0], (0, 1)),
        ([7, 3], (0, 2)),
        ([5, 3, 5, 3], (0, 4)),
        ([0, 0, 0], (0, 3)),
        ([2], (0, 1)),
    ],
)
def test_whole_steps_leaves_out_ends_with_fewer_calls(counts: list[int], whole: tuple[int, int]) -> None:
    assert find_complete_steps(counts) == whole


def test_a_slow_first_step_is_named_and_in_no_figure(tmp_path: Path) -> None:
    steady = made_up(tmp_path / "steady", (STEP_US,) * 4, host_name="node")
    slow = made_up(tmp_path / "slow", (1_880_000.0, *(STEP_US,) * 4), host_name="node")
    assert [note for note in slow.notes if "first" in note] == [
        "excluded from all figures: the first 1 step (up to 1.88 s, later steps 10.0 ms: warm-up or compilation)"
    ]
    assert {(rank.steps, rank.excluded_steps) for rank in slow.ranks} == {(4, 1)}
    assert "4 of 5 steps by ProfilerStep#" in headline(slow)[1]
    assert [t.columns for t in tables(slow, analyze(slow))] == [
        t.columns for t in tables(steady, analyze(steady))
    ]
    assert [waits.calls for waits in slow.waits] == [4, 4]


def test_iterations_of_a_suite_all_count(tmp_path: Path) -> None:
    window = {"asked": 4, "whole": 4, "warm": True}
    job = made_up(tmp_path / "job", (90_000.0, *(STEP_US,) * 3), dtbench_window=window)
    assert {(rank.steps, rank.excluded_steps) for rank in job.ranks} == {(4, 0)}


def test_a_partial_last_step_is_named_and_in_no_figure(tmp_path: Path) -> None:
    job = made_up(tmp_path / "job", last_calls=1)
    assert "ranks 0, 1, 2, 3: the last step is partial and excluded from all figures" in job.notes
    assert {rank.steps for rank in job.ranks} == {4}
    assert {collective.calls_in_steps / 4 for collective in job.collectives} == {1}


def test_steps_that_were_asked_for_and_are_missing_are_named(tmp_path: Path) -> None:
    window = {"asked": 100, "whole": 4, "why": "the program ended"}
    job = made_up(tmp_path / "job", dtbench_window=window)
    assert "ranks 0, 1, 2, 3: 4 of the 100 requested steps were recorded: the program ended" in job.notes
    assert {(rank.steps, rank.excluded_steps) for rank in job.ranks} == {(4, 1)}


@pytest.mark.parametrize("window", [{"asked": "x", "whole": []}, {"asked": 3, "whole": 0}, {"whole": 10**30}])
def test_a_window_that_makes_no_sense_harms_nothing(tmp_path: Path, window: dict[str, Any]) -> None:
    assert all(rank.steps for rank in made_up(tmp_path / "job", dtbench_window=window).ranks)


def test_ranks_without_steps_leave_none_to_the_others(tmp_path: Path) -> None:
    made_up(tmp_path / "job")
    write(tmp_path / "job", [kernel(0, 100)], 3, world=4, groups=[DP, TP])
    job = read_job([tmp_path / "job"])
    assert {rank.steps for rank in job.ranks} == {0}
    assert all("whole trace" in table.caption for table in tables(job, analyze(job)))


# ------------------------------------------------------------------------------- late ranks


@pytest.mark.parametrize("why", ["computation", "idle"])
def test_a_late_rank_is_the_first_thing_said(tmp_path: Path, why: str) -> None:
    job = made_up(tmp_path / "job", late={2: (why, 5000.0)})
    (late,) = analyze(job).late_ranks
    assert (late.rank, late.part, late.last_share) == (2, why, 1.0)
    assert late.late_s == pytest.approx(5e-3, rel=0.01)
    first = text_of(job).splitlines()[0]
    doing = {"computation": "it computes longer", "idle": "it is idle longer"}[why]
    assert first.startswith(f"Rank 2 is late by 5.00 ms a step: {doing} than the others.")
    title = re.search("<title>(.*?)</title>", render(Sources(job=job, analysis=analyze(job))))
    assert title and title[1].startswith(f"Rank 2 is late by 5.00 ms a step: {doing} than the others")


def test_two_late_ranks_are_both_named(tmp_path: Path) -> None:
    job = made_up(tmp_path / "job", late={1: ("idle", 4000.0), 3: ("computation", 4000.0)})
    assert {late.rank for late in find_late_ranks(job)} <= {1, 3}
    assert find_late_ranks(job)


def test_ranks_that_wait_for_links_are_not_late(tmp_path: Path) -> None:
    job = made_up(tmp_path / "job", late={2: ("idle", 300.0)})
    assert find_late_ranks(job) == () and "exposed communication" in text_of(job).splitlines()[0]
    for place in COMMITTED:
        assert find_late_ranks(committed(place)) == ()


# ------------------------------------------------------------------------------- against a base


def test_a_rank_that_became_late_is_exit_code_1_and_said_first(tmp_path: Path) -> None:
    base = made_up(tmp_path / "base")
    head = made_up(tmp_path / "head", (50_000.0,) * 5, late={2: ("idle", 40_000.0)})
    analysis = compare_recordings([base], [head])
    slower = {row.part for row in analysis.time_changes if row.verdict is Verdict.SLOWER}
    assert {"step_s", "lateness of rank 2 over dp", "lateness of rank 2 over tp"} <= slower
    assert analysis.exit_code == 1
    page = Page(render(Sources(job=head, analysis=analyze(head, None, [base]))))
    assert page.text.strip().startswith("Step: 10.0 ms → 50.0 ms, 5.00x slower than the base")
    back = compare_recordings([head], [base])
    assert back.exit_code == 0 and back.time_changes[0].verdict is Verdict.FASTER


def test_lateness_that_adds_little_to_a_step_is_no_verdict(tmp_path: Path) -> None:
    base = made_up(tmp_path / "base", late={1: ("idle", 50.0)})
    head = made_up(tmp_path / "head", late={1: ("idle", 500.0)})
    analysis = compare_recordings([base], [head])
    late = [row for row in analysis.time_changes if row.part == "lateness of rank 1 over dp"]
    assert late and late[0].head_s > 5 * late[0].base_s and analysis.exit_code == 0
