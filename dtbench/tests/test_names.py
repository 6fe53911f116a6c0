"""One machine or system, however it is spelt."""

from __future__ import annotations

import pytest

from dtbench.cli.compare import public_systems
from dtbench.comparison.references import find_systems
from dtbench.cost.plan.machines import built_in, find_machine, machine_called
from dtbench.errors import UsageError
from dtbench.tests.made_up import Cli


@pytest.mark.parametrize("name", built_in())
def test_built_in_machine_has_its_own_name(name: str) -> None:
    assert find_machine(name).name == find_machine(name.upper()).name == name


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        *((spelt, "h100-8x") for spelt in ("8xH100", "8x-h100", "H100_8x", "8xH100-AWS-p5", "8xH100-HBM3")),
        ("8xH100-fsdp", "h100-8x-fsdp"),
        ("8xRTX-Pro-6000", "rtx-pro-6000-8x"),
        ("8xMI300X", "mi300x-8x"),
        ("72xGB200-NVL72", "gb200"),
    ],
)
def test_machine_is_found_however_it_is_spelt(spelt: str, name: str) -> None:
    assert find_machine(spelt).name == name


@pytest.mark.parametrize(
    ("spelt", "near"),
    [
        ("8xA100-SXM4-40GB", "a100-8x"),
        ("4xH100", "h100-8x"),
        ("h1000-8x", "h100-8x"),
        ("8xA100-PCIe", "a100-8x"),
    ],
)
def test_machine_of_other_memory_bus_or_count_is_refused(spelt: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"--machine {spelt}: unknown machine; nearest are .*{near}"):
        find_machine(spelt)


def test_system_is_found_however_it_is_spelt() -> None:
    systems = tuple(public_systems())

    def named(name: str) -> list[str]:
        return [system.name for system in find_systems(systems, name)]

    kind = named("8xH100")
    assert {"8xH100-AWS-p5", "8xH100-HBM3"} < set(kind)
    assert all(name.lower().startswith("8xh100") for name in kind)
    assert kind == named("h100-8x") == named("8X-h100") == named("H100_8x")
    assert named("8xh100-aws-P5") == named("h100-8x-aws-p5") == ["8xH100-AWS-p5"]
    assert all(named(system.name) == [system.name] for system in systems)
    with pytest.raises(UsageError, match=r"'8xH1000-AWS': nearest are .*8xH100-AWS-p5.*; expected one of"):
        named("8xH1000-AWS")


def test_plan_takes_the_names_of_compare(dtbench: Cli) -> None:
    job = ("--model", "llama-8b", "--gpus", "8", "--batch", "32", "--json")
    outputs = {dtbench("plan", *job, "--machine", name) for name in ("h100-8x", "8xH100", "8xH100-AWS-p5")}
    assert len(outputs) == 1 and outputs.pop()[0] == 0


def test_table_of_steps_names_a_system_by_count() -> None:
    assert [machine_called(name) for name in ("8xH100", "8xb200", "DGX-H100", "2x")] == [
        "h100-8x",
        "b200-8x",
        "h100-8x",
        None,
    ]
