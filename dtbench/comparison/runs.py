"""Two sides, base and new: what became slower, and what cannot be said.

Almost all variance of a host latency lies between processes, so a launch counts as one observation
however many samples it holds: with one launch per side, 32% of identical pairs differ by 5% in
their means. Hence no verdict of slower or faster below five launches on each side (the fewest for
which the exact rank test can reach p < .01: 1/252), unless the sides differ by more than launches of
one build ever did; and `same` only where an interval shows it. What plain torch beside
it shares is no change of the code: then the machine drifted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from dtbench import errors
from dtbench.grouping import group_by
from dtbench.records.exports import Point, relative
from dtbench.records.judged import Change, Judged, Verdict
from dtbench.records.result import CaseKey, Header, Result, Run, estimator_of
from dtbench.stats import (
    FLOORS,
    LAUNCHES_DIFFER,
    MAX_P,
    MIN_CHANGE,
    MIN_CHANGE_S,
    drifts_of,
    has_drifted,
    hodges_lehmann_ratio,
    is_beyond_launches,
    rank_test,
    shares,
)
from dtbench.text.units import format_change, format_difference, plural

MIN_LAUNCHES = 5
# Of one case on a side; the test looks at all pairs, so a hundred thousand launches would never end.
MAX_LAUNCHES = 500
SAME_WITHIN = 0.05
SAME_CONFIDENCE = 0.95
BEYOND_LAUNCHES = f"beyond the {LAUNCHES_DIFFER:g}x that launches of one build have differed by"
ONE_LAUNCH = f"cannot tell: one launch each; use --launches {MIN_LAUNCHES} or more"


class Comparison(Struct, frozen=True, kw_only=True):
    """All cases, in the order of the base's file, and notes on what weakens them. counts: of each verdict.
    nothing_shared: the two sides in a line, where they have no case in common. machines_differ: in what the machines
    of the two sides differ, as no change of the code is told then; empty where they are alike.
    """

    kind: Literal["comparison"] = "comparison"
    exit_code: int
    notes: tuple[str, ...]
    counts: dict[Verdict, int]
    rows: tuple[Judged, ...]
    nothing_shared: str = ""
    machines_differ: str = ""

    def count(self, verdict: Verdict) -> int:
        return self.counts[verdict]

    @property
    def of_single_launches(self) -> bool:
        """Whether each side of all that can be compared is one launch."""
        compared = [row for row in self.rows if row.effect is not None]
        return bool(compared) and all(row.base_launches == row.head_launches == 1 for row in compared)

    @property
    def is_decided(self) -> bool:
        """Whether any case is called slower or faster."""
        return bool(self.count(Verdict.REGRESSION) or self.count(Verdict.IMPROVED))

    @property
    def points(self) -> list[Point]:
        """The new side's times, for other tools; bounds are those of the ratio times the base's time."""
        return [*filter(None, (relative(row, row.verdict, row.reason) for row in self.rows))]

    @property
    def sentence(self) -> str:
        """The end in one line."""
        if self.nothing_shared:
            return self.nothing_shared
        of_each = [f"{n} {v}" for v in Verdict if (n := self.count(v))]
        if self.of_single_launches:
            ratios = [row.ratio for row in self.rows if row.ratio is not None]
            ends = " to ".join(map(format_difference, (min(ratios), max(ratios))))
            of_each = [f"{plural(len(ratios), 'time')}, {ends}"] + [
                words for words in of_each if self.is_decided or not words.endswith(Verdict.INCONCLUSIVE)
            ]
        counts = ", ".join(of_each) or "nothing to compare"
        if self.machines_differ:
            return f"cannot tell: {self.machines_differ} ({counts})"
        return counts if self.is_decided or not self.of_single_launches else f"{ONE_LAUNCH} ({counts})"

    def __repr__(self) -> str:
        from dtbench.comparison.comparison_table import text_of

        return text_of(self)

    def _repr_html_(self) -> str:
        from dtbench.comparison.comparison_table import html_of

        return html_of(self)


def compare(base: Sequence[Run], new: Sequence[Run]) -> Comparison:
    """Every case and impl of either side with a verdict.

    base, new: the files of each side; all launches of all files of a side count as its launches.
    """
    once = [{(run.header.run_id, r.key): r for run in side for r in run.results} for side in (base, new)]
    repeated = sum(len(run.results) for run in (*base, *new)) - sum(map(len, once))
    old, fresh = (group_by(side.values(), lambda r: r.case_key) for side in once)
    del once  # of 200,000 results its keys take 300 MB
    sides = {key: (old.get(key, []), fresh.get(key, [])) for key in old | fresh}
    skipped = {k for k, side in sides.items() if all(r.status == "skipped" for r in chain(*side))}
    judged = tuple(_row(key, *side) for key, side in sides.items() if key not in skipped)
    notes = _notes(base, new, judged)
    if repeated:
        notes.append(f"{plural(repeated, 'result')} of a run that is given twice on a side count once")
    if skipped:
        notes.append(f"{len(skipped)} case(s) were skipped on each side that has them, and are left out")
    moves = _moves(judged)
    drifts = drifts_of((suite, impl, ratio) for (suite, _, impl, _), ratio in moves.items())
    machines_differ = _machines_differ(base, new)
    suites_with_floor = {suite for suite, _, impl, _ in moves if impl in FLOORS}
    rows = tuple(_without_drift(row, moves, drifts, row.suite in suites_with_floor) for row in judged)
    if machines_differ:
        rows = tuple(
            replace(row, verdict=Verdict.INCONCLUSIVE, reason=machines_differ) if row.effect else row
            for row in rows
        )
    if drifts:
        said = ", ".join(f"{format_change(factor)} in {suite}" for suite, factor in drifts.items())
        notes.insert(0, f"the machine drifted: plain torch and all else became {said}; {_SHARED}")
    return Comparison(
        exit_code=_exit_code(rows),
        notes=tuple(dict.fromkeys(notes)),
        counts={verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict},
        rows=rows,
        machines_differ=machines_differ,
        nothing_shared="" if old.keys() & fresh.keys() else _apart(old, fresh),
    )


def _apart(base: Collection[CaseKey], new: Collection[CaseKey]) -> str:
    """Two sides without a case in common, in a line."""
    sides = []
    for name, keys in (("base", base), ("new", new)):
        suites = ", ".join(sorted({suite for suite, *_ in keys}))
        sides.append(f"{name} has {plural(len(keys), 'case')}{f' of {suites}' if suites else ''}")
    return (
        f"nothing to compare: the two sides have no case in common ({'; '.join(sides)}); "
        "a case is matched by its suite, name, implementation and params"
    )


def _exit_code(rows: Sequence[Judged]) -> int:
    """1 a regression, 4 nothing comparable, 3 something undecided, 0 all decided and none slower."""
    there = {row.verdict for row in rows}
    broke = any(row.verdict is Verdict.FAILED and row.base_launches for row in rows)
    if broke or Verdict.REGRESSION in there:
        return errors.EXIT_REGRESSION
    if not there & {Verdict.IMPROVED, Verdict.PASS, Verdict.INCONCLUSIVE}:
        return errors.EXIT_NOTHING
    if there & {Verdict.INCONCLUSIVE, Verdict.MISSING, Verdict.FAILED}:
        return errors.EXIT_INCONCLUSIVE
    return errors.EXIT_OK


def _row(key: CaseKey, base: list[Result], new: list[Result]) -> Judged:
    old_times, new_times = _launch_times(base), _launch_times(new)
    either = [*new, *base][0]
    effect = None
    if old_times and new_times and _why(new, "failed", "wrong") is None:
        verdict, reason, effect = judge_launches(old_times, new_times)
    else:
        verdict, reason = _without_times(base, new)
    suite, name, impl, params = key
    return Judged(
        suite=suite,
        name=name,
        impl=impl,
        params=dict(params),
        verdict=verdict,
        reason=reason,
        size_bytes=either.size_bytes,
        estimator=estimator_of(either),
        base_launches=len(old_times),
        head_launches=len(new_times),
        base_s=median(old_times) if old_times else None,
        head_s=median(new_times) if new_times else None,
        effect=effect,
        tolerance=SAME_WITHIN,
    )


def _without_times(base: list[Result], new: list[Result]) -> tuple[Verdict, str]:
    """The verdict where times do not decide, and why."""
    broken = _why(new, "failed", "wrong")
    if broken is not None:
        return Verdict.FAILED, broken
    if not base:
        return Verdict.NEW, ""
    if _launch_times(base):
        return Verdict.MISSING, _why(new, "skipped") or "not measured in new"
    if not _launch_times(new):
        return Verdict.MISSING, "not timed in base, nor in new"
    broken = _why(base, "failed", "wrong")
    return Verdict.NEW, "skipped in base" if broken is None else f"no good time in base: {broken}"


def judge_launches(base: list[float], new: list[float]) -> tuple[Verdict, str, Change | None]:
    """The verdict, why it is none, and the figures behind it."""
    if min(*base, *new) <= 0:
        return Verdict.INCONCLUSIVE, "a launch measured 0 s: below what the clock resolves", None
    base, new = base[:MAX_LAUNCHES], new[:MAX_LAUNCHES]
    estimate = hodges_lehmann_ratio(base, new)
    test = rank_test(base, new)
    enough = min(len(base), len(new)) >= MIN_LAUNCHES
    change = max(estimate.ratio, 1 / estimate.ratio) - 1
    matters = change > MIN_CHANGE and abs(estimate.ratio - 1) * median(base) > MIN_CHANGE_S
    verdict, reason = Verdict.INCONCLUSIVE, ""
    if enough and matters and test.p_slower < MAX_P and estimate.ratio > 1:
        verdict = Verdict.REGRESSION
    elif enough and matters and test.p_faster < MAX_P and estimate.ratio < 1:
        verdict = Verdict.IMPROVED
    elif _within(estimate.low, estimate.high, estimate.confidence):
        verdict = Verdict.PASS
    elif not enough and is_beyond_launches(base, new):
        verdict = Verdict.REGRESSION if estimate.ratio > 1 else Verdict.IMPROVED
        reason = BEYOND_LAUNCHES
    elif len(base) == len(new) == 1:
        reason = ONE_LAUNCH
    elif not enough:
        reason = f"cannot tell: fewer than {MIN_LAUNCHES} launches on a side"
    else:
        reason = "neither a change of 2% and 0.2 µs nor sameness within 5% is shown"
    return verdict, reason, Change(**vars(estimate), **vars(test))


def _within(low: float | None, high: float | None, confidence: float | None) -> bool:
    """Whether the interval shows sameness; one that covers less than 95% shows nothing."""
    if low is None or high is None or confidence is None or confidence < SAME_CONFIDENCE:
        return False
    return low >= 1 - SAME_WITHIN and high <= 1 + SAME_WITHIN


def _launch_times(results: list[Result]) -> list[float]:
    return [r.estimate_s for r in results if r.status == "ok" and r.estimate_s is not None]


def _why(results: list[Result], *statuses: str) -> str | None:
    """The first result of these statuses, in words; None if there is none."""
    first = next((r for r in results if r.status in statuses), None)
    if first is None:
        return None
    return f"{first.status}: {first.reason}" if first.reason else first.status


_SHARED = "what plain torch shares is no change of the code; `dtbench gate` measures both sides in turn"


def _moves(rows: Sequence[Judged]) -> dict[CaseKey, float]:
    """Of each case new over base; 1 of plain torch whose launches do not show, or one of which does not suggest, that
    it moved."""
    moves = {row.key: row.effect.ratio for row in rows if row.effect is not None}
    for row in rows:
        if row.effect is not None and row.impl in FLOORS:
            p = min(row.effect.p_slower or 1.0, row.effect.p_faster or 1.0)
            enough = min(row.base_launches, row.head_launches) >= MIN_LAUNCHES
            if not (p < MAX_P if enough else has_drifted(row.effect.ratio)):
                moves[row.key] = 1.0
    return moves


def _without_drift(
    row: Judged, moves: Mapping[CaseKey, float], drifts: Mapping[str, float], suite_has_floor: bool
) -> Judged:
    """Slower and faster taken back where plain torch moved by as much: beside the same case, else in the suite; of
    suites without plain torch, in another of the run."""
    if row.verdict not in (Verdict.REGRESSION, Verdict.IMPROVED):
        return row
    suite, name, impl, params = row.key
    beside = [
        moves[key] for floor in FLOORS if floor != impl and (key := (suite, name, floor, params)) in moves
    ]
    if not beside and not suite_has_floor:
        beside = list(drifts.values())
    floor = next((one for one in [*beside, drifts.get(suite, 1.0)] if shares(row.ratio or 1.0, one)), None)
    if floor is None:
        return row
    return replace(
        row,
        verdict=Verdict.INCONCLUSIVE,
        reason=f"the machine drifted: plain torch became {format_change(floor)}, too",
    )


def _notes(base: Sequence[Run], new: Sequence[Run], rows: Sequence[Judged]) -> list[str]:
    notes = [f"{run.path} is incomplete: it has no end line" for run in [*base, *new] if not run.complete]
    few = [min(r.base_launches, r.head_launches) for r in rows if r.effect is not None]
    if few and min(few) < MIN_LAUNCHES:
        notes.append(
            f"as few as {plural(min(few), 'launch')} per side: almost all variance lies between launches, so of cases "
            f"with fewer than {MIN_LAUNCHES} on each side only a change {BEYOND_LAUNCHES} is called slower or faster; "
            f"measure with --launches {MIN_LAUNCHES}, better 10"
        )
    if any(max(r.base_launches, r.head_launches) > MAX_LAUNCHES for r in rows):
        notes.append(f"of a case with more launches the first {MAX_LAUNCHES} of each side are compared")
    if {run.header.run_id for run in base} & {run.header.run_id for run in new}:
        notes.append("the same run is on both sides")
    doubtful = sum(r.status == "ok" and bool(r.reason) for run in [*base, *new] for r in run.results)
    if doubtful:
        notes.append(
            f"{doubtful} good result(s) have a reservation, such as a throttled GPU: see dtbench show"
        )
    names = sorted({name for run in [*base, *new] for name in run.header.env})
    differing = _differing(base, new, lambda header: _facts(header, names))
    return [*notes, *(f"{title}: {sides}" for title, sides, _ in differing)]


def _machines_differ(base: Sequence[Run], new: Sequence[Run]) -> str:
    """In which known facts the machines of the two sides differ, in words; "" where they are alike."""
    differences = [f"{name} {sides}" for name, sides, known in _differing(base, new, _machine) if known]
    return f"the machines differ: {'; '.join(differences)}" if differences else ""


def _differing(
    base: Sequence[Run], new: Sequence[Run], facts_of: Callable[[Header], dict[str, str]]
) -> Iterator[tuple[str, str, bool]]:
    """Facts that are not the same in all runs of both sides: their name, what each side has, and whether every run
    holds it."""
    sides = [[facts_of(run.header) for run in side] for side in (base, new)]
    for name in dict.fromkeys(name for side in sides for facts in side for name in facts):
        old, fresh = (frozenset(facts[name] for facts in side) for side in sides)
        if len(old | fresh) > 1:
            yield name, f"{_listed(old)} in base, {_listed(fresh)} in new", "" not in old | fresh


def _listed(facts: frozenset[str]) -> str:
    text = " and ".join(sorted(fact or "unknown" for fact in facts)) or "nothing"
    return text if len(text) <= 200 else text[:197] + "..."


def _machine(header: Header) -> dict[str, str]:
    """What a time depends on besides the code. An empty text is of a fact that the run does not hold."""
    cpu, gpus = header.machine.cpu, header.machine.gpus
    facts: dict[str, Iterable[object]] = {
        "CPU": [cpu.model],
        "CPU cores": [cpu.usable_cores],
        "GPU": sorted({str(gpu.name) for gpu in gpus if gpu.name}),
        "GPU power limit": sorted({f"{gpu.power_limit_W:g} W" for gpu in gpus if gpu.power_limit_W}),
        "device type": [header.plan.get("device_type")],
        "backend": [header.versions.get("backend")],
        "mesh": [f"{n}={s}" for n, s in zip(header.mesh.dim_names, header.mesh.shape, strict=True)],
        "ranks": [len(header.ranks) or None],
        "hosts": [len({rank.node for rank in header.ranks}) or None],
        "OMP_NUM_THREADS": [header.env.get("OMP_NUM_THREADS", "unset" if header.env else None)],
    }
    return {name: ", ".join(str(p) for p in parts if p is not None) for name, parts in facts.items()}


def _facts(header: Header, variables: Sequence[str]) -> dict[str, str]:
    """What should agree between two sides, or the difference may lie there."""
    cpu, mesh, versions, dtypes = header.machine.cpu, header.mesh, header.versions, header.plan.get("dtypes")
    cores = None if cpu.usable_cores is None else f"{cpu.usable_cores} cores"
    names = ("torch", "python", "backend", "nccl")
    facts: dict[str, Iterable[object]] = {
        "the hosts differ": sorted({str(r.host) for r in header.ranks}),
        "the CPU differs": (cpu.model, cores, cpu.governor),
        "the GPUs differ": sorted(
            {
                f"{gpu.name} at {gpu.power_limit_W} W" if gpu.power_limit_W else str(gpu.name)
                for gpu in header.machine.gpus
            }
        ),
        "the versions differ": (f"{name} {versions[name]}" for name in names if versions.get(name)),
        "the mesh differs": (f"{n}={s}" for n, s in zip(mesh.dim_names, mesh.shape, strict=True)),
        "the dtypes differ": dtypes if isinstance(dtypes, list) else (),
        "one side measured less": ("--quick" if header.plan.get("quick") else "full",),
    }
    facts |= {f"{name} differs": (header.env.get(name, "unset"),) for name in variables}
    return {title: ", ".join(str(p) for p in parts if p is not None) for title, parts in facts.items()}
