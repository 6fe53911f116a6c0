"""Makes `python -m dtbench` run the `dtbench` command."""

from dtbench.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        # After a KeyboardInterrupt inside exec of a string, e.g. in dataclasses, CPython ends `python -m` by SIGINT and
        # ignores the exit code. Another exec clears the flag that causes it (see CPython's `run_eval_code_obj`).
        exec("")
