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
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from dtbench.cost.calibration.layout import builtin_link
from dtbench.cost.calibration.models import devices_per_host
from dtbench.cost.calibration.setups import device_type
from dtbench.cost.price import times_of
from dtbench.records.cost_model import DecisionGroup, Regret, RegretScore
from dtbench.records.topology import Topology
from dtbench.stats import drawn_again, interval
from dtbench.suite import Result, Run
from dtbench.suite.errors import UsageError
from dtbench.suite.grouping import group_by
from dtbench_core.cost import topology as planner
from dtbench_core.cost.prices import DimPrices, Kind, joint_prices
from dtbench_core.cost.ring import GIB, INTRA_HOST, LOCAL_COPY_US, guessed_links
from dtbench_core.cost.topology import DimConstants, MeshConstants, TopologyError

# Who chooses, in order of what they know.
CHOOSERS: Mapping[str, str] = {
    "greedy": "torch's planner (greedy, its default)",
    "by_cost": "torch's planner by cost",
    "guessed": "built-in constants, hosts as torch guesses them",
    "layout": "built-in constants, hosts as they are",
    "constants": "calibrated constants",
    "curves": "calibrated curves",
    "oracle": "what was fastest in the other launches",
    "worst": "the slowest way",
}

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


@dataclass
class Decision:
    """The candidates for one purpose. picked: torch's planner -> its way. times_s: launch -> way -> seconds."""

    library: str
    name: str
    problem: str
    size_bytes: int
    dtype: str
    picked: dict[str, str] = field(default_factory=dict)
    times_s: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)

    @property
    def ways(self) -> list[str]:
        """Those measured in every launch."""
        first, *others = self.times_s.values()
        return [way for way in first if all(way in times for times in others)]

    @property
    def times(self) -> list[dict[str, float]]:
        """Per launch, the seconds of these ways."""
        return [{way: times[way] for way in self.ways} for times in self.times_s.values()]


def regret(runs: Sequence[Run], topology: Topology) -> Regret:
    """Scores the models on runs of the suite `regret`.

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
    grouped = group_by(decisions, lambda d: (d.library, d.name, d.size_bytes))
    names = [name for name, _ in dims]
    groups = []
    for (library, name, size), own in sorted(grouped.items()):
        models = _models(runs[0], topology, dims, library)
        scores = _scores(own, models, names)
        groups.append(
            DecisionGroup(library=library, name=name, size_bytes=size, launches=launches, scores=scores)
        )
    mesh = ", ".join(f"{name}={ranks}" for name, ranks in dims)
    return Regret(mesh=mesh, groups=tuple(groups), notes=tuple(_notes(runs, launches, groups)))


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
    found: dict[tuple[str, str, str, int, str], Decision] = {}
    launches: set[tuple[str, int]] = set()
    for run in runs:
        for result in run.ok("regret"):
            key, params = _key_of(result), result.params
            decision = found.setdefault(key, Decision(*key))
            launch = (run.header.run_id, result.launch)
            launches.add(launch)
            assert result.time_s is not None
            decision.times_s.setdefault(launch, {})[result.impl] = result.time_s.p25
            asked = [model for model in ("greedy", "by_cost") if f"torch_{model}" in params]
            decision.picked = {model: str(params[f"torch_{model}"]) for model in asked}
    whole = [decision for decision in found.values() if len(decision.times_s) == len(launches)]
    return [decision for decision in whole if len(decision.ways) > 1], len(launches)


def _key_of(result: Result) -> tuple[str, str, str, int, str]:
    params = result.params
    if not result.size_bytes or "problem" not in params or "library" not in params:
        raise UsageError(f"a result of the regret suite lacks its problem, library or size: {dict(params)}")
    dtype = str(params.get("dtype", ""))
    return str(params["library"]), result.name, str(params["problem"]), result.size_bytes, dtype


# ------------------------------------------------------------------------------------- prices


def _models(
    run: Run, topology: Topology, dims: Sequence[tuple[str, int]], library: str
) -> dict[str, MeshConstants]:
    """Each priced model's constants."""
    try:
        calibrated = planner_topology(topology, library).constants(dims)
    except TopologyError as error:
        raise UsageError(f"the topology does not fit the run: {error}") from error
    ranks = [n for _, n in dims]
    per_host, _ = devices_per_host(run.header, device_type(run.header))
    layouts = {dim.name: dim.layout for dim in topology.dims}
    models = {
        "layout": MeshConstants.of_links(
            ranks, [builtin_link(layouts[name]) or INTRA_HOST for name, _ in dims]
        ),
        "constants": dataclasses.replace(calibrated, mesh_dim_curves=(), joint_curves={}),
    }
    if per_host is not None:
        models["guessed"] = MeshConstants.of_links(ranks, guessed_links(ranks, per_host))
    return models | ({"curves": calibrated} if calibrated.mesh_dim_curves else {})


def planner_topology(topology: Topology, library: str) -> planner.Topology:
    """As the core's planner takes it, with the curves of that library's own redistributions."""
    return planner.Topology(
        "the topology",
        topology.device_type,
        topology.base_latency_us,
        tuple(
            DimConstants.of_times(
                dim.name,
                dim.ranks,
                dim.bandwidth_GiBps,
                dim.latency_us_per_hop,
                collectives={name: times_of(curve) for name, curve in dim.collectives.items()},
                changes={name: times_of(curve) for name, curve in dim.transitions.get(library, {}).items()},
            )
            for dim in topology.dims
        ),
    )


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


def _scores(
    decisions: Sequence[Decision], models: Mapping[str, MeshConstants], dims: Sequence[str]
) -> dict[str, RegretScore]:
    """By model, in the order of CHOOSERS."""
    scores: dict[str, RegretScore] = {}
    for model in CHOOSERS:
        rows, ranked, ties = [], [], []
        for decision in decisions:
            ways = decision.ways
            if model in models:
                prices = {way: price_us(way, dims, models[model]) for way in ways}
                best = min(prices.values())
                chosen = [way for way in ways if prices[way] <= best * (1 + TIE)]
                ranked += _ranked(decision, prices)
                ties.append(len(chosen) > 1)
                rows.append(_regrets(decision, chosen))
            elif decision.picked.get(model) in ways:
                rows.append(_regrets(decision, [decision.picked[model]]))
            elif model == "oracle" and len(decision.times_s) > 1:
                rows.append(_of_others(decision))
            elif model == "worst":
                rows.append([max(t.values()) / min(t.values()) - 1 for t in decision.times])
        if rows:
            scores[model] = _score(rows, ranked if model in models else None, ties)
    return scores


def _regrets(decision: Decision, chosen: Sequence[str]) -> list[float]:
    """Per launch; of several chosen ways the mean."""
    return [fmean(t[way] for way in chosen) / min(t.values()) - 1 for t in decision.times]


def _of_others(decision: Decision) -> list[float]:
    """Per launch, of the way with the shortest median time in the other launches."""
    all_times = decision.times
    regrets = []
    for index, times in enumerate(all_times):
        others = [t for i, t in enumerate(all_times) if i != index]
        best = min(decision.ways, key=lambda way: median(t[way] for t in others))
        regrets.append(times[best] / min(times.values()) - 1)
    return regrets


def _ranked(decision: Decision, prices: Mapping[str, float]) -> list[float]:
    """Per pair of ways that differ clearly: 1 if the prices have the order of the times, 0 if the other,
    1/2 if they are equal."""
    times = {way: median(t[way] for t in decision.times) for way in decision.ways}
    right = []
    for slow, fast in itertools.permutations(decision.ways, 2):
        if times[slow] >= TOLD_APART * times[fast]:
            tie = math.isclose(prices[slow], prices[fast], rel_tol=TIE)
            right.append(0.5 if tie else float(prices[slow] > prices[fast]))
    return right


def _score(
    rows: Sequence[Sequence[float]], ranked: Sequence[float] | None, ties: Sequence[bool]
) -> RegretScore:
    """rows: per decision, its regret in each launch."""
    means = np.array([fmean(row) for row in rows])
    flat = [x for row in rows for x in row]
    drawn = drawn_again(means, REPLICATES, np.random.default_rng(SEED)).mean(axis=1)
    low, high = interval(drawn, INTERVAL)
    return RegretScore(
        mean=float(means.mean()),
        interval=(float(low), float(high)),
        worst=max(flat),
        near=fmean(x <= NEAR for x in flat),
        ranked_right=fmean(ranked) if ranked else None,
        ties=fmean(ties) if ranked is not None else None,
        decisions=len(rows),
    )


def _notes(runs: Sequence[Run], launches: int, groups: Sequence[DecisionGroup]) -> list[str]:
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
