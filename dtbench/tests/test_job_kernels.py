"""Which kernels of a trace communicate: by their own arguments, by the names of the libraries that have them, or by the
stream that they run on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dtbench.records.job import Job
from dtbench.tests.made_up_traces import Event, kernel, nccl, write
from dtbench.traces.job import read_job
from dtbench.traces.kernel_names import function_of, kernel_collective

# As traces have them, with what they communicate.
COMMUNICATE = {
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
}  # fmt: skip
COMPUTE = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)",
    "void layernorm::ln_fwd_kernel<AllReduce<float>>(LaunchParams)",
    "void oneflow::layer_norm::LayerNormWarpImpl<Load, Store, BlockAllReduce<float>>(long)",
    "void block_all_reduce_sum_f32_f32_kernel<256>(float*, float*, int)",
    "blockAllReduce(float*)",
    "triton_poi_fused_all_reduce_wait_tensor_add_0",
    "triton_red_fused_one_shot_all_reduce_1",
    "_ZN5apex13reduce_kernelI9AllReduceEEvPf",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 2>(long const*)",
    "void deep_ep::elastic::combine_reduce_epilogue_impl<X>(Y)",
    "void fmha_fwd_splitkv_combine_kernel<ncclX>(x)",
    "void cutlass::device_kernel<gemm_dispatch_nccl>(x)",
    "void foo<nccl::Op>(ncclDevComm*)",
    "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlopsE",
    "_Z",
    "_Z9999short",
    "",
]


@pytest.mark.parametrize("name", COMMUNICATE)
def test_kernels_of_libraries_communicate(name: str) -> None:
    assert kernel_collective(name) == COMMUNICATE[name]


@pytest.mark.parametrize("name", COMPUTE)
def test_kernels_that_speak_of_reductions_within_a_block_compute(name: str) -> None:
    assert kernel_collective(name) == ""


def test_function_of_leaves_types_and_arguments_out() -> None:
    assert function_of("void a::(anonymous namespace)::f<b::c<1>>(d::e)") == "a::f"
    assert function_of("_ZN12_GLOBAL__N_11fIfEEvT_") == "f"
    assert function_of("triton_poi_fused_add_0") == "triton_poi_fused_add_0"


def read(tmp_path: Path, events: Sequence[Event]) -> Job:
    return read_job([write(tmp_path, events)])


def test_a_custom_all_reduce_is_exposed_communication(tmp_path: Path) -> None:
    name = "void vllm::cross_device_reduce_2stage<__half, 4>(vllm::RankData*)"
    job = read(tmp_path, [kernel(0, 100), kernel(100, 50, name), kernel(150, 10)])
    (call,) = job.collectives
    assert (call.collective, call.count) == ("all_reduce", 1)
    assert job.ranks[0].communication_s == job.ranks[0].exposed_s == pytest.approx(50e-6)


def test_a_kernels_own_arguments_count_before_its_name(tmp_path: Path) -> None:
    said = {"Collective name": "_allgather_base", "In msg nelems": 10, "Out msg nelems": 20, "dtype": "Float"}
    job = read(tmp_path, [kernel(0, 10), kernel(10, 30, "_ZN5other6kernelE", 9, **said)])
    assert [(call.collective, call.bytes) for call in job.collectives] == [("all_gather", 80)]


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
        # One stream for all, as under inference.
        ([kernel(0, 900, stream=20), nccl(900, 100), kernel(1000, 40, STRANGER, 20)], ""),
        ([kernel(0, 900), kernel(900, 30, "void blockAllReduce<4>(x)")], ""),
        ([kernel(0, 900), kernel(900, 30, "triton_poi_fused_all_gather_into_tensor_3")], ""),
    ],
)  # fmt: skip
def test_unknown_kernels_that_may_communicate_are_named(
    tmp_path: Path, events: list[Event], named: str
) -> None:
    notes = [note for note in read(tmp_path, events).notes if "may communicate" in note]
    assert notes == ([DOUBT.format(named)] if named else [])


def test_only_the_longest_unknown_kernels_are_named(tmp_path: Path) -> None:
    events = [kernel(n * 100, 10 + n, f"all_gather_{'abcde'[n]}(x)") for n in range(5)]
    (note,) = [note for note in read(tmp_path, events).notes if "may communicate" in note]
    assert note == DOUBT.format("all_gather_e (14.0 µs), all_gather_d (13.0 µs), all_gather_c (12.0 µs), ...")
