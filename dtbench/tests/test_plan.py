"""Planning: counts by hand and from papers, a search that misses nothing, tables read strictly, fits."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from dtbench.cost.plan import search, tables, validate
from dtbench.cost.plan.fit import fit_machine
from dtbench.cost.plan.job import PLAIN, Job, Layout, Software
from dtbench.cost.plan.machines import (
    Fitted,
    Machine,
    Network,
    NodeLinks,
    TopologyLinks,
    built_in,
    find_machine,
)
from dtbench.cost.plan.memory import memory_of
from dtbench.cost.plan.models import built_in_models
from dtbench.cost.plan.step import model_flops, predict_step
from dtbench.records.topology import HostLayout as Place
from dtbench.records.topology import write_topology
from dtbench.suite.errors import DtbenchError, UsageError
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_topology import made_topology, ring_dim
from dtbench.text.units import format_seconds

STEPS = Path(__file__).parents[2] / "results" / "reference" / "step-times"
GPT = tables.gpt(hidden=1024, layers=8, heads=16, vocab=51200)
# Round figures: a step's parts can be added up by hand. A node's all-reduce of n bytes takes n / 100 GB/s.
MACHINE = Machine(
    name="round",
    source="made up",
    gpus_per_node=8,
    memory_GiB=80,
    peak_tflops=100,
    memory_GBps=1000,
    fitted=Fitted(
        matmul=1.0, memory=1.0, host_us=1, host_tp_us=1, layer_us=1e-6, logit_bytes=1e-6, step_us=1e-6
    ),
    fitted_on="nothing",
    network=Network(GBps=100, latency_us=1e-6),
    all_reduce={"8": [(1e3, 1e-2), (1e9, 1e4)]},
)
LINKS = NodeLinks(MACHINE)


def job(gpus: int, batch: int = 32, software: Software = PLAIN, **model: Any) -> Job:
    return Job(structs.replace(GPT, **model), gpus, batch, 1024, software)


def layout(tp: int = 1, pp: int = 1, dp: int = 1, micro_batch: int = 1, **more: Any) -> Layout:
    return Layout(tp, pp, dp, more.pop("fsdp", 1), micro_batch, **more)


def total(of: Job, how: Layout, machine: Machine = MACHINE) -> float:
    return predict_step(of, how, machine, NodeLinks(machine)).total_s


# ----------------------------------------------------------------------------------------- a step


def test_flops_of_a_step_are_those_of_the_published_formula() -> None:
    """Narayanan et al. 2021, section 5.1: 96 B s l h^2 (1 + s / 6h + V / 16 l h); of the layers one pass of four is
    recomputation."""
    b, s, layers, h, vocab = 32, 1024, 8, 1024, 51200
    published = 96 * b * s * layers * h**2 * (0.75 * (1 + s / (6 * h)) + vocab / (16 * layers * h))
    assert model_flops(job(1)) == pytest.approx(published)


def test_one_gpu_computes_and_nothing_else() -> None:
    step = predict_step(job(1), layout(), MACHINE, LINKS)
    assert (step.tensor_s, step.pipeline_s, step.data_s, step.bubble_s) == (0, 0, 0, 0)
    scores = 10.5 * 16 * 1024
    moved = 2 * 32 * 1024 * 8 * (33 * 1024 + 24 * 1024 + 6 * 4096 + scores) / 1e12
    assert step.compute_s == pytest.approx(model_flops(job(1)) / 1e14 + moved, rel=1e-6)
    assert 0 < step.mfu(MACHINE, 1) < 1


def test_full_recomputation_adds_a_forward_pass_of_the_layers() -> None:
    head = 6 * 32 * 1024 * 51200 * 1024 / 1e14
    plain, again = (
        predict_step(job(1), layout(recompute=how), MACHINE, LINKS).compute_s - head
        for how in ("none", "full")
    )
    assert again == pytest.approx(plain * 4 / 3, rel=1e-6)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_pipeline_waits_for_its_first_and_last_micro_batches(chunks: int) -> None:
    """arXiv 2104.04473: (p - 1) / m of the layers' time, over the chunks."""
    of = job(4, vocab=1)
    step = predict_step(of, layout(pp=4, chunks=chunks), MACHINE, LINKS)
    assert step.bubble_s == pytest.approx(step.compute_s * 3 / 32 / chunks, rel=1e-3)
    assert step.total_s == pytest.approx(
        step.compute_s + step.exposed_s + step.bubble_s + step.once_s, rel=1e-12
    )


def test_tensor_parallel_ranks_wait_for_what_weight_gradients_do_not_hide() -> None:
    step = predict_step(job(8), layout(tp=8), MACHINE, LINKS)
    one = 1024 * 1024 * 2 / 100e9
    weights = 2 * 1024 * 12 * 1024**2 / 8 / 1e14  # one forward pass, as long as the weights' gradients
    assert step.tensor_s == pytest.approx(32 * 8 * (2 * one + 2 * max(0, one - weights / 2)), rel=1e-3)


def test_a_layer_takes_at_least_what_the_host_needs() -> None:
    slow = structs.replace(MACHINE, fitted=structs.replace(MACHINE.fitted, host_us=1e6))
    assert total(job(1, batch=3), layout(), slow) == pytest.approx(3 * 8, rel=0.02)


@pytest.mark.parametrize(("tp", "dp"), [(1, 16), (8, 16)])
def test_gradients_between_nodes_share_the_nodes_adapters(tp: int, dp: int) -> None:
    """Whether a node's GPUs hold parts of one copy or eight copies, a node sends the same bytes."""
    of = job(tp * dp)
    elements = GPT.layers * GPT.layer_elements(tp) + GPT.end_elements(tp)
    sent = 2 * 15 / 16 * elements * 2 * tp
    assert predict_step(of, layout(tp=tp, dp=dp), MACHINE, LINKS).data_s == pytest.approx(
        sent / 100e9, rel=1e-6
    )


def test_overlap_hides_gradients_but_for_the_last_layers() -> None:
    of, how = job(16, batch=512), layout(dp=16, micro_batch=32)
    alone = predict_step(of, how, MACHINE, LINKS).data_s
    hidden = predict_step(replace(of, software=replace(PLAIN, overlap=True)), how, MACHINE, LINKS).data_s
    assert hidden == pytest.approx(alone / GPT.layers)


def test_full_sharding_gathers_in_every_micro_batch() -> None:
    of = job(8, batch=16)
    once, sharded = (predict_step(of, layout(dp=8, fsdp=n), MACHINE, LINKS).data_s for n in (1, 8))
    assert sharded == pytest.approx(
        2 * 1.5 * once
    )  # two micro batches; gathers and a scatter of half an all-reduce each


def test_experts_cost_those_that_a_token_visits() -> None:
    few, many = (model_flops(job(1, experts=8, experts_per_token=n)) for n in (1, 2))
    assert many - few == 3 * 32 * 1024 * 8 * 2 * 2 * 1024 * 4096


# ---------------------------------------------------------------------------------------- memory


def test_states_take_16_bytes_per_parameter_and_are_cut_as_the_layout_says() -> None:
    parameters = GPT.elements()
    held = memory_of(job(1), layout())
    assert held.weights + held.gradients + held.optimizer == 16 * parameters
    sharded = memory_of(job(8), layout(dp=8, fsdp=8))
    gathered = (2 * 2 + 2) * GPT.layer_elements()  # two layers' weights, one layer's gradients
    assert sharded.total - sharded.activations == pytest.approx(2 * parameters + gathered)
    assert memory_of(job(8, software=Software()), layout(dp=8)).optimizer == 12 * parameters / 8


@pytest.mark.parametrize(
    ("how", "software", "per_token"),
    [
        # Korthikanti et al. 2022, table 2: s b h (...) bytes per layer; here h = 1024, a s / h = 16
        ("none", PLAIN, lambda t: 10 + 24 / t + 5 * 16 / t),
        ("none", replace(PLAIN, sequence_parallel=True), lambda t: (34 + 5 * 16) / t),
        ("selective", replace(PLAIN, sequence_parallel=True), lambda t: 34 / t),
        ("full", PLAIN, lambda _: 2),
    ],
)
@pytest.mark.parametrize("tp", [1, 4])
def test_activations_are_those_of_the_published_formulas(
    how: str, software: Software, per_token: Callable[[int], float], tp: int
) -> None:
    few, many = (
        memory_of(job(4, software=software, layers=layers, vocab=1), layout(tp=tp, recompute=how)).activations
        for layers in (10, 20)
    )
    assert many - few == pytest.approx(10 * 1024 * 1024 * per_token(tp))


def test_the_first_stage_holds_a_micro_batch_per_stage() -> None:
    one, four = (memory_of(job(4, vocab=1), layout(pp=pp, dp=4 // pp)).activations for pp in (1, 4))
    assert four == pytest.approx(one, rel=1e-3)  # a quarter of the layers, four micro batches


# ---------------------------------------------------------------------------------------- search


def planned(of: Job, machine: Machine = MACHINE, limit: float = 80 * 2**30) -> search.Plan:
    return search.plan(of, machine, NodeLinks(machine), limit)


def test_the_best_layout_is_the_best_of_all() -> None:
    of = job(16, software=Software())
    found = planned(of)
    everything = list(search.all_layouts(of, MACHINE))
    assert len(everything) == len(set(everything)) == found.considered
    times = {how: total(of, how) for how in everything if memory_of(of, how).total <= 80 * 2**30}
    assert len(times) == found.fitting
    assert found.best[0].step.total_s == min(times.values())
    splits = [(one.layout.tp, one.layout.pp, one.layout.dp, one.layout.fsdp) for one in found.best]
    assert len(set(splits)) == len(splits)


def test_every_layout_uses_all_gpus_and_shares_the_batch() -> None:
    for how in search.all_layouts(job(48, batch=96, software=Software()), MACHINE):
        assert how.tp * how.pp * how.dp == 48
        assert how.dp % how.fsdp == 0
        assert how.micro_batches(96) * how.micro_batch * how.dp == 96
        assert GPT.layers % (how.pp * how.chunks) == 0
        assert how.chunks == 1 or how.micro_batches(96) % how.pp == 0


def test_all_layouts_of_the_tp_and_pp_that_divide_are_there() -> None:
    found = {(how.tp, how.pp) for how in search.all_layouts(job(16, batch=16), MACHINE)}
    assert found == {(tp, pp) for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)) if tp * pp <= 16}


def test_less_memory_takes_another_layout_or_none() -> None:
    of = job(8, batch=64, software=Software())
    wide, narrow = planned(of), planned(of, limit=2**30)
    assert narrow.fitting < wide.fitting
    assert narrow.best[0].memory.total <= 2**30
    assert narrow.best[0].step.total_s >= wide.best[0].step.total_s
    with pytest.raises(
        UsageError, match=r"does not fit on 8 GPUs with 1\.000 MiB each: the smallest layout .* needs"
    ):
        planned(of, limit=2**20)


def test_what_would_change_the_answer_is_said() -> None:
    of = job(32, batch=64, software=Software())
    slow = structs.replace(MACHINE, network=structs.replace(MACHINE.network, GBps=20))
    changes = planned(of, slow).changes
    assert [line.split(":")[0] for line in changes] == [
        "half the network",
        "twice the network",
        "matrix products 20 % slower",
        "a quarter less memory",
        "a quarter more memory",
    ]
    doubled = planned(of, structs.replace(slow, network=structs.replace(slow.network, GBps=40))).best[0]
    assert doubled.layout.words() in changes[1] or "the same layout" in changes[1]


def test_a_job_of_one_node_has_no_network_to_be_faster() -> None:
    changes = planned(job(8, batch=64)).changes
    assert (
        "no time of the step is priced between nodes of 8 GPUs" in changes[0]
        and "between nodes" in changes[1]
    )


def test_ten_thousand_ranks_are_a_search_of_some_thousand_layouts() -> None:
    of = Job(built_in_models()["llama-405b"], 10_000, 20_000, 4096)
    assert 0 < sum(1 for _ in search.all_layouts(of, find_machine("h100-8x"))) < 5_000


@pytest.mark.parametrize(("inner", "slower"), [(1, 1), (2, 4), (4, 4), (8, 1)])
def test_groups_that_share_a_nodes_adapters_reach_a_share_of_them(inner: int, slower: float) -> None:
    """One group over all ranks of a node and one adapter per group reach all; two or four groups a quarter."""
    alone, shared = (
        NodeLinks(structs.replace(MACHINE, network=structs.replace(MACHINE.network, shared=share)))
        for share in (1.0, 0.25)
    )
    times = [links.all_reduce(2**30, 16, inner) for links in (alone, shared)]
    assert times[1] == pytest.approx(slower * times[0], rel=1e-6)


def test_links_of_a_topology_price_a_node_and_the_network() -> None:
    dims = [
        ring_dim(name, n, bw, 1.0, "all_reduce", layout=Place(kind=kind))
        for name, n, bw, kind in (("dp", 4, 10.0, "inter-host"), ("tp", 8, 100.0, "intra-host"))
    ]
    links = TopologyLinks(made_topology(*dims), gpus_per_node=8)
    assert links.all_reduce(2**28, 1, 1) == 0
    assert links.all_reduce(2**28, 4, 8) > 5 * links.all_reduce(2**28, 8, 1) > 0
    assert links.send(2**28, 1, 8) > links.send(2**28, 1, 1)


# ----------------------------------------------------------------------------- measured steps, the fit


def test_constants_are_found_again() -> None:
    """Steps made by a machine of other constants: the fit predicts them, also those it has not seen."""
    truth = structs.replace(
        MACHINE,
        fitted=Fitted(
            matmul=0.6, memory=0.5, host_us=2000, host_tp_us=2500, layer_us=800, logit_bytes=60, step_us=3000
        ),
        network=Network(GBps=40, latency_us=10, shared=0.5),
    )
    made = [
        tables.Measured(of, how, total(of, how, truth))
        for hidden, layers, batch in ((1024, 8, 64), (2048, 16, 64), (4096, 8, 128))
        for tp, pp, dp in (
            (1, 1, 8),
            (2, 1, 4),
            (8, 1, 1),
            (2, 2, 2),
            (1, 4, 2),
            (2, 1, 16),
            (8, 1, 4),
            (1, 1, 32),
        )
        for micro in (1, 2, 4)
        for of in [
            job(
                tp * pp * dp,
                batch,
                hidden=hidden,
                layers=layers,
                heads=16,
                head_dim=hidden // 16,
                ffn=4 * hidden,
            )
        ]
        if batch % (dp * micro) == 0
        for how in [layout(tp, pp, dp, micro)]
    ]
    start = structs.replace(
        truth, fitted=find_machine("a100-8x").fitted, network=Network(GBps=100, latency_us=10)
    )
    assert validate.steps_file("", validate.predict_rows(made, start, NodeLinks(start))).mean_error > 0.05
    fit = fit_machine(made, start, "made up")
    assert fit.held_out.mean_error < 0.01
    assert fit.machine.network.GBps == pytest.approx(40, rel=0.05)
    assert fit.machine.network.shared == pytest.approx(0.5, rel=0.1)
    assert fit.machine.fitted.matmul == pytest.approx(0.6, rel=0.05)
    assert fit.machine.error is not None
    assert fit.machine.error.low <= 1 <= fit.machine.error.high
    with pytest.raises(UsageError, match="too few"):
        fit_machine(made[:7], start, "made up")


@pytest.mark.parametrize("name", built_in())
def test_built_in_machines_have_a_source(name: str) -> None:
    machine = find_machine(name)
    assert machine.source
    assert machine.fitted_on
    assert (machine.error is None) == ("no step was measured" in machine.fitted_on)


@pytest.mark.parametrize(
    ("file", "most"), [("a100-one-node", 0.08), ("a100-64-gpus", 0.12), ("a100-256-gpus", 0.12)]
)
def test_measured_steps_are_predicted_about_as_well_as_the_docs_say(
    file: str, most: float, dtbench: Cli
) -> None:
    """most: what the profiling predictor vTrain publishes is 8.4 % and 14.7 %."""
    code, out, _ = dtbench("plan", "--validate", str(STEPS / f"{file}.csv"), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["kind"] == "plan validation"
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in found["rows"]]
    assert found["mean_error"] == pytest.approx(sum(errors) / len(errors))
    assert found["mean_error"] < most


def test_of_an_all_reduce_table_the_other_sizes_are_predicted(tmp_path: Path, dtbench: Cli) -> None:
    sizes = [2**20 * (i + 1) for i in range(1024)]
    noise = np.random.default_rng(1).normal(1, 0.005, len(sizes))
    rows = [
        f"{s},{s // 4},float,{(30e3 + s / 0.2) * n:.0f},1.0,1,1" for s, n in zip(sizes, noise, strict=True)
    ]
    path = tmp_path / "table.txt"
    path.write_text("size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)\n" + "\n".join(rows) + "\n")
    code, out, _ = dtbench("plan", "--validate", str(path), "--json")
    found = json.loads(out)
    assert code == 0
    assert len(found["rows"]) == 1024 - validate.ALL_REDUCE_FITTED
    assert found["mean_error"] < 0.01


TITLES = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)"
)
MEGATRON_TITLES = (
    "Number of GPUs,Global batch size,Microbatch size,Hidden size,Attention heads,Num layers,Sequence length,"
    "Tensor model-parallel size,Data-parallel size,Pipeline model-parallel size,Step time (ms)"
)
GOOD = "8,32,4,1024,16,24,1024,2,2,2,219.7"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no rows"),
        (TITLES, "has no rows"),
        (
            f"{TITLES}\n{GOOD.replace('219.7', '-1')}",
            "line 2: iteration time is '-1', expected a number above 0",
        ),
        (f"{TITLES}\n{GOOD.replace('219.7', 'nan')}", "line 2: iteration time is 'nan'"),
        (
            f"{TITLES}\n{GOOD}\n{GOOD.replace('8,32', '9,32', 1)}",
            "line 3: tensor x data x pipeline parallelism is 8",
        ),
        (f"{TITLES}\n{GOOD.replace(',4,', ',5,', 1)}", "the global batch 32 is no multiple"),
        (f"{TITLES}\n{GOOD.replace('1024,16', '1000,16')}", "hidden size 1000 is no multiple"),
        (f"{TITLES.replace('# layers', 'depth')}\n{GOOD}", "has no column 'layers'"),
        (
            f"{TITLES},recomputation\n{GOOD},some",
            "recomputation is 'some', expected one of none, selective, full",
        ),
        ("\0,\0\n1,2", "has no column 'gpus'"),
        (f"{TITLES.replace(' (ms)', '')}\n{GOOD}", "the unit of iteration time is not said"),
        (f"{TITLES}\n{GOOD.rpartition(',')[0]}", "line 2: iteration time is '', expected a number above 0"),
        (
            f"{TITLES}\n\n64,64,1,1024,16,24,1024,64,1,1,9",
            "line 3: tensor parallelism is 64, expected at most the 16",
        ),
        (
            f"{TITLES}\n64,64,1,1024,16,24,1024,1,1,64,9",
            "line 2: pipeline parallelism x chunks is 64, expected at",
        ),
        (f"{TITLES},flash attention\n{GOOD},maybe", "line 2: got 'maybe', expected yes or no"),
        ("size(B),count\n8,2", "has no column 'gpus'"),
        ("size(B),time(ns)\n8,2\n9,x", "line 3: time is 'x', expected a number above 0"),
        (f"size(B),time(ns)\n8,2\n{'9' * 400},3", "line 3: bytes is '999"),
        ("size(KB),time(ns)\n8,2\n9,3", "the unit of the sizes is 'kb', expected B, KiB or MiB"),
        ("size(B),time(ns)\n8,2\n8,3", "has 1 sizes, expected at least 3"),
    ],
)
def test_a_table_that_cannot_be_is_refused_in_a_line(
    text: str, says: str, tmp_path: Path, dtbench: Cli
) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    code, _, err = dtbench("plan", "--validate", str(path))
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("titles", "row"),
    [
        ("\ufeff" + TITLES, GOOD),
        (f"{TITLES}\r", f"{GOOD}\r"),
        (TITLES.replace(",", ";"), GOOD.replace(",", ";").replace("219.7", "219,7")),
        (TITLES.replace(",", "\t"), GOOD.replace(",", "\t")),
        ("\nSteps of one node\n" + TITLES, f"\n{GOOD}\n,,,,"),
        (f"run,{TITLES},notes", f"a,{GOOD},slow"),
        (",".join(reversed(TITLES.split(","))), ",".join(reversed(GOOD.split(",")))),
        (TITLES.replace("(ms)", "[us]"), GOOD.replace("219.7", "219700")),
        (TITLES.replace("data parallelism,", ""), GOOD.replace("2,2,2,", "2,2,")),
        ("gpus,batch,mbs,hidden,heads,layers,seq_len,tp,dp,pp,time_ms", GOOD),
        (MEGATRON_TITLES, GOOD),
    ],
)
def test_a_table_is_known_by_its_words(titles: str, row: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(f"{titles}\n{row}\n", newline="")
    (one,) = tables.measured_steps(tables.read_table(path), MACHINE)
    assert one.time_s == pytest.approx(0.2197)
    assert one.layout == layout(tp=2, pp=2, dp=2, micro_batch=4)
    assert one.job == Job(tables.gpt(1024, 24, 16, tables.GPT_VOCAB), 8, 32, 1024, PLAIN)


def test_sizes_that_stand_more_than_once_count_by_their_median(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("size (KiB),time_us\n1,3\n4,9\n1,5\n2,6\n1,4\n")
    assert tables.all_reduces(tables.read_table(path)) == [
        (1024, pytest.approx(4e-6)),
        (2048, pytest.approx(6e-6)),
        (4096, pytest.approx(9e-6)),
    ]


def test_what_a_table_says_is_used(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(
        f"{TITLES.replace('(ms)', '(s)')},recomputation,vocabulary,flash attention\n{GOOD},selective,32000,yes\n"
    )
    (one,) = tables.measured_steps(tables.read_table(path), MACHINE)
    assert one.time_s == 219.7
    assert (one.layout.tp, one.layout.dp, one.layout.pp, one.layout.recompute) == (2, 2, 2, "selective")
    assert one.job.model.vocab == 32000
    assert one.job.software == replace(PLAIN, flash=True)


def test_a_model_that_does_not_fit_without_recomputed_in_all_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    large = "8,64,{micro},4096,32,32,2048,8,1,1,900"
    path.write_text("\n".join([TITLES, large.format(micro=1), large.format(micro=64), GOOD]) + "\n")
    read = tables.measured_steps(tables.read_table(path), MACHINE)
    assert [one.layout.recompute for one in read] == ["full", "full", "none"]


# --------------------------------------------------------------------------------- the command line


def test_a_plan_and_its_page(tmp_path: Path, dtbench: Cli) -> None:
    code, out, _ = dtbench("plan", "--model", "llama-8b", "--gpus", "16", "--batch", "32", "--json")
    found = json.loads(out)
    assert code == 0
    best = found["best"][0]
    assert best["step_s"] == pytest.approx(sum(best["parts_s"].values()))
    assert best["low_s"] < best["step_s"] < best["high_s"]
    assert all(sum(one["memory_bytes"].values()) <= found["limit_bytes"] for one in found["best"])
    (tmp_path / "plan.json").write_text(out)
    _, steps, _ = dtbench("plan", "--validate", str(STEPS / "a100-256-gpus.csv"), "--json")
    (tmp_path / "steps.json").write_text(steps)
    page = tmp_path / "plan.html"
    code, _, err = dtbench(
        "report", str(tmp_path / "plan.json"), str(tmp_path / "steps.json"), "-o", str(page)
    )
    assert code == 0, err
    assert "How to shard" in page.read_text()
    assert best["words"] in page.read_text()
    code, out, _ = dtbench("plan", "--model", "llama-8b", "--gpus", "16", "--batch", "32")
    assert code == 0
    assert best["words"] in out
    assert "with half the network" in out


def test_a_machine_is_fitted_and_used(tmp_path: Path, dtbench: Cli) -> None:
    made = tmp_path / "machine.json"
    few = tmp_path / "few.csv"
    few.write_text("\n".join([TITLES, *[GOOD] * 7]))
    code, out, err = dtbench("plan", "--fit", str(few), "-o", str(made))
    assert (code, "too few" in err) == (2, True)
    code, out, err = dtbench("plan", "--fit", str(STEPS / "a100-64-gpus.csv"), "-o", str(made))
    assert code == 0, err
    assert "mean error" in out
    assert find_machine(str(made)).fitted_on == "a100-64-gpus.csv"
    code, out, err = dtbench(
        "plan", "--validate", str(STEPS / "a100-256-gpus.csv"), "--machine", str(made), "--json"
    )
    assert json.loads(out)["mean_error"] < 0.12  # 6.5 % seen
    code, _, err = dtbench(
        "plan", "--machine", str(made), "--model", "llama-8b", "--gpus", "8", "--batch", "8"
    )
    assert code == 0, err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "--model, --gpus, --batch missing"),
        (["--model", "llama-8b", "--gpus", "8"], "--batch missing"),
        (["--model", "no-such", "--gpus", "8", "--batch", "8"], "--model no-such is not known"),
        (
            ["--model", "llama-8b", "--gpus", "7", "--batch", "8"],
            "no layout shares a batch of 8 sequences over all 7",
        ),
        (["--model", "llama-405b", "--gpus", "8", "--batch", "8"], "does not fit on 8 GPUs"),
        (
            ["--model", "llama-8b", "--gpus", "8", "--batch", "8", "--memory", "3"],
            "--memory 3 leaves nothing",
        ),
        (
            ["--model", "llama-8b", "--gpus", "8", "--batch", "8", "--machine", "abacus"],
            "--machine abacus is not known",
        ),
        (["--model", "llama-8b", "--gpus", "8", "--batch", "8", "--memory", "nan"], "--memory is nan"),
        (["--validate", "a.csv", "--fit", "b.csv"], "exclude each other"),
        (
            ["--validate", "a.csv", "--model", "llama-8b"],
            "--validate TABLE says what is predicted: leave --model out",
        ),
        (
            ["--fit", "a.csv", "--memory", "40", "-o", "b.json"],
            "--fit TABLE says what is predicted: leave --memory out",
        ),
        (["--fit", "b.csv"], "give -o FILE.json"),
        (["-o", "b.json"], "-o is for --fit"),
        (["--validate", "/dev/zero"], "is not a regular file"),
    ],
)
def test_wrong_input_is_told_in_a_line(given: list[str], says: str, dtbench: Cli) -> None:
    code, _, err = dtbench("plan", *given)
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peak_tflops": -1}, "peak_tflops is -1, expected a number of at least 1e-12"),
        ({"gpus_per_node": 0}, "gpus_per_node is 0"),
        ({"all_reduce": {}}, "all_reduce is empty"),
        ({"all_reduce": {"9": [[1, 1]]}}, "all_reduce.9 is not a number of ranks"),
        ({"all_reduce": {"8": [[2, 1], [1, 1]]}}, "rows of growing bytes"),
        ({"all_reduce": {"8": [[1, 2], [2, 1]]}}, "times that never fall"),
        ({"all_reduce": {"8": [[0.5, 1], [0.6, 2]]}}, "all_reduce.8 must have rows of growing bytes"),
        ({"error": {"low": 2, "high": 1}}, "error.low is above high"),
        ({"fitted": None}, "fitted is missing"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    content = json.loads((Path(search.__file__).parent / "machines" / "a100-8x.json").read_text()) | change
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DtbenchError, match="--machine") as raised:
        find_machine(str(path))
    assert says in str(raised.value)


def test_a_topology_without_dims_prices_no_links(tmp_path: Path, dtbench: Cli) -> None:
    path = tmp_path / "none.json"
    write_topology(made_topology(), path)
    code, _, err = dtbench(
        "plan", "--model", "llama-8b", "--gpus", "8", "--batch", "8", "--topology", str(path)
    )
    assert code == 2
    assert "the topology holds no mesh dim" in err


def test_a_topology_prices_the_links(tmp_path: Path, dtbench: Cli) -> None:
    times = []
    for bandwidth in (20.0, 2.0):
        dim = ring_dim("dp", 4, bandwidth, 5.0, "all_reduce")
        path = tmp_path / f"{bandwidth:g}.json"
        write_topology(made_topology(dim), path)
        code, out, err = dtbench(
            "plan", "--model", "llama-8b", "--gpus", "64", "--batch", "64", "--topology", str(path), "--json"
        )
        assert code == 0, err
        times.append(json.loads(out)["best"][0]["step_s"])
        changes = {line.partition(":")[0]: line for line in json.loads(out)["changes"]}
        same = format_seconds(times[-1])
        for what in ("half the network", "twice the network"):  # scale what prices the links, whatever it is
            assert "same layout" not in changes[what] or same not in changes[what]
    assert times[1] > times[0] * 1.1
    assert math.isfinite(times[1])
