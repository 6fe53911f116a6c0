"""Exports for programs that are no dependency of dtbench, checked against schemas written from their sources."""

import dataclasses
import enum
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dtbench.cost.export.targets import ExportRequest, render
from dtbench.errors import UsageError
from dtbench.records.result import MeshShape
from dtbench.records.topology import CalibratedTopology, Dim, FromRun, HostLayout
from dtbench.tests.made_up_topology import a_topology, ring_dim

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
GB_PER_GIB = 2**30 / 1e9


def placed_dim(name: str, ranks: int, hosts: int, bandwidth: float = 300.0, latency: float = 2.0) -> Dim:
    """A mesh dim whose groups span `hosts` hosts."""
    return ring_dim(
        name,
        ranks,
        bandwidth,
        latency,
        *COLLECTIVES,
        layout=HostLayout(
            kind="intra-host" if hosts == 1 else "inter-host" if hosts == ranks else "mixed",
            hosts_per_group=(hosts, hosts),
            ranks_per_host=(ranks // hosts, ranks // hosts),
        ),
    )


def gpu_topology(
    *dims: Dim, gpu: str = "NVIDIA H100 80GB HBM3", hosts: int = 2, mesh: tuple[tuple[str, int], ...] = ()
) -> CalibratedTopology:
    names, shape = zip(*(mesh or [(dim.name, dim.ranks) for dim in dims]), strict=True)
    return a_topology(
        *dims,
        device_type="cuda",
        backend="nccl",
        runs=(FromRun(run_id="made-up", versions={"nccl": "2.29.2"}, hosts=hosts, gpu=gpu),),
        mesh=MeshShape(dim_names=names, shape=shape),
    )


TWO_HOSTS = gpu_topology(
    placed_dim("dp", 2, hosts=2, bandwidth=40.0, latency=12.0), placed_dim("tp", 8, hosts=1)
)

# ------------------------------------------------------------------------------------- autoparallel


class GpuArch(enum.Enum):
    """Architectures of autoparallel's cost_models/nccl_cost_model.py (meta-pytorch/autoparallel @a54c252)."""

    AMPERE = 0
    HOPPER = 1
    BLACKWELL = 2


@dataclasses.dataclass
class NCCLTopoConfig:
    """Arguments of the class of this name in the same file, in their order. Other names raise a TypeError."""

    arch: GpuArch
    num_nodes: int
    gpus_per_node: int
    bw_intra: float
    bw_inter: float
    num_channels: int | None = None
    has_nvswitch: bool = False
    has_collnet: bool = False
    net_latency: float = 0.0


@pytest.fixture(autouse=True)
def autoparallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the schema where the exported module imports autoparallel's classes."""
    for name in ("autoparallel", "autoparallel.cost_models", "autoparallel.cost_models.nccl_cost_model"):
        module = ModuleType(name)
        vars(module).update(GpuArch=GpuArch, NCCLTopoConfig=NCCLTopoConfig)
        monkeypatch.setitem(sys.modules, name, module)


def autoparallel_config(topology: CalibratedTopology) -> NCCLTopoConfig:
    content = render(ExportRequest(topology, Path("mine.py")), "autoparallel").content
    assert isinstance(content, str)
    names: dict[str, Any] = {}
    exec(compile(content, "mine.py", "exec", dont_inherit=True), names)
    config = names["TOPOLOGY"]
    assert isinstance(config, NCCLTopoConfig)
    return config


def test_autoparallel_gets_bandwidths_per_gpu_and_extra_latency() -> None:
    assert autoparallel_config(TWO_HOSTS) == NCCLTopoConfig(
        arch=GpuArch.HOPPER,
        num_nodes=2,
        gpus_per_node=8,
        bw_intra=pytest.approx(300 * GB_PER_GIB, abs=1e-3),
        bw_inter=pytest.approx(40 * GB_PER_GIB, abs=1e-3),
        has_nvswitch=True,
        net_latency=pytest.approx(12.0 - 2.7),
    )


def test_autoparallel_divides_a_ring_over_hosts_among_its_gpus() -> None:
    """16 ranks on 2 hosts: one hop of 15 is between hosts, and 8 GPUs of each host share the traffic."""
    config = autoparallel_config(gpu_topology(placed_dim("dp", 16, hosts=2, bandwidth=160.0, latency=2.0)))
    assert config.bw_inter == pytest.approx(160 * GB_PER_GIB / 8, abs=1e-3)
    assert config.net_latency == pytest.approx(15 * 2.0 - 14 * 0.6 - 2.7)
    assert config.bw_intra == 320.0  # autoparallel's own


@pytest.mark.parametrize(
    ("gpu", "ranks", "arch", "has_nvswitch"),
    [
        ("NVIDIA A100-SXM4-40GB", 8, GpuArch.AMPERE, False),
        ("NVIDIA H200", 8, GpuArch.HOPPER, True),
        ("NVIDIA H100 PCIe", 8, GpuArch.HOPPER, False),
        ("NVIDIA H100 NVL", 8, GpuArch.HOPPER, False),
        ("NVIDIA H100 80GB HBM3", 4, GpuArch.HOPPER, False),
        ("NVIDIA B200", 8, GpuArch.BLACKWELL, True),
    ],
)
def test_autoparallel_gets_the_architecture_by_the_name_of_the_gpu(
    gpu: str, ranks: int, arch: GpuArch, has_nvswitch: bool
) -> None:
    config = autoparallel_config(gpu_topology(placed_dim("tp", ranks, hosts=1), gpu=gpu, hosts=1))
    assert (config.arch, config.has_nvswitch, config.bw_inter) == (
        arch,
        has_nvswitch,
        25.0 if arch is GpuArch.AMPERE else 50.0,
    )


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        (gpu_topology(placed_dim("tp", 8, hosts=1), gpu="NVIDIA GB200", hosts=1), "measured on NVIDIA GB200"),
        (gpu_topology(placed_dim("tp", 8, hosts=1), gpu="AMD Instinct MI300X", hosts=1), "MI300X"),
        (gpu_topology(placed_dim("tp", 8, hosts=1), gpu="", hosts=1), "without a recorded GPU name"),
        (
            gpu_topology(placed_dim("tp", 8, hosts=1), gpu="NVIDIA H100, NVIDIA A100"),
            "NVIDIA H100, NVIDIA A100",
        ),
        (gpu_topology(placed_dim("tp", 8, hosts=1), hosts=0), "8 ranks on an unknown number of hosts"),
        (gpu_topology(placed_dim("tp", 8, hosts=1), hosts=3), "8 ranks on 3 hosts"),
        (
            gpu_topology(ring_dim("tp", 8, 300.0, 2.0, "all_reduce"), hosts=1),
            "does not record whether groups of tp cross hosts",
        ),
    ],
)
def test_autoparallel_refuses_unknown_hardware_in_one_line(topology: CalibratedTopology, says: str) -> None:
    with pytest.raises(UsageError, match=says) as raised:
        autoparallel_config(topology)
    assert "\n" not in str(raised.value)
