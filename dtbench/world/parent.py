"""A rank of our launcher ends with it, however that dies.

This is a rank's first step: it imports little.
"""

from __future__ import annotations

import os
import select
import signal
import threading

LAUNCHER = "DTBENCH_LAUNCHER"  # the launcher's process id; set by our own launcher only
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_DEAD = 1


def end_with_launcher() -> None:
    """From now on this process gets a SIGTERM when its launcher dies; it ends here if that has died already.

    The parent alone does not tell: a rank may be forked by a server (Linux only, nothing elsewhere).
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    try:
        of_launcher = os.pidfd_open(int(launcher))  # refers to a zombie, too, and is then readable
    except ProcessLookupError:
        os._exit(_DEAD)
    except (AttributeError, OSError):  # before Linux 5.3
        _end_with_parent(int(launcher))
        return
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the thread inherits this
    threading.Thread(target=_wait, args=(of_launcher,), name="launcher", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _wait(of_launcher: int) -> None:
    end = select.poll()
    end.register(of_launcher, select.POLLIN)
    end.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def _end_with_parent(launcher: int) -> None:
    import ctypes

    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != launcher:  # it died before it was asked for
        os._exit(_DEAD)
