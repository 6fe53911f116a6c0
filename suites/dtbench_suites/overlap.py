"""Waiting for collectives when their results are used, not when they are issued: what that buys.

A backward pass in small: for each of some layers an all-reduce is issued on its gradient, then the next layer is
computed, which does not need it; at the end all gradients are used. The same for every impl, but for when it waits:

    core           at first use: dtbench_core.CommTensor
    torch          at first use: torch.distributed._functional_collectives, which copies each gradient first
    wait_at_once   when the collective is issued
    local          never: the computation alone, without collectives

What can be gained is the smaller of the two, time of the collectives and time of the computation; on a CPU
less, as gloo computes on the same cores. And the time that ranks wait for each other: in the cases with a
`late_ms`, each layer finds another rank that late (asleep, as one that waits for data is). Who waits at once
is late by all of these, who waits at first use by its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from dtbench.suite import Case, RunOptions, Workload, World, suite, sweep
from dtbench_core import CommTensor
from dtbench_suites import SUITES
from dtbench_suites.data import KIB, MIB, mismatch, sum_of_values, summed_values, torch_dtype

LAYERS = 4
# Bytes of one gradient, and the width of a layer's matrices, whose product takes about as long as an all-reduce
# of a size in the middle.
SWEEPS: dict[str, tuple[Sequence[int], int]] = {
    "cpu": ((64 * KIB, 512 * KIB, 4 * MIB), 384),
    "cuda": ((1 * MIB, 16 * MIB, 64 * MIB), 4096),
}
QUICK = ((64 * KIB,), 128)
LATE_MS = 20

# Issues the all-reduce of a gradient; gives what stands for the sum.
Reduce = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def wait_on_use(gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    reduced = CommTensor(gradient)
    dist.all_reduce(reduced, group=group, async_op=True)
    return reduced


def wait_at_once(gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(gradient, group=group)
    return gradient


IMPLS: dict[str, Reduce] = {
    "core": wait_on_use,
    "torch": lambda gradient, group: functional.all_reduce(gradient, "sum", group),
    "wait_at_once": wait_at_once,
    "local": lambda gradient, _group: gradient,
}


def use(out: torch.Tensor, reduced: torch.Tensor) -> None:
    torch.mul(reduced, 2, out=out)


def build_impl(
    mesh_dim: str, size_bytes: int, late_ms: int, width: int, dtype: torch.dtype, impl: str, world: World
) -> Workload:
    group, reduce = world.mesh.get_group(mesh_dim), IMPLS[impl]
    rank, n, device = group.rank(), group.size(), world.device
    count = size_bytes // dtype.itemsize
    inputs = [summed_values(rank, n, count, dtype, device, start=k) for k in range(LAYERS)]
    gradients = [torch.empty_like(one) for one in inputs]
    used = [torch.empty_like(one) for one in inputs]
    # (width, width) zeros and ones, few of these, so that the product is exact.
    index = torch.arange(width * width, device=device).view(width, width)
    layer, activations = ((index % step == 0).to(dtype) for step in (width // 2 + 1, width // 4 + 1))
    computed = torch.empty_like(layer)

    def before() -> None:
        for gradient, values in zip(gradients, inputs, strict=True):
            gradient.copy_(values)

    def run() -> None:
        issued = []
        for k, gradient in enumerate(gradients):
            if late_ms and k % n == rank:
                time.sleep(late_ms / 1000)
            issued.append(reduce(gradient, group))
            torch.mm(activations, layer, out=computed)
        for reduced, out in zip(issued, used, strict=True):
            use(out, reduced)

    def check() -> str | None:
        before()
        computed.zero_()
        run()
        product = activations.double() @ layer.double()  # of values that every dtype holds
        wrong = mismatch(computed, product.to(dtype), "the computation")
        for k, out in enumerate(used):
            want = inputs[k] if impl == "local" else sum_of_values(n, count, dtype, device, start=k)
            wrong = wrong or mismatch(out, want * 2, f"gradient {k}")
        return wrong

    return Workload(run=run, before=before, check=check)


@suite("overlap", world="ranks", help=SUITES["overlap"], impl_s=(0.6, 0.42))
def overlap(options: RunOptions) -> Iterator[Case]:
    usual, width = QUICK if options.quick else SWEEPS[options.device_type]
    sizes = options.sizes_bytes if options.sizes_chosen else usual
    for at in sweep(options, sizes=sizes):
        for late_ms in (0, LATE_MS) if at.size_bytes == sizes[len(sizes) // 2] else (0,):
            build = partial(build_impl, at.mesh_dim, at.size_bytes, late_ms, width, torch_dtype(at.dtype))
            yield Case(
                name="all_reduce",
                params=at.params | {"late_ms": late_ms, "layers": LAYERS, "width": width},
                build={impl: partial(build, impl) for impl in IMPLS},
            )
