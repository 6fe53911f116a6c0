"""The styles of tensor parallelism: how each parameter is sharded, and how inputs and outputs are placed.

Columns and rows are those of the matrix W in x @ W. torch stores the transpose of W for a Linear, and W itself for an
Embedding. On a mesh of n ranks:

    style      module      weight     bias        input used    output
    Colwise    Linear      Shard(0)   Shard(0)    Replicate     Shard(-1)
    Colwise    Embedding   Shard(1)               Replicate     Shard(-1)
    Rowwise    Linear      Shard(1)   Replicate   Shard(-1)     Partial, then output_layouts
    Rowwise    Embedding   Shard(0)               Replicate     Partial, then output_layouts

So Colwise followed by Rowwise needs one all-reduce for the pair, and another one in the backward pass.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError, PlacementTypeError
from dtbench_core.layout.mesh import mesh_info
from dtbench_core.layout.placement import REPLICATE, Placement, Placements, Replicate, Shard, as_placement
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, normalize
from dtbench_core.op_types import Ctx
from dtbench_core.parallel.convert import (
    KnownLengths,
    dtensor_from_parts,
    known_lengths_of,
    redistributed,
    with_recorded_length,
)
from dtbench_core.parallel.parameters import UnsupportedModuleError, check_parameters, place_parameter
from dtbench_core.rules.base import OpCall, PlacedSpecs, PlacementRow, Strategy, aten, rule
from dtbench_core.tensor.distribute import distribute_module
from dtbench_core.tensor.dtensor import DTensor, local_to_overwrite, wrapped
from dtbench_core.torch_compat import in_graph, new_op

# (module, its inputs or output, mesh) -> the converted inputs or output.
Convert = Callable[[nn.Module, Any, DeviceMesh], Any]


class ParallelStyle(ABC):
    """Base of the styles, which make one module parallel. `_apply` does this in place and returns the module.

    A user-defined style derives from this class and defines `_apply`, which gets a mesh with one dim.

    Attributes:
        src_data_rank: the argument of `parallelize_module`, which sets it before `_apply`.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...

    def __repr__(self) -> str:
        options = (
            f"{name}={format_option(value)}" for name, value in vars(self).items() if name != "src_data_rank"
        )
        return f"{type(self).__name__}({', '.join(options)})"


class _Sharding(NamedTuple):
    """How a style shards one type of module.

    Attributes:
        parameters: parameter name -> placement.
        input: the placement of the input that the computation on each rank needs.
    """

    parameters: dict[str, Placement]
    input: Placement


@in_graph
def _layer_input(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    layouts: Placements,
    features: int,
    placement: Placement,
    known_lengths: KnownLengths | None = None,
) -> DTensor:
    """Returns a layer's input as a DTensor with the given placement.

    Args:
        tensor: a DTensor, or this rank's part of the input according to `layouts`.
        features: the size of the last dim of the whole input of a linear layer; 0 for other layers.
        known_lengths: see `known_lengths_of`.
    """
    if isinstance(tensor, DTensor):
        return redistributed(tensor, (placement,))
    layouts = normalize(layouts, tensor.ndim, mesh_info(mesh))
    if features and layouts == (Shard(tensor.ndim - 1),):
        # The layer determines the whole size, so uneven shards need no exchange of lengths.
        shape = (*tensor.shape[:-1], features)
        return redistributed(
            wrapped(
                tensor.contiguous(),
                DTensorSpec.of(mesh, layouts, shape, contiguous_stride(shape), tensor.dtype),
            ),
            (placement,),
        )
    return redistributed(dtensor_from_parts(tensor, mesh, layouts[0], known_lengths), (placement,))


@in_graph
def _layer_output(output: DTensor, layouts: Placements, local: bool) -> torch.Tensor:
    """Returns a layer's output placed as `layouts`.

    Args:
        local: whether to return this rank's plain part.
    """
    redistributed_output = redistributed(output, layouts)
    return local_to_overwrite(with_recorded_length(redistributed_output)) if local else redistributed_output


class LayerStyle(ParallelStyle):
    """Base of Colwise and Rowwise: shards parameters by a table, and converts input and output."""

    _module_shardings: dict[type[nn.Module], _Sharding]
    _default_layouts: tuple[Placement, Placement]  # of input and output

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (single_placement(input_layouts or self._default_layouts[0], "input_layouts"),)
        self.output_layouts = (
            single_placement(output_layouts or self._default_layouts[1], "output_layouts"),
        )
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.shard(
            module,
            device_mesh,
            partial(self._prepare_input, placement=self._sharding_of(module).input),
            self._prepare_output,
        )

    def _sharding_of(self, module: nn.Module) -> _Sharding:
        name = type(self).__name__
        kind = next((kind for kind in self._module_shardings if isinstance(module, kind)), None)
        if kind is None:
            kinds = " or ".join(f"nn.{kind.__name__}" for kind in self._module_shardings)
            raise UnsupportedModuleError(
                f"Expect a torch.nn.Linear module but received {type(module)}! {name} shards {kinds}: name its "
                "submodules of these types in the plan; a fused layer must first be split into separate layers"
            )
        return self._module_shardings[kind]

    def shard(
        self, module: nn.Module, mesh: DeviceMesh, input_fn: Convert | None, output_fn: Convert | None
    ) -> nn.Module:
        """Shards the parameters. `input_fn` and `output_fn` convert inputs and output, as in `distribute_module`."""
        name, sharding = type(self).__name__, self._sharding_of(module)
        check_parameters(name, module, sharding.parameters)
        if isinstance(module, nn.Embedding):
            _check_embedding(name, module)

        def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for parameter, placement in sharding.parameters.items():
                place_parameter(part, parameter, mesh, placement, self.src_data_rank)

        if isinstance(module, nn.Embedding) and sharding.parameters["weight"] == Shard(0):
            # A bound method, so that a deep copy of the module uses the weight of the copy.
            module.forward = types.MethodType(look_up_rows, module)  # type: ignore[method-assign]
        return distribute_module(module, mesh, partition, input_fn, output_fn)

    def _prepare_output(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return _layer_output(output, self.output_layouts, self.use_local_output)

    def _prepare_input(
        self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh, placement: Placement
    ) -> DTensor:
        if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
            got = ", ".join(type(value).__name__ for value in inputs) or "no positional argument"
            raise ArgumentError(
                f"a {type(module).__name__} under {type(self).__name__} got {got}, "
                "expected one tensor: pass it by position"
            )
        return _layer_input(
            inputs[0],
            mesh,
            self.input_layouts,
            getattr(module, "in_features", 0),
            placement,
            known_lengths_of(module, mesh, self.input_layouts[0]),
        )


class ColwiseParallel(LayerStyle):
    """Shards a Linear or Embedding by columns: each rank computes some of the output features.

    Args:
        input_layouts: the placement of a plain input tensor; by default Replicate().
        output_layouts: the placement of the output; by default Shard(-1).
        use_local_output: whether to return this rank's plain part of the output instead of a DTensor.
    """

    _module_shardings = {  # noqa: RUF012 - never changed
        nn.Linear: _Sharding({"weight": Shard(0), "bias": Shard(0)}, Replicate()),
        nn.Embedding: _Sharding({"weight": Shard(1)}, Replicate()),
    }
    _default_layouts = (Replicate(), Shard(-1))


class RowwiseParallel(LayerStyle):
    """Shards a Linear or Embedding by rows: each rank computes one term of every output feature.

    An Embedding needs the whole input on every rank; pass `input_layouts=Replicate()` if the input is so.

    Args:
        input_layouts: the placement of a plain input tensor; by default Shard(-1).
        output_layouts: the placement of the output; by default Replicate().
        use_local_output: whether to return this rank's plain part of the output instead of a DTensor.
    """

    _module_shardings = {  # noqa: RUF012 - never changed
        nn.Linear: _Sharding({"weight": Shard(1), "bias": Replicate()}, Shard(-1)),
        nn.Embedding: _Sharding({"weight": Shard(0)}, Replicate()),
    }
    _default_layouts = (Shard(-1), Replicate())


def format_option(option: object) -> str:
    """Formats an option of a style for messages; placements in their short form."""
    return f"({', '.join(map(str, option))})" if isinstance(option, tuple) else repr(option)


def single_placement(placement: Placement, argument: str) -> Placement:
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
            # With rows sharded, it would need the index counts of all ranks.
            ("scale_grad_by_freq", module.scale_grad_by_freq and style == RowwiseParallel.__name__),
        )
        if is_set
    ]
    if refused:
        raise UnsupportedModuleError(
            f"{style} got an Embedding with {' and '.join(refused)}, expected one without: leave it out of the plan, "
            "so that every rank keeps the whole table"
        )


# ---- an Embedding sharded by rows ----

# Each rank looks up the rows it holds, and computes the gradient of only these rows. torch's op would compute the
# gradient of the whole table, of which each rank would then keep a part.


_backward = new_op(
    "embedding_rows_backward(Tensor grad, Tensor indices, int rows, int padding_idx) -> Tensor",
    lambda grad, indices, rows, padding: aten.embedding_dense_backward(grad, indices, rows, padding, False),
)


@rule(_backward)
def embedding_rows_backward(call: OpCall) -> Strategy:
    """(grad [..., width], indices [...]) -> gradient of the weight [rows, width], sharded by rows."""
    return Strategy([PlacementRow((REPLICATE, REPLICATE), (Shard(0),))], localize=_gradient_of_local_rows)


def _gradient_of_local_rows(placed: PlacedSpecs) -> Callable[..., Tensor]:
    (spec,) = placed.outputs
    assert spec is not None
    count, first = spec.local_shape[0], spec.local_offset[0]

    def run(grad: Tensor, indices: Tensor, rows: int, padding: int) -> Tensor:
        local_indices = indices - first
        # Gradients of rows on other ranks are added to an extra row, which is dropped.
        local_indices = torch.where((local_indices >= 0) & (local_indices < count), local_indices, count)
        local_padding = padding - first if first <= padding < first + count else -1
        gradient: Tensor = aten.embedding_dense_backward(grad, local_indices, count + 1, local_padding, False)
        return gradient[:count]

    return run


class EmbeddingRows(torch.autograd.Function):
    """(weight [rows, width] sharded by rows, indices [...], padding_idx or -1) -> [..., width], a pending sum."""

    @staticmethod
    def forward(ctx: Ctx, weight: Any, indices: Any, padding: int) -> Any:
        ctx.save_for_backward(indices)
        ctx.rows, ctx.padding, ctx.placements = weight._spec.shape[0], padding, weight._spec.placements
        return aten.embedding.default(weight, indices, padding)

    @staticmethod
    def backward(ctx: Ctx, grad: Any) -> tuple[Any, None, None]:
        (indices,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated again
            gradient = aten.embedding_dense_backward(grad, indices, ctx.rows, ctx.padding, False)
            return gradient.redistribute(placements=ctx.placements), None, None
        return _backward(grad, indices, ctx.rows, ctx.padding), None, None


def look_up_rows(module: nn.Embedding, index: Tensor) -> Tensor:
    """Replaces the forward of an Embedding sharded by rows: [...] -> [..., width], a pending sum.

    An index outside the whole table is an error on every rank, as it would be on one device.
    """
    padding = -1 if module.padding_idx is None else module.padding_idx
    return EmbeddingRows.apply(module.weight, index, padding)  # type: ignore[no-any-return]
