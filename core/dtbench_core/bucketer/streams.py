"""Orders the streams on which a bucket is used.

A gradient's hook runs on the stream of the forward op that used the parameter, and `flush()` on the caller's. So an
input may arrive on one stream, be packed on another and be waited for on a third.

Two conditions must hold:

- A stream that uses the bucket's memory waits for the stream that used it before.
- Memory returns to the allocator only after all streams that used it have finished. The allocator itself waits only
  for the stream that allocated the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dtbench_core.torch_compat import current_stream, is_stream_capturing, record_stream, stream_handle


class StreamOrder:
    """Orders all uses of one bucket's memory as if they were on a single stream. Does nothing on a CPU.

    Streams are identified by their handles: getting a handle costs a tenth of getting the stream object.

    Attributes:
        has_streams: whether the device has streams. On hot paths, reading this first is cheaper than a call.
    """

    def __init__(self, device: torch.device) -> None:
        self.has_streams = stream_handle(device) is not None
        self._device = device
        self._last_handle: object = None
        self._streams: dict[object, Any] = {}  # handle -> stream, for every stream that has used the bucket

    def record_stream_of_input(self, input_streams: dict[object, Any]) -> None:
        """Adds the current stream to `input_streams`: handle -> stream, for every stream on which an input arrived."""
        handle = stream_handle(self._device)
        if handle is not None and handle not in input_streams:
            input_streams[handle] = current_stream(self._device)

    def enter(self, input_streams: dict[object, Any] | None = None, inputs: Sequence[Tensor] = ()) -> None:
        """Makes the current stream wait for the stream that used the bucket's memory last.

        Args:
            input_streams: the streams of `inputs`, which the current stream waits for, too.
            inputs: their memory is kept until the current stream has read it.
        """
        handle = stream_handle(self._device)
        if handle != self._last_handle:
            self._streams[handle] = current_stream(self._device)
            if self._last_handle is not None:
                _wait_for(self._streams[handle], self._streams[self._last_handle])
            self._last_handle = handle
        if input_streams and input_streams.keys() != {handle}:
            for stream in input_streams.values():
                _wait_for(self._streams[handle], stream)
            for tensor in inputs:
                record_stream(tensor, self._streams[handle])

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keeps memory from being reallocated before every stream that has used the bucket has finished with it."""
        if len(self._streams) > 1:
            for tensor, stream in product(tensors, self._streams.values()):
                record_stream(tensor, stream)


def _wait_for(stream: Any, earlier: Any) -> None:
    """Makes `stream` wait for all work submitted to `earlier` so far.

    A captured stream cannot wait for work outside of the capture; the capturing code must have waited for that work
    before.
    """
    if is_stream_capturing(earlier) or not is_stream_capturing(stream):
        stream.wait_event(earlier.record_event())
