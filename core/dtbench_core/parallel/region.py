"""Random numbers of a tensor-parallel region: different for each shard of a tensor, the same for its replicas.

By default DTensors draw the numbers of a single device (layout/random.py): every rank draws the whole tensor and keeps
its part. With a TensorParallelRNG enabled, each rank draws only its part. Ranks with the same part use the same seed,
and ranks with different parts use different seeds. The numbers then depend on the mesh.

Between a ColwiseParallel and a RowwiseParallel, modules get plain tensors, which belong to no mesh. `region` declares
how these are sharded inside a block of code.

    rng = tensor_parallel_rng(mesh["tp"])
    rng.enabled = True
    module.up.reset_parameters()          # draws a different part of the weight on every rank
    with rng.region():
        h = F.dropout(h)                  # h is a plain shard: the mask differs between ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError, PlacementError
from dtbench_core.layout import random
from dtbench_core.layout.in_step import generators as generators_of
from dtbench_core.layout.mesh import MeshInfo, mesh_info
from dtbench_core.layout.placement import Placement, Shard
from dtbench_core.layout.shard_layout import empty_part
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.runtime import PerRank

# The seed of the RNG tracker in torch's first tensor-parallel API.
BASE_SEED = 1234
# Added to the seeds of shards, so that they differ from those of replicas. The value of Megatron-LM's
# model_parallel_cuda_manual_seed.
SHARD_SEED_OFFSET = 2718
# Added to the seeds of plain tensors, so that they differ from those of DTensors. It exceeds any number of ranks, and
# is below 2^32, since the Mersenne twister of the CPU ignores higher bits.
PLAIN_SEED_OFFSET = 1 << 24


class TensorParallelRNG:
    """The streams of random numbers of one mesh, one for each part of a tensor. `tensor_parallel_rng` returns it.

    Attributes:
        enabled: whether DTensors of the mesh, and plain tensors inside `region`, draw from these streams. Initially
            False. Must be the same on every rank.
        base_seed: the seed of replicated tensors. The seed of a shard adds 2718 and the shard's index.
    """

    def __init__(self, device_mesh: DeviceMesh, base_seed: int = BASE_SEED) -> None:
        self._mesh = device_mesh
        self._world = dist.group.WORLD
        # (this rank's coordinate, or None for plain tensors; mesh dims that shard; whether plain) -> generator state
        self._states: dict[tuple[Any, ...], torch.Tensor] = {}
        self.base_seed = base_seed

    @property
    def enabled(self) -> bool:
        return random.regions.get().get(self._mesh) is self

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if value:
            random.regions.get()[self._mesh] = self
        elif self.enabled:
            del random.regions.get()[self._mesh]

    def manual_seed(self, base_seed: int) -> None:
        """Restarts every stream from this seed, which must be the same on every rank.

        Raises:
            ArgumentError: not an int.
        """
        if not isinstance(base_seed, int):
            raise ArgumentError(f"manual_seed got {base_seed!r}, expected an int, the same on every rank")
        self.base_seed = base_seed
        self._states.clear()

    def draw(self, spec: DTensorSpec, make: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
        """Returns random numbers for this rank's part of a tensor of `spec`.

        Args:
            make: draws a tensor of the given shape.
        """
        if spec.info.coordinate is None or 0 in spec.local_shape:
            return empty_part(spec, spec.info.device_type)
        with self.stream(spec.info, _sharding_dims(spec.placements), plain=False):
            return make(spec.local_shape)

    @contextmanager
    def region(self, placements: Sequence[Placement] | None = None) -> Iterator[None]:
        """Context in which random numbers for plain tensors are drawn as for shards with these placements.

        Does nothing unless the streams are enabled.

        Args:
            placements: one per mesh dim; by default a Shard on each. With Replicate on all dims, the ranks draw the
                same numbers.

        Raises:
            PlacementError: another number of placements.
        """
        if not self.enabled:
            yield
            return
        info = mesh_info(self._mesh)
        if placements is not None and len(placements) != info.ndim:
            raise PlacementError(
                f"region got {len(placements)} placements for the {info}, expected one for each of its {info.ndim} dims"
            )
        info.my_coordinate()  # raises on ranks outside the mesh
        dims = tuple(range(info.ndim)) if placements is None else _sharding_dims(placements)
        with self.stream(info, dims, plain=True):
            yield

    @contextmanager
    def stream(self, info: MeshInfo, sharded: tuple[int, ...], *, plain: bool) -> Iterator[None]:
        """Context in which the device's default generator draws from the stream of this rank's part.

        Args:
            sharded: the mesh dims that shard.
            plain: whether the numbers are for plain tensors.
        """
        generators = generators_of(info)
        key = (None if plain else info.coordinate, sharded, plain)
        if (state := self._states.get(key)) is None:
            state = first_state(info, self.base_seed + (PLAIN_SEED_OFFSET if plain else 0), sharded)
        saved_state = generators.get_rng_state()
        generators.set_rng_state(state)
        try:
            yield
        finally:
            self._states[key] = generators.get_rng_state()
            generators.set_rng_state(saved_state)


def _sharding_dims(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Returns the mesh dims whose placement is a Shard."""
    return tuple(dim for dim, placement in enumerate(placements) if isinstance(placement, Shard))


def first_state(info: MeshInfo, seed: int, sharded: tuple[int, ...]) -> torch.Tensor:
    """Returns the initial generator state for this rank's part when the mesh dims `sharded` shard."""
    if sharded:
        # A digit of 0 stands for a mesh dim that does not shard, so that no two parts of any sharding share a seed.
        index = 0
        for dim, (size, coordinate) in enumerate(zip(info.sizes, info.my_coordinate(), strict=True)):
            index = index * (size + 1) + (coordinate + 1 if dim in sharded else 0)
        seed += SHARD_SEED_OFFSET + index - 1
    return torch.Generator(info.device_type).manual_seed(seed).get_state()


# mesh -> its streams, if they were ever requested
streams: PerRank[dict[DeviceMesh, TensorParallelRNG]] = PerRank("parallel.streams", dict)


def tensor_parallel_rng(device_mesh: DeviceMesh) -> TensorParallelRNG:
    """Returns the streams of `device_mesh`, created on the first call. Equal meshes of a world share them."""
    by_mesh = streams.get()
    rng = by_mesh.get(device_mesh)
    if rng is None or rng._world is not dist.group.WORLD:
        if rng is not None:
            rng.enabled = False
            del by_mesh[device_mesh]  # assigning would keep the old, equal mesh as the key
        rng = by_mesh[device_mesh] = TensorParallelRNG(device_mesh)
    return rng
