"""What a job's collectives carry in a step beside what its layout needs, by `plan`'s own volumes."""

from __future__ import annotations

import re

from dtbench.cost.plan.machines import find_machine
from dtbench.cost.plan.models import find_model
from dtbench.cost.plan.step import bytes_per_step
from dtbench.cost.plan.training import TrainingJob, TrainingLayout
from dtbench.errors import UsageError
from dtbench.grouping import group_by
from dtbench.records.job import Job, Needed

# What programs call mesh dims -> what plan calls them; of these two the layout has one alone more often than not.
_ROLES = {
    "replicate": "dp",
    "dp_replicate": "dp",
    "ddp": "dp",
    "shard": "fsdp",
    "dp_shard": "fsdp",
    "dp_shard_cp": "fsdp",
}
_DATA = {"dp", "fsdp"}
_KEYS = ("tp", "cp", "ep", "dp", "fsdp", "batch", "sequence", "micro_batch")


def needed(job: Job, model: str, layout: str) -> tuple[Needed, ...]:
    """A row per mesh dim that the layout needs. model: as `plan --model` has it. layout: `tp=2,fsdp=4,batch=8`; batch:
    sequences of a step over all ranks, default one per rank that sees its own.

    Raises:
        UsageError: of a layout that is none, or not this job's.
    """
    words = [word for word in re.split(r"[,\s]+", layout) if word]
    if not words or not all(re.fullmatch(rf"({'|'.join(_KEYS)})=[1-9]\d{{0,8}}", word) for word in words):
        raise UsageError(f"--layout {layout!r}, expected NAME=COUNT, ... with the names {', '.join(_KEYS)}")
    given = {name: int(count) for name, count in (word.split("=") for word in words)}
    tp, cp, ep = (given.get(dim, 1) for dim in ("tp", "cp", "ep"))
    dp = given.get("dp", job.world_size // (tp * cp))
    fsdp, micro_batch = given.get("fsdp", 1), given.get("micro_batch", 1)
    one = TrainingLayout(pp=1, dp=dp, fsdp=fsdp, micro_batch=micro_batch, tp=tp, cp=cp, ep=ep)
    if one.ranks != job.world_size or one.copies % fsdp:
        raise UsageError(
            f"--layout {layout!r} is of {one.ranks} ranks, expected the job's {job.world_size}, fsdp a part of dp x cp"
        )
    training = TrainingJob(
        find_model(model), job.world_size, given.get("batch", dp * micro_batch), given.get("sequence", 4096)
    )
    needs = bytes_per_step(training, one, find_machine("h100-8x"))
    carried = group_by(
        (c for c in job.collectives if c.rank == job.ranks[0].rank), lambda c: _role(c.mesh_dim, needs)
    )
    rows = []
    for dim, size in needs.items():
        calls = carried.get(dim, [])
        carries = sum((call.bytes or 0) * call.stepped for call in calls) / max(job.ranks[0].steps, 1)
        dtypes = tuple(sorted({call.dtype or "unknown" for call in calls}))
        rows.append(Needed(mesh_dim=dim, carried=carries, needed=size, share=carries / size, dtypes=dtypes))
    return tuple(rows)


def _role(mesh_dim: str, needs: dict[str, float]) -> str:
    role = _ROLES.get(mesh_dim, mesh_dim)
    alone = _DATA & set(needs)
    return next(iter(alone)) if role in _DATA and len(alone) == 1 else role
