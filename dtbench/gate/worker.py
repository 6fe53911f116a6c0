"""The code of a launch, which carries out one order in a process of the arm.

An order of mode "count" lists the selected benchmarks and counts the operations of one call of each. An order of mode
"time" takes a fixed number of samples of the benchmarks it names, in turns with the other launches. Only simulated
suites run here. The gate measures suites that need real ranks with `dtbench run`.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from dtbench.engine.clock import clocks_of
from dtbench.engine.rank import silence_torch
from dtbench.engine.tasks import Task, list_tasks
from dtbench.errors import EXIT_OK, EXIT_USAGE, DtbenchError, UsageError
from dtbench.gate import control
from dtbench.gate.benchmark import DEFAULT_TOLERANCE, Benchmark, Listing, Order, SuiteSelection, label_of
from dtbench.gate.messages import LISTING, NOW, READY, RESULT
from dtbench.records.result import Result, estimator_of
from dtbench.suite import RunOptions, registry


def load() -> None:
    """Imports the modules that every launch needs, except those that differ between arms: core and suites."""
    silence_torch()
    import torch.distributed.tensor
    import torch.profiler
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


def main(order: bytes, connection: Connection) -> int:
    """Carries out an order. Returns 0, or 2 after one line on stderr."""
    from dtbench.engine.rank_votes import select_device, simulated_world

    decoded = msgspec.msgpack.decode(order, type=Order)
    gate = GateConnection(connection)
    try:
        with simulated_world(select_device(decoded.options.device_type, 0)) as world:
            (_count if decoded.mode == "count" else _time)(decoded, gate, world)
    except DtbenchError as error:
        print(str(error), file=sys.stderr)  # noqa: T201 - the gate reads it
        return EXIT_USAGE
    return EXIT_OK


def selection_problems(encoded_options: bytes, gpus: int) -> list[str] | str:
    """Returns for each selection the reason why it has no benchmark; "" if it has some.

    If this arm refuses the options, such as a backend that its torch lacks, returns the reason instead of a list.

    Args:
        encoded_options: `GateOptions` for this arm, as JSON.
    """
    from dtbench.gate.options import GateOptions

    options = msgspec.json.decode(encoded_options, type=GateOptions)
    try:
        run_options = options.run_options(gpus)
    except UsageError as error:
        return str(error)
    selected_tasks = [selected([selection], run_options) for selection in options.selections]
    return [
        "".join(problems) or options.missing_impls({impl for task in tasks for impl in task.impls})
        for tasks, problems in selected_tasks
    ]


class GateConnection:
    """A launch's end of the connection to its gate."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._label = ""

    def at(self, label: str) -> None:
        """Reports the benchmark whose code runs next. If the launch dies, the gate blames that benchmark."""
        if label != self._label:
            self._label = label
            self._connection.send((NOW, label))

    def send(self, kind: str, value: Listing | Result) -> None:
        self._connection.send((kind, msgspec.msgpack.encode(value)))

    def await_turn(self, number: int) -> None:
        """Waits until this launch may take its sample `number`, and moves to the CPU that the gate names."""
        try:
            self._connection.send((READY, number))
            _, cpu = self._connection.recv()
        except (EOFError, OSError):
            raise SystemExit("the gate is gone") from None
        if cpu >= 0 and os.sched_getaffinity(0) != {cpu}:
            with contextlib.suppress(OSError):  # if refused, the samples are only noisier
                os.sched_setaffinity(0, {cpu})


def selected(selections: Sequence[SuiteSelection], options: RunOptions) -> tuple[list[Task], list[str]]:
    """Returns the tasks of the selections, each once, and the reasons why selections have none."""
    tasks: dict[str, Task] = {}
    problems: list[str] = []
    for selection in selections:
        try:
            listed = list_tasks(registry.load([selection.suite]), options, selection.text)
            tasks |= {task.label: task for task in listed}
        except UsageError as error:
            problems.append(str(error))
    return list(tasks.values()), problems


def benchmark_of(task: Task, impl: str) -> Benchmark:
    """Returns the benchmark of one impl of a task."""
    return Benchmark(
        key=(task.suite.name, task.case.name, impl, tuple(sorted(task.case.params.items()))),
        label=label_of(task.label, impl),
        world="ranks" if task.world == "ranks" else "simulated",
        estimator=estimator_of(task.case),
        tolerance=DEFAULT_TOLERANCE if task.case.tolerance is None else task.case.tolerance,
        floor_s=task.case.floor_s,
    )


def _count(order: Order, gate: GateConnection, world: registry.World) -> None:
    from dtbench.gate.counting import count_call

    tasks, problems = selected(order.selections, order.options)
    benchmarks = tuple(
        benchmark_of(task, impl)
        for task in [*tasks, *list_tasks([control.control], order.options)]
        for impl in task.impls
    )
    listing = Listing(benchmarks, tuple(problems))
    gate.send(LISTING, listing)
    for task in (task for task in tasks if task.world == "simulated"):
        for impl in task.impls:
            if (label := label_of(task.label, impl)) not in order.without:
                gate.at(label)
                gate.send(RESULT, count_call(task, impl, world))
    gate.send(LISTING, replace(listing, working_tree_files=imported_from(order.top)))


def imported_from(top: str) -> tuple[str, ...]:
    """Returns the files that were imported from a working tree although the working directory contains a copy.

    An editable installation can import a package from its folder, whatever PYTHONPATH is.

    Args:
        top: top folder of the working tree, "" for none.
    """
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = (Path(os.path.realpath(file)) for file in files if top and isinstance(file, str))
    return tuple(str(file) for file in paths if file.is_relative_to(top) and file.relative_to(top).exists())


def _time(order: Order, gate: GateConnection, world: registry.World) -> None:
    from dtbench.gate.sampler import SAMPLES, TAKES, Sampling, measure_in_turns, sampling_for

    sampled = [
        (task, impl, Sampling(SAMPLES, TAKES, task.case.calls_per_sample))
        for task in list_tasks([control.control], order.options)
        for impl in task.impls
    ]
    for task in selected(order.selections, order.options)[0]:
        for impl in task.impls:
            call_s = order.call_s.get(label_of(task.label, impl))
            if call_s is not None and task.world == "simulated":
                sampled.append((task, impl, sampling_for(task.case, call_s, len(order.call_s))))
    for result in measure_in_turns(sampled, world, clocks_of(world.device), gate.at, gate.await_turn):
        gate.send(RESULT, result)
