"""Helpers that the example programs share: the process group, printing on rank 0, checks."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def launched(program: str, ranks: int) -> Iterator[torch.device]:
    """Provides the process group of a torchrun launch and yields this rank's device, a GPU if every rank has one.

    Uses an existing process group if there is one. Otherwise creates it, and exits the process after the block.

    Raises:
        SystemExit: the program was not started by torchrun, or with a different number of ranks.
    """
    rank_count = int(os.environ.get("WORLD_SIZE", "0"))
    if rank_count != ranks:
        sys.exit(
            f"{program} got {rank_count or 'no'} ranks, expected {ranks}: "
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
    # Skips the shutdown of the interpreter. A cached process group keeps its threads alive beyond it, and a thread that
    # still uses a tensor then aborts the process, about once in some hundred launches (pytorch#179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def print_rank0(text: str) -> None:
    """Prints on rank 0 only."""
    if dist.get_rank() == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def expect(is_right: bool, name: str) -> None:
    """Ends this rank unless the checked result is right; torchrun then ends the other ranks, too.

    Raises:
        SystemExit: the result is wrong.
    """
    if not is_right:
        sys.exit(f"rank {dist.get_rank()}: wrong result: {name}")
