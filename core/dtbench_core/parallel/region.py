"""Random numbers of a tensor-parallel region: each shard's own where a tensor is sharded, the same where it
is replicated.

By default DTensors draw the numbers of one device (random.py), for which every rank draws the whole tensor.
Switched on, the streams here draw what a rank holds and no more: ranks that hold the same part share a
stream, ranks that hold different parts have streams with different seeds. The numbers then depend on the
mesh. Plain tensors, as styles hand them to what stands between a ColwiseParallel and a RowwiseParallel, belong
to no mesh: `region` says for a block of code how they are sharded.

    rng = tensor_parallel_rng(mesh["tp"])
    rng.enabled = True
    module.up.reset_parameters()          # another part of the weight on every rank
    with rng.region():
        h = F.dropout(h)                  # h is a plain shard: another mask on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError, PlacementError
from dtbench_core.layout import rng as random
from dtbench_core.layout.in_step import generators as generators_of
from dtbench_core.layout.mesh import MeshInfo, mesh_info
from dtbench_core.layout.placement import Placement, Shard
from dtbench_core.layout.shard_layout import empty_part
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.runtime import PerRank

# torch's first tensor-parallel API seeded its tracker so.
BASE_SEED = 1234
# What separates the seeds of shards from that of replicas, as Megatron-LM's model_parallel_cuda_manual_seed does.
SHARD_SEED_OFFSET = 2718
# Between the streams of DTensors and those of plain tensors: above any number of ranks, and below 2^32, as
# the CPU's Mersenne twister reads no higher bits.
PLAIN_SEED_OFFSET = 1 << 24


class TensorParallelRNG:
    """The streams of one mesh; get it with `tensor_parallel_rng`.

    Attributes:
        enabled: whether DTensors of the mesh, and plain tensors inside `region`, draw from the streams. False
            at first. Must be the same on every rank.
        base_seed: the seed of what is replicated; a shard's is larger by 2718 and its index.
    """

    def __init__(self, device_mesh: DeviceMesh, base_seed: int = BASE_SEED) -> None:
        self._mesh = device_mesh
        self._world = dist.group.WORLD
        # (this rank's coordinate, which mesh dims shard, whether of plain tensors) -> state of the generator.
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
        """Starts every stream anew. The seed must be the same on every rank.

        Raises:
            ArgumentError: not an int.
        """
        if not isinstance(base_seed, int):
            raise ArgumentError(f"manual_seed got {base_seed!r}, expected an int, the same on every rank")
        self.base_seed = base_seed
        self._states.clear()

    def draw(self, spec: DTensorSpec, make: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
        """What `make` draws for this rank's part of a tensor of `spec`; it is given the part's shape."""
        if spec.info.coordinate is None or 0 in spec.local_shape:
            return empty_part(spec, spec.info.device_type)
        with self.stream(spec.info, _sharded(spec.placements), plain=False):
            return make(spec.local_shape)

    @contextmanager
    def region(self, placements: Sequence[Placement] | None = None) -> Iterator[None]:
        """Inside, plain tensors are drawn for as shards of a tensor with these placements.

        Args:
            placements: one per mesh dim; a Shard on each when not given. With all Replicate the ranks draw
                alike.

        Does nothing while the streams are not enabled.
        """
        if not self.enabled:
            yield
            return
        info = mesh_info(self._mesh)
        if placements is not None and len(placements) != info.ndim:
            raise PlacementError(
                f"region got {len(placements)} placements for the {info}, expected one for each of its {info.ndim} dims"
            )
        info.my_coordinate()  # raises on a rank outside
        dims = tuple(range(info.ndim)) if placements is None else _sharded(placements)
        with self.stream(info, dims, plain=True):
            yield

    @contextmanager
    def stream(self, info: MeshInfo, sharded: tuple[int, ...], *, plain: bool) -> Iterator[None]:
        """The device's default generator draws from the stream of this rank's part."""
        generators = generators_of(info)
        key = (None if plain else info.coordinate, sharded, plain)
        state = self._states.get(key)
        if state is None:
            state = first_state(info, self.base_seed + (PLAIN_SEED_OFFSET if plain else 0), sharded)
        before = generators.get_rng_state()
        generators.set_rng_state(state)
        try:
            yield
        finally:
            self._states[key] = generators.get_rng_state()
            generators.set_rng_state(before)


def _sharded(placements: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh dims that shard."""
    return tuple(dim for dim, placement in enumerate(placements) if isinstance(placement, Shard))


def first_state(info: MeshInfo, seed: int, sharded: tuple[int, ...]) -> torch.Tensor:
    """The state that the stream of this rank's part starts from, when the mesh dims `sharded` cut."""
    if sharded:
        # 0 is a mesh dim that does not cut, so that no two parts of any sharding share a seed.
        index = 0
        for dim, (size, at) in enumerate(zip(info.sizes, info.my_coordinate(), strict=True)):
            index = index * (size + 1) + (at + 1 if dim in sharded else 0)
        seed += SHARD_SEED_OFFSET + index - 1
    return torch.Generator(info.device_type).manual_seed(seed).get_state()


# Of every mesh that was asked for.
streams: PerRank[dict[DeviceMesh, TensorParallelRNG]] = PerRank("parallel.streams", dict)


def tensor_parallel_rng(device_mesh: DeviceMesh) -> TensorParallelRNG:
    """The streams of `device_mesh`, made when first asked for; one for equal meshes of a world."""
    by_mesh = streams.get()
    rng = by_mesh.get(device_mesh)
    if rng is None or rng._world is not dist.group.WORLD:
        if rng is not None:
            rng.enabled = False
            del by_mesh[device_mesh]  # an equal key would stay
        rng = by_mesh[device_mesh] = TensorParallelRNG(device_mesh)
    return rng
