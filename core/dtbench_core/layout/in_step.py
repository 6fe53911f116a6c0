"""Keeps the default generators in the same state on all ranks that must draw the same values.

Nothing is sent unless a rank's generator changed outside a draw that all ranks of the mesh made (Note [Recorded
states]). Such a rank reports the change in the default store and waits until the other ranks report one, too. For
example, all ranks report after `torch.manual_seed` on every rank. Ranks then compare their states and take the first
rank's state if these differ. If only one rank changed its generator, the others never report. After a timeout, that
rank restores the state of the others.

Note [Recorded states]: an `Agreement` records along which mesh dims the ranks of a mesh have equal states, and that
state. It changes only in operations that all ranks of the mesh run: a draw on the mesh, or on a mesh that contains it.
So it is the same on all of them. If a rank's state differs from the recorded one, its generator changed outside such
operations.

Meshes that made their last draw together share a `Lineage`, so that a draw on the larger mesh updates both. A draw on
the smaller mesh gives that mesh its own `Lineage`.

A state from before the last draw may differ between ranks, since one rank alone may have restored it. So when
activation checkpointing restores states to repeat draws, the ranks compare them.
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

# Seconds for which a rank that reported a change waits for the others. Ranks that draw together report within
# milliseconds, or within seconds if they compile, load data or write a checkpoint in between. If a rank reports later,
# the seed that it set is lost.
PATIENCE_S = 10.0
# A shorter wait if this rank's generator also changed alone the last time, and its seed is unchanged. For example,
# rank 0 draws at every step.
LONE_PATIENCE_S = 0.2
# Number of decisions kept in the store for ranks that report late. A rank that finds none waits, then decides the same.
MAX_KEPT_DECISIONS = 16
POLL_S = 1e-4, 1e-2  # first and longest interval between two reads of the store
# Added to the number of reports for each state that differs. It is larger than any number of ranks.
DIFFERS = 1 << 32


@dataclass(eq=False)
class Lineage:
    """The generator state after the last draw that several meshes made together.

    Attributes:
        ranks: ranks of the largest of these meshes.
        state: the state; empty until it is recorded.
    """

    ranks: frozenset[int]
    state: bytes = b""


class Agreement:
    """The recorded state of the generators of a mesh's ranks.

    Attributes:
        name: prefix of the mesh's keys in the store.
        shared_dims: the mesh dims of more than one rank.
        equal_dims: the mesh dims along which the ranks have the lineage's state.
        drew_replicas: whether any draw had replicas. Until then, ranks do not compare their states.
        reports_changes: whether a rank can report that its generator changed. Otherwise ranks compare their states at
            every draw, for example if the ranks are threads.
        draws: number of draws so far.
        lone_seed: this rank's seed when its generator last changed alone; None after a change on all ranks.
    """

    def __init__(self, mesh: MeshInfo) -> None:
        ordered = tuple(ranks_of_mesh(mesh.mesh))
        instance = _mesh_counts.get()[mesh.sizes, ordered] = _mesh_counts.get()[mesh.sizes, ordered] + 1
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
        self.reports_changes = self.no_peers or world_store() is not None
        self.draws = 0
        self.lone_seed: int | None = None


_agreements: PerRank[weakref.WeakKeyDictionary[MeshInfo, Agreement]] = PerRank(
    "layout.agreements", weakref.WeakKeyDictionary
)
# Number of meshes with these sizes and ranks so far. It makes their keys in the store unique.
_mesh_counts: PerRank[Counter[tuple[Any, ...]]] = PerRank("layout.mesh_counts", Counter)
_decided: PerRank[deque[list[str]]] = PerRank("layout.decided", deque)  # keys of decisions in the store


def draw_in_step(mesh: MeshInfo, dims: Dims | None, make: Callable[[], T]) -> T:
    """Returns the result of `make`, which draws on every rank of the mesh.

    Before the draw, gives the ranks along `dims` the same generator state.

    Args:
        dims: mesh dims of more than one rank along which all ranks must draw the same values; None for all.
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
    if mesh.groups and not simulation.active and (agreement := _agreement(mesh)).reports_changes:
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
    state = (
        torch.default_generator.get_state() if mesh.device_type == "cpu" else generators(mesh).get_rng_state()
    )
    return string_at(state.data_ptr(), state.nbytes)


# ---- comparing states ----


def _synchronize(mesh: MeshInfo, agreement: Agreement, dims: Dims, state: bytes) -> None:
    """Gives the ranks along `dims` one state, if this rank's changed or their states are not recorded as equal."""
    level = agreement.equal_dims if dims <= agreement.equal_dims else agreement.shared_dims
    # If only `equal_dims` have equal states, ranks at other coordinates of the remaining dims take no part, so their
    # record of `equal_dims` stays. To keep it true, all ranks along `equal_dims` get one state, not only those along
    # `dims`.
    shared = dims if level == agreement.shared_dims else level
    answer = _report_change(mesh, agreement, state) if dims <= agreement.equal_dims else "compare"
    if answer == "alone":
        state = agreement.lineage.state
        generators(mesh).set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return
    states_equal = answer == "same" or _states_are_equal(mesh, level, state)
    if not states_equal:
        _broadcast_state(mesh, shared, state)
    if level == agreement.shared_dims and not (states_equal or shared == level):
        _forget(agreement)
        agreement.equal_dims = shared if agreement.reports_changes else frozenset()
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


# ---- reports and decisions in the default store ----


class Keys(NamedTuple):
    """Keys of one decision in the store, with the values stored there.

    Attributes:
        reports: number of ranks that have reported, plus DIFFERS for each whose state differs from the first report's.
        first: digest of the state that was reported first.
        decision: "same", "compare" or "alone".
    """

    reports: str
    first: str
    decision: str


def _report_change(mesh: MeshInfo, agreement: Agreement, state: bytes) -> str:
    """Reports that this rank's generator changed, and returns the decision on it.

    "alone": some rank along `equal_dims` did not report a change in time.
    "same": all did, and their states are equal.
    "compare": all did, and their states differ; or the ranks cannot report.
    """
    store = world_store()
    if store is None or agreement.no_peers:
        return "compare"
    place = tuple(c for d, c in enumerate(mesh.my_coordinate()) if d not in agreement.equal_dims)
    keys = Keys(*(f"{agreement.name}/{agreement.draws}/{place}/{field}" for field in Keys._fields))
    mine = _digest(state)
    differs = store.compare_set(keys.first, "", mine).decode() != mine
    reports = store.add(keys.reports, 1 + DIFFERS * differs)
    if reports % DIFFERS == prod(mesh.sizes[d] for d in agreement.equal_dims):
        answer = _decide(store, keys, "compare" if reports >= DIFFERS else "same")
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
                f"rank {dist.get_rank()} seeded or drew from its default generator, but other ranks of the {mesh} did "
                "not: its generator was reset to their state; seed and draw on every rank, or use a separate "
                "torch.Generator",
                stacklevel=2,
            )
        agreement.warned = True
    return answer


def _decide(store: Any, keys: Keys, answer: str) -> str:
    """Stores `answer` as the decision unless there is one already, and returns the stored decision."""
    decision: str = store.compare_set(keys.decision, "", answer).decode()
    decided = _decided.get()
    decided.append(list(keys))
    if len(decided) > MAX_KEPT_DECISIONS:
        for key in decided.popleft():
            store.delete_key(key)
    return decision
