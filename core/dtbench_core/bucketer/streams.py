"""Orders the streams on which one bucket is used.

A gradient's hook runs on the stream of the forward op that used the parameter, and `flush()` on the caller's. So inputs
may come on one stream, be packed on another and be waited for on a third.

Two things must hold. A stream that uses the bucket's memory waits for the stream that used it before. And memory
returns to the allocator only after every stream that used it: the allocator itself orders a freed block behind the
stream that allocated it and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtbench_core.torch_compat import current_stream, is_capturing, record_stream, stream_handle


class StreamUse(NamedTuple):
    """A stream that was current when a bucket was used.

    Attributes:
        stream: the torch.cuda.Stream.
        captured: whether a CUDA graph was being captured from it.
    """

    stream: Any
    captured: bool

    @classmethod
    def current(cls, device: torch.device) -> StreamUse:
        return cls(current_stream(device), is_capturing(device))

    def wait_for(self, earlier: StreamUse) -> None:
        """Makes this stream wait for all work that `earlier` holds by now.

        A capture cannot wait for work outside of it; whoever captures has waited for that work before.
        """
        if earlier.captured or not self.captured:
            self.stream.wait_event(earlier.stream.record_event())


class StreamOrder:
    """Makes all uses of one bucket's memory happen as if on one stream. Does nothing on a CPU.

    Streams are identified by their handles, which cost a tenth of what asking for the stream object costs.

    Attributes:
        needed: whether the device has streams. Where each input counts, asking this is cheaper than a call.
    """

    def __init__(self, device: torch.device) -> None:
        self.needed = stream_handle(device) is not None
        self._device = device
        self._last_handle: object = None
        self._last_use: StreamUse | None = None
        self._streams: dict[object, Any] = {}  # handle -> stream, of all that have used the bucket

    def note_input(self, noted: dict[object, StreamUse]) -> None:
        """Adds the current stream to `noted`, the streams on which a bucket's inputs were handed over."""
        handle = stream_handle(self._device)
        if handle is not None and handle not in noted:
            noted[handle] = StreamUse.current(self._device)

    def enter(self, noted: dict[object, StreamUse] | None = None, inputs: Sequence[Tensor] = ()) -> None:
        """Makes the current stream wait for the one that used the bucket's memory last.

        It also waits for `noted`, the streams of `inputs`, whose memory then outlives the current stream's reads.
        """
        handle = stream_handle(self._device)
        if handle != self._last_handle:
            use = StreamUse.current(self._device)
            if self._last_use is not None:
                use.wait_for(self._last_use)
            self._last_handle, self._last_use = handle, use
            self._streams[handle] = use.stream
        if noted and noted.keys() != {handle}:
            use = StreamUse.current(self._device)
            for input_use in noted.values():
                use.wait_for(input_use)
            for tensor in inputs:
                record_stream(tensor, use.stream)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keeps memory from being reallocated before every stream that has used the bucket is done with it."""
        if len(self._streams) > 1:
            for tensor, stream in product(tensors, self._streams.values()):
                record_stream(tensor, stream)
