"""A prediction as tables and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from dtbench.cost.predict.prediction import Prediction, Priced, Total
from dtbench.cost.price import Price
from dtbench.terminal import as_text, new_console, new_table, print_json, print_line, print_table
from dtbench.units import format_bytes, format_seconds, significant

# An interval wider than this factor to either side says nothing that its ends would add to.
NOT_KNOWN = 100


def print_prediction(prediction: Prediction, as_json: bool = False) -> None:
    """The collectives, then the shardings with their sums, then everything that was assumed."""
    if as_json:
        print_json(to_json(prediction))
        return
    console = new_console()
    setup = prediction.setup
    mesh = ",".join(f"{name}={size}" for name, size in setup.mesh)
    print_line(console, f"{setup.model.name} on {mesh}: communication only, not overlapped", "bold")
    for where, title in (("layer", "one layer"), ("ends", "embedding, head and loss, once a step")):
        _print_collectives(console, title, [p for p in prediction.collectives if p.call.where == where])
    _print_variants(console, prediction)
    for title, lines in (("warning", prediction.warnings), ("assumed", prediction.assumptions)):
        for line in lines:
            print_line(console, f"{title}: {line}")


def _print_collectives(console: Console, title: str, priced: list[Priced]) -> None:
    table = new_table(plain=not console.is_terminal)
    for name in ("sharding", "pass", "what", "collective", "over"):
        table.add_column(name)
    for name in ("count", "size", "time", "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("beyond what was measured")
    for p in priced:
        call = p.call
        cells = (
            *(call.scheme, call.phase, call.what, call.collective, f"{call.mesh_dim}={p.ranks}"),
            *(str(call.count), format_bytes(call.size_bytes), format_seconds(p.one.time_us * 1e-6)),
            *(_interval(p.one), _beyond(p.one)),
        )
        table.add_row(*map(as_text, cells))
    print_line(console, "")
    print_line(console, title)
    print_table(console, table)


def _print_variants(console: Console, prediction: Prediction) -> None:
    table = new_table(plain=not console.is_terminal)
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
        table.add_row(*map(as_text, cells))
    print_line(console, "")
    print_line(console, f"all {prediction.setup.model.layers} layers and the rest, per step and rank")
    print_table(console, table)
    print_line(console, "")


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
            | {"ranks": p.ranks, **_times(p.one)}
            | {name: getattr(p.one, name) for name in ("size_factor", "ranks_factor", "by_formula")}
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


def _times(of: Total | Price) -> dict[str, float]:
    return {"time_s": of.time_us * 1e-6, "low_s": of.low_us * 1e-6, "high_s": of.high_us * 1e-6}


def _interval(of: Total | Price) -> str:
    if of.high_us > NOT_KNOWN**2 * of.low_us:
        return f"unknown within {NOT_KNOWN}x"
    return f"{format_seconds(of.low_us * 1e-6)} .. {format_seconds(of.high_us * 1e-6)}"


def _beyond(one: Price) -> str:
    parts = []
    if one.by_formula:
        parts.append("by formula")
    if one.size_factor > 1:
        parts.append(f"size {significant(one.size_factor, 2)}x")
    if one.ranks_factor != 1:
        parts.append(f"ranks {significant(one.ranks_factor, 3)}x")
    return ", ".join(parts)
