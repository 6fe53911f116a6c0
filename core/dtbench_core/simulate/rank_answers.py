"""What a program asks torch about its rank, answered for simulated ranks while a LocalTensorMode is on.

`dist.get_rank()` and the coordinates in a DeviceMesh become rank-dependent numbers, or the one rank's
where code runs as one rank; a mesh dim's group becomes that rank's end of it. torch.distributed itself
still sees the one rank of the fake world, whose process this is. Functions of the core that compute with a
rank's own part run as each rank. Both are put in the place of the originals while a mode is on, so that they
cost nothing without one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from dtbench_core.errors import RankDependentError, SimulationError, describe_ranks
from dtbench_core.layout import mesh as core_mesh
from dtbench_core.layout import rng as random
from dtbench_core.layout import spec
from dtbench_core.layout.local_shards import plain_part
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.op_types import Call
from dtbench_core.parallel import region
from dtbench_core.redistribute import routes
from dtbench_core.runtime import simulation
from dtbench_core.simulate import c10d_state, dtensor_parts
from dtbench_core.simulate.group import (
    Arrival,
    SimulatedGroup,
    coordinate_of,
    describe,
    fibres_of_group,
    name_ranks,
)
from dtbench_core.simulate.local_int import local_int, values_of
from dtbench_core.simulate.local_random import default_generators
from dtbench_core.simulate.local_tensor import LocalTensor, joined_states
from dtbench_core.simulate.threads import running_rank
from dtbench_core.tensor import distribute
from dtbench_core.tensor import dtensor as tensor

if TYPE_CHECKING:
    from dtbench_core.simulate.local_mode import LocalTensorMode


_mode: LocalTensorMode | None = None


def local_tensor_mode() -> LocalTensorMode | None:
    """The mode that is active, if any."""
    return _mode


BACKEND = "dtbench_local_tensor"


def rank_group(group: ProcessGroup, rank: int) -> SimulatedGroup:
    """`rank`'s end of `group`, or of the group that is its counterpart there."""
    if isinstance(group, SimulatedGroup):
        return group
    tables = _simulation().tables_of(rank)
    if group not in tables.ends:
        fibres = fibres_of_group(group)
        ranks = next((f for f in fibres if rank in f), None)
        if ranks is None:
            raise SimulationError(
                f"got a collective on the group of ranks {describe_ranks(fibres[0])}, which does not say what rank "
                f"{rank} does: use the group of a DeviceMesh dim, or declare with declare_group(group, [[0, 1], ...]) "
                "which ranks call it together, and take only those (tensor_map)"
            )
        own = SimulatedGroup(ranks.index(rank), ranks, group.group_name, BACKEND, _arrive)
        tables.add(group, own, BACKEND)
    return cast("SimulatedGroup", tables.ends[group])


def _arrive(arrival: Arrival) -> dist.Work:
    called = f"{describe(arrival.signature)} was called on the group of {name_ranks(arrival.ranks)}"
    if _mode is None:
        raise SimulationError(
            f"{called} of a LocalTensorMode that is over: make the groups' mesh, and use them, inside one"
        )
    if (rank := running_rank()) is None:
        raise SimulationError(
            f"{called}, in code that runs as one rank alone: run it in a function under rank_map, which lets the "
            "others come"
        )
    return rank.arrive(arrival)


def _simulation() -> LocalTensorMode:
    assert _mode is not None  # patched only while one is active
    return _mode


def _get_rank(_: object, group: ProcessGroup | None = None) -> Any:
    mode = _simulation()
    ranks = mode.ranks if mode.current is None else (mode.current,)
    if group is None:
        return local_int({r: r for r in ranks})
    if isinstance(group, SimulatedGroup):
        return group.rank()
    fibres = fibres_of_group(group) if group != dist.group.WORLD else (tuple(range(dist.get_world_size())),)
    return local_int({r: next((f.index(r) for f in fibres if r in f), -1) for r in ranks})


def _end_of(original: Callable[..., ProcessGroup | None], *args: object, **kwargs: object) -> Any:
    """A group of the process, of which the rank that runs gets its end."""
    rank = _simulation().current
    if rank is None:
        return original(*args, **kwargs)
    with c10d_state.of_process():
        group = original(*args, **kwargs)
    return None if group is None else rank_group(group, rank)


def _get_coordinate(_: object, mesh: DeviceMesh) -> Any:
    mode = _simulation()
    if mode.current is not None:
        return coordinate_of(mesh, mode.current)
    inside = {r: c for r in mode.ranks if (c := coordinate_of(mesh, r)) is not None}
    if not inside:
        return None
    return tuple(local_int({r: c[d] for r, c in inside.items()}) for d in range(mesh.ndim))


def _outside(original: Call, *args: object, **kwargs: object) -> Any:
    """Makes a mesh: a matter of the process, not of its ranks."""
    with _simulation().disable(), c10d_state.of_process():
        plain, named = tree_map(lambda x: x.reconcile() if isinstance(x, LocalTensor) else x, (args, kwargs))
        return original(*plain, **named)


def _manual_seed(original: Callable[[int], torch.Generator], seed: Any) -> torch.Generator:
    mode, seeds = _simulation(), values_of(seed)
    if seeds is not None:
        for one in default_generators():
            of_rank = {rank: torch.Generator(one.device).manual_seed(s) for rank, s in seeds.items()}
            mode.random.set(one, {rank: generator.get_state() for rank, generator in of_rank.items()})
        return torch.default_generator
    generator = original(seed)
    if mode.current is None:
        mode.random.reset_all()
    return generator


def _generator_of(function: Call, device: Any) -> torch.Generator:
    """Whose state the function of torch.random or torch.cuda gets or sets."""
    if not function.__module__.startswith("torch.cuda"):
        return torch.default_generator
    index = device if isinstance(device, int) else torch.device("cuda" if device is None else device).index
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


def _get_rng_state(original: Call, device: Any = None) -> torch.Tensor:
    mode = _simulation()
    if mode.current is None:
        return joined_states(mode.random.of(_generator_of(original, device)))
    return cast("torch.Tensor", original() if device is None else original(device))


def _set_rng_state(original: Call, new_state: torch.Tensor, device: Any = None) -> None:
    mode, generator = _simulation(), _generator_of(original, device)
    if isinstance(new_state, LocalTensor):
        mode.random.set(generator, {rank: new_state.shard(rank) for rank in new_state.ranks})
        return
    original(new_state) if device is None else original(new_state, device)
    if mode.current is None:
        mode.random.reset(generator)


def _rank_by_rank(original: Call, *args: object, **kwargs: object) -> Any:
    """A function of the core that computes with a rank's own part."""
    mode = _simulation()
    if not mode.for_all or not dtensor_parts.depends_on_rank(args, kwargs):
        return original(*args, **kwargs)
    return mode.across(original, args, kwargs, what=original.__name__, seen=False)


def _even_layout(original: Call, local: torch.Tensor, *args: object) -> Any:
    shape, stride = _rank_by_rank(original, local, *args)
    if any(values_of(n) is not None for n in (*shape, *stride)):
        raise RankDependentError(
            f"from_local got local tensors of different sizes, {list(local.shape)}, without the global shape, so that "
            "each rank would take it to be another: pass shape= and stride="
        )
    return shape, stride


def _mover(original: Call, step: Any, source: DTensorSpec) -> Any:
    """A step of a redistribution, done by each rank on its shard."""
    if not _simulation().for_all:
        return original(step, source)

    def move(step: Any, source: DTensorSpec, shard: torch.Tensor) -> Any:
        return original(step, source)(plain_part(shard, source))

    what = f"redistribute ({step})"
    return lambda local: _simulation().across(move, [step, source, local], what=what, seen=False)


def _wrapped(original: Call, local: torch.Tensor, spec: Any, *args: object) -> Any:
    mode = _simulation()
    local = dtensor_parts.of_members(local, spec.info, mode.ranks) if mode.for_all else local
    return original(local, spec, *args)


def _core_manual_seed(original: Callable[..., None], seed: Any, device_mesh: DeviceMesh) -> None:
    mode = _simulation()
    original(seed, device_mesh)
    if mode.for_all:
        mode.random.reset_all()


# (of what, names, the answer, which gets the original first)
_ANSWERS: list[tuple[tuple[Any, ...], str, Call]] = [
    ((dist,), "get_rank", _get_rank),
    ((DeviceMesh,), "get_rank", lambda original, mesh: _get_rank(original)),
    (
        (DeviceMesh,),
        "get_local_rank",
        lambda of, mesh, mesh_dim=None: _get_rank(of, mesh.get_group(mesh_dim)),
    ),
    ((DeviceMesh,), "get_coordinate", _get_coordinate),
    ((DeviceMesh,), "_is_current_rank_part_of_mesh", lambda *args: _get_coordinate(*args) is not None),
    ((DeviceMesh,), "_sym_get_coordinate", lambda original, mesh, dim: _get_coordinate(original, mesh)[dim]),
    ((DeviceMesh,), "__init__ __getitem__ _flatten", _outside),
    ((DeviceMesh,), "get_group", _end_of),
    ((core_mesh,), "_world_of", _end_of),
    ((torch, torch.random), "manual_seed", _manual_seed),
    ((torch, torch.random, torch.cuda, torch.cuda.random), "get_rng_state", _get_rng_state),
    ((torch, torch.random, torch.cuda, torch.cuda.random), "set_rng_state", _set_rng_state),
    ((random,), "manual_seed", _core_manual_seed),
    ((spec, routes), "local_extents", _rank_by_rank),
    ((distribute, random), "part_of", _rank_by_rank),
    ((distribute,), "_sent", _rank_by_rank),
    ((region.TensorParallelRNG,), "draw", _rank_by_rank),
    ((region,), "first_state", _rank_by_rank),
    ((tensor,), "check_places plain_part agreed_placements checked_over_mesh", _rank_by_rank),
    ((tensor,), "even_layout", _even_layout),
    ((tensor,), "wrapped", _wrapped),
    ((routes,), "_mover", _mover),
]


@contextmanager
def answering_for(mode: LocalTensorMode) -> Iterator[None]:
    """Inside, `mode` answers."""
    global _mode
    if _mode is not None:
        raise SimulationError(
            "got a LocalTensorMode inside another, expected one at a time: take some of its ranks with tensor_map"
        )
    _mode, simulation.active = mode, True
    originals = [
        (owner, name, getattr(owner, name), answer)
        for owners, names, answer in _ANSWERS
        for name in names.split()
        for owner in owners
    ]
    for owner, name, original, answer in originals:
        setattr(owner, name, _bound(answer, original))
    try:
        yield
    finally:
        _mode, simulation.active = None, False
        for owner, name, original, _ in originals:
            setattr(owner, name, original)


def _bound(answer: Call, original: Call) -> Call:
    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> Any:
        return answer(original, *args, **kwargs)

    return call
