"""Recorded calls as nested intervals, and from these a table of stages that adds up to the measured whole. Pure.

What records a call slows it. The whole call's time is known from calls that nobody recorded, so the cost
of recording is fitted: it is what takes the recorded time down to the measured one, shared out among the
spans as the calibration says. The table therefore adds up; how far the fitted cost lies from the
calibrated one says how well each stage is known, and stands beside it as "plus or minus".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dtbench.grouping import in_order
from dtbench.records.profile import CallStages, Stage
from dtbench.suite import STAGES

# The fitted cost of recording may be so many times the calibrated one: beyond that something else than
# recording was slow, and the difference is left unattributed.
MOST_FIT = 3.0


@dataclass
class Span:
    """One call. kind: which instrument recorded it, since each costs something else."""

    name: str
    kind: str
    start_ns: float
    end_ns: float
    children: list[Span] = field(default_factory=list)

    @property
    def duration_ns(self) -> float:
        return self.end_ns - self.start_ns

    def walk(self) -> Iterator[Span]:
        """The span and all below it, parents first."""
        yield self
        yield from self.below()

    def below(self) -> Iterator[Span]:
        stack = self.children[::-1]
        while stack:
            span = stack.pop()
            yield span
            stack += reversed(span.children)


@dataclass(frozen=True)
class Overhead:
    """Of recording one span, ns. inside: counted in its own duration; outside: in its caller's."""

    inside_ns: float
    outside_ns: float

    @property
    def total_ns(self) -> float:
        return self.inside_ns + self.outside_ns


NOTHING = Overhead(0.0, 0.0)
# torch's record of an op that is handed to a tensor subclass: what is around it is dispatch, not work.
HANDED_OVER = "PythonSubclass"


def from_brackets(log: Sequence[int], names: Sequence[str], kind: str) -> list[Span]:
    """The outermost spans of a log of brackets: name index, start ns ... end ns, -1."""
    top: list[Span] = []
    opened: list[Span] = []
    for first, second in zip(log[::2], log[1::2], strict=True):
        if second == -1:
            opened.pop().end_ns = first
        else:
            span = Span(names[first], kind, second, second)
            (opened[-1].children if opened else top).append(span)
            opened.append(span)
    return top


def self_times(
    root: Span, overheads: Mapping[str, Overhead]
) -> Iterator[tuple[Span, tuple[str, ...], float]]:
    """Of each span in the tree: (span, names from the root to it, ns spent in it and in no child).

    The instrument's share is taken off: what lies inside the span itself, and outside each child.
    """
    stack: list[tuple[Span, tuple[str, ...]]] = [(root, (root.name,))]
    while stack:
        span, path = stack.pop()
        own = overheads.get(span.kind, NOTHING)
        alone = span.duration_ns - own.inside_ns
        for child in span.children:
            alone -= child.duration_ns + overheads.get(child.kind, NOTHING).outside_ns
            stack.append((child, (*path, child.name)))
        yield span, path, alone


def fold(
    calls: Sequence[Span], overheads: Mapping[str, Overhead], rename: Callable[[str], str], total_ns: float
) -> dict[tuple[str, ...], float]:
    """Stack -> ns per call, over all the calls: what a flame graph draws. They add up to total_ns: a self time that the
    correction takes below zero counts as zero there, and the others make room."""
    folded: dict[tuple[str, ...], float] = {}
    for call in calls:
        for _, path, alone in self_times(call, overheads):
            stack = tuple(map(rename, path))
            folded[stack] = folded.get(stack, 0.0) + alone
    kept = {stack: max(ns, 0.0) for stack, ns in folded.items()}
    scale = max(total_ns / max(sum(kept.values()), 1e-9), 0.0)
    return {stack: ns * scale for stack, ns in kept.items()}


# Yields, for each piece of a call, (stage, ns in it, spans whose recording it bears).
Pieces = Callable[[Span, Mapping[str, Overhead]], Iterator[tuple[str, float, float]]]


def break_down(
    calls: Sequence[Span],
    whole_ns: float,
    calibrated: Mapping[str, Overhead],
    pieces: Pieces,
    ignored: str = "",
) -> tuple[CallStages, Mapping[str, Overhead]]:
    """The table of one or more calls, without label, impl and source, and the fitted cost of recording a span.

    ignored: name of spans that are the instrument's own work.
    """
    recorded = sum(call.duration_ns for call in calls) / len(calls)
    own = sum(s.duration_ns for c in calls for s in c.walk() if s.name == ignored) / len(calls)
    cost = sum(_cost_within(call, calibrated, ignored) for call in calls) / len(calls)
    scale = min(max((recorded - own - whole_ns) / cost, 0.0), MOST_FIT) if cost > 0 else 1.0
    fitted = {kind: Overhead(o.inside_ns * scale, o.outside_ns * scale) for kind, o in calibrated.items()}
    time: dict[str, float] = {}
    borne: dict[str, float] = {}
    for call in calls:
        for stage, ns, _ in pieces(call, fitted):
            time[stage] = time.get(stage, 0.0) + ns / len(calls)
        for stage, _, cost_ns in pieces(call, calibrated):
            borne[stage] = borne.get(stage, 0.0) + cost_ns / len(calls)
    time.pop(ignored, None)
    rows = tuple(
        Stage(stage=s, ns=time[s], plus_minus_ns=borne[s] * abs(scale - 1)) for s in in_order(time, STAGES)
    )
    table = CallStages(
        label="",
        impl="",
        source="",
        whole_ns=whole_ns,
        recorded_ns=recorded,
        calls=len(calls),
        rows=rows,
        spans_per_call=sum(1 for c in calls for _ in c.walk()) / len(calls),
        fitted_to_calibrated=scale,
        unattributed_ns=whole_ns - sum(row.ns for row in rows),
    )
    return table, fitted


def _cost_within(call: Span, overheads: Mapping[str, Overhead], ignored: str) -> float:
    """What recording the call's spans added to its duration, but for what lies inside the ignored ones."""
    cost = -overheads.get(call.kind, NOTHING).outside_ns  # the root's lies before and after it
    for span in call.walk():
        of = overheads.get(span.kind, NOTHING)
        cost += of.outside_ns if span.name == ignored else of.total_ns
    return cost


def named_pieces(call: Span, overheads: Mapping[str, Overhead]) -> Iterator[tuple[str, float, float]]:
    """Where the spans are named by their stage, as the core's counters name them."""
    for span, _, alone in self_times(call, overheads):
        outside_ns = sum(overheads.get(child.kind, NOTHING).outside_ns for child in span.children)
        yield span.name, alone, overheads.get(span.kind, NOTHING).inside_ns + outside_ns


# torch's DTensor, by file and function: (part of the frame's name, stage). Read from
# torch/distributed/tensor of 2.11 and 2.13; a frame that none names belongs to its caller's stage.
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
# Once a call is in one of these, it stays until it returns; a redistribution may communicate.
_KEEPS = frozenset({"plan", "redistribute", "communicate", "local op", "wrap"})


def frame_pieces(call: Span, overheads: Mapping[str, Overhead]) -> Iterator[tuple[str, float, float]]:
    """Where the spans are torch's Python and C++ frames.

    The C++ of torch's dispatch has no frames of its own. Between two Python frames it is counted with the
    stage of the frame that comes next; before the op on the shards, with that op.
    """
    handing = {id(span) for span in call.walk() if any(s.name == HANDED_OVER for s in span.below())}
    stack: list[tuple[Span, str]] = [(call, "entry")]
    while stack:
        span, stage = stack.pop()
        own = overheads.get(span.kind, NOTHING)
        at, left_inside = span.start_ns, own.inside_ns
        for child in span.children:
            next_stage = _stage_of(child, stage, handing)
            outside = overheads.get(child.kind, NOTHING).outside_ns
            gap_stage = next_stage if span.name == HANDED_OVER else stage
            yield gap_stage, child.start_ns - at - outside - left_inside, outside + left_inside
            at, left_inside = child.end_ns, 0.0
            stack.append((child, next_stage))
        # C++ between two Python frames belongs to what comes next: after the last hash comes the look-up.
        end_stage = "entry" if span.name == HANDED_OVER and span.children else stage
        yield end_stage, span.end_ns - at - left_inside, left_inside


def _stage_of(span: Span, stage: str, handing: set[int]) -> str:
    if span.name.startswith("aten::") and id(span) not in handing:
        return stage if stage in _KEEPS else "local op"
    named = next((of for part, of in reversed(_FRAMES) if part in span.name), stage)
    if stage in _KEEPS and not (stage == "redistribute" and named == "communicate"):
        return stage
    return named
