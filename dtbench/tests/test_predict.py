"""Predicted communication of transformers: sizes by hand and by torch's own counting, prices by the curves."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dtbench.cost import price as curves
from dtbench.cost.plan import show
from dtbench.cost.plan.communication import Setup, communication
from dtbench.cost.plan.models import Model, built_in_models, find_model
from dtbench.records.plan import Communication
from dtbench.records.topology import CalibratedTopology, HostLayout, Residuals, write_topology
from dtbench.suite.errors import DtbenchError, UnreadableRunError, UsageError
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_topology import curve_of, made_dim, made_topology, ring_dim

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
# dim -> ranks, GiB/s, us per hop
DIMS = {"dp": (4, 20.0, 10.0), "tp": (8, 150.0, 2.0)}
# 2 layers; a layer has 2 * 8 * 8 (query, output) + 2 * 8 * 4 (key, value) + 3 * 8 * 16 (MLP) + 2 * 8 (norms)
SMALL = Model("small", hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=16, vocab=32)
SMALL_LAYER, SMALL_ENDS = 128 + 64 + 384 + 16, 2 * 32 * 8 + 8


def topology() -> CalibratedTopology:
    return made_topology(*(ring_dim(name, *of, *COLLECTIVES) for name, of in DIMS.items()))


def setup(mesh: dict[str, int], model: Model = SMALL, tokens: int = 64, **changes: Any) -> Setup:
    given = {"dtype": "bfloat16", "reduce_dtype": "bfloat16", "measured_as": {}} | changes
    return Setup(model, tuple(mesh.items()), tokens, **given)


def predicted(mesh: dict[str, int], model: Model = SMALL, tokens: int = 64, **changes: Any) -> Communication:
    return communication(topology(), setup(mesh, model, tokens, **changes))


def calls(prediction: Communication, scheme: str) -> Counter[tuple[str, str, str, int]]:
    """(where, phase, collective, bytes) -> how many in a layer, or in a step."""
    return Counter(
        {
            (p.where, p.phase, p.collective, p.size_bytes): p.count
            for p in prediction.collectives
            if p.scheme == scheme
        }
    )


def step_s(prediction: Communication, *schemes: str) -> float:
    (found,) = (v for v in prediction.variants if v.schemes == schemes)
    return found.step.time_s


# ------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # safetensors' count of parameters on huggingface.co
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_built_in_models_have_their_published_parameters(name: str, parameters: int) -> None:
    assert built_in_models()[name].elements() == parameters


def test_gpt3_has_175_billion_parameters_but_for_what_is_not_counted() -> None:
    assert built_in_models()["gpt3-175b"].elements() == pytest.approx(174.6e9, rel=1e-3)


def test_ranks_share_a_layer() -> None:
    assert (SMALL.layer_elements(), SMALL.end_elements()) == (SMALL_LAYER, SMALL_ENDS)
    # 4 ranks: one head and half a key-value head, which two ranks hold whole; a quarter of the MLP; all norms
    assert SMALL.layer_elements(4) == 8 * 2 * (1 + 2 * 1 + 1) + 384 // 4 + 16


def test_a_file_is_a_model(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("hidden = 8\nlayers = 2\nheads = 4\nkv_heads = 2\nffn = 16\nvocab = 32\n")
    assert find_model(str(own)).elements() == 2 * SMALL_LAYER + SMALL_ENDS
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
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(str(tmp_path / "config.json")).elements() == 2 * SMALL_LAYER + 32 * 8 + 8


GOOD = {"hidden": 8, "layers": 2, "heads": 4, "ffn": 16, "vocab": 32}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not JSON"),
        ('{"hidden": 8,', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "expected a JSON object"),
        ("{}", "hidden is missing, expected a whole number"),
        (GOOD | {"hidden": True}, "hidden is True, expected a whole number"),
        (GOOD | {"layers": 0}, "layers is 0"),
        (GOOD | {"layers": 2**41}, "from 1 to 2"),
        (GOOD | {"ffn": 1.5}, "ffn is 1.5"),
        (GOOD | {"gated": 1}, "gated is 1, expected true or false"),
        (GOOD | {"depth\x1b[2J": 1}, r"the key 'depth\\x1b\[2J' is not known"),
        (GOOD | {"heads": 3}, "no multiple of heads 3"),
        (GOOD | {"kv_heads": 8}, "heads 4 is no multiple of kv_heads 8"),
        (GOOD | {"kv_heads": 3}, "heads 4 is no multiple of kv_heads 3"),
        ({"hidden_size": 8, "model_type": "bloom"}, "model_type 'bloom', expected one of llama"),
        ({"model_type": "gpt2", "n_embd": 768}, "model_type 'gpt2', expected one of llama"),
        ({"model_type": "llava", "text_config": {}}, "model_type 'llava', expected one of llama"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_experts_per_tok is missing"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DtbenchError, match=said):
        find_model(str(path))


def test_an_unknown_model_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected one of llama-8b, llama-70b"):
        find_model("lama-8b")
    with pytest.raises(UnreadableRunError, match="cannot read"):
        find_model(str(tmp_path / "none.json"))


# ------------------------------------------------------------------------------- sizes by hand


def test_tensor_parallelism_by_hand() -> None:
    activations = 64 * 8 * 2  # tokens * hidden * bfloat16
    prediction = predicted({"tp": 4})
    assert calls(prediction, "tensor parallel") == {
        ("layer", "forward", "all_reduce", activations): 2,
        ("layer", "backward", "all_reduce", activations): 2,
        ("ends", "forward", "all_reduce", activations): 1,
        ("ends", "backward", "all_reduce", activations): 1,
        ("ends", "forward", "all_reduce", 64 * 4): 3,
    }
    cut = calls(prediction, "sequence parallel")
    for phase, collective in itertools.product(("forward", "backward"), ("all_gather", "reduce_scatter")):
        assert cut["layer", phase, collective, activations] == 2
        assert cut["ends", phase, collective, activations] == 1
    assert cut["layer", "backward", "all_reduce", 8 * 2] == 2


def test_data_parallelism_by_hand() -> None:
    prediction = predicted({"dp": 4}, reduce_dtype="float32")
    layer, ends = SMALL_LAYER, SMALL_ENDS
    assert calls(prediction, "DDP") == {
        ("layer", "backward", "all_reduce", 4 * layer): 1,
        ("ends", "backward", "all_reduce", 4 * ends): 1,
    }
    zero2 = Counter(
        {
            ("layer", "forward", "all_gather", 2 * layer): 1,
            ("layer", "backward", "reduce_scatter", 4 * layer): 1,
            ("ends", "forward", "all_gather", 2 * ends): 1,
            ("ends", "backward", "reduce_scatter", 4 * ends): 1,
        }
    )
    assert calls(prediction, "ZeRO-2") == zero2
    assert calls(prediction, "FSDP") == zero2 | {("layer", "backward", "all_gather", 2 * layer): 1}


def test_hybrid_sharding_reduces_shards_over_the_outer_dim() -> None:
    prediction = predicted({"replicate": 2, "dp": 4}, measured_as={"replicate": "dp"})
    shards = [p for p in prediction.collectives if p.mesh_dim == "replicate"]
    assert [(p.collective, p.size_bytes, p.ranks) for p in shards] == [
        ("all_reduce", 2 * SMALL_LAYER // 4, 2),
        ("all_reduce", 2 * SMALL_ENDS // 4, 2),
    ]
    assert [v.schemes for v in prediction.variants] == [("HSDP",)]


def test_a_step_is_all_layers_and_the_ends() -> None:
    prediction = predicted({"dp": 4, "tp": 4})
    assert len(prediction.variants) == 6
    for variant in prediction.variants:
        own = [p for p in prediction.collectives if p.scheme in variant.schemes]
        layer = sum(p.count * p.time_s for p in own if p.where == "layer")
        ends = sum(p.count * p.time_s for p in own if p.where == "ends")
        assert variant.layer.time_s == pytest.approx(layer)
        assert variant.step.time_s == pytest.approx(2 * layer + ends)
        assert variant.step.low_s < variant.step.time_s < variant.step.high_s


def test_sequence_parallelism_sends_as_much_as_tensor_parallelism() -> None:
    by_scheme = {v.schemes[0]: v for v in predicted({"tp": 8}, built_in_models()["llama-8b"], 8192).variants}
    # An all-reduce is a reduce-scatter and an all-gather; what is more are the norms' gradients.
    norms = 65 * 4096 * 2 * 2 * 7 / 8
    assert by_scheme["sequence parallel"].sent_bytes == by_scheme["tensor parallel"].sent_bytes + norms
    layers = (4 * 32 + 2) * 8192 * 4096 * 2 * 2 * 7 / 8
    assert by_scheme["tensor parallel"].sent_bytes == layers + 3 * 8192 * 4 * 2 * 7 / 8


# ----------------------------------------------------------------------------------------- prices


def test_measured_sizes_and_ranks_cost_what_was_measured() -> None:
    dim = topology().dims[1]
    for size in (1024, 3000, 2**26):
        at = curves.estimate(dim, "all_reduce", 8, size)
        expected = curves.price(dim.collectives["all_reduce"], size)
        assert (at.time_us, at.low_us, at.high_us) == (expected.time_us, expected.low_us, expected.high_us)
        assert not at.extrapolated


def test_other_ranks_cost_what_the_ring_says() -> None:
    """The made-up curves are the ring's own, so scaling them has to give the ring's time at any size and ranks."""
    for (measured, bandwidth, us), dim in zip(DIMS.values(), topology().dims, strict=True):
        for ranks, size in itertools.product((2, measured * 16, 4096), (1024, 2**26)):
            at = curves.estimate(dim, "all_gather", ranks, size)
            ring = 6.6 + (ranks - 1) * us + size / 2**30 * (ranks - 1) / ranks / bandwidth * 1e6
            assert at.time_us == pytest.approx(ring)
            assert at.ranks_factor == ranks / measured


def test_a_ring_scales_what_was_measured_and_does_not_replace_it() -> None:
    slow = made_dim("tp", 8, 150.0, 2.0, collectives={"all_reduce": curve_of((2**26,), (9000.0,))})
    ring = [6.6 + 2 * (n - 1) * 2 + 2**-4 * 2 * (n - 1) / n / 150 * 1e6 for n in (8, 32)]
    got = curves.estimate(slow, "all_reduce", 32, 2**26).time_us
    assert got == pytest.approx(9000 * ring[1] / ring[0])


def test_intervals_widen_with_every_doubling() -> None:
    dim = topology().dims[1]
    by_ranks = [curves.estimate(dim, "all_gather", 8 * 2**k, 2**20) for k in range(6)]
    by_size = [curves.estimate(dim, "all_gather", 8, 2 ** (30 + k)) for k in range(6)]
    for estimates in (by_ranks, by_size):
        widths = [math.log(e.high_us / e.low_us) for e in estimates]
        steps = [b - a for a, b in itertools.pairwise(widths)]
        assert steps == pytest.approx([2 * math.log(1.2)] * 5)  # the made-up curves' half width is log 1.2
        assert all(e.low_us < e.time_us < e.high_us for e in estimates)
    both = curves.estimate(dim, "all_gather", 16, 2**31)
    assert math.log(both.high_us / both.low_us) == pytest.approx(2 * math.log(1.2) * 3)


def test_collectives_that_were_not_measured_are_priced_by_the_formula() -> None:
    dim = made_dim(
        "tp", 8, 150.0, 2.0, residuals=Residuals(geometric_mean_ratio=1.2, worst_ratio=1.5, points=())
    )
    at = curves.estimate(dim, "all_gather", 8, 2**26)
    assert at.time_us == pytest.approx(6.6 + 7 * 2 + 2**-4 * 7 / 8 / 150 * 1e6)
    assert (at.by_formula, at.extrapolated) == (True, True)
    assert at.high_us / at.time_us == pytest.approx(1.5)
    beyond = curves.estimate(dim, "all_gather", 8, 2**32)  # it was fitted up to 1 GiB
    assert (beyond.size_factor, beyond.high_us / beyond.time_us) == (4, pytest.approx(1.5**3))
    prediction = communication(made_topology(dim), setup({"tp": 4}))
    assert any("all_gather was not measured on tp" in w for w in prediction.warnings)


def test_beyond_times_that_do_not_grow_the_other_collectives_say_how_they_do() -> None:
    """Times of noise alone have no slope: 208 MiB and 1 GiB would cost the same, and win every ranking."""
    flat = structs.replace(curve_of((1024, 2**20, 2**24), (3870.0,) * 3), beta_is_lower_bound=True)
    known = ring_dim("dp", 4, 20.0, 10.0, "all_gather", "all_reduce")
    dim = structs.replace(known, collectives=dict(known.collectives) | {"reduce_scatter": flat})
    at, further = (curves.estimate(dim, "reduce_scatter", 4, size) for size in (208 * 2**20, 2**30))
    per_byte = 3 / 4 / 20 / 2**30 * 1e6  # as the gather's and half the all-reduce's
    assert at.time_us == pytest.approx(3870 + (208 - 16) * 2**20 * per_byte)
    assert further.time_us == pytest.approx(3870 + (2**30 - 2**24) * per_byte)
    own = curves.estimate(known, "all_gather", 4, 2**34)  # as many doublings beyond its own table
    assert math.log(further.high_us / further.time_us) > 1.5 * math.log(own.high_us / own.time_us)
    assert curves.estimate(dim, "reduce_scatter", 4, 2**20).time_us == 3870  # inside it is what was measured


def test_shardings_whose_sizes_nothing_prices_are_not_ranked(dtbench: Cli, tmp_path: Path) -> None:
    flat = structs.replace(curve_of((1024, 2**20), (90.0, 90.0)), beta_is_lower_bound=True)
    dim = made_dim(
        "dp", 2, 1.0, 1.0, collectives=dict.fromkeys(COLLECTIVES, flat), bandwidth_is_lower_bound=True
    )
    assert curves.estimate(dim, "all_reduce", 2, 2**30).high_us > 1e6
    write_topology(made_topology(dim), tmp_path / "t.json")
    code, out, _ = dtbench("plan", "--topology", "t.json", "--mesh", "dp=2", "--model", "llama-8b")
    assert code == 0
    for scheme in ("DDP", "ZeRO-2", "FSDP"):
        row = next(line for line in out.splitlines() if line.startswith(scheme))
        assert "over 100x" in row and re.split(r"  +", row)[2] == "-"


def test_more_is_never_faster() -> None:
    model = built_in_models()["llama-8b"]
    for schemes in (("tensor parallel",), ("sequence parallel",)):
        by_tokens = [step_s(predicted({"tp": 8}, model, 2**k), *schemes) for k in range(8, 22, 2)]
        assert by_tokens == sorted(by_tokens)
    for scheme in ("DDP", "ZeRO-2", "FSDP"):
        by_ranks = [step_s(predicted({"dp": 2**k}, model), scheme) for k in range(1, 14)]
        assert by_ranks == sorted(by_ranks)
    small, large = (
        step_s(predicted({"dp": 64}, built_in_models()[m]), "FSDP") for m in ("llama-8b", "llama-70b")
    )
    assert large > small


def test_the_work_does_not_grow_with_ranks_or_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    priced = curves.price
    monkeypatch.setattr(curves, "price", lambda curve, size: asked.append(size) or priced(curve, size))
    counts = []
    for mesh, model in (
        ({"dp": 2, "tp": 2}, SMALL),
        ({"dp": 16384, "tp": 128}, built_in_models()["llama-405b"]),
    ):
        asked.clear()
        predicted(mesh, model, 2**20)
        counts.append(len(asked))
    assert counts[0] == counts[1] < 50


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("mesh", "changes", "said"),
    [
        ({"replicate": 2, "dp": 4}, {}, r"the topology holds dp=4, tp=8: give --map replicate=NAME"),
        ({"tp": 8}, {"measured_as": {"tp": "intra"}}, "priced as intra, the topology holds dp=4, tp=8"),
        ({"tp": 8}, {"measured_as": {"cp": "tp"}}, "cp is no dim of --mesh tp=8"),
        ({"pp": 4, "tp": 8}, {"measured_as": {"pp": "dp"}}, "pp=4 has no part in the training"),
        ({"tp": 1}, {}, "nothing is communicated"),
        ({"replicate": 4}, {"measured_as": {"replicate": "dp"}}, "replicate is for HSDP"),
        ({"tp": 3}, {}, "3 tensor-parallel ranks cannot share 4 heads"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    mesh: dict[str, int], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        predicted(mesh, **changes)


def test_key_value_heads_must_be_shared_evenly() -> None:
    model = Model("odd", hidden=24, layers=1, heads=12, kv_heads=3, head_dim=2, ffn=24, vocab=8)
    with pytest.raises(UsageError, match="cannot share 3 kv_heads"):
        predicted({"tp": 4}, model)
    predicted({"tp": 6}, model)


def test_other_names_are_mapped() -> None:
    named = [
        ring_dim(name, *of, *COLLECTIVES) for name, of in zip(("inter", "intra"), DIMS.values(), strict=True)
    ]
    asked = setup({"dp": 4, "tp": 4}, measured_as={"dp": "inter", "tp": "intra"})
    same = predicted({"dp": 4, "tp": 4})
    assert [v.step for v in communication(made_topology(*named), asked).variants] == [
        v.step for v in same.variants
    ]


def test_a_dim_within_hosts_warns_beyond_the_host() -> None:
    host = HostLayout(kind="intra-host", hosts_per_group=(1, 1), ranks_per_host=(8, 8))
    inside = made_topology(ring_dim("tp", *DIMS["tp"], *COLLECTIVES, layout=host))
    (warning,) = (w for w in communication(inside, setup({"tp": 4})).warnings if "scaled" in w)
    assert "tp=4 was measured as tp=8" in warning
    model = built_in_models()["llama-70b"]
    assert any("inside one host of 8" in w for w in communication(inside, setup({"tp": 64}, model)).warnings)


# --------------------------------------------------------------------------------------- the program


@pytest.fixture
def file(tmp_path: Path) -> str:
    write_topology(topology(), tmp_path / "topology.json")
    return "topology.json"


def test_json_holds_what_the_tables_show(dtbench: Cli, file: str) -> None:
    options = ("plan", "--topology", file, "--mesh", "dp=128,tp=8", "--model", "llama-8b")
    code, out, err = dtbench(*options, "--json")
    assert (code, err) == (0, "")
    content = json.loads(out)
    assert content["overlapped"] is False
    assert [v["schemes"] for v in content["variants"]][:2] == [
        ["tensor parallel", "DDP"],
        ["tensor parallel", "ZeRO-2"],
    ]
    fsdp = next(v for v in content["variants"] if v["schemes"] == ["sequence parallel", "FSDP"])
    code, out, err = dtbench(*options)
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if line.startswith("sequence parallel + FSDP"))
    assert f"{fsdp['step']['time_s'] * 1e3:.0f} ms" in row
    for text in ("not overlapped", "assumed: nothing overlaps", "8,030,261,248 parameters", "ranks 32.0x"):
        assert text in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mesh", "tp"), "is not a mesh dim"),
        (("--mesh", "tp=" + 5000 * "9"), "is not a mesh dim"),
        (("--mesh", "tp=1024,dp=2048"), "has 2097152 ranks, expected at most 1048576"),
        (("--mesh", "tp=8", "--map", "tp"), "--map tp is not understood"),
        (("--mesh", "tp=8", "--map", "tp=a,tp=b"), "each dim once"),
        (("--mesh", "cp=8"), "cp=8 has no part in the training: call it tp, dp or replicate"),
        (("--mesh", "tp=8", "--tokens", "0"), "--tokens"),
        (("--mesh", "tp=8", "--gpus", "8"), "--mesh says what is predicted: leave --gpus out"),
        (("--mesh", "tp=8", "--model", "nobody"), "expected one of llama-8b"),
        (("--mesh", "tp=8", "--topology", "none.json"), "none.json"),
    ],
)
def test_mistakes_are_one_line(dtbench: Cli, file: str, options: tuple[str, ...], said: str) -> None:
    code, out, err = dtbench("plan", "--topology", file, "--model", "llama-8b", *options)
    assert (code, out) == (2, "")
    assert said in err and err.count("\n") == 1


def test_what_is_not_known_is_not_given_in_digits(dtbench: Cli, tmp_path: Path) -> None:
    dim = made_dim("dp", 2, 1.0, 1.0, collectives={"all_reduce": curve_of((1024,), (90.0,))})
    write_topology(made_topology(dim), tmp_path / "t.json")
    code, out, _ = dtbench("plan", "--topology", "t.json", "--mesh", "dp=4096", "--model", "llama-8b")
    assert code == 0
    assert "over 100x" in next(line for line in out.splitlines() if line.startswith("DDP"))


def test_names_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model("a\x1b[2J[red]", hidden=8, layers=1, heads=4, kv_heads=4, head_dim=2, ffn=8, vocab=8)
    show.print_communication(predicted({"tp": 4}, model))
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"a\x1b[2J[red]" in out
