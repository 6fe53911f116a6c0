"""The public API of torch.distributed.tensor, name by name and parameter by parameter, against the core's
(tensor parallelism apart: see test_parallel.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.distributed.tensor.debug
import torch.distributed.tensor.experimental
from torch.distributed.tensor._utils import ExplicitRedistributionContext

import dtbench_core as ours
from core.tests.torch_version import needs_213

pytestmark = needs_213("functions lack parameters")

MODULES: dict[str, tuple[Any, Any]] = {
    "tensor": (theirs, ours),
    "experimental": (torch.distributed.tensor.experimental, ours),
    "debug": (torch.distributed.tensor.debug, ours),
}
# What the core does not have, and why.
LEFT_OUT = {
    "context_parallel": "attention over a sharded sequence has no place in the core",
    "CommDebugMode": "count_collectives() counts calls and bytes",
}
# Parameters that newer releases of torch have and the core does not.
PARAMETERS_LEFT_OUT = {
    # Marks tensors for a checker of torch's, an extra package that knows its DTensor alone.
    ("local_map", "spmd_types")
}


def _names() -> list[tuple[str, str]]:
    return [(module, name) for module, (public, _) in MODULES.items() for name in public.__all__]


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """(name, kind, default) of every parameter, without `self` and without the annotations; those that are given by
    name alone in the order of their names."""
    listed = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    listed.sort(key=lambda p: p.name if p.kind is p.KEYWORD_ONLY else "")
    return [(p.name, p.kind, p.default) for p in listed]


@pytest.mark.parametrize(("module", "name"), _names())
def test_every_public_name(module: str, name: str) -> None:
    public, core = MODULES[module]
    if name in LEFT_OUT and not hasattr(core, name):
        return
    assert hasattr(core, name), f"{name} is neither there nor in LEFT_OUT"
    if not inspect.isclass(getattr(public, name)):
        wanted = [p for p in _parameters(getattr(public, name)) if (name, p[0]) not in PARAMETERS_LEFT_OUT]
        assert _parameters(getattr(core, name)) == wanted


def test_methods_and_properties() -> None:
    for name in ("from_local", "to_local", "redistribute", "full_tensor"):
        assert _parameters(getattr(ours.DTensor, name)) == _parameters(getattr(theirs.DTensor, name)), name
    for name in ("device_mesh", "placements"):
        for kind in (theirs.DTensor, ours.DTensor):
            assert isinstance(inspect.getattr_static(kind, name), property), (kind, name)
    mine = _parameters(ours.ExplicitRedistributionContext.__init__)
    assert mine == _parameters(ExplicitRedistributionContext.__init__)
