"""Embedding tables whose shards a LocalShardsWrapper holds: made, read, moved, copied, saved and loaded."""

from __future__ import annotations

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
from torch.distributed.device_mesh import DeviceMesh

from core.tests.gloo_world import RankError, Worlds, mesh_of
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
    # Of simulated ranks each makes its own.
    held: Any = rank_map(lambda rank: _wrapper(boxes(rank)))
    return DTensor.from_local(
        held, mesh_of((4,)), [placement], run_check=False, shape=(ROWS, WIDTH), stride=(WIDTH, 1)
    )


# ---- the wrapper alone ----


def test_a_wrapper_says_what_it_holds() -> None:
    one = _wrapper([(2, 3, 0, 16)])
    assert one.shards[0].shape == (3, 16) and one.shape == (3, 16) and one.joined() is one.shards[0]
    two = _wrapper([(0, 8, 4, 2), (0, 8, 6, 3)])
    assert two.shape == (8, 5) and two.dtype == torch.float32
    assert two.shard_sizes == [torch.Size((8, 2)), torch.Size((8, 3))]
    assert two.shard_offsets == [torch.Size((0, 4)), torch.Size((0, 6))]
    assert torch.equal(two.joined(), _table()[:, 4:9])
    meta = two.storage_meta
    assert meta.size == (8, 5) and meta.properties.dtype == torch.float32
    assert meta.chunks == [
        ChunkStorageMetadata(torch.Size((0, 4)), torch.Size((8, 2))),
        ChunkStorageMetadata(torch.Size((0, 6)), torch.Size((8, 3))),
    ]
    assert two.__create_chunk_list__() == meta.chunks
    assert two.__get_tensor_shard__(MetadataIndex("t", (0, 6))) is two.shards[1]
    with pytest.raises(LayoutError, match=r"expected one of \[\(0, 4\), \(0, 6\)\]"):
        two.__get_tensor_shard__(MetadataIndex("t", (0, 5)))
    assert "at (0, 6)" in repr(two)


@pytest.mark.parametrize(
    ("shapes", "offsets", "expected"),
    [
        ([], [], "expected at least one"),
        ([(2, 4)], [(0, 0), (0, 4)], "expected one .row, column. offset for each shard"),
        ([(4,)], [(0,)], "expected matrices"),
        ([(2, 4)], [(0, -1)], ">= 0"),
        ([(2, 4)], [(0,)], "offsets .row, column."),
        ([(2, 4), (3, 4)], [(0, 0), (0, 4)], "column shards of the same rows"),
        ([(2, 4), (2, 4)], [(0, 0), (2, 0)], "column shards of the same rows"),
        ([(2, 4), (2, 4)], [(0, 4), (0, 1)], "do not overlap"),
    ],
)
def test_shards_that_do_not_stand_side_by_side(shapes: Any, offsets: Any, expected: str) -> None:
    with pytest.raises(LayoutError, match=expected):
        LocalShardsWrapper([torch.zeros(shape) for shape in shapes], offsets)
    if len(shapes) == 2:
        with pytest.raises(LayoutError, match="of one dtype"):
            LocalShardsWrapper([torch.zeros(2, 4), torch.zeros(2, 4).int()], [(0, 0), (0, 4)])


def test_ops_of_a_state_dict() -> None:
    held = _wrapper([(2, 3, 4, 2), (2, 3, 6, 3)])
    results = {
        "clone": held.clone(),
        "to": held.to(torch.float64),
        "deepcopy": copy.deepcopy(held),
        "pickle": pickle.loads(pickle.dumps(held)),
        "empty_like": torch.empty_like(held),
        "view": held.view(3, -1),
        "view_as": held.view_as(held),
        "detach": held.detach(),
    }
    shared = ("view", "view_as", "detach")
    for name, made in results.items():
        assert isinstance(made, LocalShardsWrapper), name
        assert made.shard_offsets == held.shard_offsets and made.shard_sizes == held.shard_sizes
        for shard, original in zip(made.shards, held.shards, strict=True):
            assert (shard.data_ptr() == original.data_ptr()) == (name in shared), name
            if name != "empty_like":
                assert torch.equal(shard, original.to(made.dtype))
    assert results["to"].dtype == torch.float64
    assert torch.equal(held, results["clone"])
    target = results["empty_like"]
    assert target.copy_(held) is target and torch.equal(target, held)
    saved = io.BytesIO()
    torch.save(held, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=True), held)


def test_copies_and_equality_over_other_cuts() -> None:
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
    for op in (lambda: held + 1, lambda: held.sum(), lambda: held.zero_(), lambda: torch.cat([held, held])):
        with pytest.raises(NotImplementedError, match="is not supported for LocalShardsWrapper!") as caught:
            op()
        assert isinstance(caught.value, NoRuleError)
    with pytest.raises(NotImplementedError, match="is not supported for LocalShardsWrapper!"):
        held.view(16, 8)  # in which the offset would mean nothing
    with pytest.raises(NotImplementedError, match="is not supported for LocalShardsWrapper!"):
        held.new_empty(2, 2)


# ---- in a DTensor ----


def _everything(layout: str) -> dict[str, bool]:
    tensor, whole = _tensor(layout), _table()
    held = tensor.to_local()
    doubled = tensor.to(torch.float64)
    target = torch.empty_like(tensor)
    target.copy_(tensor)
    parameter = nn.Parameter(tensor)
    (parameter.full_tensor() * whole).sum().backward()
    assert parameter.grad is not None
    moved = tensor.detach().requires_grad_()
    (moved.redistribute(placements=[R]) * 3).sum().backward()
    assert moved.grad is not None
    plain = distribute_tensor(whole, mesh_of((4,)), tensor.placements)
    return {
        "handed back": _parts(tensor.to_local()) == _parts(held),
        "metadata": tuple(tensor.shape) == (ROWS, WIDTH) and tensor.stride() == (WIDTH, 1),
        "gathered": _all_equal(tensor.full_tensor(), whole),
        "rows": _all_equal(tensor.redistribute(placements=[S0]).full_tensor(), whole),
        "columns": _all_equal(tensor.redistribute(placements=[S1]).full_tensor(), whole),
        "copies": all(
            torch.equal(t, tensor) for t in (tensor.clone(), tensor.detach(), target, copy.deepcopy(tensor))
        ),
        "shards": all(
            _kinds(t) == {LocalShardsWrapper} for t in (doubled, target, tensor.clone(), parameter)
        ),
        "dtype": doubled.dtype == torch.float64 and _all_equal(doubled.full_tensor(), whole.double()),
        "gradient": _all_equal(parameter.grad.full_tensor(), whole)
        and parameter.grad.placements == tensor.placements,
        "moved gradient": _all_equal(moved.grad.full_tensor(), torch.full_like(whole, 3.0)),
        "to and from plain": torch.equal(tensor, plain) and torch.equal(plain, tensor),
        "differs": not torch.equal(tensor, plain + 1),
    }


def _all_equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got == want).all())


def _parts(local: torch.Tensor) -> list[int]:
    """Where the memory of the shards is, of every simulated rank."""
    held: Any = getattr(local, "_local_tensors", {0: local}).values()
    return [shard.data_ptr() for part in held for shard in part.shards]


def _kinds(tensor: DTensor) -> set[type]:
    local = tensor.to_local()
    return {type(part) for part in getattr(local, "_local_tensors", {0: local}).values()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_of_shards_is_a_tensor(worlds: AnyWorlds, layout: str) -> None:
    for got in worlds(_everything, layout):
        assert all(got.values()), got


def _drawn(layout: str) -> str:
    return sharding_text(_tensor(layout))


def test_shards_are_drawn_as_they_lie(worlds: AnyWorlds) -> None:
    def cells(layout: str) -> list[list[str]]:
        lines = worlds(_drawn, layout)[0].splitlines()
        return [line.split() for line in lines if "rank" in line and "|" in line]

    assert [(line[0], line[-1]) for line in cells("row-wise uneven")] == [
        ("0:1", "0"),
        ("1:4", "1"),
        ("4:5", "2"),
        ("5:8", "3"),
    ]
    assert [line[0] for line in cells("row-wise even")] == ["0:2", "2:4", "4:6", "6:8"]
    assert cells("column shards") == [["0:8", "|", "rank", "0", "|", "rank", "1", "|", "rank", "2"]]


def _by_table() -> list[Any]:
    """Each rank holds a table of its own, on a mesh of itself."""
    rank, out = dist.get_rank(), []
    for owner in range(4):
        mesh = DeviceMesh("cpu", torch.tensor([owner]))
        mine = _wrapper([(0, ROWS, 0, WIDTH)])
        given = mine if rank == owner else torch.empty(0)
        table = DTensor.from_local(given, mesh, [R], run_check=False, shape=(ROWS, WIDTH), stride=(WIDTH, 1))
        local = table.to_local()
        out.append((tuple(table.shape), table.stride()) == ((ROWS, WIDTH), (WIDTH, 1)))
        out.append(local is mine if rank == owner else type(local) is torch.Tensor and local.numel() == 0)
        out.append(rank != owner or _all_equal(table.full_tensor(), _table()))
        out.append(torch.equal(table, table.clone()))
    return out


def test_tables_on_one_rank_each(ranks: Worlds) -> None:
    for got in ranks(_by_table):
        assert all(got), got


def _even_without_a_shape() -> list[Any]:
    rank = dist.get_rank()
    rows = DTensor.from_local(_wrapper([(2 * rank, 2, 0, WIDTH)]), mesh_of((4,)), [S0], run_check=False)
    columns = DTensor.from_local(_wrapper([(0, ROWS, 4 * rank, 4)]), mesh_of((4,)), [S1], run_check=True)
    copied = DTensor.from_local(
        _wrapper([(0, ROWS, 0, 8), (0, ROWS, 8, 8)]), mesh_of((4,)), [R], run_check=True
    )
    tensors = (rows, columns, copied)
    return [(tuple(t.shape), t.stride(), _all_equal(t.full_tensor(), _table())) for t in tensors]


def test_even_shards_need_no_shape(ranks: Worlds) -> None:
    assert ranks(_even_without_a_shape) == [[((ROWS, WIDTH), (WIDTH, 1), True)] * 3] * 4


def _on_two_mesh_dims() -> list[Any]:
    row, column = divmod(dist.get_rank(), 2)
    grid = _wrapper([(4 * row, 4, 8 * column, 3), (4 * row, 4, 8 * column + 3, 5)])
    copies = _wrapper([(0, ROWS, 5 * column, (5, 11)[column])])
    out: list[Any] = []
    for held, placements in ((grid, [S0, S1]), (copies, [R, S1])):
        table = DTensor.from_local(held, mesh_of((2, 2)), placements, shape=(ROWS, WIDTH), stride=(WIDTH, 1))
        moved = table.redistribute(placements=[R, S0])
        out += [
            table.placements,
            _all_equal(table.full_tensor(), _table()),
            _all_equal(moved.full_tensor(), _table()),
        ]
    return out


def test_on_two_mesh_dims(ranks: Worlds) -> None:
    want = [(S0, S1), True, True, (R, RaggedShard(1, (5, 11))), True, True]
    assert ranks(_on_two_mesh_dims) == [want] * 4


def _replicas_made_equal() -> bool:
    held = _wrapper([(0, ROWS, 0, 8), (0, ROWS, 8, 8)])
    for shard in held.shards:
        shard += dist.get_rank()
    table = DTensor.from_local(held, mesh_of((4,)), [R], run_check=True)
    return _all_equal(table.full_tensor(), _table())


def test_run_check_makes_replicas_of_shards_equal(ranks: Worlds) -> None:
    assert ranks(_replicas_made_equal) == [True] * 4


# ---- what is refused, on every rank ----


def _elsewhere(use: str) -> None:
    """One rank's offset is the width of the table, where the column belongs."""
    rank = dist.get_rank()
    held = _wrapper([(2 * rank, 2, 0, WIDTH)])
    if rank == 2:
        held = LocalShardsWrapper(held.shards, [(4, WIDTH)])
    table = DTensor.from_local(
        held, mesh_of((4,)), [S0], run_check=use == "run_check", shape=(ROWS, WIDTH), stride=(WIDTH, 1)
    )
    if use == "full_tensor":
        table.full_tensor()
    if use == "redistribute":
        table.redistribute(placements=[S1])
    if use == "fallback":
        torch.linalg.qr(table)


@pytest.mark.parametrize("use", ["run_check", "full_tensor", "redistribute", "fallback"])
@pytest.mark.filterwarnings("ignore::dtbench_core.dispatch.fallback.FallbackWarning")
def test_offsets_that_contradict_the_placements(ranks: Worlds, use: str) -> None:
    with pytest.raises(RankError, match=r"mesh rank 2: \[2, 16\] at \(4, 16\) where \(4, 0\)") as caught:
        ranks(_elsewhere, use)
    assert isinstance(caught.value.__cause__, LayoutError) and len(caught.value.failures) == 4


def _trusted() -> list[Any]:
    """Without run_check offsets are taken and given back as they are."""
    rank = dist.get_rank()
    held = LocalShardsWrapper([torch.zeros(2, WIDTH)], [torch.Size((2 * rank, WIDTH))])
    table = DTensor.from_local(held, mesh_of((4,)), [S0], run_check=False)
    return [table.to_local() is held, tuple(held.shard_offsets[0]), tuple(table.shape)]


def test_offsets_are_trusted_without_run_check(ranks: Worlds) -> None:
    assert ranks(_trusted) == [[True, (2 * r, WIDTH), (ROWS, WIDTH)] for r in range(4)]


def _some_plain() -> None:
    held: torch.Tensor = _wrapper([(2 * dist.get_rank(), 2, 0, WIDTH)])
    if dist.get_rank() == 1:
        held = torch.zeros(2, WIDTH)
    DTensor.from_local(held, mesh_of((4,)), [S0], shape=(ROWS, WIDTH), stride=(WIDTH, 1))


def test_shards_on_all_ranks_or_on_none(ranks: Worlds) -> None:
    with pytest.raises(RankError, match="shards on all ranks or on none") as caught:
        ranks(_some_plain)
    assert len(caught.value.failures) == 4


def _computes() -> None:
    table = _tensor("row-wise even")
    indices = distribute_tensor(torch.tensor([1, 7]), mesh_of((4,)), [R])
    torch.nn.functional.embedding(indices, table)


def test_computing_on_shards_is_refused_on_every_rank(ranks: Worlds) -> None:
    with pytest.raises(
        RankError, match=r"embedding.default is not supported for LocalShardsWrapper!"
    ) as caught:
        ranks(_computes)
    assert isinstance(caught.value.__cause__, NoRuleError) and len(caught.value.failures) == 4


# ---- checkpoints ----


def _reshard(folder: str) -> list[str]:
    """Saves each layout, loads it into every other, and into and out of tensors without shards."""
    wrong = []
    for saved in (*LAYOUTS, "plain"):
        path = f"{folder}/{saved}"
        dcp.save({"t": _target(saved, _table()), "step": 3}, checkpoint_id=path)
        for loaded in (*LAYOUTS, "plain"):
            target = _target(loaded, torch.full((ROWS, WIDTH), -1.0))
            held = target.to_local()
            state: dict[str, Any] = {"t": target, "step": 0}
            dcp.load(state, checkpoint_id=path)
            same = state["t"].to_local() is held or loaded == "plain"
            if not (same and state["step"] == 3 and _all_equal(state["t"].full_tensor(), _table())):
                wrong.append(f"{saved} -> {loaded}")
    return wrong


def _target(layout: str, values: torch.Tensor) -> DTensor:
    if layout == "plain":
        return distribute_tensor(values, mesh_of((4,)), [RaggedShard(0, (4, 0, 1, 3))])
    table = _tensor(layout)
    held: Any = table.to_local()
    for shard, (row, column) in zip(held.shards, held.shard_offsets, strict=True):
        shard.copy_(values[row : row + shard.size(0), column : column + shard.size(1)])
    return table


def test_checkpoints_load_under_another_layout(ranks: Worlds, tmp_path: Path) -> None:
    assert ranks(_reshard, str(tmp_path)) == [[]] * 4


def _save_scattered(folder: str) -> bool:
    """Column shards anywhere: no placement says where, the checkpoint does."""
    rank = dist.get_rank()
    held = _wrapper([(0, ROWS, 2 * rank, 2), (0, ROWS, 8 + 2 * rank, 2)])
    table = DTensor.from_local(held, mesh_of((4,)), [S1], shape=(ROWS, WIDTH), stride=(WIDTH, 1))
    dcp.save({"t": table}, checkpoint_id=folder)
    whole = {"t": torch.zeros(ROWS, WIDTH)}
    dcp.load(whole, checkpoint_id=folder)
    return torch.equal(whole["t"], _table())


def test_scattered_column_shards_are_saved_where_they_lie(ranks: Worlds, tmp_path: Path) -> None:
    assert ranks(_save_scattered, str(tmp_path)) == [True] * 4


def _save_meanwhile(folder: str) -> list[bool]:
    table = _tensor("column shards")
    saving = dcp.async_save({"t": table}, checkpoint_id=folder)
    held: Any = table.to_local()
    for shard in held.shards:
        shard.fill_(-1)
    saving.result()
    whole = {"t": torch.zeros(ROWS, WIDTH)}
    dcp.load(whole, checkpoint_id=folder)
    return [torch.equal(whole["t"], _table()), type(held.new_empty(held.shape)) is LocalShardsWrapper]


def test_asynchronous_checkpoints(ranks: Worlds, tmp_path: Path) -> None:
    assert ranks(_save_meanwhile, str(tmp_path)) == [[True, True]] * 4


def _save_outside(folder: str) -> None:
    held = LocalShardsWrapper([torch.zeros(2, WIDTH)], [(2 * dist.get_rank(), WIDTH)])
    table = DTensor.from_local(held, mesh_of((4,)), [S0], run_check=False)
    dcp.save({"t": table}, checkpoint_id=folder)


def test_a_shard_outside_its_table_is_not_saved(ranks: Worlds, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="expected one that lies within") as caught:
        ranks(_save_outside, str(tmp_path))
    assert len(caught.value.failures) == 4


def _save_alone(folder: str) -> list[bool]:
    """A wrapper outside any DTensor is a table of its own size."""
    dcp.save({"t": _wrapper([(0, ROWS, 0, 6), (0, ROWS, 6, 10)])}, checkpoint_id=folder, no_dist=True)
    target = LocalShardsWrapper([torch.zeros(ROWS, 9), torch.zeros(ROWS, 7)], [(0, 0), (0, 9)])
    dcp.load({"t": target}, checkpoint_id=folder, no_dist=True)
    return [torch.equal(target.joined(), _table())]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_wrapper_alone_is_saved(tmp_path: Path) -> None:
    assert _save_alone(str(tmp_path)) == [True]


def _pickled() -> list[bool]:
    table = _tensor("column shards")
    saved = io.BytesIO()
    torch.save({"t": table}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)["t"]
    return [torch.equal(loaded, table), _kinds(loaded) == {LocalShardsWrapper}]


def test_tables_are_pickled_with_their_shards(ranks: Worlds) -> None:
    assert ranks(_pickled) == [[True, True]] * 4
