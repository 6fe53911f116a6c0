"""House rules that no linter knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import dtbench_core

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
    """What of torch.distributed's the file names: attributes of any owner, and imports."""
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
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_tensor_is_made_on_a_device_that_is_named(name: str) -> None:
    """Else it would be a CPU's beside those of a GPU, and a GPU's after torch.set_default_device."""
    calls = [node for node in ast.walk(ast.parse(FILES[name].read_text())) if isinstance(node, ast.Call)]
    factories = [
        node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
    ]
    for node in factories:
        if ast.unparse(node.func.value) == "torch":
            assert {"device", None} & {keyword.arg for keyword in node.keywords}, ast.unparse(node)
