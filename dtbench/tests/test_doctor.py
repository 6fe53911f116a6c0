"""The doctor finds sources of noise on made-up hosts, and never reports unknown state as good."""

import dataclasses
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtbench.machine import doctor
from dtbench.machine.doctor import ExaminedHost, MachineFinding, examine

CPU = "sys/devices/system/cpu"
GOOD_FILES = {
    f"{CPU}/cpu0/cpufreq/scaling_governor": "performance\n",
    f"{CPU}/cpu1/cpufreq/scaling_governor": "performance\n",
    f"{CPU}/intel_pstate/no_turbo": "1\n",
    f"{CPU}/online": "0-7\n",
    "sys/devices/system/node/node0/cpulist": "0-7\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "proc/loadavg": "0.10 0.20 0.30 1/100 1234\n",
    "proc/meminfo": "MemTotal: 1000 kB\nSwapTotal: 100 kB\nSwapFree: 100 kB\n",
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/cpu.max": "max 100000\n",
    "proc/sys/kernel/hostname": "box\n",
}
NOTHING = "no such file"


def make_host(tmp_path: Path, files: Mapping[str, str] = {}, **changes: Any) -> ExaminedHost:
    """Returns a host without sources of noise, with changes applied; files set to NOTHING are not created."""
    root = tmp_path / "root"
    for name, text in {**GOOD_FILES, **files}.items():
        if text != NOTHING:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    good = ExaminedHost(
        root=root,
        env={"OMP_NUM_THREADS": "2"},
        usable_cores=8,
        nvml=lambda: None,
        resolve=lambda name: "10.0.0.7",
        torch_version=lambda: "2.12.1+cu128",
    )
    return dataclasses.replace(good, **changes)


def finding(host: ExaminedHost, check: str) -> MachineFinding:
    (match,) = [f for f in examine(host) if f.check == check]
    return match


def test_quiet_host_has_only_good_findings(tmp_path: Path) -> None:
    assert [f for f in examine(make_host(tmp_path)) if f.ok is not True] == []


def test_missing_proc_and_sys_are_reported_as_unknown(tmp_path: Path) -> None:
    findings = examine(make_host(tmp_path, dict.fromkeys(GOOD_FILES, NOTHING)))
    assert {finding.check for finding in findings if finding.ok is None} == {
        "CPU frequency governor",
        "CPU turbo",
        "load average",
        "NUMA nodes",
        "swap",
        "clock source",
    }


def test_examine_runs_on_this_host() -> None:
    findings = examine()
    assert len(findings) >= len(doctor._CHECKS) and all(f.got for f in findings)


def unresolved(_name: str) -> str:
    raise socket.gaierror(-2, "Name or service not known")


GOVERNOR, NO_TURBO = f"{CPU}/cpu1/cpufreq/scaling_governor", f"{CPU}/intel_pstate/no_turbo"
NODE, CLOCK = (
    "sys/devices/system/node/node1/cpulist",
    f"{CPU[:-3]}clocksource/clocksource0/current_clocksource",
)
OMP, MKL, QUOTA = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "cgroup CPU quota"
RANKS, NUMA = "cores for the ranks", "NUMA nodes"
GPUS = dict.fromkeys(("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"), "")


def env(**variables: str) -> dict[str, Any]:
    return {"env": variables}


LOOPBACK = {"resolve": lambda _: "127.0.1.1"}


@pytest.mark.parametrize(
    ("ok", "check", "files", "changes", "got", "remedy"),
    [
        (False, "CPU frequency governor", {GOVERNOR: "powersave"}, {}, "performance, powersave", "cpupower"),
        (False, "CPU turbo", {NO_TURBO: NOTHING, f"{CPU}/cpufreq/boost": "1"}, {}, "on", "boost"),
        (False, "load average", {"proc/loadavg": "6.50 1 1 1/2 3"}, {}, "6.5 on 8 usable cores", "top"),
        (True, OMP, {}, env(), "not set: dtbench run and torchrun give each rank 1", ""),
        (False, OMP, {}, env(SLURM_JOB_ID="1"), "not set under Slurm: 8 threads", "OMP_NUM_THREADS=2"),
        (False, OMP, {}, env(OMP_NUM_THREADS="4,2"), "4,2 with 4 ranks on 8", "OMP_NUM_THREADS=2"),
        (False, OMP, {}, env(OMP_NUM_THREADS="many"), "'many'", "OMP_NUM_THREADS=2"),
        (False, MKL, {}, env(MKL_NUM_THREADS="8"), "8 with 4 ranks", "MKL_NUM_THREADS=2"),
        (True, RANKS, GPUS, env(), "2 ranks on 8 usable cores", ""),
        (False, RANKS, {}, env(LOCAL_WORLD_SIZE="16"), "16 ranks on 8 usable", "--nproc 8"),
        (True, NUMA, {NODE: "4-7", f"{CPU}/online": "0-7,10,16-22"}, {}, "2, bound to 8 of 16 CPUs", ""),
        (False, NUMA, {NODE: "4-7"}, {}, "2, ranks are not bound to one", "numactl"),
        (False, QUOTA, {"sys/fs/cgroup/job/cpu.max": "150000 100000"}, {}, "1.5 cores", "cpuset"),
        (False, QUOTA, {"sys/fs/cgroup/cpu.max": "400000 100000"}, {}, "4 cores", "cpuset"),
        (
            False,
            "swap",
            {"proc/meminfo": "SwapTotal: 4096 kB\nSwapFree: 1024 kB\n"},
            {},
            "3.000 MiB",
            "swapoff",
        ),
        (False, "clock source", {CLOCK: "hpet"}, {}, "hpet", "clocksource=tsc"),
        (False, "NVML", GPUS, {}, "cannot be loaded, although this host has nvidia0", "nvidia-ml-py"),
        (False, "torch", {}, {"torch_version": lambda: None}, "not installed", "pip install"),
        (True, "torch", {}, {"torch_version": lambda: "2.14.0a0+git1"}, "2.14.0a0+git1", "newer than 2.13"),
        (False, "host name", {}, {"resolve": unresolved}, "box does not resolve (Name or", "/etc/hosts"),
        (True, "host name", {}, LOOPBACK, "box is 127.0.1.1", "other hosts cannot connect"),
    ],
)
def test_source_of_noise_is_reported_with_remedy(
    tmp_path: Path,
    ok: bool,
    check: str,
    files: dict[str, str],
    changes: dict[str, Any],
    got: str,
    remedy: str,
) -> None:
    result = finding(make_host(tmp_path, files, **changes), check)
    assert result.ok is ok and result.got.startswith(got)
    assert remedy in result.effect + result.remedy and (ok or result.effect)


def fake_nvml(reasons: int = 0, persistent: int = 1, pids: tuple[int, ...] = ()) -> SimpleNamespace:
    def clock_reasons(_handle: int) -> int:
        if reasons < 0:
            raise RuntimeError("Not Supported")
        return reasons

    return SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCurrentClocksThrottleReasons=clock_reasons,
        nvmlDeviceGetClockInfo=lambda handle, which: 1200,
        nvmlDeviceGetMaxClockInfo=lambda handle, which: 1980,
        nvmlDeviceGetPersistenceMode=lambda handle: persistent,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=pid) for pid in pids],
    )


@pytest.mark.parametrize(
    ("nvml", "check", "ok", "got"),
    [
        (fake_nvml(), "GPU 0 clocks", True, ""),
        (fake_nvml(), "GPU 0 persistence mode", True, ""),
        (fake_nvml(), "GPU 0 other processes", True, ""),
        (
            fake_nvml(reasons=0x1 | 0x40),
            "GPU 0 clocks",
            False,
            "SM 1200 MHz of at most 1980 MHz; slowed by hw_thermal_slowdown",
        ),
        (fake_nvml(reasons=-1), "GPU 0 clocks", None, "throttling unknown"),
        (fake_nvml(persistent=0), "GPU 0 persistence mode", False, ""),
        (fake_nvml(pids=(2**22 + 1, 2**22 + 2)), "GPU 0 other processes", False, "2 (pid 4194305, 4194306)"),
    ],
)
def test_gpu_state_is_examined(
    tmp_path: Path, nvml: SimpleNamespace, check: str, ok: bool | None, got: str
) -> None:
    result = finding(make_host(tmp_path, nvml=lambda: nvml), check)
    assert result.ok is ok and got in result.got
    assert ok is not False or "persistence" not in check or result.remedy == "sudo nvidia-smi -pm 1"
