"""A complete distributed-tensor library in pure Python on `torch.distributed`.

Names and signatures are those of torch.distributed.tensor: code written for it runs here by
changing the import. `dtbench_core.parallel` holds tensor parallelism.

The rooms, top to bottom; each imports only rooms below it:

    simulate      all ranks of a world in one process
    parallel      parallelize_module, styles, loss parallel, sharded parameters
    bucketer      many small reduce-scatters as few large ones
    comm_tensor   a tensor that waits for its collective at first use, in eager mode and in traced graphs
    interop       where torch's tools meet us: compile, debug modes, state dicts, local_map, torch's names
    tensor        DTensor: wrapping local tensors, leaving, moving, spreading global ones, factories
    dispatch      op -> cached plan -> local op -> wrapped result
    rules         which placements an op can run with, a file per family of ops
    redistribute  from one placement to another, by cost
    cost          what a collective costs, from constants or measurements; the cheapest chain of them
    layout        placement, spec and mesh: how ranks hold a tensor, and the arithmetic of shards
    comm          the only file that calls collectives
    traced_collectives  the same collectives in every rank's compiled graph
    runtime       state per rank, caches that are cleared together; beside it errors, op_types, torch_compat

The public names and the rooms are loaded when they are first used, so that `dtbench_core.cost`, whose prices
need no torch, is read without it.
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
    """The public names: what `_public` imports, read off its text, as to load it takes torch."""
    tree = ast.parse(pkgutil.get_data(__name__, "_public.py") or b"")
    return sorted(one.name for line in tree.body if isinstance(line, ast.ImportFrom) for one in line.names)


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
