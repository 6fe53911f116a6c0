"""Order of the streams that use a piece of memory, as on CUDA with NCCL but without a GPU; see streams.py."""

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from core.tests.streams import RaceError, recorded_streams
from core.tests.test_comm_tensor import PROGRAMS
from dtbench_core import CommTensor, DTensor, Partial, Replicate, Shard
from dtbench_core.bucketer import BucketError, ReduceScatterBucketer, bucket
from dtbench_core.torch_compat import all_gather_single

KIB = 2**-10  # in MiB


# --- the recorder ----------------------------------------------------------------------------------


def test_recorder_detects_a_read_that_does_not_wait_for_a_write() -> None:
    with recorded_streams() as streams:
        x = torch.ones(4)
        written = streams.event()
        with streams.on("side"):
            with pytest.raises(RaceError, match=r"mul.* on side does not wait for .*ones.* on main"):
                x * 2
            streams.wait_for(written)
            y = x * 2
            read = streams.event()
        with pytest.raises(RaceError, match=r"on main does not wait for aten.mul"):
            y + 1
        with pytest.raises(RaceError, match=r"add_.* on main does not wait for aten.mul"):
            x.view(2, 2).add_(1)  # and a write for reads
        streams.wait_for(read)
        x.add_(y)


def test_recorder_detects_memory_that_is_reused_too_early() -> None:
    with recorded_streams() as streams:
        x = torch.ones(4)
        written = streams.event()
        with streams.on("side"):
            streams.wait_for(written)
            x * 2
        del x
        with pytest.raises(RaceError, match=r"given to others on main does not wait for aten\.mul"):
            torch.ones(4)


# --- the bucketer ----------------------------------------------------------------------------------


STREAMS = st.sampled_from(["main", "side", "third"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 40), DTYPES, STREAMS), max_size=12),
    st.sampled_from([0, 0.25, 1, 1000]),
    st.sampled_from(["sum", "avg"]),
    st.booleans(),
    st.booleans(),
    STREAMS,
)
def test_bucketer_orders_inputs_of_several_streams(
    inputs: list[tuple[int, torch.dtype, str]],
    cap_kib: float,
    op: Any,
    hold: bool,
    listed: bool,
    flushing: str,
) -> None:
    """Reads and frees each result on the stream of its callback, and frees each input on its own stream."""
    dist.init_process_group("fake", rank=1, world_size=4, store=dist.HashStore())
    try:
        with recorded_streams() as streams, pytest.MonkeyPatch.context() as patch:
            patch.setattr(bucket, "FIRST_ELEMENTS", 8)  # rows grow
            bucketer = ReduceScatterBucketer(cap_kib * KIB, op=op, hold_inputs=hold, check_ranks="never")
            called: list[int] = []
            for _ in range(2):
                for numel, dtype, stream in inputs:
                    with streams.on(stream):
                        shards = [torch.ones(numel, dtype=dtype) for _ in range(4)]
                        given: Any = shards if listed else torch.cat(shards)
                        callback = lambda result: called.append(result.mul_(2).numel())  # noqa: E731
                        bucketer.reduce_scatter_async(given, dist.group.WORLD, callback)
                        for tensor in [] if hold else shards if listed else [given]:
                            tensor.fill_(7)  # a tensor that is not held may be reused immediately
                        del shards, given
                with streams.on(flushing):
                    bucketer.flush()
            assert sorted(called) == sorted(2 * [numel for numel, _, _ in inputs])
            with streams.on("main"):
                bucketer.teardown()
                torch.ones(4)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("cap_kib", [0.25, 1000])
def test_attach_orders_gradients_of_several_streams(group: dist.ProcessGroup, cap_kib: float) -> None:
    with recorded_streams() as streams:
        bucketer = ReduceScatterBucketer(cap_kib * KIB, check_ranks="never")
        parameters = [torch.nn.Parameter(torch.ones(numel)) for numel in (64, 1, 9, 128, 64)]
        shards: list[Tensor] = []
        with bucketer.attach(
            torch.nn.ParameterList(parameters), group, lambda _, shard: shards.append(shard * 2)
        ):
            ready = streams.event()
            for parameter, stream in zip(parameters, ["side", "main", "third", "side", "main"], strict=True):
                with streams.on(stream):
                    streams.wait_for(ready)
                    # On a CPU autograd runs on one stream: a hook is called as on the stream of its gradient.
                    parameter.square().sum().backward()
            bucketer.flush()
        assert [shard.numel() for shard in sorted(shards, key=Tensor.numel)] == [1, 2, 8, 8, 16]


def test_streams_outside_a_capture_are_not_waited_for_in_it(group: dist.ProcessGroup) -> None:
    """torch.cuda.graph has waited for them, and a capture cannot wait for their events."""
    with recorded_streams() as streams:
        bucketer = ReduceScatterBucketer(1, check_ranks="never", hold_inputs=True)
        bucketer.reduce_scatter_async(torch.ones(16), group, lambda result: result.add_(1))
        bucketer.flush()
        streams.wait_for(streams.event(), "captured")
        with streams.on("captured"):
            streams.capturing, streams.captured_streams = True, {"captured"}
            bucketer.reduce_scatter_async(torch.ones(16), group, lambda result: result.add_(1))
            bucketer.flush()
            streams.capturing = False
        bucketer.reduce_scatter_async(torch.ones(16), group, lambda result: result.add_(1))
        bucketer.flush()


def test_streams_of_one_capture_wait_for_each_other(group: dist.ProcessGroup) -> None:
    """Also if the bucket was used on the captured stream before the capture began."""
    with recorded_streams() as streams:
        bucketer = ReduceScatterBucketer(1, check_ranks="never")
        for streams.capturing in (False, True):
            bucketer.reduce_scatter_async(torch.ones(16), group, lambda result: result.add_(1))
            with streams.on("side"):
                bucketer.reduce_scatter_async(torch.ones(16), group, lambda result: result.add_(1))
            bucketer.flush()
        streams.capturing = False


def test_check_of_ranks_is_refused_in_a_capture(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _group: "nccl")  # a fake group is never checked
    with recorded_streams() as streams:
        bucketer = ReduceScatterBucketer(1)
        bucketer.reduce_scatter_async(torch.ones(16), group)
        streams.capturing = True
        with pytest.raises(
            BucketError, match=r"in the capture of a CUDA graph.* run one round, up to flush\(\)"
        ):
            bucketer.flush()
        streams.capturing = False


# --- CommTensor ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_comm_tensor_waits_before_its_first_use(fake_world: Any, name: str) -> None:
    fake_world(4)
    with recorded_streams() as streams:
        outs = PROGRAMS[name](torch.ones(8), CommTensor)
        assert "wait" not in streams.log
        for out in outs:
            out * 2
            out.add_(1)
        assert "wait" in streams.log


@pytest.mark.parametrize("completed", [False, True])
def test_comm_tensor_is_waited_for_on_each_stream(group: dist.ProcessGroup, completed: bool) -> None:
    with recorded_streams() as streams:
        x = CommTensor(torch.ones(4))
        dist.all_reduce(x, async_op=True)
        streams.completed = completed
        with streams.on("side"):
            x * 2
        x * 3  # the other stream's wait is not this one's
        x * 4
        # Never the same handle twice: a second wait of gloo's reduce_scatter_tensor writes its result again.
        assert streams.log.count("wait") == 1
        streams.completed = True
        assert "in flight" not in repr(x * 1) and not x._memory.writing


def test_works_that_never_report_completion_are_waited_for(group: dist.ProcessGroup) -> None:
    """The reduce-scatters of gloo never do."""
    with recorded_streams() as streams:
        x = CommTensor(torch.ones(4))
        dist.all_reduce(x, async_op=True)
        streams.works[0].is_completed = lambda: False
        streams.completed = True
        x * 2
        assert not x._memory.writing


def test_wait_in_a_capture_holds_after_it(group: dist.ProcessGroup) -> None:
    with recorded_streams() as streams:
        x = CommTensor(torch.ones(4))
        streams.capturing = True
        dist.all_reduce(x, async_op=True)
        with streams.on("side"):
            x * 2
        x * 2
        streams.capturing = False
        streams.wait_for(streams.event("side"), "later")
        with streams.on("later"):
            x + 1
        assert not x._memory.writing and streams.log.count("wait") == 1


def test_write_waits_for_collectives_that_read_on_other_streams(group: dist.ProcessGroup) -> None:
    with recorded_streams() as streams:
        out, x = CommTensor(torch.ones(32)), CommTensor(torch.ones(4))
        all_gather_single(out, x, async_op=True)
        began = streams.event()
        with streams.on("side"):
            streams.wait_for(began)
            out * 2
        x.add_(1)


# --- what NCCL has and gloo lacks ------------------------------------------------------------------


def test_no_event_is_queried_in_a_capture(group: dist.ProcessGroup) -> None:
    with recorded_streams() as streams:
        streams.capturing = streams.completed = True
        x = CommTensor(torch.ones(4))
        for _ in range(3):
            all_gather_single(CommTensor(torch.ones(32)), x, async_op=True)
        x.add_(1)
        assert streams.log.count("wait") == 3


def test_collectives_of_an_nccl_group_are_waited_for_after_its_end(group: dist.ProcessGroup) -> None:
    with recorded_streams() as streams:
        bucketer = ReduceScatterBucketer(1, check_ranks="never")
        with streams.nccl_group():
            x, y = CommTensor(torch.ones(4)), CommTensor(torch.ones(4))
            dist.all_reduce(x, async_op=True)
            dist.all_reduce(y, async_op=True)
            bucketer.reduce_scatter_async(torch.ones(16), group, lambda r: r.add_(1))
            with pytest.raises(RaceError, match="in an NCCL group that has not ended"):
                y * 1
        x * 2
        bucketer.flush()


@pytest.mark.parametrize("hold", [False, True])
def test_aborted_communicator_drops_one_bucket(group: dist.ProcessGroup, hold: bool) -> None:
    with recorded_streams() as streams:
        bucketer = ReduceScatterBucketer(64 * 4 / 2**20, hold_inputs=hold, check_ranks="never")
        called: list[Tensor] = []
        for _ in range(2):  # the first is under way when the second comes
            bucketer.reduce_scatter_async(torch.ones(64), group, called.append)
        streams.works[0].aborted = "NCCL communicator was aborted on rank 0"
        with pytest.raises(RuntimeError, match="was aborted") as caught:
            bucketer.reduce_scatter_async(torch.ones(64), group, called.append)
        assert any("inputs of this bucket are dropped" in note for note in caught.value.__notes__)
        # The aborted kernel may still run: nobody else gets its buffer.
        bucketer.reduce_scatter_async(torch.ones(64), group, called.append)
        bucketer.flush()
        assert len(called) == 3
        bucketer.teardown()
        assert bucketer.counters.held_bytes == 0


def test_error_of_a_wait_is_raised_by_the_reader(group: dist.ProcessGroup) -> None:
    with recorded_streams() as streams:
        x = CommTensor(torch.ones(4))
        dist.all_reduce(x, async_op=True)
        streams.works[0].aborted = "NCCL error: unhandled system error"
        for _ in range(2):  # the second read, too: what it holds was never written
            with pytest.raises(RuntimeError, match="unhandled system error"):
                x * 2


# --- redistribution --------------------------------------------------------------------------------

PLACEMENTS = [Replicate(), Partial(), Shard(0), Shard(1)]


@pytest.mark.parametrize("functional", [False, True])
def test_redistribution_orders_its_streams(fake_world: Any, functional: bool) -> None:
    fake_world(8)
    mesh = init_device_mesh("cpu", (2, 4))
    pairs = list(itertools.product(PLACEMENTS, repeat=2))
    with recorded_streams(functional=functional) as streams:
        for src, dst in itertools.product(pairs, repeat=2):
            if any(a != b and b == Partial() for a, b in zip(src, dst, strict=True)):
                continue
            x = DTensor.from_local(torch.ones(8, 8), mesh, src, run_check=False)
            moved = x.redistribute(mesh, dst).to_local()
            x.to_local().add_(1)  # what was sent may be written to at once
            moved.add_(1)
        assert any("reduce" in line for line in streams.log)
