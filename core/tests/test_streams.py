"""Order of the streams that use a piece of memory, as on CUDA with NCCL but without a GPU.

A recorder notes on which CUDA stream each op would run, while ops run on the CPU. It raises RaceError if two streams
use memory without an event between them. Collectives behave as with NCCL. An asynchronous one runs on a stream of its
process group, after the work of the current stream. `Work.wait()` makes the current stream wait for it and releases the
tensors, which the Work keeps alive until then. A synchronous one runs on the current stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.tests.test_comm_tensor import PROGRAMS
from dtbench_core import CommTensor, DTensor, Partial, Replicate, Shard, comm, comm_tensor
from dtbench_core.bucketer import BucketError, ReduceScatterBucketer, bucket, packing
from dtbench_core.torch_compat import all_gather_single

MAIN = "main"
# Stream -> the number of its steps that are known to be finished.
Clock = dict[str, int]


class RaceError(AssertionError):
    """Two streams use memory at the same time."""


@dataclass
class _Memory:
    """The uses of one storage.

    Attributes:
        home: the stream of its allocation, on which the allocator reuses the memory.
        written: the last write, as (stream, step, op).
        read: the reads since then.
        recorded: the streams passed to `record_stream`; the allocator waits for their work, too.
    """

    alive: StorageWeakRef
    home: str
    written: tuple[str, int, str]
    read: list[tuple[str, int, str]] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)


class _Work(Work):
    """The handle of a collective.

    Attributes:
        event: None until the kernel is launched.
        aborted: the message of the watchdog that aborted it.
    """

    def __init__(self, streams: Streams, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._streams, self._kept = streams, tensors
        self.event: Clock | None = None
        self.aborted: str | None = None

    def wait(self, timeout: Any = None) -> bool:
        self._streams.log.append("wait")
        if self.aborted:
            raise RuntimeError(self.aborted)
        if self.event is None:  # NCCL would return immediately, with nothing written
            raise RaceError("a collective is waited for in an NCCL group that has not ended")
        self._streams.wait_for(self.event)
        self._kept = []
        return True

    def is_completed(self) -> bool:
        return self.event is not None and self._streams.host_sees(self.event)


@dataclass(frozen=True)
class _Event:
    """An event with the methods of torch.cuda.Event. `captured`: it belongs to a CUDA graph and is unknown outside."""

    streams: Streams
    clock: Clock
    captured: bool

    def query(self) -> bool:
        assert not self.captured, "an event of a capture is queried"
        return self.streams.host_sees(self.clock)


@dataclass(frozen=True)
class _Stream:
    """A stream with the methods of torch.cuda.Stream that the core uses."""

    streams: Streams
    name: str

    def record_event(self) -> _Event:
        return _Event(self.streams, self.streams.event(self.name), self.streams.is_capturing(self))

    def wait_event(self, event: _Event) -> None:
        assert event.captured == self.streams.capturing, "an event of a capture is waited for outside of it"
        self.streams.wait_for(event.clock, self.name)


class Streams(TorchDispatchMode):
    """Records streams while entered: `on(name)` switches streams, `event()` and `wait_for` order them.

    Attributes:
        completed: whether each Work and event reports that it is finished.
        capturing: whether a CUDA graph is being captured.
        captured_streams: the streams that take part in the capture; all if empty.
        log: the executed ops, as "stream: op".
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = MAIN
        self.completed = self.capturing = False
        self.captured_streams: set[str] = set()
        self.log: list[str] = []
        self.works: list[_Work] = []
        self._seen: dict[str, Clock] = {}
        self._queued: list[Callable[[], None]] | None = None  # of an NCCL group that has begun
        self._memory: dict[int, _Memory] = {}
        self._pending: dict[int, Clock] = {}  # of results of functional collectives
        self._steps = itertools.count(1)

    # ---- what a program does with streams ----

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def nccl_group(self) -> Iterator[None]:
        """Collectives between ncclGroupStart and ncclGroupEnd, which are launched at the end."""
        self._queued = []
        yield
        queued, self._queued = self._queued, None
        for launch in queued:
            launch()

    def event(self, stream: str | None = None) -> Clock:
        """Returns an event after all work of the stream, by default of the current one."""
        name = self.current if stream is None else stream
        return {**self._clock(name), name: next(self._steps)}

    def wait_for(self, event: Clock, stream: str | None = None) -> None:
        clock = self._clock(self.current if stream is None else stream)
        for other, step in event.items():
            clock[other] = max(clock.get(other, 0), step)

    def host_sees(self, event: Clock) -> bool:
        """Returns whether the event is finished; if so, later work on any stream comes after it."""
        assert not self.capturing, "an event is queried while its stream is captured"
        for stream in [*self._seen, self.current] if self.completed else ():
            self.wait_for(event, stream)
        return self.completed

    def is_capturing(self, stream: _Stream) -> bool:
        """Returns whether the stream takes part in the capture of a CUDA graph."""
        return self.capturing and stream.name in (self.captured_streams or {stream.name})

    def record_stream(self, tensor: torch.Tensor, stream: _Stream) -> None:
        """Replaces Tensor.record_stream."""
        self._of(tensor).recorded.add(stream.name)

    # ---- recording ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t not in (torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # a wrapper's own ops come back
        self._freed()
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._collective(func, args, kwargs)
        reads, writes = _uses(func, args, kwargs)
        self._use(reads, writes, str(func), self.current)
        result = func(*args, **kwargs)
        self._use([], [leaf for leaf in tree_leaves(result) if _is_new(leaf, args)], str(func), self.current)
        return result

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if func._schema.name.endswith("wait_tensor"):
            self.wait_for(self._pending.pop(tensors[0].untyped_storage()._cdata, {}))
            self.log.append("wait")
            return func(*args, **kwargs)
        functional = func.namespace == "_c10d_functional"
        alone = functional or named.get("async_op", True)
        group = named.get("process_group")
        stream = f"of {ProcessGroup.unbox(group).group_name}" if alone and group is not None else self.current
        stream = f"of {named['group_name']}" if functional else stream
        reads, writes = _uses(func, args, kwargs)
        work = _Work(self, tensors if alone else [])

        def launch() -> None:
            if alone:
                self.wait_for(self.event(), stream)
            self._use(reads, writes, str(func), stream)
            work.event = self.event(stream)

        if self._queued is None or functional:
            launch()
        else:
            self._queued.append(launch)
        result = func(*args, **kwargs)
        if functional:
            self._allocate(result)
            self.wait_for(self.event(), stream)
            self._use([], [result], str(func), stream)
            self._pending[result.untyped_storage()._cdata] = self.event(stream)
            return result
        self.works.append(work)  # a handle that is dropped keeps its tensors, as the watchdog does
        boxed = work.boxed()
        return (*result[:-1], boxed) if isinstance(result, tuple) else boxed

    def _use(self, reads: list[Any], writes: list[Any], what: str, stream: str) -> None:
        step = next(self._steps)
        self._clock(stream)[stream] = step
        self.log.append(f"{stream}: {what}")
        for tensor in reads:
            memory = self._of(tensor)
            self._check(memory.written, stream, what)
            memory.read.append((stream, step, what))
        for tensor in writes:
            memory = self._of(tensor)
            for use in (memory.written, *memory.read):
                self._check(use, stream, what)
            memory.written, memory.read = (stream, step, what), []

    def _check(self, use: tuple[str, int, str], stream: str, what: str) -> None:
        other, step, earlier = use
        if other != stream and self._clock(stream).get(other, 0) < step:
            raise RaceError(f"{what} on {stream} does not wait for {earlier} on {other}")

    def _of(self, tensor: torch.Tensor) -> _Memory:
        key = tensor.untyped_storage()._cdata
        if key not in self._memory:
            self._allocate(tensor)
        return self._memory[key]

    def _allocate(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        use = (self.current, next(self._steps), "the allocation")
        self._clock(self.current)[self.current] = use[1]
        self._memory[storage._cdata] = _Memory(StorageWeakRef(storage), self.current, use)

    def _freed(self) -> None:
        """Checks freed storages: the next op on their home stream may overwrite the memory."""
        for key in [key for key, memory in self._memory.items() if memory.alive.expired()]:
            memory = self._memory.pop(key)
            # The allocator waits for all present work of the recorded streams.
            waited_for = [self._clock(stream) | {stream: next(self._steps)} for stream in memory.recorded]
            for stream, step, op in (memory.written, *memory.read):
                if all(clock.get(stream, 0) < step for clock in waited_for):
                    self._check((stream, step, op), memory.home, "memory that is given to others")

    def _clock(self, stream: str) -> Clock:
        return self._seen.setdefault(stream, {})


def _uses(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns (tensors that an op reads, tensors that it writes)."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    returns = func._schema.returns
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return reads, writes  # a view
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        # The schemas of c10d do not mark outputs: they are the first argument.
        written = argument.alias_info is not None and argument.alias_info.is_write
        written |= func.namespace == "c10d" and position == 0
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if tensors and (not written or func._schema.name in ("c10d::allreduce_", "c10d::broadcast_")):
            reads += tensors
        if written:
            writes += tensors
    return reads, writes


def _is_new(leaf: Any, args: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return False
    storages = [t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
    return leaf.untyped_storage()._cdata not in storages


@contextmanager
def recorded_streams(*, functional: bool = False) -> Iterator[Streams]:
    """Makes the core use a recorder as if it were a GPU. `functional`: with functional collectives, as in any mode."""
    streams = Streams()
    active: Callable[[], int] = comm.dispatch_modes_active
    with pytest.MonkeyPatch.context() as patch:
        for module in (comm_tensor, packing):
            patch.setattr(module, "current_stream", lambda _device: _Stream(streams, streams.current))
        patch.setattr(packing, "is_stream_capturing", streams.is_capturing)
        patch.setattr(comm_tensor, "is_capturing", lambda _device: streams.capturing)
        patch.setattr(bucket, "is_capturing", lambda _device: streams.capturing)
        patch.setattr(packing, "stream_handle", lambda _device: streams.current)
        patch.setattr(packing, "record_stream", streams.record_stream)
        if not functional:
            patch.setattr(comm, "dispatch_modes_active", lambda: active() - 1)
        with streams:
            yield streams


KIB = 2**-10  # in MiB


# ---- the recorder ----


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


# ---- the bucketer ----


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


# ---- CommTensor ----


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


# ---- what NCCL has and gloo lacks ----


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


# ---- redistribution ----

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
