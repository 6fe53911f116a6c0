"""The command line: `program` is the group of commands and turns errors into exit codes; every other file is a command
or the options of several. Nothing imports this package but `__main__` and the installed script."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """The program `dtbench`; Ctrl-C is answered in a line from the first import on."""
    try:
        from dtbench.cli.program import main as program
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.stderr.write("dtbench: interrupted\n")
        sys.exit(130)  # EXIT_INTERRUPTED, which may not be imported yet
    program()
