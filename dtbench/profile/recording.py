"""Runs a user's job as it is and records its ranks: `hook/` stands first on PYTHONPATH, all else is the job's own."""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dtbench.suite.errors import UsageError

# Communicators, compilation and DDP's buckets come in the first steps; what is left serves a script of 20.
WARMUP, STEPS = 5, 3
_HOOK = Path(__file__).with_name("hook")
_ANSWERED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
# What a job gets to end by itself: torchrun kills what is left of its ranks after 30 s.
_GRACE_S = 40.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


@dataclass(frozen=True)
class Recording:
    """exit_code: the job's, 128 + N where signal N ended it. traces: by rank. notes: what is missing and why, and where
    ranks stood when they ended badly, a sentence each."""

    exit_code: int
    traces: tuple[Path, ...]
    notes: tuple[str, ...]


def record(
    command: Sequence[str], folder: Path, *, steps: int = STEPS, warmup: int = WARMUP, timeout_s: int = 0
) -> Recording:
    """Runs `command` and keeps a trace per rank in `folder`, which exists.

    steps: to record after `warmup` ones; 0: the whole run. timeout_s: ends the job when a step takes longer; 0: never.

    Raises:
        UsageError: a command that cannot be started.
    """
    chosen = {"FOLDER": folder.resolve(), "STEPS": steps, "WARMUP": warmup, "TIMEOUT": timeout_s}
    env = {
        "KINETO_LOG_LEVEL": "99",  # it tells stderr of every start and stop
        # NCCL's last collectives are written when a rank hangs; their number has a default.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": os.environ.get(
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{folder.resolve()}/nccl_rank"
        ),
        **os.environ,
        **{f"DTBENCH_RECORD_{name}": str(value) for name, value in chosen.items()},
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_HOOK), os.environ.get("PYTHONPATH"))))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ANSWERED)
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        process = subprocess.Popen(command, env=env, preexec_fn=prepare)
        hung = _wait(process, folder, timeout_s)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"cannot run {command[0]!r}: {reason}; give a command, as in `-- torchrun train.py`"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Recording(code or int(hung), *_collect(folder, bad=bool(code or hung)))


def _wait(process: subprocess.Popen[bytes], folder: Path, timeout_s: float) -> bool:
    """Until the job has ended; whether it hung. Signals to us alone are handed on, those of a terminal it has got."""
    ended_at = None
    while process.poll() is None:
        told = signal.sigtimedwait(_ANSWERED, 0.5)
        if told and told.si_signo != signal.SIGCHLD and told.si_code <= 0:
            process.send_signal(told.si_signo)
        stuck = timeout_s and any(f.read_bytes().startswith(b"Timeout") for f in folder.glob("rank*.txt"))
        if stuck and ended_at is None:
            time.sleep(2.0)  # the other ranks' stacks
            process.terminate()
            ended_at = time.monotonic()
        elif ended_at and time.monotonic() > ended_at + _GRACE_S:
            process.kill()
    return ended_at is not None


def _collect(folder: Path, *, bad: bool) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Traces, packed, and notes."""
    with ThreadPoolExecutor() as pool:
        traces = tuple(sorted(pool.map(_pack, folder.glob("rank*[0-9].json")), key=_rank))
    states = {_rank(path): json.loads(path.read_text()) for path in folder.glob("rank*.state")}
    by_note: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        by_note.setdefault(state["note"], []).append(rank)
    notes = [f"rank {', '.join(map(str, ranks))}: {note}" for note, ranks in by_note.items() if note]
    if not states:
        notes.append(
            "nothing was recorded: no Python process of the command joined a process group; where one does, see that "
            "PYTHONPATH and DTBENCH_RECORD_* reach it (containers, mpirun -x), and that it runs without -I, -E and -S"
        )
    elif not traces and not notes:
        done = min(state["steps"] for state in states.values())
        way = (
            f"the {done} steps: give --warmup {max(done - 2, 0)}"
            if done
            else "any step of an optimizer: give --steps 0"
        )
        notes.append(f"nothing was recorded: the job ended with {way}")
    for path in sorted(folder.glob("rank*.txt"), key=lambda path: path.stat().st_mtime_ns):
        text = path.read_text(errors="replace")
        if bad and text:
            notes.append(f"rank {_rank(path)} {_where(text)}")
        elif not text:
            path.unlink()
    for path in folder.glob("rank*.state"):
        path.unlink()
    return traces, tuple(notes)


def _where(text: str) -> str:
    """`stood at train.py:12 in main (ValueError: no)`: text has the innermost frame first."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text)
    main = next((part for part in threads if part.startswith("Current")), threads[-1])
    frames = re.findall(r'  File "(.+)", line (\d+) in (.+)', main) or [("?", "?", "?")]
    file, line, name = next(
        (f for f in frames if not re.search(r"/site-packages/|/lib/python3", f[0])), frames[0]
    )
    first = text.partition("\n")[0]
    why = "ended by SIGTERM" if "hread 0x" in first else first
    return f"stood at {Path(file).name}:{line} in {name} ({why})"


def _pack(trace: Path) -> Path:
    packed = trace.with_suffix(".json.gz")
    with trace.open("rb") as raw, gzip.open(packed, "wb", compresslevel=1) as out:
        shutil.copyfileobj(raw, out, 1 << 20)
    trace.unlink()
    return packed


def _rank(path: Path) -> int:
    return int(path.name.removeprefix("rank").partition(".")[0])
