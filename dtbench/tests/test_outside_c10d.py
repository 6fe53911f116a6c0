"""Kernels that communicate without c10d: collective, dtype and bytes, of which none is guessed."""

from pathlib import Path
from typing import Any

import pytest

from dtbench.records.job import Collective
from dtbench.tests.made_up_traces import kernel, launch, op, write
from dtbench.traces.job import read_job
from dtbench.traces.kernel_names import kernel_collective, kernel_dtype


def calls_of(tmp_path: Path, kernel_name: str, ops: list[tuple[str, Any, Any]]) -> tuple[Collective, ...]:
    """Returns the calls in a trace whose only such kernel is launched within ops, given as name, shapes and types."""
    events = [launch(20, 1), kernel(100, 50, kernel_name, correlation=1), kernel(200, 10)]
    for depth, (name, shapes, types) in enumerate(ops):
        events.append(op(name, depth, 50 - 2 * depth, **{"Input Dims": shapes, "Input type": types}))
    return read_job([write(tmp_path, events, groups=[])]).collectives


BF16 = "c10::BFloat16"
MULTIMEM = (
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)"
)
ONE_SHOT = "void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**)"
TWO_SHOT = "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16, 8>(float**)"
SCATTER = "void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16, 8, true, false>(float**)"
GATHER = "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*, char*)"
STAGE_1 = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals)"
STAGE_2 = "void vllm::cross_device_reduce_2stage<__half, 8>(vllm::RankData*, vllm::RankSignals)"


@pytest.mark.parametrize(
    ("name", "ops", "expected"),
    [
        (
            MULTIMEM,
            [("symm_mem::multimem_all_reduce_", [[8, 128], [], []], [BF16, "", ""])],
            ("all_reduce", "bfloat16", 2048),
        ),
        (
            ONE_SHOT,
            [("symm_mem::one_shot_all_reduce", [[64], [], []], [BF16, "", ""])],
            ("all_reduce", "bfloat16", 128),
        ),
        # The buffer is larger than what is reduced.
        (
            ONE_SHOT,
            [("symm_mem::one_shot_all_reduce_copy", [[999], [64], [], []], [BF16, BF16, "", ""])],
            ("all_reduce", "bfloat16", 128),
        ),
        (
            TWO_SHOT,
            [("symm_mem::two_shot_all_reduce_", [[100], [], []], ["float", "", ""])],
            ("all_reduce", "float32", 400),
        ),
        (
            SCATTER,
            [("symm_mem::reduce_scatter_out", [[100], [], [], [25]], ["float", "", "Scalar", "float"])],
            ("reduce_scatter", "float32", 400),
        ),
        (
            GATHER,
            [("symm_mem::multimem_all_gather_out", [[10], [], [80]], [BF16, "", BF16])],
            ("all_gather", "bfloat16", 160),
        ),
        (
            STAGE_1,
            [
                ("vllm::all_reduce", [[4, 8]], [BF16]),
                (
                    "_C_custom_ar::all_reduce",
                    [[], [4, 8], [4, 8], [], []],
                    ["Scalar", BF16, BF16, "Scalar", "Scalar"],
                ),
            ],
            ("all_reduce", "bfloat16", 64),
        ),
        (
            STAGE_2,
            [
                (
                    "_C_custom_ar::all_reduce_unreg",
                    [[], [50], [8000], [50]],
                    ["Scalar", "c10::Half", "unsigned char", "c10::Half"],
                )
            ],
            ("all_reduce", "float16", 100),
        ),
        (
            "c10d::nvshmem_extension::allToAllV(void*, void*)",
            [("symm_mem::nvshmem_all_to_all", [[30], [30], []], ["float", "float", ""])],
            ("all_to_all", "float32", 120),
        ),
        # Without the op, or shapes, only the kernel's name tells.
        (MULTIMEM, [], ("all_reduce", "bfloat16", None)),
        (MULTIMEM, [("symm_mem::multimem_all_reduce_", None, None)], ("all_reduce", "bfloat16", None)),
        (GATHER, [], ("all_gather", None, None)),
        (STAGE_2, [("vllm::all_reduce", [[4, 8]], [BF16])], ("all_reduce", "float16", None)),
        # An op whose kernels send other tensors, or less than its buffers hold.
        (
            MULTIMEM,
            [("symm_mem::fused_matmul_all_reduce", [[4, 8], [8, 8]], [BF16, BF16])],
            ("all_reduce", "bfloat16", None),
        ),
        (
            GATHER,
            [("symm_mem::multimem_all_reduce_", [[8], [], []], [BF16, "", ""])],
            ("all_gather", None, None),
        ),
        (
            MULTIMEM,
            [("symm_mem::multimem_all_reduce_", [[8], [], []], ["float", "", ""])],
            ("all_reduce", "bfloat16", None),
        ),
        (
            "c10d::nvshmem_extension::allToAllV(void*, void*)",
            [("symm_mem::all_to_all_vdev", [[30], [90], [4], [4], []], ["float"] * 5)],
            ("all_to_all", None, None),
        ),
        (
            "void (anonymous namespace)::multimem_one_shot_reduce_kernel<float, 16>(x)",
            [("symm_mem::tile_reduce", [[4, 8], [4, 8]], ["float"] * 2)],
            ("reduce", "float32", None),
        ),
        # Damaged arguments.
        (MULTIMEM, [("symm_mem::multimem_all_reduce_", [[8], []], [BF16])], ("all_reduce", "bfloat16", None)),
        (MULTIMEM, [("symm_mem::multimem_all_reduce_", "x", {"a": 1})], ("all_reduce", "bfloat16", None)),
        (STAGE_1, [("_C_custom_ar::all_reduce", [[]], ["Scalar"])], ("all_reduce", "bfloat16", None)),
        # DeepEP and NVSHMEM are no ops of torch.
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", [], ("all_to_all", None, None)),
        (
            "void deep_ep::intranode::combine<__nv_bfloat16, (int)8, (int)768, (int)4096>(T1 *)",
            [],
            ("all_to_all", "bfloat16", None),
        ),
        ("void deep_ep::internode::dispatch<false, 4, true, 16384, 8>(x)", [], ("all_to_all", None, None)),
        ("void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)", [], ("all_to_all", None, None)),
        ("void rdxn_on_stream_kernel<float, (rdxn_ops)0>(int)", [], ("all_reduce", "float32", None)),
        ("void fcollect_on_stream_kernel<char>(int, char*)", [], ("all_gather", None, None)),
    ],
)
def test_call_is_described_by_its_kernel_and_op(
    tmp_path: Path, name: str, ops: list[tuple[str, Any, Any]], expected: tuple[str, str | None, int | None]
) -> None:
    (call,) = calls_of(tmp_path, name, ops)
    assert (call.collective, call.dtype, call.bytes) == expected
    assert (call.mesh_dim, call.group_size) == ("unknown group", None)


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16>>(x)",
        "void my_moe::dispatch<8, 768>(int4*)",
        "void vllm::moe::moe_dispatch_tokens<float>(x)",
        "void deep_ep::layout::get_dispatch_layout<256, 32, 2>(long const*)",
        "void cutlass::combine<float>(x)",
        "void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(x)",
        "void flash::flash_fwd_splitkv_combine_kernel<float>(x)",
    ],
)
def test_kernel_with_a_similar_name_computes(tmp_path: Path, name: str) -> None:
    shapes = ("symm_mem::multimem_all_reduce_", [[8, 128], [], []], [BF16, "", ""])
    assert calls_of(tmp_path, name, [shapes]) == () and kernel_collective(name) == ""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("void <unnamed>::multimem_all_reduce_kernel<c10::BFloat16, (int)16>(c10::BFloat16*)", "bfloat16"),
        ("multimem_all_reduce_kernel<bfloat16>", "bfloat16"),
        ("_ZN4vllm26cross_device_reduce_1stageI13__nv_bfloat16Li8EEEvPNS_8RankDataE", "bfloat16"),
        ("_ZN4vllm26cross_device_reduce_2stageI6__halfLi8EEEvPNS_8RankDataE", "float16"),
        ("_ZN4vllm26cross_device_reduce_2stageIfLi8EEEvPNS_8RankDataE", "float32"),
        (
            (
                "_ZN64_GLOBAL__N__62167398_25_CUDASymmetricMemoryOps_cu_39041df9_1350726"
                "two_shot_all_reduce_kernelIN3c108BFloat16ELi16ELi2ELb1ELb0EEEvPPT_"
            ),
            "bfloat16",
        ),
        ("void primus_turbo::deep_ep::intranode::combine<hip_bfloat16, 8, 1024, true>(x)", "bfloat16"),
        # Sums in another dtype, copies in any type, parameters instead of template arguments, and no type at all.
        ("void x::one_shot_all_reduce_kernel<__half, float, 8>(x)", None),
        ("void alltoall_on_stream_kernel<float>(int)", None),
        ("void x::one_shot_all_reduce_kernel(float*)", None),
        ("void aiter::allgather_vec<float, 8>(aiter::RankData*)", None),
        ("", None),
    ],
)
def test_dtype_of_a_kernel_follows_from_its_template_arguments(name: str, dtype: str | None) -> None:
    assert kernel_dtype(name) == dtype
