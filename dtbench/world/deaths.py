"""Why a rank died, where that can be told: what its libraries said last, and what the kernel counts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dtbench.text.clean import CleanStream

_CGROUPS = Path("/sys/fs/cgroup")
# What libstdc++'s std::terminate prints of an exception that nobody catches.
_TERMINATE = re.compile(r"^terminate called.*\n(?:\s*what\(\):\s*(.*)\n?)?", re.MULTILINE)
# gloo's check of a message that came (gloo/transport/tcp/pair.cc): what was sent, and the room there was for it.
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")


def oom_kills() -> int:
    """How many processes the kernel has ended for lack of memory: of this cgroup where that is told, else of this host.
    0 where nothing says."""
    for path in _counts():
        with suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def _counts() -> Iterator[Path]:
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            # A container may see its own group at the top.
            for inside in (place.strip("/"), ""):
                if not controllers:
                    yield _CGROUPS / inside / "memory.events"
                elif "memory" in controllers.split(","):
                    yield _CGROUPS / "memory" / inside / "memory.oom_control"
    yield Path("/proc/vmstat")


def keep_words(file: Path) -> None:
    """What this rank's libraries and child processes write to standard error goes to the file from now on, for
    `last_words`; what Python writes there does not."""
    with suppress(OSError):
        kept = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        sys.stderr.flush()
        sys.stderr = CleanStream(os.fdopen(os.dup(2), "w", buffering=1))
        os.dup2(kept, 2)


def last_words(file: Path) -> str:
    """The exception that ended the rank; "" where none did, or it cannot be read."""
    with suppress(OSError):
        if found := _TERMINATE.search(file.read_text("utf-8", "replace")):
            return found[1] or ""
    return ""


def other_words(folder: Path) -> str:
    """What all ranks wrote beside such exceptions."""
    return "".join(
        _TERMINATE.sub("", file.read_text("utf-8", "replace")) for file in sorted(folder.glob("words-*"))
    )


def words_file(note: str, rank: int) -> Path:
    """Beside the note that the ranks of a launch share."""
    return Path(note).with_name(f"words-{rank}")


def explain(who: str, words: str, out_of_memory: bool, otherwise: str) -> tuple[str, bool]:
    """Why a rank is gone, in a sentence, and whether it is that rank's fault.

    words: its last ones. out_of_memory: whether the kernel has ended a process for it. otherwise: what is known
    without them.
    """
    if sizes := _SIZES.search(words):
        told = f"{who} was sent {sizes[1]} bytes at a time where it expected {sizes[2]}"
        return f"the ranks disagree on the size of a collective: {told}", False
    if words:
        return f"{who} died: {words}", True
    return f"{who} {'ran out of memory: the kernel ended it' if out_of_memory else otherwise}", True
