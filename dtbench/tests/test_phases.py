"""The phase of a step in which the host issued each collective, in traces of which it is known."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dtbench.records.job import Job
from dtbench.reporting.job_tables import tables
from dtbench.tests.made_up_traces import Event, gloo, kernel, launch, nccl, note, op, write
from dtbench.tests.test_job_figures import COMMITTED, committed, made_up
from dtbench.traces.analysis import analyze
from dtbench.traces.job import read_job
from dtbench.traces.rank_trace import read_rank

NODE = "autograd::engine::evaluate_function: "
MAIN, ENGINE = 1, 2  # threads


def forward(ts: float) -> list[Event]:
    """Ops of 100 us, of which the second begins 40 us after the first one ends."""
    return [op("aten::mm", ts, 30), op("MyFunction", ts + 70, 30)]


def backward(ts: float, thread: int = MAIN) -> list[Event]:
    """Nodes from `ts` to 60 us and from 80 to 100 us later."""
    names = ("MyFunctionBackward", "MmBackward0")
    return [op(NODE + name, ts + 80 * n, 60 - 40 * n, thread) for n, name in enumerate(names)]


def phases(folder: Path, events: Sequence[Event], calls_at: Sequence[float], thread: int = MAIN) -> list[str]:
    """Returns the phase of a call that the host issues at each time, on gloo and on a GPU.

    All kernels run at the end of the trace, long after the host launched them.
    """
    on_cpu = [event for at in calls_at for event in gloo(at, 3, late=2)]
    on_gpu = [kernel(90_000, 5)]
    for number, at in enumerate(calls_at):
        on_gpu += [
            launch(at, number + 1) | {"tid": thread},
            nccl(80_000 + 10 * number, 5, correlation=number + 1),
        ]
    found = [
        [call.phase for call in read_rank(write(folder, [*events, *calls]), 0).calls]
        for calls in (on_cpu, on_gpu)
    ]
    assert found[0] == found[1]
    return found[0]


def optimizer(ts: float) -> Event:
    return note("Optimizer.step#SGD.step", ts, 100)


# A step takes 1000 us: forward from 100 to 200, backward from 300 to 400, gradients until 600, optimizer to 700.
STEPS = [
    event
    for begin in (0.0, 1000.0, 2000.0)
    for event in (
        *forward(begin + 100),
        *backward(begin + 300),
        op("aten::mm", begin + 450, 9),
        optimizer(begin + 600),
    )
]


@pytest.mark.parametrize(
    ("at", "phase"),
    [
        (1050, "other"),  # data or metrics: nothing has been computed
        (1105, "forward"),
        (1140, "forward"),
        (1250, "forward"),  # the loss
        (1310, "backward"),
        (1370, "backward"),  # between two nodes
        (1420, "other"),  # gradients, before an op that could be one of a forward pass
        (1500, "other"),  # gradients, after it
        (1650, "optimizer"),
        (1750, "other"),
        (2750, "?"),  # the trace ends before the next pass
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_phase_follows_from_autograd_and_the_optimizer(
    tmp_path: Path, at: float, phase: str, marked: bool
) -> None:
    marks = [note(f"ProfilerStep#{n}", n * 1000.0, 1000) for n in range(3)] if marked else []
    expected = "other" if (marked, at) == (True, 2750) else phase  # the step's end is known
    assert phases(tmp_path, [*STEPS, *marks], [at]) == [expected]


def test_phase_of_a_call_on_the_engines_thread_is_backward(tmp_path: Path) -> None:
    events = [*forward(0), *backward(300, ENGINE), optimizer(600)]
    assert phases(tmp_path, events, [310, 370], ENGINE) == ["backward"] * 2


def test_phases_of_accumulated_gradients(tmp_path: Path) -> None:
    """Two micro-batches before the optimizer; between them, nothing is computed until 500 us."""
    events = [*forward(100), *backward(300), *forward(500), *backward(700), optimizer(900)]
    at = [150, 350, 450, 550, 650, 750, 850]
    known = ["forward", "backward", "other", "forward", "forward", "backward", "other"]
    assert phases(tmp_path, events, at) == known


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("FSDP::pre_forward (layers.0)", "forward"),
        ("DistributedDataParallel.forward", "forward"),
        ("## Forward ##", "forward"),
        ("FSDP::root_post_backward_callback", "backward"),
        ("my optimizer", "optimizer"),
        ("Optimizer.zero_grad#SGD.zero_grad", "?"),
        ("forward_backward", "?"),
        ("train 3", "?"),
    ],
)
def test_phase_follows_from_annotations(tmp_path: Path, name: str, phase: str) -> None:
    assert phases(tmp_path, [note(name, 100, 100), op("aten::mm", 300, 5)], [150, 250]) == [phase, "?"]


def test_recomputed_forward_is_backward(tmp_path: Path) -> None:
    events = [*forward(100), *backward(300), note("FSDP::pre_forward", 305, 20), optimizer(600)]
    assert phases(tmp_path, events, [310]) == ["backward"]


def test_phase_of_a_kernel_without_its_launch_is_unknown(tmp_path: Path) -> None:
    path = write(tmp_path, [*STEPS, nccl(1310, 5), kernel(1400, 5)])
    assert [call.phase for call in read_rank(path, 0).calls] == ["?"]


def test_phases_of_a_dim_add_up_to_it(tmp_path: Path) -> None:
    """Over dp, 30 us in the forward pass; 50 us in the backward pass, of which 10 us at the same time count before."""
    marks = [note(f"ProfilerStep#{n}", n * 1000.0, 1000) for n in range(3)]
    events = [*STEPS, *marks]
    for number in range(3):
        begin = number * 1000.0
        events += [launch(begin + 150, 2 * number + 1), launch(begin + 310, 2 * number + 2)]
        events += [
            nccl(begin + 330, 30, correlation=2 * number + 1),
            nccl(begin + 350, 50, correlation=2 * number + 2),
        ]
        events += [kernel(begin + 340, 5), kernel(begin + 390, 40)]
    job = read_job([write(tmp_path, events)])
    (dim,) = job.ranks[0].dims
    found = {part.phase: (part.communication_s, part.exposed_s) for part in dim.phases}
    assert found == {
        "forward": (pytest.approx(90e-6), pytest.approx(75e-6)),
        "backward": (pytest.approx(120e-6), pytest.approx(90e-6)),
    }
    table = next(
        table for table in tables(job, analyze(job)) if table.caption.startswith("Communication by phase")
    )
    assert [[*row] for row in zip(*(column.cells for column in table.columns), strict=True)] == [
        ["dp", "forward", "30.0 µs", "25.0 µs", "2.5%"],
        ["dp", "backward", "40.0 µs", "30.0 µs", "3.0%"],
    ]


def check_parts(job: Job) -> None:
    for rank in job.ranks:
        for dim in rank.dims:
            assert dim.communication_s == pytest.approx(sum(part.communication_s for part in dim.phases))
            assert dim.exposed_s == pytest.approx(sum(part.exposed_s for part in dim.phases))


def test_phases_of_committed_jobs_are_those_of_their_program(tmp_path: Path) -> None:
    """The program reduces activations over tp in the forward pass, and gradients over dp after the backward pass."""
    for place in COMMITTED:
        check_parts(committed(place))
    for place in COMMITTED[:2]:
        found = {
            (dim.mesh_dim, part.phase)
            for rank in committed(place).ranks
            for dim in rank.dims
            for part in dim.phases
        }
        assert found == {("tp", "forward"), ("dp", "other")}
    job = made_up(tmp_path / "job")
    check_parts(job)
    assert not any("phase" in table.caption for table in tables(job, analyze(job)))  # the trace shows none
