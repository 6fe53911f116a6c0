"""Finds the steps of a job in the trace of one rank.

Steps come from the profiler's own marks (`profiler.step()`), else from an annotation that repeats, else from a sequence
of collectives that repeats. Times are microseconds.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtbench.traces.communication import Call

_PROFILER = "ProfilerStep#"
# Annotations of torch that are not steps.
_NO_STEP = re.compile(
    r"^(?:nccl|gloo|c10d|dtbench:|record_param|DistributedDataParallel|FSDP|enumerate|## |Optimizer\.zero|\[|Backward)"
)
_REPETITION = "repetition"
_OPTIMIZER = "Optimizer.step#"
# A first step that takes more than OUTLYING times as long as a usual step is warm-up or compilation. Chosen by hand.
OUTLYING = 2.0
_MIN_COVERAGE = (
    0.5  # an annotation marks steps if it covers this share of the time from its first start to its last end
)

_Span = tuple[float, float]


@dataclass(frozen=True)
class Steps:
    """The steps of a trace.

    Attributes:
        source: how they were found, as in `RankJob.steps_source`.
        host_spans: (start, end) on the host.
        spans: (start, end) on the device. A step starts with the first kernel launched in it and ends where the next
            one starts. Without a GPU, these are the host's spans.
        excluded: number of steps in the trace that were left out.
    """

    source: str = ""
    host_spans: tuple[_Span, ...] = ()
    spans: tuple[_Span, ...] = ()
    excluded: int = 0

    @property
    def longest_us(self) -> float | None:
        """Duration of the longest step; None with fewer than two, since one step is no evidence for the others."""
        return (
            max(end - start for start, end in (*self.host_spans, *self.spans))
            if len(self.spans) > 1
            else None
        )

    def select(self, begin: int, end: int) -> "Steps":
        """Keeps the steps from index `begin` up to `end` and counts the others as excluded."""
        spans = self.spans[begin:end]
        return replace(
            self,
            host_spans=self.host_spans[begin:end],
            spans=spans,
            excluded=self.excluded + len(self.spans) - len(spans),
        )

    def indices_at(self, host_times: Sequence[float]) -> NDArray[np.int64]:
        """Returns for each time the index of the step that contains it, or -1."""
        edges = np.array(self.host_spans).reshape(-1, 2)
        started, ended = (np.searchsorted(edges[:, side], host_times, side="right") for side in (0, 1))
        return np.where(started > ended, started - 1, -1)

    def contain(self, host_times: Sequence[float]) -> NDArray[np.bool_]:
        """Returns for each time whether it lies in a step.

        If no steps were found, every time counts as inside. If the steps come from repeated collectives, times after
        the last repetition also count as inside: a step with an unknown end begins there.
        """
        is_after = np.array(host_times) >= (self.host_spans[-1][1] if self.host_spans else -np.inf)
        return (self.indices_at(host_times) >= 0) | (is_after & (self.source in ("", _REPETITION)))


def count_outlying_first(durations: Sequence[float]) -> int:
    """Returns how many of the first steps take more than `OUTLYING` times a usual step of the later half."""
    usual = median_low(durations[len(durations) // 2 :] or [0.0])
    return next((index for index, duration in enumerate(durations) if duration <= OUTLYING * usual), 0)


def find_complete_steps(counts: Sequence[int]) -> tuple[int, int]:
    """Returns the index range of complete steps.

    A first or last step with less work than all others is partial. If there are only two steps with work, both count as
    complete.

    Args:
        counts: the amount of work in each step, e.g. its number of calls.
    """
    starts_late = len(counts) > 2 and counts[0] < min(counts[1:])
    ends_early = len(counts) > 1 and counts[-1] < min(counts[:-1]) and (len(counts) > 2 or not counts[-1])
    return int(starts_late), len(counts) - ends_early


def find_steps(
    annotations: Sequence[tuple[str, float, float]], launches: Any, calls: Sequence[Call] = ()
) -> Steps:
    """Finds the steps of a trace.

    Args:
        annotations: (name, start, end) on the host.
        launches: array of (launch time on the host, start on the device) for each kernel, sorted by launch time; empty
            without a GPU.
        calls: the rank's collectives, to look for repetition.
    """
    spans = sorted((start, end) for name, start, end in annotations if name.startswith(_PROFILER))
    spans = [
        (start, min(end, next_start))
        for (start, end), (next_start, _) in itertools.pairwise([*spans, (float("inf"), float("inf"))])
        if start < min(end, next_start)
    ]
    source = _PROFILER
    if not spans:
        source, spans = _repeated_annotation(annotations)
    if not spans:
        source, spans = _REPETITION, _repeated_calls(calls)
    if not spans:
        return Steps()
    host_spans = tuple(spans)
    return Steps(
        source,
        host_spans,
        spans=_spans_on_device(host_spans, launches),
        excluded=int(source.startswith(_OPTIMIZER)),  # the start of an optimizer's first step is unknown
    )


def _spans_on_device(host_spans: tuple[_Span, ...], launches: Any) -> tuple[_Span, ...]:
    """Moves steps to the device, which runs behind the host. Returns the host's spans if a step launched no kernel."""
    first, last = np.searchsorted(launches[:, 0], np.transpose(host_spans))
    if (first == last).any():
        return host_spans
    starts = [float(launches[a:b, 1].min()) for a, b in zip(first, last, strict=True)]
    end = max(float(launches[first[-1] : last[-1], 1].max()), starts[-1])
    return tuple(zip(starts, [*starts[1:], end], strict=True)) if sorted(starts) == starts else host_spans


def _repeated_annotation(annotations: Sequence[tuple[str, float, float]]) -> tuple[str, list[_Span]]:
    """Returns the annotation that covers the most time, and its spans.

    Annotations that differ only in numbers count as one. If none covers enough, steps reach from one end of an
    optimizer's step to the next.
    """
    by_name = defaultdict[str, list[_Span]](list)
    for name, start, end in annotations:
        if not _NO_STEP.match(name) and start < end:
            by_name[name if name.startswith(_OPTIMIZER) else re.sub(r"\d+", "#", name)].append((start, end))
    optimizers = {
        name: spans for name, spans in by_name.items() if name.startswith(_OPTIMIZER) and len(spans) > 2
    }
    best, best_coverage = "", _MIN_COVERAGE
    for name, spans in by_name.items():
        spans.sort()
        is_disjoint = len(spans) > 1 and all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        coverage = sum(end - start for start, end in spans) / max(spans[-1][1] - spans[0][0], 1e-9)
        if is_disjoint and coverage >= best_coverage and not name.startswith(_OPTIMIZER):
            best, best_coverage = name, coverage
    if best or not optimizers:
        return best, by_name.get(best, [])
    name = min(optimizers, key=lambda name: len(optimizers[name]))
    return name, list(itertools.pairwise(end for _, end in optimizers[name]))


def _repeated_calls(calls: Sequence[Call]) -> list[_Span]:
    """Returns steps of the shortest period with which the sequence of collectives repeats, at least twice."""
    kinds = [(call.collective, call.group.key, call.bytes, call.dtype) for call in calls]
    # border[i]: length of the longest proper prefix of kinds[: i + 1] that is also its suffix (Knuth, Morris, Pratt).
    border = [0] * len(kinds)
    for index in range(1, len(kinds)):
        n = border[index - 1]
        while n and kinds[n] != kinds[index]:
            n = border[n - 1]
        border[index] = n + (kinds[n] == kinds[index])
    period = len(kinds) - border[-1] if kinds else 0
    repeats = len(kinds) >= max(2 * period, 3)
    return list(itertools.pairwise(call.issued for call in calls[::period])) if repeats else []
