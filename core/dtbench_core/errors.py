"""Errors of the core. Each message says what was got, what was expected and what to do.

Each error also has the built-in types that torch.distributed.tensor raises in the same case.

CoreError
+-- PlacementError   (ValueError, RuntimeError)  a placement that cannot hold for this tensor or mesh
|   +-- DimError     (IndexError, AssertionError)  a Shard of a dim that the tensor does not have
|   +-- PlacementTypeError (TypeError)      an object that is not a placement, or not a sequence of them
+-- MeshError        (ValueError, RuntimeError)  tensors of different meshes, a rank outside its mesh
|   +-- CrossMeshError (NotImplementedError)  a redistribution to another mesh
+-- LayoutError      (ValueError)           a local shard that contradicts the global shape
+-- MixedTensorError (RuntimeError)         a plain tensor given where a DTensor is expected
+-- NoRuleError      (NotImplementedError)  an op, or its placements, that no rule covers
+-- BucketError      (ValueError, AssertionError)  tensors that a bucketer cannot reduce (bucketer/)
+-- ArgumentError    (RuntimeError, ValueError)  an invalid argument of the public API
|   +-- ArgumentTypeError (TypeError)       an argument of another type
|   +-- FunctionError (AssertionError)      placements that do not match a function's arguments or results
+-- RedistributionError (RuntimeError)      an implicit redistribution where only explicit ones are allowed
+-- RanksDifferError (RuntimeError)         ranks that call different ops, found by `check_ranks`
+-- SimulationError  (RuntimeError)         a call that cannot be simulated, or that would hang on real ranks
    +-- RankDependentError                  simulated ranks differ where the program needs one answer
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class CoreError(Exception):
    """Base of every error that the core raises on purpose."""


class PlacementError(CoreError, ValueError, RuntimeError):
    """A placement that cannot hold for this tensor or mesh."""


class DimError(PlacementError, IndexError, AssertionError):
    """A Shard of a dim that the tensor does not have."""


class PlacementTypeError(PlacementError, TypeError):
    """An object that is not a placement, or not a sequence of placements."""


class MeshError(CoreError, ValueError, RuntimeError):
    """Tensors of different meshes in one op, or a rank outside the mesh it uses."""


class CrossMeshError(MeshError, NotImplementedError):
    """A redistribution to another mesh than the tensor's."""


class LayoutError(CoreError, ValueError):
    """A local shard that contradicts the global shape and placements."""


class MixedTensorError(CoreError, RuntimeError):
    """A plain tensor given to an op together with a DTensor."""


class NoRuleError(CoreError, NotImplementedError):
    """An op without a rule, or whose rule does not cover these placements."""


class ArgumentError(CoreError, RuntimeError, ValueError):
    """An invalid argument of the public API."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of the public API of a wrong type."""


class FunctionError(ArgumentError, AssertionError):
    """Placements that do not match the arguments or results of a function one to one."""


class RanksDifferError(CoreError, RuntimeError):
    """Ranks that call different ops, or one op with different shapes or placements. `check_ranks` detects it."""


class SimulationError(CoreError, RuntimeError):
    """A call that cannot be simulated, or an error of the program that the simulation finds. Names the ranks."""


class RankDependentError(SimulationError):
    """A value that differs between simulated ranks although the program needs the same value for all ranks."""


class RedistributionError(CoreError, RuntimeError):
    """An implicit redistribution inside an ExplicitRedistributionContext."""


def describe_ranks(ranks: Iterable[int]) -> str:
    """Formats ranks for messages, like "0-3,7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def in_transform(caller: str, shape: Sequence[int]) -> ArgumentError:
    """Returns the error for a plain tensor inside a transform of torch.func, where tensors cannot be sent."""
    return ArgumentError(
        f"{caller} got a plain tensor of shape {list(shape)} inside a transform of torch.func (grad, vmap, jvp), where "
        "tensors have no memory to send; expected the call outside of the transform: create the DTensor before, and "
        "pass it to the transformed function as an argument or in its closure"
    )
