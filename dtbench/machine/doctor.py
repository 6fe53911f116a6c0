"""What will disturb a measurement on this machine, each finding with its effect and its remedy.

Nothing is changed and nothing fails: what cannot be found out is reported as such. The files of
`/proc` and `/sys` are read below a root that tests replace by a tree of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dtbench.machine import provenance as machine
from dtbench.machine.device import DEFAULT_CPU_RANKS, Nvml
from dtbench.text.units import format_bytes

# A run of all five suites is some MiB; this leaves room for traces and many ranks' samples.
_MIN_FREE_BYTES = 256 * 2**20
_TESTED_TORCH = ((2, 11), (2, 13))


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ok: None where it could not be found out. remedy: a command where one exists."""

    check: str
    ok: bool | None
    got: str
    effect: str = ""
    remedy: str = ""


def _judged(check: str, ok: bool, got: str, effect: str, remedy: str) -> Finding:
    """effect, remedy: where it is not ok."""
    return Finding(check, True, got) if ok else Finding(check, False, got, effect, remedy)


@dataclass(frozen=True)
class Surroundings:
    """What the checks look at; each part can be replaced by a test."""

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: Path = field(default_factory=Path.cwd)
    usable_cores: int = field(default_factory=lambda: len(machine.usable_cpus()))
    nvml: Callable[[], Nvml | None] = machine.nvml
    resolve: Callable[[str], str] = socket.gethostbyname
    torch_version: Callable[[], str | None] = lambda: machine.installed("torch")

    def read(self, path: str) -> str | None:
        """The text of a file below the root, or None."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    @property
    def local_ranks(self) -> int:
        """How many ranks will share this host: torchrun's, one per GPU, or the default."""
        told = _positive_int(self.env.get("LOCAL_WORLD_SIZE"))
        return told or len(list(self.root.glob("dev/nvidia[0-9]*"))) or DEFAULT_CPU_RANKS


def examine(here: Surroundings | None = None) -> list[Finding]:
    """All findings, good ones too, in a fixed order; well under a second, unless the name server is slow."""
    here = here or Surroundings()
    return [finding for check in _CHECKS for finding in check(here)]


# ----------------------------------------------------------------------------------- the CPU


def _governor(here: Surroundings) -> Iterator[Finding]:
    paths = here.root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    governors = {text for path in paths if (text := here.read(str(path.relative_to(here.root))))}
    check = "CPU frequency governor"
    if not governors:
        yield Finding(
            check, None, "no cpufreq here (usual in a virtual machine)", "the host decides the clock"
        )
        return
    effect = "the clock follows the load: short dispatch timings start slow and vary"
    remedy = "sudo cpupower frequency-set -g performance"
    yield _judged(check, governors <= {"performance"}, ", ".join(sorted(governors)), effect, remedy)


def _turbo(here: Surroundings) -> Iterator[Finding]:
    no_turbo = here.read("sys/devices/system/cpu/intel_pstate/no_turbo")
    boost = here.read("sys/devices/system/cpu/cpufreq/boost")
    if no_turbo is None and boost is None:
        yield Finding("CPU turbo", None, "unknown: no switch for it here")
        return
    off, switch = ("1", "intel_pstate/no_turbo") if no_turbo is not None else ("0", "cpufreq/boost")
    is_off = (no_turbo or boost) == off
    effect = "the clock depends on temperature and on how many cores are busy: later cases run slower"
    remedy = f"echo {off} | sudo tee /sys/devices/system/cpu/{switch}"
    yield _judged("CPU turbo", is_off, "off" if is_off else "on", effect, remedy)


def _load(here: Surroundings) -> Iterator[Finding]:
    text = here.read("proc/loadavg")
    if text is None or not re.match(r"\d+(\.\d+)?\s", text):
        yield Finding("load average", None, "unknown: no /proc/loadavg")
        return
    load = float(text.split()[0])
    got = f"{load:g} on {here.usable_cores} usable cores"
    # Half a core busy on average is already a neighbour of some rank.
    ok = load <= max(0.5, 0.1 * here.usable_cores)
    effect = "other processes take cores from the ranks: the slowest rank counts, so all times grow"
    yield _judged("load average", ok, got, effect, "end what runs (see: top) and wait a minute")


def _threads(here: Surroundings) -> Iterator[Finding]:
    ranks, cores = here.local_ranks, here.usable_cores
    remedy = f"export OMP_NUM_THREADS={max(1, cores // ranks)}"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text = here.env.get(name)
        if text is None:
            if name == "OMP_NUM_THREADS":  # MKL follows it
                yield _unset_threads(here, remedy)
            continue
        threads = _positive_int(text.split(",")[0])  # one number per nesting level
        got = f"{text} with {ranks} ranks on {cores} usable cores"
        if threads is None:
            yield Finding(name, False, f"{text!r}, expected a number above 0", "it is ignored", remedy)
        else:
            all_threads = threads * ranks
            effect = f"{all_threads} threads share {cores} cores: they wait for each other in every operation"
            own_remedy = f"export {name}={max(1, cores // ranks)}"
            yield _judged(name, all_threads <= max(cores, ranks), got, effect, own_remedy)


def _unset_threads(here: Surroundings, remedy: str) -> Finding:
    if "SLURM_JOB_ID" not in here.env or here.usable_cores == 1:
        return Finding("OMP_NUM_THREADS", True, "not set: dtbench run and torchrun give each rank 1")
    got = f"not set under Slurm: {here.usable_cores} threads in each of {here.local_ranks} ranks"
    effect = "the ranks' threads share the cores and wait for each other in every operation"
    return Finding("OMP_NUM_THREADS", False, got, effect, remedy)


def _cores(here: Surroundings) -> Iterator[Finding]:
    ranks, cores = here.local_ranks, here.usable_cores
    got = f"{ranks} ranks on {cores} usable cores"
    effect = "ranks take turns on a core: a small collective costs milliseconds instead of 0.3 ms"
    yield _judged("cores for the ranks", ranks <= cores, got, effect, f"dtbench run --nproc {cores}")


def _numa(here: Surroundings) -> Iterator[Finding]:
    nodes = len(list(here.root.glob("sys/devices/system/node/node[0-9]*")))
    if nodes <= 1:
        yield Finding("NUMA nodes", True if nodes else None, f"{nodes}" if nodes else "unknown")
        return
    online = len(machine.cpu_list(here.read("sys/devices/system/cpu/online") or ""))
    if online and here.usable_cores < online:
        yield Finding("NUMA nodes", True, f"{nodes}, bound to {here.usable_cores} of {online} CPUs")
        return
    effect = "a rank that moves to another node reads its memory from afar; times change between launches"
    remedy = "numactl --cpunodebind=0 --membind=0 dtbench run ..."
    yield Finding("NUMA nodes", False, f"{nodes}, and the ranks are bound to none", effect, remedy)


def _cpu_quota(here: Surroundings) -> Iterator[Finding]:
    quota = _quota_cores(here)
    if quota is None:
        yield Finding("cgroup CPU quota", True, "none")
        return
    got = f"{quota:g} cores of time on {here.usable_cores} usable cores"
    effect = "once the quota of a period (0.1 s) is used up, all ranks stand still until the next"
    remedy = "give the container whole cores: docker run --cpuset-cpus, or a static CPU manager policy"
    yield _judged("cgroup CPU quota", quota >= here.usable_cores, got, effect, remedy)


def _quota_cores(here: Surroundings) -> float | None:
    """The tightest CPU limit of this process's control groups, in cores (cgroup v2, then v1)."""
    limits: list[float] = []
    for line in (here.read("proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            base, names = "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            base, names = f"sys/fs/cgroup/{controllers}", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            if not (here.root / base).is_dir():
                base = "sys/fs/cgroup/cpu"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            text = " ".join(here.read(f"{base}/{folder}/{name}") or "" for name in names).split()
            if len(text) == 2 and all(re.fullmatch(r"\d+", t) for t in text) and int(text[1]) > 0:
                limits.append(int(text[0]) / int(text[1]))
    return min(limits, default=None)


def _swap(here: Surroundings) -> Iterator[Finding]:
    found = re.findall(r"^(Swap\w+):\s*(\d+) kB", here.read("proc/meminfo") or "", re.MULTILINE)
    kib = {str(name): int(amount) for name, amount in found}
    if "SwapTotal" not in kib or "SwapFree" not in kib:
        yield Finding("swap", None, "unknown: no /proc/meminfo")
        return
    used = (kib["SwapTotal"] - kib["SwapFree"]) * 1024
    got = f"{format_bytes(used)} in use" if used > 0 else "not in use"
    effect = "memory that was swapped out is read back from the disk inside a timed call"
    yield _judged("swap", used <= 0, got, effect, "sudo swapoff -a && sudo swapon -a")


def _huge_pages(here: Surroundings) -> Iterator[Finding]:
    text = here.read("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text or "")
    got = chosen[1] if chosen else "unknown"
    # Information: what matters is that both sides of a comparison have the same setting.
    effect = "large CPU tensors cost fewer page faults with `always`; compare only runs with the same setting"
    yield Finding("transparent huge pages", True if chosen else None, got, effect if chosen else "")


def _aslr(here: Surroundings) -> Iterator[Finding]:
    text = here.read("proc/sys/kernel/randomize_va_space")
    if text is None:
        yield Finding("address randomisation", None, "unknown")
    elif text == "0":
        effect = "every launch has one and the same memory layout, lucky or not"
        yield Finding("address randomisation", True, "off", effect)
    else:
        effect = (
            "each launch has another memory layout: 1 to 2% between launches; more launches average it out"
        )
        yield Finding("address randomisation", True, "on", effect, "dtbench run --launches 10")


def _clocksource(here: Surroundings) -> Iterator[Finding]:
    current = here.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    check = "clock source"
    if current is None:
        yield Finding(check, None, "unknown")
    else:  # these are read without a system call
        ok = current in {"tsc", "kvm-clock", "arch_sys_counter", "timebase"}
        effect = "reading the clock needs the kernel and costs up to 1 µs per reading"
        yield _judged(check, ok, current, effect, "boot with clocksource=tsc tsc=reliable")


# ------------------------------------------------------------------------------- the GPUs


def _gpus(here: Surroundings) -> Iterator[Finding]:
    devices = sorted(path.name for path in here.root.glob("dev/nvidia[0-9]*"))
    library = here.nvml()
    if library is None:
        if devices:
            yield Finding(
                "NVML",
                False,
                f"cannot be used, although there is {', '.join(devices)}",
                "clocks and throttling are not recorded: a throttled result passes for a good one",
                "pip install nvidia-ml-py, and make libnvidia-ml.so.1 visible (in a container: "
                "NVIDIA_DRIVER_CAPABILITIES=utility,compute)",
            )
        else:
            yield Finding("GPUs", True, "none")
        return
    for index, device in machine.devices(library).items():
        yield from _gpu(device, f"GPU {index}")


def _gpu(device: machine.Device, title: str) -> Iterator[Finding]:
    now = device.ask("nvmlDeviceGetClockInfo", device.library.NVML_CLOCK_SM)
    most = device.ask("nvmlDeviceGetMaxClockInfo", device.library.NVML_CLOCK_SM)
    got = f"SM {now or '?'} MHz of at most {most or '?'} MHz"
    reasons = device.clock_reasons()
    if reasons is None:
        yield Finding(f"{title} clocks", None, f"{got}; throttling unknown")
    else:
        slowed = machine.throttling(reasons)
        got += f"; slowed by {', '.join(slowed)}" if slowed else ""
        effect = "the GPU is slowed against its setting; kernels take longer, and differently so over time"
        remedy = "cool it, raise its power limit, or lock a clock it can hold: sudo nvidia-smi -lgc MHZ"
        yield _judged(f"{title} clocks", not slowed, got, effect, remedy)

    persistence = device.ask("nvmlDeviceGetPersistenceMode")
    if persistence is not None:
        got = "on" if persistence else "off"
        effect = "the driver unloads between launches: the first calls of each pay for its start"
        yield _judged(f"{title} persistence mode", bool(persistence), got, effect, "sudo nvidia-smi -pm 1")

    others = [p for p in device.ask("nvmlDeviceGetComputeRunningProcesses") or [] if p.pid != os.getpid()]
    pids = ", ".join(str(p.pid) for p in others[:5]) + (", ..." if len(others) > 5 else "")
    got = f"{len(others)} (pid {pids})" if others else "none"
    effect = "they share the GPU's time, memory bandwidth and links with the benchmark"
    yield _judged(f"{title} other processes", not others, got, effect, "nvidia-smi; end them")


# ---------------------------------------------------------------------- network, disk, torch


def _hostname(here: Surroundings) -> Iterator[Finding]:
    name = here.read("proc/sys/kernel/hostname") or socket.gethostname()
    check = "host name"
    interface = here.env.get("GLOO_SOCKET_IFNAME")
    if interface:
        yield Finding(check, True, f"not asked: GLOO_SOCKET_IFNAME={interface}")
        return
    try:
        address = here.resolve(name)
    except OSError as error:
        effect = "gloo picks its interface by this name: it falls back to loopback, or no group comes up"
        remedy = f"add a line '<address> {name}' to /etc/hosts, or export GLOO_SOCKET_IFNAME=<interface>"
        yield Finding(check, False, f"{name} does not resolve ({error.strerror or error})", effect, remedy)
        return
    got = f"{name} is {address}"
    if address.startswith("127."):
        effect = "gloo uses loopback: right on one host, and other hosts cannot connect"
        yield Finding(check, True, got, effect, "across hosts: export GLOO_SOCKET_IFNAME=<interface>")
    else:
        yield Finding(check, True, got)


def _free_space(here: Surroundings) -> Iterator[Finding]:
    check = "space for results"
    try:
        free = shutil.disk_usage(here.folder).free
    except OSError as error:
        yield Finding(check, None, f"unknown for {here.folder}: {error.strerror}")
        return
    if not os.access(here.folder, os.W_OK):
        got = f"{here.folder} cannot be written"
        yield Finding(check, False, got, "no result can be kept", "give -o another folder")
        return
    got = f"{format_bytes(free)} free in {here.folder}"
    remedy = "make room or give -o a path on another disk"
    yield _judged(check, free >= _MIN_FREE_BYTES, got, "the run stops when the disk is full", remedy)


def _torch(here: Surroundings) -> Iterator[Finding]:
    version = here.torch_version()
    low, high = ("{}.{}".format(*v) for v in _TESTED_TORCH)
    remedy = f'pip install "torch>={low}"'
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if version is None or found is None:
        yield Finding("torch", False, version or "not installed", "nothing can be measured", remedy)
        return
    number = (int(found[1]), int(found[2]))
    if number < _TESTED_TORCH[0]:
        got = f"{version}, at least {low} is needed"
        yield Finding("torch", False, got, "names that dtbench uses are missing", remedy)
        return
    newer = f"newer than {high}, the newest tried: private names may have moved"
    yield Finding("torch", True, version, newer if number > _TESTED_TORCH[1] else "")


def _positive_int(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if re.fullmatch(r"0*[1-9]\d{0,8}", text) else None


_CHECKS: tuple[Callable[[Surroundings], Iterator[Finding]], ...] = (
    _governor,
    _turbo,
    _load,
    _threads,
    _cores,
    _numa,
    _cpu_quota,
    _swap,
    _huge_pages,
    _aslr,
    _clocksource,
    _gpus,
    _hostname,
    _free_space,
    _torch,
)
