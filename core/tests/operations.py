"""A dispatch mode that counts the ops that would run on a device and the memory that they allocate; a recorded Work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtbench_core import comm


class Work:
    """A collective that records when it is waited for."""

    def __init__(self, events: list[str], name: object) -> None:
        self.events, self.name = events, name

    def wait(self) -> None:
        self.events.append(f"wait {self.name}")


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
            inputs = {
                t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
            }
            for storage in (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)):
                if storage._cdata not in inputs:
                    self._live[StorageWeakRef(storage)] = storage.nbytes()
                    self.allocated += storage.nbytes()
        self._live = {storage: nbytes for storage, nbytes in self._live.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self._live.values()))
        return result


@contextmanager
def counted() -> Iterator[Operations]:
    """Counts ops. Collectives are issued by the methods of the process group, as they are without a dispatch mode."""
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
