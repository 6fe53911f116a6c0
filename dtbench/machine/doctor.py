"""What will disturb a measurement on this machine, each finding with its effect and its remedy.

Nothing is changed and nothing fails: what cannot be found out is reported as such. The files of
`/proc` and `/sys` are read below a root that tests replace by a tree of their own.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dtbench.machine import provenance as machine
from dtbench.machine.device import DEFAULT_CPU_RANKS, Nvml, gpus
from dtbench.machine.limits import usable_cpus
from dtbench.text.units import format_bytes

_TESTED_TORCH = ((2, 11), (2, 13))


@dataclass(frozen=True)
class MachineFinding:
    """One thing looked at. ok: None where it could not be found out. remedy: a command where one exists."""

    check: str
    ok: bool | None
    got: str
    effect: str = ""
    remedy: str = ""


def _judged(check: str, ok: bool, got: str, effect: str, remedy: str) -> MachineFinding:
    """effect, remedy: where it is not ok."""
    return MachineFinding(check, True, got) if ok else MachineFinding(check, False, got, effect, remedy)


@dataclass(frozen=True)
class Surroundings:
    """What the checks look at; each part can be replaced by a test."""

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    usable_cores: int = field(default_factory=lambda: len(usable_cpus()))
    nvml: Callable[[], Nvml | None] = lambda: gpus().nvml()
    resolve: Callable[[str], str] = socket.gethostbyname
    torch_version: Callable[[], str | None] = lambda: machine.installed("torch")

    def read(self, path: str) -> str:
        """The text of a file below the root; empty where there is none."""
        return machine.read_text(self.root / path)

    @property
    def local_ranks(self) -> int:
        """How many ranks will share this host: torchrun's, one per GPU, or the default."""
        launched = _positive_int(self.env.get("LOCAL_WORLD_SIZE", ""))
        return launched or len(list(self.root.glob("dev/nvidia[0-9]*"))) or DEFAULT_CPU_RANKS


def examine(here: Surroundings | None = None) -> list[MachineFinding]:
    """All findings, good ones too, in a fixed order; well under a second, unless the name server is slow."""
    here = here or Surroundings()
    return [finding for check in _CHECKS for finding in check(here)]


def _governor(here: Surroundings) -> list[MachineFinding]:
    paths = here.root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    governors = {text for path in paths if (text := here.read(str(path.relative_to(here.root))))}
    check = "CPU frequency governor"
    if not governors:
        got = "no cpufreq here (usual in a virtual machine)"
        return [MachineFinding(check, None, got, "the host decides the clock")]
    return [
        _judged(
            check,
            ok=governors <= {"performance"},
            got=", ".join(sorted(governors)),
            effect="the clock follows the load: short dispatch timings start slow and vary",
            remedy="sudo cpupower frequency-set -g performance",
        )
    ]


def _turbo(here: Surroundings) -> list[MachineFinding]:
    for switch, off in (("intel_pstate/no_turbo", "1"), ("cpufreq/boost", "0")):
        if state := here.read(f"sys/devices/system/cpu/{switch}"):
            return [
                _judged(
                    "CPU turbo",
                    ok=state == off,
                    got="off" if state == off else "on",
                    effect="the clock depends on temperature and on how many cores are busy: later cases run slower",
                    remedy=f"echo {off} | sudo tee /sys/devices/system/cpu/{switch}",
                )
            ]
    return [MachineFinding("CPU turbo", None, "unknown: no switch for it here")]


def _load(here: Surroundings) -> list[MachineFinding]:
    match = re.match(r"(\d+(?:\.\d+)?)\s", here.read("proc/loadavg"))
    if match is None:
        return [MachineFinding("load average", None, "unknown: no /proc/loadavg")]
    load = float(match[1])
    return [
        _judged(
            "load average",
            # Half a core busy on average is already a neighbour of some rank.
            ok=load <= max(0.5, 0.1 * here.usable_cores),
            got=f"{load:g} on {here.usable_cores} usable cores",
            effect="other processes take cores from the ranks: the slowest rank counts, so all times grow",
            remedy="stop other processes (see: top) and wait a minute",
        )
    ]


def _threads(here: Surroundings) -> Iterator[MachineFinding]:
    ranks, cores = here.local_ranks, here.usable_cores
    effect = "the ranks' threads share the cores and wait for each other in every operation"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text, remedy = here.env.get(name), f"export {name}={max(1, cores // ranks)}"
        if text is not None:
            threads = _positive_int(text.split(",")[0])  # one number per nesting level
            ok = threads is not None and threads * ranks <= max(cores, ranks)
            got = f"{text if threads else f'{text!r}, expected a number above 0,'}"
            yield _judged(name, ok, f"{got} with {ranks} ranks on {cores} usable cores", effect, remedy)
        elif name == "OMP_NUM_THREADS" and "SLURM_JOB_ID" in here.env and cores > 1:
            got = f"not set under Slurm: {cores} threads in each of {ranks} ranks"
            yield MachineFinding(name, False, got, effect, remedy)
        elif name == "OMP_NUM_THREADS":  # MKL follows it
            yield MachineFinding(name, True, "not set: dtbench run and torchrun give each rank 1")


def _cores(here: Surroundings) -> list[MachineFinding]:
    ranks, cores = here.local_ranks, here.usable_cores
    return [
        _judged(
            "cores for the ranks",
            ok=ranks <= cores,
            got=f"{ranks} ranks on {cores} usable cores",
            effect="ranks take turns on a core: a small collective costs milliseconds instead of 0.3 ms",
            remedy=f"dtbench run --nproc {cores}",
        )
    ]


def _numa(here: Surroundings) -> list[MachineFinding]:
    nodes = len(list(here.root.glob("sys/devices/system/node/node[0-9]*")))
    if nodes <= 1:
        return [MachineFinding("NUMA nodes", True if nodes else None, f"{nodes}" if nodes else "unknown")]
    online = len(machine.cpu_list(here.read("sys/devices/system/cpu/online")))
    bound = bool(online) and here.usable_cores < online
    cpus = f"bound to {here.usable_cores} of {online} CPUs" if bound else "and the ranks are bound to none"
    return [
        _judged(
            "NUMA nodes",
            ok=bound,
            got=f"{nodes}, {cpus}",
            effect="a rank that moves to another node reads its memory from afar; times change between launches",
            remedy="numactl --cpunodebind=0 --membind=0 dtbench run ...",
        )
    ]


def _cpu_quota(here: Surroundings) -> list[MachineFinding]:
    """The tightest CPU limit of this process's control group (version 2) and those around it, in cores."""
    path = re.search(r"^0::/?(.*)$", here.read("proc/self/cgroup"), re.MULTILINE)
    group = Path(path[1] if path else "")
    files = [here.read(f"sys/fs/cgroup/{folder}/cpu.max") for folder in (group, *group.parents)]
    matches = [match for text in files if (match := re.fullmatch(r"(\d+) (\d+)", text))]
    if not matches:
        return [MachineFinding("cgroup CPU quota", True, "none")]
    quota = min(int(match[1]) / int(match[2]) for match in matches)
    return [
        _judged(
            "cgroup CPU quota",
            ok=quota >= here.usable_cores,
            got=f"{quota:g} cores of time on {here.usable_cores} usable cores",
            effect="once the quota of a period (0.1 s) is used up, all ranks stand still until the next",
            remedy="give the container whole cores: docker run --cpuset-cpus, or a static CPU manager policy",
        )
    ]


def _swap(here: Surroundings) -> list[MachineFinding]:
    kib = dict(re.findall(r"^(Swap\w+):\s*(\d+) kB", here.read("proc/meminfo"), re.MULTILINE))
    if not {"SwapTotal", "SwapFree"} <= set(kib):
        return [MachineFinding("swap", None, "unknown: no /proc/meminfo")]
    used = (int(kib["SwapTotal"]) - int(kib["SwapFree"])) * 1024
    return [
        _judged(
            "swap",
            ok=used <= 0,
            got=f"{format_bytes(used)} in use" if used > 0 else "not in use",
            effect="memory that was swapped out is read back from the disk inside a timed call",
            remedy="sudo swapoff -a && sudo swapon -a",
        )
    ]


def _clocksource(here: Surroundings) -> list[MachineFinding]:
    current = here.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not current:
        return [MachineFinding("clock source", None, "unknown")]
    return [
        _judged(
            "clock source",
            ok=current in {"tsc", "kvm-clock", "arch_sys_counter", "timebase"},  # read without a system call
            got=current,
            effect="reading the clock needs the kernel and costs up to 1 µs per reading",
            remedy="boot with clocksource=tsc tsc=reliable",
        )
    ]


def _gpus(here: Surroundings) -> Iterator[MachineFinding]:
    devices = sorted(path.name for path in here.root.glob("dev/nvidia[0-9]*"))
    library = here.nvml()
    if library is not None:
        for index, device in machine.devices(library).items():
            yield from _gpu(device, f"GPU {index}")
    elif devices:
        yield MachineFinding(
            "NVML",
            ok=False,
            got=f"cannot be used, although there is {', '.join(devices)}",
            effect="clocks and throttling are not recorded: a throttled result passes for a good one",
            remedy="pip install nvidia-ml-py, and make libnvidia-ml.so.1 visible (in a container: "
            "NVIDIA_DRIVER_CAPABILITIES=utility,compute)",
        )
    else:
        yield MachineFinding("GPUs", True, "none")


def _gpu(device: machine.NvmlDevice, title: str) -> Iterator[MachineFinding]:
    got = f"SM {device.clock_MHz('SM') or '?'} MHz of at most {device.clock_MHz('SM', 'Max') or '?'} MHz"
    reasons = device.clock_reasons()
    if reasons is None:
        yield MachineFinding(f"{title} clocks", None, f"{got}; throttling unknown")
    else:
        slowed = machine.throttling(reasons)
        yield _judged(
            f"{title} clocks",
            ok=not slowed,
            got=got + (f"; slowed by {', '.join(slowed)}" if slowed else ""),
            effect="the GPU is slowed against its setting; kernels take longer, and differently so over time",
            remedy="cool it, raise its power limit, or lock a clock it can hold: sudo nvidia-smi -lgc MHZ",
        )

    persistence = device.ask("nvmlDeviceGetPersistenceMode")
    if persistence is not None:
        yield _judged(
            f"{title} persistence mode",
            ok=bool(persistence),
            got="on" if persistence else "off",
            effect="the driver unloads between launches: the first calls of each pay for its start",
            remedy="sudo nvidia-smi -pm 1",
        )

    processes = device.ask("nvmlDeviceGetComputeRunningProcesses") or []
    pids = [str(process.pid) for process in processes if process.pid != os.getpid()]
    yield _judged(
        f"{title} other processes",
        ok=not pids,
        got=f"{len(pids)} (pid {', '.join(pids[:5])})" if pids else "none",
        effect="they share the GPU's time, memory bandwidth and links with the benchmark",
        remedy="nvidia-smi; end them",
    )


def _hostname(here: Surroundings) -> list[MachineFinding]:
    name = here.read("proc/sys/kernel/hostname") or socket.gethostname()
    check = "host name"
    if interface := here.env.get("GLOO_SOCKET_IFNAME"):
        return [MachineFinding(check, True, f"not asked: GLOO_SOCKET_IFNAME={interface}")]
    try:
        address = here.resolve(name)
    except OSError as error:
        return [
            MachineFinding(
                check,
                ok=False,
                got=f"{name} does not resolve ({error.strerror or error})",
                effect="gloo picks its interface by this name: it falls back to loopback, or no group comes up",
                remedy=f"add a line '<address> {name}' to /etc/hosts, or export GLOO_SOCKET_IFNAME=<interface>",
            )
        ]
    loopback = address.startswith("127.")
    return [
        MachineFinding(
            check,
            ok=True,
            got=f"{name} is {address}",
            effect="gloo uses loopback: right on one host, and other hosts cannot connect"
            if loopback
            else "",
            remedy="across hosts: export GLOO_SOCKET_IFNAME=<interface>" if loopback else "",
        )
    ]


def _torch(here: Surroundings) -> list[MachineFinding]:
    version = here.torch_version() or "not installed"
    low, high = ("{}.{}".format(*v) for v in _TESTED_TORCH)
    match = re.match(r"(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    if number < _TESTED_TORCH[0]:
        return [
            MachineFinding(
                "torch",
                ok=False,
                got=f"{version}, at least {low} is needed",
                effect="nothing can be measured",
                remedy=f'pip install "torch>={low}"',
            )
        ]
    newer = f"newer than {high}, the newest tried: private names may have moved"
    return [MachineFinding("torch", True, version, newer if number > _TESTED_TORCH[1] else "")]


def _positive_int(text: str) -> int | None:
    return int(text) if re.fullmatch(r"0*[1-9]\d{0,8}", text.strip()) else None


_CHECKS: tuple[Callable[[Surroundings], Iterable[MachineFinding]], ...] = (
    _governor,
    _turbo,
    _load,
    _threads,
    _cores,
    _numa,
    _cpu_quota,
    _swap,
    _clocksource,
    _gpus,
    _hostname,
    _torch,
)
