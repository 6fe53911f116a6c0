"""Two-dimensional parallelism: tensor parallel on one mesh dim, data parallel with sharded parameters on the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from core.tests.gloo_world import mesh_of, on_worlds
from core.tests.local_world import ThreadWorlds
from core.tests.parallel_models import MLP, VOCAB, WIDTH, Transformer, assert_same_parameters, seeded
from dtbench_core import (
    DTensor,
    MeshError,
    Replicate,
    Shard,
    StridedShard,
    count_collectives,
    distribute_tensor,
)
from dtbench_core.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
    shard_parameters,
)

ROWS, SEQ = 4, 6
# Activations are cut along the sequence between the halves of a block.
_cut: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
_whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
BLOCK: dict[str, Any] = {
    "norm1": SequenceParallel(),
    "norm2": SequenceParallel(),
    "attention": _whole,
    "attention.w[qkv]": ColwiseParallel(),
    "attention.wo": RowwiseParallel(**_cut),
    "mlp": _whole,
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(**_cut),
}
PLAN: dict[str, Any] = {
    "embed": RowwiseParallel(input_layouts=Replicate(), **_cut),
    "blocks.*": BLOCK,
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


def _part(tensor: Tensor, mesh: Any) -> Tensor:
    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None).to_local()


@pytest.mark.parametrize(
    ("shape", "order", "optimizer", "sharded"),
    [
        ((2, 2), ("dp", "tp"), "AdamW", True),
        ((2, 2), ("tp", "dp"), "SGD", True),
        ((1, 4), ("dp", "tp"), "SGD", False),  # a sequence of 6, of which the last of 4 ranks has nothing
    ],
)
@on_worlds
def test_transformer_trains_like_the_plain_one(
    shape: tuple[int, int], order: tuple[str, str], optimizer: str, sharded: bool
) -> None:
    """Some steps, every data-parallel rank with its own rows, as one device with all of them."""
    mesh = mesh_of(shape, order)
    plain, parallel = seeded(Transformer), seeded(Transformer)
    names = dict(parallel.named_modules())
    parallelize_module(parallel, mesh, PLAN, "tp")
    if sharded:
        shard_parameters(parallel, mesh, "dp")
    assert dict(parallel.named_modules()) == names
    for parameter in parallel.parameters() if sharded else ():
        assert isinstance(parameter, DTensor) and parameter.device_mesh == mesh
        assert parameter.placements[order.index("dp")].is_shard()
    # A key's bias has no effect, hence a gradient of roundings, which Adam divided by itself without eps.
    options: dict[str, Any] = (
        {"lr": 0.05, "eps": 1e-3} if optimizer == "AdamW" else {"lr": 0.5, "momentum": 0.9}
    )
    optimizers = [getattr(torch.optim, optimizer)(m.parameters(), **options) for m in (plain, parallel)]
    for step in range(2):
        torch.manual_seed(step)
        tokens, labels = torch.randint(0, VOCAB, (2, ROWS, SEQ)).unbind()
        labels[:, :2] = -100  # equally many of every data-parallel rank: the mean of means is that of all
        for one in optimizers:
            one.zero_grad()
        expected = F.cross_entropy(plain(tokens).flatten(0, 1), labels.flatten())
        expected.backward()
        if sharded:
            tokens, labels = _part(tokens, mesh["dp"]), _part(labels, mesh["dp"])
        with loss_parallel(), count_collectives() as count:
            logits = parallel(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
        assert logits.placements == (Shard(2),)
        assert count.bytes["all_to_all"] == 0
        if not sharded:
            torch.testing.assert_close(loss.full_tensor(), expected)
        assert_same_parameters(parallel, plain)
        for one in optimizers:
            one.step()
    assert_same_parameters(parallel, plain, grads=False)


@on_worlds
def test_where_parameters_go() -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = seeded(
        nn.ModuleDict, {"up": nn.Linear(WIDTH, 6), "down": nn.Linear(6, WIDTH), "odd": nn.Linear(3, 5)}
    )
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel(), "odd": ColwiseParallel()}
    shard_parameters(parallelize_module(model, mesh, plan, 1), mesh, 0)
    placements = {name: p.placements for name, p in model.named_parameters()}
    assert placements == {
        "up.weight": (Shard(1), Shard(0)),
        "up.bias": (StridedShard(0, split_factor=2), Shard(0)),
        "down.weight": (Shard(0), Shard(1)),
        "down.bias": (Shard(0), Replicate()),
        "odd.weight": (Shard(1), Shard(0)),  # 3 columns: one rank has two of them
        "odd.bias": (Replicate(), Shard(0)),  # 5 elements, of which tp leaves 3 and 2: not cut again
    }
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), values[name])
        assert parameter.is_leaf and parameter.requires_grad


@on_worlds
def test_plain_module_over_one_dim() -> None:
    """Without tensor parallelism: batches of different sizes are for the caller to weigh, so the gradients add up."""
    mesh = mesh_of((4,), ("dp",))
    plain, parallel = seeded(nn.LayerNorm, 6), seeded(nn.LayerNorm, 6)
    tied = nn.ModuleList([parallel, nn.LayerNorm(6)])
    tied[1].weight = parallel.weight
    shard_parameters(tied, mesh, reduce_op="sum")
    assert tied[1].weight is parallel.weight
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    plain(x).square().sum().backward()
    with count_collectives() as count:
        parallel(_part(x, mesh)).square().sum().backward()
    assert dict(count.calls) == {"all_gather": 2, "reduce_scatter": 2}
    assert_same_parameters(parallel, plain)
    assert "weight" not in vars(parallel)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        parallel.register_forward_pre_hook(lambda *_: 1 // 0)
        parallel(x)
    assert "weight" not in vars(parallel)


@on_worlds(world_size=2)
def test_refusals() -> None:
    mesh, deep = mesh_of((1, 2), ("dp", "tp")), mesh_of((1, 1, 2), ("pp", "dp", "tp"))
    with pytest.raises(MeshError, match=r"got the 1x1x2 cpu mesh .* expected one dim, or two"):
        shard_parameters(nn.Linear(2, 2), deep)
    with pytest.raises(MeshError, match="expected one of its names"):
        shard_parameters(nn.Linear(2, 2), mesh, "fsdp")
    twice = shard_parameters(nn.Linear(2, 2), mesh)
    with pytest.raises(MeshError, match=r"got the parameter weight, .*shard it once"):
        shard_parameters(twice, mesh)
    with pytest.raises(RuntimeError, match='reduce_op=\'max\', expected "avg" or "sum"'):
        shard_parameters(nn.Linear(2, 2), mesh, reduce_op="max")


# ---- beside torch's FSDP2 ----


def _fully_shard(kind: str) -> None:
    """torch copies a part of a parameter only on ranks that have one: none may be left waiting."""
    if kind == "fewer rows than ranks":
        mesh = mesh_of((4,))
        fully_shard(parallelize_module(nn.Linear(4, 3), mesh, ColwiseParallel()), mesh=mesh)
    mesh = mesh_of((2, 2), ("dp", "tp"))
    plan: Any = {"down": RowwiseParallel()} if kind == "half" else {"up": ColwiseParallel()}
    fully_shard(parallelize_module(seeded(MLP), mesh["tp"], plan), mesh=mesh["dp"])


@pytest.mark.parametrize("kind", ["all", "half", "fewer rows than ranks"])
def test_fully_shard_names_shard_parameters(ranks: ThreadWorlds, kind: str) -> None:
    message = r"fully_shard got the parameter float32\[.*with dtbench_core\.parallel\.shard_parameters"
    ranks.refuse(_fully_shard, kind, message=message)
