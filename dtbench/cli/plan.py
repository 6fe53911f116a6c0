"""`dtbench plan` on the command line."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from dtbench.cli import options
from dtbench.engine.options import SHORT_DTYPES
from dtbench.suite.mesh import Mesh, parse_mesh

if TYPE_CHECKING:
    from dtbench.cost.plan.machines import Links, Machine


_SOFTWARE = (
    "bfloat16, flash attention as fast as other matrix products, sequence parallelism with tensor parallelism, an "
    "optimizer sharded over dp, and data-parallel collectives that run behind computation"
)


_DTYPE = click.Choice(["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"])


def models(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Completes the built-in models and files."""
    from dtbench.cost.plan.models import built_in_models

    return [
        *(CompletionItem(n) for n in built_in_models() if n.startswith(begun)),
        CompletionItem(begun, type="file"),
    ]


class PlanCommand(options.AdvancedCommand):
    """What a search takes is shown first."""

    first = (
        "--model",
        "--gpus",
        "--batch",
        "--sequence",
        "--machine",
        "--topology",
        "--mesh",
        "--memory",
        "--json",
    )


@click.command("plan", cls=PlanCommand)
@click.option(
    "--model",
    metavar="NAME|FILE",
    shell_complete=models,
    help="llama-8b, llama-70b, llama-405b, gpt3-175b, mixtral-8x7b; or a JSON or TOML file, also a config.json "
    "of Hugging Face (llama, mistral, mixtral, qwen2, qwen3).",
)
@click.option("--gpus", type=click.IntRange(1, 2**20), help="How many GPUs train.")
@click.option("--batch", type=click.IntRange(1, 2**30), help="Sequences of one step over all GPUs.")
@click.option("--sequence", type=click.IntRange(1, 2**24), default=4096, help="Tokens of one sequence.")
@click.option(
    "--machine",
    "machine_name",
    metavar="NAME|FILE",
    default="a100-8x",
    help="One of those that --machines lists, or a JSON file that --fit wrote.",
)
@click.option(
    "--software",
    "software_name",
    metavar="NAME|FILE",
    help="Another machine whose software drives this one: h100-8x-fsdp, h100-8x-nanotron.",
)
@click.option(
    "--machines", "list_machines", is_flag=True, help="Instead: the machines that come with dtbench."
)
@click.option(
    "--topology", type=options.FILE, help="What `dtbench calibrate` wrote: prices the links instead."
)
@click.option(
    "--mesh",
    metavar="DIMS",
    type=parse_mesh,
    help="Instead of a search: what the shardings over this mesh spend on communication; dims dp, tp, replicate.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 2**40),
    default=8192,
    help="With --mesh: tokens of one data-parallel rank in a step, sequence length x micro batch.",
)
@click.option("--dtype", type=_DTYPE, default="bf16", help="With --mesh: of activations and weights.")
@click.option(
    "--reduce-dtype", type=_DTYPE, show_default="--dtype", help="With --mesh: of reduced gradients."
)
@click.option(
    "--map",
    "mapping",
    metavar="DIM=NAME,...",
    help="With --mesh: which dim of the topology prices a dim: tp=intra.",
)
@click.option(
    "--memory",
    type=click.FloatRange(0, 2**20, min_open=True),
    metavar="GIB",
    help="Memory per GPU, instead of the machine's.",
)
@click.option(
    "--validate",
    "table",
    type=options.FILE,
    metavar="TABLE",
    help="Instead: predict a CSV table of measured steps.",
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
@click.option(
    "--ignore",
    multiple=True,
    metavar="COLUMN",
    help="With --validate or --fit: a column of the table that is not used; repeatable.",
)
@options.JSON
@click.pass_context
def plan_command(context: click.Context, /, as_json: bool, **given: options.Given) -> None:
    """How to shard a model: layouts by step time and memory.

    Searches tensor, pipeline, data and sharded data parallelism, micro batches and recomputation for the fastest
    steps that fit into memory, with an interval, where the time goes, and what would change the answer.

    With --mesh instead: what shardings spend on communication per layer and step by a calibrated topology, also on more
    ranks than were measured: tensor parallelism with and without sequence parallelism (tp); DDP, ZeRO-2 and FSDP (dp),
    or HSDP (dp and replicate). A file for --model has the keys hidden, layers, heads, ffn and vocab; and where they
    differ, kv_heads, head_dim, gated, experts, experts_per_token, tied.

    \b
    Examples:
      dtbench plan --model llama-70b --gpus 512 --batch 1024
      dtbench plan --model llama-70b --topology topology.json --mesh dp=128,tp=8
      dtbench plan --validate steps.csv --machine h100-8x
      dtbench plan --machines
      dtbench plan --fit steps.csv -o machine.json
    """
    asked = _Asked(**given)
    mode = _mode(context)
    if mode == "mesh":
        _communication(asked, as_json)
    elif mode == "table":
        _validate(asked, as_json)
    elif mode == "tables":
        _fit(asked, as_json)
    elif mode == "list_machines":
        from dtbench.cost.plan.show import print_machines

        print_machines(as_json)
    else:
        _plan(asked, as_json)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """The options, checked by click one by one."""

    model: str | None
    gpus: int | None
    batch: int | None
    sequence: int
    machine_name: str
    software_name: str | None
    list_machines: bool
    topology: Path | None
    memory: float | None
    mesh: Mesh | None
    tokens: int
    dtype: str
    reduce_dtype: str | None
    mapping: str | None
    table: Path | None
    tables: tuple[Path, ...]
    output: Path | None
    ignore: tuple[str, ...]


# What is asked for instead of a search, and the options that go with it.
_MODES = {
    "mesh": {"model", "topology", "tokens", "dtype", "reduce_dtype", "mapping"},
    "table": {"machine_name", "software_name", "topology", "ignore", "sequence"},
    "tables": {"machine_name", "software_name", "output", "ignore", "sequence"},
    "list_machines": set(),
}
_OF_A_SEARCH = {"model", "gpus", "batch", "sequence", "machine_name", "software_name", "topology", "memory"}


def _mode(context: click.Context) -> str | None:
    """The one of `_MODES` that is asked for, None for a search.

    Raises:
        click.UsageError: two of them, or an option that is not for what is asked.
    """
    typed = {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }
    typed.pop("as_json", None)
    modes = [name for name in _MODES if name in typed]
    if len(modes) > 1:
        named = " and ".join(typed[name] for name in modes)
        raise click.UsageError(f"{named} exclude each other: give one of them")
    mode = modes[0] if modes else None
    idle = [name for name in typed if name != mode and name not in (_MODES[mode] if mode else _OF_A_SEARCH)]
    if mode and idle:
        what = typed[mode] + (" TABLE" if mode.startswith("table") else "")
        raise click.UsageError(
            f"{what} says what is predicted: leave {', '.join(typed[name] for name in idle)} out"
        )
    if idle == ["output"]:
        raise click.UsageError("-o is for --fit, which writes a machine file")
    if idle:
        raise click.UsageError(f"{', '.join(typed[name] for name in idle)}: for --mesh DIMS, give it too")
    return mode


def _communication(asked: _Asked, as_json: bool) -> None:
    from dtbench.cost.plan.communication import Setup, communication
    from dtbench.cost.plan.models import find_model
    from dtbench.cost.plan.show import print_communication
    from dtbench.records.topology import read_topology

    if asked.model is None or asked.topology is None or asked.mesh is None:
        missing = " and ".join(
            name
            for name, value in (("--model", asked.model), ("--topology", asked.topology))
            if value is None
        )
        raise click.UsageError(f"{missing} missing: --mesh takes both")
    dtype, reduce_dtype = (
        SHORT_DTYPES.get(of, of) for of in (asked.dtype, asked.reduce_dtype or asked.dtype)
    )
    setup = Setup(
        find_model(asked.model), asked.mesh, asked.tokens, dtype, reduce_dtype, _parse_mapping(asked.mapping)
    )
    print_communication(communication(read_topology(asked.topology), setup), as_json)


def _parse_mapping(text: str | None) -> dict[str, str]:
    """`tp=intra,dp=inter` -> {"tp": "intra", "dp": "inter"}."""
    pairs = [part.strip().partition("=") for part in text.split(",")] if text is not None else []
    mapping = {name: to for name, _, to in pairs}
    if any(not name or not to for name, to in mapping.items()) or len(mapping) < len(pairs):
        raise click.UsageError(
            f"--map {text} is not understood: expected DIM=NAME, each dim once, such as --map tp=intra,dp=inter"
        )
    return mapping


def _validate(asked: _Asked, as_json: bool) -> None:
    from dtbench.cost.plan.show import print_validation
    from dtbench.cost.plan.validate import validate_table

    assert asked.table is not None
    machine = _machine(asked)
    links = _links(machine, asked.topology)
    print_validation(validate_table(asked.table, machine, links, asked.ignore, asked.sequence), as_json)


def _plan(asked: _Asked, as_json: bool) -> None:
    from dtbench.cost.plan.ground import extrapolation
    from dtbench.cost.plan.job import Job
    from dtbench.cost.plan.models import find_model
    from dtbench.cost.plan.search import RESERVED_BYTES, plan
    from dtbench.cost.plan.show import print_plan

    if asked.memory is not None and math.isnan(asked.memory):
        raise click.UsageError("--memory is nan, expected GiB")
    if asked.model is None or asked.gpus is None or asked.batch is None:
        needed = {"--model": asked.model, "--gpus": asked.gpus, "--batch": asked.batch}
        raise click.UsageError(
            f"{', '.join(name for name, value in needed.items() if value is None)} missing: give --model, --gpus and "
            "--batch, or --mesh, or --validate TABLE"
        )
    machine = _machine(asked)
    limit = (machine.memory_GiB if asked.memory is None else asked.memory) * 2**30 - RESERVED_BYTES
    if limit <= 0:
        raise click.UsageError(
            f"--memory {asked.memory:g} leaves nothing beside the {RESERVED_BYTES >> 30} GiB that a GPU's context holds"
        )
    job = Job(find_model(asked.model), asked.gpus, asked.batch, asked.sequence)
    found = plan(job, machine, _links(machine, asked.topology), limit)
    beyond = extrapolation(job, machine)
    notes = (
        f"{machine.name}: {machine.source}; constants fitted on {machine.fitted_on}",
        *([beyond] if beyond else ()),
        *([f"its collectives are those of {machine.stands_in}"] if machine.stands_in else ()),
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


def _fit(asked: _Asked, as_json: bool) -> None:
    import msgspec

    from dtbench.cost.plan.csv_table import read_table
    from dtbench.cost.plan.fit import fit_machine
    from dtbench.cost.plan.show import print_validation
    from dtbench.cost.plan.tables import read_steps
    from dtbench.cost.plan.validate import with_left_out
    from dtbench.records.atomic import refuse_taken, write_atomically

    tables, output = asked.tables, asked.output
    if output is None:
        raise click.UsageError("--fit writes a machine file: give -o FILE.json")
    machine = _machine(asked)
    refuse_taken(output)
    read = [read_steps(read_table(path, asked.ignore), machine, asked.sequence) for path in tables]
    measured = [one for steps in read for one in steps.measured]
    fit = fit_machine(measured, machine, ", ".join(path.name for path in tables))
    write_atomically(
        output, json.dumps(msgspec.to_builtins(fit.machine), indent=1) + "\n", lambda _: False, "machine"
    )
    left_out = {why: lines for steps in read for why, lines in steps.left_out.items()}
    print_validation(
        with_left_out(fit.held_out, left_out, dict.fromkeys(n for s in read for n in s.notes)), as_json
    )
    if not as_json:
        click.echo(f"the machine, fitted to all {len(measured)} steps, is in {output}")


def _machine(asked: _Asked) -> Machine:
    from dtbench.cost.plan.machines import find_machine, with_software

    machine = find_machine(asked.machine_name)
    return (
        machine if asked.software_name is None else with_software(machine, find_machine(asked.software_name))
    )


def _links(machine: Machine, topology: Path | None) -> Links:
    from dtbench.cost.plan.machines import NodeLinks, TopologyLinks
    from dtbench.records.topology import read_topology

    return (
        NodeLinks(machine)
        if topology is None
        else TopologyLinks(read_topology(topology), machine.gpus_per_node)
    )
