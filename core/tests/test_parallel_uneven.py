"""Plain parts of sequences between modules: lengths that ranks do not divide, and what even lengths cost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.tests.compiling import compiled, quiet, ranks_for
from core.tests.gloo_world import mesh_of, on_gloo_ranks, on_ranks
from core.tests.local_world import ThreadWorlds
from core.tests.parallel_models import WIDTH, Block, assert_same_parameters, seeded
from core.tests.torch_version import needs_213
from dtbench_core import DTensor, Replicate, Shard, distribute_tensor
from dtbench_core.comm import count_collectives
from dtbench_core.errors import LayoutError
from dtbench_core.parallel import (
    ColwiseParallel,
    PairwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from dtbench_core.parallel.convert import make_input_shard_1d

N, VOCAB = 4, 24
R, S1 = Replicate(), Shard(1)
ALONG: dict[str, Any] = {"input_layouts": S1}
BLOCK: dict[str, Any] = {
    "norm1": SequenceParallel(use_local_output=True),
    "norm2": SequenceParallel(use_local_output=True),
    "attention": PrepareModuleInput(input_layouts=S1, desired_input_layouts=R, use_local_output=True),
    **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
    "attention.wo": RowwiseParallel(output_layouts=S1),
    "mlp.up": ColwiseParallel(input_layouts=S1),
    "mlp.down": RowwiseParallel(output_layouts=S1),
}


def _data(length: int) -> Tensor:
    return torch.randn((2, length, WIDTH), generator=torch.Generator().manual_seed(length))


def _part(whole: Tensor, mesh: Any, dim: int = 1) -> Tensor:
    return distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None).to_local().clone()


class Net(nn.Module):
    """Blocks between an embedding and a head, all of whose modules hand plain parts to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, sequence] -> [batch, sequence, VOCAB]
        return self.head(self.blocks(self.embed(tokens)))


NET = {
    "embed": RowwiseParallel(input_layouts=R, output_layouts=S1),
    **{f"blocks.{i}.{name}": style for i in range(2) for name, style in BLOCK.items()},
    "head": ColwiseParallel(input_layouts=S1, output_layouts=R),
}


def _same_step(
    plain: nn.Module, parallel: nn.Module, whole: Tensor, part: Tensor, mesh: Any, gathered: bool
) -> None:
    """One forward and backward pass, whose output is whole on every rank, or this rank's part."""
    for model in (plain, parallel):
        model.zero_grad()
    expected = plain(whole)
    got = parallel(part)
    assert not isinstance(got, DTensor)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    if gathered:
        torch.testing.assert_close(got, expected)
        (got * weights).sum().backward()
    else:
        torch.testing.assert_close(got, _part(expected.detach(), mesh))
        (got * _part(weights, mesh)).sum().backward()
    (expected * weights).sum().backward()
    assert_same_parameters(parallel, plain)


@pytest.mark.parametrize("lengths", [(7, 5, 8, 6), (8, 7, 8, 1)])
@on_gloo_ranks
def test_parts_of_an_embedded_sequence_of_any_length(lengths: tuple[int, ...]) -> None:
    mesh = mesh_of((N,))
    plain, parallel = seeded(Net), seeded(Net)
    parallelize_module(parallel, mesh, NET)
    for length in lengths:
        tokens = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
        _same_step(plain, parallel, tokens, tokens, mesh, gathered=True)


@pytest.mark.parametrize("lengths", [(7, 5, 8, 6), (8, 7, 8, 5)])
@on_ranks
def test_parts_that_the_program_cuts_itself(lengths: tuple[int, ...]) -> None:
    mesh = mesh_of((N,))
    plain, parallel = seeded(Block), seeded(Block)
    parallelize_module(parallel, mesh, BLOCK)
    for length in lengths:
        whole = _data(length)
        _same_step(plain, parallel, whole, _part(whole, mesh), mesh, gathered=False)


def _asked(model: nn.Module, *inputs: Tensor) -> int:
    """The collectives of a forward pass that are not there when DTensors are between the modules."""
    with torch.no_grad(), count_collectives() as count:
        model(*inputs)
    return sum(count.calls.values())


@on_ranks
def test_even_lengths_are_asked_for_once() -> None:
    mesh, tokens = mesh_of((N,)), torch.arange(16).view(2, 8) % VOCAB
    parallel = parallelize_module(seeded(Net), mesh, NET)
    first, again, third = (_asked(parallel, tokens) for _ in range(3))
    inputs_read = 4 * 2 + 1
    assert first - again == inputs_read and again == third
    # One gather and one scatter of each half of a block, of the embedding's terms and of the head.
    assert again == 2 * 2 * 2 + 1 + 2
    uneven = _asked(parallel, tokens[:, :7])
    assert uneven == again + inputs_read


@on_ranks
def test_parts_from_elsewhere_are_asked_for_each_time_and_those_behind_them_once() -> None:
    mesh = mesh_of((N,))
    parallel = parallelize_module(seeded(Block), mesh, BLOCK)
    part = _part(_data(8), mesh)
    first, again, third = (_asked(parallel, part) for _ in range(3))
    assert first - again == 3 and again == third == 4 + 1


class Cross(nn.Module):
    """A step of a decoder that reads the parts of an encoder's output each time."""

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
    norm, gather = (
        SequenceParallel(use_local_output=True),
        ColwiseParallel(input_layouts=S1, output_layouts=R),
    )
    parallelize_module(parallel, mesh, {"memory": norm, "query": norm, "keys": gather, "queries": gather})
    wholes = [
        (_data(memory), _data(query)),
        (_data(memory), _data(8)),
        (_data(8), _data(8)),
        (_data(6), _data(8)),
    ]
    for pair in wholes:
        with torch.no_grad():
            parts = [_part(whole, mesh) for whole in pair]
            torch.testing.assert_close(parallel(*parts), plain(*pair))
            kept, expected = parallel.memory(parts[0]), plain.memory(pair[0])
            for length in (8, 4, 8):
                step = _data(length)
                torch.testing.assert_close(
                    parallel.decode(kept, _part(step, mesh)), plain.decode(expected, step)
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
        x, y = _data(length), _data(length + 1)
        cut, gathered = module(_part(x, mesh), y=_part(y, mesh))
        torch.testing.assert_close(cut, _part(x * 2, mesh))
        torch.testing.assert_close(gathered, y + 1)
    whole = PrepareModuleOutput(output_layouts=S1, desired_output_layouts=R)
    alone = parallelize_module(nn.Identity(), mesh, whole)
    for length in (4, 6):
        torch.testing.assert_close(alone(_part(_data(length), mesh)), _data(length))


@on_ranks
def test_pairs_and_functions_read_parts_of_any_length() -> None:
    mesh = mesh_of((N,))
    make = lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH))  # noqa: E731
    plain, parallel = seeded(make), seeded(make)
    parallelize_module(parallel, mesh, PairwiseParallel(input_layouts=S1, output_layouts=S1))
    for length in (8, 7, 5):
        whole = _data(length)
        torch.testing.assert_close(parallel(_part(whole, mesh)), _part(plain(whole).detach(), mesh))
        read = make_input_shard_1d(_part(whole, mesh), mesh, 1)
        assert read.shape == whole.shape
        torch.testing.assert_close(read.full_tensor(), whole)


@on_ranks
def test_copied_module_reads_as_a_new_one() -> None:
    mesh = mesh_of((N,))
    parallel = parallelize_module(seeded(Block), mesh, BLOCK)
    parallel(_part(_data(8), mesh))
    plain, copied = seeded(Block), copy.deepcopy(parallel)
    torch.testing.assert_close(copied(_part(_data(7), mesh)), _part(plain(_data(7)).detach(), mesh))


def _parts_cut_otherwise() -> None:
    mesh = mesh_of((N,))
    norm = parallelize_module(nn.LayerNorm(WIDTH), mesh, SequenceParallel(use_local_output=True))
    norm(_data(8).split([3, 1, 3, 1], dim=1)[mesh.get_local_rank()])


def test_parts_that_are_not_chunks_are_refused_on_every_rank(ranks: ThreadWorlds) -> None:
    message = r"tensor of shape \[2, 8, 8\].*expected parts as torch.chunk splits it into 4 along dim 1: split it with"
    ranks.refuse(_parts_cut_otherwise, message=message, error=LayoutError)


def _compiled(backend: str) -> str:
    torch._dynamo.reset()
    mesh = mesh_of((2,))
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    first = RowwiseParallel(input_layouts=R, output_layouts=S1)
    norm, last = SequenceParallel(use_local_output=True), ColwiseParallel(input_layouts=S1, output_layouts=R)
    parallel = parallelize_module(copy.deepcopy(net), mesh, {"0": first, "1": norm, "2": last})
    step = compiled(parallel, backend=backend, fullgraph=True)
    torch.testing.assert_close(step(_data(8)), net(_data(8)))
    try:
        step(_data(7))
    except Exception as error:
        return str(error)
    return ""


@needs_213("Dynamo takes no mesh into a graph")
@quiet
def test_uneven_parts_in_a_compiled_graph_are_refused_on_every_rank(request: pytest.FixtureRequest) -> None:
    for message in ranks_for(request, "aot_eager")(_compiled, "aot_eager", world_size=2, timeout_s=240.0):
        assert "that a compiled graph made of shards of different lengths" in message
