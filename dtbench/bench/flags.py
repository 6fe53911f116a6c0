"""What the commands that measure take on their command lines: `run`, `profile` and `gate`."""

from __future__ import annotations

import click

from dtbench.bench.options import DEFAULT_TIMEOUT_S, DTYPES, parse_list, parse_sizes
from dtbench.mesh import parse_mesh
from dtbench.model import CHOOSABLE_IMPLS

IMPL = click.option(
    "--impl",
    "impls",
    default=",".join(CHOOSABLE_IMPLS),
    metavar="LIST",
    type=lambda text: parse_list(text, CHOOSABLE_IMPLS, "--impl"),
    help="Which implementations; the references beside them are always measured.",
)
MESH = click.option("--mesh", metavar="DIMS", type=parse_mesh, help="Mesh dims, outermost first: dp=2,tp=2.")
NPROC = click.option("--nproc", type=int, show_default="one per GPU, else 4", help="Ranks to start here.")
DEVICE = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
BACKEND = click.option(
    "--backend",
    type=click.Choice(["auto", "gloo"]),
    default="auto",
    help="NCCL on GPUs and gloo on CPUs, or gloo on GPUs too, which ranks may then share.",
)
SIZE = click.option(
    "--size",
    "sizes_bytes",
    metavar="SIZES",
    type=parse_sizes,
    help="Sizes of the sweeps: 1KiB:16MiB:4x (first, last, factor), 64KiB, or a comma list.",
)
DTYPE = click.option(
    "--dtype",
    "dtypes",
    default="float32",
    metavar="LIST",
    type=lambda text: parse_list(text, DTYPES, "--dtype"),
    help="One or more of " + ", ".join(DTYPES) + ".",
)
FILTER = click.option(
    "--filter",
    default="",
    show_default=False,
    metavar="TEXT",
    help="Only cases whose line in `list` holds every word of TEXT ('in quotes' it is one), NAME=VALUE as a whole.",
)
TIMEOUT = click.option("--timeout", "timeout_s", default=DEFAULT_TIMEOUT_S, help="Seconds per case.")
