"""Breaks recorded calls, trees of nested spans, down into a table of stages that adds up to the measured call.

Recording slows down a call. The time of a call without recording is measured, so the cost of recording can be fitted:
the recorded time minus that time is distributed among the spans in proportion to their calibrated cost. The table
therefore adds up. The difference between fitted and calibrated cost is the error of each stage.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dtbench.grouping import sort_by_order
from dtbench.records.profile import CallStages, Stage
from dtbench.suite import STAGES

# Limit of the fitted cost relative to the calibrated cost. Beyond it, something other than recording was slow. The
# remaining difference is unattributed.
MAX_FIT = 3.0


@dataclass
class Span:
    """A recorded call, with the calls within it.

    Attributes:
        name: name of the function, op or stage.
        kind: kind of the recorded event. Recording has a different cost for each kind.
        start_ns, end_ns: nanoseconds.
        children: the calls within it, in order of time.
    """

    name: str
    kind: str
    start_ns: float
    end_ns: float
    children: list["Span"] = field(default_factory=list)

    @property
    def duration_ns(self) -> float:
        return self.end_ns - self.start_ns

    def walk(self) -> Iterator["Span"]:
        """Yields the span and all spans within it, parents first."""
        stack = [self]
        while stack:
            span = stack.pop()
            yield span
            stack += reversed(span.children)


@dataclass(frozen=True)
class Overhead:
    """Cost of recording one span.

    Attributes:
        inside_ns: the part that lengthens the span itself.
        outside_ns: the part that lengthens its parent.
    """

    inside_ns: float
    outside_ns: float

    @property
    def total_ns(self) -> float:
        return self.inside_ns + self.outside_ns


NO_OVERHEAD = Overhead(0.0, 0.0)
# The event of an op that torch dispatches to a tensor subclass. The ops that enclose it only dispatch, so they do not
# count as work.
SUBCLASS_OP = "PythonSubclass"


def spans_from_log(log: Sequence[int], names: Sequence[str], kind: str) -> list[Span]:
    """Converts the counters' log of interval starts and ends to nested spans, and returns the outermost ones.

    Args:
        log: two numbers for each start and each end. A start has the index of its name and the time, an end the time
            and -1. Times are in nanoseconds.
        names: names of the spans.
        kind: kind of the spans.
    """
    outermost: list[Span] = []
    open_spans: list[Span] = []
    for first, second in zip(log[::2], log[1::2], strict=True):
        if second == -1:
            open_spans.pop().end_ns = first
        else:
            span = Span(names[first], kind, second, second)
            (open_spans[-1].children if open_spans else outermost).append(span)
            open_spans.append(span)
    return outermost


def self_times(
    root: Span, overheads: Mapping[str, Overhead]
) -> Iterator[tuple[Span, tuple[str, ...], float]]:
    """Yields for each span of a tree (span, names from the root to the span, nanoseconds outside its children).

    The cost of recording is subtracted: `inside_ns` of the span itself and `outside_ns` of each child.
    """
    stack: list[tuple[Span, tuple[str, ...]]] = [(root, (root.name,))]
    while stack:
        span, path = stack.pop()
        self_ns = span.duration_ns - overheads.get(span.kind, NO_OVERHEAD).inside_ns
        for child in span.children:
            self_ns -= child.duration_ns + overheads.get(child.kind, NO_OVERHEAD).outside_ns
            stack.append((child, (*path, child.name)))
        yield span, path, self_ns


def fold(
    calls: Sequence[Span], overheads: Mapping[str, Overhead], rename: Callable[[str], str], total_ns: float
) -> dict[tuple[str, ...], float]:
    """Returns stack -> nanoseconds per call, for a flame graph.

    Where subtracting the cost of recording makes a self time negative, it becomes zero. All are then scaled to add up
    to `total_ns`.
    """
    folded = defaultdict[tuple[str, ...], float](float)
    for call in calls:
        for _, path, self_ns in self_times(call, overheads):
            folded[tuple(map(rename, path))] += self_ns
    positive = {stack: max(ns, 0.0) for stack, ns in folded.items()}
    scale = max(total_ns / max(sum(positive.values()), 1e-9), 0.0)
    return {stack: ns * scale for stack, ns in positive.items()}


# Yields for each piece of a call (stage, nanoseconds without the cost of recording, that cost in nanoseconds).
Pieces = Callable[[Span, Mapping[str, Overhead]], Iterator[tuple[str, float, float]]]


def break_down(
    calls: Sequence[Span],
    whole_ns: float,
    calibrated: Mapping[str, Overhead],
    pieces: Pieces,
    ignored: str = "",
) -> tuple[CallStages, Mapping[str, Overhead]]:
    """Returns the table of some calls, without label, impl and source, and the fitted cost of recording a span.

    Args:
        calls: recorded calls.
        whole_ns: time of a call without recording.
        calibrated: kind of span -> calibrated cost of recording one.
        pieces: assigns the parts of a call to stages.
        ignored: name of the spans in which the recorder itself works.
    """
    recorded_ns = sum(call.duration_ns for call in calls) / len(calls)
    ignored_ns = sum(
        span.duration_ns for call in calls for span in call.walk() if span.name == ignored
    ) / len(calls)
    cost_ns = sum(_recording_cost(call, calibrated, ignored) for call in calls) / len(calls)
    scale = min(max((recorded_ns - ignored_ns - whole_ns) / cost_ns, 0.0), MAX_FIT) if cost_ns > 0 else 1.0
    fitted = {
        kind: Overhead(overhead.inside_ns * scale, overhead.outside_ns * scale)
        for kind, overhead in calibrated.items()
    }
    stage_ns, stage_cost_ns = defaultdict[str, float](float), defaultdict[str, float](float)
    for call in calls:
        for stage, ns, _ in pieces(call, fitted):
            stage_ns[stage] += ns / len(calls)
        for stage, _, ns in pieces(call, calibrated):
            stage_cost_ns[stage] += ns / len(calls)
    stage_ns.pop(ignored, None)
    rows = tuple(
        Stage(stage=stage, ns=stage_ns[stage], plus_minus_ns=stage_cost_ns[stage] * abs(scale - 1))
        for stage in sort_by_order(stage_ns, STAGES)
    )
    table = CallStages(
        label="",
        impl="",
        source="",
        whole_ns=whole_ns,
        recorded_ns=recorded_ns,
        calls=len(calls),
        rows=rows,
        spans_per_call=sum(1 for call in calls for _ in call.walk()) / len(calls),
        fitted_to_calibrated=scale,
        unattributed_ns=whole_ns - sum(row.ns for row in rows),
    )
    return table, fitted


def _recording_cost(call: Span, overheads: Mapping[str, Overhead], ignored: str) -> float:
    """Returns the nanoseconds that recording added to a call, except within ignored spans."""
    cost_ns = -overheads.get(call.kind, NO_OVERHEAD).outside_ns  # the root's is before and after the call
    for span in call.walk():
        overhead = overheads.get(span.kind, NO_OVERHEAD)
        cost_ns += overhead.outside_ns if span.name == ignored else overhead.total_ns
    return cost_ns


def named_pieces(call: Span, overheads: Mapping[str, Overhead]) -> Iterator[tuple[str, float, float]]:
    """Yields the pieces of a call whose spans are named after stages, like those of the core's counters."""
    for span, _, self_ns in self_times(call, overheads):
        outside_ns = sum(overheads.get(child.kind, NO_OVERHEAD).outside_ns for child in span.children)
        yield span.name, self_ns, overheads.get(span.kind, NO_OVERHEAD).inside_ns + outside_ns


# (part of a frame's name, stage) for files and functions of torch's DTensor, from torch/distributed/tensor of 2.11 and
# 2.13. The last match counts. A frame without a match belongs to its caller's stage.
_FRAMES: tuple[tuple[str, str], ...] = (
    ("simple_registry.py", "entry"),
    ("_ops.py(", "key"),
    ("_dtensor_spec.py", "key"),
    ("): device_mesh", "key"),
    ("): get_coordinate", "cache"),
    ("): _is_current_rank_part_of_mesh", "cache"),
    ("_sharding_prop.py", "plan"),
    ("_op_schema.py", "plan"),
    ("_redistribute.py", "redistribute"),
    ("_collective_utils.py", "redistribute"),
    ("_functional_collectives.py", "communicate"),
    ("distributed_c10d.py", "communicate"),
    ("c10d::", "communicate"),
    ("_c10d_functional::", "communicate"),
    ("_dispatch.py(", "glue"),
    ("): wrap", "wrap"),
)
# Stages that include all frames below them. The exception is communication within a redistribution.
_INCLUSIVE = frozenset({"plan", "redistribute", "communicate", "local op", "wrap"})


def frame_pieces(call: Span, overheads: Mapping[str, Overhead]) -> Iterator[tuple[str, float, float]]:
    """Yields the pieces of a call whose spans are torch's Python and C++ frames.

    torch's dispatch in C++ has no frames. Between two Python frames, its time belongs to the stage of the next frame.
    Directly before the op on the shards, it belongs to that op.
    """
    dispatching = {
        id(span)
        for span in call.walk()
        if any(below.name == SUBCLASS_OP for below in span.walk() if below is not span)
    }
    stack: list[tuple[Span, str]] = [(call, "entry")]
    while stack:
        span, stage = stack.pop()
        # The span's `inside_ns`, until a piece has subtracted it.
        gap_start_ns, inside_ns = span.start_ns, overheads.get(span.kind, NO_OVERHEAD).inside_ns
        for child in span.children:
            next_stage = _find_stage(child, stage, dispatching)
            outside_ns = overheads.get(child.kind, NO_OVERHEAD).outside_ns
            yield (
                next_stage if span.name == SUBCLASS_OP else stage,
                child.start_ns - gap_start_ns - outside_ns - inside_ns,
                outside_ns + inside_ns,
            )
            gap_start_ns, inside_ns = child.end_ns, 0.0
            stack.append((child, next_stage))
        yield (
            "entry" if span.name == SUBCLASS_OP and span.children else stage,
            span.end_ns - gap_start_ns - inside_ns,
            inside_ns,
        )


def _find_stage(span: Span, stage: str, dispatching: set[int]) -> str:
    """Returns the stage of a span, given its parent's stage and the ids of spans around a `SUBCLASS_OP`."""
    if span.name.startswith("aten::") and id(span) not in dispatching:
        return stage if stage in _INCLUSIVE else "local op"
    named = next((frame_stage for part, frame_stage in reversed(_FRAMES) if part in span.name), stage)
    is_inclusive = stage in _INCLUSIVE and not (stage == "redistribute" and named == "communicate")
    return stage if is_inclusive else named
