"""Small training programs for 4 gloo ranks whose communication is known: `torchrun ... job_programs.py NAME`.

Each takes STEPS steps, which its optimizer ends. What is said of one step holds for each rank.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

STEPS = 12
# late: rank LATE sleeps before each all_reduce, which the others spend in it: they do nothing else meanwhile.
LATE, LATE_S, SIZES = 2, 0.03, (1_000, 50_000, 1_000_000)  # float32
# hidden: an asynchronous all_reduce beside MATMULS of a 512 x 512 matrix, after which it is waited for.
HIDDEN_SIZE, MATMULS = 100_000, 40
# moved: a ring of point to point, and an all_to_all in which rank r sends ALL_TO_ALL[r][k] elements to rank k.
RING_SIZE = 200_000
ALL_TO_ALL = ((10_000, 20_000, 0, 30_000), (5_000, 5_000, 5_000, 5_000), (0, 0, 0, 40_000), (1, 2, 3, 4))
# mesh: (dp 2, tp 2), a Linear(WIDTH, HIDDEN) by columns and a Linear(HIDDEN, WIDTH) by rows, no bias, of BATCH rows.
BATCH, WIDTH, HIDDEN = 64, 256, 1024


def late() -> None:
    """Three all_reduces over all ranks, of 4, 200 and 4000 kB; ranks but LATE wait 30 ms in each."""
    sums = [torch.ones(size) for size in SIZES]
    for step in _steps():
        for each in sums:
            if dist.get_rank() == LATE:
                time.sleep(LATE_S)
            dist.all_reduce(each.fill_(1.0))
            assert each[0] == 4.0, step


def hidden() -> None:
    """One all_reduce of 400 kB, covered by matmuls but for what is left of it when they are done."""
    x, total = torch.randn(512, 512), torch.ones(HIDDEN_SIZE)
    for _step in _steps():
        work = dist.all_reduce(total.fill_(1.0), async_op=True)
        for _ in range(MATMULS):
            torch.mm(x, x)
        assert work is not None
        work.wait()


def moved() -> None:
    """A send and a receive of 800 kB, and an all_to_all of uneven splits: rank 0 gives 240 kB, rank 3 takes 300 kB."""
    rank = dist.get_rank()
    sent, got = torch.ones(RING_SIZE), torch.empty(RING_SIZE)
    gives, takes = list(ALL_TO_ALL[rank]), [row[rank] for row in ALL_TO_ALL]
    parts, taken = torch.ones(sum(gives)), torch.empty(sum(takes))
    for _step in _steps():
        ring = [dist.P2POp(dist.isend, sent, (rank + 1) % 4), dist.P2POp(dist.irecv, got, (rank - 1) % 4)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        dist.all_to_all_single(taken, parts, takes, gives)


def mesh_torch() -> None:
    """tp: an all_reduce of BATCH x WIDTH floats forward. dp: the gradients in one reduce_scatter and one all_gather, of
    WIDTH * HIDDEN floats (half of two weights) on each side of which one holds the whole, the other the half."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _mesh()
    model = parallelize_module(_model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    group = mesh.get_group("dp")
    for _step in _steps(model):
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        with torch.no_grad():
            gradients = [each.grad.to_local() for each in model.parameters()]  # type: ignore[union-attr]
            bucket = torch.cat([each.flatten() for each in gradients])
            shard = bucket.new_empty(bucket.numel() // 2)
            dist.reduce_scatter_tensor(shard, bucket, group=group)
            dist.all_gather_into_tensor(bucket, shard, group=group)
            for each, whole in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
                each.copy_(whole.view_as(each))


def mesh_core() -> None:
    """The same with dtbench_core: its tensor parallelism over tp, its bucketer over dp, which keeps the shards."""
    from dtbench_core import ReduceScatterBucketer
    from dtbench_core.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _mesh()
    model = parallelize_module(_model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    group, bucketer = mesh.get_group("dp"), ReduceScatterBucketer(check_ranks="never")
    shards: dict[nn.Parameter, Tensor] = {}
    bucketer.attach(model, group, shards.__setitem__)
    for _step in _steps(model):
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        bucketer.flush()
        for shard in shards.values():
            dist.all_gather_into_tensor(shard.new_empty(shard.numel() * 2), shard.contiguous(), group=group)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False)
    )


def _steps(model: nn.Module | None = None):  # type: ignore[no-untyped-def]
    """Their numbers; an optimizer's step ends each."""
    own = [nn.Parameter(torch.ones(1))]
    own[0].grad = torch.ones(1)
    optimizer = torch.optim.SGD(model.parameters() if model else own, lr=1e-6)
    for step in range(STEPS):
        yield step
        optimizer.step()
        if model:
            optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.barrier()  # gloo aborts a rank whose peer goes while something is sent
    dist.destroy_process_group()
