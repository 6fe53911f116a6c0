"""What a bucketer itself costs: 64 MiB of gradients for 8 ranks, packed, with nothing sent.

The world has 8 ranks of which 7 are simulated (torch's fake process group), so a collective takes no time and
what is left is the host's work: taking gradients in, putting them in order, handing results out.

    core        dtbench_core.ReduceScatterBucketer, given whole gradients, which it copies on arrival
    core_held   the same, told that it may hold the gradients until the bucket is full
    core_lists  the same as core, given a list of 8 chunks for each gradient, as fairscale's is
    reference   fairscale's algorithm, given the same lists
    copy        one plain copy of the 64 MiB: the floor

On CUDA that takes two cases. `pack` is the host's time, launches included; over the number of tensors it is the cost of
taking one in. `kernels` is the device's, of the same work recorded once as a CUDA graph and replayed in one launch: its
bandwidth over that of `copy` is the share of the device's own copy that packing reaches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dtbench.machine.device import gpus
from dtbench.suite import Case, ClockKind, RunOptions, Workload, World, suite
from dtbench_core import comm
from dtbench_suites import SUITES, bucketer_reference
from dtbench_suites.bucketer import KIB, MIB, bucketer_of, copy, counters_of, send_all
from dtbench_suites.data import MOVED_VALUES, mismatch, torch_dtype

# Biases and norms of a large model, small matrices, larger ones.
SIZES = (16 * KIB, 256 * KIB, 1 * MIB)
TOTAL, TOTAL_QUICK = 64 * MIB, 2 * MIB
BUCKET = 25 * MIB  # the bucketers' default


Run = Callable[[], object]


def eager(run: Run) -> Run:
    return run


def check(
    run: Run, module: Any, name: str, whole: Tensor, n: int, record: Callable[[Run], Run] = eager
) -> str | None:
    """What `run` passes to the collective `module.name`: each rank must be sent its part of every tensor, in order.

    whole: (tensors, n * k). record: makes of the run what is timed.
    """
    sent: list[Tensor] = []
    right = getattr(module, name)

    def once() -> None:
        sent.clear()
        run()

    def spy(output: Tensor, packed: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(packed.clone().view(n, -1))
        return right(output, packed, *args, **kwargs)

    with mock.patch.object(module, name, spy):
        timed = record(once)
        for packed in sent:  # as it was recorded: the repetition must write it again
            packed.zero_()
        timed()
    want = whole.view(len(whole), n, -1).transpose(0, 1).reshape(n, -1)
    return mismatch(torch.cat(sent, dim=1), want, "what is packed")


@functools.lru_cache(maxsize=1)
def made(number: int, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The gradients as one (number, count), and each, (count,), in memory of its own as a model's are.

    All impls read the same: they only differ in what they do with it, and memory holds it once.
    """
    whole = (torch.arange(number * count, device=device) % MOVED_VALUES).to(dtype).view(number, count)
    return whole, [t.clone() for t in whole]


def build(
    impl: str, number: int, count: int, dtype: torch.dtype, world: World, record: Callable[[Run], Run] = eager
) -> Workload:
    group = world.mesh.get_group(0)
    n = group.size()
    whole, gradients = made(number, count, dtype, world.device)
    if impl == "copy":
        return copy(whole, record)
    bucketer, inputs = bucketer_of(impl, BUCKET, gradients, n)
    run = partial(send_all, bucketer, inputs, [lambda _result: None] * number, group)
    timed = record(run)
    if impl == "reference":
        spied = partial(check, run, bucketer_reference, "reduce_scatter_single", whole, n, record)
        return Workload(timed, check=spied)

    def counters() -> dict[str, float]:
        counted = counters_of(bucketer, run)
        return {name: counted[name] for name in ("bytes_copied", "peak_bytes")}

    checked = partial(check, run, comm, "reduce_scatter", whole, n, record)
    return Workload(timed, check=checked, counters=counters, close=bucketer.teardown)


IMPLS = ("core", "core_held", "core_lists", "reference", "copy")


@suite("packing", world="simulated", by_default=False, help=SUITES["packing"], impl_s=(0.85, 0.03))
def packing(options: RunOptions) -> Iterator[Case]:
    total = TOTAL_QUICK if options.quick else TOTAL
    for dtype_name in options.dtypes:
        dtype = torch_dtype(dtype_name)
        for tensor_bytes in SIZES:
            number, count = total // tensor_bytes, tensor_bytes // dtype.itemsize
            ways: list[tuple[str, ClockKind, Callable[[Run], Run]]] = [("pack", "host", eager)]
            on_gpu = options.device_type == "cuda"
            if on_gpu:
                ways.append(("kernels", "device", gpus().captured))
            for name, clock, record in ways:
                yield Case(
                    name=name,
                    params={"tensors": number, "tensor_bytes": tensor_bytes, "dtype": dtype_name},
                    build={impl: partial(build, impl, number, count, dtype, record=record) for impl in IMPLS},
                    size_bytes=number * tensor_bytes,
                    bandwidth=not (on_gpu and clock == "host"),
                    clock=clock,
                )
