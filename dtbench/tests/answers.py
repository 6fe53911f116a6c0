"""The picture of answers on the README's first screen, from committed data: `python -m dtbench.tests.answers FILE.png`.

Nothing is measured: dispatch of results/, the public systems that `dtbench compare --reference` knows, the lab's
topology, and a plan on the machine of public measurements.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import dtbench
from dtbench.comparison.references import read_systems
from dtbench.cost.plan.links import NodeLinks
from dtbench.cost.plan.machines import find_machine
from dtbench.cost.plan.models import find_model
from dtbench.cost.plan.search import RESERVED_BYTES, search_layouts
from dtbench.cost.plan.training import TrainingJob
from dtbench.records.topology import read_topology
from dtbench.text.units import format_size

RESULTS = Path(__file__).parents[2] / "results"
# Of each op the placements that need no communication.
OPS = {
    "add": "S(0),S(0)",
    "addmm": "R,S(0),R",
    "linear_3d": "S(0),R,R",
    "softmax": "S(0)",
    "layer_norm": "S(0),R,R",
    "cat": "S(0),S(0)",
    "sum_dim0": "S(0)",
    "view": "S(0)",
}
SYSTEMS = ("8xH100-AWS-p5", "8xMI300X", "8xA100-SXM4-40GB", "2x8-H100-AWS-p5", "2x8-A100-AWS-p4d")


def ops(axes: Axes) -> None:
    """Cached forward calls on a mesh of 8."""
    frame = dtbench.cases_frame(RESULTS / "dispatch-cpu-2cores.jsonl", "dispatch")
    params = {"param.mesh": "8", "param.pass": "forward", "param.call": "cached"}
    for name, value in params.items():
        frame = frame[frame[name, ""] == value]
    rows = {
        (name, placements): row
        for row, name, placements in zip(
            frame.index, frame["name", ""], frame["param.placements", ""], strict=True
        )
    }
    names = list(OPS)[::-1]
    chosen = frame.loc[[rows[name, OPS[name]] for name in names], "estimate_s"] * 1e6
    for impl, words, look in (
        ("local", "plain tensors", {"marker": "|", "color": "0.5"}),
        ("core", "dtbench's core", {"marker": "o", "color": "C0"}),
        ("torch", "torch's DTensor", {"marker": "s", "color": "C1"}),
    ):
        axes.scatter(chosen[impl], names, label=words, **look)
    axes.set(title="What does an op cost on the host?", xlabel="µs per call, cached", xlim=(0, None))
    axes.legend(fontsize="small", loc="lower right")


def links(axes: Axes) -> None:
    """All-reduces of public systems."""
    systems = {system.name: system for system in read_systems()}
    for name in SYSTEMS:
        points = systems[name].collectives["all_reduce"].points
        ranks = systems[name].ranks
        sizes = [size for size, _ in points]
        axes.plot(sizes, [size / us / 1e3 * 2 * (ranks - 1) / ranks for size, us in points], label=name)
    ticks = [2**k for k in (10, 15, 20, 25, 30)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [format_size(tick) for tick in ticks])
    axes.set(title="How fast are the links?", xlabel="all_reduce of so many bytes", ylabel="busbw, GB/s")
    axes.legend(fontsize="small")


def model(axes: Axes) -> None:
    """How far predictions are from what was measured."""
    topology = read_topology(RESULTS / "lab" / "2x2-400mbit.topology.json")
    dims = [dim.name for dim in topology.dims]
    fits = [dim.residuals.geometric_mean_ratio for dim in topology.dims]
    built_in = [dim.builtin.geometric_mean_ratio if dim.builtin else 1.0 for dim in topology.dims]
    places = range(len(dims))
    axes.barh([p + 0.2 for p in places], built_in, 0.35, label="PyTorch's constants", color="C1")
    axes.barh([p - 0.2 for p in places], fits, 0.35, label="calibrated", color="C0")
    axes.set_yticks(places, dims)
    axes.set(
        title="Does the cost model fit this machine?",
        xlabel="off by this factor (1 is perfect)",
        xscale="log",
    )
    axes.legend(fontsize="small", loc="lower right")


def shardings(axes: Axes) -> None:
    """The best layouts of a plan."""
    machine = find_machine("a100-8x")
    job = TrainingJob(find_model("llama-8b"), 64, 512, 4096)
    limit = machine.memory_GiB * 2**30 - RESERVED_BYTES
    best = search_layouts(job, machine, NodeLinks(machine), limit).best[:6][::-1]
    times = [one.step_s for one in best]
    spans = [
        [one.step_s - (one.low_s or 0.0) for one in best],
        [(one.high_s or 0.0) - one.step_s for one in best],
    ]
    names = [one.words.partition(", micro")[0] for one in best]
    axes.errorbar(times, names, xerr=spans, fmt="o", capsize=3)
    axes.set(title="How should I shard llama-8b on 64 A100?", xlabel="seconds per step, 90 % interval")


def main(target: Path) -> None:
    matplotlib.use("Agg")
    figure, grid = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for draw, axes in zip((ops, links, model, shardings), grid.flat, strict=True):
        draw(axes)
        axes.grid(alpha=0.3)
        axes.set_title(axes.get_title(), loc="left", fontweight="bold", fontsize="medium")
        axes.set_title("")
    figure.savefig(target, dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
