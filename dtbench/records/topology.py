"""The topology file that `calibrate` writes: JSON, checked against the structs below when read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, structs

from dtbench.errors import UnreadableRunError
from dtbench.fields import MAX_INT, MAX_NUMBER, Amount, Count, Positive, Whole
from dtbench.records.atomic import write_atomically
from dtbench.records.read import BadFieldError, abbreviate, convert, read_json
from dtbench.records.result import MeshShape
from dtbench.text.units import format_bandwidth, format_size
from dtbench_core.cost.curve import Curve

SCHEMA = 1
# 200,000 sizes make 80 MB; beyond this it is another file.
MAX_BYTES = 256 * 2**20

Ratio = Annotated[float, Meta(ge=1 - 1e-9, le=MAX_NUMBER)]
Sizes = tuple[Whole, Whole]  # least and most
Interval = tuple[Amount, Amount]
PositiveInterval = tuple[Positive, Positive]

UNITS = "GiB = 1024^3 bytes; us = microseconds; sizes are the whole tensor as one group holds it"
FORMULA = (
    "time_us = base_latency_us + hops * latency_us_per_hop + size_GiB * hops / ranks / bandwidth_GiBps * 1e6;"
    " hops = ranks - 1, all_reduce 2 * (ranks - 1)"
)
FORMULA_OF_A_LINE = "time_us = alpha_us + size_GiB / beta_GiBps * 1e6"
PRICE_OF_A_TABLE = "linear in size between rows; beyond them the slope of the last factor of 4 in size"


class BandwidthDrop(Struct, frozen=True):
    """Bus bandwidth in bytes per second at the size before the drop and at the first in it. setting: what tells the
    curve from others. recovered_bytes: the size after the last one in it; None where the sweep ends in it."""

    collective: str
    mesh_dim: str
    setting: str
    before_bytes: Whole
    before_Bps: Positive  # noqa: N815 - bytes per second
    first_bytes: Whole
    first_Bps: Positive  # noqa: N815
    last_bytes: Whole
    recovered_bytes: Whole | None

    def __str__(self) -> str:
        before, first = format_bandwidth(self.before_Bps), format_bandwidth(self.first_Bps)
        drop = f"{before} at {format_size(self.before_bytes)} to {first} at {format_size(self.first_bytes)}"
        end = f"recovered at {format_size(self.recovered_bytes)}"
        if self.recovered_bytes is None:
            stays = f"and stays low up to {format_size(self.last_bytes)}, "
            end = stays * (self.last_bytes > self.first_bytes) + "the largest size measured"
        of = f"{self.collective} over {self.mesh_dim}" + f" ({self.setting})" * bool(self.setting)
        return f"{of}: bus bandwidth drops from {drop}, {end}"


class TableRow(Struct, frozen=True, kw_only=True):
    """A size of a curve: the time with its interval (None where it was measured once), what was measured, and each
    launch's."""

    size_bytes: Whole
    time_us: Positive
    measured_us: Positive
    low_us: Positive | None = None
    high_us: Positive | None = None
    launch_us: tuple[Positive | None, ...] = ()


class MeasuredCurve(Struct, frozen=True, kw_only=True, dict=True):
    """Times of one call over size, and the line through them where one fits. Rows by size, times that do not
    fall, each within its interval: pricing relies on it. end_GiBps: the bandwidth that the table ends with. The line
    leaves out the sizes in a drop of bandwidth."""

    alpha_us: Amount | None = None
    beta_GiBps: Positive | None = None  # noqa: N815 - as the file spells it
    beta_is_lower_bound: bool = False
    alpha_interval: Interval | None = None
    beta_interval: PositiveInterval | None = None
    geometric_mean_ratio: Ratio | None = None
    worst_ratio: Ratio | None = None
    end_GiBps: Positive | None = None  # noqa: N815
    end_interval: PositiveInterval | None = None
    dtype: str = ""
    size_bytes: Sizes
    points: Whole
    launches: Whole
    table: tuple[TableRow, ...]

    @cached_property
    def columns(self) -> Mapping[str, Curve]:
        """Each column of the table over size; the times where it has no bounds."""
        sizes = tuple(row.size_bytes for row in self.table)
        return {
            name: Curve(sizes, tuple(getattr(row, name) or row.time_us for row in self.table))
            for name in ("time_us", "low_us", "high_us")
        }

    def __post_init__(self) -> None:
        if not self.table:
            raise ValueError("table is empty, expected a row for every size")
        size_bytes, time_us = 0, 0.0
        for index, row in enumerate(self.table):
            if row.size_bytes <= size_bytes:
                raise ValueError(f"table[{index}].size_bytes is not above that of the row before it")
            if row.time_us < time_us:
                raise ValueError(f"table[{index}].time_us is below that of the row before it")
            if not (row.low_us or row.time_us) <= row.time_us <= (row.high_us or row.time_us):
                raise ValueError(f"table[{index}].time_us is not between low_us and high_us")
            size_bytes, time_us = row.size_bytes, row.time_us
        if (self.alpha_us is None) != (self.beta_GiBps is None):
            raise ValueError(
                "alpha_us: only one of alpha_us and beta_GiBps is there, expected both or neither"
            )


class Constants(Struct, frozen=True, kw_only=True):
    """What torch's formula takes of a mesh dim."""

    bandwidth_GiBps: Positive  # noqa: N815
    latency_us_per_hop: Amount


class BuiltIn(Constants, frozen=True, kw_only=True):
    """torch's own constants for the layout, and how far they are from what was measured."""

    layout: Literal["intra-host", "inter-host"]
    predicted_over_measured: Positive
    geometric_mean_ratio: Ratio


class HostLayout(Struct, frozen=True, kw_only=True):
    """Where the groups of a dim lie (`dtbench.stats.layout.DimLayout`); None where the runs do not say."""

    kind: Literal["intra-host", "inter-host", "mixed"] | None = None
    hosts_per_group: Sizes | None = None
    ranks_per_host: Sizes | None = None
    groups_per_host_pair: Count | None = None


class FittedOn(Struct, frozen=True, kw_only=True):
    """What the constants were fitted to."""

    collectives: tuple[str, ...]
    size_bytes: Sizes
    points: Whole
    launches: Whole
    sample: str = ""
    estimator: str = ""


class FittedPoint(Struct, frozen=True, kw_only=True):
    """A measured time beside the fitted one."""

    collective: str
    size_bytes: Whole
    measured_s: Positive
    predicted_s: Positive


class Residuals(Struct, frozen=True, kw_only=True):
    """How far the fit is from its points."""

    geometric_mean_ratio: Ratio
    worst_ratio: Ratio
    points: tuple[FittedPoint, ...]


class Contention(Struct, frozen=True, kw_only=True):
    """How much longer a call takes with the sibling groups at work, at one size."""

    together_over_alone: Positive
    size_bytes: Whole


class Dim(Struct, frozen=True, kw_only=True):
    """One mesh dim, or several at once ("dp+tp").

    Attributes:
        collectives: curve by name. Its bytes are those that nccl-tests counts: the gathered tensor, the tensor to be
            reduced or scattered, the buffer of one rank of an all-to-all.
        transitions: impl -> change of placement -> its curve, over the bytes of the whole tensor.
    """

    name: str
    ranks: Annotated[int, Meta(ge=2, le=MAX_INT)]
    groups: Whole = 1
    layout: HostLayout
    groups_sharing: Literal["together", "alone"]
    bandwidth_GiBps: Positive  # noqa: N815
    latency_us_per_hop: Amount
    bandwidth_is_lower_bound: bool = False
    bandwidth_interval: PositiveInterval | None
    latency_interval: Interval | None
    intervals: str = ""
    builtin: BuiltIn | None
    fitted_on: FittedOn
    residuals: Residuals
    collectives: dict[str, MeasuredCurve]
    transitions: dict[str, dict[str, MeasuredCurve]]
    contention: dict[str, Contention]
    drops: tuple[BandwidthDrop, ...] = ()
    warnings: tuple[str, ...] = ()


class FromRun(Struct, frozen=True, kw_only=True):
    """A run that it was fitted to. hosts: how many; 0 where the run does not say."""

    run_id: str
    path: str = ""
    versions: dict[str, str | None] = {}
    hosts: Count = 0


class LeftOut(Struct, frozen=True, kw_only=True):
    """A mesh dim that could not be fitted, and why."""

    name: str
    ranks: Whole
    reason: str


class CalibratedTopology(Struct, frozen=True, kw_only=True):
    """The whole file."""

    kind: Literal["topology"] = "topology"
    schema: Whole
    created: str = ""
    runs: tuple[FromRun, ...]
    device_type: str
    backend: str
    mesh: MeshShape
    base_latency_us: Amount
    units: str = UNITS
    formula: str = FORMULA
    formula_of_a_line: str = FORMULA_OF_A_LINE
    price_of_a_table: str = PRICE_OF_A_TABLE
    interval_method: str = ""
    dims: tuple[Dim, ...]
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [dim.name for dim in self.dims]
        if len(set(names)) < len(names):
            raise ValueError(f"dims has {abbreviate(names)}, expected each name once")

    def _repr_html_(self) -> str:
        """The mesh dims as a table, in a notebook."""
        import pandas as pd

        plain = (str, int, float)
        rows = [{k: v for k, v in structs.asdict(dim).items() if isinstance(v, plain)} for dim in self.dims]
        return str(pd.DataFrame(rows).to_html(index=False))

    def all_warnings(self) -> list[str]:
        """Those of the whole file and, after their name, those of its dims."""
        return [*self.warnings, *(f"{dim.name}: {warning}" for dim in self.dims for warning in dim.warnings)]


def write_topology(topology: CalibratedTopology, path: str | Path) -> None:
    """Writes the file whole or not at all.

    Raises:
        OutputError: the place cannot be written, or holds a file that is no topology.
    """
    text = msgspec.json.format(msgspec.json.encode(topology), indent=1).decode() + "\n"
    write_atomically(Path(path), text, _looks_like_one, "topology of dtbench")


def read_topology(path: str | Path) -> CalibratedTopology:
    """The topology in a file.

    Raises:
        UnreadableRunError: not a topology, of another schema, or damaged; the message names the field.
    """
    path = Path(path)
    content = read_json(path, "a topology of `dtbench calibrate`", MAX_BYTES)
    if content.get("kind") != "topology":
        raise UnreadableRunError(
            f"{path} is not a topology: kind is {abbreviate(content.get('kind'))}, "
            'expected "topology"; make one with `dtbench calibrate`'
        )
    schema = content.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise UnreadableRunError(
            f"{path} was written by a newer dtbench (schema {schema}, this one reads {SCHEMA}): "
            "upgrade dtbench to read it"
        )
    try:
        return convert(content, CalibratedTopology)
    except BadFieldError as error:
        raise UnreadableRunError(
            f"{path} is damaged: {error}; make it again with `dtbench calibrate`"
        ) from error


def _looks_like_one(head: str) -> bool:
    return head.lstrip().startswith("{") and '"kind": "topology"' in head.replace('":"', '": "')
