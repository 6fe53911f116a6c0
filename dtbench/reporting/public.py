"""Published collectives: the reference systems, and the machines of `dtbench plan`."""

from __future__ import annotations

from collections.abc import Iterator

from dtbench.comparison.references import PublishedCollective, System, read_systems
from dtbench.cost.plan.machines import MachineSpec, built_in, find_machine


def public_systems() -> tuple[System, ...]:
    """All of them; a machine as one system for each number of ranks."""
    return (*read_systems(), *_of_machines())


def _of_machines() -> Iterator[System]:
    seen: set[str] = set()
    for machine in map(find_machine, built_in()):
        # Those that another stands in for, or that differ by software, hold nothing new.
        if machine.collectives and not machine.stands_in and machine.source not in seen:
            seen.add(machine.source)
            yield from _systems(machine)


def _systems(machine: MachineSpec) -> Iterator[System]:
    gpu = machine.name.rpartition("-")[0] or machine.name
    tables = machine.all_collectives
    for ranks in sorted({ranks for table in tables.values() for ranks in table}, key=int):
        yield System(
            name=f"{ranks}x{machine.name}",
            gpu=gpu.replace("-", " ").upper(),
            ranks=int(ranks),
            hosts=1,
            link="one node",
            collectives={
                name: PublishedCollective(
                    points=tuple((int(size), us) for size, us in table[ranks]), source=machine.source
                )
                for name, table in tables.items()
                if ranks in table
            },
        )
