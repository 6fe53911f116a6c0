"""A prediction as tables and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from dtbench.cost.predict.prediction import Prediction, Priced, Total
from dtbench.cost.price import Price
from dtbench.mesh import format_mesh
from dtbench.terminal import Column, new_console, print_columns, print_json, print_line
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
    mesh = format_mesh(setup.mesh)
    print_line(console, f"{setup.model.name} on {mesh}: communication only, not overlapped", "bold")
    for where, title in (("layer", "one layer"), ("ends", "embedding, head and loss, once a step")):
        _print_collectives(console, title, [p for p in prediction.collectives if p.call.where == where])
    _print_variants(console, prediction)
    for title, lines in (("warning", prediction.warnings), ("assumed", prediction.assumptions)):
        for line in lines:
            print_line(console, f"{title}: {line}")


def _print_collectives(console: Console, title: str, priced: list[Priced]) -> None:
    calls = [p.call for p in priced]
    words: list[Column] = [
        ("sharding", [call.scheme for call in calls]),
        ("pass", [call.phase for call in calls]),
        ("what", [call.what for call in calls]),
        ("collective", [call.collective for call in calls]),
        ("over", [f"{p.call.mesh_dim}={p.ranks}" for p in priced]),
    ]
    figures: list[Column] = [
        ("count", [str(call.count) for call in calls]),
        ("size", [format_bytes(call.size_bytes) for call in calls]),
        ("time", [format_seconds(p.one.time_us * 1e-6) for p in priced]),
        ("interval", [_interval(p.one) for p in priced]),
    ]
    print_line(console, "")
    print_line(console, title)
    print_columns(console, words, figures, [("beyond what was measured", [_beyond(p.one) for p in priced])])


def _print_variants(console: Console, prediction: Prediction) -> None:
    variants = sorted(prediction.variants, key=lambda v: v.step.time_us)
    figures: list[Column] = [
        ("layer", [format_seconds(v.layer.time_us * 1e-6) for v in variants]),
        ("interval", [_interval(v.layer) for v in variants]),
        ("step", [format_seconds(v.step.time_us * 1e-6) for v in variants]),
        ("interval", [_interval(v.step) for v in variants]),
        ("sent per rank", [format_bytes(v.sent_bytes) for v in variants]),
        ("against best", [f"{significant(v.step.time_us / variants[0].step.time_us, 3)}x" for v in variants]),
    ]
    print_line(console, "")
    print_line(console, f"all {prediction.setup.model.layers} layers and the rest, per step and rank")
    print_columns(console, [("sharding", [" + ".join(v.schemes) for v in variants])], figures)
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
