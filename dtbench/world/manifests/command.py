"""`dtbench launch` on the command line."""

from __future__ import annotations

from typing import cast

import click


@click.command("launch", context_settings={"allow_interspersed_args": False})
@click.option(
    "--print",
    "scheduler",
    required=True,
    type=click.Choice(["slurm", "kubeflow", "torchx", "skypilot"]),
    help="Whose manifest: an sbatch script, a TrainJob, a component, a task.",
)
@click.option("--nodes", type=click.IntRange(1, 2**20), default=1, help="How many.")
@click.option("--ranks-per-node", type=click.IntRange(1, 2**10), default=8, help="Each with a GPU.")
@click.option("--gpus/--no-gpus", default=True, help="Whether ranks have GPUs.")
@click.option("--gpu-type", default="", help="Their type, as the scheduler spells it: H100.")
@click.option("--image", default="", help="The container image that holds the program.")
@click.option("--name", default="dtbench", help="Of the job.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def launch_command(
    scheduler: str,
    nodes: int,
    ranks_per_node: int,
    gpus: bool,
    gpu_type: str,
    image: str,
    name: str,
    command: tuple[str, ...],
) -> None:
    """Prints what runs COMMAND on a cluster; submits nothing.

    COMMAND is a program such as `dtbench run ...`, or a script.py; torchrun starts it on every rank.

    \b
    Examples:
      dtbench launch --print slurm --nodes 2 -- dtbench run collectives --mesh dp=2,tp=8 -o x.jsonl > job.sh
      dtbench launch --print skypilot --nodes 2 --gpu-type H100 -- dtbench run -o x.jsonl > task.yaml
    """
    from dtbench.world.manifests.schedulers import Job, Scheduler, manifest

    if gpu_type and not gpus:
        raise click.UsageError("--gpu-type and --no-gpus exclude each other: give one of them")
    job = Job(command, nodes, ranks_per_node, gpus, gpu_type, image, name)
    click.echo(manifest(job, cast(Scheduler, scheduler)), nl=False)
