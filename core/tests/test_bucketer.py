"""The bucketer: its layout alone, then against plain sums on real gloo ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.on_device import torch
from dtbench_core.bucketer import BucketError, ReduceScatterBucketer
from dtbench_core.bucketer import bucket as module

# What gloo sums in torch 2.13; it refuses bool, int16 and complex types.
GLOO_DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
]
MIB = 2**20


# --- layout ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 40)), st.integers(0, 30))
@example([3, 4, 11, 4, 0, 10, 1], 10)  # the third is larger than a bucket: passes the ones that wait
@example([1, 0], 0)
def test_a_bucket_is_closed_by_what_does_not_fit(numels: list[int], capacity: int) -> None:
    world, sent = 3, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.comm, "reduce_scatter", lambda _, flat, *__, **___: sent.append(flat.numel()))
        patch.setattr(module.ProcessGroup, "size", lambda self: world)
        bucketer = ReduceScatterBucketer(capacity * world * 4 / MIB, check_ranks="never")
        group, expected, filled = dist.ProcessGroup(0, 1), [], 0
        for numel in numels:
            bucketer.reduce_scatter_async(torch.ones(world * numel), group)
            if numel > capacity or not capacity:
                expected += [numel] if numel else []
            elif filled + numel > capacity:
                expected.append(filled)
                filled = numel
            else:
                filled += numel
        bucketer.flush()
    assert sent == [world * numel for numel in [*expected, filled] if numel]


@pytest.mark.parametrize(
    ("cap", "dtype", "world", "expected"),
    [
        (25, torch.float32, 4, 25 * MIB // 16),
        (1, torch.float16, 3, MIB // 6),
        (0, torch.float32, 4, 0),
        (-1, torch.float32, 4, 0),
        (0.5, torch.float64, 1, MIB // 16),
    ],
)
def test_capacity(
    fake_world: Callable[[int], None], cap: float, dtype: torch.dtype, world: int, expected: int
) -> None:
    fake_world(world)
    bucketer = ReduceScatterBucketer(cap)
    bucketer.reduce_scatter_async(torch.ones(world, dtype=dtype), dist.group.WORLD)
    assert [bucket.capacity for bucket in bucketer.buckets.values()] == [expected]


# --- real ranks: values ----------------------------------------------------------------------------


def _inputs(rank: int, shape: Sequence[int], world: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """What `rank` hands over: small whole numbers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randint(0, 7, tuple(shape), generator=generator).to(dtype) for _ in range(world)]


def _expected(me: int, shape: Sequence[int], world: int, dtype: torch.dtype, seed: int) -> Tensor:
    return sum((_inputs(r, shape, world, dtype, seed)[me] for r in range(world)), torch.zeros(()).to(dtype))


@pytest.mark.parametrize("cap_mb", [25, 0.001, 0])
@on_ranks
def test_sums_in_every_dtype_gloo_reduces(cap_mb: float) -> None:
    shapes = [(5,), (2, 3), (), (0,), (70, 2), (3, 0), (1, 1, 4), (200,)] * len(GLOO_DTYPES)
    shapes = sorted(shapes)  # neighbours alike in shape then differ in dtype: all dtypes meet all shapes
    me, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    bucketer = ReduceScatterBucketer(cap_mb)
    results: dict[int, Tensor] = {}
    for seed, shape in enumerate(shapes):
        given_inputs = _inputs(me, shape, world, GLOO_DTYPES[seed % len(GLOO_DTYPES)], seed)
        bucketer.reduce_scatter_async(
            given_inputs, group, lambda result, seed=seed: results.__setitem__(seed, result)
        )
        for tensor in given_inputs:
            tensor.fill_(1)  # the caller may reuse its tensors at once
    bucketer.flush()
    assert sorted(results) == list(range(len(shapes)))
    for seed, shape in enumerate(shapes):
        expected = _expected(me, shape, world, GLOO_DTYPES[seed % len(GLOO_DTYPES)], seed)
        torch.testing.assert_close(results[seed], expected, rtol=0, atol=0)
    bucketer.teardown()
    assert bucketer.counters.held_bytes == 0 and len(bucketer.buckets) == len(GLOO_DTYPES)
    if cap_mb == 25:
        assert bucketer.counters.collectives == len(GLOO_DTYPES)
    if cap_mb == 0:
        assert bucketer.counters.collectives == sum(1 for shape in shapes if 0 not in shape)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12),
    st.integers(0, 60),
    st.integers(0, 2),
    st.booleans(),
)
def test_packing_is_exact_for_any_shapes(
    shapes: list[tuple[int, ...]], capacity: int, rank: int, hold: bool
) -> None:
    """Without transport: a reduction that returns part `rank` of what is sent gives that input back."""
    world = 3

    def send_back(output: Tensor, flat: Tensor, group: object, async_op: bool) -> None:
        output.copy_(flat.view(world, -1)[rank])  # where it lies already, if the bucketer is right

    results: dict[int, Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.comm, "reduce_scatter", send_back)
        patch.setattr(module.ProcessGroup, "size", lambda self: world)
        patch.setattr(module.ProcessGroup, "rank", lambda self: rank)
        bucketer = ReduceScatterBucketer(capacity * world * 4 / MIB, hold_inputs=hold, check_ranks="never")
        group = dist.ProcessGroup(0, 1)

        def hand_over(seed: int, shape: tuple[int, ...]) -> None:
            inputs: list[Tensor] | Tensor = _inputs(0, shape, world, torch.float32, seed)
            if shape and seed % 2:
                inputs = torch.cat(inputs)

            def keep(result: Tensor) -> None:
                results[seed] = result
                if seed % 3 == 0 and seed < 100:  # callbacks may use the bucketer, in the middle of anything
                    hand_over(seed + 100, shape)
                if seed % 5 == 0:
                    bucketer.flush()

            bucketer.reduce_scatter_async(inputs, group, keep)

        for _ in range(2):  # the second round is laid out by what the first has shown
            results.clear()
            for seed, shape in enumerate(shapes):
                hand_over(seed, shape)
            bucketer.flush()
            bucketer.flush()
            assert sorted(results) == sorted(
                [*range(len(shapes)), *(100 + seed for seed in range(0, len(shapes), 3))]
            )
            for seed, result in results.items():
                mine = _inputs(0, shapes[seed % 100], world, torch.float32, seed)[rank]
                torch.testing.assert_close(result, mine, rtol=0, atol=0)
        bucketer.teardown()
        assert bucketer.counters.held_bytes == 0


@on_ranks
def test_groups_do_not_mix() -> None:
    mesh, me = mesh_of((2, 2), ("dp", "tp")), dist.get_rank()
    groups = [mesh.get_group("dp"), mesh.get_group("tp"), dist.group.WORLD]
    bucketer = ReduceScatterBucketer()
    got: list[tuple[int, Tensor]] = []
    for seed in range(6):
        which = seed % 3
        members = dist.get_process_group_ranks(groups[which])
        inputs = _inputs(me, (4,), len(members), torch.float32, seed)
        bucketer.reduce_scatter_async(inputs, groups[which], lambda r, seed=seed: got.append((seed, r)))
    assert len(bucketer.buckets) == 3
    assert [bucket.pending for bucket in bucketer.buckets.values()] == [2, 2, 2]
    bucketer.flush()
    assert [seed for seed, _ in got] == [0, 3, 1, 4, 2, 5]  # bucket by bucket, each in order of arrival
    for seed, result in got:
        members = dist.get_process_group_ranks(groups[seed % 3])
        mine = members.index(me)
        expected = sum(_inputs(r, (4,), len(members), torch.float32, seed)[mine] for r in members)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@on_ranks
def test_strides_and_gradients_of_inputs() -> None:
    me, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    whole = [torch.arange(24.0).reshape(4, 6).add(r) for r in range(world)]
    total = sum(whole)
    results: list[Tensor] = []
    for cap in (25, 0):
        bucketer = ReduceScatterBucketer(cap)
        # Columns of a matrix (not contiguous), and chunks of one gradient (contiguous, one storage).
        bucketer.reduce_scatter_async([whole[me].T[r] for r in range(world)], group, results.append)
        bucketer.reduce_scatter_async(list(whole[me].chunk(world)), group, results.append)
        with torch.enable_grad():
            leaf = whole[me].clone().requires_grad_()
            bucketer.reduce_scatter_async(list((leaf * 2).chunk(world)), group, results.append)
        bucketer.flush()
    for columns, rows, doubled in (results[:3], results[3:]):
        torch.testing.assert_close(columns, total.T[me], rtol=0, atol=0)
        torch.testing.assert_close(rows, total.chunk(world)[me], rtol=0, atol=0)
        torch.testing.assert_close(doubled, 2 * total.chunk(world)[me], rtol=0, atol=0)
        assert not doubled.requires_grad


# --- real ranks: order and errors ------------------------------------------------------------------


@on_ranks(world_size=2)
def test_callbacks_come_in_the_documented_order() -> None:
    group, world = dist.group.WORLD, dist.get_world_size()
    called: list[str] = []
    bucketer = ReduceScatterBucketer(bucket_cap_mb=4 * world * 10 / MIB)  # 10 floats per shard

    def hand_over(name: str, numel: int) -> None:
        bucketer.reduce_scatter_async([torch.ones(numel)] * world, group, lambda _: called.append(name))

    hand_over("small", 4)
    hand_over("large", 11)
    hand_over("none", 0)
    called.append("|")
    hand_over("pushes", 7)  # closes the first bucket, whose collective may run until the next is full
    called.append("|")
    hand_over("pushes too", 7)
    called.append("|")
    bucketer.flush()
    bucketer.flush()
    assert called == ["large", "|", "|", "small", "none", "|", "pushes", "pushes too"]


@on_ranks(world_size=2)
def test_a_failing_callback_loses_no_other() -> None:
    group, world = dist.group.WORLD, dist.get_world_size()
    mesh_group = mesh_of((world,)).get_group()
    called: list[str] = []
    cap = 4 * world * 10 / MIB
    bucketer = ReduceScatterBucketer(cap)

    def hand_over(name: str, numel: int = 4, error: Exception | None = None, to: object = group) -> None:
        def callback(result: Tensor) -> None:
            called.append(name)
            assert torch.equal(result, torch.full((numel,), float(world)))
            if error is not None:
                raise error

        bucketer.reduce_scatter_async([torch.ones(numel)] * world, to, callback)  # type: ignore[arg-type]

    # Only rank 0 fails: its collectives must stay in step with those of the others.
    mine = dist.get_rank() == 0
    hand_over("a", error=KeyError("one") if mine else None)
    hand_over("b")
    hand_over("c", 7)
    if mine:
        with pytest.raises(KeyError, match="one"):
            hand_over("c2", 7)
    else:
        hand_over("c2", 7)
    assert called == ["a", "b"]
    bucketer.flush()
    assert called == ["a", "b", "c", "c2"]

    hand_over("d", error=ValueError("two") if mine else None)
    hand_over("e", error=OSError("three") if mine else None, to=mesh_group)
    bucketer.reduce_scatter_async(
        [torch.ones(1, dtype=torch.float64)] * world, group, lambda _: called.append("f")
    )
    if mine:
        with pytest.raises(ExceptionGroup, match=r"2 callbacks or collectives") as caught:
            bucketer.flush()
        assert sorted(type(e).__name__ for e in caught.value.exceptions) == ["OSError", "ValueError"]
    else:
        bucketer.flush()
    assert called[4:] == ["d", "e", "f"]
    bucketer.teardown()


# --- one process, fake group: memory, errors -------------------------------------------------------


def test_small_inputs_take_little_memory(group: dist.ProcessGroup) -> None:
    bucketer = ReduceScatterBucketer(25)
    bucketer.reduce_scatter_async([torch.ones(8)] * 8, group)
    bucketer.flush()
    assert 0 < bucketer.counters.peak_bytes <= 64 * 1024


def test_a_kept_result_keeps_only_itself_and_small_neighbours(group: dist.ProcessGroup) -> None:
    bucketer, kept = ReduceScatterBucketer(), []
    bucketer.reduce_scatter_async([torch.ones(4)] * 8, group, kept.append)
    bucketer.reduce_scatter_async([torch.ones(300_000)] * 8, group, lambda _: None)
    for _ in range(20):
        bucketer.reduce_scatter_async([torch.ones(5_000)] * 8, group, kept.append)
    bucketer.flush()
    assert kept[0].untyped_storage().nbytes() == 16
    assert max(k.untyped_storage().nbytes() for k in kept) == 3 * 20_000  # of 64 KiB
    version = kept[1]._version
    kept[2].add_(1)  # shares memory with it, and is not a view of it to autograd
    assert kept[1]._version == version


@pytest.mark.parametrize("cap", [25, 0])
def test_inputs_are_not_kept_alive(group: dist.ProcessGroup, cap: float) -> None:
    bucketer = ReduceScatterBucketer(cap)
    inputs = [torch.ones(4) for _ in range(8)]
    seen = [weakref.ref(t) for t in inputs]
    bucketer.reduce_scatter_async(inputs, group, lambda _: None)
    del inputs
    gc.collect()
    assert [ref() for ref in seen] == [None] * 8


def test_large_chunks_of_one_tensor_are_not_copied(group: dist.ProcessGroup) -> None:
    bucketer, whole = ReduceScatterBucketer(0), torch.arange(80_000.0)
    bucketer.reduce_scatter_async(list(whole.chunk(8)), group)
    assert bucketer.counters.bytes_copied == 0
    bucketer.reduce_scatter_async(list(whole.chunk(8))[::-1], group)
    assert bucketer.counters.bytes_copied == whole.nbytes


@on_ranks(world_size=2)
def test_group_of_others() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        ReduceScatterBucketer().reduce_scatter_async([torch.ones(1)], group)
    else:
        with pytest.raises(BucketError, match="expected a process group that this rank belongs to"):
            ReduceScatterBucketer().reduce_scatter_async([torch.ones(1)], group)
