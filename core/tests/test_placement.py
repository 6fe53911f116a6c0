"""Shard arithmetic against torch.chunk, and what the public names are."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtbench_core
from dtbench_core import Partial, Replicate, Shard, _public
from dtbench_core.layout.placement import chunk_extent, chunk_lengths, local_extents, splits_evenly

sizes = st.integers(0, 40)
parts = st.integers(1, 9)


@given(sizes, parts)
def test_chunks_are_those_of_torch(size: int, count: int) -> None:
    """torch.chunk leaves out empty chunks at the end; here they are empty."""
    wanted = [c.numel() for c in torch.arange(size).chunk(count)] if size else []
    wanted += [0] * (count - len(wanted))
    assert chunk_lengths(size, count) == wanted
    offsets = [chunk_extent(size, count, index)[1] for index in range(count)]
    assert offsets == [min(size, sum(wanted[:index])) for index in range(count)]


@given(
    st.tuples(sizes, sizes), st.lists(st.sampled_from(["R", "P", 0, 1]), min_size=1, max_size=3), st.data()
)
def test_local_extents_cut_like_nested_chunks(
    shape: tuple[int, int], kinds: list[object], data: st.DataObject
) -> None:
    placements = tuple(
        Shard(k) if isinstance(k, int) else Replicate() if k == "R" else Partial() for k in kinds
    )
    mesh = tuple(data.draw(st.integers(1, 4)) for _ in placements)
    coordinate = tuple(data.draw(st.integers(0, n - 1)) for n in mesh)
    full = torch.arange(shape[0] * shape[1]).reshape(shape)
    held = full
    for placement, count, index in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, Shard):
            length, offset = chunk_extent(held.size(placement.dim), count, index)
            held = held.narrow(placement.dim, offset, length)
    local_shape, offset = local_extents(shape, placements, mesh, coordinate)
    assert tuple(held.shape) == local_shape
    if held.numel():
        assert int(held[0, 0]) == offset[0] * shape[1] + offset[1]


def test_splits_evenly() -> None:
    assert splits_evenly(8, 0, (Shard(0), Shard(0)), (2, 4))
    assert not splits_evenly(4, 0, (Shard(0), Shard(0)), (2, 4))
    assert splits_evenly(5, 0, (Shard(1), Replicate()), (2, 4))


def test_every_public_name_exists_and_says_what_it_is() -> None:
    assert sorted(dtbench_core.__all__) == dtbench_core.__all__
    assert set(dtbench_core.__all__) == {name for name in vars(_public) if not name.startswith("_")}
    assert set(dtbench_core.__all__) <= set(dir(dtbench_core))
    assert len(dtbench_core.__all__) > 40
    assert [name for name in dtbench_core.__all__ if not getattr(dtbench_core, name).__doc__] == []
    with pytest.raises(AttributeError, match="'dtbench_core' has no attribute 'Tensor'"):
        getattr(dtbench_core, "Tensor")  # noqa: B009


PRICES = """
import sys, dtbench_core
from dtbench_core.cost import curve, prices, ring, topology
assert "torch" not in sys.modules and "DTensor" in dir(dtbench_core)
assert "torch" not in sys.modules and dtbench_core.cost.ring is ring
from dtbench_core.layout import placement
assert placement.Shard is dtbench_core.Shard
"""


def test_prices_are_read_without_torch() -> None:
    subprocess.run([sys.executable, "-c", PRICES], check=True, timeout=120)
