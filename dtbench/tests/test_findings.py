"""What a run says of itself: the lines as results come, what it found, the names of those to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtbench.cli.run import _begun_with
from dtbench.engine.findings import findings, next_commands
from dtbench.records import baselines
from dtbench.suite import Result
from dtbench.suite.errors import UsageError
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli


def timed(suite: str, name: str, impl: str, seconds: float, **params: str | int) -> Result:
    ranks = {str(rank): (seconds,) * 5 for rank in range(2)} if suite == "collectives" else None
    return made_up.result(suite, name, impl, params, [seconds] * 5, rank_samples=ranks)


def test_a_run_says_what_it_found_and_doubts_what_ranks_without_cores_measured() -> None:
    dispatch = [
        timed("dispatch", "add", impl, seconds, call=call)
        for call, times in (
            ("cached", {"core": 3e-6, "torch": 9e-6}),
            ("first", {"core": 1e-6, "torch": 1e-3}),
        )
        for impl, seconds in times.items()
    ]
    sums = [
        timed("collectives", "all_reduce", "c10d", s, size=n, groups="together")
        for n, s in ((4096, 1e-4), (2**20, 1e-3))
    ]
    quiet = made_up.run([*dispatch, *sums], "a.jsonl", machine={"cpu": {"usable_cores": 8}})
    of_sums = "collectives: 2 results, fastest all_reduce size=4 KiB groups=together c10d at 100 µs, slowest all_reduce"
    fast, slow = findings(quiet)
    assert (
        fast == "dispatch: the core is 3.00x faster than torch.distributed.tensor over 1 case"
    )  # of cached calls
    assert slow.startswith(of_sums)
    assert next_commands(quiet) == [
        "next: dtbench show a.jsonl",
        "      dtbench calibrate a.jsonl -o a.topology.json",
        "      dtbench report a.jsonl -o a.html",
    ]
    sure, doubts, doubted = findings(made_up.run([*sums, *dispatch], machine={"cpu": {"usable_cores": 1}}))
    assert (
        sure == fast and doubts.startswith("with doubts, as 2 ranks share 1 core") and doubted == f"  {slow}"
    )


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
    line = (
        "the machine drifted: plain torch and all else of dispatch became 1.30x slower in the later launches"
    )
    assert any(one.startswith(line) for one in findings(made_up.run(results))) == drifts
    assert not any("drifted" in one for one in findings(made_up.run(results[:1])))


def test_any_suite_has_something_to_say() -> None:
    one = made_up.result("mine", "matmul", "torch", {"n": 64}, [4e-6] * 3)
    other = made_up.result("mine", "matmul", "torch", {"n": 256}, [1e-4] * 3)
    assert findings(made_up.run([one])) == ["mine: matmul n=64 torch 4.00 µs +0%"]
    assert findings(made_up.run([one, other])) == [
        "mine: 2 results, fastest matmul n=64 torch at 4.00 µs, slowest matmul n=256 torch at 100 µs"
    ]
    assert findings(made_up.run([])) == []


def test_baselines_have_names(dtbench: Cli) -> None:
    """The fixture's current folder is its own."""
    runs = [made_up.run([timed("s", "a", "core", seconds)]) for seconds in (1.0, 2.0)]
    first, second = (made_up.write(Path(f"{name}.jsonl"), run) for name, run in zip("ab", runs, strict=True))
    with pytest.raises(UsageError, match="none yet"):
        baselines.find("main")
    for run in (first, second):
        kept = baselines.save(run, "main")
        assert baselines.find("main") == kept and kept.read_bytes() == run.read_bytes()
    _, out, error = dtbench("compare", "main", "a.jsonl")
    assert error == "" and "50.0" in out
    code, _, error = dtbench("compare", "nope", "a.jsonl")
    assert code == 2 and "there is no baseline 'nope' (there: main)" in error
    code, _, error = dtbench("run", "dispatch", "--save-baseline", "../x")
    assert code == 2 and "names no baseline" in error


def test_a_run_that_does_not_hold_its_command_is_not_resumed_without_it(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for argv, whole in (
        (["run", "s", "-o", "y.jsonl"], True),
        ([], False),
        (["run", "s", "--token", "***"], False),
    ):
        path.unlink(missing_ok=True)
        made_up.write(path, made_up.run([], argv=argv))
        if whole:
            assert _begun_with(path) == [*argv, "--resume", "-o", str(path)]
        else:
            with pytest.raises(UsageError, match="give its suites and options beside --resume"):
                _begun_with(path)
