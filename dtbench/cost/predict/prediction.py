"""Shardings of a transformer beside each other: collectives, times, intervals, and what was assumed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtbench.cost.predict.models import Model
from dtbench.cost.predict.prices import estimate
from dtbench.cost.predict.shardings import (
    DDP,
    FSDP,
    HSDP,
    SEQUENCE,
    TENSOR,
    ZERO2,
    Call,
    Training,
    data_calls,
    tensor_calls,
)
from dtbench.cost.price import Price
from dtbench.errors import UsageError
from dtbench.mesh import format_mesh
from dtbench.units import format_bandwidth, format_seconds
from dtbench_core.cost.ring import busbw_factor

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
ROLES = ("tp", "dp", "replicate")


@dataclass(frozen=True)
class Setup:
    """What is asked for. mesh: (dim, ranks), outermost first; measured_as: dim -> dim of the topology, where the
    names differ; roles: role of ROLES -> dim."""

    model: Model
    mesh: Sequence[tuple[str, int]]
    tokens: int
    dtype: str
    reduce_dtype: str
    measured_as: Mapping[str, str]
    roles: Mapping[str, str]


@dataclass(frozen=True)
class Priced:
    """A kind of collective and what one of it takes."""

    call: Call
    ranks: int
    one: Price


@dataclass(frozen=True)
class Total:
    """Microseconds of all collectives of a kind, one after the other. low and high add up the single ones:
    what is wrong with one is likely wrong with all of them, as they share curves."""

    time_us: float
    low_us: float
    high_us: float

    @classmethod
    def of(cls, priced: Iterable[tuple[int, Price]]) -> Total:
        terms = [[count * us for us in (one.time_us, one.low_us, one.high_us)] for count, one in priced]
        return cls(*map(sum, zip(*terms, strict=True)))


@dataclass(frozen=True)
class Variant:
    """A sharding. sent_bytes: what one rank sends in a step where every collective is a ring."""

    schemes: tuple[str, ...]
    layer: Total
    step: Total
    sent_bytes: float


@dataclass(frozen=True)
class Prediction:
    setup: Setup
    training: Training
    collectives: tuple[Priced, ...]
    variants: tuple[Variant, ...]  # in the order of ROLES and schemes, not of time
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def predict(topology: Mapping[str, Any], setup: Setup) -> Prediction:
    """Prices all shardings that the mesh allows. The work does not grow with ranks, layers or tokens.

    Raises:
        UsageError: a mesh dim that the topology does not hold or that has no role, or a model that the
            tensor-parallel ranks cannot share.
    """
    ranks = dict(setup.mesh)
    dims = {name: _measured(topology, setup, name) for name, size in setup.mesh if size > 1}
    roles = _roles(setup)
    training = Training(
        setup.model,
        setup.tokens,
        ITEMSIZE[setup.dtype],
        ITEMSIZE[setup.reduce_dtype],
        tp=ranks.get(roles.get("tp", ""), 1),
        dp=ranks.get(roles.get("dp", ""), 1),
    )
    _check_model(setup.model, training.tp)
    by_scheme = dict(_schemes(training, roles))
    priced = {
        scheme: [
            Priced(call, n, estimate(dims[call.mesh_dim], call.collective, n, call.size_bytes))
            for call in calls
            for n in (ranks[call.mesh_dim],)
        ]
        for scheme, calls in by_scheme.items()
    }
    return Prediction(
        setup,
        training,
        tuple(itertools.chain.from_iterable(priced.values())),
        tuple(
            _variant(setup.model, schemes, [p for scheme in schemes for p in priced[scheme]])
            for schemes in _combinations(by_scheme)
        ),
        tuple(_assumptions(setup, training, by_scheme, dims.values())),
        tuple(_warnings(topology, setup, dims, itertools.chain.from_iterable(priced.values()))),
    )


# -------------------------------------------------------------------------------------- mesh dims


def _measured(topology: Mapping[str, Any], setup: Setup, name: str) -> Mapping[str, Any]:
    """The topology's dim that stands for a dim of the mesh."""
    held: dict[str, Mapping[str, Any]] = {dim["name"]: dim for dim in topology["dims"]}
    wanted = setup.measured_as.get(name, name)
    if wanted not in held:
        listed = ", ".join(f"{dim['name']}={dim['ranks']}" for dim in topology["dims"]) or "none"
        raise UsageError(
            f"the mesh dim {name} is to be priced as {wanted}, the topology holds {listed}: "
            f"give --map {name}=NAME with one of these"
        )
    return held[wanted]


def _roles(setup: Setup) -> dict[str, str]:
    """Role -> dim of more than one rank. Every such dim must have one."""
    ranks = dict(setup.mesh)
    for name in (*setup.roles.values(), *setup.measured_as):
        if name not in ranks:
            raise UsageError(
                f"{name} is no dim of --mesh {format_mesh(setup.mesh)}: give one of {', '.join(ranks)}"
            )
    roles = {**{role: role for role in ROLES if role in ranks}, **setup.roles}
    if len(set(roles.values())) < len(roles):
        raise UsageError(
            f"one mesh dim has two parts ({', '.join(f'{r}={d}' for r, d in roles.items())}): "
            "give each of --tp, --dp and --replicate a dim of its own"
        )
    for name, size in setup.mesh:
        if size > 1 and name not in roles.values():
            raise UsageError(
                f"the mesh dim {name}={size} has no part in the training: say which with --tp, --dp or "
                f"--replicate {name}; pipeline, context and expert parallelism are not predicted"
            )
    found = {role: dim for role, dim in roles.items() if ranks[dim] > 1}
    if not found:
        raise UsageError(
            f"--mesh {format_mesh(setup.mesh)} has no dim of more than one rank: nothing is communicated"
        )
    if "replicate" in found and "dp" not in found:
        raise UsageError(
            "--replicate is for HSDP, which also shards over dp: give a mesh with both, such as "
            "--mesh replicate=4,dp=32,tp=8, or use the dim as --dp"
        )
    return found


def _check_model(model: Model, tp: int) -> None:
    for what, count in (("heads", model.heads), ("ffn", model.ffn)):
        if count % tp:
            raise UsageError(
                f"{tp} tensor-parallel ranks cannot share {count} {what} of {model.name}: "
                "give tp a number of ranks that divides it"
            )
    if max(tp, model.kv_heads) % min(tp, model.kv_heads):
        raise UsageError(
            f"{tp} tensor-parallel ranks cannot share {model.kv_heads} kv_heads of {model.name}: "
            "give tp a divisor or a multiple of it"
        )


# --------------------------------------------------------------------------------------- variants


def _schemes(training: Training, roles: Mapping[str, str]) -> Iterator[tuple[str, list[Call]]]:
    if "tp" in roles:
        for scheme in (TENSOR, SEQUENCE):
            yield scheme, list(tensor_calls(scheme, training, roles["tp"]))
    if "dp" in roles:
        for scheme in (HSDP,) if "replicate" in roles else (DDP, ZERO2, FSDP):
            yield scheme, list(data_calls(scheme, training, roles["dp"], roles.get("replicate")))


def _combinations(schemes: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """One tensor-parallel scheme with one data-parallel one, where the mesh has dims for both."""
    tensor = [scheme for scheme in schemes if scheme in (TENSOR, SEQUENCE)]
    data = [scheme for scheme in schemes if scheme not in (TENSOR, SEQUENCE)]
    yield from itertools.product(*(part for part in (tensor, data) if part))


def _variant(model: Model, schemes: tuple[str, ...], priced: Sequence[Priced]) -> Variant:
    per_step = [(p.call.count * (model.layers if p.call.where == "layer" else 1), p) for p in priced]
    return Variant(
        schemes,
        Total.of((p.call.count, p.one) for p in priced if p.call.where == "layer"),
        Total.of((count, p.one) for count, p in per_step),
        sum(count * p.call.size_bytes * busbw_factor(p.call.collective, p.ranks) for count, p in per_step),
    )


# ------------------------------------------------------------------------------ what is assumed


def _assumptions(
    setup: Setup, training: Training, schemes: Iterable[str], dims: Iterable[Mapping[str, Any]]
) -> Iterator[str]:
    model = setup.model
    yield (
        "nothing overlaps: the times are sums, as if each collective waited for the one before and nothing were "
        "computed meanwhile; training hides part of them"
    )
    yield f"one micro batch of {setup.tokens} tokens per data-parallel rank and step; no gradient accumulation"
    yield (
        f"activations and weights are {setup.dtype}, reduced gradients {setup.reduce_dtype}; no recomputation, "
        "no pipeline, context or expert parallelism; norm clipping, optimizer and checkpoints are left out"
    )
    yield f"{model.name}: {model.elements():,} parameters ({model.source or 'from a file'}), biases not counted"
    together = [dim["name"] for dim in dims if dim["groups_sharing"] != "alone"]
    if together:
        named = " and ".join(together)
        yield f"all groups of a mesh dim work at once and share links as they did when {named} was measured"
    if SEQUENCE in schemes:
        yield "gathered activations are kept for the backward pass (DTensor; Megatron gathers them again)"
    if TENSOR in schemes:
        yield "the query, key and value projections share one gather or reduction, and so do the MLP's inputs"
    if model.experts > 1 and training.tp > 1:
        yield "experts are cut over tp as a dense MLP is, so no tokens are exchanged"
    if training.tp > model.kv_heads:
        yield f"{training.tp // model.kv_heads} ranks of tp hold the same key and value head"
    if training.dp > 1:
        yield "one collective per layer over dp, and one for embedding, head and last norm"
    yield (
        "an interval is 90 % of new launches where size and ranks were measured; beyond, it widens with every doubling "
        "of either; those of sums add up"
    )


def _warnings(
    topology: Mapping[str, Any], setup: Setup, dims: Mapping[str, Mapping[str, Any]], priced: Iterable[Priced]
) -> Iterator[str]:
    ranks = dict(setup.mesh)
    for name, dim in dims.items():
        per_host = dim["layout"]["ranks_per_host"]
        if ranks[name] != dim["ranks"]:
            yield (
                f"{name}={ranks[name]} was measured as {dim['name']}={dim['ranks']}: scaled by the ring formula's "
                f"ratio with {format_bandwidth(dim['bandwidth_GiBps'] * 2**30)} and "
                f"{format_seconds(dim['latency_us_per_hop'] * 1e-6)} per hop"
            )
        if dim["layout"]["kind"] == "intra-host" and per_host and ranks[name] > per_host[1]:
            yield (
                f"{name}={ranks[name]} is priced by a dim inside one host of {per_host[1]} ranks: right only where "
                "as many are joined by the same links; else --map it to a dim between hosts"
            )
        if dim["groups_sharing"] == "alone":
            yield f"{dim['name']} was measured, and is priced, with one group at work: all at once may be slower"
    listed = list(priced)
    for formula in sorted({(p.call.collective, p.call.mesh_dim) for p in listed if p.one.by_formula}):
        yield f"{formula[0]} was not measured on {formula[1]}: torch's ring formula with the dim's constants"
    factor = max((p.one.size_factor for p in listed), default=1.0)
    if factor > 1:
        beyond = sum(p.one.size_factor > 1 for p in listed)
        yield f"{beyond} of {len(listed)} sizes lie outside the measured ones, by up to {math.ceil(factor)} times"
    yield from (f"calibration: {warning}" for warning in topology.get("warnings", []))
    yield from (
        f"calibration of {dim['name']}: {warning}"
        for dim in dims.values()
        for warning in dim.get("warnings", [])
    )
