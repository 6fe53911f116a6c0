"""Waits for a collective at the first use of its result, in eager mode and in a graph traced with make_fx.

    torchrun --nproc-per-node 4 -m dtbench_suites.examples.wait_on_use

Prints the graph, in which the wait stands directly before the first use of the result. The program checks its own
results.
"""

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from dtbench_core import CommTensor
from dtbench_suites.examples.launched import expect, launched, print_rank0

RANKS = 4


def step(gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean of the gradient over the ranks, and a product that is computed in the meantime."""
    reduced = CommTensor(gradient.clone())
    dist.all_reduce(reduced, async_op=True)
    meanwhile = x @ x
    return reduced / RANKS, meanwhile


def main() -> None:
    with launched("wait_on_use", RANKS) as device:
        x = torch.eye(3, device=device) * 2
        gradient = torch.full((4,), float(dist.get_rank()), device=device)
        mean, meanwhile = step(gradient, x)
        expect(torch.equal(mean, torch.full_like(mean, (RANKS - 1) / 2)), "the mean, eager")
        expect(torch.equal(meanwhile, x @ x), "the computation, eager")

        graph = make_fx(step)(gradient, x)
        print_rank0(graph.code)
        for scale in (1.0, 5.0):  # the traced values, and others
            mean, meanwhile = graph(gradient * scale, x * scale)
            expected = torch.full_like(mean, scale * (RANKS - 1) / 2)
            expect(torch.equal(mean, expected), f"the mean, traced, {scale}")
            expect(torch.equal(meanwhile, (x * scale) @ (x * scale)), f"the computation, traced, {scale}")
        print_rank0("wait_on_use: right")


if __name__ == "__main__":
    main()
