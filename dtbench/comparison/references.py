"""Measured figures of public systems, and whether a run's bandwidths at large sizes are those of its kind.

The table is results/reference/systems.json: per system and collective the times that a source has printed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from dtbench.errors import (
    EXIT_INCONCLUSIVE,
    EXIT_NOTHING,
    EXIT_OK,
    EXIT_REGRESSION,
    UnreadableRunError,
    UsageError,
)
from dtbench.fields import Positive, Whole
from dtbench.grouping import group_by
from dtbench.records.read import BadFieldError, into, read_json
from dtbench.records.result import Result, Run
from dtbench.stats.layout import layout_of
from dtbench.text.names import name_words, nearest
from dtbench.text.units import format_bandwidth, format_ratio, format_size, plural
from dtbench_core.cost.ring import busbw_factor

MAX_BYTES = 16 * 2**20
TABLE = Path(__file__).with_name("reference_systems.json")  # a link, which a wheel holds as a file
# Between two published sizes the time is read off a line through them, if they are no further apart.
_MAX_GAP = 4.0

# On one host, sources of one GPU differ by 12 % at most from 64 MiB on (all_to_all of 8 A100 there), at 1 MiB by 70 %;
# on two hosts, whose networks differ, by a factor of 4 (A100) and 2 (H100): results/reference/README.md. A run is low
# below this share of the slowest source; where that is below it of the fastest, what lies between is not judged.
LOW = 0.85
JUDGED_FROM = 64 * 2**20

# A run is the log that a system was published from if all its ratios, at so many sizes at least, are 1 to rounding:
# two logs of one machine differ by more at some size.
SAME_FIGURES, MIN_SAME_FIGURES = 1e-3, 3

Verdict = Literal["low", "cannot tell", "as public measurements", "above public measurements"]
WORST_FIRST: tuple[Verdict, ...] = get_args(Verdict)
EXIT_CODES = dict(zip(WORST_FIRST, (EXIT_REGRESSION, EXIT_INCONCLUSIVE, EXIT_OK, EXIT_OK), strict=True))
_COUNTS = ("no source", "one source", "two sources", "three sources", "four sources")


class PublishedCollective(Struct, frozen=True):
    """points: (bytes, microseconds)."""

    points: tuple[tuple[Whole, Positive], ...]
    source: str


class System(Struct, frozen=True, kw_only=True):
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
                us = fast * (slow / fast) ** share
                return float(size_bytes / (us * 1e-6) * busbw_factor(collective, self.ranks))
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
    try:
        return into(read_json(path, "a reference table of dtbench", MAX_BYTES), _SystemsFile).systems
    except BadFieldError as error:
        raise UnreadableRunError(f"the reference table {path} is damaged: {error}") from error


class ReferenceRow(Struct, frozen=True):
    """One collective at one size: the run's bus bandwidth and the reference's, bytes per second, and their ratio.

    varies: whether systems of this kind may differ, by their network or PCIe, so that one of them says little.
    """

    system: str
    mesh_dim: str
    collective: str
    dtype: str
    size_bytes: int
    run_Bps: float  # noqa: N815 - bytes per second
    reference_Bps: float  # noqa: N815
    ratio: float
    varies: bool = False


class ReferenceVerdict(Struct, frozen=True, kw_only=True):
    """Collectives of one mesh dim that fared alike. ratios: least and most of the run's bandwidth over the median of
    the sources, at `sizes`. beside: the GPU and the scale, or the system that was named."""

    verdict: Verdict
    mesh_dim: str
    collectives: tuple[str, ...]
    ratios: tuple[float, float]
    beside: str
    sizes: str
    sources: int

    def __str__(self) -> str:
        least, most = (f"{ratio:.2f}" for ratio in self.ratios)
        ratios = least if least == most else f"{least} to {most}"
        sources = f"{self.sources} sources" if self.sources >= len(_COUNTS) else _COUNTS[self.sources]
        unsure = ": their network or PCIe may be another" if self.sources == 1 else ", which disagree"
        why = unsure if self.verdict == "cannot tell" else ""
        return (
            f"{self.verdict}: {ratios} of {self.beside} at {self.sizes}, {sources}{why} "
            f"({', '.join(self.collectives)} of dim {self.mesh_dim})"
        )


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
        chosen = systems_called(systems, named) if named else alike
        of_dim = [(system, row) for system in chosen for row in _rows(run, dim, system)]
        rows += [row for _, row in of_dim]
        judged = [row for system, row in of_dim if system.ranks == ranks and row.size_bytes >= JUDGED_FROM]
        verdicts += verdicts_of(judged, named or chosen[0].kind, named is not None) if judged else ()
        if not chosen:
            notes.append(_why_none(systems, run, dim, ranks, hosts))
        elif not judged:
            notes.append(
                f"dim {dim} is not judged: it has {ranks} ranks and no size from {format_size(JUDGED_FROM)} on that is "
                f"published of as many: {', '.join(f'{system.name} with {system.ranks} ranks' for system in chosen)}"
            )
    notes += [
        f"the run has the figures that were published as {name}: 1.00 of it at every size; where several sources are "
        "of one kind, a ratio above is to their median"
        for name, of_system in group_by(rows, lambda row: row.system).items()
        if len(of_system) >= MIN_SAME_FIGURES and all(abs(row.ratio - 1) < SAME_FIGURES for row in of_system)
    ]
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


def systems_called(systems: Sequence[System], named: str) -> list[System]:
    """The system of this name; else those that have all its words, as 8xH100 or h100-8x, or its letters.

    Raises:
        UsageError: no system of that name.
    """
    exact = [s for s in systems if s.name.lower() == named.lower()]
    with_words = [s for s in systems if name_words(named) <= name_words(s.name)]
    matching = exact or with_words or [s for s in systems if named.lower() in s.name.lower()]
    if not matching:
        names = [system.name for system in systems]
        raise UsageError(
            f"no public system is called {named!r}: nearest are {nearest(named, names)}; expected one of "
            f"{', '.join(names)}"
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
    names = [
        gpu.name or "" for gpu in run.header.machine.gpus if run.header.options.get("device_type") != "cpu"
    ]
    return bool(names) and all(
        re.search(model, name, re.IGNORECASE) and not re.search(other, name, re.IGNORECASE) for name in names
    )


def _why_none(systems: Sequence[System], run: Run, dim: str, ranks: int, hosts: int | None) -> str:
    gpus = ", ".join(sorted({gpu.name for gpu in run.header.machine.gpus if gpu.name}))
    same = [system for system in systems if _has_gpus_of(system, run)]
    same.sort(key=lambda system: (abs(math.log(system.ranks / ranks)), system.hosts != hosts))
    device = run.header.options.get("device_type")
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
    of_dim = (
        r for r in run.ok("collectives") if r.size_bytes and r.busbw_Bps and r.params.get("mesh_dim") == dim
    )
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


def verdicts_of(rows: Sequence[ReferenceRow], beside: str, one_is_enough: bool) -> Iterator[ReferenceVerdict]:
    """Per collective what its rows of one mesh dim, from `JUDGED_FROM` on, say; those that fared alike together.

    one_is_enough: whether a single source is believed where systems of its kind vary.
    """
    by_collective = group_by(rows, lambda row: row.collective).values()
    judged = sorted(
        (_judged(of, beside, one_is_enough) for of in by_collective),
        key=lambda verdict: WORST_FIRST.index(verdict.verdict),
    )
    alike = group_by(judged, lambda v: (v.verdict, v.sizes, v.sources, v.verdict == "low" and v.collectives))
    for several in alike.values():
        ends = [ratio for verdict in several for ratio in verdict.ratios]
        yield replace(
            several[0],
            collectives=tuple(name for verdict in several for name in verdict.collectives),
            ratios=(min(ends), max(ends)),
        )


def _judged(rows: Sequence[ReferenceRow], beside: str, one_is_enough: bool) -> ReferenceVerdict:
    at: dict[int, Verdict] = {}
    ratios: dict[int, float] = {}
    for size, of_size in sorted(group_by(rows, lambda row: row.size_bytes).items()):
        # Of several element types the fastest: some take longer to add.
        ours = max(row.run_Bps for row in of_size)
        sources = {row.system: row.reference_Bps for row in of_size}
        slowest, fastest = min(sources.values()), max(sources.values())
        ratios[size] = ours / median(sources.values())
        if ours < LOW * slowest:
            enough = one_is_enough or len(sources) > 1 or not of_size[0].varies
            at[size] = "low" if enough else "cannot tell"
        elif ours < LOW * fastest and slowest < LOW * fastest:
            at[size] = "cannot tell"
        else:
            at[size] = "above public measurements" if ours * LOW > fastest else "as public measurements"
    verdict = min(at.values(), key=WORST_FIRST.index)
    judged = [size for size in at if at[size] == verdict or verdict not in ("low", "cannot tell")]
    # nccl-tests cuts 64 MiB to whole ranks.
    named = [format_size(round(size / 2**20) * 2**20) for size in judged]
    sizes = ", ".join(named)
    if len(judged) > 1 and judged == [size for size in at if judged[0] <= size <= judged[-1]]:
        sizes = f"{named[0]} and above" if judged[-1] == max(at) else f"{named[0]} to {named[-1]}"
    return ReferenceVerdict(
        verdict=verdict,
        mesh_dim=rows[0].mesh_dim,
        collectives=(rows[0].collective,),
        ratios=(min(ratios[size] for size in judged), max(ratios[size] for size in judged)),
        beside=beside,
        sizes=sizes,
        sources=len({row.system for row in rows if row.size_bytes in judged}),
    )


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
