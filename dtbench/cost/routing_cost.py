"""The cost of unequal parts in an all-to-all: its time compared with the uniform routing of the same size.

If the fullest rank alone determined the time, the cost would be the rows that it receives over the mean. The rest is
due to the order of messages, shared links and the latency of more or fewer messages.
"""

from collections.abc import Iterable

import msgspec

from dtbench.records.comparison import Change
from dtbench.records.result import Run, integer_param
from dtbench.stats import variants
from dtbench.suite import ROUTING
from dtbench.text.units import format_ratio


class RoutingCost(msgspec.Struct, frozen=True, kw_only=True):
    """An all-to-all with one routing, compared with the uniform one.

    Attributes:
        routing: name of the routing.
        size_bytes: mean bytes that a rank sends, including those to itself.
        time_s: seconds, median over launches.
        busbw_Bps: bytes per second that a rank sends to other ranks, on average over the ranks.
        change: time / time of the uniform routing, with its 95% interval; None for that routing itself, or if no launch
            measured it.
        max_over_mean: rows that the fullest rank receives, over the mean.
    """

    mesh_dim: str
    ranks: int
    dtype: str
    size_bytes: int
    routing: str
    time_s: float
    busbw_Bps: float | None = None  # noqa: N815 - spelled as in the run file
    change: Change | None = None
    max_over_mean: float | None = None

    @property
    def verdict(self) -> str:
        """The cost of the skew in words; "" for the uniform routing."""
        change, share = self.change, self.max_over_mean or 1.0
        if change is None:
            return "" if self.routing == "uniform" else "no time of the uniform routing"
        ratio = format_ratio(change.ratio)
        if not change.low or not change.high or change.low <= 1 <= change.high:
            return "no clear cost"
        if change.high < 1:
            return f"takes {ratio} the time of uniform"
        fullest = "of which {} is" if share <= change.ratio else "less than the {} of"
        reason = f", {fullest.format(format_ratio(share))} the fullest rank" if share > 1 else ""
        return f"skew costs {ratio}{reason}"


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
        for result, time_s, change in variants(runs, "collectives", ROUTING, "uniform")
    ]
