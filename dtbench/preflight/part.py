"""Measures exchanges, collectives and work on a rank of a preflight, on commands from rank 0."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from dtbench.engine.clock import HostClock
from dtbench.engine.rank_votes import LiveWorld
from dtbench.machine.device import gpus
from dtbench.machine.host import boot_id
from dtbench.machine.limits import usable_cpus
from dtbench.preflight.examine import COPY, MATMUL, WORK_S, ProbeCommand

# Operands are larger than the caches of CPUs, and large enough to occupy a GPU. Operations are repeated until they take
# about `WORK_S`.
MATMUL_N = {"cpu": 512, "cuda": 8192}
COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}


class Probe:
    """Carries out commands on this rank. All ranks take part in each command; ranks without work in it wait."""

    def __init__(self, world: LiveWorld, barrier: Callable[[], None]) -> None:
        self._world = world
        self._barrier = barrier
        self._device = world.device
        self._connected_pairs: set[tuple[int, int]] = set()
        self._repeats: dict[str, int] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def do(self, command: ProbeCommand) -> object:
        """Returns the times of this rank, seconds."""
        return getattr(self, f"_{command['do']}")(command)

    def _timed(self, act: Callable[[], object]) -> float:
        """Returns the seconds from a barrier to the end of this rank's part."""
        self._barrier()
        return HostClock().measure(partial(self._finish, act), 1)

    def _finish(self, act: Callable[[], object]) -> None:
        act()
        if self._device.type == "cuda":
            gpus().synchronize()

    def _place(self, _command: ProbeCommand) -> tuple[str | None, list[int], int]:
        """Returns the boot id of the host, the usable CPUs (none if the rank computes on a GPU) and its threads."""
        return boot_id(), usable_cpus() if self._device.type == "cpu" else [], torch.get_num_threads()

    def _pairs(self, command: ProbeCommand) -> list[list[float] | None]:
        """Returns for each round the times of this rank's exchanges; None for a round in which it has no partner."""
        rank = self._world.rank
        partners = [
            next((b if rank == a else a for a, b in pairs if rank in (a, b)), None)
            for pairs in command["rounds"]
        ]
        exchanges = [partial(self._exchange, partner, command["bytes"]) for partner in partners]
        for exchange, pairs_at_once in zip(exchanges, command["rounds"], strict=True):
            pairs = {(a, b) for a, b in pairs_at_once}
            # The first exchange of a pair opens its connection and does not count.
            if not pairs <= self._connected_pairs:
                self._timed(exchange)
                self._connected_pairs |= pairs
        times = [[self._timed(exchange) for exchange in exchanges] for _ in range(command["reps"])]
        return [
            None if partner is None else [turn[index] for turn in times]
            for index, partner in enumerate(partners)
        ]

    def _exchange(self, partner: int | None, size_bytes: int) -> None:
        """Sends and receives `size_bytes`."""
        if partner is None:
            return
        sent, received = self._buffer("sent", size_bytes), self._buffer("received", size_bytes)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
        ):
            work.wait()

    def _all_reduce(self, command: ProbeCommand) -> list[float]:
        """Returns the times of this rank's group; empty if the rank takes no part."""
        mesh, dim = self._world.mesh, command["dim"]
        group = mesh.get_group(dim) if dim in (mesh.mesh_dim_names or ()) else None
        takes_part = self._world.rank in command["ranks"]
        data = self._buffer("sent", command["bytes"]).view(torch.float32).zero_()
        act = partial(dist.all_reduce, data, group=group) if takes_part else lambda: None
        self._timed(act)
        times = [self._timed(act) for _ in range(command["reps"])]
        return times if takes_part else []

    def _buffer(self, name: str, size_bytes: int) -> torch.Tensor:
        """Returns the first `size_bytes` of a named buffer, which grows as needed."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size_bytes:
            buffer = self._buffers[name] = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
        return buffer[:size_bytes]

    def _work(self, command: ProbeCommand) -> list[float]:
        """Returns the times of equal pieces of work; empty if the rank takes no part."""
        act = {MATMUL: self._matmul, COPY: self._copy}[command["kind"]]
        if command["kind"] not in self._repeats:
            self._repeats[command["kind"]] = self._choose_repeats(act)

        def piece(count: int) -> None:
            for _ in range(count):
                act()

        repeats = self._repeats[command["kind"]]
        counts = [repeats if self._world.rank in turn else 0 for turn in command["turns"]]
        times = [
            (count, self._timed(partial(piece, count))) for _ in range(command["reps"]) for count in counts
        ]
        return [seconds for count, seconds in times if count]

    def _choose_repeats(self, act: Callable[[], object]) -> int:
        """Returns the number of repetitions that take `WORK_S` on the fastest rank. All ranks use the same number."""
        act()
        fastest = torch.tensor([min(self._timed(act) for _ in range(3))], device=self._device)
        dist.all_reduce(fastest, op=dist.ReduceOp.MIN)
        return max(1, round(WORK_S / max(float(fastest), 1e-6)))

    def _matmul(self) -> None:
        n = MATMUL_N[self._device.type]
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        a = self._buffer("a", n * n * dtype.itemsize).view(dtype).view(n, n)
        torch.mm(a, a, out=self._buffer("out", n * n * dtype.itemsize).view(dtype).view(n, n))

    def _copy(self) -> None:
        size = COPY_BYTES[self._device.type]
        self._buffer("to", size).copy_(self._buffer("from", size))
