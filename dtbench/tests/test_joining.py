"""Ranks of other launchers: how they find rank and size, and how long they wait for each other."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtbench.engine.failure import ActiveCase, Diagnosis, FailureDetector
from dtbench.engine.rank import await_all_ranks
from dtbench.engine.rank_env import RankEnv, find_rank_env, first_host, valid_rank_env
from dtbench.engine.rank_votes import LiveWorld, StoreRanks, store_connector, why_unreachable
from dtbench.errors import UsageError, WorldBrokenError
from dtbench.records.run import read_run
from dtbench.tests.programs import FRESH, LIMIT_S, environment, start_ranks

WORDS = ("run", str(Path(__file__).with_name("faults_suite.py")), "--quick", "-o", "x.jsonl")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "n1",
}
MVAPICH = {name.replace("OMPI_", "MV2_"): value for name, value in OPEN_MPI.items()}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "n1",
}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "MASTER_ADDR": "n1"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
WORLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


# ---- places ----


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (OPEN_MPI, (3, 4, 1, 2)),
        (MVAPICH, (3, 4, 1, 2)),
        (HYDRA, (3, 4, 1, 2)),
        (FLUX, (3, 4, 1, None)),
        (SLURM, (3, 4, 1, 2)),
        # Open MPI's daemons, and Hydra's, are themselves tasks of a step; srun may set PMI's variables itself.
        (SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"} | OPEN_MPI, (3, 4, 1, 2)),
        (SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"} | HYDRA, (3, 4, 1, 2)),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMIX_RANK": "3"}, (3, 4, 1, 2)),
        # torchrun on each host of another launcher.
        (OPEN_MPI | WORLD, (1, 2, 1, None)),
        # Without the local ones, ranks are taken to fill one host after the other.
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MASTER_ADDR": "n1"}, (3, 4, 3, None)),
        (WORLD | {"RANK": "1", "LOCAL_WORLD_SIZE": "1"}, (1, 2, 0, 1)),
    ],
)
def test_find_rank_env_reads_the_variables_of_each_launcher(
    environ: dict[str, str], place: tuple[int, int, int, int | None]
) -> None:
    found = find_rank_env(environ)
    assert found is not None and found.address == "n1" and not found.agent_store
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == place


def test_find_rank_env_needs_no_address_on_one_host_and_gives_each_job_a_port() -> None:
    one_host = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": ""}
    jobs = [
        one_host | {"PMIX_NAMESPACE": job, "OMPI_COMM_WORLD_RANK": rank}
        for job in ("prterun-n1-1@1", "prterun-n1-2@1")
        for rank in "03"
    ]
    places = [place for place in map(find_rank_env, [*jobs, one_host | {"MASTER_PORT": "29501"}]) if place]
    assert [place.address for place in places] == ["localhost"] * 5
    first, _, second, _, _ = ports = [place.port for place in places]
    assert ports == [first, first, second, second, 29501] and first != second
    assert min(first, second) >= 20000 and max(first, second) < 32000


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "1"},
        {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""},
        {"NODE_RANK": "1", "LOCAL_WORLD_SIZE": "8"},
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "PMIX_RANK": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},  # a shell under srun
    ],
)
def test_find_rank_env_is_none_without_a_launcher(environ: dict[str, str]) -> None:
    assert find_rank_env(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "RANK is set but WORLD_SIZE and MASTER_ADDR and MASTER_PORT not: set all"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK and MASTER_ADDR and MASTER_PORT not"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is set but RANK and"),
        ({"RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}, "RANK is set but WORLD_SIZE not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set but RANK and WORLD_SIZE and"),
        (
            {"WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            "WORLD_SIZE and LOCAL_RANK are set but RANK .* or unset WORLD_SIZE and LOCAL_RANK",
        ),
        (WORLD | {"MASTER_PORT": ""}, "RANK and WORLD_SIZE are set but MASTER_PORT not"),
        (WORLD | {"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc': expected a whole number from 1"),
        (WORLD | {"RANK": "2"}, "RANK='2': expected a whole number of at most 1"),
        (WORLD | {"RANK": "-1"}, "RANK='-1'"),
        (WORLD | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK='1': expected .* of at most 0"),
        (WORLD | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE='3'"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK is set but RANK"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is set but RANK"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is set but RANK"),
        (
            OPEN_MPI | {"MASTER_ADDR": ""},
            "OMPI_COMM_WORLD_RANK is set but MASTER_ADDR is not: set MASTER_ADDR to",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK='4'"),
        # A number of ranks that the launcher contradicts.
        (SLURM | {"WORLD_SIZE": "16"}, "WORLD_SIZE is set but RANK"),
        (OPEN_MPI | {"RANK": "0"}, "RANK is set but WORLD_SIZE"),
        (SLURM | {"SLURM_NTASKS": "1", "WORLD_SIZE": "16"}, "WORLD_SIZE is set but RANK"),
        (SLURM | {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not"),
    ],
)
def test_find_rank_env_refuses_partial_and_contradictory_variables(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        find_rank_env(environ)


def test_find_rank_env_takes_all_variables_of_torchrun() -> None:
    torchrun = WORLD | {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    assert find_rank_env(torchrun) == RankEnv(3, 8, 1, 2, "n1", 29500, True, attempt=2)


def test_find_rank_env_gives_each_slurm_step_a_port_unless_one_is_set() -> None:
    step = SLURM | {"SLURM_JOB_NODELIST": "gpu[07-08,11],login"}
    given = step | {"MASTER_PORT": "29501", "MASTER_ADDR": "10.0.0.1"}
    envs = [env for env in map(find_rank_env, (step, step | {"SLURM_STEP_ID": "3"}, given)) if env]
    first, second, third = ((env.address, env.port) for env in envs)
    assert (first[0], second[0], third) == ("gpu07", "gpu07", ("10.0.0.1", 29501))
    assert 20000 <= first[1] < 32000 and first[1] != second[1]


def test_valid_rank_env_is_none_if_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert valid_rank_env() is None


# ---- waits ----


def silent(connection: socket.socket) -> None:
    time.sleep(60)


def speaks_http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def speaks_first(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.0\r\n")
    time.sleep(60)


@contextlib.contextmanager
def foreign_server(behaviour: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server that is no TCPStore."""

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            behaviour(connection)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("localhost", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def fail_to_join(place: RankEnv, limit_s: float, message: str) -> None:
    """Waits for the other ranks; asserts that it ends with this error."""
    with pytest.raises(WorldBrokenError, match=message):
        await_all_ranks(place, store_connector(place, 0), limit_s, limit_s / 4)


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (silent, "does not answer as a TCPStore"),
        (speaks_http, "does not answer as a TCPStore"),
        (speaks_first, "does not answer as a TCPStore"),
        (socket.socket.close, "the connection was dropped"),
    ],
)
def test_await_all_ranks_gives_up_on_a_server_that_is_no_store(
    behaviour: Callable[[socket.socket], None], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with foreign_server(behaviour) as port:
        message = rf"rank 1 waited 2 s for the TCPStore of rank 0 at localhost:{port} \(.*{why}\): nothing"
        fail_to_join(RankEnv(1, 2, 0, 2, "localhost", port, agent_store=False), 2.0, message)
    assert f"rank 1 waits for the TCPStore of rank 0 at localhost:{port}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("address", "why"),
    [("localhost", "connection refused"), ("no.invalid", ".+"), ("x" * 70 + ".invalid", ".+")],
)
def test_await_all_ranks_gives_up_on_an_address_without_server(
    address: str, why: str, free_port: int
) -> None:
    message = rf"rank 1 waited 0\.5 s for the TCPStore of the launcher at {address}:{free_port} \({why}\)"
    fail_to_join(RankEnv(1, 2, 1, 2, address, free_port, agent_store=True), 0.5, message)


def test_await_all_ranks_reports_that_the_port_of_rank_0_is_taken() -> None:
    with foreign_server(silent) as port:
        message = rf"cannot serve .* at localhost:{port} .*already in use"
        fail_to_join(RankEnv(0, 2, 0, 2, "localhost", port, agent_store=False), 20.0, message)


def test_await_all_ranks_names_the_missing_ranks(free_port: int) -> None:
    place = RankEnv(0, 3, 0, 3, "localhost", free_port, agent_store=False)
    assert not why_unreachable(place)
    fail_to_join(place, 1.0, "rank 0 waited 1 s for rank 1, rank 2 of 3 to join through .*: nothing")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failure_detector_limit_names_the_unfinished_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[Diagnosis] = []
    ended = threading.Event()

    def leave(_code: int) -> None:
        ended.set()
        raise SystemExit  # of the thread: it does not return from the end of its process

    monkeypatch.setattr("dtbench.engine.failure.exit_now", leave)
    monkeypatch.setattr(FailureDetector, "_wait_for_signals", lambda _self: None)
    detector = FailureDetector(ActiveCase(), 3, 4, reported.append)
    with detector.limit(60.0), detector.limit(0.1, "joining through a store within 0.1 s"):
        assert ended.wait(60)
    for timer in (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)):
        timer.join(60)  # else its end is reported in a later test
    (diagnosis,) = reported
    assert diagnosis.message == "rank 3 did not finish joining through a store within 0.1 s"


# ---- whole programs ----


def test_under_mpirun_the_processes_are_the_ranks_of_one_world(here: Path) -> None:
    places = [
        {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "PMIX_NAMESPACE": f"job-{os.getpid()}",
        }
        for rank in ("0", "1")
    ]
    (code, out, err), other = start_ranks(places, *WORDS, "--launches", "2", "--filter", "all_reduce n=1")
    assert (code, err, other) == (0, "", (0, "", "")), out
    run = read_run("x.jsonl")
    assert run.complete and {result.launch for result in run.results} == {0, 1}
    assert [(info.rank, info.local_rank) for info in run.header.ranks] == [(0, 0), (1, 1)]


def test_under_a_launcher_a_rank_with_part_of_its_place_measures_nothing(here: Path) -> None:
    ((code, out, err),) = start_ranks([{"RANK": "1"}], *WORDS)
    assert (code, out) == (2, "") and not Path("x.jsonl").exists()
    assert err.count("\n") == 1 and "RANK is set but WORLD_SIZE" in err


@pytest.mark.parametrize(
    "words", [("run", "dispatch"), ("preflight",), ("profile", "tensor_parallel/mlp", "-o", "p")]
)
def test_under_a_launcher_a_silent_server_ends_every_command(here: Path, words: tuple[str, ...]) -> None:
    with foreign_server(silent) as port:
        place = WORLD | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "DTBENCH_JOIN_TIMEOUT": "3"}
        done = subprocess.run(
            [*FRESH, *words], env=environment() | place, capture_output=True, text=True, timeout=LIMIT_S
        )
    assert done.returncode == 5 and not list(here.iterdir()), done
    (line,) = done.stderr.splitlines()
    assert f"rank 1 waited 3 s for the TCPStore of rank 0 at localhost:{port}" in line


def test_under_torchrun_a_restart_goes_on_with_resume(here: Path) -> None:
    """The first attempt begins the file, a rank of it is killed, and the second goes on."""
    script = f"exec {' '.join(FRESH)} {' '.join(WORDS)} --resume --filter 'good\nhow=dies rank=1\nhow=none'"
    command = [TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", "--no-python", "bash", "-c", script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    run = read_run("x.jsonl")
    assert run.complete and {result.status for result in run.results} == {"ok", "failed"}, done
    (lost,) = [result for result in run.results if result.status == "failed"]
    assert lost.params == {"how": "dies", "rank": 1} and lost.rank == 1
    assert len(run.results) == len({result.key for result in run.results}) > 7
    assert Path("x.jsonl").read_bytes().count(b'"kind":"resume"') == 1
    assert done.stdout.count("results to measure on 2 cpu ranks") == 2


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
def test_agree_gives_all_ranks_the_same_decision_over_a_store(size: int) -> None:
    store = dist.HashStore()

    def decide(rank: int) -> list[Any]:
        ranks = StoreRanks(store, rank, size, lambda reason: None)
        return [ranks.agree({"turn": turn, "rank": rank}, lambda votes: votes) for turn in range(4)]

    with ThreadPoolExecutor(size) as pool:
        decisions = list(pool.map(decide, range(size)))
    votes = [[{"turn": turn, "rank": rank} for rank in range(size)] for turn in range(4)]
    assert decisions == [votes] * size
    # Only the last decision is left: a long run does not fill the store.
    assert store.num_keys() <= 1


def test_agree_gives_up_after_a_reported_failure() -> None:
    """The other ranks may wait in a collective or have ended, and a user's process group has no watchdog."""
    ranks = StoreRanks(dist.HashStore(), 1, 2, None, timedelta(seconds=0.1))
    ranks.report_failure("ValueError: no")
    with pytest.raises(WorldBrokenError, match=r"ValueError: no; the other ranks did not answer in 0\.1 s"):
        ranks.agree({}, lambda votes: votes)
    with pytest.raises(WorldBrokenError, match="ValueError: no"):  # nor later
        ranks.agree({}, lambda votes: votes)


def test_store_connector_gives_up_on_a_dying_server_before_torch_connects() -> None:
    """Its port still takes connections for a moment; torch would try for seconds and log what it meets."""
    with socket.create_server(("localhost", 0)) as server:

        def die() -> None:
            with server.accept()[0]:
                time.sleep(0.02)

        threading.Thread(target=die, daemon=True).start()
        with pytest.raises(RuntimeError, match=r"the store at localhost:\d+ is not served: .*dropped"):
            store_connector(RankEnv(1, 2, 1, 2, "localhost", server.getsockname()[1], True), 0)(False)


def test_live_world_of_gloo_ranks_on_one_gpu_has_no_nccl_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may give a mesh of a CUDA machine groups of both: NCCL refuses two ranks on one GPU."""
    for name, found in (("is_available", True), ("is_initialized", True), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = LiveWorld(0, 1, torch.device("cuda:0"), (("a", 1),))
        meshes = world.mesh, world.mesh_of((1, 1))
        groups = [dist.group.WORLD, *(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim))]
        backends = [str(distributed_c10d._world.pg_backend_config[group]) for group in groups]
        assert [("cuda:gloo" in names, "nccl" in names) for names in backends] == [(True, False)] * 4
    finally:
        dist.destroy_process_group()
