"""The provenance of the results: command, machine, versions, commit."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from dtbench.grouping import group_by
from dtbench.records.result import Checkout, Header, Run
from dtbench.reporting.html.sources import Sources
from dtbench.reporting.run_tables import by_one_process
from dtbench.text.units import format_bytes


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
