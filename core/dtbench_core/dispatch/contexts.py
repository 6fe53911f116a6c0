"""Contexts that change what the core does by itself: implicit replication, implicit redistribution.

Both hold for the thread that entered them, and nest.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dtbench_core.errors import ArgumentError, RedistributionError
from dtbench_core.layout.placement import Placements, describe
from dtbench_core.layout.spec import DTensorSpec


class ImplicitRedistributionWarning(UserWarning):
    """An op moved a tensor by itself, inside ExplicitRedistributionContext(mode="warn")."""


# How many implicit_replication() are entered, and the innermost ExplicitRedistributionContext.
_replicating: ContextVar[int] = ContextVar("replicating", default=0)
_explicit: ContextVar[ExplicitRedistributionContext | None] = ContextVar("explicit", default=None)
explicit_context = _explicit.get  # the innermost, if any


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, a plain tensor given to an op beside DTensors counts as replicated: the same on every rank.

    That it is the same is for the caller to know; nothing checks it.
    """
    _replicating.set(_replicating.get() + 1)
    try:
        yield
    finally:
        _replicating.set(_replicating.get() - 1)


def replicates_plain() -> bool:
    """Whether this thread is inside `implicit_replication()`."""
    return _replicating.get() > 0


class ExplicitRedistributionContext:
    """Inside, an op that would redistribute one of its inputs by itself raises, before anything is sent.

    Calls of `redistribute`, `full_tensor` and their like remain free. A context with `enable=False`
    inside another lets redistributions pass again.

    Args:
        enable: False lets redistributions pass within.
        strict: refuse every redistribution; else only those that communicate, so that cutting a
            replicated tensor passes.
        mode: "raise" (a RedistributionError) or "warn" (an ImplicitRedistributionWarning).

    Raises:
        ArgumentError: another mode.
    """

    def __init__(self, enable: bool = True, strict: bool = False, mode: str = "raise") -> None:
        if mode not in ("raise", "warn"):
            raise ArgumentError(
                f'ExplicitRedistributionContext got mode={mode!r}, expected "raise" or "warn": choose one'
            )
        self.enable, self.strict, self.mode = enable, strict, mode
        self._outer: list[ExplicitRedistributionContext | None] = []  # one may be entered again inside itself

    def __enter__(self) -> ExplicitRedistributionContext:
        self._outer.append(_explicit.get())
        _explicit.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _explicit.set(self._outer.pop())

    def observe(self, op: Any, spec: DTensorSpec, placements: Placements) -> None:
        """Told before an op moves its input `spec` to `placements`. The same on every rank, as specs are.

        Raises:
            RedistributionError: this context forbids it.
        """
        if not self.enable or spec.placements == placements:
            return
        if not self.strict and not _communicates(spec, placements):
            return
        message = (
            f"{op} would redistribute its input {spec} from {describe(spec.placements)} to {describe(placements)} by "
            "itself inside an ExplicitRedistributionContext: call redistribute(placements=...) before, or leave the "
            "context"
        )
        if self.mode == "raise":
            raise RedistributionError(message)
        warnings.warn(message, ImplicitRedistributionWarning, stacklevel=4)


def _communicates(spec: DTensorSpec, placements: Placements) -> bool:
    """Whether the ranks must exchange anything: not to cut a replica, nor on mesh dims of one rank."""
    return any(
        old != new and not old.is_replicate() and ranks > 1
        for old, new, ranks in zip(spec.placements, placements, spec.info.sizes, strict=True)
    )
