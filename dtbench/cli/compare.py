"""`dtbench compare` on the command line."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtbench.cli import options

if TYPE_CHECKING:
    from dtbench.comparison.references import System


@click.command("compare")
@click.argument("base", type=options.FILE, metavar="BASE")
@click.argument("head", required=False, type=options.FILE)
@click.option(
    "--reference", is_flag=True, help="Instead: compare BASE with public systems that have the same GPUs."
)
@click.option("--system", metavar="NAME", help="With --reference: the public system to compare with.")
@click.option("--all", "with_all", is_flag=True, help="With --reference: also print every ratio.")
@options.JSON
@options.EXPORT
def compare_command(
    base: Path,
    head: Path | None,
    reference: bool,
    system: str | None,
    with_all: bool,
    as_json: bool,
    exports: options.Exports,
) -> int:
    """Compares HEAD with BASE. Exit code 1 if any case became slower.

    Exit code 3 if the result is inconclusive: too few launches, or different hardware, ranks or threads.

    BASE is a run file, or the name of a baseline of `dtbench run --save-baseline`. Two topologies of `dtbench
    calibrate` are compared by mesh dim and call.

    With --reference, compares the bus bandwidths of BASE from 64 MiB on with those published for the same GPUs, ranks
    and hosts: exit code 1 if they are lower, 3 if inconclusive, 4 without a reference.

    \b
    Examples:
      dtbench compare base.jsonl head.jsonl
      dtbench compare may.topology.json june.topology.json
      dtbench compare run.jsonl --reference --system 8xA100-SXM4-40GB
    """
    from dtbench.file_kinds import kind_of
    from dtbench.records.run import read_run

    if reference == (head is not None):
        raise click.UsageError("give BASE and HEAD, or --reference and one run")
    if head is None:
        if exports:
            raise click.UsageError(
                "--export writes the times of HEAD: give BASE and HEAD, or use `dtbench show`"
            )
        return _compare_with_reference(base, system, with_all, as_json)
    if system is not None or with_all:
        raise click.UsageError(f"{'--all' if with_all else '--system'} requires --reference")
    if kind_of(base) == "topology":  # then HEAD has to be one, too
        if exports:
            raise click.UsageError(
                "--export writes times of runs, but these are topologies: use --json instead"
            )
        from dtbench.comparison.topology_comparison import compare_topologies, print_topology_comparison
        from dtbench.records.topology import read_topology

        topologies = compare_topologies(read_topology(base), read_topology(head))
        print_topology_comparison(topologies, as_json)
        return topologies.exit_code
    from dtbench.comparison.run_comparison import compare_runs, print_comparison
    from dtbench.records import baselines
    from dtbench.records.exports import write_exports

    paths = (baselines.find_run_file(base), head)
    comparison = compare_runs(*([read_run(path, with_samples=False)] for path in paths))
    print_comparison(comparison, as_json)
    if exports:
        write_exports(comparison.points, exports)
    return comparison.exit_code


def _compare_with_reference(run: Path, system: str | None, with_all: bool, as_json: bool) -> int:
    import msgspec

    from dtbench.comparison import references
    from dtbench.records.run import read_run
    from dtbench.text.terminal import print_json

    comparison = references.compare_with_reference(
        read_run(run, with_samples=False), tuple(public_systems()), system
    )
    if as_json:
        print_json(msgspec.to_builtins(comparison))
    else:
        for line in references.comparison_lines(comparison, with_all):
            click.echo(line)
    return comparison.exit_code


def public_systems() -> "Iterator[System]":
    """Yields the reference systems, then the machines of `dtbench plan` with published collectives.

    Each number of ranks of a machine is a system.
    """
    from msgspec.structs import replace

    from dtbench.comparison.references import PublishedCollective, System, read_systems
    from dtbench.cost.plan.machines import built_in, find_machine
    from dtbench.grouping import group_by

    yield from read_systems()
    # Skips machines whose collectives were measured on another machine.
    machines = [m for m in map(find_machine, built_in()) if m.collectives and not m.stands_in]
    for machine, *_ in group_by(machines, lambda m: m.source).values():  # one machine per source
        gpu = (machine.name.rpartition("-")[0] or machine.name).replace("-", " ").upper()
        tables = machine.all_collectives
        for ranks in sorted({ranks for table in tables.values() for ranks in table}, key=int):
            collectives = {
                name: PublishedCollective(
                    tuple((int(size), us) for size, us in by_ranks[ranks]), machine.source
                )
                for name, by_ranks in tables.items()
                if ranks in by_ranks
            }
            system = System(
                name=f"{ranks}x{machine.name}",
                gpu=gpu,
                ranks=int(ranks),
                hosts=1,
                link="PCIe",
                collectives=collectives,
            )
            sizes = [(name, size) for name, published in collectives.items() for size, _ in published.points]
            # PCIe 5.0 carries 64 GB/s in each direction.
            is_faster = max(system.busbw(*point) or 0.0 for point in sizes) > 64e9
            yield replace(system, link="NVLink") if is_faster else system
