"""`python -m dtbench`: the same program as the `dtbench` script."""

import os

if {"DTBENCH_NOTE", "RANK"} <= os.environ.keys():
    import signal

    # A rank of our launcher: until it has joined the others Ctrl-C just ends it, and the launcher says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dtbench.engine.workers import end_with_launcher

    end_with_launcher()  # before the imports, which take seconds

from dtbench.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        # After a KeyboardInterrupt within the exec of a string, as in dataclasses, CPython ends `-m` by SIGINT whatever
        # the exit code (a flag of its `run_eval_code_obj`); the next exec clears that.
        exec("")
