"""What the shardings of a transformer spend on communication on a measured topology, at its sizes and ranks or
beyond: collectives, times, intervals, and what was assumed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtbench.cost.plan.models import Model
from dtbench.cost.plan.shardings import (
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
from dtbench.cost.price import estimate
from dtbench.records.plan import CallRow, Communication, ShardingRow, Times
from dtbench.records.topology import CalibratedTopology, Dim
from dtbench.suite.errors import UsageError
from dtbench.suite.mesh import format_mesh
from dtbench.text.units import format_bandwidth, format_seconds
from dtbench_core.cost.ring import busbw_factor

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
ROLES = ("tp", "dp", "replicate")


@dataclass(frozen=True)
class Setup:
    """What is asked for. mesh: (dim, ranks), outermost first, each called as its role of ROLES; measured_as: dim ->
    dim of the topology, where the names differ."""

    model: Model
    mesh: Sequence[tuple[str, int]]
    tokens: int
    dtype: str
    reduce_dtype: str
    measured_as: Mapping[str, str]


def communication(topology: CalibratedTopology, setup: Setup) -> Communication:
    """Prices all shardings that the mesh allows. The work does not grow with ranks, layers or tokens.

    Raises:
        UsageError: a mesh dim that the topology does not hold or that has no role, or a model that the
            tensor-parallel ranks cannot share.
    """
    ranks = _roles(setup)
    dims = {name: _measured(topology, setup, name) for name in ranks}
    training = Training(
        setup.model,
        setup.tokens,
        ITEMSIZE[setup.dtype],
        ITEMSIZE[setup.reduce_dtype],
        tp=ranks.get("tp", 1),
        dp=ranks.get("dp", 1),
    )
    _check_model(setup.model, training.tp)
    by_scheme = dict(_schemes(training, ranks))
    priced = {
        scheme: [_priced(call, dims[call.mesh_dim], ranks[call.mesh_dim]) for call in calls]
        for scheme, calls in by_scheme.items()
    }
    rows = tuple(itertools.chain.from_iterable(priced.values()))
    return Communication(
        model=setup.model.described(),
        mesh=dict(setup.mesh),
        measured_as=dict(setup.measured_as),
        tokens_per_rank=setup.tokens,
        dtype=setup.dtype,
        reduce_dtype=setup.reduce_dtype,
        collectives=rows,
        variants=tuple(
            _sharding(setup.model, schemes, [row for scheme in schemes for row in priced[scheme]])
            for schemes in _combinations(by_scheme)
        ),
        assumptions=tuple(_assumptions(setup, training, by_scheme, dims.values())),
        warnings=tuple(_warnings(topology, ranks, dims, rows)),
    )


# -------------------------------------------------------------------------------------- mesh dims


def _measured(topology: CalibratedTopology, setup: Setup, name: str) -> Dim:
    """The topology's dim that stands for a dim of the mesh."""
    held = {dim.name: dim for dim in topology.dims}
    wanted = setup.measured_as.get(name, name)
    if wanted not in held:
        listed = ", ".join(f"{dim.name}={dim.ranks}" for dim in topology.dims) or "none"
        raise UsageError(
            f"the mesh dim {name} is to be priced as {wanted}, the topology holds {listed}: "
            f"give --map {name}=NAME with one of these"
        )
    return held[wanted]


def _roles(setup: Setup) -> dict[str, int]:
    """The dims of more than one rank, each with a role that its name says."""
    ranks = dict(setup.mesh)
    for name in setup.measured_as:
        if name not in ranks:
            raise UsageError(
                f"{name} is no dim of --mesh {format_mesh(setup.mesh)}: give one of {', '.join(ranks)}"
            )
    found = {name: size for name, size in setup.mesh if size > 1}
    for name, size in found.items():
        if name not in ROLES:
            raise UsageError(
                f"the mesh dim {name}={size} has no part in the training: call it {', '.join(ROLES[:-1])} or "
                f"{ROLES[-1]}, and say with --map ROLE={name} which dim of the topology prices it; pipeline, context "
                "and expert parallelism are not predicted"
            )
    if not found:
        raise UsageError(
            f"--mesh {format_mesh(setup.mesh)} has no dim of more than one rank: nothing is communicated"
        )
    if "replicate" in found and "dp" not in found:
        raise UsageError(
            "replicate is for HSDP, which also shards over dp: give a mesh with both, such as "
            "--mesh replicate=4,dp=32,tp=8, or call the dim dp"
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


# --------------------------------------------------------------------------------------- shardings


def _schemes(training: Training, ranks: Mapping[str, int]) -> Iterator[tuple[str, list[Call]]]:
    if "tp" in ranks:
        for scheme in (TENSOR, SEQUENCE):
            yield scheme, list(tensor_calls(scheme, training, "tp"))
    if "dp" in ranks:
        outer = "replicate" if "replicate" in ranks else None
        for scheme in (HSDP,) if outer else (DDP, ZERO2, FSDP):
            yield scheme, list(data_calls(scheme, training, "dp", outer))


def _combinations(schemes: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """One tensor-parallel scheme with one data-parallel one, where the mesh has dims for both."""
    tensor = [scheme for scheme in schemes if scheme in (TENSOR, SEQUENCE)]
    data = [scheme for scheme in schemes if scheme not in (TENSOR, SEQUENCE)]
    yield from itertools.product(*(part for part in (tensor, data) if part))


def _priced(call: Call, dim: Dim, ranks: int) -> CallRow:
    one = estimate(dim, call.collective, ranks, call.size_bytes)
    return CallRow(
        **vars(call),
        ranks=ranks,
        time_s=one.time_us * 1e-6,
        low_s=one.low_us * 1e-6,
        high_s=one.high_us * 1e-6,
        size_factor=one.size_factor,
        ranks_factor=one.ranks_factor,
        by_formula=one.by_formula,
    )


def _sharding(model: Model, schemes: tuple[str, ...], rows: Sequence[CallRow]) -> ShardingRow:
    per_step = [(row.count * (model.layers if row.where == "layer" else 1), row) for row in rows]
    return ShardingRow(
        schemes=schemes,
        layer=_total((row.count, row) for row in rows if row.where == "layer"),
        step=_total(per_step),
        sent_bytes=sum(n * row.size_bytes * busbw_factor(row.collective, row.ranks) for n, row in per_step),
    )


def _total(counted: Iterable[tuple[int, Times]]) -> Times:
    terms = [[count * s for s in (one.time_s, one.low_s, one.high_s)] for count, one in counted]
    time_s, low_s, high_s = map(sum, zip(*terms, strict=True))
    return Times(time_s=time_s, low_s=low_s, high_s=high_s)


# ------------------------------------------------------------------------------ what is assumed


def _assumptions(
    setup: Setup, training: Training, schemes: Iterable[str], dims: Iterable[Dim]
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
    together = [dim.name for dim in dims if dim.groups_sharing != "alone"]
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
    topology: CalibratedTopology, ranks: Mapping[str, int], dims: Mapping[str, Dim], rows: Sequence[CallRow]
) -> Iterator[str]:
    for name, dim in dims.items():
        per_host = dim.layout.ranks_per_host
        if ranks[name] != dim.ranks:
            yield (
                f"{name}={ranks[name]} was measured as {dim.name}={dim.ranks}: scaled by the ring formula's "
                f"ratio with {format_bandwidth(dim.bandwidth_GiBps * 2**30)} and "
                f"{format_seconds(dim.latency_us_per_hop * 1e-6)} per hop"
            )
        if dim.layout.kind == "intra-host" and per_host and ranks[name] > per_host[1]:
            yield (
                f"{name}={ranks[name]} is priced by a dim inside one host of {per_host[1]} ranks: right only where "
                "as many are joined by the same links; else --map it to a dim between hosts"
            )
        if dim.groups_sharing == "alone":
            yield f"{dim.name} was measured, and is priced, with one group at work: all at once may be slower"
    for collective, mesh_dim in sorted({(row.collective, row.mesh_dim) for row in rows if row.by_formula}):
        yield f"{collective} was not measured on {mesh_dim}: torch's ring formula with the dim's constants"
    factor = max((row.size_factor for row in rows), default=1.0)
    if factor > 1:
        beyond = sum(row.size_factor > 1 for row in rows)
        yield f"{beyond} of {len(rows)} sizes lie outside the measured ones, by up to {math.ceil(factor)} times"
    yield from (f"calibration: {warning}" for warning in topology.warnings)
    yield from (f"calibration of {dim.name}: {warning}" for dim in dims.values() for warning in dim.warnings)
