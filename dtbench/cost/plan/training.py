"""Training jobs: transformer models, the software that trains them, and their layouts over ranks."""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import structs

from dtbench.errors import UsageError
from dtbench.records.read import BadFieldError, convert, read_json

MAX_FILE_BYTES = 2**20
# Larger values are typing errors; the limit also keeps products exact in a float.
MAX_VALUE = 2**40
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_VALUE, description="an integer from 1 to 2^40")]
_SizeOrUnset = Annotated[int, msgspec.Meta(ge=0, le=MAX_VALUE, description="an integer from 1 to 2^40")]


class TransformerModel(msgspec.Struct, frozen=True):
    """A decoder-only transformer. Biases and learned positions are not counted (below 0.1 % of GPT-3).

    Attributes:
        hidden: features between blocks.
        ffn: inner features of the MLP, or of each expert.
        kv_heads: heads of keys and values; defaults to `heads`.
        head_dim: features per head; defaults to hidden / heads.
        gated: the MLP has three matrices (SwiGLU) instead of two.
        experts: experts per layer; 1 for a dense MLP.
        tied: the embedding and the head share their matrix.
        aliases: other names in published tables.
    """

    name: str
    hidden: _Size
    layers: _Size
    heads: _Size
    ffn: _Size
    vocab: _Size
    kv_heads: _SizeOrUnset = 0
    head_dim: _SizeOrUnset = 0
    gated: bool = True
    experts: _Size = 1
    experts_per_token: _Size = 1
    tied: bool = False
    source: str = ""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.kv_heads:
            structs.force_setattr(self, "kv_heads", self.heads)
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ValueError(
                    f"hidden {self.hidden} is not a multiple of heads {self.heads}: give head_dim as well"
                )
            structs.force_setattr(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is larger than experts {self.experts}"
            )

    def layer_elements(self, tp: int = 1, ep: int = 1) -> int:
        """Returns the most parameters of a layer on any of `tp` tensor-parallel and `ep` expert-parallel ranks."""
        per_rank = _ceil(self.heads, tp) + 2 * _ceil(self.kv_heads, tp)  # query, key and value
        attention = self.hidden * self.head_dim * (per_rank + _ceil(self.heads, tp))
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + self.mlp_elements(tp, ep) + router + 2 * self.hidden

    def mlp_elements(self, tp: int = 1, ep: int = 1) -> int:
        """Returns the parameters of the MLP, or of the rank's experts, among `layer_elements`."""
        return _ceil(self.experts, ep) * (3 if self.gated else 2) * self.hidden * _ceil(self.ffn, tp)

    def vocab_elements(self, tp: int = 1) -> int:
        """Returns the parameters of embedding, head and last norm on a rank."""
        return (1 if self.tied else 2) * _ceil(self.vocab, tp) * self.hidden + self.hidden

    def elements(self) -> int:
        return self.layers * self.layer_elements() + self.vocab_elements()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


REQUIRED = ("hidden", "layers", "heads", "ffn", "vocab")
_FILE_KIND = f"a model in JSON, with the keys {', '.join(REQUIRED)}"

# Key of a model -> key in a config.json of Hugging Face's transformers.
_HUGGING_FACE_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "tied": "tie_word_embeddings",
}
# Families whose MLPs are gated; config.json does not contain this property.
_GATED_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")


@functools.cache
def built_in_models() -> Mapping[str, TransformerModel]:
    """Returns the models that are included in dtbench, by name."""
    content = (resources.files("dtbench.cost.plan") / "models.json").read_bytes()
    return {name: make_model(f"model {name}", name, keys) for name, keys in json.loads(content).items()}


def model_called(name: str) -> TransformerModel | None:
    """Returns the built-in model for a published table's name (`LLAMA3.1_405B`, `Qwen3 30B a3B (w/o MTP)`).

    An exact match takes precedence: `1B` is nanotron's model and `1b` llm-foundry's.
    """
    by_name = {alias: model for model in built_in_models().values() for alias in (model.name, *model.aliases)}
    normalized = {_normalized(alias): model for alias, model in by_name.items()}
    return by_name.get(name) or normalized.get(_normalized(re.sub(r"[(\[].*?[)\]]", "", name)))


def _normalized(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_model(name_or_path: str) -> TransformerModel:
    """Returns a built-in model by its name, or reads a JSON file.

    Required keys of a file: hidden, layers, heads, ffn, vocab. Optional keys with their defaults: kv_heads [heads],
    head_dim [hidden / heads], gated [true], experts [1], experts_per_token [1], tied [false], name, source. Instead, it
    may be a config.json of Hugging Face of the families llama, mistral, mixtral, qwen2 and qwen3.

    Raises:
        UsageError: the model is unknown, or the file has an invalid key.
        UnreadableRunError: the file cannot be read, or is not JSON.
    """
    models = built_in_models()
    if name_or_path in models:
        return models[name_or_path]
    path = Path(name_or_path)
    if path.suffix != ".json":
        raise UsageError(
            f"--model {name_or_path}: unknown model, expected one of {', '.join(models)}, or a JSON file"
        )
    content = read_json(path, _FILE_KIND, MAX_FILE_BYTES)
    if "hidden_size" in content or "model_type" in content:
        content = _from_hugging_face(path, content)
    return make_model(f"--model {path}", path.stem, {"source": path.name} | content)


def _from_hugging_face(path: Path, content: Mapping[str, object]) -> dict[str, object]:
    family = content.get("model_type")
    if family not in _GATED_FAMILIES:
        raise UsageError(
            f"--model {path} has the model_type {ascii(family)[:60]}, expected one of "
            f"{', '.join(_GATED_FAMILIES)}: write a file with the keys {', '.join(REQUIRED)} instead"
        )
    if content.get("num_local_experts") is not None and content.get("num_experts_per_tok") is None:
        raise UsageError(
            f"--model {path}: num_experts_per_tok is missing, expected the number of experts per token"
        )
    return {
        key: content[config_key]
        for key, config_key in _HUGGING_FACE_KEYS.items()
        if content.get(config_key) is not None
    }


def make_model(label: str, name: str, keys: Mapping[str, object]) -> TransformerModel:
    """Makes a model from the keys of a file.

    Args:
        label: beginning of error messages.
        name: the name of the model, if no key gives one.

    Raises:
        UsageError: a key is missing, unknown or invalid.
    """
    fields = TransformerModel.__struct_fields__
    if unknown := next((key for key in keys if key not in fields), None):
        raise UsageError(
            f"{label}: unknown key {ascii(unknown)[:60]}, expected some of {', '.join(sorted(fields))}"
        )
    try:
        return convert({"name": name} | dict(keys), TransformerModel)
    except BadFieldError as error:
        raise UsageError(f"{label}: {error}") from error


Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
Precision = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class Software:
    """Properties of the training program.

    Attributes:
        flash: attention does not store the matrix of scores.
        sequence_parallel: activations between blocks are sharded over the tensor-parallel ranks.
        overlap: reducing gradients and gathering ZeRO's weights overlap with computation. FSDP always overlaps.
        zero: ZeRO stage (arXiv 1910.02054) over the data-parallel ranks: 1 shards the optimizer's states, 2 also the
            gradients. 3 is FSDP, which is a property of the layout.
        precision: of the matrix products with the layers' weights.
    """

    flash: bool = True
    sequence_parallel: bool = True
    overlap: bool = True
    zero: int = 1
    precision: Precision = "bf16"


# Megatron-DeepSpeed at the time when the tables of measured steps were published.
PLAIN = Software(flash=False, sequence_parallel=False, overlap=False, zero=0)


@dataclass(frozen=True)
class TrainingJob:
    """A training job.

    Attributes:
        batch: sequences per step over all ranks.
        sequence: tokens per sequence.
    """

    model: TransformerModel
    gpus: int
    batch: int
    sequence: int
    software: Software = Software()


@dataclass(frozen=True)
class TrainingLayout:
    """The layout of a job over ranks; tp is the innermost dimension, followed by cp, dp and pp.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: ranks that process different sequences.
        fsdp: ranks that share a copy of the weights, a divisor of dp x cp; 1 without FSDP.
        micro_batch: sequences per micro batch.
        chunks: chunks of layers per rank in an interleaved pipeline; 1 for 1F1B.
        recompute: which activations the backward pass computes again.
        cp: ranks that share each sequence.
        ep: ranks of cp x dp x tp that share the experts of a layer.
    """

    tp: int
    pp: int
    dp: int
    fsdp: int
    micro_batch: int
    chunks: int = 1
    recompute: Recompute = "none"
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def copies(self) -> int:
        """Number of ranks that reduce the same gradient."""
        return self.dp * self.cp

    def micro_batches(self, batch: int) -> int:
        """Returns the number of micro batches per pipeline and step."""
        return batch // (self.dp * self.micro_batch)

    def words(self) -> str:
        """Describes the layout, e.g. `tp=8 pp=4 dp=32, micro batch 2, full recomputation`."""
        data = f"dp={self.dp}" if self.fsdp == 1 else f"fsdp={self.fsdp}"
        if 1 < self.fsdp < self.copies:
            data = f"dp={self.copies // self.fsdp} fsdp={self.fsdp}"
        optional = "".join(
            f" {name}={ranks}" for name, ranks in (("cp", self.cp), ("ep", self.ep)) if ranks > 1
        )
        return ", ".join(
            [
                f"tp={self.tp} pp={self.pp} {data}{optional}",
                f"micro batch {self.micro_batch}",
                *[f"{self.chunks} chunks"] * (self.chunks > 1),
                *[f"{self.recompute} recomputation"] * (self.recompute != "none"),
            ]
        )


@functools.lru_cache(maxsize=2**12)
def stage_layers(model: TransformerModel, pp: int, by_cost: bool = False) -> tuple[int, ...]:
    """Returns the number of layers of each pipeline stage. The first also has the embedding, the last the head.

    All stages have the same number if possible. Otherwise embedding and head count as a layer each, if that gives equal
    stages (Megatron-LM's --account-for-embedding-in-pipeline-split). Otherwise the first stages have one more layer.

    Args:
        by_cost: balance the cost of the matrix products, including the head, instead of the number of layers
            (nanotron).
    """
    layers = model.layers
    if by_cost and pp > 1:
        layer_cost = model.layer_elements() - 2 * model.hidden  # norms have no matrix product
        costs = [
            *itertools.accumulate([layer_cost] * layers),
            layer_cost * layers + model.vocab * model.hidden,
        ]
        stage, counts = 0, [0] * pp
        for index, cost in enumerate(costs):
            if cost * pp > costs[-1] * (stage + 1):
                stage += 1
            counts[stage] += index < layers
        return tuple(counts)
    if layers % pp and (layers + 2) % pp == 0 and pp > 1:
        per_stage = (layers + 2) // pp
        return (per_stage - 1, *([per_stage] * (pp - 2)), per_stage - 1)
    return tuple(layers // pp + (stage < layers % pp) for stage in range(pp))


def stage_elements(
    model: TransformerModel, layout: TrainingLayout, layers: Sequence[int] | None = None
) -> float:
    """Returns the most parameters of any rank before sharding over dp: its layers, embedding and head."""
    counts = layers or stage_layers(model, layout.pp)
    layer = model.layer_elements(layout.tp, layout.ep)
    vocab: float = model.vocab_elements(layout.tp)
    if layout.pp > 1 and not model.tied:
        vocab = (vocab + model.hidden) / 2
    return max(max(counts) * layer, max(counts[0], counts[-1]) * layer + vocab)
