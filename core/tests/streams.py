"""Records on which CUDA stream each op would run, while ops run on the CPU.

Raises RaceError if two streams use memory without an event between them. Collectives behave as with NCCL. An
asynchronous one runs on a stream of its process group, after the work of the current stream. `Work.wait()` makes the
current stream wait for it and releases the tensors, which the Work keeps alive until then. A synchronous one runs on
the current stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup, Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtbench_core import comm, comm_tensor
from dtbench_core.bucketer import bucket, packing

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
    arguments = func._schema.arguments
    for position, argument in enumerate(arguments):
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
