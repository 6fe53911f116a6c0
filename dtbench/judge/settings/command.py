"""`dtbench settings` on the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from dtbench import flags


@click.group("settings")
def settings_command() -> None:
    """Which values to set, out of measurements.

    \b
    Example:
      dtbench settings buckets buckets.jsonl
    """


@settings_command.command("buckets")
@flags.RUNS
@click.option(
    "--split",
    is_flag=True,
    help="Choose on random halves of the launches, too, and show the mean loss on the others.",
)
@flags.JSON
def buckets_command(runs: tuple[Path, ...], split: bool, as_json: bool) -> None:
    """The smallest bucket of gradients within 5% of the best rate.

    RUNs are of the suite `bucketer`. Printed as `bucket_cap_mb`, which DDP and inductor count in MiB.

    \b
    Example:
      dtbench run bucketer --size 1MiB:64MiB:2x --launches 5 -o buckets.jsonl
      dtbench settings buckets buckets.jsonl
    """
    from dtbench.files.run import read_run
    from dtbench.judge.settings.buckets import INDUCTOR, choose, held_out_loss, sweeps_of
    from dtbench.terminal import new_console, print_columns, print_json, print_line
    from dtbench.units import format_size

    sweeps = sweeps_of([read_run(path) for path in runs])
    choices = [choose(sweep) for sweep in sweeps]
    checked = [held_out_loss(sweep) if split else None for sweep in sweeps]
    if as_json:
        rows = [
            dataclasses.asdict(c) | {"bucket_cap_mb": c.cap_mb, "held_out_loss": loss}
            for c, loss in zip(choices, checked, strict=True)
        ]
        print_json({"kind": "settings of buckets", "rows": rows})
        return
    console = new_console()
    words = [
        ("mesh dim", [c.group[0] for c in choices]),
        ("ranks", [str(c.group[1]) for c in choices]),
        ("dtype", [c.group[2] for c in choices]),
        ("tensors", [format_size(c.group[3]) for c in choices]),
    ]
    figures = [
        ("launches", [str(c.launches) for c in choices]),
        ("bucket_cap_mb", [f"{c.cap_mb:g}" for c in choices]),
        (
            "90% interval",
            [
                "-" if c.low is None or c.high is None else f"{c.low / 2**20:g} to {c.high / 2**20:g}"
                for c in choices
            ],
        ),
        ("fastest", [f"{c.fastest / 2**20:g}" for c in choices]),
        ("loss", [f"{c.loss:.1%}" for c in choices]),
    ]
    if split:
        figures.append(
            ("loss on the other launches", [f"{loss:.1%}" for loss in checked if loss is not None])
        )
    print_columns(console, words, figures)
    print_line(console, "DDP: DistributedDataParallel(model, bucket_cap_mb=...), MiB")
    print_line(
        console,
        "inductor: torch._inductor.config.aten_distributed_optimizations."
        "pre_bucketing_fsdp_collectives_bucket_cap_mb = ..., MiB",
    )
    print_line(console, INDUCTOR)


@settings_command.command("nccl")
@click.argument("runs", nargs=-1, type=flags.FILE, metavar="[RUN]...")
@click.option(
    "--arm",
    "arms",
    type=(str, flags.FILE),
    multiple=True,
    metavar="VARIABLES RUN",
    help="A RUN that does not know its variables, as an imported log: `--arm NCCL_ALGO=Ring,NCCL_PROTO=LL ring.jsonl`; "
    "`--arm '' RUN` forced nothing. Repeatable.",
)
@click.option(
    "--nodes", type=click.IntRange(1), show_default="any", help="For communicators over so many nodes only."
)
@click.option("-o", "--output", type=flags.FILE, help="The file of the tuner plugin to write.")
@click.option(
    "--selftest",
    type=flags.FILE,
    metavar="CSV",
    help="Instead: how often the choice is wrong with the noise of real launches, a row each, columns SIZE_oop in us.",
)
def nccl_command(
    runs: tuple[Path, ...],
    arms: tuple[tuple[str, Path], ...],
    nodes: int | None,
    output: Path | None,
    selftest: Path | None,
) -> None:
    """Algorithm and protocol per size, for NCCL's tuner plugin.

    RUNs are launches of `dtbench sweep-env`: with forced variables and without. A setting is chosen for a size only
    where the gate's test shows that it is faster than what NCCL chooses itself.

    \b
    Example:
      dtbench settings nccl sweep/*.jsonl -o tuner.csv
    """
    from dtbench.files.atomic import write_atomically
    from dtbench.files.run import read_run
    from dtbench.judge.gate.arms import parse_variables
    from dtbench.judge.settings.nccl import HEAD, rows_of, times_of, winners_of
    from dtbench.terminal import new_console, print_columns, print_line
    from dtbench.units import format_size

    if selftest is not None:
        if runs or arms or output:
            raise click.UsageError("--selftest takes a table of times and nothing else")
        _selftest(selftest)
        return
    read = [(None, read_run(path)) for path in runs]
    given = [(tuple(sorted(parse_variables(text).items())), read_run(path)) for text, path in arms]
    winners = winners_of(times_of([*read, *given]))
    console = new_console()
    shown = [w for w in winners if w.effect is not None]
    print_columns(
        console,
        [("collective", [str(dict(w.case)["collective"]) for w in shown])],
        [
            ("ranks", [str(dict(w.case).get("ranks", "-")) for w in shown]),
            ("size", [format_size(w.size) for w in shown]),
            ("time, of that as it comes", [f"{w.effect.ratio:.3f}" for w in shown if w.effect]),
            ("95% bound", [f"{w.effect.high:.3f}" for w in shown if w.effect]),
            ("pairs", [str(w.effect.pairs) for w in shown if w.effect]),
        ],
        [("winner", [" ".join("=".join(pair) for pair in w.arm) for w in shown])],
    )
    print_line(console, f"{len(shown)} of {len(winners)} sizes have a winner; the others are left to NCCL")
    if output is not None:
        text = HEAD + "".join(row + "\n" for row in rows_of(winners, nodes or -1))
        write_atomically(
            output, text, lambda head: head.startswith(HEAD[:40]), "file of `dtbench settings nccl`"
        )
        print_line(console, f"the plugin's file is {output}")


def _selftest(path: Path) -> None:
    from dtbench.judge.settings.selftest import SCENARIOS, errors_of, read_times
    from dtbench.terminal import new_console, print_columns, print_line

    arms, launches, trials = 4, 12, 200
    sizes, times = read_times(path)
    rows = [
        (title, how, errors)
        for title, changes in SCENARIOS.items()
        for how, errors in errors_of(sizes, times, arms, launches, trials, changes).items()
    ]
    console = new_console()
    print_line(
        console,
        f"{trials} sweeps of {arms} arms in {launches} launches, {len(sizes)} sizes; judged on launches held out",
    )
    print_columns(
        console,
        [("the arms are", [title for title, _, _ in rows]), ("chosen by", [how for _, how, _ in rows])],
        [
            ("sizes changed", [f"{e.changed:.1%}" for *_, e in rows]),
            ("of them slower", [f"{e.slower:.1%}" for *_, e in rows]),
            ("sweeps with one", [f"{e.wrong_trials:.1%}" for *_, e in rows]),
            ("time, mean", [f"{e.mean:+.2%}" for *_, e in rows]),
            ("worst sweep", [f"{e.worst:+.2%}" for *_, e in rows]),
        ],
    )


@click.command("sweep-env", context_settings={"allow_interspersed_args": False})
@click.option(
    "--arm",
    "arms",
    required=True,
    multiple=True,
    metavar="VARIABLES",
    help="NCCL_ALGO=Ring,NCCL_PROTO=LL; repeatable.",
)
@click.option("--launches", type=click.IntRange(1, 10_000), default=10, help="Of each arm.")
@click.option("--seed", type=int, default=0, help="Of their order.")
@click.option("-o", "--output", "folder", default="sweep", help="The folder for their files.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def sweep_env_command(
    arms: tuple[str, ...], launches: int, seed: int, folder: str, command: tuple[str, ...]
) -> None:
    """Plans runs with forced variables as arms of one sweep.

    Prints a shell script of fresh launches of COMMAND, which is `dtbench run ...` under any launcher: with the
    variables of each arm and as it comes, in turns.

    \b
    Example:
      dtbench sweep-env --arm NCCL_ALGO=Ring,NCCL_PROTO=LL --arm NCCL_ALGO=Tree,NCCL_PROTO=LL --launches 12 -- \\
        torchrun --nproc-per-node 8 --no-python dtbench run collectives --filter all_reduce --mesh tp=8 > sweep.sh
    """
    from dtbench.judge.settings.sweep import script

    click.echo(script(arms, command, launches, folder, seed), nl=False)
