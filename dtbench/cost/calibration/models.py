"""The models that validation compares, from what is built into torch to the tables of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtbench.cost.calibration.layout import builtin_link
from dtbench.cost.calibration.points import COLLECTIVES
from dtbench.cost.price import price, ring_us
from dtbench.records.topology import Dim, Layout, MeasuredCurve
from dtbench.suite import Header, MeshShape
from dtbench_core.cost.ring import GIB, RING_COLLECTIVES, Ring, guessed_links

# In order of what they know. The noise floor is no model: one launch's times as the forecast of another's.
WORDS = {
    "builtin": "PyTorch's constants, layout guessed from the mesh's shape",
    "builtin_layout": "PyTorch's constants, layout from the ranks' hosts",
    "builtin_scaled": "the same times one fitted number",
    "ring": "calibrated latency and bandwidth of each dim",
    "line": "each call's own latency and bandwidth",
    "table": "each call's own table (what prices are)",
    "floor": "noise floor: one launch forecasts another",
}


@dataclass(frozen=True)
class CurvesOnly:
    """A mesh dim without constants of the ring, whose collectives were not measured on it."""

    name: str
    ranks: int
    layout: Layout
    collectives: dict[str, MeasuredCurve]
    transitions: dict[str, dict[str, MeasuredCurve]]


class Models:
    """What each model says a call takes, for some mesh dims.

    mesh, devices_per_host: what torch guesses the layout from; None where the devices are not known.
    """

    def __init__(
        self, dims: Sequence[Dim | CurvesOnly], mesh: MeshShape, devices_per_host: int | None
    ) -> None:
        self.dims = {dim.name: dim for dim in dims}
        links = [] if devices_per_host is None else guessed_links(mesh.shape, devices_per_host)
        self._guessed = dict(zip(mesh.dim_names, links, strict=False))
        self._scale = self._fitted_scale()

    def curve(self, dim: str, what: str, name: str) -> MeasuredCurve | None:
        """what: "collectives", or the impl that changes a placement."""
        found = self.dims[dim]
        curves = found.collectives if what == COLLECTIVES else found.transitions.get(what, {})
        return curves.get(name)

    def predict_us(self, dim: str, what: str, name: str, size_bytes: int) -> dict[str, float]:
        """Model -> microseconds, of those models that say something about this call."""
        predicted = {}
        if what == COLLECTIVES and name in RING_COLLECTIVES:
            of = self.dims[dim]
            if dim in self._guessed:
                predicted["builtin"] = Ring(of.ranks, *self._guessed[dim]).collective_us(name, size_bytes)
            link = builtin_link(of.layout)
            if link is not None:
                predicted["builtin_layout"] = Ring(of.ranks, *link).collective_us(name, size_bytes)
                predicted["builtin_scaled"] = predicted["builtin_layout"] * self._scale
            if isinstance(of, Dim):
                predicted["ring"] = ring_us(name, size_bytes, of.ranks, of)
        curve = self.curve(dim, what, name)
        if curve is not None:
            if curve.alpha_us is not None and curve.beta_GiBps is not None:
                predicted["line"] = max(curve.alpha_us + size_bytes / GIB / curve.beta_GiBps * 1e6, 1e-9)
            predicted["table"] = price(curve, size_bytes).time_us
        return predicted

    def _fitted_scale(self) -> float:
        """The number that takes torch's constants nearest to the topology's own tables.

        The median of the logs, which makes the mean of |log| least, the metric that is reported.
        """
        logs = [
            np.log(row.measured_us / Ring(dim.ranks, *link).collective_us(name, row.size_bytes))
            for dim in self.dims.values()
            if (link := builtin_link(dim.layout)) is not None
            for name in RING_COLLECTIVES
            if name in dim.collectives
            for row in dim.collectives[name].table
        ]
        return float(np.exp(np.median(logs))) if logs else 1.0


def devices_per_host(header: Header, device_type: str) -> tuple[int | None, str]:
    """How many devices torch counts on a host of a run, and how that is known, in words."""
    if device_type == "cpu":
        return 1, "on CPU it counts 1 device per host, so that every dim of two ranks or more crosses hosts"
    gpus = len(header.machine.gpus)
    ranks = max((rank.local_rank or 0 for rank in header.ranks), default=-1) + 1
    if gpus == ranks == 0:
        return None, "left out, since the run does not say how many devices its hosts have"
    if gpus >= ranks:
        return gpus, f"it counts {gpus} GPUs per host, those of the first rank's host"
    return ranks, f"it counts {ranks} GPUs per host, by the ranks' local numbers"
