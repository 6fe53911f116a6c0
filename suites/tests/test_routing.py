"""Routings of expert parallelism: exact totals, the models' shares, and recorded counts from a file."""

import itertools
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from dtbench.engine import budget
from dtbench.engine.options import RunRequest
from dtbench.engine.refine import is_calibrated_with
from dtbench.engine.selection import agreement_of, select
from dtbench.engine.tasks import list_tasks
from dtbench.errors import UsageError
from dtbench.suite import ROUTING, Case, RunOptions
from dtbench.suite.registry import load
from dtbench_core.cost.ring import busbw_factor
from dtbench_suites.collectives import trimmed
from dtbench_suites.routing import ROUTINGS, RoutedSweepPoint, apportion, read_counts, routed_sweep

HEADER = "source,destination,count\n"


def file_of(tmp_path: Path, text: str, name: str = "counts.csv") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def routed(**changes: object) -> list[Case]:
    options = RunOptions(**{"mesh": (("ep", 4),), "sizes_bytes": (65536,), "sizes_chosen": True} | changes)  # type: ignore[arg-type]
    return [case for case in load(["collectives"])[0].cases(options) if ROUTING in case.params]


def point_of(text: str, ranks: int, size_bytes: int, **changes: Any) -> RoutedSweepPoint:
    """Returns the point of a routing of float32 at one size."""
    options = RunOptions(
        (("ep", ranks),), (size_bytes,), sizes_chosen=True, options={"routing": text}, **changes
    )
    (point,) = [p for p in routed_sweep(options, {}) if p.params[ROUTING] in (text, Path(text).name)]
    return point


@pytest.mark.parametrize("text", [*ROUTINGS, "lognormal(0)", "lognormal(3.5)", "zipf(999)"])
@pytest.mark.parametrize("ranks", [2, 3, 7, 64])
@pytest.mark.parametrize("size_bytes", [1, 1000, 65536, 2**24])
def test_every_routing_has_exactly_the_rows_of_uniform(text: str, ranks: int, size_bytes: int) -> None:
    made, uniform = (point_of(name, ranks, size_bytes) for name in (text, "uniform"))
    sent = [sum(row) for row in made.counts]
    assert set(sent) == {sum(uniform.counts[0])} and len(sent) == ranks  # so the totals are the same, too
    assert (made.width, made.params["size"]) == (uniform.width, uniform.params["size"])
    assert made.params["size"] == sent[0] * made.width * 4
    assert min(map(min, made.counts)) >= 0
    assert sum(sum(made.received(rank)) for rank in range(ranks)) == sum(sent)
    assert len({count for row in uniform.counts for count in row}) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("size_bytes", [2**14, 2**18, 2**26])
def test_uniform_has_the_size_and_bandwidth_factor_of_all_to_all(ranks: int, size_bytes: int) -> None:
    made = point_of("uniform", ranks, size_bytes)
    assert made.params["size"] == trimmed("all_to_all", size_bytes, ranks, 4) == size_bytes
    assert made.moved_share == busbw_factor("all_to_all", ranks)
    assert made.skew == {"max_over_mean_received": 1}


def test_hot_sends_all_rows_to_rank_0() -> None:
    made = point_of("hot", 4, 65536)
    assert made.counts == [[64, 0, 0, 0]] * 4
    assert (made.skew["max_over_mean_received"], made.moved_share) == (4, 0.75)


def test_models_have_the_shares_of_their_distributions() -> None:
    zipf, lognormal = (point_of(text, 4, 2**30) for text in ("zipf(1)", "lognormal(1)"))
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4
    weights = [math.exp(NormalDist().inv_cdf((rank + 0.5) / 4)) for rank in range(4)]
    for made, shares in (
        (zipf, [1 / (rank + 1) / harmonic for rank in range(4)]),
        (lognormal, [weight / sum(weights) for weight in weights]),
    ):
        assert [count / sum(made.counts[0]) for count in made.counts[0]] == pytest.approx(shares, abs=1e-4)
        assert made.skew["max_over_mean_received"] == pytest.approx(4 * max(shares), abs=1e-3)


def test_apportion_rounds_up_where_most_was_cut_off() -> None:
    assert apportion([6, 3, 1], 5) == [3, 2, 0]  # 3.0, 1.5, 0.5: of equal remainders the first
    assert apportion([1, 1, 1], 2) == [1, 1, 0]
    assert apportion([10**15, 1], 10**6) == [10**6, 0]


def test_recorded_counts_are_scaled_and_missing_pairs_are_0(tmp_path: Path) -> None:
    path = file_of(tmp_path, HEADER + "0,1,30\n 1 , 0 ,10\n\n2,2,20\n")
    assert read_counts(Path(path)) == {(0, 1): 30, (1, 0): 10, (2, 2): 20}
    made = point_of(path, 3, 3 * 4 * 16)  # 16 rows of one element per pair: 144 rows
    assert (made.params[ROUTING], made.width) == ("counts.csv", 1)
    assert made.counts == [[0, 72, 0], [24, 0, 0], [0, 0, 48]]
    assert made.received(1) == [72, 0, 0]
    assert made.moved_share == 96 / 144 and made.skew["max_over_mean_received"] == 72 / 48


def test_recorded_counts_may_be_a_square_matrix(tmp_path: Path) -> None:
    matrix, pairs = (
        point_of(file_of(tmp_path, text), 3, 192)
        for text in ("0,3,0\n1,0,0\n\n0,0,2\n", HEADER + "0,1,3\n1,0,1\n2,2,2")
    )
    assert matrix.counts == pairs.counts
    assert read_counts(Path(file_of(tmp_path, "7"))) == {(0, 0): 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2\n3,x\n", "has '1,1,x': expected the header source,destination,count, and lines of three non-"),
        ("1,2\n3,-4\n", "or a square matrix of them"),
        ("1,2\n3,4\n5,6\n", "or a square matrix of them"),
        ("0,0\n0,0\n", "and 0 rows: expected each pair"),
        (
            HEADER + "0,1,-3",
            "has '0,1,-3': expected the header source,destination,count, and lines of three non-",
        ),
        (HEADER + "0,1,1.5", "non-negative integers"),
        (HEADER + "0,1", "non-negative integers"),
        (HEADER + f"0,1,{'9' * 16}", "non-negative integers"),
        (HEADER + "0,1,2\n0,1,2", "has 1 pairs in 2 lines and 2 rows: expected each pair"),
        (
            HEADER + "0,1,0",
            "and 0 rows: expected each pair of source and destination once, and a count above 0",
        ),
        (HEADER, "has 0 pairs in 0 lines and 0 rows"),
        ("", "expected the header source"),
        ("0,1,5\n", "has '0,1,5': expected the header source,destination,count"),
        (HEADER + "0,4,1", "has counts for 5 ranks, the mesh has ep=4: expected a mesh dim of at least 5"),
    ],
)
def test_damaged_routings_are_refused_when_cases_are_listed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        routed(options={"routing": file_of(tmp_path, text)})
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["missing.csv", "lognormal", "zipf(-1)", "x" * 300, "nul\0"])
def test_routings_that_are_neither_model_nor_file_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="expected a file of counts or one of uniform, lognormal"):
        routed(options={"routing": name})


def test_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="expected a file of counts"):
        routed(options={"routing": str(tmp_path / "x")})


def test_cases_have_each_routing_at_few_sizes_on_mesh_dims_of_several_ranks(tmp_path: Path) -> None:
    sizes = (1024, 4096, 65536, 2**18, 2**20)
    mesh = (("pp", 1), ("dp", 2), ("ep", 4))
    cases = routed(mesh=mesh, sizes_bytes=sizes, sizes_chosen=False)
    assert [(c.params["mesh_dim"], c.params[ROUTING], c.size_bytes) for c in cases] == [
        (dim, name, 65536) for dim in ("dp", "ep") for name in ROUTINGS
    ]
    assert {(c.name, c.params["groups"], c.params["mode"]) for c in cases} == {
        ("all_to_all_v", "together", "isolated")
    }
    quick = routed(mesh=mesh, sizes_bytes=sizes, sizes_chosen=False, quick=True)
    assert [c.params[ROUTING] for c in quick] == ["uniform", "lognormal(1)"] * 2
    # Three ranks do not fit the mesh dim of two.
    path = file_of(tmp_path, HEADER + "2,0,5\n")
    recorded = routed(mesh=mesh, options={"routing": path}, quick=True)
    assert [(c.params["mesh_dim"], c.params[ROUTING]) for c in recorded[4:]] == [("ep", "counts.csv")]
    assert [c.params[ROUTING] for c in routed(options={"routing": "zipf(1.5)"})][-1] == "zipf(1.5)"
    assert len(routed(options={"routing": "hot"})) == len(ROUTINGS)  # each once


def test_sizes_rounded_to_the_same_size_are_listed_once() -> None:
    assert len(routed(sizes_bytes=(1, 2, 3))) == len(ROUTINGS)


def test_budget_measures_routings_last_and_without_a_share_of_the_time() -> None:
    listed = list_tasks(load(["collectives", "redistribute"]), RunRequest().resolve("cpu", 4))
    ordered = [task.case for task in budget.by_importance(listed) if task.suite.name == "collectives"]
    count = sum(ROUTING in case.params for case in ordered)
    assert count == 8 and all(ROUTING in case.params for case in ordered[-count:])
    assert not any(is_calibrated_with(case) for case in ordered[-count:])
    without = [task for task in listed if ROUTING not in task.case.params]
    for seconds in (30.0, 60.0, 90.0):
        chosen, usual = (
            [task.label for task in budget.choose(budget.by_importance(tasks), seconds, False, 4)]
            for tasks in (listed, without)
        )
        assert chosen == usual
    alone = [task for task in listed if ROUTING in task.case.params]
    assert len(budget.choose(budget.by_importance(alone), 60.0, False, 4)) == len(alone)


def test_dispatch_and_combine_has_the_routings_in_both_passes() -> None:
    options = RunOptions((("dp", 1), ("ep", 4)), (4096, 65536), quick=True, sizes_chosen=True)
    cases = list(load(["expert_parallel"])[0].cases(options))
    assert [(c.params["size"], c.params[ROUTING], c.params["pass"]) for c in cases] == list(
        itertools.product((4096, 65536), ROUTINGS[:2], ("forward", "forward+backward"))
    )
    assert {(c.name, c.params["mesh_dim"], *c.build) for c in cases} == {
        ("dispatch_combine", "ep", "core", "torch", "c10d")
    }
    assert not load(["expert_parallel"])[0].by_default


def test_ranks_with_different_files_do_not_agree(tmp_path: Path) -> None:
    agreements = []
    for count in (1, 2):
        path = file_of(tmp_path, HEADER + f"0,1,{count}\n")
        request = RunRequest(("collectives",), suite_options={"routing": path}, device="cpu", nproc=2)
        agreements.append(agreement_of(select(request, 2)))
    differing = {name for name in agreements[0] if agreements[0][name] != agreements[1][name]}
    assert differing == {"the file counts.csv with sha256"}
