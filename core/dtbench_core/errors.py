"""The errors of the core. Each message says what was got, what was expected and what to do.

CoreError
+-- PlacementError   (ValueError)           a placement that cannot hold for this tensor or mesh
+-- MeshError        (ValueError)           tensors of different meshes, a rank outside its mesh
+-- LayoutError      (ValueError)           a local shard that contradicts the global shape
+-- MixedTensorError (RuntimeError)         a plain tensor given where a DTensor is expected
+-- NoRuleError      (NotImplementedError)  an op, or its placements, that no rule covers
+-- BucketError      (ValueError, AssertionError)  what a bucketer cannot reduce (bucketer/)
+-- ArgumentError    (RuntimeError)         an argument of the public API that cannot be followed
+-- RedistributionError (RuntimeError)      an implicit redistribution where only explicit ones may be
+-- SimulationError  (RuntimeError)         what a simulated world cannot follow, or would hang on real ranks
    +-- RankDependentError                  simulated ranks differ where the program needs one answer
"""

from __future__ import annotations


class CoreError(Exception):
    """Base of every error that the core raises on purpose."""


class PlacementError(CoreError, ValueError):
    """A placement that cannot hold for this tensor or mesh."""


class MeshError(CoreError, ValueError):
    """Tensors of different meshes in one op, or a rank outside the mesh it uses."""


class LayoutError(CoreError, ValueError):
    """A local shard that contradicts the global shape and placements."""


class MixedTensorError(CoreError, RuntimeError):
    """A plain tensor given to an op together with a DTensor."""


class NoRuleError(CoreError, NotImplementedError):
    """An op that no rule covers, or covers only for other placements."""


class ArgumentError(CoreError, RuntimeError):
    """An argument of the public API that cannot be followed."""


class SimulationError(CoreError, RuntimeError):
    """What a simulated world cannot follow, or finds wrong in the program: the message names the ranks."""


class RankDependentError(SimulationError):
    """A value that differs between simulated ranks, where the program needs one for all."""


class RedistributionError(CoreError, RuntimeError):
    """An op that would move a tensor by itself, inside an ExplicitRedistributionContext."""
