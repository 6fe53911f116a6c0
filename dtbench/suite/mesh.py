"""Device meshes as names and sizes of their dims, and the groups of ranks along each dim."""

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
    """Parses a mesh, outermost dim first: `dp=2,tp=2` -> (("dp", 2), ("tp", 2))."""
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
        raise UsageError(f"--mesh {text} names a mesh dim twice: give each name once")
    if (ranks := math.prod(size for _, size in dims)) > MAX_RANKS:
        raise UsageError(f"--mesh {text} has {ranks} ranks, expected at most {MAX_RANKS}")
    return tuple(dims)


def ranks_of(mesh: Mesh) -> int:
    return math.prod(size for _, size in mesh)


def format_mesh(mesh: Iterable[Sequence[str | int]]) -> str:
    """Formats a mesh as --mesh reads it: (("dp", 2), ("tp", 2)) -> `dp=2,tp=2`."""
    return ",".join(f"{name}={size}" for name, size in mesh)


def default_mesh(world_size: int) -> Mesh:
    """Returns the most square dp x tp mesh, with tp at least as large as dp. For a prime number of ranks: only tp."""
    for outer in range(math.isqrt(world_size), 1, -1):
        if world_size % outer == 0:
            return (("dp", outer), ("tp", world_size // outer))
    return (("tp", world_size),)


def joint_dim(dims: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Joins all dims of more than one rank into one for a collective over the whole mesh, e.g. ("dp+tp", 4).

    Returns None if fewer than two dims have more than one rank.
    """
    wide = [(name, ranks) for name, ranks in dims if ranks > 1]
    return ("+".join(name for name, _ in wide), math.prod(n for _, n in wide)) if len(wide) > 1 else None


def groups_by_dim(names: Sequence[str], shape: Sequence[int]) -> dict[str, Groups]:
    """Returns the groups of ranks of each mesh dim, and of all dims joined."""
    groups = {name: groups_of(shape, dim) for dim, name in enumerate(names)}
    joint = joint_dim(zip(names, shape, strict=True))
    return groups | ({joint[0]: [list(range(joint[1]))]} if joint else {})


def groups_in(mesh: Mesh, dim: object) -> Groups:
    """Returns the groups of the mesh dim `dim`, or a single group of all ranks if the mesh has no such dim."""
    names, shape = zip(*mesh, strict=True)
    return groups_by_dim(names, shape).get(str(dim), [list(range(ranks_of(mesh)))])


def groups_of(shape: Sequence[int], dim: int) -> Groups:
    """Returns the groups of a mesh dim: the ranks of a group differ only in that coordinate. Meshes are row-major."""
    inner = math.prod(shape[dim + 1 :])
    size = shape[dim]
    firsts = (rank for rank in range(math.prod(shape)) if rank // inner % size == 0)
    return [[first + inner * index for index in range(size)] for first in firsts]
