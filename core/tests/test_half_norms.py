"""Norms of half-precision tensors, with weights of their own precision and in float32, as torch's CPU kernels
give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from core.tests.gloo_world import mesh_of, on_ranks
from dtbench_core import Shard, distribute_tensor

NORMS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, weight, _: F.layer_norm(x, (4,), weight, weight),
    "layer_norm without weight": lambda x, *_: F.layer_norm(x, (4,)),
    "group_norm": lambda x, _, channels: F.group_norm(x, 2, channels, channels),
}


@on_ranks
def test_half_precision() -> None:
    mesh = mesh_of((4,))
    made = torch.Generator().manual_seed(2)
    for dtype in (torch.bfloat16, torch.float16):
        for precision in (dtype, torch.float32):
            values = [torch.randn(shape, generator=made) for shape in ((5, 8, 4), (4,), (8,))]
            given = [one.to(kind) for one, kind in zip(values, (dtype, precision, precision), strict=True)]
            for name, norm in NORMS.items():
                plain = [one.clone().requires_grad_() for one in given]
                placed = [
                    distribute_tensor(one, mesh, [placement] if placement else None, src_data_rank=None)
                    for one, placement in zip(given, (Shard(0), None, None), strict=True)
                ]
                for one in placed:
                    one.requires_grad_()
                expected, got = norm(*plain), norm(*placed)
                assert got.dtype == expected.dtype
                torch.testing.assert_close(got.full_tensor(), expected, msg=lambda m, n=name: f"{n}: {m}")
                expected.float().square().sum().backward()
                got.float().square().sum().backward()
                torch.testing.assert_close(placed[0].grad.full_tensor(), plain[0].grad)
