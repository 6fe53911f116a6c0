"""Where a run happened: the header of the run file, and what NVML says of a GPU.

Nothing here may fail: a fact that cannot be found out is None. The environment is recorded by an
allow-list of names that change what is measured, never whole: run files are passed around.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from dtbench._version import __version__
from dtbench.machine.device import REHEARSAL, Nvml
from dtbench.machine.device import gpus as gpus_of_torch
from dtbench.machine.git import run_git
from dtbench.machine.limits import usable_cpus
from dtbench.records.result import (
    SCHEMA,
    Checkout,
    Checkouts,
    Cpu,
    Gpu,
    Header,
    Machine,
    MeshShape,
    NvLinks,
    RankFacts,
)
from dtbench.suite import RunOptions
from dtbench.suite.mesh import Mesh
from dtbench.text.masking import is_secret, mask, mask_arguments, mask_options

# Whole families whose members tune transport, threads or the process group.
_ENV_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "KMP_", "GOMP_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_FR_")
# Single names that change a measured time. TORCHELASTIC_* stays out: it holds ids and paths of the launch, and none
# changes a time.
_ENV_NAMES = {
    *("MKL_NUM_THREADS", "MKL_DYNAMIC", "OPENBLAS_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD", "MALLOC_CONF", "MALLOC_ARENA_MAX"),
    # These check each collective.
    *("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES"),
    *("PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONDEVMODE", REHEARSAL),
}

# Why a GPU's clock is where it is. Source: NVML API reference, nvmlClocksEventReasons.
_CLOCK_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
# Settings and idleness are no throttling: the clock is where its owner put it.
_NOT_THROTTLING = frozenset({"gpu_idle", "applications_clocks_setting", "display_clock_setting"})


def provenance(
    *,
    argv: Sequence[str],
    plan: RunOptions,
    suites: Sequence[str],
    mesh: Mesh,
    ranks: Sequence[Mapping[str, object]],
    backend: str | None,
    launches: int,
) -> Header:
    """The header of a run file.

    mesh: (dim name, size), outermost first. ranks: what `local_rank_info`
    said on each rank, in rank order. backend: "gloo", "nccl", or None where no group was made.
    """
    return Header(
        schema=SCHEMA,
        run_id=uuid.uuid4().hex,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=tuple(mask_arguments(argv)),
        versions=_versions(backend),
        git=Checkouts(**msgspec.structs.asdict(_checkout(Path.cwd())), dtbench=_own_checkout()),
        machine=Machine(
            cpu=cpu(),
            gpus=tuple(gpus()),
            driver=driver_version(),
            memory_bytes=_memory_bytes(),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
        ),
        ranks=tuple(msgspec.convert({**of, "rank": rank}, RankFacts) for rank, of in enumerate(ranks)),
        mesh=MeshShape(dim_names=tuple(name for name, _ in mesh), shape=tuple(size for _, size in mesh)),
        env=environment(os.environ),
        plan=msgspec.json.decode(msgspec.json.encode(plan)) | {"options": mask_options(plan.options)},
        suites=tuple(suites),
        launches=launches,
    )


def boot_id() -> str | None:
    """What names the running kernel; its processes share one monotonic clock."""
    return read_text(Path("/proc/sys/kernel/random/boot_id")) or None


def local_rank_info(device: str, backend: str | None = None) -> dict[str, Any]:
    """What this process tells the others about itself, for the header's `ranks`.

    device: as torch spells it ("cpu", "cuda:1"). backend: what it will send through, "gloo" or "nccl"; None
    where nothing is sent.
    `boot_id` names the running kernel: it tells hosts of one name apart. `interface` is None where the backend
    was not told which to take, and chooses itself.
    """
    kind, _, index = device.partition(":")
    return {
        "rank": _env_int("RANK"),
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "local_rank": _env_int("LOCAL_RANK"),
        "device": device,
        "pid": os.getpid(),
        "numa_nodes": numa_nodes(),
        "interface": os.environ.get(f"{backend.upper()}_SOCKET_IFNAME") if backend else None,
        **(_gpu_place(int(index or 0)) if kind == "cuda" else {}),
    }


def numa_nodes(root: Path = Path("/")) -> list[int]:
    """The NUMA nodes of the CPUs that this process may run on; empty where the kernel does not say."""
    mine = set(usable_cpus())
    return sorted(
        int(folder.name.removeprefix("node"))
        for folder in root.glob("sys/devices/system/node/node[0-9]*")
        if mine & cpu_list(read_text(folder / "cpulist"))
    )


def cpu_list(text: str) -> set[int]:
    """`0-2,8` -> {0, 1, 2, 8}, as the kernel spells sets of CPUs."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in spans for cpu in range(int(first), int(last or first) + 1)}


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The allowed part of an environment."""
    return {
        name: mask(value)
        for name, value in sorted(env.items())
        if (name in _ENV_NAMES or name.startswith(_ENV_PREFIXES)) and not is_secret(name)
    }


def _env_int(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0


def _versions(backend: str | None) -> dict[str, str | None]:
    torch = sys.modules.get("torch")
    nccl = preloaded_nccl() if backend == "nccl" else None
    if backend == "nccl" and nccl is None:
        with contextlib.suppress(Exception):  # a build without NCCL raises what it likes
            from torch.cuda import nccl as torch_nccl

            nccl = ".".join(str(part) for part in torch_nccl.version())  # type: ignore[no-untyped-call]
    return {
        "dtbench": __version__,
        "torch": str(torch.__version__) if torch is not None else installed("torch"),
        "python": platform.python_version(),
        "backend": backend,
        "nccl": nccl,
        "cuda": None if torch is None else torch.version.cuda,
    }


def preloaded_nccl() -> str | None:
    """Returns the version of an NCCL that LD_PRELOAD put before torch's, which torch does not report; else None."""
    number = ctypes.c_int()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}" if major else None


def installed(package: str) -> str | None:
    """The version of an installed distribution, without importing it; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checkout(folder: Path) -> Checkout:
    """Commit and dirty flag of the checkout around `folder`; untracked files do not make it dirty."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return Checkout()
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return Checkout(commit=commit, dirty=None if status is None else status != "")


def _own_checkout() -> Checkout | None:
    """The checkout that dtbench runs from, whose tracked file this is; None when it was installed from a wheel."""
    package = Path(__file__).parents[1]
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    return _checkout(package) if tracked else None


def _git(folder: Path, *args: str) -> str | None:
    try:
        done = run_git(*args, cwd=folder)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu(root: Path = Path("/")) -> Cpu:
    info = read_text(root / "proc/cpuinfo")
    governors = {read_text(p) for p in root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor")}
    return Cpu(
        model=_cpu_model(info),
        logical_cores=os.cpu_count(),
        physical_cores=_physical_cores(info),
        usable_cores=len(usable_cpus()),
        governor="+".join(sorted(g for g in governors if g)) or None,
        numa_nodes=len(list(root.glob("sys/devices/system/node/node[0-9]*"))) or None,
    )


def _cpu_model(cpuinfo: str) -> str | None:
    for name in ("model name", "Model", "Hardware", "cpu model"):
        if match := re.search(rf"^{name}\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine() or None


def _physical_cores(cpuinfo: str) -> int | None:
    blocks = (
        dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", one, re.MULTILINE)) for one in cpuinfo.split("\n\n")
    )
    return len({(of.get("physical id", "0"), of["core id"]) for of in blocks if "core id" in of}) or None


def _memory_bytes() -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB", read_text(Path("/proc/meminfo")), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def read_text(path: Path) -> str:
    """Of a file of the kernel; empty where there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _ask(library: Nvml | None, name: str, *args: object) -> Nvml | None:
    """What NVML answers, or None: old bindings and drivers lack queries, a virtual GPU forbids some."""
    try:
        answer = getattr(library, name)(*args)
    except Exception:  # NVMLError has a subclass per fault; ctypes adds its own
        return None
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


@dataclass(frozen=True)
class NvmlDevice:
    """A GPU by NVML's handle of it."""

    library: Nvml
    handle: Nvml

    def ask(self, name: str, *args: object) -> Nvml | None:
        """What the query of this name says of it; None where it cannot be asked."""
        return _ask(self.library, name, self.handle, *args)

    def clock_MHz(self, of: Literal["SM", "MEM"], most: Literal["", "Max"] = "") -> int | None:  # noqa: N802
        """The clock of its multiprocessors or memory, now or at most."""
        return self.ask(f"nvmlDeviceGet{most}ClockInfo", getattr(self.library, f"NVML_CLOCK_{of}"))

    def link_states(self) -> dict[int, bool]:
        """Whether they are up, of the NVLinks that NVML knows."""
        links = range(getattr(self.library, "NVML_NVLINK_MAX_LINKS", 18))
        states = {link: self.ask("nvmlDeviceGetNvLinkState", link) for link in links}
        return {link: bool(state) for link, state in states.items() if state is not None}

    def clock_reasons(self) -> list[str] | None:
        """What holds its clock where it is, None where NVML does not say; an unknown bit shows as its number."""
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # the name before driver 535
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is None:
            return None
        unknown = bits & ~sum(_CLOCK_REASONS)
        names = [name for bit, name in _CLOCK_REASONS.items() if bits & bit]
        return names + ([f"unknown_{unknown:#x}"] if unknown else [])


def devices(library: Nvml | None) -> dict[int, NvmlDevice]:
    """All GPUs of this host by their numbers in NVML (PCI order), whether visible to CUDA or not."""
    count = _ask(library, "nvmlDeviceGetCount") or 0
    handles = {i: _ask(library, "nvmlDeviceGetHandleByIndex", i) for i in range(count)}
    return {i: NvmlDevice(library, handle) for i, handle in handles.items() if handle is not None}


def cuda_device(index: int) -> NvmlDevice | None:
    """index: as torch numbers CUDA devices in this process. None where NVML cannot tell which it is."""
    library = gpus_of_torch().nvml()
    handle = _handle_of(library, index)
    return None if handle is None else NvmlDevice(library, handle)


def _handle_of(library: Nvml | None, index: int) -> Nvml | None:
    """NVML's handle of a CUDA device: CUDA_VISIBLE_DEVICES renumbers, and CUDA may sort otherwise."""
    device_id = gpus_of_torch().uuid(index)
    for text in (f"GPU-{device_id}", f"MIG-{device_id}") if device_id is not None else ():
        if (handle := _ask(library, "nvmlDeviceGetHandleByUUID", text)) is not None:
            return handle
    visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
    if not visible:
        return _ask(library, "nvmlDeviceGetHandleByIndex", index)
    if index >= len(visible):
        return None
    if visible[index].isdigit():
        return _ask(library, "nvmlDeviceGetHandleByIndex", int(visible[index]))
    return _ask(library, "nvmlDeviceGetHandleByUUID", visible[index])


def driver_version() -> str | None:
    return _ask(gpus_of_torch().nvml(), "nvmlSystemGetDriverVersion")


def gpus() -> list[Gpu]:
    """What NVML says of all GPUs of this host."""
    return [_gpu(index, device) for index, device in devices(gpus_of_torch().nvml()).items()]


def _gpu(index: int, device: NvmlDevice) -> Gpu:
    memory, mig = device.ask("nvmlDeviceGetMemoryInfo"), device.ask("nvmlDeviceGetMigMode")
    persistence, links = device.ask("nvmlDeviceGetPersistenceMode"), device.link_states()
    return Gpu(
        index=index,
        name=device.ask("nvmlDeviceGetName"),
        memory_bytes=None if memory is None else int(memory.total),
        sm_clock_MHz=device.clock_MHz("SM"),
        sm_clock_max_MHz=device.clock_MHz("SM", "Max"),
        memory_clock_MHz=device.clock_MHz("MEM"),
        memory_clock_max_MHz=device.clock_MHz("MEM", "Max"),
        power_limit_W=_watts(device.ask("nvmlDeviceGetEnforcedPowerLimit")),
        persistence=None if persistence is None else bool(persistence),
        mig=None if mig is None else bool(mig[0]),
        nvlink=NvLinks(
            links=len(links),
            active_links=sum(links.values()),
            version=device.ask("nvmlDeviceGetNvLinkVersion", min(links)),
        )
        if links
        else None,
    )


def _watts(milliwatts: float | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _gpu_place(index: int, root: Path = Path("/")) -> dict[str, object]:
    """Where a CUDA device sits: its PCI bus, the NUMA node of that, its NVLink neighbours.

    index: as torch numbers CUDA devices in this process. nvlink: `neighbours` maps the bus ids of GPUs to
    the number of links to each, `switch_links` counts links to NVSwitches; None without NVLink.
    """
    device = cuda_device(index)
    bus_id = None if device is None else _bus_id(device.ask("nvmlDeviceGetPciInfo"))
    if device is None or bus_id is None:
        return {"pci_bus_id": None, "device_numa_node": None, "nvlink": None}
    node = read_text(root / "sys/bus/pci/devices" / bus_id / "numa_node")
    return {
        "pci_bus_id": bus_id,
        "device_numa_node": int(node) if node.isdigit() else None,  # -1: the kernel does not know
        "nvlink": _nvlink_peers(device),
    }


def _bus_id(info: object) -> str | None:
    """NVML's PCI address as the kernel spells it: `0000:1b:00.0`, four digits for the domain."""
    text = getattr(info, "busId", None)
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    match = re.fullmatch(r"([0-9a-fA-F]{4,8})(:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])", text or "")
    return f"{int(match[1], 16):04x}{match[2].lower()}" if match else None


def _nvlink_peers(device: NvmlDevice) -> dict[str, object] | None:
    """What the links that are up lead to; None where no link is known."""
    states = device.link_states()
    if not states:
        return None
    switch = getattr(device.library, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2)
    neighbours: Counter[str] = Counter()
    switch_links = 0
    for link in (link for link, is_up in states.items() if is_up):
        if device.ask("nvmlDeviceGetNvLinkRemoteDeviceType", link) == switch:
            switch_links += 1
        elif (bus_id := _bus_id(device.ask("nvmlDeviceGetNvLinkRemotePciInfo", link))) is not None:
            neighbours[bus_id] += 1
    return {"neighbours": dict(neighbours), "switch_links": switch_links}


def gpu_state(index: int) -> dict[str, Any] | None:
    """Clocks, temperature, power and what holds the clock down, right now; None without NVML, or where it does not say.

    index: as torch numbers CUDA devices in this process. reasons: all that NVML gives for the present clock;
    throttled_by: those that slow the GPU against its setting.
    """
    device = cuda_device(index)
    if device is None:
        return None
    reasons = device.clock_reasons()
    return {
        "sm_clock_MHz": device.clock_MHz("SM"),
        "memory_clock_MHz": device.clock_MHz("MEM"),
        "temperature_C": device.ask("nvmlDeviceGetTemperature", device.library.NVML_TEMPERATURE_GPU),
        "power_W": _watts(device.ask("nvmlDeviceGetPowerUsage")),
        "reasons": reasons,
        "throttled_by": throttling(reasons or []),
    }


def throttling(reasons: Sequence[str]) -> list[str]:
    """Those of the reasons that slow a GPU against its setting."""
    return [r for r in reasons if r not in _NOT_THROTTLING]
