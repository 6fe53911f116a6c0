"""A run of the tables of logs: its header and its results.

What DTensor's collectives do is the suite `collectives`, which `calibrate` fits: all_reduce and
broadcast in place, the others out of place, sums. All else that usable tables hold (the other
placement, other reductions and roots) is the suite `collectives_other`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from dtbench._version import __version__
from dtbench.errors import UsageError
from dtbench.grouping import group_by
from dtbench.importers.model import IN_PLACE, Log, LogFigure, LogRow, LogTable
from dtbench.records.result import SCHEMA, Gpu, Header, ImportedLog, Machine, MeshShape, RankFacts, Result
from dtbench.stats import summarize
from dtbench.suite import Param
from dtbench.suite.mesh import Mesh, format_mesh, ranks_of
from dtbench.text.masking import mask_arguments
from dtbench.text.units import plural
from dtbench_core.cost.ring import busbw_factor

SUITE, OTHER = "collectives", "collectives_other"
WORLD = "world"  # the mesh dim of a run whose logs name none

HostOrder = tuple[int, ...]  # per rank its host, numbered by first appearance


def to_run(
    logs: Sequence[Log], argv: Sequence[str], mesh: Mesh | None = None, dim: str | None = None
) -> tuple[Header, list[Result]]:
    """The header and results of a run that holds the logs' figures.

    mesh: the device mesh whose dims the tables are of, by their number of ranks. dim: the dim of all
    tables. Without, the ranks of the tables, which must agree, are the mesh.

    Raises:
        UsageError: no figure that can be used; tables of different machines; a table of no dim.
    """
    usable = [
        (log, table)
        for log in logs
        for table in log.tables
        if not table.refusal and any(row.size_bytes for row in table.rows)
    ]
    if not usable:
        raise UsageError(_why_nothing(logs))
    _agree(usable, mesh is not None)
    _choose_dims(usable, mesh, dim)
    shape = mesh or ((WORLD, usable[0][1].ranks or 1),)
    of_tables = (_results(table, table.ranks == ranks_of(shape)) for _, table in usable)
    results = _numbered(itertools.chain.from_iterable(of_tables))
    ranks = _mesh_layout(usable, shape) if len(shape) > 1 else _places(usable)
    results.sort(key=lambda result: result.suite != SUITE)  # what counts comes first
    return _header(logs, usable, argv, shape, results, ranks), results


def _why_nothing(logs: Sequence[Log]) -> str:
    reasons = []
    for log in logs:
        if log.failures:
            reasons.append(f"{log.name}: the benchmark failed, {log.failures[0]}")
        reasons += [
            f"{log.name} line {table.line}: {table.refusal or 'no rows with data'} "
            f"({plural(len(table.rows), 'row')})"
            for table in log.tables
        ]
        if not log.rows:
            reasons += [f"{log.name} {problem}" for problem in log.problems]
        if not log.tables and not log.failures:
            reasons.append(f"{log.name}: the head of a {log.format} output without any row")
    more = f", and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return f"nothing can be imported ({'; '.join(reasons[:3])}{more})"


def _agree(usable: Sequence[tuple[Log, LogTable]], one_mesh: bool) -> None:
    """Raises UsageError where the tables are of different machines or, unless of dims of one mesh, ranks and hosts."""
    facts: dict[str, Callable[[LogTable], Hashable]] = {
        "device names": lambda t: ", ".join(sorted({d.name for d in t.devices if d.name})),
        "backends": _backend,
        "device types": lambda t: t.device_type,
    }
    if not one_mesh:
        facts["ranks"] = lambda t: t.ranks
        facts["hosts"] = _hosts
    for what, fact_of in facts.items():
        seen: dict[Hashable, str] = {}
        for log, table in usable:
            if fact := fact_of(table):
                seen.setdefault(fact, log.name)
        if len(seen) > 1:
            (a, first), (b, second), *_ = seen.items()
            raise UsageError(
                f"{first} and {second} have different {what} ({a} and {b}): import them into a file each"
                + ("" if one_mesh else ", or give --mesh NAME=RANKS,... where each is a dim of one mesh")
            )


def _backend(table: LogTable) -> str:
    return "mpi" if table.tool == "osu" else "nccl"  # which torch calls RCCL too


def _hosts(table: LogTable) -> str | None:
    layout = _layout(table)
    return f"{max(layout) + 1} host(s), in the order {', '.join(map(str, layout[:16]))}" if layout else None


def _choose_dims(usable: Sequence[tuple[Log, LogTable]], mesh: Mesh | None, dim: str | None) -> None:
    """Says of each table which mesh dim it is of."""
    if mesh is None and dim is not None:
        raise UsageError(f"--dim {dim} needs the mesh that it is a dim of: give --mesh NAME=RANKS,...")
    if mesh is not None and dim is not None and dim not in dict(mesh):
        raise UsageError(f"--dim {dim} is no dim of --mesh {format_mesh(mesh)}")
    for log, table in usable:
        if mesh is None:
            table.dim = WORLD
            continue
        fitting = [name for name, size in mesh if size == table.ranks and dim in (None, name)]
        if len(fitting) != 1:
            why = f"no dim of {f'--dim {dim}' if dim else f'--mesh {format_mesh(mesh)}'}"
            if fitting:
                why = f"those of {' and of '.join(fitting)}: say which with --dim"
            raise UsageError(f"{log.name} line {table.line}: its {table.ranks} ranks are {why}")
        table.dim = fitting[0]


def _layout(table: LogTable) -> HostOrder | None:
    """Per rank its host, numbered by first appearance; None where some are not listed."""
    devices = sorted(table.devices, key=lambda d: d.rank)
    if len(devices) != table.ranks or not all(d.host for d in devices):
        return None
    order: dict[str, int] = {}
    return tuple(order.setdefault(device.host, len(order)) for device in devices)


def _mesh_layout(usable: Sequence[tuple[Log, LogTable]], mesh: Mesh) -> dict[int, RankFacts]:
    """Per rank of the mesh its host, if each dim's logs show it within a host or one rank per host; else {}."""
    spans: dict[str, set[int]] = {}
    for _, table in usable:
        if (layout := _layout(table)) is not None:
            spans.setdefault(table.dim, set()).add(max(layout) + 1)
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


def _places(usable: Sequence[tuple[Log, LogTable]]) -> dict[int, RankFacts]:
    """Per rank what the most telling table lists of it."""
    table = max((table for _, table in usable), key=lambda t: len(t.devices))
    kind = table.device_type
    return {
        d.rank: RankFacts(rank=d.rank, host=d.host or None, local_rank=d.index, device=f"{kind}:{d.index}")
        for d in table.devices
    }


def _results(table: LogTable, together: bool) -> Iterator[Result]:
    first = table.collective in IN_PLACE
    good = [f.in_place for _, f in table.figures if f.time and not f.fault]
    placements = good or [f.in_place for _, f in table.figures]
    main = first if first in placements else not first
    # Rows of one size, type, reduction and root together: cycles that rccl-tests was told to repeat.
    repeated = group_by(
        (row for row in table.rows if row.size_bytes),
        lambda row: (row.size_bytes, row.dtype, row.redop, row.root, tuple(f.in_place for f in row.figures)),
    )
    for rows in repeated.values():
        for figures in zip(*(row.figures for row in rows), strict=True):
            yield _result(table, rows[0], figures, together, figures[0].in_place == main)


def _result(table: LogTable, row: LogRow, figures: Sequence[LogFigure], together: bool, main: bool) -> Result:
    assert table.collective is not None and table.ranks is not None
    params: dict[str, Param] = {"mode": table.mode, "dtype": row.dtype, "size": row.size_bytes}
    params |= {"in_place": figures[0].in_place, "ranks": table.ranks}
    if row.redop not in ("", "none", "sum"):
        params["redop"] = row.redop
    if row.root is not None and row.root > 0:
        params["root"] = row.root
    suite = SUITE if main and not {"redop", "root"} & params.keys() else OTHER
    params |= {"mesh_dim": table.dim, "groups": "together" if together else "alone"}
    blank = Result(suite, table.collective, table.tool, params, "failed", "", size_bytes=row.size_bytes)
    good = [f for f in figures if not f.fault and f.time is not None]
    bad = next((f for f in figures if f.fault), None)
    if bad is not None or not good:
        wrong = bad is not None and bad.fault_is_wrong_data
        return msgspec.structs.replace(
            blank,
            status="wrong" if wrong else "failed",
            reason=f"line {row.line}: {bad.fault if bad else 'it has no time'}",
        )
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
        algbw_Bps=algbw,
        busbw_Bps=algbw * busbw_factor(table.collective, table.ranks),
    )


def _numbered(results: Iterator[Result]) -> list[Result]:
    """Each with its launch: the tables in which the same was measured, whatever tool it was, count up."""
    launches: dict[object, Iterator[int]] = defaultdict(itertools.count)
    keys = ((result, (*result.case_key[:2], *result.case_key[3:])) for result in results)
    return [msgspec.structs.replace(result, launch=next(launches[key])) for result, key in keys]


def _header(
    logs: Sequence[Log],
    usable: Sequence[tuple[Log, LogTable]],
    argv: Sequence[str],
    mesh: Mesh,
    results: Sequence[Result],
    places: Mapping[int, RankFacts],
) -> Header:
    first = usable[0][1]
    listed = max((table.devices for _, table in usable), key=len)
    versions: dict[str, set[str]] = {}
    for name, version in (item for _, table in usable for item in table.versions.items()):
        versions.setdefault(name, set()).add(version)
    return Header(
        schema=SCHEMA,
        # The same logs make the same run, so that calibrate does not take them for two launches.
        run_id=hashlib.sha256("".join(sorted(log.sha256 for log in logs)).encode()).hexdigest()[:32],
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=tuple(mask_arguments(argv)),
        versions={"dtbench": __version__, "torch": None, "python": None, "backend": _backend(first)}
        | {name: ", ".join(sorted(of)) for name, of in versions.items()},
        machine=Machine(gpus=tuple(Gpu(name=d.name) for d in listed if d.name and d.host == listed[0].host)),
        ranks=tuple(places[rank] for rank in sorted(places)),
        mesh=MeshShape(dim_names=tuple(name for name, _ in mesh), shape=tuple(size for _, size in mesh)),
        options={
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
                aside={name: (*held,)[:9] for table in log.tables for name, held in table.aside.items()},
            )
            for log in logs
        ),
    )
