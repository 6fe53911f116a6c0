"""What the suites share: which mesh dims to measure, test data that every dtype holds exactly, comparing.

Test data are small integers. A reduction of them has one right answer in every dtype and in every
order of adding, so a result is compared bit by bit and a wrong one cannot hide in a tolerance.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dtbench.suite import RunOptions, Skip
from dtbench.suite.mesh import joint_dim

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dtbench.suite import World

# The two libraries that offer the DTensor API and tensor parallelism, by impl name.
DTENSOR_MODULES = {"core": "dtbench_core", "torch": "torch.distributed.tensor"}

# Some of what is measured torch has since 2.13 only.
BEFORE_213 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

# 101 is prime and fits int8: parts of a buffer that start anywhere but a multiple of 101 apart differ.
MOVED_VALUES = 101
SUMMED_VALUES = 5
KIB, MIB = 2**10, 2**20


def dtensor_api(impl: str) -> Any:
    """The module of `impl` ("core" or "torch") that holds DTensor, Shard, Replicate, Partial, ..."""
    return importlib.import_module(DTENSOR_MODULES[impl])


def parallel_api(impl: str) -> Any:
    """The module of `impl` that holds parallelize_module, the styles and loss_parallel."""
    return importlib.import_module(f"{DTENSOR_MODULES[impl]}.parallel")


@dataclass(frozen=True)
class Place:
    """Where a program's tensors go: a library ("local": plain tensors, this rank's part), a mesh, a device."""

    impl: str
    mesh: DeviceMesh
    device: torch.device

    @property
    def api(self) -> Any:
        return dtensor_api(self.impl)

    def on_all(self, text: str) -> list[Any]:
        """The placement on every mesh dim."""
        return [placement(self.api, text)] * self.mesh.ndim

    def part(self, full: torch.Tensor, text: str) -> torch.Tensor:
        """What this rank holds of `full`, placed so on every mesh dim."""
        index = self.mesh.mesh.flatten().tolist().index(torch.distributed.get_rank())
        return shard_of(full, text, index, self.mesh.size()).clone()

    def put(self, full: torch.Tensor, text: str) -> Any:
        """`full` placed so: a DTensor, or this rank's part for the floor. What has no dims stays as it is ("0-dim")."""
        if text == "0-dim":
            return full
        part = self.part(full, text)
        if self.impl == "local":
            return part
        return self.api.DTensor.from_local(part, self.mesh, self.on_all(text), run_check=False)


def placement(api: Any, text: str) -> Any:
    """`S(0)`, `R`, `P` or `P(avg)` -> the placement of that library."""
    kind, _, argument = text.rstrip(")").partition("(")
    if kind == "S":
        return api.Shard(int(argument))
    return api.Partial(argument or "sum") if kind == "P" else api.Replicate()


def shard_of(full: torch.Tensor, text: str, rank: int, ranks: int) -> torch.Tensor:
    """What `rank` holds of `full` when it is placed as `text` says: a shard, or (R) all of it."""
    if not text.startswith("S"):
        return full
    return full.chunk(ranks, dim=int(text[2:-1]))[rank].contiguous()


def shared_dims(options: RunOptions) -> list[tuple[str, int]]:
    """The mesh dims with more than one rank: (name, ranks)."""
    return [(name, ranks) for name, ranks in options.mesh if ranks > 1]


def priced_dims(options: RunOptions) -> list[tuple[str, int]]:
    """The shared dims, and all of them as one ("dp+tp"): what the cost model has prices for."""
    joint = joint_dim(options.mesh)
    return shared_dims(options) + ([joint] if joint else [])


def mesh_of_dim(world: World, mesh_dim: str) -> DeviceMesh:
    """The one-dimensional mesh of a priced dim that this rank belongs to."""
    return world.mesh_of((world.world_size,)) if "+" in mesh_dim else world.mesh[mesh_dim]


def refuse_gathers_of_cuda_on_gloo(mesh: DeviceMesh) -> None:
    """Where a program gathers through torch's functional collectives.

    Raises:
        Skip: it would end the ranks with SIGSEGV, as gloo reads CUDA tensors there as if they were the host's memory:
            https://github.com/pytorch/pytorch/issues/152645.
    """
    if mesh.device_type == "cuda" and "gloo" in torch.distributed.get_backend(mesh.get_group()):
        raise Skip(
            "torch's functional all_gather of CUDA tensors on gloo ends ranks with SIGSEGV (pytorch #152645)"
        )


def torch_dtype(name: str) -> torch.dtype:
    """`float32` -> torch.float32.

    Raises:
        ValueError: torch has no dtype of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"got the dtype {name!r}, expected a name of torch such as float32 or bfloat16")
    return dtype


def moved_values(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(count,) what `rank` sends in a collective that only moves data: differs from its neighbours'."""
    index = torch.arange(31 * rank, 31 * rank + count, device=device)
    return (index % MOVED_VALUES).to(dtype)


def summed_values(
    rank: int, ranks: int, count: int, dtype: torch.dtype, device: torch.device, start: int = 0
) -> torch.Tensor:
    """(count,) what `rank` adds to a sum over `ranks` that `dtype` holds exactly; see `sum_of_values`.

    start: the index of the first value, so that tensors of one case differ.

    Raises:
        Skip: so many ranks that even the smallest sum that tells them apart overflows the dtype.
    """
    largest = largest_exact(dtype)
    if ranks * SUMMED_VALUES > largest:
        raise Skip(
            f"{dtype} counts exactly to {largest}: too few for a sum over {ranks} ranks; take a wider --dtype"
        )
    index = torch.arange(start, start + count, device=device)
    return (index % SUMMED_VALUES + rank % 2).to(dtype)


def sum_of_values(
    ranks: int, count: int, dtype: torch.dtype, device: torch.device, start: int = 0
) -> torch.Tensor:
    """(count,) the sum of `summed_values` over all ranks, in closed form."""
    index = torch.arange(start, start + count, device=device)
    return (ranks * (index % SUMMED_VALUES) + ranks // 2).to(dtype)


def largest_exact(dtype: torch.dtype) -> int:
    """Up to here the dtype holds every integer: 2^(significand bits), or the largest int."""
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def hush_torch() -> None:
    """torch.distributed.tensor tells once that it has no all-to-all on a CPU, that another redistribution could be
    cheaper, and that a CPU's random ops may lack support: known, and shown by the measured time and the check."""
    for module in ("_collective_utils", "_redistribute"):
        logging.getLogger(f"torch.distributed.tensor.{module}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)


def mismatch(
    got: torch.Tensor, want: torch.Tensor, what: str = "the result", rtol: float = 0.0
) -> str | None:
    """What is wrong with `got`, in one line, or None. rtol: relative to the largest value of `want`."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{what} is {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"
    got, want = got.detach().flatten(), want.detach().flatten()
    # Written so that NaN counts as wrong.
    limited = rtol and got.numel()
    bad = ~((got - want).abs() <= rtol * float(want.abs().max())) if limited else got != want
    places = bad.nonzero()
    if not len(places):
        return None
    first = int(places[0])
    return (
        f"{len(places)} of {got.numel()} elements of {what} are wrong, the first at {first}: "
        f"got {got[first].item():g}, expected {want[first].item():g}"
    )
