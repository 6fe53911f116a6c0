"""What is known of results without asking torch's meta kernels, against these kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dtbench_core.dispatch import metadata
from dtbench_core.layout.mesh import mesh_info
from dtbench_core.layout.placement import REPLICATE
from dtbench_core.layout.spec import DTensorSpec

layer_norm = torch.ops.aten.native_layer_norm.default
CASES = list(itertools.product([(4,), (2, 3, 4), (1, 4), (5, 2, 4)], [1, 2], [torch.float32, torch.float64]))


@pytest.mark.parametrize(("shape", "dims", "dtype"), CASES, ids=str)
def test_layer_norm_is_known(fake_world: Any, shape: tuple[int, ...], dims: int, dtype: torch.dtype) -> None:
    fake_world(2)
    info = mesh_info(init_device_mesh("cpu", (2,)))
    if dims > len(shape):
        with pytest.raises(RuntimeError):  # which the meta kernel gives
            _known(info, torch.empty(shape, dtype=dtype), [*shape, 7], False)
        return
    for given in (False, True):
        plain = torch.randn(shape, dtype=dtype)
        parameters = [torch.randn(shape[-dims:], dtype=dtype) if given else None] * 2
        want = layer_norm(plain, list(shape[-dims:]), *parameters, 1e-5)
        made, structure = _known(info, plain, list(shape[-dims:]), given)
        assert structure == "list"
        assert [(tuple(m.shape), tuple(m.stride), m.dtype) for m in made] == [
            (tuple(t.shape), t.stride(), t.dtype) for t in want
        ]


def _known(info: Any, plain: torch.Tensor, normalized: list[int], given: bool) -> Any:
    spec = DTensorSpec.of(info, (REPLICATE,), plain.shape, plain.stride(), plain.dtype)
    like = torch.empty(normalized, dtype=plain.dtype)
    parameter = DTensorSpec.of(info, (REPLICATE,), like.shape, like.stride(), like.dtype) if given else None
    return metadata.results_of(layer_norm, (spec, normalized, parameter, parameter, 1e-5), {}, False)


def test_numbers_that_kernels_loop_over_are_small(fake_world: Any) -> None:
    """The degree of a polynomial decides how long a kernel takes, and a twin's must not be whatever memory holds."""
    fake_world(2)
    info = mesh_info(init_device_mesh("cpu", (2,)))
    for dtype in (torch.float32, torch.int64):
        degree = DTensorSpec.of(info, (REPLICATE,), (), (), dtype)
        torch.full((64,), 2**30, dtype=dtype)  # freed at once: what the next allocation may get
        assert metadata._empty_twin(degree).item() == 1
