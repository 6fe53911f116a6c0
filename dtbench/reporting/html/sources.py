"""The input of a report: files of several commands, identified by their content."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from dtbench.cost.calibration import setup_of
from dtbench.errors import UnreadableRunError, UsageError
from dtbench.file_kinds import JOB_FILE
from dtbench.grouping import group_by
from dtbench.records.gate import Gate, HistoryLine, read_history
from dtbench.records.job import Job, JobAnalysis
from dtbench.records.profile import CallsProfile, CallStages, RanksProfile, RanksSection
from dtbench.records.read import BadFieldError, abbreviate, convert, open_file, read_json
from dtbench.records.result import Run
from dtbench.records.run import read_run
from dtbench.records.topology import CalibratedTopology, read_topology
from dtbench.reporting.html.changes import Changes, changes_of_gate
from dtbench.text.units import plural

MAX_JSON_BYTES = 64 * 2**20
_HEAD_BYTES = 4096
_FIRST_KIND = re.compile(rb'\s*\{\s*"kind"\s*:\s*"(run|history)"')
KINDS = "a run, a topology, a result of gate or profile, or a history"


# `kind` in a JSON file -> (struct, description of the file, function from the struct to a field of `Sources`).
_JSON: Mapping[str, tuple[type[msgspec.Struct], str, Callable[[Any], dict[str, Any]]]] = {
    "job": (Job, "job.json of `dtbench profile`", lambda job: {"job": job}),
    "gate": (Gate, "result of `dtbench gate`", lambda gate: {"gate": changes_of_gate(gate)}),
    "profile of calls": (
        CallsProfile,
        "table of `dtbench profile`",
        lambda profile: {"calls": profile.cases},
    ),
    "profile of ranks": (
        RanksProfile,
        "table of this version's `dtbench profile`: profile again",
        lambda profile: {"ranks": profile.sections},
    ),
}


@dataclass(frozen=True)
class History:
    """Times of the revisions on one kind of machine, oldest first."""

    machine: str
    points: tuple[HistoryLine, ...]


@dataclass(frozen=True)
class Sources:
    """The input of a report. All fields are optional.

    Attributes:
        runs: the runs to report, all of one setup. If there is a baseline, they are the head side.
        baseline: the runs of the base side.
        topology: calibrated topology.
        gate: result of the gate.
        calls: profiles of single calls.
        ranks: profiles of cases on several ranks.
        job: a profiled job.
        analysis: analysis of the job.
        histories: times of earlier revisions.
        systems: runs of collectives on several systems; those of the first one are also in `runs`.
        notes: notes for the reader.
        peaks: mesh dim -> peak bandwidth in bytes per second, as given by the user.
    """

    runs: tuple[Run, ...] = ()
    baseline: tuple[Run, ...] = ()
    topology: CalibratedTopology | None = None
    gate: Changes | None = None
    calls: tuple[CallStages, ...] = ()
    ranks: tuple[RanksSection, ...] = ()
    job: Job | None = None
    analysis: JobAnalysis | None = None
    histories: tuple[History, ...] = ()
    systems: tuple[tuple[Run, ...], ...] = ()
    notes: tuple[str, ...] = ()
    peaks: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not any(
            getattr(self, source.name)
            for source in fields(self)
            if source.name not in ("baseline", "notes", "peaks", "analysis")
        )


def gather(paths: Sequence[Path], baseline: Sequence[Path] = (), topology: Path | None = None) -> Sources:
    """Reads the files and folders of a report.

    A folder contains a profile or several runs. Of several runs, the last one is shown and all are the history.

    Raises:
        UnreadableRunError: a file is of none of these kinds, or is damaged.
        UsageError: there are several files of a kind that a report shows only once.
    """
    parts = [_read(path) for path in paths]
    if topology is not None:
        parts.append({"topology": read_topology(topology)})
    contents: dict[str, Any] = {"baseline": tuple(read_run(path, with_samples=False) for path in baseline)}
    for name in ("topology", "gate", "job"):
        values = [part[name] for part in parts if name in part]
        if len(values) > 1:
            words = {"topology": "topologies", "gate": "results of gates", "job": "jobs"}[name]
            raise UsageError(f"{len(values)} {words} were given: a report shows one; give one of them")
        contents[name] = values[0] if values else None
    contents |= {
        name: tuple(item for part in parts for item in part.get(name, ()))
        for name in ("runs", "calls", "ranks", "histories", "notes")
    }
    return split_systems(Sources(**contents))


def split_systems(sources: Sources) -> Sources:
    """Separates runs of collectives on several systems. The other parts of the page show the first system."""
    groups = tuple(map(tuple, group_by(sources.runs, lambda run: repr(setup_of(run))).values()))
    if len(groups) < 2 or not all(any(r.suite == "collectives" for r in run.results) for run in sources.runs):
        return sources
    return replace(sources, runs=groups[0], systems=groups)


def _read(path: Path) -> dict[str, Any]:
    """Reads a file or folder; returns field of `Sources` -> value."""
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises if a name is too long
        tables = [table for name in ("table.json", JOB_FILE) if (table := path / name).is_file()]
        return _json(tables[0]) if tables else _folder(path)
    kind = _kind_of_lines(path)
    if kind == b"run":
        return {"runs": [read_run(path)]}
    return {"histories": [_history(path)]} if kind == b"history" else _json(path)


def _history(path: Path) -> History:
    lines = read_history(path)
    words = [f"{v}" for line in lines[:1] for v in line.machine.values() if v not in (None, "", [])]
    return History(", ".join(words), tuple(lines))


def _kind_of_lines(path: Path) -> bytes:
    """Returns the kind of a file of JSON lines: b"run" or b"history"; b"" for other files."""
    with open_file(path, KINDS) as file:
        head = file.read(_HEAD_BYTES)
    if not head.strip():
        raise UnreadableRunError(f"{path} is empty: expected {KINDS}")
    first = _FIRST_KIND.match(head)
    return first[1] if first else b""


def _json(path: Path) -> dict[str, Any]:
    data = read_json(path, KINDS, MAX_JSON_BYTES)
    kind = data.get("kind")
    if kind == "topology":
        return {"topology": read_topology(path)}
    if not isinstance(kind, str) or kind not in _JSON:
        raise UnreadableRunError(
            f"{path} {f'is of the kind {abbreviate(kind)}' if 'kind' in data else 'names no kind of file'}, and a "
            f"report cannot show it: expected {KINDS}"
        )
    struct, noun, field_of = _JSON[kind]
    try:
        content = convert(data, struct)
    except BadFieldError as error:
        raise UnreadableRunError(f"{path} is damaged: {error}; expected a {noun}") from error
    return field_of(content)


def _folder(folder: Path) -> dict[str, Any]:
    """Reads a folder of runs or of `dtbench gate --history`.

    Returns the last run, the times of all runs with the same setup, and a note on runs with another setup; or the
    history of each kind of machine. Only one run at a time is in memory, since a folder may be larger than memory.
    """
    revisions, histories = [], []
    for path in sorted(folder.glob("*.jsonl")):
        kind = _kind_of_lines(path)
        if kind == b"history":
            histories.append(_history(path))
        elif kind == b"run":
            run = read_run(path, with_samples=False)
            revisions.append((run.header.started or "", path, _setup(run), _line(run)))
    if not revisions and not histories:
        raise UnreadableRunError(
            f"{folder} contains no runs, no table.json and no history: expected a folder of runs, of a profile or "
            "of `dtbench gate --history`"
        )
    if not revisions:
        return {"histories": histories}
    revisions.sort(key=lambda revision: revision[:2])
    _, last, setup, _ = revisions[-1]
    series = tuple(line for *_, its_setup, line in revisions if its_setup == setup)
    other_count = len(revisions) - len(series)
    return {
        "runs": [read_run(last)],
        "histories": histories + ([History(setup, series)] if len(series) > 1 else []),
        "notes": [f"{other_count} runs of {folder} have another setup"] if other_count else [],
    }


def _setup(run: Run) -> str:
    """Describes the setup of a run. Times of runs with equal descriptions form a series."""
    header, gpus = run.header, run.header.machine.gpus
    mesh = " x ".join(f"{name}={n}" for name, n in zip(header.mesh.dim_names, header.mesh.shape, strict=True))
    devices = sorted({str(gpu.name) for gpu in gpus}) or [header.machine.cpu.model or "unknown CPU"]
    hosts = plural(len({rank.node for rank in header.ranks}), "host")
    world = f"mesh {mesh}" if mesh else "one process"
    return ", ".join([*devices, world, hosts, str(header.versions.get("backend") or "no backend")])


def _line(run: Run) -> HistoryLine:
    """Returns a run as a revision of a history, with the median over launches of each case."""
    times: dict[str, list[float]] = {}
    for result in run.results:
        if result.status == "ok" and result.estimate_s:
            params = " ".join(f"{key}={value}" for key, value in result.params.items() if value != "")
            label = f"{result.suite} {result.name} {params} [{result.impl}]"
            times.setdefault(label, []).append(result.estimate_s)
    started = run.header.started or run.path.stem
    return HistoryLine(
        machine={},
        time=started,
        revision=started[5:16].replace("T", " ") if run.header.started else started,
        times_s={label: median(launch_times) for label, launch_times in times.items()},
    )
