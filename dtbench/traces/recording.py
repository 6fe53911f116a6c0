"""Runs a user's job as it is and records its ranks: `hook/` stands first on PYTHONPATH, all else is the job's own."""

from __future__ import annotations

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

# Communicators, compilation and DDP's buckets come in the first steps; what is left serves a script of 20.
WARMUP, STEPS = 5, 3
_ANSWERED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
_NOTHING = "nothing was recorded: no Python process joined a process group, or the hook's PYTHONPATH does not reach it"


@dataclass(frozen=True)
class Recording:
    """exit_code: the job's, 128 + N where signal N ended it. traces: by rank. notes: what is missing, and where ranks
    stood when they ended badly, the first first; a sentence each."""

    exit_code: int
    traces: tuple[Path, ...]
    notes: tuple[str, ...]


def record(
    command: Sequence[str], folder: Path, *, steps: int = STEPS, warmup: int = WARMUP, timeout_s: int = 0
) -> Recording:
    """Runs `command` and keeps a trace per rank in `folder`, which exists.

    steps: to record after `warmup` ones; 0: the whole run. timeout_s: a rank that waits longer for the end of a step,
    or for the first one, ends the job; 0: none does.

    Raises:
        UsageError: a command that cannot be started.
    """
    home = folder.resolve()
    # Kineto tells stderr of every start; of NCCL's last collectives torch keeps 2000, for who dumps them.
    env = {
        "KINETO_LOG_LEVEL": "99",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{home}/nccl_rank"),
        **os.environ,
        "DTBENCH_RECORD_WINDOW": f"{steps} {warmup} {timeout_s}",
        "DTBENCH_RECORD_FOLDER": f"{home}",
        "PYTHONPATH": f"{Path(__file__).with_name('hook')}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
    }
    prctl, before = ctypes.CDLL(None).prctl, signal.pthread_sigmask(signal.SIG_BLOCK, _ANSWERED)
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
    try:
        # The job does not outlive us: PR_SET_PDEATHSIG of linux/prctl.h.
        process = subprocess.Popen(
            command, env=env, preexec_fn=lambda: (prctl(1, signal.SIGTERM.value), unblock())
        )
        while process.poll() is None:
            told = signal.sigtimedwait(_ANSWERED, 0.5)
            # The kernel sends a terminal's signals to the job, too; those of a process are handed on.
            if told and told.si_signo != signal.SIGCHLD and told.si_code <= 0:
                process.send_signal(told.si_signo)
    except OSError as error:
        why = f"{error.strerror or error}".lower()
        raise UsageError(
            f"cannot run {command[0]!r}: {why}; give a command, as `torchrun train.py`"
        ) from error
    finally:
        unblock()
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    ranks: dict[str, list[str]] = {}
    files = sorted(home.glob("rank*.txt"), key=lambda file: file.stat().st_mtime_ns)
    for file in files:
        text = file.read_text(errors="replace")
        if text and (code or "hread 0x" not in text):  # a process that a rank forked may have been ended
            ranks.setdefault(_said(text), []).append(file.stem.removeprefix("rank"))
        else:
            file.unlink()
    notes = tuple(f"rank {', '.join(of)} {said}" for said, of in ranks.items()) if files else (_NOTHING,)
    traces = sorted(home.glob("rank*.json.gz"), key=lambda file: (len(file.name), file))
    return Recording(code, tuple(traces), notes)


def _said(text: str) -> str:
    """What a rank says of itself, or `stood at train.py:12 in main (ValueError: no)`; text: frames innermost first, of
    threads the main one last."""
    first, *threads = re.split(r"(?:Current thread|Thread) 0x", text)
    frames = re.findall(
        r'  File "(.+)", line (\d+) in (.+)', first if "  File " in first else "".join(threads[-1:])
    )
    why = first.partition("\n")[0][:160] or "ended by SIGTERM"
    for file, line, name in [frame for frame in frames if "-packages/" not in frame[0]] or frames:
        return f"stood at {Path(file).name}:{line} in {name} ({why})"
    return why
