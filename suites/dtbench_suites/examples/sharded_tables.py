"""Embedding tables cut as torchrec cuts them, as DTensors: drawn, handed back, saved, loaded cut otherwise.

    torchrun --nproc-per-node 4 -m dtbench_suites.examples.sharded_tables -e row-wise-uneven

Every sharding of `SHARDINGS` is the same few lines: each rank wraps the shards it holds with their places
in the table, and from_local makes one tensor of them. Checks itself; without -e it shows all shardings.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtbench_core import DTensor, LocalShardsWrapper, Placement, Replicate, Shard, visualize_sharding
from dtbench_suites.examples.launched import check, launched, say

RANKS = 4
ROWS, WIDTH = 8, 16  # embeddings, and the length of each


class Box(NamedTuple):
    """A stretch of rows and of columns of the table."""

    row: int
    column: int
    rows: int
    columns: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.row : self.row + self.rows, self.column : self.column + self.columns]


class Sharding(NamedTuple):
    """held: by rank, the shards it holds. loaded: the sharding in which the checkpoint is read back."""

    placement: Placement
    held: Callable[[int], list[Box]]
    loaded: str


UNEVEN = (1, 3, 1, 3)
SHARDINGS = {
    "row-wise-even": Sharding(Shard(0), lambda r: [Box(2 * r, 0, 2, WIDTH)], "column-wise"),
    "row-wise-uneven": Sharding(
        Shard(0), lambda r: [Box(sum(UNEVEN[:r]), 0, UNEVEN[r], WIDTH)], "row-wise-even"
    ),
    # Two column shards on each rank.
    "column-wise": Sharding(
        Shard(1), lambda r: [Box(0, 4 * r, ROWS, 1), Box(0, 4 * r + 1, ROWS, 3)], "row-wise-uneven"
    ),
}
TABLE_WISE = "table-wise"


def table(number: int, device: torch.device) -> torch.Tensor:
    """[ROWS, WIDTH] the same numbers on every rank."""
    return torch.arange(ROWS * WIDTH, dtype=torch.float32, device=device).view(ROWS, WIDTH) + 1000 * number


def sharded(sharding: Sharding, whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """`whole`, of which each rank keeps its shards."""
    boxes = sharding.held(dist.get_rank())
    wrapper = LocalShardsWrapper(
        local_shards=[box.of(whole).clone() for box in boxes],
        offsets=[(box.row, box.column) for box in boxes],
    )
    # Shards of any lengths: the global shape says what they make up.
    return DTensor.from_local(
        wrapper, mesh, [sharding.placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def check_parts(tensor: DTensor, boxes: list[Box], whole: torch.Tensor) -> None:
    """What to_local hands back is what was wrapped, each shard in its place."""
    local = tensor.to_local()
    check(tensor.shape == whole.shape and tensor.stride() == whole.stride(), "the table's shape")
    check(isinstance(local, LocalShardsWrapper), "to_local hands the wrapper back")
    assert isinstance(local, LocalShardsWrapper)
    check(len(local.shards) == len(boxes), "the number of shards")
    held = zip(boxes, local.shards, local.shard_sizes, local.shard_offsets, strict=True)
    for box, shard, size, offset in held:
        check(torch.equal(shard, box.of(whole)), f"the values of {box}")
        check(size == (box.rows, box.columns) and offset == (box.row, box.column), f"the place of {box}")


def show(name: str, device: torch.device, folder: str) -> None:
    """One table over all ranks."""
    mesh, whole = init_device_mesh(device.type, (RANKS,)), table(0, device)
    sharding = SHARDINGS[name]
    tensor = sharded(sharding, whole, mesh)
    visualize_sharding(tensor, header=f"\n{name}")
    check_parts(tensor, sharding.held(dist.get_rank()), whole)
    check(torch.equal(tensor.full_tensor(), whole), "the table, gathered")

    save({"table": tensor}, checkpoint_id=folder)
    other = SHARDINGS[sharding.loaded]
    target = sharded(other, torch.zeros_like(whole), mesh)
    load({"table": target}, checkpoint_id=folder)
    visualize_sharding(target, header=f"saved, and loaded {sharding.loaded}")
    check_parts(target, other.held(dist.get_rank()), whole)


def show_tables(device: torch.device, folder: str) -> None:
    """A whole table on each rank: its mesh is that rank alone, and the others hold nothing of it."""
    rank = dist.get_rank()
    wholes = [table(number, device) for number in range(RANKS)]
    tables = {}
    for owner, whole in enumerate(wholes):
        held: torch.Tensor = torch.empty(0, device=device)
        if rank == owner:
            held = LocalShardsWrapper([whole.clone()], [(0, 0)])
        mesh = DeviceMesh(device.type, torch.tensor([owner]))
        tables[f"table {owner}"] = DTensor.from_local(
            held, mesh, [Replicate()], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    for owner, (name, tensor) in enumerate(tables.items()):
        visualize_sharding(tensor, header=f"\n{TABLE_WISE}: {name}")
        dist.barrier()  # each is drawn by its own rank: in turn
        check(tensor.shape == (ROWS, WIDTH) and tensor.stride() == (WIDTH, 1), "the shape on every rank")
        if rank == owner:
            check_parts(tensor, [Box(0, 0, ROWS, WIDTH)], wholes[owner])
        else:
            check(tensor.to_local().numel() == 0, "nothing on the other ranks")

    save(tables, checkpoint_id=folder)
    mesh, uneven = init_device_mesh(device.type, (RANKS,)), SHARDINGS["row-wise-uneven"]
    targets = {name: sharded(uneven, torch.zeros(ROWS, WIDTH, device=device), mesh) for name in tables}
    load(targets, checkpoint_id=folder)
    visualize_sharding(targets["table 3"], header="saved, and each table loaded row-wise-uneven, so table 3")
    for target, whole in zip(targets.values(), wholes, strict=True):
        check_parts(target, uneven.held(rank), whole)


def main() -> None:
    names = (*SHARDINGS, TABLE_WISE)
    parser = argparse.ArgumentParser("sharded_tables", description=__doc__.split("\n", 1)[0])
    wanted = "the sharding; may be repeated"
    parser.add_argument("-e", "--example", choices=names, action="append", help=wanted)
    chosen = parser.parse_args().example or names
    with launched("sharded_tables", RANKS) as device:
        for name in chosen:
            shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(shared)
            if name == TABLE_WISE:
                show_tables(device, shared[0])
            else:
                show(name, device, shared[0])
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(shared[0])
            say(f"{name}: right")


if __name__ == "__main__":
    main()
