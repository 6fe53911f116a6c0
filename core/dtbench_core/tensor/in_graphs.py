"""What compilers ask of a DTensor: its parts, and a name for what a graph traced with it depends on."""

from __future__ import annotations

from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.redistribute.copied_view import is_copied
from dtbench_core.torch_compat import mesh_group_names, ranks_of_mesh, state_of_library


def flatten(tensor: Wrapper) -> tuple[list[str], tuple[DTensorSpec, bool, bool]]:
    """(names of its tensors, (spec, requires_grad, parted)).

    parted: a graph gives out a view of an input that it wrote to, or that was copied, as a tensor of its own, to which
    nothing may be written.
    """
    parted = tensor._parted
    if tensor._views_input and tensor._memory is not None:
        parted = is_copied(tensor) or tensor._memory[0].writes > 0
    return ["_local_tensor"], (tensor._spec, tensor.requires_grad, parted)


def stable_hash(tensor: Wrapper) -> str:
    """Names what a graph traced with this tensor depends on, its process groups and this library included."""
    spec, local = tensor._spec, tensor._local_tensor
    mesh = spec.info.mesh
    groups = mesh.device_type, mesh.mesh_dim_names, ranks_of_mesh(mesh), mesh_group_names(mesh)
    by = state_of_library()
    kept = tuple(local.shape), local.stride(), tensor.requires_grad
    return repr((by, groups, spec.placements, tuple(spec.shape), tuple(spec.stride), spec.dtype, kept))
