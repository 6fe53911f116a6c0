"""Embedding tables whose local shards a LocalShardsWrapper holds: creation, redistribution, copies, checkpoints."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from core.tests.gloo_world import mesh_of, on_ranks, on_worlds
from core.tests.local_world import AnyWorlds
from dtbench_core import (
    DTensor,
    LayoutError,
    LocalShardsWrapper,
    NoRuleError,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    sharding_text,
)
from dtbench_core.simulate import rank_map

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ROWS, WIDTH = 8, 16


def _table() -> torch.Tensor:
    return torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)


Boxes = list[tuple[int, int, int, int]]  # first row, rows, first column, columns
# By layout: how it is placed, and what rank r holds.
LAYOUTS: dict[str, tuple[Placement, Callable[[int], Boxes]]] = {
    "row-wise even": (S0, lambda r: [(2 * r, 2, 0, WIDTH)]),
    "row-wise uneven": (S0, lambda r: [((0, 1, 4, 5)[r], (1, 3, 1, 3)[r], 0, WIDTH)]),
    "rows on two ranks": (S0, lambda r: [((0, 5, 8, 8)[r], (5, 3, 0, 0)[r], 0, WIDTH)]),
    "column-wise": (S1, lambda r: [(0, ROWS, 4 * r, 4)]),
    # Ranks 0 and 1 have two and three column shards, rank 2 one, rank 3 none.
    "column shards": (
        S1,
        lambda r: [
            (0, ROWS, c, n) for c, n in [[(0, 2), (2, 4)], [(6, 1), (7, 4), (11, 1)], [(12, 4)], [(16, 0)]][r]
        ],
    ),
}


def _wrapper(boxes: Boxes) -> LocalShardsWrapper:
    whole = _table()
    parts = [
        whole[row : row + rows, column : column + columns].clone() for row, rows, column, columns in boxes
    ]
    return LocalShardsWrapper(parts, [(row, column) for row, _, column, _ in boxes])


def _tensor(layout: str) -> DTensor:
    placement, boxes = LAYOUTS[layout]
    # Each simulated rank makes its own object.
    held: Any = rank_map(lambda rank: _wrapper(boxes(rank)))
    return DTensor.from_local(
        held, mesh_of((4,)), [placement], run_check=False, shape=(ROWS, WIDTH), stride=(WIDTH, 1)
    )


# ---- the wrapper alone ----


def test_wrapper_describes_its_shards() -> None:
    one = _wrapper([(2, 3, 0, 16)])
    assert one.shards[0].shape == one.shape == (3, 16) and one.joined() is one.shards[0]
    two = _wrapper([(0, 8, 4, 2), (0, 8, 6, 3)])
    sizes = [torch.Size((8, 2)), torch.Size((8, 3))]
    offsets = [torch.Size((0, 4)), torch.Size((0, 6))]
    assert (two.shape, two.dtype, two.shard_sizes, two.shard_offsets) == (
        (8, 5),
        torch.float32,
        sizes,
        offsets,
    )
    assert torch.equal(two.joined(), _table()[:, 4:9])
    meta = two.storage_meta
    assert (meta.size, meta.properties.dtype) == ((8, 5), torch.float32)
    assert two.__create_chunk_list__() == meta.chunks == list(map(ChunkStorageMetadata, offsets, sizes))
    assert two.__get_tensor_shard__(MetadataIndex("t", (0, 6))) is two.shards[1]
    with pytest.raises(LayoutError, match=r"expected one of \[\(0, 4\), \(0, 6\)\]"):
        two.__get_tensor_shard__(MetadataIndex("t", (0, 5)))


@pytest.mark.parametrize(
    ("shapes", "offsets", "expected"),
    [
        ([], [], "expected at least one"),
        ([(2, 4)], [(0, 0), (0, 4)], "expected one .row, column. offset for each shard"),
        ([(4,)], [(0,)], "expected matrices"),
        ([(2, 4)], [(0, -1)], ">= 0"),
        ([(2, 4), (2, 4)], [(0, 0), (2, 0)], "column shards of the same rows"),
        ([(2, 4), (2, 4)], [(0, 4), (0, 1)], "do not overlap"),
    ],
)
def test_shards_that_are_not_adjacent_are_refused(shapes: Any, offsets: Any, expected: str) -> None:
    with pytest.raises(LayoutError, match=expected):
        LocalShardsWrapper([torch.zeros(shape) for shape in shapes], offsets)


def test_ops_of_a_state_dict() -> None:
    held = _wrapper([(2, 3, 4, 2), (2, 3, 6, 3)])
    results = {
        "clone": held.clone(),
        "to": held.to(torch.float64),
        "deepcopy": copy.deepcopy(held),
        "pickle": pickle.loads(pickle.dumps(held)),
        "empty_like": torch.empty_like(held),
        "view": held.view(3, -1),
        "detach": held.detach(),
    }
    for name, result in results.items():
        assert isinstance(result, LocalShardsWrapper), name
        assert result.shard_offsets == held.shard_offsets and result.shard_sizes == held.shard_sizes
        for shard, original in zip(result.shards, held.shards, strict=True):
            assert (shard.data_ptr() == original.data_ptr()) == (name in ("view", "detach")), name
            if name != "empty_like":
                assert torch.equal(shard, original.to(result.dtype))
    assert results["to"].dtype == torch.float64
    assert torch.equal(held, results["clone"])
    target = results["empty_like"]
    assert target.copy_(held) is target and torch.equal(target, held)
    saved = io.BytesIO()
    torch.save(held, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=True), held)
    assert type(held.new_empty(held.shape)) is LocalShardsWrapper  # which asynchronous checkpoints ask for


def test_copies_and_equality_of_differently_cut_wrappers() -> None:
    one, other = _wrapper([(0, 8, 0, 5), (0, 8, 5, 3)]), _wrapper([(0, 8, 0, 2), (0, 8, 2, 6)])
    plain = one.joined()
    assert torch.equal(one, other) and torch.equal(one, plain) and torch.equal(plain, other)
    elsewhere = LocalShardsWrapper(one.shards, [(0, 8), (0, 13)])
    assert not torch.equal(one, elsewhere), "the same numbers, but of other columns"
    other.shards[1][7, 5] = -1
    assert not torch.equal(one, other) and not torch.equal(plain, other) and not torch.equal(one, plain[:4])
    one.copy_(other)
    assert torch.equal(one, other)
    plain.zero_().copy_(other)
    assert torch.equal(plain, other.joined())
    one.copy_(torch.ones(8, 8))
    assert all(bool((shard == 1).all()) for shard in one.shards)
    with pytest.raises(LayoutError, match="expected the same shape"):
        one.copy_(torch.ones(8, 1))


def test_other_ops_are_refused() -> None:
    held = _wrapper([(0, 8, 0, 16)])
    for op in (
        lambda: held + 1,
        lambda: held.zero_(),
        lambda: torch.cat([held, held]),
        lambda: held.view(16, 8),
    ):
        with pytest.raises(NoRuleError, match="is not supported for LocalShardsWrapper!"):
            op()


# ---- in a DTensor ----


@pytest.mark.parametrize("layout", LAYOUTS)
@on_worlds
def test_dtensor_of_shards(layout: str) -> None:
    tensor, whole = _tensor(layout), _table()
    held = tensor.to_local()
    doubled = tensor.to(torch.float64)
    target = torch.empty_like(tensor)
    target.copy_(tensor)
    parameter = nn.Parameter(tensor)
    (parameter.full_tensor() * whole).sum().backward()
    moved = tensor.detach().requires_grad_()
    (moved.redistribute(placements=[R]) * 3).sum().backward()
    plain = distribute_tensor(whole, mesh_of((4,)), tensor.placements)
    assert _parts(tensor.to_local()) == _parts(held), "handed back"
    assert (tuple(tensor.shape), tensor.stride()) == ((ROWS, WIDTH), (WIDTH, 1))
    rows, columns = (tensor.redistribute(placements=[p]) for p in (S0, S1))
    results = tensor, rows, columns, doubled, parameter.grad, moved.grad
    expected = [whole, whole, whole, whole.double(), whole, torch.full_like(whole, 3.0)]
    torch.testing.assert_close([t.full_tensor() for t in results], expected, rtol=0, atol=0)
    assert all(
        torch.equal(t, tensor) for t in (tensor.clone(), tensor.detach(), target, copy.deepcopy(tensor))
    )
    assert all(_kinds(t) == {LocalShardsWrapper} for t in (doubled, target, tensor.clone(), parameter))
    assert parameter.grad.placements == tensor.placements
    assert torch.equal(tensor, plain) and torch.equal(plain, tensor) and not torch.equal(tensor, plain + 1)


def _all_equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got == want).all())


def _parts(local: torch.Tensor) -> list[int]:
    """Returns the addresses of the shards of every simulated rank."""
    held: Any = getattr(local, "_local_tensors", {0: local}).values()
    return [shard.data_ptr() for part in held for shard in part.shards]


def _kinds(tensor: DTensor) -> set[type]:
    local = tensor.to_local()
    return {type(part) for part in getattr(local, "_local_tensors", {0: local}).values()}


def _drawn(layout: str) -> str:
    return sharding_text(_tensor(layout))


def test_sharding_text_shows_the_shards(worlds: AnyWorlds) -> None:
    def cells(layout: str) -> list[list[str]]:
        return [
            line.split() for line in worlds(_drawn, layout)[0].splitlines() if "rank" in line and "|" in line
        ]

    rows = [("0:1", "0"), ("1:4", "1"), ("4:5", "2"), ("5:8", "3")]
    assert [(line[0], line[-1]) for line in cells("row-wise uneven")] == rows
    assert [line[0] for line in cells("row-wise even")] == ["0:2", "2:4", "4:6", "6:8"]
    assert cells("column shards") == [["0:8", "|", "rank", "0", "|", "rank", "1", "|", "rank", "2"]]


@on_ranks
def test_even_shards_need_no_shape() -> None:
    rank = dist.get_rank()
    rows = DTensor.from_local(_wrapper([(2 * rank, 2, 0, WIDTH)]), mesh_of((4,)), [S0], run_check=False)
    columns = DTensor.from_local(_wrapper([(0, ROWS, 4 * rank, 4)]), mesh_of((4,)), [S1], run_check=True)
    replica = _wrapper([(0, ROWS, 0, 8), (0, ROWS, 8, 8)])
    for shard in replica.shards:
        shard += rank  # run_check makes replicas equal
    for table in (rows, columns, DTensor.from_local(replica, mesh_of((4,)), [R], run_check=True)):
        assert (tuple(table.shape), table.stride()) == ((ROWS, WIDTH), (WIDTH, 1))
        assert _all_equal(table.full_tensor(), _table())


@on_ranks
def test_on_two_mesh_dims() -> None:
    row, column = divmod(dist.get_rank(), 2)
    grid = _wrapper([(4 * row, 4, 8 * column, 3), (4 * row, 4, 8 * column + 3, 5)])
    copies = _wrapper([(0, ROWS, 5 * column, (5, 11)[column])])
    for held, placements, result in (
        (grid, [S0, S1], (S0, S1)),
        (copies, [R, S1], (R, RaggedShard(1, (5, 11)))),
    ):
        table = DTensor.from_local(held, mesh_of((2, 2)), placements, shape=(ROWS, WIDTH), stride=(WIDTH, 1))
        assert table.placements == result and _all_equal(table.full_tensor(), _table())
        assert _all_equal(table.redistribute(placements=[R, S0]).full_tensor(), _table())


# ---- what is refused, on every rank ----


def _misplaced(use: str, folder: str) -> None:
    """Wraps shards of which one has a wrong offset, or one rank has none; then uses the tensor."""
    rank = dist.get_rank()
    held: torch.Tensor = _wrapper([(2 * rank, 2, 0, WIDTH)])
    if rank == 2 or use == "save":
        held = LocalShardsWrapper([torch.zeros(2, WIDTH)], [(2 * rank, WIDTH)])
    if use == "plain" and rank == 1:
        held = torch.zeros(2, WIDTH)
    mesh, check = mesh_of((4,)), use == "run_check"
    shape: Any = {} if use == "save" else {"shape": (ROWS, WIDTH), "stride": (WIDTH, 1)}
    table = DTensor.from_local(held, mesh, [S0], run_check=check, **shape)
    if use == "full_tensor":
        table.full_tensor()
    elif use == "redistribute":
        table.redistribute(placements=[S1])
    elif use == "fallback":
        torch.linalg.qr(table)
    elif use == "save":
        dcp.save({"t": table}, checkpoint_id=folder)


def _computes(*_: str) -> None:
    torch.nn.functional.embedding(
        distribute_tensor(torch.tensor([1, 7]), mesh_of((4,)), [R]), _tensor("row-wise even")
    )


OFFSETS = (_misplaced, r"mesh rank 2: \[2, 16\] at \(4, 16\) where \(4, 0\)", LayoutError)
REFUSED: dict[str, tuple[Callable[..., None], str, type]] = {
    "run_check": OFFSETS,
    "full_tensor": OFFSETS,
    "redistribute": OFFSETS,
    "fallback": OFFSETS,
    "plain": (_misplaced, "shards on all ranks or on none", LayoutError),
    "save": (_misplaced, "expected a shard inside the table", BaseException),
    "compute": (_computes, "embedding.default is not supported for LocalShardsWrapper!", NoRuleError),
}


@pytest.mark.parametrize("use", REFUSED)
@pytest.mark.filterwarnings("ignore::dtbench_core.dispatch.fallback.FallbackWarning")
@on_ranks
def test_shards_that_contradict_the_placements_are_refused(use: str, tmp_path: Path) -> None:
    fn, message, error = REFUSED[use]
    with pytest.raises(error, match=message):
        fn(use, str(tmp_path))


# ---- checkpoints ----


@on_ranks
def test_checkpoints_load_under_another_layout(tmp_path: Path) -> None:
    """Loads each saved layout into every other, and into and from tensors without shards."""
    for saved in (*LAYOUTS, "plain"):
        path = tmp_path / saved
        dcp.save({"t": _target(saved, _table()), "step": 3}, checkpoint_id=path)
        for loaded in (*LAYOUTS, "plain"):
            target = _target(loaded, torch.full((ROWS, WIDTH), -1.0))
            held = target.to_local()
            state: dict[str, Any] = {"t": target, "step": 0}
            dcp.load(state, checkpoint_id=path)
            assert state["t"].to_local() is held or loaded == "plain", (saved, loaded)
            assert state["step"] == 3 and _all_equal(state["t"].full_tensor(), _table()), (saved, loaded)


def _target(layout: str, values: torch.Tensor) -> DTensor:
    if layout == "plain":
        return distribute_tensor(values, mesh_of((4,)), [RaggedShard(0, (4, 0, 1, 3))])
    table = _tensor(layout)
    held: Any = table.to_local()
    for shard, (row, column) in zip(held.shards, held.shard_offsets, strict=True):
        shard.copy_(values[row : row + shard.size(0), column : column + shard.size(1)])
    return table


@on_ranks
def test_scattered_column_shards_are_saved_at_their_offsets(tmp_path: Path) -> None:
    """No placement describes these column shards, but the checkpoint has their offsets."""
    rank = dist.get_rank()
    held = _wrapper([(0, ROWS, 2 * rank, 2), (0, ROWS, 8 + 2 * rank, 2)])
    table = DTensor.from_local(held, mesh_of((4,)), [S1], shape=(ROWS, WIDTH), stride=(WIDTH, 1))
    dcp.save({"t": table}, checkpoint_id=tmp_path)
    whole = {"t": torch.zeros(ROWS, WIDTH)}
    dcp.load(whole, checkpoint_id=tmp_path)
    assert torch.equal(whole["t"], _table())
