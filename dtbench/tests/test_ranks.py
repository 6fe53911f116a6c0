from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtbench.engine.rank_env import RankEnv, find_rank_env, first_host
from dtbench.engine.ranks import LiveWorld, StoreRanks, store_connector
from dtbench.errors import UsageError, WorldBrokenError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-08,11],login",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell under srun
        (TORCHRUN, RankEnv(3, 8, 1, 2, "n1", 29500, True, attempt=2)),
        (TORCHRUN | {"RANK": "x"}, "RANK='x'"),
        (SLURM | {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not"),
    ],
)
def test_the_place_that_a_launcher_gives(environ: dict[str, str], place: RankEnv | str | None) -> None:
    if isinstance(place, str):
        with pytest.raises(UsageError, match=place):
            find_rank_env(environ)
    else:
        assert find_rank_env(environ) == place


def test_slurm() -> None:
    place = find_rank_env(SLURM)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (place.address, place.agent_store) == ("gpu07", False)
    assert 20000 <= place.port < 32000
    other = find_rank_env(SLURM | {"SLURM_STEP_ID": "3"})
    assert other is not None and other.port != place.port
    with_port = find_rank_env(SLURM | {"MASTER_PORT": "29501", "MASTER_ADDR": "10.0.0.1"})
    assert with_port is not None and (with_port.address, with_port.port) == ("10.0.0.1", 29501)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[001-004,009],login1", "gpu001"),
        ("gpu[3,5]-ib", "gpu3-ib"),
        ("rack[1-2]n[10-12]", "rack1n10"),
        ("", ""),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_agree_over_a_store(size: int) -> None:
    from torch.distributed import HashStore

    store = HashStore()

    def live(rank: int) -> list[Any]:
        ranks = StoreRanks(store, rank, size, lambda reason: None)
        return [ranks.agree({"turn": turn, "rank": rank}, lambda votes: votes) for turn in range(4)]

    with ThreadPoolExecutor(size) as pool:
        heard = list(pool.map(live, range(size)))
    expected = [[{"turn": turn, "rank": rank} for rank in range(size)] for turn in range(4)]
    assert heard == [expected] * size
    # Only the last decision is left: a long run does not fill the store.
    assert store.num_keys() <= 1


def test_a_rank_whose_call_raised_does_not_wait_for_ever() -> None:
    """The others may wait for it in a collective, or have ended; nobody watches a process group of a user's."""
    from torch.distributed import HashStore

    ranks = StoreRanks(HashStore(), 1, 2, None, timedelta(seconds=0.1))
    ranks.report_failure("ValueError: no")
    with pytest.raises(WorldBrokenError, match=r"ValueError: no; the other ranks did not answer in 0\.1 s"):
        ranks.agree({}, lambda votes: votes)
    with pytest.raises(WorldBrokenError, match="ValueError: no"):  # nor later
        ranks.agree({}, lambda votes: votes)


def test_a_store_whose_server_is_dying_is_given_up_before_torch_asks_it() -> None:
    """Its port still takes connections for a moment; torch would try for seconds and log what it meets."""
    with socket.create_server(("localhost", 0)) as server:

        def die() -> None:
            taken, _ = server.accept()
            time.sleep(0.02)
            taken.close()

        threading.Thread(target=die, daemon=True).start()
        place = RankEnv(1, 2, 1, 2, "localhost", server.getsockname()[1], True)
        with pytest.raises(RuntimeError, match=r"the store at localhost:\d+ is not served: .*dropped"):
            store_connector(place, 0)(False)


def test_gloo_ranks_that_share_a_gpu_have_no_group_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may give a mesh of a CUDA machine groups of both: NCCL refuses two ranks on one GPU."""
    for name, found in (("is_available", True), ("is_initialized", True), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = LiveWorld(0, 1, torch.device("cuda:0"), (("a", 1),))
        meshes = world.mesh, world.mesh_of((1, 1))
        groups = [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
        assert len(groups) == 3
        for group in [dist.group.WORLD, *groups]:
            assert "cuda:gloo" in str(distributed_c10d._world.pg_backend_config[group])
            assert "nccl" not in str(distributed_c10d._world.pg_backend_config[group])
    finally:
        dist.destroy_process_group()
