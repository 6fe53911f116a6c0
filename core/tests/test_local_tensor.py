"""LocalTensor: ops, collectives, numbers and random states per rank, errors that name ranks, DTensors."""

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtbench_core import (
    DTensor,
    FallbackWarning,
    Partial,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    fallbacks,
    rand,
    torch_compat,
    zeros,
)
from dtbench_core.dispatch.fallback import clear_fallbacks
from dtbench_core.errors import RankDependentError, SimulationError
from dtbench_core.simulate import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    ThreadWorld,
    declare_group,
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


@pytest.fixture
def line(mode: LocalTensorMode) -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


def held(tensor: torch.Tensor) -> list[list[float]]:
    assert isinstance(tensor, LocalTensor)
    return [tensor.shard(rank).tolist() for rank in tensor.ranks]


def uneven() -> LocalTensor:
    """Returns a LocalTensor with 2, 2, 1 and 0 rows on ranks 0 to 3, filled with rank + 1."""
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
    assert per_rank((x.shape, x.numel()), RANKS) == [((2, 3), 6), ((2, 3), 6), ((1, 3), 3), ((0, 3), 0)]
    assert held(torch.zeros(x.shape[0] + 1)) == [[0.0] * 3, [0.0] * 3, [0.0] * 2, [0.0]]
    assert x.is_contiguous() and x.view(-1).dim() == 1 and x.shape == uneven().shape


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: (x * 2 + 1).pow(2).sum(), id="pow"),
        pytest.param(lambda x: (x.sum(0) * torch.arange(3.0)).sum(), id="sum0"),
        pytest.param(
            lambda x: F.linear(x, torch.arange(6.0).view(2, 3), torch.ones(2)).pow(2).sum(), id="linear"
        ),
        pytest.param(lambda x: (x.reshape(-1, 1, 3).expand(-1, 2, -1) * 3).sum(), id="reshape"),
        pytest.param(lambda x: (x[:, 1:] * x[:, :1]).sum(), id="slice"),
        pytest.param(lambda x: (x.softmax(-1) * torch.arange(3.0)).sum(), id="softmax"),
        pytest.param(lambda x: (F.layer_norm(x, (3,)) * torch.arange(3.0)).sum(), id="layer_norm"),
        pytest.param(lambda x: (x.t().contiguous() @ x).sum(), id="transpose"),
    ],
)
def test_autograd_on_uneven_shards(mode: LocalTensorMode, function: Any) -> None:
    x = uneven().requires_grad_()
    function(x).backward()
    assert isinstance(x.grad, LocalTensor)
    for rank in RANKS:
        with mode.as_rank(rank):
            plain = x.shard(rank).requires_grad_()
            function(plain).backward()
            torch.testing.assert_close(x.grad.shard(rank), plain.grad)


def test_plain_tensors_are_the_same_on_every_rank(world_of_4: None) -> None:
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


def test_running_statistics_are_updated_once(world_of_4: None) -> None:
    """Batch norm writes to them, although its schema does not say so."""
    norm, twin = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    twin(torch.arange(12.0).view(4, 3))
    with LocalTensorMode(4):
        norm(torch.arange(12.0).view(4, 3))
        assert norm.running_mean.tolist() == twin.running_mean.tolist()
        with pytest.raises(RankDependentError, match="wrote different values to a plain"):
            norm(torch.ones(4, 3) * dist.get_rank())


def test_local_tensor_outside_a_mode(world_of_4: None) -> None:
    with LocalTensorMode(4):
        x = uneven()
    assert torch.equal((x + 1).shard(2), torch.full((1, 3), 4.0))
    for call in (dist.all_reduce, torch.Tensor.uniform_):
        with pytest.raises(SimulationError, match="outside a LocalTensorMode"):
            call(x)


# ---- what it shows ----


def test_repr_copy_and_pickle_of_a_local_tensor(mode: LocalTensorMode) -> None:
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


def test_reconcile_returns_the_value_of_all_ranks(mode: LocalTensorMode) -> None:
    assert type(torch.tensor([1.0, float("nan")]).reconcile()) is torch.Tensor
    assert torch.tensor([[1, 2]]).tolist() == [[1, 2]] and torch.ones(2).numpy().tolist() == [1.0, 1.0]
    with pytest.raises(RankDependentError, match=r"ranks 0-1: int64\[1\] \[0\]; ranks 2-3: int64\[1\] \[1\]"):
        (torch.zeros(1, dtype=torch.int64) + dist.get_rank() // 2).reconcile()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LocalTensor({}), "got no tensor"),
        (lambda: LocalTensor({0: torch.ones(1), 3: torch.ones(1, 1)}), "{0: '1-dim .* 3: '2-dim"),
        (lambda: LocalTensor({2: torch.ones(1, requires_grad=True)}), "requires grad for rank 2"),
        (
            lambda: LocalTensor({1: torch.ones(1)}) + LocalTensor({0: torch.ones(1), 1: torch.ones(1)}),
            "ranks 1 together with some of ranks 0-1",
        ),
        (lambda: LocalTensorMode([]), "expected at least one"),
        (lambda: LocalTensorMode(2).__enter__(), "without a world, expected one that has them"),
    ],
)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        call()


@pytest.mark.parametrize(("size", "message"), [(2, "inside another"), (8, "ranks 0-7 in a world of 4")])
def test_invalid_local_tensor_modes_are_refused(mode: LocalTensorMode, size: int, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        LocalTensorMode(size).__enter__()
    assert local_tensor_mode() is mode


def test_error_on_one_rank_names_the_rank(mode: LocalTensorMode) -> None:
    with pytest.raises(RuntimeError) as raised:
        rank_map(lambda rank: torch.ones(2 + (rank == 2))) + torch.ones(2)
    assert raised.value.__notes__ == [
        "on simulated rank 2: aten.add.Tensor got float32[3] [1.0, 1.0, 1.0], float32[2] [1.0, 1.0]"
    ]


def test_dim_that_broadcasts_on_some_ranks_only_is_refused(mode: LocalTensorMode) -> None:
    x = rank_map(lambda rank: torch.ones(1 + rank % 2, 3))
    with pytest.raises(RankDependentError, match="dim -2 would broadcast on rank 0,2"):
        x + torch.ones(2, 3)


# ---- numbers per rank ----


def test_arithmetic_of_numbers_per_rank() -> None:
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


@pytest.mark.parametrize(
    "branch", [lambda n: bool(n == 2), lambda n: 1 if n < 3 else 2], ids=["bool", "less"]
)
def test_branching_on_a_number_per_rank_is_an_error(branch: Callable[[Any], Any]) -> None:
    with pytest.raises(RankDependentError, match=r"got \{0: .*, 1: .*differs between the simulated ranks"):
        branch(local_int({0: 2, 1: 3}))


def test_item_returns_a_number_per_rank(mode: LocalTensorMode) -> None:
    x = torch.tensor([1.5]) * dist.get_rank()
    assert per_rank(x.item(), RANKS) == [0.0, 1.5, 3.0, 4.5]
    assert torch.tensor(2).item() == 2 and float(torch.ones(1)) == 1.0
    with pytest.raises(RankDependentError):
        bool(x > 2)
    assert torch.allclose(x, x) and not torch.equal(x, x + 1)


# ---- where a rank stands ----


def test_as_rank_runs_code_as_one_rank(mode: LocalTensorMode, mesh: DeviceMesh) -> None:
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


def test_local_tensor_mode_restores_the_process_after_an_error(world_of_4: None) -> None:
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


@maybe_run_for_local_tensor
def _mine(full: torch.Tensor, rank: int) -> torch.Tensor:
    return full[: rank + 1] if rank % 2 else full[rank:]


def test_decorated_functions_run_per_rank(mode: LocalTensorMode) -> None:
    assert _mine(torch.arange(3.0), 1).tolist() == [0.0, 1.0]
    assert held(_mine(torch.arange(4), dist.get_rank())) == [[0, 1, 2, 3], [0, 1], [2, 3], [0, 1, 2, 3]]
    with pytest.raises(SimulationError, match="requires grad for a function run per rank"):
        _mine(torch.ones(4, requires_grad=True), dist.get_rank())


def test_decorated_function_with_a_collective_runs_once_per_rank(mode: LocalTensorMode) -> None:
    @maybe_run_for_local_tensor
    def add_then_reduce(x: torch.Tensor, rank: int) -> torch.Tensor:
        x.add_(1)
        total = x.clone()
        dist.all_reduce(total)
        return total

    x = torch.ones(1) * dist.get_rank()
    assert add_then_reduce(x, dist.get_rank()).tolist() == [10.0]
    assert held(x) == [[1.0], [2.0], [3.0], [4.0]]


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
def test_diverging_ranks_of_rank_map_are_named(mode: LocalTensorMode, of_rank_2: Any, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        rank_map(lambda rank: of_rank_2() if rank == 2 else dist.all_reduce(torch.ones(1)))
    with pytest.raises(ZeroDivisionError):
        rank_map(lambda rank: 1 // 0)


# ---- random numbers ----


def test_local_tensors_draw_with_a_generator_per_rank(mode: LocalTensorMode) -> None:
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


def test_ranks_may_draw_different_amounts(mode: LocalTensorMode) -> None:
    with mode.disable():
        torch.manual_seed(0)
        sequence = torch.rand(4).tolist()
    torch.manual_seed(0)
    drawn = rank_map(lambda rank: torch.rand(rank))
    after = torch.rand(1)
    assert held(drawn) == [sequence[:rank] for rank in RANKS]
    assert held(after) == [[sequence[rank]] for rank in RANKS]


def test_function_with_a_collective_draws_once(mode: LocalTensorMode) -> None:
    def noisy(rank: int) -> torch.Tensor:
        first = torch.rand(1)
        dist.all_reduce(first)
        return torch.cat([first, torch.rand(1)])

    with mode.disable():
        torch.manual_seed(0)
        a, b, c = torch.rand(3).unbind()
    torch.manual_seed(0)
    assert held(rank_map(noisy)) == [[float(a + a + a + a), float(b)]] * 4
    assert held(torch.rand(1)) == [[float(c)]] * 4


def test_meshes_of_another_world_with_equal_group_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both worlds number their groups from 0, so a mesh of threads has a group of the same name."""
    with ThreadWorld(4) as world:
        others = world.run(lambda: [DeviceMesh("cpu", [0, 1]) for _ in range(6)])
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        try:
            with LocalTensorMode(4):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
                objects = [*others[0], *gc.get_objects()]
                monkeypatch.setattr(gc, "get_objects", lambda: objects)
                x = distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)], src_data_rank=None)
                assert torch.equal(per_rank(x.full_tensor(), range(4))[3], torch.arange(4.0))
        finally:
            dist.destroy_process_group()


# ---- collectives on LocalTensors ----


@pytest.mark.parametrize(
    ("mesh_dim", "groups"),
    [
        ("inner", [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ("outer", [[0, 2], [1, 3], [0, 2], [1, 3]]),
    ],
)
def test_collectives_along_a_mesh_dim(mesh: DeviceMesh, mesh_dim: str, groups: list[list[int]]) -> None:
    """test_threads.py tests each collective on the whole world."""
    group, me = mesh.get_group(mesh_dim), dist.get_rank()
    total, sent, part, moved = torch.ones(2) * me, torch.ones(2) * me, torch.zeros(1), torch.zeros(2)
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    dist.broadcast(sent, group=group, group_src=1)
    dist.all_gather(parts, torch.ones(1) * me, group=group)
    torch_compat.reduce_scatter_single(part, torch.arange(2.0) + 10 * me, group=group)
    dist.all_to_all_single(moved, torch.arange(2.0) + 10 * me, group=group)
    for rank, ranks in enumerate(groups):
        at = ranks.index(rank)
        got = [t.shard(rank).tolist() for t in (total, sent, *parts, part, moved)]
        want = [[max(ranks)] * 2, [ranks[1]] * 2, *([r] for r in ranks), [10.0 * sum(ranks) + 2 * at]]
        assert got == [*want, [10.0 * r + at for r in ranks]], rank


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_functional_collectives_have_gradients(mesh: DeviceMesh) -> None:
    from torch.distributed import _functional_collectives as funcol

    x = (torch.ones(2) * dist.get_rank()).requires_grad_()
    (funcol.all_gather_tensor_autograd(x, 0, mesh["inner"]) * torch.arange(4.0)).sum().backward()
    assert held(x.grad) == [[0.0, 2.0], [4.0, 6.0]] * 2
    scattered = funcol.reduce_scatter_tensor(torch.arange(2.0) + x.detach(), "sum", 0, (mesh, 0))
    assert held(scattered + 0) == [[2.0], [4.0], [4.0], [6.0]]


def test_unknown_group_must_be_declared(mode: LocalTensorMode) -> None:
    group = dist.new_group([0, 1])
    x = torch.ones(1) * dist.get_rank()
    with pytest.raises(SimulationError, match=r"no sibling group that contains rank 2: .* declare_group"):
        dist.all_reduce(x, group=group)
    with pytest.raises(SimulationError, match="expected the ranks of all groups, including this one's"):
        declare_group(group, [[2, 3]])
    declare_group(group, [[0, 1], [2, 3]])
    dist.all_reduce(x, group=group)
    assert held(x) == [[1.0], [1.0], [5.0], [5.0]]
    lone = dist.new_group([0, 1])
    some = tensor_map(x, lambda rank, shard: shard if rank < 2 else None)
    dist.all_reduce(some, group=lone)
    assert held(some) == [[2.0], [2.0]]


def test_local_tensor_mode_of_some_ranks(world_of_4: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    with LocalTensorMode({2, 3}):
        x = torch.ones(1) * dist.get_rank()
        assert isinstance(x, LocalTensor) and x.ranks == (2, 3)
        dist.all_reduce(x, group=mesh.get_group("inner"))
        assert held(x) == [[5.0], [5.0]]
        with pytest.raises(
            SimulationError, match="of ranks 0, 2 needs rank 0 too, but only ranks 2, 3 take part"
        ):
            dist.all_reduce(x, group=mesh.get_group("outer"))


def test_mesh_of_some_ranks_in_another_order(group: dist.ProcessGroup) -> None:
    with LocalTensorMode([0, 3, 5, 6]):
        mesh = DeviceMesh("cpu", [[6, 0], [3, 5]])
        x = torch.ones(1) * dist.get_rank()
        assert per_rank(mesh.get_coordinate(), (6, 0, 3, 5)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        out = torch.zeros(2)
        torch_compat.all_gather_single(out, x, group=mesh.get_group(1))
        # By rank, as torch sorts the ranks of a group.
        assert held(out) == [[0.0, 6.0], [3.0, 5.0], [3.0, 5.0], [0.0, 6.0]]


# ---- DTensors of LocalTensors ----


R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def test_dtensor_shows_every_shard(line: DeviceMesh) -> None:
    x = distribute_tensor(torch.arange(5.0), line, [S0])
    assert held(x.to_local()) == [[0.0, 1.0], [2.0, 3.0], [4.0], []]
    parts = per_rank((x._spec.local_shape, x._spec.local_offset), RANKS)
    assert parts == [((2,), (0,)), ((2,), (2,)), ((1,), (4,)), ((0,), (5,))]
    assert "{0-1: 2, 2: 1, 3: 0}] on ranks 0-3\n  0: tensor([0., 1.])" in repr(x)
    assert x.shape == (5,) and x.sum().full_tensor().reconcile().item() == 10.0


def test_from_local_of_uneven_local_tensors(line: DeviceMesh) -> None:
    x = uneven().requires_grad_()
    full = DTensor.from_local(x, line, [S0], shape=(5, 3), stride=(3, 1)).full_tensor()
    assert full[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0]
    (full * torch.arange(5.0).unsqueeze(1)).sum().backward()
    assert [rows[:1] for rows in held(x.grad[:, 0])] == [[0.0], [2.0], [4.0], []]
    # other lengths than torch.chunk's: the ranks tell each other theirs
    odd = rank_map(lambda rank: torch.full(((1, 0, 3, 1)[rank],), float(rank)))
    assert DTensor.from_local(odd, line, [S0], shape=(5,), stride=(1,)).full_tensor().tolist() == [
        0,
        2,
        2,
        2,
        3,
    ]
    with pytest.raises(RankDependentError, match=r"different sizes, .*pass shape= and stride="):
        DTensor.from_local(uneven(), line, [S0])


def test_in_place_ops_on_dtensors_of_local_tensors(mode: LocalTensorMode, line: DeviceMesh) -> None:
    x = distribute_tensor(torch.arange(6.0).view(2, 3), line, [S1])
    x[1:].mul_(-1)
    x.t_()
    assert x.placements == (S0,) and x.shape == (3, 2)
    assert x.full_tensor().tolist() == [[0, -3], [1, -4], [2, -5]]
    torch.add(x, 1, out=x)
    assert held(x.to_local()) == [[[1.0, -2.0]], [[2.0, -3.0]], [[3.0, -4.0]], []]
    # made of a plain tensor that all ranks share: each has its own from then on
    with mode.disable():
        plain = torch.zeros(4)
    y = DTensor.from_local(plain, line, [R]).add_(1)
    assert y.to_local().tolist() == [1.0] * 4 and plain.tolist() == [0.0] * 4


def test_collectives_and_fallbacks_are_counted_once(line: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 4), line, [S0])
    clear_fallbacks()
    with count_collectives() as count, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        x.redistribute(placements=[R])
        x.redistribute(placements=[S1])
        torch.bincount(x[:, 0].to(torch.int64))
    assert count.calls == {"all_gather": 2, "all_to_all": 1} and count.bytes["all_to_all"] == 32
    assert sum(fallbacks().values()) == 1
    assert [w.category for w in seen] == [FallbackWarning]


def test_random_ops_draw_what_one_device_would(mode: LocalTensorMode, line: DeviceMesh) -> None:
    with mode.disable():
        torch.manual_seed(3)
        want = [F.dropout(torch.ones(5, 2)), torch.rand(7), torch.rand(2)]
    torch.manual_seed(3)
    dropped = F.dropout(distribute_tensor(torch.ones(5, 2), line, [S0], src_data_rank=None))
    got = [dropped.full_tensor(), rand(7, device_mesh=line, placements=[S0]).full_tensor(), torch.rand(2)]
    assert [t.tolist() for t in got] == [t.tolist() for t in want]


def test_dtensor_draws_synchronize_seeds(mode: LocalTensorMode, line: DeviceMesh) -> None:
    with mode.disable():
        want = torch.rand(6, generator=torch.Generator().manual_seed(0)).tolist()
    torch.manual_seed(dist.get_rank())
    assert zeros(6, device_mesh=line, placements=[S0]).uniform_().full_tensor().tolist() == want


def test_dtensors_of_one_rank_are_refused(world_of_4: None) -> None:
    outside = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (4,)), [S0], src_data_rank=None)
    with LocalTensorMode(4), pytest.raises(SimulationError, match="made outside this LocalTensorMode"):
        outside * 2
    assert (outside * 2).to_local().tolist() == [2.0]


def test_functions_per_rank_may_use_dtensors(line: DeviceMesh) -> None:
    x = distribute_tensor(torch.arange(5.0), line, [S0])

    def total(rank: int) -> tuple[torch.Tensor, DTensor]:
        mine = DTensor.from_local(torch.ones(2) * rank, line, [S0])
        return mine.sum().full_tensor(), mine.redistribute(placements=[R])

    summed, whole = rank_map(total)
    assert summed.tolist() == 12.0 and isinstance(whole, DTensor)
    assert (whole[:5] + x.redistribute(placements=[R])).to_local().tolist() == [0.0, 1.0, 3.0, 4.0, 6.0]
