"""Types for the arguments and results of ops in code that passes them on without inspecting them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

# An argument or result of an op: a tensor, a number, None, a list of these, or any other type of a torch schema.
Value: TypeAlias = Any
Args = Sequence[Value]
Kwargs = dict[str, Value]
# An op, a kernel, or a function of torch.
Call = Callable[..., Value]
# The context of an autograd function, which accepts any attribute.
Ctx: TypeAlias = Any
