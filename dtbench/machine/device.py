"""The GPUs of this process: the one place where the harness asks torch.cuda and NVML.

`gpus()` is torch's CUDA, or in a rehearsal what a file has that the environment names: a fake that works on the CPU.
"""

from __future__ import annotations

import math
import os
import runpy
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from dtbench.errors import UsageError
from dtbench.suite import DeviceType

if TYPE_CHECKING:
    import torch

# NVML's bindings, which have no types, and what they answer.
Nvml = Any
# Names a file of Python whose `rehearsed()` stands for the GPUs; set by a rehearsal's runner for what it starts, among
# which are the gate's launches, whose copy of dtbench has no tests.
REHEARSAL = "DTBENCH_REHEARSAL"
DEFAULT_CPU_RANKS = 4
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html: since NCCL 2.30, experimental.
NCCL_SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
# Above the boost clock of every data-centre GPU (H100 SXM: 1.98 GHz, NVIDIA H100 datasheet): cycles counted at this
# rate last at least the seconds asked for.
_FASTEST_HZ = 2.5e9


class GpuEvent(Protocol):
    """A mark in the current stream's work, as torch.cuda.Event is one."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Returns when the GPU has passed it."""
        ...

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds of the GPU's time from this event to the other; both have passed."""
        ...


class Gpus:
    """What the harness uses of GPUs: torch's CUDA devices. A rehearsal has another class with these methods."""

    @property
    def _cuda(self) -> Any:  # many of its functions have no types
        import torch

        return torch.cuda

    def count(self) -> int:
        return int(self._cuda.device_count()) if self._cuda.is_available() else 0

    def current(self) -> torch.device:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def select(self, index: int) -> torch.device:
        import torch

        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def event(self) -> GpuEvent:
        event: GpuEvent = self._cuda.Event(enable_timing=True)
        return event

    def synchronize(self) -> None:
        """Returns when the current GPU has nothing left to do."""
        self._cuda.synchronize()

    def occupy(self, seconds: float) -> None:
        """Gives the current stream work that lasts at least so long and needs no memory."""
        self._cuda._sleep(math.ceil(seconds * _FASTEST_HZ))

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """A function that repeats, in one launch, the GPU's work of a call of `run`: a CUDA graph. `run` is called
        once to warm up and once to be recorded; it may not wait for the GPU."""
        cuda = self._cuda
        # What a first call sets up (libraries' handles, memory) is not captured.
        aside = cuda.Stream()
        aside.wait_stream(cuda.current_stream())
        with cuda.stream(aside):
            run()
        cuda.current_stream().wait_stream(aside)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            run()
        replay: Callable[[], object] = graph.replay
        return replay

    def l2_bytes(self, device: torch.device) -> int:
        return int(self._cuda.get_device_properties(device).L2_cache_size)

    def free_cached(self) -> None:
        """Gives memory back that nobody uses, where any was taken."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def uuid(self, index: int) -> str | None:
        """Of a GPU that this process works with; None where it works with none yet."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        return str(torch.cuda.get_device_properties(index).uuid)

    def nvml(self) -> Nvml | None:
        """The NVML bindings, initialised; None where they or the driver's library are missing or broken."""
        return loaded_nvml()


@lru_cache(maxsize=1)
def loaded_nvml() -> Nvml | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # an absent, too old or broken library shows in many ways; none is an error
        return None
    return pynvml


def rehearsing() -> bool:
    """Whether a fake stands for the GPU, and nothing measured here says anything of one."""
    return bool(os.environ.get(REHEARSAL))


def gpus() -> Gpus:
    """What stands for the GPUs of this process."""
    return _rehearsed(os.environ[REHEARSAL]) if rehearsing() else Gpus()


@lru_cache(maxsize=1)
def _rehearsed(file: str) -> Gpus:
    gpus: Gpus = runpy.run_path(file)["rehearsed"]()  # its functions keep its globals
    return gpus


def is_gpu(device: torch.device) -> bool:
    """Whether work on it is measured as a GPU's is: by events, with its state."""
    return device.type == "cuda" or rehearsing()


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> DeviceType:
    """The device type to measure on.

    Raises:
        UsageError: "cuda" without CUDA.
    """
    if wanted == "cpu" or rehearsing():
        return "cpu"
    if gpus().count():
        return "cuda"
    if wanted == "cuda":
        raise UsageError(
            "--device cuda: torch finds no CUDA device here; expected a GPU, its driver and a CUDA build "
            "of torch; use --device cpu, or ask `dtbench doctor`"
        )
    return "cpu"


def count_ranks(wanted: int | None, device_type: DeviceType, backend: str = "auto") -> int:
    """As many as wanted, else one per GPU, or 4 on CPUs.

    Ranks may share GPUs over gloo (`backend`), and over an NCCL of 2.30 or newer that its own variable permits to.

    Raises:
        UsageError: more ranks than GPUs.
    """
    if device_type == "cpu":
        return wanted or DEFAULT_CPU_RANKS
    count, may_share = gpus().count(), backend == "gloo" or os.environ.get(NCCL_SHARES_GPUS) == "1"
    if wanted is not None and wanted > count and not may_share:
        raise UsageError(
            f"{wanted} ranks are asked for, this host has {count} GPUs: expected at most one rank per GPU; "
            f"give --nproc {count}, --backend gloo (ranks then share GPUs), or --device cpu"
        )
    return wanted or count
