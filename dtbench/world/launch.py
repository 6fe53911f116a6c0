"""Starting ranks: our own launcher on one machine, and a fresh world per launch under another's.

A rank is always `dtbench run` with the same arguments, whoever starts it. What our launcher has to
add travels in three environment variables, and what rank 0 has to tell it in a small note file.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dtbench.errors import EXIT_CASE_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, WorldBrokenError

LAUNCH = "DTBENCH_LAUNCH"  # which of the --launches this is, from 0
OUTPUT = "DTBENCH_OUTPUT"  # the run file, where -o was not given
NOTE = "DTBENCH_NOTE"  # path of the note; set by our own launcher only

# What the survivors of a fault get to write the last line in before they are killed. They need the
# roll call (2 s) and a few seconds for a slow disk.
_SHUTDOWN_S = 15
# The exit codes of a rank that ends by its own will; it has said why.
_SAID_WHY = (EXIT_USAGE, EXIT_CASE_FAILED, EXIT_INTERRUPTED)


def launch_number(environ: Mapping[str, str] = os.environ) -> int:
    """Which launch this process belongs to."""
    return int(environ.get(LAUNCH, "0"))


@dataclass(frozen=True)
class Note:
    """What rank 0 tells the launcher: the case in hand, and how it ended.

    case: suite, name, params and impls. code: the exit code, once the launch is over. reported: whether
    that was said, so that the launcher need not. whole: whether all that there was has been measured.
    """

    case: Mapping[str, Any] | None = None
    code: int | None = None
    reported: bool = False
    whole: bool = False

    def write(self, path: str | None) -> None:
        """Replaces the note; does nothing without a path (another's launcher)."""
        if path is None:
            return
        with suppress(OSError):  # a full disk must not end a run that writes elsewhere
            partial = Path(f"{path}.{os.getpid()}")
            partial.write_text(json.dumps(dataclasses.asdict(self)))
            partial.replace(path)

    @classmethod
    def read(cls, path: str | Path) -> Note:
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (OSError, ValueError):
            return cls()


@dataclass(frozen=True)
class Launched:
    """How a launch of ours ended. died: what is known of the first rank that did, "" if none."""

    note: Note
    died: str = ""
    rank: int | None = None

    @property
    def code(self) -> int:
        """The launch's exit code."""
        if self.note.code is not None:
            return self.note.code
        return EXIT_CASE_FAILED if self.died else EXIT_INTERRUPTED


def start_ranks(arguments: Sequence[str], nproc: int, launch: int, output: Path) -> Launched:
    """Starts `nproc` fresh ranks of `dtbench ARGUMENTS` here and waits for them.

    They are started through torch's elastic launcher, which watches them, hosts their store and ends
    the others when one dies. Its log and its tables are not shown: the ranks say what happened.

    Raises:
        WorldBrokenError: they cannot be started.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="dtbench-") as folder, _quiet_logging():
        note = str(Path(folder) / "note.json")
        os.environ.update({LAUNCH: str(launch), OUTPUT: str(output), NOTE: note})
        # One thread per rank unless the user says otherwise: ranks that share cores and each start a
        # thread per core measure the fight for them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        newer: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN_S}
        known = {field.name for field in dataclasses.fields(LaunchConfig)}  # torch 2.11 lacks it
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=f"dtbench-{os.getpid()}-{launch}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # no look-up of this host's name, which may hang
            max_restarts=0,
            signals_to_handle=_signals(),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **{name: value for name, value in newer.items() if name in known},
        )
        try:
            elastic_launch(config, sys.executable)("-P", "-m", "dtbench", *arguments)
        except ChildFailedError as error:
            return _after_failure(error, Note.read(note))
        except SignalException:
            return Launched(Note.read(note))
        except (RuntimeError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise WorldBrokenError(f"cannot start {nproc} ranks: {type(error).__name__}: {reason}") from error
        return Launched(Note.read(note))


def end_with_launcher() -> None:
    """A rank of ours gets SIGTERM when the launcher dies, however it dies (Linux only)."""
    with suppress(OSError, AttributeError):
        # prctl's PR_SET_PDEATHSIG is 1 (linux/prctl.h).
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)


def start_again(launch: int, output: Path) -> NoReturn:
    """Under another's launcher: this rank becomes a fresh process of the next launch."""
    os.environ.update({LAUNCH: str(launch), OUTPUT: str(output)})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _after_failure(error: Any, note: Note) -> Launched:
    """What is known after some rank ended with a code: the first to end and how. Those that the
    launcher ended for it come after it."""
    said = [f.exitcode for f in error.failures.values() if f.exitcode in _SAID_WHY]
    if said and not note.reported:  # the note could not be written
        note = dataclasses.replace(note, code=said[0], reported=True)
    rank, failure = error.get_first_failure()
    how = f"ended with exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"died of signal {-failure.exitcode}"
        with suppress(ValueError):
            how = f"died of {signal.Signals(-failure.exitcode).name}"
    return Launched(note, f"rank {rank} {how}", rank)


def _signals() -> str:
    """A hang-up ends the run as Ctrl-C does, unless the user had it ignored (nohup)."""
    names = ["SIGTERM", "SIGINT"]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        names.append("SIGHUP")
    return ",".join(names)


class _quiet_logging:  # noqa: N801 - used as a function
    """Nothing is logged within the block: the elastic launcher's log repeats what the ranks report."""

    def __enter__(self) -> None:
        self._was = logging.root.manager.disable
        logging.disable(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        logging.disable(self._was)
