"""The shortest program that goes wrong in the same way: what can be left out or made plainer is, until nothing can."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from dtbench_suites.fuzz.generate import MESHES, Input, Program, listed, variables

Judge = Callable[[Program], tuple[str, str]]  # (verdict, reason)


def kind_of(verdict: str, reason: str) -> str:
    """What two finds have in common that go wrong in the same way: an error's words without its numbers and names."""
    if verdict == "wrong":
        return verdict
    return f"{verdict} {' '.join(re.findall('[A-Za-z_]{3,}', reason)[:8])}"


def minimise(program: Program, kind: str, judge: Judge, spent: Callable[[], bool]) -> Program:
    """The smallest program found that the judge gives a verdict of this kind, until the time is spent."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(program):
            if spent():
                return program
            if kind_of(*judge(smaller)) == kind:
                program, changed = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs that are a step shorter or plainer, the largest steps first."""
    first, last = program.compiled
    if program.compiles:
        yield replace(program, compiled=(0, 0))
        yield replace(program, compiled=(first + 1, last))
        yield replace(program, compiled=(first, last - 1))
    for index in reversed(range(len(program.lines))):
        yield from _without(program, index)
    used = {name for line in program.lines for name in variables(line)[0]}
    for one in program.inputs:
        if one.name not in used and len(program.inputs) > 1:
            yield replace(program, inputs=tuple(other for other in program.inputs if other is not one))
    for index, one in enumerate(program.inputs):
        for plainer in _plainer(one):
            yield replace(program, inputs=(*program.inputs[:index], plainer, *program.inputs[index + 1 :]))
    meshes = listed(MESHES)
    for mesh in meshes[: meshes.index(program.mesh)]:
        if mesh.count("[[") == program.mesh.count("[["):
            yield replace(program, mesh=mesh)
    if program.mesh.startswith("[["):
        for index in range(2):
            kept = [replace(one, places=one.places[index : index + 1]) for one in program.inputs]
            if not any("move(" in line for line in program.lines):
                yield replace(program, mesh=meshes[0], inputs=tuple(kept))


def _without(program: Program, index: int) -> Iterator[Program]:
    """Without a statement: alone, or with what it made replaced by one of what it was made of."""
    line = program.lines[index]
    used, assigned = variables(line)
    rest = [*program.lines[:index], *program.lines[index + 1 :]]
    first, last = program.compiled
    compiled = (first - (index < first), last - (index < last))
    for other in used if assigned else [""]:
        lines = [re.sub(rf"\b{assigned[0]}\b", other, one) if assigned else one for one in rest]
        yield replace(program, lines=tuple(lines), compiled=compiled)


def _plainer(one: Input) -> Iterator[Input]:
    for other in (
        replace(one, grad=False),
        replace(one, made="distribute_tensor"),
        replace(one, strides=""),
        replace(one, dtype="float64"),
    ):
        if other != one:
            yield other
    for index, place in enumerate(one.places):
        plainer = ["R", "S(0)"] if place.startswith("S(") else ["R", "P(sum)"]
        for simpler in plainer[: plainer.index(place)] if place in plainer else plainer:
            yield replace(one, places=(*one.places[:index], simpler, *one.places[index + 1 :]))
    for dim, size in enumerate(one.shape):
        if not any(place in (f"S({len(one.shape) - 1})", f"S({dim})") for place in one.places):
            yield replace(one, shape=(*one.shape[:dim], *one.shape[dim + 1 :]))
        for smaller in (size // 2, size - 1):
            if 1 < smaller < size:
                yield replace(one, shape=(*one.shape[:dim], smaller, *one.shape[dim + 1 :]))
