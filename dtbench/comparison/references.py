"""Measured figures of public systems, and a run beside those of its kind.

The table is results/reference/systems.json: per system and collective the times that a source has printed.
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

from dtbench.comparison.reference_verdict import (
    EXIT_CODES,
    JUDGED_FROM,
    WORST_FIRST,
    ReferenceRow,
    ReferenceVerdict,
    verdicts_of,
)
from dtbench.records.layout import layout_of
from dtbench.records.read import BadFieldError, into, read_json
from dtbench.suite import Result, Run
from dtbench.suite.errors import EXIT_INCONCLUSIVE, EXIT_NOTHING, UnreadableRunError, UsageError
from dtbench.suite.fields import Positive, Whole
from dtbench.suite.grouping import group_by
from dtbench.text.units import format_bandwidth, format_ratio, format_size, plural
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

    @property
    def kind(self) -> str:
        """The GPU and the scale."""
        return f"{self.ranks}x {self.gpu}" + (f" on {self.hosts} hosts" if self.hosts > 1 else "")

    @property
    def varies(self) -> bool:
        """Whether another of its kind may have another network, or cards another switch or bridge."""
        return "PCIe" in self.link or (self.hosts > 1 and "NVLink across" not in self.link)

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


class ReferenceComparison(Struct, frozen=True, kw_only=True):
    """The verdicts, the worst first, what was not judged, and the rows and systems compared. exit_code: 1 something
    low, 3 it cannot be told, 4 nothing to compare with."""

    kind: Literal["reference_comparison"] = "reference_comparison"
    exit_code: int
    verdicts: tuple[ReferenceVerdict, ...]
    notes: tuple[str, ...]
    systems: tuple[System, ...]
    rows: tuple[ReferenceRow, ...]


def compare_with_reference(
    run: Run, systems: Sequence[System], named: str | None = None
) -> ReferenceComparison:
    """The run's collectives beside the public systems of its kind: GPU, ranks, hosts per group.

    named: the system to compare with instead, whatever its kind.

    Raises:
        UsageError: no system of that name.
    """
    groups = list(_groups(run))
    notes = [] if groups else [f"{run.path.name} has no ok results of the collectives suite"]
    rows: list[ReferenceRow] = []
    verdicts: list[ReferenceVerdict] = []
    for dim, ranks, hosts in groups:
        alike = [s for s in systems if (s.ranks, s.hosts) == (ranks, hosts) and _has_gpus_of(s, run)]
        chosen = _named(systems, named) if named else alike
        of_dim = [(system, row) for system in chosen for row in _rows(run, dim, system)]
        rows += [row for _, row in of_dim]
        judged = [row for system, row in of_dim if system.ranks == ranks and row.size_bytes >= JUDGED_FROM]
        verdicts += verdicts_of(judged, named or chosen[0].kind, named is not None) if judged else ()
        if not chosen:
            notes.append(_why_none(systems, run, dim, ranks, hosts))
        elif not judged:
            of = ", ".join(f"{system.name} with {system.ranks} ranks" for system in chosen)
            notes.append(
                f"dim {dim} is not judged: it has {ranks} ranks and no size from {format_size(JUDGED_FROM)} on that is "
                f"published of as many: {of}"
            )
    used = {row.system for row in rows}
    unjudged = EXIT_INCONCLUSIVE if rows else EXIT_NOTHING
    verdicts.sort(key=lambda verdict: WORST_FIRST.index(verdict.verdict))
    return ReferenceComparison(
        exit_code=EXIT_CODES[verdicts[0].verdict] if verdicts else unjudged,
        verdicts=tuple(verdicts),
        notes=tuple(dict.fromkeys(notes)),
        systems=tuple(system for system in systems if system.name in used),
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
    mesh = run.header.mesh
    hosts = {layout.name: layout.hosts_per_group for layout in layout_of(run.header)}
    measured = {r.params.get("mesh_dim") for r in run.ok("collectives")}
    for name, size in zip(mesh.dim_names, mesh.shape, strict=True):
        if name in measured and size > 1:
            # Of groups that differ the widest, which is the slowest.
            spans = hosts.get(name)
            yield name, size, spans[1] if spans else None


def _has_gpus_of(system: System, run: Run) -> bool:
    """Whether all GPUs of the run are of the system's model and, where their names say it, on cards as these are."""
    model = rf"(?<![A-Za-z0-9]){re.escape(system.gpu)}(?![0-9])"
    other = r"SXM|HBM3" if "PCIe" in system.link else r"PCIe|\bNVL\b"
    names = [gpu.name or "" for gpu in run.header.machine.gpus if run.header.plan.get("device_type") != "cpu"]
    return bool(names) and all(
        re.search(model, name, re.IGNORECASE) and not re.search(other, name, re.IGNORECASE) for name in names
    )


def _why_none(systems: Sequence[System], run: Run, dim: str, ranks: int, hosts: int | None) -> str:
    gpus = ", ".join(sorted({gpu.name for gpu in run.header.machine.gpus if gpu.name}))
    same = [system for system in systems if _has_gpus_of(system, run)]
    same.sort(key=lambda system: (abs(math.log(system.ranks / ranks)), system.hosts != hosts))
    device = run.header.plan.get("device_type")
    others = same or [system for system in systems if system.ranks == ranks] or systems
    return (
        f"not judged: no public figures of {ranks} ranks on {hosts or 'unknown'} host(s) of "
        f"{gpus or ('cpu' if device == 'cpu' else 'a GPU that the run does not name')} (dim {dim}); "
        + (f"nearest is {same[0].name}; " if same else "")
        + f"--system NAME compares with another: {', '.join(system.name for system in others)}"
    )


def _rows(run: Run, dim: str, system: System) -> Iterator[ReferenceRow]:
    mesh = run.header.mesh
    # Of groups that ran at once, and may share links, nothing was published.
    whole = mesh.shape[mesh.dim_names.index(dim)] == math.prod(mesh.shape)
    measured = (r for r in run.ok("collectives") if r.size_bytes and r.busbw_Bps)
    of_dim = (r for r in measured if r.params.get("mesh_dim") == dim)
    cases = group_by(of_dim, lambda r: (r.name, str(r.params.get("dtype")), r.size_bytes or 0))
    for (name, dtype, size), results in sorted(cases.items()):
        reference = system.busbw(name, size)
        mine = [
            r.busbw_Bps
            for r in _one_mode(results)
            if r.busbw_Bps and (whole or r.params.get("groups") != "together")
        ]
        if reference is not None and mine:
            ours = median(mine)
            yield ReferenceRow(
                system.name, dim, name, dtype, size, ours, reference, ours / reference, system.varies
            )


def _one_mode(results: Sequence[Result]) -> list[Result]:
    """The launches measured as the references were: back to back, one group alone, if there are such."""
    kept = list(results)
    for param, wanted in (("mode", "back_to_back"), ("groups", "alone")):
        values = {r.params.get(param) for r in kept}
        taken = wanted if wanted in values else min(values, key=str)
        kept = [r for r in kept if r.params.get(param) == taken]
    return kept


def comparison_lines(comparison: ReferenceComparison, with_all: bool) -> Iterator[str]:
    """The comparison for people: the verdicts, and with_all every ratio."""
    yield from map(str, comparison.verdicts)
    for note in comparison.notes:
        yield f"! {note}"
    if comparison.rows and not with_all:
        yield f"{plural(len(comparison.rows), 'ratio')} by size and source: --all"
        return
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
    if comparison.rows:
        yield "bus bandwidths; the reference's software, network and day were its own"
