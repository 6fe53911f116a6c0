"""`dtbench settings` on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtbench.cli import options
from dtbench.suite.errors import UsageError

if TYPE_CHECKING:
    from dtbench.cost.settings.buckets import Choice
    from dtbench.cost.settings.nccl import Winner


_NO_RUN = (
    "RUN missing: give runs of bucketer, of collectives with forced NCCL_ALGO and NCCL_PROTO beside free ones, or "
    "--sweep VARIABLES -- COMMAND, which plans these"
)


class _Settings(options.AdvancedCommand):
    first = ("--json", "-o", "--sweep", "--launches")


@click.command("settings", cls=_Settings)
@click.argument("words", nargs=-1, metavar="[RUN]... | --sweep VARIABLES -- COMMAND...")
@options.JSON
@click.option(
    "-o", "--output", metavar="PATH", help="The file of NCCL's tuner plugin; the folder of a sweep."
)
@click.option(
    "--sweep",
    "forced",
    multiple=True,
    metavar="VARIABLES",
    help="Print the launches of COMMAND with these variables and without: NCCL_ALGO=Ring,NCCL_PROTO=LL. Repeatable.",
)
@click.option(
    "--launches", type=click.IntRange(1, 10_000), default=10, help="Of a sweep, for each VARIABLES."
)
@click.option("--seed", type=int, default=0, help="Of the order of a sweep.")
@click.option(
    "--split",
    is_flag=True,
    help="Choose buckets on random halves of the launches, too, and show the mean loss on the others.",
)
@click.option(
    "--arm",
    "arms",
    type=(str, options.FILE),
    multiple=True,
    metavar="VARIABLES RUN",
    help="A RUN that does not know its variables, as an imported log: `--arm NCCL_ALGO=Ring,NCCL_PROTO=LL ring.jsonl`; "
    "`--arm '' RUN` forced nothing. Repeatable.",
)
@click.option(
    "--nodes", type=click.IntRange(1), show_default="any", help="For communicators over so many nodes only."
)
def settings_command(
    words: tuple[str, ...],
    as_json: bool,
    output: str | None,
    forced: tuple[str, ...],
    launches: int,
    seed: int,
    split: bool,
    arms: tuple[tuple[str, Path], ...],
    nodes: int | None,
) -> None:
    """Which values to set: bucket sizes and NCCL's variables.

    Of runs of the suite bucketer: the smallest bucket of gradients within 5% of the best rate, as bucket_cap_mb,
    which DDP and inductor count in MiB. Of runs of collectives with forced variables and without: algorithm and
    protocol per size, for NCCL's tuner plugin, where the gate's test shows that it is faster than NCCL's default.

    With --sweep: a shell script of such runs. COMMAND is `dtbench run ...` under any launcher.

    \b
    Examples:
      dtbench settings buckets.jsonl
      dtbench settings --sweep NCCL_ALGO=Tree,NCCL_PROTO=LL -o sweep -- \\
        torchrun --nproc-per-node 8 --no-python dtbench run collectives > sweep.sh
      dtbench settings sweep/*.jsonl -o tuner.csv
    """
    if forced:
        from dtbench.cost.settings.sweep import script

        click.echo(script(forced, words, launches, "sweep" if output is None else output, seed), nl=False)
        return
    from dtbench.cost.settings.buckets import MEASURE, choose, held_out_loss, sweeps_of
    from dtbench.cost.settings.nccl import arm_of, times_of, winners_of
    from dtbench.records.run import read_run
    from dtbench.text.variables import parse_variables

    if not words and not arms:
        raise UsageError(_NO_RUN)
    runs = [read_run(Path(word)) for word in words]
    given = [(tuple(sorted(parse_variables(text).items())), read_run(path)) for text, path in arms]
    buckets = any(run.ok("bucketer") for run in runs)
    if runs and not buckets and not any(run.ok("collectives") for run in runs):
        raise UsageError(f"nothing to choose from: expected runs of bucketer or of collectives; {MEASURE}")
    swept = bool(given) or not buckets or any(arm_of(run.header.env) for run in runs)
    sweeps = sweeps_of(runs) if buckets else []
    choices = [choose(sweep) for sweep in sweeps]
    losses = [held_out_loss(sweep) if split else None for sweep in sweeps]
    winners = winners_of(times_of([*((None, run) for run in runs), *given])) if swept else []
    if as_json:
        _print_as_json(choices, losses, winners)
    else:
        if choices:
            _print_buckets(choices, losses)
        if winners:
            _print_winners(winners)
    if output is not None:
        _write_tuner(Path(output), winners, nodes or -1)


def _print_as_json(
    choices: Sequence[Choice], losses: Sequence[float | None], winners: Sequence[Winner]
) -> None:
    from dtbench.text.masking import mask_variables
    from dtbench.text.terminal import print_json

    buckets = [
        dataclasses.asdict(c) | {"bucket_cap_mb": c.cap_mb, "held_out_loss": loss}
        for c, loss in zip(choices, losses, strict=True)
    ]
    nccl = [
        {
            **dict(w.case),
            "size": w.size,
            "variables": mask_variables(dict(w.arm)),
        }
        | ({"ratio": w.effect.ratio, "high": w.effect.high, "pairs": w.effect.pairs} if w.effect else {})
        for w in winners
    ]
    print_json({"kind": "settings", "buckets": buckets, "nccl": nccl})


def _print_buckets(choices: Sequence[Choice], losses: Sequence[float | None]) -> None:
    from dtbench.cost.settings.buckets import INDUCTOR, MEASURE, MIB
    from dtbench.text.terminal import new_console, print_columns, print_line
    from dtbench.text.units import format_size

    console = new_console()
    words = [
        ("mesh dim", [c.group[0] for c in choices]),
        ("ranks", [str(c.group[1]) for c in choices]),
        ("dtype", [c.group[2] for c in choices]),
        ("tensors", [format_size(c.group[3]) for c in choices]),
    ]
    bounds = [
        "-" if c.low is None or c.high is None else f"{c.low / MIB:g} to {c.high / MIB:g}" for c in choices
    ]
    figures = [
        ("launches", [str(c.launches) for c in choices]),
        ("bucket_cap_mb", ["-" if c.cap_mb is None else f"{c.cap_mb:g}" for c in choices]),
        ("90% interval", bounds),
        ("fastest", [f"{c.fastest / MIB:g}" for c in choices]),
        ("loss", [f"{c.loss:.1%}" for c in choices]),
    ]
    if any(loss is not None for loss in losses):
        figures.append(("loss on the other launches", [f"{loss:.1%}" for loss in losses if loss is not None]))
    print_columns(console, words, figures)
    for edge in dict.fromkeys(c.edge for c in choices if c.edge):
        print_line(console, f"no bucket_cap_mb: {edge}; {MEASURE}, with sizes beyond it")
    print_line(console, "DDP: DistributedDataParallel(model, bucket_cap_mb=...), MiB")
    print_line(
        console,
        "inductor: torch._inductor.config.aten_distributed_optimizations."
        "pre_bucketing_fsdp_collectives_bucket_cap_mb = ..., MiB",
    )
    print_line(console, INDUCTOR)


def _print_winners(winners: Sequence[Winner]) -> None:
    from dtbench.text.masking import mask_variables
    from dtbench.text.terminal import new_console, print_columns, print_line
    from dtbench.text.units import format_size

    console = new_console()
    shown = [(w, w.effect) for w in winners if w.effect is not None]
    arms = [mask_variables(dict(w.arm)) for w, _ in shown]
    print_columns(
        console,
        [("collective", [str(dict(w.case)["collective"]) for w, _ in shown])],
        [
            ("ranks", [str(dict(w.case).get("ranks", "-")) for w, _ in shown]),
            ("size", [format_size(w.size) for w, _ in shown]),
            ("time / NCCL's default", [f"{effect.ratio:.3f}" for _, effect in shown]),
            ("95% bound", [f"{effect.high:.3f}" for _, effect in shown]),
            ("pairs", [str(effect.pairs) for _, effect in shown]),
        ],
        [("winner", [" ".join("=".join(pair) for pair in arm.items()) for arm in arms])],
    )
    print_line(console, f"{len(shown)} of {len(winners)} sizes have a winner; the others are left to NCCL")


def _write_tuner(path: Path, winners: Sequence[Winner], nodes: int) -> None:
    from dtbench.cost.settings.nccl import HEAD, rows_of
    from dtbench.records.atomic import write_atomically

    if not winners:
        raise UsageError("-o writes NCCL's settings: give runs of collectives, or leave it out")
    text = HEAD + "".join(row + "\n" for row in rows_of(winners, nodes))
    mark = "# Written by `dtbench settings"
    write_atomically(path, text, lambda head: head.startswith(mark), "file of `dtbench settings`")
    click.echo(f"the plugin's file is {path}", err=True)
