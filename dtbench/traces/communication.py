"""Normalizes the names that traces give collectives, dtypes and process groups.

Collectives get nccl-tests' names, dtypes torch's, and process groups those of the program's mesh dims.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dtbench.traces.kineto import Args, printable
from dtbench_core.cost.ring import busbw_factor

UNKNOWN, UNKNOWN_GROUP = "unknown", "unknown group"
MESH_DIMS = "dtbench_mesh_dims"  # key in traces that dtbench recorded: group name -> mesh dim
# Descriptions of groups that do not name a mesh dim.
_NAMELESS = ("default_pg", "undefined", "mesh_default")
_MAX_TENSOR_DIMS = 64  # torch's limit
# Calls of c10d that do not communicate: they wait, open or close a batch, or set up.
NO_COLLECTIVE = re.compile(
    r"(?i)^_?(?:wait|start|end|init|new_group|wrap|monitored|work_)|wait_tensor|_autograd$"
)
# nccl-tests' names. Names in traces ("_allgather_base_", "AllGather_RING_LL") contain one of these, apart from case and
# underscores. The first match counts, so longer names come first.
_NAMES = "barrier reduce_scatter all_reduce all_gather all_to_all send_recv broadcast scatter gather reduce send recv"
_NAME_BY_LETTERS = {name.replace("_", ""): name for name in (*_NAMES.split(), "coalesced")}
# No rank leaves these before all ranks have arrived. A broadcast's root, or a sender, may leave long before.
SYNCHRONIZING = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))
# Bytes per element -> torch's dtypes.
_DTYPES = {
    1: "int8 uint8 bool float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
    2: "float16 bfloat16 int16 uint16",
    4: "float32 int32 uint32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
_SIZES = {name: size for size, names in _DTYPES.items() for name in names.split()}
# Names of c10::ScalarType and of C++, in lower case and without "c10::".
_ALIASES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
    "short": "int16",
    "char": "int8",
    "signed char": "int8",
    "byte": "uint8",
    "unsigned char": "uint8",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
    "complex<float>": "complex64",
    "complex<double>": "complex128",
}


class ProcessGroup(NamedTuple):
    """A process group as seen in a trace.

    Attributes:
        key: identifies the group within one rank's trace; "" if the group is unknown.
        mesh_dim: name of its mesh dim.
        size: number of ranks.
        ranks: its global ranks.
    """

    key: str
    mesh_dim: str = UNKNOWN_GROUP
    size: int | None = None
    ranks: tuple[int, ...] | None = None


class Call(NamedTuple):
    """A collective or point-to-point call of one rank. Times are microseconds.

    Attributes:
        arrival: when the rank was ready for it: the start of the kernel, on gloo the start of the call.
        start, end: when the kernel or gloo's transport ran, including the time waiting for other ranks.
        collective: nccl-tests' name.
        group: its process group.
        dtype: torch's name.
        bytes: the larger of input and output.
        sequence: number of the call within its process group, if recorded.
        caller: the op that issued it.
        issued: when the host issued it, if recorded, else `start`.
        phase: the phase of the step in which the host issued it, as in `phases.PHASES`.
    """

    arrival: float
    start: float
    end: float
    collective: str
    group: ProcessGroup
    dtype: str | None = None
    bytes: int | None = None
    sequence: int | None = None
    caller: str = ""
    issued: float = 0.0
    phase: str = "?"


def parse_collective(name: str) -> str:
    """Returns e.g. `all_gather` for `c10d::_allgather_base_` and `ncclDevKernel_AllGather_RING_LL`."""
    letters = re.sub(r"[^a-z]", "", re.sub(r"^\w+::?", "", name[:300].partition("(")[0]).lower())
    return next((collective for part, collective in _NAME_BY_LETTERS.items() if part in letters), UNKNOWN)


def parse_dtype(text: object) -> tuple[str | None, int | None]:
    """Returns torch's name of a dtype and its bytes per element; None for both if it is unknown."""
    name = str(text or "")[:40].removeprefix("c10::").lower()
    name = _ALIASES.get(name, name)
    return (name, _SIZES[name]) if name in _SIZES else (None, None)


def to_count(value: object, maximum: int = 2**60) -> int | None:
    """Converts a number or text to an integer from 0 to `maximum`; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    return value if type(value) is int and 0 <= value <= maximum else None


def payload_from_counts(args: Args) -> tuple[str | None, int | None]:
    """Returns dtype and bytes of a call whose arguments contain its numbers of elements."""
    dtype, itemsize = parse_dtype(args.dtype)
    elements = [n for n in map(to_count, (args.elements_in, args.elements_out)) if n is not None]
    return dtype, to_count(max(elements) * itemsize) if elements and itemsize else None


def payload_from_shapes(
    op: str, args: Args, group_size: int | None, default_dtype: str | None = None
) -> tuple[str | None, int | None]:
    """Returns dtype and bytes of a call whose input shapes were recorded.

    A list of outputs has no recorded shape; it has the size of `group_size` inputs.

    Args:
        default_dtype: for a list of inputs, whose dtype is not recorded.
    """
    shapes, types = args.shapes, args.types
    # The tensor of a barrier carries no data.
    if "barrier" in op or not isinstance(shapes, list) or not isinstance(types, list):
        return None, None
    dtype, itemsize = next((pair for pair in map(parse_dtype, types) if pair[0]), parse_dtype(default_dtype))
    elements = [n for n in map(_count_elements, shapes, types) if n is not None]
    if not elements or itemsize is None:
        return dtype, None
    if len(elements) == 1 and op.endswith(("gather_", "scatter_")) and "base" not in op:
        itemsize *= group_size if group_size and op.endswith("gather_") else 0
    return dtype, to_count(max(elements) * itemsize) if itemsize else None


def _count_elements(shape: object, type_name: object) -> int | None:
    """Returns the elements of a tensor, or of all tensors in a list; None for other arguments."""
    if not isinstance(shape, list):
        return None
    if shape and all(isinstance(nested, list) for nested in shape):
        return sum(_product(nested) or 0 for nested in shape)
    return _product(shape) if shape or parse_dtype(type_name)[0] is not None else None


def _product(sizes: list[Any]) -> int | None:
    is_valid = len(sizes) <= _MAX_TENSOR_DIMS and all(to_count(n) is not None for n in sizes)
    return math.prod(map(int, sizes)) if is_valid else None


def read_groups(info: Mapping[str, Any], dims: Mapping[str, Any]) -> dict[str, ProcessGroup]:
    """Returns the process groups that a trace lists, by name, with their mesh dims.

    A mesh dim over all ranks uses torch's default group, whose description does not name the dim
    (torch/distributed/device_mesh.py). Its name is known only if `dtbench profile -- COMMAND` recorded the trace.

    Args:
        info: "distributedInfo" of the trace.
        dims: `MESH_DIMS` of the trace.
    """
    groups = {}
    for entry in _list_groups(info):
        if name := printable(entry.get("pg_name", "")):
            ranks = entry.get("ranks")
            is_valid = isinstance(ranks, list) and all(type(rank) is int and rank >= 0 for rank in ranks)
            members = tuple(ranks or ()) if is_valid else None
            size = len(members) if members else to_count(entry.get("pg_size"))
            dim = printable(dims.get(name, "")) or name_mesh_dim(str(entry.get("pg_desc", "")), members, size)
            groups[name] = ProcessGroup(name, dim, size, members)
    return groups


def _list_groups(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the entries of the process groups in a trace, the default group first."""
    entries = info.get("pg_config")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def find_backend(info: Mapping[str, Any], on_gpu: bool) -> str:
    """Returns the backend of the default group.

    torch writes "undefined" if the group has a backend per device type. The result is then the accelerator's backend
    with `on_gpu`, else the CPU's.
    """
    backend = printable(info.get("backend", ""))
    config = [str(entry.get("backend_config")) for entry in _list_groups(info)[:1] if backend == "undefined"]
    by_device = re.findall(r"(\w+):(\w+)", "".join(config)[:200])
    return next((name for device, name in by_device if (device != "cpu") == on_gpu), backend)


def find_group(args: Args, groups: Mapping[str, ProcessGroup]) -> ProcessGroup:
    """Returns the process group that the arguments of a call name or describe."""
    name = printable(args.group) if args.group is not None else ""
    if name in groups:
        return groups[name]
    text, size = str(args.group_ranks or ""), to_count(args.group_size)
    ranks = None
    if re.fullmatch(r"\[\d{1,9}(,\s*\d{1,9})*\]", text):  # torch ends long lists with "..."
        ranks = tuple(map(int, text[1:-1].split(",")))
        size = size or len(ranks)
    if not name and size is None:
        return ProcessGroup("")
    return ProcessGroup(name or text, name_mesh_dim(str(args.description or ""), ranks, size), size, ranks)


def name_mesh_dim(description: str, ranks: Sequence[int] | None, size: int | None) -> str:
    """Returns the program's name of a mesh dim, else a name from the group's size and the stride of its ranks."""
    if description and description not in _NAMELESS:
        return printable(description.removeprefix("mesh_") or description)
    if size is None:
        return UNKNOWN_GROUP
    strides = {b - a for a, b in itertools.pairwise(ranks)} if ranks else set()
    return f"group of {size}" + (f", stride {strides.pop()}" if len(strides) == 1 and strides != {1} else "")


def bus_bandwidth(collective: str, size: int | None, bytes_: int | None, seconds: float) -> float | None:
    """Returns bytes/s as defined by nccl-tests; None for calls without such a definition."""
    if not bytes_ or seconds < 1e-12 or collective in (UNKNOWN, "coalesced", "barrier", "send_recv"):
        return None
    if collective in ("send", "recv"):
        return bytes_ / seconds
    return bytes_ / seconds * busbw_factor(collective, size) if size and size > 1 else None
