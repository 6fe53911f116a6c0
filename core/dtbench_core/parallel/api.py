"""`parallelize_module` finds the submodules that a plan names and applies their styles."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.layout.mesh import mesh_or_current
from dtbench_core.parallel.parameters import PlanError, formerly_tied_parameters, mesh_of_dim
from dtbench_core.parallel.region import tensor_parallel_rng
from dtbench_core.parallel.style import ParallelStyle

Plan = ParallelStyle | Mapping[str, "Plan"]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | Plan | None = None,
    parallelize_plan: Plan | None = None,
    tp_mesh_dim: int | str = 0,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Makes a module tensor parallel, in place: modules and their names stay, parameters become DTensors.

    Args:
        module: the module to change.
        device_mesh: a mesh with any number of dims; by default that of the enclosing `with mesh:`. It may be left
            out: `parallelize_module(module, plan)`.
        parallelize_plan: a style for `module` itself, or a mapping of fully qualified names to styles. Each part of a
            name between dots is a shell pattern ("layers.*.w[13]"); "" is the module itself. A name without a match
            causes a warning. None causes a warning and changes nothing.
        tp_mesh_dim: the dim of `device_mesh` to shard over, by index or name. Along the other dims, the
            sharded module is replicated; `shard_parameters` shards the parameters over one of these dims too.
        src_data_rank: the rank in the mesh whose parameter values are distributed. None: every rank keeps its part of
            its own values, and nothing is sent.

    Returns:
        The same module.

    Raises:
        MeshError: the mesh has no such dim; or no mesh was given, and none is active.
        PlanError: the plan, or a part of it, has another type. Nothing has been changed then.
        UnsupportedModuleError: a style cannot shard the module that it was chosen for.
    """
    if parallelize_plan is None and isinstance(device_mesh, ParallelStyle | Mapping):
        device_mesh, parallelize_plan = None, device_mesh
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module got no parallelize_plan and changes nothing: "
            "pass a style, or a dict of submodule names to styles",
            stacklevel=2,
        )
        return module
    mesh = mesh_of_dim(mesh_or_current(cast("DeviceMesh | None", device_mesh)), tp_mesh_dim)
    tensor_parallel_rng(mesh)  # creates it with its seed; it stays off until enabled
    unmatched: list[str] = []
    for target, style in list(_resolve(module, parallelize_plan, "", unmatched)):
        style.src_data_rank = src_data_rank
        style._apply(target, mesh)
    if tied := formerly_tied_parameters(module):
        warnings.warn(
            f"the parameters {', '.join(tied)} were tied to parameters that are sharded now, and their tie is lost: "
            "name their modules in the plan too",
            stacklevel=2,
        )
    for name in unmatched:
        warnings.warn(_unmatched_warning(module, name), stacklevel=2)
    return module


def _resolve(
    module: nn.Module, plan: object, prefix: str, unmatched: list[str]
) -> Iterator[tuple[nn.Module, ParallelStyle]]:
    """Yields pairs of module and style in the plan's order, and adds keys without a match to `unmatched`."""
    if isinstance(plan, ParallelStyle):
        yield module, plan
        return
    if not isinstance(plan, Mapping):
        context = f" for {prefix!r}" if prefix else ""
        raise PlanError(
            f"Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for parallelize_plan, {type(plan)} found! "
            f"Got {plan!r}{context}: pass a ParallelStyle of dtbench_core.parallel, or a dict of names to them"
        )
    for key, inner in plan.items():
        if not isinstance(key, str):
            raise PlanError(f"parallelize_plan got the key {key!r}, expected the name of a submodule")
        name = f"{prefix}.{key}" if prefix and key else prefix or key
        targets = _matches(module, key)
        if not targets:
            unmatched.append(name)
            # A style of a wrong type is an error even without a match.
            targets = [] if isinstance(inner, ParallelStyle | Mapping) else [module]
        for target in targets:
            yield from _resolve(target, inner, name, unmatched)


def _matches(module: nn.Module, pattern: str) -> list[nn.Module]:
    """Returns the descendants whose names match the pattern, part by part; the module itself for ""."""
    matches = [module]
    for part in pattern.split(".") if pattern else []:
        matches = [
            child for match in matches for name, child in match.named_children() if fnmatchcase(name, part)
        ]
    return matches


def _unmatched_warning(module: nn.Module, key: str) -> str:
    """Returns the warning for a key without a match, with similar names, or else some names of submodules."""
    names = [name for name, _ in module.named_modules() if name]
    if close := difflib.get_close_matches(key, names, n=3):
        suggestion = f"close to it are {', '.join(close)}"
    else:
        count = f", ... ({len(names)} in all)" if len(names) > 8 else ""
        suggestion = f"the submodules are {', '.join(names[:8]) or 'none'}{count}"
    return f"the plan's key {key!r} matches no submodule and is skipped; {suggestion}: correct the key, or drop it"
