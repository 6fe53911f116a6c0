"""Every table of op cases, a file per family; `OPS` joins what they define."""

import importlib
import pkgutil

from core.tests.op_case import Op

OPS: dict[str, Op] = {}
for _found in pkgutil.iter_modules(__path__):
    _family = importlib.import_module(f"{__name__}.{_found.name}")
    assert not OPS.keys() & _family.OPS.keys(), f"{_found.name} reuses a name"
    OPS.update(_family.OPS)
