"""Tests of `dtbench.machine.backends`: names, availability in this torch, and the implementation behind a name."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtbench.engine.options import RunRequest
from dtbench.errors import EXIT_USAGE, UsageError
from dtbench.gate.arms import check_text
from dtbench.machine.backends import (
    check_backend,
    check_group,
    library_of,
    parse_backend,
    prepare_backend,
    resolve_backend,
    torch_name,
)
from dtbench.machine.provenance import _versions
from dtbench.suite.case import DeviceType
from dtbench.tests.made_up import Cli


@pytest.mark.parametrize("text", ["auto", "gloo", "gloo:tls", "nccl-legacy", "torchcomms:ncclx", "my_plugin"])
def test_backend_names_are_accepted(text: str) -> None:
    assert parse_backend(text) == text
    assert check_text(f"backend:{text}") == ("backend", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a name such as auto, gloo"),
        ("NCCL", "expected a name such as auto, gloo"),
        ("gloo:", "expected a name such as auto, gloo"),
        ("nccl:tcp", "expected a name such as auto, gloo"),
        ("gloo:tcp:x", "expected a name such as auto, gloo"),
        ("gloo:udp", "gloo has no transport 'udp', expected one of tcp, tls, uv"),
    ],
)
def test_other_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_backend(text)
    with pytest.raises(UsageError):
        check_text(f"backend:{text}")


@pytest.mark.parametrize(
    ("device", "chosen", "backend", "name", "library"),
    [
        ("cpu", "auto", "gloo", "gloo", "gloo"),
        ("cuda", "auto", "nccl", "nccl", "nccl"),
        ("cuda", "gloo", "gloo", "gloo", "gloo"),
        ("cpu", "gloo:tls", "gloo:tls", "gloo", "gloo"),
        ("cuda", "nccl-legacy", "nccl-legacy", "nccl-legacy", "nccl"),
        ("cuda", "torchcomms", "torchcomms:nccl", "nccl", "nccl"),
        ("cpu", "torchcomms", "torchcomms:gloo", "gloo", "gloo"),
        ("cuda", "torchcomms:ncclx", "torchcomms:ncclx", "ncclx", "nccl"),
        ("cpu", "mpi", "mpi", "mpi", "mpi"),
    ],
)
def test_backend_follows_the_device_unless_given(
    monkeypatch: pytest.MonkeyPatch, device: str, chosen: str, backend: str, name: str, library: str
) -> None:
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")  # from torch 2.15 on, nccl means nccl2 without it
    assert resolve_backend(device, chosen) == backend
    assert (torch_name(backend), library_of(backend)) == (name, library)


def test_transport_of_the_environment_is_part_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    assert resolve_backend("cpu") == resolve_backend("cuda", "gloo") == "gloo:tls"
    assert resolve_backend("cpu", "gloo:tcp") == "gloo:tcp"  # the option takes precedence
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "RDMA")
    assert resolve_backend("cpu") == "gloo:rdma"


@pytest.mark.parametrize(
    ("version", "variable", "backend"),
    [
        ("2.13.0+cu130", None, "nccl"),
        ("2.14.1", None, "nccl"),
        ("2.14.1", "1", "nccl2"),
        ("2.15.0", None, "nccl2"),
        ("2.15.0a0+git12", "0", "nccl"),
    ],
)
def test_two_implementations_of_nccl_have_two_names(
    version: str, variable: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "nccl2")
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", variable)
    assert resolve_backend("cuda") == backend


@pytest.mark.parametrize(
    ("available", "device", "chosen", "message"),
    [
        (("gloo",), "cpu", "nccl2", r"torch \S+ does not have it; it has gloo$"),
        (("gloo", "nccl"), "cuda", "nccl-legacy", "its nccl is that implementation: use --backend nccl"),
        (("gloo", "nccl"), "cpu", "nccl", "nccl cannot send cpu tensors; use --backend auto"),
        (("gloo",), "cpu", "torchcomms", r"torch \S+ finds no torchcomms that it can use"),
        (("gloo",), "cpu", "auto", None),
        (("gloo",), "cuda", "gloo", None),
    ],
)
def test_missing_backend_is_refused_before_ranks_start(
    available: tuple[str, ...],
    device: DeviceType,
    chosen: str,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in available)
    if message is None:
        check_backend(device, chosen)
        return
    with pytest.raises(UsageError, match=message):
        check_backend(device, chosen)


def test_transport_that_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(hostname: str) -> None:
        raise RuntimeError(f"unsupported gloo device on {hostname}: {os.environ['GLOO_DEVICE_TRANSPORT']}")

    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP")
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", refuse)
    with pytest.raises(UsageError, match=r"the backend gloo:uv cannot be used: .* on localhost: UV"):
        prepare_backend("gloo:uv")


def test_torchcomms_is_switched_on_for_its_backend_alone() -> None:
    with dist.config.patch(use_torchcomms=False):
        prepare_backend("gloo")
        assert not dist.config.use_torchcomms
        prepare_backend("torchcomms:gloo")
        assert dist.config.use_torchcomms
    assert not dist.config.use_torchcomms


@pytest.mark.parametrize("uses_torchcomms", [True, False])
def test_fallback_of_torch_to_its_own_backend_is_refused(
    uses_torchcomms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BackendWrapper:
        pass

    created = BackendWrapper() if uses_torchcomms else object()
    group = SimpleNamespace(_get_backend=lambda _device: created)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: group)
    monkeypatch.setattr(dist.distributed_c10d, "_BackendWrapper", BackendWrapper, raising=False)
    check_group("gloo", torch.device("cpu"))
    if uses_torchcomms:
        check_group("torchcomms:gloo", torch.device("cpu"))
        return
    with pytest.raises(UsageError, match="torch created object instead"):
        check_group("torchcomms:gloo", torch.device("cpu"))


def test_provenance_names_backend_and_its_library() -> None:
    assert _versions("gloo:tls")["backend"] == "gloo:tls" and "torchcomms" not in _versions("gloo")
    assert _versions("torchcomms:gloo")["torchcomms"] is None


def test_command_line_takes_a_backend(dtbench: Cli) -> None:
    for words in (
        ("run", "--backend", "gloo:udp"),
        ("gate", "--base", "backend:gloo:udp", "--head", "env:", "dispatch"),
    ):
        code, _, err = dtbench(*words)
        assert code == EXIT_USAGE and "gloo has no transport 'udp'" in err
    assert RunRequest(backend="nccl2").backend == "nccl2"
