"""`python -m dtbench`: the same program as the `dtbench` script."""

from dtbench.cli import main

if __name__ == "__main__":
    main()
