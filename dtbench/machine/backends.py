"""Backends of process groups: the names that users give, and how a process creates a group with one.

    auto              NCCL on GPUs, gloo on CPUs
    gloo              gloo's default transport; on GPUs, it sends through the host's memory
    gloo:tls          gloo with a transport of its own choice: tcp, tls or uv, if torch was built with it
    nccl-legacy       any backend that this torch has: nccl, nccl2, nccl-legacy, nccl-lazy, ucc, mpi, a plugin's name
    torchcomms        torchcomms with the backend of `auto`; torchcomms:ncclx with another

A process keeps the first transport of gloo that it has used, so several backends need several launches.
"""

import os
import re
from typing import TYPE_CHECKING, Any

from dtbench.errors import UsageError, describe, nearest

if TYPE_CHECKING:
    import torch

    from dtbench.suite import DeviceType

# Name -> the key of torch's registry of gloo devices (torch/csrc/distributed/c10d/GlooDeviceFactory.cpp).
GLOO_TRANSPORTS = {"tcp": "TCP", "tls": "TCP_TLS", "uv": "UV"}
_GLOO_VARIABLE = "GLOO_DEVICE_TRANSPORT"
TORCHCOMMS = "torchcomms"
# Examples for messages. Which of them exist depends on torch.
NAMES = ("auto", "gloo", "gloo:tcp", "nccl", "nccl2", "nccl-legacy", TORCHCOMMS)
# "1" makes torch's name nccl mean nccl2, "0" the legacy implementation. Without it, nccl is nccl2 from torch 2.15 on
# (pytorch/pytorch#192281).
NCCL2_VARIABLE, _NCCL2_SINCE = "TORCH_DIST_USE_NCCL2", (2, 15)


def parse_backend(text: str) -> str:
    """Checks the spelling of a backend, without torch.

    Raises:
        UsageError: it is no name, or an unknown transport of gloo.
    """
    name, colon, variant = text.partition(":")
    if not re.fullmatch(r"[a-z][a-z0-9_-]*(:[a-z][a-z0-9_-]*)?", text) or (
        colon and name not in ("gloo", TORCHCOMMS)
    ):
        raise UsageError(
            f"--backend {text[:40]!r}: expected a name such as {', '.join(NAMES)}{nearest(text, NAMES)}"
        )
    if colon and name == "gloo" and variant not in GLOO_TRANSPORTS:
        raise UsageError(
            f"--backend {text[:40]}: gloo has no transport {variant!r}, expected one of {', '.join(GLOO_TRANSPORTS)}"
        )
    return text


def resolve_backend(device_type: str, chosen: str = "auto") -> str:
    """Returns the backend that runs record: the default resolved, and the implementation behind a shared name.

    Results of different backends are never fitted together, so two implementations must not share a name.
    """
    default = "gloo" if device_type == "cpu" else "nccl"
    backend = default if chosen == "auto" else chosen
    if backend == TORCHCOMMS:
        return f"{TORCHCOMMS}:{default}"
    if backend == "gloo" and (key := os.environ.get(_GLOO_VARIABLE, "").upper()):
        return (
            f"gloo:{next((name for name, its_key in GLOO_TRANSPORTS.items() if its_key == key), key.lower())}"
        )
    if backend == "nccl" and _nccl_is_nccl2():
        return "nccl2"
    return backend


def _nccl_is_nccl2() -> bool:
    import torch

    is_default = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) >= _NCCL2_SINCE
    is_chosen = {"0": False, "1": True}.get(os.environ.get(NCCL2_VARIABLE, ""), is_default)
    return is_chosen and torch.distributed.is_backend_available("nccl2")


def library_of(backend: str) -> str:
    """Returns the library below a backend: "gloo", "nccl", or the backend's own name."""
    return next((library for library in ("gloo", "nccl") if library in backend), backend)


def check_backend(device_type: "DeviceType", chosen: str) -> None:
    """Checks that this torch has the backend, and that it communicates tensors of the device.

    Raises:
        UsageError: it is not available.
    """
    if chosen == "auto":
        return
    import torch
    import torch.distributed as dist

    backend = resolve_backend(device_type, chosen)
    name = torch_name(backend)
    if backend.startswith(TORCHCOMMS):
        if not getattr(dist.distributed_c10d, "_TORCHCOMM_AVAILABLE", False):
            raise UsageError(
                f"--backend {chosen}: torch {torch.__version__} finds no torchcomms that it can use; install one built "
                "for it"
            )
    elif not dist.is_backend_available(name):
        available = sorted(
            filter(dist.is_backend_available, {*dist.Backend.backend_list} - {"undefined", "fake"})
        )
        raise UsageError(
            f"--backend {chosen}: torch {torch.__version__} does not have it"
            + (
                ", since its nccl is that implementation: use --backend nccl"
                if name == "nccl-legacy" and "nccl" in available
                else ""
            )
            + f"; it has {', '.join(available)}"
        )
    if device_type not in dist.Backend.backend_capability.get(name, [device_type]):
        raise UsageError(f"--backend {chosen}: {name} cannot send {device_type} tensors; use --backend auto")


def prepare_backend(backend: str) -> None:
    """Configures this process for a resolved backend, before it creates a process group.

    Raises:
        UsageError: this torch has not been built with the transport, or the transport is not configured.
    """
    import torch.distributed as dist

    kind, _, variant = backend.partition(":")
    if kind == TORCHCOMMS:
        dist.config.use_torchcomms = True  # the environment variable is read when torch is imported
    elif variant:
        os.environ[_GLOO_VARIABLE] = GLOO_TRANSPORTS.get(variant, variant.upper())
        try:
            dist.ProcessGroupGloo.create_device(hostname="localhost")
        except RuntimeError as error:
            raise UsageError(
                f"the backend {backend} cannot be used: {describe(error)}; expected a transport that torch was built "
                f"with, and for tls the variables {_GLOO_VARIABLE}_TCP_TLS_PKEY, _CERT and _CA_FILE"
            ) from error


def check_group(backend: str, device: "torch.device") -> None:
    """Checks that the default process group uses torchcomms if it was asked to.

    torch falls back to its own backend, without a message, if torchcomms was not built for the name.

    Raises:
        UsageError: it uses another implementation.
    """
    import torch.distributed as dist

    if backend.startswith(TORCHCOMMS):
        c10d: Any = dist.distributed_c10d
        created = c10d._get_default_group()._get_backend(device)
        if not isinstance(created, c10d._BackendWrapper):
            raise UsageError(
                f"--backend {backend}: torch created {type(created).__name__} instead, so this torchcomms was not "
                f"built with {torch_name(backend)}"
            )


def torch_name(backend: str) -> str:
    """Returns the name of a resolved backend for `init_process_group`."""
    kind, _, variant = backend.partition(":")
    return variant if kind == TORCHCOMMS else kind
