"""What `dtbench calibrate` prints: a fitted topology, how good models are (`--validate`), and bucket sizes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console

from dtbench.cost.bucket_size import MEASURE, MIB, BucketChoice
from dtbench.cost.calibration.validate import REGIMES, CallGroup, Validation
from dtbench.records.topology import CalibratedTopology, Dim
from dtbench.text.terminal import Column, new_console, print_columns, print_json, print_line, print_prose
from dtbench.text.units import (
    NO_INTERVAL,
    format_interval,
    format_ratio,
    format_size,
    interval_or_none,
    significant,
)


def print_topology(topology: CalibratedTopology) -> None:
    """Per mesh dim latency and bandwidth with their intervals, how far the fit is from what it was fitted to, and the
    same of PyTorch's built-in constants; then what weakens them."""
    console, dims = new_console(), topology.dims
    builtin = [dim.builtin for dim in dims]
    figures: list[Column] = [
        ("ranks", [str(dim.ranks) for dim in dims]),
        (
            "latency [us/hop]",
            [_with_interval(significant(d.latency_us_per_hop, 3), d.latency_interval) for d in dims],
        ),
        ("bandwidth [GiB/s]", [_with_interval(_bandwidth(d), d.bandwidth_interval) for d in dims]),
        ("off by", [format_ratio(dim.residuals.geometric_mean_ratio) for dim in dims]),
    ]
    if any(builtin):
        figures += [
            (
                "PyTorch's constants",
                [f"{b.latency_us_per_hop:g} us, {b.bandwidth_GiBps:g} GiB/s" if b else "-" for b in builtin],
            ),
            ("off by", [format_ratio(b.geometric_mean_ratio) if b else "-" for b in builtin]),
        ]
    print_columns(console, [("mesh dim", [dim.name for dim in dims])], figures)
    print_prose(
        console,
        "in brackets: 90% intervals; off by: the factor between predicted and measured times, typically (1 is perfect)",
    )
    if any(dim.fitted_on.launches == 1 for dim in dims):
        print_line(console, "intervals are of one launch only: too narrow; measure with --launches 5")
    for left in topology.left_out:
        print_prose(console, f"left out: {left.name}={left.ranks}: {left.reason}")
    for warning in topology.all_warnings():
        print_prose(console, f"warning: {warning}")


def _bandwidth(dim: Dim) -> str:
    return (">= " if dim.bandwidth_is_lower_bound else "") + significant(dim.bandwidth_GiBps, 3)


def _with_interval(figure: str, of: tuple[float, float] | None) -> str:
    return f"{figure} ({format_interval(of)})"


def print_validation(validation: Validation, as_json: bool = False) -> None:
    """Per group of calls a row per model: how far off it is by size, the noise floor last."""
    if as_json:
        print_json(msgspec.to_builtins(validation))
        return
    console = new_console()
    print_line(console, validation.title, style="bold")
    for group in validation.groups:
        print_line(console, "")
        print_line(console, f"{group.name}: off by what factor, typically (1 is perfect)", style="bold")
        _print_group(console, group, validation.models)
        if group.inside is not None:
            share = f"{group.inside:.0%} of {group.points} values lie inside the fit's 90 % intervals"
            print_line(console, share + ", which are of one launch only: too narrow" * group.one_launch)
        if group.beyond:
            print_line(console, f"{group.beyond} values lie beyond the sizes it was measured at")
    print_line(console, "")
    for note in validation.notes:
        print_line(console, f"note: {note}")


def _print_group(console: Console, group: CallGroup, models: dict[str, str]) -> None:
    regimes = [regime for regime in REGIMES if any(regime in of_model for of_model in group.scores.values())]
    scores = list(group.scores.values())
    large = [of.get(">= 32 MiB") for of in scores]
    print_columns(
        console,
        [("model", [models[model] for model in group.scores])],
        figures=[
            *(
                (r, [format_ratio(of[r].geometric_mean_ratio) if r in of else "-" for of in scores])
                for r in regimes
            ),
            ("median error", [_percent(of["all"].median_error) for of in scores]),
            (">= 32 MiB, median error", [_percent(of.median_error) if of else "-" for of in large]),
            ("values", [str(of["all"].points) for of in scores]),
        ],
    )


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.1 else 2}f} %"


def print_buckets(choices: Sequence[BucketChoice], as_json: bool = False) -> None:
    """Per mesh dim, dtype and size of tensors the bucket to set, its interval, and where to set it."""
    if as_json:
        print_json({"kind": "buckets", "buckets": msgspec.to_builtins(choices)})
        return
    console = new_console()
    print_columns(
        console,
        [("mesh dim", [c.group.mesh_dim for c in choices]), ("dtype", [c.group.dtype for c in choices])],
        figures=[
            ("ranks", [str(c.group.ranks) for c in choices]),
            ("tensors", [format_size(c.group.tensor_bytes) for c in choices]),
            ("launches", [str(c.launches) for c in choices]),
            ("bucket_cap_mb", ["-" if c.bucket_cap_mb is None else f"{c.bucket_cap_mb:g}" for c in choices]),
            ("90% interval", [_bucket_interval(c) for c in choices]),
            ("fastest", [f"{c.fastest_bytes / MIB:g}" for c in choices]),
            ("loss", [f"{c.loss:.1%}" for c in choices]),
        ],
    )
    for edge in dict.fromkeys(c.edge for c in choices if c.edge):
        print_prose(console, f"no bucket_cap_mb: {edge}; {MEASURE}, with sizes beyond it")
    print_prose(
        console,
        "in MiB, for DistributedDataParallel(model, bucket_cap_mb=...) and torch._inductor.config."
        "aten_distributed_optimizations.pre_bucketing_fsdp_collectives_bucket_cap_mb",
    )


def _bucket_interval(choice: BucketChoice) -> str:
    ends = interval_or_none(choice.low_bytes, choice.high_bytes)
    return NO_INTERVAL if ends is None else " to ".join(f"{end / MIB:g}" for end in ends)
