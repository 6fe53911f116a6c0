"""Reduce-scatter of many small tensors: the gain from bucketing, by bucket size.

    core         dtbench_core.ReduceScatterBucketer with buckets of bucket_bytes
    core_held    the same with hold_inputs=True: keeps the inputs until a bucket is full instead of copying them
    reference    fairscale's algorithm (bucketer_reference.py) with buckets of the same size
    unbucketed   one collective per tensor: the cost that bucketing has to beat
    packed       as many collectives as `core` issues, over inputs that are contiguous already, so nothing is copied
    limit        one collective over all bytes at once, nothing copied
    copy         one plain copy of all bytes

The time of `core` minus that of `packed` is the cost of packing. The time of `packed` minus that of `limit` is the
cost of issuing several collectives.

The large cases send 64 MiB in buckets of the default size. They have no `unbucketed`, which would take seconds per
sample. The small cases have no `copy` and no `core_held`.

With `--size`, the sizes are bucket sizes: 64 MiB in tensors of 256 KiB are sent through buckets of each size.
`dtbench calibrate` chooses the bucket size from these cases.

Counters, per pass over all tensors: `collectives` issued, `bytes_copied` on this rank, and `peak_bytes` of the buffers
besides inputs and results.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import dtbench_core
from dtbench.suite import Case, RunOptions, Workload, World, suite
from dtbench_core.cost.ring import busbw_factor
from dtbench_core.torch_compat import reduce_scatter_single
from dtbench_suites import SUITES
from dtbench_suites.bucketer_reference import ReferenceBucketer
from dtbench_suites.data import (
    KIB,
    MIB,
    dims_with_several_ranks,
    mismatch,
    sum_of_values,
    summed_values,
    torch_dtype,
)

# (total bytes, tensor sizes in bytes, bucket sizes in bytes). 25 MiB is the default bucket size of DDP and fairscale.
# Tensors of 16 KiB are biases and norms of a large model, tensors of 256 KiB are small matrices. On a CPU the total
# is smaller because even the smallest collective takes about a millisecond.
Sweep = tuple[int, tuple[int, ...], tuple[int, ...]]
SWEEPS: dict[str, Sweep] = {
    "cpu": (2 * MIB, (16 * KIB, 256 * KIB), (256 * KIB, 1 * MIB, 25 * MIB)),
    "cuda": (64 * MIB, (16 * KIB, 256 * KIB, 4 * MIB), (1 * MIB, 8 * MIB, 25 * MIB)),
}
QUICK: Sweep = (256 * KIB, (16 * KIB,), (64 * KIB, 25 * MIB))
LARGE: Sweep = (64 * MIB, (16 * KIB, 256 * KIB, 1 * MIB), (25 * MIB,))


@dataclass(frozen=True)
class Gradients:
    """The input tensors of one rank, with a check of their reduced shards.

    All impls read the same tensors, so that memory holds them once. Values differ between neighbouring tensors.

    Attributes:
        tensors: each of shape (count,).
    """

    group: dist.ProcessGroup
    tensors: list[torch.Tensor]

    @classmethod
    @functools.lru_cache(maxsize=1)
    def make(
        cls, group: dist.ProcessGroup, number: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> "Gradients":
        rank, n = group.rank(), group.size()
        return cls(group, [summed_values(rank, n, count, dtype, device, start=k) for k in range(number)])

    def check(self, results: list[torch.Tensor | None]) -> str | None:
        """Returns a message about the first wrong shard, or None.

        Args:
            results: the reduced shard of each tensor, of shape (count / n,); None if its callback was not called.
        """
        n, first = self.group.size(), self.tensors[0]
        for k, result in enumerate(results):
            if result is None:
                return f"tensor {k} of {len(results)} was never reduced"
            summed = sum_of_values(n, first.numel(), first.dtype, first.device, start=k)
            if wrong := mismatch(result, summed.chunk(n)[self.group.rank()], f"the shard of tensor {k}"):
                return wrong
        return None


def bucketer_of(impl: str, bucket_bytes: int, tensors: list[torch.Tensor], n: int) -> tuple[Any, list[Any]]:
    """Returns the bucketer of an impl, and its inputs: the tensors, or a list of n chunks of each tensor."""
    lists = [list(t.chunk(n)) for t in tensors] if impl in ("reference", "core_lists") else []
    if impl == "reference":
        return ReferenceBucketer(bucket_bytes / MIB), lists
    return (
        dtbench_core.ReduceScatterBucketer(bucket_bytes / MIB, hold_inputs=impl == "core_held"),
        lists or tensors,
    )


def send_all(
    bucketer: Any, inputs: Sequence[Any], callbacks: Sequence[Callable[..., Any]], group: dist.ProcessGroup
) -> None:
    """Reduces all tensors through the bucketer and flushes it."""
    for tensor, callback in zip(inputs, callbacks, strict=True):
        bucketer.reduce_scatter_async(tensor, group, callback)
    bucketer.flush()


def counters_of(bucketer: Any, run: Callable[[], object]) -> dict[str, float]:
    """Returns the counters of one more pass. All ranks must call it together."""
    if isinstance(bucketer, ReferenceBucketer):
        issued = bucketer.collectives
        run()
        return {"collectives": float(bucketer.collectives - issued)}
    counters = bucketer.counters
    issued, copied = counters.collectives, counters.bytes_copied
    run()
    return {
        "collectives": counters.collectives - issued,
        "bytes_copied": counters.bytes_copied - copied,
        "peak_bytes": counters.peak_bytes,
    }


def bucketed(impl: str, gradients: Gradients, bucket_bytes: int) -> Workload:
    group, number = gradients.group, len(gradients.tensors)
    bucketer, inputs = bucketer_of(impl, bucket_bytes, gradients.tensors, group.size())
    results: list[torch.Tensor | None] = [None] * number
    callbacks = [partial(results.__setitem__, k) for k in range(number)]
    run = partial(send_all, bucketer, inputs, callbacks, group)

    def check() -> str | None:
        results[:] = [None] * number
        run()
        return gradients.check(results)

    return Workload(
        run=run,
        check=check,
        counters=partial(counters_of, bucketer, run),
        close=getattr(bucketer, "teardown", None),
    )


def unbucketed(gradients: Gradients) -> Workload:
    group = gradients.group
    outputs = [torch.empty_like(t.chunk(group.size())[0]) for t in gradients.tensors]
    calls = [
        partial(reduce_scatter_single, *pair, group=group)
        for pair in zip(outputs, gradients.tensors, strict=True)
    ]
    return uncopied(calls, outputs, lambda: gradients.check([*outputs]))


def packed(gradients: Gradients, bucket_bytes: int) -> Workload:
    """Workload whose buckets are packed beforehand: all shards of rank 0, then all of rank 1, ..."""
    group, n = gradients.group, gradients.group.size()
    tensors_per_bucket = max(1, bucket_bytes // gradients.tensors[0].nbytes)
    outputs, calls = [], []
    for start in range(0, len(gradients.tensors), tensors_per_bucket):
        rows = torch.stack(gradients.tensors[start : start + tensors_per_bucket])  # (tensors, count)
        sent = rows.view(len(rows), n, -1).transpose(0, 1).flatten()
        outputs.append(sent.new_empty(len(rows), rows.shape[1] // n))
        calls.append(partial(reduce_scatter_single, outputs[-1].view(-1), sent, group=group))
    return uncopied(
        calls, outputs, lambda: gradients.check([shard for output in outputs for shard in output])
    )


def copy(
    source: torch.Tensor, record: Callable[[Callable[[], object]], Callable[[], object]] = lambda run: run
) -> Workload:
    """Workload that copies `source`. `record` turns the copy into the function to time, e.g. a CUDA graph."""
    target = torch.empty_like(source)
    run = record(lambda: target.copy_(source))

    def check() -> str | None:
        target.zero_()
        run()
        return mismatch(target, source)

    return Workload(run=run, check=check)


def uncopied(
    calls: Sequence[Callable[[], object]], outputs: list[torch.Tensor], compare: Callable[[], str | None]
) -> Workload:
    """Workload of collectives that read the inputs and write the results directly, without buffers."""

    def run() -> None:
        for call in calls:
            call()

    def check() -> str | None:
        for output in outputs:
            output.zero_()
        run()
        return compare()

    return Workload(
        run=run,
        check=check,
        counters=lambda: {"collectives": float(len(calls)), "bytes_copied": 0.0, "peak_bytes": 0.0},
    )


SMALL_IMPLS = ("core", "reference", "unbucketed", "packed", "limit")
LARGE_IMPLS = ("core", "core_held", "reference", "packed", "limit", "copy")


def _has_smallest_tensors(case: Case) -> bool:
    """Returns whether the tensors are the smallest ones, which gain most from bucketing."""
    return case.name == "reduce_scatter" and case.params["tensor_bytes"] == 16 * KIB


@suite(
    "bucketer",
    world="ranks",
    help=SUITES["bucketer"],
    impl_s=(0.53, 0.09),
    budget_priority=_has_smallest_tensors,
)
def bucketer(options: RunOptions) -> Iterator[Case]:
    if options.quick:
        sweeps: list[tuple[str, Sweep, tuple[str, ...]]] = [("reduce_scatter", QUICK, SMALL_IMPLS)]
    elif options.sizes_chosen:
        sweeps = [
            ("reduce_scatter_buckets", (64 * MIB, (256 * KIB,), options.sizes_bytes), ("core", "limit"))
        ]
    else:
        sweeps = [
            ("reduce_scatter", SWEEPS[options.device_type], SMALL_IMPLS),
            ("reduce_scatter_large", LARGE, LARGE_IMPLS),
        ]
    for (mesh_dim, n), dtype_name, selected in itertools.product(
        dims_with_several_ranks(options), options.dtypes, sweeps
    ):
        (name, (total_bytes, tensor_sizes, bucket_sizes), impls), dtype = selected, torch_dtype(dtype_name)
        for tensor_bytes, bucket_bytes in itertools.product(tensor_sizes, bucket_sizes):
            count = tensor_bytes // dtype.itemsize // n * n  # a multiple of n, for even shards
            number, actual_bytes = total_bytes // tensor_bytes, count * dtype.itemsize
            sizes = {
                "tensor_bytes": actual_bytes,
                "bucket_bytes": bucket_bytes,
                "total_bytes": number * actual_bytes,
            }
            yield Case(
                name=name,
                params={"mesh_dim": mesh_dim, "ranks": n, "dtype": dtype_name, **sizes},
                build={
                    impl: partial(build_impl, mesh_dim, number, count, dtype, bucket_bytes, impl)
                    for impl in impls
                },
                size_bytes=sizes["total_bytes"],
                busbw_factor=busbw_factor("reduce_scatter", n),
            )


def build_impl(
    mesh_dim: str, number: int, count: int, dtype: torch.dtype, bucket_bytes: int, impl: str, world: World
) -> Workload:
    gradients = Gradients.make(world.mesh.get_group(mesh_dim), number, count, dtype, world.device)
    if impl == "copy":
        return copy(torch.stack(gradients.tensors))
    if impl in ("packed", "limit"):
        return packed(
            gradients, bucket_bytes if impl == "packed" else sum(t.nbytes for t in gradients.tensors)
        )
    return unbucketed(gradients) if impl == "unbucketed" else bucketed(impl, gradients, bucket_bytes)
