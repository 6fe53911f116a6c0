"""Recording of a user's job: the job is unchanged, steps are recorded, and failures are reported."""

import gzip
import json
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtbench.errors import UsageError
from dtbench.tests.programs import environment, start_fresh
from dtbench.traces.job import read_job
from dtbench.traces.rank_trace import read_rank
from dtbench.traces.recording import Recording, record

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")
JOBS = Path(__file__).with_name("job_programs.py")
# A program of one rank that runs steps; tests replace STEP by code.
TRAINING = """
import os, signal, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight])
for step in range(int(sys.argv[2])):
    (weight * 2).sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    STEP
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Recording]]:
    """Records a program's text under this Python."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    folder = tmp_path / "job"
    folder.mkdir()

    def run(program: str, *args: str, **options: Any) -> Recording:
        file = tmp_path / "train.py"
        file.write_text(textwrap.dedent(program))
        return record([sys.executable, str(file), *args], folder, **options)

    yield run
    assert not {path.suffix for path in folder.iterdir()} - {".gz", ".txt"}


def train(
    job: Callable[..., Recording], tmp_path: Path, step: str = "", steps: int = 12, **options: Any
) -> Recording:
    return job(TRAINING.replace("STEP", step or "pass"), str(tmp_path / "store"), str(steps), **options)


def read(trace: Path) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(trace.read_bytes())))


def steps_of(trace: Path) -> list[str]:
    names = sorted((event["ts"], event["name"]) for event in read(trace)["traceEvents"] if "ts" in event)
    return [name for _, name in names if name.startswith("ProfilerStep")]


# ------------------------------------------------------------------ what is not a rank of torch


def test_a_program_without_torch_is_as_it_would_be(job: Callable[..., Recording], tmp_path: Path) -> None:
    plain = start_fresh(sys.executable, "-c", SEEN)
    recording = job(
        f"import sys; out = open({str(tmp_path / 'seen')!r}, 'w'); sys.stdout = out\n{SEEN}\nsys.exit(3)"
    )
    paths, modules = eval((tmp_path / "seen").read_text())
    plain_paths, plain_modules = eval(plain.stdout)
    assert paths[1:] == plain_paths[1:] and modules - plain_modules <= {"sitecustomize"}
    assert (recording.exit_code, recording.traces) == (3, ())
    assert "no Python process joined a process group" in recording.notes[0]


SEEN = "import sys; print((sys.path, set(sys.modules)))"


def test_the_users_own_sitecustomize_runs(
    job: Callable[..., Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("HELD = 7")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert job("import sys, sitecustomize; sys.exit(sitecustomize.HELD)").exit_code == 7


def test_an_end_by_a_signal_is_told_as_a_shell_does(job: Callable[..., Recording]) -> None:
    assert job("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").exit_code == 128 + signal.SIGKILL


def test_a_signal_to_us_alone_reaches_the_job_once(job: Callable[..., Recording]) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    program = """
        import sys, time
        seen = 0
        for _ in range(40):
            try:
                time.sleep(0.1)
            except KeyboardInterrupt:
                seen += 1
                if seen == 1: until = _ + 10
            if seen and _ > until: sys.exit(40 + seen)
    """
    assert job(program).exit_code == 41


@pytest.mark.parametrize("command", [["no-such-command-here"], [str(JOBS)]])
def test_a_command_that_cannot_be_started_gets_one_line(tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(
        UsageError, match=r"cannot run '.+': (no such file or directory|permission denied); give"
    ):
        record(command, tmp_path)


# ------------------------------------------------------------------ one rank


def test_in_a_rank_the_window_comes_after_the_warm_up(job: Callable[..., Recording], tmp_path: Path) -> None:
    recording = train(job, tmp_path, steps=20)
    (trace,) = recording.traces
    assert (recording.exit_code, recording.notes, trace.name) == (0, (), "rank0.json.gz")
    assert steps_of(trace) == ["ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"]
    about = read(trace)["dtbench"]
    assert about["device"] == "cpu" and list(about["gloo_threads"].values()) == ["0", "0"]


def test_in_a_rank_early_end_reports_how_many_steps_are_complete(
    job: Callable[..., Recording], tmp_path: Path
) -> None:
    # `steps` of the recording, not of the program.
    recording = job(TRAINING.replace("STEP", "pass"), str(tmp_path / "store"), "12", steps=100)
    assert (recording.exit_code, recording.notes) == (0, ())
    (trace,) = recording.traces
    assert read(trace)["dtbench_window"] == {"asked": 100, "whole": 7, "why": "the program ended"}
    assert steps_of(trace)[-1] == "ProfilerStep#12"  # no optimizer's step ends it
    figures = read_job(recording.traces)
    (rank,) = figures.ranks
    # The partial step is excluded, and on a busy machine a first one that outlies.
    assert rank.excluded_steps >= 1 and rank.steps + rank.excluded_steps == 8
    assert "rank 0: 7 of the 100 requested steps were recorded: the program ended" in figures.notes
    assert [call.calls_in_steps for call in figures.collectives] == [rank.steps]


def test_in_a_rank_nothing_stays_hooked_after_the_window(
    job: Callable[..., Recording], tmp_path: Path
) -> None:
    check = """if step == 11:
        from torch.optim import optimizer as hooked
        from torch.autograd import profiler
        call = vars(dist.ProcessGroup)["send"]
        kernels = torch._C._dispatch_dump("c10d::allreduce_")
        delays = "BackendSelect" in kernels
        sys.exit(5 if delays or hooked._global_optimizer_post_hooks or profiler.profile.__init__.__name__ != "__init__"
            or type(call).__name__ != "instancemethod" else 6)"""
    assert train(job, tmp_path, check, delay=(0, 0.001)).exit_code == 6


def test_in_a_rank_too_few_steps_say_what_to_do(job: Callable[..., Recording], tmp_path: Path) -> None:
    recording = train(job, tmp_path, steps=3)
    assert (recording.traces, recording.exit_code) == ((), 0)
    assert re.search("ended after 3 steps.*--warmup", recording.notes[0])


def test_in_a_rank_what_was_recorded_before_an_exception_is_kept(
    job: Callable[..., Recording], tmp_path: Path
) -> None:
    recording = train(job, tmp_path, 'if step == 6: raise ValueError("no data")')
    assert steps_of(recording.traces[0])[:2] == ["ProfilerStep#5", "ProfilerStep#6"]
    assert (recording.exit_code, recording.notes[0]) == (
        1,
        "rank 0 stopped at train.py:10 in <module> (ValueError: no data)",
    )


def test_in_a_rank_sigterm_in_the_window_keeps_the_trace(
    job: Callable[..., Recording], tmp_path: Path
) -> None:
    recording = train(job, tmp_path, "if step == 6: os.kill(os.getpid(), signal.SIGTERM)")
    assert recording.exit_code == 128 + signal.SIGTERM and steps_of(recording.traces[0])
    assert recording.notes == ("rank 0 stopped at train.py:10 in <module> (ended by SIGTERM)",)


def test_in_a_rank_a_step_that_takes_too_long_ends_the_job(
    job: Callable[..., Recording], tmp_path: Path
) -> None:
    recording = train(job, tmp_path, "if step == 9: __import__('time').sleep(100)", timeout_s=15)
    assert recording.exit_code == 1 and len(recording.traces) == 1
    assert recording.notes == ("rank 0 stopped at train.py:10 in <module> (Timeout (0:00:15)!)",)


def test_in_a_rank_the_programs_own_profiler_is_let_be(job: Callable[..., Recording], tmp_path: Path) -> None:
    own = """if step == 6:
        own = torch.profiler.profile()
        own.start()
    if step == 8:
        own.stop()
        sys.exit(0 if any("ProfilerStep" in e.name for e in own.events()) or not own.events() else 9)"""
    recording = train(job, tmp_path, own)
    assert recording.exit_code == 9  # it has events, and none of ours
    assert "starts its own profiler at step 7" in recording.notes[0]


def test_in_a_rank_the_whole_run_of_a_program_without_an_optimizer(
    job: Callable[..., Recording], tmp_path: Path
) -> None:
    program = TRAINING.replace("optimizer.step()", "pass").replace("STEP", "pass")
    (trace,) = job(program, str(tmp_path / "store"), "4", steps=0).traces
    assert [event["name"] for event in read(trace)["traceEvents"]].count("gloo:all_reduce") == 4


@pytest.mark.parametrize(
    "call", ["dist.all_reduce(weight.grad)", "fc.wait_tensor(fc.all_reduce(weight, 'sum', '0'))"]
)
def test_in_a_rank_delay_comes_once_before_the_first_collective_of_a_step(
    job: Callable[..., Recording], tmp_path: Path, call: str
) -> None:
    program = TRAINING.replace("dist.all_reduce(weight.grad)", f"[{call} for _ in range(2)]").replace(
        "STEP", "pass"
    )
    program = program.replace("import os", "import torch.distributed._functional_collectives as fc, os")
    (trace,) = job(program, str(tmp_path / "store"), "12", delay=(0, 0.002)).traces
    events = sorted(
        (event["ts"], event["dur"], event["name"])
        for event in read(trace)["traceEvents"]
        if event.get("name") in ("dtbench:delay", "gloo:all_reduce")
        or "ProfilerStep" in event.get("name", "")
    )
    names = [name.partition("#")[0] for _, _, name in events]
    assert names == ["ProfilerStep", "dtbench:delay", "gloo:all_reduce", "gloo:all_reduce"] * 3
    assert min(dur for _, dur, name in events if name == "dtbench:delay") >= 2000
    figures = read_job([trace])
    assert figures.delay and (figures.delay.count, figures.delay.delay_s) == (3, 0.002)


def test_in_a_rank_collectives_have_the_phase_of_their_call(
    job: Callable[..., Recording], tmp_path: Path
) -> None:
    program = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer, extra = torch.optim.SGD(model.parameters()), torch.ones(3)
for step in range(12):
    dist.all_reduce(extra)
    loss = model(torch.ones(2, 4)).sum()
    dist.all_reduce(extra)
    loss.backward()
    dist.all_reduce(extra)
    optimizer.step()
"""
    (trace,) = job(program, str(tmp_path / "store")).traces
    found = [call.phase for call in read_rank(trace, 0).calls]
    assert found == ["other", "forward", "backward", "other"] * 3


def test_in_a_rank_delay_of_a_rank_outside_the_job_ends_it(
    job: Callable[..., Recording], tmp_path: Path
) -> None:
    recording = train(job, tmp_path, delay=(4, 0.03))
    assert (recording.exit_code, recording.traces) == (2, ())
    assert recording.notes == ("rank 0 stopped: --delay names rank 4, the job has ranks 0 to 0",)


# ------------------------------------------------------------------ ranks under torchrun


def test_under_torchrun_ranks_record_the_same_steps(tmp_path: Path) -> None:
    recording = record([*TORCHRUN, "4", str(JOBS), "mesh_torch"], tmp_path)
    assert recording.exit_code == 0 and len(recording.traces) == 4
    assert len({tuple(steps_of(path)) for path in recording.traces}) == 1
    for trace in map(read, recording.traces):
        group_of_thread = trace["dtbench"]["gloo_threads"]
        groups = {group["pg_name"]: group["pg_desc"] for group in trace["distributedInfo"]["pg_config"]}
        seen = {
            (groups[group_of_thread[str(event["tid"])]], tuple(event["args"]["Input Dims"][0]))
            for event in trace["traceEvents"]
            if event["name"].startswith("gloo:")
        }
        # Activations over tp; over dp the gradients, whose reduce_scatter gloo does as an all_reduce.
        assert seen == {("mesh_tp", (64, 256)), ("mesh_dp", (262144,)), ("mesh_dp", (131072,))}


def test_under_torchrun_a_rank_that_raises_is_named_and_all_traces_are_kept(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    text = TRAINING.replace('"gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1', '"gloo"')
    program.write_text(text.replace("STEP", "if step == 6 and dist.get_rank(): raise ValueError('mine')"))
    recording = record([*TORCHRUN, "2", str(program), "", "12"], tmp_path)
    assert recording.exit_code == 1 and len(recording.traces) == 2
    assert recording.notes[0].startswith("rank 1 stopped at train.py:10 in <module> (ValueError: mine)")
    assert any(note.startswith("rank 0 stopped at train.py:8 in <module>") for note in recording.notes)


def test_under_torchrun_sends_name_their_group_and_dims_over_all_ranks_their_name(tmp_path: Path) -> None:
    """Within the window of steps and after it, over a dim of all ranks and over one of half of them."""
    program = tmp_path / "train.py"
    program.write_text(SENDING)
    recording = record([*TORCHRUN, "2", str(program)], tmp_path)
    assert recording.exit_code == 0 and recording.notes == ()
    job = read_job(recording.traces)
    assert {(call.collective, call.mesh_dim, call.count) for call in job.collectives} == {
        ("all_reduce", "dp", 3),
        ("send", "dp", 3),
        ("recv", "dp", 3),
        ("send", "pp", 3),
        ("recv", "pp", 3),
    }
    # On a busy machine, the first step may take so long that it is excluded.
    notes = [note for note in job.notes if not note.startswith("excluded from all figures: the first ")]
    assert job.backend == "gloo" and notes == []


SENDING = """
import torch, torch.distributed as dist
mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight])
rank, groups = dist.get_rank(), [mesh.get_group("dp"), dist.new_group([0, 1], group_desc="mesh_pp")]
for step in range(12):
    (weight * 2).sum().backward()
    dist.all_reduce(weight.grad, group=groups[0])
    for group in groups:
        if rank == 0:
            dist.send(weight.grad, 1, group)
        else:
            dist.recv(weight.grad, 0, group)
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""
