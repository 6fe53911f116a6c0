"""What a shell or a job allows this process too little of, said before a library ends the program in its own words.

Needs neither torch nor anything else that may not be loadable then.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

from dtbench.suite.errors import UsageError

# numpy and OpenBLAS ended or never came with less than 500 MB of addresses, torch for CPUs with less than 700 MB.
_LEAST_ADDRESSES = 640 * 2**20
# A launcher, and a process of two ranks, opened 34 files; each further rank costs the launcher and its peers some.
_FILES, _FILES_PER_RANK = 32, 8
_ENOUGH_FILES = 4096
_TRIAL_S = 120.0
_LOOPBACK_S = 5.0
# What a launcher or a rank of a small case takes beyond its imports: stacks of threads, arenas, tensors.
_HEADROOM = 512 * 2**20
_TRIAL = "import resource as r; r.setrlimit(r.RLIMIT_AS, ({0}, {0})); import torch, torch.distributed"


def refuse_place() -> None:
    """Checks what every command needs.

    Raises:
        UsageError: the current folder is gone, or too little memory may be addressed.
    """
    try:
        Path.cwd()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"the current folder is gone ({reason}): cd to another, or cd to it anew") from error
    allowed = _addresses()
    if allowed is not None and allowed < _LEAST_ADDRESSES:
        raise UsageError(
            f"out of memory: {allowed >> 20} MiB of addresses are allowed (ulimit -v), expected "
            f"{_LEAST_ADDRESSES >> 20} MiB to read files and several GiB to load torch; raise the limit"
        )


def refuse_torch(ranks: int = 1) -> None:
    """Before torch is loaded. ranks: how many processes meet.

    Raises:
        UsageError: it could not be, or the ranks could not be reached.
    """
    files = _raised_files()
    wanted = _FILES + _FILES_PER_RANK * ranks
    if files < wanted:
        processes = "a process" if ranks == 1 else f"{ranks} processes"
        raise UsageError(
            f"{files} open files are allowed (ulimit -n), expected at least {wanted} for {processes}; raise the limit"
        )
    allowed = _addresses()
    if allowed is not None and "torch" not in sys.modules and not _loads_torch(allowed):
        raise UsageError(
            f"out of memory: torch cannot be loaded with the {allowed >> 20} MiB of addresses that are allowed "
            "(ulimit -v); raise the limit"
        )


def refuse_to_start(ranks: int) -> None:
    """Before so many ranks are started here, which meet at `localhost`.

    Raises:
        UsageError: nobody can be reached there, or what `refuse_torch` says.
    """
    refuse_torch(ranks)
    why = "it has no address"
    try:
        for family, _, _, _, address in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM):
            try:
                with socket.create_server(address[:2], family=family) as server:
                    socket.create_connection(server.getsockname()[:2], timeout=_LOOPBACK_S).close()
                return
            except OSError as error:
                why = f"{address[0]}: {(error.strerror or str(error)).lower()}"
    except OSError as error:
        why = (error.strerror or str(error)).lower()
    raise UsageError(
        f"ranks cannot meet at localhost ({why}): bring the loopback interface up (ip link set lo up), and give "
        "localhost an address that it has in /etc/hosts"
    )


def _addresses() -> int | None:
    """Bytes; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _raised_files() -> int:
    """How many files may be open, once the limit is as high as it may be set."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _ENOUGH_FILES if soft == resource.RLIM_INFINITY else soft


def _loads_torch(allowed: int) -> bool:
    """A library that runs out of memory ends its process, so it is tried in another one."""
    command = [sys.executable, "-P", "-c", _TRIAL.format(max(allowed - _HEADROOM, 0))]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TRIAL_S, env=dict(os.environ))
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
