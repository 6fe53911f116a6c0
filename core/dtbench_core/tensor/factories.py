"""DTensors made from nothing but a shape: ones, zeros, empty, full, rand, randn; linspace and logspace.

Each rank makes its own part; nothing is sent. `rand` and `randn` give the numbers that torch would
give on one device (see layout/random.py).
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
    """A DTensor of ones.

    Args:
        size: the global shape, as `ones(2, 3)` or `ones((2, 3))`.
        dtype: torch's default dtype when not given.
        layout: torch.strided; there is no other.
        requires_grad: whether autograd records what is done with it.
        device_mesh: the mesh it lives on; the enclosing `with mesh:` when not given.
        placements: one per mesh dim, Shard or Replicate; all Replicate when not given.

    Raises:
        ArgumentError: a shape or layout that cannot be. PlacementError: placements that do not fit.
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
    """A DTensor of `fill_value`s, whose type decides the dtype when none is given, as in torch.full.

    `size` is a sequence or one int; other arguments and errors as for `ones`.
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
    """A DTensor of shape (steps,), evenly spaced from `start` to `end`: bit for bit what torch.linspace gives.

    `start` and `end` are numbers or tensors without dims. Each rank makes all of it for a moment, as a part computed
    from its own ends is rounded otherwise. Other arguments and errors as for `ones`.
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
    """A DTensor of shape (steps,), evenly spaced on a logarithmic scale from `base ** start` to `base ** end`.

    As `linspace` in all else.
    """
    ends = _number("logspace", start), _number("logspace", end)
    fill = functools.partial(torch.logspace, *ends, base=base)
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
    """fill: makes the whole tensor from `steps`, `dtype` and `device`."""
    kind = dtype or fill(steps=0).dtype
    return _create(lambda size, **others: fill(steps=size[0], **others), name, ((steps,),), kind, *options)


def _like(model: Callable[P, DTensor], make: Callable[..., torch.Tensor], doc: str) -> Callable[P, DTensor]:
    """A function with the parameters of `model` that makes what `make` does."""
    name = make.__name__

    @functools.wraps(model, assigned=())  # its parameters, for `inspect` and `help`
    def factory(*size: Any, **options: Any) -> DTensor:
        return _create(make, name, size, **options)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"{doc} Arguments and errors as for `ones`."
    return cast("Callable[P, DTensor]", factory)


zeros = _like(ones, torch.zeros, "A DTensor of zeros.")
empty = _like(
    ones,
    torch.empty,
    "A DTensor whose values are whatever the memory held, so that replicas may differ until it is written.",
)
rand = _like(
    ones,
    torch.rand,
    "A DTensor of uniform numbers in [0, 1), those that torch.rand gives on one device seeded like the ranks.",
)
randn = _like(
    ones,
    torch.randn,
    "A DTensor of standard normal numbers, those that torch.randn gives on one device seeded like the ranks.",
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
        raise ArgumentError(f"{name} got layout={layout}, expected torch.strided: DTensors have no other")
    info = mesh_info(mesh_or_current(device_mesh))
    placed = normalize(placements, len(shape), info, shape)
    if any(p.is_partial() for p in placed):
        raise PlacementError(
            f"{name} got {describe(placed)}, expected Shard or Replicate: nothing says which terms the ranks "
            "should hold; make the terms and wrap them with DTensor.from_local(term, mesh, [Partial()])"
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
