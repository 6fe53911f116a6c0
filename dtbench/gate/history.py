"""Estimates of earlier revisions, and where they changed: advice after a merge, never a verdict.

A folder holds one JSON Lines file per kind of machine, appended to only. Times of another machine are no
baseline and are refused. Change points are found by `ruptures` (PELT on log times), where it is installed: Apache
Otava, which has E-divisive, pins an older numpy than dtbench's and has to live in an environment of its own.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dtbench.records.gate import Gate
from dtbench.records.history import Line, read_history
from dtbench.suite.errors import OutputError, plain

# Fewer points show nothing: a step needs a few on either side.
FEWEST_POINTS = 8
SIDE_POINTS = 3
# A change below this is not worth a line; the spread between launches is of this size.
MIN_CHANGE = 0.03

Series = dict[str, list[tuple[str, float]]]  # label -> (revision, seconds)


def machine_kind() -> Mapping[str, object]:
    """What has to agree for times to be comparable: CPU, cores, GPUs, system."""
    from dtbench.machine.provenance import cpu, gpus

    found = cpu()
    names = sorted(str(gpu.name) for gpu in gpus())
    kind = {"cpu": found.model, "cores": found.usable_cores, "gpus": names}
    return kind | {"system": os.uname().sysname, "arch": os.uname().machine}


def file_of(folder: Path, machine: Mapping[str, object]) -> Path:
    """The file of a kind of machine: a readable name and a hash."""
    text = json.dumps(machine, sort_keys=True)
    words = re.sub(r"[^a-z0-9]+", "-", f"{machine.get('cpu')}-{machine.get('cores')}c".lower()).strip("-")
    return folder / f"{words[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"


def follow(folder: Path, report: Gate, *, record: bool) -> list[str]:
    """Lines about the change points of the history in a folder; head's times are appended first, if wanted.

    Raises:
        UnreadableRunError: the file is damaged or of another machine.
        OutputError: it cannot be written.
    """
    machine = machine_kind()
    path = file_of(folder, machine)
    if record:
        append(path, machine, report)
    if not path.exists():
        return [f"history: nothing of this kind of machine in {folder} yet; --record appends head's times"]
    return [f"history (advisory, no part of the verdict): {line}" for line in advice(read(path, machine))]


def look_at(folder: Path, *, record: bool) -> None:
    """Before anything is measured, finds what `follow` would say no to.

    Raises:
        UnreadableRunError: the file is damaged or of another machine.
        OutputError: there is no place to append to.
    """
    machine = machine_kind()
    path = file_of(folder, machine)
    if record:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(path if path.exists() else folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise _no_place(path, error) from error
    if path.exists():
        read(path, machine)


def _no_place(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot append to {path}: {error.strerror or error}; give --history a folder")


def append(path: Path, machine: Mapping[str, object], report: Gate) -> None:
    """Appends head's times as one line; times that were not to be trusted are not kept.

    Raises:
        OutputError: the file cannot be written.
    """
    if report.trust.reasons or report.head is None:
        return
    times = {j.label: j.head_s for j in report.benchmarks if j.head_s is not None}
    if not times:
        return
    line = Line(
        machine=dict(machine),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        revision=report.head.commit or report.head.arm or "",
        torch=report.head.torch,
        times_s=times,
    )
    data = json.dumps(msgspec.to_builtins(line), allow_nan=False).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _no_place(path, error) from error


def read(path: Path, machine: Mapping[str, object]) -> Series:
    """The series of a file, oldest first. A last line cut short is left out.

    Raises:
        UnreadableRunError: damaged, too large, of a newer schema, or of another machine.
    """
    series: Series = {}
    for line in read_history(path, machine):
        for label, time_s in line.times_s.items():
            series.setdefault(label, []).append((line.revision, time_s))
    return series


def advice(series: Series) -> list[str]:
    """A line per change point, the latest change of a benchmark last."""
    try:
        import ruptures
    except ImportError:
        return [
            "change points need the package ruptures, which is not installed: pip install 'dtbench[history]'"
        ]
    import numpy as np

    found: list[str] = []
    for label, points in series.items():
        if len(points) < FEWEST_POINTS:
            continue
        logs = np.log([time_s for _, time_s in points])
        steps = np.diff(logs)
        # Of the noise between neighbours, robustly: a step is one difference among many.
        noise = float(np.median(np.abs(steps - np.median(steps)))) * 1.4826 / 2**0.5
        scaled = (logs / max(noise, 1e-3)).reshape(-1, 1)
        # The penalty of the Bayesian information criterion for a mean and a place per change, times 2.
        penalty = 2 * 2 * float(np.log(len(points)))
        ends = ruptures.Pelt(model="l2", min_size=SIDE_POINTS, jump=1).fit(scaled).predict(pen=penalty)
        bounds = [0, *ends]
        levels = [float(np.median(logs[a:b])) for a, b in itertools.pairwise(bounds)]
        for at, (before, after) in zip(ends, itertools.pairwise(levels), strict=False):
            change = float(np.expm1(after - before))
            if abs(change) >= MIN_CHANGE:
                found.append(f"{plain(label)}: {change:+.1%} since {plain(points[at][0])}")
    return found or [f"no change point in {len(series)} series"]
