"""The core's own DTensors in a LocalTensorMode, taken apart by rank and put together again.

A DTensor there holds a LocalTensor, and its spec's mesh info has rank-dependent coordinates. An op on it
runs as each rank: with that rank's shard, that rank's info and groups, through the same dispatch, plans
and movers as on real ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dtbench_core.dispatch.out_and_resize import restate
from dtbench_core.errors import SimulationError, describe_ranks
from dtbench_core.layout.mesh import MeshInfo, mesh_info, mesh_tables
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import Wrapper, wrap
from dtbench_core.redistribute.copied_view import copied_view
from dtbench_core.simulate.group import coordinate_of
from dtbench_core.simulate.local_int import values_of
from dtbench_core.simulate.local_tensor import LocalTensor, PlainCopies, RankParts, joined


class CoreParts(RankParts):
    """Also takes DTensors, specs and mesh infos apart, and puts them together."""

    def __init__(self, ranks: Sequence[int], copies: PlainCopies | None = None) -> None:
        super().__init__(copies)
        self._ranks = ranks
        self._infos = mesh_tables.get().by_object  # of all ranks, while no rank runs
        self._latest: dict[int, tuple[Wrapper, dict[int, Wrapper]]] = {}

    def other(self, value: object, rank: int) -> Any:
        if isinstance(value, Wrapper):
            part = self._part_of(value, rank)
            self._latest.setdefault(id(value), (value, {}))[1][rank] = part
            return self.remember(part, value)
        if isinstance(value, DTensorSpec):
            self._check(value.info, value)
            return of_rank(value)
        if isinstance(value, MeshInfo):
            self._check(value, value)
            return mesh_info(value.mesh)
        return self.remember(value, value) if isinstance(value, torch.Tensor) else value

    def _check(self, info: MeshInfo, what: object) -> None:
        if not any(of_all is info for _, of_all in self._infos.values()):
            raise SimulationError(
                f"got {what}, made outside this LocalTensorMode, which is one rank's alone; expected a DTensor made "
                "inside, for all ranks: make it there, or pass its full_tensor() in"
            )

    def _part_of(self, value: Wrapper, rank: int) -> Wrapper:
        self._check(value._spec.info, value._spec)
        held = value._local_tensor
        if not isinstance(held, LocalTensor):  # made of a plain tensor: each rank has its own from now on
            with torch._C._DisableTorchDispatch():
                ranks = self.members(value._spec.info)
                held = value._local_tensor = LocalTensor({r: held.detach().clone() for r in ranks})
        return wrap(type(value), held.shard(rank), of_rank(value._spec))

    def members(self, info: MeshInfo) -> tuple[int, ...]:
        """The simulated ranks in the mesh of `info`."""
        return tuple(r for r in self._ranks if coordinate_of(info.mesh, r) is not None)

    def ranks_of(self, *values: object) -> tuple[int, ...] | None:
        """The ranks that take part, if a value says so: the members of its mesh."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Wrapper):
                held = leaf._local_tensor
                return held.ranks if isinstance(held, LocalTensor) else self.members(leaf._spec.info)
            if isinstance(leaf, (DTensorSpec, MeshInfo)):
                return self.members(leaf.info if isinstance(leaf, DTensorSpec) else leaf)
        return None

    def join(self, values: Mapping[int, Any], what: str) -> Any:
        first = next(iter(values.values()))
        if not isinstance(first, Wrapper):
            return NotImplemented
        held = joined({r: v._local_tensor for r, v in values.items()}, self, what)
        spec = _of_all({r: v._spec for r, v in values.items()}, what)
        origin = getattr(first, "_origin", None)  # of a copied view, whose base is that of all ranks here
        if origin is not None and (owner := self.whole_of(origin.owner)) is not None:
            return copied_view(type(first).viewed, held, spec, owner)
        return wrap(type(first), held, spec)

    def settle(self, what: str) -> None:
        """Gives DTensors what their parts have become: written ones may have got a new shape or shard."""
        for value, parts in self._latest.values():
            held = value._local_tensor
            assert isinstance(held, LocalTensor)
            now = _of_all({r: part._spec for r, part in parts.items()}, what)
            moved = any(part._local_tensor is not held._local_tensors[r] for r, part in parts.items())
            if moved or now is not value._spec:
                local = LocalTensor({r: part._local_tensor for r, part in parts.items()})
                restate(value, local, now)


def of_rank(value: DTensorSpec) -> DTensorSpec:
    """`value` as the rank that runs has it."""
    return DTensorSpec.of(
        mesh_info(value.info.mesh), value.placements, value.shape, value.stride, value.dtype, value.order
    )


def _of_all(specs: Mapping[int, DTensorSpec], what: str) -> DTensorSpec:
    """The one spec of which these are the ranks'."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for rank, one in specs.items():
        key = (one.info.mesh, one.placements, tuple(one.shape), tuple(one.stride), one.dtype, one.order)
        kinds.setdefault(key, []).append(rank)
    if len(kinds) > 1:
        listed = "; ".join(f"ranks {describe_ranks(ranks)}: {specs[ranks[0]]}" for ranks in kinds.values())
        raise SimulationError(f"{what} gave the ranks different DTensors ({listed}), expected one for all")
    of, *described = next(iter(kinds))
    return DTensorSpec.of(mesh_info(of), *described)


def depends_on_rank(*values: object) -> bool:
    """Whether the core means something else by these on each rank."""
    kinds = (LocalTensor, Wrapper, DTensorSpec, MeshInfo)
    return any(isinstance(leaf, kinds) or values_of(leaf) is not None for leaf in tree_leaves(values))


def of_members(local: torch.Tensor, info: MeshInfo, ranks: Sequence[int]) -> torch.Tensor:
    """`local` on the ranks of the mesh alone: the others hold nothing of a DTensor."""
    if not isinstance(local, LocalTensor):
        return local
    inside = CoreParts(ranks).members(info)
    if set(local.ranks) <= set(inside):
        return local
    if local.requires_grad and torch.is_grad_enabled():
        raise SimulationError(
            f"got a LocalTensor of ranks {describe_ranks(local.ranks)} that requires grad for {info}, of which ranks "
            f"{describe_ranks(inside)} are members; expected it on these alone: make it with tensor_map"
        )
    return LocalTensor({r: t for r, t in local._local_tensors.items() if r in inside})
