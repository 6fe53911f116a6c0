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
from typing import Any

import torch
from torch import Tensor

from dtbench_core.torch_compat import current_stream, is_stream_capturing, record_stream, stream_handle


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
        self._streams: dict[object, Any] = {}  # handle -> stream, of all that have used the bucket

    def note_input(self, noted: dict[object, Any]) -> None:
        """Adds the current stream to `noted`, the streams on which a bucket's inputs were handed over."""
        handle = stream_handle(self._device)
        if handle is not None and handle not in noted:
            noted[handle] = current_stream(self._device)

    def enter(self, noted: dict[object, Any] | None = None, inputs: Sequence[Tensor] = ()) -> None:
        """Makes the current stream wait for the one that used the bucket's memory last.

        It also waits for `noted`, the streams of `inputs`, whose memory then outlives the current stream's reads.
        """
        handle = stream_handle(self._device)
        if handle != self._last_handle:
            self._streams[handle] = current_stream(self._device)
            if self._last_handle is not None:
                _wait_for(self._streams[handle], self._streams[self._last_handle])
            self._last_handle = handle
        if noted and noted.keys() != {handle}:
            for stream in noted.values():
                _wait_for(self._streams[handle], stream)
            for tensor in inputs:
                record_stream(tensor, self._streams[handle])

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keeps memory from being reallocated before every stream that has used the bucket is done with it."""
        if len(self._streams) > 1:
            for tensor, stream in product(tensors, self._streams.values()):
                record_stream(tensor, stream)


def _wait_for(stream: Any, earlier: Any) -> None:
    """Makes `stream` wait for all work that `earlier` holds by now.

    A capture cannot wait for work outside of it; whoever captures has waited for that work before.
    """
    if is_stream_capturing(earlier) or not is_stream_capturing(stream):
        stream.wait_event(earlier.record_event())
