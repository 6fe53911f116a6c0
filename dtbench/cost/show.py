"""Prints the results of `dtbench calibrate`: a fitted topology, errors of models (`--validate`), and bucket sizes."""

from collections.abc import Sequence

import msgspec
from rich.console import Console

from dtbench.cost.bucket_size import MEASURE, MIB, BucketChoice
from dtbench.cost.calibration.validate import REGIMES, CallGroup, Score, Validation
from dtbench.records.topology import CalibratedTopology
from dtbench.stats.layout import format_hosts
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
    """Prints latency and bandwidth of each mesh dim with their intervals and errors, then the warnings.

    PyTorch's built-in constants and their errors are printed next to them.
    """
    console, dims = new_console(), topology.dims
    builtin = [dim.builtin for dim in dims]
    hosts = format_hosts({d.name: (d.layout.hosts_per_group, d.layout.ranks_per_host) for d in dims})
    figures: list[Column] = [
        ("ranks", [hosts.get(dim.name, str(dim.ranks)) for dim in dims]),
        (
            "latency [us/hop]",
            [_with_interval(significant(dim.latency_us_per_hop, 3), dim.latency_interval) for dim in dims],
        ),
        (
            "bandwidth [GiB/s]",
            [
                _with_interval(
                    ">= " * dim.bandwidth_is_lower_bound + significant(dim.bandwidth_GiBps, 3),
                    dim.bandwidth_interval,
                )
                for dim in dims
            ],
        ),
        ("error", [format_ratio(dim.residuals.geometric_mean_ratio) for dim in dims]),
    ]
    if any(builtin):
        figures += [
            (
                "PyTorch's constants",
                [
                    f"{constants.latency_us_per_hop:g} us, {constants.bandwidth_GiBps:g} GiB/s"
                    if constants
                    else "-"
                    for constants in builtin
                ],
            ),
            (
                "error",
                [format_ratio(constants.geometric_mean_ratio) if constants else "-" for constants in builtin],
            ),
        ]
    print_columns(console, [("mesh dim", [dim.name for dim in dims])], figures)
    print_prose(
        console,
        "in brackets: 90% intervals; error: the typical factor between predicted and measured times (1 is perfect)",
    )
    if any(dim.fitted_on.launches == 1 for dim in dims):
        print_line(console, "intervals from a single launch are too narrow: measure with --launches 5")
    for dim in topology.left_out:
        print_prose(console, f"not calibrated: {dim.name}={dim.ranks}: {dim.reason}")
    for warning in topology.all_warnings():
        print_prose(console, f"warning: {warning}")


def _with_interval(figure: str, bounds: tuple[float, float] | None) -> str:
    return f"{figure} ({format_interval(bounds)})"


def print_validation(validation: Validation, as_json: bool = False) -> None:
    """Prints a table for each group of calls: the error of each model by size, and the noise floor in the last row."""
    if as_json:
        print_json(msgspec.to_builtins(validation))
        return
    console = new_console()
    print_line(console, validation.title, style="bold")
    for group in validation.groups:
        print_line(console, "")
        print_line(
            console,
            f"{group.name}: typical factor between predicted and measured times (1 is perfect)",
            style="bold",
        )
        _print_group(console, group, validation.models)
        if group.inside is not None:
            print_line(
                console,
                f"{group.inside:.0%} of {group.points} values lie within the 90 % intervals of the topology"
                + ", which come from a single launch and are too narrow" * group.one_launch,
            )
        if group.beyond:
            print_line(console, f"{group.beyond} values have sizes outside the topology's tables")
    print_line(console, "")
    for note in validation.notes:
        print_line(console, f"note: {note}")


def _print_group(console: Console, group: CallGroup, models: dict[str, str]) -> None:
    scores = list(group.scores.values())
    regimes = [regime for regime in REGIMES if any(regime in by_regime for by_regime in scores)]
    large = [by_regime.get(">= 32 MiB") for by_regime in scores]
    print_columns(
        console,
        [("model", [models[model] for model in group.scores])],
        figures=[
            *((regime, [_ratio(by_regime.get(regime)) for by_regime in scores]) for regime in regimes),
            ("median error", [_percent(by_regime["all"].median_error) for by_regime in scores]),
            (">= 32 MiB, median error", [_percent(score.median_error) if score else "-" for score in large]),
            ("values", [str(by_regime["all"].points) for by_regime in scores]),
        ],
    )


def _ratio(score: Score | None) -> str:
    return format_ratio(score.geometric_mean_ratio) if score else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.1 else 2}f} %"


def print_buckets(choices: Sequence[BucketChoice], as_json: bool = False) -> None:
    """Prints the recommended bucket size for each mesh dim, dtype and size of tensors."""
    if as_json:
        print_json({"kind": "buckets", "buckets": msgspec.to_builtins(choices)})
        return
    console = new_console()
    print_columns(
        console,
        [
            ("mesh dim", [choice.group.mesh_dim for choice in choices]),
            ("dtype", [choice.group.dtype for choice in choices]),
        ],
        figures=[
            ("ranks", [str(choice.group.ranks) for choice in choices]),
            ("tensors", [format_size(choice.group.tensor_bytes) for choice in choices]),
            ("launches", [str(choice.launches) for choice in choices]),
            (
                "bucket_cap_mb",
                ["-" if choice.bucket_cap_mb is None else f"{choice.bucket_cap_mb:g}" for choice in choices],
            ),
            ("90% interval", [_bucket_interval(choice) for choice in choices]),
            ("fastest", [f"{choice.fastest_bytes / MIB:g}" for choice in choices]),
            ("loss", [f"{choice.loss:.1%}" for choice in choices]),
        ],
    )
    for edge in dict.fromkeys(choice.edge for choice in choices if choice.edge):
        print_prose(console, f"no bucket_cap_mb: {edge}; {MEASURE}, with sizes beyond it")
    print_prose(
        console,
        "sizes in MiB; set them in DistributedDataParallel(model, bucket_cap_mb=...) or torch._inductor.config."
        "aten_distributed_optimizations.pre_bucketing_fsdp_collectives_bucket_cap_mb",
    )


def _bucket_interval(choice: BucketChoice) -> str:
    bounds = interval_or_none(choice.low_bytes, choice.high_bytes)
    return NO_INTERVAL if bounds is None else " to ".join(f"{size / MIB:g}" for size in bounds)
