"""A plain tensor that a DTensor was made of, when an op writes to the DTensor: autograd gives it the same history.

Values follow by themselves, as the two share memory. Of a leaf the write is refused (FromLocal).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import ReferenceType, ref

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as keep_version

from dtbench_core.layout.wrapper import SharedMemory, Wrapped, Wrapper
from dtbench_core.op_types import Ctx

# Sizes, strides and storage offset.
_Window = tuple[Sequence[int], Sequence[int], int | torch.SymInt]


class _SameHistory(torch.autograd.Function):
    """The tensor, which was written to as `written` was; its gradient is that of `written`."""

    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(grad), grad  # of a view, None would mean the whole of its base


def note_lender(tensor: Wrapped, local: torch.Tensor) -> Wrapped:
    """`tensor`, a DTensor of `local`, which is no leaf and may be used after a write to `tensor`."""
    base = local._base
    window: _Window | None = None
    if base is not None and base.dtype == local.dtype:  # may be used where nobody holds `local` any more
        window = (local.size(), local.stride(), local.storage_offset())
    memory = SharedMemory()
    memory.update_lender = partial(
        _update_lender, ref(local if base is None or window is None else base), window
    )
    tensor._memory = (memory, 0)
    return tensor


def _update_lender(lender: ReferenceType[torch.Tensor], window: _Window | None, written: Wrapper) -> None:
    local = lender()
    if local is None or not torch.is_grad_enabled():
        return
    if window is not None:
        local = local.as_strided(*window)
    whole = written if written._base is None else written._base
    # It was written to once, which autograd has counted: results that the op saved are those of now.
    with keep_version(local):
        _SameHistory.apply(local, whole.to_local())  # type: ignore[attr-defined]
