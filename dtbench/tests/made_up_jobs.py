"""Jobs for tests: eight ranks on a mesh of 2 x 4, of which one is late; and of any other number."""

import random
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from dtbench.records.job import Collective, DimParts, Job, Lane, RankJob, StepParts, Waits

STEPS, STEP_S = 3, 0.4
# Mesh dim, group size, collective, dtype, bytes, calls per step, seconds per call, bus bandwidth, asked by.
CALLS = (
    ("dp", 2, "all_gather", "bfloat16", 128 << 20, 32, 1.1e-3, 61e9, "FSDP::all_gather"),
    ("dp", 2, "reduce_scatter", "float32", 256 << 20, 32, 2.3e-3, 58e9, "FSDP::post_backward_reduce"),
    ("tp", 4, "all_reduce", "bfloat16", 32 << 20, 64, 0.35e-3, 143.8e9, "RowwiseParallel"),
    ("tp", 4, "all_gather", "bfloat16", 8 << 20, 128, 0.09e-3, 70e9, "ColwiseParallel"),
    ("world", 8, "all_reduce", "float32", 4, 1, 0.06e-3, 117e3, "clip_grad_norm_"),
)


def rank_job(rank: int, late_s: float = 0.0, **fields: Any) -> RankJob:
    parts = StepParts(
        step_s=STEP_S + late_s,
        computation_s=0.29 + late_s,
        communication_s=0.15,
        exposed_s=0.07 - late_s / 2,
        copy_s=0.004,
        idle_s=0.03,
        host_bound_s=0.012,
    )
    total = {name: STEPS * getattr(parts, name) for name in StepParts.__struct_fields__[1:]}
    job = RankJob(
        rank=rank,
        source=f"rank{rank}.json.gz",
        host=f"node{rank // 4}",
        device="NVIDIA H100 80GB HBM3",
        steps=STEPS,
        steps_source="ProfilerStep#",
        step_s=STEP_S + late_s,
        span_s=STEPS * (STEP_S + late_s),
        each_step=(parts,) * STEPS,
        dims=tuple(
            DimParts(
                mesh_dim=dim,
                communication_s=STEPS * comm,
                exposed_s=STEPS * exposed,
                waiting_s=STEPS * exposed / 2,
            )
            for dim, comm, exposed in (
                ("dp", 0.1, 0.055 - late_s / 2),
                ("tp", 0.045, 0.014),
                ("world", 0.0001, 0.0001),
            )
        ),
        clock_error_s=2e-6,
        **total,
    )
    return replace(job, **fields)


def collectives(rank: int, calls: Sequence[tuple[Any, ...]] = CALLS) -> list[Collective]:
    return [
        Collective(
            rank=rank,
            collective=name,
            mesh_dim=dim,
            group_size=size,
            dtype=dtype,
            bytes=nbytes,
            count=STEPS * count,
            in_steps=STEPS * count,
            time_s=STEPS * count * mean_s,
            median_s=mean_s,
            best_s=0.9 * mean_s,
            transfer_s=0.8 * mean_s,
            busbw=busbw,
            callers=(op,),
        )
        for dim, size, name, dtype, nbytes, count, mean_s, busbw, op in calls
    ]


def lanes(rank: int, late_s: float) -> list[Lane]:
    """Layer by layer a gather under computation, and gradients of which the end is exposed."""
    chance = random.Random(rank)
    computation, dp, tp, exposed, at = [], [], [], [], 0.0
    for _ in range(32):
        took = (STEP_S + late_s) / 32 * chance.uniform(0.95, 1.05)
        computation.append((at, at + 0.75 * took))
        dp.append((at + 0.3 * took, at + 0.9 * took))
        tp.append((at + 0.75 * took, at + 0.97 * took))
        exposed.append((at + 0.75 * took, at + 0.97 * took))
        at += took
    lanes = {"computation": computation, "communication dp": dp, "communication tp": tp, "exposed": exposed}
    return [Lane(rank=rank, name=name, intervals=tuple(intervals)) for name, intervals in lanes.items()]


def job(ranks: int = 8, late: int = 3, **fields: Any) -> Job:
    """The rank `late` computes 20 ms longer, so that the others wait for it over dp."""
    late_s = {rank: 0.02 * (rank == late) for rank in range(ranks)}
    dp = Waits(
        mesh_dim="dp",
        group_size=2,
        calls=192,
        waiting_s={str(rank): 0.0 if rank == late else 0.4 + rank / 1e3 for rank in range(ranks)},
        transfer_s=0.3,
        last_counts={str(late): 165, "1": 9},
        late_s={str(late): 3.1e-3, "1": 0.2e-3},
        unclear=18,
    )
    job = Job(
        label="job-new",
        command=("torchrun", "--nproc-per-node", "8", "train.py", "--steps", "20"),
        world_size=ranks,
        backend="nccl",
        torch="2.9.0",
        ranks=tuple(rank_job(rank, late_s[rank]) for rank in range(ranks)),
        collectives=tuple(collective for rank in range(ranks) for collective in collectives(rank)),
        waits=(dp, replace(dp, mesh_dim="tp", group_size=4, last_counts={}, late_s={}, unclear=192)),
        aligned_by="ends of collectives",
        drawn_step=12,
        drawn_s=STEP_S + late_s.get(late, 0.0),
        lanes=tuple(lane for rank in range(ranks) for lane in lanes(rank, late_s[rank])),
        notes=("excluded 2 events with an impossible duration",),
    )
    return replace(job, **fields)
