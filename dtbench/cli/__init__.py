"""The command line: `program` is the group of commands and turns errors into exit codes; every other file is a command
or the options of several. Nothing imports this package but `__main__` and the installed script."""

import os
import sys

# As little is imported here as can be: Ctrl-C is not answered before `main`.


def main() -> None:
    """The program `dtbench`; Ctrl-C and signals that end it are answered in a line from the first import on."""
    # Standard streams that were closed lead nowhere: a run file opened later would take their place.
    while (nowhere := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(nowhere, True)
    os.close(nowhere)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    try:
        if "RANK" not in os.environ:  # a rank's launcher says it
            import signal

            for signal_number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signal_number) is signal.SIG_DFL:
                    signal.signal(signal_number, signal.default_int_handler)
        from dtbench.cli.program import main as program
    except KeyboardInterrupt:
        sys.stderr.write("dtbench: interrupted\n")
        sys.exit(130)  # EXIT_INTERRUPTED, which may not be imported yet
    program()
