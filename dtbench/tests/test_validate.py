"""Validation scores each model on new launches, whose errors are known in advance."""

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dtbench.cost.calibration import calibrate
from dtbench.cost.calibration.validate import Validation, score_runs, score_split
from dtbench.errors import EXIT_OK, EXIT_USAGE, UsageError
from dtbench.records.result import Result, Run
from dtbench.records.topology import CalibratedTopology, write_topology
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli, slowed
from dtbench_core.cost.ring import RING_COLLECTIVES

SIZES = made_up.SIZES


def results(scale: float = 1.0, launch: int = 0, **changes: Any) -> list[Result]:
    options = {"names": RING_COLLECTIVES, "noise": 0.0, "samples": 6, "modes": ["together"]} | changes
    return list(made_up.collectives(launch, launch=launch, launch_factor=scale, **options))


def run_of(measured: list[Result], run_id: str = "new", **changes: Any) -> Run:
    return made_up.run(measured, path=f"{run_id}.jsonl", run_id=run_id, **changes)


@functools.cache
def fitted(*scales: float) -> CalibratedTopology:
    measured = [result for launch, scale in enumerate(scales) for result in results(scale, launch)]
    return calibrate([run_of(measured, "fitted")])


def ratio(validation: Validation, model: str, regime: str = "all", group: str = "ring collectives") -> float:
    (result,) = [g for g in validation.groups if g.name == group]
    return result.scores[model][regime].geometric_mean_ratio


def test_scores_and_noise_floor_match_the_launches() -> None:
    """Fitted on launches of 0.9, 1 and 1.1; new ones take 1.2 and 0.8 of what the formula says."""
    validation = score_runs(fitted(0.9, 1.0, 1.1), [run_of([*results(1.2, 0), *results(0.8, 1)])])
    expected = math.exp((math.log(1.2) - math.log(0.8)) / 2)
    assert [ratio(validation, model) for model in ("ring", "table")] == pytest.approx(
        [expected] * 2, rel=2e-3
    )
    (group,) = validation.groups
    table = group.scores["table"]["all"]
    assert table.points == 2 * 2 * 3 * len(SIZES)
    assert table.median_error == pytest.approx((1 - 1 / 1.2 + 1 / 0.8 - 1) / 2, rel=2e-3)
    # Each new launch forecast by the other new one and by the three that were fitted.
    forecasts = [(1.2, 0.8), (0.8, 1.2), *itertools.product((0.9, 1.0, 1.1), (1.2, 0.8))]
    logs = [abs(math.log(a / b)) for a, b in forecasts]
    assert ratio(validation, "floor") == pytest.approx(math.exp(sum(logs) / len(logs)), rel=1e-3)
    assert group.scores["floor"]["all"].points == len(forecasts) * 2 * 3 * len(SIZES)


def test_models_distinguish_torchs_guessed_layout_from_the_reported_one() -> None:
    """On CPU torch takes every dim for crossing hosts; here tp does not, and takes what torch would say."""
    builtin = {"dp": (87.7 * 0.22, 2.7), "tp": (87.7, 0.6)}
    topology = calibrate([run_of(results(truth=builtin), "fitted")])
    validation = score_runs(topology, [run_of(results(truth=builtin))])
    ratios = [ratio(validation, model) for model in ("builtin_layout", "builtin_scaled")]
    assert ratios == pytest.approx([1, 1], abs=1e-6)
    assert ratio(validation, "builtin", "> 1 MiB") > 1.5
    assert any("1 device per host" in note for note in validation.notes)
    # With as many GPUs per host as ranks it guesses right.
    gpus = {
        "machine": {"cpu": {}, "gpus": [{"name": "H"}, {"name": "H"}]},
        "options": {"device_type": "cuda"},
    }
    topology = calibrate([run_of(results(truth=builtin), "fitted", **gpus)])
    validation = score_runs(topology, [run_of(results(truth=builtin), **gpus)])
    assert ratio(validation, "builtin") == pytest.approx(1, abs=1e-6)


def test_interval_coverage_counts_each_new_value() -> None:
    topology = fitted(0.9, 1.0, 1.1)
    (group,) = score_runs(topology, [run_of([*results(1.05, 0), *results(3.0, 1)])]).groups
    assert (group.inside, group.points, group.beyond, group.one_launch) == (0.5, 96, 0, False)
    (group,) = score_runs(topology, [run_of(results(sizes=[*SIZES, 4 * SIZES[-1]]))]).groups
    assert (group.beyond, group.points) == (6, 48)
    assert score_runs(fitted(1.0), [run_of(results())]).groups[0].one_launch


def test_other_collectives_and_redistributions_are_scored_separately() -> None:
    measured = [*made_up.collectives(noise=0.0, samples=6, modes=["together"]), *made_up.redistribute()]
    validation = score_runs(calibrate([run_of(measured, "fitted")]), [run_of(measured)])
    models = {group.name: set(group.scores) for group in validation.groups}
    assert list(models) == [
        "ring collectives",
        "other collectives",
        "redistributions, core",
        "redistributions, torch",
    ]
    assert models["other collectives"] == models["redistributions, core"] == {"line", "table", "floor"}
    assert ratio(validation, "table", group="redistributions, torch") == pytest.approx(1, abs=0.02)


# ---------------------------------------------------------------------------------- what is refused


def test_fitted_runs_are_refused_unless_allowed() -> None:
    topology, own = fitted(1.0), run_of(results(), "fitted")
    with pytest.raises(UsageError, match=r"the topology was fitted to.*--same"):
        score_runs(topology, [own])
    notes = score_runs(topology, [own], allow_fitted=True).notes
    assert any(note.startswith("FITTED TO THE SAME RUN (fitted.jsonl)") for note in notes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"versions": {"backend": "nccl"}}, "has the backend gloo, but new.jsonl has nccl"),
        ({"options": {"device_type": "cuda"}}, "has the device type cpu, but new.jsonl has cuda"),
        ({"mesh": {"x": 2, "y": 2}}, r"has measured none of the topology.s mesh dims \(dp=2, tp=2\)"),
    ],
)
def test_runs_of_a_different_setup_are_refused(changes: dict[str, Any], says: str) -> None:
    mesh = {"mesh": changes["mesh"], "truth": {"x": (1, 1), "y": (1, 1)}} if "mesh" in changes else {}
    measured = results(**mesh)
    with pytest.raises(UsageError, match=says):
        score_runs(fitted(1.0), [run_of(measured, **changes)])


HALF = [structs.replace(result, params={**result.params, "dtype": "bfloat16"}) for result in results()]


@pytest.mark.parametrize(
    ("run", "difference"),
    [
        (run_of(HALF), "all_gather over dp is bfloat16 in the runs, float32 in the topology"),
        (
            run_of(results(), hosts=("a",) * 4),
            "dp spans (1, 1) hosts (min, max) in the runs, (2, 2) in the topology",
        ),
        (
            run_of(results(modes=["alone"])),
            "groups of dp were measured alone in the runs, together in the topology",
        ),
        (run_of([*results(), *results(names=("broadcast",))]), "the topology has no broadcast over tp"),
    ],
)
def test_differences_between_topology_and_runs_are_reported(run: Run, difference: str) -> None:
    assert any(difference in note for note in score_runs(fitted(1.0), [run]).notes)


# ----------------------------------------------------------------------------------- held-out sizes


def test_score_split_predicts_held_out_sizes_from_neighbours() -> None:
    """Times linear in size: a table that is read linearly is exact, whatever it was not fitted on."""
    validation = score_split(run_of(results()))
    # 8 sizes: 1, 3 and 5 are held out, the ends kept.
    assert validation.groups[0].scores["table"]["all"].points == 3 * 3 * 2
    assert ratio(validation, "table") == pytest.approx(1, abs=1e-9)
    assert "every second size of new.jsonl" in validation.title
    odd = slowed(results(), lambda result, rank: 2.0 if result.size_bytes in SIZES[1:-1:2] else 1.0)
    assert ratio(score_split(run_of(odd)), "table") == pytest.approx(2, rel=1e-9)


def test_score_split_refuses_too_few_sizes() -> None:
    with pytest.raises(UsageError, match="measured at 3 or more sizes"):
        score_split(run_of(results(sizes=SIZES[:2])))


# ------------------------------------------------------------------------------------- the command


def test_validate_command_prints_a_table_or_json(dtbench: Cli) -> None:
    write_topology(fitted(0.9, 1.1), "t.json")
    made_up.write(Path("new.jsonl"), run_of([*results(1.2, 0), *results(1.3, 1)]))
    validate = ("calibrate", "--validate", "t.json", "new.jsonl")
    code, out, _ = dtbench(*validate)
    assert code == EXIT_OK and "noise floor: another launch" in out
    assert "2 new launches of dp=2, tp=2" in out
    assert "values lie within the 90 % intervals of the topology" in out
    fields = json.loads(dtbench(*validate, "--json")[1])
    assert fields["kind"] == "validation" and fields["groups"][0]["scores"]["table"]["all"]["points"] == 96
    code, out, _ = dtbench("calibrate", "--split", "new.jsonl")
    assert code == EXIT_OK and "every second size of new.jsonl" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--split t.json fitted.jsonl", "got 2 files, expected a single RUN"),
        ("--split fitted.jsonl --same", "--same requires --validate"),
        ("--split --validate t.json fitted.jsonl", "--validate and --split exclude each other"),
        ("--split fitted.jsonl -o new.json", "but --split writes none"),
        ("fitted.jsonl", "missing -o"),
        ("fitted.jsonl -o new.json --json", "--json is not used with -o"),
        ("--validate fitted.jsonl t.json", "fitted.jsonl is a run of dtbench, expected a topology"),
    ],
)
def test_invalid_options_are_refused_in_one_line(dtbench: Cli, args: str, says: str) -> None:
    write_topology(fitted(1.0), "t.json")
    made_up.write(Path("fitted.jsonl"), run_of(results(), "fitted"))
    code, out, err = dtbench("calibrate", *args.split())
    assert (code, out, err.count("\n")) == (EXIT_USAGE, "", 1) and says in err, args
