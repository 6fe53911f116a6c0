"""Dispatch and combine of an expert layer: rows go to the ranks of their experts and come back, under autograd.

    core    dtbench_core.all_to_all_single_autograd
    torch   torch.distributed._functional_collectives.all_to_all_single_autograd
    c10d    dist.all_to_all_single forward and backward, without autograd: the floor

A pass forward has two all-to-alls, a backward pass two more. The experts of a rank multiply their rows by a factor of
their own, so a row that was at the wrong rank has a wrong value. Rows are sorted by destination beforehand. Routings
and sizes are those of `all_to_all_v` in the suite `collectives`, for all groups of a mesh dim together. Values are
small integers, so results and gradients are compared with plain indexing bit by bit.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from dtbench.records.result import integer_param
from dtbench.suite import Case, RunOptions, Workload, World, suite
from dtbench_core import all_to_all_single_autograd
from dtbench_suites import SUITES
from dtbench_suites.data import mismatch, moved_values, torch_dtype
from dtbench_suites.routing import OPTION, RoutedSweepPoint, routed_sweep
from dtbench_suites.tensor_parallel import BOTH_PASSES, FORWARD_BACKWARD, wait_for


def exchange_c10d(rows: Tensor, outputs: list[int], inputs: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(outputs), rows.size(1))
    dist.all_to_all_single(received, rows, outputs, inputs, group=group)
    return received


# Impl -> function of (rows, splits of the output, splits of the input, group) that returns the received rows.
IMPLS: dict[str, Callable[..., Tensor]] = {
    "core": all_to_all_single_autograd,
    "torch": functional.all_to_all_single_autograd,
    "c10d": exchange_c10d,
}


def build_impl(point: RoutedSweepPoint, passes: str, dtype: torch.dtype, impl: str, world: World) -> Workload:
    group = world.mesh.get_group(str(point.params["mesh_dim"]))
    rank, n, exchange = group.rank(), group.size(), IMPLS[impl]
    sent, received = point.counts[rank], point.received(rank)
    count, has_graph = sum(sent) * point.width, passes == FORWARD_BACKWARD and impl != "c10d"
    rows, cotangent = (  # (rows, width) each
        moved_values(start, count, dtype, world.device).view(-1, point.width) for start in (rank, rank + n)
    )
    rows.requires_grad_(has_graph)

    def through_experts(tensor: Tensor) -> Tensor:
        dispatched = exchange(tensor, received, sent, group)
        # A factor of 1 or 2: in bfloat16, integers are exact up to 256, and moved_values are at most 100.
        return exchange(dispatched * (rank % 2 + 1), sent, received, group)

    def step() -> list[Tensor]:
        """Returns the combined rows and, with a backward pass, their gradient."""
        if has_graph:
            combined = through_experts(rows)
            return [wait_for(combined), *map(wait_for, torch.autograd.grad(combined, rows, cotangent))]
        # By hand, the backward pass sends the gradient as the forward pass sends the rows.
        tensors = [rows, cotangent] if passes == FORWARD_BACKWARD else [rows]
        return [wait_for(through_experts(tensor)) for tensor in tensors]

    def check() -> str | None:
        scale = torch.cat([torch.full((count, 1), r % 2 + 1) for r, count in enumerate(sent)]).to(rows)
        expected = {"the combined rows": rows * scale, "the gradient": cotangent * scale}
        return next(filter(None, map(mismatch, step(), expected.values(), expected)), None)

    return Workload(step, check=check, counters=lambda: point.skew)


@suite(
    "expert_parallel",
    world="ranks",
    by_default=False,
    help=SUITES["expert_parallel"],
    options=OPTION,
    impl_s=(0.2, 0.1),
)
def expert_parallel(options: RunOptions) -> Iterator[Case]:
    for point in routed_sweep(options, {"pass": ""}):
        for passes in BOTH_PASSES:
            dtype = torch_dtype(str(point.params["dtype"]))
            yield Case(
                name="dispatch_combine",
                params={**point.params, "pass": passes},
                build={impl: partial(build_impl, point, passes, dtype, impl) for impl in IMPLS},
                size_bytes=integer_param(point.params, "size"),
                bandwidth=False,
            )
