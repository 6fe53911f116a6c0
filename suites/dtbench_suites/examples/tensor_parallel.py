"""Trains an MLP with tensor parallelism on four ranks, and compares it with the unsharded model.

    torchrun --nproc-per-node 4 -m dtbench_suites.examples.tensor_parallel

PairwiseParallel shards the first linear layer by columns and the second by rows, so that a pass needs one all-reduce.
The program checks its own results.
"""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtbench_core import DTensor
from dtbench_core.parallel import PairwiseParallel, parallelize_module
from dtbench_suites.examples.launched import expect, launched, print_rank0

RANKS, STEPS = 4, 5


def train(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """Trains the model on the batches and returns the loss of each step."""
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
        reference = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(device)
        batches = [torch.randn(8, 16, device=device) for _ in range(STEPS)]
        model = copy.deepcopy(reference)
        parallelize_module(model, init_device_mesh(device.type, (RANKS,)), PairwiseParallel())
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            full_shape, local_shape = tuple(parameter.shape), tuple(parameter.to_local().shape)
            print_rank0(f"{name:9} {full_shape!s:9} {parameter.placements[0]}: {local_shape}")
        losses, expected = train(model, batches), train(reference, batches)
        print_rank0(f"losses: {', '.join(f'{loss:.6f}' for loss in losses)}")
        expect(torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-5), "the losses")
        for (name, sharded), parameter in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(sharded, DTensor)
            expect(
                torch.allclose(sharded.full_tensor(), parameter, rtol=1e-4, atol=1e-5),
                f"{name} after {STEPS} steps",
            )
        print_rank0("tensor_parallel: right")


if __name__ == "__main__":
    main()
