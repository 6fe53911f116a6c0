"""The world a run lives in: how its ranks reach each other, and its process groups.

The ranks of a run share a key-value store from start to end. Over it go votes (`StoreRanks.agree`) and
alarms (`watch`); process groups come and go beside it.
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
from dtbench.machine.device import gpus
from dtbench.suite.mesh import Mesh, default_mesh

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh

_V = TypeVar("_V")
_D = TypeVar("_D")
SIMULATED_RANKS = 8
# Further connections are made once when a launch begins, and where something went wrong.
_DYING_S = 0.2
# The watch fires at the case's timeout and says what hangs; the group's own end comes after it.
GROUP_GRACE_S = 30.0


class RankGroup(Protocol):
    """The ranks of a world, reached outside its collectives."""

    rank: int
    size: int

    def agree(self, vote: _V, decide: Callable[[list[_V]], _D]) -> _D:
        """Every rank gives a vote (JSON data); rank 0 decides on the list of all; all get the decision."""
        ...

    def raised(self, reason: str) -> None:
        """Tells the others that a call raised here: they may be waiting in a collective."""
        ...


def store_connector(place: RankEnv, launch: int) -> Callable[[bool], Store]:
    """How to reach the store of this launch: a function that opens a new connection (True: the first
    of this process, which also serves where no launcher does).

    Each launch has its own keys. place: of this launch, see `RankEnv.of_launch`.
    """

    def connect(first: bool) -> Store:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        # Torch would try and log for a while.
        if not first and (why := why_unreachable(place)):
            raise RuntimeError(f"nobody serves the store at {place.address}:{place.port}: {why}")
        store = TCPStore(
            place.address,
            place.port,
            None,
            first and place.serves,
            timeout=timedelta(seconds=20),  # it is there: only busy
            wait_for_workers=False,
        )
        store.set_timeout(FOREVER)
        return PrefixStore(f"dtbench/{place.attempt}/{launch}", store)

    return connect


def why_unreachable(place: RankEnv) -> str:
    """Why nobody serves the store, in words; "" where somebody does, or this rank is about to.

    A process that dies still takes connections until its last thread is gone, and then drops them.
    """
    try:
        if place.serves:
            socket.getaddrinfo(place.address, place.port)
            return ""
        with socket.create_connection((place.address, place.port), timeout=20.0) as probe:
            probe.settimeout(_DYING_S)
            with contextlib.suppress(TimeoutError):
                return "" if probe.recv(1) else "the connection was dropped"
    except (OSError, UnicodeError) as error:  # a label of a name may be too long to be encoded
        return (getattr(error, "strerror", None) or str(error)).lower()
    return ""


class StoreRanks:
    """`RankGroup` over a store. Waiting ranks sleep in the kernel: nothing polls while another one works.

    patience: how long a rank waits for the others once a call of its own has raised: they may wait for it in a
        collective, or have ended. None where somebody watches the world, and ends it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        on_raised: Callable[[str], None] | None,
        patience: timedelta | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.votes = 0  # decided so far; the watch tells by it whether the ranks found together
        self._store = store
        self._on_raised = on_raised
        self._patience = patience
        self._reason = ""  # why the last call raised that did

    def raised(self, reason: str) -> None:
        self._reason = reason
        if self._on_raised is not None:
            self._on_raised(reason)

    def agree(self, vote: _V, decide: Callable[[list[_V]], _D]) -> _D:
        """See `RankGroup.agree`. One round trip per rank, two for rank 0.

        Raises:
            WorldBrokenError: a call raised here, and the others do not come.
        """
        if self.size == 1:
            alone = _sent(decide([_sent(vote)]))
            self.votes += 1
            return alone
        turn = self.votes
        decision: str | bytes
        if self.rank == 0:
            keys = [f"vote/{turn}/{rank}" for rank in range(1, self.size)]
            self._wait(keys)
            others = [json.loads(value) for value in self._store.multi_get(keys)]
            decision = json.dumps(decide([_sent(vote), *others]))
            self._store.set(f"decision/{turn}", decision)
            # All have read the decision before this one, or they would not have voted again.
            for key in [*keys, *([f"decision/{turn - 1}"] if turn else [])]:
                self._store.delete_key(key)
        else:
            self._store.set(f"vote/{turn}/{self.rank}", json.dumps(vote))
            self._wait([f"decision/{turn}"])
            decision = self._store.get(f"decision/{turn}")
        self.votes += 1
        return cast(_D, json.loads(decision))

    def _wait(self, keys: list[str]) -> None:
        if self._patience is None or not self._reason:
            self._store.wait(keys, FOREVER)
            return
        from torch.distributed import DistStoreError

        try:
            self._store.wait(keys, self._patience)
        except DistStoreError:
            limit_s = self._patience.total_seconds()
            raise WorldBrokenError(
                f"{self._reason}; the other ranks did not answer in {limit_s:g} s: they have ended, or wait for rank "
                f"{self.rank} in a collective, which ends with this process"
            ) from None


def vote_of_rank_0(votes: list[_V]) -> _V:
    """Decides for `RankGroup.agree` that all ranks get rank 0's vote."""
    return votes[0]


def _sent(value: _V) -> _V:
    """Returns the value as other ranks receive it: tuples become lists."""
    return cast(_V, json.loads(json.dumps(value)))


class AloneRanks:
    """`RankGroup` of the simulated world: rank 0 measures while the others wait."""

    rank = 0
    size = 1

    def agree(self, vote: _V, decide: Callable[[list[_V]], _D]) -> _D:
        return decide([vote])

    def raised(self, reason: str) -> None:
        pass


class LiveWorld:
    """`suite.World`: this rank's place in a live process group, and meshes over all its ranks."""

    def __init__(self, rank: int, world_size: int, device: torch.device, mesh: Mesh) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self.mesh = self._make(tuple(size for _, size in mesh), tuple(name for name, _ in mesh))

    def mesh_of(self, shape: tuple[int, ...]) -> DeviceMesh:
        """A mesh of all ranks in `shape`, its dims named dim0, dim1...; the run's own where that has
        the shape. Made once; the first call is a collective of all ranks."""
        if shape not in self._meshes:
            self._make(shape, tuple(f"dim{i}" for i in range(len(shape))))
        return self._meshes[shape]

    def _make(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        self._meshes[shape] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._meshes[shape]


def select_device(device_type: str, local_rank: int) -> torch.device:
    """This rank's device, made the current one."""
    import torch

    if device_type == "cpu":
        return torch.device("cpu")
    # A launcher may show each rank only its own GPU, which is then number 0.
    return gpus().select(local_rank % gpus().count())


def choose_backend(device_type: str, chosen: str = "auto") -> str:
    """The process group's transport for tensors on the device. chosen: "gloo" where ranks share a GPU, which NCCL
    refuses; it sends through the host's memory."""
    return "gloo" if chosen == "gloo" or device_type == "cpu" else "nccl"


@contextlib.contextmanager
def simulated_world(device: torch.device) -> Iterator[LiveWorld]:
    """Rank 0 of 8 ranks that do not exist: torch's fake process group, whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=SIMULATED_RANKS, store=FakeStore())
    try:
        yield LiveWorld(0, SIMULATED_RANKS, device, (("ranks", SIMULATED_RANKS),))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def world_of_one(device: torch.device) -> Iterator[tuple[LiveWorld, Callable[[], None]]]:
    """This process as the one rank of a group, and its barrier."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group(choose_backend(device.type), store=HashStore(), rank=0, world_size=1)
    try:
        yield LiveWorld(0, 1, device, default_mesh(1)), lambda: None
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def real_world(
    place: RankEnv, store: Store, device: torch.device, mesh: Mesh, timeout_s: float, backend: str
) -> Iterator[LiveWorld]:
    """The world of all ranks. backend: see `choose_backend`."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if backend == "gloo" and place.local_world_size == place.world_size:
        _bind_gloo_to_loopback_if_needed()
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s + GROUP_GRACE_S),
        device_id=device if backend == "nccl" else None,
    )
    try:
        yield LiveWorld(place.rank, place.world_size, device, mesh)
    finally:
        dist.destroy_process_group()


def make_barrier(device: torch.device) -> Callable[[], None]:
    """A barrier of all ranks that also waits for the work on the device."""
    import torch.distributed as dist

    if device.type == "cpu":
        return lambda: dist.barrier()

    def barrier() -> None:
        dist.barrier(device_ids=[device.index] if "nccl" in dist.get_backend() else None)
        gpus().synchronize()

    return barrier


def _bind_gloo_to_loopback_if_needed() -> None:
    """gloo listens on the address of the host's name. Where that is none of ours (a laptop between
    networks, a container without an entry for itself) and all ranks are here, loopback serves."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        names = [name for _, name in socket.if_nameindex()]
        os.environ["GLOO_SOCKET_IFNAME"] = next((n for n in names if n.startswith("lo")), "lo")
