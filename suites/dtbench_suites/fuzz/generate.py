"""A random program as data: its inputs, its statements, and which of them are compiled.

Statements are drawn one after the other and executed on plain tensors at once: what plain torch refuses, and what
grows or is not finite, is drawn again.
"""

from __future__ import annotations

import ast
import math
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dtbench_suites.compat.program import Given
from dtbench_suites.fuzz.judge import names

# Ranks of meshes of four, in many orders.
MESHES = """[0, 1, 2, 3]; [[0, 1], [2, 3]]; [[0, 1, 2, 3]]; [[[0], [1]], [[2], [3]]]; [3, 2, 1, 0]; [2, 0, 3, 1]
    [[0, 2], [1, 3]]; [[3, 2], [1, 0]]; [[3, 1], [0, 2]]; [[3], [1], [2], [0]]"""
# x, y, z: tensors of the program; d, e: dims of x; i, j: an index in d and one behind it; n: a size; c: a number;
# shape: another one for as many elements; places: as many as the mesh has dims. What is no expression writes. What may
# be 1 up to rounding is rounded: which of such is the largest is nobody's to say.
TEMPLATES = {
    "compute": """x + y; x * y; x - c; x * c; x / 4; -x; x.sin(); x.abs(); x.relu(); x.exp(); x > 0.3
        x.clamp(-1, 0.6); torch.where(x > 0.3, x, y); torch.maximum(x, y); x.masked_fill(x > 0.3, c)
        x.to(torch.float32); x.to(torch.int64); x.tril(); x @ y; x @ x.mT; torch.outer(x, y); F.gelu(x)
        F.layer_norm(x, x.shape[-1:]); F.pad(x, (1, 2)); x.bool(); F.one_hot(x.long().clamp(0, 3), 4)
        F.linear(x, y); torch.addmm(x, y, z); torch.lerp(x, y, 0.25); x.clone(); x.detach(); x // 2; x % 3; x ** 2
        x.to(torch.int8); torch.addcmul(x, y, z); x.round(); x != y; torch.full_like(x, c); x.new_zeros(n, 2)
        x.ravel().dot(y.ravel()); F.embedding(x.long().clamp(0, 1), y); F.dropout(x, 0.0); x.softmax(-1) @ y
        x.masked_select(x > 0.3); x.nonzero(); x.isclose(y)
        F.cosine_similarity(x, y, -1).round(decimals=3)""",
    "along": """x.sum(d); x.sum(); x.mean(d, keepdim=True); x.amax(d); x.argmax(d); x.cumsum(d); x.prod(d)
        x.softmax(d); x.logsumexp(d); x.var(d, correction=0); x.norm(dim=d); x.flip(d); x.roll(i, d)
        x.topk(n, d).values; x.sort(d).values; torch.cat([x, y], d); torch.stack([x, y], d); x.all(d); x.any(d)
        x.index_select(d, index(i, 0)); x.repeat_interleave(2, d); x.min(d).values; x.gather(d, x.argsort(d))
        F.normalize(x, dim=d).round(decimals=3); x.diff(dim=d); x.cumprod(d); x.nansum(d); x.std(); x.amin()
        x.sum(d, dtype=torch.int8); x.index_add(d, index(i), y); x.scatter_add(d, x.argsort(d), y); x.mean()
        x.logcumsumexp(d); x.kthvalue(n, d).values; x.aminmax(dim=d).max; x.count_nonzero(d); x.mode(d).values
        torch.cat([x[i:], y]); x.renorm(2, d, 1.5); x.unique(); x.bincount()""",
    "view": """x.t(); x.transpose(d, e); x[i:j]; x.narrow(d, i, 1); x.select(d, i); x[..., i:]; x[::2]
        x.unsqueeze(d); x.squeeze(); x.flatten(); x.view(shape); x.reshape(shape); x.unflatten(d, (-1, 1))
        x.expand(2, *x.shape); x.expand_as(y); x.chunk(2, d)[0]; x.split(n, d)[-1]; x.diagonal()
        x.unfold(d, n, n); x.movedim(d, e); x[None]; x.mT; x.view_as(x); x[i]; x.contiguous(); x.unbind(d)[i]
        x.flatten(1); x.permute(*range(x.ndim)[::-1]); x.tensor_split(2, d)[1]; x.squeeze(d); x.view(-1); x[i:j][::2]
        x[:1].expand(n, *x.shape[1:]); x.data; x.broadcast_to(y.shape); x.swapaxes(d, e); x.hsplit(1)[0]""",
    "write": """x.add_(c); x.mul_(c); x.add_(y); x.mul_(y); x.copy_(y); x.zero_(); x.fill_(c); x.relu_()
        x[i:j] = c; x[i] = y; x[..., i] = c; x[x > 0.3] = c; x.masked_fill_(x > 0.3, c); x.t_()
        x.clamp_(max=0.6); torch.mul(x, y, out=z); x.unsqueeze_(d); x.index_fill_(d, index(i), c)
        x.narrow(d, i, 1).mul_(c); x.transpose_(d, e); x.index_add_(d, index(i), y); x.select(d, i).copy_(y)
        x.squeeze_(); x.addcmul_(y, y); torch._foreach_mul_([x, y], c); x.diagonal().fill_(c); x.cumsum_(d)
        x.scatter_(d, x.argsort(d), c); x.lerp_(y, 0.5); x.sub_(y, alpha=2); x.pow_(2); x.data.mul_(c); x[i:].copy_(y)
        x[i:j] *= c; x.mT.add_(c); x.index_copy_(d, index(i), y); torch.add(x, y, out=z); x.view(-1)[i] = c
        x.masked_scatter_(x > 0.3, y.clone()); x.floor_(); x.div_(2); x.put_(index(i), y.ravel()[:1])
        x.sort(d, out=(z, y)); torch.cat([x, y], d, out=z); torch._foreach_add_([x, y], [z, x]); x.swapaxes_(d, e)
        x.index_put_((index(i),), y, accumulate=True); x.clamp_min_(c); x.eq_(y); x.cumprod_(d); x.tril_()""",
    "move": "move(x, places)",
}
_WEIGHTS = {"compute": 5, "along": 4, "view": 6, "write": 6, "move": 1}
_MOST_ELEMENTS, _MOST_VALUE = 400, 1e5
_REFUSED = (
    0.1  # of the statements that plain tensors refuse, as many stay in a program: the core must refuse them
)
_WORDS = re.compile(r"(?<!\.)\b([xyzdeijnc]|shape|places)\b(?!=)")


_RESTATES = re.compile(r"\b(t_|transpose_|squeeze_|unsqueeze_|swapaxes_)\(")


def listed(text: str) -> list[str]:
    return re.split(r";\s|\n\s+", text)


@dataclass(frozen=True)
class Input:
    """As `tensor(...)` of a program's text."""

    name: str
    shape: tuple[int, ...]
    places: tuple[str, ...]
    seed: int
    dtype: str = "float64"
    strides: str = ""
    made: str = "distribute_tensor"
    grad: bool = False

    def text(self) -> str:
        plain = Input(self.name, self.shape, self.places, self.seed)
        fields = ("dtype", "strides", "made", "grad")
        own = [f"{key}={getattr(self, key)!r}" for key in fields if getattr(self, key) != getattr(plain, key)]
        given = ", ".join([repr(self.shape), *map(repr, self.places), f"seed={self.seed}", *own])
        return f"{self.name} = tensor({given})"


@dataclass(frozen=True)
class Program:
    """compiled: the statements from the first up to, not including, the second are one compiled function."""

    mesh: str
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    compiled: tuple[int, int] = (0, 0)

    @property
    def compiles(self) -> bool:
        return self.compiled[0] < self.compiled[1]

    def text(self) -> str:
        first, last = self.compiled
        before, inside, after = self.lines[:first], self.lines[first:last], self.lines[last:]
        made = [f"mesh({self.mesh})", *(one.text() for one in self.inputs)]
        return "\n".join([*made, *before, *(_function(inside) if inside else ()), *after]) + "\n"


def _function(lines: tuple[str, ...]) -> Iterator[str]:
    """The lines as a compiled function of what they use, and its call."""
    given: dict[str, None] = {}
    made: dict[str, None] = {}
    for line in lines:
        used, defined = variables(line)
        given |= dict.fromkeys(name for name in used if name not in made)
        made |= dict.fromkeys(defined)
    results = ", ".join(made)
    yield "@compiled"
    yield f"def part({', '.join(given)}):"
    yield from (f"    {line}" for line in lines)
    if made:
        yield f"    return {results}"
    yield f"{results}{' = ' if made else ''}part({', '.join(given)})"


def variables(line: str) -> tuple[list[str], list[str]]:
    """(used, assigned) of a statement, without the names that every program has."""
    found = [node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Name)]
    own = [node for node in found if re.fullmatch(r"v\d+", node.id)]
    assigned = [node.id for node in own if isinstance(node.ctx, ast.Store)]
    return sorted({node.id for node in own if isinstance(node.ctx, ast.Load)}), assigned


def program(seed: str, compiling: float, ascending: bool = False) -> Program:
    """The program of a seed. compiling: the share of programs of which a part is compiled."""
    rng = random.Random(seed)
    meshes = [mesh for mesh in listed(MESHES) if not ascending or re.findall(r"\d", mesh) == list("0123")]
    mesh = rng.choice(meshes)
    ndim = torch.tensor(ast.literal_eval(mesh)).ndim
    inputs = tuple(_input(rng, f"v{index}", ndim) for index in range(rng.randint(1, 3)))
    space: dict[str, Any] = names(Given("plain"), [])
    lines: list[str] = []
    made: dict[str, _Forms] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_warn_always(True)  # or only the first program would see what is said once
        for one in inputs:
            exec(one.text(), space)
        for _ in range(rng.randint(1, 7)):
            if (line := _statement(rng, space, ndim, len(inputs) + len(lines))) is None:
                break
            lines.append(line)
            made = _forms(space) | made
    torch.set_warn_always(False)
    compiled = (0, 0)
    plain = not any(line.startswith("with ") for line in lines)
    if lines and plain and rng.random() < compiling and made == _forms(space):
        first = rng.randrange(len(lines))
        compiled = (first, rng.randint(first + 1, len(lines)))
    return Program(mesh, inputs, tuple(lines), compiled)


_Forms: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.Size, tuple[int, ...]]


def _forms(space: dict[str, Any]) -> dict[str, _Forms]:
    """Of each view the shape and strides, and its base's. No part of a program is compiled in which they change
    (`v1 = v0.squeeze(); v0.t_()`): for a graph torch takes a view of a tensor subclass again, of the base as it is by
    then, and fails if that is not the same."""
    views = [(name, t, t._base) for name, t in space.items() if isinstance(t, torch.Tensor)]
    return {
        name: (t.shape, t.stride(), base.shape, base.stride()) for name, t, base in views if base is not None
    }


def _input(rng: random.Random, name: str, ndim: int) -> Input:
    shape = tuple(rng.choice([1, 2, 3, 4, 4, 5, 6, 8, 0]) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3])))
    dtype = rng.choice(["float64"] * 8 + ["float32", "int64", "int8", "bool"])
    grad = dtype.startswith("float") and rng.random() < 0.3
    made = rng.choice(["distribute_tensor", "distribute_tensor", "from_local"])
    strides = rng.choice(["", "", "transposed", "stepped"])
    pending = rng.choice(["P(sum)", "P(sum)", "P(avg)", "P(max)"])  # one kind: their order would matter
    places = tuple(_place(rng, len(shape), dtype).replace("P", pending) for _ in range(ndim))
    if {"P(avg)", "P(max)"} & {*places}:  # the gradient of its local tensor is not that of the whole
        grad = grad and made != "from_local"
    return Input(name, shape, places, rng.randrange(1000), dtype, strides, made, grad)


def _place(rng: random.Random, ndim: int, dtype: str = "bool") -> str:
    options = ["R", "R", *[f"S({d})" for d in range(ndim) for _ in range(3)]]
    if dtype.startswith("float"):
        options += ["P"] * 4
    return rng.choice(options)


def _statement(rng: random.Random, space: dict[str, Any], ndim: int, number: int) -> str | None:
    """A statement that plain tensors can execute, and have executed in `space`; None if none is found soon."""
    for _ in range(30):
        (kind,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        line = _fill(rng, rng.choice(listed(TEMPLATES[kind])), space, ndim)
        if _RESTATES.search(line) and any(space[name].requires_grad for name in variables(line)[0]):
            continue  # autograd would take the views of a tensor subclass again, of the new shape
        expression, line = line, line if kind == "write" else f"v{number} = {line}"
        kept = dict(space)
        copies = {n: t.detach().clone() for n, t in space.items() if isinstance(t, torch.Tensor)}
        try:
            exec(line, space)
            if all(_tame(t) for t in space.values() if isinstance(t, torch.Tensor)) and (
                kind != "write" or _defined(line, kept, copies, space)
            ):
                return line
        except Warning:
            refused = False
        except Exception:
            refused = True
        else:
            refused = False
        space.clear()
        space.update(kept)
        if any(
            kept[name].shape != copy.shape or not torch.equal(kept[name], copy)
            for name, copy in copies.items()
        ):
            return None  # it wrote before it was refused
        if refused and "_foreach" not in line and rng.random() < _REFUSED:
            return f"with refused(): {expression}"
    return None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is not other and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _defined(
    line: str, before: dict[str, Any], copies: dict[str, torch.Tensor], after: dict[str, Any]
) -> bool:
    """Whether a write comes to the same if what it reads lies elsewhere: else the order of the elements decides."""
    used, _ = variables(line)
    written = re.findall(r"out=(v\d+)", line)[:1] or re.findall(r"v\d+", line)[:1]
    if len(used) == 1 or "out=(" in line:
        return "out=(" not in line
    if "_foreach" in line:  # one after the other, but each as if alone
        lists = re.findall(r"\[(v\d+), (v\d+)\]", line)
        return len(lists) == 1 or not any(_overlap(before[a], before[b]) for a, b in zip(*lists, strict=True))
    apart = {**before, **{name: copies[name].clone() for name in used}}
    exec(line, apart)
    return all(torch.equal(apart[name], after[name]) for name in written)


def _tame(tensor: torch.Tensor) -> bool:
    """Whether it is small, finite, and has no values at which a sum rounds."""
    if tensor.numel() > _MOST_ELEMENTS or tensor.dtype is torch.bool or not tensor.numel():
        return tensor.numel() <= _MOST_ELEMENTS
    return bool(tensor.isfinite().all()) and float(tensor.abs().max()) < _MOST_VALUE


def _fill(rng: random.Random, template: str, space: dict[str, Any], ndim: int) -> str:
    """The template with names, dims and sizes that fit x."""
    found = [name for name in space if re.fullmatch(r"v\d+", name)]
    chosen = {"x": rng.choice(found), "y": rng.choice(found), "z": rng.choice(found)}
    shape = tuple(space[chosen["x"]].shape)
    d, e = (rng.randrange(-len(shape), len(shape)) if shape else 0 for _ in range(2))
    along = 0 if re.search(r"x\[i", template) else -1 if "[..., i" in template else d
    size = shape[along] if shape else 1
    i = rng.randrange(max(size, 1))
    chosen |= {"d": str(d), "e": str(e), "i": str(i), "j": str(rng.randint(i + 1, max(size, i + 1)))}
    chosen |= {"n": str(rng.randint(1, max(size, 1))), "c": rng.choice(["2", "3", "-1.5", "0.5", "0"])}
    chosen["shape"] = repr(_factors(rng, math.prod(shape)))
    chosen["places"] = ", ".join(repr(_place(rng, len(shape))) for _ in range(ndim))
    return _WORDS.sub(lambda word: chosen[word[0]], template)


def _factors(rng: random.Random, count: int) -> tuple[int, ...]:
    left, made = count, []
    for _ in range(rng.randint(0, 2)):
        made.append(rng.choice([n for n in range(1, left + 1) if left % n == 0] or [1]))
        left //= made[-1]
    return (*made, left)
