"""Overhead of a bucketer: packs 64 MiB of gradients for 8 ranks without sending them.

7 of the 8 ranks are simulated by torch's fake process group, so a collective takes no time. The measured time is host
work: accepting gradients, packing them, and calling back with the results.

    core        dtbench_core.ReduceScatterBucketer with whole gradients, which it copies on arrival
    core_held   the same with hold_inputs=True: keeps the gradients until the bucket is full
    core_lists  the same as core with a list of 8 chunks per gradient, the form that fairscale takes
    reference   fairscale's algorithm with the same lists
    copy        one plain copy of the 64 MiB: the floor

On CUDA there are two cases. `pack` is host time including kernel launches; divided by the number of tensors, it is the
cost per gradient. `kernels` is device time of the same work, recorded as a CUDA graph and replayed in one launch; its
bandwidth relative to that of `copy` shows how close packing comes to a plain copy on the device.
"""

import functools
import itertools
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
from dtbench_suites.bucketer import bucketer_of, copy, counters_of, send_all
from dtbench_suites.data import KIB, MIB, MOVED_VALUES, mismatch, torch_dtype

# Bytes of a gradient: biases and norms of a large model, small matrices, larger matrices.
SIZES = (16 * KIB, 256 * KIB, 1 * MIB)
TOTAL, TOTAL_QUICK = 64 * MIB, 2 * MIB
BUCKET = 25 * MIB  # the bucketers' default

Run = Callable[[], object]


def eager(run: Run) -> Run:
    return run


def check(
    run: Run, module: Any, name: str, full: Tensor, n: int, record: Callable[[Run], Run] = eager
) -> str | None:
    """Checks the buffers that `run` passes to the collective `module.name`.

    Every rank must be sent its shard of every tensor, in order.

    Args:
        full: (tensors, n * k), the gradients.
        record: turns a run into the function that is timed, e.g. a CUDA graph.
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
        timed_run = record(once)
        for packed in sent:  # filled while recording; the timed run must write it again
            packed.zero_()
        timed_run()
    want = full.view(len(full), n, -1).transpose(0, 1).reshape(n, -1)
    return mismatch(torch.cat(sent, dim=1), want, "what is packed")


@functools.lru_cache(maxsize=1)
def make_gradients(
    number: int, count: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Returns the gradients as one (number, count) tensor, and as separate (count,) tensors like those of a model.

    Cached, so that all impls read the same gradients and memory holds them once.
    """
    full = (torch.arange(number * count, device=device) % MOVED_VALUES).to(dtype).view(number, count)
    return full, [t.clone() for t in full]


def build(
    impl: str, number: int, count: int, dtype: torch.dtype, world: World, record: Callable[[Run], Run] = eager
) -> Workload:
    group = world.mesh.get_group(0)
    n = group.size()
    full, gradients = make_gradients(number, count, dtype, world.device)
    if impl == "copy":
        return copy(full, record)
    bucketer, inputs = bucketer_of(impl, BUCKET, gradients, n)
    run = partial(send_all, bucketer, inputs, [lambda _result: None] * number, group)
    timed_run = record(run)
    if impl == "reference":
        check_packed = partial(check, run, bucketer_reference, "reduce_scatter_single", full, n, record)
        return Workload(timed_run, check=check_packed)

    def counters() -> dict[str, float]:
        counted = counters_of(bucketer, run)
        return {name: counted[name] for name in ("bytes_copied", "peak_bytes")}

    check_packed = partial(check, run, comm, "reduce_scatter", full, n, record)
    return Workload(timed_run, check=check_packed, counters=counters, close=bucketer.teardown)


IMPLS = ("core", "core_held", "core_lists", "reference", "copy")


@suite("packing", world="simulated", by_default=False, help=SUITES["packing"], impl_s=(0.85, 0.03))
def packing(options: RunOptions) -> Iterator[Case]:
    total = TOTAL_QUICK if options.quick else TOTAL
    variants: list[tuple[str, ClockKind, Callable[[Run], Run]]] = [("pack", "host", eager)]
    if on_gpu := options.device_type == "cuda":
        variants.append(("kernels", "device", gpus().captured))
    for dtype_name, tensor_bytes, variant in itertools.product(options.dtypes, SIZES, variants):
        (name, clock, record), dtype = variant, torch_dtype(dtype_name)
        number, count = total // tensor_bytes, tensor_bytes // dtype.itemsize
        yield Case(
            name=name,
            params={"tensors": number, "tensor_bytes": tensor_bytes, "dtype": dtype_name},
            build={impl: partial(build, impl, number, count, dtype, record=record) for impl in IMPLS},
            size_bytes=number * tensor_bytes,
            bandwidth=not (on_gpu and clock == "host"),
            clock=clock,
        )
