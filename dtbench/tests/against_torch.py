"""`dtbench.run` of functions beside torch.utils.benchmark: `python -m dtbench.tests.against_torch FILE.md`.

Functions from 1 us to 10 ms, with one and two threads, on the machine as it is and beside a process that burns a core.
The two measure the same function in the same process in turn. A round in which either calls its own figure scattered is
left out, and counted: where others have the cores, each of torch's blocks of 10 ms is disturbed, of samples of 2 ms few
are. Wants a quiet machine; the table says the load.
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

ROUNDS, MOST_ROUNDS = 7, 21
WITHIN = 0.05
# Seconds that torch.utils.benchmark measures, its own default.
TORCH_S = 0.2


class Row(NamedTuple):
    """Medians over the quiet rounds, or over all where none is. torch_s: its median, which it prints; ratio: of the two
    lower quartiles in a round. quiet, rounds: how many."""

    name: str
    threads: int
    burnt: bool
    dtbench_s: float
    torch_s: float
    ratio: float
    to_median: float
    quiet: int
    rounds: int


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
    quiet, noisy = [], []
    while len(quiet) < ROUNDS and len(quiet) + len(noisy) < MOST_ROUNDS:
        (result,) = dtbench.run({name: function}, progress=False).results
        timer = Timer("function()", globals={"function": function}, num_threads=threads)
        other = timer.blocked_autorange(min_run_time=TORCH_S)
        ours = result.estimate_s
        assert ours is not None, result.reason
        figures = ours, other.median, ours / quantile(other.times, 0.25), ours / other.median
        (noisy if "scattered" in result.reason or not other.meets_confidence() else quiet).append(figures)
    medians = [median(column) for column in zip(*(quiet or noisy), strict=True)]
    return Row(name, threads, burnt, *medians, len(quiet), len(quiet) + len(noisy))


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
            f"{row.quiet} of {row.rounds}",
        ]

    head = [
        "function",
        "threads",
        "machine",
        "dtbench",
        "torch, median",
        "ratio",
        "of lower quartiles",
        "quiet rounds",
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *map(cells, rows)])
    told = [row for row in rows if row.quiet]
    near = sum(abs(row.to_median - 1) <= WITHIN for row in told)
    alike = sum(abs(row.ratio - 1) <= WITHIN for row in told)
    cpu, cores = provenance.cpu().model or "unknown CPU", len(provenance.usable_cpus())
    return f"""# dtbench.run beside torch.utils.benchmark

`make against-torch` writes this: functions of one process, measured by `dtbench.run` and by
`Timer("function()").blocked_autorange(min_run_time={TORCH_S})` in turn, until {ROUNDS} rounds were quiet or
{MOST_ROUNDS} are over; the medians over the quiet ones, or over all where none was. Quiet is a round in which neither
calls its own figure scattered: half of the samples within 10 % of the median. dtbench's figure is the lower quartile of
its samples, torch prints the median of its own; the last ratio compares the lower quartiles of both. Both include the
call of the function.

{cpu}, {cores} cores, torch {torch.__version__}; load {load:.2f} before, {os.getloadavg()[0]:.2f} after.

{table}

{len(told)} of {len(rows)} rows had a quiet round. Of these within {WITHIN:.0%} of torch's median: {near}; of its lower
quartile: {alike}.
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
