"""Factories of DTensors: ones, zeros, empty, full, rand, randn, linspace and logspace.

Each rank makes its part; nothing is sent. `rand` and `randn` return the same numbers as torch on one device (see
layout/random.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError, ArgumentTypeError, PlacementError
from dtbench_core.layout import random
from dtbench_core.layout.mesh import mesh_info, mesh_or_current
from dtbench_core.layout.placement import Placement, describe
from dtbench_core.layout.shard_layout import part_of
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, normalize
from dtbench_core.layout.wrapper import wrap
from dtbench_core.tensor.dtensor import DTensor

P = ParamSpec("P")


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Returns a DTensor of ones.

    Args:
        size: the global shape: `ones(2, 3)` or `ones((2, 3))`.
        dtype: torch's default dtype when not given.
        layout: only torch.strided.
        requires_grad: whether autograd records ops on it.
        device_mesh: the mesh; if not given, the mesh of the enclosing `with mesh:`.
        placements: one per mesh dim, Shard or Replicate; all Replicate if not given.

    Raises:
        ArgumentError: an invalid shape or layout.
        PlacementError: placements that do not fit.
        MeshError: no mesh.
    """
    return _create(torch.ones, "ones", size, dtype, layout, requires_grad, device_mesh, placements)


def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Returns a DTensor filled with `fill_value`. Without `dtype`, the type of `fill_value` decides, as in torch.full.

    `size` is a sequence or an int. Other arguments and errors are those of `ones`.
    """
    fill = functools.partial(torch.full, fill_value=fill_value)
    dtype = dtype or fill(()).dtype
    return _create(fill, "full", (size,), dtype, layout, requires_grad, device_mesh, placements)


def linspace(
    start: float | complex | torch.Tensor,
    end: float | complex | torch.Tensor,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Returns a DTensor of shape (steps,), evenly spaced from `start` to `end`, bit for bit as torch.linspace.

    `start` and `end` are numbers or 0-dim tensors. Each rank makes the global tensor and keeps its part, since a part
    computed alone would be rounded differently. Other arguments and errors are those of `ones`.
    """
    fill = functools.partial(torch.linspace, _number("linspace", start), _number("linspace", end))
    return _spaced(fill, "linspace", steps, dtype, layout, requires_grad, device_mesh, placements)


def logspace(
    start: float | complex | torch.Tensor,
    end: float | complex | torch.Tensor,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Returns a DTensor of shape (steps,), evenly spaced on a logarithmic scale from `base ** start` to `base ** end`.

    Arguments and errors are those of `linspace`.
    """
    fill = functools.partial(torch.logspace, _number("logspace", start), _number("logspace", end), base=base)
    return _spaced(fill, "logspace", steps, dtype, layout, requires_grad, device_mesh, placements)


def _number(name: str, end: float | complex | torch.Tensor) -> float | complex:
    if not isinstance(end, torch.Tensor):
        return end
    if end.dim():
        raise ArgumentError(
            f"{name} got an end of shape {tuple(end.shape)}, expected a number or a tensor without dims"
        )
    return end.item()


def _spaced(fill: Callable[..., torch.Tensor], name: str, steps: int, dtype: Any, *options: Any) -> DTensor:
    """Returns a DTensor of `steps` elements. `fill` makes the global tensor from `steps`, `dtype` and `device`."""
    kind = dtype or fill(steps=0).dtype
    return _create(lambda size, **options: fill(steps=size[0], **options), name, ((steps,),), kind, *options)


def _like(model: Callable[P, DTensor], make: Callable[..., torch.Tensor], doc: str) -> Callable[P, DTensor]:
    """Returns a factory with the parameters of `model` that fills the tensor with `make`."""
    name = make.__name__

    @functools.wraps(model, assigned=())  # the parameters of `model`, for `inspect` and `help`
    def factory(*size: Any, **options: Any) -> DTensor:
        return _create(make, name, size, **options)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"{doc} Arguments and errors are those of `ones`."
    return cast("Callable[P, DTensor]", factory)


zeros = _like(ones, torch.zeros, "Returns a DTensor of zeros.")
empty = _like(
    ones,
    torch.empty,
    "Returns a DTensor with undefined values. Replicas may differ until the tensor is written to.",
)
rand = _like(
    ones,
    torch.rand,
    "Returns a DTensor of uniform numbers in [0, 1), the same as torch.rand on one device with the same seed.",
)
randn = _like(
    ones,
    torch.randn,
    "Returns a DTensor of standard normal numbers, the same as torch.randn on one device with the same seed.",
)


def _create(
    make: Callable[..., torch.Tensor],
    name: str,
    arguments: tuple[Any, ...],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    shape = tuple(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], Sequence) else arguments
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ArgumentTypeError(
            f"{name} got the size {shape}, expected ints >= 0: write {name}(2, 3, ...) or {name}((2, 3), ...)"
        )
    if layout is not torch.strided:
        raise ArgumentError(f"{name} got layout={layout}, expected torch.strided: DTensors support no other")
    info = mesh_info(mesh_or_current(device_mesh))
    placed = normalize(placements, len(shape), info, shape)
    if any(p.is_partial() for p in placed):
        raise PlacementError(
            f"{name} got {describe(placed)}, expected Shard or Replicate, since it is undefined which term each "
            "rank gets: make the terms and wrap them with DTensor.from_local(term, mesh, [Partial()])"
        )
    spec = DTensorSpec.of(info, placed, shape, contiguous_stride(shape), dtype or torch.get_default_dtype())

    def fill(size: Sequence[int]) -> torch.Tensor:
        return make(size, dtype=spec.dtype, device=info.device_type)

    if name in ("rand", "randn"):
        random.keep_in_step(info)
        return wrap(DTensor, random.draw(spec, fill), spec, requires_grad)
    if name in ("linspace", "logspace"):
        return wrap(DTensor, part_of(fill(spec.shape), spec), spec, requires_grad)
    return wrap(DTensor, fill(spec.local_shape), spec, requires_grad)
