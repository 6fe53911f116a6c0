"""Splits the core's DTensors by rank in a LocalTensorMode, and joins the ranks' results again.

In that mode a DTensor contains a LocalTensor, and the mesh info of its spec has rank-dependent coordinates. An op on
it is run as each rank, with that rank's shard, mesh info and process groups. Dispatch, plans and redistributions are
the same as on real ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dtbench_core.dispatch.out_and_resize import replace_local_and_spec
from dtbench_core.errors import SimulationError, describe_ranks
from dtbench_core.layout.mesh import MeshInfo, mesh_info, mesh_tables
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import Wrapper, wrap
from dtbench_core.redistribute.copied_view import copied_view
from dtbench_core.simulate.group import coordinate_of
from dtbench_core.simulate.local_int import values_of
from dtbench_core.simulate.local_tensor import LocalTensor, PlainCopies, RankParts, joined


class CoreParts(RankParts):
    """Splits DTensors, specs and mesh infos by rank, too, and joins DTensors."""

    def __init__(self, ranks: Sequence[int], copies: PlainCopies | None = None) -> None:
        super().__init__(copies)
        self._ranks = ranks
        self._mesh_infos = mesh_tables.get().by_object  # for code that runs for all ranks
        # id of a DTensor -> (the DTensor, rank -> its part)
        self._parts: dict[int, tuple[Wrapper, dict[int, Wrapper]]] = {}

    def other_part(self, value: object, rank: int) -> Any:
        if isinstance(value, Wrapper):
            part = self._dtensor_part(value, rank)
            self._parts.setdefault(id(value), (value, {}))[1][rank] = part
            return self.remember(part, value)
        if isinstance(value, DTensorSpec):
            self._check(value.info, value)
            return spec_of_running_rank(value)
        if isinstance(value, MeshInfo):
            self._check(value, value)
            return mesh_info(value.mesh)
        return self.remember(value, value) if isinstance(value, torch.Tensor) else value

    def _check(self, info: MeshInfo, value: object) -> None:
        if not any(known_info is info for _, known_info in self._mesh_infos.values()):
            raise SimulationError(
                f"got {value}, made outside this LocalTensorMode and so for one rank only; expected a DTensor made "
                "inside, for all ranks: make it there, or pass its full_tensor() in"
            )

    def _dtensor_part(self, value: Wrapper, rank: int) -> Wrapper:
        self._check(value._spec.info, value._spec)
        local = value._local_tensor
        if not isinstance(local, LocalTensor):
            # The DTensor was made of a plain tensor. From now on each rank has its own copy of it.
            with torch._C._DisableTorchDispatch():
                local = value._local_tensor = LocalTensor(
                    {r: local.detach().clone() for r in self.members(value._spec.info)}
                )
        return wrap(type(value), local.shard(rank), spec_of_running_rank(value._spec))

    def members(self, info: MeshInfo) -> tuple[int, ...]:
        """Returns the simulated ranks in the mesh of `info`."""
        return tuple(r for r in self._ranks if coordinate_of(info.mesh, r) is not None)

    def ranks_of(self, *values: object) -> tuple[int, ...] | None:
        """Returns the ranks in the mesh of the first DTensor, spec or mesh info among `values`; None without any."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Wrapper):
                local = leaf._local_tensor
                return local.ranks if isinstance(local, LocalTensor) else self.members(leaf._spec.info)
            if isinstance(leaf, (DTensorSpec, MeshInfo)):
                return self.members(leaf.info if isinstance(leaf, DTensorSpec) else leaf)
        return None

    def join_leaf(self, values: Mapping[int, Any], name: str) -> Any:
        first = next(iter(values.values()))
        if not isinstance(first, Wrapper):
            return NotImplemented
        local = joined({r: v._local_tensor for r, v in values.items()}, self, name)
        spec = _joined_spec({r: v._spec for r, v in values.items()}, name)
        origin = getattr(first, "_origin", None)  # set on a copied view
        if origin is not None and (owner := self.source_of(origin.owner)) is not None:
            return copied_view(type(first).viewed, local, spec, owner)
        return wrap(type(first), local, spec)

    def update_written(self, name: str) -> None:
        """Updates the DTensors that an op wrote to: each rank's part may have a new shape or a new local tensor."""
        for value, parts in self._parts.values():
            local = value._local_tensor
            assert isinstance(local, LocalTensor)
            spec = _joined_spec({r: part._spec for r, part in parts.items()}, name)
            if (
                any(part._local_tensor is not local._local_tensors[r] for r, part in parts.items())
                or spec is not value._spec
            ):
                replace_local_and_spec(
                    value, LocalTensor({r: part._local_tensor for r, part in parts.items()}), spec
                )


def spec_of_running_rank(value: DTensorSpec) -> DTensorSpec:
    """Returns `value` with the mesh info of the running rank."""
    return DTensorSpec.of(
        mesh_info(value.info.mesh), value.placements, value.shape, value.stride, value.dtype, value.order
    )


def _joined_spec(specs: Mapping[int, DTensorSpec], name: str) -> DTensorSpec:
    """Returns the spec for all ranks, given each rank's spec.

    Raises:
        SimulationError: the specs differ in more than the rank.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for rank, spec in specs.items():
        kinds.setdefault(
            (spec.info.mesh, spec.placements, tuple(spec.shape), tuple(spec.stride), spec.dtype, spec.order),
            [],
        ).append(rank)
    if len(kinds) > 1:
        listed = "; ".join(f"ranks {describe_ranks(ranks)}: {specs[ranks[0]]}" for ranks in kinds.values())
        raise SimulationError(
            f"{name} returned different DTensors on the ranks ({listed}), expected the same on all"
        )
    mesh, *layout = next(iter(kinds))
    return DTensorSpec.of(mesh_info(mesh), *layout)


def depends_on_rank(*values: object) -> bool:
    """Whether any value has parts or coordinates that differ between ranks."""
    kinds = (LocalTensor, Wrapper, DTensorSpec, MeshInfo)
    return any(isinstance(leaf, kinds) or values_of(leaf) is not None for leaf in tree_leaves(values))


def restricted_to_members(local: torch.Tensor, info: MeshInfo, ranks: Sequence[int]) -> torch.Tensor:
    """Returns `local` on only those ranks that are in the mesh; other ranks hold nothing of a DTensor."""
    if not isinstance(local, LocalTensor):
        return local
    members = CoreParts(ranks).members(info)
    if set(local.ranks) <= set(members):
        return local
    if local.requires_grad and torch.is_grad_enabled():
        raise SimulationError(
            f"got a LocalTensor of ranks {describe_ranks(local.ranks)} that requires grad for {info}, of which ranks "
            f"{describe_ranks(members)} are members; expected it on the members only: make it with tensor_map"
        )
    return LocalTensor({r: t for r, t in local._local_tensors.items() if r in members})
