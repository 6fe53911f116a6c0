"""Updates the autograd history of a plain tensor after a write to the DTensor that `from_local` made of it.

Both tensors share memory, so the plain tensor has the new values. It must get the history of the write, too. If the
plain tensor is a leaf, the write raises (see `FromLocal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import ReferenceType, ref

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as keep_version

from dtbench_core.layout.wrapper import SharedMemory, Wrapped, Wrapper
from dtbench_core.op_types import Ctx

# (sizes, strides, storage offset) of a view.
_Window = tuple[Sequence[int], Sequence[int], int | torch.SymInt]


class _SameHistory(torch.autograd.Function):
    """Autograd function: (tensor, written) -> tensor, marked as overwritten by `written`, which gets its gradient."""

    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(grad), grad  # not None: for a view, None would mean the gradient of its base


def with_history_update(tensor: Wrapped, local: torch.Tensor) -> Wrapped:
    """Returns `tensor`, a DTensor of `local`, such that writes to it also update the autograd history of `local`.

    `local` must not be a leaf.
    """
    base = local._base
    window: _Window | None = None
    if base is not None and base.dtype == local.dtype:  # the base may outlive `local`
        window = (local.size(), local.stride(), local.storage_offset())
    memory = SharedMemory()
    memory.update_history = partial(
        _update_history, ref(local if base is None or window is None else base), window
    )
    tensor._memory = (memory, 0)
    return tensor


def _update_history(plain: ReferenceType[torch.Tensor], window: _Window | None, written: Wrapper) -> None:
    local = plain()
    if local is None or not torch.is_grad_enabled():
        return
    if window is not None:
        local = local.as_strided(*window)
    base = written if written._base is None else written._base
    # The write has already incremented the version. Another increment would invalidate tensors that the op saved.
    with keep_version(local):
        _SameHistory.apply(local, base.to_local())  # type: ignore[attr-defined]
