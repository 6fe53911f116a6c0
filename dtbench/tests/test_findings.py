"""What a run says of itself: the lines as results come, what it found, what became of it since another run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dtbench.cli.run import _begun_with
from dtbench.engine.findings import findings, next_commands
from dtbench.records import baselines
from dtbench.suite import Result
from dtbench.suite.errors import UsageError
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli

MIB = 2**20


def collective(name: str, size: int, seconds: float, dtype: str = "float32", **changes: object) -> Result:
    params = {
        "mesh_dim": "dp",
        "ranks": 4,
        "groups": "together",
        "mode": "isolated",
        "dtype": dtype,
        "size": size,
    }
    samples = [seconds] * 4 + [2 * seconds]
    made = made_up.result("collectives", name, "c10d", params, samples, size_bytes=size, factor=1.5)
    return msgspec.structs.replace(made, **changes)


# ------------------------------------------------------------------------------------- what was found


def test_a_run_says_what_it_found_and_doubts_what_ranks_without_cores_measured() -> None:
    params = {"call": "cached", "pass": "forward", "mesh": "8"}
    times = {"local": 1e-6, "core": 3e-6, "torch": 9e-6}
    dispatch = [made_up.result("dispatch", "add", impl, params, [t] * 5) for impl, t in times.items()]
    ranks = {str(rank): (1e-3,) * 5 for rank in range(4)}
    sums = [
        collective("all_reduce", size, time, rank_samples_s=ranks)
        for size, time in ((4096, 1e-4), (MIB, 1e-3))
    ]
    quiet = made_up.run([*dispatch, *sums], "a.jsonl", machine={"cpu": {"usable_cores": 8}})
    assert findings(quiet) == [
        (
            "dispatch: an op takes 8.00 µs more with torch's DTensor, 2.00 µs more with dtbench's core than on plain "
            "tensors (median of 1 cached call)"
        ),
        "dispatch: the core is 3.00x faster than torch.distributed.tensor over 1 case",
        "collectives: all_reduce busbw 1.57 GB/s over dp at 1 MiB; 100 µs over dp at 4 KiB",
    ]
    unfloored = [made_up.result("dispatch", "view", "torch", params, [1e-3] * 5)]
    assert findings(made_up.run([*dispatch, *unfloored], "a.jsonl"))[0] == findings(quiet)[0]
    first = [
        made_up.result("dispatch", "add", impl, params | {"call": "first"}, [t] * 5)
        for impl, t in (("core", 1e-6), ("torch", 1e-3))
    ]
    as_the_page = findings(made_up.run([*dispatch, *first], "a.jsonl", machine={"cpu": {"usable_cores": 8}}))
    assert as_the_page == findings(quiet)[:2], "of cached calls alone, as the report"
    assert next_commands(quiet) == [
        "next: dtbench show a.jsonl",
        "      dtbench calibrate a.jsonl -o a.topology.json",
        "      dtbench report a.jsonl -o a.html",
    ]
    crowded = findings(made_up.run([*sums, *dispatch], machine={"cpu": {"usable_cores": 1}}))
    assert [line.split(":")[0] for line in crowded[:2]] == ["dispatch", "dispatch"]
    assert crowded[2].startswith("with doubts, as 2 ranks share 1 core") and crowded[3].startswith(
        "  collectives"
    )


def test_the_edge_of_a_sweep_of_buckets_is_named_as_such() -> None:
    def swept(*times: float) -> str:
        results = [
            made_up.result(
                "bucketer",
                "reduce_scatter",
                impl,
                {"mesh_dim": "dp", "dtype": "float32", "tensor_bytes": 4096, "bucket_bytes": MIB * 4**i},
                [time if impl == "core" else 8.0] * 3,
                size_bytes=MIB,
            )
            for i, time in enumerate(times)
            for impl in ("core", "unbucketed")
        ]
        (line,) = findings(made_up.run(results))
        return line

    assert swept(4.0, 2.0, 1.0).endswith(
        "8.00x faster in buckets of 16 MiB than unbucketed, the largest measured: larger may be faster"
    )
    assert swept(4.0, 1.0, 2.0).endswith("8.00x faster in buckets of 4 MiB than unbucketed")


def test_any_suite_has_something_to_say() -> None:
    one = made_up.result("mine", "matmul", "torch", {"n": 64}, [4e-6] * 3)
    other = made_up.result("mine", "matmul", "torch", {"n": 256}, [1e-4] * 3)
    assert findings(made_up.run([one])) == ["mine: matmul n=64 torch 4.00 µs +0%"]
    assert findings(made_up.run([one, other])) == [
        "mine: 2 times from 4.00 µs (matmul n=64 torch) to 100 µs (matmul n=256 torch)"
    ]
    assert findings(made_up.run([])) == []


# ------------------------------------------------------------------------------------- since another run


def timed(seconds: float, high: float | None = None, name: str = "a", launch: int = 0) -> Result:
    """Lower quartile `seconds`, upper quartile `high`."""
    samples = [seconds, seconds, seconds, high or seconds, high or seconds]
    return made_up.result("s", name, "core", {"n": 1}, samples, launch=launch)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ((1.0, 1.1), (1.5, 1.6), "slower by 50%"),
        ((1.0, 1.1), (3.0, 3.1), "slower by 3x"),
        ((1.5, 1.6), (1.0, 1.1), "faster by 33%"),
        ((1.0, 1.6), (1.5, 1.7), "no change"),  # within the spread
        ((1.0, 1.0), (1.04, 1.04), "no change"),  # within 5 %
        ((1e-7, 1e-7), (2e-7, 2e-7), "no change"),  # 0.1 us
    ],
)
def test_a_change_is_one_beyond_the_spread(
    old: tuple[float, float], new: tuple[float, float], words: str
) -> None:
    before = baselines.EarlierTimes(made_up.run([timed(*old)]), "main")
    change = before.change([timed(*new)])
    assert change is not None and change.words == words
    assert before.change([timed(*new, name="b")]) is None


def test_the_changes_of_a_run_are_counted_and_the_largest_named() -> None:
    before = baselines.EarlierTimes(made_up.run([timed(1.0, name=name) for name in "abc"]), "main")
    now = [timed(1.0, name="a"), timed(2.0, name="b"), timed(0.5, name="c"), timed(9.0, name="new")]
    said = "against main: 1 without change, 1 slower (s b n=1 core slower by 2x), 1 faster (s c n=1 core faster by 50%)"
    assert before.summary(now) == said
    assert before.summary(now[3:]) == ""


def test_baselines_have_names(dtbench: Cli, tmp_path: Path) -> None:
    """The fixture's current folder is its own."""
    run = made_up.write(Path("a.jsonl"), made_up.run([timed(1.0)]))
    with pytest.raises(UsageError, match="none yet"):
        baselines.find("main")
    kept = baselines.save(run, "main")
    assert baselines.find("main") == kept and kept.read_bytes() == run.read_bytes()
    made_up.write(Path("b.jsonl"), made_up.run([timed(2.0)]))
    assert (
        baselines.save(Path("b.jsonl"), "main") == kept and kept.read_bytes() == Path("b.jsonl").read_bytes()
    )
    code, out, error = dtbench("compare", "main", "a.jsonl")
    assert error == "" and "50.0" in out
    for words in (("compare", "nope", "a.jsonl"), ("run", "dispatch", "--baseline", "nope")):
        code, _, error = dtbench(*words)
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
