"""The prediction of a training step, checked by hand and against papers, and the search for layouts."""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dtbench.cli.compare import public_systems
from dtbench.comparison.references import find_systems
from dtbench.cost.plan import measured_steps, search
from dtbench.cost.plan.machines import (
    FittedConstants,
    MachineSpec,
    Network,
    NodeLinks,
    built_in,
    find_machine,
)
from dtbench.cost.plan.step import ITEM, StepTime, bytes_per_step, memory_of, model_flops, predict_step
from dtbench.cost.plan.training import (
    PLAIN,
    Software,
    TrainingJob,
    TrainingLayout,
    TransformerModel,
    built_in_models,
    find_model,
    model_called,
    stage_layers,
)
from dtbench.errors import DtbenchError, UnreadableRunError, UsageError
from dtbench.records.job import Collective, Job, RankJob
from dtbench.traces.required_volume import compare_volumes, read_layout

GPT = measured_steps.gpt(hidden=1024, layers=8, heads=16)
LLAMA = built_in_models()["llama-8b"]
H100 = find_machine("h100-8x")
# Round figures: a step's parts can be added up by hand. A node's all-reduce of n bytes takes n / 100 GB/s.
MACHINE = MachineSpec(
    name="round",
    source="made up",
    gpus_per_node=8,
    memory_GiB=80,
    peak_tflops=100,
    memory_GBps=1000,
    fitted=FittedConstants(
        matmul=1.0, memory=1.0, host_us=1, host_tp_us=1, layer_us=1e-6, logit_bytes=1e-6, step_us=1e-6
    ),
    fitted_on="nothing",
    network=Network(GBps=100, latency_us=1e-6),
    all_reduce={"8": [(1e3, 1e-2), (1e9, 1e4)]},
)
LINKS = NodeLinks(MACHINE)


def job(gpus: int, batch: int = 32, software: Software = PLAIN, **model: Any) -> TrainingJob:
    return TrainingJob(structs.replace(GPT, **model), gpus, batch, 1024, software)


def layout(tp: int = 1, pp: int = 1, dp: int = 1, micro_batch: int = 1, **more: Any) -> TrainingLayout:
    return TrainingLayout(tp, pp, dp, more.pop("fsdp", 1), micro_batch, **more)


def predicted(job: TrainingJob, layout: TrainingLayout) -> StepTime:
    return predict_step(job, layout, MACHINE, LINKS)


# ----------------------------------------------------------------------------------------- a step


def test_model_flops_match_the_published_formula() -> None:
    """Narayanan et al. 2021, section 5.1: 96 B s l h^2 (1 + s / 6h + V / 16 l h); of the layers one pass of four is
    recomputation."""
    batch, sequence, layers, hidden, vocab = 32, 1024, 8, 1024, 51200
    attention = 0.75 * (1 + sequence / (6 * hidden))
    published = 96 * batch * sequence * layers * hidden**2 * (attention + vocab / (16 * layers * hidden))
    assert model_flops(job(1)) == pytest.approx(published)


@pytest.mark.parametrize("chunks", [1, 2])
def test_pipeline_bubble_has_first_and_last_micro_batches(chunks: int) -> None:
    """arXiv 2104.04473: (p - 1) / m of the layers' time, over the chunks."""
    step = predicted(job(4, vocab=1), layout(pp=4, chunks=chunks))
    assert step.bubble_s == pytest.approx(step.compute_s * 3 / 32 / chunks, rel=1e-3)
    assert step.total_s == pytest.approx(
        step.compute_s + step.exposed_s + step.bubble_s + step.once_s, rel=1e-12
    )


def test_tensor_parallel_collectives_overlap_with_weight_gradients() -> None:
    all_reduce_s = 1024 * 1024 * 2 / 100e9
    weights_s = 2 * 1024 * 12 * 1024**2 / 8 / 1e14  # one forward pass, as long as the weights' gradients
    exposed_s = 2 * all_reduce_s + 2 * max(0, all_reduce_s - weights_s / 2)
    assert predicted(job(8), layout(tp=8)).tensor_s == pytest.approx(32 * 8 * exposed_s, rel=1e-3)


@pytest.mark.parametrize(("tp", "dp"), [(1, 16), (8, 16)])
def test_gradients_between_nodes_share_adapters(tp: int, dp: int) -> None:
    """Whether a node's GPUs hold parts of one copy or eight copies, a node sends the same bytes."""
    sent = 2 * 15 / 16 * (GPT.layers * GPT.layer_elements(tp) + GPT.vocab_elements(tp)) * 2 * tp
    assert predicted(job(tp * dp), layout(tp=tp, dp=dp)).data_s == pytest.approx(sent / 100e9, rel=1e-6)


def test_overlap_leaves_only_the_last_layers_gradients_exposed() -> None:
    exposed, hidden = (
        predicted(job(16, 512, replace(PLAIN, overlap=overlap)), layout(dp=16, micro_batch=32)).data_s
        for overlap in (False, True)
    )
    assert hidden == pytest.approx(exposed / GPT.layers)


def test_fsdp_gathers_in_every_micro_batch() -> None:
    once, sharded = (predicted(job(8, batch=16), layout(dp=8, fsdp=shards)).data_s for shards in (1, 8))
    # Two micro batches; gathers and a scatter of half an all-reduce each.
    assert sharded == pytest.approx(2 * 1.5 * once)


# ---------------------------------------------------------------------------------------- memory


def test_states_take_16_bytes_per_parameter_and_are_sharded() -> None:
    parameters = GPT.elements()
    held = memory_of(job(1), layout())
    assert held.weights + held.gradients + held.optimizer == 16 * parameters
    sharded = memory_of(job(8), layout(dp=8, fsdp=8))
    assert sharded.total - sharded.activations == pytest.approx(
        2 * parameters + ((2 * 2 + 2) * GPT.layer_elements())
    )
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
def test_activations_match_published_formulas(
    how: str, software: Software, per_token: Callable[[int], float], tp: int
) -> None:
    few, many = (
        memory_of(job(4, software=software, layers=layers, vocab=1), layout(tp=tp, recompute=how)).activations
        for layers in (10, 20)
    )
    assert many - few == pytest.approx(10 * 1024 * 1024 * per_token(tp))


# --------------------------------------------------------------------- stages, experts, sequences


def test_stage_layers_can_be_uneven() -> None:
    assert stage_layers(built_in_models()["llama-405b"], 16) == (7, *[8] * 14, 7)
    assert stage_layers(structs.replace(GPT, layers=11), 4) == (3, 3, 3, 2)
    # nanotron's, of which a head costs as much as four layers: the last of four stages has one and the head
    assert stage_layers(built_in_models()["nanotron-1b"], 4, by_cost=True) == (5, 5, 5, 1)
    assert {sum(stage_layers(LLAMA, pp, by_cost)) for pp in range(1, 33) for by_cost in (False, True)} == {
        LLAMA.layers
    }
    even, uneven = (predicted(job(4, vocab=1, layers=layers), layout(pp=4)).total_s for layers in (8, 9))
    assert uneven == pytest.approx(even * 3 / 2, rel=0.1)  # as slow as its slowest stage


def test_ring_latency_grows_with_ranks() -> None:
    slow = NodeLinks(structs.replace(MACHINE, network=structs.replace(MACHINE.network, latency_us=50)))
    for nodes in (2, 4, 64):
        ranks = 8 * nodes
        expected_s = (ranks - 1) * (2**28 / ranks / 100e9 + 50e-6)
        assert slow.collective("all_gather", 2**28, ranks, 1) == pytest.approx(expected_s)
    assert slow.collective("all_reduce", 1, 512, 1) == pytest.approx(12 * 50e-6, rel=1e-3)  # a tree's


def test_weights_stay_gathered_in_a_sharded_pipeline() -> None:
    """torchtitan: no resharding between micro batches, gradients summed whole in float32."""
    model, how = built_in_models()["llama-405b"], TrainingLayout(8, 8, 8, 8, 4, 1, "full")
    held = memory_of(TrainingJob(model, 512, 256, 8192), how, structs.replace(H100.fitted, gradient_bytes=4))
    elements = 16 * model.layer_elements(8)  # of the inner stages; the first has 15 and the embedding
    assert (held.weights, held.gradients, held.optimizer) == pytest.approx(
        (2 * elements * (1 + 1 / 8), 4 * elements * (1 + 1 / 8), 12 * elements / 8)
    )
    assert memory_of(job(8, software=Software(zero=2)), layout(dp=8)).gradients == pytest.approx(
        2 * GPT.elements() / 8
    )


def test_expert_parallel_ranks_share_experts_and_exchange_tokens() -> None:
    moe = TrainingJob(structs.replace(LLAMA, experts=8, experts_per_token=2), 8, 8, 4096)
    alone, shared = layout(dp=8), layout(dp=8, ep=8)
    assert memory_of(moe, alone).weights - memory_of(moe, shared).weights == pytest.approx(
        2 * 32 * 7 * LLAMA.mlp_elements()
    )
    exchange_s = LINKS.collective("all_to_all", 4096 * 2 * 4096 * 2, 8, 1)
    assert predicted(moe, shared).tensor_s == pytest.approx(32 * 4 * exchange_s)
    assert predicted(moe, alone).tensor_s == 0


def test_context_parallel_ranks_share_a_sequence() -> None:
    long, four = TrainingJob(LLAMA, 8, 8, 65536), layout(dp=2, cp=4)
    assert four.ranks == 8
    assert memory_of(long, four).activations == pytest.approx(memory_of(long, layout(dp=8)).activations / 4)
    assert predicted(long, four).compute_s == pytest.approx(
        predicted(long, layout(dp=2)).compute_s / 4, rel=1e-3
    )


# ---------------------------------------------------------------------------------------- search


def planned(job: TrainingJob, limit: float = 80 * 2**30) -> search.PlanFile:
    return search.search_layouts(job, MACHINE, LINKS, limit)


def test_search_returns_the_fastest_layouts() -> None:
    training = job(16, software=Software())
    plan = planned(training)
    layouts = list(search.all_layouts(training, MACHINE))
    assert len(layouts) == len(set(layouts)) == plan.considered
    times = [
        predicted(training, how).total_s for how in layouts if memory_of(training, how).total <= 80 * 2**30
    ]
    assert (len(times), min(times)) == (plan.fitting, plan.best[0].step_s)
    splits = [tuple(found.layout[name] for name in ("tp", "pp", "dp", "fsdp")) for found in plan.best]
    assert len(set(splits)) == len(splits)


def test_all_layouts_use_all_gpus_and_divide_the_batch() -> None:
    for how in search.all_layouts(job(48, batch=96, software=Software()), MACHINE):
        assert how.tp * how.pp * how.dp == 48
        assert how.micro_batches(96) * how.micro_batch * how.dp == 96
        assert how.dp % how.fsdp == GPT.layers % (how.pp * how.chunks) == 0
        assert how.chunks == 1 or how.micro_batches(96) % how.pp == 0
    splits = {(how.tp, how.pp) for how in search.all_layouts(job(16, batch=16), MACHINE)}
    assert splits == {(tp, pp) for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)) if tp * pp <= 16}


def test_search_respects_the_memory_limit() -> None:
    wide, narrow = (planned(job(8, 64, Software()), limit) for limit in (80 * 2**30, 2**30))
    assert narrow.fitting < wide.fitting and sum(narrow.best[0].memory_bytes.values()) <= 2**30
    assert narrow.best[0].step_s >= wide.best[0].step_s


# ----------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(("inner", "slower"), [(1, 1), (2, 4), (4, 4), (8, 1)])
def test_groups_that_share_adapters_get_a_reduced_bandwidth(inner: int, slower: float) -> None:
    """One group per node, or eight with an adapter each, reach the full bandwidth; two or four groups a quarter."""
    full_s, reduced_s = (
        NodeLinks(
            structs.replace(MACHINE, network=structs.replace(MACHINE.network, shared=share))
        ).collective("all_reduce", 2**30, 16, inner)
        for share in (1.0, 0.25)
    )
    assert reduced_s == pytest.approx(slower * full_s, rel=1e-6)


# ----------------------------------------------------------------------------------------- models

# 2 layers; a layer has 2 * 8 * 8 (query, output) + 2 * 8 * 4 (key, value) + 3 * 8 * 16 (MLP) + 2 * 8 (norms)
SMALL_LAYER, SMALL_ENDS = 128 + 64 + 384 + 16, 2 * 32 * 8 + 8


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # safetensors' count of parameters on huggingface.co
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt3-175b", pytest.approx(174.6e9, rel=1e-3)),  # biases and positions are not counted
    ],
)
def test_built_in_models_have_their_published_parameters(name: str, parameters: int) -> None:
    assert built_in_models()[name].elements() == parameters


def test_layer_elements_are_divided_over_ranks() -> None:
    small = TransformerModel("small", hidden=8, layers=2, heads=4, kv_heads=2, ffn=16, vocab=32)
    assert (small.layer_elements(), small.vocab_elements()) == (SMALL_LAYER, SMALL_ENDS)
    # 4 ranks: one head and half a key-value head, which two ranks hold whole; a quarter of the MLP; all norms
    assert small.layer_elements(4) == 8 * 2 * (1 + 2 * 1 + 1) + 384 // 4 + 16


GOOD = {"hidden": 8, "layers": 2, "heads": 4, "ffn": 16, "vocab": 32}


def test_find_model_reads_files(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(GOOD | {"kv_heads": 2}))
    assert find_model(str(path)).elements() == 2 * SMALL_LAYER + SMALL_ENDS
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 32,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
    }
    path.write_text(json.dumps(config))
    assert find_model(str(path)).elements() == 2 * SMALL_LAYER + 32 * 8 + 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"hidden": 8,', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "expected a JSON object"),
        ("{}", "missing required field hidden"),
        (GOOD | {"hidden": True}, "hidden: expected int"),
        (GOOD | {"layers": 0}, "layers: expected int >= 1"),
        (GOOD | {"depth\x1b[2J": 1}, r"unknown key 'depth\\x1b\[2J'"),
        (GOOD | {"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"hidden_size": 8, "model_type": "bloom"}, "model_type 'bloom', expected one of llama"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_experts_per_tok is missing"),
    ],
)
def test_invalid_models_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DtbenchError, match=message):
        find_model(str(path))


def test_model_called_knows_names_of_published_tables(tmp_path: Path) -> None:
    names = {
        "LLAMA3.1_405B": "llama-405b",
        "1B": "nanotron-1b",
        "1b": "mpt-1b",
        "Qwen3 30B a3B (w/o MTP)": "qwen3-30b-a3b",
    }
    assert [model_called(name) for name in names] == [find_model(model) for model in names.values()]
    assert model_called("no such") is None
    with pytest.raises(UsageError, match="expected one of llama-8b, llama-70b"):
        find_model("lama-8b")
    with pytest.raises(UnreadableRunError, match="cannot read"):
        find_model(str(tmp_path / "none.json"))


LAYOUT = TrainingLayout(tp=2, pp=1, dp=4, fsdp=1, micro_batch=1)


def test_bytes_per_step_by_dim() -> None:
    job = TrainingJob(LLAMA, 8, 8, 2048)
    elements = LLAMA.layers * LLAMA.layer_elements(2) + LLAMA.vocab_elements(2)
    assert bytes_per_step(job, replace(LAYOUT, fsdp=4), H100) == pytest.approx(
        {
            # Two blocks a layer, in each 2 collectives ahead and 3 back, of all activations; two micro batches.
            "tp": LLAMA.layers * 2 * 2 * 5 * 2048 * LLAMA.hidden * ITEM,
            "fsdp": 2 * (2 * elements * ITEM + elements * H100.fitted.gradient_bytes),
        }
    )
    assert set(bytes_per_step(job, LAYOUT, H100)) == {"tp", "dp"}
    with pytest.raises(ValueError, match="pp=2"):
        bytes_per_step(job, replace(LAYOUT, pp=2, dp=2), H100)


def test_job_is_compared_with_the_required_volume() -> None:
    call = Collective(
        rank=0,
        collective="all_reduce",
        mesh_dim="replicate",
        dtype="float32",
        bytes=round(bytes_per_step(TrainingJob(LLAMA, 8, 4, 2048), LAYOUT, H100)["dp"]),
        count=6,
        in_steps=6,
        time_s=1.0,
        median_s=1.0,
        best_s=1.0,
    )
    job = Job(world_size=8, ranks=(RankJob(rank=0, steps=3),), collectives=(call,))
    tp, dp = compare_volumes(job, LLAMA, read_layout("tp=2 batch=4, sequence=2048"))
    assert (tp.mesh_dim, tp.measured_bytes) == ("tp", 0)
    assert dp.ratio == pytest.approx(2) and dp.dtypes == ("float32",)
    assert re.fullmatch(r"dp transfers .* a step \(float32\), 2.00x the .* that the layout requires", str(dp))
    for layout, message in (
        ("tp=2;", "expected NAME=COUNT"),
        ("tp=3", "has 6 ranks, expected the job's 8"),
        ("tp=16", "has 16 ranks, expected the job's 8"),
    ):
        with pytest.raises(UsageError, match=message):
            list(compare_volumes(job, LLAMA, read_layout(layout)))


@pytest.mark.parametrize("name", built_in())
def test_built_in_machine_has_its_own_name(name: str) -> None:
    assert find_machine(name).name == find_machine(name.upper()).name == name


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        *((spelt, "h100-8x") for spelt in ("8xH100", "8x-h100", "H100_8x", "8xH100-AWS-p5", "8xH100-HBM3")),
        ("8xH100-fsdp", "h100-8x-fsdp"),
        ("8xRTX-Pro-6000", "rtx-pro-6000-8x"),
        ("8xMI300X", "mi300x-8x"),
        ("72xGB200-NVL72", "gb200"),
    ],
)
def test_machine_is_found_however_it_is_spelt(spelt: str, name: str) -> None:
    assert find_machine(spelt).name == name


@pytest.mark.parametrize(
    ("spelt", "near"),
    [
        ("8xA100-SXM4-40GB", "a100-8x"),
        ("4xH100", "h100-8x"),
        ("h1000-8x", "h100-8x"),
        ("8xA100-PCIe", "a100-8x"),
    ],
)
def test_machine_of_other_memory_bus_or_count_is_refused(spelt: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"--machine {spelt}: unknown machine; nearest are .*{near}"):
        find_machine(spelt)


def test_system_is_found_however_it_is_spelt() -> None:
    systems = tuple(public_systems())

    def named(name: str) -> list[str]:
        return [system.name for system in find_systems(systems, name)]

    kind = named("8xH100")
    assert {"8xH100-AWS-p5", "8xH100-HBM3"} < set(kind) and {name.lower()[:6] for name in kind} == {"8xh100"}
    assert kind == named("h100-8x") == named("8X-h100") == named("H100_8x")
    assert named("8xh100-aws-P5") == named("h100-8x-aws-p5") == ["8xH100-AWS-p5"]
    assert all(named(system.name) == [system.name] for system in systems)
    with pytest.raises(UsageError, match=r"'8xH1000-AWS': nearest are .*8xH100-AWS-p5.*; expected one of"):
        named("8xH1000-AWS")
