"""Why a rank died, where that can be told: what its libraries said last, and what the kernel counts."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
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
    `other_words`; what Python writes there does not."""
    with suppress(OSError):
        kept = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        sys.stderr.flush()
        sys.stderr = CleanStream(os.fdopen(os.dup(2), "w", buffering=1))
        os.dup2(kept, 2)


def catch_terminate(end: Callable[[str], object]) -> None:
    """From now on an exception of C++ that nobody catches, as in a thread of gloo, is given to `end`, which does not
    return, in place of being printed. Where the C++ library is not libstdc++, nothing changes.

    Only the handler that prints it knows how to read an exception, and it ends in abort(): it prints into a file, and
    is stopped there, in the signal's handler, which runs in the thread that has called abort().
    """
    step = ctypes.CFUNCTYPE(None)
    on_signal = ctypes.CFUNCTYPE(None, ctypes.c_int)

    def terminate() -> None:
        with tempfile.TemporaryFile() as file:
            shown = os.dup(2)

            def aborted(_number: int) -> None:
                os.dup2(shown, 2)
                file.seek(0)
                found = _TERMINATE.search(file.read().decode("utf-8", "replace"))
                end((found and found[1]) or "an exception of C++ that nobody caught")

            stop = on_signal(aborted)
            signal_of(int(signal.SIGABRT), stop)
            os.dup2(file.fileno(), 2)
            step(before)()

    with suppress(OSError, AttributeError):
        libraries = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
        set_terminate = libraries[0]["_ZSt13set_terminatePFvvE"]  # std::set_terminate(void (*)())
        signal_of = libraries[1]["signal"]
        signal_of.argtypes, signal_of.restype = (ctypes.c_int, on_signal), ctypes.c_void_p
        set_terminate.argtypes, set_terminate.restype = (step,), ctypes.c_void_p
        handler = step(terminate)
        _kept.append(handler)
        before = set_terminate(handler)


_kept: list[object] = []  # what C++ calls must live as long as the process


def other_words(folder: Path) -> str:
    """What all ranks wrote."""
    return "".join(file.read_text("utf-8", "replace") for file in sorted(folder.glob("words-*")))


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
