"""`dtbench predict` on the command line."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from dtbench import flags

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DTYPE = click.Choice([*DTYPES, *DTYPES.values()])


def models(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Completes the built-in models and files."""
    from dtbench.cost.predict.models import BUILT_IN

    return [*(CompletionItem(n) for n in BUILT_IN if n.startswith(begun)), CompletionItem(begun, type="file")]


@click.command("predict")
@flags.TOPOLOGY
@click.option("--mesh", required=True, metavar="DIMS", help="The mesh to predict: dp=128,tp=8.")
@click.option(
    "--model",
    required=True,
    metavar="NAME|FILE",
    shell_complete=models,
    help="llama-8b, llama-70b, llama-405b, gpt3-175b, mixtral-8x7b; or a JSON or TOML file, also a config.json "
    "of Hugging Face (llama, mistral, mixtral, qwen2, qwen3).",
)
@click.option(
    "--batch",
    "tokens",
    type=click.IntRange(1, 2**40),
    default=8192,
    help="Tokens of one data-parallel rank in a step: sequence length x micro batch.",
)
@click.option("--dtype", type=_DTYPE, default="bf16", help="Of activations and weights.")
@click.option("--reduce-dtype", type=_DTYPE, show_default="--dtype", help="Of reduced gradients.")
@click.option(
    "--map",
    "mapping",
    metavar="DIM=NAME,...",
    help="Which dim of the topology prices a dim of --mesh: tp=intra.",
)
@click.option("--tp", metavar="DIM", show_default="tp", help="The mesh dim of tensor parallelism.")
@click.option("--dp", metavar="DIM", show_default="dp", help="The mesh dim of DDP, ZeRO-2 and FSDP.")
@click.option("--replicate", metavar="DIM", show_default="replicate", help="The outer mesh dim of HSDP.")
@flags.JSON
def predict_command(
    topology: Path,
    mesh: str,
    model: str,
    tokens: int,
    dtype: str,
    reduce_dtype: str | None,
    mapping: str | None,
    tp: str | None,
    dp: str | None,
    replicate: str | None,
    as_json: bool,
) -> None:
    """What a transformer's shardings spend on communication.

    Per layer and step, by a calibrated topology. Compares tensor parallelism with and without sequence
    parallelism, and DDP, ZeRO-2 and FSDP (HSDP, where the mesh has a dim `replicate`), also on more ranks
    than were measured. A file for --model has the keys hidden, layers, heads, ffn and vocab; and where they
    differ, kv_heads, head_dim, gated, experts, experts_per_token, tied.

    \b
    Example:
      dtbench predict --topology topology.json --mesh dp=128,tp=8 --model llama-70b
    """
    from dtbench.cost.predict.models import find_model
    from dtbench.cost.predict.prediction import Setup, predict
    from dtbench.cost.predict.show import print_prediction
    from dtbench.files.topology import read_topology
    from dtbench.mesh import parse_mesh

    given = {"tp": tp, "dp": dp, "replicate": replicate}
    setup = Setup(
        find_model(model),
        parse_mesh(mesh),
        tokens,
        DTYPES.get(dtype, dtype),
        DTYPES.get(reduce_dtype or dtype, reduce_dtype or dtype),
        _parse_mapping(mapping),
        {role: dim for role, dim in given.items() if dim is not None},
    )
    print_prediction(predict(read_topology(topology), setup), as_json)


def _parse_mapping(text: str | None) -> dict[str, str]:
    """`tp=intra,dp=inter` -> {"tp": "intra", "dp": "inter"}."""
    pairs = [part.strip().partition("=") for part in text.split(",")] if text is not None else []
    mapping = {name: to for name, _, to in pairs}
    if any(not name or not to for name, to in mapping.items()) or len(mapping) < len(pairs):
        raise click.UsageError(
            f"--map {text} is not understood: expected DIM=NAME, each dim once, such as --map tp=intra,dp=inter"
        )
    return mapping
