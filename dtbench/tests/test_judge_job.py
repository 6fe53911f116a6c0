"""Analysis of a job's communication: comparison with its links, possible savings, and changes against a base."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dtbench.comparison.references import find_systems, read_systems
from dtbench.errors import UsageError
from dtbench.records.comparison import Verdict
from dtbench.records.job import Collective, DimParts, Job, JobAnalysis, LinkComparison, RankJob, StepParts
from dtbench.records.topology import CalibratedTopology
from dtbench.tests.made_up_topology import a_curve, a_dim, a_topology
from dtbench.traces.analysis import (
    ABOVE_CALIBRATED,
    analyze,
    compare_links,
    compare_recordings,
    estimate_savings,
)
from dtbench.traces.arrivals import judge_bounds

MIB = 2**20


def a_call(rank: int = 0, **changed: Any) -> Collective:
    """Returns 100 calls over dp of 30 ms each, of which 20 ms transfer 25 MiB."""
    usual = Collective(
        rank=rank,
        collective="all_reduce",
        mesh_dim="dp",
        group_size=4,
        dtype="float32",
        bytes=25 * MIB,
        count=100,
        in_steps=100,
        time_s=3.0,
        median_s=0.03,
        best_s=0.025,
        transfer_s=0.02,
    )
    return replace(usual, **{"in_steps": changed.get("count", 100)} | changed)


def a_rank(rank: int = 0, steps: int = 10, step_s: float = 1.0, computation_s: float = 0.6) -> RankJob:
    """Returns a rank whose steps are computation, 0.1 s idle, and exposed communication over dp."""
    exposed_s = step_s - computation_s - 0.1
    step = StepParts(
        step_s=step_s,
        computation_s=computation_s,
        communication_s=exposed_s,
        exposed_s=exposed_s,
        idle_s=0.1,
    )
    dims = (DimParts(mesh_dim="dp", communication_s=exposed_s * steps, exposed_s=exposed_s * steps),)
    return RankJob(rank=rank, steps=steps, step_s=step_s, each_step=(step,) * steps, dims=dims)


def a_job(*calls: Collective, ranks: tuple[RankJob, ...] = (a_rank(),), **more: Any) -> Job:
    return Job(world_size=4, ranks=ranks, collectives=calls, **more)


def the_topology() -> CalibratedTopology:
    """dp: 10 us and 2 GiB/s, so that 25 MiB take 12.217 ms; tp: 1 us and 8 GiB/s."""
    dp = a_dim("dp", 4, 3.0, 2.0, collectives={"all_reduce": a_curve(10.0, 2.0)})
    return a_topology(dp, a_dim("tp", 2, 9.0, 1.0, collectives={"all_to_all": a_curve(1.0, 8.0)}))


def beside(call: Collective) -> LinkComparison:
    (row,) = compare_links(a_job(call), the_topology())
    return row


# ------------------------------------------------------------------------------------ links


def test_a_call_without_its_wait_is_set_beside_the_curve_of_its_dim():
    row = beside(a_call())
    # The bus bandwidth of a ring of 4 is 2 (n - 1) / n = 1.5 times the algorithm's.
    assert (row.reference_s, row.busbw) == pytest.approx((10e-6 + 25 / 2048, 1.5 * 25 * MIB / 0.02))
    assert row.share == pytest.approx(0.611, abs=5e-4)
    assert (row.excludes_waiting, row.reference, row.caveat) == (True, "dim dp", "")


def test_without_the_other_ranks_the_best_call_stands_for_it():
    row = beside(a_call(transfer_s=None))
    assert (row.excludes_waiting, row.time_s) == (False, 0.025)


@pytest.mark.parametrize(
    ("changed", "doubts"),
    [
        ({"mesh_dim": "group of 4"}, "dim matched by its 4 ranks"),
        (
            {"bytes": 4 * 2**30},
            f"extrapolated from 1 KiB to 1 GiB, {ABOVE_CALIBRATED}",
        ),
        ({"group_size": 8}, "extrapolated from 4 ranks"),
        ({"collective": "all_gather"}, "by the ring formula"),
    ],
)
def test_link_comparison_states_how_the_reference_was_extrapolated(changed, doubts):
    row = beside(a_call(**changed))
    assert row.share is not None and row.caveat == doubts


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"mesh_dim": "cp", "group_size": 16}, "the topology has no mesh dim of 16 ranks (dims: dp, tp)"),
        ({"bytes": None}, "no bytes"),
        ({"mesh_dim": "unknown group", "group_size": None}, "an unknown number of ranks"),
        ({"collective": "send"}, "no send over 4 ranks of dim dp"),
        ({"collective": "all_to_all", "mesh_dim": "tp"}, "no all_to_all over 4 ranks"),
    ],
)
def test_link_comparison_states_why_there_is_no_reference(changed, why):
    row = beside(a_call(**changed))
    assert row.share is None and row.busbw is None and why in row.caveat


def test_link_comparison_with_a_public_system():
    calls = [a_call(group_size=8, bytes=size, transfer_s=0.0011638) for size in (64 * MIB, 100)]
    published, too_small = compare_links(a_job(*calls), find_systems(read_systems(), "8xa100-sxm4-40gb"))
    assert published.share == pytest.approx(0.5)  # that takes 581.9 us there
    assert too_small.caveat == (
        "no published bandwidth over 8 ranks for this collective and size (systems: 8xA100-SXM4-40GB)"
    )


# ------------------------------------------------------------------------------------ worth


def saved(job: Job, links: tuple[LinkComparison, ...] = ()) -> dict[str, float]:
    return {row.assumption: pytest.approx(row.saved_s) for row in estimate_savings(job, links)}


def test_estimate_savings_of_calibrated_links_and_hidden_communication():
    job = a_job(a_call(count=10), a_call(collective="barrier", bytes=None))
    links = compare_links(job, the_topology())
    # One call per step takes 20 ms instead of 12.2 ms; calls without a reference save nothing.
    assert saved(job, links) == {"hidden": 0.3, "calibrated": 0.02 - 10e-6 - 25 / 2048}
    assert saved(job) == {"hidden": 0.3}
    assert saved(a_job(a_call(count=1000)), links)["calibrated"] == 0.3  # no more than is exposed
    (row,) = estimate_savings(job, ())
    assert row.share == pytest.approx(0.3)


def test_savings_are_parts_of_what_is_exposed():
    """Savings from links and from waiting are parts of the exposed time of the rank that exposes most."""
    rank = a_rank()
    waited = replace(rank, dims=(replace(rank.dims[0], waiting_s=2.95),))
    links = compare_links(a_job(a_call(count=1000)), the_topology())
    job = a_job(a_call(count=1000), ranks=(a_rank(1, step_s=2.0, computation_s=1.9), waited))
    assert saved(job, links) == {"hidden": 0.3, "calibrated": 0.005, "no_late_rank": 0.295}
    assert {row.rank for row in estimate_savings(job, links)} == {0}


def test_without_steps_nothing_is_promised():
    assert list(estimate_savings(a_job(a_call(), ranks=(a_rank(steps=0),)), ())) == []


# ------------------------------------------------------------------------------------ changes


TWENTY_STEPS = {"ranks": (a_rank(steps=20),)}
ONCE = a_call(collective="broadcast", count=1, in_steps=0)  # before the first step
FP8 = [
    a_call(collective="all_gather", dtype="float8_e4m3fn", bytes=size, count=20) for size in (MIB, 4 * MIB)
]
UNKNOWN = a_job(a_call(bytes=None, dtype=None))


@pytest.mark.parametrize(
    ("base", "head", "changes"),
    [
        # Jobs of other lengths.
        (a_job(a_call(count=20)), a_job(a_call(count=40), **TWENTY_STEPS), []),
        (a_job(a_call(count=20), ONCE), a_job(a_call(count=40), ONCE, **TWENTY_STEPS), []),
        (a_job(a_call(count=20)), a_job(a_call(count=41), **TWENTY_STEPS), []),
        (
            a_job(a_call(count=20)),
            a_job(a_call(count=60), **TWENTY_STEPS),
            ["dp all_reduce of 25 MiB (float32): 3 calls instead of 2"],
        ),
        (a_job(a_call()), a_job(), ["dp all_reduce of 25 MiB (float32): 0 calls instead of 10"]),
        # Another dtype is one change.
        (
            a_job(*FP8),
            a_job(*(replace(call, dtype="bfloat16", bytes=2 * call.bytes) for call in FP8)),
            [
                "dp all_gather of 2 MiB (bfloat16) instead of 1 MiB (float8_e4m3fn), 2.00x the bytes",
                "dp all_gather of 8 MiB (bfloat16) instead of 4 MiB (float8_e4m3fn), 2.00x the bytes",
            ],
        ),
        # Other bytes, and an unknown size.
        (
            a_job(a_call()),
            a_job(a_call(bytes=50 * MIB)),
            ["dp all_reduce of 50 MiB (float32) instead of 25 MiB (float32), 2.00x the bytes"],
        ),
        (UNKNOWN, UNKNOWN, []),
        (a_job(a_call()), UNKNOWN, ["dp all_reduce of - (unknown dtype) instead of 25 MiB (float32)"]),
    ],
)
def test_calls_per_step_are_compared(base, head, changes):
    analysis = compare_recordings([base], [head])
    assert [str(row) for row in analysis.call_changes] == changes
    assert analysis.exit_code == bool(changes)


def test_compare_recordings_reports_one_more_call_on_one_rank():
    base, one_more, fewer = (
        a_job(a_call(0, count=first), a_call(1, count=second), ranks=(a_rank(0), a_rank(1)))
        for first, second in ((100, 100), (100, 101), (90, 90))
    )
    changes = [
        *compare_recordings([base], [one_more]).call_changes,
        *compare_recordings([base], [fewer]).call_changes,
    ]
    assert [(row.ranks, row.per_step) for row in changes] == [((1,), (10.0, 10.1)), ((0, 1), (10.0, 9.0))]


def test_steps_of_one_recording_give_no_verdict():
    base, head = a_job(a_call(), ranks=(a_rank(step_s=0.9),)), a_job(a_call(), ranks=(a_rank(step_s=1.8),))
    analysis = compare_recordings([base], [head])
    step = analysis.time_changes[0]
    assert (step.part, step.base_s, step.head_s) == ("step_s", 0.9, 1.8)
    assert "one launch on each side" in step.why
    # Exposed communication is 5.5x: that makes the step 2x.
    assert ({row.verdict for row in analysis.time_changes}, analysis.exit_code) == ({Verdict.INCONCLUSIVE}, 0)


def test_changes_of_one_recording_a_side_judge_steps_beyond_launches():
    base, head = a_job(ranks=(a_rank(step_s=0.9),)), a_job(ranks=(a_rank(step_s=3.6),))
    slower, faster = compare_recordings([base], [head]), compare_recordings([head], [base])
    assert [row.verdict for row in slower.time_changes] == [
        "slower",
        "inconclusive",
        "slower",
        "inconclusive",
    ]
    assert "beyond the 3.2x by which launches of one build have differed" in slower.time_changes[0].why
    assert (slower.exit_code, faster.exit_code, faster.time_changes[0].verdict) == (1, 0, "faster")


def test_five_recordings_a_side_are_judged():
    bases, heads = (
        [a_job(a_call(), ranks=(a_rank(step_s=s + n / 1000),)) for n in range(5)] for s in (1.0, 1.2)
    )
    slower, faster = compare_recordings(bases, heads), compare_recordings(heads, bases)
    assert [row.verdict for row in slower.time_changes] == ["slower", "same", "slower", "same"]
    assert (slower.exit_code, faster.exit_code) == (1, 0)


def test_recordings_that_cannot_be_compared_are_refused():
    for other in (a_job(ranks=(a_rank(1),)), a_job(ranks=(a_rank(steps=0),))):
        with pytest.raises(UsageError, match="no rank is in all recordings"):
            compare_recordings([a_job()], [other])
    assert compare_recordings([other], [other]).time_changes == ()  # without steps on either side


def test_job_analysis_round_trips_through_json():
    job = a_job(a_call())
    analysis = analyze(job, the_topology(), [a_job(a_call(dtype="bfloat16"))])
    assert (analysis.exit_code, len(analysis.links), len(analysis.call_changes)) == (1, 1, 1)
    assert len(analysis.savings) == 2
    assert msgspec.json.decode(msgspec.json.encode(analysis), type=JobAnalysis) == analysis
    alone = JobAnalysis(exit_code=0, savings=tuple(estimate_savings(job, ())), bounds=judge_bounds(job, ()))
    assert analyze(job) == alone
