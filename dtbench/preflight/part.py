"""What a rank does in a preflight: the exchanges, collectives and pieces of work that rank 0 asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from dtbench.engine.clock import HostClock
from dtbench.engine.ranks import LiveWorld
from dtbench.machine.device import gpus
from dtbench.machine.host import boot_id
from dtbench.machine.limits import usable_cpus
from dtbench.preflight.examine import COPY, MATMUL, WORK_S, ProbeCommand

# An operation is repeated until it takes about `WORK_S`; its size fits into caches of no CPU and fills a GPU.
MATMUL_N = {"cpu": 512, "cuda": 8192}
COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}


class Probe:
    """This rank. Every command is done by all ranks together; those without a part in it wait."""

    def __init__(self, world: LiveWorld, barrier: Callable[[], None]) -> None:
        self._world = world
        self._barrier = barrier
        self._device = world.device
        self._clock = HostClock()
        self._met: set[tuple[int, int]] = set()
        self._repeats: dict[str, int] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def do(self, command: ProbeCommand) -> object:
        """What this rank measured, in seconds."""
        return getattr(self, f"_{command['do']}")(command)

    def _timed(self, act: Callable[[], object]) -> float:
        """From when all ranks are there to when this one has done its part."""
        self._barrier()
        return self._clock.measure(partial(self._done, act), 1)

    def _done(self, act: Callable[[], object]) -> None:
        act()
        if self._device.type == "cuda":
            gpus().synchronize()

    def _place(self, _command: ProbeCommand) -> tuple[str | None, list[int], int]:
        """This rank's kernel, the CPUs it may use (none where it works on a GPU) and its threads."""
        return boot_id(), usable_cpus() if self._device.type == "cpu" else [], torch.get_num_threads()

    def _pairs(self, command: ProbeCommand) -> list[list[float] | None]:
        """Per round the time of each exchange of this rank; None without one."""
        partners = [self._partner(one) for one in command["rounds"]]
        times: list[list[float] | None] = [None if partner is None else [] for partner in partners]
        for rep in range(-1, command["reps"]):  # of those who have not met the first exchange is not counted
            for at, partner in enumerate(partners):
                pairs = {(a, b) for a, b in command["rounds"][at]}
                if rep < 0 and pairs <= self._met:
                    continue
                seconds = self._timed(partial(self._exchange, partner, command["bytes"]))
                if rep < 0:
                    self._met |= pairs
                elif (mine := times[at]) is not None:
                    mine.append(seconds)
        return times

    def _partner(self, pairs: Sequence[Sequence[int]]) -> int | None:
        rank = self._world.rank
        return next((b if rank == a else a for a, b in pairs if rank in (a, b)), None)

    def _exchange(self, partner: int | None, size_bytes: int) -> None:
        """So many bytes each way."""
        if partner is None:
            return
        sent, received = self._buffer("sent", size_bytes), self._buffer("received", size_bytes)
        both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def _all_reduce(self, command: ProbeCommand) -> list[float]:
        """Times of this rank's group; empty where it has no part."""
        mesh, dim = self._world.mesh, command["dim"]
        group = mesh.get_group(dim) if dim in (mesh.mesh_dim_names or ()) else None
        takes_part = self._world.rank in command["ranks"]
        data = self._buffer("sent", command["bytes"]).view(torch.float32)
        data.zero_()

        def act() -> None:
            if takes_part:
                dist.all_reduce(data, group=group)

        self._timed(act)
        times = [self._timed(act) for _ in range(command["reps"])]
        return times if takes_part else []

    def _buffer(self, name: str, size_bytes: int) -> torch.Tensor:
        """The first so many bytes of a buffer that grows."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size_bytes:
            buffer = self._buffers[name] = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
        return buffer[:size_bytes]

    def _work(self, command: ProbeCommand) -> list[float]:
        """Times of equal pieces of work; empty where this rank has no part."""
        act = {MATMUL: self._matmul, COPY: self._copy}[command["kind"]]
        if command["kind"] not in self._repeats:
            self._repeats[command["kind"]] = self._fitting(act)

        def piece(count: int) -> None:
            for _ in range(count):
                act()

        times = []
        for _ in range(command["reps"]):
            for turn in command["turns"]:
                mine = self._world.rank in turn
                seconds = self._timed(partial(piece, self._repeats[command["kind"]] if mine else 0))
                times += [seconds] if mine else []
        return times

    def _fitting(self, act: Callable[[], object]) -> int:
        """How often it is done in `WORK_S`, on the fastest rank: all do the same."""
        act()
        fastest = torch.tensor([min(self._timed(act) for _ in range(3))], device=self._device)
        dist.all_reduce(fastest, op=dist.ReduceOp.MIN)
        return max(1, round(WORK_S / max(float(fastest), 1e-6)))

    def _matmul(self) -> None:
        n = MATMUL_N[self._device.type]
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        a = self._buffer("a", n * n * dtype.itemsize).view(dtype).view(n, n)
        out = self._buffer("out", n * n * dtype.itemsize).view(dtype).view(n, n)
        torch.mm(a, a, out=out)

    def _copy(self) -> None:
        size = COPY_BYTES[self._device.type]
        self._buffer("to", size).copy_(self._buffer("from", size))
