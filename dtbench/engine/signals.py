"""Signals that end a process: held back while it has something to put in order first, and by name."""

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
def signals_held(*more: signal.Signals) -> Iterator[frozenset[signal.Signals]]:
    """Within the block the ending signals and `more` wait, to be asked for (`refuse_if_ending`) or
    waited for. Yields all of them. Processes started in the block hold them too."""
    held = ending_signals() | set(more)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield held
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def refuse_if_ending() -> None:
    """A place where it is safe to stop.

    Raises:
        KeyboardInterrupt: a held signal tells us to.
    """
    if signal.sigpending() & ending_signals():
        raise KeyboardInterrupt


def how_ended(code: int) -> str:
    """`died of SIGKILL` or `ended with exit code 3`, from a process's return code (negative: a signal's number)."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"died of {signal.Signals(-code).name}"
    return f"died of signal {-code}"
