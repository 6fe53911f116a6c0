"""`import dtbench`: measuring, reading and judging from a program."""

import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dtbench
from dtbench.errors import OutputError, UnreadableRunError, UsageError
from dtbench.suite import Case, RunOptions, Skip, Workload
from dtbench.suite.registry import Suite
from dtbench.tests import made_up

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def two_suites(tmp_path: Path) -> Path:
    """A file with results of two suites."""
    results = [
        made_up.result("collectives", "all_reduce", "c10d", {"size": 64, "mesh_dim": "tp"}, [1e-3, 2e-3]),
        made_up.result("dispatch", HOSTILE, "core", {"call": "cached"}, [1e-6, 2e-6]),
        made_up.result("dispatch", HOSTILE, "torch", {"call": "cached"}, [2e-6, 3e-6]),
    ]
    return made_up.write(tmp_path / "run.jsonl", made_up.run(results))


def test_results_print_as_the_table_and_plot(tmp_path: Path, capsys):
    import matplotlib

    matplotlib.use("Agg")
    sizes = [
        made_up.result(
            "collectives", "all_reduce", "c10d", {"size": 4**k, "mesh_dim": dim}, [1e-3 * k, 2e-3 * k]
        )
        for k in (5, 6, 7)
        for dim in ("dp", "tp")
    ]
    ops = [
        made_up.result("dispatch", op, impl, {}, [1e-6, 2e-6]) for op in "ab" for impl in ("core", "torch")
    ]
    run = dtbench.load(made_up.write(tmp_path / "both.jsonl", made_up.run([*sizes, *ops])))
    assert repr(run).endswith("both.jsonl: 10 ok>")
    print(run)  # noqa: T201
    out = capsys.readouterr().out
    assert out.startswith("collectives: p25") and "\ndispatch: min" in out and "10 x ok" in out
    curves = run.plot("collectives")
    assert [line.get_label() for line in curves.lines] == ["all_reduce dp c10d", "all_reduce tp c10d"]
    # The lower quartile of 5 and 10 ms, at 1 KiB.
    assert curves.lines[0].get_xydata()[0].tolist() == pytest.approx([1024, 6.25])
    rows = run.plot("dispatch")
    assert [text.get_text() for text in rows.get_yticklabels()] == ["b", "a"]
    assert [c.get_label() for c in rows.containers] == ["core", "torch"]
    for arguments, message in (
        ({}, "the suites are collectives, dispatch"),
        ({"suite": "dispatch", "y": "busbw"}, "no result of dispatch has one"),
        ({"suite": "dispatch", "y": "p99"}, "expected one of time, algbw, busbw"),
    ):
        with pytest.raises(UsageError, match=message):
            run.plot(**arguments)


def test_importing_loads_neither_torch_nor_pandas():
    code = "import sys, dtbench; dtbench.load; dtbench.run; print(sorted({'torch', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]" and set(dtbench.__all__) <= set(dir(dtbench))
    with pytest.raises(AttributeError, match="no attribute 'measure'"):
        dtbench.measure  # noqa: B018


def test_functions_are_measured_here_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    calls, path = Counter[str](), tmp_path / "here.jsonl"
    functions = {name: lambda name=name: calls.update([name]) for name in ("one", "two")}
    run = dtbench.run(functions, output=path, clock="host")
    assert [(r.name, r.impl, r.status, r.clock) for r in run.results] == [
        ("functions", "one", "ok", "host"),
        ("functions", "two", "ok", "host"),
    ]
    assert all(calls[r.impl] > r.time_s.n for r in run.results)  # the warm-up, too
    assert "two" in capsys.readouterr().out and dtbench.load(path).results == run.results
    with pytest.raises(OutputError, match="exists already"):
        dtbench.run(lambda: None, output=path)


@pytest.mark.parametrize(
    ("call_s", "doubts"),
    [
        (1e-6, ["scattered: half of the samples span 67% of the median; the load is"]),
        (20.0, ["only 2 samples, expected 10: give it a larger timeout_s", "scattered"]),
    ],
)
def test_few_or_scattered_samples_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, call_s: float, doubts: list[str]
):
    times_s = itertools.cycle((2 * call_s, call_s))
    clock = SimpleNamespace(
        started_ns=0,
        error_ns=0.0,
        settle=lambda *, cold=False: None,
        measure=lambda _run, _calls: next(times_s),
    )
    monkeypatch.setattr("dtbench.engine.session.clocks_of", lambda _device: {"host": clock, "device": clock})
    (result,) = dtbench.run(lambda: None, progress=False).results
    assert result.status == "ok" and result.counters["threads"] == torch.get_num_threads()
    assert all(doubt in result.reason for doubt in doubts), result.reason


@pytest.mark.parametrize("world, size", [("ranks", 1), ("simulated", 8)])
def test_a_suite_object_is_measured_in_this_process(world: str, size: int):
    def skipping(_world: object) -> Workload:
        raise Skip("not here")

    def cases(_plan: RunOptions) -> Iterator[Case]:
        def build(live: object) -> Workload:
            return Workload(lambda: None, check=lambda: None if live.world_size == size else "another world")

        yield Case("noop", {"n": 1}, {"core": build, "torch": skipping})

    results = dtbench.run(Suite("mine", cases, world, "a test")).results
    assert [(r.impl, r.status) for r in results] == [("core", "ok"), ("torch", "skipped")]


@pytest.mark.parametrize(
    "target, options, message",
    [
        ("nonsense", {}, "no suite is called 'nonsense'"),
        (3, {}, "expected the name or file of a suite"),
        ({"a": 3}, {}, "'a' cannot be measured"),
        (lambda: None, {"nproc": 2}, "nproc: only for suites given by name or file"),
    ],
)
def test_run_refuses_mistakes_in_one_line(target: object, options: dict[str, int], message: str):
    with pytest.raises(UsageError, match=message) as caught:
        dtbench.run(target, progress=False, **options)
    assert "\n" not in str(caught.value)


def test_frames_take_a_run_a_path_or_several(two_suites: Path):
    both, run = two_suites, dtbench.load(two_suites)
    sources = (run, both, str(both), [both], (item for item in (run,)), [run, both])
    assert [len(dtbench.results_frame(source)) for source in sources] == [3, 3, 3, 3, 3, 6]
    assert [*dtbench.results_frame(both, suite="dispatch").filter(regex=r"^param\.").columns] == [
        "param.call"
    ]
    cases = dtbench.cases_frame(both, suite="dispatch")
    assert cases["core/torch", "estimate_s"].tolist() == [0.5] and not cases.isna().all().any()
    assert len(dtbench.cases_frame(dtbench.results_frame(both))) == 2
    with pytest.raises(
        UsageError, match="no result of the suite 'overlap': the runs have collectives, dispatch"
    ):
        dtbench.results_frame(both, suite="overlap")
    with pytest.raises(UnreadableRunError):
        dtbench.results_frame(both.with_name("missing"))


def test_results_are_tables_in_a_notebook_and_escaped(two_suites: Path):
    run = dtbench.load(two_suites)
    page, comparison = run._repr_html_(), dtbench.compare(run, two_suites)
    assert "estimate_s" not in page and re.search(r"<th>time</th>\s*<th>spread</th>", page)
    assert re.search(r"<td>[\d.]+ [nµm]s</td>\s*<td>\+\d+%</td>", page)
    for shown in (page, comparison._repr_html_()):
        assert "<table" in shown and "&lt;script&gt;" in shown and HOSTILE not in shown
    assert repr(comparison) == str(comparison) and repr(comparison).endswith(comparison.summary)
    assert repr(comparison).splitlines()[1].split()[:2] == ["case", "impl"] and "\x1b" not in repr(comparison)


def test_calibrate_compare_and_report_take_runs_and_paths(tmp_path: Path):
    run = dtbench.load(made_up.write(tmp_path / "run.jsonl", made_up.run(list(made_up.collectives()))))
    topology = dtbench.calibrate(run, tmp_path / "topology.json")
    assert {dim.name for dim in topology.dims} == set(made_up.TRUTH) and "<table" in topology._repr_html_()
    assert dtbench.compare(run, run.path).rows
    page = dtbench.report([run, tmp_path / "topology.json"], tmp_path / "page.html", base=run)
    assert "</html>" in page.read_text()


def test_functions_of_a_program_under_torchrun_in_ranks(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch.distributed as dist, torch, dtbench\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(4)\n"
        "run = dtbench.run({'all_reduce': lambda: dist.all_reduce(x)}, output='out.jsonl', progress=False)\n"
        "assert [r.status for r in run.results] == ['ok'], run\n"
        "assert len(run.results[0].rank_samples_s) == 2\n"
        "dist.destroy_process_group()\n"
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(dtbench.load(tmp_path / "out.jsonl").results) == 1
