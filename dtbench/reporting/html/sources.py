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
from dtbench.records.gate import Gate
from dtbench.records.history import HistoryLine, read_history
from dtbench.records.profile import Calls, CallStages, RankSection, RanksProfile
from dtbench.records.read import BadFieldError, into, opened, read_json, shown
from dtbench.records.run import read_run
from dtbench.records.topology import CalibratedTopology, read_topology
from dtbench.reporting.html.changes import Changes, of_gate
from dtbench.suite import Run
from dtbench.suite.errors import UnreadableRunError, UsageError
from dtbench.suite.grouping import group_by
from dtbench.text.units import plural

MAX_JSON_BYTES = 64 * 2**20
_HEAD_BYTES = 4096
_FIRST_KIND = re.compile(rb'\s*\{\s*"kind"\s*:\s*"(run|history)"')
KINDS = "a run, a topology, a result of gate or profile, or a history"


# What has the `kind` in a JSON file: the field of `Sources`, the struct, and whose output it is.
_JSON: Mapping[str, tuple[str, type[msgspec.Struct], str]] = {
    "gate": ("gate", Gate, "result of `dtbench gate`"),
    "profile of calls": ("calls", Calls, "table of `dtbench profile`"),
    "profile of ranks": ("ranks", RanksProfile, "table of `dtbench profile`"),
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
    spans: section of a rank profile -> what each rank did in one iteration of it.
    recorded: the words of a profiled case -> the frames of its calls, or the trace of its ranks.
    peaks: mesh dim -> bytes per second that no
    collective over it can pass, as the user knows.
    """

    runs: tuple[Run, ...] = ()
    baseline: tuple[Run, ...] = ()
    topology: CalibratedTopology | None = None
    gate: Changes | None = None
    calls: tuple[CallStages, ...] = ()
    ranks: tuple[RankSection, ...] = ()
    histories: tuple[History, ...] = ()
    systems: tuple[tuple[Run, ...], ...] = ()
    notes: tuple[str, ...] = ()
    peaks: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        aside = ("baseline", "notes", "peaks")
        return not any(getattr(self, one.name) for one in fields(self) if one.name not in aside)


def gather(paths: Sequence[Path], baseline: Sequence[Path] = (), topology: Path | None = None) -> Sources:
    """Reads files, each for what it is; a folder is a profile's, or one of runs, of which the last is shown and all
    tell how each case moved.

    Raises:
        UnreadableRunError: a file that is none of these, or is damaged.
        UsageError: two of what there can be only one of.
    """
    fitted = read_topology(topology) if topology is not None else None
    sources = Sources(baseline=tuple(read_run(path) for path in baseline), topology=fitted)
    for path in paths:
        sources = _with(sources, path)
    return _apart(sources)


def _apart(sources: Sources) -> Sources:
    """Runs of collectives on several systems stand beside each other; the rest of the page is of the first system's."""
    groups = tuple(map(tuple, group_by(sources.runs, lambda run: repr(setup_of(run))).values()))
    if len(groups) < 2 or not all(any(r.suite == "collectives" for r in run.results) for run in sources.runs):
        return sources
    return replace(sources, runs=groups[0], systems=groups)


def _with(sources: Sources, path: Path) -> Sources:
    if os.path.isdir(path):  # noqa: PTH112 - Path's raises where a name is too long
        table = path / "table.json"  # of a profile
        return (
            _with_json(sources, table, read_json(table, KINDS, MAX_JSON_BYTES))
            if table.is_file()
            else _with_folder(sources, path)
        )
    head = _head(path)
    first = _FIRST_KIND.match(head)
    if first is not None and first[1] == b"history":
        return _add(sources, path, "histories", _history(path))
    if first is not None:
        return _add(sources, path, "runs", read_run(path))
    return _with_json(sources, path, read_json(path, KINDS, MAX_JSON_BYTES))


def _with_json(sources: Sources, path: Path, data: Mapping[str, object]) -> Sources:
    kind = data.get("kind")
    if kind == "topology":
        return _add(sources, path, "topology", read_topology(path))
    if not isinstance(kind, str) or kind not in _JSON:
        raise UnreadableRunError(
            f"{path} is none of the files that a report is made of (its kind is {shown(kind)}): expected {KINDS}"
        )
    name, struct, what = _JSON[kind]
    try:
        found = into(data, struct)
    except BadFieldError as error:
        raise UnreadableRunError(f"{path} is damaged: {error}; expected a {what}") from error
    if isinstance(found, Gate):
        return _add(sources, path, name, of_gate(found))
    parts = (
        found.cases
        if isinstance(found, Calls)
        else found.sections
        if isinstance(found, RanksProfile)
        else [found]
    )
    return _add(sources, path, name, *parts)


def _add(sources: Sources, path: Path, name: str, *found: object) -> Sources:
    there = getattr(sources, name)
    if there is not None and not isinstance(there, tuple):
        words = {"topology": "topology", "gate": "result of a gate"}
        raise UsageError(f"{path} is a second {words[name]}: a report shows one; give one of them")
    more: dict[str, Any] = {name: found[0] if there is None else (*there, *found)}
    return replace(sources, **more)


# ------------------------------------------------------------------------------------ files


def _head(path: Path) -> bytes:
    with opened(path, KINDS) as file:
        head = file.read(_HEAD_BYTES)
    if not head.strip():
        raise UnreadableRunError(f"{path} is empty: expected {KINDS}")
    return head


def _with_folder(sources: Sources, folder: Path) -> Sources:
    """Runs of other machines or meshes than the last one's are left out, and it is said."""
    found = [
        path
        for path in sorted(folder.glob("*.jsonl"))
        if (m := _FIRST_KIND.match(_head(path))) and m[1] == b"run"
    ]
    revisions = sorted((of for path in found if (of := _revision(path))), key=lambda of: of[:2])
    if not revisions:
        raise UnreadableRunError(
            f"{folder} holds neither runs nor a table.json: expected a folder of runs or a profile"
        )
    *_, (_, last, setup, _) = revisions
    alike = [line for *_, of, line in revisions if of == setup]
    moved = History(", ".join(setup), tuple(alike))
    notes = (
        ()
        if len(alike) == len(revisions)
        else (f"{len(revisions) - len(alike)} runs of {folder} have another setup",)
    )
    return replace(
        sources,
        runs=(*sources.runs, read_run(folder / last)),
        histories=(*sources.histories, *([moved] if len(alike) > 1 else [])),
        notes=(*sources.notes, *notes),
    )


def _revision(path: Path) -> tuple[str, str, tuple[str, ...], HistoryLine] | None:
    """(when, file, setup, times) of a run, None of one of verdicts; the run itself is not kept, as a folder may hold
    more than the memory does."""
    run = read_run(path, with_samples=False)
    return run.header.started or "", path.name, _setup(run), _line(run)


def _setup(run: Run) -> tuple[str, ...]:
    """What has to agree for the times of two runs to be of one series."""
    header, gpus = run.header, run.header.machine.gpus
    mesh = " x ".join(f"{name}={n}" for name, n in zip(header.mesh.dim_names, header.mesh.shape, strict=True))
    devices = sorted({str(gpu.name) for gpu in gpus}) or [header.machine.cpu.model or "unknown CPU"]
    hosts = plural(len({rank.node for rank in header.ranks}), "host")
    world = f"mesh {mesh}" if mesh else "one process"
    return (*devices, world, hosts, str(header.versions.get("backend") or "no backend"))


def _line(run: Run) -> HistoryLine:
    """A run as a revision: of each case the median over launches."""
    times: dict[str, list[float]] = {}
    for result in run.results:
        if result.status == "ok" and result.estimate_s:
            params = " ".join(f"{key}={value}" for key, value in result.params.items() if value != "")
            times.setdefault(f"{result.suite} {result.name} {params} [{result.impl}]", []).append(
                result.estimate_s
            )
    started = run.header.started or run.path.stem
    return HistoryLine(
        machine={},
        time=started,
        revision=started[5:16].replace("T", " ") if run.header.started else started,
        times_s={label: median(of) for label, of in times.items()},
    )


def _history(path: Path) -> History:
    lines = read_history(path)
    known = [f"{v}" for line in lines[:1] for v in line.machine.values() if v not in (None, "", [])]
    return History(", ".join(known), tuple(lines))
