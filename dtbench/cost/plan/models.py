"""Transformers, as far as their steps and their communication depend on them."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from dtbench.model.errors import UsageError
from dtbench.records.read import BadFieldError, into, read_bytes, read_json

MAX_FILE_BYTES = 2**20
# Any of these beyond 2^40 is a slip of the keyboard; it also keeps the products exact in a float.
MAX_VALUE = 2**40


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. Biases and learned positions are not counted (below 0.1 % of GPT-3)."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # inner features of the MLP; of one expert
    vocab: int
    gated: bool = True  # three matrices in the MLP (SwiGLU) instead of two
    experts: int = 1
    experts_per_token: int = 1
    tied: bool = False  # one matrix is both embedding and head
    source: str = ""

    def layer_elements(self, tp: int = 1) -> int:
        """Parameters of one layer that one of `tp` tensor-parallel ranks holds; the largest rank's."""
        per_rank = _ceil(self.heads, tp) + 2 * _ceil(self.kv_heads, tp)  # query, key and value
        attention = self.hidden * self.head_dim * (per_rank + _ceil(self.heads, tp))
        mlp = self.experts * (3 if self.gated else 2) * self.hidden * _ceil(self.ffn, tp)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + mlp + router + 2 * self.hidden

    def end_elements(self, tp: int = 1) -> int:
        """Parameters of embedding, head and last norm that one rank holds."""
        return (1 if self.tied else 2) * _ceil(self.vocab, tp) * self.hidden + self.hidden

    def described(self) -> dict[str, str | int | bool]:
        """Its fields, and how many parameters these make."""
        return asdict(self) | {"elements": self.elements()}

    def elements(self) -> int:
        """All parameters."""
        return self.layers * self.layer_elements() + self.end_elements()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _llama(name: str, hidden: int, layers: int, heads: int, ffn: int, repository: str) -> Model:
    # config.json of the repository on huggingface.co: vocab_size 128256, num_key_value_heads 8
    return Model(
        name, hidden, layers, heads, 8, 128, ffn, 128256, source=f"config.json of meta-llama/{repository}"
    )


BUILT_IN = {
    model.name: model
    for model in (
        _llama("llama-8b", 4096, 32, 32, 14336, "Llama-3.1-8B"),
        _llama("llama-70b", 8192, 80, 64, 28672, "Llama-3.1-70B"),
        _llama("llama-405b", 16384, 126, 128, 53248, "Llama-3.1-405B"),
        Model(
            "gpt3-175b",
            12288,
            96,
            96,
            96,
            128,
            4 * 12288,
            50257,
            gated=False,
            tied=True,
            source="Brown et al. 2020 (arXiv 2005.14165), table 2.1",
        ),
        Model(
            "mixtral-8x7b",
            4096,
            32,
            32,
            8,
            128,
            14336,
            32000,
            experts=8,
            experts_per_token=2,
            source="config.json of mistralai/Mixtral-8x7B-v0.1",
        ),
    )
}

REQUIRED = ("hidden", "layers", "heads", "ffn", "vocab")
_WHAT = f"a model in JSON or TOML, with the keys {', '.join(REQUIRED)}"
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_VALUE, description="a whole number from 1 to 2^40")]


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a file; see `find_model`."""

    name: str = ""
    hidden: _Size
    layers: _Size
    heads: _Size
    kv_heads: _Size | None = None
    head_dim: _Size | None = None
    ffn: _Size
    vocab: _Size
    gated: bool = True
    experts: _Size = 1
    experts_per_token: _Size = 1
    tied: bool = False
    source: str = ""


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
    if name_or_path in BUILT_IN:
        return BUILT_IN[name_or_path]
    path = Path(name_or_path)
    if not os.path.exists(path) and path.suffix not in (".json", ".toml"):  # noqa: PTH110 - Path's raises where a name is too long
        raise UsageError(
            f"--model {name_or_path} is not known: expected one of {', '.join(BUILT_IN)}, or a JSON or TOML file"
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
    return _model(path, content)


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
    own = {ours: content[theirs] for ours, theirs in _HUGGING_FACE.items() if content.get(theirs) is not None}
    return {**own, "source": path.name}


def _model(path: Path, content: Mapping[str, object]) -> Model:
    def fail(what: str, expected: str) -> UsageError:
        return UsageError(f"--model {path}: {what}, expected {expected}")

    for key in content:
        if key not in _File.__struct_fields__:
            raise fail(
                f"the key {ascii(key)[:60]} is not known",
                f"some of {', '.join(sorted(_File.__struct_fields__))}",
            )
    try:
        file = into(content, _File)
    except BadFieldError as error:
        raise UsageError(f"--model {path}: {error}") from error
    if file.head_dim is None and file.hidden % file.heads:
        raise fail(f"hidden {file.hidden} is no multiple of heads {file.heads}", "head_dim as well")
    kv_heads = file.heads if file.kv_heads is None else file.kv_heads
    if file.heads % kv_heads:
        raise fail(
            f"heads {file.heads} is no multiple of kv_heads {kv_heads}", "as many query heads for each"
        )
    if file.experts_per_token > file.experts:
        raise fail(
            f"experts_per_token {file.experts_per_token} is more than experts {file.experts}",
            "at most as many",
        )
    given = msgspec.structs.asdict(file) | {"kv_heads": kv_heads}
    given["head_dim"] = file.hidden // file.heads if file.head_dim is None else file.head_dim
    return Model(**given | {"name": file.name or path.stem, "source": file.source or path.name})
