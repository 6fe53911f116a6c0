"""The command line.

`program` has the group of commands and turns errors into exit codes. `options` has the options that commands share. The
other files define one or two commands each. Only `__main__` and the installed script call `main`.
"""

import os
import sys

# Import as little as possible here: before `main`, Ctrl-C prints a traceback.


def main() -> None:
    """Runs the program `dtbench`. From here on, Ctrl-C and ending signals print one line instead of a traceback."""
    # Opens closed standard streams on /dev/null. Otherwise a run file opened later would get descriptor 0, 1 or 2.
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(null, True)
    os.close(null)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    try:
        if "RANK" not in os.environ:  # not in a rank, where the launcher reports the signal
            import signal

            for signal_number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signal_number) is signal.SIG_DFL:
                    signal.signal(signal_number, signal.default_int_handler)
        from dtbench.cli.program import main as program
    except KeyboardInterrupt:
        sys.stderr.write("dtbench: interrupted\n")
        sys.exit(130)  # EXIT_INTERRUPTED, which may not be imported yet
    program()
