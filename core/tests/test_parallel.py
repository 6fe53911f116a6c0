"""Tensor parallelism with ColwiseParallel and RowwiseParallel, compared with the plain modules."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from core.tests.gloo_world import WORLD_SIZE, mesh_of, on_ranks, on_worlds
from core.tests.local_world import ThreadWorlds
from core.tests.on_device import DEVICE_TYPE, torch
from core.tests.parallel_models import (
    BATCH,
    HIDDEN,
    MLP,
    SEQ,
    VOCAB,
    WIDTH,
    Attention,
    Transformer,
    assert_same_parameters,
    assert_trains_alike,
    seeded,
)
from core.tests.placing import place
from dtbench_core import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    check_ranks,
    count_collectives,
)
from dtbench_core.errors import ArgumentError, LayoutError, MeshError, PlacementError
from dtbench_core.parallel import (
    ColwiseParallel,
    PairwiseParallel,
    ParallelStyle,
    PlanError,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)

ATTENTION_PLAN: dict[str, ParallelStyle] = {"w[qkv]": ColwiseParallel(), "wo": RowwiseParallel()}
MLP_PLAN: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


BATCHES = (BATCH, SEQ, WIDTH)


@pytest.mark.parametrize(
    ("make", "args", "shape"),
    [
        (MLP, (), BATCHES),
        (MLP, (), (WIDTH,)),
        (MLP, (False,), (5, WIDTH)),
        *((MLP, (True, uneven), BATCHES) for uneven in (10, 3)),
        (Attention, (), BATCHES),
    ],
)
@on_ranks
def test_modules_train_like_the_plain_ones(make: Any, args: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Compares outputs, gradients of inputs and parameters, and parameters after SGD steps."""
    mesh = mesh_of((WORLD_SIZE,))
    plain, parallel = seeded(make, *args), seeded(make, *args)
    before = dict(parallel.named_modules())
    assert parallelize_module(parallel, mesh, MLP_PLAN if make is MLP else ATTENTION_PLAN) is parallel
    assert dict(parallel.named_modules()) == before
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, parallel)]
    for _ in range(3):
        with check_ranks():
            assert_trains_alike(plain, parallel, torch.randn(shape))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(parallel, plain, grads=False)


@on_ranks
def test_mlp_needs_one_reduction_each_way() -> None:
    module = parallelize_module(seeded(MLP), mesh_of((WORLD_SIZE,)), MLP_PLAN)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    with count_collectives() as forward:
        out = module(x)
    with count_collectives() as backward:
        out.sum().backward()
    assert dict(forward.calls) == dict(backward.calls) == {"all_reduce": 1}


# --- a whole model ---------------------------------------------------------------------------------

MODEL_PLAN: dict[str, Any] = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*": {"attention": ATTENTION_PLAN, "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()},
    "head": ColwiseParallel(output_layouts=Replicate()),
}


@pytest.mark.parametrize("tied", [False, True])
@on_ranks
def test_model_trains_like_the_plain_one(tied: bool) -> None:
    mesh = mesh_of((WORLD_SIZE,))
    plain, parallel = seeded(Transformer, 2), seeded(Transformer, 2)
    for model in (plain, parallel) if tied else ():
        model.head.weight = model.embed.weight
    parallelize_module(parallel, mesh, MODEL_PLAN)
    assert (parallel.head.weight is parallel.embed.weight) is tied
    assert parallel.blocks[1].mlp.up.weight.placements == (Shard(0),)
    assert parallel.blocks[0].attention.wo.weight.placements == (Shard(1),)
    assert not isinstance(parallel.blocks[0].norm1.weight, DTensor)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, parallel)]
    for _ in range(2):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
        for module, optimizer in zip((plain, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()
        assert_same_parameters(parallel, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_parameters(parallel, plain, grads=False)


# --- layouts ---------------------------------------------------------------------------------------


def placed(tensor: Tensor, placement: Placement) -> Tensor:
    return place(tensor, placement, mesh=(WORLD_SIZE,)).to_local()


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(-1)])
@pytest.mark.parametrize("wanted", [Replicate(), Shard(0), Shard(1), Shard(-1)])
@pytest.mark.parametrize("local", [True, False])
@on_ranks
def test_linear_layouts(
    style: type[ParallelStyle], placement: Placement, wanted: Placement, local: bool
) -> None:
    plain = seeded(nn.Linear, WIDTH, HIDDEN)
    layouts = style(input_layouts=placement, output_layouts=wanted, use_local_output=local)
    parallel = parallelize_module(copy.deepcopy(plain), mesh_of((WORLD_SIZE,)), layouts)
    data, weights = torch.randn(4, 4, WIDTH), torch.randn(4, 4, HIDDEN)
    x = data.clone().requires_grad_()
    mine = placed(data, placement).clone().requires_grad_()
    expected, out = plain(x), parallel(mine)
    assert isinstance(out, DTensor) is not local
    out, weight, want = (
        (out, placed(weights, wanted), placed(expected.detach(), wanted))
        if local
        else (out.full_tensor(), weights, expected.detach())
    )
    torch.testing.assert_close(out, want)
    (expected * weights).sum().backward()
    (out * weight).sum().backward()
    torch.testing.assert_close(mine.grad, placed(x.grad, placement))
    assert_same_parameters(parallel, plain)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("rows", [VOCAB, 10, 5])
@pytest.mark.parametrize("kind", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("wanted", [Replicate(), Shard(-1)])
@on_worlds
def test_embedding(kind: Any, rows: int, padding: int | None, wanted: Placement) -> None:
    plain = seeded(lambda: nn.Embedding(rows, WIDTH, padding_idx=padding))
    style = kind(input_layouts=Replicate(), output_layouts=wanted)
    parallel = parallelize_module(copy.deepcopy(plain), mesh_of((WORLD_SIZE,)), style)
    tokens = torch.arange(10).reshape(BATCH, 5) * 3 % rows
    tokens[0, 0], tokens[1, 4] = padding or 0, rows - 1
    weights = torch.linspace(-1, 1, 10 * WIDTH).view(BATCH, 5, WIDTH)
    expected, out = plain(tokens), parallel(tokens)
    (expected * weights).sum().backward()
    torch.testing.assert_close(out, placed(expected.detach(), wanted))
    (out * placed(weights, wanted)).sum().backward()
    assert_same_parameters(parallel, plain)


@pytest.mark.parametrize(("rows", "index"), [(8, 8), (5, 6), (5, -1)])
@on_ranks
def test_index_outside_the_table_fails_on_every_rank(rows: int, index: int) -> None:
    mesh = mesh_of((WORLD_SIZE,))
    module = parallelize_module(nn.Embedding(rows, WIDTH), mesh, RowwiseParallel(input_layouts=Replicate()))
    with pytest.raises(IndexError):
        module(torch.tensor([0, index]))
    dist.barrier()  # every rank raised: none is left waiting in a collective


# --- plans and their errors ------------------------------------------------------------------------


def test_plans(fake_world: Callable[[int], None]) -> None:
    fake_world(2)
    mesh, two_dims = mesh_of((2,), ("tp",)), mesh_of((1, 2), ("dp", "tp"))
    colwise = ColwiseParallel()
    warned: list[tuple[Callable[[], nn.Module], Any, str]] = [
        (MLP, None, "no parallelize_plan and changes nothing"),
        (MLP, {"upp": colwise, "up": colwise}, r"key 'upp' matches no submodule .* close to it are up:"),
        (
            lambda: Transformer(2),
            {"blocks.*.attn.wq": colwise},
            r"'blocks\.\*\.attn\.wq' .* close to it are blocks\.[01]\.attention\.wq, ",
        ),
        (lambda: nn.Linear(4, 4), {"a": {"b": colwise}}, r"key 'a' matches no submodule .* are none"),
    ]
    for make, plan, message in warned:
        with pytest.warns(UserWarning, match=message):
            parallelize_module(make(), mesh, plan)

    meshes: list[tuple[Any, Any, str]] = [
        (two_dims, "pp", r"'pp' of .*one of its names \('dp', 'tp'\) or an index"),
        (None, 0, "got no device_mesh, and there is no current mesh"),
        ("tp", 0, "got str as device_mesh"),
    ]
    for given, dim, message in meshes:
        with pytest.raises(MeshError, match=message):
            parallelize_module(MLP(), given, MLP_PLAN, dim)
    with mesh:  # the current mesh may be left out
        assert isinstance(parallelize_module(MLP(), parallelize_plan=MLP_PLAN).up.weight, DTensor)
        assert isinstance(parallelize_module(MLP(), PairwiseParallel()).up.weight, DTensor)

    module, seed = MLP(), "Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for parallelize_plan"
    wrong: list[tuple[Any, str]] = [
        (3, f"{seed}, <class 'int'> found! Got 3: pass a ParallelStyle"),
        ({"up": colwise, "down": None}, f"{seed}, <class 'NoneType'> found! Got None for 'down'"),
        ({1: colwise}, "got the key 1, expected the name"),
    ]
    for plan, message in wrong:
        with pytest.raises(PlanError, match=re.escape(message)) as raised:
            parallelize_module(module, mesh, plan)
        assert isinstance(raised.value, RuntimeError) and isinstance(raised.value, TypeError)
        assert not any(isinstance(p, DTensor) for p in module.parameters())

    assert parallelize_module(nn.Linear(4, 4), mesh, {"": colwise}).weight.placements == (Shard(0),)
    assert not parallelize_module(nn.Linear(4, 4).requires_grad_(False), mesh, colwise).weight.requires_grad


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight


def test_refusals(fake_world: Callable[[int], None]) -> None:
    fake_world(2)
    mesh = mesh_of((2,), ("tp",))
    colwise, rowwise = ColwiseParallel(), RowwiseParallel(input_layouts=Replicate())
    done = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    refused: list[tuple[type[Exception], str, nn.Module, Any]] = [
        (UnsupportedModuleError, r"Expect a torch\.nn\.Linear module but received .*MLP", MLP(), colwise),
        (UnsupportedModuleError, "weight is computed or not made yet", nn.LazyLinear(4), colwise),
        (UnsupportedModuleError, "weight is computed or not made yet", normed, rowwise),
        (UnsupportedModuleError, "Embedding with max_norm", nn.Embedding(4, 4, max_norm=1.0), colwise),
        (ArgumentError, "weight is a DTensor already .*parallelize a module once", done, colwise),
        (
            ArgumentError,
            r"weight of a Linear is tied to a parameter already placed as .*untie them",
            Tied(),
            {"a": colwise, "b": rowwise},
        ),
    ]
    for kind, message, module, plan in refused:
        with pytest.raises(kind, match=message):
            parallelize_module(module, mesh, plan)
    with pytest.warns(
        UserWarning, match=r"parameters b\.weight were tied to parameters that are sharded now"
    ):
        parallelize_module(Tied(), mesh, {"a": colwise})

    with pytest.raises(PlacementError, match=r"got input_layouts=.*not in a list"):
        ColwiseParallel(input_layouts=[Replicate()])
    theirs: Any = torch.distributed.tensor
    assert RowwiseParallel(output_layouts=theirs.Shard(0)).output_layouts == (Shard(0),)

    with pytest.raises(ArgumentError, match="Linear under ColwiseParallel got no positional argument"):
        done(input=torch.ones(2, 4))
    with pytest.raises(ArgumentError, match="got list, expected one tensor"):
        done([torch.ones(2, 4)])
    cut = parallelize_module(nn.Linear(4, 4), mesh, RowwiseParallel())
    with pytest.raises(LayoutError, match=r"\[2, 4\].*expected \[2, 2\]"):
        cut(torch.ones(2, 4))


def _source_rank(src: int | None) -> tuple[list[float], list[float]]:
    mesh = mesh_of((2,), ("tp",))
    module = nn.Sequential(nn.Linear(2, 2)).to(DEVICE_TYPE)
    for parameter in module.parameters():
        nn.init.constant_(parameter, dist.get_rank())
    plan: Any = {"0": RowwiseParallel()} if src is not None else {"": {"0": ColwiseParallel()}}
    parallelize_module(module, mesh, plan, src_data_rank=src)
    return module[0].weight.to_local().flatten().tolist(), module[0].bias.to_local().tolist()


def test_values_come_from_the_source_rank_or_are_the_ranks_own(ranks: ThreadWorlds) -> None:
    for src in (0, 1):
        assert ranks(_source_rank, src, world_size=2) == [([src, src], [src, src])] * 2
    assert ranks(_source_rank, None, world_size=2) == [([0.0, 0.0], [0.0]), ([1.0, 1.0], [1.0])]
