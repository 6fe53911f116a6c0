"""`python -m dtbench`: the same program as the `dtbench` script."""

from dtbench.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        # After a KeyboardInterrupt within the exec of a string, as in dataclasses, CPython ends `-m` by SIGINT whatever
        # the exit code (a flag of its `run_eval_code_obj`); the next exec clears that.
        exec("")
