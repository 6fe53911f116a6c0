"""Nested intervals of time on one thread, and what the instrument itself adds to them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


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
        stack = [self]
        while stack:
            span = stack.pop()
            yield span
            stack.extend(reversed(span.children))


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
    """The outermost spans of a log of brackets: name index, start ns ... end ns, -1.

    Raises:
        ValueError: brackets that do not match.
    """
    top: list[Span] = []
    opened: list[Span] = []
    for first, second in zip(log[::2], log[1::2], strict=True):
        if second == -1:
            opened.pop().end_ns = first
        else:
            span = Span(names[first], kind, second, second)
            (opened[-1].children if opened else top).append(span)
            opened.append(span)
    if opened:
        raise ValueError(f"{opened[-1].name} was entered and not left")
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


def quickest(calls: Sequence[Span]) -> list[Span]:
    """The quicker half of the calls: what disturbs a call only ever lengthens it."""
    return sorted(calls, key=lambda span: span.duration_ns)[: max(1, round(len(calls) / 2))]


def fold(
    calls: Iterable[Span],
    overheads: Mapping[str, Overhead],
    rename: Callable[[str], str] = lambda name: name,
) -> dict[tuple[str, ...], float]:
    """Stack -> ns per call, over all the calls: what a flame graph draws.

    A self time that the correction takes below zero counts as zero.
    """
    calls = list(calls)
    folded: dict[tuple[str, ...], float] = {}
    for call in calls:
        for _, path, alone in self_times(call, overheads):
            stack = tuple(map(rename, path))
            folded[stack] = folded.get(stack, 0.0) + alone / len(calls)
    return {stack: max(ns, 0.0) for stack, ns in folded.items()}
