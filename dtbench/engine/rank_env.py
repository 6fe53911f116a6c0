"""Reads the rank of this process from the environment variables of torchrun, srun or mpirun.

Our launcher sets torchrun's variables.
"""

import dataclasses
import os
import re
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

from dtbench.errors import UsageError

# Passed from one launch to the next where a rank of another launcher restarts itself.
_ENV_LAUNCH = "DTBENCH_LAUNCH"  # number of the launch, from 0
_ENV_OUTPUT = "DTBENCH_OUTPUT"  # the run file, if -o does not name it

_MAX_PORT = 65535


def launch_number() -> int:
    """Returns which of the --launches this process belongs to, from 0."""
    return int(os.environ.get(_ENV_LAUNCH, "0"))


def output_of(chosen: Path | None) -> Path:
    """Returns the run file: `chosen` if -o was given, else a name from the start time of the run."""
    return chosen or Path(
        os.environ.get(_ENV_OUTPUT) or time.strftime("run-%Y%m%dT%H%M%SZ.jsonl", time.gmtime())
    )


def start_next_launch(launch: int, output: Path) -> NoReturn:
    """Replaces this rank of another launcher by a fresh process that measures the next launch."""
    os.environ.update({_ENV_LAUNCH: str(launch), _ENV_OUTPUT: str(output)})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@dataclass(frozen=True)
class RankEnv:
    """A rank as its launcher describes it to the process.

    Attributes:
        rank: the rank, from 0.
        world_size: number of ranks.
        local_rank: the rank among those of its host.
        local_world_size: number of ranks on its host, if known.
        address: host of the ranks' store.
        port: port of the ranks' store.
        agent_store: whether the launcher serves the store, which then outlives the ranks; otherwise rank 0 does.
        attempt: how often torchrun has restarted the ranks, which keep their store.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    address: str
    port: int
    agent_store: bool
    attempt: int = 0

    def of_launch(self, launch: int) -> Self:
        """Returns the environment with a port of its own for each launch, since rank 0's previous port may linger."""
        return dataclasses.replace(
            self, port=self.port if self.agent_store else min(self.port + launch, _MAX_PORT)
        )

    @property
    def serves(self) -> bool:
        """Whether this rank serves the store."""
        return self.rank == 0 and not self.agent_store

    @property
    def store(self) -> str:
        """The store and its address, for messages."""
        return f"the TCPStore of {'the launcher' if self.agent_store else 'rank 0'} at {self.address}:{self.port}"


class _Variables(NamedTuple):
    """Names of the environment variables by which a launcher describes a rank.

    Attributes:
        rank: the rank.
        size: number of ranks.
        local_rank: the rank among those of its host.
        local_size: number of ranks on its host.
        job: variables that together identify the job, with the same values on every rank.
        hosts: lists of hosts, each beginning with the host of rank 0.
    """

    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    job: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


_TORCHRUN = _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# srun(1), "OUTPUT ENVIRONMENT VARIABLES".
_SLURM = _Variables(
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
)
# The first launcher whose rank and size are set counts. A launcher that runs inside another's job precedes that one.
_LAUNCHERS = (
    _TORCHRUN,
    # docs.open-mpi.org, "Environment variables set for MPI applications"; the namespace: PMIx_Init(3).
    _Variables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
    ),
    # MVAPICH2's mpirun_rsh.
    _Variables(
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
    ),
    # flux-environment(7).
    _Variables("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", job=("FLUX_JOB_ID",)),
    _SLURM,
    _SLURM._replace(size="SLURM_NTASKS"),
    # Hydra, the mpiexec of MPICH and Intel MPI.
    _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Torch's rendezvous needs all of them.
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def find_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv | None:
    """Returns the rank of this process; None if no launcher started ranks.

    A Slurm step or mpirun of a single process does not count: our launcher starts the ranks inside it.

    Raises:
        UsageError: the variables are incomplete, contradictory or impossible.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")
    # A batch script has Slurm's variables but is not in a step. Hydra's step has one process per host, which starts the
    # ranks.
    by_srun = "SLURM_STEP_ID" in environ and environ.get("PMI_SIZE", tasks) == tasks
    launchers = [names for names in _LAUNCHERS if by_srun or names.rank != _SLURM.rank]
    names = next((names for names in launchers if environ.get(names.rank) and environ.get(names.size)), None)
    if names is None:
        pairs = (name for launcher in launchers for name in launcher[:2])
        # LOCAL_RANK, PMIX_RANK and PALS_RANKID show that this is a rank, but not how many there are.
        present = [name for name in (*pairs, "LOCAL_RANK", "PMIX_RANK", "PALS_RANKID") if environ.get(name)]
        # Containers may set WORLD_SIZE=1, without ranks.
        _refuse_partial(
            environ, [] if present == ["WORLD_SIZE"] and environ["WORLD_SIZE"] == "1" else present
        )
        return None
    size = _number(names.size, environ[names.size], 1)
    if names is _TORCHRUN:
        _refuse_partial(environ, [] if all(map(environ.get, _NEEDED)) else _TORCHRUN[:2])
    else:
        values = zip(_TORCHRUN[:2], (environ[names.rank], environ[names.size]), strict=True)
        _refuse_partial(environ, [name for name, value in values if environ.get(name, "") not in ("", value)])
        if size == 1:
            return None
    rank = _number(names.rank, environ[names.rank], 0, size - 1)
    # Slurm writes 4(x2), or 4,2 if hosts differ.
    local = re.sub(r"\(x\d+\)$", "", environ.get(names.local_size, ""))
    local_size = _number(names.local_size, local, 1, size) if local and "," not in local else None
    local_rank = environ.get(names.local_rank) or str(rank % (local_size or size))
    hosts = "localhost" if local_size == size else next(filter(None, map(environ.get, names.hosts)), "")
    address = environ.get("MASTER_ADDR") or first_host(hosts)
    if not address:
        raise UsageError(
            f"{names.rank} is set but {' or '.join(('MASTER_ADDR', *names.hosts[1:]))} is not: set MASTER_ADDR to the "
            "host of rank 0, on every rank (Open MPI: mpirun -x MASTER_ADDR=HOST)"
        )
    if not address.strip() or not address.isprintable():
        raise UsageError(f"the environment has MASTER_ADDR={address[:40]!r}: expected the host of rank 0")
    # Spread jobs over the registered ports below Linux's ephemeral range (from 32768).
    job = zlib.crc32(" ".join(environ.get(name, "") for name in names.job).encode())
    return RankEnv(
        rank=rank,
        world_size=size,
        local_rank=_number(names.local_rank, local_rank, 0, (local_size or size) - 1),
        local_world_size=local_size,
        address=address,
        port=_number("MASTER_PORT", environ.get("MASTER_PORT") or str(20000 + job % 12000), 1, _MAX_PORT),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number("TORCHELASTIC_RESTART_COUNT", environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def valid_rank_env() -> RankEnv | None:
    """Returns the rank of this process; None if it has none or its variables are refused. The command reports those."""
    with suppress(UsageError):
        return find_rank_env()
    return None


def _refuse_partial(environ: Mapping[str, str], present: Sequence[str]) -> None:
    """Refuses variables that make this process a rank without describing it completely."""
    if present:
        raise UsageError(
            f"{' and '.join(present)} {'are' if len(present) > 1 else 'is'} set but "
            f"{' and '.join(name for name in _NEEDED if not environ.get(name))} not: set all of "
            f"{', '.join(_NEEDED)} on every rank, as torchrun does, or unset {' and '.join(present)}, "
            "and dtbench takes its ranks from srun or mpirun, or starts its own"
        )


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm node list, "" if it is empty: `gpu[001-004,009],login1` -> `gpu001`."""
    # Replace each range by its first host.
    return re.sub(r"\[([^],-]*)[^]]*]?", r"\1", nodelist.strip()).partition(",")[0]


def _number(name: str, text: str, minimum: int = 0, maximum: int | None = None) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1
    if number < minimum or (maximum is not None and number > maximum):
        raise UsageError(
            f"the environment has {name}={text[:40]!r}: expected a whole number{f' from {minimum}' if minimum else ''}"
            f"{'' if maximum is None else f' of at most {maximum}'}; correct or unset it"
        )
    return number
