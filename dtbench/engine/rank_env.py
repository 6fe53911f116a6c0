"""This process's place among the ranks that a launcher started, from the variables of torchrun, srun or mpirun.

Our launcher sets torchrun's variables.
"""

from __future__ import annotations

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
from typing import NamedTuple, NoReturn

from dtbench.errors import UsageError

# Passed from one launch to the next where a rank of another launcher restarts itself.
_ENV_LAUNCH = "DTBENCH_LAUNCH"  # number of the launch, from 0
_ENV_OUTPUT = "DTBENCH_OUTPUT"  # the run file, if -o does not name it

_MAX_PORT = 65535


def launch_number() -> int:
    """Returns which of the --launches this process belongs to, from 0."""
    return int(os.environ.get(_ENV_LAUNCH, "0"))


def output_of(chosen: Path | None) -> Path:
    """Returns the run file: `chosen` by -o, else named by the time at which the run began."""
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
    """This process in a world that a launcher has started.

    agent_store: the launcher hosts the store, so that it outlives the ranks; otherwise rank 0 does.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    address: str
    port: int
    agent_store: bool
    attempt: int = 0  # torchrun may start the ranks again, on the same store

    def of_launch(self, launch: int) -> RankEnv:
        """With a port for this launch where rank 0 hosts the store: that of the launch before may linger."""
        further = 0 if self.agent_store else launch
        return dataclasses.replace(self, port=min(self.port + further, _MAX_PORT))

    @property
    def serves(self) -> bool:
        return self.rank == 0 and not self.agent_store

    @property
    def store(self) -> str:
        """The store and its address, for messages."""
        return f"the TCPStore of {'the launcher' if self.agent_store else 'rank 0'} at {self.address}:{self.port}"


class _Variables(NamedTuple):
    """Environment variables in which a launcher gives a process its place.

    Attributes:
        rank: its rank.
        size: the number of ranks.
        local_rank: its rank among those of its host.
        local_size: the number of ranks on its host.
        job: together they identify the job, with the same values on every rank.
        hosts: of each the first host is that of rank 0.
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
# The first whose rank and size are set counts: a launcher that runs inside another's job stands before it.
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
    """The place that a launcher gave this process; None when no launcher started ranks.

    A Slurm step, or an mpirun, of a single process is no world: our own launcher starts the ranks inside it.

    Raises:
        UsageError: an environment that is only partly set, contradicts itself, or cannot be.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")
    # A batch script is in no step; Hydra starts one process per host as a step, which starts the ranks.
    by_srun = "SLURM_STEP_ID" in environ and environ.get("PMI_SIZE", tasks) == tasks
    launchers = [names for names in _LAUNCHERS if by_srun or names.rank != _SLURM.rank]
    names = next((names for names in launchers if environ.get(names.rank) and environ.get(names.size)), None)
    if names is None:
        pairs = (name for others in launchers for name in others[:2])
        # The last three identify a rank and give no number of ranks.
        found = [name for name in (*pairs, "LOCAL_RANK", "PMIX_RANK", "PALS_RANKID") if environ.get(name)]
        # Containers may set a world of one, which has no other ranks.
        _refuse_partial(environ, [] if found == ["WORLD_SIZE"] and environ["WORLD_SIZE"] == "1" else found)
        return None
    size = _number(names.size, environ[names.size], 1)
    if names is _TORCHRUN:
        _refuse_partial(environ, [] if all(map(environ.get, _NEEDED)) else _TORCHRUN[:2])
    else:
        given = zip(_TORCHRUN[:2], (environ[names.rank], environ[names.size]), strict=True)
        _refuse_partial(environ, [name for name, value in given if environ.get(name, "") not in ("", value)])
        if size == 1:
            return None
    rank = _number(names.rank, environ[names.rank], 0, size - 1)
    # Slurm writes 4(x2), or 4,2 where hosts differ.
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
    # Spread jobs over the registered ports below Linux's ephemeral range (from 32768).
    job = zlib.crc32(" ".join(environ.get(name, "") for name in names.job).encode())
    return RankEnv(
        rank=rank,
        world_size=size,
        local_rank=_number(names.local_rank, local_rank, 0, (local_size or size) - 1),
        local_world_size=local_size,
        address=_address(address),
        port=_number("MASTER_PORT", environ.get("MASTER_PORT") or str(20000 + job % 12000), 1, _MAX_PORT),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number("TORCHELASTIC_RESTART_COUNT", environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def valid_rank_env() -> RankEnv | None:
    """The place; None also where its variables are refused, which the command itself reports."""
    with suppress(UsageError):
        return find_rank_env()
    return None


def _refuse_partial(environ: Mapping[str, str], found: Sequence[str]) -> None:
    """found: variables that make this process a rank, and are not enough for it."""
    if found:
        missing = " and ".join(name for name in _NEEDED if not environ.get(name))
        raise UsageError(
            f"{' and '.join(found)} {'are' if len(found) > 1 else 'is'} set but {missing} not: set all of "
            f"{', '.join(_NEEDED)} on every rank, as torchrun does, or unset {' and '.join(found)}, and dtbench takes "
            "its ranks from srun or mpirun, or starts its own"
        )


def first_host(nodelist: str) -> str:
    """`gpu[001-004,009],login1` -> `gpu001`: the first host of a Slurm node list; "" of an empty one."""
    # The first host of each range.
    return re.sub(r"\[([^],-]*)[^]]*]?", r"\1", nodelist.strip()).partition(",")[0]


def _number(name: str, text: str, least: int = 0, most: int | None = None) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1
    if number < least or (most is not None and number > most):
        raise UsageError(
            f"the environment has {name}={text[:40]!r}: expected a whole number"
            f"{f' from {least}' if least else ''}{'' if most is None else f' of at most {most}'}; correct or unset it"
        )
    return number


def _address(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise UsageError(f"the environment has MASTER_ADDR={text[:40]!r}: expected the host of rank 0")
    return text
