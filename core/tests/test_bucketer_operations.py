"""Device operations of the bucketer: their number per bucket, overlap with computation, memory.

Dispatch modes count them on a CPU; no time is measured.
"""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from core.tests.gloo_world import mesh_of, on_gloo_ranks, on_ranks
from core.tests.operations import Operations, Work, counted, within
from dtbench_core import comm
from dtbench_core.bucketer import ReduceScatterBucketer
from dtbench_core.bucketer.bucket import Bucket

KIB, MIB = 2**10, 2**20

# --- operations per bucket -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [lambda t: t, lambda t: t.view(64, -1), lambda t: list(t.chunk(8))],
    ids=["flat", "matrix", "chunks"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"op": "avg"},
        {"op": "premul", "factor": 0.5},
        {"op": "avg", "reduce_dtype": torch.float32},
    ],
    ids=str,
)
def test_held_bucket_takes_few_operations(
    group: dist.ProcessGroup, form: Callable[[Tensor], Any], options: dict[str, Any]
) -> None:
    """Buckets of 4096 tensors take one packing, one collective, and at most one op each to scale and to convert."""
    dtype = torch.bfloat16 if "reduce_dtype" in options else torch.float32
    inputs = [form(torch.ones(16 * KIB // dtype.itemsize, dtype=dtype)) for _ in range(4096)]
    bucketer = ReduceScatterBucketer(hold_inputs=True, **options)
    with counted() as operations:
        for given in inputs:
            bucketer.reduce_scatter_async(given, group, lambda _: None)
        bucketer.flush()
    issued = bucketer.counters.collectives
    most = 2 + ("op" in options) + ("reduce_dtype" in options)
    assert issued == (6 if "reduce_dtype" in options else 3)
    assert len(operations.names) <= most * issued, Counter(operations.names)


def test_odd_shards_take_one_more_operation(group: dist.ProcessGroup) -> None:
    bucketer = ReduceScatterBucketer(hold_inputs=True)
    with counted() as operations:
        for numel in (8, 64, 8 * 6, 128):
            bucketer.reduce_scatter_async(torch.ones(numel), group, lambda _: None)
        operations.names.clear()
        bucketer.flush()
    assert operations.names == ["new_zeros", "_chunk_cat.out", "c10d::_reduce_scatter_base_"]


def test_copied_input_takes_one_operation(group: dist.ProcessGroup) -> None:
    bucketer = ReduceScatterBucketer(hold_inputs=False)
    inputs = [torch.ones(4 * KIB) for _ in range(100)]
    for _ in range(2):  # from the second round on, the length of the rows is known
        with counted() as operations:
            for tensor in inputs:
                bucketer.reduce_scatter_async(tensor, group, lambda _: None)
            bucketer.flush()
    assert Counter(operations.names) == {"copy_": 100, "c10d::_reduce_scatter_base_": 1}


# --- attach ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [16, 17])  # 17: padded for 8 ranks
@pytest.mark.parametrize("cap_kib", [0.25, 4, 1000])
@pytest.mark.parametrize("hold", [False, True])
def test_attach_overlaps_every_collective_with_computation(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, features: int, cap_kib: float, hold: bool
) -> None:
    """0.25 KiB: weights are larger than a bucket. 4 KiB: a bucket holds three layers. 1000 KiB: all."""
    model = nn.Sequential(*(nn.Linear(features, features) for _ in range(6)))
    bucketer = ReduceScatterBucketer(cap_kib * KIB / MIB, check_ranks="never", hold_inputs=hold)
    shards: dict[nn.Parameter, Tensor] = {}
    with counted() as operations, bucketer.attach(model, group, shards.__setitem__):
        loss, events, issued = model(torch.ones(2, features)).sum(), operations.names, list[int]()

        def issue(output: Tensor, packed: Tensor, group: object, async_op: bool) -> Work:
            events.append(f"issue {len(issued)}")
            issued.append(packed.numel())
            return Work(events, len(issued) - 1)

        monkeypatch.setattr(comm, "reduce_scatter", issue)
        events.clear()
        loss.backward()
        ended = len(events)
        bucketer.flush()
    assert set(shards) == set(model.parameters())
    for index in range(len(issued)):
        start, end = events.index(f"issue {index}"), events.index(f"wait {index}")
        assert end > ended or {"mm", "sum.dim_IntList"} & set(events[start:end]), (index, events)
    backward = Counter(events[:ended])
    assert not {"copy_", "clone", "stack", "cat", "_foreach_copy_"} & set(backward), backward
    assert backward["constant_pad_nd"] == (6 if (features, cap_kib) == (17, 0.25) else 0)


def test_inputs_are_copied_into_a_bucket_that_holds_gradients(group: dist.ProcessGroup) -> None:
    """An input of reduce_scatter_async may be reused immediately, even in a bucket that holds gradients."""
    parameter = nn.Parameter(torch.ones(20))
    bucketer = ReduceScatterBucketer(op="avg")
    results: list[Tensor] = []
    inputs: list[Any] = [torch.ones(16), [torch.ones(2) for _ in range(8)], torch.ones(8, 3)]
    with (
        counted() as operations,
        bucketer.attach(nn.ParameterList([parameter]), group, lambda _, s: results.append(s)),
    ):
        parameter.sum().backward()
        operations.names.clear()
        for given in inputs:
            bucketer.reduce_scatter_async(given, group, results.append)
        # A list of small shards is joined first.
        assert operations.names == ["clone", "stack", "clone", "clone"]
        parameter.sum().backward()
        bucketer.flush()
    assert [tuple(result.shape) for result in results] == [(3,), (2,), (2,), (1, 3), (3,)]


# --- memory ----------------------------------------------------------------------------------------

LAYERS, FEATURES = 4, 256


# Weights larger than a bucket; a bucket of the size of FSDP2's, which has one for each layer.
@pytest.mark.parametrize("cap_mb", [0.1, (FEATURES + 1) * FEATURES * 4 / MIB])
@on_gloo_ranks(world_size=2)
def test_attach_allocates_no_more_than_fsdp2(cap_mb: float) -> None:
    """Reduces the gradients of the same parameters both ways, and compares the gradients' shards, too."""
    me, world = dist.get_rank(), dist.get_world_size()

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)))

    given = torch.arange(4.0 * FEATURES).view(4, FEATURES).mul(1 + me) / 1000
    sharded, model, theirs, ours = make(), make(), Operations(), Operations()
    for layer in sharded:
        fully_shard(layer, mesh=mesh_of((world,)))
    shards: dict[nn.Parameter, Tensor] = {}
    bucketer = ReduceScatterBucketer(cap_mb, op="avg", check_ranks="never")
    active: Callable[[], int] = comm.dispatch_modes_active
    with pytest.MonkeyPatch.context() as patch, bucketer.attach(model, dist.group.WORLD, shards.__setitem__):
        # Only what is allocated to reduce gradients, not to compute them.
        patch.setattr(_fsdp_param_group, "foreach_reduce", within(theirs, _fsdp_param_group.foreach_reduce))
        patch.setattr(comm, "dispatch_modes_active", lambda: active() - 1)
        patch.setattr(Bucket, "add", within(ours, Bucket.add))
        sharded(given).sum().backward()
        model(given).sum().backward()
        within(ours, bucketer.flush)()
    for parameter, reference in zip(model.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(shards[parameter], reference.grad.to_local().flatten())
    assert ours.allocated <= theirs.allocated and ours.peak <= theirs.peak


# --- values ----------------------------------------------------------------------------------------


@on_ranks(world_size=2)
def test_kept_results_are_not_written_to_by_later_buckets() -> None:
    me, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for hold, options in product((False, True), ({}, {"op": "avg"}, {"op": "premul", "factor": 2.0})):
        bucketer = ReduceScatterBucketer(world * 4 * 8 / MIB, hold_inputs=hold, **options)
        kept: list[Tensor] = []
        for value in range(12):
            bucketer.reduce_scatter_async(
                torch.full((3 * world,), float(value + me)),
                group,
                kept.append if value % 4 == 0 else lambda result: result.fill_(-1),
            )
        bucketer.flush()
        scale = {"avg": 0.5, "premul": 2.0}.get(str(options.get("op")), 1.0)
        for value, result in zip((0, 4, 8), kept, strict=True):
            assert result.tolist() == [scale * (2 * value + 1)] * 3
            assert result._version == kept[0]._version  # written to by itself alone
        bucketer.teardown()
