"""DTensors made from nothing but a shape: ones, zeros, empty, full, rand, randn.

Each rank makes its own part; nothing is sent. `rand` and `randn` give the numbers that torch would
give on one device (see layout/rng.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError, PlacementError
from dtbench_core.layout import rng as random
from dtbench_core.layout.mesh import mesh_info, mesh_or_current
from dtbench_core.layout.placement import Placement, describe
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, normalize
from dtbench_core.layout.wrapper import wrap
from dtbench_core.tensor.dtensor import DTensor


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
    made = _spec("ones", size, dtype, layout, device_mesh, placements)
    return _local(torch.ones, made, requires_grad)


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of zeros. Arguments and errors as for `ones`."""
    made = _spec("zeros", size, dtype, layout, device_mesh, placements)
    return _local(torch.zeros, made, requires_grad)


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor whose values are whatever the memory held, so that replicas may differ until it is
    written. Arguments and errors as for `ones`."""
    made = _spec("empty", size, dtype, layout, device_mesh, placements)
    return _local(torch.empty, made, requires_grad)


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
    if dtype is None:
        dtype = torch.full((), fill_value).dtype
    made = _spec("full", (size,), dtype, layout, device_mesh, placements)
    return _local(lambda shape, **kwargs: torch.full(shape, fill_value, **kwargs), made, requires_grad)


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of uniform numbers in [0, 1), those that torch.rand gives on one device seeded like the
    ranks. Arguments and errors as for `ones`."""
    made = _spec("rand", size, dtype, layout, device_mesh, placements)
    return _drawn(torch.rand, made, requires_grad)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of standard normal numbers, those that torch.randn gives on one device seeded like the
    ranks. Arguments and errors as for `ones`."""
    made = _spec("randn", size, dtype, layout, device_mesh, placements)
    return _drawn(torch.randn, made, requires_grad)


def _spec(
    name: str,
    given: tuple[Any, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensorSpec:
    shape = tuple(given[0]) if len(given) == 1 and isinstance(given[0], Sequence) else given
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ArgumentError(
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
    return DTensorSpec.of(
        info, placed, shape, contiguous_stride(shape), torch.get_default_dtype() if dtype is None else dtype
    )


def _local(make: Callable[..., torch.Tensor], spec: DTensorSpec, requires_grad: bool) -> DTensor:
    local = make(spec.local_shape, dtype=spec.dtype, device=spec.info.device_type)
    return wrap(DTensor, local, spec, requires_grad)


def _drawn(make: Callable[..., torch.Tensor], spec: DTensorSpec, requires_grad: bool) -> DTensor:
    random.keep_in_step(spec.info)
    local = random.draw(spec, lambda shape: make(shape, dtype=spec.dtype, device=spec.info.device_type))
    return wrap(DTensor, local, spec, requires_grad)
