"""Logs of launches: whatever an arm prints, each keeps its first and last MiB."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

KEPT_BYTES = 2**20  # at each end
# How often a log is looked at while a launch is waited for.
LOOK_S = 0.25


class CappedLog:
    """A file that processes append to, cut in the middle from time to time. left_out: bytes, in all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_out = 0

    def open(self) -> IO[bytes]:
        """Emptied, to append to."""
        self.path.write_bytes(b"")
        return self.path.open("ab")

    def cut(self, *, final: bool = False) -> None:
        """Leaves the two ends. final: nobody writes any more; before, it may be half as long again."""
        with contextlib.suppress(OSError), self.path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= (2 if final else 3) * KEPT_BYTES:
                return
            file.seek(-KEPT_BYTES, os.SEEK_END)
            last = file.read(KEPT_BYTES)
            self.left_out += size - 2 * KEPT_BYTES
            file.truncate(KEPT_BYTES)
            with self.path.open("ab") as end:
                end.write(f"\n... {self.left_out} bytes left out by dtbench ...\n".encode() + last)

    def tail(self) -> str:
        """Its last lines."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - 2**16, 0))
            return file.read().decode(errors="replace")
        return ""
