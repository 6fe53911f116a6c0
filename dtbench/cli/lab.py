"""`dtbench lab`: the commands."""

from __future__ import annotations

import click

from dtbench.suite.errors import UsageError
from dtbench.tests.lab import network

_RATE_HELP = "Of each host's link, each way: 100mbit, 1.6gbit."
_NAME_OPTION = click.option("--name", default=network.DEFAULT_NAME, help="Of the lab; host 0 is NAME-0.")


@click.group("lab")
def lab_command() -> None:
    """Several hosts on this machine, with links of a set rate.

    They are network namespaces. Needs Linux, root, iproute2 and util-linux. This machine's own network stays as it is.

    \b
    Example:
      dtbench lab run --hosts 2 --rate 400mbit --ranks-per-host 2 -- dtbench run --device cpu --mesh dp=2,tp=2
    """


@lab_command.command()
@click.option("--hosts", type=int, default=2, help="How many.")
@click.option("--rate", required=True, metavar="RATE", help=_RATE_HELP)
@_NAME_OPTION
def up(hosts: int, rate: str, name: str) -> None:
    """Makes the hosts and their links."""
    made = network.Lab(name, hosts, network.parse_rate(rate))
    if network.is_temporary(name):
        raise UsageError(f"--name {name}: t and a number name labs that end with a `lab run`; give another")
    network.require_abilities()
    network.up(made)
    click.echo(describe(made))


@lab_command.command(context_settings={"allow_interspersed_args": False})
@click.option("--ranks-per-host", type=click.IntRange(1), default=1, help="How many in each.")
@_NAME_OPTION
@click.option("--hosts", type=int, help="Make a lab of so many hosts for this command only; with --rate.")
@click.option("--rate", metavar="RATE", help=_RATE_HELP)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def run(ranks_per_host: int, name: str, hosts: int | None, rate: str | None, command: tuple[str, ...]) -> int:
    """Runs COMMAND on ranks in every host.

    It is `dtbench run ...`, a script.py or a program. Each host has an agent of torch's elastic launcher, as under
    torchrun; ranks are numbered host by host. The first host's output is shown. The exit code is the command's.
    """
    from dtbench.tests.lab.run import program_of
    from dtbench.tests.lab.run import run as run_on_hosts

    if (hosts is None) != (rate is None):
        raise click.UsageError("--hosts and --rate go together: they make a lab for this command")
    program_of(command)  # refused before a lab is made for it
    if hosts is None or rate is None:
        network.require_abilities()
        return run_on_hosts(network.find(name), ranks_per_host, command)
    own = network.Lab(network.temporary_name(), hosts, network.parse_rate(rate))
    network.require_abilities()
    with network.temporary(own):
        return run_on_hosts(own, ranks_per_host, command)


@lab_command.command()
@_NAME_OPTION
@click.option("--all", "every", is_flag=True, help="All labs of this machine.")
def down(name: str, every: bool) -> None:
    """Ends what runs in a lab and removes it."""
    network.check_name(name)
    network.require_abilities()
    gone = [found for found in (network.names() if every else [name]) if network.down(found)]
    for found in gone:
        click.echo(f"the lab {found} is gone")
    if not gone:
        click.echo("there is no lab" if every else f"there is no lab {name}: nothing to take down")


@lab_command.command()
def status() -> None:
    """The labs of this machine."""
    network.require_abilities()
    names = network.names()
    for name in names:
        click.echo(_state_of(name))
    if not names:
        click.echo("there is no lab")


def _state_of(name: str) -> str:
    try:
        found = network.find(name)
    except UsageError as error:
        return str(error)
    count = sum(len(network.pids_in(namespace)) for namespace in found.namespaces)
    return f"{describe(found)}; {count} processes"


def describe(lab: network.Lab) -> str:
    """A lab in one line."""
    rate = network.format_rate(lab.rate_bit_per_s)
    most = lab.goodput_bytes_per_s / 1e6
    names = f"{lab.hostnames[0]} to {lab.hostnames[-1]}"
    return f"lab {lab.name}: {lab.hosts} hosts ({names}), {rate} each way, at most {most:.4g} MB/s of data"
