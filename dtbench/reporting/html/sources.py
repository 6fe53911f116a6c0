"""What a report is made of: files of several commands, told apart by what they hold."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from dtbench.cost.calibration import setup_of
from dtbench.errors import UnreadableRunError, UsageError
from dtbench.file_kinds import JOB_FILE
from dtbench.grouping import group_by
from dtbench.records.gate import Gate
from dtbench.records.history import HistoryLine, read_history
from dtbench.records.job import Job, JobAnalysis
from dtbench.records.profile import CallsProfile, CallStages, RanksProfile, RanksSection
from dtbench.records.read import BadFieldError, into, opened, read_json, shown
from dtbench.records.result import Run
from dtbench.records.run import read_run
from dtbench.records.topology import CalibratedTopology, read_topology
from dtbench.reporting.html.changes import Changes, of_gate
from dtbench.text.units import plural

MAX_JSON_BYTES = 64 * 2**20
_HEAD_BYTES = 4096
_FIRST_KIND = re.compile(rb'\s*\{\s*"kind"\s*:\s*"(run|history)"')
KINDS = "a run, a topology, a result of gate or profile, or a history"


# What has the `kind` in a JSON file, and whose output it is.
_JSON: Mapping[str, tuple[type[msgspec.Struct], str]] = {
    "job": (Job, "job.json of `dtbench profile`"),
    "gate": (Gate, "result of `dtbench gate`"),
    "profile of calls": (CallsProfile, "table of `dtbench profile`"),
    "profile of ranks": (RanksProfile, "table of this version's `dtbench profile`: profile again"),
}


@dataclass(frozen=True)
class History:
    """The revisions of one kind of machine, oldest first."""

    machine: str
    points: tuple[HistoryLine, ...]


@dataclass(frozen=True)
class Sources:
    """Everything that a report may be made of; only some of it has to be there.

    systems: runs of collectives of several setups, each with its launches; the first one's are `runs`, too.
    peaks: mesh dim -> bytes per second that no collective over it can pass, as the user knows.
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
        aside = ("baseline", "notes", "peaks", "analysis")
        return not any(getattr(self, one.name) for one in fields(self) if one.name not in aside)


def gather(paths: Sequence[Path], baseline: Sequence[Path] = (), topology: Path | None = None) -> Sources:
    """Reads files, each for what it is; a folder is a profile's, or one of runs, of which the last is shown and all
    tell how each case moved.

    Raises:
        UnreadableRunError: a file that is none of these, or is damaged.
        UsageError: two of what there can be only one of.
    """
    parts = [_read(path) for path in paths]
    if topology is not None:
        parts.append({"topology": read_topology(topology)})
    all_of: dict[str, Any] = {"baseline": tuple(read_run(path, with_samples=False) for path in baseline)}
    for name in ("topology", "gate", "job"):
        values = [part[name] for part in parts if name in part]
        if len(values) > 1:
            words = {"topology": "topologies", "gate": "results of gates", "job": "jobs"}[name]
            raise UsageError(f"{len(values)} {words} were given: a report shows one; give one of them")
        all_of[name] = values[0] if values else None
    for name in ("runs", "calls", "ranks", "histories", "notes"):
        all_of[name] = tuple(one for part in parts for one in part.get(name, ()))
    return beside_each_other(Sources(**all_of))


def beside_each_other(sources: Sources) -> Sources:
    """Runs of collectives on several systems apart; the rest of the page is of the first system's."""
    groups = tuple(map(tuple, group_by(sources.runs, lambda run: repr(setup_of(run))).values()))
    if len(groups) < 2 or not all(any(r.suite == "collectives" for r in run.results) for run in sources.runs):
        return sources
    return replace(sources, runs=groups[0], systems=groups)


def _read(path: Path) -> dict[str, Any]:
    """Field of `Sources` -> what the file or folder holds of it."""
    if os.path.isdir(path):  # noqa: PTH112 - Path's raises where a name is too long
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
    """What a file of JSON lines holds; of other files nothing."""
    with opened(path, KINDS) as file:
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
            f"{path} is none of the files that a report is made of (its kind is {shown(kind)}): expected {KINDS}"
        )
    struct, what = _JSON[kind]
    try:
        content = into(data, struct)
    except BadFieldError as error:
        raise UnreadableRunError(f"{path} is damaged: {error}; expected a {what}") from error
    if isinstance(content, Job):
        return {"job": content}
    if isinstance(content, CallsProfile):
        return {"calls": content.cases}
    return {"ranks": content.sections} if isinstance(content, RanksProfile) else {"gate": of_gate(content)}  # type: ignore[arg-type]


def _folder(folder: Path) -> dict[str, Any]:
    """The last run, and the times of all of its setup; a note says how many others there are. Of a folder of
    `dtbench gate --history`, the history of each kind of machine.

    One run at a time is held, as a folder may hold more than the memory does.
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
            f"{folder} holds neither runs nor a table.json nor a history: expected a folder of runs, of a profile or "
            "of `dtbench gate --history`"
        )
    if not revisions:
        return {"histories": histories}
    revisions.sort(key=lambda revision: revision[:2])
    _, last, setup, _ = revisions[-1]
    series = tuple(line for *_, its_setup, line in revisions if its_setup == setup)
    others = len(revisions) - len(series)
    return {
        "runs": [read_run(last)],
        "histories": histories + ([History(setup, series)] if len(series) > 1 else []),
        "notes": [f"{others} runs of {folder} have another setup"] if others else [],
    }


def _setup(run: Run) -> str:
    """What has to agree for the times of two runs to be of one series."""
    header, gpus = run.header, run.header.machine.gpus
    mesh = " x ".join(f"{name}={n}" for name, n in zip(header.mesh.dim_names, header.mesh.shape, strict=True))
    devices = sorted({str(gpu.name) for gpu in gpus}) or [header.machine.cpu.model or "unknown CPU"]
    hosts = plural(len({rank.node for rank in header.ranks}), "host")
    world = f"mesh {mesh}" if mesh else "one process"
    return ", ".join([*devices, world, hosts, str(header.versions.get("backend") or "no backend")])


def _line(run: Run) -> HistoryLine:
    """A run as a revision: of each case the median over launches."""
    times: dict[str, list[float]] = {}
    for result in run.results:
        if result.status == "ok" and result.estimate_s:
            params = " ".join(f"{key}={value}" for key, value in result.params.items() if value != "")
            label = f"{result.suite} {result.name} {params} [{result.impl}]"
            times.setdefault(label, []).append(result.estimate_s)
    started = run.header.started or run.path.stem
    revision = started[5:16].replace("T", " ") if run.header.started else started
    medians = {label: median(of) for label, of in times.items()}
    return HistoryLine(machine={}, time=started, revision=revision, times_s=medians)
