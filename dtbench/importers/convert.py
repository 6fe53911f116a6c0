"""Converts the tables of logs to a run: its header and its results.

The suite `collectives`, which `calibrate` fits, contains the collectives that DTensor uses: sums, with all_reduce and
broadcast in place, and the others out of place. Other reductions, roots and buffer placements become the suite
`collectives_other`.
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from dtbench._version import __version__
from dtbench.errors import UsageError
from dtbench.grouping import group_by
from dtbench.importers.model import IN_PLACE, Log, LogMeasurement, LogRow, LogTable
from dtbench.records.result import SCHEMA, Gpu, Header, ImportedLog, Machine, MeshShape, RankFacts, Result
from dtbench.stats import summarize
from dtbench.suite import Param
from dtbench.suite.mesh import Mesh, format_mesh, ranks_of
from dtbench.text.masking import mask_arguments
from dtbench.text.units import plural
from dtbench_core.cost.ring import busbw_factor

SUITE, OTHER = "collectives", "collectives_other"
WORLD = "world"  # mesh dim of all ranks, used without --mesh

HostOrder = tuple[int, ...]  # number of each rank's host; hosts are numbered by first appearance


def to_run(
    logs: Sequence[Log], argv: Sequence[str], mesh: Mesh | None = None, dim: str | None = None
) -> tuple[Header, list[Result]]:
    """Returns the header and the results of a run with the logs' measurements.

    Args:
        mesh: device mesh of the job. Each table belongs to the dim that has its number of ranks. Without a mesh, all
            tables must have the same number of ranks.
        dim: the mesh dim of all tables, if the number of ranks is ambiguous.

    Raises:
        UsageError: no measurement can be used, tables come from different machines, or a table fits no dim.
    """
    usable = [
        (log, table)
        for log in logs
        for table in log.tables
        if not table.refusal and any(row.size_bytes for row in table.rows)
    ]
    if not usable:
        raise UsageError(_reasons(logs))
    _refuse_different_machines(usable, mesh is not None)
    _choose_dims(usable, mesh, dim)
    shape = mesh or ((WORLD, usable[0][1].ranks or 1),)
    launches: dict[object, Iterator[int]] = defaultdict(itertools.count)
    # A further measurement of the same case, with any tool, is a further launch.
    results = [
        msgspec.structs.replace(result, launch=next(launches[*result.case_key[:2], *result.case_key[3:]]))
        for _, table in usable
        for result in _results(table, table.ranks == ranks_of(shape))
    ]
    ranks = _mesh_layout(usable, shape) if len(shape) > 1 else _listed_ranks(usable)
    results.sort(key=lambda result: result.suite != SUITE)  # the main suite comes first
    return _header(logs, usable, argv, shape, results, ranks), results


def _reasons(logs: Sequence[Log]) -> str:
    reasons = []
    for log in logs:
        reasons += [f"{log.name}: the benchmark failed, {failure}" for failure in log.failures[:1]]
        reasons += [
            f"{log.name} line {table.line}: {table.refusal or 'no rows with data'} "
            f"({plural(len(table.rows), 'row')})"
            for table in log.tables
        ]
        reasons += [f"{log.name} {problem}" for problem in ([] if log.rows else log.problems)]
        if not log.tables and not log.failures:
            reasons.append(f"{log.name}: the beginning of a {log.format} output without any row")
    omitted = f", and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return f"nothing can be imported ({'; '.join(reasons[:3])}{omitted})"


def _refuse_different_machines(usable: Sequence[tuple[Log, LogTable]], one_mesh: bool) -> None:
    """Raises UsageError if the tables come from different machines.

    Unless they measured dims of one mesh, they must also have the same ranks and hosts.
    """
    facts: dict[str, Callable[[LogTable], Hashable]] = {
        "device names": lambda table: ", ".join(sorted({rank.name for rank in table.devices if rank.name})),
        "backends": _backend,
        "device types": lambda table: table.device_type,
    }
    if not one_mesh:
        facts["ranks"] = lambda table: table.ranks
        facts["hosts"] = _hosts
    for label, fact_of in facts.items():
        log_of_fact: dict[Hashable, str] = {}
        for log, table in usable:
            if fact := fact_of(table):
                log_of_fact.setdefault(fact, log.name)
        if len(log_of_fact) > 1:
            (fact, first), (other_fact, second), *_ = log_of_fact.items()
            raise UsageError(
                f"{first} and {second} have different {label} ({fact} and {other_fact}): import them into separate "
                "files"
                + ("" if one_mesh else ", or give --mesh NAME=RANKS,... if each measured a dim of one mesh")
            )


def _backend(table: LogTable) -> str:
    return "mpi" if table.tool == "osu" else "nccl"  # torch calls RCCL "nccl", too


def _hosts(table: LogTable) -> str | None:
    layout = _layout(table)
    return f"{max(layout) + 1} host(s), in the order {', '.join(map(str, layout[:16]))}" if layout else None


def _choose_dims(usable: Sequence[tuple[Log, LogTable]], mesh: Mesh | None, dim: str | None) -> None:
    """Sets the mesh dim of each table."""
    if mesh is None and dim is not None:
        raise UsageError(f"--dim {dim} requires a mesh: give --mesh NAME=RANKS,...")
    if mesh is not None and dim is not None and dim not in dict(mesh):
        raise UsageError(f"--dim {dim} is not a dim of --mesh {format_mesh(mesh)}")
    for log, table in usable:
        if mesh is None:
            table.dim = WORLD
            continue
        fitting = [name for name, size in mesh if size == table.ranks and dim in (None, name)]
        if len(fitting) != 1:
            conflict = f"do not match {f'--dim {dim}' if dim else f'--mesh {format_mesh(mesh)}'}"
            if fitting:
                conflict = f"match {' and '.join(fitting)}: choose one with --dim"
            raise UsageError(f"{log.name} line {table.line}: its {table.ranks} ranks {conflict}")
        table.dim = fitting[0]


def _layout(table: LogTable) -> HostOrder | None:
    """Returns the number of each rank's host; None if the log does not list all of them."""
    devices = sorted(table.devices, key=lambda device: device.rank)
    if len(devices) != table.ranks or not all(device.host for device in devices):
        return None
    order: dict[str, int] = {}
    return tuple(order.setdefault(device.host, len(order)) for device in devices)


def _mesh_layout(usable: Sequence[tuple[Log, LogTable]], mesh: Mesh) -> dict[int, RankFacts]:
    """Returns the host of each rank of the mesh.

    The logs of each dim must show that its ranks are all on one host, or all on different hosts; otherwise {}.
    """
    spans: dict[str, set[int]] = {}
    for _, table in usable:
        if (layout := _layout(table)) is not None:
            spans.setdefault(table.dim, set()).add(max(layout) + 1)
    spans_hosts = []
    for name, size in mesh:
        if size > 1 and spans.get(name) not in ({1}, {size}):
            return {}
        spans_hosts.append(size > 1 and spans[name] == {size})
    order: dict[tuple[int, ...], int] = {}
    ranks = {}
    for rank, coordinates in enumerate(itertools.product(*(range(size) for _, size in mesh))):
        host = tuple(
            coord for coord, is_spanning in zip(coordinates, spans_hosts, strict=True) if is_spanning
        )
        ranks[rank] = RankFacts(rank=rank, host=f"host{order.setdefault(host, len(order))}")
    return ranks


def _listed_ranks(usable: Sequence[tuple[Log, LogTable]]) -> dict[int, RankFacts]:
    """Returns the facts about each rank from the table with the longest list of ranks."""
    table = max((table for _, table in usable), key=lambda table: len(table.devices))
    return {
        device.rank: RankFacts(
            rank=device.rank,
            host=device.host or None,
            local_rank=device.index,
            device=f"{table.device_type}:{device.index}",
        )
        for device in table.devices
    }


def _results(table: LogTable, is_whole_mesh: bool) -> Iterator[Result]:
    preferred = table.collective in IN_PLACE
    usable = [
        measurement.in_place
        for _, measurement in table.measurements
        if measurement.time and not measurement.fault
    ]
    placements = usable or [measurement.in_place for _, measurement in table.measurements]
    main = preferred if preferred in placements else not preferred
    # Rows of the same size, type, reduction and root are the cycles of one measurement (an option of rccl-tests).
    cycles = group_by(
        (row for row in table.rows if row.size_bytes),
        lambda row: (
            *(row.size_bytes, row.dtype, row.redop, row.root),
            tuple(measurement.in_place for measurement in row.measurements),
        ),
    )
    for rows in cycles.values():
        for measurements in zip(*(row.measurements for row in rows), strict=True):
            yield _result(table, rows[0], measurements, is_whole_mesh, measurements[0].in_place == main)


def _result(
    table: LogTable, row: LogRow, measurements: Sequence[LogMeasurement], is_whole_mesh: bool, is_main: bool
) -> Result:
    assert table.collective is not None and table.ranks is not None
    params: dict[str, Param] = {
        "mode": table.mode,
        "dtype": row.dtype,
        "size": row.size_bytes,
        "in_place": measurements[0].in_place,
        "ranks": table.ranks,
    }
    if row.redop not in ("", "none", "sum"):
        params["redop"] = row.redop
    if row.root is not None and row.root > 0:
        params["root"] = row.root
    suite = SUITE if is_main and not {"redop", "root"} & params.keys() else OTHER
    params |= {"mesh_dim": table.dim, "groups": "together" if is_whole_mesh else "alone"}
    blank = Result(suite, table.collective, table.tool, params, "failed", "", size_bytes=row.size_bytes)
    usable = [
        measurement for measurement in measurements if not measurement.fault and measurement.time is not None
    ]
    faulty = next((measurement for measurement in measurements if measurement.fault), None)
    if faulty is not None or not usable:
        return msgspec.structs.replace(
            blank,
            status="wrong" if faulty and faulty.fault_is_wrong_data else "failed",
            reason=f"line {row.line}: {faulty.fault if faulty else 'it has no time'}",
        )
    samples = [
        time
        for measurement in usable
        for time in (measurement.samples_s or (measurement.time.value if measurement.time else 0.0,))
    ]
    timing = summarize(samples)
    algbw = row.size_bytes / timing.p25  # the estimator of device times; see `estimator_of`
    derived = max(
        (
            measurement.time.coarseness
            for measurement in usable
            if measurement.time and measurement.time_is_derived
        ),
        default=None,
    )
    return msgspec.structs.replace(
        blank,
        status="ok",
        reason="" if derived is None else f"time derived as size over bandwidth, accurate to {derived:.1%}",
        time_s=timing,
        samples_s=tuple(samples),
        algbw_Bps=algbw,
        busbw_Bps=algbw * busbw_factor(table.collective, table.ranks),
    )


def _header(
    logs: Sequence[Log],
    usable: Sequence[tuple[Log, LogTable]],
    argv: Sequence[str],
    mesh: Mesh,
    results: Sequence[Result],
    ranks: Mapping[int, RankFacts],
) -> Header:
    first = usable[0][1]
    listed = max((table.devices for _, table in usable), key=len)
    versions: dict[str, set[str]] = {}
    for name, version in (item for _, table in usable for item in table.versions.items()):
        versions.setdefault(name, set()).add(version)
    return Header(
        schema=SCHEMA,
        # The same logs get the same id, so that calibrate does not count them as two launches.
        run_id=hashlib.sha256("".join(sorted(log.sha256 for log in logs)).encode()).hexdigest()[:32],
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=tuple(mask_arguments(argv)),
        versions={"dtbench": __version__, "torch": None, "python": None, "backend": _backend(first)}
        | {name: ", ".join(sorted(values)) for name, values in versions.items()},
        machine=Machine(
            gpus=tuple(Gpu(name=rank.name) for rank in listed if rank.name and rank.host == listed[0].host)
        ),
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        mesh=MeshShape(dim_names=tuple(name for name, _ in mesh), shape=tuple(size for _, size in mesh)),
        options={
            "mesh": [list(entry) for entry in mesh],
            "device_type": first.device_type,
            "dtypes": sorted({str(result.params["dtype"]) for result in results}),
        },
        suites=tuple(sorted({result.suite for result in results})),
        launches=max(result.launch for result in results) + 1,
        imported=tuple(
            ImportedLog(
                file=log.name,
                sha256=log.sha256,
                format=log.format,
                tables=len(log.tables),
                rows=log.rows,
                started=next((table.started for table in log.tables if table.started), None),
                unused_columns={
                    name: (*values,)[:9]
                    for table in log.tables
                    for name, values in table.unused_columns.items()
                },
            )
            for log in logs
        ),
    )
