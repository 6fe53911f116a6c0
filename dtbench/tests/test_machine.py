"""Provenance: complete, without secrets, and never a reason to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dtbench.machine import provenance as machine
from dtbench.machine.device import loaded_nvml
from dtbench.records.layout import layout_of
from dtbench.records.run import RunWriter, read_run
from dtbench.suite import Header, MeshShape, Result, RunOptions
from dtbench.suite.result import Checkouts, NvLinks
from dtbench.tests import made_up
from dtbench.tests.gpu.fake_gpu import fake_nvml as fake_nvml_of
from dtbench.text import masking

PLAN = RunOptions((("dp", 2), ("tp", 2)), (1024, 4096), quick=True)


def header(**changes: Any) -> Header:
    facts: dict[str, Any] = {
        "argv": ["dtbench", "run"],
        "plan": PLAN,
        "suites": ["dispatch"],
        "mesh": PLAN.mesh,
        "ranks": [machine.local_rank_info("cpu")] * 4,
        "backend": "gloo",
        "launches": 2,
    }
    return machine.provenance(**facts | changes)


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
        # Of the links that are up: a GPU, a switch.
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: {0: 0, 2: 2}[link],
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(busId="00000000:C1:00.0"),
    )
    monkeypatch.setattr(machine, "nvml", lambda: fake)
    return fake


# ------------------------------------------------------------------------------- the header


def test_the_header_is_one_that_the_store_reads_back(tmp_path: Path) -> None:
    made = header()
    with RunWriter.create(tmp_path / "x.jsonl", made) as writer:
        writer.append(Result("s", "n", "core", {}, "ok"))
    read = read_run(tmp_path / "x.jsonl").header
    assert read == made
    assert read.mesh == MeshShape(dim_names=("dp", "tp"), shape=(2, 2))
    assert [r.rank for r in read.ranks] == [0, 1, 2, 3]
    assert read.plan["sizes_bytes"] == [1024, 4096]
    assert read.versions["backend"] == "gloo"
    assert read.versions["nccl"] is None
    assert read.versions["torch"]
    assert read.started.endswith("+00:00")
    assert read.machine.cpu.usable_cores == len(os.sched_getaffinity(0))
    assert read.launches == 2


def test_each_run_has_its_own_id_and_may_have_another_mesh() -> None:
    assert header().run_id != header().run_id
    assert header(mesh=[("world", 8)]).mesh == MeshShape(dim_names=("world",), shape=(8,))


def test_this_module_does_not_load_torch() -> None:
    code = "import sys, dtbench.machine.doctor, dtbench.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_rank_tells_where_it_sits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "11")
    info = machine.local_rank_info("cuda:3")
    assert (info["rank"], info["local_rank"], info["device"]) == (11, 3, "cuda:3")
    assert info["pid"] == os.getpid()
    assert info["host"]
    monkeypatch.setenv("LOCAL_RANK", "none")
    assert machine.local_rank_info("cpu")["local_rank"] == 0


def test_two_namespaces_of_one_machine_are_told_apart_by_their_names() -> None:
    """Real ones, where this user may make them; the made-up ones are in test_layout."""
    code = "import json; from dtbench.machine import provenance; print(json.dumps(provenance.local_rank_info('cpu')))"
    run = [sys.executable, "-c", code]
    inside = ["unshare", "--uts", "sh", "-c", 'hostname node-b && exec "$@"', "sh", *run]
    done = subprocess.run(inside, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"needs the right to make a namespace: {done.stderr.strip()[-100:]}")
    here = machine.local_rank_info("cpu")
    there = json.loads(done.stdout)
    assert there["boot_id"] == here["boot_id"] and there["host"] == "node-b" != here["host"]
    mesh = {"dim_names": ["tp"], "shape": [2]}
    (tp,) = layout_of(made_up.read({"mesh": mesh, "ranks": [here | {"rank": 0}, there | {"rank": 1}]}))
    assert tp.hosts_per_group == (2, 2)


def test_the_numa_nodes_of_the_cpus_that_a_rank_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, cpus in enumerate(("0-1,8-9", "2-3", "", "16")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for mine, nodes in (({3, 16}, [1, 3]), ({9}, [0]), ({77}, [])):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, mine=mine: mine)
        assert machine.numa_nodes(tmp_path) == nodes


def test_the_interface_is_the_one_told_or_that_of_the_hosts_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(machine.socket, "gethostbyname", lambda _name: "127.0.0.1")
    assert machine.local_rank_info("cpu", "gloo")["interface"] == "lo"
    assert machine.local_rank_info("cpu")["interface"] is None
    assert machine.local_rank_info("cuda:0", "nccl")["interface"] is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert machine.local_rank_info("cpu", "gloo")["interface"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    def unknown(_name: str) -> str:
        raise OSError("no such host")

    monkeypatch.setattr(machine.socket, "gethostbyname", unknown)
    assert machine.local_rank_info("cpu", "gloo")["interface"] is None


# ------------------------------------------------------------------------------ no secrets


def test_the_environment_is_recorded_by_an_allow_list() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_LONG": "1," * 500,
        "AWS_SECRET_ACCESS_KEY": "leak",
        "HF_TOKEN": "leak",
        "HOME": "/home/leak",
        "PATH": "/leak",
        "TORCHELASTIC_ERROR_FILE": "/leak",
        "NCCL_API_TOKEN": "leak",
        "XOMP_": "leak",
        "NCCL_NET_PLUGIN": "tok=leak",
        "NCCL_PROXY": "https://me:leak@host",
    }
    kept = machine.environment(env)
    assert set(kept) == {
        "NCCL_DEBUG",
        "GLOO_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "TORCH_NCCL_BLOCKING_WAIT",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_LONG",
        "NCCL_NET_PLUGIN",
        "NCCL_PROXY",
    }
    assert "leak" not in str(kept)
    assert len(kept["NCCL_LONG"]) == 200


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["run", "-o", "x.jsonl"], ["run", "-o", "x.jsonl"]),
        (["--filter", "pass=forward key_size=8 tokens=4096 author=me"],) * 2,
        (["--token", "leak", "run"], ["--token", "***", "run"]),
        (["--api-key=leak"], ["--api-key=***"]),
        (["--key=leak", "--key", "leak"], ["--key=***", "--key", "***"]),
        (["--header", "Authorization: Bearer leak leak"], ["--header", "Authorization: ***"]),
        (["--header=X-Api-Key:leak"], ["--header=X-Api-Key:***"]),
        (["-H", "cookie: a=leak; b=leak"], ["-H", "cookie: ***"]),
        (["WANDB_API_KEY=leak"], ["WANDB_API_KEY=***"]),
        (["env:A=1,DB_PASS=le,ak,B=2"], ["env:A=1,DB_PASS=***,B=2"]),
        (['{"a": 1, "password": "leak", "b": 2}'], ['{"a": 1, "password": ***, "b": 2}']),
        (["https://me:leak@host/x?sig=leak&y=1"], ["https://***@host/x?sig=***&y=1"]),
        (["--api-key leak"], ["--api-key ***"]),
        (["-x 1 --password le ak --y 2"], ["-x 1 --password *** --y 2"]),
        (["say Bearer leak"], ["say Bearer ***"]),
        ([f"with ghp_{'x' * 36} inside"], ["with *** inside"]),
        (["https://me:le@ak@host/x", "https://me:le/ak@host"], ["https://***@host/x", "https://***@host"]),
        (["curl -u me:leak --user=me:leak x"], ["curl -u me:*** --user=me:*** x"]),
        (["AccountKey=leak;E=1", "sharedSig=leak"], ["AccountKey=***;E=1", "sharedSig=***"]),
        (["PASS=leak", "--pw", "leak", "creds=leak"], ["PASS=***", "--pw", "***", "creds=***"]),
        ([r"{\"password\": \"leak\"}", "password%3Dleak"], [r"{\"password\": ***", "password%3D***"]),
        (["-----BEGIN PRIVATE KEY-----\nleak\n-----END"], ["-----BEGIN PRIVATE KEY-----***-----END"]),
        ([f"nvapi-{'x' * 20} npm_{'x' * 36}"], ["*** ***"]),
        (["--monkey=1", "turkey: 1", "mode=pass"], ["--monkey=1", "turkey: 1", "mode=pass"]),
        (["a" * 500], ["a" * 197 + "..."]),
    ],
)
def test_arguments_lose_their_secrets(argv: list[str], shown: list[str]) -> None:
    assert masking.mask_arguments(argv) == shown


def test_a_run_of_arguments_is_limited() -> None:
    assert len(masking.mask_arguments(["x"] * 10_000)) == 200


def test_what_is_said_of_arguments_loses_their_secrets() -> None:
    argv = ["show", "https://me:leak@host/x", "--to=token=leak", "--api-key", "leak", "-o", "x"]
    said = "no https:/me:leak@host/x, no token=leak nor 'leak'; leaks and x stay"
    assert masking.mask_echoes(said, argv) == "no https://***@host/x, no *** nor '***'; leaks and x stay"


def test_variables_keep_a_mark_of_their_secrets() -> None:
    shown = masking.mask_variables({"TOKEN": "leak", "A": "1", "NCCL_NET_PLUGIN": "tok=leak"})
    assert (
        shown["A"] == "1"
        and "leak" not in str(shown)
        and all(shown[n].startswith("***") for n in shown if n != "A")
    )
    assert shown["TOKEN"] != masking.mask_variables({"TOKEN": "other"})["TOKEN"]


def test_of_variables_numbers_known_words_and_paths_are_kept() -> None:
    kept = (
        "",
        "4",
        "-1",
        "0x1f",
        "4194304",
        "4MiB",
        "0.5",
        "0-3,8",
        "Ring",
        "^Tree",
        "allreduce:tree;broadcast:ring",
        "INIT,NET",
        "=eth0",
        "^docker0,lo",
        "enp65s0f0",
        "mlx5_0:1,mlx5_1:1",
        "expandable_segments:True,max_split_size_mb:128",
        "granularity=fine,compact,1,0",
        "{0:4}:8:4",
        "10.0.0.1:1234",
        "/var/log/nccl.%h.txt",
        "../step.so",
        "/usr/lib/libjemalloc.so.2:libtcmalloc.so",
        "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    )
    hidden = (
        "--password leak",
        "leak",
        "hunter2",
        "a=leak",
        "/opt/token=leak/bin",
        "https://me:leak@host",
        "1 leak",
    )
    hidden += ("Ring --api-key leak", "x" * 40, "ghp_" + "x" * 36, "/a b", "deadbeefcafe")
    for value in kept:
        assert masking.mask_variables({"A": value}) == {"A": value}
    for value in hidden:
        assert masking.mask_variables({"A": value})["A"].startswith("***"), value


# -------------------------------------------------------------------------------------- git


def git(folder: Path, *args: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *args], cwd=folder, check=True, capture_output=True)


def test_the_commit_and_whether_it_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert header().git.commit is None
    git(tmp_path, "init", "-q")
    assert header().git.commit is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "untracked").write_text("1")
    clean = header().git
    assert len(clean.commit or "") == 40
    assert clean.dirty is False
    (tmp_path / "a").write_text("2")
    assert header().git == msgspec.structs.replace(clean, dirty=True)


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert header().git == Checkouts()


# -------------------------------------------------------------------------------------- CPU


def test_the_cpu_of_a_foreign_machine(tmp_path: Path) -> None:
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
    cpu = machine.cpu(tmp_path)
    assert cpu.model == "Some CPU @ 3 GHz"
    assert cpu.physical_cores == 4
    assert cpu.governor == "powersave"
    assert cpu.numa_nodes == 2


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    cpu = machine.cpu(tmp_path)
    assert (cpu.governor, cpu.numa_nodes, cpu.physical_cores) == (None, None, None)


# ------------------------------------------------------------------------------------- GPUs


def test_gpus_as_nvml_tells_them(fake_nvml: SimpleNamespace) -> None:
    found = machine.gpus()
    assert [gpu.index for gpu in found] == [0, 1]
    assert found[1].name == "Fake of handle-1"
    assert found[0].memory_bytes == 80 * 2**30
    assert (found[0].sm_clock_MHz, found[0].sm_clock_max_MHz) == (1500, 1980)
    assert found[0].power_limit_W == 700
    assert found[0].nvlink == NvLinks(links=3, active_links=2, version=4)
    assert found[0].mig is None  # raises
    assert found[0].persistence is None  # not in these bindings
    assert machine.driver_version() == "570.1"
    assert header().machine.gpus == tuple(found)


def test_a_rank_tells_where_its_gpu_sits(fake_nvml: SimpleNamespace, tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    assert machine._gpu_place(0, tmp_path) == {
        "pci_bus_id": "0000:1b:00.0",
        "device_numa_node": 1,
        "nvlink": {"neighbours": {"0000:c1:00.0": 1}, "switch_links": 1},
    }
    (folder / "numa_node").write_text("-1\n")
    assert machine._gpu_place(0, tmp_path)["device_numa_node"] is None
    assert machine.local_rank_info("cuda:0", "nccl")["pci_bus_id"] == "0000:1b:00.0"
    assert "pci_bus_id" not in machine.local_rank_info("cpu")
    fake_nvml.nvmlDeviceGetPciInfo = lambda handle: SimpleNamespace(busId=b"?")
    assert set(machine._gpu_place(0).values()) == {None}


def test_a_throttled_gpu_says_why(fake_nvml: SimpleNamespace) -> None:
    state = machine.gpu_state(0)
    assert state is not None
    assert state["throttled_by"] == []
    assert (state["temperature_C"], state["power_W"]) == (61, 345.678)
    fake_nvml.reasons = 0x1 | 0x4 | 0x40 | 0x1000
    state = machine.gpu_state(0)
    assert state is not None
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
def test_a_cuda_device_is_found_behind_visible_devices(
    fake_nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, visible: str, index: int, handle: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.handle_of(fake_nvml, index) == handle
    assert (machine.gpu_state(index) is None) == (handle is None)


def test_a_broken_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libnvidia-ml.so.1: file too short")

    loaded_nvml.cache_clear()
    monkeypatch.setattr("pynvml.nvmlInit", broken)
    try:
        assert machine.nvml() is None
        assert machine.gpus() == []
        assert machine.gpu_state(0) is None
        assert machine.driver_version() is None
    finally:
        loaded_nvml.cache_clear()


def test_missing_bindings_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_nvml.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    try:
        assert machine.nvml() is None
    finally:
        loaded_nvml.cache_clear()
