"""The head of the page: title, summary, what to know first; and at its end what is not ok."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dtbench.comparison.compare_launches import SINGLE_LAUNCH
from dtbench.grouping import group_by
from dtbench.records.comparison import Verdict
from dtbench.records.result import Result, Run
from dtbench.records.topology import CalibratedTopology
from dtbench.reporting.html.parts.provenance import hardware, hosts, mesh_words
from dtbench.reporting.html.section import Material, ReportSection
from dtbench.reporting.run_tables import by_one_process
from dtbench.text.units import format_seconds, plural

NOT_OK = {
    "wrong": "Wrong data: the result did not match the reference, so no time is shown",
    "failed": "Failed",
    "skipped": "Skipped",
}


def title(of: Material, sections: Sequence[ReportSection]) -> str:
    """The outcome: the verdict of a comparison, else what the first sections found."""
    sources = of.sources
    if of.changes is not None and (tallies := of.changes.tallies):
        sides = f"{' → '.join(of.changes.ends)}: " if of.changes.ends else ""
        moved = [tally for tally in tallies if tally[0] != Verdict.SAME] or tallies
        if of.changes.outcome == "single":
            return f"{sides}{SINGLE_LAUNCH}"
        counts = ", ".join(f"{count} {verdict}" for verdict, count, _ in moved)
        return f"{sides}{counts} of {len(of.changes.changes)}"
    if words := "; ".join([one.outcome for one in sections if one.outcome][:2]):
        return words[0].upper() + words[1:] if words.split()[0].isalpha() else words
    if sources.runs:
        return _times(of) or f"Mesh {mesh_words(sources.runs[0].header) or 'unknown'}"
    if sources.calls or sources.ranks:
        return "Profile"
    return "Cost model" if sources.topology is not None else "History"


def _times(of: Material) -> str:
    """Of suites that no section sums up: from the fastest to the slowest."""
    cases = of.cases(*of.suites)
    times = [measured.estimate_s for case in cases for measured in case.impls.values()]
    if not times:
        return ""
    ends = " to ".join(dict.fromkeys(map(format_seconds, (min(times), max(times)))))
    return f"{', '.join(of.suites)}: {plural(len(cases), 'case')}{' from' if ' to ' in ends else ','} {ends}"


CORE_IS = (
    "“The core” is dtbench’s own DTensor, dtbench_core, written in Python on torch.distributed; “torch” is "
    "torch.distributed.tensor. Both ran the same cases alternately."
)


def summary(of: Material) -> list[str]:
    """What was measured on what, and what the core is where it first stands."""
    runs = of.sources.runs
    if not runs:
        return []
    header = runs[0].header
    cases = of.cases(*of.suites)
    launches = len({(run.header.run_id, r.launch) for run in runs for r in run.results})
    torch = f", torch {header.versions['torch']}" if header.versions.get("torch") else ""
    sentence = (
        f"{plural(len(cases), 'case')} in {plural(launches, 'launch')} on {hardware(header)}{torch}. "
        f"{_world(runs)}"
    )
    return [sentence, *([CORE_IS] if any({"core", "torch"} <= case.impls.keys() for case in cases) else [])]


def _world(runs: Sequence[Run]) -> str:
    """The mesh and its ranks; where one process measured everything, that."""
    header = runs[0].header
    if by_one_process(runs):
        return "One process measured; the other ranks of its meshes are simulated."
    if not mesh_words(header) and len(header.ranks) == 1:
        return "One process measured."
    ranks = f", {plural(len(header.ranks), 'rank')}" if header.ranks else ""
    where = f" on {plural(len(hosts(header)), 'host')}" if hosts(header) else ""
    backend = header.versions.get("backend") or "no backend"
    return f"Mesh {mesh_words(header) or 'unknown'} over {backend}{ranks}{where}."


class PageWarning(NamedTuple):
    """text: what a reader has to know. brief: the same in few words, of one that changes how the page is read."""

    text: str
    brief: str = ""


def warnings(of: Material) -> list[PageWarning]:
    """The most severe first."""
    sources, runs = of.sources, of.sources.runs
    notes = []
    if cut := [run.path.name for run in runs if not run.complete]:
        notes.append(
            PageWarning(
                f"{', '.join(cut)} has no end line; cases are missing. `dtbench run --resume` continues it.",
                brief="run incomplete",
            )
        )
    tally = Counter(result.status for run in runs for result in run.results)
    for status in ("wrong", "failed"):
        if tally[status]:
            words = plural(tally[status], f"{status} result")
            notes.append(PageWarning(f"{words}: see Failures.", words))
    words = plural(len(of.drops), "bandwidth drop")
    notes += [PageWarning(f"{drop}.", "" if i else words) for i, drop in enumerate(of.drops)]
    if of.shared_cores and any(case.get("mesh_dim") for case in of.cases(*of.suites)):
        notes.append(
            PageWarning(
                f"{of.shared_cores}: times of collectives include waiting for a core, so they do not show the speed of "
                "the links and are left out of the title and the headlines.",
                brief=of.shared_cores,
            )
        )
    if any(run.header.options.get("quick") for run in runs):
        notes.append(
            PageWarning("Few samples: small differences are not significant.", brief="measured with --quick")
        )
    if sources.topology is not None and runs:
        notes += map(PageWarning, _of_topology(sources.topology, {run.header.run_id for run in runs}))
    return [*notes, *map(PageWarning, sources.notes)]


def _of_topology(topology: CalibratedTopology, run_ids: set[str]) -> list[str]:
    strangers = sorted(run.run_id for run in topology.runs if run.run_id not in run_ids)
    warned = sum(bool(dim.warnings) for dim in topology.dims)
    other = f"The topology was fitted to another run ({', '.join(strangers)}): its points are not those here."
    return [
        *([other] if strangers else []),
        *topology.warnings,
        *([f"The fit of {plural(warned, 'mesh dim')} has warnings: see the cost model."] if warned else []),
    ]


def failures(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """(caption, its reasons with the results that gave them): a cause that meets many cases is told once."""
    faults = []
    for status, caption in NOT_OK.items():
        results = (r for run in runs for r in run.results if r.status == status)
        if by_reason := group_by(results, lambda result: result.reason or "no reason given"):
            faults.append((caption, [(reason, list(map(_named, of))) for reason, of in by_reason.items()]))
    return faults


def _named(result: Result) -> str:
    params = ", ".join(f"{k}={v}" for k, v in result.params.items())
    rank = "" if result.rank is None else f", rank {result.rank}"
    return (
        f"{result.suite} {result.name}, {result.impl}{f' ({params})' if params else ''}{rank}, "
        f"launch {result.launch}"
    )
