"""Shards of any length (RaggedShard), strided shards, and the shards of views."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.op_cases import OPS
from core.tests.placing import S0, S1, P, R, assert_like_plain, place
from dtbench_core import (
    DTensor,
    LayoutError,
    Partial,
    Placement,
    PlacementError,
    RaggedShard,
    Shard,
    StridedShard,
    count_collectives,
    distribute_tensor,
    zeros,
)
from dtbench_core.layout.placement import Placements
from dtbench_core.rules.view import _factor_groups, regrouped_placements

pytestmark = pytest.mark.filterwarnings("ignore::dtbench_core.dispatch.fallback.FallbackWarning")

ROWS = RaggedShard(0, (1, 3, 1, 3))
A = torch.arange(32.0).reshape(8, 4)
B = torch.linspace(-2, 2, 32).reshape(8, 4)


def _cut(full: Tensor, placement: Placement | list[Placement], mesh: tuple[int, ...] = (4,)) -> DTensor:
    return place(full, *(placement if isinstance(placement, list) else [placement]), mesh=mesh)


# ---- local shards of any length ----


@on_ranks
def test_ranks_agree_on_lengths() -> None:
    """Tests from_local with shards like those of torch.chunk, with empty ones, and on two mesh dims."""
    rank = dist.get_rank()
    for counts in ((2, 2, 2, 2), (3, 3, 2, 0), (0, 8, 0, 0)):
        part = torch.full((counts[rank], 4), float(rank))
        dtensor = DTensor.from_local(part, mesh_of((4,)), [S0], shape=(8, 4), stride=(4, 1))
        assert dtensor.placements == ((S0,) if counts[3] else (RaggedShard(0, counts),))
    row, column = divmod(rank, 2)
    part = A[[0, 5][row] : [5, 8][row], [0, 1][column] : [1, 4][column]]
    dtensor = DTensor.from_local(part, mesh_of((2, 2)), [S0, S1], shape=(8, 4), stride=(4, 1))
    assert dtensor.placements == (RaggedShard(0, (5, 3)), RaggedShard(1, (1, 3)))
    assert torch.equal(dtensor.full_tensor(), A)


# ---- moving ----

PLACEMENTS: list[Placement] = [
    *(R, S0, S1, ROWS),
    *(RaggedShard(0, (0, 0, 8, 0)), RaggedShard(1, (2, 0, 1, 1)), RaggedShard(-1, (1, 1, 2, 0))),
    *(StridedShard(0, 2), StridedShard(0, 4), StridedShard(1, 2)),
]
PLACEMENTS_2D: list[list[Placement]] = [
    [R, RaggedShard(0, (5, 3))],
    [RaggedShard(0, (1, 7)), S1],
    [S0, RaggedShard(0, (3, 1))],
    [S0, StridedShard(0, 2)],
    [StridedShard(0, 4), S0],
    [RaggedShard(0, (6, 2)), StridedShard(0, 2)],
    [RaggedShard(1, (3, 1)), RaggedShard(0, (2, 6))],
    [S0, S0],
]


@pytest.mark.parametrize(
    ("mesh", "options"), [((4,), [[p] for p in PLACEMENTS]), ((2, 2), PLACEMENTS_2D)], ids=["1d", "2d"]
)
@on_ranks
def test_moving(mesh: tuple[int, ...], options: list[list[Placement]]) -> None:
    """Redistributes between every two placements and compares values and gradients."""
    for src, dst in itertools.product(options, options):
        tensor = _cut(A, src, mesh).requires_grad_()
        own_part = _part(A, tensor.placements, mesh, mesh_of(mesh).get_coordinate())
        assert torch.equal(tensor.to_local(), own_part), src
        moved = tensor.redistribute(placements=dst)
        want = _cut(A, dst, mesh)
        moved.backward(_cut(B, dst, mesh))
        assert (moved.placements, tensor.grad.placements) == (want.placements, tensor.placements), (src, dst)
        torch.testing.assert_close(
            [moved.to_local(), moved.full_tensor(), tensor.grad.full_tensor()],
            [want.to_local(), A, B],
            rtol=0,
            atol=0,
            msg=lambda text, where=(src, dst): f"{where}: {text}",
        )


@pytest.mark.parametrize("placement", (ROWS, StridedShard(0, 2), RaggedShard(1, (0, 4, 0, 0))))
@on_ranks
def test_reductions_scatters_and_factories_make_any_shards(placement: Any) -> None:
    """Reduces Partials, scatters from another rank, and calls factories."""
    terms = DTensor.from_local(A * (dist.get_rank() + 1), mesh_of((4,)), [P])
    assert torch.equal(terms.redistribute(placements=[placement]).full_tensor(), A * 10)
    largest = DTensor.from_local(A * (dist.get_rank() + 1), mesh_of((4,)), [Partial("max")])
    assert torch.equal(largest.redistribute(placements=[placement]).full_tensor(), A * 4)
    sent = distribute_tensor(A + dist.get_rank(), mesh_of((4,)), [placement], src_data_rank=2)
    assert torch.equal(sent.full_tensor(), A + 2)
    dtensor = zeros(8, 4, device_mesh=mesh_of((4,)), placements=[placement])
    assert dtensor.to_local().shape == sent.to_local().shape and dtensor._spec.placements == sent.placements


# ---- ops ----

# These send nothing on shards of any length.
FREE = ("add", "mul_number", "where", "unsqueeze", "gelu", "in place", "new")
OF_THE_TABLES = (
    *(
        "softmax",
        "layer_norm_plain",
        "sum_dim",
        "mean",
        "amax",
        "norm",
        "cumsum",
        "slice_other",
        "cat",
        "stack",
    ),
    *("view_join", "view_split", "split", "tril", "flip", "roll", "index_select_sharded", "cross_entropy"),
    *("mse_loss_mean", "gather_parts"),
)
PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {
    "transposed": (lambda x, y: x.t() + y.t(), 2),
    "inner": (lambda x, y: x.t() @ y, 2),
    "outer": (lambda x, y: F.gelu(F.linear(x, y)), 2),
    "in place": (lambda x, y: x.clone().mul_(y), 2),
    "new": (lambda x: x + x.new_ones(8, 4) + torch.zeros_like(x), 1),
    **{name: (OPS[name].fn, len(OPS[name].shapes)) for name in FREE[:5] + OF_THE_TABLES},
}


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks
def test_ops(name: str) -> None:
    fn, count = PROGRAMS[name]
    inputs = [full.double().requires_grad_() for full in (A, B)[:count]]
    for mesh, layout in (
        *(((4,), [p]) for p in (ROWS, RaggedShard(0, (0, 8, 0, 0)), RaggedShard(1, (1, 0, 2, 1)))),
        ((4,), [StridedShard(0, 2)]),
        ((2, 2), [RaggedShard(0, (5, 3)), S1]),
        ((2, 2), [S0, StridedShard(0, 2)]),
    ):
        placed = [_cut(full.detach(), layout, mesh).requires_grad_() for full in inputs]
        assert_like_plain(fn, inputs, placed, layout)
        with count_collectives() as counted, torch.no_grad():
            fn(*placed)
        assert not (name in FREE and counted.calls), (layout, counted)


@on_ranks
def test_ops_of_different_shards() -> None:
    """Combines a ragged tensor with tensors of other placements."""
    x = _cut(A, ROWS)
    for other in (R, S0, S1, RaggedShard(0, (2, 2, 2, 2)), RaggedShard(0, (4, 0, 4, 0)), StridedShard(0, 2)):
        assert torch.equal((x + _cut(B, other)).full_tensor(), A + B), other
        assert torch.allclose((_cut(B, other) @ x.t()).full_tensor(), B @ A.t()), other
    assert (x * _cut(torch.arange(4.0), R)).placements == (x + 1).placements == (ROWS,)


@on_ranks
def test_embedding_of_ragged_rows() -> None:
    """The lookup in a table with ragged rows needs no communication."""
    indices = torch.tensor([[0, 7], [4, 4], [1, 3]])
    plain, table = A.clone().requires_grad_(), _cut(A, ROWS).requires_grad_()
    placed = _cut(indices, R)
    with count_collectives() as count:
        rows = F.embedding(placed, table)
    assert not count.calls
    full, want = rows.full_tensor(), F.embedding(indices, plain)
    full.sum().backward()
    want.sum().backward()
    assert torch.equal(full, want)
    assert plain.grad is not None and torch.equal(table.grad.full_tensor(), plain.grad)


# ---- copies, checkpoints, local_map ----


@on_ranks
def test_saving_and_loading(tmp_path: Path) -> None:
    for number, saved in enumerate(PLACEMENTS):
        tensor = _cut(A, saved)
        torch.save(tensor, f"{tmp_path}/{dist.get_rank()}.pt")
        loaded = torch.load(f"{tmp_path}/{dist.get_rank()}.pt")
        assert loaded._spec is tensor._spec and torch.equal(loaded.full_tensor(), A)
        dcp.save({"x": tensor}, checkpoint_id=f"{tmp_path}/{number}")
        for placement in PLACEMENTS:
            target = _cut(torch.zeros(8, 4), placement)
            dcp.load({"x": target}, checkpoint_id=f"{tmp_path}/{number}")
            assert torch.equal(target.full_tensor(), A), (saved, placement)


# ---- mistakes ----

MISTAKES: dict[str, tuple[Callable[[Any], Any], type, str]] = {
    "too few counts": (
        lambda m: distribute_tensor(A, m, [RaggedShard(0, (4, 4))]),
        PlacementError,
        "expected one count per rank",
    ),
    "counts of another length": (
        lambda m: _cut(A, S0).redistribute(placements=[RaggedShard(0, (1, 1, 1, 1))]),
        PlacementError,
        r"for tensor dim 0 of \[8\] elements",
    ),
    "negative": (
        lambda m: RaggedShard(0, (-1, 9)),
        ValueError,
        r"got the counts \(-1, 9\), expected ints >= 0",
    ),
    "one rank is wrong": (
        lambda m: DTensor.from_local(A[: 2 + (dist.get_rank() == 3)], m, [S0], shape=(8, 4), stride=(4, 1)),
        LayoutError,
        r"\[3, 4\] at \(3,\)",
    ),
    "ranks disagree": (
        lambda m: DTensor.from_local(A[:2], m, [S0], shape=(8 + dist.get_rank(), 4), stride=(4, 1)),
        LayoutError,
        "got different arguments on the ranks",
    ),
    "lengths differ across": (
        lambda m: DTensor.from_local(
            A[: [5, 3, 3, 5][dist.get_rank()], :2], mesh_of((2, 2)), [S1, S0], shape=(8, 4), stride=(4, 1)
        ),
        LayoutError,
        "expected shards that add up to it",
    ),
    "counts contradict": (
        lambda m: DTensor.from_local(A[:2], m, [ROWS]),
        LayoutError,
        r"placed as S\(0:1\+3\+1\+3\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
@on_ranks
def test_mistakes(name: str) -> None:
    call, kind, message = MISTAKES[name]
    mesh_of((2, 2))
    with pytest.raises(kind, match=message) as caught:
        call(mesh_of((4,)))
    assert type(caught.value) is kind and "\n" not in str(caught.value)


# ---- placements of views ----


def _part(whole: torch.Tensor, placements: Placements, sizes: tuple[int, ...], at: tuple[int, ...]) -> Any:
    for placement, parts, index in zip(placements, sizes, at, strict=True):
        if isinstance(placement, Shard):
            whole = placement.part(whole, parts, index)
    return whole


@st.composite
def _views(draw: Any) -> Any:
    """Draws two shapes with equal numbers of elements, a mesh, and placements of the first shape."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))
    shapes = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=3)) | {len(factors)})
        shapes.append(tuple(math.prod(factors[a:b]) for a, b in itertools.pairwise([0, *cuts])))
    mesh = tuple(draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3)))
    left = [{n} for n in shapes[0]]
    placements: list[Placement] = []
    for parts in mesh:
        dim = draw(st.integers(0, len(shapes[0]) - 1))
        kinds: list[Placement] = [R, Shard(dim)]
        if len(left[dim]) == 1:
            (n,) = left[dim]
            at = sorted(draw(st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1)))
            kinds.append(RaggedShard(dim, tuple(b - a for a, b in itertools.pairwise([0, *at, n]))))
            kinds += [StridedShard(dim, f) for f in (2, 3, 4) if n % f == 0]
        placement = draw(st.sampled_from(kinds))
        placements.append(placement)
        if isinstance(placement, Shard):
            left[dim] = {k for n in left[dim] for k in placement.lengths(n, parts)}
    return shapes[0], shapes[1], mesh, tuple(placements)


@settings(max_examples=300, deadline=None)
@given(_views())
def test_shard_of_a_view_is_the_view_of_the_shard(case: Any) -> None:
    before, after, mesh, placements = case
    view_placements = regrouped_placements(placements, mesh, before, after, _factor_groups(before, after))
    if view_placements is None:
        return
    whole = torch.arange(math.prod(before))
    for at in itertools.product(*map(range, mesh)):
        part = _part(whole.view(before), placements, mesh, at)
        mine = _part(whole.view(after), view_placements, mesh, at)
        assert torch.equal(part.reshape(-1), mine.reshape(-1)), (view_placements, at)


@pytest.mark.parametrize(
    ("mesh", "placements", "shape"),
    [
        ((4,), [S1], (2, 8, 4)),
        ((4,), [S0], (5, 3, 4)),
        ((2, 2), [S0, S1], (4, 6, 4)),
        ((2, 2), [S1, S0], (4, 6, 4)),
        ((4,), [RaggedShard(0, (1, 0, 2, 1))], (4, 3, 4)),
    ],
)
@on_ranks
def test_products_over_joined_dims_stay_local(
    mesh: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]
) -> None:
    """A linear layer flattens batch dims by a view; forward and backward need no communication."""
    full = (torch.arange(float(math.prod(shape))).reshape(shape) / 10).requires_grad_()
    weight = (torch.arange(12.0).reshape(3, 4) / 10).requires_grad_()
    x = place(full.detach(), *placements, mesh=mesh).requires_grad_()
    w = place(weight.detach(), mesh=mesh).requires_grad_()
    out = F.gelu((full.view(-1, shape[-1]) @ weight.t()).view(*shape[:-1], 3))
    with count_collectives() as count:
        got = F.gelu((x.view(-1, shape[-1]) @ w.t()).view(*shape[:-1], 3))
    assert not count.calls, "nothing moves on the way"
    whole = got.full_tensor()
    for result in (out, whole):
        result.pow(2).sum().backward()
    assert got.placements == x.grad.placements == tuple(placements)
    torch.testing.assert_close(
        [whole, x.grad.full_tensor(), w.grad.full_tensor()], [out, full.grad, weight.grad]
    )
