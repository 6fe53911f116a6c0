"""What was measured before, an earlier preflight or a topology: where all ranks are slow, none has a faster peer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dtbench.cost.plan.machines import Machine, NodeLinks, built_in, find_machine
from dtbench.cost.price import estimate
from dtbench.preflight.examine import Examination
from dtbench.records.preflight import Finding, Preflight
from dtbench.records.read import BadFieldError, into, read_json, shown
from dtbench.records.topology import CalibratedTopology, read_topology
from dtbench.suite.errors import UnreadableRunError, UsageError
from dtbench.suite.mesh import format_mesh

MAX_BYTES = 2**28
_WHAT = "a topology, or what `dtbench preflight --json` printed"
# Of public times of calls without a pause between them: isolated calls, on another day's software, are slower.
SLOWER_THAN_PUBLIC = 0.60
# Of the speed before. Days and jobs differ by more than peers of one minute do.
SLOWER = 0.80


@dataclass(frozen=True)
class Expected:
    """One of the three."""

    before: Preflight | None = None
    topology: CalibratedTopology | None = None
    machine: Machine | None = None


def read_expected(path: Path) -> Expected:
    """A file, or a machine that comes with dtbench by its name.

    Raises:
        UnreadableRunError: none of these, or damaged.
    """
    if str(path) in built_in():
        return Expected(machine=find_machine(str(path)))
    content = read_json(path, _WHAT, MAX_BYTES)
    if content.get("kind") == "topology":
        return Expected(topology=read_topology(path))
    if content.get("kind") != "preflight":
        raise UnreadableRunError(f"{path}: its kind is {shown(content.get('kind'))}, expected {_WHAT}")
    try:
        return Expected(before=into(content, Preflight))
    except BadFieldError as error:
        raise UnreadableRunError(f"{path} is damaged: {error}") from error


def compare_with(expected: Expected, found: Examination, device: str) -> None:
    """Adds what is slower than before, and notes what could not be compared. device: `cpu` or `cuda`.

    Raises:
        UsageError: the earlier preflight is of another device.
    """
    before, world = expected.before, found.world
    if expected.machine is not None and device != "cuda":
        raise UsageError(f"--expect {expected.machine.name} is of GPUs, this was measured on {device}")
    if before is not None and before.device != device:
        raise UsageError(f"--expect was measured on {before.device}, this on {device}: give one of {device}")
    if before is not None and (len(before.hosts), before.mesh) != (world.size, world.mesh):
        found.notes.append(
            f"--expect is of {len(before.hosts)} ranks as {format_mesh(before.mesh)}, these are {world.size} as "
            f"{format_mesh(world.mesh)}: links and dims of the same size are compared, which other ranks shared"
        )
    pairs = list(_compared(expected, found))
    if not pairs:
        found.notes.append(
            "--expect holds nothing that was measured here: no mesh dim, link or work in common"
        )
    for what, kind, before_s, now_s in pairs:
        if (share := before_s / now_s) < (SLOWER if expected.machine is None else SLOWER_THAN_PUBLIC):
            what += " against what is expected"
            ranks = tuple(range(world.size))
            found.findings.append(Finding(what=what, kind=kind, ranks=ranks, share=share, p=0.0))


def _compared(expected: Expected, found: Examination) -> Iterator[tuple[str, str, float, float]]:
    """(what, kind, seconds expected, seconds now)."""
    before = expected.before
    if expected.machine is not None:
        yield from _public(expected.machine, found)
    if expected.topology is not None:
        dims = {dim.name: dim for dim in expected.topology.dims}
        for name, of in found.dims.items():
            if name in dims:
                price = estimate(dims[name], "all_reduce", len(of.groups[0]), of.size_bytes)
                # Beyond what was measured nothing is expected sharply.
                yield f"mesh dim {name}", "all_reduce", price.high_us * 1e-6, median(of.times_s)
    if before is None:
        return
    for kind, links in found.pairs.items():
        rates = [one.rate for one in before.links if one.kind == kind]
        if rates:
            yield "all links", kind, 1 / median(rates), 1 / median(map(links.rate, links.exchanges))
    for row in before.dims:
        now = found.dims.get(row.dim)
        if now is not None and now.size_bytes == row.size_bytes and len(now.groups[0]) == len(row.groups[0]):
            yield f"mesh dim {row.dim}", "all_reduce", median(row.times_s), median(now.times_s)


def _public(machine: Machine, found: Examination) -> Iterator[tuple[str, str, float, float]]:
    """All-reduces inside hosts beside what was published of such machines."""
    links = NodeLinks(machine)
    for name, of in found.dims.items():
        ranks = len(of.groups[0])
        inside = all(len({found.world.hosts[rank] for rank in group}) == 1 for group in of.groups)
        if inside and ranks <= machine.gpus_per_node:
            expected_s = links.in_node("all_reduce", of.size_bytes, ranks)
            yield f"mesh dim {name}", "all_reduce", expected_s, median(of.times_s)
