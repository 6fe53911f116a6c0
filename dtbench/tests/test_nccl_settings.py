"""NCCL settings: who wins by the gate's test, the rows of the tuner plugin, the plan of a sweep."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from dtbench.cost.settings.nccl import Arm, arm_of, rows_of, times_of, winners_of
from dtbench.reporting.html.sources import Sources, _apart
from dtbench.suite import Run
from dtbench.suite.errors import UsageError
from dtbench.tests import made_up
from dtbench.tests.html_page import section
from dtbench.tests.made_up import Cli
from dtbench.tests.settings_selftest import errors_of

RING: Arm = (("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "LL128"))
TREE: Arm = (("NCCL_ALGO", "Tree"), ("NCCL_PROTO", "LL"))
HEAD = """\
# nThread 1 nGpus 8 minBytes 1048576 maxBytes 2097152 step: 2(factor)
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
SIZES = (1024, 4096, 16384, 65536)


def launches(
    arm: Arm, factors: tuple[float, ...], n: int = 14, seed: int = 0, name: str = "all_reduce"
) -> list[Run]:
    """Files of a launch each: a size takes 1 ms times the arm's factor, with 1% of noise."""
    rng = np.random.default_rng(seed + len(str(arm)))
    params = {"mode": "back_to_back", "dtype": "float32", "mesh_dim": "dp", "ranks": 8, "groups": "together"}
    return [
        made_up.run(
            [
                made_up.result(
                    "collectives",
                    name,
                    "c10d",
                    params | {"size": size},
                    [1e-3 * factor * float(np.exp(rng.normal(0, 0.01)))],
                    size_bytes=size,
                )
                for size, factor in zip(SIZES, factors, strict=True)
            ],
            env=dict(arm) | {"DTBENCH_SWEEP_ARM": ",".join("=".join(pair) for pair in arm)},
        )
        for _ in range(n)
    ]


def rows(*arms: list[Run], nodes: int = -1) -> list[str]:
    return rows_of(winners_of(times_of((None, run) for runs in arms for run in runs)), nodes)


BASE = launches((), (1, 1, 1, 1))


def test_winners_are_ranges_of_the_plugins_file() -> None:
    """Where NCCL's own choice stands between two sizes, or beyond the last, no row speaks."""
    assert rows(BASE, launches(TREE, (0.8, 0.8, 1, 1.2)), launches(RING, (1.2, 1, 1.2, 0.9))) == [
        "allreduce,1024,4096,tree,ll,-1,-1,8,-1,-1",
        "allreduce,65536,65536,ring,ll128,-1,-1,8,-1,-1",
    ]
    assert rows(BASE, launches(TREE, (0.8, 1, 0.8, 1)), nodes=2) == [
        "allreduce,1024,1024,tree,ll,-1,2,8,-1,-1",
        "allreduce,16384,16384,tree,ll,-1,2,8,-1,-1",
    ]


def test_the_best_of_several_winners_is_taken_and_its_channels() -> None:
    capped: Arm = (("NCCL_ALGO", "NVLSTree"), ("NCCL_MAX_NCHANNELS", "16"), ("NCCL_PROTO", "Simple"))
    assert rows(BASE, launches(TREE, (0.9,) * 4), launches(capped, (0.7,) * 4)) == [
        "allreduce,1024,65536,nvls_tree,simple,16,-1,8,-1,-1"
    ]


def test_a_report_shows_the_winners_of_a_sweep_and_the_launches_as_they_come() -> None:
    ring = launches(RING, (1.0, 1.0, 0.8, 0.7))
    together = _apart(Sources(runs=(*BASE, *ring)))
    assert (together.runs, len(together.sweep)) == (tuple(BASE), len(BASE) + len(ring))
    (table,) = section("settings", sweep=together.sweep).tables
    (*_, comes), (*_, won) = table.rows
    assert comes[2:5] == ["1 KiB", "4 KiB", "NCCL's default"]
    assert won[:5] == ["all_reduce", "8", "16 KiB", "64 KiB", "NCCL_ALGO=Ring NCCL_PROTO=LL128"]
    assert [float(cell.rstrip("×")) for cell in won[5:7]] == pytest.approx([0.7, 0.8], abs=0.02)
    few = section("settings", sweep=(*BASE[:3], *ring[:3]))
    assert "expected at least" in few.missing


def test_noise_and_a_percent_win_nothing() -> None:
    assert rows(BASE, launches(TREE, (1, 1, 1, 1)), launches(RING, (0.99, 0.99, 0.985, 0.99))) == []


def test_what_the_plugin_cannot_set_is_not_written() -> None:
    for arm in (
        (("NCCL_ALGO", "Ring"),),
        (("NCCL_ALGO", "^Ring"), ("NCCL_PROTO", "LL")),
        (("GLOO_SOCKET_IFNAME", "lo"),),
    ):
        with pytest.raises(UsageError, match="nothing that the tuner plugin can set"):
            rows(BASE, launches(arm, (0.5,) * 4))
    # A collective that the plugin would take for an all-reduce.
    with pytest.raises(UsageError, match="nothing to choose from"):
        rows(launches((), (1,) * 4, name="all_to_all"), launches(TREE, (0.5,) * 4, name="all_to_all"))


def test_too_few_launches_are_refused_with_the_number_that_would_do() -> None:
    with pytest.raises(
        UsageError, match="got 6 launches of an arm, expected at least 7: among 4 arms and sizes"
    ):
        rows(BASE, launches(TREE, (0.5,) * 4, n=6))
    assert rows(BASE, launches(TREE, (0.5,) * 4, n=7))


def test_logs_of_several_runs_with_forced_settings(dtbench: Cli, tmp_path: Path) -> None:
    """nccl-tests knows nothing of its variables: the command line says them."""
    line = "  {0}  {1}  float  sum  -1  {2:.2f}  {3:.2f}  {4:.2f}  0  {2:.2f}  {3:.2f}  {4:.2f}  0\n"
    words = []
    for variables, factor in (("", 1.0), ("NCCL_ALGO=Tree,NCCL_PROTO=LL", 0.5)):
        for n in range(8):
            text = HEAD
            for size in (2**20, 2**21):
                us = size / 1e3 * factor * (1 + n / 1000)
                text += line.format(size, size // 4, us, size / us / 1e3, size / us / 1e3 * 1.75)
            path = tmp_path / f"{len(variables)}-{n}"
            Path(f"{path}.log").write_text(text)
            given = ("--collective", "all_reduce", "--ranks", "8")
            assert dtbench("import", f"{path}.log", *given, "-o", f"{path}.jsonl")[0] == 0
            words += ["--arm", variables, f"{path}.jsonl"]
    code, out, error = dtbench("settings", *words, "--nodes", "1", "-o", "tuner.csv")
    assert (code, error) == (0, "the plugin's file is tuner.csv\n") and "2 of 2 sizes have a winner" in out
    written = Path("tuner.csv").read_text().splitlines()
    assert [row for row in written if not row.startswith("#")] == [
        "allreduce,1048576,2097152,tree,ll,-1,1,8,-1,-1"
    ]


def test_no_size_is_made_slower_where_arms_only_differ_by_noise() -> None:
    times = 1e-3 * np.exp(np.random.default_rng(3).normal(0, 0.01, (10, 4)))
    found = errors_of(SIZES, times, arms=3, launches=12, trials=20, changes=(0.01,))
    assert found["ours"].changed == 0 < found["minimum"].slower


def test_a_sweep_takes_turns_and_keeps_every_word(dtbench: Cli) -> None:
    words = ["--sweep", "NCCL_ALGO=Ring,NCCL_PROTO=LL", "--sweep", "A=it's;x", "--launches", "3", "-o", "a b"]
    code, out, error = dtbench("settings", *words, "--", "dtbench", "run", "collectives/all_reduce", "$x")
    assert (code, error) == (0, "")
    found = [shlex.split(row) for row in out.splitlines() if " -o " in row]
    ends = [row[-2:] for row in found]
    assert sorted(path for _, path in ends) == [
        f"a b/{n:02d}-arm{k}.jsonl" for n in range(3) for k in range(3)
    ]
    assert [path[4:6] for _, path in ends] == ["00"] * 3 + ["01"] * 3 + ["02"] * 3
    own = ["dtbench", "run", "collectives/all_reduce", "$x"]
    envs = {tuple(row[: row.index("dtbench")]) for row in found}
    assert all(row[row.index("dtbench") : -2] == own for row in found)
    ring = "NCCL_ALGO=Ring,NCCL_PROTO=LL"
    assert envs == {
        ("env", "DTBENCH_SWEEP_ARM="),
        ("env", f"DTBENCH_SWEEP_ARM={ring}", *ring.split(",")),
        ("env", "DTBENCH_SWEEP_ARM=A=it's;x", "A=it's;x"),
    }


def test_an_arm_is_what_the_sweep_forced_and_not_what_else_was_set() -> None:
    assert arm_of({"DTBENCH_SWEEP_ARM": "", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_ALGO": "Ring"}) == ()
    assert arm_of({"DTBENCH_SWEEP_ARM": "OMP_NUM_THREADS=2,A=1"}) == (("A", "1"), ("OMP_NUM_THREADS", "2"))
    assert arm_of({"GLOO_SOCKET_IFNAME": "eth0"}) == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("settings --sweep A=1", "expected COMMAND"),
        ("settings --sweep MY_TOKEN=x -- dtbench run", "the value of MY_TOKEN looks like a secret"),
        ("settings --sweep A=://me:pw@host -- dtbench run", "the value of A looks like a secret"),
        ("settings --sweep Ring -- dtbench run", "no variable"),
        ("settings --sweep A=1 --sweep A=1 -- dtbench run", "stands twice"),
        ("settings --sweep A=1 -- dtbench run -o x", "leave -o"),
        ("settings --sweep A=1,A=2 -- dtbench run", "sets A twice"),
        ("settings --sweep A=1 --output= -- dtbench run", "-o is empty"),
        ("settings", "RUN missing: give runs of bucketer"),
        ("settings none.jsonl", "none.jsonl"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(dtbench: Cli, words: str, said: str) -> None:
    code, out, error = dtbench(*words.split())
    assert (code, out) == (2, "") and error.count("\n") == 1 and said in error, error
