"""The samples of torch's op database, and the placements each is tried in.

Sizes: the database builds its samples from four module constants L, M, S, XS (20, 10, 5, 3). As torch's
own tests of DTensor do, they are set to multiples of the rank count where shards shall be even. In the
uneven mode none is: with 4 ranks, 5 gives shards of 2, 2, 1, 0 and 3 gives 1, 1, 1, 0.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from dtbench_suites.coverage.verdicts import RANKS, Place, Places

SEED = 20251

# L, M, S, XS. Even: those of torch's test_dtensor_ops.py.
_EVEN_SIZES = (24, 12, 4, 2)
_UNEVEN_SIZES = (22, 10, 5, 3)
# Their samples hold lengths that fit the database's own sizes alone, and the plain op reads beyond its input
# where they do not fit.
_OWN_SIZES = (20, 10, 5, 3)
_NEED_OWN_SIZES = frozenset({"_segment_reduce.lengths", "_segment_reduce.offsets"})
# Of a sample generator that has hundreds, the first so many are looked at and spread over.
_SAMPLES_LOOKED_AT = 120


@dataclass(frozen=True)
class Sample:
    """One call of an op. `leaves` of the pytree (input, args, kwargs); `tensors`: their indices."""

    leaves: tuple[Any, ...]
    tree: Any
    tensors: tuple[int, ...]
    requires_grad: tuple[bool, ...]
    process: Callable[[Any], Any]  # what of the output is determined: singular vectors up to sign, ...
    broadcasts_input: bool

    @property
    def values(self) -> list[torch.Tensor]:
        return [self.leaves[i] for i in self.tensors]


@functools.cache
def database() -> dict[str, Any]:
    """torch's OpInfo of every op of its database with float32 on the CPU, by the op's full name.

    Raises:
        ImportError: the database needs the package expecttest.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    ops = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in ops}


def has_mode(name: str, mode: str) -> bool:
    """Whether the op has an in-place variant, or an out= argument, where the mode asks for it."""
    if mode == "inplace":
        return database()[name].inplace_variant is not None
    return mode != "out" or bool(database()[name].supports_out)


def samples_of(name: str, mode: str, limit: int) -> tuple[list[Sample], str]:
    """(at most `limit` of the op's samples, spread over what its generator yields; the error that ended it or "").

    The same every time. Some generators take a part of a tensor that is not there in the sizes set here.
    """
    op = database()[name]
    sizes = _UNEVEN_SIZES if mode == "uneven" else _EVEN_SIZES
    _set_sizes(_OWN_SIZES if name in _NEED_OWN_SIZES else sizes)
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    made = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    found, ended = [], ""
    try:
        for one in itertools.islice(made, _SAMPLES_LOOKED_AT):
            found.append(_sample(one))  # noqa: PERF401 - those before an error count
    except (RuntimeError, ValueError, IndexError) as error:
        ended = f"{type(error).__name__}: {error}"
    if mode in _LAID_OUT:
        found = [_laid_out(one, _LAID_OUT[mode]) for one in found]
    usable = [one for one in found if one.tensors and all(map(_can_distribute, one.values))]
    if mode == "inplace":
        usable = [one for one in usable if not one.broadcasts_input]
    if len(usable) > limit:
        usable = [usable[i * len(usable) // limit] for i in range(limit)]
    return usable, ended


def _sample(one: Any) -> Sample:
    leaves, tree = tree_flatten((one.input, one.args, one.kwargs))
    tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    requires_grad = tuple(leaves[i].requires_grad for i in tensors)
    leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return Sample(
        tuple(leaves), tree, tensors, requires_grad, one.output_process_fn_grad, bool(one.broadcasts_input)
    )


def transposed(full: torch.Tensor) -> torch.Tensor:
    """A copy whose dims lie in memory in the opposite order."""
    backwards = tuple(range(full.ndim)[::-1])
    return full.permute(backwards).contiguous().permute(backwards)


def stepped(full: torch.Tensor) -> torch.Tensor:
    """A copy with a gap after every element."""
    return full.repeat_interleave(2, -1)[..., ::2] if full.ndim else full.clone()


# How the inputs of these modes lie in memory.
_LAID_OUT = {"strided": transposed, "from_local": stepped}


def _laid_out(sample: Sample, lay: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
    given = [
        lay(leaf) if i in sample.tensors and _can_distribute(leaf) else leaf
        for i, leaf in enumerate(sample.leaves)
    ]
    return dataclasses.replace(sample, leaves=tuple(given))


def _can_distribute(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _set_sizes(sizes: tuple[int, int, int, int]) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal.") and name.split(".")[3] in (
            "opinfo",
            "common_methods_invocations",
        ):
            for constant, size in zip(("L", "M", "S", "XS"), sizes, strict=True):
                if type(vars(module).get(constant)) is int:
                    setattr(module, constant, size)


# ---- placements ----


def places_of(tensors: Sequence[torch.Tensor], mode: str, limit: int, salt: str) -> list[Places]:
    """At most `limit` ways to place the tensors, each once; the same every time for the same `salt`.

    First all replicated, then all tensors alike where they can be, then one tensor alone placed
    otherwise, in turn with combinations drawn at random.
    """
    choices = [_choices(tensor, mode) for tensor in tensors]
    belonging = (c for c in _combinations(choices, salt) if _belongs(c, tensors, mode))
    return list(itertools.islice(belonging, limit))


def _choices(tensor: torch.Tensor, mode: str) -> list[tuple[Place, ...]]:
    shape = tensor.shape
    if mode == "partial":
        if not tensor.is_floating_point():
            return [("R",)]
        return [("R",), ("P(sum)",), ("P(avg)",), ("P(max)",)]
    if mode == "order":
        cut = ["R", *(f"S({d})" for d, size in enumerate(shape) if size)]
        return list(itertools.product(cut, cut))
    if mode == "mesh2x2":
        found: list[tuple[Place, ...]] = [("R", "R")]
        halves = [d for d, size in enumerate(shape) if size and size % 2 == 0]
        found += [(f"S({d})", "R") for d in halves] + [("R", f"S({d})") for d in halves]
        found += [(f"S({a})", f"S({b})") for a in halves for b in halves if a != b or shape[a] % RANKS == 0]
        return found
    if mode in ("uneven", *_LAID_OUT):
        return [("R",), *((f"S({d})",) for d, size in enumerate(shape) if size)]
    return [("R",), *((f"S({d})",) for d, size in enumerate(shape) if size and size % RANKS == 0)]


def _belongs(places: Places, tensors: Sequence[torch.Tensor], mode: str) -> bool:
    if mode == "partial":
        return any(one[0].startswith("P") for one in places)
    if mode == "uneven":
        return any(
            place.startswith("S") and tensor.shape[int(place[2:-1])] % RANKS
            for one, tensor in zip(places, tensors, strict=True)
            for place in one
        )
    return True


def _combinations(choices: list[list[tuple[Place, ...]]], salt: str) -> Iterator[Places]:
    """Every combination if they are few; otherwise the plain ones and some drawn, without repetition."""
    rng = random.Random(salt)
    if math.prod(map(len, choices)) <= 256:
        drawn = list(itertools.product(*choices))
        rng.shuffle(drawn)
    else:
        drawn = [tuple(rng.choice(own) for own in choices) for _ in range(1024)]
    first = choices[0][0]  # replicated everywhere
    alike = [
        tuple(place if place in own else first for own in choices)
        for place in dict.fromkeys(place for own in choices for place in own)
    ]
    alone = [
        tuple(place if k == i else first for k in range(len(choices)))
        for i, own in enumerate(choices)
        for place in own[1:]
    ]
    mixed = itertools.chain.from_iterable(itertools.zip_longest(alone, drawn))
    yield from dict.fromkeys(places for places in (*alike, *mixed) if places is not None)
