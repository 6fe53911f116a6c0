"""Runs a user's job unchanged and records a trace of each rank.

The folder `hook/` comes first on PYTHONPATH, so every Python process of the job runs its `sitecustomize`.
"""

import ctypes
import functools
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtbench.errors import UsageError

# The first steps create communicators, compile, and rebuild DDP's buckets. WARMUP +
# STEPS is small enough for scripts with 20 steps.
WARMUP, STEPS = 5, 3
_FORWARDED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
_NO_RANKS = "nothing was recorded: no Python process joined a process group, or PYTHONPATH did not reach it"


@dataclass(frozen=True)
class Recording:
    """Result of running a job.

    Attributes:
        exit_code: the job's exit code; 128 + N if signal N ended it.
        traces: one file for each recorded rank, in the order of ranks.
        notes: what is missing, and where failed ranks stopped, one sentence each; the first failure first.
    """

    exit_code: int
    traces: tuple[Path, ...]
    notes: tuple[str, ...]


def record(
    command: Sequence[str],
    folder: Path,
    *,
    steps: int = STEPS,
    warmup: int = WARMUP,
    timeout_s: int = 0,
    delay: tuple[int, float] | None = None,
) -> Recording:
    """Runs a command and writes a trace of each rank.

    Args:
        command: the program and its arguments.
        folder: an existing folder for the traces.
        steps: steps to record; 0 records the whole run.
        warmup: steps before the recorded ones.
        timeout_s: seconds without the end of a step after which a rank ends the job; 0 for no limit.
        delay: a rank, and the seconds by which its first collective of each step is delayed.

    Raises:
        UsageError: the command cannot be started.
    """
    folder = folder.resolve()
    # KINETO_LOG_LEVEL silences Kineto's message at each start. After a timeout, NCCL dumps its last collectives (flight
    # recorder) into the file of TORCH_FR_DUMP_TEMP_FILE.
    env = {
        "KINETO_LOG_LEVEL": "99",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{folder}/nccl_rank"),
        **os.environ,
        "DTBENCH_RECORD_WINDOW": f"{steps} {warmup} {timeout_s}",
        "DTBENCH_RECORD_FOLDER": f"{folder}",
        **({"DTBENCH_RECORD_DELAY": f"{delay[0]} {delay[1]:.9f}"} if delay else {}),
        "PYTHONPATH": f"{Path(__file__).with_name('hook')}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
    }
    prctl, old_mask = ctypes.CDLL(None).prctl, signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED_SIGNALS)
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, old_mask)
    try:
        # PR_SET_PDEATHSIG (linux/prctl.h) ends the job if this process dies.
        process = subprocess.Popen(
            command, env=env, preexec_fn=lambda: (prctl(1, signal.SIGTERM.value), unblock())
        )
        while process.poll() is None:
            received = signal.sigtimedwait(_FORWARDED_SIGNALS, 0.5)
            # The kernel sends a terminal's signals to the job itself. Only those that a process sent are forwarded.
            if received and received.si_signo != signal.SIGCHLD and received.si_code <= 0:
                process.send_signal(received.si_signo)
    except OSError as error:
        raise UsageError(
            f"cannot run {command[0]!r}: {(error.strerror or str(error)).lower()}; give a command such as "
            "`torchrun train.py`"
        ) from error
    finally:
        unblock()
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    ranks_by_report: dict[str, list[str]] = {}
    files = sorted(folder.glob("rank*.txt"), key=lambda file: file.stat().st_mtime_ns)
    for file in files:
        text = file.read_text(errors="replace")
        # After success, stacks come from child processes that a rank terminated.
        if text and (code or "hread 0x" not in text):
            ranks_by_report.setdefault(_summarize(text), []).append(file.stem.removeprefix("rank"))
        else:
            file.unlink()
    notes = (f"rank {', '.join(ranks)} {report}" for report, ranks in ranks_by_report.items())
    return Recording(
        exit_code=code,
        traces=tuple(sorted(folder.glob("rank*.json.gz"), key=lambda file: (len(file.name), file))),
        notes=tuple(notes) if files else (_NO_RANKS,),
    )


def _summarize(text: str) -> str:
    """Returns a rank's own report, or where it stopped, e.g. "stopped at train.py:12 in main (ValueError: no)".

    Args:
        text: the content of the rank's `rankN.txt`. Stacks have the innermost frame first, and the main thread last.
    """
    report, *threads = re.split(r"(?:Current thread|Thread) 0x", text)
    stack = report if "  File " in report else "".join(threads[-1:])
    frames = re.findall(r'  File "(.+)", line (\d+) in (.+)', stack)
    reason = report.partition("\n")[0][:160] or "ended by SIGTERM"
    for file, line, name in [frame for frame in frames if "-packages/" not in frame[0]] or frames:
        return f"stopped at {Path(file).name}:{line} in {name} ({reason})"
    return reason
