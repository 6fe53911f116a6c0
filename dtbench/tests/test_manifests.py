"""Manifests: a shell, YAML and the schedulers' own readers find in them the command that was given."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from string import Template

import pytest
import yaml

from dtbench.tests.made_up import Cli
from dtbench.world.manifests.schedulers import Job, Scheduler, manifest

HOSTILE = (
    "dtbench", "run", "a b", "it's", 'say "no"', "$HOME", "${HOME}", "$(id)", "$$", "`id`", "\\", "\\n", "a\\",
    "; exit 3 #", "l1\n  l2\n\n#SBATCH --nodes=9\nl3 ", "\ttab", "*", "~", "- a: b", "{{ job }}", "{% raw %}", "%s",
    "'''", '"""', "", " ", "é☃😀", "--nodes", "--", "!bang", "&", "null", "0x1", "${replica_id}", "$(VAR)",
)  # fmt: skip
JOB = Job(HOSTILE, nodes=2, ranks_per_node=4, gpu="H100", image="reg.example/x:1")
TORCHRUN = ["--nnodes", "2", "--nproc-per-node", "4", "--node-rank", "1", "--master-addr", "host-a"]
PORT = ["--master-port", "29500"]
SCHEDULERS: tuple[Scheduler, ...] = ("slurm", "kubeflow", "torchx", "skypilot")


@pytest.fixture
def bash(tmp_path: Path) -> Callable[[list[str], dict[str, str]], list[str]]:
    """What a script calls torchrun with, as a node's shell runs it. srun passes on what follows its options."""
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


Bash = Callable[[list[str], dict[str, str]], list[str]]


def test_an_sbatch_script_starts_the_command(bash: Bash, tmp_path: Path) -> None:
    text = manifest(JOB, "slurm")
    script = tmp_path / "job.sh"
    script.write_text(text)
    found = bash([str(script)], {"SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_NODEID": "1"})
    assert found == [*TORCHRUN, *PORT, "--no-python", *HOSTILE]
    head = text.partition("\nset -eu\n")[0]
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=H100:4\n" in head
    assert "--gpus" not in manifest(Job(("a",), 1, 1, gpus=False), "slurm")


def test_a_skypilot_task_starts_the_command(bash: Bash) -> None:
    task = yaml.safe_load(manifest(JOB, "skypilot"))
    resources = {"accelerators": "H100:4", "image_id": "docker:reg.example/x:1"}
    assert {k: v for k, v in task.items() if k != "run"} == {
        "name": "dtbench",
        "num_nodes": 2,
        "resources": resources,
    }
    found = bash(["-c", task["run"]], {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "host-a\nhost-b"})
    assert found == [*TORCHRUN, *PORT, "--no-python", *HOSTILE]
    assert "resources" not in yaml.safe_load(manifest(Job(("a",), 1, 1, gpus=False), "skypilot"))


def test_a_trainjob_holds_the_command_and_no_field_that_is_not_documented() -> None:
    """trainer.kubeflow.org/v1alpha1: https://www.kubeflow.org/docs/components/trainer/."""
    found = yaml.safe_load(manifest(JOB, "kubeflow"))
    assert found.pop("apiVersion") == "trainer.kubeflow.org/v1alpha1" and found.pop("kind") == "TrainJob"
    arguments = found["spec"]["trainer"].pop("args")
    assert found == {
        "metadata": {"name": "dtbench"},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": "reg.example/x:1",
                "numNodes": 2,
                "numProcPerNode": 4,
                "resourcesPerNode": {"limits": {"nvidia.com/gpu": 4}},
                "command": ["torchrun"],
            },
        },
    }
    # Kubernetes takes `$$` for `$`, and only a single `$` before `(` for the start of a variable.
    assert not any("$" in word.replace("$$", "") for word in arguments)
    assert [word.replace("$$", "$") for word in arguments] == ["--no-python", *HOSTILE]


def test_a_trainjob_is_one_to_kubeflows_own_models() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    found = yaml.safe_load(manifest(JOB, "kubeflow"))
    assert models.TrainerV1alpha1TrainJob.from_dict(found).to_dict() == found


def test_a_torchx_component_starts_the_command(bash: Bash, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = types.SimpleNamespace(**dict.fromkeys(("AppDef", "Role", "Resource"), types.SimpleNamespace))
    monkeypatch.setitem(sys.modules, "torchx", types.SimpleNamespace(specs=specs))
    monkeypatch.setitem(sys.modules, "torchx.specs", specs)
    names: dict[str, Callable[..., types.SimpleNamespace]] = {}
    exec(manifest(JOB, "torchx"), names)
    app = names["job"](cpu=8, mem_mb=1000)
    (role,) = app.roles
    assert (app.name, role.num_replicas, role.resource.gpu, role.image) == (
        "dtbench",
        2,
        4,
        "reg.example/x:1",
    )
    # As torchx.specs.macros.Values.apply fills a role's arguments in.
    values = {"replica_id": "1", "rank0_env": "FIRST_HOST"}
    arguments = [Template(word).safe_substitute(values) for word in role.args]
    found = bash(arguments, {"FIRST_HOST": "host-a"})
    assert found == [*TORCHRUN, *PORT, "--no-python", *HOSTILE]


def test_a_torchx_component_is_one_to_torchx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finder = pytest.importorskip("torchx.specs.finder")
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(manifest(JOB, "torchx"))
    component = finder.get_component("job.py:job")  # runs torchx's validator
    assert component.fn(cpu=8, mem_mb=1000).roles[0].num_replicas == 2


def test_a_skypilot_task_is_one_to_skypilot() -> None:
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml_config(yaml.safe_load(manifest(JOB, "skypilot"))).num_nodes == 2


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_script_is_pythons(scheduler: Scheduler) -> None:
    assert "--no-python" not in manifest(Job(("train.py",), 1, 1, gpu="A100", image="x"), scheduler)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--print slurm", "COMMAND"),
        ("--print cray -- a", "cray"),
        ("--print slurm --nodes 0 -- a", "--nodes"),
        ("--print slurm --name A_b -- a", "--name is 'A_b'"),
        ("--print kubeflow --image a;b -- a", "--image is 'a;b'"),
        ("--print slurm --gpu-type H100:8 -- a", "--gpu-type is 'H100:8'"),
        ("--print slurm --no-gpus --gpu-type H100 -- a", "exclude each other"),
        ("--print skypilot -- a", "give --gpu-type"),
        ("--print torchx -- a", "give --image"),
        ("--print slurm -- --nodes", "expected a program"),
        ("--print slurm -- a b\x1bc", "'\\x1b'"),
        ("--print kubeflow -- a b\u2028", "'\\u2028'"),
    ],
)
def test_what_cannot_be_printed_is_refused_in_a_line(dtbench: Cli, words: str, said: str) -> None:
    code, out, error = dtbench("launch", *words.split(" "))
    assert (code, out) == (2, "") and error.count("\n") == 1 and said in error, error


def test_the_command_line_prints_a_manifest(dtbench: Cli) -> None:
    words = [
        "launch",
        "--print",
        "slurm",
        "--nodes",
        "2",
        "--ranks-per-node",
        "4",
        "--",
        "dtbench",
        "run",
        "--mesh",
        "dp=8",
    ]
    code, out, error = dtbench(*words)
    assert (code, error) == (0, "") and out.endswith("torchrun --no-python dtbench run --mesh dp=8\n")
