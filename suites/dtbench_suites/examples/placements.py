"""Shows placements, collectives and their estimated cost on four ranks simulated in one process.

    python -m dtbench_suites.examples.placements

Every line runs for all ranks. A LocalTensor holds and prints the local tensors of all ranks. The program checks its own
results.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtbench_core import DTensor, Partial, Replicate, Shard, count_collectives, distribute_tensor, explain
from dtbench_core.interop.collective_utils import mesh_broadcast, pad_tensor, unpad_tensor
from dtbench_core.simulate import LocalTensorMode, rank_map

RANKS = 4


def expect(is_right: bool, name: str) -> None:
    if not is_right:
        sys.exit(f"wrong result: {name}")


def show(text: object) -> None:
    sys.stdout.write(f"{text}\n")


def run() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    full = torch.arange(10.0).view(5, 2)

    rows = distribute_tensor(full, mesh, [Shard(0)])
    show(f"five rows over four ranks: {rows}\n")

    with count_collectives() as count:
        columns = rows.redistribute(placements=[Shard(1)])
    show(f"redistribution to columns, with its estimated cost:\n{explain(rows, [Shard(1)])}")
    show(f"issued: {dict(count.calls)}\n")
    expect(torch.equal(columns.full_tensor(), full), "the columns")

    # Every rank holds a term of a sum. Redistributing it takes an all-reduce or a reduce-scatter.
    terms = DTensor.from_local(rank_map(lambda rank: torch.full((4,), float(rank))), mesh, [Partial()])
    for target in (Replicate(), Shard(0)):
        total = terms.redistribute(placements=[target])
        expect(torch.equal(total.full_tensor(), torch.full((4,), 6.0)), f"the sum, placed {target}")
        show(f"{terms.placements[0]} -> {target}: {total.to_local()}\n")

    # Collective utilities, which have the same names as in torch.
    padded = pad_tensor(full, 0, 3)
    expect(padded.shape == (8, 2) and torch.equal(unpad_tensor(padded, 0, 3), full), "padding")
    sent = rank_map(lambda rank: torch.tensor([float(rank)]))
    mesh_broadcast(sent, mesh)
    expect(torch.equal(sent, torch.zeros(1)), "the broadcast")


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        with LocalTensorMode(RANKS):
            run()
    finally:
        dist.destroy_process_group()
    show("placements: right")


if __name__ == "__main__":
    main()
