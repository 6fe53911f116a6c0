"""`dtbench profile` of a user's job: its targets and options, what is printed and kept; and the one line that names it
where a trace or a training script is given to another command."""

import contextlib
import gzip
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dtbench.file_kinds import HEAD_BYTES, kind_of
from dtbench.records.comparison import Verdict
from dtbench.records.job import CallChange, CallKind, Job, JobAnalysis, Lane, SavingEstimate, TimeChange
from dtbench.records.topology import read_topology
from dtbench.reporting.html import Sources, gather, render
from dtbench.reporting.job_tables import extremes, print_job
from dtbench.tests import made_up_jobs
from dtbench.tests.html_page import HOSTILE, Page, harmless, hostile
from dtbench.tests.made_up import Cli
from dtbench.traces.job import _MAX_LANE_INTERVALS

NO_ANALYSIS = JobAnalysis(0)
TOPOLOGY = Path(__file__).parents[2] / "results" / "baseline-cpu-gloo-4ranks.topology.json"
EVENTS = '{"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "nccl", "ts": 1, "dur": 2}]}'


def profile_in(folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    (folder / "job.json").write_bytes(msgspec.json.encode(made_up_jobs.job(**fields)))
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces the reading of traces by a made-up job; returns the file names of each call."""
    names: list[list[str]] = []

    def read_job(paths: Sequence[Path], label: str = "", command: Sequence[str] = ()) -> Job:
        names.append([path.name for path in paths])
        return made_up_jobs.job(label=label or "traces", command=tuple(command))

    monkeypatch.setattr("dtbench.traces.profile_job.read_job", read_job)
    return names


def test_profile_prints_traces_and_writes_them_with_o(dtbench: Cli, read: list[list[str]]) -> None:
    Path("traces").mkdir()
    for targets in (["a.json.gz", "b.json"], ["traces"]):
        code, out, err = dtbench("profile", *targets)
        assert (code, read.pop()) == (0, targets) and "-o FOLDER" in err
    assert "Communication by mesh dim" in out and [path.name for path in Path().iterdir()] == ["traces"]
    assert [dtbench("profile", *words)[0] for words in (["."], ["traces", "-o", "job"])] == [0, 0]
    assert sorted(path.name for path in Path("job").iterdir()) == ["job.json", "table.txt"]
    assert dtbench("profile", "traces", "-o", "job")[2].startswith("dtbench: job exists already")
    assert dtbench("show", "job")[1] == dtbench("profile", "job")[1] == Path("job/table.txt").read_text()


def test_profile_json_is_one_job_document(dtbench: Cli) -> None:
    profile_in(Path("job"))
    code, out, _ = dtbench("profile", "job", "--json")
    content = json.loads(out)
    assert msgspec.convert(content, Job) == made_up_jobs.job()
    steps = {"rank", "steps", "step_s", "computation_s", "communication_s", "exposed_s"}
    calls = {"rank", "collective", "mesh_dim", "group_size", "dtype", "bytes", "count", "time_s", "busbw"}
    assert steps <= content["ranks"][0].keys() and calls <= content["collectives"][0].keys()
    assert (code, content["analysis"]["exit_code"]) == (0, 0)
    assert json.loads(dtbench("show", "job", "--json")[1])["ranks"]


def test_profile_base_with_other_calls_exits_with_1(dtbench: Cli) -> None:
    profile_in(Path("head"))
    calls = [call for call in made_up_jobs.job().collectives if call.mesh_dim != "world"]
    profile_in(Path("base"), collectives=tuple(calls))
    assert dtbench("profile", "head", "--base", "head")[0] == 0
    code, out, _ = dtbench("profile", "head", "--base", "base")
    assert code == 1 and "world all_reduce" in out.partition("Base → head")[2]


@pytest.mark.parametrize("code", [0, 7])
def test_profile_command_keeps_its_options_and_exit_code(
    dtbench: Cli, read: list[list[str]], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    calls: list[Any] = []

    def record(command: Sequence[str], folder: Path, **options: Any) -> Any:
        calls.append((list(command), options))
        if not code:
            (folder / "rank0.json.gz").touch()
        return SimpleNamespace(
            exit_code=code, traces=(folder / "rank0.json.gz",) * (not code), notes=("A note.",)
        )

    monkeypatch.setattr("dtbench.traces.profile_job.record", record)
    command = ["torchrun", "train.py", "--steps", "20", "--", "--json"]
    got, out, err = dtbench("profile", "--steps", "4", "-o", "job", "--", *command)
    assert (got, calls) == (code, [(command, {"steps": 4, "warmup": 5, "timeout_s": 0, "delay": None})])
    if code:
        assert err.startswith("dtbench: no rank wrote a trace") and not Path("job").exists()
        return
    kept = msgspec.json.decode(Path("job/job.json").read_bytes(), type=Job)
    assert (kept.label, [*kept.command], kept.notes[0]) == ("job", command, "A note.") and "- A note." in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("job --mesh dp=2", "--mesh is for a suite, the target is traces"),
        ("job --steps 2", "--steps is for -- COMMAND"),
        ("job --delay rank=2,ms=30", "--delay is for -- COMMAND, the target is traces"),
        ("dispatch/add --delay rank=2,ms=30", "--delay is for -- COMMAND, the target is a suite"),
        *(
            (f"--delay {text} -- python x.py", f"{text!r}: expected rank=RANK,ms=MILLISECONDS")
            for text in (
                "rank=2",
                "rank=2,ms=0",
                "rank=2,ms=-3",
                "rank=2,ms=inf",
                "rank=-1,ms=3",
                "rank=2,s=3",
                "rank=2,ms=3,x=1",
            )
        ),
        ("dispatch/add --json", "--json is for traces or -- COMMAND"),
        ("--quick -- python x.py", "--quick is for a suite"),
        ("job -- python x.py", "expected traces, one SUITE[/CASE], or -- COMMAND"),
        ("--", "expected traces"),
        ("", "expected traces"),
        ("dispatch/add dispatch/mul", "got 2 targets"),
    ],
)
def test_profile_refuses_options_of_another_kind_of_target(dtbench: Cli, words: str, says: str) -> None:
    profile_in(Path("job"))
    code, _, err = dtbench("profile", *words.split())
    assert code == 2 and says in err and err.count("\n") == 1


def test_profile_delay_reaches_the_recorder_and_the_page(
    dtbench: Cli, read: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[Any] = []

    def record(_command: Sequence[str], folder: Path, *, delay: Any, **_options: Any) -> Any:
        delays.append(delay)
        (folder / "rank0.json.gz").touch()
        return SimpleNamespace(exit_code=0, traces=(folder / "rank0.json.gz",), notes=())

    monkeypatch.setattr("dtbench.traces.profile_job.record", record)
    assert dtbench("profile", "--delay", "ms=2.5,rank=3", "-o", "job", "--", "python", "x.py")[0] == 0
    assert delays == [(3, 0.0025)]


def test_model_and_layout_are_checked_before_the_command_runs(
    dtbench: Cli, read: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(_command: Sequence[str], folder: Path, **_options: Any) -> Any:
        (folder / "rank0.json.gz").touch()
        return SimpleNamespace(exit_code=0, traces=(folder / "rank0.json.gz",), notes=())

    def profile(model: str, layout: str) -> tuple[int, str, str]:
        words = ("profile", "-o", "job", "--model", model, "--layout", layout)
        return dtbench(*words, "--", "python", "x.py")

    monkeypatch.setattr("dtbench.traces.profile_job.record", record)
    for model, layout, message in (
        ("lama", "tp=2", "--model lama: unknown model"),
        ("llama-8b", "tp=two", "--layout 'tp=two', expected NAME=COUNT"),
    ):
        code, _, err = profile(model, layout)
        assert code == 2 and message in err and err.count("\n") == 1 and not Path("job").exists()
    # The number of ranks is known after the command only, and what it recorded is kept.
    code, _, err = profile("llama-8b", "tp=3")
    assert code == 2 and "has 6 ranks, expected the job's" in err
    assert msgspec.json.decode(Path("job/job.json").read_bytes(), type=Job).ranks


def test_bytes_per_step_are_not_compared_where_a_trace_has_no_steps(dtbench: Cli) -> None:
    job = made_up_jobs.job()
    ranks = tuple(msgspec.structs.replace(rank, steps=0, steps_source="", each_step=()) for rank in job.ranks)
    Path("job").mkdir()
    Path("job/job.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(job, ranks=ranks)))
    code, out, err = dtbench("profile", "job", "--model", "llama-8b", "--layout", "tp=8")
    assert code == 2 and not out and err.count("\n") == 1
    assert "--model compares bytes per step, and the traces show no steps: call profiler.step()" in err


def text_of(job: Job, analysis: JobAnalysis = NO_ANALYSIS) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_job(job, analysis)
    return out.getvalue()


def test_print_job_shows_the_extremes_of_a_thousand_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    job = made_up_jobs.job(ranks=1024, late=700)
    assert len(extremes(job)) == 16 and {1, 700} <= {rank.rank for rank in extremes(job)}
    text = text_of(job)
    assert "Ranks, 16 of 1024" in text and text.count("\n") < 60 and "rank 700: 86%, 3.10 ms" in text
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, text_of(job).splitlines())) <= 80


def test_print_job_of_sparse_traces_omits_missing_figures() -> None:
    ranks = (made_up_jobs.rank_job(0, steps=0, steps_source="", step_s=None, each_step=()),)
    bare = made_up_jobs.job(ranks=1)
    calls = [msgspec.structs.replace(c, dtype=None, bytes=None, busbw=None) for c in bare.collectives]
    text = text_of(msgspec.structs.replace(bare, ranks=ranks, collectives=tuple(calls), waits=(), notes=()))
    assert "No steps are marked" in text and "whole trace" in text
    assert "Last" not in text and "busbw" not in text
    assert text_of(msgspec.structs.replace(bare, ranks=ranks, collectives=(), lanes=()))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("text", "is_trace"),
    [
        (EVENTS, True),
        (
            '{"schemaVersion": 1, "distributedInfo": {"pg_config": ['
            + "1, " * HEAD_BYTES
            + '0]}, "traceEvents": []}',
            True,
        ),
        ('\ufeff[{"ph": "X", "ts": 1}]', True),
        ("", False),
        ('[{"name": "x"}]', False),
        ('{"kind": "run"}', False),
        ('{"kind": "run", "options": {"traceEvents": 1}}', False),
    ],
)
def test_kind_of_reads_the_head_of_a_file(
    tmp_path: Path, text: str, is_trace: bool, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "file").write_bytes(pack(text.encode()))
    assert (kind_of(tmp_path / "file") == "trace") == is_trace


def test_kind_of_is_unknown_for_folders_and_damaged_archives(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(gzip.compress(b" " * 2**24 + EVENTS.encode())[:-9])
    assert not kind_of(tmp_path / "file") and not kind_of(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "import T -o x",
        "show T",
        "report T -o x",
        "run T",
        "compare T T",
        "calibrate T",
        "gate --base env: --head env: T",
    ],
)
@pytest.mark.parametrize("trace", ["t.json", "t 1.json.gz"])
def test_other_commands_refuse_a_trace_and_name_profile(dtbench: Cli, command: str, trace: str) -> None:
    Path(trace).write_bytes(gzip.compress(EVENTS.encode()) if trace.endswith(".gz") else EVENTS.encode())
    code, _, err = dtbench(*(trace if word == "T" else word for word in command.split()))
    assert code == 2 and err.count("\n") == 1 and f"{trace} is a trace of torch.profiler, expected" in err
    assert f"`dtbench profile {trace if trace == 't.json' else repr(trace)}`" in err


@pytest.mark.parametrize(
    "command",
    ["run train.py", "profile train.py/x", "import train.py -o x", "show train.py", "report train.py -o x"],
)
def test_other_commands_do_not_run_a_training_script_and_name_profile(dtbench: Cli, command: str) -> None:
    Path("train.py").write_text("import torch\nopen('ran', 'w')\n")
    code, _, err = dtbench(*command.split())
    assert code == 2 and err.count("\n") == 1 and "`dtbench profile -- python train.py`" in err
    assert not Path("ran").exists()


def test_a_profile_has_a_timeline_curves_tables_and_notes(tmp_path: Path) -> None:
    folder = profile_in(tmp_path / "job")
    assert gather([folder]).job == gather([folder / "job.json"]).job == made_up_jobs.job()
    analysis = JobAnalysis(0, savings=(SavingEstimate("dp", "hidden", 3, 0.42, 0.06, 0.14),))
    page = Page(render(Sources(job=made_up_jobs.job(), topology=read_topology(TOPOLOGY), analysis=analysis)))
    for text in (
        "Step 12",
        "8 of 8 ranks, clocks aligned by ends of collectives",
        "all_gather, calibrated",
        "reduce_scatter",
        "excluded 2 events",
    ):
        assert text in page.section_text["job"]
    for text in (
        "60.0 ms (14% of the step of rank 3) if computation covered all communication over dp",
        "17% of the step is exposed communication",
        "torchrun --nproc-per-node 8",
    ):
        assert text in page.text
    assert [row[-1] for row in page.rows if row[-1].endswith(".gz")] == [f"rank{n}.json.gz" for n in range(8)]
    assert ("a", {"href": "https://ui.perfetto.dev"}) in page.tags


def test_job_page_clips_calibrated_lines() -> None:
    """They are of more sizes than the job has."""
    text = render(gather([TOPOLOGY.parent / "job" / "core"], topology=TOPOLOGY))
    drawings = re.findall(r'<svg class="plot"[^>]*inJob.*?</svg>', text, re.DOTALL)
    leaving = re.findall(r'<path d="M -[^>]*>', "".join(drawings))
    assert leaving and all("clip-path" in path for path in leaving)


def test_job_page_title_is_the_first_finding() -> None:
    gathers = CallKind("dp", "all_gather", 4, "float32", 2**19)
    calls = CallChange(gathers, gathers, (0.0, 2.0), (0,))
    step = TimeChange("step_s", Verdict.SLOWER, "beyond the 3.2x of launches", 0.01, 0.1, None)
    for analysis, title in (
        (JobAnalysis(1, call_changes=(calls,)), "Dp all_gather of 512 KiB (float32): 2 calls instead of 0"),
        (JobAnalysis(1, time_changes=(step,)), "Step: 10.0 ms → 100 ms, 10.0x slower than the base"),
    ):
        assert f"<h1>{title}</h1>" in render(Sources(job=made_up_jobs.job(), analysis=analysis))


def test_page_draws_few_of_many_ranks_and_lists_all() -> None:
    page = Page(render(Sources(job=made_up_jobs.job(ranks=64))))
    assert "16 of 64 ranks" in page.section_text["job"]
    assert len([row for row in page.rows if row[-1].endswith(".gz")]) == 64


def test_page_with_the_most_lanes_stays_below_two_megabytes() -> None:
    intervals = tuple((n / 1250 + 1e-7, n / 1250 + 4.1234e-4) for n in range(_MAX_LANE_INTERVALS))
    lanes = tuple(
        Lane(rank=rank, name=f"communication {n}", intervals=intervals)
        for rank in range(16)
        for n in range(6)
    )
    text = render(Sources(job=made_up_jobs.job(ranks=16, lanes=lanes)))
    assert len(text) < 2_000_000 and Page(text).section_text["job"].count("communication 5")


def test_job_page_escapes_hostile_names() -> None:
    job = msgspec.convert(
        hostile(msgspec.to_builtins(made_up_jobs.job()), {"kind", "last", "waiting_s"}), Job
    )
    calls = [
        msgspec.structs.replace(call, mesh_dim=HOSTILE * 5, collective="x" * 3000) for call in job.collectives
    ]
    harmless(render(Sources(job=msgspec.structs.replace(job, collectives=tuple(calls)))))
