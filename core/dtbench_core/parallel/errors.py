"""What tensor parallelism refuses. Each is of the core's tree and of the built-in type that torch raises."""

from __future__ import annotations

from dtbench_core.errors import ArgumentError, CoreError


class PlanError(CoreError, TypeError, RuntimeError):
    """A plan that is neither a style nor a mapping of names to styles."""


class UnsupportedModuleError(CoreError, NotImplementedError):
    """A module that a style does not know how to shard. A RuntimeError, as every NotImplementedError is."""


class LayoutsError(ArgumentError, AssertionError):
    """Layouts that do not match the inputs or outputs of a module one to one."""


class UnsupportedStyleError(CoreError, NotImplementedError):
    """A style that the function at hand does not take."""
