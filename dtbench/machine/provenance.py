"""Builds the header of a run file, which records where and how the run happened.

Nothing here raises: a fact that cannot be determined is None. Since run files are passed around, only those
environment variables are recorded that are listed here because they change what is measured.
"""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from dtbench._version import __version__
from dtbench.machine.backends import NCCL2_VARIABLE, TORCHCOMMS, library_of
from dtbench.machine.device import REHEARSAL
from dtbench.machine.git import run_git
from dtbench.machine.host import boot_id, describe_cpu, memory_bytes, numa_nodes
from dtbench.machine.nvml import describe_gpus, driver_version, gpu_location
from dtbench.records.result import (
    SCHEMA,
    Checkout,
    Checkouts,
    Header,
    Machine,
    MeshShape,
    RankFacts,
)
from dtbench.suite import RunOptions
from dtbench.suite.mesh import Mesh
from dtbench.text.masking import is_secret, mask, mask_arguments, mask_options

# Prefixes of variables that tune the transport, threads or the process group.
_ENV_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "KMP_", "GOMP_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_FR_")
# Further variables that change a measured time. TORCHELASTIC_* is not recorded: it holds the launch's ids and paths.
_ENV_NAMES = {
    *("MKL_NUM_THREADS", "MKL_DYNAMIC", "OPENBLAS_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", NCCL2_VARIABLE),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD", "MALLOC_CONF", "MALLOC_ARENA_MAX"),
    # Debugging variables, which add checks to each collective.
    *("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES"),
    *("PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONDEVMODE", REHEARSAL),
}


def build_header(
    *,
    argv: Sequence[str],
    options: RunOptions,
    suites: Sequence[str],
    mesh: Mesh,
    ranks: Sequence[Mapping[str, object]],
    backend: str | None,
    launches: int,
) -> Header:
    """Builds the header of a run file.

    Args:
        argv: the command line; its secrets are masked.
        mesh: (dim name, size), outermost first.
        ranks: the results of `local_rank_info`, in rank order.
        backend: as `resolve_backend` returns it, or None if no process group was created.
    """
    return Header(
        schema=SCHEMA,
        run_id=uuid.uuid4().hex,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=tuple(mask_arguments(argv)),
        versions=_versions(backend),
        git=Checkouts(**msgspec.structs.asdict(_checkout(Path.cwd())), dtbench=_own_checkout()),
        machine=Machine(
            cpu=describe_cpu(),
            gpus=tuple(describe_gpus()),
            driver=driver_version(),
            memory_bytes=memory_bytes(),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
        ),
        ranks=tuple(msgspec.convert({**facts, "rank": rank}, RankFacts) for rank, facts in enumerate(ranks)),
        mesh=MeshShape(dim_names=tuple(name for name, _ in mesh), shape=tuple(size for _, size in mesh)),
        env=environment(os.environ),
        options=msgspec.json.decode(msgspec.json.encode(options))
        | {"options": mask_options(options.options)},
        suites=tuple(suites),
        launches=launches,
    )


def local_rank_info(device: str, backend: str | None = None) -> dict[str, Any]:
    """Describes this process for the header's `ranks`.

    `boot_id` distinguishes hosts of the same name. `interface` is None if the environment leaves the choice of a
    network interface to the backend.

    Args:
        device: torch's spelling ("cpu", "cuda:1").
        backend: as `resolve_backend` returns it; None if the process will not communicate.
    """
    kind, _, index = device.partition(":")
    return {
        "rank": _env_int("RANK"),
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "local_rank": _env_int("LOCAL_RANK"),
        "device": device,
        "pid": os.getpid(),
        "numa_nodes": numa_nodes(),
        "interface": os.environ.get(f"{library_of(backend).upper()}_SOCKET_IFNAME") if backend else None,
        **(gpu_location(int(index or 0)) if kind == "cuda" else {}),
    }


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to record, with secrets masked."""
    return {
        name: mask(value)
        for name, value in sorted(env.items())
        if (name in _ENV_NAMES or name.startswith(_ENV_PREFIXES)) and not is_secret(name)
    }


def _env_int(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0


def _versions(backend: str | None) -> dict[str, str | None]:
    torch = sys.modules.get("torch")
    on_nccl = backend is not None and library_of(backend) == "nccl"
    nccl = preloaded_nccl() if on_nccl else None
    if on_nccl and nccl is None:
        with contextlib.suppress(Exception):  # the error of a build without NCCL varies
            from torch.cuda import nccl as torch_nccl

            nccl = ".".join(str(part) for part in torch_nccl.version())  # type: ignore[no-untyped-call]
    return {
        "dtbench": __version__,
        "torch": str(torch.__version__) if torch is not None else installed("torch"),
        "python": platform.python_version(),
        "backend": backend,
        "nccl": nccl,
        **({TORCHCOMMS: installed(TORCHCOMMS)} if TORCHCOMMS in (backend or "") else {}),
        "cuda": None if torch is None else torch.version.cuda,
    }


def preloaded_nccl() -> str | None:
    """Returns the version of an NCCL loaded by LD_PRELOAD, which torch does not report; None without one."""
    number = ctypes.c_int()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(number))
    major, minor_patch = divmod(number.value, 10_000)
    return f"{major}.{minor_patch // 100}.{minor_patch % 100}" if major else None


def installed(package: str) -> str | None:
    """Returns the version of an installed distribution without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checkout(folder: Path) -> Checkout:
    """Returns commit and dirty flag of the checkout that contains `folder`. Untracked files do not make it dirty."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return Checkout()
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return Checkout(commit=commit, dirty=None if status is None else status != "")


def _own_checkout() -> Checkout | None:
    """Returns the checkout that dtbench runs from; None if dtbench was installed from a wheel."""
    package = Path(__file__).parents[1]
    return (
        _checkout(package)
        if _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
        else None
    )


def _git(folder: Path, *args: str) -> str | None:
    try:
        process = run_git(*args, cwd=folder)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
