"""The files of how-to/launch.md: a shell, YAML and the schedulers' own readers find the same command in each."""

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from string import Template

import pytest
import yaml

from dtbench.tests.test_docs import ROOT, blocks

FILES = {name: text for _, name, text in blocks(ROOT / "docs" / "pages" / "how-to" / "launch.md")}
TORCHRUN = [
    *("--nnodes", "2", "--nproc-per-node", "8", "--node-rank", "1"),
    *("--master-addr", "host-a", "--master-port", "29500"),
]
COMMAND = ["--no-python", "dtbench", "run", "collectives", "--mesh", "dp=2,tp=8", "-o", "run.jsonl"]
Bash = Callable[[list[str], dict[str, str]], list[str]]


@pytest.fixture
def bash(tmp_path: Path) -> Bash:
    """Runs a script like a node's shell and returns the arguments that it passes to torchrun."""
    for name, text in (
        ("torchrun", "printf '%s\\0' \"$@\""),
        ("scontrol", "printf 'host-a\\nhost-b\\n'"),
        ("srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(words: list[str], env: dict[str, str]) -> list[str]:
        env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(["bash", *words], env=env, capture_output=True, text=True, check=True)
        assert not done.stderr
        return done.stdout.split("\0")[:-1]

    return run


def test_an_sbatch_script_starts_the_command(bash: Bash, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(FILES["job.sh"])
    env = {"SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_NODEID": "1"}
    assert bash([str(tmp_path / "job.sh")], env) == [*TORCHRUN, *COMMAND]
    options = {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"}
    assert options <= set(FILES["job.sh"].splitlines())


def test_a_skypilot_task_starts_the_command(bash: Bash) -> None:
    task = yaml.safe_load(FILES["task.yaml"])
    env = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "host-a\nhost-b"}
    assert bash(["-c", task["run"]], env) == [*TORCHRUN, *COMMAND]
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")


def test_a_trainjob_holds_the_command() -> None:
    """trainer.kubeflow.org/v1alpha1: https://www.kubeflow.org/docs/components/trainer/."""
    job = yaml.safe_load(FILES["job.yaml"])
    trainer = job["spec"]["trainer"]
    assert trainer["command"] + trainer["args"] == ["torchrun", *COMMAND[:-1], "/data/run.jsonl"]
    assert (job["apiVersion"], job["kind"], trainer["numNodes"], trainer["numProcPerNode"]) == (
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        2,
        8,
    )


def test_a_torchx_component_starts_the_command(bash: Bash, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = types.SimpleNamespace(**dict.fromkeys(("AppDef", "Role", "Resource"), types.SimpleNamespace))
    monkeypatch.setitem(sys.modules, "torchx", types.SimpleNamespace(specs=specs))
    monkeypatch.setitem(sys.modules, "torchx.specs", specs)
    names: dict[str, Callable[..., types.SimpleNamespace]] = {}
    exec(FILES["component.py"], names)
    (role,) = names["job"](cpu=8, mem_mb=1000).roles
    assert (role.num_replicas, role.resource.gpu) == (2, 8)
    # Fills in a role's arguments like torchx.specs.macros.Values.apply.
    arguments = [
        Template(word).safe_substitute({"replica_id": "1", "rank0_env": "FIRST_HOST"}) for word in role.args
    ]
    assert bash(arguments, {"FIRST_HOST": "host-a"}) == [*TORCHRUN, *COMMAND]
