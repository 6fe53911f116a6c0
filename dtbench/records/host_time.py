"""Answers about host time that are computed from the results of a run."""

from collections.abc import Mapping

from msgspec import Struct

from dtbench.fields import Amount


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
