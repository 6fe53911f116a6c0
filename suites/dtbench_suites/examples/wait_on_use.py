"""A collective that is waited for where its result is used: in eager mode, and in a graph traced with make_fx.

    torchrun --nproc-per-node 4 -m dtbench_suites.examples.wait_on_use

Checks itself, and prints the graph: the result node after the collective, the wait before its reader.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from dtbench_core import CommTensor
from dtbench_suites.examples.launched import check, launched, say

RANKS = 4


def step(gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient's mean over the ranks, and something that is computed meanwhile."""
    reduced = CommTensor(gradient.clone())
    dist.all_reduce(reduced, async_op=True)
    meanwhile = x @ x
    return reduced / RANKS, meanwhile


def main() -> None:
    with launched("wait_on_use", RANKS) as device:
        rank = dist.get_rank()
        x = torch.eye(3, device=device) * 2
        gradient = torch.full((4,), float(rank), device=device)
        mean, meanwhile = step(gradient, x)
        check(torch.equal(mean, torch.full_like(mean, (RANKS - 1) / 2)), "the mean, eager")
        check(torch.equal(meanwhile, x @ x), "the computation, eager")

        graph = make_fx(step)(gradient, x)
        say(graph.code)
        for scale in (1.0, 5.0):  # what was traced, and fresh values
            mean, meanwhile = graph(gradient * scale, x * scale)
            expected = torch.full_like(mean, scale * (RANKS - 1) / 2)
            check(torch.equal(mean, expected), f"the mean, traced, {scale}")
            check(torch.equal(meanwhile, (x * scale) @ (x * scale)), f"the computation, traced, {scale}")
        say("wait_on_use: right")


if __name__ == "__main__":
    main()
