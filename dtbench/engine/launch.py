"""Starting ranks: our own launcher on one machine, and a fresh world per launch under another's.

A rank is always `dtbench run` with the same arguments, whoever starts it. What our launcher has to
add travels in environment variables, and what rank 0 has to tell it in a small note file.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

from dtbench.engine.deaths import explain, oom_kills, other_words
from dtbench.engine.failure import INTERRUPTED, ActiveCase, Diagnosis
from dtbench.engine.parent import INTERRUPTED_MARK, LAUNCHER, NOTE
from dtbench.engine.scratch import scratch
from dtbench.engine.signals import answered, ending_signals, how_ended
from dtbench.machine.limits import refuse_to_start
from dtbench.records.atomic import replace_file
from dtbench.suite.errors import (
    EXIT_CASE_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OWN_FAULT,
    EXIT_USAGE,
    OutputError,
    WorldBrokenError,
    complain,
)

LAUNCH = "DTBENCH_LAUNCH"  # which of the --launches this is, from 0
AGAIN = (
    "DTBENCH_AGAIN"  # where ranks of this launch were lost and these go on: its start, on the monotonic clock
)
OUTPUT = "DTBENCH_OUTPUT"  # the run file, where -o was not given

# Ctrl-C is the launcher's to answer: in a rank's first imports Python's answer is a traceback. `__main__` ends this.
DEAF_TO_CTRL_C = ("/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh")
# What the survivors of a fault get to write the last line in before they are killed. They need the
# answers of all ranks (2 s) and a few seconds for a slow disk.
_SHUTDOWN_S = 15
# The exit codes of a rank that ends by its own will, having said why.
_SAID_WHY = (EXIT_USAGE, EXIT_CASE_FAILED, EXIT_INTERRUPTED, EXIT_OWN_FAULT)


def launch_number(environ: Mapping[str, str] = os.environ) -> int:
    """Which launch this process belongs to."""
    return int(environ.get(LAUNCH, "0"))


@dataclass(frozen=True)
class Note:
    """What rank 0 tells the launcher: what it is doing, and how the launch ended.

    good: how many results of the run are ok. code: the exit code, once the launch is over. reported: whether that
    was said, so that the launcher need not. whole: whether all that there was has been measured. lost: what ended the
    ranks, in words that are left to the launcher to say, since it knows how the run goes on.
    """

    case: ActiveCase = field(default_factory=ActiveCase)
    good: int = 0
    code: int | None = None
    reported: bool = False
    whole: bool = False
    lost: str | None = None

    def write(self, path: str) -> bool:
        """Replaces the note, and says whether it could."""
        with suppress(OSError):  # a full disk must not end a run that writes elsewhere
            replace_file(Path(path), msgspec.json.encode(self))
            return True
        return False

    @classmethod
    def read(cls, path: str | Path) -> Note:
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, ValueError, msgspec.MsgspecError):
            return cls()


def start_ranks(
    arguments: Sequence[str],
    nproc: int,
    launch: int,
    output: Path,
    report: Callable[[Diagnosis, ActiveCase], str | None],
    *,
    began_s: float | None = None,
) -> Note:
    """Starts `nproc` fresh ranks of `dtbench ARGUMENTS` here and waits for them; the last note of rank 0, with
    the launch's exit code.

    They are started through torch's elastic launcher, which waits for them, hosts their store and ends
    the others when one dies. Its log and its tables are not shown: the ranks say what happened.

    report: called with what ended the ranks and what they were doing, where none was left to say so; gives what
        it has left unsaid. began_s: where others of this launch were lost, when the first of them were started.

    Raises:
        UsageError: fewer files may be open than they need, or they could not meet.
        WorldBrokenError: they cannot be started.
    """
    refuse_to_start(nproc)
    with scratch() as folder:
        note_path = str(folder / "note.json")
        told = {LAUNCH: str(launch), OUTPUT: str(output), NOTE: note_path, LAUNCHER: str(os.getpid())}
        os.environ.update(told | {AGAIN: str(began_s or "")})
        # Ranks that share cores and each start a thread per core would measure the fight for them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        failures: list[tuple[int, int]] = []
        killed_before = oom_kills()
        run_elastic(
            [*DEAF_TO_CTRL_C, sys.executable, "-P", "-m", "dtbench", *arguments],
            str(folder),
            failures.extend,
            shutdown_s=_SHUTDOWN_S,
            interrupted_by=ending_signals(),
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=f"dtbench-{os.getpid()}-{launch}",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # no look-up of this host's name, which may hang
        )
        note = Note.read(note_path)
        print(other_words(folder), end="", file=sys.stderr, flush=True)  # noqa: T201
    # The first to end counts: those that the launcher ended for it come after it.
    if (
        failures and failures[0][1] in _SAID_WHY and not note.reported
    ):  # refused, or the note could not be written
        note = dataclasses.replace(note, code=failures[0][1], reported=True)
    if note.reported and note.code is not None:
        return note
    diagnosis = _diagnose(failures, oom_kills() > killed_before)
    lost = None
    try:
        lost = report(diagnosis, note.case)
    except OutputError as error:
        complain(f"{diagnosis.during(note.case)}: {error}")
    return dataclasses.replace(note, code=diagnosis.code, lost=lost)


def _diagnose(failures: Sequence[tuple[int, int]], oom: bool) -> Diagnosis:
    """failures: (rank, exit code), first to last. oom: whether the kernel ended a process for lack of memory."""
    if not failures or failures[0][1] == EXIT_INTERRUPTED:
        return INTERRUPTED
    rank, code = failures[0]
    sentence, faulty = explain(f"rank {rank}", "", oom and code == -signal.SIGKILL, how_ended(code))
    return Diagnosis(sentence, rank if faulty else None)


def run_elastic(
    command: Sequence[str],
    folder: str,
    on_failure: Callable[[list[tuple[int, int]]], None],
    *,
    shutdown_s: float,
    interrupted_by: Set[signal.Signals] = frozenset({signal.SIGINT}),
    **chosen: Any,
) -> int:
    """Runs the command on ranks through torch's elastic launcher, without its log, which repeats what ranks say.
    The signal that ended it, 0 if none did.

    folder: for its logs. on_failure: called with (rank, exit code) of the ranks that failed, first to last, while
    it still serves the store. shutdown_s: what ranks get to end by themselves before it kills them. chosen: of
    its `LaunchConfig`.

    Raises:
        WorldBrokenError: they cannot be started.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "shutdown_timeout" in {
        field.name for field in dataclasses.fields(LaunchConfig)
    }:  # torch 2.11 lacks it
        chosen["shutdown_timeout"] = shutdown_s
    config = LaunchConfig(
        rdzv_backend="c10d",
        max_restarts=0,
        # The launcher passes over a name that is none, where nothing is left to it.
        signals_to_handle=",".join(number.name for number in ending_signals() - interrupted_by),
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **chosen,
    )

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        # Before ranks are told: those that are still deaf to it look for this once they are not.
        with suppress(OSError):
            Path(folder, INTERRUPTED_MARK).touch()
        raise SignalException(f"got signal {number}", sigval=signal.SIGINT)

    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # The launcher fills in `${local_rank}`, and reads `$$` as `$`.
        with answered(interrupted_by, interrupt):
            elastic_launch(config, command[0])(*(word.replace("$", "$$") for word in command[1:]))
    except ChildFailedError as error:
        found = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        on_failure([(rank, failure.exitcode) for rank, failure in found])
    except SignalException as ended:
        return int(ended.sigval)
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        count = chosen["nproc_per_node"]
        raise WorldBrokenError(f"cannot start {count} ranks: {type(error).__name__}: {reason}") from error
    finally:
        logging.disable(logged)
    return 0


def start_again(launch: int, output: Path) -> NoReturn:
    """Under another's launcher: this rank becomes a fresh process of the next launch."""
    os.environ.update({LAUNCH: str(launch), OUTPUT: str(output)})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
