"""Placements, collectives and their price, on four ranks inside this one process.

    python -m dtbench_suites.examples.placements

The program runs once; every line runs for all ranks, whose parts a LocalTensor shows side by side. Checks itself.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtbench_core import DTensor, Partial, Replicate, Shard, count_collectives, distribute_tensor, explain
from dtbench_core.interop.collective_utils import mesh_broadcast, pad_tensor, unpad_tensor
from dtbench_core.simulate import LocalTensorMode, rank_map

RANKS = 4


def expect(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"wrong: {what}")


def show(text: object) -> None:
    sys.stdout.write(f"{text}\n")


def run() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = torch.arange(10.0).view(5, 2)

    rows = distribute_tensor(whole, mesh, [Shard(0)])
    show(f"five rows over four ranks: {rows}\n")

    with count_collectives() as count:
        columns = rows.redistribute(placements=[Shard(1)])
    show(f"to columns, as it was planned and priced:\n{explain(rows, [Shard(1)])}")
    show(f"issued: {dict(count.calls)}\n")
    expect(torch.equal(columns.full_tensor(), whole), "the columns")

    # Every rank holds a term of a sum: an all-reduce, a reduce-scatter.
    terms = DTensor.from_local(rank_map(lambda rank: torch.full((4,), float(rank))), mesh, [Partial()])
    for wanted in (Replicate(), Shard(0)):
        total = terms.redistribute(placements=[wanted])
        expect(torch.equal(total.full_tensor(), torch.full((4,), 6.0)), f"the sum, placed {wanted}")
        show(f"{terms.placements[0]} -> {wanted}: {total.to_local()}\n")

    # The utilities below, by the names that torch has for them.
    padded = pad_tensor(whole, 0, 3)
    expect(padded.shape == (8, 2) and torch.equal(unpad_tensor(padded, 0, 3), whole), "padding")
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
