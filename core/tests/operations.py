"""Counts the ops that would run on a device, and the memory that they allocate, on a CPU by a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtbench_core import comm


class Operations(TorchDispatchMode):
    """Records the ops that run on a device, and the memory that they allocate.

    Attributes:
        names: of the ops, without views and allocations.
        allocated: bytes of all new storages.
        peak: the most bytes of new storages that were alive at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.allocated = self.peak = 0
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns, name = func._schema.returns, func.name().removeprefix("aten::")
        is_view = bool(returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in returns
        )
        if is_view or name.startswith(("detach", "unsafe_split")):
            return result
        if "empty" not in name:
            self.names.append(name)
        if func.namespace == "aten":
            given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for made in (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)):
                if made._cdata not in given:
                    self._live[StorageWeakRef(made)] = made.nbytes()
                    self.allocated += made.nbytes()
        self._live = {storage: nbytes for storage, nbytes in self._live.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self._live.values()))
        return result


@contextmanager
def counted() -> Iterator[Operations]:
    """Counts ops; collectives are issued as without a mode, by the process group's own methods."""
    active: Callable[[], int] = comm.dispatch_modes_active
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "dispatch_modes_active", lambda: active() - 1)
        with Operations() as operations:
            yield operations


def within(operations: Operations, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that counts its operations."""

    def counting(*args: Any, **kwargs: Any) -> Any:
        with operations:
            return function(*args, **kwargs)

    return counting
