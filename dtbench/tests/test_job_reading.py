"""Traces made by hand, of which one knows what they say."""

import gzip
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dtbench.errors import DtbenchError
from dtbench.records.job import Collective, Job, RankJob
from dtbench.records.read import convert
from dtbench.tests.made_up_traces import (
    Event,
    event,
    gloo,
    header,
    kernel,
    launch,
    nccl,
    note,
    op,
    steps,
    text_of,
    write,
)
from dtbench.traces import kineto
from dtbench.traces.job import read_job


def read(tmp_path: Path, events: Sequence[Event], **more: Any) -> Job:
    return read_job([write(tmp_path, events, **more)])


def read_text(tmp_path: Path, text: bytes) -> Job:
    (tmp_path / "t.json").write_bytes(text)
    return read_job([tmp_path])


def only_call(job: Job) -> Collective:
    (call,) = job.collectives
    return call


def parts(rank: RankJob) -> list[float]:
    """Returns span, computation, communication, exposed, copies and idle, microseconds."""
    names = ("span_s", "computation_s", "communication_s", "exposed_s", "copy_s", "idle_s")
    return [round(getattr(rank, name) * 1e6, 3) for name in names]


# Two streams compute at once, a copy lies over a message and the message over the end of the computation.
BUSY = [
    kernel(100, 50),
    kernel(120, 60, stream=8),
    nccl(150, 100),
    nccl(240, 60),
    event("Memcpy HtoD", 200, 80, "gpu_memcpy", 9),
    kernel(350, 50),
]
# Three steps with a kernel each.
MARKED = [
    *steps(3),
    *(launch(n * 1000 + 1, n + 1) for n in range(3)),
    *(kernel(n * 1000 + 10, 100, correlation=n + 1) for n in range(3)),
]
PARAM_COMMS = {
    "Collective name": "_allgather_base",
    "In msg nelems": 500,
    "Out msg nelems": 1000,
    "dtype": "BFloat16",
    "Group size": 2,
    "Process Group Name": "1",
}


def test_intervals_are_united_before_they_are_added(tmp_path: Path) -> None:
    (rank,) = read(tmp_path, BUSY).ranks
    assert parts(rank) == [300, 130, 150, 120, 80, 50]


@pytest.mark.parametrize(("seed", "packed"), [(1, False), (2, True)])
def test_read_job_is_independent_of_event_order_and_compression(
    tmp_path: Path, seed: int, packed: bool
) -> None:
    events = [*BUSY, *steps(3), op("record_param_comms", 140, 5)]
    expected = read(tmp_path, events)
    got = read(tmp_path, random.Random(seed).sample(events, len(events)), packed=packed)
    assert got.ranks[0].each_step == expected.ranks[0].each_step
    assert got.collectives == expected.collectives


@pytest.mark.parametrize(
    ("zero", "replaced", "computed"),
    [
        pytest.param(0.5, {}, 40, id="floats"),
        pytest.param(1_700_000_000_000_000, {}, 40, id="integers"),
        pytest.param(0, {b'"ts": 20': b'"ts": "20.0"'}, 40, id="texts"),
        pytest.param(
            0,
            {
                **{b'"ts": %d,' % at: b'"ts": 1700000000000%03d.125,' % at for at in (0, 20, 60)},
                b'"dur": 20': b'"dur": 39.875',
            },
            59.875,
            id="more digits than a float has",
        ),
    ],
)
def test_times_are_exact_from_the_first_event_on(
    tmp_path: Path, zero: float, replaced: dict[bytes, bytes], computed: float
) -> None:
    text = text_of([kernel(zero + at, dur) for at, dur in ((0, 10), (20, 20), (60, 10))])
    for old, new in replaced.items():
        text = text.replace(old, new)
    assert parts(read_text(tmp_path, text).ranks[0])[:2] == [70, computed]


def test_event_with_invalid_time_is_excluded(tmp_path: Path) -> None:
    job = read_text(tmp_path, text_of([*BUSY, kernel(99, 1)]).replace(b'"ts": 99', b'"ts": NaN'))
    assert parts(job.ranks[0]) == [300, 130, 150, 120, 80, 50]
    assert any("excluded 1 event without a time" in text for text in job.notes)


@pytest.mark.parametrize("wrong", [-5, 2**31 / 1e3, 1e7, 1500])
def test_events_with_impossible_durations_are_excluded_with_a_note(tmp_path: Path, wrong: float) -> None:
    """Negative, 2^31 ns, longer than the trace, longer than the longest step."""
    sound = [*MARKED, nccl(1300, 50)]
    expected = read(tmp_path, sound)
    got = read(tmp_path, [*sound, kernel(1200, wrong), nccl(1250, wrong)])
    assert (parts(got.ranks[0]), got.collectives) == (parts(expected.ranks[0]), expected.collectives)
    assert any("excluded 2 events with an impossible duration" in text for text in got.notes)


def test_event_between_steps_may_last_longer_than_a_step(tmp_path: Path) -> None:
    """A barrier after an evaluation, say."""
    job = read(tmp_path, [*MARKED, kernel(9000, 10), nccl(4000, 3000)])
    assert job.ranks[0].communication_s == pytest.approx(3e-3)
    assert not any("impossible" in text for text in job.notes)


@pytest.mark.parametrize(
    "events",
    [
        [
            *BUSY,
            *steps(3),
            launch(5, 1),
            kernel(10, 5, correlation=1),
            kernel(10, 5, correlation=2),
            op("c10d::allreduce_", 140, 30),
            op("record_param_comms", 141, 5, **PARAM_COMMS),
        ],
        [op("aten::mm", 0, 9), *gloo(10, 50), *gloo(100, 50), *steps(3, name="train ")],
    ],
    ids=["GPU", "CPU"],
)
def test_a_trace_that_holds_every_event_twice_counts_each_once(tmp_path: Path, events: list[Event]) -> None:
    """A profile that is exported twice repeats events. Kernels of a graph on two streams are no repetition."""
    once, twice = (read(tmp_path, events * count) for count in (1, 2))
    assert (twice.collectives, twice.ranks) == (once.collectives, once.ranks)
    (repetition,) = {*twice.notes} - {*once.notes}
    assert re.fullmatch(r"rank 0: excluded \d+ events that repeat another event", repetition)


# ---- what a collective was ----

GENERIC = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([kernel(100, 50, GENERIC, **PARAM_COMMS)], id="the kernel's arguments"),
        pytest.param(
            [kernel(100, 50, "_ZN5other6kernelE", **PARAM_COMMS)], id="an unknown kernel's arguments"
        ),
        pytest.param(
            [
                op("c10d::_allgather_base_", 0, 30),
                op("record_param_comms", 5, 10, **PARAM_COMMS),
                op("aten::matmul", 40, 9),
                launch(7, 3),
                kernel(100, 50, GENERIC, correlation=3),
            ],
            id="the call that launched it, as RCCL's must be",
        ),
        pytest.param(
            [
                op("c10d::_allgather_base_", 0, 30),
                op("record_param_comms", 5, 10, **PARAM_COMMS | {"External id": 9}),
                event("nccl:_all_gather_base", 99, 52, "gpu_user_annotation", 7, **{"External id": 9}),
                kernel(100, 50, GENERIC),
            ],
            id="the annotation on its stream",
        ),
    ],
)
def test_collective_is_identified_by(tmp_path: Path, events: list[Event]) -> None:
    call = only_call(read(tmp_path, [*events, kernel(200, 1)]))
    assert (call.collective, call.mesh_dim, call.group_size) == ("all_gather", "dp", 2)
    assert (call.dtype, call.bytes, call.count) == ("bfloat16", 2000, 1)


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "all_reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("void vllm::cross_device_reduce_2stage<__half, 4>(vllm::RankData*)", "all_reduce"),
        ("ncclDevKernel_SendRecv(x)", "send_recv"),
        ("ncclDevKernel_Generic(x)", "unknown"),
    ],
)
def test_kernel_without_arguments_is_identified_by_name(tmp_path: Path, name: str, collective: str) -> None:
    job = read(tmp_path, [kernel(0, 10, name), kernel(20, 1)], groups=[])
    call = only_call(job)
    dtype = "float16" if "__half" in name else None
    assert (call.collective, call.bytes, call.dtype) == (collective, None, dtype)
    assert call.mesh_dim == "unknown group"
    assert parts(job.ranks[0])[:4] == [21, 1, 10, 10]
    assert any("could not be identified" in text for text in job.notes) == (collective == "unknown")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("all_to_allv", "all_to_all"),
        ("alltoall_base", "all_to_all"),
        ("broadcast", "broadcast"),
        ("recv", "recv"),
    ],
)
def test_collective_names_of_torch_are_unified(tmp_path: Path, name: str, known: str) -> None:
    assert only_call(read(tmp_path, [nccl(0, 10, name), kernel(20, 1)])).collective == known


def test_bytes_of_a_collective_are_the_larger_of_input_and_output(tmp_path: Path) -> None:
    sizes = {"all_to_allv": (300, 700), "_allgather_base": (500, 1000), "_reduce_scatter_base": (1000, 500)}
    events = [
        nccl(100 * n, 10, name, **{"In msg nelems": received, "Out msg nelems": sent})
        for n, (name, (received, sent)) in enumerate(sizes.items())
    ]
    calls = {call.collective: call.bytes for call in read(tmp_path, events).collectives}
    assert calls == {"all_to_all": 2800, "all_gather": 4000, "reduce_scatter": 4000}


@pytest.mark.parametrize(
    ("said", "name", "size"),
    [
        ("Float8_e4m3fn", "float8_e4m3fn", 1),
        ("c10::BFloat16", "bfloat16", 2),
        ("Long", "int64", 8),
        ("c10::complex<float>", "complex64", 8),
        ("Quad", None, None),
    ],
)
def test_dtype_names_of_torch_are_unified(
    tmp_path: Path, said: str, name: str | None, size: int | None
) -> None:
    call = only_call(read(tmp_path, [nccl(0, 10, dtype=said), kernel(20, 1)]))
    assert (call.dtype, call.bytes) == (name, size and 1000 * size)


def test_gloo_bytes_come_from_the_shapes_of_calls(tmp_path: Path) -> None:
    call, carrier = gloo(
        100, 30, "allgather", **{"Input Dims": [[], [[250]]], "Input type": ["", "TensorList"]}
    )
    events = [
        *gloo(0, 50),
        call,
        carrier | {"args": {"Input Dims": [[250]], "Input type": ["c10::BFloat16"]}},
        op("c10d::wait_tensor", 300, 5),
        op("c10d::start_coalescing", 310, 5),
        op("c10d::end_coalescing", 320, 5),
        op("aten::mm", 10, 20),
    ]
    job = read(tmp_path, events)
    calls = {call.collective: (call.dtype, call.bytes, call.mesh_dim) for call in job.collectives}
    assert calls == {"all_reduce": ("float32", 4000, "dp"), "all_gather": ("bfloat16", 1000, "dp")}
    assert parts(job.ranks[0]) == [325, 20, 80, 60, 0, 245]


@pytest.mark.parametrize(
    ("args", "dim", "size"),
    [
        ({"Process Group Name": "1"}, "dp", 4),
        ({"Process Group Name": "7", "Process Group Description": "mesh_tp"}, "tp", 2),
        (
            {"Process Group Name": "8", "Process Group Ranks": "[0, 2]", "Group size": 2},
            "group of 2, stride 2",
            2,
        ),
        (
            {"Process Group Name": "9", "Process Group Ranks": "[0, 1, ...]", "Group size": 64},
            "group of 64",
            64,
        ),
        (
            {"Process Group Name": None, "Process Group Ranks": None, "Group size": None},
            "unknown group",
            None,
        ),
    ],
)
def test_mesh_dim_of_process_group(tmp_path: Path, args: Event, dim: str, size: int | None) -> None:
    tp = {"pg_name": "3", "pg_desc": "mesh_tp", "pg_size": 2, "ranks": [0, 1]}
    dp = {"pg_name": "1", "pg_desc": "mesh_dp", "pg_size": 4, "ranks": [0, 1, 2, 3]}
    call = only_call(read(tmp_path, [nccl(0, 10, **args), kernel(20, 1)], world=4, groups=[dp, tp]))
    assert (call.mesh_dim, call.group_size) == (dim, size or args.get("Group size", 2))


@pytest.mark.parametrize(
    ("recorded", "dim"),
    [
        ({}, "group of 2"),
        ({"dtbench_mesh_dims": {"0": "dp"}}, "dp"),
        ({"dtbench_mesh_dims": {"0": "dp/shard"}}, "dp/shard"),
        ({"dtbench_mesh_dims": []}, "group of 2"),
        ({"dtbench_mesh_dims": {}}, "group of 2"),
    ],
)
@pytest.mark.parametrize("description", ["default_pg", "mesh_default"])
def test_mesh_dim_over_all_ranks_has_the_name_that_was_recorded(
    tmp_path: Path, recorded: dict[str, object], dim: str, description: str
) -> None:
    """torch gives it the default group, whose description is no dim's."""
    groups = [{"pg_name": "0", "pg_desc": description, "ranks": [0, 1]}]
    events = [nccl(0, 10, **{"Process Group Name": "0"}), kernel(20, 1)]
    assert only_call(read(tmp_path, events, groups=groups, **recorded)).mesh_dim == dim


TWO_GROUPS = [{"pg_name": name, "pg_desc": f"mesh_{name}", "ranks": [0, 1]} for name in "12"]


def test_gloo_sends_have_the_recorded_group(tmp_path: Path) -> None:
    events = [op("aten::mm", 500, 5)]
    for n, name in enumerate(["1", "2", "", "unheard of"]):
        events += [
            note(f"dtbench:group {name}", n * 100, 20),
            note("2", n * 100, 20),  # the program's own
            op("c10d::send", n * 100 + 1, 15, **{"Input Dims": [[[10]]], "Input type": ["TensorList"]}),
            event(
                "gloo:send",
                n * 100 + 5,
                50,
                "user_annotation",
                **{"Input Dims": [[10]], "Input type": ["float"]},
            ),
        ]
    job = read(tmp_path, events, groups=TWO_GROUPS)
    calls = {call.mesh_dim: (call.count, call.bytes, call.callers) for call in job.collectives}
    assert calls == {"1": (1, 40, ("2",)), "2": (1, 40, ("2",)), "unknown group": (2, 40, ("2",))}
    unknown = r"rank 0: the process group of 2 sends and receives is unknown.*-- COMMAND"
    assert [bool(re.match(unknown, text)) for text in job.notes if "sends and receives" in text] == [True]


def test_gloo_groups_are_identified_on_all_ranks_or_none(tmp_path: Path) -> None:
    # A group has two threads; on rank 1 one of them had nothing to do.
    for rank, threads in enumerate([(50, 51, 60, 61), (50, 51, 60, 60)]):
        events = [call for n, tid in enumerate(threads) for call in gloo(n * 100, 20, tid=tid)]
        write(tmp_path, [*events, op("aten::mm", 500, 5)], rank, groups=TWO_GROUPS)
    assert {call.mesh_dim for call in read_job([tmp_path / "rank0.json"]).collectives} == {"1", "2"}
    assert {call.mesh_dim for call in read_job([tmp_path]).collectives} == {"unknown group"}


@pytest.mark.parametrize(
    ("recorded", "delays", "expected"),
    [
        ("0 0.030000000", 2, (0, 0.03, 2)),
        ("0 0.030000000", 1, (0, 0.03, 1)),
        ("1 0.030000000", 0, (1, 0.03, 0)),  # the trace of rank 1 is missing
        ("-1 0", 2, None),
        ("0 nan", 2, None),
        ([0, 1], 2, None),
        ("9" * 5000, 2, None),
    ],
)
def test_injected_delay_is_no_part_of_the_call_that_it_delays(
    tmp_path: Path, recorded: object, delays: int, expected: tuple[int, float, int] | None
) -> None:
    """Each call lasts 35 us on the host, of which the rank sleeps 30; its transport takes 20 us."""
    events = [*steps(2), op("aten::mm", 500, 5)]
    for n in range(2):
        call, transport = gloo(n * 1000 + 100, 20, late=35)
        events += [call, transport, note("dtbench:delay", n * 1000 + 101, 30)][: 3 if n < delays else 2]
    job = read(tmp_path, events, dtbench={"delay": recorded})
    other = write(tmp_path, [*steps(2), *gloo(100, 50), *gloo(1100, 50)], 1)
    both = read_job([tmp_path / "rank0.json", other])
    assert only_call(job).count == 2 and job.ranks[0].communication_s == pytest.approx(40e-6)
    # Both ranks leave at 155 us; rank 1 arrives at 100 us, and rank 0 after its delay at 131 us.
    assert both.waits[0].waiting_s["1"] == pytest.approx(31e-6 * delays)
    found = job.delay and (job.delay.rank, job.delay.delay_s, job.delay.count)
    assert found == expected
    text = f"rank 0 was delayed by 30.0 ms before its first collective of each step, as --delay requested: {delays} "
    assert any(line.startswith(text) for line in job.notes) == bool(expected and expected[2])


# ---- steps ----


@pytest.mark.parametrize(
    ("marks", "by", "count"),
    [
        (steps(4), "ProfilerStep#", 4),
        (steps(4, name="train "), "train #", 4),
        ([note("Optimizer.step#AdamW.step", n * 1000 + 900, 50) for n in range(4)], None, 3),
        ([], "repetition", 3),
    ],
)
def test_steps_are_found_from_marks_or_repetition(
    tmp_path: Path, marks: list[Event], by: str | None, count: int
) -> None:
    events = [e for n in range(4) for e in (nccl(n * 1000 + 100, 50), nccl(n * 1000 + 300, 90, "all_gather"))]
    (rank,) = read(tmp_path, [*marks, *events]).ranks
    assert (rank.steps_source, rank.steps) == (by or "Optimizer.step#AdamW.step", count)
    assert rank.step_s == pytest.approx(1e-3)


def test_call_counts_in_the_step_that_issued_it(tmp_path: Path) -> None:
    """Though the GPU runs behind, and before and after the steps calls are made, too."""
    issued = [-50.0, 900.0, 1900.0, 2900.0, 3500.0]
    events = [launch(at, n) for n, at in enumerate(issued)]
    events += [nccl(at + 700, 50, correlation=n) for n, at in enumerate(issued)]
    call = only_call(read(tmp_path, [*steps(3), *events]))
    assert (call.count, call.in_steps) == (5, 3)


# ---- damaged files ----

NESTED = [kernel(n * 10, 5, stacks=[{"a": 1}, {"b": 2}, {"a": "},{"}], text='},{"ph"') for n in range(200)]


@pytest.mark.parametrize("packed", [False, True])
def test_read_job_keeps_the_complete_events_of_a_cut_file(tmp_path: Path, packed: bool) -> None:
    path = write(tmp_path, NESTED, packed=packed)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    job = read_job([path])
    assert 0.2e-3 < job.ranks[0].computation_s < 0.9e-3
    assert any("cut off" in text for text in job.notes)


@pytest.mark.parametrize("damage", [b'"name": \x00', b'"name": gemm"', b'"name": [{', b'"name": "a\xff"'])
def test_damaged_event_is_skipped(tmp_path: Path, damage: bytes) -> None:
    name = b'"name": "gemm"'
    before, after = SOUND[: len(SOUND) // 2], SOUND[len(SOUND) // 2 :]
    job = read_text(tmp_path, before + after.replace(name, damage, 1))
    lost = 0 if b"\xff" in damage else 1  # a letter
    assert job.ranks[0].computation_s == pytest.approx((200 - lost) * 5e-6)
    assert any("excluded 1 damaged event" in text for text in job.notes) == bool(lost)


SOUND = text_of(NESTED)
STACK_FRAMES = {str(n): {"name": "f", "parent": "0"} for n in range(3000)}


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        pytest.param(
            SOUND[SOUND.index(b"[", SOUND.index(b"traceEvents")) : SOUND.rindex(b"]") + 1], 0, id="array"
        ),
        pytest.param(b", ]".join(SOUND.rsplit(b"]", 1)), 0, id="trailing comma"),
        pytest.param(SOUND.replace(b"\n", b"").replace(b"}, ", b"},"), 0, id="one line"),
        pytest.param(
            text_of(NESTED, {}, stackFrames=STACK_FRAMES, distributedInfo={"rank": 3, "world_size": 8}),
            3,
            id="header after",
        ),
    ],
)
def test_read_job_accepts_variants_of_the_json(tmp_path: Path, text: bytes, rank: int) -> None:
    job = read_text(tmp_path, text)
    assert (job.ranks[0].rank, job.ranks[0].computation_s) == (rank, pytest.approx(1e-3))
    assert not any("cut off" in text or "damaged" in text for text in job.notes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, "expected its JSON") for text in (b"", b"{}", b'{"traceEvents": 3}', b"PK\x03\x04" * 99)),
        (text_of([]), "expected a profiler's trace"),
        (gzip.compress(b"\0" * 2**22), "expected its JSON"),
        (b"\x1f\x8b\x08", "expected its JSON"),
        # A trace of another tool.
        (
            text_of([event("Layout", 1, 5, "blink"), event("v8", 9, 5, "op")], {}),
            "expected a profiler's trace",
        ),
    ],
)
def test_read_job_refuses_other_files_in_one_line(tmp_path: Path, text: bytes, expected: str) -> None:
    with pytest.raises(DtbenchError, match=rf"^[^\n]*{expected}[^\n]*\Z"):
        read_text(tmp_path, text)


# ---- several ranks ----


def ranks_of(
    tmp_path: Path, count: int, *, seq: bool = True, apart_us: float = 0.0, late: int = 1, **more: Any
) -> Job:
    """10 all-reduces; rank `late` comes to each 300 us after the others, and all leave together."""
    for rank in range(count):
        group = {"Process Group Ranks": str(list(range(count))), "Group size": count}
        late_us = 300 if rank == late else rank
        events = []
        for n in range(10):
            begin = n * 1000 + apart_us * rank
            call = group | ({"Seq": n} if seq else {})
            events += [kernel(begin, 100), nccl(begin + 100 + late_us, 500 - late_us, **call)]
        write(tmp_path, events, rank, world=count, **more)
    return read_job([tmp_path])


@pytest.mark.parametrize(
    ("seq", "apart_us", "host"),
    [(True, 0.0, ""), (True, 60e6, ""), (False, 60e6, "one"), (False, 0.0, "one"), (False, 60e6, "two")],
)
def test_waits_name_the_last_rank_and_the_time_of_the_others(
    tmp_path: Path, seq: bool, apart_us: float, host: str
) -> None:
    job = ranks_of(tmp_path, 3, seq=seq, apart_us=apart_us, host_name="node" * (host == "one"))
    (waits,) = job.waits
    assert (waits.mesh_dim, waits.group_size, waits.calls, waits.last_counts) == ("dp", 3, 10, {"1": 10})
    error = max(rank.clock_error_s or 0 for rank in job.ranks)
    assert waits.late_s["1"] == pytest.approx(299e-6, abs=error + 1e-9)
    assert waits.waiting_s["0"] == pytest.approx(3e-3, abs=10 * error + 1e-9)
    assert ("sequence number" if seq else "order") in job.aligned_by
    assert job.ranks[1].clock_offset_s == pytest.approx(-apart_us / 1e6, abs=1e-4)
    (transfer_s,) = (call.transfer_s for call in job.collectives if call.rank == 1)
    assert transfer_s == pytest.approx(200e-6, abs=error + 1e-9)


def test_missing_ranks_give_no_waits(tmp_path: Path) -> None:
    ranks_of(tmp_path, 3)
    (tmp_path / "rank2.json").unlink()
    job = read_job([tmp_path])
    assert (job.world_size, len(job.ranks), job.waits) == (3, 2, ())
    assert any("2 of 3 ranks" in text for text in job.notes)


@pytest.mark.parametrize("seq", [True, False])
def test_traces_that_start_at_different_calls_match_by_sequence_number(tmp_path: Path, seq: bool) -> None:
    """Numbers join them; without, the n-th is not the n-th."""
    ranks_of(tmp_path, 2, seq=seq)
    write(tmp_path, [nccl(n * 1000 + 400, 200, **({"Seq": n} if seq else {})) for n in range(4, 10)], 1)
    assert [waits.calls for waits in read_job([tmp_path]).waits] == ([6] if seq else [])


def test_waits_of_subgroups_use_separate_clocks(tmp_path: Path) -> None:
    """On 2 x 2 ranks, the calls of each pair have the same sequence numbers."""
    for rank in range(4):
        pair, late_us = rank // 2 * 2, 100 * (rank == 3)
        group = {"pg_name": f"tp{pair}", "pg_desc": "mesh_tp", "ranks": [pair, pair + 1]}
        members = {"Process Group Name": group["pg_name"], "Process Group Ranks": str(group["ranks"])}
        events = [nccl(n * 1000 + late_us, 200 - late_us, Seq=n, **members) for n in range(8)]
        write(tmp_path, events, rank, world=4, groups=[group])
    job = read_job([tmp_path])
    assert any("share no collective" in text for text in job.notes)
    (waits,) = job.waits  # of both pairs, each on a clock of its own
    assert (waits.calls, waits.group_size, waits.last_counts) == (16, 2, {"3": 8})


def test_read_job_refuses_two_traces_of_one_rank(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_bytes(text_of(BUSY, header(1)))
    with pytest.raises(DtbenchError, match="both of rank 1"):
        read_job([tmp_path])


# ---- what is made to harm ----


@pytest.mark.parametrize(
    "args",
    [
        {"Input Dims": [[10**9] * 4, [[10**18] * 100_000], [-5, 3]], "Input type": ["float"] * 3},
        {"Process Group Ranks": 5, "Seq": -1, "Group size": "x", "In msg nelems": 10**400, "dtype": []},
        {"External id": [1], "correlation": {}, "Collective name": {"a": 1}, "Process Group Name": [[]]},
    ],
)
def test_event_arguments_may_have_any_size_and_type(tmp_path: Path, args: Event) -> None:
    events = [*gloo(0, 50, **args), nccl(100, 5, **args), op("c10d::allreduce_", 99, 9, **args), kernel(1, 1)]
    job = read(tmp_path, events)
    assert convert(msgspec.to_builtins(job), Job) == job


def test_huge_rank_counts_are_read(tmp_path: Path) -> None:
    many = 10**18
    groups = [{"pg_name": "1", "pg_size": many}, {"pg_name": 7, "ranks": ["0", "1"]}]
    for rank in range(2):
        text = text_of([nccl(n * 100, 50) for n in range(3)], header(rank, groups=groups))
        (tmp_path / f"{rank}.json").write_bytes(text.replace(b'"world_size": 2', b'"world_size": %d' % many))
    job = read_job([tmp_path])
    assert (job.world_size, job.waits) == (many, ())


@pytest.mark.parametrize("filler", [b" ", b"[", b"{", b'"', b"},{", b"\0"])
def test_oversized_traces_are_refused(tmp_path: Path, filler: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it fills the memory: a GB of it is a MB of gzip."""
    monkeypatch.setattr(kineto, "PIECE", 2**16)
    monkeypatch.setattr(kineto, "MAX_EVENT_BYTES", 2**20)
    monkeypatch.setattr(kineto, "MAX_TRACE_BYTES", 2**21)
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' + filler * 2**22, 1))
    with pytest.raises(DtbenchError, match=r"more than (1 MiB|0 GiB)"):
        read_job([tmp_path])


def test_deeply_nested_event_is_skipped(tmp_path: Path) -> None:
    deep = b'"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "name": "gemm"'
    job = read_text(tmp_path, SOUND.replace(b'"name": "gemm"', deep, 1))
    assert job.ranks[0].computation_s == pytest.approx(199 * 5e-6)
