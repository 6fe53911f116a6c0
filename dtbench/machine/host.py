"""Describes the CPU, memory and kernel of this host from `/proc` and `/sys`.

A fact that the kernel does not report is None or empty.
"""

import os
import platform
import re
from pathlib import Path

from dtbench.machine.limits import usable_cpus
from dtbench.records.result import Cpu


def boot_id() -> str | None:
    """Returns the id of the running kernel. Processes with the same id share a monotonic clock."""
    return read_text(Path("/proc/sys/kernel/random/boot_id")) or None


def numa_nodes(root: Path = Path("/")) -> list[int]:
    """Returns the NUMA nodes of the CPUs that this process may run on; empty if the kernel does not report them."""
    usable = set(usable_cpus())
    return sorted(
        int(folder.name.removeprefix("node"))
        for folder in root.glob("sys/devices/system/node/node[0-9]*")
        if usable & cpu_list(read_text(folder / "cpulist"))
    )


def cpu_list(text: str) -> set[int]:
    """Parses the kernel's notation of a set of CPUs: `0-2,8` -> {0, 1, 2, 8}."""
    return {
        cpu
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)
        for cpu in range(int(first), int(last or first) + 1)
    }


def describe_cpu(root: Path = Path("/")) -> Cpu:
    info = read_text(root / "proc/cpuinfo")
    governors = map(read_text, root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"))
    return Cpu(
        model=_cpu_model(info),
        logical_cores=os.cpu_count(),
        physical_cores=_physical_cores(info),
        usable_cores=len(usable_cpus()),
        governor="+".join(sorted(set(filter(None, governors)))) or None,
        numa_nodes=len(list(root.glob("sys/devices/system/node/node[0-9]*"))) or None,
    )


def _cpu_model(cpuinfo: str) -> str | None:
    for name in ("model name", "Model", "Hardware", "cpu model"):
        if match := re.search(rf"^{name}\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine() or None


def _physical_cores(cpuinfo: str) -> int | None:
    cpus = (
        dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", block, re.MULTILINE)) for block in cpuinfo.split("\n\n")
    )
    return len({(cpu.get("physical id", "0"), cpu["core id"]) for cpu in cpus if "core id" in cpu}) or None


def memory_bytes() -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB", read_text(Path("/proc/meminfo")), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def read_text(path: Path) -> str:
    """Returns the stripped text of one of the kernel's files, or "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
