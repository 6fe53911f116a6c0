"""Benchmarks of `gate_selftest`: ops of the core, three fifths of them with real extra work in one arm.

A call is a loop of 100 calls of the op. In the arm that sets DTBENCH_SELFTEST_EXTRA, the loop is longer: by
3, 5 or 10 calls in one benchmark of five each, and by none in the other two of five.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

from dtbench.suite import Case, RunOptions, Workload, World, suite

VARIABLE = "DTBENCH_SELFTEST_EXTRA"
NAME = "gate-selftest"
CALLS = 100
EXTRA = (0, 3, 5, 10, 0)  # calls more per hundred, by the number of the benchmark
BENCHMARKS = 50
ROWS = 4
# 64 MiB of float32, more than an L2 holds, so that kernels take longer than it takes to launch them: at the 4.8 TB/s of
# an H200's data sheet to read and write them takes 28 us.
ROWS_ON_GPU = 4096


@suite(NAME, world="simulated", help="ops with a known amount of extra work", by_default=False)
def selftest(options: RunOptions) -> Iterator[Case]:
    slowed = os.environ.get(VARIABLE) == "1"
    on_gpu = options.device_type == "cuda"
    rows = ROWS_ON_GPU if on_gpu else ROWS
    for number in range(BENCHMARKS):
        extra = EXTRA[number % len(EXTRA)]
        name = tuple(OPS)[number // len(EXTRA) % len(OPS)]
        yield Case(
            name,
            {"number": number, "extra": extra},
            build={"core": partial(_build, name, CALLS + (extra if slowed else 0), rows)},
            clock="device" if on_gpu else "host",
            warmup_calls=2,
        )


def _build(name: str, calls: int, rows: int, world: World) -> Workload:
    import torch

    from dtbench_core import DTensor, Shard

    def tensor() -> Any:
        return DTensor.from_local(
            torch.ones(rows, rows, device=world.device), world.mesh, [Shard(0)], run_check=False
        )

    op = OPS[name](tensor)

    def run() -> None:
        for _ in repeat(None, calls):
            op()

    return Workload(run=run)


def _add(tensor: Callable[[], Any]) -> Callable[[], Any]:
    x, y = tensor(), tensor()
    return lambda: x + y


def _of_one(call: Callable[[Any], Any]) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    return lambda tensor: partial(call, tensor())


OPS: dict[str, Callable[[Callable[[], Any]], Callable[[], Any]]] = {
    "add": _add,
    "mul_scalar": _of_one(lambda x: x * 2.0),
    "relu": _of_one(lambda x: x.relu()),
    "transpose": _of_one(lambda x: x.transpose(0, 1)),
    "softmax": _of_one(lambda x: x.softmax(1)),
    "view": _of_one(lambda x: x.view(-1, 2, 2)),
}
