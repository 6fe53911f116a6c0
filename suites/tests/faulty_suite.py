"""The built-in suites with a fault: on the last rank, every result is changed after it was computed.

A suite file for `dtbench run`. All of its cases must get the status `wrong`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.tensor

import dtbench_core
from dtbench.suite import Case, RunOptions, Workload
from dtbench.suite.registry import load, suite
from dtbench_core import comm
from dtbench_suites import (
    bucketer,
    bucketer_reference,
    collectives,
    embedding,
    expert_parallel,
    overlap,
    payload,
    tensor_parallel,
)


def spoil(tensor: torch.Tensor) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        tensor.view(-1)[-1] += 1


class Finished:
    """Replaces a Work that has been waited for, because a gloo Work writes its output again in each wait()."""

    def wait(self) -> bool:
        return True


def spoiled_output(right: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the collective with a fault in its output, which is its first argument."""

    def call(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = right(output, *args, **kwargs)
        if isinstance(work, dist.Work):
            work.wait()
            work = Finished()
        spoil(output)
        return work

    return call


def spoiled_result(right: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the redistribution with a fault in the DTensor that it returns."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        local = result.to_local().clone()
        spoil(local)
        return type(result).from_local(local, result.device_mesh, result.placements, run_check=False)

    return call


def spoiled_tensor(right: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with a fault in the tensor that it returns."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = right(*args, **kwargs).clone()
        spoil(result)
        return result

    return call


def spoiled_model(right: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> torch.nn.Module:
        model: torch.nn.Module = right(*args)
        parameter = next(model.parameters()).detach()
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local += 1.0
        return model

    return call


def spoiled_step(right: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the maker of a step with a fault in the first result of the step."""

    def make(*args: Any) -> Callable[[], list[torch.Tensor]]:
        step = right(*args)

        def spoiled() -> list[torch.Tensor]:
            first, *others = step()
            first = first.detach().clone()
            spoil(first)
            return [first, *others]

        return spoiled

    return make


Fault = tuple[Any, str, Callable[[Any], Any]]


def faults() -> list[Fault]:
    """Returns (owner, attribute, wrapper) of each function that can be spoiled."""
    outputs = [(m, "reduce_scatter_single") for m in (collectives, bucketer, bucketer_reference, payload)]
    outputs += [(dist, name) for name in ("all_reduce", "all_to_all_single", "broadcast", "scatter")]
    outputs += [(m, "all_gather_single") for m in (collectives, payload)]
    outputs += [(comm, "reduce_scatter"), (overlap, "use")]
    return [
        *((owner, name, spoiled_output) for owner, name in outputs),
        (expert_parallel, "wait_for", spoiled_tensor),
        (dtbench_core.DTensor, "redistribute", spoiled_result),
        (torch.distributed.tensor.DTensor, "redistribute", spoiled_result),
        (tensor_parallel, "parallelize", spoiled_model),
        (embedding, "step_of", spoiled_step),
    ]


def faulty(build: Callable[[Any], Workload], names: tuple[str, ...]) -> Callable[[Any], Workload]:
    """Returns the workload of `build`, built and run with the faults in the functions `names`."""

    def with_faults(step: Callable[[], Any]) -> Any:
        with contextlib.ExitStack() as stack:
            for owner, name, spoiled in faults():
                if name in names:
                    stack.enter_context(mock.patch.object(owner, name, spoiled(getattr(owner, name))))
            return step()

    def make(world: Any) -> Workload:
        workload: Workload = with_faults(lambda: build(world))
        run, check = workload.run, workload.check
        return dataclasses.replace(
            workload,
            run=lambda: with_faults(run),
            check=None if check is None else lambda: with_faults(check),
        )

    return make


COLLECTIVES = "all_gather_single reduce_scatter_single all_reduce all_to_all_single broadcast scatter"
SPOILED = {
    "collectives": tuple(COLLECTIVES.split()),
    "redistribute": ("redistribute",),
    "bucketer": ("reduce_scatter_single", "reduce_scatter"),
    "tensor_parallel": ("parallelize",),
    "embedding": ("step_of",),
    "expert_parallel": ("wait_for",),
    "overlap": ("use",),
    "payload": tuple(COLLECTIVES.split()),
}


@suite("faulty", world="ranks", help="every case with a fault")
def faulty_suite(options: RunOptions) -> Iterator[Case]:
    for name, spoiled in SPOILED.items():
        for case in load([name])[0].cases(options):
            build = {impl: faulty(build, spoiled) for impl, build in case.build.items()}
            yield dataclasses.replace(case, name=f"{name} {case.name}", build=build, samples=2)
