"""Summarizes a run in a line per suite, and suggests the next commands.

If the run gives reasons to doubt a line, such as ranks that share cores or scattered samples, these are added.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import geometric_mean, median

from dtbench.engine.progress import params_of
from dtbench.grouping import group_by
from dtbench.records.result import Result, Run
from dtbench.stats import suggests_drift, suite_drifts
from dtbench.stats.dispatch_headline import FEWEST_CASES, PYTORCH_CASES, SINGLE_OPS, added_times, kind_of
from dtbench.stats.exchanges import describe_exchanges
from dtbench.stats.host_time import second_calls, step_growths
from dtbench.stats.layout import shared_cores
from dtbench.suite import CHOOSABLE_IMPLS, Param
from dtbench.suite.case import FLOOR
from dtbench.text.units import format_change, format_seconds, format_spread, plural, significant

# If half of the cases have a larger spread, the machine was busy with something else.
SCATTERED = 0.5
# Minima and lower quartiles of equal code differ by a smaller factor within a launch on an idle machine.
SLOWER = 1.1

# impl -> its median seconds over launches, and the result of the first launch
_Case = Mapping[str, tuple[float, Result]]


def findings(run: Run) -> list[str]:
    """Returns the lines, suite by suite. Unreliable lines follow the others, with the reasons."""
    reliable: list[str] = []
    unreliable: defaultdict[str, list[str]] = defaultdict(list)
    for suite, results in group_by(run.results, lambda r: r.suite).items():
        timed = [r for r in results if r.status == "ok" and r.estimate_s]
        if timed:
            doubts = _doubts(run, timed)
            lines = unreliable[doubts] if doubts else reliable
            lines += [
                f"{suite}: {finding}"
                for finding in (
                    *_findings(suite, _cases(timed)),
                    *describe_host_time(timed),
                    *describe_exchanges(replace(run, results=tuple(timed))),
                )
            ]
    for doubts, lines in unreliable.items():
        reliable += [f"unreliable ({doubts}):", *(f"  {line}" for line in lines)]
    return [*reliable, *_drifts(run)]


def _drifts(run: Run) -> list[str]:
    """Returns the suites whose times, including plain torch's, changed between the earlier and the later launches."""
    half, changes = max((r.launch for r in run.results), default=0) / 2, []
    timed = (r for r in run.results if r.status == "ok" and r.estimate_s)
    for (suite, _, impl, _), launches in group_by(timed, lambda r: r.case_key).items():
        halves = group_by(launches, lambda r: r.launch > half)
        if len(halves) == 2:
            early, late = (median(r.estimate_s or 0.0 for r in halves[is_late]) for is_late in (False, True))
            changes.append((suite, impl, late / early))
    return [
        f"the machine drifted: plain torch and all other impls of {suite} became {format_change(factor)} in the later "
        "launches"
        for suite, factor in suite_drifts(changes).items()
        if suggests_drift(factor)
    ]


def next_commands(run: Run) -> list[str]:
    """Returns the suggested commands, as lines."""
    path = run.path
    has_failures = any(r.status in ("failed", "wrong") for r in run.results)
    commands = [f"dtbench show {path}" + ("  # with the reasons of failures" if has_failures else "")]
    if any(r.params.get("groups") == "together" for r in run.collectives()):
        commands.append(f"dtbench calibrate {path} -o {path.with_suffix('.topology.json')}")
    elif run.ok("bucketer"):
        commands.append(f"dtbench calibrate {path}")
    commands.append(f"dtbench report {path} -o {path.with_suffix('.html')}")
    return [f"{'next:' if not number else '     '} {command}" for number, command in enumerate(commands)]


def _cases(results: Sequence[Result]) -> list[_Case]:
    return [
        {
            impl: (median(launch.estimate_s or 0.0 for launch in launches), launches[0])
            for impl, launches in group_by(case_results, lambda r: r.impl).items()
        }
        for case_results in group_by(results, lambda r: (r.name, tuple(sorted(r.params.items())))).values()
    ]


def _doubts(run: Run, timed: Sequence[Result]) -> str:
    doubts = []
    if any(r.rank_samples_s for r in timed) and (shared := shared_cores(run.header)):
        doubts.append(f"{shared}, so times of collectives include waiting for a core")
    if median(r.spread or 0.0 for r in timed) > SCATTERED:
        doubts.append(f"samples spread by over {SCATTERED:.0%}, see dtbench doctor")
    return "; ".join(doubts)


def _findings(suite: str, cases: Sequence[_Case]) -> Iterator[str]:
    """Yields the findings of a suite; those of the dispatch suite by kind of call, after the time added per op."""
    times = [{impl: seconds for impl, (seconds, _) in case.items()} for case in cases]
    if suite == "dispatch":
        names = [(result.name, result.params) for case in cases for _, result in [next(iter(case.values()))]]
        yield from describe_added_time((*name, seconds) for name, seconds in zip(names, times, strict=True))
        kinds = group_by(zip(names, cases, strict=True), lambda pair: kind_of(*pair[0]))
        yield from (f"{kind}: {_finding([case for _, case in pairs])}" for kind, pairs in kinds.items())
        if any(
            result.name.startswith(PYTORCH_CASES) and "instructions" not in result.counters
            for case in cases
            for _, result in case.values()
        ):
            yield (
                f"{PYTORCH_CASES}* without instruction counts: torch cannot read a hardware counter here; use Linux, "
                "kernel.perf_event_paranoid of at most 2, and a machine that is not virtual"
            )
    else:
        yield _finding(cases)
    yield from describe_slow_floors(times)


def describe_added_time(cases: Iterable[tuple[str, Mapping[str, Param], Mapping[str, float]]]) -> list[str]:
    """Describes the time that dispatch adds to an op, if it is known.

    For example "an op takes 5.00 µs more with torch’s DTensor: median of 12 single ops (add, ...), cached forward calls
    on one mesh dim".

    Args:
        cases: see `added_times`.
    """
    added, ops = added_times(cases)
    names = {"torch": "torch’s DTensor", "core": "dtbench’s core"}
    differences = ", ".join(f"{format_seconds(s)} more with {names[impl]}" for impl, s in added.items())
    count = f"{len(ops)}{f' of {len(SINGLE_OPS)}' if len(ops) < len(SINGLE_OPS) else ''} single ops"
    words = f"an op takes {differences}: median of {count} ({', '.join(ops)}), cached forward calls on one mesh dim"
    return [words] if added else []


def describe_host_time(results: Sequence[Result]) -> list[str]:
    """Describes, per library, the second calls that miss the sharding cache, and the leaks of repeated steps."""
    calls = group_by(second_calls(results), lambda call: call.impl)
    misses = {impl: [call.op for call in counted if call.decisions > 0] for impl, counted in calls.items()}
    words = ", ".join(
        f"{len(ops)} of {len(calls[impl])} with {impl}" + f" ({', '.join(dict.fromkeys(ops))})" * bool(ops)
        for impl, ops in misses.items()
    )
    lines = [f"second calls that miss the sharding cache: {words}"] if words else []
    for (name, steps), growths in group_by(step_growths(results), lambda g: (g.name, g.steps)).items():
        verdicts = dict.fromkeys(f"{growth.impl} {growth.verdict}" for growth in growths)
        lines.append(f"objects and memory kept by {steps} {name}: {'; '.join(verdicts)}")
    return lines


def describe_slow_floors(times: Iterable[Mapping[str, float]]) -> list[str]:
    """Describes the impls that a suite's floor is slower than, by more than noise.

    Args:
        times: impl -> seconds, for each case.
    """
    times = [case for case in times if FLOOR in case]
    floor_is_slower = {
        impl: [case[FLOOR] > SLOWER * case[impl] for case in times if impl in case]
        for impl in CHOOSABLE_IMPLS
    }
    faster = " and ".join(
        f"{impl} in {sum(is_slower)} of {plural(len(is_slower), 'case')}"
        for impl, is_slower in floor_is_slower.items()
        if any(is_slower)
    )
    return [f"the floor ({FLOOR}) is slower than {faster}: it is not a floor there"] if faster else []


def _finding(cases: Sequence[_Case]) -> str:
    """Compares the core with torch if enough cases have both; else describes the fastest and slowest case."""
    ratios = [case["torch"][0] / case["core"][0] for case in cases if {"core", "torch"} <= case.keys()]
    if len(ratios) >= FEWEST_CASES:
        return f"the core is {_speed(ratios)}"
    times = [timed for case in cases for timed in case.values()]
    (low_s, fastest), (high_s, slowest) = (pick(times, key=itemgetter(0)) for pick in (min, max))
    if len(times) == 1:
        return f"{_words(fastest)} {format_seconds(low_s)} {format_spread(fastest.spread)}"
    return (
        f"{plural(len(times), 'result')}, fastest {_words(fastest)} at {format_seconds(low_s)}, "
        f"slowest {_words(slowest)} at {format_seconds(high_s)}"
    )


def _words(result: Result) -> str:
    return " ".join(filter(None, (result.name, params_of(result), result.impl)))


def _speed(ratios: Sequence[float]) -> str:
    """Formats ratios: `1.96x faster than torch.distributed.tensor, geometric mean of 12 cases, from 0.9x to 5.3x`."""
    mean = geometric_mean(ratios)
    factor = significant(max(mean, 1 / mean), 3)
    words = f"{factor}x {'faster' if mean >= 1 else 'slower'} than" if factor != "1.00" else "as fast as"
    span = f"from {significant(min(ratios), 2)}x to {significant(max(ratios), 2)}x"
    return f"{words} torch.distributed.tensor, geometric mean of {plural(len(ratios), 'case')}, {span}"
