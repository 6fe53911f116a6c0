"""`dtbench profile` on the command line, for a training job or for cases of a suite."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtbench.cli import options
from dtbench.file_kinds import is_profile, kind_of
from dtbench.suite.registry import read_builtin

if TYPE_CHECKING:
    from dtbench.traces.analysis import Topology

_JOB_OPTIONS = ["topology", "system", "bases", "as_json", "model", "layout"]
# Kind of target -> the options that apply to it, apart from -o.
_OPTIONS = {
    "a suite": ["impls", "filter", "mesh", "nproc", "device", "backend", "quick", "timeout_s"],
    "traces": _JOB_OPTIONS,
    "-- COMMAND": [*_JOB_OPTIONS, "steps", "warmup", "timeout_s", "delay"],
}


# Programs that start jobs.
_PROGRAM = re.compile(r"python[\d.]*|torchrun|srun|mpirun|mpiexec|accelerate|deepspeed|uv|bash|sh")


def _parse_delay(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> tuple[int, float] | None:
    """Returns the rank and the seconds of --delay."""
    keys = dict(pair.partition("=")[::2] for pair in (text or "").split(","))
    rank, ms = keys.get("rank", ""), keys.get("ms", "")
    is_valid = re.fullmatch(r"\d{1,9}", rank) and re.fullmatch(r"\d{1,9}(\.\d{1,9})?", ms) and float(ms) > 0
    if text is not None and (len(keys) != 2 or not is_valid):
        raise click.BadParameter(
            f"{text!r}: expected rank=RANK,ms=MILLISECONDS with a rank of the job and more than 0 ms, such as "
            "rank=2,ms=30"
        )
    return (int(rank), float(ms) / 1e3) if text is not None else None


class _Profile(options.AdvancedCommand):
    first = ("--topology", "--base", "--json", "-o", "--steps", "--filter", "--nproc")

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Removes the command of a job, which follows the first `--`, since it has options of its own."""
        end = args.index("--") if "--" in args else len(args)
        programs = [index for index, word in enumerate(args[:end]) if _PROGRAM.fullmatch(Path(word).name)]
        if programs and end == len(args):
            words = shlex.join([*args[: programs[0]], "--", *args[programs[0] :]])
            raise click.UsageError(
                f"{args[programs[0]]} begins a command: put -- before it, `dtbench profile {words}`", context
            )
        context.meta["command"] = args[end + 1 :] if end < len(args) else None
        return super().parse_args(context, args[:end])


@click.command("profile", cls=_Profile)
@click.argument("targets", nargs=-1, metavar="[TARGET]... [-- COMMAND]")
@click.option(
    "--topology", type=options.FILE, help="For a job: topology with calibrated bandwidths to compare with."
)
@click.option(
    "--system", metavar="NAME", help="For a job: a public system to compare with, as in compare --reference."
)
@click.option(
    "--base", "bases", multiple=True, type=options.FILE, help="For a job: a profile of the base; repeatable."
)
@click.option("--model", metavar="NAME|FILE", help="For a job: the model, as in plan; with --layout.")
@click.option("--layout", metavar="DIM=N,...", help="For a job: e.g. tp=2,fsdp=4,batch=8,sequence=4096.")
@options.JSON
@click.option("--steps", default=3, type=click.IntRange(0), help="For a command: steps to record; 0: all.")
@click.option(
    "--warmup", default=5, type=click.IntRange(0), help="For a command: steps before the recorded ones."
)
@click.option(
    "--delay",
    metavar="rank=N,ms=N",
    callback=_parse_delay,
    help="For a command: delay this rank's first collective of each step, to test what the profile says.",
)
@options.IMPL
@options.FILTER
@options.MESH
@options.NPROC
@options.DEVICE
@options.BACKEND
@click.option("--quick", is_flag=True, help="Fewer cases and rounds.")
@options.TIMEOUT
@click.option("-o", "--output", type=options.FILE, show_default="profile-TIME", help="The folder to create.")
@click.pass_context
def profile_command(
    context: click.Context, /, targets: tuple[str, ...], output: Path | None, **choices: options.OptionValue
) -> int:
    """Shows where the time of a job, or of a suite's case, goes.

    TARGETs are traces of torch.profiler or logs of NCCL's inspector (files, folders), a job's profile, or SUITE[/CASE].
    COMMAND is run unchanged and recorded. A profile of traces or logs is only printed unless -o names a folder. With
    --base, the exit code is 1 if calls, bytes or dtypes of the job differ from the base or a time is slower.

    \b
    Examples:
      dtbench profile -- torchrun --nproc-per-node 8 train.py --steps 20
      dtbench profile traces/*.json.gz --topology topology.json -o job
      dtbench profile job-head --base job-base
      dtbench profile dispatch/add -o add
    """
    command: list[str] | None = context.meta["command"]
    kind = "traces" if any(map(_is_recording, targets)) else "a suite" if command is None else "-- COMMAND"
    typed = options.typed(context)
    for option in context.command.params:
        if option.name in typed.difference(_OPTIONS[kind], ("targets", "output")):
            takers = " or ".join(taker for taker, names in _OPTIONS.items() if option.name in names)
            raise click.UsageError(f"{option.opts[0]} is for {takers}, the target is {kind}: leave it out")
    if (command is not None and (targets or not command)) or (len(targets) != 1 and kind == "a suite"):
        raise click.UsageError(
            f"got {len(targets)} targets{'' if command is None else ' and --'}, expected traces, one SUITE[/CASE], or "
            "-- COMMAND, such as -- torchrun --nproc-per-node 8 train.py"
        )
    if kind != "a suite":
        choices["timeout_s"] = int(choices["timeout_s"]) if "timeout_s" in typed else 0
        return _profile_job([*map(Path, targets)], command or (), output, **choices)
    from dtbench.engine.options import RunRequest
    from dtbench.profile.profile import profile
    from dtbench.profile.request import make_request

    chosen = {name: choices[name] for name in _OPTIONS[kind] if name != "filter"}
    return profile(make_request(targets[0], choices["filter"], output, RunRequest(**chosen)))


def _is_recording(target: str) -> bool:
    path = Path(target)
    is_folder = path.is_dir() and target.partition("/")[0] not in read_builtin()
    # The last three names are those of NCCL's inspector, so that a message about an empty log names it.
    is_named = target.endswith((".json", ".json.gz", ".log", ".log.gz", ".prom"))
    return is_folder or is_named or kind_of(path) in ("trace", "inspector")


def _profile_job(
    paths: list[Path], command: Sequence[str], folder: Path | None, **choices: options.OptionValue
) -> int:
    """Profiles a job, prints the result and returns the exit code."""
    from dtbench.traces.profile_job import JobRequest, print_profile, profile_job

    model, layout, as_json = choices["model"], choices["layout"], choices["as_json"]
    if (model is None) != (layout is None):
        raise click.UsageError("--model and --layout belong together: give both, or neither")
    profiled = profile_job(
        JobRequest(
            paths=paths,
            command=command,
            folder=folder,
            topology=_read_reference(choices["topology"], choices["system"]),
            bases=choices["bases"],
            model_and_layout=(model, layout) if model else None,
            redirect_stdout=as_json,
            **{name: choices[name] for name in ("steps", "warmup", "timeout_s", "delay")},
        )
    )
    print_profile(profiled, as_json)
    if profiled.folder or not is_profile(paths[0]):
        click.echo(
            f"the profile is in {profiled.folder}"
            if profiled.folder
            else "-o FOLDER keeps the profile for --base and report",
            err=True,
        )
    return profiled.exit_code


def _read_reference(topology: Path | None, system: str | None) -> "Topology | None":
    """Reads the bandwidths that --topology or --system names."""
    from dtbench.cli.compare import public_systems
    from dtbench.comparison.references import find_systems
    from dtbench.records.topology import read_topology

    if topology and system:
        raise click.UsageError("--topology and --system exclude each other: give one of them")
    if system:
        return find_systems(tuple(public_systems()), system)
    return read_topology(topology) if topology else None
