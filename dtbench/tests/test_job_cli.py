"""`dtbench profile` of a user's job: its targets and options, what is printed and kept; and the one line that names it
where a trace or a training script is given to another command."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dtbench.file_kinds import HEAD_BYTES, looks_like_trace
from dtbench.records.job import Job, JobAnalysis
from dtbench.reporting.job_tables import extremes, print_job
from dtbench.tests import made_up_jobs
from dtbench.tests.made_up import Cli

EVENTS = '{"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "nccl", "ts": 1, "dur": 2}]}'


def profile_in(folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    (folder / "job.json").write_bytes(msgspec.json.encode(made_up_jobs.job(**fields)))
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is read in place of traces that are read: their names."""
    names: list[list[str]] = []

    def read_job(paths: Sequence[Path], label: str = "", command: Sequence[str] = ()) -> Job:
        names.append([path.name for path in paths])
        return made_up_jobs.job(label=label or "traces", command=tuple(command))

    monkeypatch.setattr("dtbench.traces.profile_job.read_job", read_job)
    return names


def test_traces_are_printed_and_kept_where_a_folder_is_named(dtbench: Cli, read: list[list[str]]) -> None:
    Path("traces").mkdir()
    for targets in (["a.json.gz", "b.json"], ["traces"]):
        code, out, err = dtbench("profile", *targets)
        assert (code, read.pop()) == (0, targets) and "-o FOLDER" in err
    assert "Communication by mesh dim" in out and [path.name for path in Path().iterdir()] == ["traces"]
    assert dtbench("profile", ".")[0] == 0
    assert dtbench("profile", "traces", "-o", "job")[0] == 0
    assert sorted(path.name for path in Path("job").iterdir()) == ["job.json", "table.txt"]
    assert dtbench("profile", "traces", "-o", "job")[2].startswith("dtbench: job exists already")
    assert dtbench("show", "job")[1] == dtbench("profile", "job")[1] == Path("job/table.txt").read_text()


def test_json_is_one_document_with_the_fields_of_a_job(dtbench: Cli) -> None:
    profile_in(Path("job"))
    code, out, _ = dtbench("profile", "job", "--json")
    content = json.loads(out)
    assert code == 0 and msgspec.convert(content, Job) == made_up_jobs.job()
    steps = {"rank", "steps", "step_s", "computation_s", "communication_s", "exposed_s"}
    calls = {"rank", "collective", "mesh_dim", "group_size", "dtype", "bytes", "count", "time_s", "busbw"}
    assert steps <= content["ranks"][0].keys() and calls <= content["collectives"][0].keys()
    assert content["analysis"]["exit_code"] == 0 and json.loads(dtbench("show", "job", "--json")[1])["ranks"]


def test_a_base_with_other_calls_is_told_and_is_exit_code_1(dtbench: Cli) -> None:
    profile_in(Path("new"))
    calls = [call for call in made_up_jobs.job().collectives if call.mesh_dim != "world"]
    profile_in(Path("old"), collectives=tuple(calls))
    assert dtbench("profile", "new", "--base", "new")[0] == 0
    code, out, _ = dtbench("profile", "new", "--base", "old")
    assert code == 1 and "world all_reduce" in out.partition("Base → head")[2]


@pytest.mark.parametrize("code", [0, 7])
def test_a_command_has_options_of_its_own_and_its_exit_code(
    dtbench: Cli, read: list[list[str]], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    calls: list[Any] = []

    def record(command: Sequence[str], folder: Path, **options: Any) -> Any:
        calls.append((list(command), options))
        return SimpleNamespace(
            exit_code=code, traces=(folder / "rank0.json.gz",) * (not code), notes=("A note.",)
        )

    monkeypatch.setattr("dtbench.traces.profile_job.record", record)
    command = ["torchrun", "train.py", "--steps", "20", "--", "--json"]
    got, out, err = dtbench("profile", "--steps", "4", "-o", "job", "--", *command)
    assert (got, calls) == (code, [(command, {"steps": 4, "warmup": 5, "timeout_s": 0})])
    if code:
        assert err.startswith("dtbench: no rank wrote a trace") and not Path("job").exists()
        return
    kept = msgspec.json.decode(Path("job/job.json").read_bytes(), type=Job)
    assert (kept.label, kept.command, kept.notes[0]) == (
        "job",
        tuple(command),
        "A note.",
    ) and "- A note." in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("job --mesh dp=2", "--mesh is for a suite, the target is traces"),
        ("job --steps 2", "--steps is for -- COMMAND"),
        ("dispatch/add --json", "--json is for traces or -- COMMAND"),
        ("--quick -- python x.py", "--quick is for a suite"),
        ("job -- python x.py", "expected traces, one SUITE[/CASE], or -- COMMAND"),
        ("--", "expected traces"),
        ("", "expected traces"),
        ("dispatch/add dispatch/mul", "got 2 targets"),
    ],
)
def test_options_of_another_kind_of_target_are_refused(dtbench: Cli, words: str, says: str) -> None:
    profile_in(Path("job"))
    code, _, err = dtbench("profile", *words.split())
    assert code == 2 and says in err and err.count("\n") == 1


def text_of(job: Job) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_job(job, JobAnalysis(0))
    return out.getvalue()


def test_of_a_thousand_ranks_the_extremes_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = made_up_jobs.job(ranks=1024, late=700)
    assert len(extremes(job)) == 16 and {1, 700} <= {rank.rank for rank in extremes(job)}
    text = text_of(job)
    assert "Ranks, 16 of 1024" in text and text.count("\n") < 60 and "rank 700: 86%, 3.10 ms" in text
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, text_of(job).splitlines())) <= 80


def test_a_job_without_steps_or_with_little_in_its_traces_is_told_as_such() -> None:
    ranks = (made_up_jobs.rank_job(0, steps=0, steps_source="", step_s=None, each_step=()),)
    bare = made_up_jobs.job(ranks=1)
    calls = [msgspec.structs.replace(c, dtype=None, bytes=None, busbw=None) for c in bare.collectives]
    text = text_of(msgspec.structs.replace(bare, ranks=ranks, collectives=tuple(calls), waits=(), notes=()))
    assert (
        "No steps are marked" in text and "whole trace" in text and "Last" not in text and "busbw" not in text
    )
    assert text_of(msgspec.structs.replace(bare, ranks=ranks, collectives=(), lanes=()))


def test_traces_are_known_by_their_head(tmp_path: Path) -> None:
    listed = (
        '{"schemaVersion": 1, "distributedInfo": {"pg_config": ['
        + "1, " * HEAD_BYTES
        + '0]}, "traceEvents": []}'
    )
    for text, is_one in (
        (EVENTS, True),
        (listed, True),
        ('\ufeff[{"ph": "X", "ts": 1}]', True),
        ("", False),
        ('[{"name": "x"}]', False),
        ('{"kind": "run"}', False),
    ):
        for data in (text.encode(), gzip.compress(text.encode())):
            (tmp_path / "file").write_bytes(data)
            assert looks_like_trace(tmp_path / "file") == is_one, text[:80]
    (tmp_path / "file").write_bytes(gzip.compress(b" " * 2**24 + EVENTS.encode())[:-9])
    assert not looks_like_trace(tmp_path / "file") and not looks_like_trace(tmp_path)


def test_other_commands_name_profile_for_a_trace(dtbench: Cli) -> None:
    Path("t.json").write_text(EVENTS)
    Path("t 1.json.gz").write_bytes(gzip.compress(EVENTS.encode()))
    for trace in ("t.json", "t 1.json.gz"):
        for words in (
            "import T -o x",
            "show T",
            "report T -o x",
            "run T",
            "compare T T",
            "calibrate T",
            "gate --base env: --head env: T",
        ):
            code, _, err = dtbench(*(trace if word == "T" else word for word in words.split()))
            assert (
                code == 2
                and err.count("\n") == 1
                and f"{trace} is a trace of torch.profiler, expected" in err
            )
            assert f"`dtbench profile {trace if trace == 't.json' else repr(trace)}`" in err


def test_a_training_script_is_not_run_and_profile_is_named(dtbench: Cli) -> None:
    Path("train.py").write_text("import torch\nopen('ran', 'w')\n")
    for words in (
        "run train.py",
        "profile train.py/x",
        "import train.py -o x",
        "show train.py",
        "report train.py -o x",
    ):
        code, _, err = dtbench(*words.split())
        assert code == 2 and err.count("\n") == 1 and "`dtbench profile -- python train.py`" in err, err
    assert not Path("ran").exists()
