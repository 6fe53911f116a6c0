"""Host time of a training step with fully sharded parameters, by the number of groups and of parameters per group.

Only when named. A group is a module whose parameters are gathered together before its forward and before its backward,
and whose gradients are reduced together. Parameters have one element per rank, so nearly all of the time is that of
the host.

    torch   torch.distributed.fsdp.fully_shard (FSDP2), one call per group
    core    dtbench_core.parallel.shard_parameters. It differs: each parameter has its own collectives, and gathered
            parameters are kept until the backward has used them, so they are gathered once per step
    local   the plain module on this rank's data: the floor

A step is a forward and a backward. `group` is "simulated", a fake group of 8 ranks without communication, or "real",
all ranks of the run, where the times include waiting for the collectives.

For `torch`, the counters `stage_s:*` split the fastest of some further steps: into the hooks of FSDPParamGroup, and
`rest`, the remaining time of the step. The hooks do not nest, so the parts add up to `stage_s:recorded step`.
`pre_backward` includes prefetching the parameters of the next group, `post_backward` the reduction of the gradients.
`dtbench show` fits the time per group and per parameter.
"""

import itertools
import timeit
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn

from dtbench.stats.host_time import STAGE
from dtbench.suite import Case, RunOptions, Skip, Workload, World, suite
from dtbench_suites import SUITES
from dtbench_suites.dispatch_programs import WORLD as SIMULATED_RANKS
from dtbench_suites.tensor_parallel import ROUNDINGS, compare

# Groups as the layers of a model. A layer of a transformer has about 8 parameters, one with experts far more.
GROUPS, GROUPS_QUICK = (1, 8, 32), (1, 2, 4)
PARAMETERS, PARAMETERS_QUICK = (1, 8, 64), (1, 4)
# The core has a collective per parameter, which takes milliseconds on gloo. Real ranks measure it up to so many.
MOST_COLLECTIVES, MOST_COLLECTIVES_QUICK = 64, 8
SAMPLES, SAMPLES_QUICK = 7, 3
STAGES = ("pre_forward", "post_forward", "pre_backward", "post_backward")  # methods of FSDPParamGroup
RECORDED_STEPS = 4


class Group(nn.ParameterList):
    """Multiplies by the mean of its parameters, which are near 1, so that products of many groups are."""

    __call__ = nn.Module.__call__  # a ParameterList refuses calls

    def forward(self, x: Tensor) -> Tensor:  # (ranks,) -> (ranks,)
        return x * torch.stack([*self]).mean(0)


def stage_times(step: Callable[[], object]) -> dict[str, float]:
    """Returns the seconds of each stage in the fastest of some steps of fully_shard."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    methods = {stage: getattr(FSDPParamGroup, stage) for stage in STAGES}
    recorded: list[dict[str, float]] = []

    def timed(group: object, stage: str, *args: Any, **kwargs: Any) -> Any:
        started_s = timeit.default_timer()
        result = methods[stage](group, *args, **kwargs)
        recorded[-1][stage] += timeit.default_timer() - started_s
        return result

    try:
        for stage in STAGES:
            setattr(FSDPParamGroup, stage, partialmethod(timed, stage))
        for _ in range(RECORDED_STEPS):
            recorded.append(dict.fromkeys(STAGES, 0.0))
            total_s = timeit.timeit(step, number=1)
            recorded[-1] |= {"rest": total_s - sum(recorded[-1].values()), "recorded step": total_s}
    finally:
        for stage, method in methods.items():
            setattr(FSDPParamGroup, stage, method)
    fastest = min(recorded, key=lambda stages: stages["recorded step"])
    return {f"{STAGE}{stage}": seconds for stage, seconds in fastest.items()}


def build_impl(groups: int, parameters: int, impl: str, world: World) -> Workload:
    n, mesh = world.world_size, world.mesh_of((world.world_size,))
    with world.device:
        batches = [(1 + (torch.arange(n) + rank) % 3 / 64).requires_grad_() for rank in range(n)]
        model, reference = (
            nn.Sequential(
                *(
                    Group(nn.Parameter(1 + (torch.arange(n) % 3 + i % 5) / 64) for i in range(parameters))
                    for _ in range(groups)
                )
            )
            for _ in range(2)
        )
    if impl == "torch":
        # Imported late: it takes a second, which the process that only lists cases need not spend.
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        if missing := [stage for stage in STAGES if not hasattr(FSDPParamGroup, stage)]:
            raise Skip(
                f"torch {torch.__version__} has no FSDPParamGroup.{missing[0]}, which this suite times"
            )
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    elif impl == "core":
        from dtbench_core.parallel import shard_parameters

        shard_parameters(model, mesh)

    def step() -> None:
        model.zero_grad()
        model(batches[world.rank]).sum().backward()

    def check() -> str | None:
        """Compares the parameters after a step of SGD with those of plain torch on the data of all ranks."""
        step()
        sharded: list[Any] = list(model.parameters())
        if (
            impl != "local" and torch.distributed.get_backend(mesh.get_group()) == "fake"
        ):  # which moves no data
            wrong = [p for p in sharded if (p.grad.placements, p.grad.shape) != (p.placements, (n,))]
            return "a gradient is not sharded as its parameter" if wrong else None
        reference.zero_grad()
        for batch in [batches[world.rank]] if impl == "local" else batches:
            (reference(batch).sum() / (1 if impl == "local" else n)).backward()
        for module in (model, reference):
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        names, expected = zip(*reference.named_parameters(), strict=True)
        return compare(names, sharded, [*expected], ROUNDINGS * torch.finfo(torch.float32).eps)

    return Workload(run=step, check=check, counters=partial(stage_times, step) if impl == "torch" else None)


@suite("fsdp", world="simulated", help=SUITES["fsdp"], by_default=False, impl_s=(0.8, 0.25))
def fsdp(options: RunOptions) -> Iterator[Case]:
    group_counts, parameter_counts, max_collectives, samples = (
        (GROUPS_QUICK, PARAMETERS_QUICK, MOST_COLLECTIVES_QUICK, SAMPLES_QUICK)
        if options.quick
        else (GROUPS, PARAMETERS, MOST_COLLECTIVES, SAMPLES)
    )
    for group, groups, parameters in itertools.product(
        ("simulated", "real") if options.world_size > 1 else ("simulated",), group_counts, parameter_counts
    ):
        ranks = options.world_size if group == "real" else SIMULATED_RANKS
        impls = (
            ("torch", "local")
            if group == "real" and groups * parameters > max_collectives
            else ("core", "torch", "local")
        )
        yield Case(
            name="step",
            params={"group": group, "ranks": ranks, "groups": groups, "params": parameters},
            build={impl: partial(build_impl, groups, parameters, impl) for impl in impls},
            clock="host",
            samples=samples,
            warmup_calls=2,
            world="ranks" if group == "real" else "simulated",
        )
