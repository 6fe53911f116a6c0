"""What choices cost, by hand-computed prices and times."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dtbench.cost.regret import NOTHING, planner_topology, price_us, regret
from dtbench.records.run import RunWriter
from dtbench.records.topology import MeasuredCurve, Topology, write_topology
from dtbench.suite import Result, Run
from dtbench.suite.errors import UsageError
from dtbench.tests.made_up import MIB, Cli, header, result, run
from dtbench.tests.made_up_topology import curve_of, made_dim, made_topology
from dtbench_core.cost.topology import MeshConstants

CHANGES = ("S(0)->R", "S(1)->R", "P->R", "P->S(0)", "P->S(1)", "S(0)->S(1)", "S(1)->S(0)")
DIMS = ("dp", "tp")
STRAIGHT, DETOUR, LONG = "tp:P->R:4194304", "tp:P->S(0):4194304 tp:S(0)->R:4194304", "dp+tp:P+P->R+R:4194304"


def flat(us: float) -> MeasuredCurve:
    return curve_of((1024, 2**30), (us, us))


def topology(**us: float) -> Topology:
    """Every change takes 100 us on both mesh dims, but as `us` says: `PR=300`. dp crosses hosts."""
    dims = []
    for name, bandwidth, layout in (("dp", 0.5, "inter-host"), ("tp", 2.0, "intra-host")):
        curves = {change: flat(us.get(short(change), 100.0)) for change in CHANGES}
        dim = made_dim(name, 2, bandwidth, 10.0, layout=layout)
        transitions = {"core": curves, "torch": {c: flat(7.0) for c in CHANGES}}
        dims.append(structs.replace(dim, transitions=transitions))
    return made_topology(*dims)


def short(change: str) -> str:
    return change.replace("(", "").replace(")", "").replace("->", "")


def decided(
    times_s: dict[str, float],
    launch: int = 0,
    library: str = "core",
    problem: str = "R,P->R,R",
    **params: Any,
) -> list[Result]:
    """One decision as the suite writes it; every sample of a way takes the same time."""
    where = {"library": library, "problem": problem, "mesh": "dp=2,tp=2", "dtype": "float32", **params}
    return [
        result("regret", "redistribute", way, where, [s] * 4, size_bytes=4 * MIB, launch=launch)
        for way, s in times_s.items()
    ]


def scores(found: Any) -> dict[str, Any]:
    (group,) = found.groups
    return dict(group.scores)


def test_prices_are_the_cores() -> None:
    info = planner_topology(topology(PR=300.0), "core").constants((("dp", 2), ("tp", 2)))
    assert price_us(STRAIGHT, DIMS, info) == 300
    assert price_us(DETOUR, DIMS, info) == 200
    assert price_us("tp:R->S(1):4096 dp:S(0)->S(1):4096", DIMS, info) == pytest.approx(101)
    assert price_us("a.tp:S(1)->R:4096 b.dp:S(0)->R:64 out.tp:P->S(0):8192", DIMS, info) == 300
    assert price_us(NOTHING, DIMS, info) == 0
    assert price_us(LONG, DIMS, info) == math.inf, "measured one by one, but not together"
    both = topology()
    curves = {"core": {c: flat(55.0) for c in CHANGES}}
    together = structs.replace(both.dims[0], name="dp+tp", ranks=4, transitions=curves)
    both = structs.replace(both, dims=(*both.dims, together))
    joint = planner_topology(both, "core").constants((("dp", 2), ("tp", 2)))
    assert price_us(LONG, DIMS, joint) == 55
    bare = MeshConstants(None, (2, 2), (0.5, 2.0), (40.0, 10.0))
    quarter_gib = 2**28
    # One hop of 10 us, and half of it over 2 GiB/s.
    assert price_us(f"tp:S(0)->R:{quarter_gib}", DIMS, bare) == pytest.approx(6.6 + 10 + 0.25 / 2 / 2 * 1e6)
    # 2 x 3 hops of 40 us, and 3/4 of it twice over 0.5 GiB/s.
    joint = price_us(f"dp+tp:P+P->R+R:{quarter_gib}", DIMS, bare)
    assert joint == pytest.approx(6.6 + 6 * 40 + 0.25 * 6 / 4 / 0.5 * 1e6)


def test_each_model_is_charged_what_it_chose() -> None:
    times = {STRAIGHT: 3e-3, DETOUR: 2e-3, LONG: 8e-3}
    picked = {"torch_greedy": STRAIGHT, "torch_by_cost": LONG}
    found = scores(regret([run(decided(times, **picked))], topology(PR=300.0)))
    assert found["greedy"].mean == pytest.approx(0.5)
    assert found["by_cost"].mean == pytest.approx(3.0)
    assert found["curves"].mean == 0, "300 us against 200"
    assert found["curves"].ranked_right == pytest.approx(1.0)
    assert found["worst"].worst == pytest.approx(3.0)
    assert "oracle" not in found
    # The formula has the all-reduce and its two halves cost the same but for the base latency.
    assert found["constants"].mean == pytest.approx(0.5)
    assert found["constants"].near == 0


def test_the_choice_of_the_other_launches_shows_what_noise_costs() -> None:
    launches = [
        {STRAIGHT: 1.0e-3, DETOUR: 1.2e-3},
        {STRAIGHT: 1.5e-3, DETOUR: 1.2e-3},
        {STRAIGHT: 1.1e-3, DETOUR: 1.4e-3},
    ]
    results = [r for i, times in enumerate(launches) for r in decided(times, launch=i)]
    found = scores(regret([run(results)], topology()))
    # Medians without the first launch: 1.3 and 1.3, the first way of two. Without the second: 1.05 and 1.3.
    # Without the third: 1.25 and 1.2, so the second way, which then takes 1.4 against 1.1.
    assert found["oracle"].mean == pytest.approx((0 + 0.25 + 1.4 / 1.1 - 1) / 3)
    assert found["oracle"].worst == pytest.approx(1.4 / 1.1 - 1)
    assert found["oracle"].near == pytest.approx(1 / 3)


def test_no_preference_is_charged_the_mean_and_ranks_half() -> None:
    times = {"tp:P->S(0):4194304": 1e-3, "tp:P->S(1):4194304": 3e-3}
    found = scores(regret([run(decided(times))], topology()))
    assert found["curves"].mean == pytest.approx(1.0), "(1 + 3) / 2 is twice the best"
    assert (found["curves"].ranked_right, found["curves"].ties) == (0.5, 1.0)


def test_each_library_has_its_own_curves_and_group() -> None:
    results = [
        *decided({STRAIGHT: 1e-3, DETOUR: 2e-3}, library="torch"),
        *decided({STRAIGHT: 3e-3, DETOUR: 2e-3}),
    ]
    found = regret([run(results)], topology(PR=300.0))
    assert [(g.library, g.scores["curves"].mean) for g in found.groups] == [("core", 0.0), ("torch", 0.0)]


def test_what_weakens_it_is_said() -> None:
    results = decided({STRAIGHT: 1e-3, DETOUR: 1.01e-3})
    bare = topology()
    bare = structs.replace(bare, dims=tuple(structs.replace(dim, transitions={}) for dim in bare.dims))
    notes = regret([run(results)], bare).notes
    assert any("one launch only" in note for note in notes)
    assert any("no curves" in note for note in notes)
    noisy = [
        r
        for i, times in enumerate([{STRAIGHT: 1e-3, DETOUR: 2e-3}, {STRAIGHT: 2e-3, DETOUR: 1e-3}])
        for r in decided(times, launch=i)
    ]
    assert any("hardly be told apart" in note for note in regret([run(noisy)], topology()).notes)


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ([run([])], "no ok results of the regret suite"),
        ([run(decided({STRAIGHT: 1e-3, "rm -rf": 1e-3}))], "is no step over dp, tp"),
        ([run(decided({STRAIGHT: 1e-3, "pp:P->R:4": 1e-3}))], "is no step over dp, tp"),
        ([run(decided({STRAIGHT: 1e-3, "tp:P->Q:4": 1e-3}))], "is no step"),
        ([run(decided({STRAIGHT: 1e-3, "tp:P->S(0)R:4": 1e-3}))], "is no placement"),
        (
            [run(decided({STRAIGHT: 1e-3}), mesh={"dp": 2, "tp": 2}), run([], mesh={"tp": 4})],
            "different meshes",
        ),
        ([run(decided({STRAIGHT: 1e-3, DETOUR: 1e-3}), mesh={"dp": 2, "tp": 8})], "not the mesh dim tp=8"),
    ],
)
def test_what_cannot_be_scored_is_refused(runs: list[Run], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        regret(runs, topology())


def test_the_command(tmp_path: Path, dtbench: Cli) -> None:
    results = [r for i in (0, 1) for r in decided({STRAIGHT: 3e-3, DETOUR: 2e-3}, i, torch_greedy=STRAIGHT)]
    writer = RunWriter.create(tmp_path / "r.jsonl", header())
    for r in results:
        writer.append(r)
    writer.close()
    write_topology(topology(PR=300.0), tmp_path / "t.json")
    code, out, _ = dtbench("calibrate", "--regret", "t.json", "r.jsonl")
    assert code == 0
    assert "redistribute by core, 4 MiB, dp=2, tp=2: 1 decisions, 2 launches" in out
    assert any("greedy" in line and "50.0 %" in line for line in out.splitlines())
    code, out, _ = dtbench("calibrate", "--regret", "t.json", "r.jsonl", "--json")
    assert json.loads(out)["groups"][0]["scores"]["greedy"]["mean"] == pytest.approx(0.5)
