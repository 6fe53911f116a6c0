"""How often the choice of an NCCL setting is wrong: made-up arms with the noise of real launches.

times: a real launch per row and size per column. An arm's launch is the median launch, times the deviation of a row
drawn at random (whole, as neighbouring sizes deviate alike), times what the arm changes at that size. Beside our
choice stands the bare minimum of all that was collected, as the plugin's own optimize_config.py takes it.

    python -m dtbench.tests.settings_selftest TIMES.csv      in a checkout
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtbench.cost.settings.nccl import Arm, Case, Times, winners_of
from dtbench.suite.errors import DtbenchError, UsageError, complain
from dtbench.text.terminal import new_console, print_columns, print_line

# By how much an arm changes a size, drawn for each.
SCENARIOS: dict[str, tuple[float, ...]] = {
    "all the same": (0.0,),
    "0.1% slower": (0.001,),
    "10% faster to slower": (-0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1),
}
CASE: Case = (("collective", "all_reduce"), ("ranks", 8))
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Errors:
    """Of one way to choose, over all trials and sizes, as shares.

    changed: sizes whose setting it changed. slower: of those, truly slower than NCCL's choice. wrong_trials: trials
    with such a size. mean, worst: time on held-out launches over that of NCCL's choice, less 1; of the worst trial.
    """

    changed: float
    slower: float
    mean: float
    worst: float
    wrong_trials: float


def read_times(path: Path) -> tuple[tuple[int, ...], Array]:
    """Sizes and times of a CSV with a launch per row and columns SIZE_oop, microseconds.

    Raises:
        UsageError: no such table, or fewer than four launches.
    """
    import pandas as pd

    try:
        table = pd.read_csv(path)
        sizes = {int(str(name)[:-4]): name for name in table if str(name).endswith("_oop")}
        times = table[list(sizes.values())].to_numpy(dtype=np.float64) * 1e-6
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path} as a table of times: {error}") from error
    if len(times) < 4 or not sizes or not (times > 0).all():
        raise UsageError(
            f"{path} holds {times.shape[0]} launches of {len(sizes)} sizes, expected four or more, above 0"
        )
    return tuple(sizes), times


def errors_of(
    sizes: Sequence[int],
    times: Array,
    arms: int,
    launches: int,
    trials: int,
    changes: Sequence[float],
    seed: int = 0,
) -> dict[str, Errors]:
    """Ours and the minimum's errors over made-up sweeps of so many arms and launches."""
    rng = np.random.default_rng(seed)
    typical = np.median(times, axis=0)
    deviations = times / typical
    found: dict[str, list[tuple[Array, Array, Array]]] = {"ours": [], "minimum": []}
    for _ in range(trials):
        factors = np.vstack([np.ones(len(sizes)), 1 + rng.choice(changes, (arms, len(sizes)))])
        drawn = deviations[rng.integers(len(times), size=(2, arms + 1, launches))]
        seen, held_out = typical * factors[:, None] * drawn  # (arms + 1, launches, sizes) each
        chosen = {"ours": _ours(sizes, seen), "minimum": seen.min(axis=1).argmin(axis=0)}
        over = np.median(held_out, axis=1)
        at = np.arange(len(sizes))
        for name, arm in chosen.items():
            found[name].append((arm > 0, factors[arm, at] > 1, over[arm, at] / over[0] - 1))
    return {name: _errors(*map(np.asarray, zip(*rows, strict=True))) for name, rows in found.items()}


def _errors(changed: Array, slower: Array, loss: Array) -> Errors:
    of = loss.mean(axis=1)
    share = float(slower.sum() / max(changed.sum(), 1))
    return Errors(
        float(changed.mean()), share, float(of.mean()), float(of.max()), float(slower.any(axis=1).mean())
    )


def _ours(sizes: Sequence[int], seen: Array) -> npt.NDArray[np.intp]:
    names: list[Arm] = [()] + [(("NCCL_ALGO", f"arm{k}"),) for k in range(1, len(seen))]
    times: Times = {
        (CASE, size): {name: list(seen[k, :, i]) for k, name in enumerate(names)}
        for i, size in enumerate(sizes)
    }
    return np.asarray(
        [names.index(w.arm) for w in sorted(winners_of(times), key=lambda w: sizes.index(w.size))]
    )


def selftest(path: Path) -> None:
    """Prints how often either choice is wrong."""
    arms, launches, trials = 4, 12, 200
    sizes, times = read_times(path)
    rows = [
        (title, how, errors)
        for title, changes in SCENARIOS.items()
        for how, errors in errors_of(sizes, times, arms, launches, trials, changes).items()
    ]
    console = new_console()
    print_line(
        console,
        f"{trials} sweeps of {arms} arms in {launches} launches, {len(sizes)} sizes; judged on launches held out",
    )
    print_columns(
        console,
        [("the arms are", [title for title, _, _ in rows]), ("chosen by", [how for _, how, _ in rows])],
        [
            ("sizes changed", [f"{e.changed:.1%}" for *_, e in rows]),
            ("of them slower", [f"{e.slower:.1%}" for *_, e in rows]),
            ("sweeps with one", [f"{e.wrong_trials:.1%}" for *_, e in rows]),
            ("time, mean", [f"{e.mean:+.2%}" for *_, e in rows]),
            ("worst sweep", [f"{e.worst:+.2%}" for *_, e in rows]),
        ],
    )


if __name__ == "__main__":
    try:
        selftest(Path(sys.argv[1]))
    except (DtbenchError, IndexError) as error:
        complain(str(error) if isinstance(error, DtbenchError) else str(__doc__))
        sys.exit(2)
