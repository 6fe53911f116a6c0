"""LocalShardsWrapper: the shards of one embedding table on a rank, with their offsets in the table.

torchrec's sharded modules keep DTensors of such wrappers in their state dicts:

    wrapper = LocalShardsWrapper([rows], [(first_row, 0)])
    DTensor.from_local(wrapper, mesh, [Shard(0)], run_check=False, shape=table_shape, stride=(width, 1))

`to_local()` returns the wrapper. torch.distributed.checkpoint writes and reads each shard at its own offset. The
wrapper supports only the ops that checkpoints need. `joined()` gives a plain tensor for all others. `full_tensor()` and
`redistribute()` of the DTensor call `joined()`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch

from dtbench_core import comm
from dtbench_core.errors import LayoutError, NoRuleError
from dtbench_core.op_types import Call
from dtbench_core.torch_compat import disabled_torch_function, make_wrapper

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import WriteItem

    from dtbench_core.layout.spec import DTensorSpec

aten = torch.ops.aten

# Ops that run on each shard, with the same other arguments. Results have the same offsets.
_SHARD_BY_SHARD = (aten._to_copy.default, aten.clone.default, aten.detach.default, aten.empty_like.default)


class LocalShardsWrapper(torch.Tensor):
    """The shards of one table on this rank: a single shard, or several column shards of the same rows.

    The wrapper has the shape of the shards concatenated along the columns, and no memory of its own. A rank without
    shards wraps an empty tensor: `torch.empty(0, width)` if rows are sharded, `torch.empty(rows, 0)` if columns are.

    Args:
        local_shards: [rows, columns] tensors with the same dtype, device and number of rows. They are not copied.
        offsets: (row, column) of each shard in the table.

    Raises:
        LayoutError: shards that cannot be concatenated, or offsets that do not fit them.
    """

    _shards: list[torch.Tensor]
    _offsets: list[torch.Size]

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(
        cls, local_shards: Sequence[torch.Tensor], offsets: Sequence[Sequence[int]]
    ) -> LocalShardsWrapper:
        shards, places = list(local_shards), [torch.Size(offset) for offset in offsets]
        _check(shards, places)
        first = shards[0]
        shape = (first.size(0), sum(shard.size(1) for shard in shards))
        wrapper = make_wrapper(cls, shape, (max(shape[1], 1), 1), dtype=first.dtype, device=first.device)
        wrapper._shards, wrapper._offsets = shards, places  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]

    @property
    def shards(self) -> list[torch.Tensor]:
        """The shards, in the order given."""
        return self._shards

    @property
    def shard_sizes(self) -> list[torch.Size]:
        """The shape of each shard."""
        return [shard.shape for shard in self._shards]

    @property
    def shard_offsets(self) -> list[torch.Size]:
        """The position (row, column) in the table of each shard's first element."""
        return self._offsets

    @functools.cached_property
    def storage_meta(self) -> TensorStorageMetadata:
        """Metadata for torch.distributed.checkpoint: tensor properties, the wrapper's shape, the shards as chunks."""
        from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

        return TensorStorageMetadata(
            properties=TensorProperties.create_from_tensor(self._shards[0]),
            size=self.shape,
            chunks=_chunks(self),
        )

    def joined(self) -> torch.Tensor:
        """Returns the shards concatenated along the columns: a copy of several shards, or the only shard itself."""
        return self._shards[0] if len(self._shards) == 1 else torch.cat(self._shards, dim=1)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        listed = ", ".join(f"{s} at {tuple(o)}" for s, o in zip(self._shards, self._offsets, strict=True))
        return f"LocalShardsWrapper({listed})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SHARD_BY_SHARD and isinstance(args[0], LocalShardsWrapper):
            return LocalShardsWrapper(
                [func(shard, *args[1:], **(kwargs or {})) for shard in args[0]._shards], args[0]._offsets
            )
        if func in _BY_OP:
            return _BY_OP[func](*args, **(kwargs or {}))
        raise NoRuleError(
            f"{func} is not supported for LocalShardsWrapper! It supports the ops of state dicts: view, detach, clone, "
            "copy_, to, equal and empty_like; for other ops make the DTensor from the plain tensor wrapper.joined()"
        )

    # torch would copy the wrapper without its shards.
    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return LocalShardsWrapper, (self._shards, [tuple(offset) for offset in self._offsets])

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShardsWrapper:
        if id(self) not in memo:
            copies = [s.detach().clone(memory_format=torch.contiguous_format) for s in self._shards]
            memo[id(self)] = LocalShardsWrapper(copies, self._offsets)
        return cast("LocalShardsWrapper", memo[id(self)])

    # torch.distributed.checkpoint calls these methods. Those of a DTensor call the ones of its local tensor.
    def __create_write_items__(self, fqn: str, object: torch.Tensor) -> list[WriteItem]:
        """Returns the shards as parts of `object`, which has the table's shape.

        Raises:
            LayoutError: a shard exceeds the table.
        """
        size = torch.Size(object.shape)
        return write_items(fqn, chunks_within(self, size), self._shards[0], size)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return _chunks(self)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the shard that starts at `index.offset`."""
        for shard, offset in zip(self._shards, self._offsets, strict=True):
            if index.offset is not None and tuple(offset) == tuple(index.offset) and shard.numel():
                return shard
        raise LayoutError(
            f"got the offset {index.offset} of {index.fqn}, expected one of {list(map(tuple, self._offsets))}, where "
            "this rank's shards start"
        )


torch.serialization.add_safe_globals([LocalShardsWrapper])


def holds_shards(tensor: torch.Tensor) -> TypeGuard[LocalShardsWrapper]:
    return tensor.__class__ is LocalShardsWrapper


def _check(shards: list[torch.Tensor], places: list[torch.Size]) -> None:
    got = f"LocalShardsWrapper got shards of the shapes {[list(s.shape) for s in shards]}"
    if not shards:
        raise LayoutError(
            f"{got}, expected at least one: on a rank without a shard wrap an empty one, such as "
            "torch.empty(0, width)"
        )
    if len(shards) != len(places):
        raise LayoutError(
            f"{got} and {len(places)} offsets, expected one (row, column) offset for each shard"
        )
    if any(shard.ndim != 2 for shard in shards):
        raise LayoutError(
            f"{got}, expected matrices [rows, columns]: a shard is a part of an embedding table"
        )
    got += f" at {[tuple(p) for p in places]}"
    if any(len(place) != 2 or min(place) < 0 for place in places):
        raise LayoutError(f"{got}, expected offsets (row, column) >= 0")
    kinds = {(s.size(0), s.dtype, s.device, place[0]) for s, place in zip(shards, places, strict=True)}
    if len(kinds) > 1:
        raise LayoutError(
            f"{got}, {[str(s.dtype) for s in shards]}, expected column shards of the same rows, of one dtype on one "
            "device: put shards of other rows in another table"
        )
    columns = sorted((place[1], shard.size(1)) for shard, place in zip(shards, places, strict=True))
    if any(previous[0] + previous[1] > following[0] for previous, following in itertools.pairwise(columns)):
        raise LayoutError(f"{got}, expected shards that do not overlap")


# ---- ops that need more than one call per shard ----


def _view(wrapper: LocalShardsWrapper, shape: Sequence[int]) -> LocalShardsWrapper:
    _require_own_shape(wrapper, "view", torch.empty(wrapper.shape, device="meta").view(shape).shape)
    return LocalShardsWrapper([shard.view(shard.shape) for shard in wrapper._shards], wrapper._offsets)


def _new_empty(wrapper: LocalShardsWrapper, size: Sequence[int], **options: Any) -> LocalShardsWrapper:
    """Returns a wrapper of uninitialized shards with the same shapes. Asynchronous checkpoints call it."""
    _require_own_shape(wrapper, "new_empty", size)
    return LocalShardsWrapper(
        [shard.new_empty(shard.shape, **options) for shard in wrapper._shards], wrapper._offsets
    )


def _require_own_shape(wrapper: LocalShardsWrapper, op: str, shape: Sequence[int]) -> None:
    """Raises if an op would change the shape, since the offsets would then be wrong."""
    if tuple(shape) != tuple(wrapper.shape):
        raise NoRuleError(
            f"aten.{op}.default to {list(shape)} is not supported for LocalShardsWrapper! Expected its own shape "
            f"{list(wrapper.shape)}, for which the shards' offsets are valid: call wrapper.joined().{op}({list(shape)})"
        )


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copies `source` to `target`, which may be cut into different column shards."""
    if target.shape != source.shape:
        raise LayoutError(f"copy_ got {list(source.shape)} for {list(target.shape)}, expected the same shape")
    for part, values in _same_columns(target, source):
        part.copy_(values, non_blocking)
    return target


def equal_shards(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the values are equal and, for two wrappers, the offsets, too. Compares the shards without dispatch."""
    if first.shape != second.shape:
        return False
    if holds_shards(first) and holds_shards(second) and _places(first) != _places(second):
        return False
    return all(torch.equal(*pair) for pair in _same_columns(first, second))


_BY_OP: dict[Any, Call] = {
    aten.is_pinned.default: lambda wrapper, device=None: wrapper._shards[0].is_pinned(),
    aten.view.default: _view,
    aten.new_empty.default: _new_empty,
    aten.copy_.default: _copy_,
    aten.equal.default: equal_shards,
}


def _same_columns(first: torch.Tensor, second: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields pairs of views with the same columns. Each view lies inside one shard."""
    sides = [t._shards if holds_shards(t) else [t] for t in (first, second)]
    cuts = sorted({end for shards in sides for end in itertools.accumulate(s.size(1) for s in shards)})
    return zip(*(_cut(shards, cuts) for shards in sides), strict=True)


def _cut(shards: Sequence[torch.Tensor], cuts: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yields parts of the shards, cut at these columns of the concatenated shards."""
    end = 0
    for shard in shards:
        start, end = end, end + shard.size(1)
        if end > start:
            yield from shard.tensor_split([cut - start for cut in cuts if start < cut < end], dim=1)


def _places(wrapper: LocalShardsWrapper) -> list[tuple[int, int, int]]:
    """Returns (row, first column, number of columns) of the parts of the table that the shards cover, in order.

    Adjacent shards count as one part.
    """
    places: list[tuple[int, int, int]] = []
    for shard, (row, column) in zip(wrapper._shards, wrapper._offsets, strict=True):
        if places and places[-1][1] + places[-1][2] == column:
            places[-1] = (row, places[-1][1], places[-1][2] + shard.size(1))
        elif shard.numel() or len(wrapper._shards) == 1:
            places.append((row, column, shard.size(1)))
    return places


# ---- positions of the shards in the table ----


def _chunks(wrapper: LocalShardsWrapper) -> list[ChunkStorageMetadata]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    pairs = zip(wrapper._offsets, wrapper.shard_sizes, strict=True)
    return [ChunkStorageMetadata(offsets=offset, sizes=size) for offset, size in pairs]


def write_items(
    fqn: str, chunks: Sequence[ChunkStorageMetadata], like: torch.Tensor, size: torch.Size
) -> list[WriteItem]:
    """Returns the write items of torch.distributed.checkpoint for parts of a tensor.

    Args:
        chunks: the parts.
        like: any tensor with the same dtype and other properties.
        size: shape of the whole tensor.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(like)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in chunks
    ]


def chunks_within(wrapper: LocalShardsWrapper, shape: torch.Size) -> list[ChunkStorageMetadata]:
    """Returns the shards that have elements, for a checkpoint of a table of this shape.

    Raises:
        LayoutError: a shard exceeds the table.
    """
    chunks = [c for c in _chunks(wrapper) if 0 not in c.sizes]
    for chunk in chunks:
        ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(shape) != 2 or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise LayoutError(
                f"got a shard of {list(chunk.sizes)} at {tuple(chunk.offsets)} in a table of {list(shape)}, expected "
                "a shard inside the table: an offset is the (row, column) of the shard's first element; save the "
                "DTensor, which has the table's shape"
            )
    return chunks


def _misplaced(local: LocalShardsWrapper, spec: DTensorSpec) -> str | None:
    """Returns a description of the first shard whose offset contradicts the spec's placements, or None."""
    row, column = spec.local_offset
    for shard, offset in zip(local._shards, local._offsets, strict=True):
        if shard.numel() and tuple(offset) != (row, column):
            return f"{list(shard.shape)} at {tuple(offset)} where {(row, column)} was expected"
        column += shard.size(1)
    return None


def check_places(local: torch.Tensor, spec: DTensorSpec) -> None:
    """Checks on all ranks that the shards' offsets fit the placements. All ranks of the mesh must call it.

    Raises:
        LayoutError: on every rank, if the offsets differ on any rank.
    """
    if not holds_shards(local) or spec.info.coordinate is None:
        return
    reasons = [_misplaced(local, spec)]
    for group in spec.info.groups:
        reasons = [reason for part in comm.all_gather_objects(reasons, group) for reason in part]
    wrong = [f"mesh rank {i}: {reason}" for i, reason in enumerate(reasons) if reason is not None]
    if wrong:
        raise LayoutError(
            f"got shards of {spec} at offsets that contradict its placements ({'; '.join(wrong)}); expected shards in "
            "the order of the ranks: correct the offsets, or save and load the tensor with "
            "torch.distributed.checkpoint, which accepts any offsets"
        )


def plain_part(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns this rank's part as a plain tensor. All ranks of the mesh must call it. Raises as `check_places` does."""
    check_places(local, spec)
    return local.joined() if holds_shards(local) else local
