"""Answers about host time that are computed from the results of a run."""

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
    decisions: int
    second_s: Amount
    first_s: Amount | None
    cached_s: Amount | None

    @property
    def misses(self) -> bool:
        """Whether the call misses the cache."""
        return self.decisions > 0
