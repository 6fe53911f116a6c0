"""Exports for programs that are no dependency of dtbench, checked against schemas written from their sources."""

import dataclasses
import enum
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from dtbench.cost.estimate import ring_us
from dtbench.cost.export.aiconfigurator import OPERATIONS
from dtbench.cost.export.targets import ExportRequest, export, render
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
    *dims: Dim,
    gpu: str = "NVIDIA H100 80GB HBM3",
    hosts: int = 2,
    mesh: tuple[tuple[str, int], ...] = (),
    nccl: str | None = "2.29.2",
) -> CalibratedTopology:
    names, shape = zip(*(mesh or [(dim.name, dim.ranks) for dim in dims]), strict=True)
    return a_topology(
        *dims,
        device_type="cuda",
        backend="nccl",
        runs=(FromRun(run_id="made-up", versions={"nccl": nccl}, hosts=hosts, gpu=gpu),),
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


def exported_yaml(topology: CalibratedTopology, target: str) -> Any:
    content = render(ExportRequest(topology, Path("mine.yaml")), target).content
    assert isinstance(content, str)
    assert content.isascii()
    return yaml.safe_load(content)


# ------------------------------------------------------------------------------------------- Primus

# Fields of CollectiveArgs in primus/core/projection/module_profilers/collective_args.py (AMD-AGI/Primus @fd1eeab) that
# get_default_args takes from a hardware_config. Primus ignores other names.
PRIMUS_FIELDS = {
    *("node_size", "pod_size", "nics_per_node", "switch_topology", "node_topology", "vector_flops"),
    *("node_bw", "pod_bw", "cluster_bw", "bw_eff", "p2p_bw_eff", "node_lat", "pod_lat", "cluster_lat"),
    *("hbm_latency", "write_latency", "write_resp", "kernel_launch_latency", "rccl_overhead_us"),
    *("ar_overlap_factor", "ar_warmup_chunk_bytes", "nic_rdma_setup_us", "nic_warmup_bytes"),
    *("a2a_peer_lat", "a2a_intra_sync_overhead", "a2a_intra_node_peer_lat", "a2a_mesh_contention"),
    *("a2a_rccl_overhead_us", "a2a_remote_contention"),
}


def primus_config(topology: CalibratedTopology) -> dict[str, Any]:
    content = exported_yaml(topology, "primus")
    assert content.keys() == {"hardware_config"}
    config = content["hardware_config"]
    assert isinstance(config, dict)
    assert config.keys() <= PRIMUS_FIELDS
    # PyYAML reads numbers such as 1e30 as strings.
    assert all(isinstance(value, float | int) for name, value in config.items() if name != "node_topology")
    return config


def primus_all_reduce_us(config: dict[str, Any], size_bytes: int, ranks: int) -> float:
    """Time of an all-reduce: the fastest of those algorithms of collective_model.py that can be fastest here."""
    hosts = max(1, ranks // config["node_size"])
    inside = min(ranks, config["node_size"])
    step_us = config["hbm_latency"] + 2 * config["write_latency"] + config["write_resp"]
    node_bytes_per_us = 1e3 * config["node_bw"] * config["bw_eff"]
    pod_bytes_per_us = 1e3 * config.get("pod_bw", math.inf) * config["bw_eff"]
    share = (inside - 1) / inside * size_bytes / node_bytes_per_us
    own = config["kernel_launch_latency"] + config["rccl_overhead_us"]
    if hosts == 1:  # one step to all ranks
        return float(own + 2 * (step_us + share) + 2 * size_bytes / config["vector_flops"])
    # Reduce-scatter and all-gather inside hosts, and an all-reduce of each share between them.
    between = size_bytes / inside * (hosts - 1) / hosts / pod_bytes_per_us
    times = (
        2 * (step_us * math.log2(inside) + share),
        2 * (config["pod_lat"] * math.ceil(math.log2(hosts)) + between),
    )
    return float(own + max(times) + (1 - config["ar_overlap_factor"]) * min(times))


@pytest.mark.parametrize("size", [2**10, 2**20, 2**26, 2**30])
def test_primus_all_reduce_in_a_host_takes_the_time_of_the_fitted_ring(size: int) -> None:
    dim = placed_dim("tp", 8, hosts=1)
    config = primus_config(gpu_topology(dim, hosts=1))
    assert primus_all_reduce_us(config, size, 8) == pytest.approx(
        ring_us("all_reduce", size, 8, dim), rel=1e-4
    )


@pytest.mark.parametrize("hosts", [2, 8])
def test_primus_all_reduce_between_hosts_takes_the_time_of_the_fitted_ring(hosts: int) -> None:
    """Each GPU all-reduces its share between hosts, which hides the part inside them."""
    size, dims = 2**30, (placed_dim("dp", hosts, hosts=hosts, bandwidth=5.0), placed_dim("tp", 8, hosts=1))
    config = primus_config(gpu_topology(*dims, hosts=hosts))
    expected_us = ring_us("all_reduce", size // 8, hosts, dims[0])
    assert primus_all_reduce_us(config, size, 8 * hosts) == pytest.approx(expected_us, rel=1e-4)


def test_primus_gets_no_efficiency_and_no_overhead_besides_the_measured() -> None:
    config = primus_config(TWO_HOSTS)
    factors = {"bw_eff": 1.0, "p2p_bw_eff": 1.0, "ar_overlap_factor": 1.0}
    overheads = {
        name for name in PRIMUS_FIELDS if name.startswith(("a2a_", "nic_rdma", "rccl", "ar_warmup", "write_"))
    }
    assert {name: config[name] for name in factors} == factors
    assert {name: config[name] for name in overheads} == dict.fromkeys(overheads, 0)
    assert config["switch_topology"] is False


def test_primus_gets_its_own_bandwidth_of_links_that_were_not_measured() -> None:
    request = ExportRequest(gpu_topology(placed_dim("tp", 8, hosts=1), hosts=1), Path("mine.yaml"))
    config = primus_config(request.topology)
    assert config["pod_bw"] == pytest.approx(50.0 * 0.7)
    assert not {"pod_lat", "nic_rdma_setup_us", "a2a_peer_lat"} & config.keys()
    assert render(request, "primus").notes == (
        "Primus's own bandwidth between hosts is used, since no mesh dim between hosts was measured",
    )
    config = primus_config(gpu_topology(placed_dim("dp", 16, hosts=2)))
    assert config["node_bw"] == pytest.approx(1024.0 * 0.7)
    assert not {"node_lat", "hbm_latency", "write_latency"} & config.keys()


def test_primus_divides_a_ring_over_hosts_among_its_gpus() -> None:
    config = primus_config(gpu_topology(placed_dim("dp", 16, hosts=2, bandwidth=160.0, latency=2.0)))
    assert config["pod_bw"] == pytest.approx(160 * GB_PER_GIB / 8, abs=1e-3)
    assert config["pod_lat"] == pytest.approx(15 * 2.0)


def test_primus_gets_the_bandwidth_of_all_links_of_a_mesh_of_gpus() -> None:
    """Primus multiplies it by 3 / 7 for groups of 4 of 8 GPUs."""
    dims = (placed_dim("dp", 2, hosts=1), placed_dim("tp", 4, hosts=1, bandwidth=150.0))
    config = primus_config(gpu_topology(*dims, hosts=1, gpu="AMD Instinct MI300X"))
    assert config["node_topology"] == "mesh"
    assert config["node_bw"] * 3 / 7 == pytest.approx(150 * GB_PER_GIB, rel=1e-4)
    assert primus_config(gpu_topology(*dims, hosts=1))["node_topology"] == "switch"


# ---------------------------------------------------------------------------------------- ASTRA-sim


def astra_sim_network(topology: CalibratedTopology) -> dict[str, list[Any]]:
    """Reads a network as common/network-parser/NetworkParser.cpp does (astra-network-analytical @599a047)."""
    network = exported_yaml(topology, "astra-sim")
    assert network.keys() == {"topology", "npus_count", "bandwidth", "latency"}
    assert len({len(values) for values in network.values()}) == 1
    assert {*network["topology"]} <= {"Ring", "FullyConnected", "Switch"}
    assert min(network["npus_count"]) > 1
    assert min(network["bandwidth"]) > 0
    assert min(network["latency"]) >= 0
    assert isinstance(network, dict)
    return network


def astra_sim_ring_us(network: dict[str, list[Any]], index: int, collective: str, size_bytes: int) -> float:
    """Time of a collective of ring steps, each a message to the next rank (congestion_unaware/basic-topology)."""
    ranks = network["npus_count"][index]
    bytes_per_ns = network["bandwidth"][index] * 2**30 / 1e9
    steps = (2 if collective == "all_reduce" else 1) * (ranks - 1)
    return float(steps * (network["latency"][index] + size_bytes / ranks / bytes_per_ns) / 1e3)


def test_astra_sim_gets_the_innermost_dim_first() -> None:
    network = astra_sim_network(TWO_HOSTS)
    assert network == {
        "topology": ["Ring", "Ring"],
        "npus_count": [8, 2],
        "bandwidth": [300.0, 40.0],
        "latency": [2000.0, 12000.0],
    }


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("size", [2**10, 2**30])
def test_astra_sim_rings_take_the_time_of_the_fit_without_the_base_latency(
    collective: str, size: int
) -> None:
    network = astra_sim_network(TWO_HOSTS)
    for index, dim in enumerate(reversed(TWO_HOSTS.dims)):
        expected_us = ring_us(collective, size, dim.ranks, dim) - TWO_HOSTS.base_latency_us
        assert astra_sim_ring_us(network, index, collective, size) == pytest.approx(expected_us)


def test_astra_sim_gets_neither_joint_dims_nor_dims_of_one_rank() -> None:
    dims = (*TWO_HOSTS.dims, placed_dim("dp+tp", 16, hosts=2))
    network = astra_sim_network(gpu_topology(*dims, mesh=(("pp", 1), ("dp", 2), ("tp", 8))))
    assert network["npus_count"] == [8, 2]


def test_astra_sim_refuses_a_network_that_lacks_a_dim() -> None:
    topology = gpu_topology(placed_dim("tp", 8, hosts=1), mesh=(("dp", 2), ("tp", 8)))
    with pytest.raises(UsageError, match=r"every dim of the mesh dp=2,tp=8, but dp=2 was not calibrated"):
        astra_sim_network(topology)


# ----------------------------------------------------------------------------------- aiconfigurator

# A host of eight GPUs, calibrated over groups of 2, 4 and 8.
ONE_HOST = gpu_topology(
    placed_dim("dp", 2, hosts=1),
    placed_dim("tp", 4, hosts=1),
    placed_dim("dp+tp", 8, hosts=1),
    hosts=1,
    mesh=(("dp", 2), ("tp", 4)),
)


def aiconfigurator_folder(topology: CalibratedTopology, tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow", reason="writes Parquet; the extra dev has it")
    export(ExportRequest(topology, tmp_path / "systems"), "aiconfigurator")
    return tmp_path / "systems"


def nccl_times(folder: Path) -> dict[tuple[str, str, int], dict[int, float]]:
    """Reads (dtype, operation, GPUs) -> elements -> ms.

    So does load_nccl_parquet in aic-core/rust/aiconfigurator-core/src/perf_database/communication.rs (@095f58a).
    """
    import pyarrow.parquet

    (system,) = (yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml"))
    root = folder / system["data_dir"] / "comm" / "nccl" / system["misc"]["nccl_version"]
    meta = yaml.safe_load((root / "collection_meta.yaml").read_text())
    assert meta["schema_version"] == 1
    assert meta["runtime"] == {"framework": "nccl", "version": system["misc"]["nccl_version"]}
    assert meta["tables"] == {"nccl_perf": {"status": "complete"}}
    times: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in pyarrow.parquet.read_table(root / "nccl_perf.parquet").to_pylist():
        key = (row["nccl_dtype"], row["op_name"], row["num_gpus"])
        assert (type(row["message_size"]), type(row["latency"])) == (int, float)
        assert row["message_size"] not in times.setdefault(key, {}), "only the first of two is read"
        times[key][row["message_size"]] = row["latency"]
    return times


def test_aiconfigurator_look_ups_follow_the_curves(tmp_path: Path) -> None:
    """aiconfigurator interpolates linearly, and scales with the size beyond the table."""
    times = nccl_times(aiconfigurator_folder(ONE_HOST, tmp_path))
    assert times.keys() == {
        (dtype, operation, ranks)
        for dtype in ("half", "int8")
        for operation in ("all_gather", "all_reduce", "alltoall", "reduce_scatter")
        for ranks in (2, 4, 8)
    }
    for dim in ONE_HOST.dims:
        for collective, operation in OPERATIONS.items():
            curve = dim.collectives[collective].columns["time_us"]
            for dtype, itemsize in (("half", 2), ("int8", 1)):
                table = times[dtype, operation, dim.ranks]
                assert (min(table), max(table)) == (1, 2**40 // itemsize)
                for elements, time_ms in table.items():
                    assert time_ms == pytest.approx(curve.us(elements * itemsize) / 1e3)


def test_aiconfigurator_gets_what_its_system_requires(tmp_path: Path) -> None:
    """The fields without a default in aic-core/rust/aiconfigurator-core/src/common/system_spec.rs."""
    folder = aiconfigurator_folder(TWO_HOSTS, tmp_path)
    system = yaml.safe_load((folder / "h100_sxm.yaml").read_text())
    assert system == {
        "data_dir": "data/h100_sxm",
        "gpu": {"mem_bw": 3350 * 10**9, "mem_capacity": 80 * 2**30, "bfloat16_tc_flops": 989400 * 10**9},
        "node": {
            "num_gpus_per_node": 8,
            "intra_node_bw": pytest.approx(300 * 2**30, rel=1e-5),
            "inter_node_bw": pytest.approx(40 * 2**30, rel=1e-5),
            "p2p_latency": 12e-6,
        },
        "misc": {"nccl_version": "2.29.2"},
    }


def test_aiconfigurator_gets_the_network_of_the_data_sheet_if_it_was_not_measured(tmp_path: Path) -> None:
    system = yaml.safe_load((aiconfigurator_folder(ONE_HOST, tmp_path) / "h100_sxm.yaml").read_text())
    assert system["node"]["inter_node_bw"] == 50 * 10**9
    assert system["node"]["p2p_latency"] == 14e-6


def test_aiconfigurator_gets_groups_on_as_few_hosts_as_possible(tmp_path: Path) -> None:
    """It takes two GPUs to share a host, so the dim dp over two hosts is left out."""
    topology = gpu_topology(*TWO_HOSTS.dims, placed_dim("dp+tp", 16, hosts=2), mesh=(("dp", 2), ("tp", 8)))
    pytest.importorskip("pyarrow", reason="writes Parquet; the extra dev has it")
    request = ExportRequest(topology, tmp_path / "systems")
    notes = export(request, "aiconfigurator")
    assert {ranks for _, _, ranks in nccl_times(request.path)} == {8, 16}
    assert [note.partition(",")[0] for note in notes] == ["not exported: dp"]


def test_aiconfigurator_finds_the_exported_times(tmp_path: Path) -> None:
    """Loads the folder with aiconfigurator's own database, and evaluates an all-reduce with its engine."""
    perf_database = pytest.importorskip("aiconfigurator_core.sdk.perf_database")
    from aiconfigurator_core.sdk.common import CommQuantMode
    from aiconfigurator_core.sdk.engine import _evaluate_single_op
    from aiconfigurator_core.sdk.operations.communication import NCCL

    folder = aiconfigurator_folder(ONE_HOST, tmp_path)
    (folder / "data/h100_sxm/trtllm/1.0.0").mkdir(parents=True)  # compute times, which the export lacks
    database = perf_database.get_database(
        *("h100_sxm", "trtllm", "1.0.0", [str(folder)]), allow_missing_data=True, allow_unlisted_version=True
    )
    curve = ONE_HOST.dims[2].collectives["all_reduce"].columns["time_us"]
    for elements in (1, 1_000, 3 * 2**20, 2**25, 2**33):  # measured sizes, sizes between them and beyond
        operation = NCCL("all_reduce", 1.0, "all_reduce", elements, 8, CommQuantMode.half)
        time_ms = float(_evaluate_single_op(database, operation, is_context=True, batch_size=1, s=1, x=1))
        assert time_ms == pytest.approx(curve.us(2 * elements) / 1e3)
    assert database.system_spec.get_p2p_bandwidth(16) == 50e9


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        (gpu_topology(placed_dim("tp", 8, hosts=1), gpu="NVIDIA H100 PCIe", hosts=1), "NVIDIA H100 PCIe"),
        (gpu_topology(placed_dim("tp", 8, hosts=1), gpu="", hosts=1), "without a recorded GPU name"),
        (gpu_topology(placed_dim("dp", 16, hosts=2)), "every mesh dim of the topology crosses hosts"),
        (gpu_topology(placed_dim("tp", 8, hosts=1), hosts=1, nccl=None), "version of NCCL"),
        (gpu_topology(placed_dim("tp", 8, hosts=1), hosts=1, nccl="../../etc"), "version of NCCL"),
        (gpu_topology(placed_dim("tp", 8, hosts=1), hosts=3), "8 ranks on 3 hosts"),
    ],
)
def test_aiconfigurator_refuses_unknown_systems_in_one_line(topology: CalibratedTopology, says: str) -> None:
    with pytest.raises(UsageError, match=says) as raised:
        render(ExportRequest(topology, Path("systems")), "aiconfigurator")
    assert "\n" not in str(raised.value)


def test_aiconfigurator_names_the_package_that_writes_parquet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="pip install pyarrow"):
        render(ExportRequest(ONE_HOST, Path("systems")), "aiconfigurator")
