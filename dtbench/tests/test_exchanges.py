"""The cost of unequal parts in an all-to-all, and the size from which a payload pays, on runs made by construction."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dtbench.comparison.references import compare_with_reference, read_systems
from dtbench.cost import calibration
from dtbench.engine.findings import findings, next_commands
from dtbench.engine.refine import sizes_between
from dtbench.records.comparison import Change
from dtbench.records.result import Result
from dtbench.records.suite_answers import PayloadChoice, RoutingCost
from dtbench.stats import resampled_ratio
from dtbench.stats.drops import drops_of
from dtbench.stats.exchanges import choose_payload, payload_choices, routing_costs
from dtbench.suite import RunOptions
from dtbench.tests import made_up
from dtbench.tests.html_page import section
from dtbench.tests.made_up import Cli

KIB, MIB = 2**10, 2**20


def routed(
    factors: dict[str, float],
    *,
    launches: int = 1,
    noise: float = 0.02,
    counters: dict[str, float] | None = None,
    sizes: Sequence[int] = (MIB,),
    samples: int = 30,
) -> Iterator[Result]:
    """all_to_all_v over 4 ranks, each routing with the given factor of the uniform one's 1 ms per MiB."""
    rng = np.random.default_rng(5)
    for launch, (name, factor), size in itertools.product(range(launches), factors.items(), sizes):
        times = 1e-3 * size / MIB * factor * np.exp(rng.normal(0, noise, samples))
        params = {"mesh_dim": "ep", "ranks": 4, "groups": "together", "mode": "isolated", "dtype": "float32"}
        yield made_up.result(
            "collectives",
            "all_to_all_v",
            "c10d",
            {**params, "size": size, "routing": name},
            times.tolist(),
            size_bytes=size,
            factor=0.75,
            counters={"max_over_mean_received": (counters or {}).get(name, 1.0)},
            launch=launch,
        )


def cost_of(*arguments: Any, **changes: Any) -> dict[str, RoutingCost]:
    return {cost.routing: cost for cost in routing_costs([made_up.run(list(routed(*arguments, **changes)))])}


@pytest.mark.parametrize("launches", [1, 5])
def test_cost_is_the_ratio_to_uniform_with_an_interval_around_it(launches: int) -> None:
    costs = cost_of({"uniform": 1.0, "zipf(1)": 2.3}, launches=launches, counters={"zipf(1)": 1.9})
    skewed, uniform = costs["zipf(1)"], costs["uniform"]
    change = skewed.change
    assert change is not None and change.low is not None and change.high is not None
    assert change.ratio == pytest.approx(2.3, rel=0.02) and (change.pairs, change.confidence) == (
        launches,
        0.95,
    )
    assert 2.2 < change.low < 2.3 < change.high < 2.4
    assert (uniform.change, uniform.verdict, uniform.max_over_mean) == (None, "", 1.0)
    assert skewed.time_s == pytest.approx(2.3e-3, rel=0.03)
    assert skewed.busbw_Bps == pytest.approx(0.75 * MIB / skewed.time_s, rel=0.01)


def cost(ratio: float | None, low: float | None, high: float | None, share: float | None) -> RoutingCost:
    return RoutingCost(
        mesh_dim="ep",
        ranks=4,
        dtype="float32",
        size_bytes=MIB,
        routing="hot",
        time_s=1e-3,
        change=Change(ratio=ratio, low=low, high=high) if ratio else None,
        max_over_mean=share,
    )


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ((2.3, 2.2, 2.4, 1.9), "skew costs 2.30x, of which 1.90x is the fullest rank"),
        ((1.4, 1.2, 1.6, 1.9), "skew costs 1.40x, less than the 1.90x of the fullest rank"),
        ((1.4, 1.2, 1.6, 1.0), "skew costs 1.40x"),
        ((1.4, 1.2, 1.6, None), "skew costs 1.40x"),
        ((1.2, 0.9, 1.6, 1.9), "no clear cost"),
        ((1.2, None, None, 1.9), "no clear cost"),
        ((0.8, 0.7, 0.9, 1.9), "takes 0.800x the time of uniform"),
        ((None, None, None, 1.9), "no time of the uniform routing"),
    ],
)
def test_verdict_says_what_the_fullest_rank_explains(figures: Any, verdict: str) -> None:
    assert cost(*figures).verdict == verdict


def test_noise_without_a_cost_is_no_clear_cost() -> None:
    assert cost_of({"uniform": 1.0, "zipf(1)": 1.01}, noise=0.2)["zipf(1)"].verdict == "no clear cost"


def test_routing_without_uniform_or_samples_has_no_interval() -> None:
    assert cost_of({"hot": 2.0})["hot"].verdict == "no time of the uniform routing"
    results = [result.without_samples() for result in routed({"uniform": 1.0, "hot": 2.0})]
    (hot,) = [c for c in routing_costs([made_up.run(results)]) if c.routing == "hot"]
    assert hot.change is not None and hot.change.ratio == pytest.approx(2.0, rel=0.02)
    assert (hot.change.low, hot.change.high, hot.verdict) == (None, None, "no clear cost")


def test_resampled_ratio_pairs_launches() -> None:
    """Launches that differ tenfold from each other, in which head always takes twice as long."""
    base, head = (
        {
            ("r", launch): made_up.result("s", "n", "c10d", {}, [1e-3 * factor * 10**launch] * 9)
            for launch in range(launches)
        }
        for factor, launches in ((1.0, 4), (2.0, 3))
    )
    estimate = resampled_ratio(base, head)
    assert estimate is not None and estimate.ratio == pytest.approx(2.0)
    assert (estimate.low, estimate.high) == (None, None)  # no replicate differs
    assert resampled_ratio(base, {("other", 0): head["r", 0]}) is None


def test_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        base, head = (
            {
                ("r", 0): made_up.result(
                    "s", "n", "c10d", {}, (factor * np.exp(rng.normal(0, 0.1, 40))).tolist()
                )
            }
            for factor in (1.0, 1.5)
        )
        estimate = resampled_ratio(base, head)
        assert estimate is not None and estimate.low is not None and estimate.high is not None
        covered += estimate.low <= 1.5 <= estimate.high
    assert 0.88 <= covered / 200 <= 0.99


# ---- what takes collectives of equal parts alone ----

OTHERS = list(made_up.collectives())
ROUTED = [
    msgspec.structs.replace(r, params={**r.params, "mesh_dim": "tp", "ranks": 2})
    for r in routed({"uniform": 9.0, "hot": 40.0}, sizes=[2**10 * 4**k for k in range(8)], noise=0.0)
]


def test_calibration_references_and_drops_ignore_unequal_parts() -> None:
    with_routed, without = made_up.run([*OTHERS, *ROUTED]), made_up.run(OTHERS)
    topologies = [
        msgspec.to_builtins(calibration.calibrate([run])) | {"created": ""} for run in (with_routed, without)
    ]
    assert topologies[0] == topologies[1]
    assert "all_to_all_v" not in json.dumps(topologies[0])
    compared = compare_with_reference(made_up.run(ROUTED), read_systems())
    assert "has no ok results of the collectives suite" in compared.notes[0] and compared.rows == ()
    slower = [
        msgspec.structs.replace(r, busbw_Bps=1e9 if r.size_bytes == MIB else 1e3 * (r.size_bytes or 0))
        for r in ROUTED
    ]
    assert drops_of([*OTHERS, *slower]) == drops_of(OTHERS)
    assert "calibrate" not in " ".join(next_commands(made_up.run(ROUTED)))


def test_no_sizes_are_added_between_those_of_unequal_parts() -> None:
    bent = [
        msgspec.structs.replace(
            r, samples_s=tuple(s * (5 if (r.size_bytes or 0) > MIB else 1) for s in r.samples_s)
        )
        for r in ROUTED
    ]
    options = RunOptions((("tp", 2),), ())
    assert list(sizes_between(options, bent, [])) == []
    equal = [
        msgspec.structs.replace(r, params={k: v for k, v in r.params.items() if k != "routing"}) for r in bent
    ]
    assert list(sizes_between(options, equal, [])) != []


def test_page_shows_unequal_parts_in_a_table_and_nowhere_else() -> None:
    both, alone = (section("collectives", results) for results in ([*OTHERS, *ROUTED], OTHERS))
    assert [t.rows for t in both.tables[1:]] == [t.rows for t in alone.tables]
    assert [f.caption for f in both.figures] == [f.caption for f in alone.figures]
    assert (both.headlines, both.outcome) == (alone.headlines, alone.outcome)
    only = section("collectives", routed({"uniform": 1.0, "hot": 2.0}, counters={"hot": 1.5}))
    assert only.tables[0].rows[1][2][-1] == "skew costs 1.99x, of which 1.50x is the fullest rank"
    moved, moved_alone = (
        section("redistribute", results)
        for results in ([*OTHERS, *ROUTED, *made_up.redistribute()], [*OTHERS, *made_up.redistribute()])
    )
    assert [t.rows for t in moved.tables] == [t.rows for t in moved_alone.tables]
    assert moved.headlines == moved_alone.headlines


def test_show_prints_the_cost_in_text_and_json(tmp_path: Path, dtbench: Cli) -> None:
    results = list(routed({"uniform": 1.0, "zipf(1)": 2.3}, counters={"zipf(1)": 1.9}))
    path = made_up.write(tmp_path / "run.jsonl", made_up.run(results))
    shown = dtbench("show", str(path))[1]
    assert "all_to_all_v: cost of unequal parts" in shown
    assert "of which 1.90x is the fullest rank" in shown
    costs = json.loads(dtbench("show", str(path), "--json")[1])[0]["routing_costs"]
    assert msgspec.convert(costs, list[RoutingCost]) == routing_costs([made_up.run(results)])


def test_run_ends_with_the_cost_of_each_routing_and_the_choice_of_each_payload() -> None:
    results = [
        *routed({"uniform": 1.0, "zipf(1)": 2.3}, counters={"zipf(1)": 1.9}),
        *payloads(32 * KIB, 0.02),
    ]
    lines = "\n".join(findings(made_up.run(results)))
    assert "collectives: all_to_all_v zipf(1) over ep, 1 MiB: skew costs 2.29x, of which 1.90x is" in lines
    assert "payload: bfloat16 in all_gather over tp pays from about 3" in lines
    assert "uniform over" not in lines


def test_files_with_odd_values_are_shown(tmp_path: Path, dtbench: Cli) -> None:
    results = list(routed({"uniform": 1.0, "<b>\x1b[2J": 2.0}))
    odd = {"mesh_dim": 3.5, "ranks": "x", "routing": True}
    results.append(msgspec.structs.replace(results[0], params=odd, counters={}))
    path = made_up.write(tmp_path / "run.jsonl", made_up.run(results))
    code, shown, error = dtbench("show", str(path))
    assert code == 0 and "\x1b[2J" not in shown and "3.5=0" in shown, error


# ---- the size from which a narrower payload pays ----

SIZES = tuple(KIB * 4**k for k in range(6))  # 1 KiB to 1 MiB


def chosen(ratios: Sequence[float], spread: float = 0.05) -> PayloadChoice:
    """Returns the choice for ratios at SIZES, whose intervals extend by `spread` on both sides; 0 for no intervals."""
    changes = {
        size: Change(ratio=r, low=r * (1 - spread), high=r * (1 + spread)) if spread else Change(ratio=r)
        for size, r in zip(SIZES, ratios, strict=False)
    }
    return choose_payload("tp", 4, "all_gather", "bfloat16", changes)


@pytest.mark.parametrize(
    ("ratios", "verdict", "pays_from", "low", "high"),
    [
        # 2x slower at 4 KiB, 2x faster at 16 KiB: on logarithmic scales, they are equal halfway, at 8 KiB.
        ([4, 2, 0.5, 0.4], "about 8.000 KiB on, clearly from 16 KiB", 8 * KIB, 4 * KIB, 16 * KIB),
        # A third of the way in log ratio: 4 KiB * 4^(1/3).
        (
            [4, 2, 0.25, 0.2],
            "about 6.350 KiB on, clearly from 16 KiB",
            round(4 * KIB * 4 ** (1 / 3)),
            4 * KIB,
            16 * KIB,
        ),
        # Unclear sizes between the last clear loss and the first clear gain.
        (
            [2, 1.02, 1 / 1.02, 0.5],
            "about 8.000 KiB on, clearly from 64 KiB",
            8 * KIB,
            KIB,
            64 * KIB,
        ),
        # Several crossings: it pays from the last one on.
        (
            [0.5, 2, 0.5, 2, 0.5, 0.5],
            "about 128.0 KiB on, clearly from 256 KiB",
            128 * KIB,
            64 * KIB,
            256 * KIB,
        ),
        # An unclear size above does not revoke the answer.
        ([2, 0.5, 1.01, 0.5], "about 2.000 KiB on, clearly from 4 KiB", 2 * KIB, KIB, 4 * KIB),
        # At the largest sizes, it seems to lose.
        ([2, 0.5, 0.5, 1.01], "clearly pays from 4 KiB to 16 KiB, unclear above", None, KIB, 4 * KIB),
        ([0.5, 0.98, 1.0], "clearly pays at 1 KiB, unclear above", None, None, KIB),
        ([0.5, 0.5, 0.5], "pays at all measured sizes", None, None, KIB),
        ([0.98, 0.97, 0.5], "about 16.00 KiB on, clearly from 16 KiB", None, None, 16 * KIB),
        ([2, 2, 2], "pays at no measured size", None, 16 * KIB, None),
        ([1.01, 0.99, 1.0], "pays at no measured size", None, None, None),
        ([0.5, 0.5, 2], "pays only below 16 KiB", None, 16 * KIB, None),
    ],
)
def test_payload_pays_from_the_last_crossing_on(
    ratios: Sequence[float], verdict: str, pays_from: int | None, low: int | None, high: int | None
) -> None:
    choice = chosen(ratios)
    assert (choice.verdict.removeprefix("pays from "), choice.pays_from_bytes) == (verdict, pays_from)
    assert (choice.low_bytes, choice.high_bytes) == (low, high)


def test_ratios_without_intervals_give_no_size() -> None:
    choice = chosen([2.0, 0.5], spread=0)
    assert (choice.verdict, choice.pays_from_bytes) == ("pays at no measured size", None)


def payloads(crossing_bytes: float, noise: float, *, launches: int = 1, seed: int = 1) -> Iterator[Result]:
    """float32 takes 1 ms + 1 ms per crossing; bfloat16 1.5 ms + 0.5 ms per crossing: they are equal at the crossing."""
    rng = np.random.default_rng(seed)
    for launch, size, (payload, part) in itertools.product(
        range(launches),
        SIZES,
        [("float32", "total"), *itertools.product(["bfloat16"], ["total", "transfer"])],
    ):
        load = size / crossing_bytes
        exact = {"float32": 1 + load, "bfloat16": 1.5 + 0.5 * load}[payload] * (
            0.1 if part == "transfer" else 1
        )
        times = 1e-3 * exact * np.exp(rng.normal(0, noise, 40))
        params = {"mesh_dim": "tp", "ranks": 4, "dtype": "float32", "size": size, "part": part}
        yield made_up.result(
            "payload", "all_gather", payload, params, times.tolist(), size_bytes=size, launch=launch
        )


@pytest.mark.parametrize("launches", [1, 4])
def test_crossing_of_a_run_lies_within_its_interval(launches: int) -> None:
    crossing = 32 * KIB
    (choice,) = payload_choices([made_up.run(list(payloads(crossing, 0.02, launches=launches)))])
    assert (choice.mesh_dim, choice.ranks, choice.collective, choice.payload) == (
        "tp",
        4,
        "all_gather",
        "bfloat16",
    )
    assert (choice.low_bytes, choice.high_bytes) == (16 * KIB, 64 * KIB)
    assert choice.pays_from_bytes == pytest.approx(crossing, rel=0.15)


def test_noise_widens_the_interval_of_the_crossing() -> None:
    (choice,) = payload_choices([made_up.run(list(payloads(32 * KIB, 0.5, seed=3)))])
    assert (choice.low_bytes or 0) < 16 * KIB or (choice.high_bytes or SIZES[-1] + 1) > 64 * KIB


def test_payloads_are_shown_in_text_json_and_on_the_page(tmp_path: Path, dtbench: Cli) -> None:
    results = list(payloads(32 * KIB, 0.02))
    path = made_up.write(tmp_path / "run.jsonl", made_up.run(results))
    shown = dtbench("show", str(path))[1]
    line = next(line for line in shown.splitlines() if line.startswith("tp=4") and "bfloat16" in line)
    assert "16 KiB" in line and "64 KiB" in line and "pays from about 3" in line
    choices = json.loads(dtbench("show", str(path), "--json")[1])[0]["payload_choices"]
    assert msgspec.convert(choices, list[PayloadChoice]) == payload_choices([made_up.run(results)])
    on_page = section("others", results).tables[0]
    assert on_page.caption.startswith("payload: the size") and on_page.rows[0][2][-1].startswith(
        "pays from about 3"
    )


def test_payload_without_float32_gives_no_answer() -> None:
    results = [r for r in payloads(32 * KIB, 0.02) if r.impl != "float32"]
    assert payload_choices([made_up.run(results)]) == []
