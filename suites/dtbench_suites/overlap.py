"""Gain from waiting for collectives at the first use of their results instead of immediately.

The program imitates a backward pass. It issues an all-reduce of each layer's gradient, then computes the next layer,
which does not need that gradient; at the end it uses all gradients. The impls differ only in when they wait:

    core           at first use: dtbench_core.CommTensor
    torch          at first use: torch.distributed._functional_collectives, which copies each gradient first
    wait_at_once   when the collective is issued
    local          never: the computation alone, without collectives

The largest possible gain is the smaller of communication time and computation time. On a CPU it is less, because gloo
uses the same cores.

In the cases with a nonzero `late_ms`, one rank per layer arrives that much later (it sleeps, like a rank that waits for
data). An impl that waits immediately is delayed by every late rank, one that waits at first use only by itself.
"""

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
# (bytes of one gradient, width of a layer's matrices). The matrix product takes about as long as an all-reduce of the
# middle size.
SWEEPS: dict[str, tuple[Sequence[int], int]] = {
    "cpu": ((64 * KIB, 512 * KIB, 4 * MIB), 384),
    "cuda": ((1 * MIB, 16 * MIB, 64 * MIB), 4096),
}
QUICK = ((64 * KIB,), 128)
LATE_MS = 20

# Issues the all-reduce of a gradient; returns the sum, which may still be pending.
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
    gradients = [torch.empty_like(values) for values in inputs]
    used = [torch.empty_like(values) for values in inputs]
    # (width, width) matrices of zeros and few ones, so that the product is exact.
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
        product = activations.double() @ layer.double()  # exact in every dtype
        wrong = mismatch(computed, product.to(dtype), "the computation")
        for k, out in enumerate(used):
            want = inputs[k] if impl == "local" else sum_of_values(n, count, dtype, device, start=k)
            wrong = wrong or mismatch(out, want * 2, f"gradient {k}")
        return wrong

    return Workload(run=run, before=before, check=check)


@suite("overlap", world="ranks", help=SUITES["overlap"], impl_s=(0.6, 0.42))
def overlap(options: RunOptions) -> Iterator[Case]:
    default_sizes, width = QUICK if options.quick else SWEEPS[options.device_type]
    sizes = options.sizes_bytes if options.sizes_chosen else default_sizes
    for point in sweep(options, sizes=sizes):
        for late_ms in (0, LATE_MS) if point.size_bytes == sizes[len(sizes) // 2] else (0,):
            yield Case(
                name="all_reduce",
                params=point.params | {"late_ms": late_ms, "layers": LAYERS, "width": width},
                build={
                    impl: partial(
                        build_impl,
                        point.mesh_dim,
                        point.size_bytes,
                        late_ms,
                        width,
                        torch_dtype(point.dtype),
                        impl,
                    )
                    for impl in IMPLS
                },
            )
