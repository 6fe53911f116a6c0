"""Reads a GPU's identity, clocks, throttling and NVLink neighbours through NVML.

A query that the bindings, the driver or a virtual GPU do not support returns None instead of raising.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dtbench.machine.device import Nvml, gpus
from dtbench.machine.host import read_text
from dtbench.records.result import Gpu, NvLinks

# Bits of the reasons that determine a GPU's current clock. Source: NVML API reference, nvmlClocksEventReasons.
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
# An idle GPU and a clock set by its owner are not throttled.
_NOT_THROTTLING = frozenset({"gpu_idle", "applications_clocks_setting", "display_clock_setting"})


def _ask(library: Nvml | None, name: str, *args: object) -> Nvml | None:
    """Returns the result of an NVML query, or None if it is not supported.

    Old bindings and drivers lack some queries, and virtual GPUs forbid some.
    """
    try:
        answer = getattr(library, name)(*args)
    except Exception:  # NVMLError has a subclass per fault; ctypes adds its own
        return None
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


@dataclass(frozen=True)
class NvmlDevice:
    """A GPU, identified by its NVML handle."""

    library: Nvml
    handle: Nvml

    def ask(self, name: str, *args: object) -> Nvml | None:
        """Returns the result of the named NVML query on this GPU; None if the query is not supported."""
        return _ask(self.library, name, self.handle, *args)

    def clock_MHz(self, domain: Literal["SM", "MEM"], limit: Literal["", "Max"] = "") -> int | None:  # noqa: N802
        """Returns the current clock of the multiprocessors or the memory, or with `limit` "Max" the highest."""
        return self.ask(f"nvmlDeviceGet{limit}ClockInfo", getattr(self.library, f"NVML_CLOCK_{domain}"))

    def link_states(self) -> dict[int, bool]:
        """Returns NVLink number -> whether the link is up, for the links that NVML reports."""
        states = {
            link: self.ask("nvmlDeviceGetNvLinkState", link)
            for link in range(getattr(self.library, "NVML_NVLINK_MAX_LINKS", 18))
        }
        return {link: bool(state) for link, state in states.items() if state is not None}

    def clock_reasons(self) -> list[str] | None:
        """Returns the reasons for the current clock; None if NVML does not report them.

        Bits without a known name are reported as one "unknown_0x..." entry.
        """
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # the query's name before driver 535
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is None:
            return None
        unknown = bits & ~sum(_CLOCK_REASONS)
        return [
            *(name for bit, name in _CLOCK_REASONS.items() if bits & bit),
            *([f"unknown_{unknown:#x}"] if unknown else []),
        ]


def devices(library: Nvml | None) -> dict[int, NvmlDevice]:
    """Returns all GPUs of this host by NVML index (PCI order), including those hidden from CUDA."""
    handles = {
        index: _ask(library, "nvmlDeviceGetHandleByIndex", index)
        for index in range(_ask(library, "nvmlDeviceGetCount") or 0)
    }
    return {index: NvmlDevice(library, handle) for index, handle in handles.items() if handle is not None}


def cuda_device(index: int) -> NvmlDevice | None:
    """Returns the CUDA device that torch numbers `index` in this process; None if NVML cannot identify it.

    NVML's numbers differ: CUDA_VISIBLE_DEVICES renumbers devices, and CUDA may order them differently.
    """
    library, device_id = gpus().nvml(), gpus().uuid(index)
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    names = [] if device_id is None else [f"GPU-{device_id}", f"MIG-{device_id}"]
    names += visible[index : index + 1] if visible else [str(index)]
    handles = (
        _ask(library, "nvmlDeviceGetHandleByIndex", int(name))
        if name.isdigit()
        else _ask(library, "nvmlDeviceGetHandleByUUID", name)
        for name in names
    )
    handle = next((handle for handle in handles if handle is not None), None)
    return None if handle is None else NvmlDevice(library, handle)


def driver_version() -> str | None:
    return _ask(gpus().nvml(), "nvmlSystemGetDriverVersion")


def describe_gpus() -> list[Gpu]:
    """Describes all GPUs of this host for the run's header."""
    return [_gpu(index, device) for index, device in devices(gpus().nvml()).items()]


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


def gpu_location(index: int, root: Path = Path("/")) -> dict[str, object]:
    """Locates a CUDA device: its PCI bus id, the NUMA node of that bus, and its NVLink neighbours.

    Args:
        index: torch's number of the CUDA device in this process.

    Returns:
        Fields of `RankFacts`. `nvlink` is None without NVLink. Otherwise, `neighbours` maps PCI bus ids of GPUs to
        the number of links to each, and `switch_links` counts links to NVSwitches.
    """
    device = cuda_device(index)
    bus_id = None if device is None else _bus_id(device.ask("nvmlDeviceGetPciInfo"))
    if device is None or bus_id is None:
        return {"pci_bus_id": None, "device_numa_node": None, "nvlink": None}
    node = read_text(root / "sys/bus/pci/devices" / bus_id / "numa_node")
    return {
        "pci_bus_id": bus_id,
        "device_numa_node": int(node) if node.isdigit() else None,  # the kernel writes -1 for an unknown node
        "nvlink": _nvlink_peers(device),
    }


def _bus_id(info: object) -> str | None:
    """Converts NVML's PCI address to the kernel's spelling: `0000:1b:00.0`, with a domain of four digits."""
    text = getattr(info, "busId", None)
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    match = re.fullmatch(r"([0-9a-fA-F]{4,8})(:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])", text or "")
    return f"{int(match[1], 16):04x}{match[2].lower()}" if match else None


def _nvlink_peers(device: NvmlDevice) -> dict[str, object] | None:
    """Counts the active NVLinks by what they connect to; None if NVML reports no link."""
    states = device.link_states()
    if not states:
        return None
    leads_to_switch = {
        link: device.ask("nvmlDeviceGetNvLinkRemoteDeviceType", link)
        == getattr(device.library, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2)
        for link, is_up in states.items()
        if is_up
    }
    bus_ids = (
        _bus_id(device.ask("nvmlDeviceGetNvLinkRemotePciInfo", link))
        for link, is_switch in leads_to_switch.items()
        if not is_switch
    )
    return {
        "neighbours": dict(Counter(filter(None, bus_ids))),
        "switch_links": sum(leads_to_switch.values()),
    }


def gpu_state(index: int) -> dict[str, Any] | None:
    """Returns the current clocks, temperature, power and throttling of a GPU; None if NVML cannot identify it.

    Args:
        index: torch's number of the CUDA device in this process.

    Returns:
        A dict in which `reasons` are all of NVML's reasons for the current clock, and `throttled_by` those of
        them that keep the clock below its setting.
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
    """Returns the reasons that keep a GPU's clock below its setting."""
    return [reason for reason in reasons if reason not in _NOT_THROTTLING]
