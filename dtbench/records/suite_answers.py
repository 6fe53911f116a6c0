"""Answers of suites beyond the times of their cases, computed from the results of a run."""

from collections.abc import Mapping

from msgspec import Struct

from dtbench.fields import Amount
from dtbench.records.comparison import Change
from dtbench.text.units import format_ratio


class SecondCall(Struct, frozen=True):
    """The second call of an op with the same shapes, which should find its sharding decisions in a cache.

    Attributes:
        op: name of the op.
        impl: "core" or "torch".
        placements: placements of the inputs.
        pass_: "forward" or "forward+backward".
        decisions: number of sharding decisions that the second call made again. Above 0, it misses the cache.
        second_s: shortest second call, seconds.
        first_s: shortest first call, seconds; None if it was not measured.
        cached_s: mean of cached calls in the fastest sample, seconds; None if it was not measured.
    """

    op: str
    impl: str
    placements: str
    pass_: str
    decisions: float
    second_s: Amount
    first_s: Amount | None
    cached_s: Amount | None


class StepGrowth(Struct, frozen=True):
    """Objects and memory that each of many equal steps keeps.

    Attributes:
        name: name of the step.
        impl: name of the implementation.
        steps: number of steps.
        objects_per_step: objects kept per step, mean without the first quarter of the steps.
        bytes_per_step: growth of the process's memory per step, bytes; None if the system does not tell.
        late_over_early: median time of the last 20 steps over that of the first 20 after the warm-up.
        types: type -> objects kept per step, the most first. Types that do not grow are left out.
        verdict: "flat", or the leak with its types.
    """

    name: str
    impl: str
    steps: int
    objects_per_step: float
    bytes_per_step: float | None
    late_over_early: float | None
    types: Mapping[str, float]
    verdict: str


class GroupCost(Struct, frozen=True):
    """Host time of sharded parameters by a fit: fixed + per group * groups + per parameter * all parameters.

    Attributes:
        group: "simulated" or "real" ranks.
        impl: name of the implementation.
        stage: "step", or a stage of a step.
        fixed_s: estimate and 95 % interval of the time that does not depend on groups, seconds.
        per_group_s: that of the time per group, seconds.
        per_parameter_s: that of the time per parameter, seconds.
    """

    group: str
    impl: str
    stage: str
    fixed_s: tuple[float, float, float]
    per_group_s: tuple[float, float, float]
    per_parameter_s: tuple[float, float, float]


class RoutingCost(Struct, frozen=True, kw_only=True):
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


class PayloadChoice(Struct, frozen=True, kw_only=True):
    """The size from which sending a collective in a narrower dtype pays.

    Attributes:
        collective: name of the collective.
        payload: the narrower dtype.
        verdict: the answer in words.
        pays_from_bytes: estimated size from which on it pays, in bytes of float32: where the ratio crosses 1,
            interpolated on logarithmic scales. None if it is not between two measured sizes.
        low_bytes: the largest size that clearly loses; None if none does.
        high_bytes: the smallest size above that which clearly pays; None if none does.
    """

    mesh_dim: str
    ranks: int
    collective: str
    payload: str
    verdict: str
    pays_from_bytes: int | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
