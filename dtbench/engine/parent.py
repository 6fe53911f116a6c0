"""A rank of our launcher ends with it, however that dies.

This is a rank's first step: it imports little.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import threading

LAUNCHER = "DTBENCH_LAUNCHER"  # the launcher's process id; set by our own launcher only
NOTE = "DTBENCH_NOTE"  # path of the note to it (launch.py); set by our own launcher only
INTERRUPTED_MARK = "interrupted"  # a file beside the note, once the launcher was interrupted
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_DEAD = 1
_INTERRUPTED = 130  # model.errors, which takes a while to load
# What pidfd_open says of a process that has ended, and of one that is reaped while it looks.
_NO_SUCH_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)


def end_with_launcher() -> None:
    """From now on this process gets a SIGTERM when its launcher dies; it ends here if that has died already, or was
    interrupted while this process was deaf to it.

    The kernel signals the death of a parent, whatever this process does then. A rank that a server has forked has
    another parent: a thread waits for its launcher's end (both on Linux only, nothing elsewhere).
    """
    if NOTE in os.environ and os.path.exists(  # noqa: PTH110 - pathlib takes a while to load
        os.path.join(os.path.dirname(os.environ[NOTE]), INTERRUPTED_MARK)  # noqa: PTH118, PTH120
    ):
        os._exit(_INTERRUPTED)
    launcher = int(os.environ.get(LAUNCHER, "0"))
    if launcher and os.getppid() == launcher:
        _end_with_parent(launcher)
    elif launcher:
        _end_with_process(launcher)


def _end_with_parent(parent: int) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it died before its signal was set
        os._exit(_DEAD)


def _end_with_process(pid: int) -> None:
    try:
        of_launcher = os.pidfd_open(pid)  # refers to a zombie, too, and is then readable
    except AttributeError:
        return
    except OSError as error:
        if error.errno in _NO_SUCH_PROCESS:
            os._exit(_DEAD)
        return  # before Linux 5.3
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the thread inherits this
    threading.Thread(target=_wait, args=(of_launcher,), name="launcher", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _wait(of_launcher: int) -> None:
    end = select.poll()
    end.register(of_launcher, select.POLLIN)
    end.poll()
    os.kill(os.getpid(), signal.SIGTERM)
