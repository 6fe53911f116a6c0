"""The topology file of `dtbench calibrate`: JSON with the structure of the structs below."""

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
# A table of 200,000 sizes has 80 MB; larger files are not topologies.
MAX_BYTES = 256 * 2**20

Ratio = Annotated[float, Meta(ge=1 - 1e-9, le=MAX_NUMBER)]
Sizes = tuple[Whole, Whole]  # smallest and largest
Interval = tuple[Amount, Amount]
PositiveInterval = tuple[Positive, Positive]

UNITS = "GiB = 1024^3 bytes; us = microseconds; sizes are the whole tensor as one group holds it"
FORMULA = (
    "time_us = base_latency_us + hops * latency_us_per_hop + size_GiB * hops / ranks / bandwidth_GiBps * 1e6;"
    " hops = ranks - 1, all_reduce 2 * (ranks - 1)"
)
FORMULA_OF_A_LINE = "time_us = alpha_us + size_GiB / beta_GiBps * 1e6"
INTERPOLATION_OF_A_TABLE = (
    "linear in size between rows; beyond them the slope of the last factor of 4 in size"
)


class BandwidthDrop(Struct, frozen=True):
    """A range of sizes with a lower bus bandwidth than smaller sizes have.

    Attributes:
        collective: name of the collective.
        mesh_dim: name of the mesh dim.
        setting: distinguishes the curve from others of the same collective and dim, else "".
        before_bytes: last size before the drop.
        before_Bps: its bus bandwidth, bytes per second.
        first_bytes: first size in the drop.
        first_Bps: its bus bandwidth, bytes per second.
        last_bytes: last size in the drop.
        recovered_bytes: first size behind the drop; None if the measured sizes end in the drop.
    """

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
        if self.recovered_bytes is not None:
            end = f"recovered at {format_size(self.recovered_bytes)}"
        else:
            stays = f"and stays low up to {format_size(self.last_bytes)}, "
            end = stays * (self.last_bytes > self.first_bytes) + "the largest size measured"
        setting = f" ({self.setting})" if self.setting else ""
        return (
            f"{self.collective} over {self.mesh_dim}{setting}: bus bandwidth drops "
            f"from {format_bandwidth(self.before_Bps)} at {format_size(self.before_bytes)} "
            f"to {format_bandwidth(self.first_Bps)} at {format_size(self.first_bytes)}, {end}"
        )


class TableRow(Struct, frozen=True, kw_only=True):
    """The time of one size of a curve.

    Attributes:
        size_bytes: the size.
        time_us: the estimated time, which does not fall with size.
        measured_us: the measured time.
        low_us: lower end of the time's interval; None if it was measured only once.
        high_us: upper end of the time's interval; None if it was measured only once.
        launch_us: estimate of each launch.
    """

    size_bytes: Whole
    time_us: Positive
    measured_us: Positive
    low_us: Positive | None = None
    high_us: Positive | None = None
    launch_us: tuple[Positive | None, ...] = ()


class MeasuredCurve(Struct, frozen=True, kw_only=True, dict=True):
    """Times of one call as a function of size, and the line through them if one fits.

    Attributes:
        alpha_us: latency of the line; None if no line fits.
        beta_GiBps: bandwidth of the line; None if no line fits.
        beta_is_lower_bound: whether the bandwidth may be higher than `beta_GiBps`.
        geometric_mean_ratio: geometric mean of the ratios between measured times and the line, each at least 1.
        worst_ratio: the largest of these ratios.
        end_GiBps: bandwidth of the largest sizes in the table.
        size_bytes: range of sizes of the line, which excludes sizes in a drop of bandwidth.
        points: number of sizes.
        launches: number of launches.
        table: a row per size. Cost estimates rely on ascending sizes, and on times that do not fall and lie within
            their intervals.
    """

    alpha_us: Amount | None = None
    beta_GiBps: Positive | None = None  # noqa: N815 - the file spells it so
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
        """Column of the table -> its curve over size. Missing bounds are replaced by the times."""
        sizes = tuple(row.size_bytes for row in self.table)
        return {
            name: Curve(sizes, tuple(getattr(row, name) or row.time_us for row in self.table))
            for name in ("time_us", "low_us", "high_us")
        }

    def __post_init__(self) -> None:
        if not self.table:
            raise ValueError("table is empty, expected a row per size")
        size_bytes, time_us = 0, 0.0
        for index, row in enumerate(self.table):
            if row.size_bytes <= size_bytes:
                raise ValueError(f"table[{index}].size_bytes is not above that of the preceding row")
            if row.time_us < time_us:
                raise ValueError(f"table[{index}].time_us is below that of the preceding row")
            if not (row.low_us or row.time_us) <= row.time_us <= (row.high_us or row.time_us):
                raise ValueError(f"table[{index}].time_us is not between low_us and high_us")
            size_bytes, time_us = row.size_bytes, row.time_us
        if (self.alpha_us is None) != (self.beta_GiBps is None):
            raise ValueError(
                "alpha_us: only one of alpha_us and beta_GiBps is given, expected both or neither"
            )


class Constants(Struct, frozen=True, kw_only=True):
    """The parameters of a mesh dim in torch's cost formula."""

    bandwidth_GiBps: Positive  # noqa: N815
    latency_us_per_hop: Amount


class BuiltIn(Constants, frozen=True, kw_only=True):
    """torch's own constants for the layout, compared with the measured times.

    Attributes:
        predicted_over_measured: typical ratio of torch's time to the measured time.
        geometric_mean_ratio: geometric mean of the deviations, each expressed as a ratio of at least 1.
    """

    layout: Literal["intra-host", "inter-host"]
    predicted_over_measured: Positive
    geometric_mean_ratio: Ratio


class HostLayout(Struct, frozen=True, kw_only=True):
    """The hosts of a dim's process groups (`dtbench.stats.layout.DimLayout`). A field is None if the runs lack it."""

    kind: Literal["intra-host", "inter-host", "mixed"] | None = None
    hosts_per_group: Sizes | None = None
    ranks_per_host: Sizes | None = None
    groups_per_host_pair: Count | None = None


class FittedOn(Struct, frozen=True, kw_only=True):
    """The measurements that the constants were fitted to."""

    collectives: tuple[str, ...]
    size_bytes: Sizes
    points: Whole
    launches: Whole
    sample: str = ""
    estimator: str = ""


class FittedPoint(Struct, frozen=True, kw_only=True):
    """A measured time and its fitted value."""

    collective: str
    size_bytes: Whole
    measured_s: Positive
    predicted_s: Positive


class Residuals(Struct, frozen=True, kw_only=True):
    """Deviations of the fit from its points."""

    geometric_mean_ratio: Ratio
    worst_ratio: Ratio
    points: tuple[FittedPoint, ...]


class Contention(Struct, frozen=True, kw_only=True):
    """Slowdown of a call of one size while the other groups of the dim also communicate."""

    together_over_alone: Positive
    size_bytes: Whole


class Dim(Struct, frozen=True, kw_only=True):
    """The calibration of a mesh dim, or of several dims together ("dp+tp").

    Attributes:
        groups: number of process groups of the dim.
        groups_sharing: whether the groups communicated at the same time ("together") or not ("alone").
        intervals: explains the intervals.
        builtin: torch's own constants.
        collectives: name -> curve. Sizes are those of nccl-tests: the gathered tensor, the tensor to be reduced or
            scattered, the buffer of one rank of an all-to-all.
        transitions: implementation -> change of placement -> curve. Sizes are those of the global tensor.
        contention: collective -> slowdown.
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
    """A run that a topology was fitted to.

    Attributes:
        hosts: number of hosts; 0 if the run does not record them.
        gpu: distinct names of the GPUs on the first host, joined by ", "; "" if the run does not record them.
        driver: version of the GPU driver; None if the run does not record it.
    """

    run_id: str
    path: str = ""
    versions: dict[str, str | None] = {}
    hosts: Count = 0
    gpu: str = ""
    driver: str | None = None


class LeftOut(Struct, frozen=True, kw_only=True):
    """A mesh dim that could not be fitted, with the reason."""

    name: str
    ranks: Whole
    reason: str


class CalibratedTopology(Struct, frozen=True, kw_only=True):
    """The contents of a topology file.

    Attributes:
        created: when it was calibrated, ISO 8601.
        runs: the runs that it was fitted to.
        base_latency_us: latency of a call without its hops, the same for all dims.
        dims: the calibrated mesh dims.
        left_out: mesh dims that could not be fitted.
    """

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
    price_of_a_table: str = INTERPOLATION_OF_A_TABLE
    interval_method: str = ""
    dims: tuple[Dim, ...]
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [dim.name for dim in self.dims]
        if len(set(names)) < len(names):
            raise ValueError(f"dims has {abbreviate(names)}, expected distinct names")

    def _repr_html_(self) -> str:
        """Returns the mesh dims as a table for notebooks."""
        import pandas as pd

        rows = [
            {
                name: value
                for name, value in structs.asdict(dim).items()
                if isinstance(value, str | int | float)
            }
            for dim in self.dims
        ]
        return str(pd.DataFrame(rows).to_html(index=False))

    def all_warnings(self) -> list[str]:
        """Returns the warnings of the file and of its dims; the latter begin with the dim's name."""
        return [*self.warnings, *(f"{dim.name}: {warning}" for dim in self.dims for warning in dim.warnings)]


def write_topology(topology: CalibratedTopology, path: str | Path) -> None:
    """Writes the file atomically.

    Raises:
        OutputError: the path cannot be written, or is a file that is not a topology.
    """
    write_atomically(
        Path(path),
        msgspec.json.format(msgspec.json.encode(topology), indent=1).decode() + "\n",
        _is_topology,
        "topology of dtbench",
    )


def read_topology(path: str | Path) -> CalibratedTopology:
    """Reads a topology.

    Raises:
        UnreadableRunError: the file is not a topology, is of a newer schema, or is damaged.
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


def _is_topology(head: str) -> bool:
    return head.lstrip().startswith("{") and '"kind": "topology"' in head.replace('":"', '": "')
