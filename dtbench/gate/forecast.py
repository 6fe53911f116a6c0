"""How long a gate takes at the least, said before it spends anything."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from multiprocessing.connection import Pipe

from dtbench.engine import budget
from dtbench.engine.options import RunRequest, Task, list_tasks
from dtbench.engine.progress import about
from dtbench.engine.workers import Fork
from dtbench.gate.benchmark import Selection
from dtbench.gate.sampler import FEW_BENCHMARKS, SAMPLES_S
from dtbench.gate.schedule import SCREEN_ROUNDS, TEST_LOOKS
from dtbench.suite import CHOOSABLE_IMPLS
from dtbench.suite.errors import DtbenchError
from dtbench.suite.suites import load
from dtbench.text.units import plural

# Loading both arms and counting, on two cores; of a launch, forking and setting up its benchmarks. 31 benchmarks took
# 37 s in 15 launches there, 28 of them sampling.
COUNT_S, LAUNCH_S = 8.0, 0.2
# What suites get to be loaded in: torch takes 2 to 5 s.
LIST_S = 15.0


def forecast(selections: Sequence[Selection], impls: Sequence[str], options: RunRequest, ranks: int) -> str:
    """`31 benchmarks: about 40 s at the least, if nothing moved, ...`; nothing where they cannot be listed here in a
    while. In a process of its own: suites are programs of others, which may hang or print.

    options: those of the launches. ranks: of a world.
    """
    ours, theirs = Pipe(duplex=False)

    def tell() -> int:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        theirs.send(_forecast(selections, impls, options, ranks))
        return 0

    child = Fork(tell)
    theirs.close()
    with ours, contextlib.suppress(EOFError, OSError):
        said: str = ours.recv() if ours.poll(LIST_S) else ""
        child.end()
        return said
    child.end()
    return ""


def _forecast(selections: Sequence[Selection], impls: Sequence[str], options: RunRequest, ranks: int) -> str:
    try:
        plan = options.resolve("cpu", ranks)
        tasks = {
            task.label: task for one in selections for task in list_tasks(load([one.suite]), plan, one.text)
        }
    except DtbenchError:
        return ""
    kept = [(task, sum(not impls or impl in impls for impl in task.impls)) for task in tasks.values()]
    count = sum(number for _, number in kept)
    launch_s = launch_time_s([task for task, number in kept if number], count)
    screen_s = COUNT_S + 3 * SCREEN_ROUNDS * launch_s
    pair_s = 2 * TEST_LOOKS[0] * launch_s
    least, more = about(screen_s), about(pair_s)
    what = plural(count, "benchmark")
    return f"{what}: {least} at the least, where none is slower; {more} more to confirm one that is"


def launch_time_s(tasks: Sequence[Task], benchmarks: int) -> float:
    """About what a launch of the tasks takes, seconds."""
    simulated = sum(len(task.impls) for task in tasks if task.suite.world == "simulated")
    of_ranks = [task for task in tasks if task.suite.world == "ranks"]
    total_s = LAUNCH_S
    if simulated:
        total_s += SAMPLES_S * max(min(simulated, benchmarks), FEW_BENCHMARKS)
    if of_ranks:
        total_s += budget.START_S + budget.estimate_s(of_ranks, quick=False)
    return total_s


def impls_to_launch(impls: Sequence[str]) -> tuple[str, ...]:
    """Those of the impls to judge that `--impl` chooses between, else both."""
    return tuple(impl for impl in CHOOSABLE_IMPLS if impl in impls) or CHOOSABLE_IMPLS
