"""House rules that no linter knows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dtbench_core

FOLDER = Path(dtbench_core.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
# Methods and functions of c10d that talk to other ranks.
COLLECTIVES = {
    *("all_reduce", "allreduce", "all_gather", "allgather", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("broadcast", "scatter", "gather", "reduce", "barrier", "all_gather_object", "send", "recv"),
}


def _calls_of_c10d(tree: ast.AST) -> list[str]:
    """`dist.x(...)` and `torch.distributed.x(...)` for every collective x."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = ast.unparse(node.value)
            if owner in ("dist", "torch.distributed", "c10d", "torch_compat", "group"):
                found.append(f"{owner}.{node.attr}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(FOLDER)))
def test_only_comm_calls_collectives(path: Path) -> None:
    calls = _calls_of_c10d(ast.parse(path.read_text()))
    if path.name == "comm.py":
        assert calls, "the check must see the calls of comm.py, or it sees none"
    elif path.name != "torch_compat.py":  # which gives them one name over torch's versions
        assert not calls


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(FOLDER)))
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600
