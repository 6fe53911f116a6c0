"""Contexts that allow implicit replication and forbid implicit redistribution.

Both apply to the thread that entered them, and can be nested.
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
    """An op redistributed an input implicitly inside ExplicitRedistributionContext(mode="warn")."""


# Number of active implicit_replication() contexts, and the innermost ExplicitRedistributionContext.
_replicating: ContextVar[int] = ContextVar("replicating", default=0)
_explicit: ContextVar[ExplicitRedistributionContext | None] = ContextVar("explicit", default=None)
explicit_context = _explicit.get  # the innermost, if any


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Treats plain tensors that are passed to an op together with DTensors as replicated.

    The caller must ensure that they are the same on every rank; this is not checked.
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
    """Inside this context, an op that would redistribute an input implicitly raises before anything is sent.

    Explicit calls such as `redistribute` and `full_tensor` are allowed. An inner context with `enable=False` allows
    implicit redistributions again.

    Args:
        enable: False allows implicit redistributions.
        strict: forbid every implicit redistribution; otherwise only those that communicate. Cutting a replicated tensor
            does not communicate.
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
        self._outer: list[
            ExplicitRedistributionContext | None
        ] = []  # a context may be entered again inside itself

    def __enter__(self) -> ExplicitRedistributionContext:
        self._outer.append(_explicit.get())
        _explicit.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _explicit.set(self._outer.pop())

    def observe(self, op: Any, spec: DTensorSpec, placements: Placements) -> None:
        """Checks an implicit redistribution before it runs. All ranks reach the same result, as specs are equal.

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
    """Whether the redistribution communicates. Cutting a replicated tensor does not, nor do mesh dims of one rank."""
    return any(
        old != new and not old.is_replicate() and ranks > 1
        for old, new, ranks in zip(spec.placements, placements, spec.info.sizes, strict=True)
    )
