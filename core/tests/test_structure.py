"""Rules of the code that no linter checks, and the public names and parameters, compared with those of torch."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor as theirs
import torch.distributed.tensor.debug
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
from torch.distributed.tensor._utils import ExplicitRedistributionContext

import dtbench_core
import dtbench_core as ours
import dtbench_core.parallel
from core.tests.torch_version import needs_213
from dtbench_core import _public

FOLDER = Path(dtbench_core.__file__).parent
FILES = {str(path.relative_to(FOLDER)): path for path in sorted(FOLDER.rglob("*.py"))}
# Whatever torch has that talks to other ranks: functions, methods of groups, functional collectives.
COLLECTIVES = {
    name
    for owner in (dist, dist.ProcessGroup, funcol, dist.distributed_c10d)
    for name in dir(owner)
    if re.search("reduce|gather|scatter|broadcast|barrier|alltoall|all_to_all|send|recv", name)
    and callable(getattr(owner, name))
}
# Owners of such a name that send nothing: our own functions, and ops on one rank's tensors.
LOCAL = re.compile(r"comm|functools|checkpoint|shifted|aten(\.\w+)?")
# torch_compat gives names one spelling over torch's versions; the others are the simulated transport itself.
EXEMPT = {"torch_compat.py", "simulate/group.py"}


def _calls_of_c10d(tree: ast.AST) -> list[str]:
    """Returns the collectives of torch.distributed that a file uses: attributes of any object, and imports."""
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = ast.unparse(node.value)
            if not LOCAL.fullmatch(owner):
                calls.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            calls += [one.name for one in node.names if one.name in COLLECTIVES]
    return calls


@pytest.mark.parametrize("name", sorted(FILES.keys() - EXEMPT))
def test_only_comm_calls_collectives(name: str) -> None:
    calls = _calls_of_c10d(ast.parse(FILES[name].read_text()))
    assert bool(calls) is (name == "comm.py"), calls


FACTORIES = {
    *("torch.arange", "torch.empty", "torch.empty_strided", "torch.eye", "torch.full", "torch.linspace"),
    *("torch.ones", "torch.rand", "torch.randint", "torch.randn", "torch.randperm", "torch.scalar_tensor"),
    *("torch.tensor", "torch.zeros"),
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_factories_are_given_a_device(name: str) -> None:
    """Otherwise a tensor would be on the CPU, or on the device of torch.set_default_device."""
    calls = [node for node in ast.walk(ast.parse(FILES[name].read_text())) if isinstance(node, ast.Call)]
    for node in calls:
        if ast.unparse(node.func) in FACTORIES:
            assert {"device", None} & {keyword.arg for keyword in node.keywords}, ast.unparse(node)


# ---- names and parameters of torch ----


MODULES: dict[str, tuple[Any, Any]] = {
    "tensor": (theirs, ours),
    "experimental": (torch.distributed.tensor.experimental, ours),
    "debug": (torch.distributed.tensor.debug, ours),
    "parallel": (torch.distributed.tensor.parallel, dtbench_core.parallel),
}
# Names that the core lacks, with the reason.
LEFT_OUT = {
    "context_parallel": "attention over a sharded sequence has no place in the core",
    "CommDebugMode": "count_collectives() counts calls and bytes",
}
# Parameters that torch or the core does not have.
PARAMETERS_OF_ONE_SIDE = {
    # Marks tensors for a checker of torch's, an extra package that knows its DTensor alone.
    ("local_map", "spmd_types"),
    # A parameter of the first version of torch's function.
    ("parallelize_module", "tp_mesh_dim"),
}


def _names() -> list[tuple[str, str]]:
    return [(module, name) for module, (public, _) in MODULES.items() for name in public.__all__]


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Returns (name, kind, default) of every parameter except `self`; keyword-only ones sorted by name."""
    listed = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    listed.sort(key=lambda p: p.name if p.kind is p.KEYWORD_ONLY else "")
    return [(p.name, p.kind, p.default) for p in listed]


@needs_213("functions lack parameters")
@pytest.mark.parametrize(("module", "name"), _names())
def test_every_public_name(module: str, name: str) -> None:
    public, core = MODULES[module]
    assert (name in core.__all__) != (name in LEFT_OUT)
    if name in core.__all__ and (module == "parallel" or not inspect.isclass(getattr(public, name))):
        got, expected = (
            [p for p in _parameters(getattr(side, name)) if (name, p[0]) not in PARAMETERS_OF_ONE_SIDE]
            for side in (core, public)
        )
        assert got == expected


@needs_213("functions lack parameters")
def test_methods_and_properties() -> None:
    for name in ("from_local", "to_local", "redistribute", "full_tensor"):
        assert _parameters(getattr(ours.DTensor, name)) == _parameters(getattr(theirs.DTensor, name)), name
    for name in ("device_mesh", "placements"):
        for kind in (theirs.DTensor, ours.DTensor):
            assert isinstance(inspect.getattr_static(kind, name), property), (kind, name)
    assert _parameters(ours.ExplicitRedistributionContext.__init__) == _parameters(
        ExplicitRedistributionContext.__init__
    )


# ---- placements and public names ----


def test_every_public_name_exists_and_has_a_docstring() -> None:
    assert sorted(dtbench_core.__all__) == dtbench_core.__all__
    assert set(dtbench_core.__all__) == {name for name in vars(_public) if not name.startswith("_")}
    assert set(dtbench_core.__all__) <= set(dir(dtbench_core))
    assert len(dtbench_core.__all__) > 40
    assert [name for name in dtbench_core.__all__ if not getattr(dtbench_core, name).__doc__] == []
    with pytest.raises(AttributeError, match="'dtbench_core' has no attribute 'Tensor'"):
        getattr(dtbench_core, "Tensor")  # noqa: B009


PRICES = """
import sys, dtbench_core
from dtbench_core.cost import curve, prices, ring, topology
assert "torch" not in sys.modules and "DTensor" in dir(dtbench_core)
assert "torch" not in sys.modules and dtbench_core.cost.ring is ring
from dtbench_core.layout import placement
assert placement.Shard is dtbench_core.Shard
"""


def test_cost_model_is_imported_without_torch() -> None:
    subprocess.run([sys.executable, "-c", PRICES], check=True, timeout=120)
