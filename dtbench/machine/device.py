"""Accesses GPUs for the harness, through torch.cuda and NVML.

`gpus()` wraps torch.cuda. If the environment variable DTBENCH_REHEARSAL names a Python file, `gpus()` returns the fake
GPUs of that file, which work on the CPU (a "rehearsal").
"""

import math
import os
import runpy
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

from dtbench.errors import UsageError
from dtbench.machine.backends import library_of
from dtbench.suite import DeviceType

if TYPE_CHECKING:
    import torch

# NVML's bindings and the results of their functions, which have no types.
Nvml = Any
# Environment variable with the path of a Python file whose `rehearsed()` returns the fake GPUs. It is a path, not a
# module: the gate's launches inherit it, and their installation of dtbench contains no tests.
REHEARSAL = "DTBENCH_REHEARSAL"
DEFAULT_CPU_RANKS = 4
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html: since NCCL 2.30, experimental.
NCCL_SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
# Above the boost clock of every data-centre GPU (H100 SXM: 1.98 GHz, NVIDIA H100 datasheet), so that converting
# seconds to cycles at this rate never yields too few cycles.
_CLOCK_UPPER_BOUND_HZ = 2.5e9


class GpuEvent(Protocol):
    """A marker in the current stream, like torch.cuda.Event."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Blocks until the GPU has passed this event."""

    def elapsed_time(self, end_event: Self) -> float:
        """Returns the GPU time from this event to the other, in milliseconds. The GPU must have passed both."""


@lru_cache(maxsize=1)
def loaded_nvml() -> Nvml | None:
    """Returns the initialized NVML bindings; None if they or the driver's library are missing or broken."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # missing, outdated and broken libraries raise many different errors
        return None
    return pynvml


class Gpus:
    """The functions of torch.cuda that the harness uses. A rehearsal replaces them by a class with the same methods."""

    @property
    def _cuda(self) -> Any:  # many functions of torch.cuda have no types
        import torch

        return torch.cuda

    def count(self) -> int:
        return int(self._cuda.device_count()) if self._cuda.is_available() else 0

    def current(self) -> "torch.device":
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def select(self, index: int) -> "torch.device":
        import torch

        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def event(self) -> GpuEvent:
        return cast(GpuEvent, self._cuda.Event(enable_timing=True))

    def synchronize(self) -> None:
        """Blocks until the current GPU has finished all queued work."""
        self._cuda.synchronize()

    def occupy(self, seconds: float) -> None:
        """Queues work on the current stream that takes at least `seconds` and needs no memory."""
        self._cuda._sleep(math.ceil(seconds * _CLOCK_UPPER_BOUND_HZ))

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """Captures the GPU work of `run` in a CUDA graph and returns the function that replays it in one launch.

        `run` is called twice, to warm up and to be captured. It must not wait for the GPU.
        """
        cuda = self._cuda
        # The first call creates library handles and allocates memory, which cannot be captured.
        warmup_stream = cuda.Stream()
        warmup_stream.wait_stream(cuda.current_stream())
        with cuda.stream(warmup_stream):
            run()
        cuda.current_stream().wait_stream(warmup_stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            run()
        return cast(Callable[[], object], graph.replay)

    def l2_bytes(self, device: "torch.device") -> int:
        return int(self._cuda.get_device_properties(device).L2_cache_size)

    def free_cached(self) -> None:
        """Frees the unused memory that torch's allocator caches. Does not initialize CUDA."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def uuid(self, index: int) -> str | None:
        """Returns the UUID of a GPU; None while this process has not initialized CUDA."""
        torch = sys.modules.get("torch")
        is_initialized = torch is not None and torch.cuda.is_initialized()
        return str(self._cuda.get_device_properties(index).uuid) if is_initialized else None

    nvml = staticmethod(loaded_nvml)


def rehearsing() -> bool:
    """Returns whether fake GPUs replace the real ones, so that measured times are meaningless."""
    return bool(os.environ.get(REHEARSAL))


def gpus() -> Gpus:
    """Returns this process's access to GPUs, or the fake one in a rehearsal."""
    return _rehearsed(os.environ[REHEARSAL]) if rehearsing() else Gpus()


@lru_cache(maxsize=1)
def _rehearsed(file: str) -> Gpus:
    # The module's globals stay alive through its functions.
    return cast(Gpus, runpy.run_path(file)["rehearsed"]())


def is_gpu(device: "torch.device") -> bool:
    """Returns whether work on the device is timed with events and the GPU's state is recorded."""
    return device.type == "cuda" or rehearsing()


def choose_device(requested: Literal["auto", "cpu", "cuda"]) -> DeviceType:
    """Returns the device type to measure on.

    Raises:
        UsageError: "cuda" was requested without a CUDA device.
    """
    if requested == "cpu" or rehearsing():
        return "cpu"
    if gpus().count():
        return "cuda"
    if requested == "cuda":
        raise UsageError(
            "--device cuda: torch finds no CUDA device; expected a GPU, its driver and a CUDA build "
            "of torch; use --device cpu, or run `dtbench doctor`"
        )
    return "cpu"


def count_ranks(requested: int | None, device_type: DeviceType, backend: str = "auto") -> int:
    """Returns the requested number of ranks, else one per GPU, else 4 on CPUs.

    Ranks may share GPUs with gloo, and with NCCL 2.30 or newer if NCCL_MULTI_RANK_GPU_ENABLE=1.

    Raises:
        UsageError: there are more ranks than GPUs, and they may not share them.
    """
    if device_type == "cpu":
        return requested or DEFAULT_CPU_RANKS
    count, may_share = (
        gpus().count(),
        library_of(backend) == "gloo" or os.environ.get(NCCL_SHARES_GPUS) == "1",
    )
    if requested is not None and requested > count and not may_share:
        raise UsageError(
            f"{requested} ranks requested, but this host has {count} GPUs: expected at most one rank per GPU; "
            f"use --nproc {count}, --backend gloo (ranks then share GPUs), or --device cpu"
        )
    return requested or count
