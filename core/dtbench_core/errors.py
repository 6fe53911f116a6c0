"""The errors of the core. Each message says what was got, what was expected and what to do.

Each is also of the built-in types that torch.distributed.tensor raises there.

CoreError
+-- PlacementError   (ValueError, RuntimeError)  a placement that cannot hold for this tensor or mesh
|   +-- DimError     (IndexError, AssertionError)  a Shard of a dim that the tensor does not have
|   +-- PlacementTypeError (TypeError)      what is no placement, or no sequence of them
+-- MeshError        (ValueError, RuntimeError)  tensors of different meshes, a rank outside its mesh
|   +-- CrossMeshError (NotImplementedError)  a redistribution to another mesh
+-- LayoutError      (ValueError)           a local shard that contradicts the global shape
+-- MixedTensorError (RuntimeError)         a plain tensor given where a DTensor is expected
+-- NoRuleError      (NotImplementedError)  an op, or its placements, that no rule covers
+-- BucketError      (ValueError, AssertionError)  what a bucketer cannot reduce (bucketer/)
+-- ArgumentError    (RuntimeError, ValueError)  an argument of the public API that cannot be followed
|   +-- ArgumentTypeError (TypeError)       an argument of another type
|   +-- FunctionError (AssertionError)      placements that do not match a function's arguments or results
+-- RedistributionError (RuntimeError)      an implicit redistribution where only explicit ones may be
+-- RanksDifferError (RuntimeError)         ranks that do not do the same, found by `check_ranks`
+-- SimulationError  (RuntimeError)         what a simulated world cannot follow, or would hang on real ranks
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
    """What is no placement, or no sequence of them."""


class MeshError(CoreError, ValueError, RuntimeError):
    """Tensors of different meshes in one op, or a rank outside the mesh it uses."""


class CrossMeshError(MeshError, NotImplementedError):
    """A redistribution to another mesh than the tensor's."""


class LayoutError(CoreError, ValueError):
    """A local shard that contradicts the global shape and placements."""


class MixedTensorError(CoreError, RuntimeError):
    """A plain tensor given to an op together with a DTensor."""


class NoRuleError(CoreError, NotImplementedError):
    """An op that no rule covers, or covers only for other placements."""


class ArgumentError(CoreError, RuntimeError, ValueError):
    """An argument of the public API that cannot be followed."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of the public API of another type than it takes."""


class FunctionError(ArgumentError, AssertionError):
    """Placements that do not match the arguments or results of a function one to one."""


class RanksDifferError(CoreError, RuntimeError):
    """Ranks that come with different ops, shapes or placements, as `check_ranks` finds."""


class SimulationError(CoreError, RuntimeError):
    """What a simulated world cannot follow, or finds wrong in the program: the message names the ranks."""


class RankDependentError(SimulationError):
    """A value that differs between simulated ranks, where the program needs one for all."""


class RedistributionError(CoreError, RuntimeError):
    """An op that would move a tensor by itself, inside an ExplicitRedistributionContext."""


def describe_ranks(ranks: Iterable[int]) -> str:
    """`0-3,7` for messages."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def in_transform(caller: str, shape: Sequence[int]) -> ArgumentError:
    """The refusal of a plain tensor inside a transform of torch.func, whose tensors cannot be sent."""
    return ArgumentError(
        f"{caller} got a plain tensor of shape {list(shape)} inside a transform of torch.func (grad, vmap, jvp), where "
        "tensors have no memory to send; expected it outside of one: make the DTensor before, and pass it as an "
        "argument of the function that is transformed, or let the function use it"
    )
