"""Cost models on the terminal: what `calibrate` fits, and how good models are (`--validate`, `--regret`)."""

from __future__ import annotations

import msgspec
from rich.console import Console

from dtbench.cost.calibration.validate import REGIMES
from dtbench.cost.regret import CHOOSERS
from dtbench.records.cost_model import CallGroup, Regret, Validation
from dtbench.records.topology import Dim, Topology
from dtbench.text.terminal import Column, new_console, print_columns, print_json, print_line, print_prose
from dtbench.text.units import format_ratio, format_size, significant


def print_topology(topology: Topology) -> None:
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
        constants = [
            f"{b.latency_us_per_hop:g} us, {b.bandwidth_GiBps:g} GiB/s" if b else "-" for b in builtin
        ]
        figures += [
            ("PyTorch's constants", constants),
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


def _with_interval(figure: str, of: tuple[float, float]) -> str:
    return f"{figure} ({' .. '.join(significant(end, 3) for end in of)})"


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
    figures: list[Column] = [
        *(
            (r, [format_ratio(of[r].geometric_mean_ratio) if r in of else "-" for of in scores])
            for r in regimes
        ),
        ("median error", [_percent(of["all"].median_error) for of in scores]),
        (">= 32 MiB, median error", [_percent(of.median_error) if of else "-" for of in large]),
        ("values", [str(of["all"].points) for of in scores]),
    ]
    print_columns(console, [("model", [models[model] for model in group.scores])], figures)


def print_regret(found: Regret, as_json: bool = False) -> None:
    """Per library, kind and size a row per model: what its choices cost more than the best."""
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    console = new_console()
    for group in found.groups:
        head = f"{group.name} by {group.library}, {format_size(group.size_bytes)}, {found.mesh}: "
        counts = f"{next(iter(group.scores.values())).decisions} decisions, {group.launches} launches"
        print_line(console, head + counts, style="bold")
        scores = list(group.scores.values())
        figures: list[Column] = [
            ("mean regret", [_percent(s.mean) for s in scores]),
            ("90 % interval", [" to ".join(map(_percent, s.interval)) for s in scores]),
            ("largest", [_percent(s.worst) for s in scores]),
            ("within 10 %", [_share(s.near) for s in scores]),
            ("pairs in order", [_share(s.ranked_right) for s in scores]),
            ("no preference", [_share(s.ties) for s in scores]),
        ]
        print_columns(console, [("chosen by", [CHOOSERS[model] for model in group.scores])], figures)
        print_line(console, "")
    for note in found.notes:
        print_line(console, f"note: {note}")


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.1 else 2}f} %"
