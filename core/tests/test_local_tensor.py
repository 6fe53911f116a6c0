"""LocalTensor by itself: ops, collectives, numbers and random states per rank, and errors that name ranks."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtbench_core import Shard, distribute_tensor
from dtbench_core.errors import RankDependentError, SimulationError
from dtbench_core.simulate import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    ThreadWorld,
    local_int,
    local_tensor_mode,
    maybe_run_for_local_tensor,
    per_rank,
    rank_map,
    tensor_map,
)

RANKS = range(4)


@pytest.fixture
def mesh(mode: LocalTensorMode) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def held(tensor: torch.Tensor) -> list[list[float]]:
    assert isinstance(tensor, LocalTensor)
    return [tensor.shard(rank).tolist() for rank in tensor.ranks]


def uneven() -> LocalTensor:
    """Rows of rank r: 2, 2, 1 and 0, filled with r + 1."""
    return rank_map(lambda rank: torch.full(((2, 2, 1, 0)[rank], 3), rank + 1.0))


# ---- ops ----


def test_ops_run_on_every_shard(mode: LocalTensorMode) -> None:
    x = torch.arange(3.0) + dist.get_rank()
    assert held(x * 2 - 1) == [[2 * (v + r) - 1 for v in range(3)] for r in RANKS]
    x[1] = 9
    x.mul_(2)
    assert held(x) == [[2.0 * r, 18.0, 2.0 * (2 + r)] for r in RANKS]
    assert held(x.view(3, 1).t()[0]) == held(x)
    first, second = x.split([1, 2])
    assert held(torch.cat([second, first])) == [[18.0, 2.0 * (2 + r), 2.0 * r] for r in RANKS]
    y = torch.zeros(2, 2)
    y.view(-1)[1:3].copy_(torch.ones(2) * dist.get_rank())
    assert held(y) == [[[0.0, r], [r, 0.0]] for r in RANKS]


def test_uneven_shards_show_a_size_per_rank(mode: LocalTensorMode) -> None:
    x = uneven()
    assert str(x.shape) == "torch.Size([{0-1: 2, 2: 1, 3: 0}, 3])"
    assert per_rank(x.shape, RANKS) == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert per_rank(x.numel(), RANKS) == [6, 6, 3, 0]
    assert held(torch.zeros(x.shape[0] + 1).sum(0, keepdim=True)) == [[0.0]] * 4
    assert per_rank(torch.zeros(x.shape[0] + 1).shape[0], RANKS) == [3, 3, 2, 1]
    assert x.is_contiguous() and x.view(-1).dim() == 1
    assert x.shape == uneven().shape


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pow": lambda x: (x * 2 + 1).pow(2).sum(),
    "sum0": lambda x: (x.sum(0) * torch.arange(3.0)).sum(),
    "linear": lambda x: F.linear(x, torch.arange(6.0).view(2, 3), torch.ones(2)).pow(2).sum(),
    "reshape": lambda x: (x.reshape(-1, 1, 3).expand(-1, 2, -1) * 3).sum(),
    "slice": lambda x: (x[:, 1:] * x[:, :1]).sum(),
    "softmax": lambda x: (x.softmax(-1) * torch.arange(3.0)).sum(),
    "layer_norm": lambda x: (F.layer_norm(x, (3,)) * torch.arange(3.0)).sum(),
    "transpose": lambda x: (x.t().contiguous() @ x).sum(),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_autograd_on_uneven_shards(mode: LocalTensorMode, name: str) -> None:
    x = uneven().requires_grad_()
    GRADIENTS[name](x).backward()
    assert isinstance(x.grad, LocalTensor)
    for rank in RANKS:
        with mode.as_rank(rank):
            plain = x.shard(rank).requires_grad_()
            GRADIENTS[name](plain).backward()
            torch.testing.assert_close(x.grad.shard(rank), plain.grad)


def test_plain_tensors_are_the_same_on_every_rank(fake_world: Callable[[int], None]) -> None:
    fake_world(4)
    plain, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    with LocalTensorMode(4):
        assert type(plain + 1) is torch.Tensor
        local = torch.arange(2.0) + dist.get_rank()
        assert held(plain + local) == [[1.0 + r, 2.0 + r] for r in RANKS]
        plain.add_(torch.ones(2))
        with pytest.raises(RankDependentError, match=r"plain float32\[2\] .*ranks 0: .*make it inside"):
            plain.add_(local)
        dist.all_reduce(plain)
        (weight * local).sum().backward()
        assert isinstance(weight.grad, LocalTensor) and held(weight.grad) == held(local)
    assert plain.tolist() == [8.0, 8.0]


def test_running_statistics_are_updated_once(fake_world: Callable[[int], None]) -> None:
    """Batch norm writes to them, and its schema does not say so."""
    fake_world(4)
    norm, twin = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    twin(torch.arange(12.0).view(4, 3))
    with LocalTensorMode(4):
        norm(torch.arange(12.0).view(4, 3))
        assert norm.running_mean.tolist() == twin.running_mean.tolist()
        with pytest.raises(RankDependentError, match="wrote different values to a plain"):
            norm(torch.ones(4, 3) * dist.get_rank())


def test_outside_a_mode(mode: LocalTensorMode) -> None:
    x = uneven()
    mode.__exit__(None, None, None)
    try:
        assert torch.equal((x + 1).shard(2), torch.full((1, 3), 4.0))
        with pytest.raises(SimulationError, match="outside a LocalTensorMode"):
            dist.all_reduce(x)
        with pytest.raises(SimulationError, match="outside a LocalTensorMode"):
            x.uniform_()
    finally:
        mode.__enter__()


# ---- what it shows ----


def test_what_is_printed_copied_and_pickled(mode: LocalTensorMode) -> None:
    x = uneven().requires_grad_()
    assert repr(x).splitlines() == [
        "LocalTensor(float32[{0-1: 2, 2: 1, 3: 0}, 3] on ranks 0-3, requires_grad=True",
        "  0: tensor([[1., 1., 1.],",
        "            [1., 1., 1.]])",
        "  1: tensor([[2., 2., 2.],",
        "            [2., 2., 2.]])",
        "  2: tensor([[3., 3., 3.]])",
        "  3: tensor([], size=(0, 3)))",
    ]
    assert repr(torch.zeros(1)) == "LocalTensor(float32[1] on ranks 0-3\n  0-3: tensor([0.]))"
    twin = copy.deepcopy(x.detach())
    x.detach().zero_()
    assert held(twin)[2] == [[3.0] * 3]
    assert held(pickle.loads(pickle.dumps(twin)))[1] == [[2.0] * 3] * 2


def test_reconcile(mode: LocalTensorMode) -> None:
    same = torch.tensor([1.0, float("nan")])
    assert type(same.reconcile()) is torch.Tensor
    assert torch.tensor([[1, 2]]).tolist() == [[1, 2]] and torch.ones(2).numpy().tolist() == [1.0, 1.0]
    with pytest.raises(RankDependentError, match=r"ranks 0-1: int64\[1\] \[0\]; ranks 2-3: int64\[1\] \[1\]"):
        (torch.zeros(1, dtype=torch.int64) + dist.get_rank() // 2).reconcile()


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: LocalTensor({}), "got no tensor"),
    "dims": (lambda: LocalTensor({0: torch.ones(1), 3: torch.ones(1, 1)}), "{0: '1-dim .* 3: '2-dim"),
    "grad": (lambda: LocalTensor({2: torch.ones(1, requires_grad=True)}), "requires grad for rank 2"),
    "mixed": (
        lambda: LocalTensor({1: torch.ones(1)}) + LocalTensor({0: torch.ones(1)}),
        "ranks 1 together with some of ranks 0",
    ),
    "no ranks": (lambda: LocalTensorMode([]), "expected at least one"),
    "no world": (lambda: LocalTensorMode(2).__enter__(), "without a world, expected one that has them"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes(name: str) -> None:
    with pytest.raises(SimulationError, match=BAD[name][1]):
        BAD[name][0]()


def test_mistakes_with_modes(mode: LocalTensorMode) -> None:
    with pytest.raises(SimulationError, match="inside another"), LocalTensorMode(2):
        pass
    with pytest.raises(SimulationError, match="ranks 0-7 in a world of 4"), LocalTensorMode(8):
        pass
    assert local_tensor_mode() is mode


def test_an_error_on_one_rank_names_it(mode: LocalTensorMode) -> None:
    with pytest.raises(RuntimeError) as raised:
        rank_map(lambda rank: torch.ones(2 + (rank == 2))) + torch.ones(2)
    assert raised.value.__notes__ == [
        "on simulated rank 2: aten.add.Tensor got float32[3] [1.0, 1.0, 1.0], float32[2] [1.0, 1.0]"
    ]


def test_a_dim_that_broadcasts_on_some_ranks_only_is_refused(mode: LocalTensorMode) -> None:
    x = rank_map(lambda rank: torch.ones(1 + rank % 2, 3))
    with pytest.raises(RankDependentError, match="dim -2 would broadcast on rank 0,2"):
        x + torch.ones(2, 3)


# ---- numbers per rank ----


def test_numbers_per_rank() -> None:
    n = local_int({0: 2, 1: 3, 2: 3})
    assert isinstance(n, torch.SymInt) and isinstance(n.node, LocalIntNode)
    for expression, want in {
        "n + 1": [3, 4, 4],
        "1 - n": [-1, -2, -2],
        "n * n": [4, 9, 9],
        "7 // n": [3, 2, 2],
        "n % 2": [0, 1, 1],
        "-n": [-2, -3, -3],
        "torch.sym_max(n, 3)": [3, 3, 3],
        "n / 2": [1.0, 1.5, 1.5],
        "torch.sym_float(n) * 0.5": [1.0, 1.5, 1.5],
        "n == 2": [True, False, False],
    }.items():
        assert per_rank(eval(expression), range(3)) == want, expression
    assert n < 10 and not n > 3 and n != 7 and n - n == 0 and n == n
    assert str(n) == "{0: 2, 1-2: 3}" and local_int({0: 5, 3: 5}) == 5


AMBIGUOUS: dict[str, Callable[[Any], Any]] = {
    "bool": lambda n: bool(n == 2),
    "less": lambda n: 1 if n < 3 else 2,
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_branching_on_a_number_per_rank_is_an_error(name: str) -> None:
    with pytest.raises(RankDependentError, match=r"got \{0: .*, 1: .*differs between the simulated ranks"):
        AMBIGUOUS[name](local_int({0: 2, 1: 3}))


def test_items_per_rank(mode: LocalTensorMode) -> None:
    x = torch.tensor([1.5]) * dist.get_rank()
    assert per_rank(x.item(), RANKS) == [0.0, 1.5, 3.0, 4.5]
    assert torch.tensor(2).item() == 2 and float(torch.ones(1)) == 1.0
    with pytest.raises(RankDependentError):
        bool(x > 2)
    assert torch.allclose(x, x) and not torch.equal(x, x + 1)


# ---- where a rank stands ----


def test_as_one_rank(mode: LocalTensorMode, mesh: DeviceMesh) -> None:
    x = uneven()
    with mode.as_rank(2):
        assert dist.get_rank() == 2 and mesh.get_coordinate() == (1, 0)
        assert mesh.get_local_rank(1) == 0 and dist.get_rank(mesh.get_group(0)) == 1
        assert type(torch.ones(2)) is torch.Tensor and x.shard(2).tolist() == [[3.0] * 3]
        with pytest.raises(SimulationError, match=r"code that runs as rank 2: take its part, x.shard\(2\)"):
            x + 1
        with pytest.raises(SimulationError, match="runs as one rank alone"):
            dist.all_reduce(torch.ones(1))
    assert isinstance(torch.ones(2), LocalTensor)
    with pytest.raises(SimulationError, match="got rank 7, expected one of 0-3"), mode.as_rank(7):
        pass


def test_everything_is_given_back(fake_world: Callable[[int], None]) -> None:
    fake_world(4)
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(ZeroDivisionError), LocalTensorMode(4) as mode, mode.as_rank(1):
        raise ZeroDivisionError
    assert dist.get_rank() == 0 and mesh.get_coordinate() == (0,) and local_tensor_mode() is None
    assert type(torch.ones(1)) is torch.Tensor


# ---- functions per rank ----


def test_rank_map_joins_results(mode: LocalTensorMode) -> None:
    tensor, number, same, nested = rank_map(
        lambda rank: (torch.full((1,), rank), rank * 2, "same", {"list": [rank, torch.zeros(rank)]})
    )
    assert held(tensor) == [[0], [1], [2], [3]]
    assert per_rank(number, RANKS) == [0, 2, 4, 6] and same == "same"
    assert per_rank(nested["list"][1].shape, RANKS) == [(0,), (1,), (2,), (3,)]
    with pytest.raises(RankDependentError, match=r"cannot be joined, \{0: 'a', 1-3: 'b'\}"):
        rank_map(lambda rank: "b" if rank else "a")
    with pytest.raises(RankDependentError, match="2 items"):
        rank_map(lambda rank: [0] * (rank + 1))


def test_rank_map_runs_collectives(mode: LocalTensorMode, mesh: DeviceMesh) -> None:
    def both(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = torch.ones(2) * rank
        dist.all_reduce(mine, group=mesh.get_group("inner"))
        parts = [torch.empty(2) for _ in RANKS] if rank == 1 else None
        dist.gather(mine, parts, dst=1)
        return mine, torch.cat(parts) if parts else torch.zeros(0)

    summed, gathered = rank_map(both)
    assert held(summed) == [[1.0] * 2, [1.0] * 2, [5.0] * 2, [5.0] * 2]
    assert held(gathered) == [[], [1.0] * 4 + [5.0] * 4, [], []]


def test_tensor_map(mode: LocalTensorMode) -> None:
    x = uneven()
    assert held(tensor_map(x, lambda rank, shard: shard[:, 0] + rank)) == [[1.0, 1.0], [3.0, 3.0], [5.0], []]
    some = tensor_map(x, lambda rank, shard: shard if rank % 2 else None)
    assert isinstance(some, LocalTensor) and some.ranks == (1, 3)
    assert held(some * 2) == [[[4.0] * 3] * 2, []]
    with pytest.raises(SimulationError, match="ranks 1,3 together with some of ranks 0-3"):
        some + x


@maybe_run_for_local_tensor
def _mine(full: torch.Tensor, rank: int) -> torch.Tensor:
    return full[: rank + 1] if rank % 2 else full[rank:]


def test_decorated_functions_run_per_rank(mode: LocalTensorMode) -> None:
    assert _mine(torch.arange(3.0), 1).tolist() == [0.0, 1.0]
    assert held(_mine(torch.arange(4), dist.get_rank())) == [[0, 1, 2, 3], [0, 1], [2, 3], [0, 1, 2, 3]]
    with pytest.raises(SimulationError, match="requires grad for a function run per rank"):
        _mine(torch.ones(4, requires_grad=True), dist.get_rank())


def test_a_function_with_a_collective_runs_once(mode: LocalTensorMode) -> None:
    @maybe_run_for_local_tensor
    def add_then_reduce(x: torch.Tensor, rank: int) -> torch.Tensor:
        x.add_(1)
        total = x.clone()
        dist.all_reduce(total)
        return total

    x = torch.ones(1) * dist.get_rank()
    assert add_then_reduce(x, dist.get_rank()).tolist() == [10.0]
    assert held(x) == [[1.0], [2.0], [3.0], [4.0]]


def _raise() -> None:
    raise ValueError("bad luck")


@pytest.mark.parametrize(
    ("of_rank_2", "message"),
    [
        (
            lambda: None,
            r"hang: rank 2 returned while ranks 0, 1, 3 waited in all_reduce\(sum, float32\[1\]\)",
        ),
        (
            lambda: dist.all_reduce(torch.ones(3)),
            r"mismatched collectives: rank 2 called all_reduce\(sum, float32\[3\]\)",
        ),
    ],
)
def test_ranks_that_diverge_are_named(mode: LocalTensorMode, of_rank_2: Any, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        rank_map(lambda rank: of_rank_2() if rank == 2 else dist.all_reduce(torch.ones(1)))
    with pytest.raises(ValueError, match="bad luck"):
        rank_map(lambda rank: _raise())


# ---- random numbers ----


def test_ranks_seeded_apart_draw_apart(mode: LocalTensorMode) -> None:
    def alone(seed: int) -> list[float]:
        return torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()

    with mode.disable():
        want = [alone(seed) for seed in RANKS]
        shared = alone(5)
    torch.manual_seed(dist.get_rank())
    assert held(torch.cat([torch.rand(2), torch.rand(2)])) == want
    rank_map(lambda rank: torch.manual_seed(rank).initial_seed())
    kept = torch.get_rng_state()
    assert held(torch.rand(4)) == want
    torch.manual_seed(0)  # what rank 0 had: all must take it
    assert held(torch.rand(4)) == [want[0]] * 4
    torch.set_rng_state(kept)
    assert held(torch.rand(4)) == want
    generator = torch.Generator().manual_seed(5)
    assert held(torch.rand(4, generator=generator)) == [shared] * 4
    assert held(rank_map(lambda rank: torch.rand(4, generator=generator.manual_seed(rank)))) == want


def test_ranks_that_draw_different_amounts_go_apart(mode: LocalTensorMode) -> None:
    with mode.disable():
        torch.manual_seed(0)
        sequence = torch.rand(4).tolist()
    torch.manual_seed(0)
    drawn = rank_map(lambda rank: torch.rand(rank))
    after = torch.rand(1)
    assert held(drawn) == [sequence[:rank] for rank in RANKS]
    assert held(after) == [[sequence[rank]] for rank in RANKS]


def test_a_collective_does_not_draw_twice(mode: LocalTensorMode) -> None:
    def noisy(rank: int) -> torch.Tensor:
        first = torch.rand(1)
        dist.all_reduce(first)
        return torch.cat([first, torch.rand(1)])

    with mode.disable():
        torch.manual_seed(0)
        a, b, c = torch.rand(3).unbind()
    torch.manual_seed(0)
    got = rank_map(noisy)
    assert held(got) == [[float(a + a + a + a), float(b)]] * 4
    assert held(torch.rand(1)) == [[float(c)]] * 4


def test_groups_of_another_worlds_mesh_are_not_taken_for_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both worlds count their groups from 0, so that a mesh of thread ranks has a group of the same name."""
    with ThreadWorld(4) as world:
        others = world.run(lambda: [DeviceMesh("cpu", [0, 1]) for _ in range(6)])
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        try:
            with LocalTensorMode(4):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
                objects = [*others[0], *gc.get_objects()]
                monkeypatch.setattr(gc, "get_objects", lambda: objects)
                x = distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)], src_data_rank=None)
                whole = x.full_tensor()
                assert torch.equal(per_rank(whole, range(4))[3], torch.arange(4.0))
        finally:
            dist.destroy_process_group()
