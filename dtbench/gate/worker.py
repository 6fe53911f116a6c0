"""One launch of an arm: what `loader` loads for all of them, and what each does then.

An order of the mode "count" lists the selected benchmarks and counts what one call of each does; "time"
samples the cases it names a fixed number of times and nothing else, by turns. Simulated suites
only: those of ranks are measured by `dtbench run`, which the gate starts beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dtbench.engine.clock import clocks_of
from dtbench.engine.options import Task, list_tasks
from dtbench.engine.rank import quiet_torch
from dtbench.gate import control
from dtbench.gate.benchmark import (
    DEFAULT_TOLERANCE,
    IN_HAND,
    LISTING,
    ORDER,
    RESULTS,
    Benchmark,
    Listing,
    Order,
    Selection,
    label_of,
    write_listing,
)
from dtbench.records.run import RunWriter
from dtbench.suite import RunOptions, estimator_of
from dtbench.suite import suites as registry
from dtbench.suite.errors import EXIT_OK, EXIT_USAGE, DtbenchError, UsageError

if TYPE_CHECKING:
    from dtbench.engine.ranks import LiveWorld


def load(more: Sequence[str]) -> None:
    """Loads what a launch of any arm needs, and nothing of an arm. more: modules of torch that this selection
    needs too, if it is so in every arm.
    """
    quiet_torch()
    import torch.distributed
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    for name in more:
        with contextlib.suppress(Exception):  # it is loaded again where it is needed, and fails there
            importlib.import_module(name)


def main(stem: Path, await_turn: Callable[[int], None]) -> int:
    """Carries out the order whose files begin so; 0, or 2 with one line on stderr."""
    order = msgspec.json.decode(stem.with_suffix(ORDER).read_bytes(), type=Order)
    try:
        if order.mode == "count":
            _count(order, stem)
        else:
            _time(order, stem, await_turn)
    except DtbenchError as error:
        print(str(error), file=sys.stderr)  # noqa: T201 - the gate reads it
        return EXIT_USAGE
    return EXIT_OK


# ------------------------------------------------------------------------------ which cases


def selected(selections: Sequence[Selection], plan: RunOptions) -> tuple[list[Task], list[str]]:
    """The tasks of the selections, each once, and why a selection has none."""
    tasks: dict[tuple[object, ...], Task] = {}
    problems: list[str] = []
    for selection in selections:
        try:
            suites = registry.load([selection.suite])
            found = list_tasks(suites, plan, selection.text)
        except UsageError as error:
            problems.append(str(error))
            continue
        for task in found:
            tasks.setdefault((task.suite.name, task.case.name, *sorted(task.case.params.items())), task)
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


# ------------------------------------------------------------------------------ the two modes


def _count(order: Order, stem: Path) -> None:
    import torch

    from dtbench.gate.counting import counted

    known = set(sys.modules)
    tasks, problems = selected(order.selections, order.plan)
    chosen = [*tasks, *list_tasks([control.control], order.plan)]
    listing = Listing(
        tuple(benchmark_of(task, impl) for task in chosen for impl in task.impls),
        tuple(problems),
        ".".join(platform.python_version_tuple()[:2]),
        str(torch.__version__),
    )
    write_listing(stem.with_suffix(LISTING), listing)
    loaded = {"": _new_modules(known)}
    with _launch(order.plan, stem, chosen) as (writer, world, now):
        for task in (task for task in tasks if task.suite.world == "simulated"):
            for impl in task.impls:
                label = label_of(task.label, impl)
                if label not in order.without:
                    now.write(label)
                    writer.append(counted(task, impl, world))
                    loaded[label] = _new_modules(known)
    write_listing(stem.with_suffix(LISTING), dataclasses.replace(listing, loaded=loaded))


def _new_modules(known: set[str]) -> tuple[str, ...]:
    """Modules of torch that are loaded and not known, in their order; now they are known. Without its compiler,
    which starts processes that launches must not share.
    """
    new = [name for name in sys.modules if name not in known]
    known.update(new)
    return tuple(n for n in new if n.startswith("torch.") and not n.startswith("torch._inductor."))


def _time(order: Order, stem: Path, await_turn: Callable[[int], None]) -> None:
    from dtbench.gate.sampler import SAMPLES, TAKES, Sampling, measure_in_turns, sampling_for

    tasks, _ = selected(order.selections, order.plan)
    wanted = [
        (task, impl, Sampling(SAMPLES, TAKES, task.case.calls_per_sample))
        for task in list_tasks([control.control], order.plan)
        for impl in task.impls
    ]
    for task in tasks:
        for impl in task.impls:
            label = label_of(task.label, impl)
            if label in order.call_s and task.suite.world == "simulated":
                how = sampling_for(task.case, order.call_s[label], len(order.call_s))
                wanted.append((task, impl, how))
    with _launch(order.plan, stem, [task for task, *_ in wanted]) as (writer, world, now):
        for result in measure_in_turns(wanted, world, clocks_of(world.device), now.write, await_turn):
            writer.append(result)


class _Note:
    """The case in hand, in a file of fixed length that is rewritten in place: no time to speak of."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._last = ""

    def write(self, label: str) -> None:
        """Names the case, or none."""
        if label != self._last:
            data = label.encode("utf-8", "replace")
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
            self._last = label


@contextlib.contextmanager
def _launch(
    plan: RunOptions, stem: Path, tasks: Sequence[Task]
) -> Iterator[tuple[RunWriter, LiveWorld, _Note]]:
    """The run file, the simulated world and the note of the case in hand; the file is whole in the end."""
    from dtbench.engine.ranks import device_of, simulated_world
    from dtbench.machine.provenance import local_rank_info, provenance

    header = provenance(
        argv=sys.argv[1:],
        plan=plan,
        suites=sorted({task.suite.name for task in tasks}),
        mesh=(),
        ranks=[local_rank_info(plan.device_type)],
        backend=None,
        launches=1,
    )
    device = device_of(plan.device_type, 0)
    with RunWriter.create(stem.with_suffix(RESULTS), header) as writer, simulated_world(device) as world:
        note = _Note(stem.with_suffix(IN_HAND))
        yield writer, world, note
        writer.end()
        note.write("")
