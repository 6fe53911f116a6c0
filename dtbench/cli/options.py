"""Options that several commands take, each with one name and one meaning."""

from pathlib import Path
from typing import Any, TypeAlias

import click
from click.core import ParameterSource

from dtbench.engine.options import (
    DEFAULT_TIMEOUT_S,
    DTYPES,
    SHORT_DTYPES,
    parse_dtypes,
    parse_list,
    parse_sizes,
)
from dtbench.machine.backends import parse_backend
from dtbench.suite import CHOOSABLE_IMPLS
from dtbench.suite.mesh import parse_mesh

# Value of an option as click returns it, not yet validated.
OptionValue: TypeAlias = Any
# Formats with the file to write in each.
Exports: TypeAlias = tuple[tuple[str, Path], ...]


class AdvancedCommand(click.Command):
    """A command whose help lists the options named in `first`, and the others as advanced options."""

    first: tuple[str, ...] = ()

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        shown: list[tuple[str, str]] = []
        advanced: list[tuple[str, str]] = []
        for option in self.get_params(context):
            if isinstance(option, click.Option) and (record := option.get_help_record(context)):
                (shown if {*self.first, "--help"} & {*option.opts} else advanced).append(record)
        for title, records in (("Options", shown), ("Advanced options", advanced)):
            with formatter.section(title):
                formatter.write_dl(records)


def typed(context: click.Context) -> set[str]:
    """Returns the names of parameters given on the command line."""
    return {n for n in context.params if context.get_parameter_source(n) is ParameterSource.COMMANDLINE}


FILE = click.Path(path_type=Path)
RUNS = click.argument("runs", nargs=-1, required=True, type=FILE, metavar="RUN...")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
IMPL = click.option(
    "--impl",
    "impls",
    default=",".join(CHOOSABLE_IMPLS),
    metavar="LIST",
    type=lambda text: parse_list(text, CHOOSABLE_IMPLS, "--impl"),
    help="Implementations to measure. Reference implementations are always measured.",
)
MESH = click.option("--mesh", metavar="DIMS", type=parse_mesh, help="Mesh dims, outermost first: dp=2,tp=2.")
NPROC = click.option(
    "--nproc", type=int, show_default="one per GPU, else 4", help="Number of ranks to start on this host."
)
DEVICE = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
BACKEND = click.option(
    "--backend",
    metavar="NAME",
    type=parse_backend,
    default="auto",
    help="auto: NCCL on GPUs, gloo on CPUs. gloo: also on GPUs, so that several ranks can share a GPU. gloo:tcp, "
    "gloo:tls: a transport of gloo. nccl2, nccl-legacy, torchcomms and others: where torch has them.",
)
SIZE = click.option(
    "--size",
    "sizes_bytes",
    metavar="SIZES",
    type=parse_sizes,
    help="Sizes of the sweeps: 1KiB:16MiB:4x (first, last, factor), 64KiB, or a comma list.",
)
DTYPE = click.option(
    "--dtype",
    "dtypes",
    default="float32",
    metavar="LIST",
    type=parse_dtypes,
    help=f"One or more of {', '.join(DTYPES)}; also {', '.join(SHORT_DTYPES)}.",
)
FILTER = click.option(
    "--filter",
    default="",
    show_default=False,
    metavar="TEXT",
    help="Only cases whose line in `list` contains every word of TEXT. Quoted words are a phrase; NAME=VALUE must "
    "match exactly; size=4KiB works.",
)
TIMEOUT = click.option(
    "--timeout", "timeout_s", default=DEFAULT_TIMEOUT_S, metavar="SECONDS", help="Limit per case."
)


def _export(
    context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> list[tuple[str, Path]]:
    """Returns (format, file) for each FORMAT:FILE, validated before anything is measured."""
    from dtbench.records.exports import FORMATS

    exports = []
    for text in texts:
        name, _, file = text.partition(":")
        if name not in FORMATS or not file:
            raise click.BadParameter(
                f"{text!r}: expected FORMAT:FILE, FORMAT one of {', '.join(FORMATS)}; such as bmf:times.json"
            )
        if name == "hud" and not file.endswith(".json"):
            raise click.BadParameter(
                f"{text!r}: PyTorch's uploader reads only files whose name ends in .json; such as hud:{file}.json"
            )
        if name == "pr-time" and context.command.name != "show":
            raise click.BadParameter(
                f"{text!r}: pr-time has no base; give it to `dtbench show RUN --export {text}`"
            )
        if not Path(file).parent.is_dir():
            raise click.BadParameter(
                f"{text!r}: there is no folder {Path(file).parent}; make it, or name another"
            )
        exports.append((name, Path(file)))
    return exports


EXPORT = click.option(
    "--export",
    "exports",
    multiple=True,
    metavar="FORMAT:FILE",
    callback=_export,
    help="Also write the times for another tool: github (github-action-benchmark), bmf (Bencher), hud (PyTorch's HUD) "
    "or, from `show`, pr-time (pr_time_benchmarks); repeatable.",
)
