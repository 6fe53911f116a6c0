"""Every Python process of a job under `dtbench profile -- COMMAND` finds this on PYTHONPATH and runs it: it runs the
`sitecustomize` that it hides, and has a process record once that joins a process group. Most are no rank, and their
Python may lack dtbench: it imports nothing that the interpreter has not loaded."""

import os
import sys
from _frozen_importlib import ModuleSpec, module_from_spec
from _frozen_importlib_external import PathFinder

_HERE = os.path.dirname(__file__)  # noqa: PTH120


class _WhenLoaded:
    """In sys.meta_path until torch.distributed is imported: to import torch here would slow every process."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != "torch.distributed.distributed_c10d":
            return None
        sys.meta_path.remove(self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in sys.meta_path)), None)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _wrap(module, load(module))  # type: ignore[method-assign]
        return spec


def _wrap(c10d, _loaded) -> None:  # type: ignore[no-untyped-def]
    def init_process_group(*args: object, **kwargs: object) -> None:
        join(*args, **kwargs)
        try:
            if "dtbench_recorder" not in sys.modules:
                _run("dtbench_recorder", [_HERE])
        except Exception as error:  # the job goes on as it would without us
            sys.stderr.write(f"dtbench: this rank is not recorded: {type(error).__name__}: {error}\n")

    join = c10d.init_process_group
    c10d.init_process_group = sys.modules["functools"].wraps(join)(init_process_group)


def _run(name: str, path: "list[str]") -> None:
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {name}", name=name)  # which `site` passes over
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


sys.meta_path.insert(0, _WhenLoaded())
# The program finds what it would find without us.
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
_run("sitecustomize", sys.path)
