"""The page of a job: what it draws and holds, of many ranks few; hostile names are text."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from dtbench.records.comparison import Verdict
from dtbench.records.job import CallChange, CallKind, Job, JobAnalysis, Lane, SavingEstimate, TimeChange
from dtbench.records.topology import read_topology
from dtbench.reporting.html import Sources, gather, render
from dtbench.tests import made_up_jobs
from dtbench.tests.html_page import HOSTILE, Page, harmless, hostile
from dtbench.tests.test_job_cli import profile_in
from dtbench.traces.job import _MAX_LANE_INTERVALS

TOPOLOGY = Path(__file__).parents[2] / "results" / "baseline-cpu-gloo-4ranks.topology.json"


def test_a_profile_has_a_timeline_curves_tables_and_notes(tmp_path: Path) -> None:
    folder = profile_in(tmp_path / "job")
    sources = gather([folder], topology=TOPOLOGY)
    assert sources.job == gather([folder / "job.json"]).job == made_up_jobs.job()
    worth = JobAnalysis(0, savings=(SavingEstimate("dp", "hidden", 3, 0.42, 0.06, 0.14),))
    text = render(Sources(job=sources.job, topology=read_topology(TOPOLOGY), analysis=worth))
    page = Page(text)
    job = page.section_text["job"]
    assert "Step 12" in job and "8 of 8 ranks, clocks aligned by ends of collectives" in job
    assert "all_gather, calibrated" in job and "reduce_scatter" in job
    assert (
        "60.0 ms (14% of the step of rank 3) if computation covered all communication over dp" in page.text
        and "excluded 2 events" in job
    )
    assert [row[-1] for row in page.rows if row[-1].endswith(".gz")] == [f"rank{n}.json.gz" for n in range(8)]
    assert ("a", {"href": "https://ui.perfetto.dev"}) in page.tags
    assert (
        "17% of the step is exposed communication" in page.text and "torchrun --nproc-per-node 8" in page.text
    )


def test_calibrated_lines_end_at_the_edge_of_their_drawing() -> None:
    """They are of more sizes than the job has."""
    text = render(gather([TOPOLOGY.parent / "job" / "core"], topology=TOPOLOGY))
    drawings = re.findall(r'<svg class="plot"[^>]*inJob.*?</svg>', text, re.DOTALL)
    leaving = re.findall(r'<path d="M -[^>]*>', "".join(drawings))
    assert leaving and all("clip-path" in path for path in leaving)


def test_title_is_the_whole_first_finding_without_its_reason() -> None:
    gathers = CallKind("dp", "all_gather", 4, "float32", 2**19)
    calls = JobAnalysis(
        1, call_changes=(CallChange(gathers, gathers, (0.0, 2.0), (0,)),), compared_ranks=(0,)
    )
    assert titled(calls) == "Dp all_gather of 512 KiB (float32): 2 calls instead of 0"
    step = TimeChange("step_s", Verdict.SLOWER, "beyond the 3.2x of launches", 0.01, 0.1, None)
    assert (
        titled(JobAnalysis(1, time_changes=(step,))) == "Step: 10.0 ms → 100 ms, 10.0x slower than the base"
    )


def titled(analysis: JobAnalysis) -> str:
    (title,) = re.findall("<h1>(.*?)</h1>", render(Sources(job=made_up_jobs.job(), analysis=analysis)))
    return title


def test_of_many_ranks_few_are_drawn_and_all_are_in_the_table() -> None:
    text = render(Sources(job=made_up_jobs.job(ranks=64)))
    page = Page(text)
    assert "16 of 64 ranks" in page.section_text["job"]
    assert len([row for row in page.rows if row[-1].endswith(".gz")]) == 64


def test_all_that_a_reader_has_drawn_fits_on_a_page() -> None:
    many = tuple((n / 1250 + 1e-7, n / 1250 + 4.1234e-4) for n in range(_MAX_LANE_INTERVALS))
    lanes = [
        Lane(rank=rank, name=f"communication {n}", intervals=many) for rank in range(16) for n in range(6)
    ]
    text = render(Sources(job=made_up_jobs.job(ranks=16, lanes=tuple(lanes))))
    assert len(text) < 2_000_000 and Page(text).section_text["job"].count("communication 5")


def test_hostile_names_are_text() -> None:
    job = msgspec.convert(
        hostile(msgspec.to_builtins(made_up_jobs.job()), {"kind", "last", "waiting_s"}), Job
    )
    calls = [
        msgspec.structs.replace(call, mesh_dim=HOSTILE * 5, collective="x" * 3000) for call in job.collectives
    ]
    harmless(render(Sources(job=msgspec.structs.replace(job, collectives=tuple(calls)))))
