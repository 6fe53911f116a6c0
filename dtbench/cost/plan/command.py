"""`dtbench plan` on the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtbench import flags
from dtbench.cost.predict.command import models

if TYPE_CHECKING:
    from dtbench.cost.plan.machines import Links, Machine


_SOFTWARE = (
    "bfloat16, flash attention as fast as other matrix products, sequence parallelism with tensor parallelism, an "
    "optimizer sharded over dp, and data-parallel collectives that run behind computation"
)


@click.command("plan")
@click.option("--model", metavar="NAME|FILE", shell_complete=models, help="As of `dtbench predict`.")
@click.option("--gpus", type=click.IntRange(1, 2**20), help="How many GPUs train.")
@click.option("--batch", type=click.IntRange(1, 2**30), help="Sequences of one step over all GPUs.")
@click.option("--sequence", type=click.IntRange(1, 2**24), default=4096, help="Tokens of one sequence.")
@click.option(
    "--machine",
    "machine_name",
    metavar="NAME|FILE",
    default="a100-8x",
    help="a100-8x, h100-8x, or a JSON file that --fit wrote.",
)
@click.option("--topology", type=flags.FILE, help="What `dtbench calibrate` wrote: prices the links instead.")
@click.option(
    "--memory",
    type=click.FloatRange(0, 2**20, min_open=True),
    metavar="GIB",
    help="Memory per GPU, instead of the machine's.",
)
@click.option(
    "--validate",
    "table",
    type=flags.FILE,
    metavar="TABLE",
    help="Instead: predict a CSV table of measured steps.",
)
@click.option(
    "--fit",
    "tables",
    type=flags.FILE,
    multiple=True,
    metavar="TABLE",
    help="Instead: fit --machine's constants to measured steps; repeatable.",
)
@click.option("-o", "--output", type=flags.FILE, help="With --fit: the machine file to write.")
@flags.JSON
def plan_command(
    model: str | None,
    gpus: int | None,
    batch: int | None,
    sequence: int,
    machine_name: str,
    topology: Path | None,
    memory: float | None,
    table: Path | None,
    tables: tuple[Path, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """How to shard a model: layouts by step time and memory.

    Searches tensor, pipeline, data and sharded data parallelism, micro batches and recomputation for the fastest
    steps that fit into memory, with an interval, where the time goes, and what would change the answer.

    \b
    Examples:
      dtbench plan --model llama-70b --gpus 512 --batch 1024
      dtbench plan --validate steps.csv
      dtbench plan --fit steps.csv -o machine.json
    """
    from dtbench.cost.plan.machines import find_machine
    from dtbench.cost.plan.show import print_validation
    from dtbench.cost.plan.validate import validate_table

    if table is not None and tables:
        raise click.UsageError("--validate and --fit exclude each other: give one of them")
    if output is not None and not tables:
        raise click.UsageError("-o is for --fit, which writes a machine file")
    if memory is not None and math.isnan(memory):
        raise click.UsageError("--memory is nan, expected GiB")
    given = {"--model": model, "--gpus": gpus, "--batch": batch, "--memory": memory}
    if table is not None or tables:
        option = "--fit" if tables else "--validate"
        if idle := [name for name, value in given.items() if value is not None]:
            raise click.UsageError(f"{option} TABLE says what is predicted: leave {', '.join(idle)} out")
    machine = find_machine(machine_name)
    if table is not None:
        print_validation(validate_table(table, machine, _links(machine, topology)), as_json)
        return
    if tables:
        _fit(tables, machine, output, as_json)
        return
    if model is None or gpus is None or batch is None:
        missing = [name for name, value in given.items() if value is None and name != "--memory"]
        raise click.UsageError(
            f"{', '.join(missing)} missing: give --model, --gpus and --batch, or --validate TABLE"
        )
    _plan(model, gpus, batch, sequence, machine, topology, memory, as_json)


def _plan(
    model: str,
    gpus: int,
    batch: int,
    sequence: int,
    machine: Machine,
    topology: Path | None,
    memory: float | None,
    as_json: bool,
) -> None:
    from dtbench.cost.plan.job import Job
    from dtbench.cost.plan.search import RESERVED_BYTES, plan
    from dtbench.cost.plan.show import print_plan
    from dtbench.cost.predict.models import find_model

    limit = (machine.memory_GiB if memory is None else memory) * 2**30 - RESERVED_BYTES
    if limit <= 0:
        raise click.UsageError(
            f"--memory {memory:g} leaves nothing beside the {RESERVED_BYTES >> 30} GiB that a GPU's context holds"
        )
    found = plan(
        Job(find_model(model), gpus, batch, sequence), machine, lambda on: _links(on, topology), limit
    )
    notes = (
        f"{machine.name}: {machine.source}; constants fitted on {machine.fitted_on}",
        *(
            ()
            if machine.error
            else (f"no step was measured on {machine.name}: how far off this is, is not known",)
        ),
        _SOFTWARE,
        f"{RESERVED_BYTES >> 30} GiB of each GPU are left to its context, buffers and fragmentation",
        *(
            ("experts are cut over tp as a dense MLP is, so no tokens are exchanged",)
            if found.job.model.experts > 1
            else ()
        ),
    )
    print_plan(found, notes, as_json)


def _fit(tables: tuple[Path, ...], machine: Machine, output: Path | None, as_json: bool) -> None:
    import msgspec

    from dtbench.cost.plan.fit import fit_machine
    from dtbench.cost.plan.show import print_validation
    from dtbench.cost.plan.tables import measured_steps, read_table
    from dtbench.files.atomic import refuse_taken, write_atomically

    if output is None:
        raise click.UsageError("--fit writes a machine file: give -o FILE.json")
    refuse_taken(output)
    measured = [one for path in tables for one in measured_steps(read_table(path), machine)]
    fit = fit_machine(measured, machine, ", ".join(path.name for path in tables))
    write_atomically(
        output, json.dumps(msgspec.to_builtins(fit.machine), indent=1) + "\n", lambda _: False, "machine"
    )
    print_validation(fit.held_out, as_json)
    if not as_json:
        click.echo(f"the machine, fitted to all {len(measured)} steps, is in {output}")


def _links(machine: Machine, topology: Path | None) -> Links:
    from dtbench.cost.plan.machines import NodeLinks, TopologyLinks
    from dtbench.files.topology import read_topology

    return (
        NodeLinks(machine)
        if topology is None
        else TopologyLinks(read_topology(topology), machine.gpus_per_node)
    )
