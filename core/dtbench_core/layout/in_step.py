"""That ranks which are to draw the same values draw them from one state of their default generators.

Nothing is sent while no rank's generator moved by itself: see Note [Who moved]. A rank whose generator did tells it
at the store of the world, and waits for the others to do so too (`torch.manual_seed` on every rank). When all have,
they compare, and take over the first's state where states differ. A rank that moved alone would wait for ever, as the
others have no reason to come: it takes back the state that they hold.

Note [Who moved]: an `Agreement` says along which mesh dims the ranks of a mesh hold one state, and which. All ranks of
the mesh know the same of it, as it is changed only by what all of them do: a draw on the mesh, or on one that has all
its ranks. A rank that holds another state than it says has moved by itself. Between draws on two such meshes the state
is one object, a `Lineage`, which a draw on the larger moves for both; a draw on the smaller parts them.
A state that was agreed on long ago proves nothing: a rank may have gone back to it alone. So what a checkpoint
computes again is compared.
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
Dims = frozenset[int]  # of a mesh

# How long a rank that moved waits for the others. Ranks that draw together come within milliseconds, those that
# compile, load data or write a checkpoint between draws seconds apart; one that comes later loses the seed it set.
PATIENCE_S = 10.0
# Of a rank that was alone the last time and has not seeded since: a program in which rank 0 draws at every step.
LONE_PATIENCE_S = 0.2
# Decisions that are left at the store, for ranks that come late. One that finds none decides the same after waiting.
KEPT_DECISIONS = 16
POLL_S = 1e-4, 1e-2  # the first pause between two looks at the store, and the longest
DIFFERS = 1 << 32  # above any number of ranks, in a count that says of each whether its state differs


@dataclass(eq=False)
class Lineage:
    """The state after the last draw on meshes of which the largest has `ranks`."""

    ranks: frozenset[int]
    state: bytes = b""


class Agreement:
    """What the ranks of a mesh know of each other's generators.

    equal_dims: the mesh dims along which ranks hold the lineage's state; of more than one rank, as `every`, which are
    all such dims. watched: whether replicas were drawn; before, what is drawn for shards is not looked at.
    draws: so far. reports_moves: whether a rank can tell that it moved; where not, as where ranks are threads, every
    draw compares.
    """

    def __init__(self, mesh: MeshInfo) -> None:
        ordered = tuple(ranks_of_mesh(mesh.mesh))
        nth = _meshes_of.get()[mesh.sizes, ordered] = _meshes_of.get()[mesh.sizes, ordered] + 1
        digest = hashlib.blake2b(repr((mesh.sizes, ordered, nth)).encode(), digest_size=16).hexdigest()
        self.name, self.ranks = f"dtbench_core/in_step/{digest}", frozenset(ordered)
        self.device_type = mesh.device_type
        self.every: Dims = frozenset(d for d, group in enumerate(mesh.groups) if group.size() > 1)
        self.equal_dims: Dims = frozenset()
        self.lineage = Lineage(self.ranks)
        self.watched = self.warned = False
        self.no_peers = (
            bool(mesh.groups) and dist.get_backend(comm.process_group_of(mesh.groups[0])) == "fake"
        )
        self.reports_moves = self.no_peers or world_store() is not None
        self.draws = 0
        self.alone_with: int | None = None  # the seed with which this rank was alone


_agreements: PerRank[weakref.WeakKeyDictionary[MeshInfo, Agreement]] = PerRank(
    "layout.agreements", weakref.WeakKeyDictionary
)
# How many meshes had these sizes and ranks: their names at the store differ.
_meshes_of: PerRank[Counter[tuple[Any, ...]]] = PerRank("layout.meshes_of", Counter)
_decided: PerRank[deque[list[str]]] = PerRank("layout.decided", deque)  # keys at the store


def drawn(mesh: MeshInfo, dims: Dims | None, make: Callable[[], T]) -> T:
    """What `make` draws on every rank of the mesh; the same along `dims` of more than one rank, or all."""
    if not mesh.groups or simulation.active or (dispatch_modes_active() and is_traced()):
        return make()
    agreement = _agreement(mesh)
    agreement.draws += 1
    dims = agreement.every if dims is None else dims
    if not dims and not (agreement.watched and agreement.equal_dims):
        agreement.equal_dims = dims
        return make()
    agreement.watched = True
    if mesh.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        _forget(agreement)  # a captured graph reads the generator's state when it is replayed
        return make()
    state = _state(mesh)
    if state != agreement.lineage.state or not dims <= agreement.equal_dims:
        _meet(mesh, agreement, dims, state)
    result = make()
    state = _state(mesh)
    if len(agreement.lineage.ranks) == len(agreement.ranks):
        agreement.lineage.state = state
    else:
        agreement.lineage = Lineage(agreement.ranks, state)
    return result


def agreed(mesh: MeshInfo) -> None:
    """Every rank of the mesh has just brought its generator into one state."""
    if mesh.groups and not simulation.active and (agreement := _agreement(mesh)).reports_moves:
        lineage = Lineage(agreement.ranks, _state(mesh))
        for other in _within(agreement):
            other.lineage, other.equal_dims = lineage, other.every


def generators(mesh: MeshInfo) -> Any:
    """The module that holds the default generator of the mesh's devices."""
    return torch if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type)


def _agreement(mesh: MeshInfo) -> Agreement:
    agreements = _agreements.get()
    agreement = agreements.get(mesh)
    if agreement is None:
        agreement = agreements[mesh] = Agreement(mesh)
    return agreement


def _within(agreement: Agreement) -> list[Agreement]:
    """Those of the meshes of these devices whose ranks are all of this mesh: its own too."""
    devices, ranks = agreement.device_type, agreement.ranks
    return [a for a in _agreements.get().values() if a.device_type == devices and a.ranks <= ranks]


def _forget(agreement: Agreement) -> None:
    for other in _within(agreement):
        other.equal_dims = frozenset()


def _state(mesh: MeshInfo) -> bytes:
    if mesh.device_type == "cuda":  # the bytes of its state, without the tensors that `get_rng_state` makes
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        return b"".join(n.to_bytes(8, "little") for n in (generator.initial_seed(), generator.get_offset()))
    # At every draw: without torch's function around it, and without a view as numpy's, it costs a third less.
    cpu = mesh.device_type == "cpu"
    state = torch.default_generator.get_state() if cpu else generators(mesh).get_rng_state()
    return string_at(state.data_ptr(), state.nbytes)


# ---- ranks that are to compare ----


def _meet(mesh: MeshInfo, agreement: Agreement, dims: Dims, state: bytes) -> None:
    """Brings the states of ranks along `dims` together. This rank moved, or no rank knows the others' states."""
    level = agreement.equal_dims if dims <= agreement.equal_dims else agreement.every
    # Where fewer than all ranks share a lineage, the others do not see its states parted.
    shared = dims if level == agreement.every else level
    answer = _answer_of_lineage(mesh, agreement, state) if dims <= agreement.equal_dims else "compare"
    if answer == "alone":
        state = agreement.lineage.state
        generators(mesh).set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return
    same = answer == "same" or _compared(mesh, level, state)
    if not same:
        _take_over(mesh, shared, state)
    if level == agreement.every and not (same or shared == level):
        _forget(agreement)
        agreement.equal_dims = shared if agreement.reports_moves else frozenset()
        agreement.lineage = Lineage(agreement.ranks)
    elif level == agreement.every:
        agreed(mesh)


def _compared(mesh: MeshInfo, dims: Dims, state: bytes) -> bool:
    """Whether the ranks along `dims` hold one state."""
    digest = int(_digest(state)[:14], 16)
    extremes = torch.tensor([digest, -digest], device=mesh.device_type)
    for dim in sorted(dims):
        comm.all_reduce(extremes, mesh.groups[dim], "max")
    most, least = extremes.tolist()
    return bool(most == -least)


def _take_over(mesh: MeshInfo, dims: Dims, state: bytes) -> None:
    """Takes the state of the first rank along `dims`."""
    taken = torch.frombuffer(bytearray(state), dtype=torch.uint8).to(mesh.device_type)
    for dim in sorted(dims):
        comm.broadcast(taken, mesh.groups[dim])
    generators(mesh).set_rng_state(taken.cpu())


def _digest(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=16).hexdigest()


# ---- at the store of the world ----


class Keys(NamedTuple):
    """came: how many ranks. first: the digest of the first's state. decision: same, compare or alone."""

    came: str
    first: str
    decision: str


def _answer_of_lineage(mesh: MeshInfo, agreement: Agreement, state: bytes) -> str:
    """What the ranks of this lineage do about a move of this one: "same" and "compare" if all came, else "alone"."""
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
        patience = LONE_PATIENCE_S if agreement.alone_with == seed else PATIENCE_S
        until, pause = time.monotonic() + patience, POLL_S[0]
        while not (decided := store.check([keys.decision])) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, POLL_S[1])
        answer = store.get(keys.decision).decode() if decided else _decide(store, keys, "alone")
    agreement.alone_with = None
    if answer == "alone":
        agreement.alone_with = generators(mesh).initial_seed()
        if not agreement.warned:
            warnings.warn(
                f"rank {dist.get_rank()} drew or seeded random numbers without all ranks of the {mesh} that draw with "
                "it: it takes back the state of their generators; do it on every rank, or with a torch.Generator of "
                "its own",
                stacklevel=2,
            )
        agreement.warned = True
    return answer


def _decide(store: Any, keys: Keys, answer: str) -> str:
    """The decision: this one, if none was before."""
    decision: str = store.compare_set(keys.decision, "", answer).decode()
    decided = _decided.get()
    decided.append(list(keys))
    if len(decided) > KEPT_DECISIONS:
        for key in decided.popleft():
            store.delete_key(key)
    return decision
