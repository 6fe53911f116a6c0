"""Feeds a bucketer from a module's backward pass, as FSDP does."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dtbench_core.bucketer.layout import BucketError
from dtbench_core.layout.wrapper import Wrapper, held_by


class GradientFeed:
    """The hooks of one module. `remove()`, or leaving it as a context, takes them off."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> GradientFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def feed_gradients(
    module: nn.Module, parts: int, hand_over: Callable[[nn.Parameter, Tensor], None]
) -> GradientFeed:
    """Takes every gradient off its parameter as soon as it is complete, and hands it over: flat, padded with
    zeros to a multiple of `parts` elements. In the order of the backward pass."""

    def take(parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            with torch.no_grad():
                hand_over(parameter, flattened(gradient, parts))

    found = [p for p in module.parameters() if p.requires_grad]
    return GradientFeed([p.register_post_accumulate_grad_hook(take) for p in found])


def flattened(gradient: Tensor, parts: int) -> Tensor:
    """(parts * k,) its elements in row-major order, then zeros; of a DTensor those of this rank.

    Raises:
        BucketError: a sparse gradient, or one that is still to be summed over its mesh.
    """
    if isinstance(gradient, Wrapper):
        if gradient._spec.has_partial():
            raise BucketError(
                f"got a gradient {gradient._spec}, expected one that is not Partial: redistribute the output "
                "of the layer, or hand the gradient over yourself with the group it is to be summed over"
            )
        gradient = held_by(gradient)
    if gradient.layout is not torch.strided:
        raise BucketError(
            f"got a gradient of layout {gradient.layout}, expected a dense one: make the layer with sparse=False"
        )
    flat = gradient.reshape(-1)
    missing = -flat.numel() % parts
    return F.pad(flat, (0, missing)) if missing else flat
