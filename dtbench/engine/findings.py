"""What a run found, in a line per suite, and what to type next.

A figure that the run itself gives reasons to doubt is said with them: ranks that share cores, samples that scatter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from statistics import geometric_mean, median

from dtbench.engine.progress import params_of
from dtbench.grouping import group_by
from dtbench.records.result import Result, Run
from dtbench.stats import suggests_drift, suite_drifts
from dtbench.stats.dispatch_headline import FEWEST_CASES, SINGLE_OPS, added_times, kind_of
from dtbench.stats.layout import shared_cores
from dtbench.suite import CHOOSABLE_IMPLS, Param
from dtbench.suite.case import FLOOR
from dtbench.text.units import format_change, format_seconds, format_spread, plural, significant

# Half of the cases scattering by more than this: the machine was busy with something else.
SCATTERED = 0.5
# Minima and lower quartiles of one launch differ by less between equal code on a machine that is not at other work.
SLOWER = 1.1

# impl -> seconds, the median over launches, and the first of these
_Case = Mapping[str, tuple[float, Result]]


def findings(run: Run) -> list[str]:
    """The lines, suite by suite; those that are doubtful stand below the others, with what makes them so."""
    sure: list[str] = []
    doubted: defaultdict[str, list[str]] = defaultdict(list)
    for suite, results in group_by(run.results, lambda r: r.suite).items():
        timed = [r for r in results if r.status == "ok" and r.estimate_s]
        if timed:
            doubts = _doubts(run, timed)
            lines = doubted[doubts] if doubts else sure
            lines += (f"{suite}: {finding}" for finding in _findings(suite, _cases(timed)))
    for doubts, lines in doubted.items():
        sure += [f"unreliable ({doubts}):", *(f"  {line}" for line in lines)]
    return [*sure, *_drifts(run)]


def _drifts(run: Run) -> list[str]:
    """Where plain torch and all beside it took longer, or less, in the later launches than in the earlier."""
    half, moves = max((r.launch for r in run.results), default=0) / 2, []
    timed = (r for r in run.results if r.status == "ok" and r.estimate_s)
    for (suite, _, impl, _), launches in group_by(timed, lambda r: r.case_key).items():
        parts = group_by(launches, lambda r: r.launch > half)
        if len(parts) == 2:
            early, late = (median(r.estimate_s or 0.0 for r in parts[is_late]) for is_late in (False, True))
            moves.append((suite, impl, late / early))
    return [
        f"the machine drifted: plain torch and all else of {suite} became {format_change(factor)} in the later launches"
        for suite, factor in suite_drifts(moves).items()
        if suggests_drift(factor)
    ]


def next_commands(run: Run) -> list[str]:
    """What a reader may want to type, as lines."""
    path = run.path
    bad = any(r.status in ("failed", "wrong") for r in run.results)
    commands = [f"dtbench show {path}" + ("  # with the reasons of failures" if bad else "")]
    if any(r.params.get("groups") == "together" for r in run.ok("collectives")):
        commands.append(f"dtbench calibrate {path} -o {path.with_suffix('.topology.json')}")
    if run.ok("bucketer"):
        commands.append(f"dtbench calibrate {path}")
    commands.append(f"dtbench report {path} -o {path.with_suffix('.html')}")
    return [f"{'next:' if not number else '     '} {command}" for number, command in enumerate(commands)]


def _cases(results: Sequence[Result]) -> list[_Case]:
    by_impl = [
        group_by(of, lambda r: r.impl)
        for of in group_by(results, lambda r: (r.name, tuple(sorted(r.params.items())))).values()
    ]
    return [{i: (median(r.estimate_s or 0.0 for r in of), of[0]) for i, of in one.items()} for one in by_impl]


def _doubts(run: Run, timed: Sequence[Result]) -> str:
    doubts = []
    if any(r.rank_samples_s for r in timed) and (shared := shared_cores(run.header)):
        doubts.append(f"{shared}, so times of collectives include waiting for a core")
    if median(r.spread or 0.0 for r in timed) > SCATTERED:
        doubts.append(f"samples spread by over {SCATTERED:.0%}, see dtbench doctor")
    return "; ".join(doubts)


def _findings(suite: str, cases: Sequence[_Case]) -> Iterator[str]:
    """Of the dispatch suite each kind of call by itself, after what is added to a single op."""
    times = [{impl: seconds for impl, (seconds, _) in of.items()} for of in cases]
    if suite == "dispatch":
        names = [(r.name, r.params) for of in cases for _, r in [next(iter(of.values()))]]
        yield from describe_added_time((*name, of) for name, of in zip(names, times, strict=True))
        kinds = group_by(zip(names, cases, strict=True), lambda named: kind_of(*named[0]))
        yield from (f"{kind}: {_finding([case for _, case in of])}" for kind, of in kinds.items())
    else:
        yield _finding(cases)
    yield from describe_slow_floors(times)


def describe_added_time(cases: Iterable[tuple[str, Mapping[str, Param], Mapping[str, float]]]) -> list[str]:
    """`an op takes 5.00 µs more with torch’s DTensor, 3.28 µs more with dtbench’s core: median of 12 single ops (add,
    ...), cached forward calls on one mesh dim`, or nothing. cases: see `added_times`."""
    added, ops = added_times(cases)
    names = {"torch": "torch’s DTensor", "core": "dtbench’s core"}
    each = ", ".join(f"{format_seconds(s)} more with {names[impl]}" for impl, s in added.items())
    of = f"{len(ops)}{f' of {len(SINGLE_OPS)}' if len(ops) < len(SINGLE_OPS) else ''} single ops"
    words = f"an op takes {each}: median of {of} ({', '.join(ops)}), cached forward calls on one mesh dim"
    return [words] if added else []


def describe_slow_floors(times: Iterable[Mapping[str, float]]) -> list[str]:
    """What a suite's floor is slower than, where it is by more than noise. times: of each case, seconds by impl."""
    times = [of for of in times if FLOOR in of]
    below = []
    for impl in CHOOSABLE_IMPLS:
        slower = [of[FLOOR] > SLOWER * of[impl] for of in times if impl in of]
        if any(slower):
            below.append(f"{impl} in {sum(slower)} of {plural(len(slower), 'case')}")
    words = f"the floor ({FLOOR}) is slower than {' and '.join(below)}: it is no floor there"
    return [words] if below else []


def _finding(cases: Sequence[_Case]) -> str:
    """The core against torch where enough cases have both; else from the fastest case on."""
    ratios = [c["torch"][0] / c["core"][0] for c in cases if {"core", "torch"} <= c.keys()]
    if len(ratios) >= FEWEST_CASES:
        return f"the core is {_speed(ratios)}"
    times = [timed for case in cases for timed in case.values()]
    (low_s, fastest), (high_s, slowest) = (of(times, key=itemgetter(0)) for of in (min, max))
    if len(times) == 1:
        return f"{_words(fastest)} {format_seconds(low_s)} {format_spread(fastest.spread)}"
    return (
        f"{plural(len(times), 'result')}, fastest {_words(fastest)} at {format_seconds(low_s)}, "
        f"slowest {_words(slowest)} at {format_seconds(high_s)}"
    )


def _words(result: Result) -> str:
    return " ".join(filter(None, (result.name, params_of(result), result.impl)))


def _speed(ratios: Sequence[float]) -> str:
    """`1.96x faster than torch.distributed.tensor, geometric mean of 12 cases, from 0.9x to 5.3x`."""
    mean = geometric_mean(ratios)
    factor = significant(max(mean, 1 / mean), 3)
    words = f"{factor}x {'faster' if mean >= 1 else 'slower'} than" if factor != "1.00" else "as fast as"
    span = f"from {significant(min(ratios), 2)}x to {significant(max(ratios), 2)}x"
    return f"{words} torch.distributed.tensor, geometric mean of {plural(len(ratios), 'case')}, {span}"
