"""Random ops on DTensors: synchronized generators, seeds, given generators, numbers that differ between ranks."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from core.tests.gloo_world import mesh_of, on_gloo_ranks, on_ranks, on_worlds
from core.tests.local_world import ThreadWorlds
from dtbench_core import ArgumentError, DTensor, Partial, Replicate, Shard, comm, distribute_tensor, rand
from dtbench_core.layout import in_step, random
from dtbench_core.parallel import ColwiseParallel, RowwiseParallel, parallelize_module, tensor_parallel_rng

S0, R, S1 = Shard(0), Replicate(), Shard(1)


def _drawn_in_a_graph() -> list[torch.Tensor]:
    """Returns the shards that graphs draw on differently seeded ranks."""
    torch._dynamo.reset()
    torch.manual_seed(dist.get_rank())
    x = distribute_tensor(torch.ones(64), mesh_of((2, 2)), [S0, R], src_data_rank=None)
    draws = torch.rand_like, F.dropout, lambda t: torch.empty_like(t).normal_()
    compiled = [torch.compile(draw, backend="aot_eager", fullgraph=True) for draw in draws]
    return [draw(x).to_local() for draw in compiled for _ in range(2)]


def test_replicas_draw_the_same_in_graphs(ranks: ThreadWorlds) -> None:
    drawn = ranks(_drawn_in_a_graph)
    torch.testing.assert_close(drawn, [drawn[0], drawn[0], drawn[2], drawn[2]], rtol=0, atol=0)
    for each in drawn[::2]:
        assert all(len(one.unique()) > 1 for one in each)
        assert not any(torch.equal(one, again) for one, again in zip(each[::2], each[1::2], strict=True))


@pytest.mark.parametrize("placements", [[R], [S0], [Shard(1)]], ids=str)
@on_ranks
def test_generator_of_the_caller(placements: list[Any]) -> None:
    x = distribute_tensor(torch.zeros(5, 3), mesh_of((4,)), placements, src_data_rank=None)
    mine, plain = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(3):
        expected = torch.zeros(5, 3).normal_(generator=plain)
        torch.testing.assert_close(x.normal_(generator=mine).full_tensor(), expected)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("seed", (0, -1, 2**63, 2**64 - 1))
@on_ranks
def test_manual_seed_takes_every_64_bit_seed(seed: Any) -> None:
    mesh = mesh_of((4,))
    x = distribute_tensor(torch.ones(5), mesh, [S0], src_data_rank=None)
    random.manual_seed(seed, mesh)
    expected = torch.rand(5, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(torch.rand_like(x).full_tensor(), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([1, 1, 2, 1], "pass the same seed on every rank"),
        ([0, 2**32, 0, 0], "pass the same seed on every rank"),
        (["1"] * 4, "expected an int"),
    ],
    ids=str,
)
@on_ranks
def test_different_seeds_are_refused(seeds: list[Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        random.manual_seed(seeds[dist.get_rank()], mesh_of((4,)))


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": F.dropout,
    "dropout in place": lambda x: F.dropout(x.clone(), inplace=True),
    "dropout of a view": lambda x: F.dropout(x[:, 1:]),
    "dropout of every other column": lambda x: F.dropout(x[:, ::2]),
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: x.bernoulli(0.3),
    "normal_": lambda x: x.clone().normal_(),
    "random_": lambda x: x.clone().random_(100),
}


@on_ranks
def test_strided_tensors_draw_as_on_one_device() -> None:
    mesh = mesh_of((4,))
    full = torch.arange(48.0).view(6, 8).t() - 20
    for name, draw in STRIDED.items():
        torch.manual_seed(5)
        expected, after = draw(full), torch.rand(1)
        for placed in (Replicate(), Shard(0), Shard(1), Partial()):
            x = distribute_tensor(full, mesh, [placed], src_data_rank=None)
            random.manual_seed(5, mesh)
            results = draw(x).full_tensor(), torch.rand(1)
            assert all(map(torch.equal, results, (expected, after))), f"{name} {placed}"


@pytest.mark.parametrize(
    ("shape", "placements"), (((4,), [S0]), ((4,), [Shard(1)]), ((2, 2), [S0, R]), ((2, 2), [R, R]))
)
@on_ranks
def test_dropout_is_differentiated_as_on_one_device(shape: Any, placements: Any) -> None:
    """Compares values, gradient and second gradient."""
    values = torch.arange(1.0, 41.0).view(5, 8).sin()
    mesh = mesh_of(shape)
    results = []
    for x in (values.clone(), distribute_tensor(values, mesh, placements, src_data_rank=None)):
        x.requires_grad_()
        random.manual_seed(7, mesh)
        out = F.dropout(x, 0.3)
        (first,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (out, first, second)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


# ---- ranks that draw or seed by themselves ----


def _replicas(placements: list[Any], shape: tuple[int, ...] = (2, 2)) -> DTensor:
    """Returns a tensor after a first draw, in which the ranks of the mesh have compared their generators."""
    mesh = mesh_of(shape)
    random.manual_seed(11, mesh)
    x = distribute_tensor(torch.ones(8, 3), mesh, placements, src_data_rank=None)
    torch.rand_like(x)
    return x


@pytest.mark.parametrize("placements", [[R, R], [S0, R], [R, S0], [S0, S0], [Shard(1), S0]], ids=str)
@on_gloo_ranks
def test_synchronized_ranks_draw_as_one_device_without_communication(placements: list[Any]) -> None:
    x = _replicas(placements)
    with comm.count_collectives() as sent:
        got = [F.dropout(x), torch.rand_like(x), x.clone().normal_()]
        moved = x.redistribute(x.device_mesh, [S0, S0])
        sent.calls.clear()
        torch.rand_like(moved)
        torch.rand_like(x)
    assert not sent.calls
    torch.manual_seed(11)
    plain = torch.ones(8, 3)
    torch.rand(8, 3)
    expected = [F.dropout(plain), torch.rand(8, 3), plain.normal_()]
    torch.testing.assert_close([one.full_tensor() for one in got], expected)


@pytest.mark.parametrize("placements", [[R, R], [S0, R], [R, S0]], ids=str)
@pytest.mark.parametrize("movers", [[0], [3], [0, 1], [1, 2, 3]], ids=str)
@pytest.mark.parametrize("way", ["draw", "seed"])
@on_gloo_ranks
def test_ranks_that_draw_alone_are_resynchronized(placements: list[Any], movers: list[int], way: str) -> None:
    x = _replicas(placements)
    moves = dist.get_rank() in movers
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(in_step, "PATIENCE_S", 0.2)
        for _ in range(2):
            if moves:
                torch.rand(5) if way == "draw" else torch.manual_seed(dist.get_rank())
            got = torch.rand_like(x).full_tensor()
    torch.manual_seed(11)
    draws = [torch.rand(8, 3) for _ in range(3)]
    torch.testing.assert_close(got, draws[2], rtol=0, atol=0)
    assert sum("its generator was reset to" in str(one.message) for one in warned) <= moves


def _moved_differently(placements: list[Any]) -> list[torch.Tensor]:
    x = _replicas(placements)
    torch.manual_seed(40 + dist.get_rank())
    return [torch.rand_like(x).to_local() for _ in range(2)]


@pytest.mark.parametrize(
    ("placements", "leaders", "parts"),
    [([R, R], [0] * 4, [(0, 1)] * 4), ([S0, R], [0, 0, 2, 2], "0011"), ([R, S0], [0, 1, 0, 1], "0101")],
)
def test_differently_seeded_ranks_follow_the_first(
    ranks: ThreadWorlds, placements: list[Any], leaders: list[int], parts: Any
) -> None:
    """`parts`: the halves of one device's draws that each rank has; both halves if replicated."""
    for drawn, leader, part in zip(ranks(_moved_differently, placements), leaders, parts, strict=True):
        torch.manual_seed(40 + leader)
        for got in drawn:
            halves = torch.rand(8, 3).chunk(2)
            torch.testing.assert_close(got, torch.cat([halves[int(i)] for i in part]))


def _mixed_draws(seeds: list[int]) -> list[list[torch.Tensor]]:
    """Draws on two meshes of the same ranks and on a sub-mesh, after each rank has seeded its generator."""
    grid, line = mesh_of((2, 2), ("dp", "tp")), mesh_of((4,))
    random.manual_seed(11, grid)
    drawn = []
    for mesh, placements in [
        *((grid, p) for p in ([R, R], [S0, S0], [R, S0], [S0, R], [R, R])),
        (line, [R]),
        (line, [S0]),
        (grid["tp"], [R]),
        (grid, [S0, R]),
        (grid, [R, S0]),
        (line, [R]),
    ]:
        x = distribute_tensor(torch.ones(8, 3), mesh, placements, src_data_rank=None)
        if seeds:
            torch.manual_seed(seeds[dist.get_rank()] + len(drawn))
        drawn.append(
            torch.rand_like(x).to_local()
            if S0 not in placements or seeds
            else torch.rand_like(x).full_tensor()
        )
    return drawn


def test_meshes_that_share_a_generator(ranks: ThreadWorlds) -> None:
    torch.manual_seed(11)
    expected = [torch.rand(8, 3) for _ in range(11)]
    for drawn in ranks(_mixed_draws, []):
        torch.testing.assert_close(drawn, expected)


@pytest.mark.parametrize("seeds", [[1, 2, 3, 4], [1, 1, 2, 2], [1, 2, 1, 2]], ids=str)
def test_replicas_of_several_meshes_stay_equal(ranks: ThreadWorlds, seeds: list[int]) -> None:
    drawn = ranks(_mixed_draws, seeds)
    everybody, rows, columns = ((0, 1), (0, 2), (0, 3)), ((0, 1), (2, 3)), ((0, 2), (1, 3))
    same = {
        **dict.fromkeys((0, 4, 5, 10), everybody),
        **dict.fromkeys((3, 7, 8), rows),
        **dict.fromkeys((2, 9), columns),
    }
    for draw, pairs in same.items():
        for one, other in pairs:
            assert torch.equal(drawn[one][draw], drawn[other][draw]), (draw, one, other)


@on_ranks
def test_checkpoint_repeats_its_draws() -> None:
    x = _replicas([S0, R]).requires_grad_()
    out = torch.utils.checkpoint.checkpoint(lambda t: F.dropout(t) + F.dropout(t), x, use_reentrant=False)
    out.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), out.full_tensor())


@on_gloo_ranks
def test_captured_draw_reads_no_generator_and_sends_nothing() -> None:
    """While a CUDA graph is captured, reading the state of a generator is an error."""
    x = _replicas([R, R])
    info = x._spec.info
    with pytest.MonkeyPatch.context() as patch, comm.count_collectives() as sent:
        patch.setattr(info, "device_type", "cuda")
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(in_step, "generators", lambda _: pytest.fail("the generator was asked"))
        assert in_step.draw_in_step(info, x._spec.replica_dims, lambda: 5) == 5
    assert not sent.calls
    with comm.count_collectives() as sent:
        torch.rand_like(x)
        torch.rand_like(x)
    assert sent.calls == {"all_reduce": 2}  # along both mesh dims, once: nobody knows what a replay draws


# ---- random numbers that differ between ranks ----


def _drawn_by(seed: int, *shape: int) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def _local_tensors_of_all_ranks(local: torch.Tensor, mesh: Any) -> list[torch.Tensor]:
    """Returns the local tensor of each rank of a 1-D mesh."""
    return list(DTensor.from_local(local.contiguous(), mesh, [S0]).full_tensor().chunk(mesh.size()))


@contextmanager
def _different_draws(mesh: Any) -> Iterator[Any]:
    """Lets the ranks of a mesh draw different numbers, from the seed 1234; yields the switch."""
    rng = tensor_parallel_rng(mesh)
    rng.manual_seed(1234)
    rng.enabled = True
    try:
        yield rng
    finally:
        rng.enabled = False


@on_worlds
def test_tensor_parallel_rng_is_off_until_enabled() -> None:
    mesh = mesh_of((4,), ("tp",))
    module = parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())
    rng = tensor_parallel_rng(mesh)
    assert rng is tensor_parallel_rng(mesh) and (rng.enabled, rng.base_seed) == (False, 1234)
    # Off: what one device draws, DTensor or plain.
    random.manual_seed(5, mesh)
    whole = rand(8, 3, device_mesh=mesh, placements=[S0]).full_tensor()
    with rng.region():
        plain = torch.rand(2)
    one = torch.Generator().manual_seed(5)
    torch.testing.assert_close(whole, torch.rand(8, 3, generator=one))
    torch.testing.assert_close(plain, torch.rand(2, generator=one))

    with _different_draws(mesh):
        before = torch.get_rng_state()
        sharded = rand(8, 3, device_mesh=mesh, placements=[S0])
        replicated = rand(5, device_mesh=mesh, placements=[R])
        again = torch.empty_like(sharded).uniform_()
        for rank, (first, second) in enumerate(
            zip(*(t.full_tensor().chunk(4) for t in (sharded, again)), strict=True)
        ):
            drawn = torch.Generator().manual_seed(1234 + 2718 + rank)
            torch.testing.assert_close(first, torch.rand(2, 3, generator=drawn))
            torch.testing.assert_close(second, torch.rand(2, 3, generator=drawn))
        torch.testing.assert_close(replicated.full_tensor(), _drawn_by(1234, 5))
        rng.manual_seed(77)
        torch.testing.assert_close(rand(5, device_mesh=mesh).full_tensor(), _drawn_by(77, 5))
        # The caller's generator goes first, and the default one is left alone.
        own = sharded.normal_(generator=torch.Generator().manual_seed(9))
        torch.testing.assert_close(
            own.full_tensor(), torch.zeros(8, 3).normal_(generator=torch.Generator().manual_seed(9))
        )
        assert torch.equal(before, torch.get_rng_state())
        # A module's weights: another part on every rank, replicas alike.
        nn.init.uniform_(module.weight)
        parts = module.weight.full_tensor().chunk(4)
        assert all(not torch.equal(parts[0], part) for part in parts[1:])
        bias = parallelize_module(nn.Linear(8, 8), mesh, RowwiseParallel()).bias
        nn.init.uniform_(bias)
        assert all(
            torch.equal(bias.to_local(), one) for one in _local_tensors_of_all_ranks(bias.to_local(), mesh)
        )
    assert not random.regions.get() and not rng.enabled


@on_worlds
def test_regions_of_plain_tensors_draw_differently_on_every_rank() -> None:
    """After a region, the ranks draw the same numbers again."""
    mesh = mesh_of((4,), ("tp",))
    with _different_draws(mesh) as rng:
        torch.manual_seed(3)
        with rng.region():
            first = F.dropout(torch.ones(1, 64))
            with rng.region([R]):
                same_on_all = F.dropout(torch.ones(1, 64))
        outside = F.dropout(torch.ones(1, 64))
        with rng.region():
            second = F.dropout(torch.ones(1, 64))
        masks = [*_local_tensors_of_all_ranks(first, mesh), *_local_tensors_of_all_ranks(second, mesh)]
        assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 8
        for same in (same_on_all, outside):
            assert (
                len({tuple(mask.flatten().tolist()) for mask in _local_tensors_of_all_ranks(same, mesh)}) == 1
            )
        torch.manual_seed(3)
        torch.testing.assert_close(outside, F.dropout(torch.ones(1, 64)))
        # DTensors have streams of their own: the plain tensors' draws are not drawn again.
        sharded = F.dropout(distribute_tensor(torch.ones(4, 64), mesh, [S0], src_data_rank=None))
        assert not any(torch.equal(row, mask) for row in sharded.full_tensor().split(1) for mask in masks)


@on_worlds
def test_each_shard_of_a_2d_mesh_is_drawn_once() -> None:
    """For any placements, also with uneven and empty shards."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    with _different_draws(mesh):
        drawn = []
        for placements in ([R, R], [S0, R], [R, S0], [S0, S0], [S0, S1], [S1, S0]):
            whole = rand(4, 4, device_mesh=mesh, placements=placements).full_tensor()
            assert len(set(whole.flatten().tolist())) == 16
            drawn += whole.flatten().tolist()
        # [S0, S0], [S0, S1] and [S1, S0] go on with the streams of the four parts; nothing repeats.
        assert len(set(drawn)) == len(drawn)
        uneven = rand(3, 5, device_mesh=mesh, placements=[S0, S0])  # the last rank has no row
        assert len(set(uneven.full_tensor().flatten().tolist())) == 15
