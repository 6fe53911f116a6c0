"""Starts the recorder in each rank of a job under `dtbench profile -- COMMAND`.

Every Python process of the job finds this module on PYTHONPATH and runs it at start. It removes its folder from
sys.path, runs the `sitecustomize` that it shadows, and starts the recorder once the process joins a process group.

Most processes are not ranks, and their Python may lack dtbench. This module therefore imports only what the interpreter
has already loaded.
"""

import os
import sys
from _frozen_importlib import ModuleSpec, module_from_spec
from _frozen_importlib_external import PathFinder

_HERE = os.path.dirname(__file__)  # noqa: PTH120


class _WhenLoaded:
    """Import hook that waits until the program imports torch.distributed.

    Importing torch here would slow down every process.
    """

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
        original(*args, **kwargs)
        try:
            if "dtbench_recorder" not in sys.modules:
                _import_from("dtbench_recorder", [_HERE])
        except Exception as error:  # must not stop the job
            sys.stderr.write(f"dtbench: this rank is not recorded: {type(error).__name__}: {error}\n")

    original = c10d.init_process_group
    c10d.init_process_group = sys.modules["functools"].wraps(original)(init_process_group)


def _import_from(name: str, path: "list[str]") -> None:
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {name}", name=name)  # `site` ignores this error
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


sys.meta_path.insert(0, _WhenLoaded())
# The program's imports must find the same modules as without this folder.
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
_import_from("sitecustomize", sys.path)
