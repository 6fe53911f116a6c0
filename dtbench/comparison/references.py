"""Measured figures of public systems, and a run beside those of its kind.

The table is results/reference/systems.json: per system and collective the times that a source has
printed. It says what others got, which is no verdict: their software, network and day were theirs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from msgspec import Struct

from dtbench.records.read import BadFieldError, into, read_json
from dtbench.suite import Result, Run
from dtbench.suite.errors import EXIT_NOTHING, EXIT_OK, UnreadableRunError, UsageError
from dtbench.suite.fields import Positive, Whole
from dtbench.suite.grouping import group_by
from dtbench.text.units import format_bandwidth, format_ratio, format_size
from dtbench_core.cost.ring import busbw_factor

MAX_BYTES = 16 * 2**20
TABLE = Path(__file__).with_name("reference_systems.json")  # a link, which a wheel holds as a file
# Between two published sizes the time is read off a line through them, if they are no further apart.
_MAX_GAP = 4.0


class PublishedCollective(Struct, frozen=True):
    """points: (bytes, microseconds)."""

    points: tuple[tuple[Whole, Positive], ...]
    source: str


class System(Struct, frozen=True, kw_only=True):
    """One public system."""

    name: str
    gpu: str
    ranks: Whole
    hosts: Whole
    link: str
    note: str = ""
    collectives: dict[str, PublishedCollective]

    def busbw(self, collective: str, size_bytes: int) -> float | None:
        """Bus bandwidth at a size, bytes per second; None outside what was published."""
        curve = self.collectives.get(collective)
        points = sorted(dict(curve.points).items()) if curve else []
        for (small, fast), (large, slow) in itertools.pairwise(points):
            if small <= size_bytes <= large and (large <= small * _MAX_GAP or size_bytes in (small, large)):
                share = math.log(size_bytes / small) / math.log(large / small)
                us: float = fast * (slow / fast) ** share
                return size_bytes / (us * 1e-6) * busbw_factor(collective, self.ranks)
        return None


class _SystemsFile(Struct, frozen=True):
    kind: Literal["reference"]
    schema: Literal[1]
    systems: tuple[System, ...]


def read_systems(path: Path = TABLE) -> tuple[System, ...]:
    """The systems of the table that comes with dtbench, or of another.

    Raises:
        UnreadableRunError: there is none, or it is damaged.
    """
    table = read_json(path, "a reference table of dtbench", MAX_BYTES)
    try:
        return into(table, _SystemsFile).systems
    except BadFieldError as error:
        raise UnreadableRunError(f"the reference table {path} is damaged: {error}") from error


class ReferenceRow(Struct, frozen=True):
    """One collective at one size: the run's bus bandwidth and the reference's, bytes per second, and their ratio."""

    system: str
    mesh_dim: str
    collective: str
    dtype: str
    size_bytes: int
    run_Bps: float  # noqa: N815 - bytes per second
    reference_Bps: float  # noqa: N815
    ratio: float


class ReferenceComparison(Struct, frozen=True, kw_only=True):
    """The rows, the systems they speak of, and what was left out. exit_code: 4 where nothing could be compared."""

    kind: Literal["reference_comparison"] = "reference_comparison"
    exit_code: int
    notes: tuple[str, ...]
    systems: tuple[System, ...]
    rows: tuple[ReferenceRow, ...]


# ----------------------------------------------------------------------------------------- comparing


def compare_with_reference(
    run: Run, systems: Sequence[System], named: str | None = None
) -> ReferenceComparison:
    """The run's collectives beside the public systems of its kind: GPU, ranks, hosts per group.

    named: the system to compare with instead, whatever its kind.

    Raises:
        UsageError: no system of that name.
    """
    groups = list(_groups(run))
    notes: list[str] = []
    if not groups:
        notes.append(f"{run.path.name} has no ok results of the collectives suite")
    rows: list[ReferenceRow] = []
    used: dict[str, System] = {}
    for dim, ranks, hosts in groups:
        chosen = _named(systems, named) if named else _of_kind(systems, run, ranks, hosts)
        if not chosen:
            device = _gpus(run) or run.header.plan.get("device_type") or "an unknown device"
            where = f" on {hosts} host(s)" if hosts else ""
            notes.append(
                f"no public figures of {ranks} ranks{where} of {device} (dim {dim}); "
                "--system NAME compares with another: " + ", ".join(system.name for system in systems)
            )
        for system in chosen:
            if system.ranks != ranks:
                notes.append(f"{system.name} has {system.ranks} ranks, dim {dim} has {ranks}")
            compared = list(_rows(run, dim, system))
            rows += compared
            if compared:
                used[system.name] = system
    return ReferenceComparison(
        exit_code=EXIT_OK if rows else EXIT_NOTHING,
        notes=tuple(dict.fromkeys(notes)),
        systems=tuple(used.values()),
        rows=tuple(rows),
    )


def _named(systems: Sequence[System], named: str) -> list[System]:
    exact = [s for s in systems if s.name.lower() == named.lower()]
    matching = exact or [s for s in systems if named.lower() in s.name.lower()]
    if not matching:
        raise UsageError(
            f"no public system is called {named!r}: expected one of {', '.join(s.name for s in systems)}"
        )
    return matching


def _groups(run: Run) -> Iterator[tuple[str, int, int | None]]:
    """Per mesh dim with results: its name, ranks, and hosts per group where the run says."""
    header = run.header
    names, shape = header.mesh.dim_names, header.mesh.shape
    hosts = {rank.rank: rank.host for rank in header.ranks if rank.host}
    measured = {r.params.get("mesh_dim") for r in run.ok("collectives")}
    for at, (name, size) in enumerate(zip(names, shape, strict=True)):
        if name in measured and size > 1:
            inside = math.prod(shape[at + 1 :])
            group = range(0, size * inside, inside)
            all_known = all(rank in hosts for rank in group)
            yield name, size, len({hosts[rank] for rank in group}) if all_known else None


def _gpus(run: Run) -> str:
    return ", ".join(sorted({str(gpu.name) for gpu in run.header.machine.gpus if gpu.name}))


def _of_kind(systems: Sequence[System], run: Run, ranks: int, hosts: int | None) -> list[System]:
    gpus = _gpus(run)
    if run.header.plan.get("device_type") == "cpu":
        return []
    return [
        system
        for system in systems
        if system.ranks == ranks
        and hosts in (None, system.hosts)
        and (not gpus or re.search(rf"(?<![A-Za-z0-9]){re.escape(system.gpu)}(?![0-9])", gpus, re.IGNORECASE))
    ]


def _rows(run: Run, dim: str, system: System) -> Iterator[ReferenceRow]:
    measured = (r for r in run.ok("collectives") if r.size_bytes and r.busbw_Bps)
    of_dim = (r for r in measured if r.params.get("mesh_dim") == dim)
    cases = group_by(of_dim, lambda r: (r.name, str(r.params.get("dtype")), r.size_bytes or 0))
    for (name, dtype, size), results in sorted(cases.items()):
        reference = system.busbw(name, size)
        mine = [r.busbw_Bps for r in _one_mode(results) if r.busbw_Bps]
        if reference is not None and mine:
            ours = median(mine)
            yield ReferenceRow(system.name, dim, name, dtype, size, ours, reference, ours / reference)


def _one_mode(results: Sequence[Result]) -> list[Result]:
    """The launches measured as the references were: back to back, one group alone, if there are such."""
    kept = list(results)
    for param, wanted in (("mode", "back_to_back"), ("groups", "alone")):
        values = {r.params.get(param) for r in kept}
        taken = wanted if wanted in values else min(values, key=str)
        kept = [r for r in kept if r.params.get(param) == taken]
    return kept


# ------------------------------------------------------------------------------------------ printing


def comparison_lines(comparison: ReferenceComparison) -> Iterator[str]:
    """The comparison for people."""
    for system in comparison.systems:
        mine = [row for row in comparison.rows if row.system == system.name]
        yield f"{system.name} ({system.link})" + (f", {system.note}" if system.note else "")
        for name in dict.fromkeys(row.collective for row in mine):
            yield f"  {name}, from {system.collectives[name].source}"
            for row in (row for row in mine if row.collective == name):
                yield (
                    f"    {row.dtype:>9} {format_size(row.size_bytes):>14}  {format_bandwidth(row.run_Bps):>11}  "
                    f"reference {format_bandwidth(row.reference_Bps):>11}  {format_ratio(row.ratio)}"
                )
    for note in comparison.notes:
        yield f"! {note}"
    if comparison.rows:
        yield "bus bandwidths; the reference's software, network and day were its own"
