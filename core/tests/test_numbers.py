"""Numbers in calls that are planned already: equal ones of other types, and those that plain tensors refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

from core.tests.gloo_world import mesh_of, on_ranks
from dtbench_core import DTensor, Partial, Replicate, Shard, clear_caches, comm, distribute_tensor
from dtbench_core.layout.mesh import mesh_info

S, P = Shard, Partial()
# Each is equal to another of another type, or to itself with another sign.
NUMBERS = (
    *(True, 1, 1.0, 1 + 0j, np.bool_(True), np.int32(1), np.int64(1), np.float32(1), np.float64(1)),
    *(False, 0, 0.0, -0.0, 0j, np.bool_(False), np.int64(0), np.float64(0.0), np.float64(-0.0)),
    np.complex128(1),
)
TAKING: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "+": lambda x, n: x + n,
    "*": lambda x, n: x * n,
    "/": lambda x, n: (x + 2) / n,
    "==": lambda x, n: x == n,
    "where": lambda x, n: torch.where(x > 0, x, n),
    "full_like": lambda x, n: torch.full_like(x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "add_": lambda x, n: x.clone().add_(n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "foreach": lambda x, n: torch._foreach_add([x], n)[0],
    "foreach of a list": lambda x, n: torch._foreach_add([x, x], [n, n])[0],
    "through another op": lambda x, n: torch.heaviside(x, x * n),
}


def _outcome(run: Callable[..., Any], *args: Any) -> torch.Tensor | type[Exception]:
    """What it gives, whole, or the class of what it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result: torch.Tensor = run(*args)
        except Exception as error:
            return type(error)
        return result.full_tensor() if isinstance(result, DTensor) else result


def test_equal_numbers_of_different_types_are_different(fake_world: Callable[[int], None]) -> None:
    """No number may be taken for another that was met before it."""
    fake_world(4)
    mesh = DeviceMesh("cpu", range(4))
    for full in (torch.tensor([3.0, -2, 0, 1]), torch.tensor([3, -2, 0, 1]), torch.tensor([True, False])):
        x = distribute_tensor(full, mesh, [Replicate()], src_data_rank=None)
        for name, call in TAKING.items():
            outcomes = [_outcome(call, full, n) for n in NUMBERS]
            for first in NUMBERS:
                clear_caches()
                for _ in range(2):  # planned, and fast
                    _outcome(call, x, first)
                for number, expected in zip(NUMBERS, outcomes, strict=True):
                    if number != first:
                        continue
                    got = _outcome(call, x, number)
                    where = f"{name} {full.dtype} {first!r} {number!r}: {got}, expected {expected}"
                    if isinstance(expected, torch.Tensor):
                        assert isinstance(got, torch.Tensor) and got.dtype == expected.dtype, where
                        assert_close(got, expected, equal_nan=True, msg=where)
                        assert torch.equal(torch.signbit(got.real), torch.signbit(expected.real)), where
                    else:
                        assert got is expected, where


INTS, FLOATS, HALVES = torch.tensor([3, 2, 1]), torch.tensor([3.0, 2, 1]), torch.tensor([3.0, 2, 1]).half()
BYTES = INTS.to(torch.int8)
MATRICES = torch.eye(2).repeat(3, 1, 1)
SECOND = MATRICES * torch.tensor([0, 1, 0])[:, None, None]
# Of four ranks that cut three elements one holds none. An accepted number, and one that is refused.
REFUSING: dict[str, tuple[torch.Tensor, Callable[[Any, Any], Any], Any, Any]] = {
    "pow": (INTS, lambda x, n: x**n, 2, -1),
    "foreach_pow": (INTS, lambda x, n: torch._foreach_pow([x, x], n)[1], 2, -1),
    "foreach_clamp_min": (BYTES, lambda x, n: torch._foreach_clamp_min([x, x], n)[1], 2, 1000),
    "clamp": (HALVES, lambda x, n: x.clamp(n), 1.0, 1e9),
    "threshold": (BYTES, lambda x, n: F.threshold(x, n, 1), 1, 1000),
    "masked_fill": (HALVES, lambda x, n: x.masked_fill(x > 2, n), 1.0, 1e9),
    "masked_fill_": (HALVES, lambda x, n: x.clone().masked_fill_(x > 2, n), 1.0, 1e9),
    "fill_": (HALVES, lambda x, n: x.clone().fill_(n), 1.0, 1e9),
    "full_like": (HALVES, lambda x, n: torch.full_like(x, n), 1.0, 1e9),
    "new_full": (HALVES, lambda x, n: x.new_full((3,), n), 1.0, 1e9),
    "index_put": (HALVES, lambda x, n: _written(x, n), 1.0, 1e9),
    "celu": (FLOATS, lambda x, n: F.celu(x, n), 1.0, 0.0),
    "lerp": (FLOATS, lambda x, n: torch.lerp(x, x, n), 0.5, 1e300),
    "alpha": (HALVES, lambda x, n: torch.add(x, x, alpha=n), 1.0, 1e9),
    "polygamma": (FLOATS, lambda x, n: torch.polygamma(n, x), 2, -1),
    "floor_divide": (INTS, lambda x, n: x // n, 1, 0),
    "smooth_l1_loss": (FLOATS, lambda x, n: F.smooth_l1_loss(x, x, beta=n), 0.5, -1.0),
    "one_hot": (INTS, lambda x, n: F.one_hot(x * n, 4), 1, 2),
    "cholesky_inverse of one": (MATRICES, lambda x, n: torch.cholesky_inverse(x - n), 0, SECOND),
}  # fmt: skip


def _written(x: torch.Tensor, number: float) -> torch.Tensor:
    x = x.clone()
    x[0:3] = number
    return x


def _agreed(mesh: DeviceMesh, run: Callable[..., Any], *args: Any) -> Any:
    """As `_outcome`, where all ranks must come to the same kind of outcome before any may gather it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result, error = None, None
        try:
            result = run(*args)
        except Exception as raised:
            error = raised
    seen = comm.all_gather_objects(error is None, mesh_info(mesh).groups[0])
    assert len(set(seen)) == 1, f"ranks that did not raise: {seen}, here {error!r}"
    return error if result is None else result.full_tensor()


@on_ranks
def test_numbers_that_are_refused() -> None:
    """By all ranks alike, whatever was accepted before, and never because of what was refused before."""
    mesh = mesh_of((4,))

    def put(full: Any) -> Any:
        cut = isinstance(full, torch.Tensor)
        return distribute_tensor(full, mesh, [S(0)], src_data_rank=None) if cut else full

    for name, (full, call, good, bad) in REFUSING.items():
        x = put(full)
        for order in ((good, good, bad, good), (bad, good), (bad, bad)):
            clear_caches()
            for number in order:
                expected = _outcome(call, full, number)
                got = _agreed(mesh, call, x, put(number))
                where = f"{name} {number}: {got!r}, expected {expected}"
                if isinstance(expected, torch.Tensor):
                    assert isinstance(got, torch.Tensor), where
                    assert_close(got, expected, msg=where)
                else:
                    assert isinstance(got, (expected, RuntimeError)) and isinstance(got, Exception), where


PENDING: dict[str, Callable[[Any], torch.Tensor]] = {
    "int8": lambda put: put(torch.full((8,), 100, dtype=torch.int8)).sum(dtype=torch.int8),
    "int64": lambda put: put(torch.full((8,), 2**62 + 5)).sum(),
    "product": lambda put: put(torch.full((8,), 7, dtype=torch.int8)).prod(dtype=torch.int8),
    "matmul": lambda put: put(BYTES[:, None].repeat(30, 2)).t() @ put(BYTES[:, None].repeat(30, 2) * 40),
}
LEAVING: dict[str, Callable[[Any], Any]] = {
    "/": lambda x: x / 2,
    "* a complex": lambda x: x * 1j,
    "* itself": lambda x: x * x,
    "-": lambda x: x - x * 2,
    "float": lambda x: x.double() / 3,
    "to float": lambda x: torch.zeros_like(x, dtype=torch.float64).add_(x),
    "cumsum": lambda x: x.reshape(-1).cumsum(0),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x, dtype=torch.int64)),
    "foreach": lambda x: torch._foreach_mul([x], 0.5)[0],
    "cat": lambda x: torch.cat([x.reshape(-1), torch.ones_like(x, dtype=torch.int64).reshape(-1)]),
}


@on_ranks
def test_pending_sums_of_integers_that_wrap_around() -> None:
    """Terms that wrap around add up in their own dtype alone."""
    mesh = mesh_of((4,))

    def put(full: torch.Tensor) -> DTensor:
        return distribute_tensor(full, mesh, [S(0)], src_data_rank=None)

    for name, pending in PENDING.items():
        for how, call in LEAVING.items():
            got, expected = call(pending(put)).full_tensor(), call(pending(lambda full: full))
            assert got.dtype == expected.dtype, f"{name} {how}: {got}, expected {expected}"
            assert_close(got, expected, msg=f"{name} {how}: {got}, expected {expected}")
