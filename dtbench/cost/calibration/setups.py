"""Which runs go together: launches of one mesh, backend and machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtbench.errors import UsageError
from dtbench.records.result import Header, Run
from dtbench.records.topology import FromRun
from dtbench.stats.layout import hosts_of


def check_same_setup(runs: Sequence[Run]) -> None:
    """Raises UsageError unless the runs are launches of one mesh, backend and machine."""
    if not runs:
        raise UsageError("no run given: name at least one file of `dtbench run`")
    seen: dict[str, Run] = {}
    for run in runs:
        run_id = run.header.run_id
        if run_id in seen:
            raise UsageError(f"{run.path} and {seen[run_id].path} are the same run ({run_id}): give it once")
        seen[run_id] = run
    first: dict[str, tuple[object, Run]] = {}
    for run in runs:
        for what, value in setup_of(run).items():
            other, of = first.setdefault(what, (value, run))
            if value != other:
                commands = (f"`dtbench calibrate {r.path} -o {r.path.stem}.topology.json`" for r in (of, run))
                raise UsageError(
                    f"{of.path} and {run.path} differ in {what} ({other} and {value}): "
                    "only launches of one setup can be put together, as a topology is of one mesh and machine; "
                    f"give the others separately: {' and '.join(commands)}"
                )


def setup_of(run: Run) -> dict[str, object]:
    """What must agree. Hosts by their order of appearance: a scheduler may hand out other nodes. A run that one process
    measured has no mesh, and goes with any."""
    header = run.header
    mesh, machine = header.mesh, header.machine
    order: dict[str, int] = {}
    layout = [order.setdefault(host or "?", len(order)) for host in hosts_of(header)]
    setup: dict[str, object] = {
        "backend": backend(header),
        "device type": device_type(header),
        "CPU": machine.cpu.model or "unknown",
        "GPUs": ", ".join(str(gpu.name) for gpu in machine.gpus) or "none",
    }
    if mesh.shape:
        setup["mesh"] = ", ".join(f"{n}={s}" for n, s in zip(mesh.dim_names, mesh.shape, strict=True))
        setup["hosts of the ranks"] = layout
    return setup


def backend(header: Header) -> str:
    return header.versions.get("backend") or "unknown"


def device_type(header: Header) -> str:
    devices = [rank.device for rank in header.ranks if rank.device]
    return str(header.options.get("device_type") or (devices[0] if devices else "unknown")).split(":")[0]


def version_warnings(runs: Sequence[Run]) -> Iterator[str]:
    for what in ("torch", "nccl"):
        versions = sorted({str(run.header.versions.get(what)) for run in runs})
        if len(versions) > 1:
            yield f"the runs have different versions of {what}: {', '.join(versions)}"
    if cut := [run.path.name for run in runs if not run.complete]:
        yield f"incomplete run: {', '.join(cut)}; sizes or collectives may be missing"


def provenance(run: Run) -> FromRun:
    return FromRun(
        run_id=run.header.run_id,
        path=run.path.name,
        versions=dict(run.header.versions),
        hosts=len({host for host in hosts_of(run.header) if host is not None}),
    )


def paths(runs: Sequence[Run]) -> str:
    return ", ".join(str(run.path) for run in runs)
