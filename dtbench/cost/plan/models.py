"""Transformers, as far as their steps and their communication depend on them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import structs

from dtbench.errors import UsageError
from dtbench.records.read import BadFieldError, into, read_json

MAX_FILE_BYTES = 2**20
# Any of these beyond 2^40 is a slip of the keyboard; it also keeps the products exact in a float.
MAX_VALUE = 2**40
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_VALUE, description="a whole number from 1 to 2^40")]
_SizeOrUnset = Annotated[int, msgspec.Meta(ge=0, le=MAX_VALUE, description="a whole number from 1 to 2^40")]


class TransformerModel(msgspec.Struct, frozen=True):
    """A decoder-only transformer. Biases and learned positions are not counted (below 0.1 % of GPT-3).

    kv_heads: as many as heads where not given; head_dim: hidden / heads. ffn: inner features of the MLP; of one
    expert. gated: three matrices in the MLP (SwiGLU) instead of two. tied: one
    matrix is both embedding and head. aliases: other names in published tables.
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
                    f"hidden {self.hidden} is no multiple of heads {self.heads}, expected head_dim as well"
                )
            structs.force_setattr(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than experts {self.experts}"
            )

    def layer_elements(self, tp: int = 1, ep: int = 1) -> int:
        """Parameters of one layer that one of `tp` tensor-parallel and `ep` expert-parallel ranks holds; the largest
        rank's."""
        per_rank = _ceil(self.heads, tp) + 2 * _ceil(self.kv_heads, tp)  # query, key and value
        attention = self.hidden * self.head_dim * (per_rank + _ceil(self.heads, tp))
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + self.mlp_elements(tp, ep) + router + 2 * self.hidden

    def mlp_elements(self, tp: int = 1, ep: int = 1) -> int:
        """Of these the MLP's, or those of the experts that are on the rank."""
        return _ceil(self.experts, ep) * (3 if self.gated else 2) * self.hidden * _ceil(self.ffn, tp)

    def end_elements(self, tp: int = 1) -> int:
        """Parameters of embedding, head and last norm that one rank holds."""
        return (1 if self.tied else 2) * _ceil(self.vocab, tp) * self.hidden + self.hidden

    def elements(self) -> int:
        return self.layers * self.layer_elements() + self.end_elements()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


REQUIRED = ("hidden", "layers", "heads", "ffn", "vocab")
_WHAT = f"a model in JSON, with the keys {', '.join(REQUIRED)}"

# A config.json of Hugging Face's transformers, for the families whose MLPs are known to be gated.
_HUGGING_FACE = {
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
_GATED_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")


@functools.cache
def built_in_models() -> Mapping[str, TransformerModel]:
    """Those that come with dtbench, by name."""
    content = json.loads(resources.files("dtbench.cost.plan").joinpath("models.json").read_bytes())
    return {name: make_model(f"model {name}", name, keys) for name, keys in content.items()}


def model_called(name: str) -> TransformerModel | None:
    """The built-in model of a name as published tables write it (`LLAMA3.1_405B`, `Qwen3 30B a3B (w/o MTP)`). `1B` and
    `1b` are different ones: nanotron's and llm-foundry's."""
    by_name = {other: model for model in built_in_models().values() for other in (model.name, *model.aliases)}
    plain = {_plain(other): model for other, model in by_name.items()}
    return by_name.get(name) or plain.get(_plain(re.sub(r"[(\[].*?[)\]]", "", name)))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_model(name_or_path: str) -> TransformerModel:
    """A built-in model by name, or the model in a JSON file.

    Keys of a file: hidden, layers, heads, ffn, vocab; and, where they differ from what is in brackets,
    kv_heads [heads], head_dim [hidden / heads], gated [true], experts [1], experts_per_token [1], tied [false],
    name, source. A config.json of Hugging Face of the families llama, mistral, mixtral, qwen2 and qwen3 is taken too.

    Raises:
        UsageError: no such model; or a file that is not one, with the key that is wrong.
        UnreadableRunError: a file that cannot be read, or is no JSON.
    """
    models = built_in_models()
    if name_or_path in models:
        return models[name_or_path]
    path = Path(name_or_path)
    if path.suffix != ".json":
        raise UsageError(
            f"--model {name_or_path} is not known: expected one of {', '.join(models)}, or a JSON file"
        )
    content = read_json(path, _WHAT, MAX_FILE_BYTES)
    if "hidden_size" in content or "model_type" in content:
        content = _from_hugging_face(path, content)
    return make_model(f"--model {path}", path.stem, {"source": path.name} | content)


def _from_hugging_face(path: Path, content: Mapping[str, object]) -> dict[str, object]:
    family = content.get("model_type")
    if family not in _GATED_FAMILIES:
        raise UsageError(
            f"--model {path} is a configuration of model_type {ascii(family)[:60]}, expected one of "
            f"{', '.join(_GATED_FAMILIES)}: write a file with the keys {', '.join(REQUIRED)} instead"
        )
    if content.get("num_local_experts") is not None and content.get("num_experts_per_tok") is None:
        raise UsageError(
            f"--model {path}: num_experts_per_tok is missing, expected how many experts a token visits"
        )
    return {
        ours: content[theirs] for ours, theirs in _HUGGING_FACE.items() if content.get(theirs) is not None
    }


def make_model(where: str, name: str, keys: Mapping[str, object]) -> TransformerModel:
    """The model that the keys of a file describe. where: what error messages begin with. name: where no key says it.

    Raises:
        UsageError: a key that is missing, not known or cannot be.
    """
    fields = TransformerModel.__struct_fields__
    if unknown := next((key for key in keys if key not in fields), None):
        raise UsageError(
            f"{where}: the key {ascii(unknown)[:60]} is not known, expected some of {', '.join(sorted(fields))}"
        )
    try:
        return into({"name": name} | dict(keys), TransformerModel)
    except BadFieldError as error:
        raise UsageError(f"{where}: {error}") from error
