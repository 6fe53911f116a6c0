"""An MLP cut over four ranks, trained for some steps: as the whole model on one.

    torchrun --nproc-per-node 4 -m dtbench_suites.examples.tensor_parallel

PairwiseParallel cuts the first linear layer by columns and the second by rows, so that a pass needs one
all-reduce. Checks itself.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtbench_core import DTensor
from dtbench_core.parallel import PairwiseParallel, parallelize_module
from dtbench_suites.examples.launched import check, launched, say

RANKS, STEPS = 4, 5


def train(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x in batches:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    with launched("tensor_parallel", RANKS) as device:
        torch.manual_seed(0)  # the same model and batches on every rank
        whole = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(device)
        batches = [torch.randn(8, 16, device=device) for _ in range(STEPS)]
        model = copy.deepcopy(whole)
        parallelize_module(model, init_device_mesh(device.type, (RANKS,)), PairwiseParallel())
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            whole_shape, own_shape = tuple(parameter.shape), tuple(parameter.to_local().shape)
            say(f"{name:9} {whole_shape!s:9} {parameter.placements[0]}: {own_shape}")
        losses, expected = train(model, batches), train(whole, batches)
        say(f"losses: {', '.join(f'{loss:.6f}' for loss in losses)}")
        check(torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-5), "the losses")
        for (name, cut), parameter in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert isinstance(cut, DTensor)
            alike = torch.allclose(cut.full_tensor(), parameter, rtol=1e-4, atol=1e-5)
            check(alike, f"{name} after {STEPS} steps")
        say("tensor_parallel: right")


if __name__ == "__main__":
    main()
