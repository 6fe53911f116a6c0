"""The ranks' store, their votes over it, and their process groups.

The ranks of a launch share a key-value store from start to end. It carries votes (`StoreRanks.agree`) and the events of
`failure`. Process groups come and go independently of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from dtbench.engine.failure import FOREVER
from dtbench.engine.rank_env import RankEnv
from dtbench.errors import WorldBrokenError
from dtbench.machine.backends import check_group, library_of, resolve_backend, torch_name
from dtbench.machine.device import gpus
from dtbench.suite.mesh import Mesh, default_mesh

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh

_V = TypeVar("_V")
_D = TypeVar("_D")
SIMULATED_RANKS = 8
# Time for a dying server to drop the connection of a probe.
_PROBE_S = 0.2
# The process group times out this long after the case's timeout. Before that, the failure detector names what hangs.
GROUP_GRACE_S = 30.0


class RankGroup(Protocol):
    """Votes of all ranks, outside the collectives that are measured."""

    rank: int
    size: int

    def agree(self, vote: _V, decide: Callable[[list[_V]], _D]) -> _D:
        """Returns the decision that rank 0 takes on the votes of all ranks. Votes and decision are JSON data."""

    def report_failure(self, error: str) -> None:
        """Informs the other ranks that a call raised here, since they may be waiting in a collective."""


def store_connector(env: RankEnv, launch: int) -> Callable[[bool], Store]:
    """Returns a function that opens a new connection to the store of this launch.

    The function's argument is True for the first connection of this process, which on rank 0 also serves the store
    unless the launcher does. Each launch has its own keys.

    Args:
        env: the environment of this launch, see `RankEnv.of_launch`.
    """

    def connect(first: bool) -> Store:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        # TCPStore would retry and log for a while.
        if not first and (reason := why_unreachable(env)):
            raise RuntimeError(f"the store at {env.address}:{env.port} is not served: {reason}")
        store = TCPStore(
            env.address,
            env.port,
            None,
            first and env.serves,
            timeout=timedelta(seconds=20),  # it is served, but may be busy
            wait_for_workers=False,
        )
        store.set_timeout(FOREVER)
        return PrefixStore(f"dtbench/{env.attempt}/{launch}", store)

    return connect


def why_unreachable(env: RankEnv) -> str:
    """Returns the reason why the store is not served, or "" if it is, or if this rank will serve it.

    A dying process accepts connections until its last thread has ended, and then drops them.
    """
    try:
        if env.serves:
            socket.getaddrinfo(env.address, env.port)
            return ""
        with socket.create_connection((env.address, env.port), timeout=20.0) as probe:
            probe.settimeout(_PROBE_S)
            with contextlib.suppress(TimeoutError):
                return "" if probe.recv(1) else "the connection was dropped"
    except (OSError, UnicodeError) as error:  # a label of the host name may be too long to encode
        return (getattr(error, "strerror", None) or str(error)).lower()
    return ""


class StoreRanks:
    """`RankGroup` over a store. Waiting ranks sleep; nothing polls while another rank works.

    Attributes:
        votes: number of votes taken, by which the failure detector sees whether the ranks still make progress.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        on_failure: Callable[[str], None] | None,
        patience: timedelta | None = None,
    ) -> None:
        """Takes part in the votes of `size` ranks.

        Args:
            on_failure: called with the error of a call that raised here.
            patience: how long to wait for the other ranks after a call raised here: they may have ended, or wait for
                this rank in a collective. None if a failure detector ends the ranks.
        """
        self.rank = rank
        self.size = size
        self.votes = 0
        self._store = store
        self._on_failure = on_failure
        self._patience = patience
        self._error = ""  # of the last call that raised

    def report_failure(self, error: str) -> None:
        self._error = error
        if self._on_failure is not None:
            self._on_failure(error)

    def agree(self, vote: _V, decide: Callable[[list[_V]], _D]) -> _D:
        """See `RankGroup.agree`. Each rank sets its vote and waits for the decision, which rank 0 makes from all votes.

        Raises:
            WorldBrokenError: a call raised here, and the other ranks do not vote.
        """
        if self.size == 1:
            self.votes += 1
            return _as_received(decide([_as_received(vote)]))
        turn = self.votes
        if self.rank == 0:
            keys = [f"vote/{turn}/{rank}" for rank in range(1, self.size)]
            self._wait(keys)
            other_votes = map(json.loads, self._store.multi_get(keys))
            decision = json.dumps(decide([_as_received(vote), *other_votes]))
            self._store.set(f"decision/{turn}", decision)
            # All ranks have read the previous decision, since they have voted again.
            for key in [*keys, *([f"decision/{turn - 1}"] if turn else [])]:
                self._store.delete_key(key)
        else:
            self._store.set(f"vote/{turn}/{self.rank}", json.dumps(vote))
            self._wait([f"decision/{turn}"])
            decision = self._store.get(f"decision/{turn}").decode()
        self.votes += 1
        return cast(_D, json.loads(decision))

    def _wait(self, keys: list[str]) -> None:
        if self._patience is None or not self._error:
            self._store.wait(keys, FOREVER)
            return
        from torch.distributed import DistStoreError

        try:
            self._store.wait(keys, self._patience)
        except DistStoreError:
            raise WorldBrokenError(
                f"{self._error}; the other ranks did not answer in {self._patience.total_seconds():g} s: they have "
                f"ended or are stuck in a collective with rank {self.rank}; ending this process releases them"
            ) from None


def vote_of_rank_0(votes: list[_V]) -> _V:
    """Decides for `RankGroup.agree` that all ranks get rank 0's vote."""
    return votes[0]


def _as_received(value: _V) -> _V:
    """Returns the value as other ranks receive it: tuples become lists."""
    return cast(_V, json.loads(json.dumps(value)))


class AloneRanks:
    """`RankGroup` of a single process, for simulated ranks."""

    rank = 0
    size = 1

    def agree(self, vote: _V, decide: Callable[[list[_V]], _D]) -> _D:
        return decide([vote])

    def report_failure(self, error: str) -> None:
        """Does nothing, since this process has no other ranks."""


class LiveWorld:
    """`suite.World`: this rank in a process group, and meshes over all ranks."""

    def __init__(self, rank: int, world_size: int, device: torch.device, mesh: Mesh) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self.mesh = self._make(tuple(size for _, size in mesh), tuple(name for name, _ in mesh))

    def mesh_of(self, shape: tuple[int, ...]) -> DeviceMesh:
        """Returns a mesh of all ranks in `shape`: the run's mesh if it has that shape, else one with dims dim0, dim1...

        The first call with a shape is a collective of all ranks.
        """
        if shape not in self._meshes:
            self._make(shape, tuple(f"dim{i}" for i in range(len(shape))))
        return self._meshes[shape]

    def _make(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        self._meshes[shape] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._meshes[shape]


class SimulatedWorld(LiveWorld):
    """`suite.World`: rank 0 of simulated ranks. A one-dimensional mesh may have more ranks than the process group."""

    def _make(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        if len(shape) > 1 or shape[0] <= self.world_size:
            return super()._make(shape, names)
        from torch.distributed import distributed_c10d
        from torch.distributed.device_mesh import DeviceMesh

        # The public functions make no group larger than the default one. Replacing the default group would end the
        # meshes of cases that are measured in turn with this one. Destroying the default group destroys this one, too.
        group, _ = distributed_c10d._new_process_group_helper(
            shape[0],
            self.rank,
            [],
            "fake",
            distributed_c10d._get_default_store(),
            distributed_c10d.GroupName(f"simulated {shape[0]}"),
            timeout=distributed_c10d.default_pg_timeout,
        )
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(shape[0])}
        return self._meshes.setdefault(
            shape, DeviceMesh.from_group(group, self.device.type, mesh_dim_names=names)
        )


def select_device(device_type: str, local_rank: int) -> torch.device:
    """Returns this rank's device, after making it the current one."""
    import torch

    # If the launcher shows each rank only its own GPU, this GPU is number 0.
    return torch.device("cpu") if device_type == "cpu" else gpus().select(local_rank % gpus().count())


@contextlib.contextmanager
def simulated_world(device: torch.device) -> Iterator[LiveWorld]:
    """Yields rank 0 of 8 simulated ranks: torch's fake process group, whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=SIMULATED_RANKS, store=FakeStore())
    try:
        yield SimulatedWorld(0, SIMULATED_RANKS, device, (("ranks", SIMULATED_RANKS),))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def world_of_one(device: torch.device) -> Iterator[tuple[LiveWorld, Callable[[], None]]]:
    """Yields this process as the single rank of a process group, and its barrier."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group(torch_name(resolve_backend(device.type)), store=HashStore(), rank=0, world_size=1)
    try:
        yield LiveWorld(0, 1, device, default_mesh(1)), lambda: None
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def real_world(
    env: RankEnv, store: Store, device: torch.device, mesh: Mesh, timeout_s: float, backend: str
) -> Iterator[LiveWorld]:
    """Yields the world of all ranks in a new process group.

    After an error the group is not destroyed: NCCL would wait for the other ranks, which have not been informed yet.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if library_of(backend) == "gloo" and env.local_world_size == env.world_size:
        _bind_gloo_to_loopback_if_needed()
    dist.init_process_group(
        torch_name(backend),
        store=PrefixStore("group", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s + GROUP_GRACE_S),
        device_id=device if library_of(backend) == "nccl" else None,
    )
    check_group(backend, device)
    yield LiveWorld(env.rank, env.world_size, device, mesh)
    dist.destroy_process_group()


def make_barrier(device: torch.device) -> Callable[[], None]:
    """Returns a barrier of all ranks that also waits for the device's work."""
    import torch.distributed as dist

    if device.type == "cpu":
        return lambda: dist.barrier()

    def barrier() -> None:
        dist.barrier(device_ids=[device.index] if "nccl" in dist.get_backend() else None)
        gpus().synchronize()

    return barrier


def _bind_gloo_to_loopback_if_needed() -> None:
    """Makes gloo listen on loopback if this host does not have the address that its name resolves to.

    That happens on a laptop between networks, or in a container without an entry for itself.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        with socket.socket() as probe:
            probe.bind((socket.gethostbyname(socket.gethostname()), 0))
    except OSError:
        loopbacks = (name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ["GLOO_SOCKET_IFNAME"] = next(loopbacks, "lo")
