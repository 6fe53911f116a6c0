"""A prediction as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtbench.predict.prediction import Prediction, Priced, Total
from dtbench.predict.prices import Estimate
from dtbench.units import format_bytes, format_seconds, significant

# Wide enough that nothing wraps where no terminal reads along.
_PIPE_WIDTH = 10_000
# An interval wider than this factor to either side says nothing that its ends would add to.
NOT_KNOWN = 100


def print_prediction(prediction: Prediction, as_json: bool = False) -> None:
    """The collectives, then the shardings with their sums, then everything that was assumed."""
    if as_json:
        sys.stdout.write(json.dumps(to_json(prediction), allow_nan=False, indent=2) + "\n")
        return
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    setup = prediction.setup
    mesh = ",".join(f"{name}={size}" for name, size in setup.mesh)
    _line(console, f"{setup.model.name} on {mesh}: communication only, not overlapped", "bold")
    for where, title in (("layer", "one layer"), ("ends", "embedding, head and loss, once a step")):
        _print_collectives(console, title, [p for p in prediction.collectives if p.call.where == where])
    _print_variants(console, prediction)
    for title, lines in (("warning", prediction.warnings), ("assumed", prediction.assumptions)):
        for line in lines:
            _line(console, f"{title}: {line}")


def _print_collectives(console: Console, title: str, priced: list[Priced]) -> None:
    table = _table(console)
    for name in ("sharding", "pass", "what", "collective", "over"):
        table.add_column(name)
    for name in ("count", "size", "time", "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("beyond what was measured")
    for p in priced:
        call = p.call
        table.add_row(
            *(
                _text(cell)
                for cell in (
                    call.scheme,
                    call.phase,
                    call.what,
                    call.collective,
                    f"{call.mesh_dim}={p.ranks}",
                    str(call.count),
                    format_bytes(call.size_bytes),
                    format_seconds(p.one.time_us * 1e-6),
                    _interval(p.one),
                    _beyond(p.one),
                )
            )
        )
    _line(console, "")
    _line(console, title)
    console.print(table, crop=False)


def _print_variants(console: Console, prediction: Prediction) -> None:
    table = _table(console)
    table.add_column("sharding")
    for name in ("layer", "interval", "step", "interval", "sent per rank", "against best"):
        table.add_column(name, justify="right", no_wrap=True)
    best = min(variant.step.time_us for variant in prediction.variants)
    for variant in sorted(prediction.variants, key=lambda v: v.step.time_us):
        cells = (
            " + ".join(variant.schemes),
            format_seconds(variant.layer.time_us * 1e-6),
            _interval(variant.layer),
            format_seconds(variant.step.time_us * 1e-6),
            _interval(variant.step),
            format_bytes(variant.sent_bytes),
            f"{significant(variant.step.time_us / best, 3)}x",
        )
        table.add_row(*map(_text, cells))
    _line(console, "")
    _line(console, f"all {prediction.setup.model.layers} layers and the rest, per step and rank")
    console.print(table, crop=False)
    _line(console, "")


def to_json(prediction: Prediction) -> dict[str, Any]:
    """For machines. Times in seconds, sizes in bytes."""
    setup = prediction.setup
    return {
        "kind": "prediction",
        "model": dataclasses.asdict(setup.model) | {"elements": setup.model.elements()},
        "mesh": dict(setup.mesh),
        "measured_as": dict(setup.measured_as),
        "tokens_per_rank": setup.tokens,
        "dtype": setup.dtype,
        "reduce_dtype": setup.reduce_dtype,
        "collectives": [
            dataclasses.asdict(p.call)
            | {
                "ranks": p.ranks,
                **_times(p.one),
                "size_factor": p.one.size_factor,
                "ranks_factor": p.one.ranks_factor,
                "by_formula": p.one.by_formula,
            }
            for p in prediction.collectives
        ],
        "variants": [
            {
                "schemes": list(variant.schemes),
                "layer": _times(variant.layer),
                "step": _times(variant.step),
                "sent_bytes": variant.sent_bytes,
            }
            for variant in prediction.variants
        ],
        "overlapped": False,
        "assumptions": list(prediction.assumptions),
        "warnings": list(prediction.warnings),
    }


def _times(of: Total | Estimate) -> dict[str, float]:
    return {"time_s": of.time_us * 1e-6, "low_s": of.low_us * 1e-6, "high_s": of.high_us * 1e-6}


def _interval(of: Total | Estimate) -> str:
    if of.high_us > NOT_KNOWN**2 * of.low_us:
        return f"unknown within {NOT_KNOWN}x"
    return f"{format_seconds(of.low_us * 1e-6)} .. {format_seconds(of.high_us * 1e-6)}"


def _beyond(one: Estimate) -> str:
    parts = []
    if one.by_formula:
        parts.append("by formula")
    if one.size_factor > 1:
        parts.append(f"size {significant(one.size_factor, 2)}x")
    if one.ranks_factor != 1:
        parts.append(f"ranks {significant(one.ranks_factor, 3)}x")
    return ", ".join(parts)


def _table(console: Console) -> Table:
    plain = not console.is_terminal
    return Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False, header_style="" if plain else "bold")


def _line(console: Console, line: str, style: str = "") -> None:
    console.print(_text(line, style), soft_wrap=True)


def _text(text: str, style: str = "") -> Text:
    """Without what could move a terminal's cursor, and such that its encoding can spell it."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("µ", "u").encode(encoding, "backslashreplace").decode(encoding)
    return Text(text, style=style, overflow="fold")
