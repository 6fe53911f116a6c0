"""What NVML says of a GPU while the ranks work: clocks, power, temperature, throttling, NVLink traffic."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping

from dtbench.machine import provenance as machine

# NVML renews clocks and power every 20 to 100 ms, depending on the GPU; a reading takes about 1 ms.
SAMPLE_EVERY_S = 0.05

Samples = dict[str, list[tuple[float, float]]]  # counter -> (us on the host's clock, value)


class Sampler:
    """Reads a GPU's state in a thread while it is entered. index: as torch numbers CUDA devices in this process."""

    def __init__(self, index: int, every_s: float = SAMPLE_EVERY_S) -> None:
        self.samples: Samples = {}
        self.reasons: set[str] = set()
        self._index = index
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="nvml", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            before_ns = time.time_ns()
            state = self._state()
            at_us = (before_ns + time.time_ns()) / 2e3
            for name, value in state.items():
                self.samples.setdefault(name, []).append((at_us, value))
            if self._stop.wait(self._every_s):
                return

    def _state(self) -> dict[str, float]:
        state = machine.gpu_state(self._index)
        if state is None:
            return {}
        self.reasons.update(state["throttled_by"])
        read = [
            (name, state[name]) for name in ("sm_clock_MHz", "memory_clock_MHz", "temperature_C", "power_W")
        ]
        found = {name: float(value) for name, value in read if value is not None}
        return found | {"throttled": float(bool(state["throttled_by"]))} | nvlink_KiB(self._index)


def nvlink_KiB(index: int) -> dict[str, float]:  # noqa: N802 - the unit as it is written
    """Payload sent and received over all NVLinks since the driver was loaded; empty where NVML knows of
    none. Source: NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX of nvml.h, in KiB per link."""
    device = machine.cuda_device(index)
    if device is None:
        return {}
    found: dict[str, float] = {}
    for name, field in (
        ("nvlink_sent_KiB", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX"),
        ("nvlink_received_KiB", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"),
    ):
        number = getattr(device.library, field, None)
        asked = [(number, link) for link in device.links]
        values = device.ask("nvmlDeviceGetFieldValues", asked) if number is not None else None
        known = [float(v.value.ullVal) for v in values or () if v.nvmlReturn == 0]
        if known:
            found[name] = sum(known)
    return found


def counters_of(samples: Mapping[str, list[tuple[float, float]]]) -> Samples:
    """As the trace draws them: what only rises as a rate from sample to sample, in GB/s (10^9 bytes/s)."""
    drawn: Samples = {}
    for name, values in samples.items():
        if not name.endswith("_KiB"):
            drawn[name] = values
            continue
        drawn[name.replace("_KiB", "_GBps")] = [
            (at, (higher - value) * 1024 / (later - at) / 1e3)  # bytes per us are 10^6 bytes/s
            for (at, value), (later, higher) in itertools.pairwise(values)
            if later > at and higher >= value
        ]
    return drawn
