"""The picture on the README's first screen, of committed measurements: `python -m dtbench.tests.answers FILE.png`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

import dtbench
from dtbench.stats.dispatch_headline import SINGLE_OP_PARAMS, SINGLE_OPS
from dtbench.text.units import format_size
from dtbench_core.cost.ring import Ring

RESULTS = Path(__file__).parents[2] / "results"


def ops(axes: Axes) -> None:
    """Cached forward calls on a mesh of 8."""
    frame = dtbench.cases_frame(RESULTS / "baseline-cpu-gloo-4ranks.jsonl", "dispatch")
    for name, value in SINGLE_OP_PARAMS.items():
        frame = frame[frame[f"param.{name}", ""] == value]
    frame = frame.set_index([("name", ""), ("param.placements", "")])["estimate_s"] * 1e6
    chosen = frame.loc[list(reversed(SINGLE_OPS.items()))]
    for impl, label, look in (
        ("local", "plain tensors: the floor", {"marker": "|", "color": "0.4", "s": 90}),
        ("core", "dtbench's core", {"marker": "o", "color": "C0"}),
        ("torch", "torch's DTensor", {"marker": "s", "color": "C1"}),
    ):
        axes.scatter(chosen[impl], chosen.index.get_level_values(0), label=label, **look)
    axes.set(title="What does an op cost on the host?", xlabel="µs per cached call", xlim=(0, None))
    axes.legend(loc="lower right")


def links(axes: Axes, topology: dict[str, Any]) -> None:
    """The all-reduce of each mesh dim over size, with the fitted line and the line of PyTorch's constants."""
    for color, dim in enumerate(topology["dims"]):
        curve = dim["collectives"]["all_reduce"]
        sizes = np.array([row["size_bytes"] for row in curve["table"]])
        axes.plot(sizes, [row["measured_us"] for row in curve["table"]], "o", color=f"C{color}", ms=4)
        fitted_us = curve["alpha_us"] + sizes / 2**30 / curve["beta_GiBps"] * 1e6
        axes.plot(
            sizes, fitted_us, color=f"C{color}", label=f"{dim['name']}, {dim['ranks']} ranks: fitted line"
        )
    dim = topology["dims"][0]
    ring = Ring(dim["ranks"], dim["builtin"]["bandwidth_GiBps"], dim["builtin"]["latency_us_per_hop"])
    axes.plot(
        sizes, [ring.collective_us("all_reduce", size) for size in sizes], "k--", label="PyTorch's constants"
    )
    ticks = [2**k for k in (10, 14, 18, 22)]
    axes.set(xscale="log", yscale="log", title="How fast is each mesh dim?", ylim=(None, 3e6))
    axes.set(xlabel="bytes of an all_reduce, gloo", ylabel="µs, measured (dots)")
    axes.set_xticks(ticks, [format_size(tick) for tick in ticks])
    axes.legend(loc="upper left")


def model(axes: Axes, topology: dict[str, Any]) -> None:
    """Draws the typical factor between predicted and measured times of each mesh dim."""
    dims = topology["dims"][::-1]
    for shift, color, label, factors in (
        (0.2, "C1", "PyTorch's constants", [dim["builtin"]["geometric_mean_ratio"] for dim in dims]),
        (-0.2, "C0", "calibrated", [dim["residuals"]["geometric_mean_ratio"] for dim in dims]),
    ):
        bars = axes.barh([k + shift for k in range(len(dims))], factors, 0.36, color=color, label=label)
        axes.bar_label(bars, [f"{factor:.3g}x" for factor in factors], padding=3)
    axes.set_yticks(range(len(dims)), [dim["name"] for dim in dims])
    axes.set(title="Does the cost model fit this machine?", xlabel="off by this factor (1 is perfect)")
    axes.set(xscale="log", xlim=(1, 1e5))
    axes.legend(loc="center right")


def gate(axes: Axes) -> None:
    """Head over base of each benchmark, sorted, with its interval: a revision that was slowed on purpose."""
    benchmarks = json.loads((RESULTS / "gate" / "slowed.json").read_text())["benchmarks"]
    benchmarks.sort(key=lambda benchmark: benchmark["effect"]["ratio"])
    for verdict, color in (("same", "0.4"), ("slower", "C3")):
        places = [at for at, benchmark in enumerate(benchmarks) if benchmark["verdict"] == verdict]
        effects = [benchmarks[at]["effect"] for at in places]
        low, ratio, high = (
            np.array([effect[key] for effect in effects]) * 100 for key in ("low", "ratio", "high")
        )
        axes.errorbar(places, ratio - 100, yerr=(ratio - low, high - ratio), fmt="o", ms=4, color=color)
        axes.plot([], [], "o", color=color, label=f"{len(places)} {verdict}")
    axes.axhline(0, color="k", lw=0.8)
    axes.set(title="Did a change make it slower?", ylabel="% slower than base", xticks=[])
    axes.set_xlabel("benchmarks of a head slowed by 0.35 µs a call")
    axes.legend(loc="upper left")


def main(target: Path) -> None:
    topology = json.loads((RESULTS / "baseline-cpu-gloo-4ranks.topology.json").read_text())
    matplotlib.use("Agg")
    with plt.rc_context({"font.size": 9, "legend.fontsize": 8, "axes.titlelocation": "left"}):
        figure, grid = plt.subplots(2, 2, figsize=(8, 6), layout="constrained")
        ops(grid[0, 0])
        links(grid[0, 1], topology)
        model(grid[1, 0], topology)
        gate(grid[1, 1])
        for axes in grid.flat:
            axes.grid(alpha=0.3)
            axes.title.set_fontweight("bold")
        figure.savefig(target, dpi=200, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
