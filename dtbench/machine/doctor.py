"""Checks this host for sources of noise, and reports their effects and remedies.

The checks only read. A check that cannot find its information reports "unknown" instead of raising. All files of
`/proc` and `/sys` are read below `ExaminedHost.root`, which tests set to a directory of their own.
"""

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dtbench.machine.device import DEFAULT_CPU_RANKS, Nvml, gpus
from dtbench.machine.host import cpu_list, read_text
from dtbench.machine.limits import usable_cpus
from dtbench.machine.nvml import NvmlDevice, devices, throttling
from dtbench.machine.provenance import installed
from dtbench.text.units import format_bytes

_TESTED_TORCH = ((2, 11), (2, 13))


@dataclass(frozen=True)
class MachineFinding:
    """The result of one check.

    Attributes:
        check: what was checked.
        ok: False for a source of noise; None if it could not be determined.
        got: the state that was found.
        effect: its effect on a measurement.
        remedy: how to change it, as a command if there is one.
    """

    check: str
    ok: bool | None
    got: str
    effect: str = ""
    remedy: str = ""


def _finding(check: str, ok: bool, got: str, effect: str, remedy: str) -> MachineFinding:
    """Returns a finding that has the effect and the remedy only if the check failed."""
    return MachineFinding(check, True, got) if ok else MachineFinding(check, False, got, effect, remedy)


@dataclass(frozen=True)
class ExaminedHost:
    """The host as the checks read it; tests replace single parts.

    Attributes:
        root: directory that contains `proc`, `sys` and `dev`.
        env: environment variables.
        usable_cores: number of CPUs that this process may run on.
        nvml: returns the NVML bindings, or None without NVML.
        resolve: host name -> IPv4 address; raises OSError.
        torch_version: returns the installed version of torch, or None.
    """

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    usable_cores: int = field(default_factory=lambda: len(usable_cpus()))
    nvml: Callable[[], Nvml | None] = lambda: gpus().nvml()
    resolve: Callable[[str], str] = socket.gethostbyname
    torch_version: Callable[[], str | None] = lambda: installed("torch")

    def read(self, path: str) -> str:
        """Returns the stripped text of a file below the root, or "" if it cannot be read."""
        return read_text(self.root / path)

    @property
    def local_ranks(self) -> int:
        """Number of ranks that will share this host: as torchrun set it, else one per GPU, else the default."""
        return (
            _positive_int(self.env.get("LOCAL_WORLD_SIZE", ""))
            or len(list(self.root.glob("dev/nvidia[0-9]*")))
            or DEFAULT_CPU_RANKS
        )


def examine(host: ExaminedHost | None = None) -> list[MachineFinding]:
    """Runs all checks in a fixed order and returns the findings, including the good ones.

    Takes well under a second, unless the name server is slow.
    """
    host = host or ExaminedHost()
    return [finding for check in _CHECKS for finding in check(host)]


def _governor(host: ExaminedHost) -> list[MachineFinding]:
    paths = host.root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    governors = set(filter(None, map(read_text, paths)))
    check = "CPU frequency governor"
    if not governors:
        return [
            MachineFinding(
                check,
                None,
                "no cpufreq on this host (usual in a virtual machine)",
                "the host decides the clock",
            )
        ]
    return [
        _finding(
            check,
            ok=governors <= {"performance"},
            got=", ".join(sorted(governors)),
            effect="the clock follows the load: short dispatch timings start slow and vary",
            remedy="sudo cpupower frequency-set -g performance",
        )
    ]


def _turbo(host: ExaminedHost) -> list[MachineFinding]:
    for switch, disabled in (("intel_pstate/no_turbo", "1"), ("cpufreq/boost", "0")):
        if state := host.read(f"sys/devices/system/cpu/{switch}"):
            return [
                _finding(
                    "CPU turbo",
                    ok=state == disabled,
                    got="off" if state == disabled else "on",
                    effect="the clock depends on temperature and on how many cores are busy: later cases run slower",
                    remedy=f"echo {disabled} | sudo tee /sys/devices/system/cpu/{switch}",
                )
            ]
    return [MachineFinding("CPU turbo", None, "unknown: this host has no switch for it")]


def _load(host: ExaminedHost) -> list[MachineFinding]:
    match = re.match(r"(\d+(?:\.\d+)?)\s", host.read("proc/loadavg"))
    if match is None:
        return [MachineFinding("load average", None, "unknown: no /proc/loadavg")]
    load = float(match[1])
    return [
        _finding(
            "load average",
            # Half a busy core on average already slows some rank.
            ok=load <= max(0.5, 0.1 * host.usable_cores),
            got=f"{load:g} on {host.usable_cores} usable cores",
            effect="other processes take cores from the ranks: the slowest rank counts, so all times grow",
            remedy="stop other processes (see: top) and wait a minute",
        )
    ]


def _threads(host: ExaminedHost) -> Iterator[MachineFinding]:
    ranks, cores = host.local_ranks, host.usable_cores
    effect = "the ranks' threads share the cores and wait for each other in every operation"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text, remedy = host.env.get(name), f"export {name}={max(1, cores // ranks)}"
        if text is not None:
            threads = _positive_int(text.split(",")[0])  # one number per nesting level
            got = text if threads else f"{text!r}, expected a number above 0,"
            yield _finding(
                name,
                ok=threads is not None and threads * ranks <= max(cores, ranks),
                got=f"{got} with {ranks} ranks on {cores} usable cores",
                effect=effect,
                remedy=remedy,
            )
        elif name == "OMP_NUM_THREADS":  # MKL_NUM_THREADS defaults to it
            uses_all_cores = "SLURM_JOB_ID" in host.env and cores > 1
            yield _finding(
                name,
                ok=not uses_all_cores,
                got=f"not set under Slurm: {cores} threads in each of {ranks} ranks"
                if uses_all_cores
                else "not set: dtbench run and torchrun give each rank 1",
                effect=effect,
                remedy=remedy,
            )


def _cores(host: ExaminedHost) -> list[MachineFinding]:
    ranks, cores = host.local_ranks, host.usable_cores
    return [
        _finding(
            "cores for the ranks",
            ok=ranks <= cores,
            got=f"{ranks} ranks on {cores} usable cores",
            effect="ranks share cores: a small collective costs milliseconds instead of 0.3 ms",
            remedy=f"dtbench run --nproc {cores}",
        )
    ]


def _numa(host: ExaminedHost) -> list[MachineFinding]:
    nodes = len(list(host.root.glob("sys/devices/system/node/node[0-9]*")))
    if nodes <= 1:
        return [MachineFinding("NUMA nodes", True if nodes else None, f"{nodes}" if nodes else "unknown")]
    online = len(cpu_list(host.read("sys/devices/system/cpu/online")))
    bound = bool(online) and host.usable_cores < online
    cpus = f"bound to {host.usable_cores} of {online} CPUs" if bound else "ranks are not bound to one"
    return [
        _finding(
            "NUMA nodes",
            ok=bound,
            got=f"{nodes}, {cpus}",
            effect="a rank that moves to another node accesses remote memory; times change between launches",
            remedy="numactl --cpunodebind=0 --membind=0 dtbench run ...",
        )
    ]


def _cpu_quota(host: ExaminedHost) -> list[MachineFinding]:
    """Checks the lowest CPU limit, in cores, of this process's control group (version 2) and its parents."""
    path = re.search(r"^0::/?(.*)$", host.read("proc/self/cgroup"), re.MULTILINE)
    group = Path(path[1] if path else "")
    matches = [
        match
        for folder in (group, *group.parents)
        if (match := re.fullmatch(r"(\d+) (\d+)", host.read(f"sys/fs/cgroup/{folder}/cpu.max")))
    ]
    if not matches:
        return [MachineFinding("cgroup CPU quota", True, "none")]
    quota = min(int(match[1]) / int(match[2]) for match in matches)
    return [
        _finding(
            "cgroup CPU quota",
            ok=quota >= host.usable_cores,
            got=f"{quota:g} cores of time on {host.usable_cores} usable cores",
            effect="once the quota of a period (0.1 s) is used up, all ranks are paused until the next period",
            remedy="give the container whole cores: docker run --cpuset-cpus, or a static CPU manager policy",
        )
    ]


def _swap(host: ExaminedHost) -> list[MachineFinding]:
    kib = dict(re.findall(r"^(Swap\w+):\s*(\d+) kB", host.read("proc/meminfo"), re.MULTILINE))
    if not {"SwapTotal", "SwapFree"} <= set(kib):
        return [MachineFinding("swap", None, "unknown: no /proc/meminfo")]
    used = (int(kib["SwapTotal"]) - int(kib["SwapFree"])) * 1024
    return [
        _finding(
            "swap",
            ok=used <= 0,
            got=f"{format_bytes(used)} in use" if used > 0 else "not in use",
            effect="swapped-out memory is read back from disk during a timed call",
            remedy="sudo swapoff -a && sudo swapon -a",
        )
    ]


def _clocksource(host: ExaminedHost) -> list[MachineFinding]:
    current = host.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not current:
        return [MachineFinding("clock source", None, "unknown")]
    return [
        _finding(
            "clock source",
            ok=current in {"tsc", "kvm-clock", "arch_sys_counter", "timebase"},  # read without a system call
            got=current,
            effect="reading the clock needs the kernel and costs up to 1 µs per reading",
            remedy="boot with clocksource=tsc tsc=reliable",
        )
    ]


def _gpus(host: ExaminedHost) -> Iterator[MachineFinding]:
    device_files = sorted(path.name for path in host.root.glob("dev/nvidia[0-9]*"))
    library = host.nvml()
    if library is not None:
        for index, device in devices(library).items():
            yield from _gpu(device, f"GPU {index}")
    elif device_files:
        yield MachineFinding(
            "NVML",
            ok=False,
            got=f"cannot be loaded, although this host has {', '.join(device_files)}",
            effect="clocks and throttling are not recorded, so throttled results go unnoticed",
            remedy="pip install nvidia-ml-py, and make libnvidia-ml.so.1 visible (in a container: "
            "NVIDIA_DRIVER_CAPABILITIES=utility,compute)",
        )
    else:
        yield MachineFinding("GPUs", True, "none")


def _gpu(device: NvmlDevice, title: str) -> Iterator[MachineFinding]:
    got = f"SM {device.clock_MHz('SM') or '?'} MHz of at most {device.clock_MHz('SM', 'Max') or '?'} MHz"
    reasons = device.clock_reasons()
    if reasons is None:
        yield MachineFinding(f"{title} clocks", None, f"{got}; throttling unknown")
    else:
        causes = throttling(reasons)
        yield _finding(
            f"{title} clocks",
            ok=not causes,
            got=got + (f"; slowed by {', '.join(causes)}" if causes else ""),
            effect="the GPU runs below its clock setting: kernels take longer, by amounts that vary over time",
            remedy="cool it, raise its power limit, or lock a clock that it sustains: sudo nvidia-smi -lgc MHZ",
        )

    persistence = device.ask("nvmlDeviceGetPersistenceMode")
    if persistence is not None:
        yield _finding(
            f"{title} persistence mode",
            ok=bool(persistence),
            got="on" if persistence else "off",
            effect="the driver unloads between launches, and the first calls of each launch include its start",
            remedy="sudo nvidia-smi -pm 1",
        )

    pids = [
        str(process.pid)
        for process in device.ask("nvmlDeviceGetComputeRunningProcesses") or []
        if process.pid != os.getpid()
    ]
    yield _finding(
        f"{title} other processes",
        ok=not pids,
        got=f"{len(pids)} (pid {', '.join(pids[:5])})" if pids else "none",
        effect="they compete with the benchmark for the GPU, its memory bandwidth and its links",
        remedy="list them with nvidia-smi and end them",
    )


def _hostname(host: ExaminedHost) -> list[MachineFinding]:
    name = host.read("proc/sys/kernel/hostname") or socket.gethostname()
    check = "host name"
    if interface := host.env.get("GLOO_SOCKET_IFNAME"):
        return [MachineFinding(check, True, f"not used: GLOO_SOCKET_IFNAME={interface}")]
    try:
        address = host.resolve(name)
    except OSError as error:
        return [
            MachineFinding(
                check,
                ok=False,
                got=f"{name} does not resolve ({error.strerror or error})",
                effect="gloo selects its interface by this name: it uses loopback, or cannot create process groups",
                remedy=f"add a line '<address> {name}' to /etc/hosts, or export GLOO_SOCKET_IFNAME=<interface>",
            )
        ]
    loopback = address.startswith("127.")
    return [
        MachineFinding(
            check,
            ok=True,
            got=f"{name} is {address}",
            effect="gloo uses loopback: fine on a single host, but other hosts cannot connect"
            if loopback
            else "",
            remedy="for several hosts: export GLOO_SOCKET_IFNAME=<interface>" if loopback else "",
        )
    ]


def _torch(host: ExaminedHost) -> list[MachineFinding]:
    version = host.torch_version() or "not installed"
    low, high = ("{}.{}".format(*version) for version in _TESTED_TORCH)
    number = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if number < _TESTED_TORCH[0]:
        return [
            MachineFinding(
                "torch",
                ok=False,
                got=f"{version}, expected at least {low}",
                effect="nothing can be measured",
                remedy=f'pip install "torch>={low}"',
            )
        ]
    warning = f"newer than {high}, the newest tested version: private names may have moved"
    return [MachineFinding("torch", True, version, warning if number > _TESTED_TORCH[1] else "")]


def _positive_int(text: str) -> int | None:
    return int(text) if re.fullmatch(r"0*[1-9]\d{0,8}", text.strip()) else None


_CHECKS: tuple[Callable[[ExaminedHost], Iterable[MachineFinding]], ...] = (
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
