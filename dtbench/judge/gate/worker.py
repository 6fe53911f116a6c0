"""One launch of an arm: what `loader` loads for all of them, and what each does then.

An order of the mode "count" lists the selected benchmarks and counts what one call of each does; "time"
samples the cases it names a fixed number of times and nothing else, by turns. Simulated suites
only: those of ranks are measured by `dtbench run`, which the gate starts beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtbench import suite as registry
from dtbench.bench.clock import Clock
from dtbench.bench.options import RunOptions, Task, list_tasks
from dtbench.bench.session import quiet_torch
from dtbench.errors import EXIT_OK, EXIT_USAGE, DtbenchError, UsageError
from dtbench.files.store import RunWriter
from dtbench.judge.gate import control
from dtbench.judge.gate.benchmark import (
    CALL_S,
    DEFAULT_TOLERANCE,
    Benchmark,
    Listing,
    Selection,
    write_listing,
)
from dtbench.model import Case, Plan, Result, Skip, Workload, estimator_of

# As the dispatch suite's own warm-up; more than ten make no difference.
COUNT_WARMUP_CALLS = 20
NOTE_SUFFIX = ".now"  # the case in hand, for the gate to name when this process dies


def load(more: Sequence[str]) -> None:
    """Loads what a launch of any arm needs, and nothing of an arm. more: modules of torch that this selection
    needs too, if it is so in every arm.
    """
    quiet_torch()
    import torch.distributed
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    import dtbench.judge.gate.counting
    import dtbench.judge.gate.sampler
    import dtbench.machine.provenance
    import dtbench.world.ranks  # noqa: F401

    for name in more:
        with contextlib.suppress(Exception):  # it is loaded again where it is needed, and fails there
            importlib.import_module(name)


def main(argv: Sequence[str], await_turn: Callable[[int], None]) -> int:
    """Carries out the order argv[0] with its results in argv[1]; 0, or 2 with one line on stderr."""
    order = json.loads(Path(argv[0]).read_text())
    output = Path(argv[1])
    try:
        plan = plan_of(order["plan"])
        if order["mode"] == "count":
            _count(order, plan, output)
        else:
            _time(order, plan, output, await_turn)
    except DtbenchError as error:
        print(str(error), file=sys.stderr)  # noqa: T201 - the gate reads it
        return EXIT_USAGE
    return EXIT_OK


def plan_of(given: Mapping[str, Any]) -> Plan:
    """The plan that the options of the gate make, the same in both arms."""
    mesh = given.get("mesh")
    options = RunOptions(
        impls=tuple(given["impls"]),
        mesh=None if mesh is None else tuple((name, size) for name, size in mesh),
        nproc=given["nproc"],
        sizes_bytes=None if given.get("sizes") is None else tuple(given["sizes"]),
        dtypes=tuple(given["dtypes"]),
    )
    return options.plan(given["device"], given["nproc"])


# ------------------------------------------------------------------------------ which cases


def selected(selections: Sequence[Selection], plan: Plan) -> tuple[list[Task], list[str]]:
    """The tasks of the selections, each once, and why a selection has none."""
    tasks: dict[tuple[Any, ...], Task] = {}
    problems: list[str] = []
    for selection in selections:
        try:
            suites = registry.load([selection.suite])
            found = list_tasks(suites, plan, selection.text)
        except UsageError as error:
            problems.append(str(error))
            continue
        for task in found:
            if task.suite.world == "own":
                problems.append(f"{task.suite.name} gives verdicts and no times: it has no place in a gate")
                break
            tasks.setdefault((task.suite.name, task.case.name, *sorted(task.case.params.items())), task)
    return list(tasks.values()), problems


def control_tasks(plan: Plan) -> list[Task]:
    """What is measured beside every selection."""
    return list_tasks([control.control], plan)


def benchmark_of(task: Task, impl: str) -> Benchmark:
    """How the gate judges one impl of a task."""
    case = task.case
    return Benchmark(
        key=(task.suite.name, case.name, impl, tuple(sorted(case.params.items()))),
        label=f"{task.label} [{impl}]",
        world="ranks" if task.suite.world == "ranks" else "simulated",
        # Noise only adds to a host latency; a collective's fastest call is a lucky meeting of ranks.
        estimator=estimator_of(case),
        tolerance=DEFAULT_TOLERANCE if case.tolerance is None else case.tolerance,
        floor_s=case.floor_s,
    )


# ------------------------------------------------------------------------------ the two modes


def _count(order: Mapping[str, Any], plan: Plan, output: Path) -> None:
    import torch

    known = set(sys.modules)
    tasks, problems = selected([Selection(**s) for s in order["selections"]], plan)
    chosen = [*tasks, *control_tasks(plan)]
    listing = Listing(
        tuple(benchmark_of(task, impl) for task in chosen for impl in task.impls),
        tuple(problems),
        ".".join(platform.python_version_tuple()[:2]),
        torch.__version__,
    )
    write_listing(Path(order["listing"]), listing)
    simulated = [task for task in tasks if task.suite.world == "simulated"]
    left_out = set(order["without"])
    loaded = {"": _new_modules(known)}
    with _writer(plan, output, chosen) as writer, _world(plan) as world:
        gc.collect()
        gc.freeze()  # what is alive now stays: no later collection needs to look at it
        now = _Note(output)
        for task in simulated:
            for impl in task.impls:
                benchmark = benchmark_of(task, impl)
                if benchmark.label in left_out:
                    continue
                now.write(benchmark.label)
                writer.append(_counted(task, impl, world))
                loaded[benchmark.label] = _new_modules(known)
        writer.end()
        now.write("")
    write_listing(Path(order["listing"]), dataclasses.replace(listing, loaded=loaded))


def _new_modules(known: set[str]) -> list[str]:
    """Modules of torch that are loaded and not known, in their order; now they are known. Without its compiler,
    which starts processes that launches must not share.
    """
    new = [name for name in sys.modules if name not in known]
    known.update(new)
    return [name for name in new if name.startswith("torch.") and not name.startswith("torch._inductor.")]


def _counted(task: Task, impl: str, world: Any) -> Result:
    from dtbench.errors import describe
    from dtbench.judge.gate.counting import count_calls

    case: Case = task.case
    named = (task.suite.name, case.name, impl, case.params)
    try:
        workload = case.build[impl](world)
        try:
            warm_up = case.warmup_calls if case.samples is not None else COUNT_WARMUP_CALLS
            counters = count_calls(workload, max(case.warmup_calls, warm_up))
            call_s = _call_s(workload)
            wrong = workload.check() if workload.check is not None else None
        finally:
            if workload.close is not None:
                workload.close()
    except Skip as skip:
        return Result(*named, "skipped", str(skip))
    except Exception as error:
        return Result(*named, "failed", describe(error))
    if wrong is not None:
        return Result(*named, "wrong", wrong)
    return Result(*named, "ok", counters={**counters, CALL_S: call_s})


def _call_s(workload: Workload) -> float:
    """What a warm call takes, seconds, roughly: it sets the number of samples."""
    taken = []
    for _ in range(3):
        if workload.before is not None:
            workload.before()
        began = time.perf_counter()
        workload.run()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _time(order: Mapping[str, Any], plan: Plan, output: Path, await_turn: Callable[[int], None]) -> None:
    from dtbench.judge.gate.sampler import SAMPLES, TAKES, Sampling, measure, sampling_for

    tasks, _ = selected([Selection(**s) for s in order["selections"]], plan)
    call_s: Mapping[str, float] = order["call_s"]  # by label
    wanted = [
        (task, impl, Sampling(SAMPLES, TAKES, task.case.calls_per_sample))
        for task in control_tasks(plan)
        for impl in task.impls
    ]
    for task in tasks:
        for impl in task.impls:
            label = benchmark_of(task, impl).label
            if label in call_s and task.suite.world == "simulated":
                wanted.append((task, impl, sampling_for(task.case, call_s[label], len(call_s))))
    with _writer(plan, output, [task for task, *_ in wanted]) as writer, _world(plan) as world:
        now = _Note(output)
        for result in measure(wanted, world, _clocks(world.device), now.write, await_turn):
            writer.append(result)
        writer.end()
        now.write("")


def _clocks(device: Any) -> dict[str, Clock]:
    from dtbench.bench.clock import CudaClock, HostClock, HostClockOnCuda

    if device.type == "cpu":
        return {"host": HostClock(), "device": HostClock()}
    return {"host": HostClockOnCuda(), "device": CudaClock(device)}


class _Note:
    """The case in hand, in a file of fixed length that is rewritten in place: no time to speak of."""

    def __init__(self, output: Path) -> None:
        self._fd = os.open(f"{output}{NOTE_SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._last = ""

    def write(self, label: str) -> None:
        """Names the case, or none."""
        if label != self._last:
            data = label.encode("utf-8", "replace")
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
            self._last = label


@contextlib.contextmanager
def _world(plan: Plan) -> Iterator[Any]:
    from dtbench.world.ranks import device_of, simulated_world

    with simulated_world(device_of(plan.device_type, 0)) as world:
        yield world


@contextlib.contextmanager
def _writer(plan: Plan, output: Path, tasks: Sequence[Task]) -> Iterator[RunWriter]:
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
    with RunWriter.create(output, header) as writer:
        yield writer
