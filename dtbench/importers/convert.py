"""A run of the tables of logs: its header and its results.

What DTensor's collectives do is the suite `collectives`, which `calibrate` fits: all_reduce and
broadcast in place, the others out of place, sums. All else that the tables hold (the other
placement, other reductions and roots, rows without data, tables that cannot be used) is the suite
`collectives_other`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from dtbench._version import __version__
from dtbench.importers.model import IN_PLACE, Figure, Log, Row, Table
from dtbench.stats import summarize
from dtbench.suite import (
    SCHEMA,
    Gpu,
    Header,
    ImportedLog,
    Machine,
    MeshShape,
    Param,
    RankFacts,
    Result,
)
from dtbench.suite.errors import UsageError
from dtbench.suite.grouping import group_by
from dtbench.suite.mesh import Mesh, format_mesh, ranks_of
from dtbench.text.masking import mask_arguments
from dtbench_core.cost.ring import busbw_factor

SUITE, OTHER = "collectives", "collectives_other"
BACKENDS = {"osu": "mpi"}  # of the others it is nccl, which torch calls RCCL too
WORLD, GROUP = "world", "group"  # the mesh dims of a run whose logs name none

_F = TypeVar("_F")
Layout = tuple[int, ...]  # per rank its host, numbered by first appearance


def to_run(
    logs: Sequence[Log], argv: Sequence[str], mesh: Mesh | None = None, dim: str | None = None
) -> tuple[Header, list[Result]]:
    """The header and results of a run that holds the logs' figures.

    mesh: the device mesh whose dims the tables are of, by their number of ranks. dim: the dim of all
    tables. Without, the ranks of the tables, which must agree, are the mesh.

    Raises:
        UsageError: no figure that can be used; tables of different machines; a table of no dim.
    """
    tables = [(log, table) for log in logs for table in log.tables]
    usable = [(log, table) for log, table in tables if not table.refusal and _has_figures(table)]
    if not usable:
        raise UsageError(_why_nothing(logs))
    _same_machine(usable)
    dims = _dims(usable, mesh, dim)
    shape = mesh or _own_mesh(usable[0][1])
    results = _numbered(
        result for log, table in tables for result in _results(log, table, dims.get(id(table)), shape)
    )
    several = mesh is not None and len(mesh) > 1
    ranks = _mesh_layout(usable, dims, shape) if several else {facts.rank: facts for facts in _places(usable)}
    results.sort(key=lambda result: result.suite != SUITE)  # what counts comes first
    return _header(logs, usable, argv, shape, results, ranks), results


def _has_figures(table: Table) -> bool:
    return any(row.size_bytes and f.time and not f.fault for row, f in table.figures)


def _why_nothing(logs: Sequence[Log]) -> str:
    reasons = []
    for log in logs:
        if log.failures:
            reasons.append(f"{log.name}: the benchmark failed, {log.failures[0]}")
        for table in log.tables:
            faults = [f.fault for _, f in table.figures if f.fault]
            why = table.refusal or (faults[0] if faults else "no rows with data")
            reasons.append(f"{log.name} line {table.line}: {why}")
        if not log.tables and not log.failures:
            reasons.append(f"{log.name}: the head of a {log.format} output without any row")
    more = f", and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return f"nothing can be imported ({'; '.join(reasons[:3])}{more})"


# --------------------------------------------------------------------------------- what goes together


def _same_machine(usable: Sequence[tuple[Log, Table]]) -> None:
    """Raises UsageError where the tables say that they are of different machines."""
    facts: dict[str, Callable[[Table], str]] = {
        "device names": lambda t: ", ".join(sorted({d.name for d in t.devices if d.name})),
        "backends": lambda t: BACKENDS.get(t.tool, "nccl"),
        "device types": lambda t: t.device_type,
    }
    for what, fact_of in facts.items():
        seen = _seen(usable, fact_of)
        if len(seen) > 1:
            (a, first), (b, second), *_ = seen.items()
            raise UsageError(
                f"{first} and {second} have different {what} ({a} and {b}): import them into a file each"
            )


def _seen(usable: Sequence[tuple[Log, Table]], fact_of: Callable[[Table], _F | None]) -> dict[_F, str]:
    """What the tables say, where they say something, and the first log that says so."""
    seen: dict[_F, str] = {}
    for log, table in usable:
        if fact := fact_of(table):
            seen.setdefault(fact, log.name)
    return seen


def _dims(usable: Sequence[tuple[Log, Table]], mesh: Mesh | None, dim: str | None) -> dict[int, str]:
    """Per table (by its id) the mesh dim it is of."""
    if mesh is None:
        if dim is not None:
            raise UsageError(f"--dim {dim} needs the mesh that it is a dim of: give --mesh NAME=RANKS,...")
        _agree(usable)
        return {id(table): WORLD for _, table in usable}
    if dim is not None and dim not in dict(mesh):
        raise UsageError(f"--dim {dim} is no dim of --mesh {format_mesh(mesh)}")
    found = {}
    for log, table in usable:
        fitting = [name for name, size in mesh if size == table.ranks and dim in (None, name)]
        if len(fitting) != 1:
            why = f"no dim of {f'--dim {dim}' if dim else f'--mesh {format_mesh(mesh)}'}"
            if fitting:
                why = f"those of {' and of '.join(fitting)}: say which with --dim"
            raise UsageError(f"{log.name} line {table.line}: its {table.ranks} ranks are {why}")
        found[id(table)] = fitting[0]
    return found


def _agree(usable: Sequence[tuple[Log, Table]]) -> None:
    """Raises UsageError unless all tables are of one number of ranks and one layout of hosts."""
    sizes, layouts = _seen(usable, lambda table: (table.ranks, table.groups)), _seen(usable, _layout)
    if len(sizes) > 1:
        each = ", ".join(f"{ranks} in {name}" for (ranks, _), name in sizes.items())
        raise UsageError(
            f"the logs are of groups of different sizes ({each} ranks): import each into a file of its own, "
            "or give --mesh NAME=RANKS,... where each is a dim of one mesh"
        )
    if len(layouts) > 1:
        (a, first), (b, second), *_ = layouts.items()
        raise UsageError(
            f"{first} has {len(a)} ranks on {max(a) + 1} host(s), {second} has them on {max(b) + 1} or in "
            "another order: import them into a file each, or give --mesh NAME=RANKS,... and --dim"
        )


def _layout(table: Table) -> Layout | None:
    """Per rank its host, numbered by first appearance, ranks by group; None where some are not listed."""
    devices = sorted(table.devices, key=lambda d: (d.group, d.rank))
    if len(devices) != (table.ranks or 0) * table.groups or not all(d.host for d in devices):
        return None
    order: dict[str, int] = {}
    return tuple(order.setdefault(device.host, len(order)) for device in devices)


def _own_mesh(table: Table) -> Mesh:
    world = ((WORLD, table.ranks or 1),)
    return ((GROUP, table.groups), *world) if table.groups > 1 else world


def _mesh_layout(
    usable: Sequence[tuple[Log, Table]], dims: Mapping[int, str], mesh: Mesh
) -> dict[int, RankFacts]:
    """Per rank of the mesh its host, if each dim's logs show it within a host or one rank per host; else {}."""
    spans: dict[str, set[int]] = {}
    for _, table in usable:
        if (layout := _layout(table)) is not None:
            spans.setdefault(dims[id(table)], set()).add(max(layout) + 1)
    across = []
    for name, size in mesh:
        if size > 1 and spans.get(name) not in ({1}, {size}):
            return {}
        across.append(size > 1 and spans[name] == {size})
    order: dict[tuple[int, ...], int] = {}
    ranks = {}
    for rank, place in enumerate(itertools.product(*(range(size) for _, size in mesh))):
        host = tuple(x for x, is_across in zip(place, across, strict=True) if is_across)
        ranks[rank] = RankFacts(rank=rank, host=f"host{order.setdefault(host, len(order))}")
    return ranks


def _places(usable: Sequence[tuple[Log, Table]]) -> Iterator[RankFacts]:
    """Per rank what the most telling table lists of it, ranks in the order of the mesh."""
    table = max((table for _, table in usable), key=lambda t: len(t.devices))
    for position, device in enumerate(sorted(table.devices, key=lambda d: (d.group, d.rank))):
        rank = position if table.groups > 1 else device.rank
        yield RankFacts(
            rank=rank,
            host=device.host or None,
            local_rank=device.index,
            device=f"{table.device_type}:{device.index}",
        )


# --------------------------------------------------------------------------------------- the results


def _results(log: Log, table: Table, dim: str | None, mesh: Mesh) -> Iterator[Result]:
    if table.refusal or dim is None:
        for row, figure in table.figures:
            yield _skipped(table, row, figure, table.refusal or figure.fault or "no data")
        return
    first = table.collective in IN_PLACE
    placements = {f.in_place for _, f in table.figures if f.time and not f.fault}
    main = first if first in placements else not first
    together = table.groups > 1 or table.ranks == ranks_of(mesh)
    # Rows of one size, type, reduction and root together: cycles that rccl-tests was told to repeat.
    repeated = group_by(
        table.rows,
        lambda row: (row.size_bytes, row.dtype, row.redop, row.root, tuple(f.in_place for f in row.figures)),
    )
    for rows in repeated.values():
        for figures in zip(*(row.figures for row in rows), strict=True):
            yield _result(table, rows[0], figures, dim, together, figures[0].in_place == main)


def _params(table: Table, row: Row, figure: Figure) -> dict[str, Param]:
    params: dict[str, Param] = {
        "mode": table.mode,
        "dtype": row.dtype,
        "size": row.size_bytes,
        "in_place": figure.in_place,
    }
    if table.ranks is not None:
        params["ranks"] = table.ranks
    if row.redop not in ("", "none", "sum"):
        params["redop"] = row.redop
    if (row.root or 0) > 0 and row.root is not None:
        params["root"] = row.root
    return params


def _skipped(table: Table, row: Row, figure: Figure, reason: str) -> Result:
    params, name = _params(table, row, figure), table.collective or "unknown"
    return Result(OTHER, name, table.tool, params, "skipped", reason, size_bytes=row.size_bytes)


def _result(
    table: Table, row: Row, figures: Sequence[Figure], dim: str, together: bool, main: bool
) -> Result:
    assert table.collective is not None and table.ranks is not None
    if not row.size_bytes:
        return _skipped(table, row, figures[0], "0 bytes: nothing is sent")
    params = _params(table, row, figures[0])
    params |= {"mesh_dim": dim, "groups": "together" if together else "alone"}
    suite = SUITE if main and not {"redop", "root"} & params.keys() else OTHER
    blank = Result(suite, table.collective, table.tool, params, "failed", "", size_bytes=row.size_bytes)
    good = [f for f in figures if not f.fault and f.time is not None]
    bad = next((f for f in figures if f.fault), None)
    if bad is not None or not good:
        reason = f"line {row.line}: {bad.fault}" if bad else f"line {row.line}: it has no time"
        wrong = bad is not None and bad.fault_is_wrong_data
        return msgspec.structs.replace(blank, status="wrong" if wrong else "failed", reason=reason)
    samples = [s for f in good for s in (f.samples_s or (f.time.value if f.time else 0.0,))]
    timing = summarize(samples)
    algbw = row.size_bytes / timing.p25  # as `estimator_of` has it for device times
    derived = max((f.time.coarseness for f in good if f.time and f.time_is_derived), default=None)
    return msgspec.structs.replace(
        blank,
        status="ok",
        reason="" if derived is None else f"the time is the size over the bandwidth, known to {derived:.1%}",
        time_s=timing,
        samples_s=tuple(samples),
        rank_samples_s=_rank_samples(table, good[0]) if len(good) == 1 else {},
        algbw_Bps=algbw,
        busbw_Bps=algbw * busbw_factor(table.collective, table.ranks),
        counters={} if table.iterations is None else {"iterations": table.iterations},
    )


def _rank_samples(table: Table, figure: Figure) -> Mapping[str, tuple[float, ...]]:
    """The ranks' own samples, by their place in the mesh."""
    if table.groups == 1 or not figure.rank_samples_s:
        return figure.rank_samples_s
    order = sorted(table.devices, key=lambda d: (d.group, d.rank))
    places = {str(device.rank): str(position) for position, device in enumerate(order)}
    return {places[rank]: samples for rank, samples in figure.rank_samples_s.items() if rank in places}


def _numbered(results: Iterator[Result]) -> list[Result]:
    """Each with its launch: the tables in which the same was measured, whatever tool it was, count up."""
    seen: dict[object, int] = {}
    numbered = []
    for result in results:
        key = (result.suite, result.name, tuple(sorted(result.params.items())))
        launch = seen.get(key, -1) + 1
        seen[key] = launch
        numbered.append(msgspec.structs.replace(result, launch=launch))
    return numbered


# ---------------------------------------------------------------------------------------- the header


def _header(
    logs: Sequence[Log],
    usable: Sequence[tuple[Log, Table]],
    argv: Sequence[str],
    mesh: Mesh,
    results: Sequence[Result],
    places: Mapping[int, RankFacts],
) -> Header:
    first = usable[0][1]
    listed = max((table.devices for _, table in usable), key=len)
    return Header(
        schema=SCHEMA,
        # The same logs make the same run, so that calibrate does not take them for two launches.
        run_id=hashlib.sha256("".join(sorted(log.sha256 for log in logs)).encode()).hexdigest()[:32],
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=tuple(mask_arguments(argv)),
        versions={
            "dtbench": __version__,
            "torch": None,
            "python": None,
            "backend": BACKENDS.get(first.tool, "nccl"),
            **_versions(usable),
        },
        machine=Machine(gpus=tuple(Gpu(name=d.name) for d in listed if d.name and d.host == listed[0].host)),
        ranks=tuple(places[rank] for rank in sorted(places)),
        mesh=MeshShape(dim_names=tuple(name for name, _ in mesh), shape=tuple(size for _, size in mesh)),
        plan={
            "mesh": [list(entry) for entry in mesh],
            "device_type": first.device_type,
            "dtypes": sorted({str(r.params["dtype"]) for r in results}),
        },
        suites=tuple(sorted({r.suite for r in results})),
        launches=max(r.launch for r in results) + 1,
        imported=tuple(
            ImportedLog(
                file=log.name,
                sha256=log.sha256,
                format=log.format,
                tables=len(log.tables),
                rows=log.rows,
                started=next((table.started for table in log.tables if table.started), None),
            )
            for log in logs
        ),
    )


def _versions(usable: Sequence[tuple[Log, Table]]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for _, table in usable:
        for name, version in table.versions.items():
            found.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(versions)) for name, versions in found.items()}
