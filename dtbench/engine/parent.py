"""A rank of our launcher ends with it, however that dies. This is a rank's first step: it imports little."""

from __future__ import annotations

import contextlib
import os
import signal

LAUNCHER = "DTBENCH_LAUNCHER"  # the launcher's process id; set by our own launcher only
NOTE = "DTBENCH_NOTE"  # path of the note to it (`place.Note`); set by our own launcher only
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher() -> None:
    """From now on the kernel sends this process a SIGTERM when its launcher dies (on Linux; elsewhere the ranks notice
    that its store is gone); it ends here if that has died already."""
    launcher = int(os.environ.get(LAUNCHER, "0"))
    if not launcher:
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != launcher:  # it died before its signal was set
        os._exit(1)
