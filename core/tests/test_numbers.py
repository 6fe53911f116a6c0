"""Numbers and values as arguments: equal ones of other types differ, invalid ones are refused on every rank."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.local_world import ThreadWorlds
from dtbench_core import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    clear_caches,
    comm,
    count_collectives,
    distribute_tensor,
)
from dtbench_core.layout.mesh import mesh_info

S, P, R = Shard, Partial(), Replicate()
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
    """Returns the full result, or the class of the exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result: torch.Tensor = run(*args)
        except Exception as error:
            return type(error)
        return result.full_tensor() if isinstance(result, DTensor) else result


def test_equal_numbers_of_different_types_are_different(fake_world: Callable[[int], None]) -> None:
    """No number is mistaken for an equal one of an earlier call."""
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
# With three elements on four ranks, one rank has none. Each case has an accepted number and a refused one.
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
    """Like `_outcome`, but checks first that either all ranks raise or none."""
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
def test_invalid_numbers_are_refused_on_every_rank() -> None:
    """Earlier calls, accepted or refused, do not matter."""
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
    """Terms that overflow must be added in their own dtype."""
    mesh = mesh_of((4,))

    def put(full: torch.Tensor) -> DTensor:
        return distribute_tensor(full, mesh, [S(0)], src_data_rank=None)

    for name, pending in PENDING.items():
        for how, call in LEAVING.items():
            got, expected = call(pending(put)).full_tensor(), call(pending(lambda full: full))
            assert got.dtype == expected.dtype, f"{name} {how}: {got}, expected {expected}"
            assert_close(got, expected, msg=f"{name} {how}: {got}, expected {expected}")


# ---- values that one rank alone holds and plain tensors refuse ----


Place = Callable[..., Any]
FULL = torch.arange(1, 49).view(8, 6)
# The last rank of four that hold 8 rows has the value that is refused: a zero, or an index far beyond.
ZERO = FULL.clone()
ZERO[7, 2] = 0
ROWS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 77])
EACH = torch.zeros(8, 6, dtype=torch.int64)
EACH[7, 1] = 66
DOUBLES = FULL.double()
LOGITS = FULL.double() / 48


def _in_place(op: str) -> Callable[[Place], Any]:
    return lambda put: getattr(put(FULL.clone(), 0), op)(put(ZERO, 0))


# Programs on tensors that `put(full, dim)` shards, or replicates if dim is None.
REFUSED_VALUES: dict[str, Callable[[Place], Any]] = {
    "//": lambda put: put(FULL, 0) // put(ZERO, 0),
    "%": lambda put: put(FULL, 0) % put(ZERO, 0),
    "number %": lambda put: torch.remainder(5, put(ZERO, 0)),
    "fmod": lambda put: torch.fmod(put(FULL, 0), put(ZERO, 0)),
    "out=": lambda put: torch.fmod(put(FULL, 0), put(ZERO, 0), out=put(FULL.clone(), 0)),
    "remainder_": _in_place("remainder_"),
    "//=, of a broadcast row": lambda put: put(FULL, 1) // put(ZERO[7], 0),
    "index": lambda put: put(DOUBLES, None)[put(ROWS, 0)],
    "index_select": lambda put: put(DOUBLES, None).index_select(0, put(ROWS, 0)),
    "index_select of the sharded dim": lambda put: put(DOUBLES, 0).index_select(0, put(ROWS, 0)),
    "gather": lambda put: put(DOUBLES, 0).gather(1, put(EACH, 0)),
    "scatter": lambda put: put(DOUBLES, 0).scatter(1, put(EACH, 0), 1.0),
    "scatter_add": lambda put: put(DOUBLES, 0).scatter_add(1, put(EACH, 0), put(DOUBLES, 0)),
    "index_put": lambda put: put(DOUBLES, None).index_put((put(ROWS, 0),), put(DOUBLES, 0), accumulate=True),
    "index_add": lambda put: put(DOUBLES, None).index_add(0, put(ROWS, 0), put(DOUBLES, 0)),
    "embedding of sharded rows": lambda put: F.embedding(put(EACH, 0), put(DOUBLES, 0)),
    "cross_entropy": lambda put: F.cross_entropy(put(LOGITS, 0), put(ROWS % 50, 0), reduction="none"),
    "cross_entropy of sharded classes": lambda put: F.cross_entropy(put(LOGITS, 1), put(ROWS % 50, 0)),
    "binary_cross_entropy": lambda put: F.binary_cross_entropy(put(DOUBLES / 47, 0), put(LOGITS, 0)),
    "backward": lambda put: (
        (put(LOGITS.clone(), 0).requires_grad_().gather(1, put(EACH, 0))).sum().backward()
    ),
    # Replicated values, and ranks whose part of what they are applied to is empty.
    "index of what some ranks hold": lambda put: put(DOUBLES[:, :3], 1)[put(ROWS, None)],
    "index_put_ of what some ranks hold": lambda put: put(DOUBLES[:, :3].clone(), 1).index_put_(
        (put(ROWS, None),), put(DOUBLES[:, :3], 1)
    ),
    "index_add_ of what some ranks hold": lambda put: put(DOUBLES[:, :3].clone(), 1).index_add_(
        0, put(ROWS, None), put(DOUBLES[:, :3], 1)
    ),
    "// 0 of 3 columns": lambda put: put(FULL[:, :3], 1) // 0,
}


def _put(mesh: DeviceMesh, *more: Placement) -> Place:
    def put(full: torch.Tensor, dim: int | None) -> DTensor:
        return distribute_tensor(full, mesh, [*more, R if dim is None else S(dim)], src_data_rank=None)

    return put


def _refuses(name: str, mesh_shape: tuple[int, ...]) -> None:
    program, mesh = REFUSED_VALUES[name], mesh_of(mesh_shape)
    expected: Any = _outcome(program, lambda full, dim: full)
    for _ in range(2):  # the second from what the first has planned
        got: Any = _outcome(program, _put(mesh, *[R] * (len(mesh_shape) - 1)))
        assert issubclass(got, expected), (got, expected)
    # The ranks are still in step.
    assert distribute_tensor(DOUBLES, mesh, [S(0)] * len(mesh_shape)).sum().full_tensor() == DOUBLES.sum()


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_every_rank_raises_what_plain_tensors_raise(
    ranks: ThreadWorlds, name: str, mesh_shape: tuple[int, ...]
) -> None:
    ranks(_refuses, name, mesh_shape)


@on_ranks
def test_replicated_values_cost_no_collective() -> None:
    put = _put(mesh_of((4,)))
    x, rows, divisor = put(FULL, 0), put(ROWS % 6, None), put(FULL, None)
    with count_collectives() as seen:
        x.index_select(1, rows)
        x[:, rows]
        put(FULL, None) // divisor
    assert not seen.calls
