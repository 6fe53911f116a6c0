"""Transformers, as far as their steps and their communication depend on them."""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import structs

from dtbench.records.read import BadFieldError, into, read_bytes, read_json
from dtbench.suite.errors import UsageError

MAX_FILE_BYTES = 2**20
# Any of these beyond 2^40 is a slip of the keyboard; it also keeps the products exact in a float.
MAX_VALUE = 2**40
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_VALUE, description="a whole number from 1 to 2^40")]


class Model(msgspec.Struct, frozen=True):
    """A decoder-only transformer. Biases and learned positions are not counted (below 0.1 % of GPT-3).

    ffn: inner features of the MLP; of one expert. gated: three matrices in the MLP (SwiGLU) instead of two. tied: one
    matrix is both embedding and head.
    """

    name: str
    hidden: _Size
    layers: _Size
    heads: _Size
    kv_heads: _Size
    head_dim: _Size
    ffn: _Size
    vocab: _Size
    gated: bool = True
    experts: _Size = 1
    experts_per_token: _Size = 1
    tied: bool = False
    source: str = ""

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

    def described(self) -> dict[str, str | int | bool]:
        """Its fields, and how many parameters these make."""
        return structs.asdict(self) | {"elements": self.elements()}

    def elements(self) -> int:
        """All parameters."""
        return self.layers * self.layer_elements() + self.end_elements()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


REQUIRED = ("hidden", "layers", "heads", "ffn", "vocab")
_WHAT = f"a model in JSON or TOML, with the keys {', '.join(REQUIRED)}"

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
def _content() -> tuple[dict[str, Model], dict[str, str], dict[str, str]]:
    """Models by name; other names of them; and by plain name why a model is not one."""
    content = json.loads(resources.files("dtbench.cost.plan").joinpath("models.json").read_bytes())
    refused = content.pop("refused")
    others = {other: name for name, keys in content.items() for other in keys.pop("aliases", ())}
    return {name: make_model(f"model {name}", name, keys) for name, keys in content.items()}, others, refused


def built_in_models() -> Mapping[str, Model]:
    """Those that come with dtbench, by name."""
    return _content()[0]


def model_called(name: str) -> Model | str | None:
    """The built-in model of a name as tables write it (`LLAMA3.1_405B`, `Qwen3 30B a3B (w/o MTP)`); or why it is not
    in the model; None: not known. `1B` and `1b` are different ones: nanotron's and llm-foundry's."""
    models, others, refused = _content()
    exact = {**{key: key for key in models}, **others}
    if name in exact:
        return models[exact[name]]
    plain = _plain(re.sub(r"[(\[].*?[)\]]", "", name))
    by_plain = {_plain(key): value for key, value in exact.items()}
    return models[by_plain[plain]] if plain in by_plain else refused.get(plain)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_model(name_or_path: str) -> Model:
    """A built-in model by name, or the model in a JSON or TOML file.

    Keys of a file: hidden, layers, heads, ffn, vocab; and, where they differ from what is in brackets,
    kv_heads [heads], head_dim [hidden / heads], gated [true], experts [1], experts_per_token [1], tied [false],
    name, source.
    A config.json of Hugging Face of the families llama, mistral, mixtral, qwen2 and qwen3 is taken too.

    Raises:
        UsageError: no such model; or a file that is not one, with the key that is wrong.
        UnreadableRunError: a file that cannot be read, or is no JSON.
    """
    known = built_in_models()
    if name_or_path in known:
        return known[name_or_path]
    path = Path(name_or_path)
    if not os.path.exists(path) and path.suffix not in (".json", ".toml"):  # noqa: PTH110 - Path's raises where a name is too long
        raise UsageError(
            f"--model {name_or_path} is not known: expected one of {', '.join(known)}, or a JSON or TOML file"
        )
    if path.suffix == ".toml":
        try:
            content = tomllib.loads(read_bytes(path, _WHAT, MAX_FILE_BYTES).decode("utf-8"))
        except ValueError as error:
            raise UsageError(f"--model {path} is not {_WHAT}: not TOML ({str(error)[:120]})") from error
    else:
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


def make_model(where: str, name: str, keys: Mapping[str, object]) -> Model:
    """The model that the keys of a file describe; those that may be missing follow from the others.

    where: what error messages begin with. name: where no key says it.

    Raises:
        UsageError: a key that is missing, not known or cannot be.
    """

    def fail(what: str, expected: str) -> UsageError:
        return UsageError(f"{where}: {what}, expected {expected}")

    fields = Model.__struct_fields__
    if unknown := next((key for key in keys if key not in fields), None):
        raise fail(f"the key {ascii(unknown)[:60]} is not known", f"some of {', '.join(sorted(fields))}")
    # A head's size is filled in below, once the others are known to be whole numbers.
    given = dict(keys)
    for key, value in {"name": name, "kv_heads": keys.get("heads", 1), "head_dim": 1}.items():
        given.setdefault(key, value)
    try:
        model = into(given, Model)
    except BadFieldError as error:
        raise UsageError(f"{where}: {error}") from error
    if "head_dim" not in keys:
        if model.hidden % model.heads:
            raise fail(f"hidden {model.hidden} is no multiple of heads {model.heads}", "head_dim as well")
        model = structs.replace(model, head_dim=model.hidden // model.heads)
    if model.heads % model.kv_heads:
        raise fail(
            f"heads {model.heads} is no multiple of kv_heads {model.kv_heads}", "as many query heads for each"
        )
    if model.experts_per_token > model.experts:
        raise fail(
            f"experts_per_token {model.experts_per_token} is more than experts {model.experts}",
            "at most as many",
        )
    return model
