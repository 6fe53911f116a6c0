"""Makes torch and the core answer per rank while a LocalTensorMode is active.

`dist.get_rank()` and the coordinates in a DeviceMesh become rank-dependent numbers; in code that runs as one rank,
they are that rank's numbers. The group of a mesh dim becomes that rank's group object. torch.distributed itself is
still in a fake world, in which this process is a single rank.

Functions of the core that compute with a rank's own part are called as each rank.

The answers replace the original functions only while a mode is active, so they cost nothing without one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from dtbench_core.errors import RankDependentError
from dtbench_core.layout import mesh as core_mesh
from dtbench_core.layout import random, spec
from dtbench_core.layout.local_shards import plain_part
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.op_types import Call
from dtbench_core.parallel import region
from dtbench_core.redistribute import routes
from dtbench_core.runtime import simulation
from dtbench_core.simulate import c10d_state, dtensor_parts
from dtbench_core.simulate.group import SimulatedGroup, coordinate_of, sibling_groups
from dtbench_core.simulate.local_int import local_int, values_of
from dtbench_core.simulate.local_random import default_generators
from dtbench_core.simulate.local_tensor import LocalTensor, joined_states
from dtbench_core.simulate.rank_runner import RankRunner
from dtbench_core.tensor import distribute
from dtbench_core.tensor import dtensor as tensor

# ---- the answers: each gets the mode, the function that it replaces, and that function's arguments ----


def _get_rank(mode: RankRunner, _original: object, group: ProcessGroup | None = None) -> Any:
    ranks = mode.ranks if mode.current_rank is None else (mode.current_rank,)
    if group is None:
        return local_int({r: r for r in ranks})
    if isinstance(group, SimulatedGroup):
        return group.rank()
    groups = sibling_groups(group) if group != dist.group.WORLD else (tuple(range(dist.get_world_size())),)
    return local_int({r: next((members.index(r) for members in groups if r in members), -1) for r in ranks})


def _get_group(
    mode: RankRunner, original: Callable[..., ProcessGroup | None], *args: object, **kwargs: object
) -> Any:
    if mode.current_rank is None:
        return original(*args, **kwargs)
    with c10d_state.use_process_tables():
        group = original(*args, **kwargs)
    return None if group is None else mode.rank_group(group, mode.current_rank)


def _get_coordinate(mode: RankRunner, _original: object, mesh: DeviceMesh) -> Any:
    if mode.current_rank is not None:
        return coordinate_of(mesh, mode.current_rank)
    coordinates = {r: c for r in mode.ranks if (c := coordinate_of(mesh, r)) is not None}
    if not coordinates:
        return None
    return tuple(local_int({r: c[d] for r, c in coordinates.items()}) for d in range(mesh.ndim))


def _make_mesh(mode: RankRunner, original: Call, *args: object, **kwargs: object) -> Any:
    """Makes a mesh once, for the process and not for each rank."""
    with mode.disable(), c10d_state.use_process_tables():
        plain_args, plain_kwargs = tree_map(
            lambda leaf: leaf.reconcile() if isinstance(leaf, LocalTensor) else leaf, (args, kwargs)
        )
        return original(*plain_args, **plain_kwargs)


def _manual_seed(mode: RankRunner, original: Callable[[int], torch.Generator], seed: Any) -> torch.Generator:
    seeds = values_of(seed)
    if seeds is not None:
        for default in default_generators():
            seeded = {rank: torch.Generator(default.device).manual_seed(s) for rank, s in seeds.items()}
            mode.random.set(default, {rank: generator.get_state() for rank, generator in seeded.items()})
        return torch.default_generator
    generator = original(seed)
    if mode.current_rank is None:
        mode.random.reset_all()
    return generator


def _generator_of(function: Call, device: Any) -> torch.Generator:
    """Returns the generator whose state `function`, of torch.random or torch.cuda, gets or sets."""
    if not function.__module__.startswith("torch.cuda"):
        return torch.default_generator
    index = device if isinstance(device, int) else torch.device("cuda" if device is None else device).index
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


def _get_rng_state(mode: RankRunner, original: Call, device: Any = None) -> torch.Tensor:
    if mode.current_rank is None:
        return joined_states(mode.random.states_of(_generator_of(original, device)))
    return cast("torch.Tensor", original() if device is None else original(device))


def _set_rng_state(mode: RankRunner, original: Call, new_state: torch.Tensor, device: Any = None) -> None:
    generator = _generator_of(original, device)
    if isinstance(new_state, LocalTensor):
        mode.random.set(generator, {rank: new_state.shard(rank) for rank in new_state.ranks})
        return
    original(new_state) if device is None else original(new_state, device)
    if mode.current_rank is None:
        mode.random.reset(generator)


def _call_as_ranks(mode: RankRunner, original: Call, *args: object, **kwargs: object) -> Any:
    """Calls a function of the core once as each rank, since it computes with a rank's own part."""
    if not mode.runs_for_all or not dtensor_parts.depends_on_rank(args, kwargs):
        return original(*args, **kwargs)
    return mode.call_as_ranks(original, args, kwargs, name=original.__name__, sees_ops=False)


def _even_layout(mode: RankRunner, original: Call, local: torch.Tensor, *args: object) -> Any:
    shape, stride = _call_as_ranks(mode, original, local, *args)
    if any(values_of(n) is not None for n in (*shape, *stride)):
        raise RankDependentError(
            f"from_local got local tensors of different sizes, {list(local.shape)}, without the global shape, so that "
            "each rank would assume another global shape: pass shape= and stride="
        )
    return shape, stride


def _mover(mode: RankRunner, original: Call, step: Any, source: DTensorSpec) -> Any:
    """Returns the function of one redistribution step, which each rank calls on its shard."""
    if not mode.runs_for_all:
        return original(step, source)

    def move(step: Any, source: DTensorSpec, shard: torch.Tensor) -> Any:
        return original(step, source)(plain_part(shard, source))

    return lambda local: mode.call_as_ranks(
        move, [step, source, local], name=f"redistribute ({step})", sees_ops=False
    )


def _wrapped(mode: RankRunner, original: Call, local: torch.Tensor, spec: Any, *args: object) -> Any:
    local = dtensor_parts.restricted_to_members(local, spec.info, mode.ranks) if mode.runs_for_all else local
    return original(local, spec, *args)


def _core_manual_seed(
    mode: RankRunner, original: Callable[..., None], seed: Any, device_mesh: DeviceMesh
) -> None:
    original(seed, device_mesh)
    if mode.runs_for_all:
        mode.random.reset_all()


# (owners, names, answer): replaces each of the names in each owner.
_ANSWERS: list[tuple[tuple[Any, ...], str, Call]] = [
    ((dist,), "get_rank", _get_rank),
    ((DeviceMesh,), "get_rank", lambda mode, original, mesh: _get_rank(mode, original)),
    (
        (DeviceMesh,),
        "get_local_rank",
        lambda mode, original, mesh, mesh_dim=None: _get_rank(mode, original, mesh.get_group(mesh_dim)),
    ),
    ((DeviceMesh,), "get_coordinate", _get_coordinate),
    ((DeviceMesh,), "_is_current_rank_part_of_mesh", lambda *args: _get_coordinate(*args) is not None),
    (
        (DeviceMesh,),
        "_sym_get_coordinate",
        lambda mode, original, mesh, dim: _get_coordinate(mode, original, mesh)[dim],
    ),
    ((DeviceMesh,), "__init__ __getitem__ _flatten", _make_mesh),
    ((DeviceMesh,), "get_group", _get_group),
    ((core_mesh,), "_world_group", _get_group),
    ((torch, torch.random), "manual_seed", _manual_seed),
    ((torch, torch.random, torch.cuda, torch.cuda.random), "get_rng_state", _get_rng_state),
    ((torch, torch.random, torch.cuda, torch.cuda.random), "set_rng_state", _set_rng_state),
    ((random,), "manual_seed", _core_manual_seed),
    ((spec, routes), "local_extents", _call_as_ranks),
    ((distribute, random), "part_of", _call_as_ranks),
    ((distribute,), "_sent", _call_as_ranks),
    ((region.TensorParallelRNG,), "draw", _call_as_ranks),
    ((region,), "first_state", _call_as_ranks),
    ((tensor,), "check_places plain_part agreed_placements checked_over_mesh", _call_as_ranks),
    ((tensor,), "even_layout", _even_layout),
    ((tensor,), "wrapped", _wrapped),
    ((routes,), "_mover", _mover),
]


@contextmanager
def answers_installed(mode: RankRunner) -> Iterator[None]:
    """Context in which the answers of `mode` replace the original functions."""
    originals = [
        (owner, name, getattr(owner, name), answer)
        for owners, names, answer in _ANSWERS
        for name in names.split()
        for owner in owners
    ]
    simulation.active = True
    for owner, name, original, answer in originals:
        setattr(owner, name, _bind_answer(mode, answer, original))
    try:
        yield
    finally:
        simulation.active = False
        for owner, name, original, _ in originals:
            setattr(owner, name, original)


def _bind_answer(mode: RankRunner, answer: Call, original: Call) -> Call:
    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> Any:
        return answer(mode, original, *args, **kwargs)

    return call
