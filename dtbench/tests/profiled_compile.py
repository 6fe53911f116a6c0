"""A function with collectives, compiled with a profile: `torchrun --nproc-per-node 2 profiled_compile.py PROFILE`.

Rank 0 prints one JSON list per look-up in the profile: collective, ranks, elements of the output, dtype, milliseconds,
source.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._inductor import config
from torch._inductor.fx_passes.profile_guided_estimation import ProfileData
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _runtime_estimation

look_up = ProfileData.lookup_collective


def print_look_up(self: ProfileData, *query: Any) -> tuple[float, str] | None:
    found = look_up(self, *query)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps([*query, *(found or (None, None))]) + "\n")
    return found


def communicate(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> Any:
    gathered = functional.all_gather_tensor(x, 0, group)
    reduced = functional.all_reduce(x @ weight, "sum", group)
    scattered = functional.reduce_scatter_tensor(x @ weight, "sum", 0, group)
    return gathered @ weight, reduced, scattered


def main() -> None:
    dist.init_process_group("gloo")
    group = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)).get_group("tp")
    options = config.aten_distributed_optimizations
    options.enable_overlap_scheduling = True
    options.profile_guided_estimations_profile_path = sys.argv[1]
    # Without a GPU, torch can neither time matrix products nor find the memory's bandwidth.
    options.compute_estimator = "analytical"
    _runtime_estimation.get_gpu_dram_gbps = lambda: 100
    ProfileData.lookup_collective = print_look_up  # type: ignore[method-assign]
    x, weight = torch.ones(64, 64), torch.ones(64, 64)
    gathered, reduced, scattered = torch.compile(communicate)(x, weight, group)
    assert (gathered.shape, reduced.shape, scattered.shape) == ((128, 64), (64, 64), (32, 64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
