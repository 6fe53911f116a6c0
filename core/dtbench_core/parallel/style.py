"""The styles of tensor parallelism: which parameter is sharded how, and what goes in and out.

Column and row are those of the matrix W in x @ W; torch stores a Linear's weight as W transposed and
an Embedding's as W. On a mesh of n ranks:

    style      module      weight     bias        input (wanted)   output
    Colwise    Linear      Shard(0)   Shard(0)    Replicate        Shard(-1)
    Colwise    Embedding   Shard(1)               Replicate        Shard(-1)
    Rowwise    Linear      Shard(1)   Replicate   Shard(-1)        Partial, then as output_layouts says
    Rowwise    Embedding   Shard(0)               Replicate        Partial, then as output_layouts says

So Colwise followed by Rowwise needs one all-reduce for the pair, and another one backward.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError, PlacementTypeError
from dtbench_core.layout.mesh import mesh_info
from dtbench_core.layout.placement import Placement, Placements, Replicate, Shard, as_placement
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, normalize
from dtbench_core.parallel.convert import ReadLengths, handed_out, lengths_read_by, placed, read_part
from dtbench_core.parallel.embedding import look_up_rows
from dtbench_core.parallel.parameters import UnsupportedModuleError, check_parameters, place_parameter
from dtbench_core.tensor.distribute import distribute_module
from dtbench_core.tensor.dtensor import DTensor, handed_over, wrapped
from dtbench_core.torch_compat import in_graph

# (module, its inputs or outputs, mesh) -> what takes their place.
Convert = Callable[[nn.Module, Any, DeviceMesh], Any]


class ParallelStyle(ABC):
    """How one module is made parallel. `_apply` does it in place, and returns the module.

    A style of one's own derives from this and defines `_apply`; the mesh it gets has one dim.
    """

    # Set by parallelize_module before `_apply`: see there.
    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...

    def __repr__(self) -> str:
        options = (f"{name}={shown(of)}" for name, of in vars(self).items() if name != "src_data_rank")
        return f"{type(self).__name__}({', '.join(options)})"


class _Sharding(NamedTuple):
    """How a style shards one type of module."""

    parameters: dict[str, Placement]
    input: Placement  # what the local computation needs


@in_graph
def _entering(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    layouts: Placements,
    features: int,
    wanted: Placement,
    known: ReadLengths | None = None,
) -> DTensor:
    """A layer's input placed as `wanted`; a plain one is the part of the whole that `layouts` says.

    Args:
        features: of a linear layer, which the whole input has in its last dim; else 0.
        known: see `lengths_read_by`.
    """
    if isinstance(tensor, DTensor):
        return placed(tensor, (wanted,))
    layouts = normalize(layouts, tensor.ndim, mesh_info(mesh))
    if features and layouts == (Shard(tensor.ndim - 1),):
        # The whole size is known here, so uneven shards are understood without asking the other ranks.
        shape = (*tensor.shape[:-1], features)
        spec = DTensorSpec.of(mesh, layouts, shape, contiguous_stride(shape), tensor.dtype)
        return placed(wrapped(tensor.contiguous(), spec), (wanted,))
    return placed(read_part(tensor, mesh, layouts[0], known), (wanted,))


@in_graph
def _leaving(output: DTensor, layouts: Placements, local: bool) -> torch.Tensor:
    """A layer's output placed as `layouts`; local: its plain part."""
    moved = placed(output, layouts)
    return handed_over(handed_out(moved)) if local else moved


class LayerStyle(ParallelStyle):
    """What Colwise and Rowwise share: a table of shardings, and conversion at both ends."""

    _shardings: dict[type[nn.Module], _Sharding]
    _layouts: tuple[Placement, Placement]  # of input and output, when not given

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (one_placement(input_layouts or self._layouts[0], "input_layouts"),)
        self.output_layouts = (one_placement(output_layouts or self._layouts[1], "output_layouts"),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        prepare_input = partial(self._prepare_input, wanted=self._sharding_of(module).input)
        return self.shard(module, device_mesh, prepare_input, self._prepare_output)

    def _sharding_of(self, module: nn.Module) -> _Sharding:
        name = type(self).__name__
        kind = next((kind for kind in self._shardings if isinstance(module, kind)), None)
        if kind is None:
            kinds = " or ".join(f"nn.{kind.__name__}" for kind in self._shardings)
            raise UnsupportedModuleError(
                f"Expect a torch.nn.Linear module but received {type(module)}! {name} shards {kinds}: name its "
                "submodules of these types in the plan; a fused layer must first be written as separate ones"
            )
        return self._shardings[kind]

    def shard(
        self, module: nn.Module, mesh: DeviceMesh, input_fn: Convert | None, output_fn: Convert | None
    ) -> nn.Module:
        """Shards the parameters; what goes in and out is left to the functions given, as distribute_module's."""
        name, sharding = type(self).__name__, self._sharding_of(module)
        check_parameters(name, module, sharding.parameters)
        if isinstance(module, nn.Embedding):
            _check_embedding(name, module)

        def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for parameter, placement in sharding.parameters.items():
                place_parameter(part, parameter, mesh, placement, self.src_data_rank)

        if isinstance(module, nn.Embedding) and sharding.parameters["weight"] == Shard(0):
            # A bound method, so that a deep copy of the module runs on the copy's weight.
            module.forward = types.MethodType(look_up_rows, module)  # type: ignore[method-assign]
        return distribute_module(module, mesh, partition, input_fn, output_fn)

    def _prepare_output(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return _leaving(output, self.output_layouts, self.use_local_output)

    def _prepare_input(
        self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh, wanted: Placement
    ) -> DTensor:
        if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
            got = ", ".join(type(value).__name__ for value in inputs) or "no positional argument"
            raise ArgumentError(
                f"a {type(module).__name__} under {type(self).__name__} got {got}, "
                "expected one tensor: pass it by position"
            )
        features = getattr(module, "in_features", 0)
        known = lengths_read_by(module, mesh, self.input_layouts[0])
        return _entering(inputs[0], mesh, self.input_layouts, features, wanted, known)


class ColwiseParallel(LayerStyle):
    """Shards a Linear or Embedding by columns: each rank computes some of the output features.

    Args:
        input_layouts: how a plain input tensor is to be read; Replicate() when not given.
        output_layouts: how the output is to be placed; Shard(-1) when not given.
        use_local_output: give out this rank's plain part of the output, not a DTensor.
    """

    _shardings = {  # noqa: RUF012 - never changed
        nn.Linear: _Sharding({"weight": Shard(0), "bias": Shard(0)}, Replicate()),
        nn.Embedding: _Sharding({"weight": Shard(1)}, Replicate()),
    }
    _layouts = (Replicate(), Shard(-1))


class RowwiseParallel(LayerStyle):
    """Shards a Linear or Embedding by rows: each rank computes a term of every output feature.

    An Embedding's input is wanted whole on every rank; say `input_layouts=Replicate()` if it is.

    Args:
        input_layouts: how a plain input tensor is to be read; Shard(-1) when not given.
        output_layouts: how the output is to be placed; Replicate() when not given.
        use_local_output: give out this rank's plain part of the output, not a DTensor.
    """

    _shardings = {  # noqa: RUF012 - never changed
        nn.Linear: _Sharding({"weight": Shard(1), "bias": Replicate()}, Shard(-1)),
        nn.Embedding: _Sharding({"weight": Shard(0)}, Replicate()),
    }
    _layouts = (Shard(-1), Replicate())


def shown(option: object) -> str:
    """An option of a style, for messages; placements in their short form."""
    if isinstance(option, tuple):
        return f"({', '.join(map(str, option))})"
    return repr(option)


def one_placement(placement: Placement, argument: str) -> Placement:
    if isinstance(placement, Sequence):
        raise PlacementTypeError(
            f"got {argument}={placement!r}, expected one placement: Shard, Replicate or Partial, not in a list"
        )
    return as_placement(placement)


def _check_embedding(style: str, module: nn.Embedding) -> None:
    refused = [
        option
        for option, is_set in (
            ("max_norm", module.max_norm is not None),
            ("sparse", module.sparse),
            # Needs the counts of all ranks where the rows are spread.
            ("scale_grad_by_freq", module.scale_grad_by_freq and style == RowwiseParallel.__name__),
        )
        if is_set
    ]
    if refused:
        raise UnsupportedModuleError(
            f"{style} got an Embedding with {' and '.join(refused)}, expected one without: leave it out of the plan, "
            "which keeps it whole on every rank"
        )
