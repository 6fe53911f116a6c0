"""What the example programs share: the ranks that torchrun started, one voice for all, checks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def launched(program: str, ranks: int) -> Iterator[torch.device]:
    """The process group of torchrun's processes, made unless it is there; gives this rank's device, a GPU where
    every rank has one. Where it was made, a rank that comes to the end of the block has ended.

    Raises:
        SystemExit: not started by torchrun, or with another number of ranks.
    """
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if started != ranks:
        sys.exit(
            f"{program} got {started or 'no'} ranks, expected {ranks}: "
            f"torchrun --nproc-per-node {ranks} -m dtbench_suites.examples.{program}"
        )
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if dist.is_initialized():
        yield device
        return
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # Past the interpreter's end: a group's threads outlive it where a cache holds it, and one that is then still
    # busy with a tensor aborts the process, once in some hundred launches on busy cores (pytorch#179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def say(text: str) -> None:
    """On rank 0 alone."""
    if dist.get_rank() == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def check(holds: bool, what: str) -> None:
    """Raises:
    SystemExit: if it does not hold; torchrun then ends the other ranks too.
    """
    if not holds:
        sys.exit(f"rank {dist.get_rank()}: wrong: {what}")
