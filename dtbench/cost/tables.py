"""How good cost models are, on the terminal: what `validate` and `regret` print."""

from __future__ import annotations

from rich.console import Console

from dtbench.cost.calibration.models import WORDS as MODELS
from dtbench.cost.calibration.validate import REGIMES, Group, Validation
from dtbench.cost.regret import CHOOSERS, Regret
from dtbench.terminal import (
    add_figures,
    add_words,
    as_text,
    new_console,
    new_table,
    print_json,
    print_line,
    print_table,
)
from dtbench.units import format_ratio, format_size


def print_validation(validation: Validation, as_json: bool = False) -> None:
    """Per group of calls a row per model: how far off it is by size, the noise floor last."""
    if as_json:
        print_json(validation.to_json())
        return
    console = new_console()
    print_line(console, validation.title, style="bold")
    for group in validation.groups:
        print_line(console, "")
        print_line(console, f"{group.name}: off by what factor, typically (1 is perfect)", style="bold")
        _print_group(console, group)
        if group.inside is not None:
            share = f"{group.inside:.0%} of {group.points} values lie inside the fit's 90 % intervals"
            print_line(console, share + ", which are of one launch only: too narrow" * group.one_launch)
        if group.beyond:
            print_line(console, f"{group.beyond} values lie beyond the sizes it was measured at")
    print_line(console, "")
    for note in validation.notes:
        print_line(console, f"note: {note}")


def _print_group(console: Console, group: Group) -> None:
    regimes = [regime for regime in REGIMES if any(regime in of_model for of_model in group.scores.values())]
    table = new_table(plain=not console.is_terminal)
    add_words(table, "model", list(MODELS.values()))
    for title in (*regimes, "median error", ">= 32 MiB, median error", "values"):
        add_figures(table, title)
    for model, scores in group.scores.items():
        large = scores.get(">= 32 MiB")
        table.add_row(
            as_text(MODELS[model]),
            *(as_text(format_ratio(scores[r].geometric_mean_ratio) if r in scores else "-") for r in regimes),
            as_text(_percent(scores["all"].median_error)),
            as_text(_percent(large.median_error) if large else "-"),
            str(scores["all"].points),
        )
    print_table(console, table)


def print_regret(found: Regret, as_json: bool = False) -> None:
    """Per library, kind and size a row per model: what its choices cost more than the best."""
    if as_json:
        print_json(found.to_json())
        return
    console = new_console()
    for group in found.groups:
        head = f"{group.name} by {group.library}, {format_size(group.size_bytes)}, {found.mesh}: "
        counts = f"{next(iter(group.scores.values())).decisions} decisions, {group.launches} launches"
        print_line(console, head + counts, style="bold")
        table = new_table(plain=not console.is_terminal)
        add_words(table, "chosen by", list(CHOOSERS.values()))
        for title in (
            "mean regret",
            "90 % interval",
            "largest",
            "within 10 %",
            "pairs in order",
            "no preference",
        ):
            add_figures(table, title)
        for model, score in group.scores.items():
            low, high = score.interval
            shares = (score.near, score.ranked_right, score.ties)
            table.add_row(
                as_text(CHOOSERS[model]),
                _percent(score.mean),
                f"{_percent(low)} to {_percent(high)}",
                _percent(score.worst),
                *("-" if share is None else f"{share:.0%}" for share in shares),
            )
        print_table(console, table)
        print_line(console, "")
    for note in found.notes:
        print_line(console, f"note: {note}")


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.1 else 2}f} %"
