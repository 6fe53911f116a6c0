"""Traces without kernels: of a job on CPUs they are read, of a job on an accelerator refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtbench.errors import DtbenchError
from dtbench.tests.made_up_traces import Event, event, gloo, header, kernel, launch, note, op, text_of, write
from dtbench.traces.job import read_job


@pytest.mark.parametrize(
    ("events", "shows"),
    [
        ([op("c10d::allreduce_", 0, 9), op("record_param_comms", 1, 5)], "nccl"),
        ([note("nccl:all_reduce", 0, 9), *gloo(20, 9)], "nccl:all_reduce"),
        ([note("xccl:broadcast", 0, 9)], "xccl:broadcast"),
        ([event("graph", 5, 9, "hpu_op")], "hpu_op"),
        ([event("hccl::all_reduce", 5, 9, "mtia_ccp_events")], "mtia_ccp_events"),
        ([op("aten::_mps_convolution", 5, 9)], "aten::_mps_convolution"),
        ([op("npu::npu_fusion_attention", 5, 9)], "npu::npu_fusion_attention"),
    ],
)
def test_trace_without_kernels_of_an_accelerators_job_is_refused(
    tmp_path: Path, events: list[Event], shows: str
) -> None:
    with pytest.raises(DtbenchError) as caught:
        read_job([write(tmp_path, [op("aten::mm", 0, 9), launch(3, 1), *events])])
    assert f"rank0.json has no kernels, although '{shows}' shows" in str(caught.value)
    assert "ProfilerActivity.CPU and .CUDA" in str(caught.value)


def test_trace_cut_off_before_its_kernels_is_refused(tmp_path: Path) -> None:
    text = text_of([op("aten::mm", 0, 9), op("c10d::allreduce_", 9, 9), kernel(20, 9)])
    (tmp_path / "t.json").write_bytes(text[: text.index(b'"kernel"')])
    with pytest.raises(DtbenchError, match="no kernels before the point where it is cut off, although"):
        read_job([tmp_path])


@pytest.mark.parametrize("backend", ["gloo", "mpi", "ucc", "ccl", "", "undefined"])
def test_trace_of_a_job_on_cpus_is_read_without_kernels(tmp_path: Path, backend: str) -> None:
    """Also where a profiler with CUDA's activities left calls of its runtime, as it does at its end."""
    head = header()
    head["distributedInfo"]["backend"] = backend
    events = [op("aten::mm", 0, 9), op("c10d::allreduce_", 9, 5), launch(30, 1)]
    (tmp_path / "t.json").write_bytes(text_of(events, head))
    job = read_job([tmp_path])
    assert (job.ranks[0].computation_s, job.collectives) == (pytest.approx(9e-6), ())
    assert any("calls of torch.distributed have no times" in text for text in job.notes)


@pytest.mark.parametrize(
    ("config", "kernels", "backend"),
    [
        ("cpu:gloo", False, "gloo"),
        ("cpu:gloo,cuda:nccl", False, "gloo"),
        ("cpu:gloo,cuda:nccl", True, "nccl"),
        (None, True, "undefined"),
    ],
)
def test_backend_that_torch_chose_is_named(
    tmp_path: Path, config: str | None, kernels: bool, backend: str
) -> None:
    default = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": config, "ranks": [0, 1]}
    head = header(groups=[default])
    head["distributedInfo"]["backend"] = "undefined"
    (tmp_path / "t.json").write_bytes(
        text_of([kernel(0, 9)] if kernels else [op("aten::mm", 0, 9), *gloo(9, 9)], head)
    )
    assert read_job([tmp_path]).backend == backend
