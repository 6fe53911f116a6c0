"""Control benchmarks, whose code is the same in both arms. If their times change, the machine has changed.

Then the gate's verdicts from times do not hold.

There are two kinds. `torch`: plain ops on tensors of 16 values, for arms that share one torch. `python`: arithmetic of
the interpreter alone, for arms with different builds of torch.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial

from dtbench.suite import Case, RunOptions, Workload, World, suite

NAME = "gate-control"
KIND = "DTBENCH_GATE_CONTROL"  # "torch" or "python"; set by the gate in every launch of both arms
# Calls per sample, so that a sample lasts 50 to 200 us, like those of the dispatch suite.
TORCH_CALLS = 50
PYTHON_CALLS = 5
PYTHON_STEPS = 500
WARMUP_CALLS = 100


@suite(
    NAME, world="simulated", help="control benchmarks of every gate, the same in both arms", by_default=False
)
def control(options: RunOptions) -> Iterator[Case]:
    python = os.environ.get(KIND) == "python"
    for name, build in (PYTHON if python else TORCH).items():
        yield Case(
            name,
            {},
            build={"plain": partial(_build, build)},
            clock="host",
            calls_per_sample=PYTHON_CALLS if python else TORCH_CALLS,
            warmup_calls=WARMUP_CALLS,
        )


def _build(build: Callable[[], Callable[[], object]], world: World) -> Workload:
    return Workload(run=build())


def _op(name: str) -> Callable[[], object]:
    import torch

    x, y = torch.ones(4, 4), torch.ones(4, 4)
    op = getattr(torch, name)
    return partial(op, x, y) if name in ("add", "mm") else partial(op, x)


def _steps() -> Callable[[], object]:
    steps = (None,) * PYTHON_STEPS

    def run() -> int:
        total = 0
        for _ in steps:
            total = (total + 3) % 7
        return total

    return run


TORCH = {name: partial(_op, name) for name in ("add", "mm", "relu", "sum", "clone")}
# These neither allocate nor look up dict entries. Controls that did moved by 1.0 and 1.7% between two builds of torch,
# presumably because their memory addresses depend on the other imports of a process.
PYTHON: dict[str, Callable[[], Callable[[], object]]] = {
    # The modulus may be any odd integer of several machine words.
    "powers": lambda: partial(pow, 3, 2**40 - 1, 2**255 - 19),
    "steps": _steps,
}
