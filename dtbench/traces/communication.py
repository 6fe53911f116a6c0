"""What traces call a collective, its dtype and its group, in one vocabulary: that of nccl-tests, torch and the mesh."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dtbench.traces.kineto import Args, told
from dtbench_core.cost.ring import busbw_factor

UNKNOWN, UNKNOWN_GROUP = "unknown", "unknown group"
MESH_DIMS = "dtbench_mesh_dims"  # in a trace that dtbench recorded: a group's name -> its mesh dim's
# Descriptions of groups that no mesh dim has to itself.
_NAMELESS = ("default_pg", "undefined", "mesh_default")
_MOST_DIMS = 64  # of a tensor: torch's limit
# Calls of c10d that are none: they wait, open or close a batch, or set up.
NO_COLLECTIVE = re.compile(
    r"(?i)^_?(?:wait|start|end|init|new_group|wrap|monitored|work_)|wait_tensor|_autograd$"
)
# nccl-tests' names. Whatever traces have more ("_allgather_base_", "AllGather_RING_LL") holds one of these, less case
# and underscores; the first counts.
_NAMES = "barrier reduce_scatter all_reduce all_gather all_to_all send_recv broadcast scatter gather reduce send recv"
_NAMES_OF = {name.replace("_", ""): name for name in (*_NAMES.split(), "coalesced")}
# torch's dtypes by bytes per element, and ScalarType's names for them, without "c10::", in lower case.
_DTYPES = {
    1: "int8 uint8 bool float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
    2: "float16 bfloat16 int16 uint16",
    4: "float32 int32 uint32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
_SIZES = {name: size for size, names in _DTYPES.items() for name in names.split()}
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
    """A process group. key: by which all calls of one rank over it are alike. ranks: in a world's numbers."""

    key: str
    mesh_dim: str = UNKNOWN_GROUP
    size: int | None = None
    ranks: tuple[int, ...] | None = None


class Call(NamedTuple):
    """A collective of one rank, us. arrival: when the rank was ready for it: the kernel's start, of gloo the call.
    start, end: of the transport's work, waiting included. bytes: the larger of what goes in and comes out. issued: when
    the host called for it, where the trace says, else the start."""

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


def collective_of(name: str) -> str:
    """`c10d::_allgather_base_`, `nccl:_all_gather_base`, `ncclDevKernel_AllGather_RING_LL`: `all_gather`."""
    words = re.sub(r"[^a-z]", "", re.sub(r"^\w+::?", "", name[:300].partition("(")[0]).lower())
    return next((known for part, known in _NAMES_OF.items() if part in words), UNKNOWN)


def dtype_of(text: object) -> tuple[str | None, int | None]:
    """torch's name, and bytes per element."""
    name = str(text or "")[:40].removeprefix("c10::").lower()
    name = _ALIASES.get(name, name)
    return (name, _SIZES[name]) if name in _SIZES else (None, None)


def whole(value: object, most: int = 2**60) -> int | None:
    """A count that a trace has as a number or a text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    return value if type(value) is int and 0 <= value <= most else None


def payload(args: Args) -> tuple[str | None, int | None]:
    """dtype and bytes of a call that says how many elements it has."""
    dtype, itemsize = dtype_of(args.dtype)
    elements = [n for n in map(whole, (args.elements_in, args.elements_out)) if n is not None]
    return dtype, whole(max(elements) * itemsize) if elements and itemsize else None


def payload_of_shapes(
    op: str, args: Args, group_size: int | None, carried: str | None = None
) -> tuple[str | None, int | None]:
    """The same of a call whose inputs' shapes were recorded. A list of outputs has none: it is as many inputs; a list
    of inputs has no dtype: it is that which is carried."""
    shapes, types = args.shapes, args.types
    # A barrier's tensor is a pretext.
    if "barrier" in op or not isinstance(shapes, list) or not isinstance(types, list):
        return None, None
    dtype, itemsize = next((found for kind in types if (found := dtype_of(kind))[0]), dtype_of(carried))
    elements = [n for n in map(_elements, shapes, types) if n is not None]
    if not elements or itemsize is None:
        return dtype, None
    if len(elements) == 1 and op.endswith(("gather_", "scatter_")) and "base" not in op:
        itemsize *= group_size if group_size and op.endswith("gather_") else 0
    return dtype, whole(max(elements) * itemsize) if itemsize else None


def _elements(shape: object, kind: object) -> int | None:
    """Of a tensor's shape, or of a list of shapes all together; None of what is no tensor."""
    if not isinstance(shape, list):
        return None
    if shape and all(isinstance(of, list) for of in shape):
        return sum(_product(of) or 0 for of in shape)
    return _product(shape) if shape or dtype_of(kind)[0] is not None else None


def _product(sizes: list[Any]) -> int | None:
    if len(sizes) > _MOST_DIMS or not all(whole(n) is not None for n in sizes):
        return None
    return math.prod(map(int, sizes))


def groups_of(info: Mapping[str, Any], dims: Mapping[str, Any]) -> dict[str, ProcessGroup]:
    """By process group's name: those that the trace lists, with the mesh dims that a DeviceMesh names them by.

    A mesh dim over all ranks has torch's default group, which carries no dim's name (torch/distributed/device_mesh.py):
    its name is known where `dtbench profile -- COMMAND` recorded the trace.

    Args:
        info: the trace's "distributedInfo".
        dims: its `MESH_DIMS`.
    """
    groups = {}
    for one in _listed(info):
        if name := told(one.get("pg_name", "")):
            ranks = one.get("ranks")
            sound = isinstance(ranks, list) and all(type(of) is int and of >= 0 for of in ranks)
            known = tuple(ranks or ()) if sound else None
            size = len(known) if known else whole(one.get("pg_size"))
            dim = told(dims.get(name, "")) or dim_of(str(one.get("pg_desc", "")), known, size)
            groups[name] = ProcessGroup(name, dim, size, known)
    return groups


def _listed(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The process groups that a trace lists, the default group first."""
    listed = info.get("pg_config")
    return [group for group in listed if isinstance(group, dict)] if isinstance(listed, list) else []


def backend_of(info: Mapping[str, Any], on_gpu: bool) -> str:
    """Returns the default group's backend; torch calls it `undefined` where it chose one per device."""
    backend = told(info.get("backend", ""))
    default = [str(group.get("backend_config")) for group in _listed(info)[:1] if backend == "undefined"]
    by_device = re.findall(r"(\w+):(\w+)", "".join(default)[:200])
    return next((name for device, name in by_device if (device != "cpu") == on_gpu), backend)


def group_of(args: Args, groups: Mapping[str, ProcessGroup]) -> ProcessGroup:
    """Of a call's own words."""
    name = told(args.group) if args.group is not None else ""
    if name in groups:
        return groups[name]
    text, size = str(args.group_ranks or ""), whole(args.group_size)
    ranks = None
    if re.fullmatch(r"\[\d{1,9}(,\s*\d{1,9})*\]", text):  # long lists end in "..."
        ranks = tuple(map(int, text[1:-1].split(",")))
        size = size or len(ranks)
    if not name and size is None:
        return ProcessGroup("")
    return ProcessGroup(name or text, dim_of(str(args.description or ""), ranks, size), size, ranks)


def dim_of(description: str, ranks: Sequence[int] | None, size: int | None) -> str:
    """A mesh dim's name as the program has it, else what tells groups of one kind from others."""
    if description and description not in _NAMELESS:
        return told(description.removeprefix("mesh_") or description)
    if size is None:
        return UNKNOWN_GROUP
    strides = {b - a for a, b in itertools.pairwise(ranks)} if ranks else set()
    return f"group of {size}" + (f", stride {strides.pop()}" if len(strides) == 1 and strides != {1} else "")


def busbw_of(collective: str, size: int | None, bytes_: int | None, seconds: float) -> float | None:
    """bytes/s as nccl-tests has it; None where there is none."""
    if not bytes_ or seconds < 1e-12 or collective in (UNKNOWN, "coalesced", "barrier", "send_recv"):
        return None
    if collective in ("send", "recv"):
        return bytes_ / seconds
    return bytes_ / seconds * busbw_factor(collective, size) if size and size > 1 else None
