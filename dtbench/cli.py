"""The command line. Each command parses its options and hands them to the part that does the work,
which is imported only then: `dtbench --help` must not wait for torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

import dtbench
from dtbench.bench import options as opts
from dtbench.cost.export.command import export
from dtbench.cost.predict.command import predict
from dtbench.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REGRESSION, DtbenchError
from dtbench.mesh import parse_mesh
from dtbench.model import CHOOSABLE_IMPLS
from dtbench.world.lab.command import lab

_T = TypeVar("_T")
_RUN_FILE = click.Path(path_type=Path)


def _parsed(parse: Callable[[str], _T]) -> Callable[[Any, Any, str | None], _T | None]:
    """The callback of an option that a function of `options` parses."""
    return lambda _context, _option, text: None if text is None else parse(text)


def main() -> NoReturn:
    """The program. An error that one line explains is printed as one line, with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(prog_name="dtbench", standalone_mode=False)
    except DtbenchError as error:
        code = _refuse(str(error), error.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "dtbench"
        message = error.format_message().rstrip(".")
        code = _refuse(f"{message}; `{command} --help` shows what there is", error.exit_code)
    except click.ClickException as error:
        code = _refuse(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        code = _refuse("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone
        code = EXIT_OK
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _refuse(text: str, code: int) -> int:
    """One line on stderr, from one rank: in a launched world all ranks come here alike."""
    from dtbench.bench.session import LET_RANK_0_SPEAK_S
    from dtbench.world.ranks import find_place

    try:
        place = find_place()
    except DtbenchError:
        place = None
    if place is not None and place.rank != 0:
        time.sleep(LET_RANK_0_SPEAK_S)
    else:
        click.echo("dtbench: " + " ".join(text.split()), err=True)
    return code


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(dtbench.__version__, prog_name="dtbench")
@click.pass_context
def cli(context: click.Context) -> None:
    """Measures what distributed tensors cost, and turns the measurements into decisions.

    \b
    Exit codes: 0 done, 1 regression, 2 usage or unreadable input, 3 inconclusive,
    4 nothing comparable, 5 a case failed.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command("list")
@click.argument("suite", required=False)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def list_(suite: str | None, as_json: bool) -> None:
    """The suites, or the cases of one (as 4 CPU ranks would measure them)."""
    from dtbench import suite as registry
    from dtbench.bench.session import quiet_torch

    quiet_torch()
    suites = registry.load([suite] if suite else [], all_kinds=True)
    plan = opts.RunOptions().plan("cpu", opts.DEFAULT_CPU_RANKS)
    tasks = opts.list_tasks([s for s in suites if suite or s.by_default], plan)
    if as_json:
        click.echo(json.dumps(_listing(suites, tasks, with_cases=suite is not None), indent=2))
        return
    if suite is None:
        width = max(len(s.name) for s in suites)
        for s in suites:
            count = f"{sum(t.suite is s for t in tasks)} cases" if s.by_default else "only when named"
            click.echo(f"{s.name:{width}}  {s.help} ({count})")
        return
    for name, text in suites[0].options.items():
        click.echo(f"--{name}: {text}")
    for task in tasks:
        click.echo(f"{task.label}  [{', '.join(task.impls)}]")


def _listing(suites: list[Any], tasks: list[opts.Task], *, with_cases: bool) -> list[dict[str, Any]]:
    listing: list[dict[str, Any]] = []
    for suite in suites:
        own = [task for task in tasks if task.suite is suite]
        entry: dict[str, Any] = {
            "suite": suite.name,
            "world": suite.world,
            "help": suite.help,
            "cases": len(own),
        }
        if with_cases:
            entry["cases"] = [
                {"name": t.case.name, "params": dict(t.case.params), "impls": list(t.impls)} for t in own
            ]
        listing.append(entry)
    return listing


@cli.command(context_settings={"ignore_unknown_options": True})  # suites declare some of their own
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SUITE]...")
@click.option(
    "--impl",
    "impls",
    default=",".join(CHOOSABLE_IMPLS),
    show_default=True,
    metavar="LIST",
    callback=_parsed(lambda text: opts.parse_list(text, CHOOSABLE_IMPLS, "--impl")),
    help="Which implementations; the references beside them are always measured.",
)
@click.option(
    "--mesh", metavar="DIMS", callback=_parsed(parse_mesh), help="Mesh dims, outermost first: dp=2,tp=2."
)
@click.option("--nproc", type=int, help="Ranks to start here [default: one per GPU, else 4].")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--size",
    "sizes",
    metavar="SIZES",
    callback=_parsed(opts.parse_sizes),
    help="Sizes of the sweeps: 1KiB:16MiB:4x (first, last, factor), 64KiB, or a comma list.",
)
@click.option(
    "--max-size",
    "max_size_bytes",
    metavar="SIZE",
    callback=_parsed(opts.parse_size),
    help="A run to calibrate with: the largest payload you plan. Sweeps go from 1 KiB to it by 4x, with "
    "--refine and --launches 5.",
)
@click.option(
    "--refine/--no-refine",
    default=None,
    help="Measure further sizes where neighbours miss a size between them by over 10 % and over its noise "
    "(collectives, redistribute) [default: with --max-size].",
)
@click.option(
    "--dtype",
    "dtypes",
    default="float32",
    show_default=True,
    metavar="LIST",
    callback=_parsed(lambda text: opts.parse_list(text, opts.DTYPES, "--dtype")),
)
@click.option(
    "--filter", "text", default="", metavar="TEXT", help="Only cases whose line in `list` holds TEXT."
)
@click.option("--quick", is_flag=True, help="Fewer sizes and samples.")
@click.option(
    "--launches",
    type=int,
    metavar="K",
    help=f"Repeat everything in K fresh worlds [default: {opts.CALIBRATION_LAUNCHES} with --max-size, else 1].",
)
@click.option(
    "--timeout", "timeout_s", default=opts.DEFAULT_TIMEOUT_S, show_default=True, help="Seconds per case."
)
@click.option("--resume", is_flag=True, help="Go on with the run in -o FILE.")
@click.option("-o", "--output", type=_RUN_FILE, help="The run file to write [default: run-TIME.jsonl].")
def run(text: str, sizes: Any, words: tuple[str, ...], launches: int | None, **given: Any) -> int:
    """Measures the suites (names or paths of .py files; all but `coverage` when none is named).

    Starts its own ranks, or joins the world of torchrun or Slurm when started by them. A suite may have
    options of its own, which `dtbench list SUITE` shows.
    """
    from dtbench.bench.run import run as run_suites

    suites, own = opts.split_words(words)
    if launches is None:
        launches = 1 if given["max_size_bytes"] is None else opts.CALIBRATION_LAUNCHES
    options = opts.RunOptions(
        suites=suites, sizes_bytes=sizes, filter=text, suite_options=own, launches=launches, **given
    )
    return run_suites(options, sys.argv[1:])


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=_RUN_FILE, metavar="RUN...")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--csv", "as_csv", is_flag=True, help="One line per result, for spreadsheets.")
def show(runs: tuple[Path, ...], as_json: bool, as_csv: bool) -> None:
    """Tables of the results in run files."""
    from dtbench.files.store import read_run
    from dtbench.show.tables import print_csv, print_runs

    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other: give one of them")
    read = [read_run(path) for path in runs]
    if as_csv:
        print_csv(read)
    else:
        print_runs(read, as_json)


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=_RUN_FILE, metavar="RUN...")
@click.option("--table", type=_RUN_FILE, help="Write the verdicts of all ops as a Markdown page.")
@click.option("--save", type=_RUN_FILE, help="Write the core's verdicts as a baseline.")
@click.option("--baseline", type=_RUN_FILE, help="What must not become worse: exit code 1 if something did.")
def coverage(runs: tuple[Path, ...], table: Path | None, save: Path | None, baseline: Path | None) -> int:
    """The verdicts in run files of `dtbench run coverage`: a table of them, a check against a baseline."""
    from dtbench.files.store import read_run
    from dtbench.judge import op_verdicts as verdicts

    read = [read_run(path) for path in runs]
    if len(read) > 1 and (save or baseline):
        raise click.UsageError("--save and --baseline are about one run: give one RUN")
    head, rows = verdicts.summary_rows(verdicts.merged(read))
    for row in [head, *rows]:
        click.echo("  ".join(f"{cell:>10}" for cell in row))
    if table is not None:
        table.write_text(verdicts.markdown(read))
    if save is not None:
        verdicts.write_baseline(verdicts.baseline_of(read[0]), save)
    if baseline is None:
        return EXIT_OK
    worse, better = verdicts.became_worse(verdicts.read_baseline(baseline), verdicts.baseline_of(read[0]))
    for line in worse:
        click.echo(f"worse: {line}")
    click.echo(
        f"{len(worse)} worse than {baseline}, {better} better" + (" (--save keeps that)" if better else "")
    )
    return EXIT_REGRESSION if worse else EXIT_OK


@cli.command()
@click.argument("base", type=_RUN_FILE)
@click.argument("new", required=False, type=_RUN_FILE)
@click.option("--reference", is_flag=True, help="Compare BASE with public systems of its kind instead.")
@click.option("--system", metavar="NAME", help="With --reference: the public system to compare with.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def compare(base: Path, new: Path | None, reference: bool, system: str | None, as_json: bool) -> int:
    """What became slower or faster from BASE to NEW. Exit code 1 if anything became slower.

    With --reference, BASE's bus bandwidths beside published ones of the same GPUs, ranks and hosts.
    """
    if reference == (new is not None):
        raise click.UsageError("give BASE and NEW, or --reference and one run")
    if new is None:
        return _compare_with_reference(base, system, as_json)
    if system is not None:
        raise click.UsageError("--system goes with --reference")
    from dtbench.files.store import read_run
    from dtbench.judge.compare import compare as compare_runs
    from dtbench.show.tables import print_comparison

    comparison = compare_runs([read_run(base)], [read_run(new)])
    print_comparison(comparison, as_json)
    return comparison.exit_code


def _compare_with_reference(run: Path, system: str | None, as_json: bool) -> int:
    from dtbench.files.store import read_run
    from dtbench.judge import references as reference

    comparison = reference.compare_with_reference(read_run(run), reference.read_systems(), system)
    if as_json:
        click.echo(json.dumps(comparison.to_json(), indent=2))
    else:
        for line in reference.lines(comparison):
            click.echo(line)
    return comparison.exit_code


@cli.command("import")
@click.argument("files", nargs=-1, required=True, type=_RUN_FILE, metavar="FILE...")
@click.option("-o", "--output", required=True, type=_RUN_FILE, help="The run file to write.")
@click.option(
    "--mesh",
    metavar="DIMS",
    callback=_parsed(parse_mesh),
    help="The mesh whose dims the logs are of, by their ranks: dp=16,tp=8 [default: the logs' own ranks].",
)
@click.option("--dim", metavar="NAME", help="The dim of --mesh that all the logs are of.")
@click.option("--collective", metavar="NAME", help="What was measured, where a log does not say: all_reduce.")
@click.option("--ranks", type=click.IntRange(1), help="On how many ranks, where a log does not say.")
def import_(files: tuple[Path, ...], output: Path, **given: Any) -> int:
    """Reads logs of nccl-tests, rccl-tests, DeepSpeed, OSU and ml-engineering into a run file.

    Each row is checked (size / time = algbw, busbw / algbw = the collective's factor, wrong data); one
    that fails is recorded with the reason and no time, and the exit code is 5.
    """
    from dtbench.importers.command import import_logs

    code, lines = import_logs(files, output, sys.argv[1:], **given)
    for line in lines:
        click.echo(line)
    return code


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=_RUN_FILE, metavar="RUN...")
@click.option("-o", "--output", required=True, type=_RUN_FILE, help="The topology file to write.")
def calibrate(runs: tuple[Path, ...], output: Path) -> None:
    """Fits the cost model to what run files measured: collectives and changes of placement, per mesh dim."""
    from dtbench.cost.calibration import calibrate as fit
    from dtbench.cost.calibration import write_topology
    from dtbench.files.store import read_run

    write_topology(fit([read_run(path) for path in runs]), output)
    click.echo(f"the topology is in {output}")


@cli.command()
@click.argument("files", nargs=-1, required=True, type=_RUN_FILE, metavar="TOPOLOGY RUN...")
@click.option("--same", is_flag=True, help="Allow runs that the topology was fitted on, which flatters it.")
@click.option(
    "--split", is_flag=True, help="Take one RUN and no topology: fit every second size, predict the rest."
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def validate(files: tuple[Path, ...], same: bool, split: bool, as_json: bool) -> None:
    """How well a topology predicts runs that it was not fitted on, beside PyTorch's constants and noise."""
    from dtbench.cost.calibration import read_topology
    from dtbench.cost.calibration.validate import validate as validate_runs
    from dtbench.cost.calibration.validate import validate_split
    from dtbench.files.store import read_run
    from dtbench.show.tables import print_validation

    if split:
        if len(files) != 1 or same:
            raise click.UsageError("--split takes one RUN, and neither a topology nor --same")
        print_validation(validate_split(read_run(files[0])), as_json)
        return
    if len(files) < 2:
        raise click.UsageError("give a TOPOLOGY and at least one RUN, or --split and one RUN")
    topology, runs = read_topology(files[0]), [read_run(path) for path in files[1:]]
    print_validation(validate_runs(topology, runs, same=same), as_json)


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=_RUN_FILE, metavar="RUN...")
@click.option("--topology", required=True, type=_RUN_FILE, help="What `dtbench calibrate` wrote.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def regret(runs: tuple[Path, ...], topology: Path, as_json: bool) -> None:
    """What the choices of each cost model cost more than the best, in runs of the suite `regret`."""
    from dtbench.cost.calibration import read_topology
    from dtbench.cost.regret import regret as score
    from dtbench.files.store import read_run
    from dtbench.show.tables import print_regret

    print_regret(score([read_run(path) for path in runs], read_topology(topology)), as_json)


@cli.command()
@click.argument("files", nargs=-1, type=_RUN_FILE, metavar="FILE...")
@click.option(
    "--baseline", multiple=True, type=_RUN_FILE, metavar="RUN", help="What to compare with; repeatable."
)
@click.option("--topology", type=_RUN_FILE, help="A topology; may as well be one of the FILEs.")
@click.option(
    "--index", type=_RUN_FILE, metavar="FOLDER", help="Instead: a page that lists a folder's reports."
)
@click.option("-o", "--output", required=True, type=_RUN_FILE, help="The page to write.")
def report(
    files: tuple[Path, ...],
    baseline: tuple[Path, ...],
    topology: Path | None,
    index: Path | None,
    output: Path,
) -> None:
    """One HTML page of what was measured and found out.

    FILEs are told apart by what they hold: runs, a topology, the JSON of gate or regret, a profile's folder, a
    history of gates, verdicts on ops.
    """
    from dtbench.show.report import gather, write_index, write_report

    if index is not None:
        if files or baseline or topology:
            raise click.UsageError("--index takes a folder of reports and nothing else")
        write_index(index, output)
        click.echo(f"the index is in {output}")
        return
    write_report(gather(files, baseline, topology), output)
    click.echo(f"the report is in {output}")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def doctor(as_json: bool) -> None:
    """What will disturb a measurement on this machine, each finding with its remedy."""
    from dtbench.machine.doctor import examine
    from dtbench.show.tables import print_findings

    print_findings(examine(), as_json)


cli.add_command(lab)
cli.add_command(export)
cli.add_command(predict)


@cli.command()
@click.argument("target", metavar="SUITE[/CASE]")
@click.option(
    "--impl",
    "impls",
    default=",".join(CHOOSABLE_IMPLS),
    show_default=True,
    metavar="LIST",
    callback=_parsed(lambda text: opts.parse_list(text, CHOOSABLE_IMPLS, "--impl")),
)
@click.option(
    "--filter", "text", default="", metavar="TEXT", help="Only cases whose line in `list` holds TEXT."
)
@click.option("--mesh", metavar="DIMS", callback=_parsed(parse_mesh), help="As for `run`.")
@click.option("--nproc", type=int, help="Ranks to start here [default: one per GPU, else 4].")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--nvtx", is_flag=True, help="On a GPU: NVTX ranges around the iterations, for Nsight.")
@click.option("--quick", is_flag=True, help="Fewer cases and rounds.")
@click.option(
    "--timeout", "timeout_s", default=opts.DEFAULT_TIMEOUT_S, show_default=True, help="Seconds per case."
)
@click.option("-o", "--output", type=_RUN_FILE, help="The folder to make [default: profile-TIME].")
def profile(target: str, text: str, nvtx: bool, output: Path | None, **given: Any) -> int:
    """Where the time of a case goes: dispatch/add by stage, tensor_parallel as one trace of all ranks.

    Writes a table, a trace for Perfetto and, of single calls, a flame graph.
    """
    from dtbench.profile.command import profile as take_apart
    from dtbench.profile.request import make_request

    return take_apart(make_request(target, text, output, nvtx, opts.RunOptions(**given)), sys.argv[1:])


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def gate(words: tuple[str, ...]) -> Any:
    """Is --head slower than --base? Launches of both in random order, as many as it takes."""
    from dtbench.judge.gate.command import command

    return command.main(list(words), prog_name="dtbench gate", standalone_mode=False)
