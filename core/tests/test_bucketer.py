"""ReduceScatterBucketer: values against plain sums, order of callbacks, reductions, DTensors, hooks, memory, errors."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from core.tests.gloo_world import WORLD_SIZE, mesh_of, on_ranks, on_worlds
from core.tests.on_device import DEVICE_TYPE, torch
from core.tests.operations import Work
from dtbench_core import CoreError, DTensor, Partial, Replicate, Shard, comm, distribute_tensor
from dtbench_core.bucketer import BucketError, ReduceScatterBucketer
from dtbench_core.bucketer.packing import JOIN_BYTES

# The dtypes that gloo sums in torch 2.13; it refuses bool, int16 and complex types.
GLOO_DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
]
MIB = 2**20


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# --- real ranks: values ----------------------------------------------------------------------------


def _inputs(rank: int, shape: Sequence[int], world: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Returns the inputs of `rank`: small integers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randint(0, 7, tuple(shape), generator=generator).to(dtype) for _ in range(world)]


def _expected(me: int, shape: Sequence[int], world: int, dtype: torch.dtype, seed: int) -> Tensor:
    return sum((_inputs(r, shape, world, dtype, seed)[me] for r in range(world)), torch.zeros(()).to(dtype))


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("form", [list, torch.stack])
@pytest.mark.parametrize("cap_mb", [25, 0.001, 0])
@on_ranks
def test_sums_in_every_dtype_gloo_reduces(
    cap_mb: float, form: Callable[[list[Tensor]], Any], hold: bool
) -> None:
    # Sorted, so that each shape meets all dtypes.
    shapes = sorted([(5,), (2, 3), (), (0,), (70, 2), (3, 0), (1, 1, 4), (200,)] * len(GLOO_DTYPES))
    me, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    cases = [(shape, world, GLOO_DTYPES[i % len(GLOO_DTYPES)], i) for i, shape in enumerate(shapes)]
    bucketer, results = ReduceScatterBucketer(cap_mb, hold_inputs=hold), dict[int, Tensor]()
    for seed, case in enumerate(cases):
        inputs = _inputs(me, *case)
        bucketer.reduce_scatter_async(form(inputs), group, partial(results.__setitem__, seed))
        for tensor in () if hold else inputs:
            tensor.fill_(1)  # the caller may reuse its tensors at once
    bucketer.flush()
    expected = {seed: _expected(me, *case).flatten() for seed, case in enumerate(cases)}
    same({seed: result.flatten() for seed, result in results.items()}, expected)
    bucketer.teardown()
    assert bucketer.counters.held_bytes == 0


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("cap", [25, 8 * 10 / MIB * 4, 0])
@on_ranks(world_size=2)
def test_callbacks_may_use_the_bucketer(cap: float, hold: bool) -> None:
    me, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    bucketer, got = ReduceScatterBucketer(cap, hold_inputs=hold), dict[int, Tensor]()

    def reduce(seed: int, again: bool = True) -> None:
        def keep(result: Tensor) -> None:
            got[seed] = result
            if again:
                reduce(seed + 100, again=False)
            if seed % 3 == 0:
                bucketer.flush()

        inputs = _inputs(me, (seed % 7, 2), world, torch.float32, seed)
        bucketer.reduce_scatter_async(torch.cat(inputs) if seed % 2 else inputs, group, keep)

    for seed in range(12):
        reduce(seed)
    bucketer.flush()
    bucketer.flush()
    seeds = [*range(12), *range(100, 112)]
    same(got, {seed: _expected(me, (seed % 7, 2), world, torch.float32, seed) for seed in seeds})
    bucketer.teardown()
    assert bucketer.counters.held_bytes == 0


@on_ranks
def test_groups_have_separate_buckets() -> None:
    mesh, me = mesh_of((2, WORLD_SIZE // 2), ("dp", "tp")), dist.get_rank()
    groups = [mesh.get_group("dp"), mesh.get_group("tp"), dist.group.WORLD]
    bucketer = ReduceScatterBucketer()
    got: list[tuple[int, Tensor]] = []
    for seed in range(6):
        inputs = _inputs(me, (4,), groups[seed % 3].size(), torch.float32, seed)
        bucketer.reduce_scatter_async(inputs, groups[seed % 3], lambda r, seed=seed: got.append((seed, r)))
    bucketer.flush()
    assert [seed for seed, _ in got] == [0, 3, 1, 4, 2, 5]  # bucket by bucket, each in order of arrival
    for seed, result in got:
        members = dist.get_process_group_ranks(groups[seed % 3])
        terms = [_inputs(r, (4,), len(members), torch.float32, seed) for r in members]
        same(result, sum(term[members.index(me)] for term in terms))


@on_ranks
def test_inputs_may_be_strided_or_require_grad() -> None:
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
    part = total.chunk(world)[me]
    same(results, 2 * [total.T[me], part, 2 * part])
    assert not any(result.requires_grad for result in results)


# --- real ranks: order and errors ------------------------------------------------------------------


@on_ranks(world_size=2)
def test_order_of_callbacks() -> None:
    group, world = dist.group.WORLD, dist.get_world_size()
    called: list[str] = []
    bucketer = ReduceScatterBucketer(bucket_cap_mb=4 * world * 10 / MIB)  # 10 floats per shard

    def reduce(name: str, numel: int) -> None:
        bucketer.reduce_scatter_async([torch.ones(numel)] * world, group, lambda _: called.append(name))

    reduce("small", 4)
    reduce("large", 11)
    reduce("none", 0)
    called.append("|")
    reduce("pushes", 7)  # closes the first bucket, whose collective may run until the next is full
    called.append("|")
    reduce("pushes too", 7)
    called.append("|")
    bucketer.flush()
    bucketer.flush()
    assert called == ["large", "|", "|", "small", "none", "|", "pushes", "pushes too"]


@on_ranks(world_size=2)
def test_failing_callback_does_not_stop_the_others() -> None:
    group, world = dist.group.WORLD, dist.get_world_size()
    mesh_group = mesh_of((world,)).get_group()
    called: list[str] = []
    bucketer = ReduceScatterBucketer(4 * world * 10 / MIB)
    mine = dist.get_rank() == 0  # only rank 0 fails: its collectives stay in step with those of the others

    def reduce(name: str, numel: int = 4, error: Exception | None = None, to: object = group) -> None:
        def callback(result: Tensor) -> None:
            called.append(name)
            same(result, torch.full((numel,), float(world)))
            if error is not None and mine:
                raise error

        bucketer.reduce_scatter_async([torch.ones(numel)] * world, to, callback)

    reduce("a", error=KeyError("one"))
    reduce("b")
    reduce("c", 7)
    with pytest.raises(KeyError, match="one") if mine else nullcontext():
        reduce("c2", 7)
    assert called == ["a", "b"]
    bucketer.flush()
    assert called == ["a", "b", "c", "c2"]

    reduce("d", error=ValueError("two"))
    reduce("e", error=OSError("three"), to=mesh_group)
    with (
        pytest.raises(ExceptionGroup, match=r"2 callbacks or collectives")
        if mine
        else nullcontext() as caught
    ):
        bucketer.flush()
    if caught is not None:
        assert sorted(type(e).__name__ for e in caught.value.exceptions) == ["OSError", "ValueError"]
    assert called[4:] == ["d", "e"]
    bucketer.teardown()


# --- one process, fake group: memory, errors -------------------------------------------------------


@pytest.mark.parametrize("numel", (8 * 40, 8 * 4001))
@pytest.mark.parametrize("hold", [False, True])
def test_memory_stays_below_two_buckets(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, hold: bool, numel: int
) -> None:
    monkeypatch.setattr(comm, "reduce_scatter", lambda *_, async_op: Work([], ""))  # as slow as can be
    bucketer = ReduceScatterBucketer(1, hold_inputs=hold)
    for _ in range(2 * (3 * MIB // (numel * 4))):  # 6 buckets and a bit
        bucketer.reduce_scatter_async(torch.ones(numel), group, lambda _: None)
    bucketer.flush()
    assert MIB / 2 < bucketer.counters.peak_bytes <= 2 * MIB
    bucketer.teardown()
    assert bucketer.counters.held_bytes == 0


# --- overlap ---------------------------------------------------------------------------------------


def test_collective_overlaps_filling_the_next_bucket(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def issue(output: Tensor, packed: Tensor, group: object, async_op: bool) -> Work:
        assert async_op
        events.append(f"issue {packed[0]:g}")
        return Work(events, f"{packed[0]:g}")

    monkeypatch.setattr(comm, "reduce_scatter", issue)
    bucketer = ReduceScatterBucketer(8 * 10 * 4 / MIB)  # 10 elements per shard
    for k in range(8):
        events.append(f"add {k}")
        bucketer.reduce_scatter_async(
            torch.full((40,), float(k)), group, lambda _, k=k: events.append(f"call {k}")
        )
    events.append("flush")
    bucketer.flush()
    assert events == [
        *("add 0", "add 1", "add 2", "issue 0", "add 3"),
        *("add 4", "issue 2", "wait 0", "call 0", "call 1", "add 5"),
        *("add 6", "issue 4", "wait 2", "call 2", "call 3", "add 7"),
        *("flush", "issue 6", "wait 4", "call 4", "call 5", "wait 6", "call 6", "call 7"),
    ]


def test_failed_collective_drops_only_its_bucket(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucketer, called = ReduceScatterBucketer(), []

    def refuse_doubles(output: Tensor, packed: Tensor, group: object, async_op: bool) -> None:
        if packed.dtype is torch.float64:
            raise RuntimeError("no such sums")

    with monkeypatch.context() as patch:
        patch.setattr(comm, "reduce_scatter", refuse_doubles)
        for dtype in (torch.float64, torch.float32):
            bucketer.reduce_scatter_async(torch.ones(8, dtype=dtype), group, lambda r: called.append(r.dtype))
        with pytest.raises(RuntimeError, match="no such sums") as caught:
            bucketer.flush()
    assert "The 1 inputs of this bucket are dropped" in caught.value.__notes__[0]
    bucketer.reduce_scatter_async(torch.ones(8, dtype=torch.float64), group, lambda r: called.append(r.dtype))
    bucketer.flush()
    bucketer.teardown()
    assert called == [torch.float32, torch.float64]
    assert bucketer.counters.held_bytes == 0


# --- reductions and inputs, on real ranks ----------------------------------------------------------


@on_ranks(world_size=2)
def test_reductions() -> None:
    me, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    # Thirds are rounded in bfloat16, sums of them too: what was added in float32 is seen.
    own_inputs = [((torch.arange(40) + 7 * r) / 3).to(torch.bfloat16) for r in range(world)]
    whole = torch.stack(own_inputs)
    part = slice(me * 40 // world, (me + 1) * 40 // world)
    cases = [
        ({"op": "sum"}, torch.float32, lambda t: t.float().sum(0)),
        ({"op": "avg"}, torch.float64, lambda t: t.double().sum(0) / world),
        ({"op": "premul", "factor": 0.25}, torch.float32, lambda t: (t.float() * 0.25).sum(0)),
        ({"reduce_dtype": torch.float32}, torch.bfloat16, lambda t: t.float().sum(0).bfloat16()),
        (
            {"reduce_dtype": torch.float64, "op": "avg"},
            torch.bfloat16,
            lambda t: t.double().mean(0).bfloat16(),
        ),
        ({"reduce_dtype": torch.float64}, torch.int32, lambda t: t.int().sum(0).int()),
        ({"op": "avg"}, torch.complex64, lambda t: t.to(torch.complex64).sum(0) / world),
    ]
    for (options, dtype, expected), cap, hold in product(cases, (25, 50 / MIB, 0), (False, True)):
        bucketer = ReduceScatterBucketer(cap, hold_inputs=hold, **options)
        got: list[Tensor] = []
        mine = own_inputs[me].to(dtype)
        chunks = list(mine.chunk(world))
        for inputs in (mine, chunks, mine.view(-1, 2), [c.clone() for c in chunks]):
            bucketer.reduce_scatter_async(inputs, group, got.append)
        bucketer.flush()
        assert [g.ndim for g in got] == [1, 1, 2, 1], (options, cap)
        want = [expected(whole)[part].to(dtype)] * 4
        torch.testing.assert_close([g.flatten() for g in got], want, rtol=1e-6, atol=1e-6)
        same(mine, own_inputs[me].to(dtype))  # as it was handed over


@pytest.mark.parametrize(("cap", "hold"), ((25, False), (25, True), (0, False)))
@on_worlds
def test_dtensors_tensors_and_lists(cap: float, hold: bool) -> None:
    """Does not use the rank, so that it also runs with LocalTensors."""
    mesh = mesh_of((2, WORLD_SIZE // 2), ("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    whole = torch.arange(8.0 * 6).reshape(8, 6)
    bucketer = ReduceScatterBucketer(cap, hold_inputs=hold, check_ranks="always")
    got: dict[str, Any] = {}
    placed = [
        ((Partial(), Shard(0)), dp),
        ((Partial(), Shard(1)), dp),
        ((Partial(), Replicate()), dp),
        ((Shard(0), Partial()), tp),
    ]
    for placements, over in placed:
        gradient = distribute_tensor(whole, mesh, [p if p.is_shard() else Replicate() for p in placements])
        gradient = DTensor.from_local(gradient.to_local(), mesh, placements)  # terms that are all alike
        bucketer.reduce_scatter_async(gradient, over, partial(got.__setitem__, str(placements)))
    # A mesh without the group: the local part is reduced as it is.
    other = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    part = other.to_local()
    unplaced = {"part": other, "list": [other, other], "plain list": [part, part], "plain": part.flatten()}
    for name, given in unplaced.items():
        bucketer.reduce_scatter_async(given, dp, partial(got.__setitem__, name))
    bucketer.flush()
    same([got["plain list"], got["plain"]], [2 * part, got["part"].flatten()])
    results = [got[name] for name in (*(str(placements) for placements, _ in placed), "list")]
    assert not any(result._spec.has_partial() for result in results)
    same([result.full_tensor() for result in results], [2 * whole] * 5)
    assert got["list"].placements == other.placements
    assert not isinstance(got["part"], DTensor) and tuple(got["part"].shape) == (2, 6)
    for placements, over, message in (
        ((Replicate(), Shard(0)), dp, "expected Partial there"),
        ((Partial(), Partial()), dp, "Partial at most on the group's mesh dim"),
        ((Partial(), Partial()), dist.group.WORLD, "Partial at most"),
    ):
        with pytest.raises(BucketError, match=message):
            bucketer.reduce_scatter_async(DTensor.from_local(whole, mesh, placements), over)
    bucketer.teardown()


@pytest.mark.parametrize("cap", [25, 24 / MIB, 0])
@on_ranks
def test_attach_reduces_gradients(cap: float) -> None:
    me, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)).to(DEVICE_TYPE)
    data = torch.randn(world, 4, 5)

    def gradients(rank: int) -> list[Tensor]:
        return list(torch.autograd.grad(model(data[rank]).square().sum(), list(model.parameters())))

    means = [
        sum(terms).flatten() / world for terms in zip(*(gradients(r) for r in range(world)), strict=True)
    ]
    expected = [torch.cat([mean, torch.zeros(-mean.numel() % world)]).chunk(world)[me] for mean in means]
    shards: dict[nn.Parameter, Tensor] = {}
    bucketer = ReduceScatterBucketer(cap, op="avg")
    with bucketer.attach(model, group, shards.__setitem__):
        for _ in range(2):
            shards.clear()
            model(data[me]).square().sum().backward()
            assert not (shards and cap == 25) and all(p.grad is None for p in model.parameters())
            bucketer.flush()
            torch.testing.assert_close([shards[parameter] for parameter in model.parameters()], expected)
    model(data[me]).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    bucketer.teardown()


@on_ranks(world_size=2)
def test_ranks_with_different_inputs_are_reported() -> None:
    me, group = dist.get_rank(), dist.group.WORLD
    cases = [
        ([[4], [6]], [[6], [4]], r"rank 0: flush, 2 inputs, .*on \[\[4\], \[6\]\]; rank 1: .*\[\[6\], \[4\]"),
        ([[4], [6]], [[4]], r"rank 0: .* from input 1 on \[\[6\]\]; rank 1: .* 1 inputs, .*on \[\]"),
        ([[2, 3]], [[3, 2]], r"rank 0: .*\[\[2, 3\]\]; rank 1: .*\[\[3, 2\]\]"),
        ([[11]], [[4]], "rank 0: a single input, .*; rank 1: flush"),
        ([[8], [8]], [[8]], "rank 0: a full bucket, 1 inputs.*; rank 1: flush, 1 inputs"),
    ]
    for *shapes, message in cases:
        bucketer = ReduceScatterBucketer(2 * 10 * 4 / MIB)  # 10 elements per shard
        with pytest.raises(BucketError, match=message):
            for shape in shapes[me]:
                bucketer.reduce_scatter_async([torch.ones(shape)] * 2, group)
            bucketer.flush()
    bucketer, got = ReduceScatterBucketer(check_ranks="always"), []
    bucketer.reduce_scatter_async([torch.ones(4 + me)] * 2, group)
    with pytest.raises(BucketError, match="disagree"):
        bucketer.flush()
    bucketer.reduce_scatter_async([torch.ones(4)] * 2, group, got.append)  # it can be used on
    bucketer.flush()
    same(got[0], torch.full((4,), 2.0))
    bucketer.teardown()

    alone = dist.new_group([0])
    with pytest.raises(BucketError, match="process group that this rank belongs to") if me else nullcontext():
        ReduceScatterBucketer().reduce_scatter_async([torch.ones(1)], alone)


@pytest.mark.usefixtures("own_part")
def test_held_inputs_must_not_change(group: dist.ProcessGroup) -> None:
    bucketer = ReduceScatterBucketer(hold_inputs=True)
    spoil: list[tuple[Callable[[Tensor], object], str]] = [
        (lambda t: t.add_(1), "got tensor 1 of 2 in this bucket changed"),
        (lambda t: t.untyped_storage().resize_(0), "got tensor 1 of 2 in this bucket freed"),
    ]
    for change, message in spoil:
        tensors = [torch.ones(16), torch.ones(16)]
        for tensor in tensors:
            bucketer.reduce_scatter_async(tensor, group)
        change(tensors[1])
        with pytest.raises(BucketError, match=message):
            bucketer.flush()
    got: list[Tensor] = []
    with torch.inference_mode():
        bucketer.reduce_scatter_async(torch.ones(16), group, got.append)
        bucketer.reduce_scatter_async([torch.ones(2)] * 8, group, got.append)
    bucketer.flush()
    assert [g.tolist() for g in got] == [[1, 1], [1, 1]]
    bucketer.teardown()
    assert bucketer.counters.held_bytes == 0


# --- errors ----------------------------------------------------------------------------------------


def test_errors_are_those_fairscale_raises(group: dist.ProcessGroup) -> None:
    bucketer = ReduceScatterBucketer(bucket_cap_mb=25)
    with pytest.raises(
        AssertionError, match=r"received 7 inputs, expected group.size\(\) \(8\): pass one tensor"
    ):
        bucketer.reduce_scatter_async([torch.ones(3)] * 7, group)
    bucketer.reduce_scatter_async(input_list=[torch.ones(3)] * 8, group=group, callback_fn=None)
    (bucket,) = bucketer.buckets.values()
    message = r"Incorrect call of teardown: .*1 inputs .*expected none: call flush\(\)"
    for teardown in (bucketer.teardown, bucket.teardown):
        with pytest.raises(AssertionError, match=message) as caught:
            teardown()
        assert isinstance(caught.value, CoreError) and isinstance(caught.value, ValueError)
    bucketer.flush()
    bucketer.teardown()


@pytest.mark.usefixtures("own_part")
@pytest.mark.parametrize("cap", [25, 64 / MIB])
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("options", [{}, {"op": "avg"}, {"reduce_dtype": torch.float32}], ids=str)
def test_group_of_one_returns_its_inputs(
    fake_world: Callable[[int], None], options: dict[str, object], hold: bool, cap: float
) -> None:
    fake_world(1)
    bucketer, results = ReduceScatterBucketer(cap, hold_inputs=hold, **options), dict[int, Tensor]()
    dtype = torch.bfloat16 if options else torch.float32
    inputs = [
        *(torch.randn(n) for n in (1, 3, 7, 8, 0, 2 * JOIN_BYTES)),
        torch.tensor(2.0),
        torch.randn(2, 3).T,
    ]
    for _ in range(2):
        for k, tensor in enumerate(inputs):
            bucketer.reduce_scatter_async(
                [tensor.to(dtype)], dist.group.WORLD, partial(results.__setitem__, k)
            )
        bucketer.flush()
        for k, tensor in enumerate(inputs):
            same(results.pop(k), tensor.to(dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "max"}, "expected 'sum', 'avg', or 'premul'"),
        ({"op": "premul"}, "got op='premul' with factor=None"),
        ({"factor": 2.0}, "got op='sum' with factor=2.0"),
        ({"check_ranks": "often"}, "expected one of first, always, never"),
        ({"bucket_cap_mb": float("nan")}, "got bucket_cap_mb=.*, expected a finite number"),
        ({"bucket_cap_mb": "25"}, "got bucket_cap_mb=.*, expected a finite number"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BucketError, match=message):
        ReduceScatterBucketer(**options)


def test_invalid_inputs_are_refused(group: dist.ProcessGroup) -> None:
    averaging = ReduceScatterBucketer(op="avg")
    to_real = ReduceScatterBucketer(reduce_dtype=torch.float32)
    bucketer, holding = ReduceScatterBucketer(), ReduceScatterBucketer(hold_inputs=True)
    small, large = torch.ones(4), torch.ones(JOIN_BYTES)
    for _ in range(2):  # the second time on the fast path, if the input has one
        bucketer.reduce_scatter_async(torch.ones(8), group)
        holding.reduce_scatter_async(torch.ones(8), group)
        for use, inputs, message in [
            (holding, torch.ones(8).to_sparse(), "expected dense tensors"),
            (averaging, torch.ones(8, dtype=torch.int64), "expected a floating or complex dtype"),
            (to_real, torch.ones(8, dtype=torch.complex64), "expected a complex reduce_dtype"),
            (bucketer, torch.ones(9), r"expected a dim 0 that group.size\(\) \(8\) divides"),
            (bucketer, torch.tensor(1.0), "expected a dim 0"),
            (bucketer, torch.ones(8).to_sparse(), "expected dense tensors"),
            (bucketer, [1.0] * 8, "got float as an input"),
            (bucketer, [small] * 7 + [torch.ones(5)], r"got input 7 of float32\[5\] .* and input 0"),
            (bucketer, [small] * 7 + [small.double()], r"got input 7 of float64\[4\]"),
            (bucketer, [large] * 7 + [large[:-1]], r"got input 7 of"),
            (
                bucketer,
                [torch.ones(4, device="meta")] + [small] * 7,
                rf"got input 1 of float32\[4\] on {DEVICE_TYPE}",
            ),
            (bucketer, [], "received 0 inputs"),
        ]:
            with pytest.raises(BucketError, match=message):
                use.reduce_scatter_async(inputs, group)
    assert [b.pending for b in bucketer.buckets.values()] == [2]
    assert not averaging.buckets
