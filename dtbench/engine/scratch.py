"""Temporary folders that do not outlive their program: what a killed one left, the next one removes.

So with processes: those that were started with the folder's name in their environment end with the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "dtbench-scratch-"
# Over the processes: a killed one is there until the kernel has come to it, and one that hangs in a driver for ever.
_MOST_PASSES, _BETWEEN_S = 100, 0.01


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A new temporary folder, locked while it is in use and removed in the end, with the processes that know it.

    Those of this user that no program holds are removed first.
    """
    sweep()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Another program's sweep may have come before the lock: then the folder is gone.
        with contextlib.suppress(FileNotFoundError):
            held = os.open(folder, os.O_RDONLY)
            _lock(held, fcntl.LOCK_EX)
            if folder.exists():
                break
            os.close(held)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(held)


def sweep() -> None:
    """Removes what killed programs of this user left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(found).st_uid == os.getuid() and _lock(found, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    _remove(folder)
            finally:
                os.close(found)


def _remove(folder: Path) -> None:
    for _ in range(_MOST_PASSES):
        if not _end_processes_of(folder):
            break
        time.sleep(_BETWEEN_S)
    shutil.rmtree(folder, ignore_errors=True)


def _end_processes_of(folder: Path) -> bool:
    """Whether there were any: those may have started others, which this did not see."""
    mark, found = os.fsencode(folder), False
    for environ in Path("/proc").glob("[0-9]*/environ"):  # only Linux has it
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
                found = True
    return found


def _lock(folder: int, how: int) -> bool:
    """Whether it is locked now. A file system without locks goes without: nothing on it is swept."""
    try:
        fcntl.flock(folder, how)
    except OSError:
        return False
    return True
