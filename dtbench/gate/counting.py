"""Counts the operations of one call: Python calls, allocations, collectives and their bytes.

Runs in the arm's process. The counted calls are not timed. A counter that differs between repeats within one process is
dropped.
"""

import sys
from collections.abc import Mapping
from types import FrameType

from dtbench.engine.clock import HostClock
from dtbench.engine.measure import ImplOutcome, SamplingSchedule, Subject, measure, to_result
from dtbench.engine.tasks import Task
from dtbench.gate.benchmark import CALL_S
from dtbench.gate.sampler import warm_up_calls
from dtbench.records.result import Result
from dtbench.suite import World

REPEATS = 3


def count_call(task: Task, impl: str, world: World) -> Result:
    """Returns the counters of one warm call and its rough time. The workload's own counters are included."""
    schedule = _Counting(Subject(task.case, impl))
    measure([schedule.subject], world, schedule)
    bad = schedule.subject.failure
    return to_result(task, impl, ImplOutcome(*bad) if bad else ImplOutcome("ok", counters=schedule.counters))


class _Counting(SamplingSchedule):
    """The schedule that counts the calls of one benchmark."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.counters: dict[str, float] = {}

    def warm_up(self) -> None:
        self.subject.attempt(lambda: self.subject.call(warm_up_calls(self.subject.case)))

    def sample(self) -> None:
        self.subject.attempt(self._count)

    def _count(self) -> None:
        subject = self.subject
        for count in (_python_calls, _collectives, _allocations):
            self.counters |= _agreed([count(subject) for _ in range(REPEATS)])
        if subject.workload.counters is not None:
            self.counters |= _agreed([dict(subject.workload.counters()) for _ in range(2)])
        self.counters[CALL_S] = subject.fastest_s(HostClock(), samples=3, calls=1)


def _agreed(repeats: list[Mapping[str, float]]) -> dict[str, float]:
    return {
        name: float(value) for name, value in repeats[0].items() if all(r.get(name) == value for r in repeats)
    }


def _python_calls(subject: Subject) -> dict[str, float]:
    """Counts the calls of Python functions in this thread, including the function `run` of the workload."""
    calls = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call":
            calls += 1

    subject.prepare()
    previous_profiler = sys.getprofile()
    sys.setprofile(on_event)
    try:
        subject.workload.run()
    finally:
        sys.setprofile(previous_profiler)
    return {"python_calls": calls}


def _collectives(subject: Subject) -> dict[str, float]:
    """Counts the collectives that pass torch's dispatcher, and their bytes: of the largest argument or output."""
    import torch
    from torch._ops import OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    counted = {"collectives": 0.0, "collective_bytes": 0.0}

    def bytes_of(values: object) -> int:
        return sum(v.numel() * v.element_size() for v in tree_leaves(values) if isinstance(v, torch.Tensor))

    class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it so
        def __torch_dispatch__(
            self,
            func: OpOverload,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            out: object = func(*args, **(kwargs or {}))
            if func.namespace in _NAMESPACES and "wait" not in func.__name__:
                counted["collectives"] += 1
                counted["collective_bytes"] += max((bytes_of(value) for value in (*args, out)), default=0)
            return out

    subject.prepare()
    with CollectiveCounter():  # type: ignore[no-untyped-call]
        subject.workload.run()
    return counted


# Op namespaces of collectives: those of process groups and the functional ones.
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})


def _allocations(subject: Subject) -> dict[str, float]:
    """Counts the allocations of torch's allocator and their bytes, as recorded by the profiler."""
    from torch.autograd.profiler import profile

    subject.prepare()
    with profile(use_kineto=True, profile_memory=True) as profiler:
        subject.workload.run()
    blocks = [
        event.nbytes()
        for event in profiler.kineto_results.events()
        if event.name() == "[memory]" and event.nbytes() > 0
    ]
    return {"allocations": float(len(blocks)), "allocated_bytes": float(sum(blocks))}
