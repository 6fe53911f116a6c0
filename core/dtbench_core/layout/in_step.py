"""Keeps the default generators of ranks that draw the same values in one state.

Nothing is sent unless a rank's generator moved by itself (Note [Who moved]). Such a rank reports it in the store of the
world and waits for the others to do the same, as after `torch.manual_seed` on every rank. Once all have reported, they
compare their states and take the first rank's if they differ. If only one rank moved, the others never report: after a
timeout it takes back the state that they have.

Note [Who moved]: an `Agreement` records along which mesh dims the ranks of a mesh have one state, and that state. It
only
changes in operations of all ranks of the mesh, so it is the same on all of them: a draw on the mesh, or on a mesh that
contains it. A rank whose state differs from the recorded one has moved by itself. Meshes whose last draw was common
share a `Lineage`, so that a draw on the larger one updates both; a draw on the smaller one gives it a `Lineage` of its
own. A state that was recorded long ago proves nothing, as one rank may have restored it. So draws that a checkpoint
repeats are compared.
"""

from __future__ import annotations

import hashlib
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable
from ctypes import string_at
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dtbench_core import comm
from dtbench_core.layout.mesh import MeshInfo
from dtbench_core.runtime import PerRank, simulation
from dtbench_core.torch_compat import dispatch_modes_active, is_traced, ranks_of_mesh, world_store

T = TypeVar("T")
Dims = frozenset[int]  # indices of mesh dims

# Seconds that a rank that moved waits for the others. Ranks that draw together report within milliseconds, and within
# seconds if they compile, load data or write a checkpoint in between. A rank that reports later loses the seed it set.
PATIENCE_S = 10.0
# The same for a rank that moved alone the last time and was not seeded since, as if rank 0 draws at every step.
LONE_PATIENCE_S = 0.2
# Decisions that stay in the store for late ranks. A rank that finds none reaches the same decision after waiting.
MAX_KEPT_DECISIONS = 16
POLL_S = 1e-4, 1e-2  # first and longest interval between two reads of the store
DIFFERS = 1 << 32  # larger than any number of ranks; added to the count of ranks for each whose state differs


@dataclass(eq=False)
class Lineage:
    """The generator state after the last common draw of some meshes, of which the largest has `ranks`."""

    ranks: frozenset[int]
    state: bytes = b""


class Agreement:
    """The recorded state of the generators of a mesh's ranks.

    Attributes:
        name: prefix of the mesh's keys in the store.
        shared_dims: the mesh dims of more than one rank.
        equal_dims: those along which the ranks have the lineage's state.
        drew_replicas: whether replicas were drawn. Until then, draws of shards are not compared.
        reports_moves: whether a rank can report that it moved. Otherwise every draw is compared, as for threads.
        draws: number of draws so far.
        lone_seed: the seed with which this rank moved alone the last time.
    """

    def __init__(self, mesh: MeshInfo) -> None:
        ordered = tuple(ranks_of_mesh(mesh.mesh))
        instance = _meshes_of.get()[mesh.sizes, ordered] = _meshes_of.get()[mesh.sizes, ordered] + 1
        digest = hashlib.blake2b(repr((mesh.sizes, ordered, instance)).encode(), digest_size=16).hexdigest()
        self.name, self.ranks = f"dtbench_core/in_step/{digest}", frozenset(ordered)
        self.device_type = mesh.device_type
        self.shared_dims: Dims = frozenset(d for d, group in enumerate(mesh.groups) if group.size() > 1)
        self.equal_dims: Dims = frozenset()
        self.lineage = Lineage(self.ranks)
        self.drew_replicas = self.warned = False
        self.no_peers = (
            bool(mesh.groups) and dist.get_backend(comm.process_group_of(mesh.groups[0])) == "fake"
        )
        self.reports_moves = self.no_peers or world_store() is not None
        self.draws = 0
        self.lone_seed: int | None = None


_agreements: PerRank[weakref.WeakKeyDictionary[MeshInfo, Agreement]] = PerRank(
    "layout.agreements", weakref.WeakKeyDictionary
)
# Number of meshes with these sizes and ranks so far. It makes their names in the store differ.
_meshes_of: PerRank[Counter[tuple[Any, ...]]] = PerRank("layout.meshes_of", Counter)
_decided: PerRank[deque[list[str]]] = PerRank("layout.decided", deque)  # keys in the store


def draw_in_step(mesh: MeshInfo, dims: Dims | None, make: Callable[[], T]) -> T:
    """Returns what `make` draws on every rank of the mesh.

    Args:
        dims: mesh dims of more than one rank along which all ranks must draw the same; None for all.
    """
    if not mesh.groups or simulation.active or (dispatch_modes_active() and is_traced()):
        return make()
    agreement = _agreement(mesh)
    agreement.draws += 1
    dims = agreement.shared_dims if dims is None else dims
    if not dims and not (agreement.drew_replicas and agreement.equal_dims):
        agreement.equal_dims = dims
        return make()
    agreement.drew_replicas = True
    if mesh.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        _forget(agreement)  # a captured graph reads the generator's state when it is replayed
        return make()
    state = _state(mesh)
    if state != agreement.lineage.state or not dims <= agreement.equal_dims:
        _synchronize(mesh, agreement, dims, state)
    result = make()
    state = _state(mesh)
    if len(agreement.lineage.ranks) == len(agreement.ranks):
        agreement.lineage.state = state
    else:
        agreement.lineage = Lineage(agreement.ranks, state)
    return result


def note_equal_states(mesh: MeshInfo) -> None:
    """Records that every rank of the mesh has just set its generator to the same state."""
    if mesh.groups and not simulation.active and (agreement := _agreement(mesh)).reports_moves:
        lineage = Lineage(agreement.ranks, _state(mesh))
        for related in _submeshes(agreement):
            related.lineage, related.equal_dims = lineage, related.shared_dims


def generators(mesh: MeshInfo) -> Any:
    """Returns the module with the default generator of the mesh's devices."""
    return torch if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type)


def _agreement(mesh: MeshInfo) -> Agreement:
    agreements = _agreements.get()
    agreement = agreements.get(mesh)
    if agreement is None:
        agreement = agreements[mesh] = Agreement(mesh)
    return agreement


def _submeshes(agreement: Agreement) -> list[Agreement]:
    """Returns the agreements of meshes of these devices that this mesh contains, including its own."""
    devices, ranks = agreement.device_type, agreement.ranks
    return [a for a in _agreements.get().values() if a.device_type == devices and a.ranks <= ranks]


def _forget(agreement: Agreement) -> None:
    for related in _submeshes(agreement):
        related.equal_dims = frozenset()


def _state(mesh: MeshInfo) -> bytes:
    if mesh.device_type == "cuda":  # without the tensors that `get_rng_state` makes
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        return b"".join(n.to_bytes(8, "little") for n in (generator.initial_seed(), generator.get_offset()))
    # Runs at every draw: a third faster than torch's wrapper and a NumPy view.
    cpu = mesh.device_type == "cpu"
    state = torch.default_generator.get_state() if cpu else generators(mesh).get_rng_state()
    return string_at(state.data_ptr(), state.nbytes)


# ---- comparing states ----


def _synchronize(mesh: MeshInfo, agreement: Agreement, dims: Dims, state: bytes) -> None:
    """Gives the ranks along `dims` one state, if this rank moved or the states of the others are not recorded."""
    level = agreement.equal_dims if dims <= agreement.equal_dims else agreement.shared_dims
    # If only some ranks share a lineage, the others do not see that its states differ.
    shared = dims if level == agreement.shared_dims else level
    answer = _answer_of_lineage(mesh, agreement, state) if dims <= agreement.equal_dims else "compare"
    if answer == "alone":
        state = agreement.lineage.state
        generators(mesh).set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return
    states_equal = answer == "same" or _states_are_equal(mesh, level, state)
    if not states_equal:
        _broadcast_state(mesh, shared, state)
    if level == agreement.shared_dims and not (states_equal or shared == level):
        _forget(agreement)
        agreement.equal_dims = shared if agreement.reports_moves else frozenset()
        agreement.lineage = Lineage(agreement.ranks)
    elif level == agreement.shared_dims:
        note_equal_states(mesh)


def _states_are_equal(mesh: MeshInfo, dims: Dims, state: bytes) -> bool:
    """Whether the ranks along `dims` have the same state."""
    digest = int(_digest(state)[:14], 16)
    extremes = torch.tensor([digest, -digest], device=mesh.device_type)
    for dim in sorted(dims):
        comm.all_reduce(extremes, mesh.groups[dim], "max")
    highest, negated_lowest = extremes.tolist()
    return bool(highest == -negated_lowest)


def _broadcast_state(mesh: MeshInfo, dims: Dims, state: bytes) -> None:
    """Sets the generator to the state of the first rank along `dims`."""
    received = torch.frombuffer(bytearray(state), dtype=torch.uint8).to(mesh.device_type)
    for dim in sorted(dims):
        comm.broadcast(received, mesh.groups[dim])
    generators(mesh).set_rng_state(received.cpu())


def _digest(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=16).hexdigest()


# ---- in the store of the world ----


class Keys(NamedTuple):
    """Keys of one decision in the store.

    Attributes:
        came: number of ranks that have reported, plus DIFFERS for each whose state differs from the first.
        first: digest of the state of the first rank that reported.
        decision: "same", "compare" or "alone".
    """

    came: str
    first: str
    decision: str


def _answer_of_lineage(mesh: MeshInfo, agreement: Agreement, state: bytes) -> str:
    """Returns the decision about a move of this rank: "alone" if not all ranks of the lineage reported a move.

    Otherwise "same" or "compare", by whether their states are equal.
    """
    store = world_store()
    if store is None or agreement.no_peers:
        return "compare"
    place = tuple(c for d, c in enumerate(mesh.my_coordinate()) if d not in agreement.equal_dims)
    keys = Keys(*(f"{agreement.name}/{agreement.draws}/{place}/{field}" for field in Keys._fields))
    mine = _digest(state)
    differs = store.compare_set(keys.first, "", mine).decode() != mine
    came = store.add(keys.came, 1 + DIFFERS * differs)
    if came % DIFFERS == prod(mesh.sizes[d] for d in agreement.equal_dims):
        answer = _decide(store, keys, "compare" if came >= DIFFERS else "same")
    else:
        seed = generators(mesh).initial_seed()
        patience = LONE_PATIENCE_S if agreement.lone_seed == seed else PATIENCE_S
        deadline, pause = time.monotonic() + patience, POLL_S[0]
        while not (decided := store.check([keys.decision])) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, POLL_S[1])
        answer = store.get(keys.decision).decode() if decided else _decide(store, keys, "alone")
    agreement.lone_seed = None
    if answer == "alone":
        agreement.lone_seed = generators(mesh).initial_seed()
        if not agreement.warned:
            warnings.warn(
                f"rank {dist.get_rank()} drew or seeded random numbers, but not all ranks of the {mesh} that draw with "
                "it did: its generator is reset to the state of theirs; do it on every rank, or use a separate "
                "torch.Generator",
                stacklevel=2,
            )
        agreement.warned = True
    return answer


def _decide(store: Any, keys: Keys, answer: str) -> str:
    """Returns the decision in the store, which is `answer` if there was none."""
    decision: str = store.compare_set(keys.decision, "", answer).decode()
    decided = _decided.get()
    decided.append(list(keys))
    if len(decided) > MAX_KEPT_DECISIONS:
        for key in decided.popleft():
            store.delete_key(key)
    return decision
