"""Algorithm and protocol per size range for NCCL's example tuner plugin, only where launches show that they win.

Rows of the plugin's file, `collective,min,max,algo,proto,channels,nNodes,nRanks,pipeOps,regBuff`, as its plugin.cc
reads them (NCCL 2.27 to 2.29, plugins/tuner/example): bytes of the larger of what a rank sends and receives, both
ends included; -1 matches anything; the first row that matches counts; lines with # are comments; a collective that
it does not know it takes for allreduce, an algorithm for ring, a protocol for simple, so none such is written.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from dtbench.stats import Effect, alpha_of, effect_of, smallest_change
from dtbench.suite import SWEEP_ARM, Run
from dtbench.suite.errors import UsageError
from dtbench.text.variables import parse_variables

COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
_FORCED = ("NCCL_ALGO", "NCCL_PROTO")
# NCCL's own cap of channels; an arm that sets it says how many its times are of.
_CHANNELS = "NCCL_MAX_NCHANNELS"
HEAD = """\
# Written by `dtbench settings`. collective,min,max,algo,proto,channels,nNodes,nRanks,pipeOps,regBuff
# Read by NCCL's example tuner plugin: NCCL_TUNER_CONFIG_FILE. It sets one channel where none is given (channels -1, and
# sizes that no row matches): measure with the plugin loaded, or with a plugin that leaves channels alone.
"""

Arm = tuple[tuple[str, str], ...]  # variables and their values; () as it comes
# Collective, ranks, dtype and whatever else tells cases apart but for the size.
Case = tuple[tuple[str, object], ...]
Times = Mapping[tuple[Case, int], Mapping[Arm, Sequence[float]]]


@dataclass(frozen=True)
class Winner:
    """The arm of a size; () where none is shown to win. effect: against the launches as they come."""

    case: Case
    size: int
    arm: Arm
    effect: Effect | None


@dataclass(frozen=True)
class Range:
    """winners: of neighbouring sizes, ascending, at least one."""

    case: Case
    arm: Arm
    winners: tuple[Winner, ...]


def arm_of(env: Mapping[str, str]) -> Arm:
    """What `dtbench settings --sweep` wrote; of a run that it did not start, the variables that the plugin can set."""
    if SWEEP_ARM in env:
        return tuple(sorted(parse_variables(env[SWEEP_ARM]).items()))
    return tuple((name, env[name]) for name in sorted((*_FORCED, _CHANNELS)) if name in env)


def times_of(runs: Iterable[tuple[Arm | None, Run]]) -> Times:
    """(case, size in bytes) -> arm -> a time per launch, seconds, in the order of the files. An arm that is None is
    read from the run's header. Of a collective measured in several ways (dtypes, modes), the one over most sizes: the
    plugin does not tell them apart.

    Raises:
        UsageError: a header with an arm that is no list of variables.
    """
    found: defaultdict[tuple[Case, int], defaultdict[Arm, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for given, run in runs:
        arm = given if given is not None else arm_of(run.header.env)
        for r in run.ok("collectives"):
            if r.name in COLLECTIVES and r.estimate_s and r.size_bytes:
                rest = {k: v for k, v in r.params.items() if k != "size"} | {"collective": r.name}
                found[tuple(sorted(rest.items())), r.size_bytes][arm].append(r.estimate_s)
    sizes = Counter(case for case, _ in found)
    best: dict[tuple[object, ...], Case] = {}
    for case in sizes:
        what = tuple(dict(case).get(name) for name in ("collective", "ranks"))
        best[what] = max(best.get(what, case), case, key=sizes.__getitem__)
    return {key: of for key, of in found.items() if key[0] in best.values()}


def winners_of(times: Times) -> list[Winner]:
    """The arm of every case and size that the gate's test shows to be faster than the launches as they come: a paired
    signed-rank test, its level split over all tests of the sweep, and a change that matters. Of several the fastest.

    Raises:
        UsageError: no launches without forced variables, or too few of them to show anything.
    """
    tests = [(key, arm) for key, arms in times.items() if () in arms for arm in arms if arm]
    if not tests:
        raise UsageError(
            "nothing to choose from: give launches as they come and others with forced NCCL_ALGO and NCCL_PROTO, "
            "of the same collectives; `dtbench settings --sweep` plans them"
        )
    alpha = alpha_of(len(tests), 1)
    most = max(min(len(times[key][()]), len(times[key][arm])) for key, arm in tests)
    least = math.floor(-math.log2(alpha)) + 1  # n pairs that all agree have p = 2 ** -n
    if most < least:
        raise UsageError(
            f"got {most} launches of an arm, expected at least {least}: among {len(tests)} arms and sizes fewer show "
            "no winner; measure more launches, or fewer sizes or arms"
        )
    found = []
    for (case, size), arms in sorted(times.items(), key=lambda item: (str(item[0][0]), item[0][1])):
        base = arms.get((), [])
        effects = []
        for arm, head in arms.items():
            n = min(len(base), len(head))
            if arm and n:
                effect = effect_of(base[:n], head[:n])
                if effect.p_faster < alpha and 1 - effect.ratio > smallest_change(min(base)):
                    effects.append((effect.ratio, arm, effect))
        best = min(effects, default=None)
        found.append(Winner(case, size, best[1] if best else (), best[2] if best else None))
    return found


def ranges_of(winners: Sequence[Winner]) -> list[Range]:
    """Neighbouring sizes with one winner, from the first to the last that was measured."""
    return [
        Range(case, arm, tuple(group))
        for (case, arm), group in groupby(winners, key=lambda w: (w.case, w.arm))
    ]


def rows_of(winners: Sequence[Winner], nodes: int = -1) -> list[str]:
    """The plugin's rows, one per range that has a winner.

    Raises:
        UsageError: a winner that forces something else than one algorithm and one protocol that the plugin knows.
    """
    rows = []
    for one in ranges_of(winners):
        arm, sizes = one.arm, [w.size for w in one.winners]
        if not arm:
            continue
        forced, of = dict(arm), dict(one.case)
        algorithm, protocol = (forced.get(name, "").lower() for name in _FORCED)
        if algorithm.replace("nvlstree", "nvls_tree") not in ALGORITHMS or protocol not in PROTOCOLS:
            raise UsageError(
                f"the winning arm {','.join('='.join(pair) for pair in arm)} is nothing that the tuner plugin can set: "
                "expected NCCL_ALGO and NCCL_PROTO with one value each, such as NCCL_ALGO=Ring,NCCL_PROTO=LL128"
            )
        algorithm = algorithm.replace("nvlstree", "nvls_tree")
        fields = (COLLECTIVES[str(of["collective"])], sizes[0], sizes[-1], algorithm, protocol)
        rest = (forced.get(_CHANNELS, "-1"), nodes, of.get("ranks", -1), -1, -1)
        rows.append(",".join(map(str, (*fields, *rest))))
    return rows
