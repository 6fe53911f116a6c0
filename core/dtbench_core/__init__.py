"""A complete distributed-tensor library in pure Python on `torch.distributed`.

Names and signatures are those of torch.distributed.tensor: code written for it runs after changing the import.
`dtbench_core.parallel` contains tensor parallelism.

The subpackages and modules, from top to bottom. Each imports only those below it:

    simulate      all ranks of a world in one process
    parallel      parallelize_module, styles, loss parallel, sharded parameters
    bucketer      combines many small reduce-scatters into few large ones
    comm_tensor   a tensor that waits for its collective at first use, in eager mode and in traced graphs
    interop       support for torch's tools: compile, debug modes, state dicts, local_map, torch's DTensor
    tensor        DTensor: from_local, to_local, redistribute, distribute_tensor, factories
    dispatch      op -> cached plan -> local op -> wrapped result
    rules         placements that an op can run with, one file per family of ops
    redistribute  the cheapest route between two placements, and its execution
    cost          cost of collectives, from constants or measurements, and the cheapest chain of them
    layout        placements, specs and meshes: how ranks hold a tensor, and the arithmetic of shards
    comm          the only file that calls collectives
    traced_collectives  keeps collectives in the compiled graphs of all ranks
    runtime       state per rank and caches that are cleared together

errors, op_types and torch_compat are at the level of runtime.

Public names, subpackages and modules are loaded at their first use. So `dtbench_core.cost` can be imported without
torch, which its prices do not need.
"""

# ruff: noqa: F403 (the names are for type checkers; `__getattr__` loads them)

import ast
import functools
import importlib.util
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtbench_core._public import *


@functools.cache
def _names() -> list[str]:
    """Returns the public names. They are parsed from the text of `_public`, because importing it needs torch."""
    tree = ast.parse(pkgutil.get_data(__name__, "_public.py") or b"")
    imports = (statement for statement in tree.body if isinstance(statement, ast.ImportFrom))
    return sorted(alias.name for statement in imports for alias in statement.names)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _names()
    if name in _names():
        value = getattr(importlib.import_module(f"{__name__}._public"), name)
        globals()[name] = value
        return value
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_names()})
