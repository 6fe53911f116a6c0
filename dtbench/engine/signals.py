"""Signals that end a process: answered while it has something to put in order first, and by name."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from types import FrameType


def ending_signals() -> frozenset[signal.Signals]:
    """Those that end us: a hang-up too, unless the user had it ignored (nohup)."""
    ending = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.add(signal.SIGHUP)
    return frozenset(ending)


@contextmanager
def answered(
    numbers: Set[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Within the block `handler` answers these signals."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, other)


def how_ended(code: int) -> str:
    """`died of SIGKILL` or `ended with exit code 3`, from a process's return code (negative: a signal's number)."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"died of {signal.Signals(-code).name}"
    return f"died of signal {-code}"
