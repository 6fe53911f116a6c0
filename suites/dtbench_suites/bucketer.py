"""Reduce-scatter of many small tensors: what bundling them into buckets gains, and at which size.

    core         dtbench_core.ReduceScatterBucketer, buckets of bucket_bytes
    core_held    the same, told that it may hold the tensors until a bucket is full instead of copying them
    reference    fairscale's algorithm (bucketer_reference.py), buckets of the same size
    unbucketed   one collective for each tensor: what bucketing has to beat
    packed       as many collectives as `core` issues, over tensors that lie in order already: nothing is copied, so
                 what `core` takes beyond it is packing, and what it takes beyond `limit` the collectives' own cost
    limit        one collective over all bytes at once, nothing copied
    copy         one plain copy of all bytes

The large cases are 64 MiB in the bucketers' default buckets. They have no `unbucketed`, which would take
seconds per sample, and the small ones have no `copy` and no `core_held`.

With `--size`, which then are the sizes of buckets, the 64 MiB in tensors of 256 KiB are sent through each of them:
the sizes that `dtbench calibrate` chooses from.

Counters, per pass over all tensors: collectives issued, bytes_copied on this rank, and peak_bytes of
buffers besides the inputs and the results.
"""

from __future__ import annotations

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
from dtbench_suites.data import KIB, MIB, mismatch, shared_dims, sum_of_values, summed_values, torch_dtype

# Bytes of all tensors, of one tensor, of a bucket. 25 MiB is the bucketers' default (DDP and fairscale);
# tensors of 16 KiB are biases and norms of a large model, 256 KiB small matrices. On a CPU a collective
# costs about a millisecond however small it is, so there are fewer of them.
Sweep = tuple[int, tuple[int, ...], tuple[int, ...]]
SWEEPS: dict[str, Sweep] = {
    "cpu": (2 * MIB, (16 * KIB, 256 * KIB), (256 * KIB, 1 * MIB, 25 * MIB)),
    "cuda": (64 * MIB, (16 * KIB, 256 * KIB, 4 * MIB), (1 * MIB, 8 * MIB, 25 * MIB)),
}
QUICK: Sweep = (256 * KIB, (16 * KIB,), (64 * KIB, 25 * MIB))
LARGE: Sweep = (64 * MIB, (16 * KIB, 256 * KIB, 1 * MIB), (25 * MIB,))


@dataclass(frozen=True)
class Gradients:
    """The tensors of one rank, and what is to come out. Tensor k holds other values than its neighbours.

    All impls read the same: they only differ in what they do with it, and memory holds it once.
    """

    group: dist.ProcessGroup
    tensors: list[torch.Tensor]  # each (count,)

    @classmethod
    @functools.lru_cache(maxsize=1)
    def make(
        cls, group: dist.ProcessGroup, number: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Gradients:
        rank, n = group.rank(), group.size()
        return cls(group, [summed_values(rank, n, count, dtype, device, start=k) for k in range(number)])

    def check(self, results: list[torch.Tensor | None]) -> str | None:
        """results: for tensor k its reduced shard, (count / n,); None where none came."""
        n, first = self.group.size(), self.tensors[0]
        for k, result in enumerate(results):
            if result is None:
                return f"tensor {k} of {len(results)} was never reduced"
            whole = sum_of_values(n, first.numel(), first.dtype, first.device, start=k)
            wrong = mismatch(result, whole.chunk(n)[self.group.rank()], f"the shard of tensor {k}")
            if wrong:
                return wrong
        return None


def bucketer_of(impl: str, bucket_bytes: int, tensors: list[torch.Tensor], n: int) -> tuple[Any, list[Any]]:
    """(the bucketer of an impl, each tensor in the form that it takes)."""
    lists = [list(t.chunk(n)) for t in tensors] if impl in ("reference", "core_lists") else []
    if impl == "reference":
        return ReferenceBucketer(bucket_bytes / MIB), lists
    own = dtbench_core.ReduceScatterBucketer(bucket_bytes / MIB, hold_inputs=impl == "core_held")
    return own, lists or tensors


def send_all(
    bucketer: Any, inputs: Sequence[Any], callbacks: Sequence[Callable[..., Any]], group: dist.ProcessGroup
) -> None:
    """One pass over all tensors."""
    for tensor, callback in zip(inputs, callbacks, strict=True):
        bucketer.reduce_scatter_async(tensor, group, callback)
    bucketer.flush()


def counters_of(bucketer: Any, run: Callable[[], object]) -> dict[str, float]:
    """Of one more pass; all ranks together."""
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
    keep = [partial(results.__setitem__, k) for k in range(number)]
    run = partial(send_all, bucketer, inputs, keep, group)

    def check() -> str | None:
        results[:] = [None] * number
        run()
        return gradients.check(results)

    close = getattr(bucketer, "teardown", None)
    return Workload(run=run, check=check, counters=partial(counters_of, bucketer, run), close=close)


def unbucketed(gradients: Gradients) -> Workload:
    group = gradients.group
    outputs = [torch.empty_like(t.chunk(group.size())[0]) for t in gradients.tensors]
    pairs = zip(outputs, gradients.tensors, strict=True)
    calls = [partial(reduce_scatter_single, *pair, group=group) for pair in pairs]
    return plain(calls, outputs, lambda: gradients.check([*outputs]))


def packed(gradients: Gradients, bucket_bytes: int) -> Workload:
    """As a bucket would lie at its best: all shards for rank 0, all for rank 1, ..."""
    group, n = gradients.group, gradients.group.size()
    many = max(1, bucket_bytes // gradients.tensors[0].nbytes)
    outputs, calls = [], []
    for start in range(0, len(gradients.tensors), many):
        rows = torch.stack(gradients.tensors[start : start + many])  # (tensors, count)
        sent = rows.view(len(rows), n, -1).transpose(0, 1).flatten()
        outputs.append(sent.new_empty(len(rows), rows.shape[1] // n))
        calls.append(partial(reduce_scatter_single, outputs[-1].view(-1), sent, group=group))
    return plain(calls, outputs, lambda: gradients.check([shard for output in outputs for shard in output]))


def copy(
    source: torch.Tensor, record: Callable[[Callable[[], object]], Callable[[], object]] = lambda run: run
) -> Workload:
    """record: makes of the copy what is timed."""
    target = torch.empty_like(source)
    run = record(lambda: target.copy_(source))

    def check() -> str | None:
        target.zero_()
        run()
        return mismatch(target, source)

    return Workload(run=run, check=check)


def plain(
    calls: Sequence[Callable[[], object]], outputs: list[torch.Tensor], compare: Callable[[], str | None]
) -> Workload:
    """Collectives straight from the inputs into the results: nothing copied, nothing held."""

    def run() -> None:
        for call in calls:
            call()

    def check() -> str | None:
        for output in outputs:
            output.zero_()
        run()
        return compare()

    counters = {"collectives": float(len(calls)), "bytes_copied": 0.0, "peak_bytes": 0.0}
    return Workload(run=run, check=check, counters=lambda: counters)


SMALL_IMPLS = ("core", "reference", "unbucketed", "packed", "limit")
LARGE_IMPLS = ("core", "core_held", "reference", "packed", "limit", "copy")


def _gains_most(case: Case) -> bool:
    """Whether the tensors are the smallest, for which buckets are made."""
    return case.name == "reduce_scatter" and case.params["tensor_bytes"] == 16 * KIB


@suite("bucketer", world="ranks", help=SUITES["bucketer"], impl_s=(0.53, 0.09), budget_priority=_gains_most)
def bucketer(options: RunOptions) -> Iterator[Case]:
    sweeps: list[tuple[str, Sweep, tuple[str, ...]]]
    if options.quick:
        sweeps = [("reduce_scatter", QUICK, SMALL_IMPLS)]
    elif options.sizes_chosen:
        chosen = 64 * MIB, (256 * KIB,), options.sizes_bytes
        sweeps = [("reduce_scatter_buckets", chosen, ("core", "limit"))]
    else:
        small = ("reduce_scatter", SWEEPS[options.device_type], SMALL_IMPLS)
        sweeps = [small, ("reduce_scatter_large", LARGE, LARGE_IMPLS)]
    for (mesh_dim, n), dtype_name, way in itertools.product(shared_dims(options), options.dtypes, sweeps):
        (name, (total_bytes, tensor_sizes, bucket_sizes), impls), dtype = way, torch_dtype(dtype_name)
        for tensor_bytes, bucket_bytes in itertools.product(tensor_sizes, bucket_sizes):
            count = tensor_bytes // dtype.itemsize // n * n  # even shards
            number, taken = total_bytes // tensor_bytes, count * dtype.itemsize
            sizes = {"tensor_bytes": taken, "bucket_bytes": bucket_bytes, "total_bytes": number * taken}
            build = partial(build_impl, mesh_dim, number, count, dtype, bucket_bytes)
            yield Case(
                name=name,
                params={"mesh_dim": mesh_dim, "ranks": n, "dtype": dtype_name, **sizes},
                build={impl: partial(build, impl) for impl in impls},
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
        all_bytes = sum(t.nbytes for t in gradients.tensors)
        return packed(gradients, bucket_bytes if impl == "packed" else all_bytes)
    return unbucketed(gradients) if impl == "unbucketed" else bucketed(impl, gradients, bucket_bytes)
