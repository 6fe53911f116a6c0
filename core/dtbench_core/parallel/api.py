"""`parallelize_module`: finds the submodules a plan names and applies its styles to them."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.layout.mesh import mesh_or_current
from dtbench_core.parallel.parameters import PlanError, left_behind, mesh_of_dim
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
        device_mesh: of any number of dims; the mesh of the enclosing `with mesh:` when not given. It may be
            left out: `parallelize_module(module, plan)`.
        parallelize_plan: a style for `module` itself, or a mapping of fully qualified names to styles.
            Each part of a name between dots is a shell pattern ("layers.*.w[13]"); "" is the module
            itself. A name that matches nothing warns. None warns and does nothing.
        tp_mesh_dim: the dim of `device_mesh` to shard over, by index or name. The others hold replicas of
            the whole group; `shard_parameters` spreads the parameters over one of them too.
        src_data_rank: the rank in the mesh whose parameter values count. None: every rank keeps its own
            part of its own values and nothing is sent.

    Returns:
        The same module.

    Raises:
        MeshError: a mesh without such a dim; no mesh given, and none current.
        PlanError: a plan, or a part of it, of another type; nothing has been changed then.
        UnsupportedModuleError: a module that the style chosen for it cannot shard.
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
    tensor_parallel_rng(mesh)  # with its seed set, and off until it is switched on
    unmatched: list[str] = []
    for target, style in list(_resolve(module, parallelize_plan, "", unmatched)):
        style.src_data_rank = src_data_rank
        style._apply(target, mesh)
    if tied := left_behind(module):
        warnings.warn(
            f"the parameters {', '.join(tied)} were tied to ones that are sharded now, and will go their own "
            "way: name their modules in the plan too",
            stacklevel=2,
        )
    for name in unmatched:
        warnings.warn(_unmatched(module, name), stacklevel=2)
    return module


def _resolve(
    module: nn.Module, plan: object, prefix: str, unmatched: list[str]
) -> Iterator[tuple[nn.Module, ParallelStyle]]:
    """Pairs of module and style in the plan's order; keys without a match go to `unmatched`."""
    if isinstance(plan, ParallelStyle):
        yield module, plan
        return
    if not isinstance(plan, Mapping):
        where = f" for {prefix!r}" if prefix else ""
        raise PlanError(
            f"Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for parallelize_plan, {type(plan)} found! "
            f"Got {plan!r}{where}: pass a ParallelStyle of dtbench_core.parallel, or a dict of names to them"
        )
    for key, inner in plan.items():
        if not isinstance(key, str):
            raise PlanError(f"parallelize_plan got the key {key!r}, expected the name of a submodule")
        name = f"{prefix}.{key}" if prefix and key else prefix or key
        targets = _matches(module, key)
        if not targets:
            unmatched.append(name)
            # A wrong type is an error all the same.
            targets = [] if isinstance(inner, ParallelStyle | Mapping) else [module]
        for target in targets:
            yield from _resolve(target, inner, name, unmatched)


def _matches(module: nn.Module, pattern: str) -> list[nn.Module]:
    """The descendants whose names match, part by part; the module itself for ""."""
    matches = [module]
    for part in pattern.split(".") if pattern else []:
        matches = [child for m in matches for name, child in m.named_children() if fnmatchcase(name, part)]
    return matches


def _unmatched(module: nn.Module, key: str) -> str:
    """What to tell of a plan's key without a match: the names that are like it, or some of those there are."""
    names = [name for name, _ in module.named_modules() if name]
    if close := difflib.get_close_matches(key, names, n=3):
        like = f"close to it are {', '.join(close)}"
    else:
        more = f", ... ({len(names)} in all)" if len(names) > 8 else ""
        like = f"the submodules here are {', '.join(names[:8]) or 'none'}{more}"
    return f"the plan's key {key!r} matches no submodule and is skipped; {like}: correct the key, or drop it"
