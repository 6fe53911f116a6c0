"""Checks that runs are launches of the same setup: mesh, backend and machine."""

from collections.abc import Iterator, Sequence

from dtbench.errors import UsageError
from dtbench.records.result import Header, Run
from dtbench.records.topology import FromRun
from dtbench.stats.layout import hosts_of


def check_same_setup(runs: Sequence[Run]) -> None:
    """Raises UsageError unless the runs are different launches with the same mesh, backend and machine."""
    if not runs:
        raise UsageError("no run given: expected at least one file of `dtbench run`")
    run_of_id: dict[str, Run] = {}
    for run in runs:
        if (earlier := run_of_id.setdefault(run.header.run_id, run)) is not run:
            raise UsageError(
                f"{run.path} and {earlier.path} are the same run ({run.header.run_id}): give it once"
            )
    first_of: dict[str, tuple[object, Run]] = {}
    for run in runs:
        for label, value in setup_of(run).items():
            first_value, first_run = first_of.setdefault(label, (value, run))
            if value != first_value:
                commands = (
                    f"`dtbench calibrate {different.path} -o {different.path.stem}.topology.json`"
                    for different in (first_run, run)
                )
                raise UsageError(
                    f"{first_run.path} and {run.path} differ in {label} ({first_value} and {value}): expected "
                    "launches with the same mesh, backend and machine; calibrate the runs separately: "
                    f"{' and '.join(commands)}"
                )


def setup_of(run: Run) -> dict[str, object]:
    """Returns the facts that launches of the same setup share, by label.

    Hosts are numbered by first appearance, since a scheduler may assign different nodes to each launch. A run of a
    single process has no mesh and can be combined with any mesh.
    """
    header = run.header
    mesh, machine = header.mesh, header.machine
    order: dict[str, int] = {}
    setup: dict[str, object] = {
        "backend": backend(header),
        "device type": device_type(header),
        "CPU": machine.cpu.model or "unknown",
        "GPUs": ", ".join(str(gpu.name) for gpu in machine.gpus) or "none",
    }
    if mesh.shape:
        setup["mesh"] = ", ".join(
            f"{name}={size}" for name, size in zip(mesh.dim_names, mesh.shape, strict=True)
        )
        setup["hosts of the ranks"] = [order.setdefault(host or "?", len(order)) for host in hosts_of(header)]
    return setup


def backend(header: Header) -> str:
    return header.versions.get("backend") or "unknown"


def device_type(header: Header) -> str:
    devices = [rank.device for rank in header.ranks if rank.device]
    return str(header.options.get("device_type") or (devices[0] if devices else "unknown")).split(":")[0]


def version_warnings(runs: Sequence[Run]) -> Iterator[str]:
    for library in ("torch", "nccl"):
        versions = sorted({str(run.header.versions.get(library)) for run in runs})
        if len(versions) > 1:
            yield f"the runs have different versions of {library}: {', '.join(versions)}"
    if incomplete := [run.path.name for run in runs if not run.complete]:
        yield f"incomplete run: {', '.join(incomplete)}; sizes or collectives may be missing"


def source_of(run: Run) -> FromRun:
    return FromRun(
        run_id=run.header.run_id,
        path=run.path.name,
        versions=dict(run.header.versions),
        hosts=len({host for host in hosts_of(run.header) if host is not None}),
        gpu=", ".join(dict.fromkeys(gpu.name for gpu in run.header.machine.gpus if gpu.name)),
        driver=run.header.machine.driver,
    )


def paths(runs: Sequence[Run]) -> str:
    return ", ".join(str(run.path) for run in runs)
