"""`dtbench plan` on measured tables: the CSV format, fits, intervals, machine files, the command line."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dtbench.cost.plan import machines, measured_steps, prediction_intervals
from dtbench.cost.plan.machines import (
    ErrorBounds,
    find_machine,
    machine_called,
)
from dtbench.cost.plan.measured_steps import read_table
from dtbench.cost.plan.training import PLAIN, Software, TrainingJob, TrainingLayout, built_in_models
from dtbench.errors import DtbenchError
from dtbench.records.topology import write_topology
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_topology import a_topology, ring_dim
from dtbench.tests.test_plan import H100, MACHINE, job, layout

STEPS = Path(__file__).parents[2] / "results" / "reference" / "step-times"
TITLES = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)"
)
GOOD = "8,32,4,1024,16,24,1024,2,2,2,219.7"


def read(tmp_path: Path, text: str, sequence: int = 4096) -> measured_steps.MeasuredSteps:
    path = tmp_path / "steps.csv"
    path.write_text(text, newline="")
    return measured_steps.read_steps(read_table(path), H100, sequence)


def plan(dtbench: Cli, *words: str) -> Any:
    """Runs `dtbench plan ... --json`, which must succeed, and returns what it printed."""
    code, out, err = dtbench("plan", *words, "--json")
    assert code == 0, err
    return json.loads(out)


def refused(dtbench: Cli, *words: str) -> str:
    """Runs `dtbench plan`, which must refuse its input, and returns the line that it printed."""
    code, _, err = dtbench("plan", *words)
    assert (code, err.count("\n")) == (2, 1)
    return err


# ------------------------------------------------------------------------------------- the CSV format


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff{TITLES}\n{GOOD}\n",
        f"{TITLES}\r\n{GOOD}\r\n",
        f"{TITLES},notes,\n{GOOD},slow,\n,,,\n",
        f"{','.join(reversed(TITLES.split(',')))}\n{','.join(reversed(GOOD.split(',')))}\n",
        f"{TITLES.replace('(ms)', '(s)')}\n{GOOD.replace('219.7', '0.2197')}\n",
        f"{TITLES.replace('data parallelism,', '')}\n{GOOD.replace('2,2,2,', '2,2,')}\n",
        f"gpus,gbs,mbs,hidden,attention_heads,layers,Sequence Length,TP,DP,PP,iteration_time_ms\n{GOOD}\n",
    ],
)
def test_titles_ignore_case_order_and_punctuation(text: str, tmp_path: Path) -> None:
    (step,) = read(tmp_path, text).steps
    assert (step.time_s, step.layout, step.job) == (
        pytest.approx(0.2197),
        layout(tp=2, pp=2, dp=2, micro_batch=4),
        TrainingJob(measured_steps.gpt(1024, 16, 24), 8, 32, 1024, PLAIN),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TITLES, "has no rows"),
        (f"{TITLES},colour\n{GOOD},red", "unknown column 'colour', expected some of gpus, nodes"),
        (f"{TITLES.replace('# layers', 'notes')}\n{GOOD}", "has no column layers"),
        (
            f"{TITLES.replace('iteration time (ms)', 'notes')}\n{GOOD}",
            "has no column iteration time or tokens/s",
        ),
        (f"{TITLES.replace(' (ms)', '')}\n{GOOD}", "unknown column 'iteration time'"),
        (
            f"{TITLES}\n{GOOD.replace('219.7', '-1')}",
            "line 2: iteration time is '-1', expected a number from",
        ),
        (f"{TITLES}\n{GOOD.replace('8,32', '8.5,32')}", "line 2: gpus is 8.5, expected an integer"),
        (
            f"{TITLES}\n{GOOD.rpartition(',')[0]}",
            "most frequent reason (1 row, first in line 2): the time is missing",
        ),
        (f"{TITLES}\n{GOOD.replace('8,32', '9,32', 1)}", "x pipeline parallelism is 8, expected the 9 GPUs"),
        (f"{TITLES}\n{GOOD.replace(',4,', ',5,', 1)}", "the global batch 32 is not a multiple"),
        (f"{TITLES}\n{GOOD.replace('1024,16', '1000,16')}", "hidden size 1000 is not a multiple"),
        (f"{TITLES}\n64,64,1,1024,16,24,1024,64,1,1,9", "tensor parallelism is 64, expected at most the 16"),
        (f"{TITLES}\n64,64,1,1024,16,24,1024,1,1,64,9", "pipeline parallelism x chunks is 64, expected at"),
        (f"{TITLES},recomputation\n{GOOD},some", "recomputation is 'some', expected one of none, selective"),
        (f"{TITLES},zero\n{GOOD},4", "line 2: zero is '4', expected 0 to 3"),
        (f"{TITLES},precision\n{GOOD},NVFP4", "precision is nvfp4, expected bf16, fp16 or fp8"),
        ("size(B),count\n8,2", "has no column gpus: give --gpus"),
        ("gpus,bytes\n8,2", "has no column time"),
        ("gpus,bytes,time (us)\n8,8,x", "line 2: time is 'x', expected a number from"),
        ("system,gpus,bytes,time (us)\nh100_sxm,8,8,1", "has no row for a100-8x: h100_sxm is not a100-8x"),
    ],
)
def test_invalid_tables_are_refused_in_one_line(
    text: str, message: str, tmp_path: Path, dtbench: Cli
) -> None:
    (tmp_path / "steps.csv").write_text(text)
    assert message in refused(dtbench, "--validate", "steps.csv")


PLAYBOOK = """model,nodes,mbs,grad_acc,gbs,dp,pp,tp,zero,mfu_pct,tok_per_s_per_gpu,tok_per_s,gpu_mem_gb
1B,1,1,32,256,8,1,1,1,38.1,39006,312045,24.2
8B,2,1,128,256,2,4,2,0,38.7,6429,102856,42.7
3B,1,8,4,256,4,1,2,0,,,,
1B,1,1,16,256,8,1,1,1,38.1,39006,312045,24.2
9B,1,1,32,256,8,1,1,1,38.1,39006,312045,24.2
1B,1,1,32,256,8,1,1,1,38.1,39006,0.0,24.2
"""


def test_missing_properties_are_assumed_and_unsupported_rows_left_out(tmp_path: Path) -> None:
    measured = read(tmp_path, PLAYBOOK)
    small, large = measured.steps
    assert (small.line, small.time_s, small.memory) == (2, pytest.approx(256 * 4096 / 312045), 24.2e9)
    assert small.job == TrainingJob(built_in_models()["nanotron-1b"], 8, 256, 4096, Software(zero=1))
    assert (large.line, large.layout, large.job.software) == (
        3,
        TrainingLayout(2, 4, 2, 1, 1),
        Software(zero=0),
    )
    assert {reason.partition(":")[0]: lines for reason, lines in measured.left_out.items()} == {
        "the time is missing": [4],
        "micro batch x gradient accumulation x data parallel is not the global batch": [5],
        "unknown model 9B": [6],
        "tokens/s is rounded to 0": [7],
    }
    assert any("sequence length 4096" in note for note in measured.notes)
    assert "the time comes from the column tokens/s; not used: tokens/s/gpu, mfu_pct" in measured.notes
    assert read(tmp_path, PLAYBOOK, sequence=2048).steps[0].job.sequence == 2048
    notes = read(tmp_path, PLAYBOOK.replace("312045", "9312045")).notes
    assert "1 of 2 rows exceed the peak FLOP/s of h100-8x: check --machine" in notes


def test_every_column_affects_the_step(tmp_path: Path) -> None:
    (tmp_path / "moe.json").write_text(
        json.dumps({"hidden": 512, "layers": 32, "heads": 8, "ffn": 64, "vocab": 100, "experts": 8})
    )
    (step,) = read(
        tmp_path,
        "system,model,gpus,global batch,micro batch,sequence length,tp,pp,cp,ep,fsdp,precision,recomputation,VP,"
        "sequence parallel,flash attention,overlap,training,memory (GiB),tokens/s/gpu\n"
        f"DGX-H100,{tmp_path}/moe.json,64,64,1,8192,2,2,2,4,8,MXFP8,selective,2,no,no,no,pre-training,40,4096\n",
    ).steps
    # 8 shards of dp are 16 of dp x cp.
    assert step.layout == TrainingLayout(2, 2, 8, 16, 1, 2, "selective", 2, 4)
    assert (step.job.model.experts, step.job.model.layers) == (8, 32)
    assert step.job.software == Software(False, False, False, precision="fp8")
    assert (step.time_s, step.memory) == (pytest.approx(64 * 8192 / 4096 / 64), 40 * 2**30)


def test_rows_of_other_machines_and_unsupported_training_are_left_out(tmp_path: Path) -> None:
    rows = [f"{row},8,64,2,9000\n" for row in ("llama-8b,DGX-H100,", "llama-8b,DGX-B200,", "llama-8b,,LoRA")]
    measured = read(
        tmp_path, "model,system,training,gpus,global batch,micro batch,tokens/s\n" + "".join(rows)
    )
    assert ([step.line for step in measured.steps], measured.left_out) == (
        [2],
        {"DGX-B200 is not h100-8x": [3], "training of low-rank adapters is not supported": [4]},
    )


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("DGX-H100", "h100-8x"),
        ("h100_80gb", "h100-8x"),
        ("8xH100", "h100-8x"),
        ("8xb200", "b200-8x"),
        ("NVIDIA GB200", "gb200"),
        ("T4", None),
        ("2x", None),
    ],
)
def test_table_of_steps_names_a_machine(name: str, machine: str | None) -> None:
    assert machine_called(name) == machine


def test_table_of_collectives_is_predicted_from_the_machine(tmp_path: Path, dtbench: Cli) -> None:
    path = tmp_path / "nccl.csv"
    size, us = find_machine("h200-8x").collectives["all_gather"]["4"][-1]
    path.write_text(
        "system,op,n_gpus,bytes,time_us\n"
        f"h200_sxm,all_gather,4,{size:.0f},{us}\nh200_sxm,alltoall,8,1024,10\nh100_sxm,all_reduce,8,1024,10\n"
    )
    content = plan(dtbench, "--validate", str(path), "--machine", "h200-8x")
    gathered, exchanged = content["rows"]
    assert (gathered["label"], exchanged["label"]) == (
        f"all_gather of 4 GPUs: {size:.0f} B",
        "all_to_all of 8 GPUs: 1024 B",
    )
    assert gathered["predicted_s"] == pytest.approx(us * 1e-6)
    assert "1 row: h100_sxm is not h200-8x (line 4)" in content["verdict"]
    path.write_text(f"size(B),time(ns),busbw(GB/s),time(ns)\n{2**20},44210,23.7,1\n")  # in place is not read
    (row,) = plan(dtbench, "--validate", str(path), "--gpus", "8")["rows"]
    assert (row["label"], row["measured_s"]) == ("all_reduce of 8 GPUs: 1048576 B", pytest.approx(44.21e-6))


@pytest.mark.parametrize(
    ("file", "machine", "most", "coverage"),
    [
        # what the profiling predictor vTrain publishes is 8.4 % and 14.7 %
        ("a100-one-node", "a100-8x", 0.08, 0.9),
        ("a100-64-gpus", "a100-8x", 0.12, 0.9),
        ("a100-256-gpus", "a100-8x", 0.12, 0.9),  # not fitted
        ("llm-foundry-h100", "h100-8x", 0.06, 0.9),
        ("torchtitan-h100", "h100-8x", 0.14, 0.85),
        ("megatron-bridge-newest", "gb200", 0.2, 0.9),
        ("playbook-h100", "h100-8x-nanotron", 0.25, 0.9),
    ],
)
def test_published_steps_are_predicted_as_accurately_as_documented(
    file: str, machine: str, most: float, coverage: float, dtbench: Cli
) -> None:
    """Halves of tables that the constants were not fitted to are in results/plan."""
    content = plan(dtbench, "--validate", str(STEPS / f"{file}.csv"), "--machine", machine)
    rows = content["rows"]
    error = sum(abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows) / len(rows)
    assert content["mean_error"] == pytest.approx(error) and error < most
    assert sum(row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows) / len(rows) >= coverage


# --------------------------------------------------------------------------------- fits and machines


def test_intervals_depend_on_the_kind_and_widen_outside_the_fitted_range() -> None:
    machine = structs.replace(
        MACHINE,
        error=ErrorBounds(low=0.5, high=4.0, kinds={"one node": (0.9, 1.1)}),
        fitted_range={"GPUs": (1, 64), "parameters": (1e8, 1e11), "tokens a sequence": (1024, 1024)},
    )
    # Beyond the measured range, errors in one direction may also occur in the other.
    slow = structs.replace(machine, error=ErrorBounds(low=1.25, high=2.0, kinds={}))
    for judged, gpus, interval in (
        (machine, 8, (0.9, 1.1)),
        (machine, 64, (0.5, 4.0)),
        (machine, 256, (0.5**1.8, 4**1.8)),
        (slow, 64, (1.25, 2.0)),
        (slow, 256, (0.5**1.8, 2**1.8)),
    ):
        assert prediction_intervals.interval(job(gpus), layout(dp=gpus), judged) == pytest.approx(interval)
    assert [prediction_intervals.extrapolation(job(gpus), machine) for gpus in (64, 256)] == [
        None,
        (
            "extrapolated beyond the steps that round was fitted to: "
            "256 GPUs (a factor of 4.00 outside the fitted range 1 to 64)"
        ),
    ]
    sparse = prediction_intervals.error_of(["one node"] * 10, [1.0] * 9 + [2.0])
    assert (sparse.high, sparse.kinds) == (2.0, {})  # of few steps the whole range
    assert sparse.low <= prediction_intervals.LAUNCH_TO_LAUNCH[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_tflops": -1}, "peak_tflops: expected float >= 1e-12"),
        ({"all_reduce": {}}, "all_reduce is empty"),
        ({"all_reduce": {"9": [[1, 1]]}}, "all_reduce.9 is not a number of ranks"),
        ({"all_reduce": {"8": [[2, 1], [1, 1]]}}, "rows with increasing bytes"),
        ({"all_reduce": {"8": [[1, 2], [2, 1]]}}, "times that never decrease"),
        ({"error": {"low": 2, "high": 1}}, "error: low is above high"),
        ({"fitted": None}, "fitted: expected object"),
    ],
)
def test_invalid_machines_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    valid = json.loads((Path(machines.__file__).parent / "machines" / "a100-8x.json").read_text())
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(valid | change))
    with pytest.raises(DtbenchError, match=f"--machine .*{re.escape(message)}"):
        find_machine(str(path))


# --------------------------------------------------------------------------------- the command line

SEARCH = ["--model", "llama-8b", "--gpus", "8", "--batch", "8"]


def test_plan_tables_and_json_agree(dtbench: Cli) -> None:
    content = plan(dtbench, *SEARCH)
    best = content["best"][0]
    assert content["parameters"] == built_in_models()["llama-8b"].elements()
    assert best["step_s"] == pytest.approx(sum(best["parts_s"].values()))
    assert best["low_s"] < best["step_s"] < best["high_s"]
    assert max(sum(found["memory_bytes"].values()) for found in content["best"]) <= content["limit_bytes"]
    code, out, _ = dtbench("plan", *SEARCH)
    assert code == 0 and best["words"] in out and best["why"].partition(",")[0] in out


def test_fitted_machine_can_be_used(tmp_path: Path, dtbench: Cli) -> None:
    machine = str(tmp_path / "machine.json")
    few = tmp_path / "few.csv"
    few.write_text("\n".join([TITLES, *[GOOD] * 7]))
    assert "got 7 measured steps, expected at least 8" in refused(dtbench, "--fit", str(few), "-o", machine)
    code, out, err = dtbench("plan", "--fit", str(STEPS / "a100-64-gpus.csv"), "-o", machine)
    assert code == 0 and "mean error" in out and f"to {machine}" in out, err
    assert find_machine(machine).fitted_on == "a100-64-gpus.csv"
    validation = plan(dtbench, "--validate", str(STEPS / "a100-256-gpus.csv"), "--machine", machine)
    assert validation["mean_error"] < 0.12  # 6.5 % seen
    assert plan(dtbench, *SEARCH, "--machine", machine)["best"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [],
            "missing --model and --gpus and --batch, e.g. `dtbench plan --model llama-8b --gpus 8 --batch 256`",
        ),
        (
            ["--gpus", "64"],
            "missing --model and --batch, e.g. `dtbench plan --model llama-8b --gpus 64 --batch 256`",
        ),
        ([*SEARCH, "--model", "no-such"], "--model no-such: unknown model"),
        ([*SEARCH, "--gpus", "7"], "no layout divides a batch of 8 sequences over 7"),
        ([*SEARCH, "--model", "llama-405b"], "does not fit on 8 GPUs with"),
        ([*SEARCH, "--memory", "3"], "got --memory 3, expected more than"),
        ([*SEARCH, "--machine", "abacus"], "--machine abacus: unknown machine"),
        ([*SEARCH, "-o", "b.json"], "-o requires --fit"),
        (["--validate", "a.csv", "--fit", "b.csv"], "exclude each other"),
        (
            ["--validate", "a.csv", "--model", "llama-8b"],
            "--validate does not use --model: leave it out",
        ),
        (["--fit", "a.csv", "--memory", "40", "-o", "b.json"], "does not use --memory: leave it out"),
        (["--fit", "b.csv"], "give -o FILE.json"),
        (["--validate", "/dev/zero"], "is not a regular file"),
    ],
)
def test_invalid_input_is_reported_in_one_line(options: list[str], message: str, dtbench: Cli) -> None:
    assert message in refused(dtbench, *options)


def test_topology_determines_the_links(tmp_path: Path, dtbench: Cli) -> None:
    times_s = []
    for bandwidth in (20.0, 2.0):
        write_topology(a_topology(ring_dim("dp", 4, bandwidth, 5.0, "all_reduce")), tmp_path / "t.json")
        content = plan(dtbench, *SEARCH, "--gpus", "64", "--batch", "64", "--topology", "t.json")
        times_s.append(content["best"][0]["step_s"])
    assert times_s[0] * 1.1 < times_s[1] < math.inf
