"""Finds the phase of a step in which the host issued a call: forward, backward, optimizer, or other.

- The optimizer runs within `Optimizer.step#...`, the backward pass within nodes of autograd's engine, on any thread.
- Annotations whose names contain "forward", "backward" or "optim" count, too. Those of DDP and FSDP do.
- The forward pass begins with the first op whose backward node the trace has (`aten::mm` and `MmBackward0`), and ends
  where the backward pass begins.
- The time between these phases is "other": data, metrics, and work on gradients after the backward pass.

A call is in no known phase if the trace does not show a backward pass, or ends before the next one. Times are
microseconds on the host.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtbench.traces.intervals import Intervals, difference, intervals, union

FORWARD, BACKWARD, OPTIMIZER, OTHER, UNKNOWN_PHASE = "forward", "backward", "optimizer", "other", "?"
PHASES = (FORWARD, BACKWARD, OPTIMIZER, OTHER, UNKNOWN_PHASE)
_NODE = "autograd::engine::evaluate_function: "
_WORDS = {
    OPTIMIZER: re.compile(r"(?i)optim(?!.*zero_grad)"),
    BACKWARD: re.compile("(?i)backward"),
    FORWARD: re.compile("(?i)forward"),
}


@dataclass(frozen=True)
class Phases:
    """When the host was in each phase.

    Attributes:
        spans: phase -> when the trace shows it directly, merged.
        forward_ops: starts of ops with a backward node, outside of these spans, sorted.
        steps: starts of steps and the end of the last one, sorted.
    """

    spans: Mapping[str, Intervals]
    forward_ops: Any
    steps: Any

    def at(self, host_times: Sequence[float]) -> list[str]:
        """Returns the phase at each time."""
        times = np.array(host_times, dtype=np.float64)
        backward, optimizer = self.spans[BACKWARD], self.spans[OPTIMIZER]
        forward_before, forward_after = _neighbors(self.forward_ops, self.forward_ops, times)
        backward_end, backward_start = _neighbors(backward[:, 1], backward[:, 0], times)
        optimizer_end, optimizer_start = _neighbors(optimizer[:, 1], optimizer[:, 0], times)
        step_start, step_end = _neighbors(self.steps, self.steps, times)
        other_end, other_start = np.maximum(optimizer_end, step_start), np.minimum(optimizer_start, step_end)
        is_before_backward = backward_start < other_start
        is_in_forward = is_before_backward & (forward_before > np.maximum(backward_end, other_end))
        is_in_gap = is_before_backward & (backward_end > other_end) & (forward_after > backward_start)
        is_shown = (len(backward) > 0) & np.isfinite(np.minimum(backward_start, other_start))
        conditions = [_contains(self.spans[phase], times) for phase in _WORDS]
        conditions += [is_in_forward, is_in_gap, is_shown]
        return list(map(str, np.select(conditions, [*_WORDS, FORWARD, BACKWARD, OTHER], UNKNOWN_PHASE)))


def find_phases(
    annotations: Iterable[tuple[str, float, float]],
    ops: Iterable[tuple[Any, Any, Any]],
    names: Sequence[str],
    steps: Sequence[tuple[float, float]],
) -> Phases:
    """Finds the phases in a trace.

    Args:
        annotations: (name, start, end) on the host.
        ops: for each thread, arrays of the starts, the durations, and the numbers of the names of its ops.
        names: number -> name of an op.
        steps: (start, end) of each step on the host.
    """
    shown: dict[str, list[Any]] = {phase: [] for phase in _WORDS}
    for name, start, end in annotations:
        phases = [phase for phase, word in _WORDS.items() if word.search(name)]
        if len(phases) == 1:
            shown[phases[0]].append((start, end))
    nodes = [name.removeprefix(_NODE) if name.startswith(_NODE) else "" for name in names]
    differentiable = {_letters(re.sub(r"Backward\d*$", "", node)) for node in nodes if "Backward" in node}
    is_node = np.array([bool(node) for node in nodes], dtype=bool)
    is_forward = np.array(
        [_letters(name.rpartition("::")[2]) in differentiable for name in names], dtype=bool
    )
    forward_ops = [np.empty(0)]
    for starts, durations, tags in ops:
        is_backward = is_node[tags]
        shown[BACKWARD] += np.column_stack([starts, starts + durations])[is_backward].tolist()
        forward_ops.append(starts[is_forward[tags]])
    spans = {phase: union(intervals(pairs)) for phase, pairs in shown.items()}
    spans[BACKWARD] = difference(spans[BACKWARD], spans[OPTIMIZER])
    starts = np.sort(np.concatenate(forward_ops))
    is_within = _contains(spans[BACKWARD], starts) | _contains(spans[OPTIMIZER], starts)
    return Phases(spans, starts[~is_within], np.unique(np.array([*steps]).ravel()))


def _letters(name: str) -> str:
    """Returns the name of an op as autograd's nodes and ops have it in common, e.g. "logsoftmax"."""
    return name.replace("_", "").lower()


def _neighbors(ends: Any, starts: Any, times: Any) -> tuple[Any, Any]:
    """Returns for each time the last end at or before it and the first start after it, infinite without one."""
    last_ends = np.concatenate([[-np.inf], ends])[np.searchsorted(ends, times, side="right")]
    return last_ends, np.append(starts, np.inf)[np.searchsorted(starts, times, side="right")]


def _contains(united: Intervals, times: Any) -> Any:
    """Returns for each time whether the set contains it. An interval contains its start, but not its end."""
    return np.searchsorted(united.ravel(), times, side="right") % 2 == 1
