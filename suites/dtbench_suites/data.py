"""Helpers that the suites share: mesh dims to measure, placements, exact test data, comparison of results.

Test data are small integers. Their sum is exact in every dtype and in every order of addition, so results are compared
bit by bit and no error can hide within a tolerance.
"""

import importlib
import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtbench.suite import RunOptions, Skip, World
from dtbench.suite.mesh import joint_dim

# Impl -> the library that provides its DTensor API and tensor parallelism.
DTENSOR_MODULES = {"core": "dtbench_core", "torch": "torch.distributed.tensor"}

# Some measured features exist only since torch 2.13.
BEFORE_213 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

# Prime, so two parts of a buffer differ unless their starts are a multiple of 101 apart. Fits int8.
MOVED_VALUES = 101
SUMMED_VALUES = 5
KIB, MIB = 2**10, 2**20


def dtensor_api(impl: str) -> Any:
    """Returns the module of `impl` ("core" or "torch") with DTensor, Shard, Replicate, Partial, ..."""
    return importlib.import_module(DTENSOR_MODULES[impl])


def parallel_api(impl: str) -> Any:
    """Returns the module of `impl` with parallelize_module, the parallel styles and loss_parallel."""
    return importlib.import_module(f"{DTENSOR_MODULES[impl]}.parallel")


@dataclass(frozen=True)
class Place:
    """Distributes the tensors of a measured program.

    Attributes:
        impl: the library: "core", "torch", or "local" for plain tensors that hold this rank's shard.
        mesh: the mesh of DTensors.
        device: this rank's device.
    """

    impl: str
    mesh: DeviceMesh
    device: torch.device

    @property
    def api(self) -> Any:
        return dtensor_api(self.impl)

    def placements(self, text: str) -> list[Any]:
        """Returns the placement that `text` names, once per mesh dim."""
        return [placement(self.api, text)] * self.mesh.ndim

    def part(self, full: torch.Tensor, text: str) -> torch.Tensor:
        """Returns this rank's shard of `full` with the placement `text` on every mesh dim."""
        index = self.mesh.mesh.flatten().tolist().index(torch.distributed.get_rank())
        return shard_of(full, text, index, self.mesh.size()).clone()

    def put(self, full: torch.Tensor, text: str) -> Any:
        """Returns `full` as a DTensor with that placement, or this rank's shard if `impl` is "local".

        With the text "0-dim", returns the plain tensor itself.
        """
        if text == "0-dim":
            return full
        part = self.part(full, text)
        if self.impl == "local":
            return part
        return self.api.DTensor.from_local(part, self.mesh, self.placements(text), run_check=False)

    def mismatch(
        self,
        got: Any,
        text: str,
        shape: tuple[int, ...],
        local: torch.Tensor,
        name: str = "the result",
        rtol: float = 0.0,
        may_be_plain: bool = False,
    ) -> str | None:
        """Compares a DTensor's placements, global shape and local values. Returns a one-line message, or None.

        Args:
            text: the placement on every mesh dim.
            shape: the global shape.
            local: this rank's values.
            rtol: see `mismatch`.
            may_be_plain: whether `got` may be a plain local tensor, as it always may if `impl` is "local".
        """
        if hasattr(got, "placements"):
            want = self.placements(text)
            if list(got.placements) != want or got.shape != shape:
                return f"{name} is {got.placements} {tuple(got.shape)}, expected {want} {tuple(shape)}"
            got = got.to_local()
        elif self.impl != "local" and not may_be_plain:
            return f"{name} is a plain {type(got).__name__}, expected a DTensor"
        return mismatch(got, local, name, rtol)


def placement(api: Any, text: str) -> Any:
    """Parses `S(0)`, `R`, `P` or `P(avg)` into a placement of the library `api`."""
    kind, _, argument = text.rstrip(")").partition("(")
    if kind == "S":
        return api.Shard(int(argument))
    return api.Partial(argument or "sum") if kind == "P" else api.Replicate()


def shard_of(full: torch.Tensor, text: str, rank: int, ranks: int) -> torch.Tensor:
    """Returns the part of `full` that `rank` holds under the placement `text`: a shard, or all of it unless sharded."""
    return full.chunk(ranks, dim=int(text[2:-1]))[rank].contiguous() if text.startswith("S") else full


def dims_with_several_ranks(options: RunOptions) -> list[tuple[str, int]]:
    """Returns (name, ranks) of each mesh dim with more than one rank."""
    return [(name, ranks) for name, ranks in options.mesh if ranks > 1]


def calibrated_dims(options: RunOptions) -> list[tuple[str, int]]:
    """Returns the mesh dims for which the cost model estimates times.

    These are the dims with several ranks, and all ranks together ("dp+tp").
    """
    joint = joint_dim(options.mesh)
    return dims_with_several_ranks(options) + ([joint] if joint else [])


def mesh_of_dim(world: World, mesh_dim: str) -> DeviceMesh:
    """Returns this rank's one-dimensional mesh of a calibrated dim."""
    return world.mesh_of((world.world_size,)) if "+" in mesh_dim else world.mesh[mesh_dim]


def skip_cuda_gathers_on_gloo(mesh: DeviceMesh) -> None:
    """Skips a program that calls torch's functional all_gather, if its tensors are CUDA tensors on gloo.

    Raises:
        Skip: gloo would read CUDA memory as host memory there and crash with SIGSEGV:
            https://github.com/pytorch/pytorch/issues/152645.
    """
    if mesh.device_type == "cuda" and "gloo" in torch.distributed.get_backend(mesh.get_group()):
        raise Skip(
            "torch's functional all_gather of CUDA tensors on gloo crashes with SIGSEGV (pytorch #152645)"
        )


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch.dtype of a name such as `float32`.

    Raises:
        ValueError: torch has no dtype of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"got the dtype {name!r}, expected a torch dtype such as float32 or bfloat16")
    return dtype


def moved_values(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the (count,) values that `rank` sends in a collective without arithmetic. Neighbouring ranks differ."""
    return (torch.arange(31 * rank, 31 * rank + count, device=device) % MOVED_VALUES).to(dtype)


def summed_values(
    rank: int, ranks: int, count: int, dtype: torch.dtype, device: torch.device, start: int = 0
) -> torch.Tensor:
    """Returns the (count,) values that `rank` adds to a sum over `ranks`, which `sum_of_values` gives exactly.

    Args:
        start: the index of the first value. Tensors with different starts differ.

    Raises:
        Skip: the sum over these ranks exceeds the integers that the dtype represents exactly.
    """
    largest = largest_exact(dtype)
    if ranks * SUMMED_VALUES > largest:
        raise Skip(
            f"{dtype} represents integers exactly up to {largest}: too few for a sum over {ranks} ranks; "
            "choose a wider --dtype"
        )
    return (torch.arange(start, start + count, device=device) % SUMMED_VALUES + rank % 2).to(dtype)


def sum_of_values(
    ranks: int, count: int, dtype: torch.dtype, device: torch.device, start: int = 0
) -> torch.Tensor:
    """Returns the (count,) sum of `summed_values` over all ranks, in closed form."""
    index = torch.arange(start, start + count, device=device)
    return (ranks * (index % SUMMED_VALUES) + ranks // 2).to(dtype)


def largest_exact(dtype: torch.dtype) -> int:
    """Returns the largest n such that the dtype represents all integers up to n: 2^(significand bits) or the max."""
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def silence_torch() -> None:
    """Silences three known messages of torch.distributed.tensor.

    They concern the missing all-to-all on CPUs, cheaper redistributions, and random ops on CPUs. The measured times and
    the checks show the effects.
    """
    for module in ("_collective_utils", "_redistribute"):
        logging.getLogger(f"torch.distributed.tensor.{module}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)


def mismatch(
    got: torch.Tensor, want: torch.Tensor, name: str = "the result", rtol: float = 0.0
) -> str | None:
    """Returns a one-line message about how `got` differs from `want`, or None.

    Args:
        rtol: tolerance relative to the largest absolute value of `want`; 0 compares exactly.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{name} is {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"
    got, want = got.detach().flatten(), want.detach().flatten()
    # Negated so that NaN counts as wrong.
    tolerant = rtol and got.numel()
    is_wrong = ~((got - want).abs() <= rtol * float(want.abs().max())) if tolerant else got != want
    positions = is_wrong.nonzero()
    if not len(positions):
        return None
    first = int(positions[0])
    return (
        f"{len(positions)} of {got.numel()} elements of {name} are wrong, the first at {first}: "
        f"got {got[first].item():g}, expected {want[first].item():g}"
    )
