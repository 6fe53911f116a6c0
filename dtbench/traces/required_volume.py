"""Compares the bytes of a job's collectives with the bytes that `dtbench plan` predicts for its layout."""

import re
from collections.abc import Iterator, Mapping

from dtbench.cost.plan.machines import find_machine
from dtbench.cost.plan.step import bytes_per_step
from dtbench.cost.plan.training import TrainingJob, TrainingLayout, TransformerModel
from dtbench.errors import UsageError
from dtbench.grouping import group_by
from dtbench.records.job import Job, VolumeComparison

# Common names of mesh dims -> the planner's name.
_PLANNER_DIMS = {
    "replicate": "dp",
    "dp_replicate": "dp",
    "ddp": "dp",
    "shard": "fsdp",
    "dp_shard": "fsdp",
    "dp_shard_cp": "fsdp",
}
_DATA_DIMS = {"dp", "fsdp"}
_KEYS = ("tp", "cp", "ep", "dp", "fsdp", "batch", "sequence", "micro_batch")


def read_layout(layout: str) -> dict[str, int]:
    """Returns the counts of a layout such as "tp=2,fsdp=4,batch=8".

    Raises:
        UsageError: the layout is malformed.
    """
    items = [item for item in re.split(r"[,\s]+", layout) if item]
    if not items or not all(re.fullmatch(rf"({'|'.join(_KEYS)})=[1-9]\d{{0,8}}", item) for item in items):
        raise UsageError(f"--layout {layout!r}, expected NAME=COUNT, ... with the names {', '.join(_KEYS)}")
    return {name: int(count) for name, count in (item.split("=") for item in items)}


def compare_volumes(
    job: Job, model: TransformerModel, layout: Mapping[str, int]
) -> Iterator[VolumeComparison]:
    """Yields a comparison for each mesh dim over which the layout communicates.

    Args:
        job: the job.
        model: the model that the job trains.
        layout: the counts of `read_layout`. batch is the number of sequences per step on all ranks; the default is one
            for each rank that reads its own data.

    Raises:
        UsageError: the job has no steps, or the layout does not have the job's number of ranks.
    """
    if not job.ranks[0].steps:
        cause = "the traces show no steps: call profiler.step(), or wrap each step in record_function"
        if job.lacks_times:
            cause = "logs of NCCL's inspector show no steps: give traces"
        raise UsageError(f"--model compares bytes per step, and {cause}")
    tp, cp, ep = (layout.get(dim, 1) for dim in ("tp", "cp", "ep"))
    dp = layout.get("dp", max(1, job.world_size // (tp * cp)))
    fsdp, micro_batch = layout.get("fsdp", 1), layout.get("micro_batch", 1)
    training_layout = TrainingLayout(pp=1, dp=dp, fsdp=fsdp, micro_batch=micro_batch, tp=tp, cp=cp, ep=ep)
    if training_layout.ranks != job.world_size or training_layout.copies % fsdp:
        raise UsageError(
            f"--layout {','.join(f'{name}={count}' for name, count in layout.items())} has {training_layout.ranks} "
            f"ranks, expected the job's {job.world_size} and an fsdp that divides dp x cp"
        )
    training = TrainingJob(
        model, job.world_size, layout.get("batch", dp * micro_batch), layout.get("sequence", 4096)
    )
    required = bytes_per_step(training, training_layout, find_machine("h100-8x"))
    calls_by_dim = group_by(
        (call for call in job.collectives if call.rank == job.ranks[0].rank),
        lambda call: _planner_dim(call.mesh_dim, required),
    )
    for dim, required_bytes in required.items():
        calls = calls_by_dim.get(dim, [])
        measured_bytes = sum((call.bytes or 0) * call.calls_in_steps for call in calls) / job.ranks[0].steps
        yield VolumeComparison(
            mesh_dim=dim,
            measured_bytes=measured_bytes,
            required_bytes=required_bytes,
            ratio=measured_bytes / required_bytes,
            dtypes=tuple(sorted({call.dtype or "unknown" for call in calls})),
        )


def _planner_dim(mesh_dim: str, required: dict[str, float]) -> str:
    """Returns the planner's name of a mesh dim. If only one of dp and fsdp communicates, both names mean that one."""
    planner_dim = _PLANNER_DIMS.get(mesh_dim, mesh_dim)
    data_dims = _DATA_DIMS & set(required)
    return next(iter(data_dims)) if planner_dim in _DATA_DIMS and len(data_dims) == 1 else planner_dim
