"""Compares two topologies: what changed in the setup, in latency and bandwidth per mesh dim, and in the times of calls.

Each size that both topologies have is tested like a case of `dtbench compare`, on the launches' own times. Topologies
of older versions lack these; then the 90% intervals decide, see `compare_intervals`.

A topology has hundreds of sizes, and some of them would pass a test by chance. So the Benjamini-Hochberg procedure
selects among all sizes of all calls: of the sizes called slower, at most 5% are expected to be unchanged; the same
holds for faster. Sizes of a call share their launches, so their tests depend positively on each other. The procedure
holds for such tests (Benjamini & Yekutieli, "The Control of the False Discovery Rate in Multiple Testing under
Dependency", 2001).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from msgspec import Struct
from msgspec.structs import replace

from dtbench.comparison.compare_launches import SAME_WITHIN, SINGLE_LAUNCH, compare_launches
from dtbench.comparison.run_comparison import (
    Comparison,
    exit_code_of,
    format_machine_differences,
    print_comparison,
)
from dtbench.grouping import group_by
from dtbench.records.comparison import Change, ComparedCase, Verdict
from dtbench.records.topology import CalibratedTopology, Dim, MeasuredCurve, TableRow
from dtbench.stats import FAMILY_P
from dtbench.text.terminal import MAX_ROWS, new_console, print_columns, print_line
from dtbench.text.units import format_interval, format_size, interval_or_none, plural, significant

# Facts without which times say nothing about a change of the same links.
_MACHINE_FACTS = ("device type", "GPU")
SAME_DATA = "the same measurement on both sides"
# A value, and its 90% interval over new launches; None if there is no interval.
Bounded = tuple[float, tuple[float, float] | None]
_CallKey = tuple[str, str, str]  # mesh dim, implementation, name
_Call = tuple[Dim, MeasuredCurve]
_BY_CHANCE = "cannot tell: may be chance among many sizes; measure with more launches"


class ComparedConstant(Struct, frozen=True, kw_only=True):
    """The fitted latency or bandwidth of a mesh dim in both topologies.

    Attributes:
        mesh_dim: name of the mesh dim.
        name: "latency [us/hop]" or "bandwidth [GiB/s]".
        base: value and 90% interval in base.
        head: the same for head.
        verdict: slower for a higher latency or a lower bandwidth.
        reason: explains a verdict that needs it, else "".
    """

    mesh_dim: str
    name: str
    base: Bounded
    head: Bounded
    verdict: Verdict
    reason: str = ""


class ComparedSize(Struct, frozen=True, kw_only=True):
    """The time of a call at one size in both topologies.

    Attributes:
        case: the comparison; its suite is the mesh dim.
        base: the size's times in base, with their 90% interval and the time of each launch.
        head: the same for head.
    """

    case: ComparedCase
    base: TableRow
    head: TableRow


class TopologyComparison(Comparison, frozen=True, kw_only=True):
    """The comparison of two topologies.

    Its rows are the calls, each with the figures of the size that changed most. Their suite is the mesh dim.

    Attributes:
        setup: fact -> values in base and head that differ; "" for a value that is not recorded.
        constants: latency and bandwidth of each mesh dim. They do not affect the exit code.
        sizes: all sizes that both topologies have.
    """

    setup: dict[str, tuple[str, str]]
    constants: tuple[ComparedConstant, ...]
    sizes: tuple[ComparedSize, ...]


def compare_topologies(base: CalibratedTopology, head: CalibratedTopology) -> TopologyComparison:
    """Compares the setups, the constants of each mesh dim, and the times of all calls."""
    setup = {
        name: (base_value, head_value)
        for (name, base_value), head_value in zip(_facts(base).items(), _facts(head).values(), strict=True)
        if base_value != head_value
    }
    machines_differ = format_machine_differences(
        [f"{name} {_sides(setup[name])}" for name in _MACHINE_FACTS if all(setup.get(name, ("",)))]
    )
    base_dims, head_dims = ({dim.name: dim for dim in topology.dims} for topology in (base, head))
    base_calls, head_calls = _calls(base, head_dims.keys()), _calls(head, base_dims.keys())
    shared = [key for key in base_calls if key in head_calls]
    sizes = _discount_chance(
        [
            size
            for key in shared
            for size in _compare_sizes(key, base_calls[key], head_calls[key], machines_differ)
        ]
    )
    cases_of_call = group_by((size.case for size in sizes), lambda case: (case.suite, case.impl, case.name))
    left_out = {dim.name: dim.reason for dim in (*base.left_out, *head.left_out)}
    rows = [_call_row(key, cases_of_call.get(key, [])) for key in shared]
    rows += [
        _row(key, Verdict.MISSING if key in base_calls else Verdict.NEW, left_out.get(key[0], ""))
        for key in base_calls | head_calls
        if key not in shared
    ]
    return TopologyComparison(
        kind="topology comparison",
        exit_code=exit_code_of(rows),
        notes=_notes(base, head, setup, [size.case for size in sizes]),
        counts={verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict},
        rows=tuple(rows),
        nothing_shared=""
        if shared
        else "nothing to compare: the two topologies have no call in common; their mesh dims are "
        + _sides((", ".join(base_dims), ", ".join(head_dims))),
        machines_differ=machines_differ,
        setup=setup,
        constants=tuple(
            constant
            for name, dim in base_dims.items()
            if name in head_dims
            for constant in _compare_constants(dim, head_dims[name], machines_differ)
        ),
        sizes=tuple(sizes),
    )


def _facts(topology: CalibratedTopology) -> dict[str, str]:
    """Returns name -> value of the facts about a setup, the same names for all topologies; "" for a missing value."""
    facts: dict[str, Iterable[object]] = {
        "calibrated": [topology.created],
        "device type": [topology.device_type],
        "backend": [topology.backend],
        "mesh": [
            f"{name}={size}" for name, size in zip(topology.mesh.dim_names, topology.mesh.shape, strict=True)
        ],
        "hosts": [run.hosts for run in topology.runs],
        "GPU": [run.gpu for run in topology.runs],
        "driver": [run.driver for run in topology.runs],
        **{
            name: [run.versions.get(name) for run in topology.runs]
            for name in ("nccl", "cuda", "torch", "python", "dtbench")
        },
    }
    return {name: ", ".join(dict.fromkeys(str(value) for value in facts[name] if value)) for name in facts}


def _sides(values: tuple[str, str]) -> str:
    return f"{values[0] or 'unknown'} in base, {values[1] or 'unknown'} in head"


def _calls(topology: CalibratedTopology, other_dims: Set[str]) -> dict[_CallKey, _Call]:
    """Returns the calls of a topology. A mesh dim that the other topology lacks has a single entry for all calls."""
    return {
        (dim.name, impl, name) if dim.name in other_dims else (dim.name, "", "all calls"): (dim, curve)
        for dim in topology.dims
        for impl, curves in {"": dim.collectives, **dim.transitions}.items()
        for name, curve in curves.items()
    }


def _compare_constants(base: Dim, head: Dim, machines_differ: str) -> Iterator[ComparedConstant]:
    obstacle = machines_differ or _differences(base, head)
    launches = min(base.fitted_on.launches, head.fitted_on.launches)
    latency: list[Bounded] = [(dim.latency_us_per_hop, dim.latency_interval) for dim in (base, head)]
    bandwidth: list[Bounded] = [
        (dim.bandwidth_GiBps, None if dim.bandwidth_is_lower_bound else dim.bandwidth_interval)
        for dim in (base, head)
    ]
    for name, sides, (verdict, reason, _) in (
        ("latency [us/hop]", latency, compare_intervals(latency[0], latency[1], launches)),
        # The sides are swapped, since a lower bandwidth is slower.
        ("bandwidth [GiB/s]", bandwidth, compare_intervals(bandwidth[1], bandwidth[0], launches)),
    ):
        yield ComparedConstant(
            mesh_dim=base.name,
            name=name,
            base=sides[0],
            head=sides[1],
            verdict=Verdict.INCONCLUSIVE if obstacle else verdict,
            reason=obstacle or reason,
        )


def compare_intervals(base: Bounded, head: Bounded, launches: int) -> tuple[Verdict, str, Change | None]:
    """Compares two values of which only 90% intervals over new launches are known.

    They differ if the intervals are disjoint, and are the same if the bounds of their ratio lie within 5% of 1.

    Args:
        launches: the smaller number of launches behind the intervals. One launch does not show how launches vary.

    Returns:
        (verdict, reason, change). The change is None without two intervals above 0.
    """
    (base_value, base_bounds), (head_value, head_bounds) = base, head
    if base == head:
        return Verdict.SAME, SAME_DATA, None
    if launches < 2:
        return Verdict.INCONCLUSIVE, SINGLE_LAUNCH, None
    if not (base_bounds and head_bounds) or min(base_value, head_value, *base_bounds, *head_bounds) <= 0:
        return Verdict.INCONCLUSIVE, "cannot tell: a side has no interval, or one that reaches 0", None
    low, high = head_bounds[0] / base_bounds[1], head_bounds[1] / base_bounds[0]
    change = Change(ratio=head_value / base_value, low=low, high=high)
    if low >= 1 - SAME_WITHIN and high <= 1 + SAME_WITHIN:
        return Verdict.SAME, "", change
    if low > 1 or high < 1:
        return Verdict.SLOWER if low > 1 else Verdict.FASTER, "", change
    return Verdict.INCONCLUSIVE, "cannot tell: the intervals overlap", change


def _differences(base: Dim, head: Dim, *dtypes: str) -> str:
    """Describes how the groups of a mesh dim or the dtypes of a call differ; "" if the times can be compared."""
    facts = {
        "ranks": (base.ranks, head.ranks),
        "groups": (base.groups, head.groups),
        "groups at work": (base.groups_sharing, head.groups_sharing),
        "hosts per group": (base.layout.hosts_per_group, head.layout.hosts_per_group),
        "dtype": dtypes,
    }
    return "; ".join(
        f"{name} {values[0]} in base, {values[1]} in head"
        for name, values in facts.items()
        if None not in values and len(set(values)) > 1
    )


def _compare_sizes(key: _CallKey, base: _Call, head: _Call, machines_differ: str) -> list[ComparedSize]:
    """Compares a call at each size that both topologies have, without regard to chance among many sizes."""
    (base_dim, base_curve), (head_dim, head_curve) = base, head
    obstacle = machines_differ or _differences(base_dim, head_dim, base_curve.dtype, head_curve.dtype)
    head_rows = {row.size_bytes: row for row in head_curve.table}
    return [
        _compare_size(
            key, row, head_rows[row.size_bytes], (base_curve.launches, head_curve.launches), obstacle
        )
        for row in base_curve.table
        if row.size_bytes in head_rows
    ]


def _compare_size(
    key: _CallKey, base: TableRow, head: TableRow, launches: tuple[int, int], obstacle: str
) -> ComparedSize:
    base_s, head_s = ([us * 1e-6 for us in row.launch_us if us is not None] for row in (base, head))
    base_us, head_us = ((row.measured_us, interval_or_none(row.low_us, row.high_us)) for row in (base, head))
    verdict, reason, effect = (
        compare_launches(base_s, head_s)
        if base_s and head_s
        else compare_intervals(base_us, head_us, min(launches))
    )
    if obstacle or base == head:
        verdict, reason = (Verdict.INCONCLUSIVE, obstacle) if obstacle else (Verdict.SAME, SAME_DATA)
    return ComparedSize(
        case=replace(
            _row(key, verdict, reason),
            params={"size": base.size_bytes},
            size_bytes=base.size_bytes,
            base_launches=len(base_s) or launches[0],
            head_launches=len(head_s) or launches[1],
            base_s=base.measured_us * 1e-6,
            head_s=head.measured_us * 1e-6,
            # Without a test: no ratio of times that cannot be compared, or that are the same.
            effect=None if obstacle or base == head else effect,
        ),
        base=base,
        head=head,
    )


def _row(key: _CallKey, verdict: Verdict, reason: str) -> ComparedCase:
    mesh_dim, impl, name = key
    return ComparedCase(
        suite=mesh_dim,
        name=name,
        impl=impl,
        params={},
        verdict=verdict,
        reason=reason,
        estimator="p25",
        tolerance=SAME_WITHIN,
    )


def _discount_chance(sizes: Sequence[ComparedSize]) -> Sequence[ComparedSize]:
    """Makes changes inconclusive that the Benjamini-Hochberg procedure (1995) at level `FAMILY_P` does not accept."""
    for verdict, name in ((Verdict.SLOWER, "p_slower"), (Verdict.FASTER, "p_faster")):
        ordered = sorted(p for size in sizes if (p := getattr(size.case.effect, name, None)) is not None)
        limit = max((p for i, p in enumerate(ordered, 1) if p <= FAMILY_P * i / len(ordered)), default=0.0)
        sizes = [
            replace(size, case=replace(size.case, verdict=Verdict.INCONCLUSIVE, reason=_BY_CHANCE))
            # A change with a reason exceeds any between launches of one build. One by intervals has no p value.
            if size.case.verdict is verdict
            and not size.case.reason
            and (getattr(size.case.effect, name) or 0) > limit
            else size
            for size in sizes
        ]
    return sizes


def _call_row(key: _CallKey, cases: Sequence[ComparedCase]) -> ComparedCase:
    """Returns the verdict of a call, with the figures of the size that changed most among those with this verdict."""
    if not cases:
        return _row(key, Verdict.INCONCLUSIVE, "the two sides have no size in common")
    by_verdict = group_by(cases, lambda case: case.verdict)
    # The call has the first of these verdicts that one of its sizes has.
    decisive = next(
        by_verdict[verdict]
        for verdict in (Verdict.SLOWER, Verdict.FASTER, Verdict.INCONCLUSIVE, Verdict.SAME)
        if verdict in by_verdict
    )
    largest = max(decisive, key=lambda case: abs(math.log(case.ratio or 1)))
    return replace(
        largest,
        params={
            "sizes": f"{len(decisive)} of {len(cases)}: {_span(decisive)}",
            "largest change": format_size(largest.size_bytes),
        },
        reason=f"faster at {_span(by_verdict[Verdict.FASTER])}"
        if {Verdict.SLOWER, Verdict.FASTER} <= by_verdict.keys()
        else largest.reason,
    )


def _span(cases: Sequence[ComparedCase]) -> str:
    return " to ".join(dict.fromkeys(format_size(case.size_bytes) for case in (cases[0], cases[-1])))


def _notes(
    base: CalibratedTopology,
    head: CalibratedTopology,
    setup: Mapping[str, tuple[str, str]],
    cases: Sequence[ComparedCase],
) -> tuple[str, ...]:
    notes = {
        "the same run is on both sides": bool(
            {run.run_id for run in base.runs} & {run.run_id for run in head.runs}
        ),
        f"{plural(len(cases), 'time')} compared; at most {FAMILY_P:.0%} of the changes are expected to be chance; "
        "other load on the machine or its network looks like a slower link": any(
            case.verdict in (Verdict.SLOWER, Verdict.FASTER) for case in cases
        ),
        "a side lacks the times of its launches, so 90% intervals decide; calibrate its runs again for a test": any(
            case.effect and case.effect.p_slower is None for case in cases
        ),
    }
    return (
        *(f"{name}: {_sides(values)}" for name, values in setup.items()),
        *(note for note, applies in notes.items() if applies),
    )


def print_topology_comparison(comparison: TopologyComparison, as_json: bool = False) -> None:
    """Prints the constants, a table of calls per mesh dim with the gravest first, and notes; or strict JSON."""
    if comparison.constants and not as_json:
        console, constants = new_console(), comparison.constants[:MAX_ROWS]
        print_columns(
            console,
            [
                ("verdict", [constant.verdict for constant in constants]),
                ("mesh dim", [constant.mesh_dim for constant in constants]),
                ("constant", [constant.name for constant in constants]),
            ],
            [
                ("base (90% interval)", [_bounded(constant.base) for constant in constants]),
                ("head (90% interval)", [_bounded(constant.head) for constant in constants]),
            ],
            [("reason", [constant.reason for constant in constants])],
        )
        print_line(console, "")
    print_comparison(comparison, as_json)


def _bounded(bounded: Bounded) -> str:
    return f"{significant(bounded[0])} ({format_interval(bounded[1], '..')})"
