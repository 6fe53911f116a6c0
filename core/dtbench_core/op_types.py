"""Types of what ops take and give, where it is passed on without a look at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

# An argument or a result: a tensor, a number, a list of these, None, whatever else a schema of torch's names.
Value: TypeAlias = Any
Args = Sequence[Value]
Kwargs = dict[str, Value]
# An op, a kernel, or a function of torch's.
Call = Callable[..., Value]
# The context of an autograd function, which takes any attribute.
Ctx: TypeAlias = Any
