"""The samples of torch's op database, and the placements each is tried in.

The database builds its samples from four module constants L, M, S, XS (20, 10, 5, 3). As in torch's own tests of
DTensor they are set to multiples of the rank count where shards shall be even. In the mode `uneven` none is: with 4
ranks, 5 gives shards of 2, 2, 1, 0 and 3 gives 1, 1, 1, 0.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

RANKS, SEED = 4, 20251
# At most so many samples of each op, and placements of each sample.
SAMPLES, PLACES = 3, 4
MODES = ("even", "uneven", "partial", "mesh2x2", "order", "strided", "from_local", "inplace", "out")

# Per tensor of a sample (and then per tensor of out=), per mesh dim: "R", "S(0)", "P(sum)", "P(avg)", "P(max)".
Places = tuple[tuple[str, ...], ...]

# L, M, S, XS. Even: those of torch's test_dtensor_ops.py.
_EVEN_SIZES, _UNEVEN_SIZES = (24, 12, 4, 2), (22, 10, 5, 3)
# Their samples hold lengths that fit the database's own sizes alone; with others the plain op reads beyond its input.
_OWN_SIZES = (20, 10, 5, 3)
_NEED_OWN_SIZES = frozenset({"_segment_reduce.lengths", "_segment_reduce.offsets"})
# Number of samples that are considered if a generator yields hundreds.
_SAMPLES_LOOKED_AT = 120


@dataclasses.dataclass(frozen=True)
class OpSample:
    """One call of an op.

    Attributes:
        leaves: of the pytree (input, args, kwargs).
        tensors: indices of the tensors among the leaves.
        process: keeps the determined parts of the output, e.g. singular vectors up to their sign.
    """

    leaves: tuple[Any, ...]
    tree: Any
    tensors: tuple[int, ...]
    requires_grad: tuple[bool, ...]
    process: Callable[[Any], Any]

    @property
    def values(self) -> list[torch.Tensor]:
        return [self.leaves[i] for i in self.tensors]


@functools.cache
def database() -> dict[str, Any]:
    """Returns torch's OpInfo of every op that supports float32 on the CPU, by the full name of the op."""
    from torch.testing._internal.common_methods_invocations import op_db

    ops = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in ops}


def has_mode(name: str, mode: str) -> bool:
    """Returns whether the op has the in-place variant or the out= argument that the mode needs."""
    if mode == "inplace":
        return database()[name].inplace_variant is not None
    return mode != "out" or bool(database()[name].supports_out)


def samples_of(name: str, mode: str) -> list[OpSample]:
    """Returns some samples of the op, spread over those of its generator. They are the same in every run."""
    usable = []
    for sample in _drawn(name, _UNEVEN_SIZES if mode == "uneven" else _EVEN_SIZES):
        one = _sample(sample, _LAID_OUT.get(mode, lambda full: full))
        fits = one.tensors and all(map(_can_distribute, one.values))
        if fits and not (mode == "inplace" and sample.broadcasts_input):
            usable.append(one)
    count = min(SAMPLES, len(usable))
    return [usable[i * len(usable) // count] for i in range(count)]


@functools.lru_cache(maxsize=2)
def _drawn(name: str, sizes: tuple[int, int, int, int]) -> list[Any]:
    """Returns the first samples of the op's generator."""
    op = database()[name]
    _set_sizes(_OWN_SIZES if name in _NEED_OWN_SIZES else sizes)
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    generator = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    drawn: list[Any] = []
    # Some generators take a part of a tensor that is not there in these sizes: those before it count.
    with contextlib.suppress(RuntimeError, ValueError, IndexError):
        for sample in itertools.islice(generator, _SAMPLES_LOOKED_AT):
            drawn.append(sample)  # noqa: PERF402 - what was yielded before an error is kept
    return drawn


def _sample(sample: Any, lay_out: Callable[[torch.Tensor], torch.Tensor]) -> OpSample:
    leaves, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    requires_grad = tuple(leaves[i].requires_grad for i in tensors)
    for i in tensors:
        value = leaves[i].detach()
        leaves[i] = lay_out(value) if _can_distribute(value) else value
    return OpSample(tuple(leaves), tree, tensors, requires_grad, sample.output_process_fn_grad)


def transposed(full: torch.Tensor) -> torch.Tensor:
    """Returns a copy whose dims lie in memory in the opposite order."""
    backwards = tuple(range(full.ndim)[::-1])
    return full.permute(backwards).contiguous().permute(backwards)


def stepped(full: torch.Tensor) -> torch.Tensor:
    """Returns a copy with a gap after every element."""
    return full.repeat_interleave(2, -1)[..., ::2] if full.ndim else full.clone()


# Memory layouts of the inputs in these modes.
_LAID_OUT = {"strided": transposed, "from_local": stepped}


def _can_distribute(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _set_sizes(sizes: tuple[int, int, int, int]) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(
            ("torch.testing._internal.opinfo", "torch.testing._internal.common_methods_invocations")
        ):
            for constant, size in zip(("L", "M", "S", "XS"), sizes, strict=True):
                if type(vars(module).get(constant)) is int:
                    setattr(module, constant, size)


def places_of(tensors: Sequence[torch.Tensor], mode: str, salt: str) -> list[Places]:
    """Returns some distinct placements of the tensors, the same in every run for the same `salt`.

    First all tensors are replicated, then all have the same placement if possible. Then placements of a single tensor
    alternate with random combinations.
    """
    choices = [_choices(tensor, mode) for tensor in tensors]
    rng = random.Random(salt)
    if math.prod(map(len, choices)) <= 256:
        drawn = list(itertools.product(*choices))
        rng.shuffle(drawn)
    else:
        drawn = [tuple(rng.choice(own) for own in choices) for _ in range(1024)]
    replicated = choices[0][0]
    same = [
        tuple(place if place in own else replicated for own in choices)
        for place in dict.fromkeys(place for own in choices for place in own)
    ]
    alone = [
        tuple(place if k == i else replicated for k in range(len(choices)))
        for i, own in enumerate(choices)
        for place in own[1:]
    ]
    mixed = itertools.chain.from_iterable(itertools.zip_longest(alone, drawn))
    distinct = dict.fromkeys(places for places in (*same, *mixed) if places is not None)
    return list(itertools.islice((p for p in distinct if _belongs(p, tensors, mode)), PLACES))


def _choices(tensor: torch.Tensor, mode: str) -> list[tuple[str, ...]]:
    shape = tensor.shape
    dims = [d for d, size in enumerate(shape) if size]
    if mode == "partial":
        return [("R",), *([("P(sum)",), ("P(avg)",), ("P(max)",)] if tensor.is_floating_point() else [])]
    if mode == "order":
        return list(itertools.product(["R", *(f"S({d})" for d in dims)], repeat=2))
    if mode == "mesh2x2":
        halves = [d for d in dims if shape[d] % 2 == 0]
        both = [(a, b) for a in halves for b in halves if a != b or shape[a] % RANKS == 0]
        return [
            ("R", "R"),
            *((f"S({d})", "R") for d in halves),
            *(("R", f"S({d})") for d in halves),
            *((f"S({a})", f"S({b})") for a, b in both),
        ]
    any_size = mode in ("uneven", *_LAID_OUT)
    return [("R",), *((f"S({d})",) for d in dims if any_size or shape[d] % RANKS == 0)]


def _belongs(places: Places, tensors: Sequence[torch.Tensor], mode: str) -> bool:
    """Returns whether some tensor has a placement that only this mode has."""
    if mode == "partial":
        return any(place[0].startswith("P") for place in places)
    return mode != "uneven" or any(
        one.startswith("S") and tensor.shape[int(one[2:-1])] % RANKS
        for (one,), tensor in zip(places, tensors, strict=True)
    )
