"""`python -m dtbench.rank_main SPEC`: a rank that our launcher started.

SPEC is the launch's file (`dtbench.engine.launch_files.LaunchSpec`), which the rank reads instead of a command line.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from dtbench.engine.workers import end_with_launcher


def main(spec_path: str) -> None:
    # Ctrl-C ends a rank that has not joined the others yet; the launcher reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Before the imports, which take seconds.
    spec = json.loads(Path(spec_path).read_text())
    end_with_launcher(spec["launcher_pid"])
    from dtbench.cli.program import main as run_program

    run_program(lambda: join_launch(spec))


def join_launch(fields: dict[str, Any]) -> NoReturn:
    """Does this rank's part in the launch; ends the process.

    Args:
        fields: the fields of the `LaunchSpec`, as JSON data.
    """
    import msgspec

    from dtbench.engine.launch_files import LaunchSpec
    from dtbench.engine.options import RunRequest
    from dtbench.engine.rank_env import find_rank_env

    spec, place = msgspec.convert(fields, LaunchSpec), find_rank_env()
    assert place is not None, "the launcher sets torchrun's variables"
    match spec.command:
        case "run":
            from dtbench.engine.session import Session

            Session(spec.request_as(RunRequest), place, spec).run()
        case "preflight":
            from dtbench.preflight.preflight import Coordinator, PreflightRequest

            Coordinator(spec.request_as(PreflightRequest), place, spec.report_path).run_and_exit()
        case "profile":
            from dtbench.profile.ranks import RankProfile
            from dtbench.profile.request import ProfileRequest

            RankProfile(spec.request_as(ProfileRequest), place, spec.report_path).run_and_exit()


if __name__ == "__main__":
    main(sys.argv[1])
