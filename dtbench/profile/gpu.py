"""What NVML says of a GPU while the ranks work: clocks, power, temperature, throttling."""

from __future__ import annotations

import threading
import time

from dtbench.machine import provenance as machine

# NVML renews clocks and power every 20 to 100 ms, depending on the GPU; a reading takes about 1 ms.
SAMPLE_EVERY_S = 0.05


class Sampler:
    """Reads a GPU's state in a thread while it is entered. index: as torch numbers CUDA devices in this process.

    samples: counter -> (us on the host's clock, value). reasons: why it was throttled.
    """

    def __init__(self, index: int, every_s: float = SAMPLE_EVERY_S) -> None:
        self.samples: dict[str, list[tuple[float, float]]] = {}
        self.reasons: set[str] = set()
        self._index, self._every_s = index, every_s
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
            state = machine.gpu_state(self._index)
            at_us = (before_ns + time.time_ns()) / 2e3
            if state is not None:
                self.reasons.update(state["throttled_by"])
                values = {
                    "sm_clock_MHz": state["sm_clock_MHz"],
                    "memory_clock_MHz": state["memory_clock_MHz"],
                    "temperature_C": state["temperature_C"],
                    "power_W": state["power_W"],
                    "throttled": bool(state["throttled_by"]),
                }
                for name, value in values.items():
                    if value is not None:
                        self.samples.setdefault(name, []).append((at_us, float(value)))
            if self._stop.wait(self._every_s):
                return
