"""`dtbench plan` on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtbench.cli import options

if TYPE_CHECKING:
    from dtbench.cost.plan.machines import Links, MachineSpec
    from dtbench.cost.plan.search import PlanFile
    from dtbench.cost.plan.training import TrainingJob
    from dtbench.cost.plan.validate import StepsFile


_EXAMPLE = {"--model": "llama-8b", "--gpus": 8, "--batch": 256}


@click.command("plan")
@click.option(
    "--model",
    metavar="NAME|FILE",
    help="llama-8b, llama-70b, llama-405b, gpt3-175b, mixtral-8x7b; or a JSON file, also a config.json "
    "of Hugging Face (llama, mistral, mixtral, qwen2, qwen3).",
)
@click.option("--gpus", type=click.IntRange(1, 2**20), help="The number of GPUs.")
@click.option("--batch", type=click.IntRange(1, 2**30), help="Sequences per step over all GPUs.")
@click.option("--sequence", type=click.IntRange(1, 2**24), default=4096, help="Tokens per sequence.")
@click.option(
    "--machine",
    "machine_name",
    metavar="NAME|FILE",
    default="a100-8x",
    help="A machine that --machines lists, or a JSON file that --fit wrote.",
)
@click.option(
    "--topology",
    type=options.FILE,
    help="Predict communication from this file of `dtbench calibrate` instead of the machine's numbers.",
)
@click.option(
    "--memory",
    type=click.FloatRange(0, 2**20, min_open=True),
    metavar="GIB",
    help="Memory per GPU, instead of the machine's.",
)
@click.option("--machines", "list_machines", is_flag=True, help="Instead: list the built-in machines.")
@click.option(
    "--validate",
    "table",
    type=options.FILE,
    metavar="TABLE",
    help="Instead: compare predictions with a CSV table of measured steps or collectives.",
)
@click.option(
    "--fit",
    "tables",
    type=options.FILE,
    multiple=True,
    metavar="TABLE",
    help="Instead: fit --machine's constants to measured steps; repeatable.",
)
@click.option("-o", "--output", type=options.FILE, help="With --fit: the machine file to write.")
@options.JSON
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
    list_machines: bool,
    as_json: bool,
) -> None:
    """Chooses layouts for training a model by step time and memory.

    Searches tensor, pipeline, data and sharded data parallelism, micro batches and recomputation for the fastest steps
    that fit into memory. Prints each layout's step time with its interval, and where most time is lost. A file for
    --model has the keys hidden, layers, heads, ffn and vocab. Optional keys are kv_heads, head_dim, gated, experts,
    experts_per_token and tied.

    \b
    Examples:
      dtbench plan --model llama-70b --gpus 512 --batch 1024
      dtbench plan --validate steps.csv --machine h100-8x
      dtbench plan --machines
      dtbench plan --fit steps.csv -o machine.json
    """
    import msgspec

    from dtbench.cost.plan import show
    from dtbench.cost.plan.machines import find_machine
    from dtbench.cost.plan.training import TrainingJob, find_model
    from dtbench.cost.plan.validate import validate_table
    from dtbench.text.terminal import print_json

    _check_mode(
        {"--validate": table, "--fit": tables, "--machines": list_machines},
        {"--model": model, "--batch": batch, "--memory": memory},
    )
    if output is not None and not tables:
        raise click.UsageError("-o requires --fit, which writes a machine file")
    if list_machines:
        show.print_machines()
        return
    machine = find_machine(machine_name)
    if tables:
        file: PlanFile | StepsFile = _fit(tables, machine, sequence, output)
    elif table is not None:
        file = validate_table(table, machine, _links(machine, topology), sequence, gpus)
    elif model is None or gpus is None or batch is None:
        raise _incomplete({"--model": model, "--gpus": gpus, "--batch": batch})
    else:
        file = _search(
            TrainingJob(find_model(model), gpus, batch, sequence), machine, _links(machine, topology), memory
        )
    if as_json:
        print_json(msgspec.to_builtins(file))
    else:
        show.print_file(file)


def _incomplete(required: Mapping[str, object]) -> click.UsageError:
    """Returns the error of a search without some required options, with a complete command as an example."""
    missing = " and ".join(name for name, value in required.items() if value is None)
    example = " ".join(f"{name} {required[name] or default}" for name, default in _EXAMPLE.items())
    return click.UsageError(
        f"missing {missing}, e.g. `dtbench plan {example}`; or give --validate TABLE, or --fit TABLE"
    )


def _check_mode(modes: Mapping[str, object], search_options: Mapping[str, object]) -> None:
    """Raises click.UsageError for two modes at once, or for a mode together with an option of the search."""
    selected = [name for name, value in modes.items() if value]
    if len(selected) > 1:
        raise click.UsageError(f"{' and '.join(selected)} exclude each other: give one of them")
    ignored = [name for name, value in search_options.items() if value is not None]
    if selected and ignored:
        raise click.UsageError(f"{selected[0]} does not use {', '.join(ignored)}: leave it out")


def _search(job: TrainingJob, machine: MachineSpec, links: Links, memory: float | None) -> PlanFile:
    from dtbench.cost.plan.search import RESERVED_BYTES, search_layouts

    limit_bytes = (machine.memory_GiB if memory is None else memory) * 2**30 - RESERVED_BYTES
    if not limit_bytes > 0:  # or not a number
        raise click.UsageError(
            f"got --memory {memory:g}, expected more than the {RESERVED_BYTES >> 30} GiB that are reserved per GPU"
        )
    return search_layouts(job, machine, links, limit_bytes)


def _fit(tables: tuple[Path, ...], machine: MachineSpec, sequence: int, output: Path | None) -> StepsFile:
    import msgspec
    from msgspec import structs

    from dtbench.cost.plan.measured_steps import MeasuredSteps, read_steps, read_table
    from dtbench.cost.plan.validate import fit_machine
    from dtbench.records.atomic import check_output_path, write_atomically

    if output is None:
        raise click.UsageError("--fit writes a machine file: give -o FILE.json")
    check_output_path(output)
    by_table = [read_steps(read_table(path), machine, sequence) for path in tables]
    measured = MeasuredSteps(
        steps=[step for table in by_table for step in table.steps],
        left_out={reason: lines for table in by_table for reason, lines in table.left_out.items()},
        notes=tuple(dict.fromkeys(note for table in by_table for note in table.notes)),
    )
    fitted, held_out = fit_machine(measured, machine, ", ".join(path.name for path in tables))
    write_atomically(
        output, json.dumps(msgspec.to_builtins(fitted), indent=1) + "\n", lambda _: False, "machine"
    )
    return structs.replace(
        held_out,
        verdict=(
            *held_out.verdict,
            f"wrote the machine, fitted to all {len(measured.steps)} steps, to {output}",
        ),
    )


def _links(machine: MachineSpec, topology: Path | None) -> Links:
    from dtbench.cost.plan.machines import NodeLinks, TopologyLinks
    from dtbench.records.topology import read_topology

    return (
        NodeLinks(machine)
        if topology is None
        else TopologyLinks(read_topology(topology), machine.gpus_per_node)
    )
