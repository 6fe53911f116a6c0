"""One launch of an arm: what `loader` loads for all of them, and what each does then.

An order of the mode "count" lists the selected benchmarks and counts what one call of each does; "time"
samples the benchmarks it names a fixed number of times and nothing else, by turns. Simulated suites
only: those of ranks are measured by `dtbench run`, which the gate starts beside it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from dtbench.engine.clock import clocks_of
from dtbench.engine.rank import silence_torch
from dtbench.engine.tasks import Task, list_tasks
from dtbench.errors import EXIT_OK, EXIT_USAGE, DtbenchError, UsageError
from dtbench.gate import control
from dtbench.gate.benchmark import DEFAULT_TOLERANCE, Benchmark, Listing, Order, Selection, label_of
from dtbench.gate.messages import LISTING, NOW, READY, RESULT
from dtbench.records.result import Result, estimator_of
from dtbench.suite import RunOptions, registry


def load() -> None:
    """Loads what a launch of any arm needs, and nothing of an arm."""
    silence_torch()
    import torch.distributed.tensor
    import torch.profiler
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


def main(order: bytes, connection: Connection) -> int:
    """Carries out an order; 0, or 2 with one line on stderr."""
    from dtbench.engine.ranks import select_device, simulated_world

    wanted = msgspec.msgpack.decode(order, type=Order)
    gate = GateConnection(connection)
    try:
        with simulated_world(select_device(wanted.plan.device_type, 0)) as world:
            (_count if wanted.mode == "count" else _time)(wanted, gate, world)
    except DtbenchError as error:
        print(str(error), file=sys.stderr)  # noqa: T201 - the gate reads it
        return EXIT_USAGE
    return EXIT_OK


def problems_of(asked: bytes, gpus: int) -> list[str]:
    """Why each selection of a gate has no benchmark, "" where it has some. asked: its `GateOptions`, for this arm."""
    from dtbench.gate.options import GateOptions

    options = msgspec.json.decode(asked, type=GateOptions)
    found = [selected([selection], options.plan(gpus)) for selection in options.selections]
    return [
        "".join(problems) or options.lacks({impl for task in tasks for impl in task.impls})
        for tasks, problems in found
    ]


class GateConnection:
    """What a launch tells its gate."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._label = ""

    def at(self, label: str) -> None:
        """The benchmark whose code runs next: the gate names it where the launch dies."""
        if label != self._label:
            self._label = label
            self._connection.send((NOW, label))

    def send(self, what: str, value: Listing | Result) -> None:
        self._connection.send((what, msgspec.msgpack.encode(value)))

    def await_turn(self, number: int) -> None:
        """Returns when it is this launch's turn to take its sample of this number, on the CPU that the gate names."""
        try:
            self._connection.send((READY, number))
            _, cpu = self._connection.recv()
        except (EOFError, OSError):
            raise SystemExit("the gate is gone") from None
        if cpu >= 0 and os.sched_getaffinity(0) != {cpu}:
            with contextlib.suppress(OSError):  # then it is only noisier
                os.sched_setaffinity(0, {cpu})


def selected(selections: Sequence[Selection], plan: RunOptions) -> tuple[list[Task], list[str]]:
    """The tasks of the selections, each once, and why a selection has none."""
    tasks: dict[str, Task] = {}
    problems: list[str] = []
    for selection in selections:
        try:
            listed = list_tasks(registry.load([selection.suite]), plan, selection.text)
        except UsageError as error:
            problems.append(str(error))
        else:
            for task in listed:
                tasks.setdefault(task.label, task)
    return list(tasks.values()), problems


def benchmark_of(task: Task, impl: str) -> Benchmark:
    """How the gate judges one impl of a task."""
    case = task.case
    return Benchmark(
        key=(task.suite.name, case.name, impl, tuple(sorted(case.params.items()))),
        label=label_of(task.label, impl),
        world="ranks" if task.suite.world == "ranks" else "simulated",
        # Noise only adds to a host latency; a collective's fastest call is a lucky meeting of ranks.
        estimator=estimator_of(case),
        tolerance=DEFAULT_TOLERANCE if case.tolerance is None else case.tolerance,
        floor_s=case.floor_s,
    )


def _count(order: Order, gate: GateConnection, world: registry.World) -> None:
    from dtbench.gate.counting import counted

    tasks, problems = selected(order.selections, order.plan)
    listed = [*tasks, *list_tasks([control.control], order.plan)]
    benchmarks = tuple(benchmark_of(task, impl) for task in listed for impl in task.impls)
    gate.send(LISTING, Listing(benchmarks, tuple(problems)))
    for task in (task for task in tasks if task.suite.world == "simulated"):
        for impl in task.impls:
            if (label := label_of(task.label, impl)) not in order.without:
                gate.at(label)
                gate.send(RESULT, counted(task, impl, world))


def _time(order: Order, gate: GateConnection, world: registry.World) -> None:
    from dtbench.gate.sampler import SAMPLES, TAKES, Sampling, measure_in_turns, sampling_for

    wanted = [
        (task, impl, Sampling(SAMPLES, TAKES, task.case.calls_per_sample))
        for task in list_tasks([control.control], order.plan)
        for impl in task.impls
    ]
    for task in selected(order.selections, order.plan)[0]:
        for impl in task.impls:
            call_s = order.call_s.get(label_of(task.label, impl))
            if call_s is not None and task.suite.world == "simulated":
                wanted.append((task, impl, sampling_for(task.case, call_s, len(order.call_s))))
    for result in measure_in_turns(wanted, world, clocks_of(world.device), gate.at, gate.await_turn):
        gate.send(RESULT, result)
