"""What a run found, in a line or two per suite, and what to type next.

A figure that the run itself gives reasons to doubt is followed by them: ranks that share cores, samples that scatter, a
best size at the edge of its sweep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean, median

from dtbench.records.layout import crowded
from dtbench.suite import Result, Run
from dtbench.suite.grouping import group_by
from dtbench.text.units import (
    format_bandwidth,
    format_seconds,
    format_size,
    format_spread,
    plural,
    significant,
)

# Half of the cases scattering by more than this: the machine was busy with something else.
SCATTERED = 0.5
# A rate still growing by more than this at the last step of a sweep has its best beyond it.
STILL_RISING = 0.05
# Of a collective, as in training: all groups of a mesh dim at once, each call awaited.
REGIME = ("together", "isolated")

_Case = Mapping[str, Sequence[Result]]  # impl -> its launches


def findings(run: Run) -> list[str]:
    """The lines, suite by suite; those that are doubtful stand below the others, with what makes them so."""
    sure: list[str] = []
    doubted: defaultdict[str, list[str]] = defaultdict(list)
    for suite, results in group_by(run.results, lambda r: r.suite).items():
        timed = [r for r in results if r.status == "ok" and r.estimate_s]
        if timed:
            cases = _cases(timed)
            lines = _FINDERS.get(suite, _in_general)(cases) or _in_general(cases)
            doubts = _doubts(run, timed)
            (doubted[doubts] if doubts else sure).extend(f"{suite}: {line}" for line in lines)
    for doubts, lines in doubted.items():
        sure += [f"with doubts, as {doubts}:", *(f"  {line}" for line in lines)]
    return sure


def next_commands(run: Run) -> list[str]:
    """What a reader may want to type, as lines."""
    path = run.path
    bad = any(r.status in ("failed", "wrong") for r in run.results)
    commands = [f"dtbench show {path}" + ("  # with the reasons of what is not ok" if bad else "")]
    if any(r.params.get("groups") == "together" for r in run.ok("collectives")):
        commands.append(f"dtbench calibrate {path} -o {path.with_suffix('.topology.json')}")
    if run.ok("bucketer"):
        commands.append(f"dtbench calibrate {path}")
    commands.append(f"dtbench report {path} -o {path.with_suffix('.html')}")
    return [f"{'next:' if not number else '     '} {command}" for number, command in enumerate(commands)]


def _cases(results: Sequence[Result]) -> list[_Case]:
    cases = group_by(results, lambda r: (r.name, tuple(sorted(r.params.items()))))
    return [group_by(of, lambda r: r.impl) for of in cases.values()]


def _time_s(case: _Case, impl: str) -> float | None:
    """Over launches; None where the case lacks it."""
    return median(r.estimate_s or 0.0 for r in case[impl]) if impl in case else None


def _rate_Bps(results: Sequence[Result]) -> float | None:  # noqa: N802 - bytes per second
    rates = [r.busbw_Bps or r.algbw_Bps for r in results]
    return median(rate for rate in rates if rate) if any(rates) else None


def _doubts(run: Run, timed: Sequence[Result]) -> str:
    doubts = []
    if any(r.rank_samples_s for r in timed) and (shared := crowded(run.header)):
        doubts.append(f"{shared}, so times of collectives are not those of the links")
    if median(r.spread or 0.0 for r in timed) > SCATTERED:
        doubts.append(f"samples scatter by over {SCATTERED:.0%} (see dtbench doctor)")
    return " and ".join(doubts)


def _in_general(cases: Sequence[_Case]) -> list[str]:
    """The core against torch where both are there, else from the fastest case to the slowest."""
    pairs = [(core, torch) for c in cases if (core := _time_s(c, "core")) and (torch := _time_s(c, "torch"))]
    if pairs:
        return [f"the core is {_speed([torch / core for core, torch in pairs])}"]
    times = [
        (time_s, of[0]) for case in cases for of in case.values() if (time_s := _time_s(case, of[0].impl))
    ]
    (low_s, fastest), (high_s, slowest) = min(times, key=_first), max(times, key=_first)
    if len(times) == 1:
        return [f"{_words(fastest)} {format_seconds(low_s)} {format_spread(fastest.spread)}"]
    ends = (f"{format_seconds(t)} ({_words(r)})" for t, r in ((low_s, fastest), (high_s, slowest)))
    return [f"{plural(len(times), 'time')} from {' to '.join(ends)}"]


def _first(pair: tuple[float, Result]) -> float:
    return pair[0]


def _words(result: Result) -> str:
    params = " ".join(
        f"{k}={format_size(v) if k == 'size' and isinstance(v, int) else v}" for k, v in result.params.items()
    )
    return " ".join(filter(None, (result.name, params, result.impl)))


def _speed(ratios: Sequence[float]) -> str:
    """`1.96x faster than torch.distributed.tensor over 12 cases (0.9x to 5.3x)`."""
    mean = geometric_mean(ratios)
    factor = f"{significant(max(mean, 1 / mean), 3)}x {'faster' if mean >= 1 else 'slower'}"
    span = (
        f", from {significant(min(ratios), 2)}x to {significant(max(ratios), 2)}x" if len(ratios) > 1 else ""
    )
    return f"{factor} than torch.distributed.tensor over {plural(len(ratios), 'case')}{span}"


def _dispatch(cases: Sequence[_Case]) -> list[str]:
    """What an op costs beyond the plain op, of calls whose decision is cached."""
    cached = [c for c in cases if next(iter(c.values()))[0].params.get("call") == "cached"]
    forward = [c for c in cached if next(iter(c.values()))[0].params.get("pass") == "forward"]
    lines, counted = [], 0
    for impl, who in (("torch", "torch's DTensor"), ("core", "dtbench's core")):
        added = [
            mine - floor
            for case in forward or cached
            if (mine := _time_s(case, impl)) and (floor := _time_s(case, "local"))
        ]
        if added:
            lines.append(f"{format_seconds(max(median(added), 0.0))} more with {who}")
            counted = max(counted, len(added))
    calls = plural(counted, "cached call")
    added_line = f"an op takes {', '.join(lines)} than on plain tensors (median of {calls})"
    return ([added_line] if lines else []) + _in_general(cached or cases)


def _collectives(cases: Sequence[_Case]) -> list[str]:
    """Of the first collective the bus bandwidth of the largest size and the time of the smallest per mesh dim, under
    the load of training where that was measured."""
    results = [r for case in cases for of in case.values() for r in of]
    regimes = group_by(results, lambda r: (r.params.get("groups"), r.params.get("mode")))
    name, of = next(iter(group_by(regimes.get(REGIME) or results, lambda r: r.name).items()))
    dims = group_by(of, lambda r: str(r.params.get("mesh_dim")))
    parts = []
    for end, title, figure in ((max, "busbw ", _shown_rate), (min, "", _shown_time)):
        sizes = {dim: end(r.size_bytes or 0 for r in members) for dim, members in dims.items()}
        shown = {
            dim: f"{text} over {dim}"
            for dim, members in dims.items()
            if (text := figure([r for r in members if (r.size_bytes or 0) == sizes[dim]])) != "-"
        }
        at = group_by(shown, sizes.__getitem__)  # a run within a budget has other sizes of each dim
        by_size = [f"{', '.join(shown[dim] for dim in of)} at {format_size(size)}" for size, of in at.items()]
        if by_size:
            parts.append(f"{title}{', '.join(by_size)}")
    return [f"{name} {'; '.join(parts)}"]


def _shown_rate(of: Sequence[Result]) -> str:
    return format_bandwidth(_rate_Bps(of))


def _shown_time(of: Sequence[Result]) -> str:
    return format_seconds(median(r.estimate_s or 0.0 for r in of))


def _bucketer(cases: Sequence[_Case]) -> list[str]:
    """The rate of the best bucket size, unless it is the edge of its sweep."""
    firsts = [(case, next(iter(case.values()))[0]) for case in cases if {"core", "unbucketed"} <= {*case}]
    groups = group_by(
        firsts, lambda pair: tuple(pair[1].params.get(k) for k in ("mesh_dim", "dtype", "tensor_bytes"))
    )
    lines = []
    for (dim, _, tensor), of in groups.items():
        sweep = sorted(of, key=lambda pair: int(pair[1].params.get("bucket_bytes", 0)))
        rates = [_rate_Bps(case["core"]) or 0.0 for case, _ in sweep]
        best = rates.index(max(rates))
        rising = best == len(sweep) - 1 and len(sweep) > 1 and rates[-1] > (1 + STILL_RISING) * rates[-2]
        core_s, plain_s = (_time_s(sweep[best][0], impl) or 0.0 for impl in ("core", "unbucketed"))
        bucket = format_size(int(sweep[best][1].params.get("bucket_bytes", 0)))
        where = f"tensors of {format_size(int(tensor or 0))} over {dim}"
        gain = f"{significant(plain_s / core_s, 3)}x faster in buckets of {bucket} than unbucketed"
        edge = ", the largest measured: larger may be faster" if rising or len(sweep) == 1 else ""
        lines.append(f"{where}: {gain}{edge}")
    return lines[:2]


_FINDERS: Mapping[str, Callable[[Sequence[_Case]], list[str]]] = {
    "dispatch": _dispatch,
    "collectives": _collectives,
    "bucketer": _bucketer,
}
