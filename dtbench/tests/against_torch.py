"""`dtbench.run` of functions beside torch.utils.benchmark: `python -m dtbench.tests.against_torch FILE.md`.

Functions from 1 us to 10 ms, with one and two threads, on the machine as it is and beside a process that burns a core.
The two measure the same function in the same process in turn. Wants a quiet machine; the table says the load.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

import dtbench
from dtbench.machine import provenance
from dtbench.stats import quantile
from dtbench.text.units import format_seconds

ROUNDS = 7
WITHIN = 0.05
# Seconds that torch.utils.benchmark measures, its own default.
TORCH_S = 0.2


class Row(NamedTuple):
    """Medians over the rounds. torch_s: its median, which it prints; ratio: of the two lower quartiles in a round."""

    name: str
    threads: int
    burnt: bool
    dtbench_s: float
    torch_s: float
    ratio: float
    to_median: float
    doubts: int


def functions() -> dict[str, Callable[[], object]]:
    """From about 1 us to about 10 ms of one core."""
    small, medium, large, huge = (torch.randn(n, n) for n in (64, 256, 1024, 2048))
    return {
        "neg of 64 x 64": lambda: small.neg(),
        "mm of 64 x 64": lambda: small @ small,
        "add of 256 x 256": lambda: medium + medium,
        "mm of 256 x 256": lambda: medium @ medium,
        "softmax of 1024 x 1024": lambda: large.softmax(-1),
        "exp of 2048 x 2048": lambda: huge.exp(),
    }


@contextlib.contextmanager
def burnt_core(wanted: bool) -> Iterator[None]:
    """Another process that never waits, where wanted."""
    if not wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burner:
        try:
            yield
        finally:
            burner.kill()


def measured(name: str, function: Callable[[], object], threads: int, burnt: bool) -> Row:
    torch.set_num_threads(threads)
    ours, theirs, ratios, to_median, doubts = [], [], [], [], 0
    for _ in range(ROUNDS):
        (result,) = dtbench.run({name: function}, progress=False).results
        timer = Timer("function()", globals={"function": function}, num_threads=threads)
        other = timer.blocked_autorange(min_run_time=TORCH_S)
        assert result.estimate_s is not None, result.reason
        ours.append(result.estimate_s)
        theirs.append(other.median)
        ratios.append(result.estimate_s / quantile(other.times, 0.25))
        to_median.append(result.estimate_s / other.median)
        doubts += bool(result.reason)
    return Row(name, threads, burnt, median(ours), median(theirs), median(ratios), median(to_median), doubts)


def page_of(rows: list[Row], load: float) -> str:
    def cells(row: Row) -> list[str]:
        return [
            row.name,
            str(row.threads),
            "one core burnt" if row.burnt else "as it is",
            format_seconds(row.dtbench_s),
            format_seconds(row.torch_s),
            f"{row.to_median:.3f}",
            f"{row.ratio:.3f}",
            f"{row.doubts} of {ROUNDS}",
        ]

    head = [
        "function",
        "threads",
        "machine",
        "dtbench",
        "torch, median",
        "ratio",
        "of lower quartiles",
        "warned",
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *map(cells, rows)])
    near = sum(abs(row.to_median - 1) <= WITHIN for row in rows)
    alike = sum(abs(row.ratio - 1) <= WITHIN for row in rows)
    cpu, cores = provenance.cpu().model or "unknown CPU", len(provenance.usable_cpus())
    return f"""# dtbench.run beside torch.utils.benchmark

`make against-torch` writes this: functions of one process, measured by `dtbench.run` and by
`Timer("function()").blocked_autorange(min_run_time={TORCH_S})` in turn, {ROUNDS} rounds; the medians over the rounds.
dtbench's figure is the lower quartile of its samples, torch prints the median of its own; the last ratio compares
the lower quartiles of both. Both include the call of the function. "Warned" counts the rounds in which dtbench called
its own figure scattered.

{cpu}, {cores} cores, torch {torch.__version__}; load {load:.2f} before.

{table}

Within {WITHIN:.0%} of torch's median: {near} of {len(rows)}; of its lower quartile: {alike} of {len(rows)}.
"""


def main() -> None:
    load = os.getloadavg()[0]
    rows = []
    for burnt in (False, True):
        with burnt_core(burnt):
            for threads in (1, 2):
                rows += [measured(name, f, threads, burnt) for name, f in functions().items()]
                print(*rows[-len(functions()) :], sep="\n", flush=True)  # noqa: T201 - a contributor's command
    Path(sys.argv[1]).write_text(page_of(rows, load))


if __name__ == "__main__":
    main()
