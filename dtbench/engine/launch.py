"""`dtbench run` in the process that the user starts: starts the ranks of each launch and waits for them.

Under another launcher this process is a rank itself and continues in `session`.
"""

import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import msgspec

from dtbench.engine.failure import INTERRUPTED, Diagnosis, describe_kept_results, record_failure
from dtbench.engine.launch_files import LaunchSpec, RankReport
from dtbench.engine.options import RunRequest
from dtbench.engine.progress import print_status, print_status_if_slow
from dtbench.engine.rank_env import find_rank_env, launch_number, output_of
from dtbench.engine.selection import select
from dtbench.engine.session import Session, run_to_resume, say_complete
from dtbench.engine.tasks import remaining
from dtbench.engine.workers import describe_exit, ending_signals, handling_signals, scratch
from dtbench.errors import (
    EXIT_CASE_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OWN_FAULT,
    EXIT_USAGE,
    WorldBrokenError,
    describe,
    print_error,
)
from dtbench.machine.limits import refuse_local_ranks
from dtbench.records import baselines
from dtbench.records.atomic import check_output_path
from dtbench.text.units import plural

# After this many restarts in a row without a result, the machine is at fault, not a case.
MAX_RESTARTS_WITHOUT_RESULT = 5
# Grace period for surviving ranks to write their last line before SIGKILL: 2 s for the other ranks' answers, and a few
# seconds for a slow disk.
_SHUTDOWN_S = 15
# Exit codes of ranks that have printed why they end.
_EXPLAINED_EXIT_CODES = (EXIT_USAGE, EXIT_CASE_FAILED, EXIT_INTERRUPTED, EXIT_OWN_FAULT)


def run(request: RunRequest, argv: Sequence[str]) -> int:
    """Measures what the request asks for, as a rank of another launcher or with ranks of its own.

    Args:
        request: the options of the command line.
        argv: the command line without the program's name, for the header of the run file.

    Returns:
        The exit code.
    """
    spec = LaunchSpec(command="run", argv=tuple(argv), start_s=time.monotonic(), launch=launch_number())
    if (place := find_rank_env()) is not None:
        Session(request, place, spec).run()
    if request.save_baseline is not None:
        baselines.baseline_path(request.save_baseline)
    with print_status_if_slow(f"loading torch and {', '.join(request.suites) or 'the suites'}"):
        selection = select(request)
    output = output_of(request.output)
    previous = run_to_resume(selection, output)
    if previous is None:
        check_output_path(output, resumable=True)
    elif previous.complete:
        return say_complete(previous)
    print_status(f"starting {plural(selection.options.world_size, 'process')}, loading torch")
    spec = msgspec.structs.replace(spec, request=dataclasses.replace(request, output=output))
    measured = {result.key for result in previous.results} if previous else set()
    for launch in range(request.launches):
        # Skip a launch whose results are all in the file, except the last, which completes it. With --refine, only the
        # ranks know which sizes are missing.
        if launch + 1 < request.launches and not (
            selection.options.refine or remaining(selection.tasks, measured, launch)
        ):
            continue
        spec = msgspec.structs.replace(spec, launch=launch, is_restart=False)
        restarts_without_result, ok_results = 0, 0
        # Ranks are restarted after a fatal case, to continue with the remaining cases.
        while (report := start_ranks(spec, selection.options.world_size)).diagnosis is not None:
            restarts_without_result = 0 if report.ok_results > ok_results else restarts_without_result + 1
            ok_results = max(ok_results, report.ok_results)
            is_hopeless = restarts_without_result == MAX_RESTARTS_WITHOUT_RESULT
            may_restart = request.on_failure == "continue" and not is_hopeless
            if not record_failure(report.diagnosis, report.case, output, may_restart=may_restart):
                if is_hopeless:
                    print_error(
                        f"{MAX_RESTARTS_WITHOUT_RESULT} starts in a row gave no result: "
                        f"{describe_kept_results(output)}"
                    )
                break
            spec = msgspec.structs.replace(spec, is_restart=True)
        code = EXIT_INTERRUPTED if report.exit_code is None else report.exit_code
        if not report.is_complete:
            break
    return code


def start_ranks(spec: LaunchSpec, world_size: int) -> RankReport:
    """Starts `world_size` fresh ranks here and waits until they end.

    Torch's elastic launcher hosts their store and ends them together. Its own log is suppressed, since the ranks report
    what happened.

    Returns:
        Their last report, with the exit code of the launch. Its diagnosis is None if the ranks ended in order or have
        printed why they ended.

    Raises:
        UsageError: the limit of open files is too low, or localhost cannot be reached.
        WorldBrokenError: the ranks cannot be started.
    """
    refuse_local_ranks(world_size)
    # If each rank had a thread per core, the times would include contention for cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        # The launcher forwards the signal as SIGTERM, which ends a rank during its imports and prints no traceback.
        raise SignalException(f"got signal {number}", sigval=signal.SIGTERM)

    has_shutdown_timeout = "shutdown_timeout" in LaunchConfig.__dataclass_fields__  # torch 2.11 lacks it
    options: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN_S} if has_shutdown_timeout else {}
    failures: list[tuple[int, int]] = []
    log_level = logging.root.manager.disable
    with scratch() as folder:
        spec_path, report_path = folder / "spec.json", folder / "report.json"
        report_path.write_bytes(msgspec.json.encode(RankReport()))
        spec = msgspec.structs.replace(spec, launcher_pid=os.getpid(), report_path=str(report_path))
        # json, unlike msgspec, also writes file names that are not UTF-8.
        spec_path.write_text(json.dumps(msgspec.to_builtins(spec, enc_hook=str)))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=f"dtbench-{os.getpid()}-{spec.launch}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # looking up this host's name may hang
            max_restarts=0,
            signals_to_handle="",  # `interrupt` handles them
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
            **options,
        )
        # The launcher replaces `${local_rank}`, and reads `$$` as `$`.
        arguments = "-P", "-m", "dtbench.rank_main", str(spec_path).replace("$", "$$")
        logging.disable(logging.CRITICAL)
        try:
            with handling_signals(ending_signals(), interrupt):
                elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            failures = [
                (rank, failure.exitcode)
                for rank, failure in sorted(error.failures.items(), key=lambda item: item[1].timestamp)
            ]
        except SignalException:
            pass
        except (RuntimeError, OSError) as error:
            # After the launch is over, torch's launcher may signal a rank that has just ended.
            if msgspec.json.decode(report_path.read_bytes(), type=RankReport).exit_code is None:
                raise WorldBrokenError(f"cannot start {world_size} ranks: {describe(error)}") from error
        finally:
            logging.disable(log_level)
        return _outcome(msgspec.json.decode(report_path.read_bytes(), type=RankReport), failures)


def _outcome(report: RankReport, failures: Sequence[tuple[int, int]]) -> RankReport:
    """Adds the exit code and the diagnosis to the last report of the ranks, after they have ended.

    Args:
        failures: (rank, exit code) of the ranks that failed, the first failure first; empty if a signal ended the
            launcher.
    """
    if report.exit_code is not None:  # the launch is over, however its ranks ended afterwards
        return msgspec.structs.replace(report, diagnosis=None)
    diagnosis = report.diagnosis
    if not failures:
        diagnosis = INTERRUPTED
    elif diagnosis is None:
        rank, code = failures[0]
        if code in _EXPLAINED_EXIT_CODES:  # options were refused, or the report could not be written
            return msgspec.structs.replace(report, exit_code=code)
        diagnosis = Diagnosis(f"rank {rank} {describe_exit(code)}", rank)
    return msgspec.structs.replace(report, exit_code=diagnosis.code, diagnosis=diagnosis)
