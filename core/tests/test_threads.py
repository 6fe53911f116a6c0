"""Ranks simulated by threads: collectives against plain arithmetic, reports of hangs, separate state per rank."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

import dtbench_core as core
from core.tests.gloo_world import on_ranks
from core.tests.test_local_tensor import RANKS, held
from dtbench_core import comm, torch_compat
from dtbench_core.errors import SimulationError
from dtbench_core.runtime import initial_values, using_values
from dtbench_core.simulate import LocalTensorMode, ThreadWorld, per_rank, rank_map, run_ranks
from dtbench_core.simulate.threads import diverged

N = 4


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    with ThreadWorld(N) as world:
        yield world


def _mine(rank: int, *shape: int) -> torch.Tensor:
    """Returns the input of `rank`, which any rank can compute. Inputs differ between ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def _all(*shape: int, n: int = N) -> torch.Tensor:
    return torch.stack([_mine(r, *shape) for r in range(n)])


# ---- every collective ----

EachRank = Callable[[Callable[[], Any]], list[Any]]


@pytest.fixture(params=["threads", "local"])
def each_rank(request: pytest.FixtureRequest) -> EachRank:
    """Runs a function as each rank, in a ThreadWorld or in a LocalTensorMode; returns its results by rank."""
    if request.param == "threads":
        return request.getfixturevalue("world").run
    request.getfixturevalue("mode")
    return lambda body: per_rank(rank_map(lambda rank: body()), range(N))


def as_each_rank(body: Callable[[], None]) -> Callable[[EachRank], None]:
    """Decorator of a test that each rank executes, in a ThreadWorld and in a LocalTensorMode."""

    def test(each_rank: EachRank) -> None:
        each_rank(body)

    return test


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda x: x.sum(0),
    "AVG": lambda x: x.mean(0),
    "PRODUCT": lambda x: x.prod(0),
    "MAX": lambda x: x.amax(0),
    "MIN": lambda x: x.amin(0),
    "BAND": functools.partial(functools.reduce, torch.bitwise_and),
    "BOR": functools.partial(functools.reduce, torch.bitwise_or),
    "BXOR": functools.partial(functools.reduce, torch.bitwise_xor),
}


@pytest.mark.parametrize("op", _REDUCTIONS)
def test_reductions(each_rank: EachRank, op: str) -> None:
    def body() -> None:
        me, code, bits = dist.get_rank(), getattr(dist.ReduceOp, op), op.startswith("B")
        terms = (8 * _all(4, 3)).long() if bits else _all(4, 3)
        expected = _REDUCTIONS[op](terms)
        part = expected[me : me + 1]
        reduced, at_2, scattered, from_list = (t.clone() for t in (terms[me], terms[me], part, part))
        dist.all_reduce(reduced, code)
        dist.reduce(at_2, dst=2, op=code)
        torch_compat.reduce_scatter_single(scattered.zero_(), terms[me].clone(), op=code)
        dist.reduce_scatter(from_list.zero_(), list(terms[me].clone().split(1)), op=code)
        got = [reduced, at_2, scattered, from_list]
        torch.testing.assert_close(got, [expected, expected if me == 2 else terms[me], part, part])
        if op == "AVG":  # of integers: an integer
            dist.all_reduce(whole := torch.tensor(me), code)
            assert int(whole) == 1  # 6 / 4

    each_rank(body)


@as_each_rank
def test_gathers_and_scatters() -> None:
    me, everything = dist.get_rank(), _all(2, 3)
    flat, mine, sent = torch.empty(N * 2, 3), torch.empty(2, 3), _mine(me, 5)
    parts, gathered = ([torch.empty(2, 3) for _ in range(N)] for _ in range(2))
    uneven = [torch.empty(r, 2) for r in range(N)]  # rank 0 has nothing
    torch_compat.all_gather_single(flat, _mine(me, 2, 3))
    dist.all_gather(parts, _mine(me, 2, 3).t().contiguous().t())
    dist.all_gather(uneven, _mine(me, me, 2))
    dist.gather(_mine(me, 2, 3), gathered if me == 1 else None, dst=1)
    dist.scatter(mine, list(everything) if me == 3 else None, src=3)
    dist.broadcast(sent, src=2)
    got = {"flat": flat, "parts": parts, "uneven": uneven, "scattered": mine, "sent": sent}
    expected: dict[str, Any] = {
        "flat": everything.flatten(0, 1),
        "parts": list(everything),
        "uneven": [_mine(r, r, 2) for r in range(N)],
        "scattered": everything[me],
        "sent": _mine(2, 5),
    }
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert me != 1 or torch.equal(torch.stack(gathered), everything)


@as_each_rank
def test_all_to_all() -> None:
    me = dist.get_rank()
    out = torch.empty(N, 2)
    dist.all_to_all_single(out, _mine(me, N, 2))
    assert torch.equal(out, _all(N, 2)[:, me])
    rows = [[r + s for r in range(N)] for s in range(N)]  # rank s sends rows[s][r] rows to rank r
    out = torch.empty(sum(rows[me]), 2)
    dist.all_to_all_single(out, _mine(me, sum(rows[me]), 2), rows[me], rows[me])
    assert torch.equal(out, torch.cat([_mine(s, sum(rows[s]), 2).split(rows[s])[me] for s in range(N)]))
    outs = [torch.empty(s + 1) for s in range(N)]
    dist.all_to_all(outs, [_mine(me, me + 1) + r for r in range(N)])
    assert all(torch.equal(outs[s], _mine(s, s + 1) + me) for s in range(N))


@as_each_rank
def test_objects_and_barrier() -> None:
    me = dist.get_rank()
    dist.barrier()
    gathered: list[Any] = [None] * N
    dist.all_gather_object(gathered, {"rank": me, "pad": "x" * me})
    assert gathered == [{"rank": r, "pad": "x" * r} for r in range(N)]
    objects: list[Any] = [me]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [1]


@as_each_rank
def test_functional_collectives() -> None:
    me, group = dist.get_rank(), dist.group.WORLD
    wait = funcol.wait_tensor
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    gather_all = (
        getattr(funcol, "all_gather_single_coalesced", None) or funcol.all_gather_into_tensor_coalesced
    )
    sums = wait(funcol.all_reduce(_mine(me, 4), "sum", group)), wait(scatter(_mine(me, 8), "avg", 0, group))
    torch.testing.assert_close(sums, (_all(4).sum(0), _all(8).mean(0)[2 * me : 2 * me + 2]))
    got = {
        "all_gather": gather(_mine(me, 2, 3), 0, group),
        "all_to_all": funcol.all_to_all_single(_mine(me, N, 2), None, None, group),
        "broadcast": funcol.broadcast(_mine(me, 3), 1, group),
        "coalesced gathers": gather_all([_mine(me, 2), _mine(me, 1)], group),
        "coalesced maxima": funcol.all_reduce_coalesced([_mine(me, 2), _mine(me, 1)], "max", group),
    }
    expected = {
        "all_gather": _all(2, 3).flatten(0, 1),
        "all_to_all": _all(N, 2)[:, me],
        "broadcast": _mine(1, 3),
        "coalesced gathers": [_all(2).flatten(), _all(1).flatten()],
        "coalesced maxima": [_all(2).amax(0), _all(1).amax(0)],
    }
    torch.testing.assert_close(torch.utils._pytree.tree_map(wait, got), expected, rtol=0, atol=0)


@on_ranks
def test_asynchronous_collectives_are_waited_for_later() -> None:
    me = dist.get_rank()
    groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])]
    first, second = _mine(me, 3), _mine(me, 2)
    order = [(first, groups[0]), (second, groups[1])]
    # The ranks issue in two groups in opposite orders: only waiting at once would be a deadlock.
    for work in [dist.all_reduce(t, group=g, async_op=True) for t, g in (order if me % 2 else order[::-1])]:
        work.wait()
    earlier, later = _mine(me, 2), _mine(me, 2)
    unwaited = dist.all_reduce(earlier, async_op=True)
    dist.all_reduce(later, async_op=True).wait()
    assert unwaited.is_completed()
    torch.testing.assert_close([first, second, later], [_all(3).sum(0), _all(2).sum(0), _all(2).sum(0)])


# ---- groups and meshes ----


@on_ranks
def test_subgroups_and_meshes() -> None:
    me = dist.get_rank()
    group = [dist.new_group([0, 2]), dist.new_group([3, 1])][me % 2]
    assert dist.get_process_group_ranks(group) == ([0, 2] if me % 2 == 0 else [1, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert list(mesh.get_coordinate() or ()) == [me // 2, me % 2]
    expected = [
        (group, _mine(me % 2, 2) + _mine(me % 2 + 2, 2)),
        (mesh.get_group("tp"), _mine(me // 2 * 2, 2) + _mine(me // 2 * 2 + 1, 2)),
        (mesh["dp", "tp"]._flatten().get_group(), _all(2).sum(0)),
    ]
    for summed_group, total in expected:
        x = _mine(me, 2)
        dist.all_reduce(x, group=summed_group)
        torch.testing.assert_close(x, total)


def _sum_over_64_ranks() -> float:
    mesh, full = init_device_mesh("cpu", (4, 4, 4)), torch.arange(512.0).view(8, 8, 8)
    x = core.distribute_tensor(full, mesh, [core.Shard(d) for d in range(3)], src_data_rank=None)
    return float((x * 2).sum().full_tensor())


def test_world_of_64_ranks() -> None:
    assert {outcome.value for outcome in run_ranks(_sum_over_64_ranks, 64)} == {512.0 * 511}


def test_64_ranks_as_local_tensors(fake_world: Callable[[int], None]) -> None:
    fake_world(64)
    with LocalTensorMode(64):
        assert _sum_over_64_ranks() == 512.0 * 511


# ---- ranks that go apart ----


def test_hang_is_reported_and_the_world_remains_usable(world: ThreadWorld) -> None:
    def body() -> None:
        x = torch.ones(3, 2)
        dist.all_reduce(x)
        if dist.get_rank() == 2:
            raise ValueError("not here")
        dist.all_reduce(x)

    message = r"rank 2 raised ValueError: not here while ranks 0, 1, 3 "
    for _ in range(2):
        with pytest.raises(SimulationError, match=message) as info:
            world.run(body)
        assert "waited in all_reduce(sum, float32[3, 2])" in str(info.value)
        assert isinstance(info.value.__cause__, ValueError)
        assert [outcome.stopped for outcome in world.outcomes(body)] == [True, True, False, True]
        assert world.run(dist.get_rank) == [0, 1, 2, 3]


def _all_reduce_or(of_rank_1: Callable[[], object]) -> Callable[[], object]:
    return lambda: of_rank_1() if dist.get_rank() == 1 else dist.all_reduce(torch.ones(4))


def _waits_for_another() -> None:
    dist.barrier(group=[dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])][dist.get_rank() % 2])


def _sends_too_much() -> None:
    rows = 2 if dist.get_rank() == 0 else 1
    dist.all_to_all_single(torch.empty(N), torch.ones(N - 1 + rows), [1] * N, [1, 1, 1, rows])


OTHERS: dict[str, Callable[[], object]] = {
    r"all_reduce\(sum, float32\[5\]\)": lambda: dist.all_reduce(torch.ones(5)),
    r"all_reduce\(max, float32\[4\]\)": lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX),
    r"all_reduce\(sum, int64\[4\]\)": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64)),
    r"broadcast\(from group rank 0, float32\[4\]\)": lambda: dist.broadcast(torch.ones(4), 0),
}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            lambda: dist.get_rank() == 3 or dist.barrier(),
            "rank 3 returned while ranks 0, 1, 2 waited in barrier",
        ),
        (_waits_for_another, r"^hang: ranks 0, 2 waited in barrier\(\) of group '\w+', ranks 1, 3 waited in"),
        (lambda: 1 // dist.get_rank(), r"rank 0 raised ZeroDivisionError.* while ranks 1, 2, 3 returned"),
        (_sends_too_much, r"group rank 0 sends \[2\] to group rank 3, which expects \[1\]"),
        (lambda: ThreadWorld(2).run(dist.get_rank), "cannot start a world"),
        *(
            (_all_reduce_or(other), rf"rank 1 called {name} where rank 0 called all_reduce\(sum, fl")
            for name, other in OTHERS.items()
        ),
    ],
)
def test_diverging_ranks_are_named(world: ThreadWorld, body: Callable[[], object], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        world.run(body)
    assert world.run(dist.get_rank) == [0, 1, 2, 3]


def test_swallowed_stop_is_still_reported(world: ThreadWorld) -> None:
    def body() -> str:
        if dist.get_rank() == 1:
            return "left"
        try:
            dist.barrier()
        except SimulationError:
            try:
                dist.barrier()  # nothing comes about any more in this call
            except SimulationError:
                return "swallowed"
        return "passed"

    outcomes = world.outcomes(body)
    assert [o.value for o in outcomes] == ["swallowed", "left", "swallowed", "swallowed"]
    assert [o.stopped for o in outcomes] == [True, False, True, True]
    assert "stopped" in (diverged(outcomes) or "")


# ---- what is a rank's own ----


def test_ranks_draw_from_the_seed_of_the_process(world: ThreadWorld) -> None:
    torch.manual_seed(7)  # the draws of the ranks do not advance this generator
    assert world.run(lambda: float(torch.rand(()))) == [float(torch.rand(()))] * N


@on_ranks
def test_collectives_of_inference_tensors_and_of_leaves() -> None:
    with torch.inference_mode(dist.get_rank() == 0):
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [N, N]
    leaf = torch.ones(2, requires_grad=True)
    dist.all_reduce(leaf.detach())
    (leaf * 2).sum().backward()
    assert leaf.grad is not None and leaf.tolist() == [N, N]


# ---- living with the process ----


def test_process_keeps_its_own_process_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ThreadWorld(2) as world:
            assert world.run(dist.get_world_size) == [2, 2]
            assert dist.get_world_size() == 1 and dist.get_backend() == "gloo"
            x = torch.ones(2)
            assert torch.equal(funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD)), x)
            assert world.run(dist.get_rank) == [0, 1]
    finally:
        dist.destroy_process_group()
    with ThreadWorld(2) as world:  # and without one the process stays without
        world.run(dist.get_rank)
        assert not dist.is_initialized()


def test_threads_end_with_their_world() -> None:
    before = threading.active_count()
    with ThreadWorld(3) as world:
        world.run(dist.get_rank)
        assert threading.active_count() == before + 3
    assert threading.active_count() == before
    world.close()
    assert world.run(dist.get_rank) == [0, 1, 2]  # it starts again
    world.close()


def test_threads_end_one_at_a_time() -> None:
    """Freeing torch's per-thread compiler state takes a lock and runs Python, so threads must take turns."""
    kept, events = threading.local(), list[tuple[str, int]]()

    class OfThread:
        def __del__(self) -> None:
            events.append(("begins", threading.get_ident()))
            time.sleep(0.02)
            events.append(("ends", threading.get_ident()))

    with ThreadWorld(3) as world:
        world.run(lambda: setattr(kept, "value", OfThread()))
    assert [what for what, _ in events] == ["begins", "ends"] * 3
    assert len({thread for _, thread in events}) == 3


# ---- simulated ranks on a CUDA device that is not there ----


@pytest.fixture
def cuda_generator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """The default generator of a simulated CUDA device."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    return generator


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_rank_has_its_own_generator(
    world: ThreadWorld, cuda_generator: torch.Generator, device: str
) -> None:
    generator = cuda_generator if device == "cuda" else torch.default_generator

    def body() -> list[float]:
        generator.manual_seed(dist.get_rank())
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand((), generator=generator)))
            dist.barrier()  # others draw here
        return drawn

    before = generator.get_state()
    got = world.run(body)
    assert torch.equal(generator.get_state(), before)
    for rank in range(N):
        alone = torch.Generator().manual_seed(rank)
        assert got[rank] == [float(torch.rand((), generator=alone)) for _ in range(3)]


def test_backend_of_simulated_ranks_includes_cuda(world: ThreadWorld) -> None:
    backends = [
        dist.distributed_c10d.BackendConfig(dist.Backend(name)) for name in world.run(dist.get_backend)
    ]
    assert all({"cpu", "cuda"} <= set(backend.device_backend_map) for backend in backends)


def test_cuda_states_by_rank(mode: LocalTensorMode, cuda_generator: torch.Generator) -> None:
    """Seeding seeds each rank's CUDA generator, whose state can be read and set."""

    def states() -> list[list[int]]:
        return held(rank_map(lambda rank: cuda_generator.get_state()))

    with mode.disable():
        want = [torch.Generator().manual_seed(rank).get_state().tolist() for rank in RANKS]
    torch.manual_seed(dist.get_rank())
    kept = torch.cuda.get_rng_state()
    assert states() == held(kept) == want
    rank_map(lambda rank: cuda_generator.manual_seed(5).initial_seed())
    assert states() == [states()[0]] * len(RANKS) != want
    torch.cuda.set_rng_state(kept)
    assert states() == want


def test_backward_stays_on_the_thread_of_a_rank(world: ThreadWorld) -> None:
    """By default, autograd runs GPU work on its own thread, which belongs to no rank."""

    is_multithreaded = torch._C._is_multithreading_enabled
    assert world.run(is_multithreaded) == [False] * N and is_multithreaded()


def test_backward_of_local_tensors_stays_on_the_calling_thread(mode: LocalTensorMode) -> None:
    assert not torch._C._is_multithreading_enabled()
    with mode.disable():
        assert not torch._C._is_multithreading_enabled()


# ---- state that is separate for each rank ----


def test_threads_without_a_rank_share_the_state_of_the_process(group: dist.ProcessGroup) -> None:
    """Autograd's threads, for example, issue the collectives of a backward pass."""
    with ThreadPoolExecutor() as threads, comm.count_collectives() as count:
        threads.submit(comm.all_reduce, torch.ones(3), group).result()
    assert count.calls == {"all_reduce": 1} and count.bytes == {"all_reduce": 12}
    with ThreadPoolExecutor() as threads, using_values(*initial_values()), comm.count_collectives() as apart:
        threads.submit(comm.all_reduce, torch.ones(3), group).result()
    assert not apart.calls and count.calls == {"all_reduce": 1}
