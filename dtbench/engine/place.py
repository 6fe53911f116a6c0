"""This process's place in a world that a launcher has started, as torchrun, Slurm or our own launcher tell it.

What our launcher tells its ranks beyond torchrun's variables stands in others, and what they tell it in a note.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from dtbench.engine.failure import ActiveCase, Diagnosis
from dtbench.records.atomic import replace_file
from dtbench.suite.errors import UsageError

LAUNCH = "DTBENCH_LAUNCH"  # which of the --launches this is, from 0
AGAIN = "DTBENCH_AGAIN"  # set where ranks of this launch were lost
BEGAN = "DTBENCH_BEGAN"  # when the run did, on the launcher's monotonic clock
NOTE = "DTBENCH_NOTE"  # path of the note to it; set by our own launcher only
OUTPUT = "DTBENCH_OUTPUT"  # the run file, where -o was not given

_MAX_PORT = 65535


def launch_number(environ: Mapping[str, str] = os.environ) -> int:
    return int(environ.get(LAUNCH, "0"))


def output_of(chosen: Path | None) -> Path:
    """The run file: that of -o, or a name by the time in the current folder, which the launcher tells its ranks."""
    return chosen or Path(os.environ.get(OUTPUT) or time.strftime("run-%Y%m%dT%H%M%SZ.jsonl", time.gmtime()))


def start_again(launch: int, output: Path) -> NoReturn:
    """Under another's launcher: this rank becomes a fresh process of the next launch."""
    os.environ.update({LAUNCH: str(launch), OUTPUT: str(output)})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@dataclass(frozen=True)
class Note:
    """What the ranks tell our launcher.

    case: what they are at. good: how many results of the run are ok. code: the exit code, once the launch is over and
    that was said. whole: whether all that there was has been measured. diagnosis: what ended them, which the launcher
    records and says.
    """

    case: ActiveCase = field(default_factory=ActiveCase)
    good: int = 0
    code: int | None = None
    whole: bool = False
    diagnosis: Diagnosis | None = None

    def write(self, path: str) -> bool:
        """Replaces the note, and says whether it could."""
        with suppress(OSError):  # a full disk must not end a run that writes elsewhere
            replace_file(Path(path), msgspec.json.encode(self))
            return True
        return False

    @classmethod
    def read(cls, path: str | Path) -> Note:
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, ValueError, msgspec.MsgspecError):
            return cls()


@dataclass(frozen=True)
class RankPlace:
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

    def of_launch(self, launch: int) -> RankPlace:
        """With a port for this launch where rank 0 hosts the store: that of the launch before may linger."""
        further = 0 if self.agent_store else launch
        return dataclasses.replace(self, port=min(self.port + further, _MAX_PORT))

    @property
    def serves(self) -> bool:
        return self.rank == 0 and not self.agent_store


def find_place(environ: Mapping[str, str] = os.environ) -> RankPlace | None:
    """The place that torchrun or Slurm gave this process; None when nobody started ranks.

    A Slurm step of a single task is no world: our own launcher starts the ranks inside it.

    Raises:
        UsageError: an environment that is only half set, or cannot be.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun_place(environ)
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and _number("SLURM_NTASKS", tasks) > 1:
        return _slurm_place(environ, _number("SLURM_NTASKS", tasks))
    return None


def _torchrun_place(environ: Mapping[str, str]) -> RankPlace:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise UsageError(
            f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not: start dtbench under torchrun, "
            f"or unset RANK and WORLD_SIZE to let it start its own ranks"
        )
    world_size = _number("WORLD_SIZE", environ["WORLD_SIZE"], 1)
    rank = _number("RANK", environ["RANK"], 0, world_size - 1)
    local = environ.get("LOCAL_WORLD_SIZE")
    return RankPlace(
        rank=rank,
        world_size=world_size,
        local_rank=_number("LOCAL_RANK", environ.get("LOCAL_RANK", str(rank))),
        local_world_size=_number("LOCAL_WORLD_SIZE", local, 1, world_size) if local else None,
        address=_address(environ["MASTER_ADDR"]),
        port=_number("MASTER_PORT", environ["MASTER_PORT"], 1, _MAX_PORT),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number("TORCHELASTIC_RESTART_COUNT", environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def _slurm_place(environ: Mapping[str, str], world_size: int) -> RankPlace:
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    address = environ.get("MASTER_ADDR") or first_host(hosts)
    if not address:
        remedy = "start dtbench with srun, or set MASTER_ADDR"
        raise UsageError(f"SLURM_PROCID is set but SLURM_JOB_NODELIST is not: {remedy}")
    per_node = re.fullmatch(r"(\d+)(?:\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    job = _number("SLURM_JOB_ID", environ.get("SLURM_JOB_ID", "0"))
    step = _number("SLURM_STEP_ID", environ["SLURM_STEP_ID"])
    # Spread jobs and steps over the registered ports below Linux's ephemeral range (from 32768).
    port = environ.get("MASTER_PORT") or str(20000 + (job * 7 + step) % 12000)
    return RankPlace(
        rank=_number("SLURM_PROCID", environ["SLURM_PROCID"], 0, world_size - 1),
        world_size=world_size,
        local_rank=_number("SLURM_LOCALID", environ.get("SLURM_LOCALID", "0")),
        local_world_size=int(per_node[1]) if per_node else None,
        address=_address(address),
        port=_number("MASTER_PORT", port, 1, _MAX_PORT),
        agent_store=False,
    )


def first_host(nodelist: str) -> str:
    """`gpu[001-004,009],login1` -> `gpu001`: the first host of a Slurm node list; "" of an empty one."""
    firsts = re.sub(r"\[([^],-]*)[^]]*]?", r"\1", nodelist.strip())  # of each range
    return firsts.partition(",")[0]


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
