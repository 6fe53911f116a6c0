"""What a layout needs, by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dtbench.cost.plan.machines import find_machine
from dtbench.cost.plan.step import ITEM, bytes_per_step
from dtbench.cost.plan.training import TrainingJob, TrainingLayout, find_model
from dtbench.errors import UsageError
from dtbench.records.job import Collective, Job, RankJob
from dtbench.traces.required_volume import compare_volumes

MODEL, MACHINE = find_model("llama-8b"), find_machine("h100-8x")
LAYOUT = TrainingLayout(tp=2, pp=1, dp=4, fsdp=1, micro_batch=1)


def test_bytes_per_step_by_dim() -> None:
    job = TrainingJob(MODEL, 8, 8, 2048)
    with_fsdp = bytes_per_step(job, replace(LAYOUT, fsdp=4), MACHINE)
    # Two blocks a layer, in each 2 collectives ahead and 3 back, of all activations; two micro batches.
    assert with_fsdp["tp"] == MODEL.layers * 2 * 2 * 5 * 2048 * MODEL.hidden * ITEM
    weights = (MODEL.layers * MODEL.layer_elements(2) + MODEL.vocab_elements(2)) * ITEM
    gradients = weights / ITEM * MACHINE.fitted.gradient_bytes
    assert with_fsdp["fsdp"] == pytest.approx(2 * (2 * weights + gradients))
    assert set(with_fsdp) == {"tp", "fsdp"}
    assert set(bytes_per_step(job, LAYOUT, MACHINE)) == {"tp", "dp"}
    with pytest.raises(ValueError, match="pp=2"):
        bytes_per_step(job, replace(LAYOUT, pp=2, dp=2), MACHINE)


def test_job_is_compared_with_the_required_volume() -> None:
    size = round(bytes_per_step(TrainingJob(MODEL, 8, 4, 2048), LAYOUT, MACHINE)["dp"])
    times = {"time_s": 1.0, "median_s": 1.0, "best_s": 1.0}
    call = Collective(
        rank=0,
        collective="all_reduce",
        mesh_dim="replicate",
        dtype="float32",
        bytes=size,
        count=6,
        in_steps=6,
        **times,
    )
    job = Job(world_size=8, ranks=(RankJob(rank=0, steps=3),), collectives=(call,))
    tp, dp = compare_volumes(job, "llama-8b", "tp=2 batch=4, sequence=2048")
    assert (tp.mesh_dim, tp.measured_bytes) == ("tp", 0)
    assert dp.ratio == pytest.approx(2) and dp.dtypes == ("float32",)
    assert re.fullmatch(r"dp transfers .* a step \(float32\), 2.00x the .* that the layout requires", str(dp))
    for layout, message in {
        "tp=2;": "expected NAME=COUNT",
        "tp=3": "has 6 ranks, expected the job's 8",
    }.items():
        with pytest.raises(UsageError, match=message):
            compare_volumes(job, "llama-8b", layout)
