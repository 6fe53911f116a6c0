"""Appends head's times to a history, which `dtbench report FOLDER` plots over revisions. Verdicts do not depend on it.

The folder has one JSON Lines file per kind of machine. A file that contains times of another kind is refused.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dtbench.errors import OutputError
from dtbench.records.gate import Gate, HistoryLine, read_history


def history_file(folder: Path) -> Path:
    """Returns the file for this kind of machine, after checking that it can be appended to.

    Raises:
        UnreadableRunError: the file is damaged or from another machine.
        OutputError: the file cannot be written.
    """
    machine = machine_kind()
    path = file_of(folder, machine)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("ab").close()
            read_history(path, machine)
    except OSError as error:
        raise _cannot_append(path, error) from error
    return path


def machine_kind() -> Mapping[str, object]:
    """Returns the properties that must agree for times to be comparable: CPU, cores, GPUs, system."""
    from dtbench.machine.host import describe_cpu
    from dtbench.machine.nvml import describe_gpus

    chip = describe_cpu()
    return {
        "cpu": chip.model,
        "cores": chip.usable_cores,
        "gpus": sorted(str(gpu.name) for gpu in describe_gpus()),
        "system": os.uname().sysname,
        "arch": os.uname().machine,
    }


def file_of(folder: Path, machine: Mapping[str, object]) -> Path:
    """Returns the path for a kind of machine: a readable name and a hash."""
    text = json.dumps(machine, sort_keys=True)
    words = re.sub(r"[^a-z0-9]+", "-", f"{machine.get('cpu')}-{machine.get('cores')}c".lower()).strip("-")
    return folder / f"{words[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"


def append(path: Path, report: Gate) -> bool:
    """Appends head's times as one line and returns True.

    Returns False without writing if the machine could not be trusted or no benchmark of head has a time.

    Raises:
        OutputError: the file cannot be written.
    """
    times = {j.label: j.head_s for j in report.benchmarks if j.head_s is not None}
    if report.trust.reasons or report.head is None or not times:
        return False
    line = HistoryLine(
        machine=dict(machine_kind()),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        revision=report.head.commit or report.head.arm or "",
        torch=report.head.torch,
        times_s=times,
    )
    data = json.dumps(msgspec.to_builtins(line), allow_nan=False).encode() + b"\n"
    try:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _cannot_append(path, error) from error
    return True


def _cannot_append(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot append to {path}: {error.strerror or error}; give --history a folder")
