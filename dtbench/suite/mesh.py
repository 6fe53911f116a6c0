"""Device meshes as the command line and the headers of runs write them: names and sizes of their dims."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from dtbench.errors import UsageError

Mesh = tuple[tuple[str, int], ...]
Groups = list[list[int]]

# The largest clusters hold some 10^5 GPUs.
MAX_RANKS = 2**20
_DIM = re.compile(r"([A-Za-z_]\w*)=([0-9]{1,9})")


def parse_mesh(text: str) -> Mesh:
    """`dp=2,tp=2` -> (("dp", 2), ("tp", 2)), outermost first."""
    dims: list[tuple[str, int]] = []
    for part in text.split(","):
        match = _DIM.fullmatch(part.strip())
        if match is None or int(match[2]) < 1:
            raise UsageError(
                f"{part.strip()[:40]!r} in --mesh {text[:80]} is not a mesh dim: "
                f"expected NAME=RANKS, such as --mesh dp=2,tp=2"
            )
        dims.append((match[1], int(match[2])))
    if len({name for name, _ in dims}) < len(dims):
        raise UsageError(f"--mesh {text} gives a mesh dim twice: expected every name once")
    if (ranks := math.prod(size for _, size in dims)) > MAX_RANKS:
        raise UsageError(f"--mesh {text} has {ranks} ranks, expected at most {MAX_RANKS}")
    return tuple(dims)


def ranks_of(mesh: Mesh) -> int:
    return math.prod(size for _, size in mesh)


def format_mesh(mesh: Iterable[Sequence[str | int]]) -> str:
    """(("dp", 2), ("tp", 2)) -> `dp=2,tp=2`, as --mesh reads it."""
    return ",".join(f"{name}={size}" for name, size in mesh)


def default_mesh(world_size: int) -> Mesh:
    """The most square dp x tp of the world, the larger dim inside; one dim `tp` when it is prime."""
    for outer in range(math.isqrt(world_size), 1, -1):
        if world_size % outer == 0:
            return (("dp", outer), ("tp", world_size // outer))
    return (("tp", world_size),)


def joint_dim(dims: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """All mesh dims of more than one rank taken as one, ("dp+tp", 4): what a collective over the whole
    mesh runs on. None where fewer than two dims have ranks to share."""
    wide = [(name, ranks) for name, ranks in dims if ranks > 1]
    return ("+".join(name for name, _ in wide), math.prod(n for _, n in wide)) if len(wide) > 1 else None


def groups_by_dim(names: Sequence[str], shape: Sequence[int]) -> dict[str, Groups]:
    """The groups of each mesh dim, and of all dims as one."""
    groups = {name: groups_of(shape, dim) for dim, name in enumerate(names)}
    joint = joint_dim(zip(names, shape, strict=True))
    return groups | ({joint[0]: [list(range(joint[1]))]} if joint else {})


def groups_in(mesh: Mesh, dim: object) -> Groups:
    """The groups of a mesh dim by its name; all ranks as one group where the mesh has no dim of that name."""
    names, shape = zip(*mesh, strict=True)
    return groups_by_dim(names, shape).get(str(dim), [list(range(ranks_of(mesh)))])


def groups_of(shape: Sequence[int], dim: int) -> Groups:
    """The groups of a mesh dim: ranks that differ in that coordinate alone. Meshes are row-major."""
    inner = math.prod(shape[dim + 1 :])
    size = shape[dim]
    firsts = (rank for rank in range(math.prod(shape)) if rank // inner % size == 0)
    return [[first + inner * at for at in range(size)] for first in firsts]
