"""Checks limits of the process and its host early, before a library fails on them with an obscure message.

Imports neither torch nor other libraries that may fail to load under such limits.
"""

import os
import resource
import socket
from pathlib import Path

from dtbench.errors import UsageError

# Measured: the launcher of two ranks, and each of them, opened 34 files. Each further rank adds some to all processes.
_BASE_FILES, _FILES_PER_RANK = 32, 8
_FILES_GOAL = 4096
_LOOPBACK_TIMEOUT_S = 5.0


def refuse_deleted_folder() -> None:
    """Raises UsageError if the current folder no longer exists."""
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the current folder no longer exists ({(error.strerror or str(error)).lower()}): cd to an existing one"
        ) from error


def ensure_file_limit(ranks: int = 1) -> None:
    """Increases the limit of open files as far as allowed. Call it before torch is loaded.

    Args:
        ranks: number of processes that will connect to each other.

    Raises:
        UsageError: the limit is still too low for them.
    """
    limit = _raise_file_limit()
    required = _BASE_FILES + _FILES_PER_RANK * ranks
    if limit < required:
        raise UsageError(
            f"{limit} open files are allowed (ulimit -n), expected at least {required} for "
            f"{'a process' if ranks == 1 else f'{ranks} processes'}; raise the limit"
        )


def refuse_local_ranks(ranks: int) -> None:
    """Checks that `ranks` processes can run on this host and connect to each other through `localhost`.

    Raises:
        UsageError: no connection to localhost is possible, or too few files may be open.
    """
    ensure_file_limit(ranks)
    reason = "it has no address"
    try:
        for family, _, _, _, address in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM):
            try:
                with socket.create_server(address[:2], family=family) as server:
                    socket.create_connection(server.getsockname()[:2], timeout=_LOOPBACK_TIMEOUT_S).close()
                return
            except OSError as error:
                reason = f"{address[0]}: {(error.strerror or str(error)).lower()}"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    raise UsageError(
        f"ranks cannot connect to localhost ({reason}): enable the loopback interface (ip link set lo up), and map "
        "localhost to its address in /etc/hosts"
    )


def _raise_file_limit() -> int:
    """Raises the soft limit of open files towards `_FILES_GOAL` and returns the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = _FILES_GOAL if hard == resource.RLIM_INFINITY else min(hard, _FILES_GOAL)
    if soft != resource.RLIM_INFINITY and soft < goal:
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
        return goal
    return _FILES_GOAL if soft == resource.RLIM_INFINITY else soft


def usable_cpus() -> list[int]:
    """Returns the numbers of the CPUs that this process may run on, which taskset or a cpuset can restrict."""
    return sorted(os.sched_getaffinity(0))
