"""Training programs for 4 gloo ranks with known communication: `torchrun --nproc-per-node 4 job_programs.py NAME`.

Each runs STEPS optimizer steps. Every rank communicates the same in every step.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

STEPS = 12
# On a mesh dp=2, tp=2: a column-wise Linear(WIDTH, HIDDEN) and a row-wise Linear(HIDDEN, WIDTH), without bias.
BATCH, WIDTH, HIDDEN = 64, 256, 1024


def mesh_torch() -> None:
    """Trains with torch's tensor parallelism.

    Over tp, the forward pass has one all_reduce of BATCH x WIDTH floats. Over dp, the gradients (WIDTH * HIDDEN floats,
    half of both weights) go through one reduce_scatter and one all_gather.
    """
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
    """Trains the same model with dtbench_core: its tensor parallelism over tp, its gradient bucketer over dp."""
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


def _steps(model: nn.Module) -> Iterator[int]:
    """Yields the number of each step, and runs the optimizer after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(STEPS):
        yield step
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.barrier()  # gloo aborts a rank whose peer goes while something is sent
    dist.destroy_process_group()
