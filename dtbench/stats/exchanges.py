"""Answers of the suites that measure exchanges: the cost of unequal parts, and the size from which a payload pays.

An all-to-all of unequal parts is compared with the uniform routing of the same size. If the fullest rank alone
determined the time, the cost would be the rows that it receives over the mean. The rest is due to the order of
messages, shared links and the latency of more or fewer messages.

A collective that is sent in a narrower dtype pays where its total time, with the conversion, is below that of float32.
A size clearly pays or loses if the 95% interval of the ratio excludes 1.
"""

import itertools
import math
from collections.abc import Iterable, Mapping

from dtbench.grouping import group_by
from dtbench.records.comparison import Change
from dtbench.records.result import Run, integer_param
from dtbench.records.suite_answers import PayloadChoice, RoutingCost
from dtbench.stats.order import variants
from dtbench.suite import ROUTING
from dtbench.text.units import format_bytes, format_size


def routing_costs(runs: Iterable[Run]) -> list[RoutingCost]:
    """Returns the cost of every routing of the suite `collectives`, by mesh dim, dtype and size."""
    return [
        RoutingCost(
            mesh_dim=str(result.params.get("mesh_dim")),
            ranks=integer_param(result.params, "ranks"),
            dtype=str(result.params.get("dtype")),
            size_bytes=result.size_bytes or 0,
            routing=str(result.params[ROUTING]),
            time_s=time_s,
            busbw_Bps=(result.busbw_Bps or 0.0) * (result.estimate_s or 0.0) / time_s or None,
            change=change,
            max_over_mean=result.counters.get("max_over_mean_received"),
        )
        for result, time_s, change in variants(runs, "collectives", "uniform", ROUTING)
    ]


def payload_choices(runs: Iterable[Run]) -> list[PayloadChoice]:
    """Returns the choice for every mesh dim, collective and narrower dtype of the suite `payload`."""
    by_curve = group_by(
        (
            (result, change)
            for result, _, change in variants(runs, "payload", "float32")
            if change is not None and result.params.get("part") == "total"
        ),
        lambda pair: (
            str(pair[0].params.get("mesh_dim")),
            integer_param(pair[0].params, "ranks"),
            pair[0].name,
            pair[0].impl,
        ),
    )
    return [
        choose_payload(*curve, {result.size_bytes or 0: change for result, change in pairs})
        for curve, pairs in by_curve.items()
    ]


def choose_payload(
    mesh_dim: str, ranks: int, collective: str, payload: str, changes: Mapping[int, Change]
) -> PayloadChoice:
    """Chooses the size from which on the payload pays.

    Args:
        changes: size in bytes -> total time of the payload / that of float32.
    """
    sizes = sorted(changes)
    pays = [size for size in sizes if 0 < (changes[size].high or 0) < 1]
    low = max((size for size in sizes if (changes[size].low or 0) > 1), default=None)
    high = min((size for size in pays if size > (low or 0)), default=None)
    crossings = [
        round(a * (b / a) ** (math.log(changes[a].ratio) / math.log(changes[a].ratio / changes[b].ratio)))
        for a, b in itertools.pairwise(size for size in sizes if (low or 0) <= size <= (high or 0))
        if changes[a].ratio >= 1 > changes[b].ratio
    ]
    # Larger sizes at which it seems to lose, though not clearly.
    is_unclear_above = any(changes[size].ratio >= 1 for size in sizes if size > max(pays, default=0))
    return PayloadChoice(
        mesh_dim=mesh_dim,
        ranks=ranks,
        collective=collective,
        payload=payload,
        verdict="pays at all measured sizes"
        if len(pays) == len(sizes)
        else f"clearly pays {f'from {format_size(high)} to' if high < pays[-1] else 'at'} {format_size(pays[-1])}, "
        "unclear above"
        if high is not None and is_unclear_above
        else f"pays from about {format_bytes([high, *crossings][-1])} on, clearly from {format_size(high)}"
        if high is not None
        else f"pays only below {format_size(low)}"
        if pays
        else "pays at no measured size",
        pays_from_bytes=crossings[-1] if crossings and not is_unclear_above else None,
        low_bytes=low,
        high_bytes=high,
    )


def describe_exchanges(run: Run) -> list[str]:
    """Describes the cost of each routing but the uniform one, and each choice of a payload."""
    return [
        *(
            f"all_to_all_v {cost.routing} over {cost.mesh_dim}, {format_size(cost.size_bytes)}: {cost.verdict}"
            for cost in routing_costs([run])
            if cost.verdict
        ),
        *(f"{c.payload} in {c.collective} over {c.mesh_dim} {c.verdict}" for c in payload_choices([run])),
    ]
