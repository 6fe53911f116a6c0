"""What several commands take on their command lines, each with one name: files, `-o`, `--json`, `--topology`."""

from __future__ import annotations

from pathlib import Path

import click

FILE = click.Path(path_type=Path)
RUNS = click.argument("runs", nargs=-1, required=True, type=FILE, metavar="RUN...")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
TOPOLOGY = click.option("--topology", required=True, type=FILE, help="What `dtbench calibrate` wrote.")
