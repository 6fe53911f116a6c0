"""What a bucketer itself costs: 64 MiB of gradients for 8 ranks, packed, with nothing sent.

The world has 8 ranks of which 7 are simulated (torch's fake process group), so a collective takes no time and
what is left is the host's work: taking gradients in, putting them in order, handing results out.

    core        dtbench_core.ReduceScatterBucketer, given whole gradients, which it copies on arrival
    core_held   the same, told that it may hold the gradients until the bucket is full
    core_lists  the same as core, given a list of 8 chunks for each gradient, as fairscale's is
    reference   fairscale's algorithm, given the same lists
    copy        one plain copy of the 64 MiB: the floor

On CUDA the device's clock is read: `copy` over `core` is the share of the device's copy bandwidth that
copying in reaches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dtbench_core
from dtbench.model import Case, Plan, Workload
from dtbench.suite import World, suite
from dtbench_core import comm
from dtbench_suites import SUITES, bucketer_reference
from dtbench_suites.bucketer_reference import ReferenceBucketer
from dtbench_suites.data import MOVED_VALUES, mismatch, torch_dtype

KIB, MIB = 2**10, 2**20
# Biases and norms of a large model, small matrices, larger ones.
SIZES = (16 * KIB, 256 * KIB, 1 * MIB)
TOTAL, TOTAL_QUICK = 64 * MIB, 2 * MIB
BUCKET = 25 * MIB  # the bucketers' default


def forget(result: Tensor) -> None:
    """A callback that keeps nothing."""


def packed_by(module: Any, name: str, run: Callable[[], object]) -> list[Tensor]:
    """What `run` passes to the collective `module.name`, each copied."""
    seen: list[Tensor] = []
    right = getattr(module, name)

    def spy(output: Tensor, packed: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(packed.clone())
        return right(output, packed, *args, **kwargs)

    setattr(module, name, spy)
    try:
        run()
    finally:
        setattr(module, name, right)
    return seen


def check(run: Callable[[], object], module: Any, name: str, whole: Tensor, n: int) -> str | None:
    """whole: (tensors, n * k). Each rank must be sent its part of every tensor, in order."""
    sent = packed_by(module, name, run)
    rows = torch.cat([t.view(n, -1) for t in sent], dim=1)
    return mismatch(rows, whole.view(len(whole), n, -1).transpose(0, 1).reshape(n, -1), "what is packed")


@functools.lru_cache(maxsize=1)
def made(number: int, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The gradients as one (number, count), and each, (count,), in memory of its own as a model's are.

    All impls read the same: they only differ in what they do with it, and memory holds it once.
    """
    whole = (torch.arange(number * count, device=device) % MOVED_VALUES).to(dtype).view(number, count)
    return whole, [t.clone() for t in whole]


def build(impl: str, number: int, count: int, dtype: torch.dtype, world: World) -> Workload:
    group = world.mesh.get_group(0)
    n = group.size()
    whole, gradients = made(number, count, dtype, world.device)
    lists = [list(t.chunk(n)) for t in gradients]
    if impl == "copy":
        target = torch.empty_like(whole)

        def compare() -> str | None:
            target.zero_()
            target.copy_(whole)
            return mismatch(target, whole)

        return Workload(run=lambda: target.copy_(whole), check=compare)
    if impl == "reference":
        reference = ReferenceBucketer(BUCKET / MIB)

        def run_reference() -> None:
            for shards in lists:
                reference.reduce_scatter_async(shards, group, forget)
            reference.flush()

        return Workload(
            run=run_reference,
            check=partial(check, run_reference, bucketer_reference, "reduce_scatter_single", whole, n),
        )
    bucketer = dtbench_core.ReduceScatterBucketer(BUCKET / MIB, hold_inputs=impl == "core_held")
    inputs: list[Any] = lists if impl == "core_lists" else gradients

    def run() -> None:
        for given in inputs:
            bucketer.reduce_scatter_async(given, group, forget)
        bucketer.flush()

    def counters() -> dict[str, float]:
        before = bucketer.counters.bytes_copied
        run()
        return {
            "bytes_copied": bucketer.counters.bytes_copied - before,
            "peak_bytes": bucketer.counters.peak_bytes,
        }

    checked = partial(check, run, comm, "reduce_scatter", whole, n)
    return Workload(run=run, check=checked, counters=counters, close=bucketer.teardown)


IMPLS = ("core", "core_held", "core_lists", "reference", "copy")


@suite("packing", world="simulated", by_default=False, help=SUITES["packing"])
def packing(plan: Plan) -> Iterator[Case]:
    total = TOTAL_QUICK if plan.quick else TOTAL
    for dtype_name in plan.dtypes:
        dtype = torch_dtype(dtype_name)
        for tensor_bytes in SIZES:
            number, count = total // tensor_bytes, tensor_bytes // dtype.itemsize
            yield Case(
                name="pack",
                params={"tensors": number, "tensor_bytes": tensor_bytes, "dtype": dtype_name},
                build={impl: partial(build, impl, number, count, dtype) for impl in IMPLS},
                size_bytes=number * tensor_bytes,
                clock="device" if plan.device_type == "cuda" else "host",
            )
