"""Compares the bandwidths of a run at large sizes with published measurements of similar systems.

The table results/reference/systems.json has the published times of each public system and collective.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from msgspec import Struct, field
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
from dtbench.records.read import BadFieldError, convert, read_json
from dtbench.records.result import Result, Run
from dtbench.stats.layout import layout_of
from dtbench.text.names import name_words, nearest
from dtbench.text.units import format_bandwidth, format_ratio, format_size, plural
from dtbench_core.cost.ring import busbw_factor

MAX_BYTES = 16 * 2**20
TABLE = Path(__file__).with_name("reference_systems.json")  # a symbolic link; a wheel contains the file
# Largest ratio of two published sizes between which the time is interpolated.
_MAX_GAP = 4.0

# A run is called low if its bandwidth is below this fraction of the slowest published source. If that source is itself
# below this fraction of the fastest, bandwidths between the two get no verdict.
# On one host, sources for one GPU differ by at most 12% from 64 MiB on
# (all_to_all of 8 A100), and by 70% at 1 MiB. On two hosts, whose networks differ, they differ by a factor of 4 (A100)
# and 2 (H100): results/reference/README.md.
LOW = 0.85
# Smallest message size with a verdict, bytes.
MIN_SIZE = 64 * 2**20

# A run is probably the published log itself if its ratios are 1 within this tolerance at this many sizes or more: two
# logs of one machine differ by more at some size.
SAME_FIGURES, MIN_SAME_FIGURES = 1e-3, 3

Verdict = Literal["low", "cannot tell", "as public measurements", "above public measurements"]
WORST_FIRST: tuple[Verdict, ...] = get_args(Verdict)
EXIT_CODES = dict(zip(WORST_FIRST, (EXIT_REGRESSION, EXIT_INCONCLUSIVE, EXIT_OK, EXIT_OK), strict=True))
_COUNTS = ("no source", "one source", "two sources", "three sources", "four sources")


class PublishedCollective(Struct, frozen=True):
    """Published times of one collective.

    Attributes:
        points: (bytes, microseconds) per size.
        source: where the times were published.
    """

    points: tuple[tuple[Whole, Positive], ...]
    source: str


class System(Struct, frozen=True, kw_only=True):
    """A public system with published measurements.

    Attributes:
        name: name of the system.
        gpu: GPU model.
        ranks: number of GPUs that took part.
        hosts: number of hosts.
        link: connection between the GPUs.
        note: remark on the measurements.
        collectives: published times by collective.
    """

    name: str
    gpu: str
    ranks: Whole
    hosts: Whole
    link: str
    note: str = ""
    collectives: dict[str, PublishedCollective]

    @property
    def kind(self) -> str:
        """Number and model of the GPUs, and the number of hosts."""
        return f"{self.ranks}x {self.gpu}" + (f" on {self.hosts} hosts" if self.hosts > 1 else "")

    @property
    def varies(self) -> bool:
        """Whether systems of this kind may have different networks, PCIe switches or bridges."""
        return "PCIe" in self.link or (self.hosts > 1 and "NVLink across" not in self.link)

    def busbw(self, collective: str, size_bytes: int) -> float | None:
        """Returns the bus bandwidth in bytes per second, interpolated; None outside the published sizes."""
        curve = self.collectives.get(collective)
        points = sorted(dict(curve.points).items()) if curve else []
        for (small, small_us), (large, large_us) in itertools.pairwise(points):
            if small <= size_bytes <= large and (large <= small * _MAX_GAP or size_bytes in (small, large)):
                position = math.log(size_bytes / small) / math.log(large / small)
                time_us = small_us * (large_us / small_us) ** position
                return float(size_bytes / (time_us * 1e-6) * busbw_factor(collective, self.ranks))
        return None


class _SystemsFile(Struct, frozen=True):
    kind: Literal["reference"]
    schema: Literal[1]
    systems: tuple[System, ...]


def read_systems(path: Path = TABLE) -> tuple[System, ...]:
    """Reads a table of systems, by default the one that is part of dtbench.

    Raises:
        UnreadableRunError: the file does not exist or is damaged.
    """
    try:
        return convert(read_json(path, "a reference table of dtbench", MAX_BYTES), _SystemsFile).systems
    except BadFieldError as error:
        raise UnreadableRunError(f"the reference table {path} is damaged: {error}") from error


class ReferenceRow(Struct, frozen=True):
    """The run's bandwidth of one collective at one size, compared with one public system.

    Attributes:
        system: name of the public system.
        mesh_dim: mesh dim of the run.
        collective: the collective.
        dtype: dtype of the run.
        size_bytes: message size.
        run_Bps: bus bandwidth of the run, bytes per second.
        reference_Bps: published bus bandwidth, bytes per second.
        ratio: run_Bps / reference_Bps.
        varies: whether systems of this kind may differ in network or PCIe, so that a single one is weak evidence.
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
    """Verdict on collectives of one mesh dim.

    Attributes:
        verdict: the verdict.
        mesh_dim: mesh dim of the run.
        collectives: collectives with this verdict.
        ratios: (lowest, highest) ratio of the run's bandwidth to the median of the sources, at `sizes`.
        compared_with: kind of system, or the named system, that the run is compared with.
        sizes: message sizes to which the verdict applies, as text.
        sources: number of public systems.
    """

    verdict: Verdict
    mesh_dim: str
    collectives: tuple[str, ...]
    ratios: tuple[float, float]
    compared_with: str = field(name="beside")
    sizes: str
    sources: int

    def __str__(self) -> str:
        lowest, highest = (f"{ratio:.2f}" for ratio in self.ratios)
        ratios = lowest if lowest == highest else f"{lowest} to {highest}"
        sources = f"{self.sources} sources" if self.sources >= len(_COUNTS) else _COUNTS[self.sources]
        doubt = ", whose network or PCIe may differ" if self.sources == 1 else ", which disagree"
        return (
            f"{self.verdict}: {ratios} of {self.compared_with} at {self.sizes}, {sources}"
            f"{doubt if self.verdict == 'cannot tell' else ''} "
            f"({', '.join(self.collectives)} of dim {self.mesh_dim})"
        )


class ReferenceComparison(Struct, frozen=True, kw_only=True):
    """A run compared with public systems.

    Attributes:
        kind: identifies the JSON.
        exit_code: 1 if a bandwidth is low, 3 if no verdict is possible, 4 if there is nothing to compare with, else 0.
        verdicts: the verdicts, the worst first.
        notes: reasons why mesh dims have no verdict, and other caveats.
        systems: the public systems in `rows`.
        rows: all comparisons.
    """

    kind: Literal["reference_comparison"] = "reference_comparison"
    exit_code: int
    verdicts: tuple[ReferenceVerdict, ...]
    notes: tuple[str, ...]
    systems: tuple[System, ...]
    rows: tuple[ReferenceRow, ...]


def compare_with_reference(
    run: Run, systems: Sequence[System], named: str | None = None
) -> ReferenceComparison:
    """Compares the run's collectives with the public systems that have the same GPU, ranks and hosts per group.

    Args:
        run: the run.
        systems: the public systems.
        named: name of a system to compare with instead, even if its GPU, ranks or hosts differ.

    Raises:
        UsageError: there is no system of that name.
    """
    groups = list(_groups(run))
    notes = [] if groups else [f"{run.path.name} has no ok results of the collectives suite"]
    rows: list[ReferenceRow] = []
    verdicts: list[ReferenceVerdict] = []
    for dim, ranks, hosts in groups:
        chosen = (
            find_systems(systems, named)
            if named
            else [s for s in systems if (s.ranks, s.hosts) == (ranks, hosts) and _has_gpus_of(s, run)]
        )
        dim_rows = [(system, row) for system in chosen for row in _rows(run, dim, system)]
        rows += [row for _, row in dim_rows]
        decisive = [row for system, row in dim_rows if system.ranks == ranks and row.size_bytes >= MIN_SIZE]
        verdicts += verdicts_of(decisive, named or chosen[0].kind, named is not None) if decisive else ()
        if not chosen:
            notes.append(_no_systems_note(systems, run, dim, ranks, hosts))
        elif not decisive:
            notes.append(
                f"no verdict on dim {dim}, which has {ranks} ranks: no size from {format_size(MIN_SIZE)} on is "
                "published for as many ranks: "
                f"{', '.join(f'{system.name} with {system.ranks} ranks' for system in chosen)}"
            )
    notes += [
        f"the run has the same times as were published for {name} (ratio 1.00 at every size); the ratios above are to "
        "the median of all sources of that kind"
        for name, system_rows in group_by(rows, lambda row: row.system).items()
        if len(system_rows) >= MIN_SAME_FIGURES
        and all(abs(row.ratio - 1) < SAME_FIGURES for row in system_rows)
    ]
    used = {row.system for row in rows}
    verdicts.sort(key=lambda verdict: WORST_FIRST.index(verdict.verdict))
    return ReferenceComparison(
        exit_code=EXIT_CODES[verdicts[0].verdict]
        if verdicts
        else (EXIT_INCONCLUSIVE if rows else EXIT_NOTHING),
        verdicts=tuple(verdicts),
        notes=tuple(dict.fromkeys(notes)),
        systems=tuple(system for system in systems if system.name in used),
        rows=tuple(rows),
    )


def find_systems(systems: Sequence[System], named: str) -> list[System]:
    """Returns the public systems that match a name.

    That is the system with exactly this name. Otherwise those whose names contain all words of it (8xH100), otherwise
    those whose names contain it as a substring.

    Raises:
        UsageError: there is no such system.
    """
    exact = [system for system in systems if system.name.lower() == named.lower()]
    with_words = [system for system in systems if name_words(named) <= name_words(system.name)]
    matching = exact or with_words or [system for system in systems if named.lower() in system.name.lower()]
    if not matching:
        names = [system.name for system in systems]
        raise UsageError(
            f"no public system is called {named!r}: nearest are {nearest(named, names)}; expected one of "
            f"{', '.join(names)}"
        )
    return matching


def _groups(run: Run) -> Iterator[tuple[str, int, int | None]]:
    """Yields (name, ranks, hosts per group) of each mesh dim with results; hosts are None if not recorded."""
    mesh = run.header.mesh
    hosts = {layout.name: layout.hosts_per_group for layout in layout_of(run.header)}
    measured = {r.params.get("mesh_dim") for r in run.collectives()}
    for name, size in zip(mesh.dim_names, mesh.shape, strict=True):
        if name in measured and size > 1:
            # If groups span different numbers of hosts, the largest counts, since that group is the slowest.
            spans = hosts.get(name)
            yield name, size, spans[1] if spans else None


def _has_gpus_of(system: System, run: Run) -> bool:
    """Whether all GPUs of the run are of the system's model and, if their names include it, of its form factor."""
    model = rf"(?<![A-Za-z0-9]){re.escape(system.gpu)}(?![0-9])"
    excluded = r"SXM|HBM3" if "PCIe" in system.link else r"PCIe|\bNVL\b"
    names = [
        gpu.name or "" for gpu in run.header.machine.gpus if run.header.options.get("device_type") != "cpu"
    ]
    return bool(names) and all(
        re.search(model, name, re.IGNORECASE) and not re.search(excluded, name, re.IGNORECASE)
        for name in names
    )


def _no_systems_note(systems: Sequence[System], run: Run, dim: str, ranks: int, hosts: int | None) -> str:
    gpus = ", ".join(sorted({gpu.name for gpu in run.header.machine.gpus if gpu.name}))
    with_gpu = sorted(
        (system for system in systems if _has_gpus_of(system, run)),
        key=lambda system: (abs(math.log(system.ranks / ranks)), system.hosts != hosts),
    )
    device = run.header.options.get("device_type")
    candidates = with_gpu or [system for system in systems if system.ranks == ranks] or systems
    return (
        f"no verdict on dim {dim}: no public measurements of {ranks} ranks on {hosts or 'unknown'} host(s) with "
        f"{gpus or ('cpu' if device == 'cpu' else 'a GPU that the run does not name')}; "
        + (f"nearest is {with_gpu[0].name}; " if with_gpu else "")
        + f"--system NAME compares with another: {', '.join(system.name for system in candidates)}"
    )


def _rows(run: Run, dim: str, system: System) -> Iterator[ReferenceRow]:
    mesh = run.header.mesh
    # There are no published measurements of groups that run at the same time and may share links.
    is_single_group = mesh.shape[mesh.dim_names.index(dim)] == math.prod(mesh.shape)
    results_of_dim = (
        r for r in run.collectives() if r.size_bytes and r.busbw_Bps and r.params.get("mesh_dim") == dim
    )
    for (name, dtype, size), results in sorted(
        group_by(results_of_dim, lambda r: (r.name, str(r.params.get("dtype")), r.size_bytes or 0)).items()
    ):
        reference = system.busbw(name, size)
        bandwidths = [
            r.busbw_Bps
            for r in _reference_mode(results)
            if r.busbw_Bps and (is_single_group or r.params.get("groups") != "together")
        ]
        if reference is not None and bandwidths:
            run_bandwidth = median(bandwidths)
            yield ReferenceRow(
                system.name,
                dim,
                name,
                dtype,
                size,
                run_bandwidth,
                reference,
                run_bandwidth / reference,
                system.varies,
            )


def _reference_mode(results: Sequence[Result]) -> list[Result]:
    """Selects the launches that were measured like the references: back to back and one group alone, if possible."""
    selected = list(results)
    for param, preferred in (("mode", "back_to_back"), ("groups", "alone")):
        values = {r.params.get(param) for r in selected}
        value = preferred if preferred in values else min(values, key=str)
        selected = [r for r in selected if r.params.get(param) == value]
    return selected


def verdicts_of(
    rows: Sequence[ReferenceRow], compared_with: str, one_is_enough: bool
) -> Iterator[ReferenceVerdict]:
    """Yields the verdicts on the collectives of one mesh dim. Collectives with equal verdicts are merged into one.

    Args:
        rows: comparisons at `MIN_SIZE` and above.
        compared_with: kind of system, or the named system.
        one_is_enough: whether a single source suffices for "low" even if systems of its kind vary.
    """
    verdicts = (
        _verdict_on_collective(rows_of_collective, compared_with, one_is_enough)
        for rows_of_collective in group_by(rows, lambda row: row.collective).values()
    )
    for group in group_by(
        verdicts, lambda v: (v.verdict, v.sizes, v.sources, v.verdict == "low" and v.collectives)
    ).values():
        ratios = [ratio for verdict in group for ratio in verdict.ratios]
        yield replace(
            group[0],
            collectives=tuple(name for verdict in group for name in verdict.collectives),
            ratios=(min(ratios), max(ratios)),
        )


def _verdict_on_collective(
    rows: Sequence[ReferenceRow], compared_with: str, one_is_enough: bool
) -> ReferenceVerdict:
    verdicts: dict[int, Verdict] = {}
    ratios: dict[int, float] = {}
    for size, size_rows in sorted(group_by(rows, lambda row: row.size_bytes).items()):
        # The fastest dtype counts, since some dtypes take longer to reduce.
        run_bandwidth = max(row.run_Bps for row in size_rows)
        sources = {row.system: row.reference_Bps for row in size_rows}
        slowest, fastest = min(sources.values()), max(sources.values())
        ratios[size] = run_bandwidth / median(sources.values())
        if run_bandwidth < LOW * slowest:
            verdicts[size] = (
                "low" if one_is_enough or len(sources) > 1 or not size_rows[0].varies else "cannot tell"
            )
        elif run_bandwidth < LOW * fastest and slowest < LOW * fastest:
            verdicts[size] = "cannot tell"
        else:
            verdicts[size] = (
                "above public measurements" if run_bandwidth * LOW > fastest else "as public measurements"
            )
    verdict = min(verdicts.values(), key=WORST_FIRST.index)
    decisive = [
        size for size in verdicts if verdicts[size] == verdict or verdict not in ("low", "cannot tell")
    ]
    # nccl-tests rounds 64 MiB down to a multiple of the ranks.
    names = [format_size(round(size / 2**20) * 2**20) for size in decisive]
    sizes = ", ".join(names)
    if len(decisive) > 1 and decisive == [size for size in verdicts if decisive[0] <= size <= decisive[-1]]:
        sizes = f"{names[0]} and above" if decisive[-1] == max(verdicts) else f"{names[0]} to {names[-1]}"
    return ReferenceVerdict(
        verdict=verdict,
        mesh_dim=rows[0].mesh_dim,
        collectives=(rows[0].collective,),
        ratios=(
            min(ratios[size] for size in decisive),
            max(ratios[size] for size in decisive),
        ),
        compared_with=compared_with,
        sizes=sizes,
        sources=len({row.system for row in rows if row.size_bytes in decisive}),
    )


def comparison_lines(comparison: ReferenceComparison, with_all: bool) -> Iterator[str]:
    """Yields the lines of the comparison for a terminal: verdicts, notes and, if `with_all`, all ratios."""
    yield from map(str, comparison.verdicts)
    yield from (f"! {note}" for note in comparison.notes)
    if comparison.rows and not with_all:
        yield f"{plural(len(comparison.rows), 'ratio')} by size and source: --all"
        return
    for system in comparison.systems:
        system_rows = [row for row in comparison.rows if row.system == system.name]
        yield f"{system.name} ({system.link})" + (f", {system.note}" if system.note else "")
        for name in dict.fromkeys(row.collective for row in system_rows):
            yield f"  {name}, from {system.collectives[name].source}"
            for row in (row for row in system_rows if row.collective == name):
                yield (
                    f"    {row.dtype:>9} {format_size(row.size_bytes):>14}  {format_bandwidth(row.run_Bps):>11}  "
                    f"reference {format_bandwidth(row.reference_Bps):>11}  {format_ratio(row.ratio)}"
                )
    if comparison.rows:
        yield "bus bandwidths; software and network of the references may differ from those of the run"
