"""Where the steps of a job begin and end, by what a trace shows: the profiler's own marks, an annotation that comes
again and again, or a sequence of collectives that repeats."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtbench.traces.communication import Call

_PROFILER = "ProfilerStep#"
# What torch annotates by itself and is no step.
_NO_STEP = re.compile(
    r"^(?:nccl|gloo|c10d|dtbench:|record_param|DistributedDataParallel|FSDP|enumerate|## |Optimizer\.zero|\[|Backward)"
)
_REPETITION = "repetition"
_OPTIMIZER = "Optimizer.step#"
# A first step that takes more than this times a usual one is of warm-up or compilation. Set, not fitted.
OUTLYING = 2.0
_COVERS = 0.5  # an annotation that is a step covers at least so much of the time from its first to its last


@dataclass(frozen=True)
class Steps:
    """The steps of a trace, us.

    Attributes:
        by: what told them.
        host: (start, end) as marked.
        marks: the same on the device, from the first kernel that a step launched to that of the next.
        left_out: how many others the trace has.
    """

    by: str = ""
    host: tuple[tuple[float, float], ...] = ()
    marks: tuple[tuple[float, float], ...] = ()
    left_out: int = 0

    @property
    def longest_us(self) -> float | None:
        """None for less than two: one step alone does not say how long a step is."""
        durations = (end - start for start, end in (*self.host, *self.marks))
        return max(durations) if len(self.marks) > 1 else None

    def part(self, begin: int, end: int) -> Steps:
        """The steps from one place to another."""
        left_out = self.left_out + len(self.marks) - len(self.marks[begin:end])
        return replace(self, host=self.host[begin:end], marks=self.marks[begin:end], left_out=left_out)

    def places(self, times: Sequence[float]) -> NDArray[np.int64]:
        """For each time of the host the place of the step that it lies in; -1 where it lies in none."""
        edges = np.array(self.host).reshape(-1, 2)
        begun, over = (np.searchsorted(edges[:, side], times, side="right") for side in (0, 1))
        return np.where(begun > over, begun - 1, -1)

    def hold(self, times: Sequence[float]) -> NDArray[np.bool_]:
        """Whether each time of the host lies in a step. Without steps all do. After the last repetition one more
        begins, whose end is unknown."""
        after = np.array(times) >= (self.host[-1][1] if self.host else -np.inf)
        return (self.places(times) >= 0) | (after & (self.by in ("", _REPETITION)))


def outlying_first(durations: Sequence[float]) -> int:
    """Returns how many of the first steps take more than `OUTLYING` times a usual one of the later half."""
    usual = median_low(durations[len(durations) // 2 :] or [0.0])
    return next((place for place, took in enumerate(durations) if took <= OUTLYING * usual), 0)


def whole_steps(counts: Sequence[int]) -> tuple[int, int]:
    """Returns from where to where steps are whole.

    Args:
        counts: the calls of each step. A first or last one with fewer than all others is partial; of two that have
            some, neither is.
    """
    begin = len(counts) > 2 and counts[0] < min(counts[1:])
    ends_early = len(counts) > 1 and counts[-1] < min(counts[:-1]) and (len(counts) > 2 or not counts[-1])
    return int(begin), len(counts) - ends_early


def steps_of(
    annotations: Sequence[tuple[str, float, float]], launches: Any, calls: Sequence[Call] = ()
) -> Steps:
    """annotations: (name, start, end). launches: (launch, start) of kernels, by launch, none without a GPU."""
    marked = sorted((start, end) for name, start, end in annotations if name.startswith(_PROFILER))
    following = [*(start for start, _ in marked[1:]), float("inf")]
    marked = [(a, min(b, c)) for (a, b), c in zip(marked, following, strict=False) if a < min(b, c)]
    by = _PROFILER
    if not marked:
        by, marked = _repeated(annotations)
    if not marked:
        by, marked = _REPETITION, _by_calls(calls)
    if not marked:
        return Steps()
    host = tuple(marked)
    return Steps(
        by,
        host,
        marks=_on_device(host, launches),
        left_out=int(by.startswith(_OPTIMIZER)),  # the first step of an optimizer has no mark of its begin
    )


def _on_device(host: tuple[tuple[float, float], ...], launches: Any) -> tuple[tuple[float, float], ...]:
    """The GPU runs behind the host: a step of its begins with the first kernel that the host launched in the step. The
    host's own where a step launched none."""
    first = np.searchsorted(launches[:, 0], [start for start, _ in host])
    last = np.searchsorted(launches[:, 0], [end for _, end in host])
    if (first == last).any():
        return host
    begins = [float(launches[a:b, 1].min()) for a, b in zip(first, last, strict=True)]
    end = max(float(launches[first[-1] : last[-1], 1].max()), begins[-1])
    if sorted(begins) != begins:
        return host
    return tuple(zip(begins, [*begins[1:], end], strict=True))


def _repeated(annotations: Sequence[tuple[str, float, float]]) -> tuple[str, list[tuple[float, float]]]:
    """The annotation that covers most, numbers aside; else from one step of the optimizer to the next."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for name, start, end in annotations:
        if not _NO_STEP.match(name) and start < end:
            key = name if name.startswith(_OPTIMIZER) else re.sub(r"\d+", "#", name)
            by_name.setdefault(key, []).append((start, end))
    optimizers = {name: of for name, of in by_name.items() if name.startswith(_OPTIMIZER) and len(of) > 2}
    best, covers = "", _COVERS
    for name, of in by_name.items():
        of.sort()
        apart = len(of) > 1 and all(a[1] <= b[0] for a, b in itertools.pairwise(of))
        share = sum(e - s for s, e in of) / max(of[-1][1] - of[0][0], 1e-9)
        if apart and share >= covers and not name.startswith(_OPTIMIZER):
            best, covers = name, share
    if best or not optimizers:
        return best, by_name.get(best, [])
    name = min(optimizers, key=lambda name: len(optimizers[name]))
    return name, list(itertools.pairwise(end for _, end in optimizers[name]))


def _by_calls(calls: Sequence[Call]) -> list[tuple[float, float]]:
    """The shortest period of the sequence of collectives, where it repeats at least twice to the end."""
    kinds = [(call.collective, call.group.key, call.bytes, call.dtype) for call in calls]
    # For each beginning of the sequence the longest of its ends that it begins with, too (Knuth, Morris and Pratt).
    border = [0] * len(kinds)
    for at in range(1, len(kinds)):
        n = border[at - 1]
        while n and kinds[n] != kinds[at]:
            n = border[n - 1]
        border[at] = n + (kinds[n] == kinds[at])
    period = len(kinds) - border[-1] if kinds else 0
    if len(kinds) < max(2 * period, 3):
        return []
    return list(itertools.pairwise(call.issued for call in calls[::period]))
