"""What a shell or a job allows this process too little of, said before a library ends the program in its own words.

Needs neither torch nor anything else that may not be loadable then.
"""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

from dtbench.errors import UsageError

# A launcher, and a process of two ranks, opened 34 files; each further rank costs the launcher and its peers some.
_FILES, _FILES_PER_RANK = 32, 8
_ENOUGH_FILES = 4096
_LOOPBACK_S = 5.0


def refuse_place() -> None:
    """Raises UsageError where the current folder is gone."""
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the current folder is gone ({(error.strerror or str(error)).lower()}): cd to another, or cd to it anew"
        ) from error


def refuse_torch(ranks: int = 1) -> None:
    """Before torch is loaded. ranks: how many processes meet.

    Raises:
        UsageError: too few files may be open for them.
    """
    files = _raised_files()
    wanted = _FILES + _FILES_PER_RANK * ranks
    if files < wanted:
        processes = "a process" if ranks == 1 else f"{ranks} processes"
        raise UsageError(
            f"{files} open files are allowed (ulimit -n), expected at least {wanted} for {processes}; raise the limit"
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


def _raised_files() -> int:
    """How many files may be open, once the limit is as high as it may be set."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _ENOUGH_FILES if soft == resource.RLIM_INFINITY else soft


def usable_cpus() -> list[int]:
    """The CPUs this process may run on, by number: fewer than the machine's under taskset or a cpuset."""
    return sorted(os.sched_getaffinity(0))
