"""Findings that a run prints at its end, named baselines, and the command of a resumed run."""

import statistics
from contextlib import nullcontext
from pathlib import Path

import pytest
from msgspec import structs

from dtbench.cli.run import _original_argv
from dtbench.engine.findings import describe_slow_floors, findings, next_commands
from dtbench.errors import UsageError
from dtbench.records import baselines
from dtbench.records.result import Result
from dtbench.stats.dispatch_headline import SINGLE_OPS
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli


def timed(suite: str, name: str, impl: str, seconds: float, **params: str | int) -> Result:
    ranks = {str(rank): (seconds,) * 5 for rank in range(2)} if suite == "collectives" else None
    return made_up.result(suite, name, impl, params, [seconds] * 5, rank_samples=ranks)


CACHED = {"mesh": "8", "pass": "forward", "call": "cached"}


def single_ops(count: int) -> list[Result]:
    """Op k takes 1 us on plain tensors, 5 + k in the core and 9 + 2 k us in torch."""
    return [
        timed("dispatch", name, impl, us * 1e-6, **CACHED | {"placements": SINGLE_OPS[name]})
        for k, name in enumerate(list(SINGLE_OPS)[:count])
        for impl, us in (("core", 5.0 + k), ("torch", 9.0 + 2 * k), ("local", 1.0))
    ]


# Calls that are no single op on one mesh dim, each a thousand times as long.
OTHERS = [
    timed("dispatch", name, impl, us * 1e-3, **CACHED | params)
    for name, params in (
        ("adamw_step_x10", {"placements": "S(0)"}),
        ("tp_mlp", {"placements": "Colwise,Rowwise"}),
        ("redistribute", {"placements": "S(0)->S(0)"}),
        ("add", {"placements": "S(0),S(0)", "mesh": "2x4"}),
        ("add", {"placements": "S(0),R"}),
        ("relu", {"placements": "S(0)", "call": "first"}),
        *(("relu", {"placements": f"S({dim})", "pass": "forward+requires_grad"}) for dim in range(5)),
        ("relu", {"placements": "S(0)", "pass": "forward+backward"}),
    )
    for impl, us in (("core", 5.0), ("torch", 9.0), ("local", 1.0))
]


def test_overhead_of_an_op_is_the_median_of_the_single_ops() -> None:
    # 8 + 2 k and 4 + k us, k = 5.5 in the middle.
    overhead = (
        "dispatch: an op takes 19.0 µs more with torch’s DTensor, 9.50 µs more with dtbench’s core: "
        "median of 12 single ops (add, mul_scalar, "
    )
    for others in ([], OTHERS):
        assert findings(made_up.run([*others, *single_ops(12)]))[0].startswith(overhead)
    of_five = findings(made_up.run([*OTHERS, *single_ops(5)]))[0]
    assert "an op takes 12.0 µs more" in of_five and "median of 5 of 12 single ops" in of_five
    assert "an op takes" not in str(findings(made_up.run([*OTHERS, *single_ops(4)])))


def test_each_kind_of_call_has_its_own_mean() -> None:
    lines = findings(made_up.run([*single_ops(12), *OTHERS]))
    mean = statistics.geometric_mean([*((9 + 2 * k) / (5 + k) for k in range(12)), 9 / 5, 9 / 5])
    assert (
        f"dispatch: single ops: the core is {mean:.2f}x faster than torch.distributed.tensor, geometric mean of "
        "14 cases, from 1.8x to 1.9x"
    ) in lines
    assert (
        "dispatch: single ops on tensors that require gradients: the core is 1.80x faster than "
        "torch.distributed.tensor, geometric mean of 5 cases, from 1.8x to 1.8x"
    ) in lines
    assert [line.split(": ")[1] for line in lines[1:]] == [
        "single ops",
        "optimizer steps, clipping and other calls of many ops",
        "redistributions to the same placement",
        "first calls",
        "single ops on tensors that require gradients",
        "single ops with their backward",
    ]
    # There is no mean of fewer than five cases.
    assert lines[4] == (
        "dispatch: first calls: 3 results, fastest relu mesh=8 pass=forward call=first placements=S(0) local at "
        "1.00 ms, slowest relu mesh=8 pass=forward call=first placements=S(0) torch at 9.00 ms"
    )


def test_missing_instruction_counts_are_reported_once() -> None:
    def pytorch_results(counters: dict[str, float]) -> list[Result]:
        return [
            structs.replace(timed("dispatch", f"dtensor_dispatch_{name}", impl, 1e-5), counters=counters)
            for name in ("view", "random")
            for impl in ("core", "torch")
        ]

    words = "dtensor_dispatch_* without instruction counts"
    lines = findings(made_up.run([*pytorch_results({}), *single_ops(5)]))
    assert [words in line for line in lines].count(True) == 1
    assert any(
        line.startswith("dispatch: calls of pytorch's own DTensor benchmarks: 4 results") for line in lines
    )
    assert words not in str(findings(made_up.run(pytorch_results({"instructions": 1e5}))))
    assert words not in str(findings(made_up.run(single_ops(5))))


def test_slow_floor_is_reported_as_no_floor() -> None:
    times = [{"local": 3.0, "core": 2.0, "torch": 4.0}, {"local": 1.05, "core": 1.0}, {"core": 1.0}]
    floor = "the floor (local) is slower than core in 1 of {}: it is not a floor there"
    assert describe_slow_floors(times) == [floor.format("2 cases")]
    two = floor.format("1 case and torch in 1 of 1 case")
    assert describe_slow_floors([{"local": 3.0, "core": 2.0, "torch": 2.0}]) == [two]
    assert describe_slow_floors([{"local": 1.0, "core": 2.0}, {"whole": 3.0, "core": 2.0}]) == []
    results = [timed("mine", "a", impl, seconds) for impl, seconds in (("core", 1e-3), ("local", 2e-3))]
    assert findings(made_up.run(results))[-1] == f"mine: {floor.format('1 case')}"


def test_findings_of_more_ranks_than_cores_are_marked_unreliable() -> None:
    steps = [
        timed("steps", "add", impl, seconds, n=n)
        for n in range(5)
        for impl, seconds in {"core": 3e-6, "torch": 9e-6}.items()
    ]
    sums = [
        timed("collectives", "all_reduce", "c10d", s, size=n, groups="together")
        for n, s in ((4096, 1e-4), (2**20, 1e-3))
    ]
    quiet = made_up.run([*steps, *sums], "a.jsonl", machine={"cpu": {"usable_cores": 8}})
    fast, slow = findings(quiet)
    assert fast == (
        "steps: the core is 3.00x faster than torch.distributed.tensor, geometric mean of 5 cases, from 3.0x to 3.0x"
    )
    assert slow.startswith(
        "collectives: 2 results, fastest all_reduce size=4 KiB groups=together c10d at 100 µs, slowest all_reduce"
    )
    assert next_commands(quiet) == [
        "next: dtbench show a.jsonl",
        "      dtbench calibrate a.jsonl -o a.topology.json",
        "      dtbench report a.jsonl -o a.html",
    ]
    buckets = [timed("bucketer", "reduce_scatter", impl, 1e-3, size=4096) for impl in ("core", "reference")]
    both = made_up.run([*sums, *buckets], "a.jsonl")
    assert [line for line in next_commands(both) if "calibrate" in line] == next_commands(quiet)[1:2]
    sure, doubts, doubted = findings(made_up.run([*sums, *steps], machine={"cpu": {"usable_cores": 1}}))
    assert sure == fast and doubts.startswith("unreliable (2 ranks share 1 core, ") and doubted == f"  {slow}"


@pytest.mark.parametrize(
    ("late", "drifts"),
    [({"core": 1.3, "torch": 1.3, "local": 1.3}, True), ({"core": 1.3, "torch": 1.3, "local": 1.0}, False)],
)
def test_launches_in_which_all_took_longer_are_drift(late: dict[str, float], drifts: bool) -> None:
    results = [
        made_up.result("dispatch", "add", impl, {}, [1e-5 * factor**is_late] * 5, launch=launch)
        for impl, factor in late.items()
        for launch, is_late in enumerate((0, 0, 0, 1, 1))
    ]
    line = "the machine drifted: plain torch and all other impls of dispatch became 1.30x slower in the later launches"
    assert any(text.startswith(line) for text in findings(made_up.run(results))) == drifts
    assert not any("drifted" in text for text in findings(made_up.run(results[:1])))


def test_unknown_suite_reports_its_fastest_and_slowest_result() -> None:
    results = [
        made_up.result("mine", "matmul", "torch", {"n": n}, [seconds] * 3)
        for n, seconds in ((64, 4e-6), (256, 1e-4))
    ]
    assert findings(made_up.run(results[:1])) == ["mine: matmul n=64 torch 4.00 µs +0%"]
    assert findings(made_up.run(results)) == [
        "mine: 2 results, fastest matmul n=64 torch at 4.00 µs, slowest matmul n=256 torch at 100 µs"
    ]
    assert findings(made_up.run([])) == []


def test_baselines_have_names(dtbench: Cli) -> None:
    """The fixture changes to a folder of its own."""
    first, second = (
        made_up.write(Path(f"{name}.jsonl"), made_up.run([timed("s", "a", "core", seconds)]))
        for name, seconds in (("a", 1.0), ("b", 2.0))
    )
    with pytest.raises(UsageError, match="none yet"):
        baselines.find_run_file("main")
    for run in (first, second):
        kept = baselines.save(run, "main")
        assert baselines.find_run_file("main") == kept and kept.read_bytes() == run.read_bytes()
    for words, code, message in (
        ("compare main a.jsonl", 3, "2.00x faster"),
        ("compare nope a.jsonl", 2, "there is no baseline 'nope' (have: main)"),
        ("run dispatch --save-baseline ../x", 2, "is not a name of a baseline"),
    ):
        exit_code, out, error = dtbench(*words.split())
        assert exit_code == code and message in out + error


@pytest.mark.parametrize(
    ("argv", "is_complete"),
    [(["run", "s", "-o", "y.jsonl"], True), ([], False), (["run", "s", "--token", "***"], False)],
)
def test_resume_needs_the_original_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], is_complete: bool
) -> None:
    path = made_up.write(tmp_path / "x.jsonl", made_up.run([], argv=argv))
    resuming = ["--resume", "--budget", "9m", "-o", str(path)]
    monkeypatch.setattr("sys.argv", ["dtbench", "run", *resuming])
    refused = pytest.raises(UsageError, match="repeat its suites and options with --resume")
    with nullcontext() if is_complete else refused:
        assert _original_argv(path) == [*argv, *resuming]
