"""Distinguishes communication kernels from computation by their function names.

Comments cite the repository and file that define the names. Template arguments and parameters are ignored, because they
may name a reduction within a thread block (`LayerNorm<BlockAllReduce>`), which is computation.
"""

import re
from functools import lru_cache

from dtbench.traces.communication import parse_collective

# Pattern of the name after its namespaces -> its collective; "" to parse the collective from the name. The first match
# counts.
_COLLECTIVES = (
    # NCCL and RCCL: src/device/generate.py; MSCCL: ROCm/rccl src/misc/msccl; MSCCL++: microsoft/mscclpp
    # src/ext/collectives; oneCCL: intel/torch-xpu-ops#5384; NVSHMEM and torch: c10d/symm_mem/*_extension.cu.
    (r"(?:nccl|rccl|msccl|oneccl|nvshmem|rocshmem)\w*(?:::\w+)*", ""),
    # NVSHMEM: src/include/internal/non_abi/nvshmemi_h_to_d_coll_defs.cuh.
    (r"(?:barrier|sync)\w*_on_stream_kernel\w*", "barrier"),
    (r"rdxn\w*_on_stream_kernel\w*", "all_reduce"),
    (r"fcollect\w*_on_stream_kernel\w*", "all_gather"),
    (r"(?:alltoall|broadcast|reducescatter)\w*_on_stream_kernel\w*", ""),
    # torch: c10d/symm_mem/CUDASymmetricMemory.cu.
    (r"c10d::symmetric_memory::barrier_kernel", "barrier"),
    (r"c10d::symmetric_memory::put_signal_kernel", "send"),
    (r"c10d::symmetric_memory::wait_signal_kernel", "recv"),
    (r"c10d::nccl_extension::lsa_put\w*|nvshmem_extension::\w*put\w*", "send"),
    (r"c10d::nccl_extension::lsa_get\w*", "recv"),
    # torch: c10d/symm_mem/CUDASymmetricMemoryOps.cu; FBGEMM: gen_ai/src/comm/car.cu; sglang, in Triton:
    # srt/distributed/device_communicators/triton_symm_mem_ag.py and its kin.
    (r"multimem_one_shot_reduce_kernel", "reduce"),
    (r"multimem_all_gather\w*", "all_gather"),
    (r"multimem_all_reduce_kernel|(?:multimem_)?(?:one|two)_?shot_?all_?reduce\w*", "all_reduce"),
    (r"fbgemm_gpu::reduce_scatter", "reduce_scatter"),
    # vLLM: csrc/custom_all_reduce.cuh, csrc/quickreduce/quick_reduce.h; aiter: csrc/include/custom_all_reduce*.cuh,
    # quick_all_reduce.cuh; sglang: sgl-kernel/csrc/allreduce, jit_kernel.
    (r"cross_device_reduce_\w+|allreduce_(?:rmsnorm_)?prototype_twoshot|allReduceQuantFp8", "all_reduce"),
    (r"all_reduce_(?:one|two)_shot\w*|allreduce_LL_[12]node|ar_(?:ll_)?gfx1250\w*", "all_reduce"),
    (r"aiter::allgather_(?:lastdim|naive|vec)|ag_gfx1250_\w+", "all_gather"),
    (r"aiter::reduce_scatter_\w+|rs_gfx1250_\w+", "reduce_scatter"),
    # TensorRT-LLM: kernels/customAllReduceKernels.cu and kernels/communicationKernels; FlashInfer has them in
    # include/flashinfer/comm/trtllm_*.cuh, and its own in mixed_comm.cuh and pcie_ipc_all_reduce.cuh.
    (r"(?:lowPrecision\w+|hybridCubeMesh)AllReduceKernel|minimax_reduce_rms_kernel_lamport", "all_reduce"),
    (r"(?:\w+_)?allreduce_fusion_kernel\w*|(?:\w+_)?one_shot_(?:\w+_)?all_reduce_norm_kernel", "all_reduce"),
    (r"flashinfer::comm::pcie_ipc::\w+_kernel", "all_reduce"),
    (r"flashinfer::mixed_comm::\w+_kernel", ""),
    # Mixture of experts. TensorRT-LLM and FlashInfer: the files above, helixAllToAll.cu and ulysses_all_to_all.cuh;
    # DeepEP: csrc/kernels, deep_ep/include/deep_ep/impls;
    # mori: src/ops/dispatch_combine, include/mori/collective; pplx-kernels and pplx-garden: a2a kernels.
    (r"moeA2A(?:Dispatch|Combine)Kernel|(?:moe|helix)AllToAllKernel|ulysses_a2a_kernel", "all_to_all"),
    (r"deep_ep::(?:\w+::)*(?:notify_|hybrid_)?(?:dispatch|combine)(?:_impl)?", "all_to_all"),
    (r"deep_ep::(?:\w+::)*(?:cached_notify\w*|barrier\w*|clean_low_latency_buffer)", "barrier"),
    (r"Ep(?:Dispatch|Combine)(?:Intra|Inter|LowLatency|Sync)\w+|OneShotAll2all\w+", "all_to_all"),
    (
        r"pplx::(?:\w+::)*(?:dispatch|combine)Kernel|a2a_(?:dispatch|combine)_(?:send|recv)_kernel",
        "all_to_all",
    ),
    # Transformer Engine: common/comm_gemm_overlap/userbuffers/userbuffers.cu.
    (r"userbuffers_fp16_sum_inplace_gpu_\w+_ag", "all_gather"),
    (r"userbuffers_fp16_sum_inplace_gpu_\w+_rs\w*", "reduce_scatter"),
    (r"userbuffers_fp16_sum_inplace_gpu_\w+", "all_reduce"),
    (r"kuserbuffers_pushsendrecv\w*", "send_recv"),
    (r"kuserbuffers_(?:push|pull)send", "send"),
    (r"kuserbuffers_(?:push|pull)recv", "recv"),
    # oneCCL on SYCL: uxlfoundation/oneCCL src/coll/algorithms/*/sycl.
    (r"allreduce_?(?:small|medium|large)_?kernel\w*", "all_reduce"),
    (r"allgatherv?_?(?:small|medium|large)_?kernel\w*", "all_gather"),
    (r"reduce_?scatter_?(?:small|medium|large)\w*kernel\w*", "reduce_scatter"),
)
_KNOWN = tuple((re.compile(rf"(?:.*::)?(?:{name})", re.IGNORECASE), kind) for name, kind in _COLLECTIVES)
# Types in template arguments -> torch's dtypes. Kernels that only copy carry bytes in any type, so theirs show nothing.
_DTYPES = (
    (r"(?:__)?(?:nv_|hip_)?bfloat16|BFloat16", "bfloat16"),
    (r"(?:__)?half|Half", "float16"),
    (r"float|f", "float32"),
    (r"double|d", "float64"),
)
_REDUCES = re.compile(r"(?i)reduce|rdxn|combine")
# A mangled first argument: a letter, or a name after its length, maybe within a namespace.
_MANGLED_TYPE = re.compile(r"I(?:([fd])|N?(?:\d+[a-z]\w*?)?\d{1,2}((?:__)?[A-Za-z]\w*?))[EL]")
_MAX_NAME = 600  # characters of a name that are read; the function's own name comes first
_LENGTH = re.compile(r"L?(\d{1,3})")  # before each part of a mangled name
# torch uses one kernel for both: it is a reduce_scatter if its fourth template argument is true.
_SCATTERS = re.compile(
    r"two_shot_all_reduce_kernel(?:<[^<>]+, \d+, -?\d+, true|I\w{1,40}?Li\d+ELin?\d+ELb1E)"
)
# Ops that launch such kernels -> the number of the argument whose size is that of the call. Other ops may have buffers
# larger than what is sent. torch: c10d/symm_mem/SymmetricMemory.cpp; vLLM: csrc/torch_bindings.cpp, and
# csrc/custom_all_reduce.cu before 2025; sglang: sgl-kernel/csrc/common_extension.cc.
SIZED_ARGUMENTS = {
    "symm_mem::multimem_all_reduce_": 0,
    "symm_mem::multimem_one_shot_all_reduce": 0,
    "symm_mem::multimem_one_shot_all_reduce_out": 0,
    "symm_mem::multimem_one_shot_reduce_out": 0,
    "symm_mem::multimem_all_gather_out": 2,
    "symm_mem::one_shot_all_reduce": 0,
    "symm_mem::one_shot_all_reduce_out": 0,
    "symm_mem::one_shot_all_reduce_copy": 1,
    "symm_mem::one_shot_all_reduce_copy_out": 1,
    "symm_mem::two_shot_all_reduce_": 0,
    "symm_mem::two_shot_all_reduce_out": 0,
    "symm_mem::reduce_scatter_out": 0,
    "symm_mem::nvshmem_broadcast": 0,
    "symm_mem::nvshmem_all_to_all": 0,
    "_C_custom_ar::all_reduce": 1,
    "_C_custom_ar::all_reduce_reg": 1,
    "_C_custom_ar::all_reduce_unreg": 1,
    "sgl_kernel::all_reduce": 1,
}
# Names of unknown kernels that may communicate, except for collectives within a thread block or a warp.
MAY_COMMUNICATE = re.compile(
    r"(?i)^(?!.*(?:block|warp|wave|thread|quad|lane)_?all)"
    r".*(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|a2a_|multimem|send_?recv)"
)
# Kernels that compute on any stream: torch's, compiled ones, and those of GEMM and attention libraries.
COMPUTES = re.compile(
    r"(?i)^(?:at::|triton_|cub::|thrust::)|gemm|cutlass|cublas|cudnn|Cijk_|flash_|fmha|elementwise"
)


@lru_cache(2**14)
def function_of(name: str) -> str:
    """Returns a kernel's function with its namespaces, without return type, template arguments and parameters.

    Args:
        name: demangled, or mangled by the Itanium C++ ABI, which puts the length before each part.
    """
    name = name[:_MAX_NAME]
    if mangled := re.match(r"_ZN?[KL]?(?=\d)", name):
        parts, offset = list[str](), mangled.end()
        while length := _LENGTH.match(name, offset):
            parts.append(name[length.end() : (offset := length.end() + int(length[1]))])
        return "::".join(part for part in parts if not part.startswith("_GLOBAL__N_"))
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", name)
    return re.split(r"[<(.]", plain, maxsplit=1)[0].strip().rpartition(" ")[2]


@lru_cache(2**14)
def kernel_collective(name: str) -> str:
    """Returns a kernel's collective, "unknown" if its name does not show which, or "" if it computes."""
    function = function_of(name)
    collective = next(
        (kind or parse_collective(function) for pattern, kind in _KNOWN if pattern.fullmatch(function)), ""
    )
    return "reduce_scatter" if collective and _SCATTERS.search(name) else collective


@lru_cache(2**14)
def kernel_dtype(name: str) -> str | None:
    """Returns the dtype that a communication kernel reduces, as its template arguments show; None if they do not.

    Several dtypes show nothing, since one may be that of the sum.
    """
    function = function_of(name).rpartition("::")[2]
    arguments = name[:_MAX_NAME].partition(function or "(")[2]
    if mangled := _MANGLED_TYPE.match(arguments):
        types = [mangled[1] or mangled[2]]
    else:
        types = re.split(r"[<>,]\s*|::", arguments.partition("(")[0]) if arguments.startswith("<") else []
    dtypes = {dtype for pattern, dtype in _DTYPES for type_ in types if re.fullmatch(pattern, type_)}
    return dtypes.pop() if len(dtypes) == 1 and _REDUCES.search(function) else None
