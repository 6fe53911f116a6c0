"""Shows embedding tables with torchrec's shardings as DTensors: visualizes, unwraps, saves and reshards them.

    torchrun --nproc-per-node 4 -m dtbench_suites.examples.sharded_tables -e row-wise-uneven

For every sharding, each rank wraps its local shards with their offsets in the table, and from_local makes a DTensor of
them. The program checks its own results. Without -e it shows all shardings.
"""

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
from dtbench_suites.examples.launched import expect, launched, print_rank0

RANKS = 4
ROWS, WIDTH = 8, 16  # embeddings, and the length of each


class Box(NamedTuple):
    """A rectangular shard of a table: offsets and sizes in rows and columns."""

    row: int
    column: int
    rows: int
    columns: int

    def of(self, full: torch.Tensor) -> torch.Tensor:
        return full[self.row : self.row + self.rows, self.column : self.column + self.columns]


class Sharding(NamedTuple):
    """A sharding of one table over all ranks.

    Attributes:
        boxes_of: rank -> its shards.
        loaded_as: the sharding into which the checkpoint is loaded.
    """

    placement: Placement
    boxes_of: Callable[[int], list[Box]]
    loaded_as: str


UNEVEN = (1, 3, 1, 3)
SHARDINGS = {
    "row-wise-even": Sharding(Shard(0), lambda r: [Box(2 * r, 0, 2, WIDTH)], "column-wise"),
    "row-wise-uneven": Sharding(
        Shard(0), lambda r: [Box(sum(UNEVEN[:r]), 0, UNEVEN[r], WIDTH)], "row-wise-even"
    ),
    # Two shards per rank.
    "column-wise": Sharding(
        Shard(1), lambda r: [Box(0, 4 * r, ROWS, 1), Box(0, 4 * r + 1, ROWS, 3)], "row-wise-uneven"
    ),
}
TABLE_WISE = "table-wise"


def table(number: int, device: torch.device) -> torch.Tensor:
    """Returns table `number`, of shape (ROWS, WIDTH), with equal values on all ranks."""
    return torch.arange(ROWS * WIDTH, dtype=torch.float32, device=device).view(ROWS, WIDTH) + 1000 * number


def sharded(sharding: Sharding, full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Returns `full` as a DTensor with that sharding."""
    boxes = sharding.boxes_of(dist.get_rank())
    wrapper = LocalShardsWrapper(
        local_shards=[box.of(full).clone() for box in boxes],
        offsets=[(box.row, box.column) for box in boxes],
    )
    # Shards may differ in size, so from_local needs the global shape.
    return DTensor.from_local(
        wrapper, mesh, [sharding.placement], run_check=False, shape=full.shape, stride=full.stride()
    )


def check_parts(tensor: DTensor, boxes: list[Box], full: torch.Tensor) -> None:
    """Checks that to_local returns the wrapper with the given shards."""
    local = tensor.to_local()
    expect(tensor.shape == full.shape and tensor.stride() == full.stride(), "the table's shape")
    expect(isinstance(local, LocalShardsWrapper), "to_local returns the wrapper")
    assert isinstance(local, LocalShardsWrapper)
    expect(len(local.shards) == len(boxes), "the number of shards")
    for box, shard, size, offset in zip(
        boxes, local.shards, local.shard_sizes, local.shard_offsets, strict=True
    ):
        expect(torch.equal(shard, box.of(full)), f"the values of {box}")
        expect(size == (box.rows, box.columns) and offset == (box.row, box.column), f"the place of {box}")


def show(name: str, device: torch.device, folder: str) -> None:
    """Shows one table that is sharded over all ranks."""
    mesh, full = init_device_mesh(device.type, (RANKS,)), table(0, device)
    sharding = SHARDINGS[name]
    tensor = sharded(sharding, full, mesh)
    visualize_sharding(tensor, header=f"\n{name}")
    check_parts(tensor, sharding.boxes_of(dist.get_rank()), full)
    expect(torch.equal(tensor.full_tensor(), full), "the table, gathered")

    save({"table": tensor}, checkpoint_id=folder)
    loaded_sharding = SHARDINGS[sharding.loaded_as]
    target = sharded(loaded_sharding, torch.zeros_like(full), mesh)
    load({"table": target}, checkpoint_id=folder)
    visualize_sharding(target, header=f"saved, and loaded {sharding.loaded_as}")
    check_parts(target, loaded_sharding.boxes_of(dist.get_rank()), full)


def show_tables(device: torch.device, folder: str) -> None:
    """Shows one table per rank. The mesh of a table holds its rank only; the other ranks hold an empty tensor."""
    rank = dist.get_rank()
    full_tables = [table(number, device) for number in range(RANKS)]
    tables = {}
    for owner, full in enumerate(full_tables):
        local = (
            LocalShardsWrapper([full.clone()], [(0, 0)]) if rank == owner else torch.empty(0, device=device)
        )
        mesh = DeviceMesh(device.type, torch.tensor([owner]))
        tables[f"table {owner}"] = DTensor.from_local(
            local, mesh, [Replicate()], run_check=False, shape=full.shape, stride=full.stride()
        )
    for owner, (name, tensor) in enumerate(tables.items()):
        visualize_sharding(tensor, header=f"\n{TABLE_WISE}: {name}")
        dist.barrier()  # each table is printed by its own rank, so the ranks take turns
        expect(tensor.shape == (ROWS, WIDTH) and tensor.stride() == (WIDTH, 1), "the shape on every rank")
        if rank == owner:
            check_parts(tensor, [Box(0, 0, ROWS, WIDTH)], full_tables[owner])
        else:
            expect(tensor.to_local().numel() == 0, "nothing on the other ranks")

    save(tables, checkpoint_id=folder)
    mesh, uneven = init_device_mesh(device.type, (RANKS,)), SHARDINGS["row-wise-uneven"]
    targets = {name: sharded(uneven, torch.zeros(ROWS, WIDTH, device=device), mesh) for name in tables}
    load(targets, checkpoint_id=folder)
    visualize_sharding(targets["table 3"], header="saved, and each table loaded row-wise-uneven, so table 3")
    for target, full in zip(targets.values(), full_tables, strict=True):
        check_parts(target, uneven.boxes_of(rank), full)


def main() -> None:
    names = (*SHARDINGS, TABLE_WISE)
    parser = argparse.ArgumentParser("sharded_tables", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "-e", "--example", choices=names, action="append", help="the sharding; may be repeated"
    )
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
            print_rank0(f"{name}: right")


if __name__ == "__main__":
    main()
