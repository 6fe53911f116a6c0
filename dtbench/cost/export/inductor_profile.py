"""`dtbench export --to inductor-profile`: a trace for the profile-guided estimates of torch.compile.

The option `aten_distributed_optimizations.profile_guided_estimations_profile_path` of torch._inductor.config names a
Chrome trace of collectives. torch looks a collective up by the ranks of its process group and by its dtype. Between two
sizes it interpolates in log-log space (torch/_inductor/fx_passes/profile_guided_estimation.py, torch 2.13 and 2.14).

The trace has every process group of the mesh, since torch would use a group for others of the same stride and size
only if there is a single one. The events were not recorded: each has the time of the calibrated curve.
"""

import itertools
import json
import math
from collections.abc import Iterator

from dtbench.cost.export.module import INDUCTOR_COLLECTIVES, describe_source
from dtbench.cost.export.targets import Export, ExportRequest
from dtbench.errors import UsageError
from dtbench.records.topology import Dim
from dtbench.suite.mesh import Groups, format_mesh, groups_by_dim
from dtbench_core.cost.curve import Curve

# dtype -> its name in traces, which is that of torch.Tensor.type(), and its bytes.
DTYPES = {
    "float32": ("Float", 4),
    "float64": ("Double", 8),
    "float16": ("Half", 2),
    "bfloat16": ("BFloat16", 2),
}
# Largest error of torch's interpolation halfway between two sizes.
MAX_ERROR = 0.01
# The sizes extend to 1 TiB, more than any tensor. Beyond twice the largest size, torch 2.13 uses one bandwidth for all
# collectives of a group, although a reduce-scatter has the smallest output and an all-gather the largest.
LARGEST_BYTES = 2**40
# An event has about 300 bytes; torch loads a million in some seconds.
MAX_EVENTS = 1_000_000


def render(request: ExportRequest) -> Export:
    """Returns the trace.

    Raises:
        UsageError: the topology lacks a dim of the given mesh, no dim has two ranks, or the trace would be too large.
    """
    dims, notes = _measured_dims(request)
    calls = {dim.name: [*_calls(dim, request.dtypes)] for dim, _ in dims}
    groups = [(dim, ranks) for dim, dim_groups in dims for ranks in dim_groups]
    if (count := sum(len(calls[dim.name]) for dim, _ in groups)) > MAX_EVENTS:
        raise UsageError(
            f"the profile of {len(groups)} process groups would have {count} events, expected at most {MAX_EVENTS}: "
            "give fewer dtypes, or the mesh of a part of the job"
        )
    # DeviceMesh describes the groups of a dim by its name, by which newer torch than 2.14 finds them.
    configs = [
        {
            "pg_name": str(index),
            "pg_desc": f"mesh_{dim.name.replace('+', '_')}",
            "pg_size": dim.ranks,
            "ranks": ranks,
        }
        for index, (dim, ranks) in enumerate(groups)
    ]
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": f"{call['Collective name']} over {dim.name}",
            "pid": 0,
            "tid": index,
            "ts": start_us,
            "dur": duration_us,
            "args": {
                **call,
                "Process Group Name": configs[index]["pg_name"],
                "Process Group Description": configs[index]["pg_desc"],
                "Process Group Ranks": str(ranks),
                "Group size": dim.ranks,
            },
        }
        for index, (dim, ranks) in enumerate(groups)
        for call, start_us, duration_us in calls[dim.name]
    ]
    trace = {
        "dtbench_export": "written by `dtbench export --to inductor-profile`; not recorded",
        "source": describe_source(request.topology),
        "distributedInfo": {"backend": request.topology.backend, "rank": 0, "pg_config": configs},
        "traceEvents": events,
    }
    return Export(json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n", notes)


def _measured_dims(request: ExportRequest) -> tuple[list[tuple[Dim, Groups]], tuple[str, ...]]:
    """Returns the calibrated dims of the mesh with their process groups, and notes about what is missing."""
    topology = request.topology
    mesh = request.mesh or tuple(zip(topology.mesh.dim_names, topology.mesh.shape, strict=True))
    calibrated = {(dim.name, dim.ranks): dim for dim in topology.dims}
    missing = [dim for dim in mesh if dim[1] > 1 and dim not in calibrated]
    if request.mesh and missing:
        raise UsageError(
            f"--mesh has {format_mesh(missing)}, but the topology was calibrated on {format_mesh(calibrated)}: "
            "give a mesh of these dims, or calibrate a run on that mesh"
        )
    groups = groups_by_dim(*zip(*mesh, strict=True)) if mesh else {}
    dims = [
        (dim, groups[dim.name])
        for dim in topology.dims
        if dim.name in groups and len(groups[dim.name][0]) == dim.ranks
    ]
    if not dims:
        raise UsageError(
            f"got the mesh {format_mesh(mesh) or 'without dims'}, expected one with {format_mesh(calibrated)}, "
            "the dims that were calibrated"
        )
    exported = {dim.name for dim, _ in dims}
    return dims, (
        *(f"not exported, since it was not calibrated: {format_mesh([dim])}" for dim in missing),
        *(
            f"not exported, since the mesh lacks it: {format_mesh([dim])}"
            for dim in calibrated
            if dim[0] not in exported
        ),
        *(
            f"not exported, since it was not measured over {dim.name}: {collective}"
            for dim, _ in dims
            for collective in INDUCTOR_COLLECTIVES
            if collective not in dim.collectives
        ),
    )


def _calls(dim: Dim, dtypes: tuple[str, ...]) -> Iterator[tuple[dict[str, object], float, float]]:
    """Yields the arguments of events, without those of the process group, and their start and duration in us."""
    start_us = 0.0
    measured = [collective for collective in INDUCTOR_COLLECTIVES if collective in dim.collectives]
    for collective, dtype in itertools.product(measured, dtypes):
        name, itemsize = DTYPES[dtype]
        curve = dim.collectives[collective].columns["time_us"]
        # The curve counts the scattered tensor, torch the part that a rank receives.
        element_bytes = itemsize * (dim.ranks if collective == "reduce_scatter" else 1)
        for elements in sample_sizes(curve, element_bytes):
            inputs = {"all_gather": elements // dim.ranks, "reduce_scatter": elements * dim.ranks}
            call: dict[str, object] = {
                "Collective name": collective,
                "In msg nelems": inputs.get(collective, elements),
                "Out msg nelems": elements,
                "dtype": name,
            }
            duration_us = curve.us(elements * element_bytes)
            yield call, start_us, duration_us
            start_us += duration_us


def sample_sizes(curve: Curve, element_bytes: int) -> Iterator[int]:
    """Yields ascending numbers of elements between which log-log interpolation follows the curve."""
    # The curve bends at its sizes: the numbers of elements on either side of each.
    bends = (size // element_bytes + step for size in curve.sizes for step in (0, size % element_bytes > 0))
    limits = sorted({1, *bends, LARGEST_BYTES // element_bytes} - {0})
    for low, high in itertools.pairwise(limits):
        yield from _sizes_between(curve, element_bytes, low, high)
    yield limits[-1]


def _sizes_between(curve: Curve, element_bytes: int, low: int, high: int) -> Iterator[int]:
    """Yields `low` and the numbers of elements to insert before `high`."""
    middle = math.isqrt(low * high)
    low_us, middle_us, high_us = (curve.us(elements * element_bytes) for elements in (low, middle, high))
    share = math.log(middle / low) / math.log(high / low)
    if middle > low and abs(low_us ** (1 - share) * high_us**share / middle_us - 1) > MAX_ERROR:
        yield from _sizes_between(curve, element_bytes, low, middle)
        yield from _sizes_between(curve, element_bytes, middle, high)
    else:
        yield low
