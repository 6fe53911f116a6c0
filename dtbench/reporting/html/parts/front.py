"""Title, summary and warnings at the top of the page; failures and provenance of the results at its end."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from dtbench.comparison.compare_launches import SINGLE_LAUNCH
from dtbench.grouping import group_by
from dtbench.records.comparison import Verdict
from dtbench.records.result import Checkout, Header, Result, Run
from dtbench.records.topology import CalibratedTopology
from dtbench.reporting.html.section import Material, ReportSection
from dtbench.reporting.html.sources import Sources
from dtbench.reporting.run_tables import by_one_process
from dtbench.text.units import format_bytes, format_seconds, plural

NOT_OK = {
    "wrong": "Wrong data: the result did not match the reference, so no time is shown",
    "failed": "Failed",
    "skipped": "Skipped",
}


def title(material: Material, sections: Sequence[ReportSection]) -> str:
    """Returns the title: the verdict of a comparison, else the outcome of the first sections."""
    sources = material.sources
    if material.changes is not None and (tallies := material.changes.tallies):
        sides = f"{' → '.join(material.changes.ends)}: " if material.changes.ends else ""
        moved = [tally for tally in tallies if tally[0] != Verdict.SAME] or tallies
        if material.changes.outcome == "single":
            return f"{sides}{SINGLE_LAUNCH}"
        counts = ", ".join(f"{count} {verdict}" for verdict, count, _ in moved)
        return f"{sides}{counts} of {len(material.changes.changes)}"
    if words := "; ".join([section.outcome for section in sections if section.outcome][:2]):
        return words[0].upper() + words[1:] if words.split()[0].isalpha() else words
    if sources.runs:
        return _times(material) or f"Mesh {mesh_words(sources.runs[0].header) or 'unknown'}"
    if sources.calls or sources.ranks:
        return "Profile"
    return "Cost model" if sources.topology is not None else "History"


def _times(material: Material) -> str:
    """Returns a title with the range of times, for suites whose sections have no outcome."""
    cases = material.cases(*material.suites)
    if not (times := [measured.estimate_s for case in cases for measured in case.impls.values()]):
        return ""
    extremes = " to ".join(dict.fromkeys(map(format_seconds, (min(times), max(times)))))
    separator = " from" if " to " in extremes else ","
    return f"{', '.join(material.suites)}: {plural(len(cases), 'case')}{separator} {extremes}"


CORE_IS = (
    "“The core” is dtbench’s own DTensor, dtbench_core, written in Python on torch.distributed; “torch” is "
    "torch.distributed.tensor. Both ran the same cases alternately."
)


def summary(material: Material) -> list[str]:
    """Returns sentences about what was measured on which hardware, and what "the core" is."""
    if not (runs := material.sources.runs):
        return []
    header = runs[0].header
    cases = material.cases(*material.suites)
    launches = len({(run.header.run_id, r.launch) for run in runs for r in run.results})
    torch = f", torch {header.versions['torch']}" if header.versions.get("torch") else ""
    return [
        f"{plural(len(cases), 'case')} in {plural(launches, 'launch')} on {hardware(header)}{torch}. {_world(runs)}",
        *([CORE_IS] if any({"core", "torch"} <= case.impls.keys() for case in cases) else []),
    ]


def _world(runs: Sequence[Run]) -> str:
    """Describes the mesh and its ranks, or the process if a single one measured everything."""
    header = runs[0].header
    if by_one_process(runs):
        return "One process measured; the other ranks of its meshes are simulated."
    if not mesh_words(header) and len(header.ranks) == 1:
        return "One process measured."
    ranks = f", {plural(len(header.ranks), 'rank')}" if header.ranks else ""
    host_count = f" on {plural(len(hosts(header)), 'host')}" if hosts(header) else ""
    backend = header.versions.get("backend") or "no backend"
    return f"Mesh {mesh_words(header) or 'unknown'} over {backend}{ranks}{host_count}."


class PageWarning(NamedTuple):
    """A warning at the top of the page.

    Attributes:
        text: the warning.
        brief: the warning in a few words, if it affects how to read the page.
    """

    text: str
    brief: str = ""


def warnings(material: Material) -> list[PageWarning]:
    """Returns the warnings, the most severe first."""
    sources, runs = material.sources, material.sources.runs
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
    words = plural(len(material.drops), "bandwidth drop")
    notes += [PageWarning(f"{drop}.", "" if i else words) for i, drop in enumerate(material.drops)]
    if material.shared_cores and any(case.get("mesh_dim") for case in material.cases(*material.suites)):
        notes.append(
            PageWarning(
                f"{material.shared_cores}: times of collectives include waiting for a core, so they do not show the "
                "speed of the links and are left out of the title and the headlines.",
                brief=material.shared_cores,
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
    note = f"The topology was fitted to another run ({', '.join(strangers)}): its points are not those of this page."
    return [
        *([note] if strangers else []),
        *topology.warnings,
        *([f"The fit of {plural(warned, 'mesh dim')} has warnings: see the cost model."] if warned else []),
    ]


def failures(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Returns (caption, [(reason, results)]): results with the same reason are listed together."""
    by_status = group_by((result for run in runs for result in run.results), lambda result: result.status)
    faults = {
        caption: group_by(by_status[status], lambda result: result.reason or "no reason given")
        for status, caption in NOT_OK.items()
        if status in by_status
    }
    return [
        (caption, [(reason, list(map(_describe, results))) for reason, results in by_reason.items()])
        for caption, by_reason in faults.items()
    ]


def _describe(result: Result) -> str:
    params = ", ".join(f"{k}={v}" for k, v in result.params.items())
    rank = "" if result.rank is None else f", rank {result.rank}"
    return (
        f"{result.suite} {result.name}, {result.impl}{f' ({params})' if params else ''}{rank}, "
        f"launch {result.launch}"
    )


def mesh_words(header: Header) -> str:
    mesh = header.mesh
    return " × ".join(f"{name} = {size}" for name, size in zip(mesh.dim_names, mesh.shape, strict=True))


def hosts(header: Header) -> list[str]:
    """Returns the host names of all nodes; several nodes may have the same name."""
    return sorted(host for host, _ in dict.fromkeys(rank.node for rank in header.ranks) if host)


def hardware(header: Header) -> str:
    machine = header.machine
    gpus = Counter(str(gpu.name or "GPU") for gpu in machine.gpus)
    named = [f"{count} × {name}" if count > 1 else name for name, count in gpus.items()]
    return ", ".join([*named, *([machine.cpu.model] if machine.cpu.model else [])]) or "unknown hardware"


# (name, value) pairs.
Facts = list[tuple[str, str]]


def provenance(sources: Sources) -> dict[str, Facts]:
    """Returns the facts and the environment variables of a report."""
    sides = [(f"Gate, {side}", words) for side, words in (sources.gate.sides if sources.gate else ())]
    if job := sources.job:
        devices = {f"{rank.device} on {rank.host or 'unknown host'}" for rank in job.ranks}
        sides += [
            ("Job", shlex.join(job.command) or job.label),
            ("Devices", ", ".join(sorted(devices))),
            ("Versions", f"torch {job.torch or 'unknown'}, {job.backend or 'unknown backend'}"),
        ]
    if not sources.runs:
        return {"facts": sides, "environment": []}
    header = sources.runs[0].header
    facts = [
        *(("Command", _command(run.header.argv)) for run in sources.runs),
        *(("Run", _run_words(run)) for run in sources.runs),
        *(("Baseline", _run_words(run)) for run in sources.baseline),
        *sides,
        *_facts(header, by_one_process(sources.runs)),
    ]
    return {
        "facts": [fact for fact in facts if fact[1]],
        "environment": [(name, str(value)) for name, value in sorted(header.env.items())],
    }


def _run_words(run: Run) -> str:
    return (
        f"{run.header.run_id}, started {run.header.started or 'at an unknown time'}, "
        f"{'complete' if run.complete else 'incomplete'}, file {run.path.name}"
    )


def _facts(header: Header, is_single_process: bool) -> list[tuple[str, str]]:
    """Returns the facts of a run. If a single process measured, the mesh and its ranks are left out."""
    machine: dict[str, object] = msgspec.to_builtins(header.machine)
    cpu = machine.pop("cpu")
    del machine["gpus"]
    gpus = Counter(_described(msgspec.to_builtins(gpu)) for gpu in header.machine.gpus)
    facts = [
        ("Mesh", mesh_words(header)),
        ("Ranks", _placement(header)),
        ("Versions", ", ".join(f"{k} {v}" for k, v in header.versions.items() if v is not None)),
        ("Checkout", _checkout(header.git)),
        ("dtbench’s checkout", _checkout(header.git.dtbench)),
        ("CPU", _described(cpu)),
        ("GPUs", "; ".join(f"{count} × {words}" for words, count in gpus.items())),
        *[(_words(k).capitalize(), _described(v, k)) for k, v in machine.items()],
        ("Suites", ", ".join(header.suites)),
        ("Launches", str(header.launches)),
        ("Options", _described({k: v for k, v in header.options.items() if k != "mesh"})),
        ("Schema", str(header.schema)),
    ]
    return [
        (name, value)
        for name, value in facts
        if value and not (is_single_process and name in ("Mesh", "Ranks"))
    ]


def _placement(header: Header) -> str:
    """Describes the ranks of each host with the kind of device, e.g. "vm: 0–3 (cpu)"."""
    words = []
    for (host, _), ranks in group_by(header.ranks, lambda rank: rank.node).items():
        devices = dict.fromkeys(rank.device.partition(":")[0] for rank in ranks if rank.device)
        kinds = f" ({', '.join(devices)})" if devices else ""
        words.append(f"{host or 'unknown host'}: {_ranges([rank.rank for rank in ranks])}{kinds}")
    return "; ".join(words)


def _ranges(numbers: Sequence[int]) -> str:
    """Formats numbers as ranges, e.g. "0–3, 8"."""
    # In a range of consecutive numbers, number - index is constant.
    spans = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in span] for _, span in spans]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _command(argv: Sequence[str]) -> str:
    line = shlex.join(str(arg) for arg in argv)
    return line if not argv or Path(argv[0]).name == "dtbench" else f"dtbench {line}"


def _checkout(git: Checkout | None) -> str:
    if git is None or not git.commit:
        return ""
    state = {True: ", with uncommitted changes", False: ", clean", None: ""}[git.dirty]
    return f"{git.commit}{state}"


def _words(key: str) -> str:
    return str(key).removesuffix("_bytes").replace("_", " ")


def _described(value: object, key: str = "") -> str:
    """Formats a fact of the header, which may be nested."""
    if isinstance(value, Mapping):
        present = {k: v for k, v in value.items() if v not in (None, "", [], {})}
        return ", ".join(f"{_words(k)} {_described(v, str(k))}" for k, v in present.items())
    if isinstance(value, list | tuple):
        return " ".join(_described(v, key) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if str(key).endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return "" if value is None else str(value)
