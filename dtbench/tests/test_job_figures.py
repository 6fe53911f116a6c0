"""The figures of a job: they are of the same steps, parts add up to wholes, and a late rank is named."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from dtbench.errors import DtbenchError
from dtbench.records.comparison import Verdict
from dtbench.records.job import Job
from dtbench.reporting.html import Sources, render
from dtbench.reporting.job_tables import headline, tables
from dtbench.tests.html_page import Page
from dtbench.tests.made_up_traces import (
    Event,
    event,
    gloo,
    header,
    kernel,
    launch,
    nccl,
    note,
    op,
    text_of,
    write,
)
from dtbench.tests.test_job_cli import text_of as printed
from dtbench.traces.analysis import analyze, compare_recordings, find_late_ranks
from dtbench.traces.job import read_job
from dtbench.traces.kernel_names import function_of, kernel_collective
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
    members = {"Process Group Name": group["pg_name"], "Process Group Ranks": str(group["ranks"])}
    return nccl(start, end - start, Seq=number, **members, **{"Group size": 4})


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
        events = list[Event]()
        part, late_us = (late or {}).get(rank, ("", 0.0))
        for number, (duration, end) in enumerate(zip(durations_us, accumulate(durations_us), strict=True)):
            begin = end - duration
            events += [
                note(f"ProfilerStep#{number + 5}", begin, duration),
                kernel(begin, 2000 + (late_us if part == "computation" else 0)),
                kernel(end - 1500, 500),  # hides a part of the calls
                event("Memcpy HtoD", end - 150, 50, "gpu_memcpy", 9),
            ]
            start = begin + 2000 + late_us + rank
            calls = [call(start, end - 200, number), call(start + 500, end - 600, number, TP)]
            events += calls[: last_calls if number == len(durations_us) - 1 else 2]
        write(folder, events, rank, world=4, groups=[DP, TP], **more)
    return read_job([folder])


def committed(place: str) -> Job:
    path = RESULTS / place
    return read_job([path] if path.is_dir() else sorted(path.parent.glob(path.name)))


# ------------------------------------------------------------------------------- parts and wholes


def check_parts_of_ranks(job: Job) -> None:
    for rank in job.ranks:
        for step in (*rank.each_step, rank.mean_step):
            alone_s = step.step_s - step.computation_s - step.exposed_s - step.idle_s
            assert -1e-9 <= alone_s <= step.copy_s + 1e-9
            assert step.exposed_s <= step.communication_s + 1e-9
            assert (step.host_bound_s or 0) <= step.idle_s + 1e-9
        count = len(rank.each_step)
        assert (rank.steps, rank.step_s) == (count, rank.mean_step.step_s if count else None)
        exposed_s = (count or 1) * rank.mean_step.exposed_s
        assert sum(dim.exposed_s for dim in rank.dims) == pytest.approx(exposed_s, abs=1e-9)
        for dim in rank.dims:
            assert (dim.waiting_s or 0) <= dim.exposed_s + 1e-9 <= dim.communication_s + 2e-9
    for collective in job.collectives:
        assert collective.timed == (collective.in_steps or collective.count)
        assert collective.best_s <= collective.median_s
        assert (collective.transfer_s or 0) <= collective.mean_s + 1e-9


def check_savings(job: Job) -> None:
    saved = {(row.mesh_dim, row.assumption): row.saved_s for row in analyze(job).savings}
    hidden_s = {
        mesh_dim: saved_s for (mesh_dim, assumption), saved_s in saved.items() if assumption == "hidden"
    }
    for row in analyze(job).savings:
        parts_s = [saved.get((row.mesh_dim, part), 0.0) for part in ("calibrated", "no_late_rank")]
        assert sum(parts_s) <= hidden_s[row.mesh_dim] + 1e-9
        step = next(rank.mean_step for rank in job.ranks if rank.rank == row.rank)
        assert (sum(hidden_s.values()), row.step_s) == (pytest.approx(step.exposed_s), step.step_s)


def check_tables(job: Job) -> None:
    """The dims' shares add up to the headline's, and the ranks' to it over all steps."""
    shown = {table.caption.split(",")[0]: table for table in tables(job, analyze(job))}
    exposed = {
        caption: [*column.cells]
        for caption, table in shown.items()
        for column in table.columns
        if column.header == "exposed/step"
    }
    steps = [rank.mean_step for rank in job.ranks]
    share = 100 * sum(step.exposed_s for step in steps) / sum(step.step_s for step in steps)
    assert headline(job)[0] == f"{share:.0f}%"
    if dims := exposed.get("Communication by mesh dim"):
        assert sum(float(cell.rstrip("%")) for cell in dims) == pytest.approx(share, abs=0.06 * len(dims))
    assert exposed["Ranks"] == [f"{step.exposed_s / step.step_s:.1%}" for step in steps]


@pytest.mark.parametrize(
    "source",
    [
        *COMMITTED,
        {},
        {"late": {2: ("idle", 4000.0)}},
        {"late": {1: ("computation", 3000.0), 3: ("idle", 3500.0)}},
        {"durations_us": (900_000.0, STEP_US, STEP_US, STEP_US)},
        {"durations_us": (STEP_US, 30_000.0, STEP_US), "last_calls": 1},
    ],
)
def test_parts_of_a_job_add_up(tmp_path: Path, source: str | dict[str, Any]) -> None:
    """source: a committed job, or the arguments of a made-up one."""
    job = committed(source) if isinstance(source, str) else made_up(tmp_path / "job", **source)
    check_parts_of_ranks(job)
    check_savings(job)
    check_tables(job)


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


def test_a_partial_last_step_is_named_and_in_no_figure(tmp_path: Path) -> None:
    job = made_up(tmp_path / "job", last_calls=1)
    assert "ranks 0, 1, 2, 3: the last step is partial and excluded from all figures" in job.notes
    assert {rank.steps for rank in job.ranks} == {4}
    assert {collective.calls_in_steps / 4 for collective in job.collectives} == {1}


@pytest.mark.parametrize(
    ("window", "steps", "note"),
    [
        ({"asked": 5, "whole": 5, "warm": True}, (5, 0), ""),  # all iterations of a suite count
        (
            {"asked": 100, "whole": 4, "why": "the program ended"},
            (3, 2),
            "ranks 0, 1, 2, 3: 4 of the 100 requested steps were recorded: the program ended",
        ),
        (
            {"asked": 3, "whole": 0, "why": "killed"},
            (1, 4),
            "ranks 0, 1, 2, 3: 0 of the 3 requested steps were recorded: killed",
        ),
        # Invalid values are ignored.
        ({"asked": "x", "whole": []}, (4, 1), ""),
        ({"whole": 10**30}, (4, 1), ""),
    ],
)
def test_recording_window_says_which_steps_count(
    tmp_path: Path, window: dict[str, Any], steps: tuple[int, int], note: str
) -> None:
    job = made_up(tmp_path / "job", (90_000.0, *(STEP_US,) * 4), dtbench_window=window)
    assert {(rank.steps, rank.excluded_steps) for rank in job.ranks} == {steps}
    assert [text for text in job.notes if "requested" in text] == [note] * bool(note)


def test_ranks_without_steps_leave_none_to_the_others(tmp_path: Path) -> None:
    made_up(tmp_path / "job")
    write(tmp_path / "job", [kernel(0, 100)], 3, world=4, groups=[DP, TP])
    job = read_job([tmp_path / "job"])
    assert {rank.steps for rank in job.ranks} == {0}
    assert all("whole trace" in table.caption for table in tables(job, analyze(job)))


# ------------------------------------------------------------------------------- late ranks


@pytest.mark.parametrize(
    ("part", "cause"), [("computation", "it computes longer"), ("idle", "it is idle longer")]
)
def test_late_rank_follows_the_verdict_in_the_printed_table_and_the_page(
    tmp_path: Path, part: str, cause: str
) -> None:
    job = made_up(tmp_path / "job", late={2: (part, 5000.0)})
    analysis = analyze(job)
    (late,) = analysis.late_ranks
    assert (late.rank, late.part, late.last_share) == (2, part, 1.0)
    assert late.late_s == pytest.approx(5e-3, rel=0.01)
    sentence = f"Rank 2 is late by 5.00 ms a step: {cause} than the others"
    verdict = "Dp all_reduce is mixed: 57% of its time is waiting for rank 2, which comes 5.00 ms late"
    first, second, *_ = printed(job, analysis).split(".\n")
    assert (first, second.replace("\n", " ").startswith(sentence)) == (
        f"{verdict}, and the rest is transfer",
        True,
    )
    page = render(Sources(job=job, analysis=analysis))
    assert f"<title>{verdict}" in page and sentence in Page(page).text


def test_find_late_ranks_names_several(tmp_path: Path) -> None:
    job = made_up(tmp_path / "job", late={1: ("idle", 4000.0), 3: ("computation", 4000.0)})
    assert set() < {late.rank for late in find_late_ranks(job)} <= {1, 3}


def test_ranks_that_wait_for_links_are_not_late(tmp_path: Path) -> None:
    job = made_up(tmp_path / "job", late={2: ("idle", 300.0)})
    assert "is late by" not in printed(job, analyze(job))
    assert [find_late_ranks(recorded) for recorded in (job, *map(committed, COMMITTED))] == [()] * 5


# ------------------------------------------------------------------------------- against a base


def test_new_late_rank_exits_with_1_and_leads_the_page(tmp_path: Path) -> None:
    base = made_up(tmp_path / "base")
    head = made_up(tmp_path / "head", (50_000.0,) * 5, late={2: ("idle", 40_000.0)})
    analysis = compare_recordings([base], [head])
    slower = {row.part for row in analysis.time_changes if row.verdict is Verdict.SLOWER}
    assert {"step_s", "lateness of rank 2 over dp", "lateness of rank 2 over tp"} <= slower
    page = Page(render(Sources(job=head, analysis=analyze(head, None, [base]))))
    assert page.text.strip().startswith("Step: 10.0 ms → 50.0 ms, 5.00x slower than the base")
    back = compare_recordings([head], [base])
    assert (analysis.exit_code, back.exit_code, back.time_changes[0].verdict) == (1, 0, Verdict.FASTER)


def test_lateness_that_adds_little_to_a_step_is_no_verdict(tmp_path: Path) -> None:
    base = made_up(tmp_path / "base", late={1: ("idle", 50.0)})
    analysis = compare_recordings([base], [made_up(tmp_path / "head", late={1: ("idle", 500.0)})])
    late = [row for row in analysis.time_changes if row.part == "lateness of rank 1 over dp"]
    assert late and late[0].head_s > 5 * late[0].base_s and analysis.exit_code == 0


# Kernel name in a trace -> collective; "" for computation.
KERNELS = {
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals, int)": "all_reduce",
    "void vllm::cross_device_reduce_2stage<__half, 4>(vllm::RankData*, int)": "all_reduce",
    "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(sglang::RankData*)": "all_reduce",
    "void (anonymous namespace)::all_reduce_one_shot_push_kernel<__half, 4u, true>(X)": "all_reduce",
    "_ZN4vllm26cross_device_reduce_1stageI13__nv_bfloat16Li8EEEvPNS_8RankDataE": "all_reduce",
    "void aiter::allreduce_fusion_kernel_2stage<__hip_bfloat16, 8>(aiter::RankData*)": "all_reduce",
    "void aiter::reduce_scatter_split_lastdim<float, 8>(aiter::RankData*)": "reduce_scatter",
    "void aiter::allgather_vec<float, 8>(aiter::RankData*)": "all_gather",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<half, X>, half>(x)": "all_reduce",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8, true>(AllReduceParams)": "all_reduce",
    "void tensorrt_llm::kernels::twoShotAllReduceKernel<__half, 8>(AllReduceParams)": "all_reduce",
    "void tensorrt_llm::kernels::reduce_fusion::lamport_style_one_shot_all_reduce_norm_kernel<T>(x)": "all_reduce",
    "void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport<P, T, 8>(X)": "all_reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<P>(X)": "all_reduce",
    "void flashinfer::x::moefinalize_allreduce_fusion_kernel_oneshot_lamport<X>(Y)": "all_reduce",
    "void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<8, float>(x)": "all_reduce",
    "void flashinfer::mixed_comm::fused_reducescatter_allreduce_kernel<X>(Y)": "reduce_scatter",
    "void moeA2ADispatchKernel<X>(Y)": "all_to_all",
    "userbuffers_fp16_sum_inplace_gpu_mc(int, int)": "all_reduce",
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop_fp8<2, __nv_fp8_e4m3>(int)": "reduce_scatter",
    "void userbuffers_fp16_sum_inplace_gpu_rw_ag<8>(int)": "all_gather",
    "kuserbuffers_pushsend(int*, int*)": "send",
    "kuserbuffers_pushrecv(int)": "recv",
    "kuserbuffers_pushsendrecv_atomic(int)": "send_recv",
    "void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16, 8>(float**)": "all_reduce",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16, 8, false, false>(float**)": "all_reduce",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16, 8, true, false>(float**)": "reduce_scatter",
    "_ZN64_GLOBAL__N__62167398_25_CUDASymmetricMemoryOps_cu_39041df9_1350726two_shot_all_reduce_kernel"
    "IN3c108BFloat16ELi16ELi2ELb1ELb0EEEvPPT_": "reduce_scatter",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(X)": "all_reduce",
    "void (anonymous namespace)::multimem_all_gather_kernel<16>(X)": "all_gather",
    "c10d::symmetric_memory::barrier_kernel(unsigned int**, int)": "barrier",
    "c10d::nvshmem_extension::allToAllV(void*, void*)": "all_to_all",
    "nvshmemi_proxy_quiet(x)": "unknown",
    "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)": "barrier",
    "void rdxn_on_stream_kernel<float, (rdxn_ops)0>(int)": "all_reduce",
    "void alltoall_on_stream_kernel<float>(int)": "all_to_all",
    "void tensorrt_llm::kernels::mnnvl::twoshot_allreduce_kernel<8, float>(float*)": "all_reduce",
    "void tensorrt_llm::kernels::lowPrecisionTwoShotAllReduceKernel<half, T, 8>(x)": "all_reduce",
    "one_shot_all_reduce_kernel_optimized": "all_reduce",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)": "all_to_all",
    "void deep_ep::internode_ll::combine<3, 7168, 9>(void*)": "all_to_all",
    "void deep_ep::elastic::hybrid_dispatch_impl<X>(Y)": "all_to_all",
    "void deep_ep::intranode::cached_notify_combine<8>(void**)": "barrier",
    "EpDispatchIntraNodeKernel_bf16": "all_to_all",
    "void pplx::internode::dispatchKernel<X>(Y)": "all_to_all",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "_Z40ncclDevKernel_ReduceScatter_Sum_bf16_RING24ncclDevKernelArgsStorageILm4096EE": "reduce_scatter",
    "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "all_gather",
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "all_reduce",
    "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32(x)": "all_reduce",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>) [clone .kd]": "unknown",
    "mscclKernel_Sum_half_Simple_false(x)": "unknown",
    "void mscclpp::collective::allreduceNvlsPacket<X>(Y)": "all_reduce",
    "void oneccl_allreduce_pcie<float>": "all_reduce",
    "class AllreduceMediumKernel_GlobalSync<float>": "all_reduce",
    # Reductions within a block, and other computation whose name resembles communication.
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)": "",
    "void layernorm::ln_fwd_kernel<AllReduce<float>>(LaunchParams)": "",
    "void oneflow::layer_norm::LayerNormWarpImpl<Load, Store, BlockAllReduce<float>>(long)": "",
    "void block_all_reduce_sum_f32_f32_kernel<256>(float*, float*, int)": "",
    "blockAllReduce(float*)": "",
    "triton_poi_fused_all_reduce_wait_tensor_add_0": "",
    "triton_red_fused_one_shot_all_reduce_1": "",
    "_ZN5apex13reduce_kernelI9AllReduceEEvPf": "",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 2>(long const*)": "",
    "void deep_ep::elastic::combine_reduce_epilogue_impl<X>(Y)": "",
    "void fmha_fwd_splitkv_combine_kernel<ncclX>(x)": "",
    "void cutlass::device_kernel<gemm_dispatch_nccl>(x)": "",
    "void foo<nccl::Op>(ncclDevComm*)": "",
    "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlopsE": "",
    "_Z": "",
    "_Z9999short": "",
    "": "",
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_collective_of_a_kernel_follows_from_its_name(name: str) -> None:
    assert kernel_collective(name) == KERNELS[name]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("void a::(anonymous namespace)::f<b::c<1>>(d::e)", "a::f"),
        ("_ZN12_GLOBAL__N_11fIfEEvT_", "f"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
    ],
)
def test_function_of_leaves_types_and_arguments_out(name: str, function: str) -> None:
    assert function_of(name) == function


def doubts(tmp_path: Path, events: Sequence[Event]) -> list[str]:
    """Returns the notes about kernels that may communicate."""
    return [text for text in read_job([write(tmp_path, events)]).notes if "may communicate" in text]


STRANGER = "void newlib::exchange<8>(int*)"
DOUBT = "rank 0: kernels that count as computation may communicate: {}; dtbench does not know their names"


@pytest.mark.parametrize(
    ("events", "named"),
    [
        # Stream 20 has NCCL's kernels and next to nothing else; stream 7 computes.
        ([kernel(0, 900), nccl(0, 100), kernel(100, 40, STRANGER, 20)], "newlib::exchange (40.0 µs)"),
        ([kernel(0, 900), nccl(0, 100), *(kernel(n, 9, STRANGER, 20) for n in (2, 30))], "newlib::exchange (18.0 µs)"),
        ([kernel(0, 900), kernel(900, 30, "my_all_gather<4>(x)")], "my_all_gather (30.0 µs)"),
        # A copy of torch's own before a collective, and what computes elsewhere, too.
        ([kernel(0, 900), nccl(0, 100), kernel(100, 40, "void at::native::cat<1>(x)", 20)], ""),
        ([kernel(0, 900, STRANGER), nccl(0, 100), kernel(100, 40, STRANGER, 20)], ""),
        # A single stream, as in inference.
        ([kernel(0, 900, stream=20), nccl(900, 100), kernel(1000, 40, STRANGER, 20)], ""),
        ([kernel(0, 900), kernel(900, 30, "void blockAllReduce<4>(x)")], ""),
        ([kernel(0, 900), kernel(900, 30, "triton_poi_fused_all_gather_into_tensor_3")], ""),
    ],
)  # fmt: skip
def test_unknown_kernels_that_may_communicate_are_named(
    tmp_path: Path, events: list[Event], named: str
) -> None:
    assert doubts(tmp_path, events) == ([DOUBT.format(named)] if named else [])


def test_only_the_longest_unknown_kernels_are_named(tmp_path: Path) -> None:
    events = [kernel(n * 100, 10 + n, f"all_gather_{'abcde'[n]}(x)") for n in range(5)]
    names = "all_gather_e (14.0 µs), all_gather_d (13.0 µs), all_gather_c (12.0 µs), ..."
    assert doubts(tmp_path, events) == [DOUBT.format(names)]


@pytest.mark.parametrize(
    ("events", "shows"),
    [
        ([op("c10d::allreduce_", 0, 9), op("record_param_comms", 1, 5)], "nccl"),
        ([note("nccl:all_reduce", 0, 9), *gloo(20, 9)], "nccl:all_reduce"),
        ([note("xccl:broadcast", 0, 9)], "xccl:broadcast"),
        ([event("graph", 5, 9, "hpu_op")], "hpu_op"),
        ([event("hccl::all_reduce", 5, 9, "mtia_ccp_events")], "mtia_ccp_events"),
        ([op("aten::_mps_convolution", 5, 9)], "aten::_mps_convolution"),
        ([op("npu::npu_fusion_attention", 5, 9)], "npu::npu_fusion_attention"),
    ],
)
def test_trace_without_kernels_of_an_accelerators_job_is_refused(
    tmp_path: Path, events: list[Event], shows: str
) -> None:
    message = (
        f"rank0.json has no kernels, although '{shows}' shows.*ProfilerActivity.CPU and ProfilerActivity.CUDA"
    )
    with pytest.raises(DtbenchError, match=message):
        read_job([write(tmp_path, [op("aten::mm", 0, 9), launch(3, 1), *events])])


def test_trace_cut_off_before_its_kernels_is_refused(tmp_path: Path) -> None:
    text = text_of([op("aten::mm", 0, 9), op("c10d::allreduce_", 9, 9), kernel(20, 9)])
    (tmp_path / "t.json").write_bytes(text[: text.index(b'"kernel"')])
    with pytest.raises(DtbenchError, match="no kernels before the point where it is cut off, although"):
        read_job([tmp_path])


@pytest.mark.parametrize("backend", ["gloo", "mpi", "ucc", "ccl", "", "undefined"])
def test_trace_of_a_job_on_cpus_is_read_without_kernels(tmp_path: Path, backend: str) -> None:
    """Also where a profiler with CUDA's activities left calls of its runtime, as it does at its end."""
    head = header()
    head["distributedInfo"]["backend"] = backend
    (tmp_path / "t.json").write_bytes(
        text_of([op("aten::mm", 0, 9), op("c10d::allreduce_", 9, 5), launch(30, 1)], head)
    )
    job = read_job([tmp_path])
    assert (job.ranks[0].computation_s, job.collectives) == (pytest.approx(9e-6), ())
    assert any("calls of torch.distributed have no times" in text for text in job.notes)


@pytest.mark.parametrize(
    ("config", "kernels", "backend"),
    [
        ("cpu:gloo", False, "gloo"),
        ("cpu:gloo,cuda:nccl", False, "gloo"),
        ("cpu:gloo,cuda:nccl", True, "nccl"),
        (None, True, "undefined"),
    ],
)
def test_backend_that_torch_chose_is_named(
    tmp_path: Path, config: str | None, kernels: bool, backend: str
) -> None:
    head = header(
        groups=[{"pg_name": "0", "pg_desc": "default_pg", "backend_config": config, "ranks": [0, 1]}]
    )
    head["distributedInfo"]["backend"] = "undefined"
    (tmp_path / "t.json").write_bytes(
        text_of([kernel(0, 9)] if kernels else [op("aten::mm", 0, 9), *gloo(9, 9)], head)
    )
    assert read_job([tmp_path]).backend == backend
