"""Provenance: complete, without secrets, and never a reason to fail."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dtbench.machine import host, nvml, provenance
from dtbench.machine.device import Gpus, loaded_nvml
from dtbench.records.result import Header, MeshShape, NvLinks, Result
from dtbench.records.run import RunWriter, read_run
from dtbench.suite import RunOptions
from dtbench.tests.gpu.fake_gpu import fake_nvml as fake_nvml_of
from dtbench.text import masking

PLAN = RunOptions((("dp", 2), ("tp", 2)), (1024, 4096), quick=True)


def header() -> Header:
    return provenance.build_header(
        argv=["dtbench", "run"],
        options=PLAN,
        suites=["dispatch"],
        mesh=PLAN.mesh,
        ranks=[provenance.local_rank_info("cpu")] * 4,
        backend="gloo",
        launches=2,
    )


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two GPUs; like the real bindings, a query that a GPU does not support raises."""
    fake = fake_nvml_of(2)
    vars(fake).update(
        nvmlSystemGetDriverVersion=lambda: b"570.1",  # old bindings answer in bytes
        nvmlDeviceGetName=lambda handle: f"Fake of {handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * 2**30),
        nvmlDeviceGetClockInfo=lambda handle, which: {1: 1500, 2: 2600}[which],
        nvmlDeviceGetMaxClockInfo=lambda handle, which: {1: 1980, 2: 2619}[which],
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetPowerUsage=lambda handle: 345_678,
        nvmlDeviceGetTemperature=lambda handle, sensor: 61,
        nvmlDeviceGetMigMode=lambda handle: {}["not supported"],
        nvmlDeviceGetNvLinkState=lambda handle, link: [1, 0, 1][link],
        nvmlDeviceGetNvLinkVersion=lambda handle, link: 4,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=b"00000000:1B:00.0"),
        # Peers of the two active links: a GPU and a switch.
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: {0: 0, 2: 2}[link],
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(busId="00000000:C1:00.0"),
    )
    monkeypatch.setattr(Gpus, "nvml", lambda _self: fake)
    return fake


# ------------------------------------------------------------------------------- the header


def test_header_round_trips_through_a_run_file(tmp_path: Path) -> None:
    written = header()
    with RunWriter.create(tmp_path / "x.jsonl", written) as writer:
        writer.append(Result("s", "n", "core", {}, "ok"))
    read = read_run(tmp_path / "x.jsonl").header
    assert read == written and read.versions["torch"]
    assert (read.mesh, read.versions["backend"]) == (MeshShape(dim_names=("dp", "tp"), shape=(2, 2)), "gloo")
    assert [rank.rank for rank in read.ranks] == [0, 1, 2, 3]
    assert read.machine.cpu.usable_cores == len(os.sched_getaffinity(0))


def test_local_rank_info_describes_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "11")
    info = provenance.local_rank_info("cuda:3")
    assert info["host"]
    assert {key: info[key] for key in ("rank", "local_rank", "device", "pid")} == {
        "rank": 11,
        "local_rank": 3,
        "device": "cuda:3",
        "pid": os.getpid(),
    }
    monkeypatch.setenv("LOCAL_RANK", "none")
    assert provenance.local_rank_info("cpu")["local_rank"] == 0


def test_numa_nodes_are_those_of_usable_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cpus in enumerate(("0-1,8-9", "2-3", "", "16")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for usable, nodes in (({3, 16}, [1, 3]), ({9}, [0]), ({77}, [])):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, usable=usable: usable)
        assert host.numa_nodes(tmp_path) == nodes


# ------------------------------------------------------------------------------ no secrets


def test_environment_records_only_allowed_variables() -> None:
    recorded = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    refused = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HOME", "NCCL_API_TOKEN", "XOMP_")
    masked = {"NCCL_NET_PLUGIN": "token=leak", "NCCL_PROXY": "https://me:leak@host"}
    assert provenance.environment(recorded | masked | dict.fromkeys(refused, "leak")) == recorded | {
        "NCCL_NET_PLUGIN": "token=***",
        "NCCL_PROXY": "https://***@host",
    }


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["run", "-o", "x.jsonl", "a" * 500], ["run", "-o", "x.jsonl", "a" * 500]),
        (["--filter", "pass=forward tokens=4096 author=me token_bytes=2 key=1"],) * 2,
        (["--token", "leak", "run"], ["--token", "***", "run"]),
        (["--api-key=leak"], ["--api-key=***"]),
        (["--header", "Authorization: Bearer leak"], ["--header", "Authorization: ***"]),
        (["WANDB_API_KEY=leak"], ["WANDB_API_KEY=***"]),
        (["env:A=1,DB_PASSWORD=leak,B=2"], ["env:A=1,DB_PASSWORD=***,B=2"]),
        (['{"a": 1, "password": "leak", "b": 2}'], ['{"a": 1, "password": "***", "b": 2}']),
        (
            ["https://me:leak@host/x?y=1", "https:/me:leak@host"],
            ["https://***@host/x?y=1", "https:/***@host"],
        ),
        (["-x 1 --password leak --y 2"], ["-x 1 --password *** --y 2"]),
    ],
)
def test_arguments_are_masked(argv: list[str], shown: list[str]) -> None:
    assert masking.mask_arguments(argv) == shown and masking.is_unmasked(shown) == (argv == shown)


# -------------------------------------------------------------------------------------- git


def git(folder: Path, *args: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *args], cwd=folder, check=True, capture_output=True)


def test_checkout_has_commit_and_dirty_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert header().git.commit is None
    git(tmp_path, "init", "-q")
    assert header().git.commit is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "untracked").write_text("1")
    clean = header().git
    assert (len(clean.commit or ""), clean.dirty) == (40, False)
    (tmp_path / "a").write_text("2")
    assert header().git == msgspec.structs.replace(clean, dirty=True)


# -------------------------------------------------------------------------------------- CPU


def test_describe_cpu_of_other_and_unknown_architectures(tmp_path: Path) -> None:
    unknown = host.describe_cpu(tmp_path)
    assert (unknown.governor, unknown.numa_nodes, unknown.physical_cores) == (None, None, None)
    (tmp_path / "proc").mkdir()
    blocks = [
        f"processor\t: {i}\nmodel name\t: Some CPU @ 3 GHz\nphysical id\t: {i // 4}\ncore id\t\t: {i % 2}\n"
        for i in range(8)
    ]
    (tmp_path / "proc/cpuinfo").write_text("\n".join(blocks))
    for i in range(2):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{i}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text("powersave\n")
        (tmp_path / f"sys/devices/system/node/node{i}").mkdir(parents=True)
    cpu = host.describe_cpu(tmp_path)
    assert (cpu.model, cpu.physical_cores, cpu.governor, cpu.numa_nodes) == (
        "Some CPU @ 3 GHz",
        4,
        "powersave",
        2,
    )


# ------------------------------------------------------------------------------------- GPUs


def test_describe_gpus_reads_nvml(fake_nvml: SimpleNamespace) -> None:
    first, second = gpus = nvml.describe_gpus()
    assert (first.index, second.index, second.name) == (0, 1, "Fake of handle-1")
    assert (first.memory_bytes, first.sm_clock_MHz, first.sm_clock_max_MHz) == (80 * 2**30, 1500, 1980)
    assert (first.power_limit_W, first.nvlink) == (700, NvLinks(links=3, active_links=2, version=4))
    assert (first.mig, first.persistence) == (None, None)  # one raises, these bindings lack the other
    assert (nvml.driver_version(), header().machine.gpus) == ("570.1", tuple(gpus))


def test_gpu_location_has_bus_numa_node_and_nvlinks(fake_nvml: SimpleNamespace, tmp_path: Path) -> None:
    numa_node = tmp_path / "sys/bus/pci/devices/0000:1b:00.0/numa_node"
    numa_node.parent.mkdir(parents=True)
    numa_node.write_text("1\n")
    assert nvml.gpu_location(0, tmp_path) == {
        "pci_bus_id": "0000:1b:00.0",
        "device_numa_node": 1,
        "nvlink": {"neighbours": {"0000:c1:00.0": 1}, "switch_links": 1},
    }
    numa_node.write_text("-1\n")
    assert nvml.gpu_location(0, tmp_path)["device_numa_node"] is None
    ranks = (provenance.local_rank_info("cuda:0", "nccl"), provenance.local_rank_info("cpu"))
    assert [rank.get("pci_bus_id") for rank in ranks] == ["0000:1b:00.0", None]
    fake_nvml.nvmlDeviceGetPciInfo = lambda handle: SimpleNamespace(busId=b"?")
    assert set(nvml.gpu_location(0).values()) == {None}


def test_gpu_state_has_reasons_for_throttling(fake_nvml: SimpleNamespace) -> None:
    state: Any = nvml.gpu_state(0)
    assert (state["throttled_by"], state["temperature_C"], state["power_W"]) == ([], 61, 345.678)
    fake_nvml.reasons = 0x1 | 0x4 | 0x40 | 0x1000
    state = nvml.gpu_state(0)
    assert state["reasons"] == ["gpu_idle", "sw_power_cap", "hw_thermal_slowdown", "unknown_0x1000"]
    assert state["throttled_by"] == ["sw_power_cap", "hw_thermal_slowdown", "unknown_0x1000"]


@pytest.mark.parametrize(
    ("visible", "index", "handle"),
    [
        ("", 1, "handle-1"),
        ("1,0", 0, "handle-1"),
        ("1", 1, None),
        ("GPU-abc", 0, "handle-of-GPU-abc"),
        ("", 7, None),
    ],
)
def test_cuda_device_respects_visible_devices(
    fake_nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, visible: str, index: int, handle: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device = nvml.cuda_device(index)
    assert (device and device.handle) == handle
    assert (nvml.gpu_state(index) is None) == (handle is None)


@pytest.mark.parametrize("broken", ["pynvml", "pynvml.nvmlInit"])
def test_missing_or_broken_nvml_is_no_error(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def init() -> None:
        raise OSError("libnvidia-ml.so.1: file too short")

    loaded_nvml.cache_clear()
    if broken == "pynvml":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        monkeypatch.setattr(broken, init)
    try:
        gpus, state, driver = nvml.describe_gpus(), nvml.gpu_state(0), nvml.driver_version()
        assert (loaded_nvml(), gpus, state, driver) == (None, [], None, None)
    finally:
        loaded_nvml.cache_clear()


def test_preloaded_nccl_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(number: Any) -> int:
        number._obj.value = 23007
        return 0

    assert provenance.preloaded_nccl() is None
    monkeypatch.setattr(provenance.ctypes, "CDLL", lambda _name: SimpleNamespace(ncclGetVersion=answer))
    assert [provenance._versions(backend)["nccl"] for backend in ("nccl", "gloo")] == ["2.30.7", None]
