"""Fills in the manifest of a scheduler. Whatever a command's arguments hold, they arrive as they were given.

Known formats: sbatch and srun of Slurm 20.11 and newer; `TrainJob` of trainer.kubeflow.org/v1alpha1 with the runtime
`torch-distributed`, which sets torchrun's PET_* variables; a component of TorchX 0.7; a task of SkyPilot 0.14.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2

from dtbench.errors import UsageError

Scheduler = Literal["slurm", "kubeflow", "torchx", "skypilot"]
# The least that all four take: a label of RFC 1035, as Kubernetes wants it.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
# `A100`, `A100-80GB`; Slurm has lower-case ones, some with dots.
_GPU = re.compile(r"[A-Za-z0-9][\w.-]*")
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*")
MASTER_PORT = 29500  # torchrun's default


@dataclass(frozen=True)
class Job:
    """What is to run where. gpus: whether each rank has one; gpu: their type, as the scheduler spells it."""

    command: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    gpus: bool = True
    gpu: str = ""
    image: str = ""
    name: str = "dtbench"


def manifest(job: Job, scheduler: Scheduler) -> str:
    """The text of the manifest.

    Raises:
        UsageError: a name, image or type of GPU that no scheduler takes, an argument that cannot be written as text,
            or something that this scheduler needs and was not given.
    """
    _check(job, scheduler)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )
    environment.filters |= {"shell": shlex.join, "yaml": _yaml, "python": ascii, "dollars": _doubled}
    program = [*([] if job.command[0].endswith(".py") else ["--no-python"]), *job.command]
    template = environment.get_template(f"{scheduler}.jinja")
    return template.render(job=job, program=program, port=MASTER_PORT)


def _check(job: Job, scheduler: Scheduler) -> None:
    for what, pattern, text, example in (
        ("--name", _NAME, job.name, "lower-case letters, digits and hyphens, at most 63, such as dtbench-8"),
        ("--gpu-type", _GPU, job.gpu or "a", "the scheduler's word for it, such as H100"),
        ("--image", _IMAGE, job.image or "a", "an image's name, such as registry.example/pytorch:2.13"),
    ):
        if not pattern.fullmatch(text):
            raise UsageError(f"{what} is {text!r}, expected {example}")
    if not job.command[0] or job.command[0].startswith("-"):
        raise UsageError(
            f"got the command {job.command[0]!r}, expected a program or a script.py and its arguments"
        )
    for argument in job.command:
        if bad := next((c for c in argument if not c.isprintable() and c not in "\n\t"), None):
            raise UsageError(
                f"the argument {argument!r} holds {bad!r}, which a manifest cannot hold as text: put it into a file"
            )
    if scheduler == "skypilot" and job.gpus and not job.gpu:
        raise UsageError("a SkyPilot task names its GPUs: give --gpu-type, such as H100, or --no-gpus")
    if scheduler == "torchx" and not job.image:
        raise UsageError("a TorchX role needs an image: give --image")


def _yaml(text: str) -> str:
    """A scalar between double quotes: JSON's escapes of printable text, line ends and tabs are YAML's, too."""
    return json.dumps(text, ensure_ascii=False)


def _doubled(words: Sequence[str]) -> list[str]:
    """For readers that put values in where `$` stands, and take two for one: Kubernetes and TorchX."""
    return [word.replace("$", "$$") for word in words]
