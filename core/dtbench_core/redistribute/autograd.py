"""Redistribution of DTensors, with and without autograd."""

from __future__ import annotations

import torch

from dtbench_core.layout.placement import Placements
from dtbench_core.layout.spec import DTensorSpec, preserved_stride
from dtbench_core.layout.wrapper import Wrapper, wrap
from dtbench_core.op_types import Ctx
from dtbench_core.redistribute.routes import Route, cheapest_route, run_route
from dtbench_core.torch_compat import AutogradFunction, any_requires_grad, version_of


def redistributed_local(tensor: Wrapper, dst: Placements, route: Route) -> torch.Tensor:
    """Returns the local part of `tensor` redistributed to `dst`, for an op that only reads it.

    A pending sum of a tensor that requires grad is reduced once, and the result is stored with the tensor until the
    tensor is written to. Two collectives may add the same terms in different orders and round differently. A gradient
    formula that searches the tensor for its maximum would then not find it, and would divide by a count of zero.
    """
    if (
        not _has_rounding_partial(tensor._spec.placements)
        or _has_rounding_partial(dst)
        or not any_requires_grad(tensor)
    ):
        return run_route(tensor._local_tensor, route)
    version = version_of(tensor)
    cached = tensor.__dict__.get("_materialised")
    if cached is None or cached[0] != version:
        spec = tensor._spec.with_placements(dst)
        cached = tensor.__dict__["_materialised"] = (version, spec, run_route(tensor._local_tensor, route))
    _, spec, local = cached
    return local if spec.placements == dst else run_route(local, cheapest_route(spec, dst))


def _has_rounding_partial(placements: Placements) -> bool:
    return any(p.is_partial() and not (p.is_partial("max") or p.is_partial("min")) for p in placements)


def redistribute_tensor(tensor: Wrapper, dst: Placements) -> Wrapper:
    """Redistributes `tensor` to `dst` outside autograd. Without a change the result shares the local tensor."""
    return redistribute_along(tensor, cheapest_route(tensor._spec, dst))


def redistribute_along(tensor: Wrapper, route: Route) -> Wrapper:
    """Returns `tensor` after the route, outside autograd."""
    return wrap(tensor.viewed, run_route(tensor._local_tensor, route), route.result)


class Redistribute(AutogradFunction):
    """Redistribution under autograd.

    It does not change the values of the global tensor, so the gradient is only redistributed to the input's placements.
    """

    @staticmethod
    def forward(
        ctx: Ctx,
        tensor: Wrapper,
        route: Route,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> Wrapper:
        ctx.route, ctx.forward_dtype, ctx.backward_dtype = route, forward_dtype, backward_dtype
        if forward_dtype is not None and forward_dtype != route.source.dtype:
            tensor = cast_dtype(tensor, forward_dtype)
            route = cheapest_route(tensor._spec, route.result.placements)
        return redistribute_along(tensor, route)

    @staticmethod
    def backward(ctx: Ctx, grad: Wrapper) -> tuple[Wrapper, None, None, None]:
        route: Route = ctx.route
        if ctx.backward_dtype is not None and grad._spec.dtype != ctx.backward_dtype:
            grad = cast_dtype(grad, ctx.backward_dtype)
        back = cheapest_route(grad._spec, route.gradient)
        if torch.is_grad_enabled():  # a double backward: this backward needs a graph of its own
            moved: Wrapper = Redistribute.apply(grad, back, None, None)
        else:
            moved = redistribute_along(grad, back)
        if moved._spec.dtype != route.source.dtype:
            moved = cast_dtype(moved, route.source.dtype)
        return moved, None, None, None

    @staticmethod
    def jvp(ctx: Ctx, tangent: Wrapper, *_: object) -> Wrapper:
        if ctx.forward_dtype is not None and ctx.forward_dtype != tangent._spec.dtype:
            tangent = cast_dtype(tangent, ctx.forward_dtype)
        return redistribute_tensor(tangent, ctx.route.result.placements)


def cast_dtype(tensor: Wrapper, dtype: torch.dtype) -> Wrapper:
    """Casts the shards of `tensor` to another dtype, outside autograd."""
    spec = tensor._spec
    stride = preserved_stride(tuple(spec.shape), spec.stride)
    return wrap(
        tensor.viewed,
        tensor._local_tensor.to(dtype),
        DTensorSpec.of(spec.info, spec.placements, spec.shape, stride, dtype, spec.order),
    )
