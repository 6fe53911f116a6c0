"""What each cost model's choices cost more than the best ones.

The suite `regret` measures, decision by decision, the candidate ways of moving a tensor. Here every model
chooses among them, by its own prices, and is charged what its choice took in each launch:

    regret = time of the choice / time of the fastest way in that launch - 1

The fastest in hindsight profits from noise, so even a perfect model shows some regret. How much, is said by
the choice of the other launches: the way that was fastest in their median, charged in the launch left
out. Below it lies no model for long; where it comes near the regret of the worst way, the ways cannot be told
apart and the decision says nothing.

Prices are the core's (`dtbench_core.cost.prices`), with each model's constants. torch's two planners are not
priced: the suite asked them, and their ways are among the candidates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from dtbench.cost.calibration.layout import crosses_hosts
from dtbench.cost.choices import CHOOSERS, Group, Regret, Score
from dtbench.errors import UsageError
from dtbench.model import Result, Run
from dtbench_core.cost.prices import DimPrices, Kind, joint_prices
from dtbench_core.cost.ring import GIB, INTER_HOST, INTRA_HOST, LOCAL_COPY_US, guessed_links
from dtbench_core.cost.topology import MeshConstants, Topology, TopologyError

# Two ways are told apart from here on when the order of their prices is judged.
TOLD_APART = 1.25
NEAR = 0.10  # "within 10 % of the best"
# Prices this close are a tie: the model has no preference, and is charged the mean.
TIE = 1e-9
INTERVAL, REPLICATES, SEED = 0.9, 1000, 20240229

# `a.dp+tp:P+P->S(0)+S(1):4096`, as the suite writes the steps of a way.
_STEP = re.compile(
    r"(?:\w+\.)?(?P<dims>[A-Za-z_]\w*(?:\+[A-Za-z_]\w*)*)"
    r":(?P<src>[SRP()\d+]+)->(?P<dst>[SRP()\d+]+):(?P<bytes>\d{1,15})"
)
_PLACEMENT = re.compile(r"R|P|S\((\d{1,3})\)")
NOTHING = "nothing to send"


@dataclass(frozen=True)
class Decision:
    """The candidates for one purpose. times_s: launch -> way -> seconds."""

    library: str
    name: str
    problem: str
    size_bytes: int
    picked: Mapping[str, str]  # torch's planner -> its way
    times_s: Mapping[tuple[str, int], Mapping[str, float]]

    @property
    def ways(self) -> list[str]:
        """Those measured in every launch."""
        of_launches = list(self.times_s.values())
        return [way for way in of_launches[0] if all(way in times for times in of_launches)]


def regret(runs: Sequence[Run], topology: Mapping[str, Any]) -> Regret:
    """Scores the models on runs of the suite `regret`. topology: a topology file's content, checked.

    Raises:
        UsageError: runs without such results or of different meshes, a topology that lacks their mesh dims.
    """
    dims = _dims_of(runs)
    decisions, launches = _decisions(runs)
    if not decisions:
        raise UsageError(
            f"no ok results of the regret suite in {', '.join(str(run.path) for run in runs)}: "
            "measure them with `dtbench run regret --mesh dp=2,tp=2 --launches 2`"
        )
    grouped: dict[tuple[str, str, int], list[Decision]] = {}
    for decision in decisions:
        grouped.setdefault((decision.library, decision.name, decision.size_bytes), []).append(decision)
    names = [name for name, _ in dims]
    groups = []
    for (library, name, size), own in sorted(grouped.items()):
        models = _models(runs[0], topology, dims, library)
        prices = {model: _Prices(names, info) for model, info in models.items()}
        groups.append(Group(library, name, size, launches, _scores(own, prices)))
    mesh = ", ".join(f"{name}={ranks}" for name, ranks in dims)
    return Regret(mesh, tuple(groups), tuple(_notes(runs, topology, launches, groups)))


# ------------------------------------------------------------------------------------- what was measured


def _dims_of(runs: Sequence[Run]) -> list[tuple[str, int]]:
    """The mesh dims of more than one rank, which ways are written in."""
    meshes = [run.header.mesh for run in runs]
    if any(mesh != meshes[0] for mesh in meshes):
        raise UsageError(
            f"{', '.join(str(run.path) for run in runs)} are of different meshes: expected launches of one"
        )
    pairs = zip(meshes[0].dim_names, meshes[0].shape, strict=True)
    return [(name, ranks) for name, ranks in pairs if ranks > 1]


def _decisions(runs: Sequence[Run]) -> tuple[list[Decision], int]:
    """What was measured in every launch, and the number of launches."""
    found: dict[tuple[str, str, str, int, str], dict[tuple[str, int], dict[str, float]]] = {}
    picked: dict[tuple[str, str, str, int, str], dict[str, str]] = {}
    launches: set[tuple[str, int]] = set()
    for run in runs:
        for result in run.ok("regret"):
            key = _key_of(result)
            launch = (run.header.run_id, result.launch)
            launches.add(launch)
            assert result.time_s is not None
            found.setdefault(key, {}).setdefault(launch, {})[result.impl] = result.time_s.p25
            picked[key] = {
                model: str(result.params[f"torch_{model}"])
                for model in ("greedy", "by_cost")
                if f"torch_{model}" in result.params
            }
    decisions = [
        Decision(library, name, problem, size, picked[key], times)
        for key, times in found.items()
        for library, name, problem, size, _ in [key]
        if len(times) == len(launches)
    ]
    return [d for d in decisions if len(d.ways) > 1], len(launches)


def _key_of(result: Result) -> tuple[str, str, str, int, str]:
    params = result.params
    if not result.size_bytes or "problem" not in params or "library" not in params:
        raise UsageError(f"a result of the regret suite lacks its problem, library or size: {dict(params)}")
    dtype = str(params.get("dtype", ""))
    return str(params["library"]), result.name, str(params["problem"]), result.size_bytes, dtype


# ------------------------------------------------------------------------------------- prices


def _models(
    run: Run, topology: Mapping[str, Any], dims: Sequence[tuple[str, int]], library: str
) -> dict[str, MeshConstants]:
    """Each priced model's constants."""
    try:
        calibrated = Topology.load(_of_library(topology, library)).constants(dims)
    except TopologyError as error:
        raise UsageError(f"the topology does not fit the run: {error}") from error
    ranks = [n for _, n in dims]
    header = run.header
    gpus = len(header.machine.gpus)
    per_host = gpus if str(header.plan.get("device_type")) == "cuda" and gpus else 1
    layouts = {dim["name"]: dim["layout"] for dim in topology["dims"]}
    links = [INTER_HOST if crosses_hosts(layouts[name]) else INTRA_HOST for name, _ in dims]
    models = {
        "guessed": MeshConstants.of_links(ranks, guessed_links(ranks, per_host)),
        "layout": MeshConstants.of_links(ranks, links),
        "constants": dataclasses.replace(calibrated, mesh_dim_curves=(), joint_curves={}),
    }
    return models | ({"curves": calibrated} if calibrated.mesh_dim_curves else {})


def _of_library(topology: Mapping[str, Any], library: str) -> dict[str, Any]:
    """The topology with the curves of that library's own redistributions."""
    dims = [{**dim, "transitions": {"core": dim["transitions"].get(library, {})}} for dim in topology["dims"]]
    return {**topology, "dims": dims}


def price_us(way: str, dims: Sequence[str], info: MeshConstants) -> float:
    """Microseconds that the constants expect of a way, as the core's planner adds them up.

    way: its steps, as the suite writes them. dims: the names of the mesh dims of `info`.

    Raises:
        UsageError: not a way, or one over mesh dims that are not there.
    """
    if way == NOTHING:
        return 0.0
    return sum(_step_us(word, dims, info) for word in way.split(" "))


def _step_us(word: str, dims: Sequence[str], info: MeshConstants) -> float:
    step = _STEP.fullmatch(word)
    if step is None or not set(step["dims"].split("+")) <= set(dims):
        raise UsageError(
            f"{word[:80]!r} in a result of the regret suite is no step over {', '.join(dims)}: expected "
            "such as tp:P->S(0):4096; measure again with this version"
        )
    indices = [dims.index(name) for name in step["dims"].split("+")]
    src, dst = ([_kind(p) for p in step[side].split("+")] for side in ("src", "dst"))
    whole = int(step["bytes"]) / GIB
    ranks = math.prod(info.mesh_dim_devices[d] for d in indices)
    held = whole / ranks if src[0].letter == "S" else whole
    if len(indices) > 1:
        joint = joint_prices(info, indices)
        return (
            math.inf if joint is None else max(joint.us(*pair, held) for pair in zip(src, dst, strict=True))
        )
    prices = DimPrices.of(info, indices[0])
    if src[0].letter == "R":
        return prices.cut_us(dst[0], held, LOCAL_COPY_US)
    return prices.us(src[0], dst[0], held)


def _kind(text: str) -> Kind:
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{text[:40]!r} in a result of the regret suite is no placement: expected R, P or S(0)"
        )
    return Kind("S", int(match[1])) if match[1] else Kind(text)


# ------------------------------------------------------------------------------------- scores


class _Prices:
    """A model that has a price for every way."""

    def __init__(self, dims: Sequence[str], info: MeshConstants) -> None:
        self._dims, self._info = dims, info

    def of(self, decision: Decision) -> dict[str, float]:
        return {way: price_us(way, self._dims, self._info) for way in decision.ways}


def _scores(decisions: Sequence[Decision], models: Mapping[str, _Prices]) -> dict[str, Score]:
    """By model, in the order of CHOOSERS."""
    launches = len(decisions[0].times_s)
    scores: dict[str, Score] = {}
    for model in CHOOSERS:
        rows, ranked, ties = [], [], []
        for decision in decisions:
            if model in models:
                prices = models[model].of(decision)
                best = min(prices.values())
                chosen = [way for way in decision.ways if prices[way] <= best * (1 + TIE)]
                ranked += _ranked(decision, prices)
                ties.append(len(chosen) > 1)
                rows.append(_regrets(decision, chosen))
            elif model in decision.picked and decision.picked[model] in decision.ways:
                rows.append(_regrets(decision, [decision.picked[model]]))
            elif model == "oracle" and launches > 1:
                rows.append(_of_others(decision))
            elif model == "worst":
                rows.append([max(t.values()) / min(t.values()) - 1 for t in _times(decision)])
        if rows:
            scores[model] = _score(rows, ranked if model in models else None, ties)
    return scores


def _times(decision: Decision) -> list[dict[str, float]]:
    """Per launch, the times of the ways that every launch measured."""
    return [{way: times[way] for way in decision.ways} for times in decision.times_s.values()]


def _regrets(decision: Decision, chosen: Sequence[str]) -> list[float]:
    """Per launch; of several chosen ways the mean."""
    return [fmean(t[way] for way in chosen) / min(t.values()) - 1 for t in _times(decision)]


def _of_others(decision: Decision) -> list[float]:
    """Per launch, of the way with the shortest median time in the other launches."""
    all_times = _times(decision)
    regrets = []
    for index, times in enumerate(all_times):
        others = [t for i, t in enumerate(all_times) if i != index]
        best = min(decision.ways, key=lambda way: median(t[way] for t in others))
        regrets.append(times[best] / min(times.values()) - 1)
    return regrets


def _ranked(decision: Decision, prices: Mapping[str, float]) -> list[float]:
    """Per pair of ways that differ clearly: 1 if the prices have the order of the times, 0 if the other,
    1/2 if they are equal."""
    times = {way: median(t[way] for t in _times(decision)) for way in decision.ways}
    right = []
    for slow, fast in itertools.permutations(decision.ways, 2):
        if times[slow] >= TOLD_APART * times[fast]:
            tie = math.isclose(prices[slow], prices[fast], rel_tol=TIE)
            right.append(0.5 if tie else float(prices[slow] > prices[fast]))
    return right


def _score(rows: Sequence[Sequence[float]], ranked: Sequence[float] | None, ties: Sequence[bool]) -> Score:
    """rows: per decision, its regret in each launch."""
    means = np.array([fmean(row) for row in rows])
    flat = [x for row in rows for x in row]
    rng = np.random.default_rng(SEED)
    drawn = means[rng.integers(len(means), size=(REPLICATES, len(means)))].mean(axis=1)
    low, high = np.quantile(drawn, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return Score(
        mean=float(means.mean()),
        interval=(float(low), float(high)),
        worst=max(flat),
        near=fmean(x <= NEAR for x in flat),
        ranked_right=fmean(ranked) if ranked else None,
        ties=fmean(ties) if ranked is not None else None,
        decisions=len(rows),
    )


def _notes(
    runs: Sequence[Run], topology: Mapping[str, Any], launches: int, groups: Sequence[Group]
) -> list[str]:
    notes = []
    if launches < 2:
        notes.append(
            "one launch only: what noise alone costs is not known; measure with --launches 2 or more"
        )
    if any("curves" not in group.scores for group in groups):
        notes.append(
            "the topology holds no curves for some mesh dims: calibrate from a run that has the suites "
            "collectives or redistribute on all of them"
        )
    for group in groups:
        oracle, worst = group.scores.get("oracle"), group.scores["worst"]
        if oracle is not None and oracle.mean > worst.mean / 3:
            notes.append(
                f"{group.library} {group.name} of {group.size_bytes} bytes: the ways can hardly be told apart "
                f"(noise alone costs {oracle.mean:.0%}, the slowest way {worst.mean:.0%})"
            )
    bad = sum(r.suite == "regret" and r.status != "ok" for run in runs for r in run.results)
    if bad:
        notes.append(f"{bad} results of the suite are not ok and left out")
    return notes
