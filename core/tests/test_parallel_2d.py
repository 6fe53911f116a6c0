"""Tensor parallelism with sharded parameters on a second mesh dim; sequences that the ranks do not divide."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from core.tests.compiling import compiled, quiet, ranks_for
from core.tests.gloo_world import mesh_of, on_gloo_ranks, on_ranks, on_worlds
from core.tests.parallel_models import MLP, VOCAB, WIDTH, Block, Transformer, assert_same_parameters, seeded
from core.tests.torch_version import needs_213
from dtbench_core import (
    DTensor,
    MeshError,
    Replicate,
    Shard,
    StridedShard,
    count_collectives,
    distribute_tensor,
)
from dtbench_core.errors import LayoutError
from dtbench_core.parallel import (
    ColwiseParallel,
    PairwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
    shard_parameters,
)
from dtbench_core.parallel.convert import make_input_shard_1d

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


def _chunk(whole: Tensor, mesh: Any, dim: int = 1) -> Tensor:
    return distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None).to_local().clone()


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
    """Each data-parallel rank has its own rows; compared with one device that has all of them."""
    mesh = mesh_of(shape, order)
    plain, parallel = seeded(Transformer), seeded(Transformer)
    names = dict(parallel.named_modules())
    parallelize_module(parallel, mesh, PLAN, "tp")
    if sharded:
        shard_parameters(parallel, mesh, "dp")
    assert dict(parallel.named_modules()) == names
    for parameter in parallel.parameters() if sharded else ():
        assert parameter.device_mesh == mesh and parameter.placements[order.index("dp")].is_shard()
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
            tokens, labels = (_chunk(t, mesh["dp"], dim=0) for t in (tokens, labels))
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
def test_placements_of_sharded_parameters() -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = seeded(
        nn.ModuleDict, {"up": nn.Linear(WIDTH, 6), "down": nn.Linear(6, WIDTH), "odd": nn.Linear(3, 5)}
    )
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel(), "odd": ColwiseParallel()}
    shard_parameters(parallelize_module(model, mesh, plan, 1), mesh, 0)
    assert {name: p.placements for name, p in model.named_parameters()} == {
        "up.weight": (Shard(1), Shard(0)),
        "up.bias": (StridedShard(0, split_factor=2), Shard(0)),
        "down.weight": (Shard(0), Shard(1)),
        "down.bias": (Shard(0), Replicate()),
        "odd.weight": (Shard(1), Shard(0)),  # 3 columns: one rank has two of them
        "odd.bias": (Replicate(), Shard(0)),  # 5 elements, of which tp leaves 3 and 2: not cut again
    }
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(
        {name: p.detach().full_tensor() for name, p in model.named_parameters()}, values
    )


@on_worlds
def test_plain_module_over_one_dim() -> None:
    """Without tensor parallelism. Gradients are summed, since the caller weighs batches of different sizes."""
    mesh = mesh_of((4,), ("dp",))
    plain, parallel = seeded(nn.LayerNorm, 6), seeded(nn.LayerNorm, 6)
    tied = nn.ModuleList([parallel, nn.LayerNorm(6)])
    tied[1].weight = parallel.weight
    shard_parameters(tied, mesh, reduce_op="sum")
    assert tied[1].weight is parallel.weight
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    plain(x).square().sum().backward()
    with count_collectives() as count:
        parallel(_chunk(x, mesh, dim=0)).square().sum().backward()
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
    linear, twice = nn.Linear(2, 2), shard_parameters(nn.Linear(2, 2), mesh)
    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: shard_parameters(linear, deep), MeshError, "1x1x2 cpu mesh .* expected one dim, or two"),
        (lambda: shard_parameters(linear, mesh, "fsdp"), MeshError, "expected one of its names"),
        (lambda: shard_parameters(twice, mesh), MeshError, "got the parameter weight, .*shard it once"),
        (
            lambda: shard_parameters(linear, mesh, reduce_op="max"),
            RuntimeError,
            'reduce_op=\'max\', expected "avg" or "sum"',
        ),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()


# ---- beside torch's FSDP2 ----


@pytest.mark.parametrize(
    "kind",
    [
        "all",
        "half",
        pytest.param(
            "fewer rows than ranks", marks=needs_213("fully_shard reads no attribute before it sends")
        ),
    ],
)
@on_ranks
def test_fully_shard_is_refused_in_favour_of_shard_parameters(kind: str) -> None:
    """torch copies a shard of a parameter only on ranks that have one, so all ranks must raise."""
    module, mesh = seeded(MLP), mesh_of((2, 2), ("dp", "tp"))
    plan: Any = {"down": RowwiseParallel()} if kind == "half" else {"up": ColwiseParallel()}
    tensor_parallel, data_parallel = mesh["tp"], mesh["dp"]
    if kind == "fewer rows than ranks":
        module, plan = nn.Linear(4, 3), ColwiseParallel()
        tensor_parallel = data_parallel = mesh_of((4,))
    parallelize_module(module, tensor_parallel, plan)
    message = r"fully_shard got the parameter float32\[.*with dtbench_core\.parallel\.shard_parameters"
    with pytest.raises(Exception, match=message):
        fully_shard(module, mesh=data_parallel)


# ---- sequences of lengths that the ranks do not divide ----


N = 4
R, S1 = Replicate(), Shard(1)
ALONG: dict[str, Any] = {"input_layouts": S1}
PLAIN_BLOCK: dict[str, Any] = {
    "norm1": SequenceParallel(use_local_output=True),
    "norm2": SequenceParallel(use_local_output=True),
    "attention": PrepareModuleInput(input_layouts=S1, desired_input_layouts=R, use_local_output=True),
    **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
    "attention.wo": RowwiseParallel(output_layouts=S1),
    "mlp.up": ColwiseParallel(input_layouts=S1),
    "mlp.down": RowwiseParallel(output_layouts=S1),
}


def _sequence(length: int) -> Tensor:
    return torch.randn((2, length, WIDTH), generator=torch.Generator().manual_seed(length))


NET: dict[str, Any] = {
    "embed": RowwiseParallel(input_layouts=R, output_layouts=S1),
    "blocks.*": PLAIN_BLOCK,
    "norm": SequenceParallel(use_local_output=True),
    "head": ColwiseParallel(input_layouts=S1, output_layouts=R),
}


def _same_step(
    plain: nn.Module, parallel: nn.Module, whole: Tensor, part: Tensor, cut: Callable[[Tensor], Tensor]
) -> None:
    """Compares a forward and backward pass. `cut` returns what a rank has of the output."""
    for model in (plain, parallel):
        model.zero_grad()
    expected, got = plain(whole), parallel(part)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    assert not isinstance(got, DTensor)
    torch.testing.assert_close(got, cut(expected.detach()))
    (got * cut(weights)).sum().backward()
    (expected * weights).sum().backward()
    assert_same_parameters(parallel, plain)


@pytest.mark.parametrize("lengths", [(7, 5, 8, 6), (8, 7, 8, 1)])
@on_gloo_ranks
def test_embedded_sequences_of_any_length(lengths: tuple[int, ...]) -> None:
    mesh = mesh_of((N,))
    plain, parallel = seeded(Transformer, 2), seeded(Transformer, 2)
    parallelize_module(parallel, mesh, NET)
    for length in lengths:
        tokens = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
        _same_step(plain, parallel, tokens, tokens, lambda output: output)


@pytest.mark.parametrize("lengths", [(7, 5, 8, 6), (8, 7, 8, 5)])
@on_ranks
def test_chunks_of_sequences_of_any_length(lengths: tuple[int, ...]) -> None:
    mesh = mesh_of((N,))
    plain, parallel = seeded(Block), seeded(Block)
    parallelize_module(parallel, mesh, PLAIN_BLOCK)
    for length in lengths:
        whole = _sequence(length)
        _same_step(plain, parallel, whole, _chunk(whole, mesh), lambda output: _chunk(output, mesh))


def _asked(model: nn.Module, inputs: Tensor) -> int:
    """Returns the number of collectives of a forward pass."""
    with torch.no_grad(), count_collectives() as count:
        model(inputs)
    return count.calls.total()


@on_ranks
def test_even_lengths_are_exchanged_once() -> None:
    mesh, tokens = mesh_of((N,)), torch.arange(16).view(2, 8) % VOCAB
    parallel = parallelize_module(seeded(Transformer, 2), mesh, NET)
    first, again, third = (_asked(parallel, tokens) for _ in range(3))
    inputs_read = 4 * 2 + 1 + 1  # by norms, halves of blocks and the head
    assert first - again == inputs_read and again == third
    # One gather and one scatter of each half of a block, of the embedding's terms and of the head.
    assert again == 2 * 2 * 2 + 1 + 2
    assert _asked(parallel, tokens[:, :7]) == again + inputs_read


@on_ranks
def test_lengths_of_inputs_from_outside_are_exchanged_each_time() -> None:
    mesh = mesh_of((N,))
    parallel = parallelize_module(seeded(Block), mesh, PLAIN_BLOCK)
    first, again, third = (_asked(parallel, _chunk(_sequence(8), mesh)) for _ in range(3))
    assert first - again == 3 and again == third == 4 + 1


class Cross(nn.Module):
    """A decoder step that reads an encoder's output each time."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.query = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.keys, self.queries = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def decode(self, memory: Tensor, query: Tensor) -> Tensor:
        return self.queries(self.query(query)) @ self.keys(memory).transpose(1, 2)

    def forward(self, memory: Tensor, query: Tensor) -> Tensor:
        return self.decode(self.memory(memory), query)


@pytest.mark.parametrize(("memory", "query"), [(7, 8), (8, 7), (5, 7), (8, 4)])
@on_ranks
def test_two_sequences_of_different_lengths(memory: int, query: int) -> None:
    mesh = mesh_of((N,))
    plain, parallel = seeded(Cross), seeded(Cross)
    norm = SequenceParallel(use_local_output=True)
    gather = ColwiseParallel(input_layouts=S1, output_layouts=R)
    parallelize_module(parallel, mesh, {"memory": norm, "query": norm, "keys": gather, "queries": gather})
    for lengths in ((memory, query), (memory, 8), (8, 8), (6, 8)):
        pair = [_sequence(length) for length in lengths]
        with torch.no_grad():
            parts = [_chunk(whole, mesh) for whole in pair]
            torch.testing.assert_close(parallel(*parts), plain(*pair))
            kept, expected = parallel.memory(parts[0]), plain.memory(pair[0])
            for step in map(_sequence, (8, 4, 8)):
                torch.testing.assert_close(
                    parallel.decode(kept, _chunk(step, mesh)), plain.decode(expected, step)
                )


class Pair(nn.Module):
    def forward(self, x: Tensor, *, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y + 1


@on_ranks
def test_inputs_and_outputs_of_any_length() -> None:
    mesh = mesh_of((N,))
    style = PrepareModuleInputOutput(
        input_layouts=S1,
        desired_input_layouts=R,
        input_kwarg_layouts={"y": S1},
        desired_input_kwarg_layouts={"y": S1},
        use_local_input=True,
        output_layouts=(R, S1),
        desired_output_layouts=(S1, R),
    )
    module = parallelize_module(Pair(), mesh, style)
    for length in (8, 7, 5, 2):
        x, y = _sequence(length), _sequence(length + 1)
        cut, gathered = module(_chunk(x, mesh), y=_chunk(y, mesh))
        torch.testing.assert_close((cut, gathered), (_chunk(x * 2, mesh), y + 1))
    alone = parallelize_module(
        nn.Identity(), mesh, PrepareModuleOutput(output_layouts=S1, desired_output_layouts=R)
    )
    for length in (4, 6):
        torch.testing.assert_close(alone(_chunk(_sequence(length), mesh)), _sequence(length))


@on_ranks
def test_pairs_and_functions_read_parts_of_any_length() -> None:
    mesh = mesh_of((N,))
    make = lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH))  # noqa: E731
    plain, parallel = seeded(make), seeded(make)
    parallelize_module(parallel, mesh, PairwiseParallel(input_layouts=S1, output_layouts=S1))
    for length in (8, 7, 5):
        whole = _sequence(length)
        torch.testing.assert_close(parallel(_chunk(whole, mesh)), _chunk(plain(whole).detach(), mesh))
        torch.testing.assert_close(make_input_shard_1d(_chunk(whole, mesh), mesh, 1).full_tensor(), whole)


@on_ranks
def test_copied_module_exchanges_lengths_like_a_new_one() -> None:
    mesh = mesh_of((N,))
    parallel = parallelize_module(seeded(Block), mesh, PLAIN_BLOCK)
    parallel(_chunk(_sequence(8), mesh))
    plain, copied = seeded(Block), copy.deepcopy(parallel)
    torch.testing.assert_close(copied(_chunk(_sequence(7), mesh)), _chunk(plain(_sequence(7)).detach(), mesh))


@on_ranks
def test_parts_that_are_not_chunks_are_refused_on_every_rank() -> None:
    mesh = mesh_of((N,))
    norm = parallelize_module(nn.LayerNorm(WIDTH), mesh, SequenceParallel(use_local_output=True))
    message = r"tensor of shape \[2, 8, 8\].*expected parts as torch.chunk splits it into 4 along dim 1: split it with"
    with pytest.raises(LayoutError, match=message):
        norm(_sequence(8).split([3, 1, 3, 1], dim=1)[mesh.get_local_rank()])


def _check_compiled(backend: str) -> None:
    torch._dynamo.reset()
    mesh = mesh_of((2,))
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    first = RowwiseParallel(input_layouts=R, output_layouts=S1)
    norm, last = SequenceParallel(use_local_output=True), ColwiseParallel(input_layouts=S1, output_layouts=R)
    parallel = parallelize_module(copy.deepcopy(net), mesh, {"0": first, "1": norm, "2": last})
    step = compiled(parallel, backend=backend, fullgraph=True)
    torch.testing.assert_close(step(_sequence(8)), net(_sequence(8)))
    with pytest.raises(Exception, match="in a compiled graph that has shards of different lengths"):
        step(_sequence(7))


@needs_213("Dynamo takes no mesh into a graph")
@quiet
def test_uneven_parts_in_a_compiled_graph_are_refused_on_every_rank(request: pytest.FixtureRequest) -> None:
    ranks_for(request, "aot_eager")(_check_compiled, "aot_eager", world_size=2, timeout_s=240.0)
