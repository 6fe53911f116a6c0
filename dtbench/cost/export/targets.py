"""The targets of `dtbench export`: programs that read calibrated figures, and the function that renders each form.

The command line imports this module for its help, so records are imported only when they are used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dtbench.errors import UsageError

if TYPE_CHECKING:
    from dtbench.records.topology import CalibratedTopology
    from dtbench.suite.mesh import Mesh

DEFAULT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ExportRequest:
    """The topology to export, and the options of the command.

    Attributes:
        topology: the calibrated topology.
        path: the file or folder to write.
        mesh: the mesh of the job that will use the export; empty for the topology's mesh.
        dtypes: dtypes of the tensors, for targets whose tables have one.
    """

    topology: CalibratedTopology
    path: Path
    mesh: Mesh = ()
    dtypes: tuple[str, ...] = DEFAULT_DTYPES


@dataclass(frozen=True)
class Export:
    """A rendered topology.

    Attributes:
        content: text of the file, or path in the folder -> contents.
        notes: figures that the export lacks, one line each.
    """

    content: str | Mapping[str, bytes]
    notes: tuple[str, ...] = ()


class Target(NamedTuple):
    """A program that reads calibrated figures.

    Attributes:
        taker: the program, and what it uses the figures for.
        form: what is written.
        renderer: MODULE.FUNCTION in this package, which returns the Export of an ExportRequest.
        options: fields of ExportRequest, besides topology and path, that the function uses.
    """

    taker: str
    form: str
    renderer: str
    options: tuple[str, ...] = ()


TARGETS: Mapping[str, Target] = {
    "torch": Target(
        "torch.distributed.tensor, which chooses redistributions", "Python module", "module.render_torch"
    ),
    "inductor": Target(
        "the scheduler of torch.compile, which overlaps collectives",
        "Python module",
        "module.render_inductor",
    ),
    "inductor-profile": Target(
        "the profile-guided estimates of torch.compile (torch 2.13 and later)",
        "Chrome trace",
        "inductor_profile.render",
        ("mesh", "dtypes"),
    ),
    "autoparallel": Target(
        "the NCCL cost model of meta-pytorch/autoparallel", "Python module", "autoparallel.render"
    ),
    "primus": Target(
        "the performance projection of AMD-AGI/Primus", "hardware config", "simulators.render_primus"
    ),
    "astra-sim": Target(
        "the analytical network of ASTRA-sim", "network config", "simulators.render_astra_sim"
    ),
    "aiconfigurator": Target(
        "ai-dynamo's aiconfigurator, which plans inference", "systems folder", "aiconfigurator.render"
    ),
}


def export(request: ExportRequest, name: str) -> tuple[str, ...]:
    """Writes the topology for the target `name`, atomically, and returns notes about missing figures.

    Raises:
        UsageError: the target cannot represent the topology, or does not use one of the options.
        OutputError: the path cannot be written, or is a file that `export` did not write.
    """
    from dtbench.records.atomic import check_output_path, write_atomically, write_folder

    rendered = render(request, name)
    if isinstance(rendered.content, str):
        write_atomically(request.path, rendered.content, _is_export, "file of `dtbench export`")
    else:
        check_output_path(request.path, "remove it")
        write_folder(request.path, rendered.content)
    return rendered.notes


def render(request: ExportRequest, name: str) -> Export:
    """Returns the export without writing it."""
    target = TARGETS[name]
    for option in ("mesh", "dtypes"):
        if option not in target.options and getattr(request, option) != getattr(ExportRequest, option):
            takers = ", ".join(taker for taker, described in TARGETS.items() if option in described.options)
            raise UsageError(f"--{option.rstrip('s')} is for {takers}, not for {name}: leave it out")
    if not request.topology.dims:
        raise UsageError(
            "the topology has no mesh dim, expected at least one: calibrate a run of the suite collectives"
        )
    module, _, function = target.renderer.partition(".")
    renderer: Callable[[ExportRequest], Export] = getattr(
        importlib.import_module(f"dtbench.cost.export.{module}"), function
    )
    return renderer(request)


def _is_export(head: str) -> bool:
    return "written by `dtbench export" in head.split("\n", 1)[0]
